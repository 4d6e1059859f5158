"""What holds for every structure in a segment: who may change it, what becomes of it, bad sizes;
and for those that wait or hold their lock, how that ends."""

import ctypes
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from support.refusals import refused

from lightcache import errors, shm
from lightcache.shm import layout
from lightcache.shm.listing import list_segments


@dataclass(frozen=True)
class Kind:
    """A class, sizes for one, and calls of it: some that look, some that change it."""

    made: Any
    sizes: dict[str, int]
    looks: Any
    changes: Any
    config: dict[str, int] | None = None
    """What a segment says that is too short for it."""


KINDS = {
    "list": Kind(
        shm.SharedList,
        {"nodes": 6},
        lambda one: (lambda: one.length(0), lambda: one.where(0)),
        lambda one: (lambda: one.push_back(0), lambda: one.remove(0), lambda: one.pop_front(0)),
    ),
    "dict": Kind(
        shm.SharedDict,
        {"capacity": 5},
        lambda one: (lambda: one.get(1), lambda: len(one)),
        lambda one: (lambda: one.put(1, 1), lambda: one.pop(1)),
    ),
    "ring": Kind(
        shm.SharedRing,
        {"capacity": 5, "message_bytes": 12},
        lambda one: (lambda: len(one),),
        lambda one: (
            lambda: one.push(b"two"),
            lambda: one.push_many([b"two"]),
            one.pop,
            lambda: one.pop_many(1),
        ),
        {"capacity": 1000, "message_bytes": 1000},
    ),
    "log": Kind(
        shm.SharedLog,
        {"capacity": 5, "message_bytes": 12},
        lambda one: (lambda: len(one), one.behind, one.check),
        lambda one: (lambda: one.append(b"two"),),
        {"capacity": 1000, "message_bytes": 1000},
    ),
}
OF_ENTRIES = ["ring", "log"]
BAD_SIZES = [0, -1, 1 << 40, 1.5, True]


@pytest.fixture
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def one(segment_name, kind):
    with kind.made.create(segment_name, **kind.sizes) as made:
        yield made


every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
of_entries = pytest.mark.parametrize("kind", OF_ENTRIES, indirect=True)


@every_kind
def test_readers_look_and_cannot_change(kind, one):
    with kind.made.attach(one.segment.name, readonly=True) as reader:
        for look in kind.looks(reader):
            look()
        for change in kind.changes(reader):
            refused(errors.PermissionDenied, "", change)


@every_kind
def test_what_is_closed_says_so(segment_name, kind):
    one = kind.made.create(segment_name, **kind.sizes)
    for _ in range(2):
        one.close()
    for call in (*kind.looks(one), *kind.changes(one)):
        refused(errors.Detached, "close", call)


@every_kind
def test_a_forked_child_is_told_to_attach(kind, one):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (*kind.looks(one), *kind.changes(one)):
                refused(errors.Detached, "", call)
            with kind.made.attach(one.segment.name) as mine:
                kind.looks(mine)[0]()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    one.check()


@every_kind
def test_other_kinds_are_told_apart(segment_name, kind, one):
    for other in KINDS.values():
        if other is not kind:
            refused(errors.LayoutMismatch, "", other.made.attach, one.segment.name)
    refused(errors.ConfigError, "uses its lock itself", shm.RobustLock, one.segment)
    told = {info.name: info.kind for info in list_segments()}
    assert KINDS[told[segment_name]] is kind


@pytest.mark.parametrize("bad", BAD_SIZES)
@every_kind
def test_sizes_are_checked(segment_name, kind, bad):
    for size in kind.sizes:
        for make in (kind.made.create, kind.made.open):
            refused(errors.ConfigError, size, make, segment_name, **{**kind.sizes, size: bad})


@of_entries
def test_a_segment_that_says_what_it_cannot_hold(segment_name, kind):
    number = layout.SegmentKind[kind.made.__name__.removeprefix("Shared").upper()]
    for config, error, words in (
        (kind.config, errors.ConfigError, "too short for 1000"),
        ({**kind.config, "capacity": 0}, errors.CacheCorrupted, "capacity"),
    ):
        with shm.Segment.create(segment_name, 4096, kind=number, config=config) as segment:
            for readonly in (False, True):
                refused(error, words, kind.made.attach, segment_name, readonly=readonly)
            assert segment.clients() == []


# ---- entries: bytes of any kind


def ends(kind, one):
    """How an entry is put in, and taken out."""
    if kind is KINDS["ring"]:
        return one.push, one.pop
    return one.append, shm.SharedLog.attach(one.segment.name).read


