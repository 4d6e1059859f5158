"""Offload and Load: pages are held exactly as long as a copy may touch them, and published only
when it has succeeded."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.device_sides import Device
from support.index_view import IndexView
from support.interrupts import interrupt
from support.keys import prompt
from support.refusals import refused
from support.scripts import with_support

from lightcache import (
    Abandoned,
    Cache,
    ConfigError,
    Detached,
    InUse,
    LayoutMismatch,
    LeaseLost,
    Load,
    Offload,
    TransferFailed,
    WaitTimeout,
)
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlanes
from lightcache.kernels.testing import moved_rows
from lightcache.reservations import ReservationShard

TOKENS = 4
SLOTS = 64
GEOMETRY = PageGeometry(
    [KVGroup.attention("kv", layers=2, heads=2, head_dim=4, dtype_bytes=2, page_tokens=TOKENS)]
)


class Gate:
    """What a copy is `after`: opened by the test."""

    def __init__(self, error: Exception | None = None) -> None:
        self.opened, self.error = threading.Event(), error

    def synchronize(self) -> None:
        assert self.opened.wait(60)
        if self.error:
            raise self.error


class World:
    """A cache of 8 pages, a device, and an engine between them."""

    def __init__(self, name: str) -> None:
        self.cache = Cache.create(
            name,
            pages=8,
            page_bytes=GEOMETRY.page_bytes,
            page_tokens=TOKENS,
            fingerprint=f"model {GEOMETRY.fingerprint()}",
            secret=bytes(16),
        )
        self.device = Device(GEOMETRY.share(), SLOTS, 3)
        self.engine = self.cache.transfer_engine(GEOMETRY, self.device.planes, threads=2)
        self.gate = Gate()

    def close(self) -> None:
        self.gate.opened.set()
        gc.collect()
        self.engine.close()
        assert self.pins() == 0
        assert self.cache.stats().writing == 0
        self.cache.close()

    def pins(self) -> int:
        report = self.cache.check()
        assert report.clean, report.message
        return report.pins

    def slots(self, pages: int, seed: int = 0) -> Any:
        return np.random.default_rng(seed).permutation(SLOTS)[: pages * TOKENS]

    def written(self, keys: Any, slots: Any) -> None:
        """All pages of these keys are ready and have the bytes of these slots."""
        with self.cache.match(keys) as hit:
            assert len(hit) == len(keys)
            flat = self.cache.pool.array.reshape(-1)
            move = Move(hit.pages.tolist(), slots[: len(keys) * TOKENS])
            for page, slot in moved_rows(
                GEOMETRY.share(), self.device, GEOMETRY.page_bytes, [move]
            ):
                assert (flat[page] == self.device.memory[slot]).all()


@pytest.fixture
def world(segment_name: str) -> Iterator[World]:
    made = World(segment_name)
    yield made
    made.close()


def test_new_pages_are_published_when_the_copy_is_over(world: World) -> None:
    slots = world.slots(3)
    with world.cache.reserve(prompt(1, 3)) as new:
        offload = Offload(world.engine, new, slots, after=[world.gate])
    assert world.pins() == 3, "leaving the reservation's `with` ended it"
    assert not offload.done()
    assert offload.ready is None
    refused(WaitTimeout, "", offload.wait, 0)
    assert world.cache.peek(prompt(1, 3)) == 0
    world.gate.opened.set()
    offload.wait(60)
    assert offload.done()
    assert offload.ready is True
    assert world.pins() == 0
    offload.abort()
    world.written(prompt(1, 3), slots)


def test_what_is_present_busy_or_missing_is_left_alone(world: World) -> None:
    slots = world.slots(10)
    Offload(world.engine, world.cache.reserve(prompt(1, 2)), slots).wait(60)
    with Cache.attach(world.cache.name, secret=bytes(16)) as second:
        busy = second.reserve(prompt(1, 4), 2)
        new = world.cache.reserve(prompt(1, 10))
        assert (new.present.tolist(), new.busy.tolist()) == ([0, 1], [2, 3])
        assert (new.new.tolist(), new.missing.tolist()) == ([4, 5, 6, 7], [8, 9])
        before = world.cache.pool.array.copy()
        mine, others = new.pages.tolist(), new.present_pages.tolist() + busy.pages.tolist()
        offload = Offload(world.engine, new, slots)
        offload.wait(60)
        assert offload.transfer.nbytes == 4 * GEOMETRY.used_bytes
        after = world.cache.pool.array
        assert (after[others] == before[others]).all()
        assert (after[mine] != before[mine]).any()
        del after
        busy.release()
    Offload(world.engine, world.cache.reserve(prompt(1, 4), 2), slots).wait(60)
    world.written(prompt(1, 8), slots)


def test_polling_the_engine_publishes(world: World) -> None:
    kept = [
        Offload(
            world.engine,
            world.cache.reserve(prompt(name, 2)),
            world.slots(2, name),
            after=[world.gate],
        )
        for name in (1, 2)
    ]
    world.gate.opened.set()
    for offload in kept:
        offload.transfer.wait_on()
        assert offload.ready is None
    assert world.engine.poll() == 0
    assert [offload.ready for offload in kept] == [True, True]
    assert world.pins() == 0
    assert world.cache.peek(prompt(2, 2)) == 2


def test_nothing_new(world: World) -> None:
    Offload(world.engine, world.cache.reserve(prompt(1, 2)), world.slots(2)).wait(60)
    offload = Offload(world.engine, world.cache.reserve(prompt(1, 2)), world.slots(2))
    offload.wait(60)
    assert offload.ready is True
    assert offload.transfer.nbytes == 0


def test_a_failed_copy_is_not_published(world: World) -> None:
    gate = Gate(RuntimeError("lost"))
    offload = Offload(world.engine, world.cache.reserve(prompt(1, 2)), world.slots(2), after=[gate])
    gate.opened.set()
    for _ in range(2):
        refused(TransferFailed, "lost", offload.wait, 60)
    refused(TransferFailed, "", offload.done)
    assert offload.ready is False
    assert world.cache.wait(prompt(1, 2), timeout=0) == 0
    assert world.pins() == 0


def test_aborting_tells_at_once_and_holds_until_the_end(world: World) -> None:
    keys = prompt(1, 3)
    new = world.cache.reserve(keys)
    pages = set(new.pages.tolist())
    offload = Offload(world.engine, new, world.slots(3), after=[world.gate])
    offload.abort()
    offload.abort()
    assert world.cache.wait(keys, timeout=0) == 0, "somebody would still wait for them"
    assert world.pins() == 3
    with world.cache.reserve(prompt(2, 8)) as other:
        assert len(other.new) == 5
        assert not pages & set(other.pages.tolist()), "handed on while a copy writes them"
    with world.cache.reserve(keys) as again:
        assert len(again.new) == 3
    assert not offload.done()
    assert offload.ready is None
    world.gate.opened.set()
    offload.wait(60)
    assert offload.done()
    assert offload.ready is False
    assert world.pins() == 0
    assert world.cache.peek(keys) == 0
    with world.cache.reserve(prompt(2, 8)) as other:
        assert len(other.new) == 8


def drop(world: World, offload: Offload) -> None:
    del offload
    gc.collect()


def leave_by_exception(world: World, offload: Offload) -> None:
    with pytest.raises(KeyError), offload:
        raise KeyError


@pytest.mark.parametrize("leave", [drop, leave_by_exception])
def test_a_dropped_one_is_aborted_and_holds_on(world: World, leave: Any) -> None:
    made = [Offload(world.engine, world.cache.reserve(prompt(1, 3)), world.slots(3),
                    after=[world.gate])]  # fmt: skip
    leave(world, made.pop())
    gc.collect()
    assert world.cache.wait(prompt(1, 3), timeout=0) == 0
    assert world.pins() == 3, "the pages were let go while the copy goes on"
    world.gate.opened.set()
    world.engine.close()
    assert world.pins() == 0
    assert world.cache.peek(prompt(1, 3)) == 0


def test_one_that_was_dropped_with_its_engine(world: World) -> None:
    engine = world.cache.transfer_engine(GEOMETRY, world.device.planes)
    offload = Offload(engine, world.cache.reserve(prompt(1, 3)), world.slots(3), after=[world.gate])
    copy = offload.transfer
    del offload, engine
    gc.collect()
    assert world.pins() == 3
    world.gate.opened.set()
    copy.wait(60)
    assert world.pins() == 0


def test_leaving_the_with_waits(world: World) -> None:
    with Offload(world.engine, world.cache.reserve(prompt(1, 3)), world.slots(3)) as offload:
        pass
    assert offload.ready is True
    with Load(world.engine, world.cache.match(prompt(1, 3)), world.slots(3)) as load:
        pass
    assert load.done()
    assert world.pins() == 0


def test_cleared_meanwhile(world: World) -> None:
    offload = Offload(
        world.engine, world.cache.reserve(prompt(1, 3)), world.slots(3), after=[world.gate]
    )
    world.cache.clear()
    assert world.pins() == 3
    world.gate.opened.set()
    for call in (offload.wait, offload.done):
        refused(Abandoned, "", call)
    assert offload.ready is False
    assert world.pins() == 0


def test_a_load_holds_its_lease(world: World) -> None:
    keys, slots, to = prompt(1, 3), world.slots(3), np.arange(3 * TOKENS)
    Offload(world.engine, world.cache.reserve(keys), slots).wait(60)
    lease = world.cache.match(keys)
    pages = lease.pages.tolist()
    with lease:
        load = Load(world.engine, lease, to, after=[world.gate], window=1)
    refused(LeaseLost, "", lease.release)
    assert world.pins() == 3
    assert world.cache.evict(8) == 0
    assert not load.done()
    del load
    gc.collect()
    assert world.pins() == 3, "a dropped load let go of pages that it reads"
    world.gate.opened.set()
    world.engine.close()
    assert world.pins() == 0
    flat = world.cache.pool.array.reshape(-1)
    for page, slot in moved_rows(
        GEOMETRY.share(), world.device, GEOMETRY.page_bytes, [Move(pages, to)]
    ):
        assert (flat[page] == world.device.memory[slot]).all()


def test_a_failed_load_lets_go(world: World) -> None:
    Offload(world.engine, world.cache.reserve(prompt(1, 2)), world.slots(2)).wait(60)
    gate = Gate(RuntimeError("lost"))
    load = Load(world.engine, world.cache.match(prompt(1, 2)), world.slots(2), after=[gate])
    gate.opened.set()
    refused(TransferFailed, "", load.wait, 60)
    assert world.pins() == 0


@pytest.mark.parametrize(
    ("slots", "how", "why"),
    [
        (np.arange(11), {}, "positions 0 to 2 hold tokens 0 to 11"),
        (np.arange(12.0), {}, "slots"),
        (np.arange(12) + SLOTS, {}, "slots: expected"),
        (np.arange(12) - 1, {}, "negative slot"),
        (np.arange(12), {"positions": [0, 1]}, "one a page"),
        (np.arange(12), {"positions": [0, 1, 3]}, "positions 0 to 3"),
        (np.arange(12), {"positions": [-1, 0, 1]}, "positions"),
        (np.arange(12), {"page_tokens": 0}, "page_tokens"),
        (np.arange(12), {"window": 0}, "window"),
        (np.arange(12), {"after": 1}, "after"),
    ],
)
def test_bad_input_leaves_it_with_the_caller(world: World, slots: Any, how: Any, why: str) -> None:
    with world.cache.reserve(prompt(1, 3)) as new:
        refused(ConfigError, why, Offload, world.engine, new, slots, **how)
        gc.collect()
        assert world.pins() == 3
        assert new.publish()
    assert world.pins() == 0


def test_a_bad_load_leaves_the_lease_with_the_caller(world: World) -> None:
    Offload(world.engine, world.cache.reserve(prompt(1, 2)), world.slots(2)).wait(60)
    with world.cache.match(prompt(1, 2)) as lease:
        refused(ConfigError, "", Load, world.engine, lease, world.slots(3))
        gc.collect()
        assert len(lease.pages) == 2
        assert world.pins() == 2
    refused(LeaseLost, "", Load, world.engine, lease, world.slots(2))
    refused(ConfigError, "expected a Lease", Load, world.engine, 17, world.slots(2))


def test_what_has_ended_or_has_shards_is_refused(world: World) -> None:
    new = world.cache.reserve(prompt(1, 2))
    new.release()
    refused(LeaseLost, "", Offload, world.engine, new, world.slots(2))
    with world.cache.reserve(prompt(1, 2), shards=2) as new:
        refused(ConfigError, "2 shards", Offload, world.engine, new, world.slots(2))
    with pytest.raises(ConfigError, match="expected a Reservation or ReservationShard"):
        Offload(world.engine, None, world.slots(2))  # type: ignore[arg-type]
    new = world.cache.reserve(prompt(1, 2))
    offload = Offload(world.engine, new, world.slots(2), after=[world.gate])
    for call in (new.publish, new.abandon, new.release):
        refused((Abandoned, LeaseLost), "", call)
    refused(LeaseLost, "", Offload, world.engine, new, world.slots(2))
    assert world.pins() == 2
    world.gate.opened.set()
    offload.wait(60)


def adopted(world: World, shard: int, ticket: Any) -> ReservationShard:
    found = world.cache.adopt(bytes(ticket), shard=shard)
    assert isinstance(found, ReservationShard)
    return found


def test_a_shard_names_its_positions(world: World) -> None:
    slots = world.slots(4)
    Offload(world.engine, world.cache.reserve(prompt(1, 2)), slots).wait(60)
    new = world.cache.reserve(prompt(1, 4))
    ticket = new.ticket([world.cache.client_id])
    shard = adopted(world, 0, ticket)
    refused(ConfigError, "give positions=", Offload, world.engine, shard, slots)
    offload = Offload(world.engine, shard, slots, positions=new.new)
    offload.wait(60)
    assert offload.ready is True
    assert ticket.poll().verdict is True
    ticket.drop()
    new.release()
    world.written(prompt(1, 4), slots)


def test_an_aborted_shard_tells_its_giver(world: World) -> None:
    new = world.cache.reserve(prompt(1, 2), shards=2)
    ticket = new.ticket([world.cache.client_id])
    offload = Offload(world.engine, adopted(world, 0, ticket), world.slots(2), after=[world.gate])
    offload.abort()
    assert ticket.poll().verdict is False
    assert world.cache.wait(prompt(1, 2), timeout=0) == 0
    ticket.drop()
    new.release()
    assert world.pins() == 2, "the copy's own"
    world.gate.opened.set()
    offload.wait(60)
    assert world.pins() == 0


class Broken(HostEngine):
    """Fails when it has begun, as a device may."""

    error: BaseException = RuntimeError("launch failure")

    def offload(self, *arguments: Any, **how: Any) -> Any:
        super().offload(*arguments, **how)
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("x"), TransferFailed("x"), KeyboardInterrupt()])
def test_what_has_begun_holds_its_pages_though_its_call_raised(
    world: World, error: BaseException
) -> None:
    memory = HostPages(world.cache.pool.array)
    with Broken(GEOMETRY, world.device.planes, memory) as engine:
        engine.error = error
        with world.cache.reserve(prompt(1, 3)) as new, pytest.raises(type(error)):
            Offload(engine, new, world.slots(3), after=[world.gate])
        del new
        gc.collect()
        Offload(world.engine, world.cache.reserve(prompt(2, 2)), world.slots(2)).wait(60)
        assert world.pins() == 3, "let go while the copy may go on"
        world.gate.opened.set()
        engine.close()
        Offload(world.engine, world.cache.reserve(prompt(3, 2)), world.slots(2)).wait(60)
        assert world.pins() == 0
        assert world.cache.peek(prompt(1, 3)) == 0
    del engine, memory


@pytest.mark.slow
def test_an_interrupt_anywhere_leaks_nothing(world: World) -> None:
    """Ctrl-C at every place of making one, of waiting for it and of dropping it."""
    slots, keys = world.slots(3), prompt(1, 3)
    ready = places = 0

    def whole() -> None:
        with world.cache.reserve(keys) as new:
            offload = Offload(world.engine, new, slots)
        offload.wait(60)
        with world.cache.match(keys) as hit:
            load = Load(world.engine, hit, slots)
        load.wait(60)

    for at in range(0, 100_000, 7):
        more = interrupt(whole, at)
        gc.collect()
        while world.engine.poll():
            pass
        gc.collect()
        assert world.pins() == 0, f"at place {at}"
        assert world.cache.stats().writing == 0, f"at place {at}"
        if world.cache.peek(keys):
            ready += 1
            world.written(keys, slots)
        world.cache.evict(8)
        places += 1
        if not more:
            break
    assert 0 < ready < places
    assert places > 20


def test_an_engine_for_the_cache(world: World) -> None:
    other = PageGeometry(
        [KVGroup.attention("kv", layers=2, heads=1, head_dim=8, dtype_bytes=2, page_tokens=TOKENS)]
    )
    assert other.page_bytes == GEOMETRY.page_bytes
    larger = PageGeometry(
        [KVGroup.attention("kv", layers=2, heads=2, head_dim=8, dtype_bytes=2, page_tokens=TOKENS)]
    )
    shorter = PageGeometry(
        [KVGroup.attention("kv", layers=4, heads=2, head_dim=4, dtype_bytes=2, page_tokens=2)]
    )
    for geometry, why in (
        (other, "as a word of its own"),
        (larger, "page_bytes=geometry"),
        (shorter, "page_tokens=geometry"),
    ):
        planes = Device(geometry.share(), SLOTS).planes
        refused(LayoutMismatch, why, world.cache.transfer_engine, geometry, planes)
    with pytest.raises(ConfigError, match="PinnedPages"):
        world.cache.transfer_engine(GEOMETRY, DevicePlanes({}, device="cuda:0"))
    elsewhere = HostPages(np.zeros((2, GEOMETRY.page_bytes), np.uint8))
    with pytest.raises(ConfigError, match="memory"):
        world.cache.transfer_engine(GEOMETRY, world.device.planes, memory=elsewhere)


def test_one_fingerprint_that_begins_another(segment_name: str) -> None:
    group = KVGroup.opaque("o", layers=1, row_bytes=16, page_tokens=4)
    wide = KVGroup.opaque("p", layers=1, row_bytes=16, page_tokens=4)
    one, both = PageGeometry([group], align=4096), PageGeometry([group, wide], align=4096)
    assert one.fingerprint() in both.fingerprint()
    with Cache.create(
        segment_name, pages=2, page_bytes=4096, fingerprint=both.fingerprint(), secret=bytes(16)
    ) as cache:
        refused(LayoutMismatch, "", cache.transfer_engine, one, Device(one.share(), 8).planes)
        cache.transfer_engine(both, Device(both.share(), 8).planes).close()


ABORTED_AND_KILLED = """
import signal, sys, threading
import numpy as np
from support.device_sides import Device
from support.keys import prompt
from unit.test_page_transfers import GEOMETRY, SLOTS
from lightcache import Cache, Offload

