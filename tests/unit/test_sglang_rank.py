"""The part of the linker for SGLang that imports nothing of it, called in SGLang's order by a
stand-in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.sglang_stand_in import PAGE, Engine, hashes_of

from lightcache import Cache, OffloadQueue
from lightcache.connectors.engine_cache import open_engine_cache
from lightcache.connectors.link import guarded
from lightcache.connectors.sglang import rank as module
from lightcache.connectors.sglang.options import Options
from lightcache.connectors.sglang.rank import ROOT, Neighbours, Rank
from lightcache.errors import ConfigError, LightcacheError
from lightcache.shm import Segment
from lightcache.tools.maintenance import _switch

pytestmark = pytest.mark.usefixtures("engines_apart")
PROMPT = list(range(3, 53))  # 50 tokens: 12 pages, and 2 tokens
HASHES = hashes_of(PROMPT)


@pytest.fixture
def engines_apart(monkeypatch: pytest.MonkeyPatch, segment_name: str) -> Iterator[None]:
    """Ranks are processes of their own: here each is a client. Caches outlive them."""
    apart = partial(open_engine_cache, shared=False)
    monkeypatch.setattr(module, "open_engine_cache", apart)
    yield
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


class Gate:
    """Copies wait for it."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def wait(self) -> None:
        self.open.wait()


def pins(name: str) -> int:
    with Cache.attach(name) as cache:
        report = cache.check()
        report.raise_if_broken()
        return int(report.pins)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_engine_finds_whole_pages(segment_name: str, ranks: int, latent: bool) -> None:
    how = {"latent": latent}
    with Engine(segment_name, ranks=ranks, **how) as one, Engine(segment_name, **how) as other:
        assert one.ask(PROMPT) == 0
        assert one.ask(PROMPT) == other.ask(PROMPT) == 12
        assert other.ask([*PROMPT[:30], *range(100, 130)]) == 7
        assert one.ask(PROMPT, device=5) == 7
        assert sum(rank.voice.count for rank in one.ranks + other.ranks) == 0
        assert pins(segment_name) == 0


def test_latents_are_written_once(segment_name: str) -> None:
    with Engine(segment_name, ranks=2, latent=True) as engine:
        engine.ask(PROMPT)
        written = [rank.figures["saved_bytes"] for rank in engine.ranks]
        cache = engine.ranks[0]._link.current.cache  # type: ignore[union-attr]
        assert sum(written) == 12 * cache.pool.page_bytes
        assert written[0] == written[1]