@of_entries
def test_any_bytes_and_none(kind, one):
    put, take = ends(kind, one)
    for data in (b"", bytes(12), bytearray(b"\0\xff\0"), memoryview(b"abcdef")[::2]):
        put(data, timeout=0)
        assert take(timeout=0) == bytes(data)


@pytest.mark.parametrize("bad", ["text", 3, None, [1], bytes(13), bytearray(13)])
@of_entries
def test_bad_entries_are_refused_and_nothing_is_put_in(kind, one, bad):
    put, take = ends(kind, one)
    refused(errors.ConfigError, r"(message|entry): expected", put, bad)
    if kind is KINDS["ring"]:
        refused(errors.ConfigError, "message: expected", one.push_many, [b"good", bad])
    refused(errors.WaitTimeout, "", take, timeout=0)


@pytest.mark.parametrize("bad", BAD_SIZES)
@of_entries
def test_a_limit_is_checked(kind, one, bad):
    many = one.pop_many if kind is KINDS["ring"] else kind.made.attach(one.segment.name).read_many
    refused(errors.ConfigError, "limit", many, bad)


# ---- waits


def wait_of(name, segment_name):
    """Something that waits, what ends it, and the event that it sleeps on; and what to close."""
    if name == "event":
        segment = shm.Segment.create(segment_name, 4096)
        segment.join("test")
        event, word = shm.Event(segment, 0), shm.AtomicU32(segment, 4)

        def end():
            word.store(1)
            event.notify()

        return lambda: event.wait_for(lambda: word.load() == 1), end, event, [segment]
    structure, verb = name.split()
    kind = KINDS[structure]
    one = kind.made.create(segment_name, **kind.sizes)
    if structure == "ring":
        if verb == "push":
            one.push_many([b"old"] * one.capacity)
            return lambda: one.push(b"new"), one.pop, one._drained, [one]
        return one.pop, lambda: one.push(b"new"), one._filled, [one]
    reader = kind.made.attach(segment_name)
    if verb == "read":
        return reader.read, lambda: one.append(b"new"), reader._news, [reader, one]
    for _ in range(one.capacity):
        one.append(b"old", timeout=0)
    end = reader.close if verb == "leave" else reader.read
    return lambda: one.append(b"new"), end, one._room, [reader, one]


WAITS = ["event", "ring push", "ring pop", "log append", "log read", "log leave"]


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_woken_and_does_not_only_look_again(
    segment_name, name, monkeypatch, wait_until
):
    """Looking again every 50 ms would hide a notification that never comes."""
    monkeypatch.setattr("lightcache.shm.sync._LOOK_AGAIN", 3600.0)
    wait, end, event, opened = wait_of(name, segment_name)
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    segment = getattr(opened[-1], "segment", opened[-1])
    word = ctypes.c_uint32.from_address(segment.address + event._at)
    wait_until(lambda: word.value & 1 == 1, "the waiter to ask to be woken")
    end()
    waiter.join(60)
    assert not waiter.is_alive()
    for each in opened:
        each.close()


@pytest.mark.parametrize("name", WAITS[:-1])
def test_ctrl_c_ends_a_wait_at_once(segment_name, name):
    wait, _, _, opened = wait_of(name, segment_name)
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))

    def interrupted():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        wait()

    try:
        refused(KeyboardInterrupt, "", interrupted)
    finally:
        signal.signal(signal.SIGALRM, previous)
    for each in opened:
        each.close()


@pytest.mark.parametrize(
    ("kind", "operation", "words"),
    [
        ("ring", 2, r"push in .*client 1 \(ring, pid .* in pop"),
        ("log", 1, r"become the writer of .*client 1 \(log writer, pid .* in lead"),
    ],
    indirect=["kind"],
)
def test_the_lock_tells_its_holder_and_the_operation(kind, one, operation, words):
    lock = layout.LockRecord.from_address(one.segment.address + layout.LOCK_OFFSET)
    lock.word = one.segment.client.slot | one.segment.client.epoch << layout.LOCK_EPOCH_SHIFT
    lock.operation = operation
    lock.sequence = lock.holder >> 32
    name, how = one.segment.name, {"lock_timeout": 0.05}
    if kind is KINDS["ring"]:
        with kind.made.attach(name, **how) as slow, pytest.raises(errors.LockTimeout, match=words):
            slow.push(b"x")
    else:
        segment = shm.Segment.attach(name)
        refused(errors.LockTimeout, words, kind.made, segment, writer=True, **how)
        segment.close()
        with kind.made.attach(name) as reader:  # these take no lock
            one.append(b"x")
            assert reader.read(timeout=0) == b"x"
    lock.word = 0
    kind.changes(one)[0]()
