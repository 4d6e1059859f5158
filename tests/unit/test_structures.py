"""SharedList and SharedDict against plain Python, atomics, events, and the lock by itself."""

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.filling import corrupt
from support.refusals import refused

from lightcache import errors, shm

NODES, LISTS, CAPACITY = 6, 3, 5


@pytest.fixture
def lists(segment_name):
    with shm.SharedList.create(segment_name, nodes=NODES, lists=LISTS) as made:
        yield made


@pytest.fixture
def table(segment_name):
    with shm.SharedDict.create(segment_name, capacity=CAPACITY) as made:
        yield made


@pytest.fixture
def plain(segment_name):
    with shm.Segment.create(segment_name, 4096) as made:
        made.join("test")
        yield made


LIST_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["push_back", "push_front", "move_back", "move_front", "remove"]),
        st.integers(0, NODES - 1),
        st.integers(0, LISTS - 1),
    )
    | st.tuples(st.sampled_from(["pop_front", "pop_back"]), st.integers(0, LISTS - 1)),
    max_size=40,
)


def apply_to_model(model, verb, node, which):
    """What `verb` does to plain lists; returns what it should return, or an exception type."""
    on = next((entries for entries in model if node in entries), None)
    if verb == "remove":
        if on is not None:
            on.remove(node)
        return on is not None
    if verb.startswith("push") and on is not None:
        return errors.InUse
    if on is not None:
        on.remove(node)
    model[which].insert(len(model[which]) if verb.endswith("back") else 0, node)
    return None


def test_list_equals_plain_lists(segment_name):
    with shm.SharedList.create(segment_name, nodes=NODES, lists=LISTS) as real:

        @settings(max_examples=60, derandomize=True, deadline=None)
        @given(LIST_CALLS)
        def run(calls):
            for node in range(NODES):
                real.remove(node)
            model = [[] for _ in range(LISTS)]
            for verb, *arguments in calls:
                if verb.startswith("pop"):
                    entries = model[arguments[0]]
                    at = 0 if verb == "pop_front" else -1
                    expected = entries.pop(at) if entries else None
                    assert getattr(real, verb)(*arguments) == expected
                else:
                    expected = apply_to_model(model, verb, *arguments)
                    if expected is errors.InUse:
                        refused(errors.InUse, "", getattr(real, verb), *arguments)
                    elif verb == "remove":
                        assert real.remove(arguments[0]) == expected
                    else:
                        getattr(real, verb)(*arguments)
                real.check()
            assert [list(real.snapshot(i)) for i in range(LISTS)] == model
            assert [real.length(i) for i in range(LISTS)] == [len(entries) for entries in model]
            where = {node: i for i, entries in enumerate(model) for node in entries}
            assert [real.where(n) for n in range(NODES)] == [where.get(n) for n in range(NODES)]

        run()


def test_dict_equals_a_plain_dict(segment_name):
    # Keys of few low bits share chains; the capacity is smaller than the number of keys.
    keys = st.sampled_from([n << 64 | n % 2 for n in range(9)])
    calls = st.lists(
        st.tuples(st.sampled_from(["put", "put_new", "pop", "get"]), keys, st.integers(-9, 9)),
        max_size=40,
    )
    with shm.SharedDict.create(segment_name, capacity=CAPACITY) as real:

        @settings(max_examples=60, derandomize=True, deadline=None)
        @given(calls)
        def run(steps):
            for key, _ in real.items():
                real.pop(key)
            model = {}
            for verb, key, value in steps:
                full = key not in model and len(model) == CAPACITY
                if verb in ("put", "put_new") and full:
                    refused(errors.NoSpace, "5 of 5", getattr(real, verb), key, value)
                elif verb == "put":
                    assert real.put(key, value) == (key in model)
                    model[key] = value
                elif verb == "put_new":
                    assert real.put_new(key, value) == (key not in model)
                    model.setdefault(key, value)
                elif verb == "pop":
                    assert real.pop(key) == model.pop(key, None)
                assert real.get(key) == model.get(key)
                assert (key in real) == (key in model)
                real.check()
            assert dict(real.items()) == model
            assert len(real) == len(model)

        run()


