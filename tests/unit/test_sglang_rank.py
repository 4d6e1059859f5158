"""The part of the linker for SGLang that imports nothing of it, called in SGLang's order by a
stand-in."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.keys import prompt
from support.learned_traffic import PAGES, occupied
from support.learned_traffic import PROMPT as PAGES_EACH
from support.refusals import refused
from support.sglang_stand_in import PAGE, Engine, engines_apart, hashes_of, pins  # noqa: F401

from lightcache import Cache, LayerLoads, OffloadQueue
from lightcache.connectors import engine_cache
from lightcache.connectors.link import Link, Voice, guarded
from lightcache.connectors.sglang import rank as module
from lightcache.connectors.sglang.rank import ROOT, Neighbours, Options, Rank
from lightcache.errors import ConfigError, NotReady
from lightcache.shm import Segment
from lightcache.tools.maintenance import _switch

pytestmark = pytest.mark.usefixtures("engines_apart")
PROMPT = list(range(3, 53))  # 50 tokens: 12 pages, and 2 tokens
HASHES = hashes_of(PROMPT)


class Gate:
    """Copies wait for it."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def wait(self) -> None:
        self.open.wait()


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
        engine.offload(list(range(200, 224)), begin=3, before="ab" * 32)  # not its beginning
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


HOLDS = """
import os, signal, sys
from lightcache import Cache
cache = Cache.attach(sys.argv[1])
assert cache.index.core.locked("lci_hold", what="test") == 0
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_saves_wait_together_for_a_stopped_holder_of_the_lock(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK", 0.25)
    now, go, reserve = 0.0, threading.Event(), Cache.reserve
    waits: list[float] = []

    def waited(cache: Cache, *arguments: Any, timeout: float, **how: Any) -> Any:
        nonlocal now
        waits.append(timeout)
        now += timeout
        return reserve(cache, *arguments, timeout=timeout, **how)

    with Engine(segment_name) as engine, contextlib.ExitStack() as stack:
        rank = engine.ranks[0]
        rank._clock = lambda: now
        holder = subprocess.Popen([sys.executable, "-c", HOLDS, segment_name])
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        monkeypatch.setattr(Cache, "reserve", waited)
        marker = threading.Event()
        monkeypatch.setattr(marker, "set", go.wait)  # all are queued before the first begins
        rank._saves.put(marker)
        for number in range(20):
            engine.offload(list(range(100 * number, 100 * number + 8)))
        go.set()
        assert engine.saved(20) == [False] * 20
        assert waits == [0.25] + [0.05] * 19
        stack.close()
        engine.offload(PROMPT[:24])
        assert engine.saved() == [True]


def test_beginnings_stay_when_the_device_has_them(segment_name: str) -> None:
    """Half of the pool is evicted: no page is found whose beginning is gone."""
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


@pytest.mark.parametrize("asked", [None, "hz"])
def test_the_order_of_a_new_cache_is_lru(segment_name: str, asked: str | None) -> None:
    """SGLang names the end alone of what its device serves. A cache that is there keeps its own."""
    for own in ({} if asked is None else {"eviction": asked}, {}):
        with Engine(segment_name, **own) as engine:
            cache = engine.ranks[0]._link.current.cache  # type: ignore[union-attr]
            assert cache.index.eviction == (asked or "lru")


def test_what_the_device_has_whole_stays(segment_name: str) -> None:
    """SGLang names nothing of such a prompt: without a touch it would look cold, and go first."""
    with Engine(segment_name) as engine:
        rank = engine.ranks[0]
        now = 0.0
        rank._clock = lambda: now
        other = list(range(200, 248))
        for prompt in (PROMPT, other):
            engine.ask(prompt)
        rank.used(HASHES[-1:])
        rank.used(["ab" * 32])  # one that is not here
        now = module.TOUCH
        rank.completed()
        rank.used(hashes_of(other)[-1:])
        rank.completed()  # too early for another touch
        cache = rank._link.current.cache  # type: ignore[union-attr]
        assert cache.evict(12) == 12
        assert engine.lookup("r", HASHES) == 12
        assert engine.lookup("other", hashes_of(other)) == 0
        for number in range(module.USED + 1):
            rank.used([f"{number:064x}"])
        assert len(rank._used) == module.USED
        now += module.TOUCH
        rank.completed()
        for number in range(3):  # of long windows fewer
            rank.used([*["cd" * 32] * (module.TOUCHED // 2 - 1), f"{number:064x}"])
        assert len(rank._used) == 2
        assert rank.voice.count == 0
        assert pins(segment_name) == 12


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


def test_events_that_cannot_be_recorded_fail_their_batch(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        assert engine.lookup("r", HASHES) == 12
        rank = engine.ranks[0]
        rank.load("r", HASHES, lambda: engine.take(12))
        leases = rank._queued["r"].leases
        assert rank.finish(rank.begin(lambda: 1 // 0)) is False  # type: ignore[arg-type,return-value]
        assert all(lease.ended for lease in leases)
        assert rank.voice.count == 1
        assert pins(segment_name) == 0


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
    monkeypatch.setattr(engine_cache, "REST", 0.0)
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


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("on purpose")


def test_a_reset_that_fails_forgets_the_old_weights_all_the_same(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(segment_name) as engine:
        rank = engine.ranks[0]
        engine.ask(PROMPT)
        for name in ("r", "other"):
            assert engine.lookup(name, HASHES) == 12
        rank.load("other", HASHES, lambda: engine.take(12))
        with monkeypatch.context() as patch:
            patch.setattr(OffloadQueue, "close", fails)
            patch.setattr(Cache, "cancel", fails)
            patch.setattr(rank, "finish", fails)
            rank.begin(list)
            rank.reset()
        assert rank.voice.count == 3
        assert engine.lookup("new", HASHES) == 0
        assert not rank._promises
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == 12


def test_a_load_that_still_writes_is_waited_for(
    segment_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Opens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "still writes" in record.getMessage():
                gate.open.set()

    gate, opens, log = Gate(), Opens(), logging.getLogger("lightcache.connectors")
    going = LayerLoads.in_flight.fget
    answers = iter([fails])  # it does not know, once
    look = property(lambda loads: next(answers, going)(loads))
    monkeypatch.setattr(LayerLoads, "in_flight", look)
    monkeypatch.setattr(module, "LATE", 0.0)
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        rank = engine.ranks[0]
        monkeypatch.setattr(module, "LOAD", 0.0)
        assert engine.lookup("r", HASHES) == 12
        slots = engine.take(12)
        rank.load("r", HASHES, lambda: slots)
        log.addHandler(opens)
        try:
            assert not rank.finish(rank.begin(lambda: [gate]))
            assert gate.open.is_set()
        finally:
            log.removeHandler(opens)
            gate.open.set()
        assert rank.figures["late_loads"] >= 1
        engine.check(PROMPT, 0, slots)  # it has ended
        assert pins(segment_name) == 0


def test_a_plan_that_a_load_cannot_take_is_given_back(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise NotReady("on purpose")

    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        rank = engine.ranks[0]
        for name, attribute, value in (("r", "take", refuses), ("q", "usable", lambda: None)):
            assert engine.lookup(name, HASHES) == 12
            with monkeypatch.context() as patch:
                patch.setattr(Cache if attribute == "take" else rank, attribute, value)
                rank.load(name, HASHES, lambda: engine.take(12))
            assert pins(segment_name) == 0
            assert not rank.finish(rank.begin(list))
            rank._rest_until = 0.0


def test_plans_of_an_idle_engine_lapse(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        rank = engine.ranks[0]
        assert engine.lookup("gone", HASHES) == 12
        cache, now = rank._link.current.cache, rank._clock()  # type: ignore[union-attr]
        cache.index._book.clock = rank._clock = lambda: now + module.LIMIT + 1
        assert rank.completed() == 0
        assert pins(segment_name) == 0


def test_each_save_has_its_turn(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(segment_name) as engine:
        rank = engine.ranks[0]
        rank.guess_beginnings("not told")
        rank.offload(["no hash"], lambda: engine.take(1), None, [])
        engine.offload(PROMPT[:8])
        assert engine.saved(2) == [False, True]

        usual, calls = OffloadQueue.submit, iter([fails])
        monkeypatch.setattr(OffloadQueue, "submit", lambda *given: next(calls, usual)(*given))
        engine.offload(PROMPT[:12])
        engine.offload(PROMPT[:16])
        assert engine.saved(2) == [False, True]

        assert engine.lookup("r", HASHES[:4]) == 4
        with monkeypatch.context() as patch:
            patch.setattr(Cache, "cancel", fails)
            engine.offload(PROMPT[:20])
        assert engine.saved() == [True]
        assert not rank._promises
        assert len(rank._offloads) == 0


def test_threads_that_die_or_cannot_start_cost_no_turn(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(segment_name) as engine:
        rank = engine.ranks[0]
        rank._saves.put(None)
        rank._thread.join()  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            engine.offload(PROMPT[:8])
            assert rank.completed() == 0
            assert rank.voice.count == 1
        assert engine.saved() == [True]

        gate, begun = Gate(), threading.Event()
        usual = OffloadQueue._ensure_thread

        def refuses(offloads: OffloadQueue) -> None:
            begun.set()
            fails()

        with monkeypatch.context() as patch:
            patch.setattr(OffloadQueue, "_ensure_thread", refuses)
            engine.offload(PROMPT[:16], after=[gate])
            begun.wait()
            patch.setattr(OffloadQueue, "_ensure_thread", usual)
        gate.open.set()
        assert engine.saved() == [True]
        assert len(rank._offloads) == 0

        gate = Gate()
        engine.offload(PROMPT[:24], after=[gate])
        while not len(rank._offloads):
            pass
        try:
            with monkeypatch.context() as patch:
                patch.setattr(OffloadQueue, "_ensure_thread", fails)
                former = rank._offloads
                assert not former.close(0.0)
            assert former.completed() == 1
            assert former.pop().error is not None
        finally:
            gate.open.set()


def test_errors_of_a_storage_hide_nothing(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SimpleNamespace(prefetch=fails, write=fails)
    monkeypatch.setattr(module.Opened, "tier", tier)
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)  # it is saved
        assert engine.lookup("r", hashes_of([*PROMPT, *range(20)])) == 12
        assert engine.ranks[0].voice.count == 3


def test_what_two_threads_lose_is_closed_once() -> None:
    class Slow(Link[object]):
        """A thread that reads the side waits for the other, for a while."""

        @property
        def _current(self) -> object:
            side = self.side
            if losing:
                with contextlib.suppress(threading.BrokenBarrierError):
                    both.wait(0.1)
            return side

        @_current.setter
        def _current(self, side: object) -> None:
            self.side = side

    losing, both, closed, side = False, threading.Barrier(2), list[object](), object()
    link = Slow(Voice("test"), lambda: side, closed.append)
    link._current = side
    losing = True
    threads = [threading.Thread(target=link.lose, args=(side,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losing = False
    link.close(0.0)
    assert closed == [side]


def test_the_first_use_is_not_said_to_be_one_again(caplog: pytest.LogCaptureFixture) -> None:
    voice = Voice("test")
    for when in ("now", "again", "again"):
        voice.trouble("open", OSError("not there"))
        voice.well()
        voice.well()
        assert len(caplog.records) == 2
        assert caplog.records[1].message == f"test: the cache is used {when}"
        caplog.clear()
    quiet = Voice("test")
    quiet.well()
    assert not caplog.records
    quiet.trouble("load", OSError("lost"))
    quiet.well()
    assert caplog.records[-1].message == "test: the cache is used again"


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
        ({"eviction": "fifo"}, r"eviction: expected one of \('lru', 'hz'\), found 'fifo'"),
        ({"blocks_per_page": 2}, "found blocks_per_page"),
    ],
)
def test_wrong_options(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options.of(given)


def test_what_is_not_worth_saving_is_not_saved(segment_name: str) -> None:
    page = 512
    with Engine(segment_name, size=PAGES * page, eviction="hz", admission=True) as engine:
        link = engine.ranks[0]._link
        assert link is not None
        assert link.current is not None
        cache = link.current.cache
        assert cache.index.pages == PAGES
        occupied(cache.index)
        engine.offload(PROMPT)
        assert engine.saved() == [False]
        assert engine.lookup("a", HASHES) == 0
        cache.index.drop(prompt(0, PAGES_EACH))  # there is room for ten pages of twelve
        other = [7, *PROMPT]
        engine.offload(other)
        assert engine.saved() == [False]
        assert engine.lookup("b", hashes_of(other)) == PAGES_EACH


def test_several_ranks_would_differ_on_what_is_worth_saving(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(segment_name, ranks=2, admission=True) as engine:
        assert not any(rank.serves for rank in engine.ranks)
    assert "admission: expected false where several ranks save" in caplog.text
    refused(ConfigError, "admission: expected true or false", Options.of, {"admission": 1})
