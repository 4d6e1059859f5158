"""SharedRing against a deque, its limits, its waits, and what it says to those who may not."""

import ctypes
import os
import signal
import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.filling import corrupt

from lightcache import errors, shm
from lightcache.shm import layout

CAPACITY, BYTES = 5, 12


@pytest.fixture
def ring(segment_name):
    with shm.SharedRing.create(segment_name, capacity=CAPACITY, message_bytes=BYTES) as made:
        yield made


def drain(ring):
    found = []
    while some := ring.pop_many(3):
        found += some
    return found


MESSAGES = st.binary(max_size=BYTES)
CALLS = st.lists(
    st.tuples(st.just("push"), MESSAGES)
    | st.tuples(st.just("push_many"), st.lists(MESSAGES, max_size=CAPACITY + 2))
    | st.tuples(st.just("pop"), st.none())
    | st.tuples(st.just("pop_many"), st.integers(1, CAPACITY + 2)),
    max_size=40,
)


@pytest.mark.parametrize("capacity", [1, 2, CAPACITY])
def test_ring_equals_a_deque(segment_name, capacity):
    with shm.SharedRing.create(segment_name, capacity=capacity, message_bytes=BYTES) as real:

        @settings(max_examples=60, derandomize=True, deadline=None)
        @given(CALLS)
        def run(calls):
            drain(real)
            model = deque()
            for verb, argument in calls:
                room = capacity - len(model)
                if verb == "push" and room == 0:
                    with pytest.raises(errors.WaitTimeout, match="full"):
                        real.push(argument, timeout=0)
                elif verb == "push":
                    real.push(argument, timeout=0)
                    model.append(argument)
                elif verb == "push_many":
                    assert real.push_many(argument) == min(len(argument), room)
                    model.extend(argument[:room])
                elif verb == "pop" and not model:
                    with pytest.raises(errors.WaitTimeout, match="empty"):
                        real.pop(timeout=0)
                elif verb == "pop":
                    assert real.pop(timeout=0) == model.popleft()
                else:
                    expected = [model.popleft() for _ in range(min(argument, len(model)))]
                    assert real.pop_many(argument) == expected
                real.check()
                assert len(real) == len(model)
            assert drain(real) == list(model)

        run()


def test_messages_outlive_their_producer(segment_name):
    sizes = {"capacity": CAPACITY, "message_bytes": BYTES, "lifetime": "persistent"}
    with shm.SharedRing.create(segment_name, **sizes) as ring:
        ring.push(b"one")
    with pytest.raises(errors.LayoutMismatch, match="capacity"):
        shm.SharedRing.open(segment_name, capacity=CAPACITY + 1, message_bytes=BYTES)
    with shm.SharedRing.open(segment_name, **sizes) as ring:
        assert ring.pop(timeout=0) == b"one"
    shm.Segment.unlink(segment_name)


def test_any_bytes_and_none(ring):
    for data in (b"", bytes(BYTES), bytearray(b"\0\xff\0"), memoryview(b"abcdef")[::2]):
        ring.push(data, timeout=0)
        assert ring.pop(timeout=0) == bytes(data)


@pytest.mark.parametrize("bad", ["text", 3, None, [1], bytes(BYTES + 1), bytearray(BYTES + 1)])
def test_bad_messages_are_refused_and_nothing_is_pushed(ring, bad):
    with pytest.raises(errors.ConfigError, match="message: expected"):
        ring.push(bad)
    with pytest.raises(errors.ConfigError, match="message: expected"):
        ring.push_many([b"good", bad])
    assert len(ring) == 0


@pytest.mark.parametrize("bad", [0, -1, 1 << 40, 1.5, True])
def test_sizes_are_checked(segment_name, ring, bad):
    with pytest.raises(errors.ConfigError, match="capacity"):
        shm.SharedRing.create(segment_name + "-2", capacity=bad, message_bytes=1)
    with pytest.raises(errors.ConfigError, match="message_bytes"):
        shm.SharedRing.create(segment_name + "-2", capacity=1, message_bytes=bad)
    with pytest.raises(errors.ConfigError, match="limit"):
        ring.pop_many(bad)