def test_dict_refuses_more_keys_in_a_chain_than_the_bound(segment_name):
    with shm.SharedDict.create(segment_name, capacity=100) as table:
        for n in range(32):
            table[n << 64] = n
        with pytest.raises(errors.NoSpace, match="spread keys"):
            table[99 << 64] = 0
        table[1] = 5  # another chain
        table.check()
        assert table[31 << 64] == 31
        refused(KeyError, "", lambda: table[99 << 64])


@pytest.mark.parametrize("bad", [-1, 1 << 128, "key", None])
def test_dict_refuses_bad_keys(table, bad):
    refused(errors.ConfigError, "128 bits", table.get, bad)


def test_dict_refuses_bad_values(table):
    refused(errors.ConfigError, "32 bits", table.put, 1, 1 << 31)


@pytest.mark.parametrize(
    ("node", "which"), [(-1, 0), (NODES, 0), (0, -1), (0, LISTS), (1 << 40, 0)]
)
def test_list_refuses_what_is_out_of_range(lists, node, which):
    refused(errors.ConfigError, "node below 6", lists.push_back, node, which)


@pytest.mark.parametrize("kind", [shm.AtomicU32, shm.AtomicU64])
def test_atomics(plain, kind):
    word = kind(plain, 64)
    top = (1 << word._bits) - 1
    assert word.load() == 0
    assert word.add(-1) == 0
    assert word.load() == top
    assert word.add(3) == top
    assert word.fetch_or(0b1100) == 2
    assert word.fetch_and(0b0110) == 0b1110
    assert word.swap(40) == 0b0110
    assert not word.compare_exchange(41, 1)
    assert word.compare_exchange(40, 1)
    word.store(9)
    assert word.load() == 9


@pytest.mark.parametrize("offset", [-8, 2, 4096, 4092])
def test_atomics_refuse_bad_offsets(plain, offset):
    refused(errors.ConfigError, "multiple of 8", shm.AtomicU64, plain, offset)


def test_event_wakes_another_process(plain):
    event, word = shm.Event(plain, 0), shm.AtomicU32(plain, 4)
    pid = os.fork()
    if pid == 0:
        try:
            with shm.Segment.attach(plain.name) as mine:
                mine.join("child")
                shm.AtomicU32(mine, 4).store(1)
                shm.Event(mine, 0).notify()
        finally:
            os._exit(0)
    event.wait_for(lambda: word.load() == 1, timeout=60)
    os.waitpid(pid, 0)


def test_event_times_out(plain):
    with pytest.raises(errors.WaitTimeout, match="not met"):
        shm.Event(plain, 0).wait_for(lambda: False, timeout=0.01)


def test_lock_tells_that_its_owner_died(plain):
    ready_r, ready_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            mine = shm.Segment.attach(plain.name)
            mine.join("victim")
            with shm.RobustLock(mine).hold():
                os.write(ready_w, b"1")
                signal.pause()
        finally:
            os._exit(0)
    os.read(ready_r, 1)
    lock = shm.RobustLock(plain)
    with (
        pytest.raises(errors.LockTimeout, match=r"client 2 \(victim, pid"),
        lock.hold(timeout=0.05),
    ):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with lock.hold(timeout=60) as held:
        assert held.owner_died
    with lock.hold() as held:
        assert not held.owner_died
    os.close(ready_r)
    os.close(ready_w)


def test_a_damaged_dict_is_an_error_not_a_signal(table):
    table[1] = 2
    corrupt(table.segment, 8, 77)  # the count
    refused(errors.CacheCorrupted, "1 items", table.check)


def test_a_damaged_list_is_an_error_not_a_signal(segment_name):
    with shm.SharedList.create(segment_name, nodes=NODES, lists=LISTS) as lists:
        lists.push_back(2)
        corrupt(lists.segment, 4 * LISTS + 4 * NODES, 0x7FFFFFFF)  # list 0's last node
        refused(errors.CacheCorrupted, "", lists.check)
        refused(errors.CacheCorrupted, "", lists.push_back, 3)
        with pytest.raises(errors.CacheCorrupted):
            lists.push_front(3) if lists.pop_back() is None else None