def test_a_lookup_pins_what_it_promises_until_its_time_is_up(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        rank = engine.ranks[0]
        cache = rank._link.current.cache  # type: ignore[union-attr]
        assert engine.lookup("waits", HASHES) == 12
        assert cache.plans.pages == 12
        assert cache.evict(cache.pages) == 0
        assert engine.lookup("waits", HASHES[3:], HASHES[2]) == 9
        assert cache.plans.pages == 9
        now = rank._clock()
        cache.index._book.clock = rank._clock = lambda: now + module.LIMIT - 1
        assert engine.lookup("waits", HASHES[3:], HASHES[2]) == 9  # renewed
        cache.index._book.clock = rank._clock = lambda: now + 2 * module.LIMIT - 2
        assert engine.lookup("other", HASHES[:1]) == 1
        assert cache.plans.pages == 10
        cache.index._book.clock = rank._clock = lambda: now + 3 * module.LIMIT
        assert engine.lookup("none", ["ab" * 32]) == 0
        assert list(rank._promises) == []
        assert engine.load("waits", PROMPT, HASHES[3:], 3)  # it looks once more


def test_what_a_request_has_computed_all_the_same_is_given_back(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        assert engine.lookup("r", HASHES) == engine.lookup("other", HASHES[8:], HASHES[7]) + 8 == 12
        engine.offload(PROMPT[:24])
        assert list(engine.ranks[0]._promises) == ["other"]
        assert engine.saved() == [True]
        assert pins(segment_name) == 4


def test_ranks_load_what_they_have_agreed_on(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        assert engine.lookup("r", HASHES) == 12
        assert engine.load("r", PROMPT, HASHES[:5])
        assert engine.lookup("r", HASHES[2:], HASHES[1]) == 10
        assert engine.load("r", PROMPT, HASHES[:5])  # of an earlier lookup
        assert pins(segment_name) == 0


def test_pages_that_have_gone_fail_their_batch_and_nothing_else(segment_name: str) -> None:
    with Engine(segment_name, ranks=2) as engine:
        engine.ask(PROMPT)
        assert engine.lookup("r", HASHES) == 12
        cache = engine.ranks[1]._link.current.cache  # type: ignore[union-attr]
        assert cache.cancel("r")
        with Cache.attach(segment_name) as other:
            assert engine.ranks[0]._link is not None
            engine.ranks[0]._link.current.cache.cancel("r")  # type: ignore[union-attr]
            assert other.evict(other.pages) == 12
        assert not engine.load("r", PROMPT, HASHES)
        assert engine.lookup("r", HASHES) == 0
        assert [rank.figures["failed_batches"] for rank in engine.ranks] == [1, 1]
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == 12
        assert pins(segment_name) == 0


def test_a_load_that_is_cancelled_gives_its_pages_back(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        rank = engine.ranks[0]
        assert engine.lookup("r", HASHES) == 12
        rank.load("r", HASHES, lambda: engine.take(12))
        assert pins(segment_name) == 12
        assert rank.cancel_load("r")
        assert not rank.cancel_load("r")
        assert rank.begin(list) == -1
        assert pins(segment_name) == 0


def test_saves_end_in_their_order_whatever_fails(segment_name: str) -> None:
    gate = Gate()
    with Engine(segment_name) as engine:
        engine.offload(PROMPT[:24], after=[gate])
        engine.offload(list(range(200, 224)), begin=3, before="ab" * 32)  # its head is not there
        engine.offload(list(range(100, 124)))
        rank = engine.ranks[0]
        while len(rank._offloads) < 3:
            assert rank.completed() == 0
        gate.open.set()
        assert engine.saved(3) == [True, False, True]
        assert rank.figures["absent_pages"] == 3
        engine.offload(PROMPT[:24])
        assert engine.saved() == [True]  # it is there
        assert rank.voice.count == 0


def test_heads_stay_when_the_device_has_them(segment_name: str) -> None:
    """Half of the pool is evicted: no page is found whose head is gone."""
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        for number in range(4):  # the device has the first three pages: the rest is looked up
            branch = [*PROMPT[: 3 * PAGE], *range(100 * number, 100 * number + 20)]
            assert engine.ask(branch, device=3) == 0
        cache = engine.ranks[0]._link.current.cache  # type: ignore[union-attr]
        pages = cache.stats().ready
        cache.evict(pages // 2)
        assert engine.lookup("r", HASHES[:3]) == 3
        left = sum(
            engine.lookup(f"r{number}", hashes_of([*PROMPT[:12], *range(start, start + 20)])) - 3
            for number, start in enumerate(range(0, 400, 100))
        )
        left += engine.lookup("whole", HASHES)
        assert left == cache.stats().ready


def test_without_the_tree_neighbours_are_remembered(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        rank = engine.ranks[0]
        rank.guess_beginnings("not told")
        slots = engine.compute(PROMPT)
        rank.lookup("r", HASHES, None)
        for begin, end in ((0, 4), (4, 12)):
            part = slots[begin * PAGE : end * PAGE]
            rank.offload(HASHES[begin:end], lambda part=part: part, None, [])
        assert engine.saved(2) == [True, True]
        assert rank.figures["unknown_beginnings"] == 1
        cache = rank._link.current.cache  # type: ignore[union-attr]
        cache.evict(8)
        assert engine.lookup("r", HASHES) == 4


def test_neighbours_are_bounded() -> None:
    known = Neighbours(5)
    known.see(HASHES[:3], ROOT)
    known.see(HASHES[3:6])
    assert known.before(HASHES[0]) == ROOT
    assert known.before(HASHES[1]) == HASHES[0]
    assert known.before(HASHES[3]) is None
    known.see(HASHES[6:10], HASHES[5])
    assert known.before(HASHES[1]) is None
    assert known.before(HASHES[6]) == HASHES[5]


def test_a_reset_is_of_one_launch(segment_name: str) -> None:
    with Engine(segment_name, ranks=2) as one, Engine(segment_name, "22222222") as other:
        one.ask(PROMPT)
        for rank in one.ranks:
            rank.reset()
        assert one.ask(PROMPT) == 0
        assert other.ask(PROMPT) == one.ask(PROMPT) == 12
        assert len({rank._weights for rank in one.ranks}) == 1
    kept = Engine(segment_name, "44444444", on_reset="keep")
    with Engine(segment_name, "33333333") as third, kept:
        third.ranks[0].reset()
        kept.ranks[0].reset()
        assert kept.ask(PROMPT) == 12
        opened = third.ranks[0]._link.current  # type: ignore[union-attr]
        names = {space.weights for space in opened.cache.index.namespaces()}
        assert {name[:8] for name in names} == {"", "sglang-3"}


def test_a_reset_gives_up_what_reads_the_device(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET", 0.01)
    gate = Gate()
    with Engine(segment_name, on_reset="keep") as engine:
        rank = engine.ranks[0]
        engine.offload(PROMPT, after=[gate])
        engine.lookup("r", HASHES)
        rank.load("q", HASHES, lambda: engine.take(12))
        while not len(rank._offloads):
            pass
        rank.reset()
        gate.open.set()
        assert rank.completed() == 0
        while pins(segment_name):
            pass
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == 12


def test_a_save_that_has_not_begun_at_a_reset_never_does(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow() -> Any:
        asked.set()
        gate.open.wait()
        return slots

    monkeypatch.setattr(module, "QUIET", 0.01)
    gate, asked = Gate(), threading.Event()
    with Engine(segment_name, on_reset="keep") as engine:
        slots = engine.compute(PROMPT)
        engine.ranks[0].offload(HASHES, slow, ROOT, [])
        asked.wait()
        monkeypatch.setattr(OffloadQueue, "close", lambda *_: True)  # it is not known to it yet
        engine.ranks[0].reset()
        monkeypatch.undo()
        gate.open.set()
        engine.offload(PROMPT[:4])
        assert engine.saved() == [True]
        assert engine.lookup("r", HASHES) == 1


def test_a_storage_is_read_before_a_lookup_promises(segment_name: str, tmp_path: Path) -> None:
    url = f"disk:{tmp_path}?capacity=16MiB"
    with Engine(segment_name, ranks=2, storage=url) as engine:
        engine.ask(PROMPT)
        tier = engine.ranks[0]._link.current.tier  # type: ignore[union-attr]
        while tier.stats().queued + tier.stats().running + tier.stats().writing:
            pass
    Segment.unlink(segment_name)
    with Engine(segment_name, ranks=2, storage=url) as engine:
        assert engine.lookup("r", HASHES) == 0
        promise = engine.ranks[0]._misses["r"]
        assert promise.read is not None
        promise.read.wait(10)
        assert engine.lookup("r", HASHES) == 12
        assert engine.load("r", PROMPT, HASHES)


def test_disabled_and_removed(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 0.0)
    with Engine(segment_name) as engine:
        rank = engine.ranks[0]
        engine.ask(PROMPT)
        _switch(segment_name, None, 1)
        linker = Guarded(rank)
        assert linker.lookup("r", HASHES) == 0
        assert rank.voice.count == 1
        _switch(segment_name, None, 0)
        assert linker.lookup("r", HASHES) == 12
        Segment.unlink(segment_name, force=True)
        slots = engine.take(12)
        rank.load("r", HASHES, lambda: slots)
        assert engine.run({"r": (PROMPT, 0, slots)}) == {"r": False}
        engine.offload(PROMPT)
        assert engine.saved() == [False]
        while rank._link is None or rank._link.current is None:
            pass
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == 12


class Guarded:
    """As the linker's methods are."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.trouble = rank, rank.trouble

    @guarded(int)
    def lookup(self, request: str, hashes: list[str]) -> int:
        return self.rank.lookup(request, hashes, ROOT)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sise": "1GiB"}, "linker_extra_config: expected options among .*, found sise"),
        ({"on_reset": "clear"}, "on_reset: expected one of"),
        ({"size": 0}, "size"),
        ({"storage": 3}, "storage: expected a URL"),
        ({"blocks_per_page": 2}, "found blocks_per_page"),
    ],
)
def test_wrong_options(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options.of(given)