def test_a_segment_too_short_for_what_it_says(segment_name):
    config = {"capacity": 1000, "message_bytes": 1000}
    with shm.Segment.create(segment_name, 4096, kind=shm.SegmentKind.RING, config=config):
        with pytest.raises(errors.ConfigError, match="too short for 1000 messages"):
            shm.SharedRing.attach(segment_name)


def test_a_segment_that_says_what_no_ring_has(segment_name):
    config = {"capacity": 0, "message_bytes": 1000}
    with shm.Segment.create(segment_name, 4096, kind=shm.SegmentKind.RING, config=config):
        with pytest.raises(errors.CacheCorrupted, match="capacity"):
            shm.SharedRing.attach(segment_name)


def test_one_step_moves_as_much_as_one_hold_may(segment_name):
    many, large = layout.RING_BATCH, layout.RING_MESSAGE
    with shm.SharedRing.create(segment_name, capacity=1000, message_bytes=large) as ring:
        assert ring.push_many([b"%d" % i for i in range(1000)]) == many
        assert ring.push_many([b"%d" % i for i in range(many, 1000)]) == many
        assert ring.pop_many(1000) == [b"%d" % i for i in range(many)]
        assert ring.push_many([b"good"] * many + [b"not looked at" * large]) == many
        assert len(drain(ring)) == 2 * many
        assert ring.push_many([b"%d" % i for i in range(many)]) == many
        assert len(drain(ring)) == many
        four = layout.RING_HOLD // large
        assert ring.push_many([bytes(large)] * 9) == four
        assert ring.push_many([bytes(large)] * 9) == four
        assert ring.pop_many(9) == [bytes(large)] * four
        ring.check()


def test_readers_look_and_cannot_change(ring):
    ring.push(b"one")
    with shm.SharedRing.attach(ring.segment.name, readonly=True) as reader:
        assert len(reader) == 1
        assert (reader.capacity, reader.message_bytes) == (CAPACITY, BYTES)
        for change in (
            lambda: reader.push(b"two"),
            lambda: reader.push_many([b"two"]),
            reader.pop,
            lambda: reader.pop_many(1),
        ):
            with pytest.raises(errors.PermissionDenied):
                change()
    assert ring.pop(timeout=0) == b"one"


def test_closed_rings_say_so(segment_name):
    ring = shm.SharedRing.create(segment_name, capacity=4, message_bytes=4)
    ring.close()
    for call in (lambda: ring.push(b""), ring.pop, lambda: ring.pop_many(1), lambda: len(ring)):
        with pytest.raises(errors.Detached, match="close"):
            call()


def test_a_forked_child_is_told_to_attach(ring):
    ring.push(b"one")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (lambda: ring.push(b"two"), ring.pop, lambda: len(ring)):
                with pytest.raises(errors.Detached):
                    call()
            with shm.SharedRing.attach(ring.segment.name) as mine:
                mine.push(b"two")
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert drain(ring) == [b"one", b"two"]


def test_other_kinds_are_told_apart(segment_name, ring):
    with pytest.raises(errors.LayoutMismatch):
        shm.SharedDict.attach(ring.segment.name)
    with pytest.raises(errors.ConfigError, match="uses its lock itself"):
        shm.RobustLock(ring.segment)
    assert [info.kind for info in shm.list_segments() if info.name == segment_name] == ["ring"]


def other_end(name, act):
    """Run `act` with a ring of its own in another process; the process's number."""
    pid = os.fork()
    if pid == 0:
        try:
            with shm.SharedRing.attach(name) as mine:
                act(mine)
        finally:
            os._exit(0)
    return pid


def test_pop_waits_for_a_push_of_another_process(ring):
    pid = other_end(ring.segment.name, lambda mine: mine.push(b"late"))
    assert ring.pop(timeout=60) == b"late"
    os.waitpid(pid, 0)


def test_push_waits_for_a_pop_of_another_process(ring):
    for i in range(CAPACITY):
        ring.push(b"%d" % i)
    pid = other_end(ring.segment.name, lambda mine: mine.pop())
    ring.push(b"late", timeout=60)
    os.waitpid(pid, 0)
    assert drain(ring) == [b"1", b"2", b"3", b"4", b"late"]


