"""SharedLog against a list, its limits, its waits, and what it says to those who may not."""

import ctypes
import os
import signal
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.filling import corrupt
from support.refusals import refused

from lightcache import errors, shm
from lightcache.shm import layout

CAPACITY, BYTES = 5, 12
SIZES = {"capacity": CAPACITY, "message_bytes": BYTES}


@pytest.fixture
def log(segment_name):
    """Its writer."""
    with shm.SharedLog.create(segment_name, **SIZES) as made:
        yield made


@pytest.fixture
def reader(log):
    with shm.SharedLog.attach(log.segment.name) as made:
        yield made


def in_child(act):
    """Run `act` in a child, which exits 0 if it returns; the child's number."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return pid


def killed(name, act=lambda log: None, **how):
    """Attach in a child, `act`, and be killed."""

    def run():
        log = shm.SharedLog.attach(name, **how)
        act(log)
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(os.waitpid(in_child(run), 0)[1]) == signal.SIGKILL


ENTRIES = st.binary(max_size=BYTES)
WHO = st.integers(0, 2)
CALLS = st.lists(
    st.tuples(st.just("append"), ENTRIES)
    | st.tuples(st.sampled_from(["join", "leave", "read"]), WHO)
    | st.tuples(st.just("read_many"), st.tuples(WHO, st.integers(1, CAPACITY + 2))),
    max_size=40,
)


def model_step(log, readers, appended, at, verb, argument):
    """One call, of the log and of its model: `appended`, and where each reader stands."""
    if verb == "append":
        if at and len(appended) - min(at.values()) == log.capacity:
            refused(errors.WaitTimeout, "full", log.append, argument, timeout=0)
        else:
            log.append(argument, timeout=0)
            appended.append(argument)
    elif verb == "read_many" and argument[0] in at:
        who, limit = argument
        expected = appended[at[who] :][:limit]
        assert readers[who].read_many(limit) == expected
        at[who] += len(expected)
    elif verb == "join" and argument not in at:
        readers[argument] = shm.SharedLog.attach(log.segment.name)
        at[argument] = len(appended)
    elif verb == "leave" and argument in at:
        readers.pop(argument).close()
        del at[argument]
    elif verb == "read" and argument in at:
        if at[argument] == len(appended):
            refused(errors.WaitTimeout, "nothing was appended", readers[argument].read, timeout=0)
        else:
            assert readers[argument].read(timeout=0) == appended[at[argument]]
            at[argument] += 1


@pytest.mark.parametrize("capacity", [1, 2, CAPACITY])
def test_log_equals_a_list(segment_name, capacity):
    @settings(max_examples=60, derandomize=True, deadline=None)
    @given(CALLS)
    def run(calls):
        readers, appended, at = {}, [], {}
        with shm.SharedLog.create(segment_name, capacity=capacity, message_bytes=BYTES) as log:
            for verb, argument in calls:
                model_step(log, readers, appended, at, verb, argument)
                log.check()
                assert log.appended == len(appended)
                behind = sorted(one.behind for one in log.behind())
                assert behind == sorted(len(appended) - one for one in at.values())
                assert len(log) == max([0, *behind])
                assert {who: one.position for who, one in readers.items()} == at
            for one in readers.values():
                one.close()

    run()


def test_one_call_reads_as_much_as_it_may(segment_name):
    many, large = layout.LOG_BATCH, layout.LOG_MESSAGE
    sizes = {"capacity": 2 * many, "message_bytes": large}
    with shm.SharedLog.create(segment_name, **sizes) as log:
        with shm.SharedLog.attach(segment_name) as reader:
            for i in range(many + 5):
                log.append(b"%d" % i, timeout=0)
            assert reader.read_many(1000) == [b"%d" % i for i in range(many)]
            assert len(reader.read_many(1000)) == 5
            for _ in range(9):
                log.append(bytes(large), timeout=0)
            assert reader.read_many(9) == [bytes(large)] * (layout.LOG_HOLD // large)
            assert reader.read(timeout=0) == bytes(large)
            log.check()


def test_readers_begin_where_they_join(log, reader):
    log.append(b"one")
    with shm.SharedLog.attach(log.segment.name) as late:
        assert (reader.position, late.position) == (0, 1)
        assert late.read_many(9) == []
        log.append(b"two")
        assert late.read(timeout=0) == b"two"
        assert reader.read_many(9) == [b"one", b"two"]
        refused(errors.WaitTimeout, r"nothing was appended.* for 0 s", late.read, timeout=0)


def test_entries_outlive_their_writer(segment_name):
    sizes = {**SIZES, "lifetime": "persistent"}
    log = shm.SharedLog.create(segment_name, **sizes)
    with shm.SharedLog.attach(segment_name) as reader:
        log.append(b"one")
        log.append(b"two")
        log.close()
        with pytest.raises(errors.LayoutMismatch, match="capacity"):
            shm.SharedLog.open(segment_name, capacity=CAPACITY + 1, message_bytes=BYTES)
        assert reader.read(timeout=0) == b"one"
        assert reader.read_many(9) == [b"two"]
        for ask in (reader.read, lambda: reader.read_many(9)):
            refused(errors.Abandoned, "writer has left or was killed", ask)
        with shm.SharedLog.open(segment_name, **sizes, writer=True) as heir:
            refused(errors.WaitTimeout, "", reader.read, timeout=0)
            heir.append(b"three")
            assert (heir.appended, reader.read(timeout=0)) == (3, b"three")
    shm.Segment.unlink(segment_name)


def test_who_reads_before_the_first_writer_waits_for_it(segment_name):
    with shm.SharedLog.open(segment_name, **SIZES) as reader:
        assert reader.read_many(1) == []
        pid = in_child(
            lambda: shm.SharedLog.open(segment_name, **SIZES, writer=True).append(b"first")
        )
        assert reader.read(timeout=60) == b"first"
        os.waitpid(pid, 0)
        refused(errors.Abandoned, "", reader.read, timeout=60)


def test_a_second_writer_is_told_who_the_first_is(log):
    before = len(log.segment.clients())
    for _ in range(3):
        who = rf"slot 1: log writer, pid {os.getpid()}, living"
        with pytest.raises(errors.InUse, match=rf"become the writer of .*{who}"):
            shm.SharedLog.attach(log.segment.name, writer=True)
    refused(errors.InUse, "pid", shm.SharedLog.open, log.segment.name, **SIZES, writer=True)
    assert len(log.segment.clients()) == before, "who was refused has left"
    with pytest.raises(errors.ConfigError, match="found both"):
        shm.SharedLog.attach(log.segment.name, writer=True, readonly=True)


def test_a_killed_writer_is_succeeded(segment_name):
    with shm.SharedLog.open(segment_name, **SIZES) as reader:
        killed(segment_name, lambda log: [log.append(b"%d" % i) for i in range(3)], writer=True)
        assert reader.read(timeout=60) == b"0"
        with shm.SharedLog.attach(segment_name, writer=True) as heir:
            heir.append(b"3")
            assert reader.read_many(9) == [b"1", b"2", b"3"]
            heir.check()


def test_a_killed_reader_holds_nobody_up(log, reader):
    killed(log.segment.name)
    slots = [(one.slot, one.alive) for one in log.behind()]
    assert slots == [(2, True), (3, False)]
    for i in range(2 * CAPACITY):
        log.append(b"%d" % i, timeout=0)
        assert reader.read(timeout=0) == b"%d" % i
    assert [(one.slot, one.behind) for one in log.behind()] == [(2, 0)]
    log.check()


def test_the_table_of_clients_is_cleared_of_dead_readers(log):
    killed(log.segment.name)
    log.append(b"early")  # not for those who take its slot
    joined = [shm.SharedLog.attach(log.segment.name) for _ in range(layout.SLOTS - 2)]
    log.append(b"one")
    assert {one.read(timeout=0) for one in joined} == {b"one"}
    refused(errors.InUse, "more clients than slots", shm.SharedLog.attach, log.segment.name)
    for one in joined:
        one.close()


def test_a_slow_reader_is_named(log, reader):
    with shm.SharedLog.attach(log.segment.name) as quick:
        for _ in range(CAPACITY):
            log.append(b"x", timeout=0)
            quick.read(timeout=0)
        who = rf"slot 2: log reader, pid {os.getpid()}, living, {CAPACITY} behind\)"
        with pytest.raises(errors.WaitTimeout, match=rf"was full for 0.01 s: .*by \({who}"):
            log.append(b"y", timeout=0.01)
        assert len(log) == CAPACITY
        assert reader.read_many(9) == [b"x"] * CAPACITY
        log.append(b"z", timeout=0)


def test_onlookers_look_and_cannot_change(log, reader):
    log.append(b"one")
    with shm.SharedLog.attach(log.segment.name, readonly=True) as look:
        assert (len(look), look.appended) == (1, 1)
        assert [(one.slot, one.behind) for one in look.behind()] == [(2, 1)]
        look.check()
        for change in (
            lambda: look.append(b"two"),
            lambda: look.read(timeout=0),
            lambda: look.read_many(1),
            lambda: look.position,
        ):
            refused(errors.PermissionDenied, "", change)
        assert repr(look).endswith("readonly>")
    assert reader.read(timeout=0) == b"one"


def test_each_role_is_told_what_the_other_may(log, reader):
    refused(errors.PermissionDenied, "attach with writer=True", reader.append, b"x")
    for call in (lambda: log.read(timeout=0), lambda: log.read_many(1), lambda: log.position):
        refused(errors.PermissionDenied, "attached as its writer", call)
    assert [repr(one).split()[-1] for one in (log, reader)] == ["writer>", "reader>"]


def test_closed_logs_say_so(segment_name):
    log = shm.SharedLog.create(segment_name, **SIZES)
    reader = shm.SharedLog.attach(segment_name)
    for one in (reader, log):
        one.close()
        one.close()
    for call in (lambda: log.append(b""), reader.read, lambda: len(log), log.behind, log.check):
        refused(errors.Detached, "close", call)
    assert repr(log).endswith("closed>")


def test_closing_while_a_view_lives_changes_nothing(log, reader):
    view = reader.segment.view(0, 8)
    refused(errors.InUse, "", reader.close)
    log.append(b"one")
    assert reader.read(timeout=0) == b"one"
    del view


def test_read_waits_for_an_append_of_another_process(segment_name):
    with shm.SharedLog.open(segment_name, **SIZES) as reader:
        held, hold = os.pipe()

        def write():
            with shm.SharedLog.attach(segment_name, writer=True) as log:
                os.read(held, 1)
                log.append(b"late")

        pid = in_child(write)
        os.write(hold, b"x")
        assert reader.read(timeout=60) == b"late"
        os.waitpid(pid, 0)
        os.close(held), os.close(hold)


def test_append_waits_for_a_read_of_another_process(log):
    joined, join = os.pipe()

    def read():
        with shm.SharedLog.attach(log.segment.name) as mine:
            os.write(join, b"x")
            for i in range(CAPACITY + 1):
                assert mine.read(timeout=60) == b"%d" % i

    pid = in_child(read)
    os.read(joined, 1)
    for i in range(CAPACITY + 1):
        log.append(b"%d" % i, timeout=60)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(joined), os.close(join)


def test_a_waiting_reader_is_told_of_its_writers_death(segment_name, wait_until):
    with shm.SharedLog.open(segment_name, **SIZES) as reader:

        def write():
            with shm.SharedLog.attach(segment_name, writer=True) as log:
                log.append(b"one")
                signal.pause()

        pid = in_child(write)
        assert reader.read(timeout=60) == b"one"
        word = ctypes.c_uint32.from_address(reader.segment.address + reader._news._at)
        told = []

        def read():
            refused(errors.Abandoned, "", reader.read)
            told.append(True)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        wait_until(lambda: word.value & 1 == 1, "the reader to sleep")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        thread.join(60)
        assert told


@pytest.mark.parametrize("writer", [False, True])
def test_an_interrupt_while_attaching_leaves_nothing(log, writer, monkeypatch):
    """It comes behind the call that has made us reader or writer."""
    name = log.segment.name
    if writer:
        log.close()
        shm.SharedLog.open(name, **SIZES, lifetime="persistent").close()
    verb = "_lead" if writer else "_join"
    done = getattr(shm.SharedLog, verb)

    def interrupted(self):
        done(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(shm.SharedLog, verb, interrupted)
    refused(KeyboardInterrupt, "", shm.SharedLog.attach, name, writer=writer)
    monkeypatch.undo()
    with shm.SharedLog.attach(name, writer=writer) as again:
        assert again.is_writer == writer
        assert len(again.segment.clients()) == (1 if writer else 2)
        again.check()
    if writer:
        shm.Segment.unlink(name)


def test_threads_share_a_reader(log, reader):
    """What one process reads each of its threads reads once, in order."""
    each, found = 600, [[], []]

    def read(into):
        while (entry := reader.read()) != b"end":
            into.append(int(entry))

    threads = [threading.Thread(target=read, args=[into], daemon=True) for into in found]
    for thread in threads:
        thread.start()
    for i in range(each):
        log.append(b"%d" % i)
    for _ in threads:
        log.append(b"end")
    for thread in threads:
        thread.join(60)
    assert sorted(found[0] + found[1]) == list(range(each))
    assert found == [sorted(one) for one in found]


def test_threads_share_a_writer(log, reader):
    each = 300

    def write(who):
        for i in range(each):
            log.append(b"%d %d" % (who, i))

    threads = [threading.Thread(target=write, args=[i], daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    found = [tuple(map(int, reader.read(timeout=60).split())) for _ in range(2 * each)]
    for thread in threads:
        thread.join(60)
    for who in range(2):
        assert [i for one, i in found if one == who] == list(range(each))


ROOT = ctypes.sizeof(layout.LogRoot)
OWN = layout.LogRoot.cursors.offset + 2 * ctypes.sizeof(layout.LogCursor)  # of the slot 2


@pytest.mark.parametrize(
    ("offset", "value", "named"),
    [
        (layout.LogRoot.appended.offset, 900, "reader 2 stands at entry 0, of 900"),
        (layout.LogRoot.appended.offset + 4, 1 << 31, "entries are said to have been appended"),
        (OWN, 9, "reader 2 stands at entry 8, of 2 appended"),
        (ROOT + layout.LogSlot.stamp.offset, 5, "slot 0 holds entry 5, expected 0"),
        (ROOT + layout.LogSlot.length.offset, 1 << 31, "has 2147483648 bytes"),
    ],
)
def test_a_damaged_log_is_an_error_not_a_signal(log, reader, offset, value, named):
    log.append(b"one")
    log.append(b"two")
    corrupt(log.segment, offset, value)
    refused(errors.CacheCorrupted, named, log.check)
    for ask in (reader.read, lambda: reader.read_many(2)):
        refused(errors.CacheCorrupted, "", ask)


def test_a_second_entry_that_is_damaged_takes_nothing(log, reader):
    log.append(b"one")
    log.append(b"two")
    corrupt(log.segment, ROOT + 8 + 16, 7)  # a slot of 12 bytes takes 16
    refused(errors.CacheCorrupted, "read from", reader.read_many, 2)
    assert reader.position == 0
    assert reader.read() == b"one"
