"""The whole way on one GPU: a cache in shared memory, pinned, with engines of several processes;
ranks that die, copies that are given up, engines that go while copies are under way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu.place import DEADLINE, place
from gpu.ranks import (
    GEOMETRY,
    PAGES,
    TOKENS,
    Model,
    Worker,
    create,
    slots_of,
    together,
    wrong_bytes,
)
from support.keys import prompt
from support.refusals import refused

from lightcache import (
    Cache,
    ClientId,
    Detached,
    InUse,
    Load,
    NotReady,
    Offload,
    TransferFailed,
    WaitTimeout,
)
from lightcache.kernels.geometry import PageGeometry
from lightcache.kernels.moves import Move

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STAND_IN = True
STAMP = 0xFE
HELD = 0.2  # seconds for which a shut gate is seen to hold copies up


@pytest.fixture
def where() -> Iterator[Any]:
    made = place()
    yield made
    made.close()


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with create(segment_name) as made:
        yield made
        report = made.check()
        assert report.clean, report.message
        assert report.pins == 0


@contextlib.contextmanager
def workers(folder: Path, count: int) -> Iterator[list[Worker]]:
    """Processes that are gone afterwards."""
    made = [Worker(folder, number) for number in range(count)]
    try:
        together(made, "hello", [{}] * count)
        yield made
    finally:
        for worker in made:
            worker.kill()


def joined(cache: Cache, ranks: list[Worker], mode: str, **more: Any) -> list[ClientId]:
    """All of them, as ranks that write."""
    order = {"name": cache.name, "ranks": len(ranks), "mode": mode, "writing": True, **more}
    told = together(ranks, "join", [{**order, "rank": at} for at in range(len(ranks))])
    assert all(isinstance(each, list) for each in told), told
    return [ClientId(*each) for each in told]


def offered(cache: Cache, at_least: int) -> int:
    """How many pages one can reserve now; asks until there are enough, or for a minute."""
    end = time.monotonic() + DEADLINE
    while True:
        cache.reap()
        with cache.reserve(prompt(99, PAGES)) as new:
            found = len(new.new)
        if found >= at_least or time.monotonic() > end:
            return found


# ---- processes


def test_two_ranks_write_what_a_third_process_reads(segment_name: str, tmp_path: Path) -> None:
    with workers(tmp_path, 3) as (first, second, reader):
        for name, mode in enumerate(["staged", "direct", "auto"], 1):
            with create(f"{segment_name}-{mode}") as cache:
                clients = joined(cache, [first, second], mode)
                keys, slots = prompt(name, 5), [slots_of(5, seed) for seed in (1, 2)]
                with cache.reserve(keys, shards=2) as new, new.ticket(clients) as ticket:
                    data = {"ticket": bytes(ticket).hex(), "prompt": name}
                    orders = [{**data, "shard": at, "slots": slots[at]} for at in range(2)]
                    pages = together([first, second], "adopt", orders)
                    assert pages == [new.pages.tolist()] * 2
                    at = new.new.tolist()
                    orders = [{"slots": own, "where": at} for own in slots]
                    told = together([first, second], "offload", orders)
                    assert sorted(map(str, told)) == ["False", "True"], f"the last one's: {told}"
                    assert ticket.poll().verdict is True
                assert wrong_bytes(cache, name, pages[0]) == 0
                reader("join", name=cache.name, rank=0, ranks=1, mode=mode, writing=False)
                found = reader("load", prompt=name, pages=5, slots=slots_of(5, 3))
                assert found == [5, 0], "(pages, wrong values)"
                together([first, second, reader], "leave", [{}] * 3)
                assert cache.check().pins == 0


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_a_rank_killed_with_copies_queued(cache: Cache, tmp_path: Path, mode: str) -> None:
    keys, slots = prompt(1, 3), slots_of(3, 1)
    with workers(tmp_path, 2) as (living, victim):
        clients = joined(cache, [living, victim], mode)
        with cache.reserve(keys, shards=2) as new, new.ticket(clients) as ticket:
            data = {"ticket": bytes(ticket).hex(), "prompt": 1, "slots": slots}
            together([living, victim], "adopt", [{**data, "shard": at} for at in range(2)])
            order = {"slots": slots, "where": new.new.tolist()}
            assert living("offload", **order) is False
            queued = victim("queue", **order)
            assert not any(queued), queued
            assert ticket.poll().verdict is None
            assert cache.peek(keys) == 0
            victim.kill()
            assert cache.wait(keys, timeout=DEADLINE) == 0
            assert ticket.poll().verdict is False
        assert offered(cache, PAGES) == PAGES, f"clients: {cache.clients()}"
        assert cache.peek(keys) == 0
        with cache.reserve(prompt(2, PAGES)) as again:
            cache.pool.array[again.pages] = STAMP
            assert living("leave") is None
            assert (cache.pool.array[again.pages] == STAMP).all(), "somebody else wrote there"


# ---- copies under way


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_pages_of_an_aborted_copy_stay_until_it_is_over(
    cache: Cache, where: Any, mode: str
) -> None:
    model, keys, slots = Model(where, cache, mode=mode), prompt(1, 3), slots_of(3, 1)
    model.warm()
    model.compute(1, slots)
    where.synchronize()
    gate = where.gate()
    try:
        new = cache.reserve(keys)
        pages = new.pages.tolist()
        offload = Offload(model.engine, new, slots, after=[gate.event])
        assert not offload.done()
        assert cache.peek(keys) == 0
        offload.abort()
        assert cache.wait(keys, timeout=DEADLINE) == 0, "nobody waits for it any more"
        with cache.reserve(prompt(2, PAGES)) as others:
            taken = others.pages.tolist()
            with pytest.raises(WaitTimeout):  # as long as a copy that does not wait would take
                offload.wait(HELD)
        assert len(taken) == PAGES - 3, "no more than those that no copy writes to"
        assert not set(taken) & set(pages)
    finally:
        gate.open()
    offload.wait(DEADLINE)
    assert offload.ready is False
    assert wrong_bytes(cache, 1, pages) == 0, "nothing cancels a copy"
    assert cache.peek(keys) == 0
    assert offered(cache, PAGES) == PAGES
    model.close()


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_a_lease_is_held_until_its_load_is_over(cache: Cache, where: Any, mode: str) -> None:
    """The Load is dropped: the pages cannot be evicted all the same."""
    model, keys, slots = Model(where, cache, mode=mode), prompt(1, 3), slots_of(3, 1)
    model.warm()
    model.compute(1, slots)
    Offload(model.engine, cache.reserve(keys), slots).wait(DEADLINE)
    model.forget()
    where.synchronize()
    gate, there = where.gate(), slots_of(3, 2)
    try:
        transfer = Load(model.engine, cache.match(keys), there, after=[gate.event]).transfer
        with cache.reserve(prompt(2, PAGES)) as others:
            taken = len(others.new)
            refused(WaitTimeout, "", transfer.wait, HELD)
        assert taken == PAGES - 3
    finally:
        gate.open()
    transfer.wait(DEADLINE)
    assert model.wrong(1, there) == 0
    assert offered(cache, PAGES) == PAGES, "and now they can"
    model.close()


def test_closing_waits_for_copies(cache: Cache, where: Any, wait_until: Any) -> None:
    model, keys, slots = Model(where, cache, mode="staged"), prompt(1, 3), slots_of(3, 1)
    model.warm()
    model.compute(1, slots)
    where.synchronize()
    gate = where.gate()
    closing = threading.Thread(target=model.engine.close)
    try:
        new = cache.reserve(keys)
        pages = new.pages.tolist()
        offload = Offload(model.engine, new, slots, after=[gate.event])
        closing.start()
        wait_until(lambda: model.engine._in_flight.closed, "the engine is closing")
        refused(Detached, "closed", model.engine.load, Move([0], slots[:TOKENS]))
        refused(InUse, "", cache.close)
        assert cache.peek(keys) == 0
        refused(WaitTimeout, "", offload.wait, HELD)
        assert closing.is_alive()
    finally:
        gate.open()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert offload.done()
    assert offload.ready is True
    assert cache.peek(keys) == 3
    assert wrong_bytes(cache, 1, pages) == 0


# ---- pages that are not registered yet, and copies that fail


def test_a_page_that_is_not_registered_yet(segment_name: str, where: Any) -> None:
    """One thread, held up behind its first piece: other pages are refused, and kept by whoever
    reserved them."""
    geometry = PageGeometry(GEOMETRY.groups, align=1 << 20)  # pages of 1 MiB, most of it padding
    pages, go_on = 96, threading.Event()

    def hold_up(done: int, of: int) -> None:
        assert go_on.wait(DEADLINE), f"forgotten at {done} of {of} pages"

    with create(segment_name, geometry, pages) as cache:
        cache.pool.prefault()
        model = Model(where, cache, geometry=geometry, threads=1, progress=hold_up)
        slots = [slot % 256 for slot in range(pages * TOKENS)]
        try:
            model.memory.wait([0], DEADLINE)
            ready = model.memory.ready
            assert 0 < ready < pages
            model.engine.offload(Move([0], slots[:TOKENS])).wait(DEADLINE)
            with pytest.raises(NotReady, match=f"page {ready} is not registered.*{ready} of 96"):
                model.engine.offload(Move([ready], slots[:TOKENS]))
            new = cache.reserve(prompt(1, pages))
            assert len(new.new) == pages
            refused(NotReady, "`wait` for it", Offload, model.engine, new, slots)
            assert model.engine.poll() == 0
        finally:
            go_on.set()
        model.memory.wait(new.pages, DEADLINE)
        model.compute(1, slots[:TOKENS])
        where.synchronize()
        Offload(model.engine, new, slots).wait(DEADLINE)
        assert cache.peek(prompt(1, pages)) == pages
        model.close()


class Refused:
    """A copier that asks the driver for nonsense where it should write to the pool."""

    def __init__(self, inner: Any, memory: Any) -> None:
        self._inner, self.anywhere, self.add = inner, inner.anywhere, inner.add
        self._low, self._high = memory.address, memory.address + memory.nbytes

    def __call__(self, targets: Any, sources: Any, sizes: Any, stream: Any) -> None:
        bad = [0 if self._low <= target < self._high else target for target in targets]
        self._inner(bad, sources, sizes, stream)


def test_a_copy_that_the_driver_refuses(
    cache: Cache, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page is nobody's, the engine goes on, and so does torch."""
    model, keys, slots = Model(where, cache, mode="staged"), prompt(1, 1), slots_of(1, 1)
    model.warm()
    model.compute(1, slots)
    where.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(
            model.engine._parts, "copier", Refused(model.engine._parts.copier, model.memory)
        )
        offload = Offload(model.engine, cache.reserve(keys), slots)
        refused(TransferFailed, r"failed: .*abandon those pages", offload.wait, DEADLINE)
    assert offload.ready is False
    assert cache.peek(keys) == 0
    assert cache.check().pins == 0
    Offload(model.engine, cache.reserve(keys), slots).wait(DEADLINE)
    with cache.match(keys) as lease:
        assert wrong_bytes(cache, 1, lease.pages.tolist()) == 0
    model.close()
    assert (torch.ones(4, device=where.memory) + 1).sum().item() == 8, "torch was told of it"


def test_pinned_twice(cache: Cache, where: Any) -> None:
    model = Model(where, cache)
    refused(InUse, "pinned already", where.pin, cache)
    refused(InUse, "engines still use", model.memory.close)
    model.warm()
    assert np.all(model.tensors[0][0].cpu().numpy() == 0x5E5E)
    model.close()
    model.memory.close()
    again = Model(where, cache)
    again.warm()
    again.close()