@pytest.mark.parametrize("verb", ["push", "pop"])
def test_who_waits_is_woken_and_does_not_only_look_again(ring, verb, monkeypatch, wait_until):
    """Looking again every 50 ms would hide a notification that never comes."""
    monkeypatch.setattr("lightcache.shm.sync._LOOK_AGAIN", 3600.0)
    while verb == "push" and len(ring) < CAPACITY:
        ring.push(b"old")
    wait = {"push": lambda: ring.push(b"new"), "pop": ring.pop}[verb]
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    event = ring._drained if verb == "push" else ring._filled
    word = ctypes.c_uint32.from_address(ring.segment.address + event._at)
    wait_until(lambda: word.value & 1 == 1, "the waiter to ask to be woken")
    ring.pop() if verb == "push" else ring.push(b"new")
    waiter.join(60)
    assert not waiter.is_alive()


@pytest.mark.parametrize("verb", ["push", "pop"])
def test_ctrl_c_ends_a_wait_at_once(ring, verb):
    while verb == "push" and len(ring) < CAPACITY:
        ring.push(b"old")
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            ring.push(b"new", timeout=100) if verb == "push" else ring.pop(timeout=100)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_threads_share_a_ring(ring):
    """Two threads push, two pop: nothing is lost, and each producer's messages keep their order."""
    each, found = 300, [[], []]

    def produce(who):
        for i in range(each):
            ring.push(b"%d %d" % (who, i))

    def consume(into):
        while (message := ring.pop()) != b"end":
            into.append(tuple(map(int, message.split())))

    producers = [threading.Thread(target=produce, args=[i], daemon=True) for i in range(2)]
    consumers = [threading.Thread(target=consume, args=[into], daemon=True) for into in found]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join(60)
    for _ in consumers:
        ring.push(b"end")
    for thread in consumers:
        thread.join(60)
    assert sorted(found[0] + found[1]) == [(who, i) for who in range(2) for i in range(each)]
    for one in found:
        for who in range(2):
            order = [i for producer, i in one if producer == who]
            assert order == sorted(order)


def test_the_lock_tells_who_holds_it_and_in_what(segment_name):
    with shm.SharedRing.create(segment_name, capacity=4, message_bytes=8) as ring:
        slow = shm.SharedRing.attach(segment_name, lock_timeout=0.05)
        assert slow._calls.lock_timeout == 0.05
        lock = layout.LockRecord.from_address(ring.segment.address + layout.LOCK_OFFSET)
        lock.word = ring.segment.client.slot | ring.segment.client.epoch << layout.LOCK_EPOCH_SHIFT
        lock.operation = 2
        lock.sequence = lock.holder >> 32
        with pytest.raises(errors.LockTimeout, match=r"push in .*client 1 \(ring, pid .* in pop"):
            slow.push(b"x")
        lock.word = 0
        slow.push(b"x")
        slow.close()
        assert ring.pop() == b"x"


ROOT, SLOT = ctypes.sizeof(layout.RingRoot), 8 + 16  # a slot of 12 bytes takes 16


@pytest.mark.parametrize(
    ("offset", "value", "named"),
    [
        (layout.RingRoot.first.offset, CAPACITY, "from slot 5 on"),
        (layout.RingRoot.count.offset, CAPACITY + 1, "6 messages"),
        (layout.RingRoot.pushed.offset, 9, "expected 7"),
        (ROOT + layout.RingSlot.stamp.offset, 5, "slot 0 holds message 5, expected 0"),
        (ROOT + layout.RingSlot.length.offset, 1 << 31, "has 2147483648 bytes"),
    ],
)
def test_a_damaged_ring_is_an_error_not_a_signal(ring, offset, value, named):
    ring.push(b"one")
    ring.push(b"two")
    corrupt(ring.segment, offset, value)
    with pytest.raises(errors.CacheCorrupted, match=named):
        ring.check()
    with pytest.raises(errors.CacheCorrupted):
        ring.pop()
    with pytest.raises(errors.CacheCorrupted):
        ring.pop_many(2)


def test_a_second_message_that_is_damaged_takes_nothing_out(ring):
    ring.push(b"one")
    ring.push(b"two")
    corrupt(ring.segment, ROOT + SLOT, 7)
    with pytest.raises(errors.CacheCorrupted, match="pop from"):
        ring.pop_many(2)
    assert len(ring) == 2
    assert ring.pop() == b"one"