cache = Cache.attach(sys.argv[1], secret=bytes(16), role="doomed", device=True)
engine = cache.transfer_engine(GEOMETRY, Device(GEOMETRY.share(), SLOTS, 3).planes)
never = threading.Event()
offload = Offload(engine, cache.reserve(prompt(1, 3)), np.arange(12), after=[never])
offload.abort()
print("aborted", flush=True)
signal.pause()
"""


def test_pages_of_an_aborted_copy_are_quarantined_too(world: World) -> None:
    """Aborted, and killed with the copy under way: a device may still be writing them."""
    child = subprocess.Popen(
        [sys.executable, "-c", with_support(ABORTED_AND_KILLED), world.cache.name],
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"aborted\n"
        [slot] = [c.slot for c in world.cache.clients() if c.role == "doomed"]
        child.kill()
    record = IndexView(world.cache.index).client(slot)
    record.pidns += 1  # as if its end could not be seen: then it is a matter of time, here ours
    assert world.cache.reap() == 1
    record.quarantine_until_ns = 1 << 62
    assert world.pins() == 3
    with world.cache.reserve(prompt(2, 8)) as other:
        assert len(other.new) == 5, "offered while a copy may write them"
    record.quarantine_until_ns = 1
    assert world.cache.reap() == 1
    assert world.pins() == 0
    with world.cache.reserve(prompt(2, 8)) as other:
        assert len(other.new) == 8


def test_a_cache_is_not_closed_under_an_engine(world: World) -> None:
    refused(InUse, "", world.cache.close)
    world.engine.close()
    with pytest.raises(Detached, match="closed"):
        Offload(world.engine, world.cache.reserve(prompt(1, 2)), world.slots(2))
    gc.collect()
