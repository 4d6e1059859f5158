"""The halves of the connector for vLLM, called in vLLM's order by a stand-in."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.keys import prompt
from support.learned_traffic import PAGES, occupied
from support.learned_traffic import PROMPT as PAGES_EACH
from support.vllm_stand_in import BLOCK, Engine, Request

from lightcache import Cache
from lightcache.connectors import engine_cache, link
from lightcache.connectors.vllm import prompts, scheduler, worker
from lightcache.connectors.vllm.scheduler import launch_of, open_cache, team_of
from lightcache.errors import LightcacheError, NotReady
from lightcache.layout import Hint
from lightcache.shm import Segment
from lightcache.storage.tier import StorageTier
from lightcache.tools.maintenance import _switch

pytestmark = pytest.mark.usefixtures("engines_apart")
PROMPT = list(range(3, 53))  # 50 tokens: 12 blocks, 6 pages of 8 tokens, and 2 tokens


@pytest.fixture
def engines_apart(monkeypatch: pytest.MonkeyPatch, segment_name: str) -> Iterator[None]:
    """Engines are processes of their own: here each half is a client. Caches outlive them."""
    for half in ("scheduler", "worker"):
        apart = partial(open_cache, shared=False)
        monkeypatch.setattr(f"lightcache.connectors.vllm.{half}.open_cache", apart)
    monkeypatch.setattr(scheduler, "STORAGE", scheduler.START)  # other work may hold it up
    yield
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


class Gate:
    """Copies wait for it."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def wait(self) -> None:
        self.open.wait()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_engine_finds_whole_pages(segment_name: str) -> None:
    with Engine(segment_name) as first, Engine(segment_name, "other") as second:
        assert first.ask(PROMPT) == 0
        assert second.ask(PROMPT) == 48
        assert second.ask([*PROMPT[:30], *range(100, 130)]) == 24
        assert second.ask(PROMPT, device=5 * BLOCK) == 48 - 20
        assert second.ask(PROMPT[:48]) == 40  # one token is computed
        first.idle()
        with Cache.attach(segment_name) as other:
            other.check().raise_if_broken()


def test_what_the_device_has_alone_is_not_loaded(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        assert engine.ask(PROMPT, device=48) == 0
        assert engine.scheduler.look(Request(PROMPT, skip_reading_prefix_cache=True), 0) == (
            0,
            False,
        )


def test_salts_are_apart(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT, cache_salt="a")
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT, cache_salt="b") == 0
        assert engine.ask(PROMPT, cache_salt="a") == 48


def adapter(folder: Path, name: str) -> Any:
    """A LoRA adapter with a file, as vLLM's request has it."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "adapter_model.safetensors").write_text(name)
    return SimpleNamespace(lora_name=name, lora_path=str(folder / name))


def test_adapters_are_apart_and_each_is_found_by_the_first_request(
    segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: str, usual: Any = prompts.files_digest) -> bytes:
        while not looked.is_set():
            looked.wait()
        return bytes(usual(path))

    looked = threading.Event()
    monkeypatch.setattr(prompts, "files_digest", slow)
    monkeypatch.setattr(scheduler, "ADAPTER", 60.0)
    one, other = (adapter(tmp_path, name) for name in "ab")
    with Engine(segment_name) as first, Engine(segment_name, "other") as second:
        asked = Request(PROMPT, lora_request=one)
        first.scheduler.begin(asked)
        assert first.scheduler.look(asked, 0) == (None, False)  # its files are being looked at
        adapters = first.scheduler._adapters

        def just_before(request: str) -> None:
            """They are known an instant after the look."""
            looked.set()
            while not adapters.known(request):
                pass
            patch.undo()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapters, "take", just_before)
            assert first.scheduler.look(asked, 0) == (None, False)
        assert first.look(asked) == 0
        assert first.ask(PROMPT, lora_request=one) == 0
        assert second.ask(PROMPT) == second.ask(PROMPT, lora_request=other) == 0
        assert second.ask(PROMPT, lora_request=one) == 48


def test_an_adapter_whose_files_cannot_be_looked_at_is_not_waited_for(
    segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(path: str) -> bytes:
        raise OSError(5, path)

    def hangs(path: str) -> bytes:
        looked.wait()
        return b""

    looked = threading.Event()
    one = adapter(tmp_path, "a")
    monkeypatch.setattr(prompts, "files_digest", lost)
    with Engine(segment_name) as engine:
        assert engine.ask(PROMPT, lora_request=one) == engine.ask(PROMPT, lora_request=one) == 0
        assert Cache.attach(segment_name, readonly=True).stats().ready == 0
        monkeypatch.setattr(prompts, "files_digest", hangs)
        asked, now = Request(PROMPT, lora_request=one), engine.scheduler._clock()
        engine.scheduler.begin(asked)
        assert engine.scheduler.look(asked, 0) == (None, False)
        engine.scheduler._clock = lambda: now + 60
        assert engine.scheduler.look(asked, 0) == (0, False)
        looked.set()


@pytest.mark.parametrize("stages", [(2, 1), (1, 2), (2, 2)])
def test_stages_of_a_pipeline_read_what_others_have_written(
    segment_name: str, stages: tuple[int, int]
) -> None:
    writers, readers = stages
    with Engine(segment_name, "a", ranks=2, stages=writers) as first:
        assert first.ask(PROMPT) == 0
        with Engine(segment_name, "b", stages=readers) as second:
            assert second.ask(PROMPT) == 48
        assert first.ask(PROMPT) == 48


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_write_each_byte_of_latents_once(segment_name: str, ranks: int) -> None:
    with Engine(segment_name, "a", ranks=ranks, heads=1) as first:
        assert first.ask(PROMPT) == 0
        saved = [worker.take_figures()["saved_bytes"] for worker in first.workers]
        with Cache.attach(segment_name, readonly=True) as cache:
            assert cache.stats().ready == 6
            assert sum(saved) == 6 * cache.page_bytes
        assert max(saved) < sum(saved)
        with Engine(segment_name, "b", heads=1) as second:
            assert second.ask(PROMPT) == 48


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_ranks_of_another_number_read(segment_name: str, writers: int, readers: int) -> None:
    with Engine(segment_name, "a", ranks=writers) as first:
        assert first.ask(PROMPT) == 0
        with Engine(segment_name, "b", ranks=readers) as second:
            assert second.ask(PROMPT) == 48
        assert Cache.attach(segment_name, readonly=True).stats().ready == 6


def test_blocks_are_kept_while_a_save_reads_them(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        gate = Gate()
        engine.workers[0]._events = lambda: [gate]
        request = Request(PROMPT)
        engine.admit(request)
        engine.compute(request)
        engine.end(request)
        assert engine.scheduler.pending
        assert request.request_id in engine.kept
        gate.open.set()
        engine.idle()
        assert not engine.kept
        assert engine.ask(PROMPT) == 48


def test_blocks_are_kept_until_all_chunks_are_saved(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        gates = [Gate(), Gate()]
        request = Request(PROMPT)
        engine.admit(request)
        for gate, end in zip(gates, (20, None), strict=True):
            engine.workers[0]._events = lambda gate=gate: [gate]
            engine.compute(request, end)
        engine.end(request)
        gates[0].open.set()
        while len(engine.scheduler._jobs) > 1:
            engine.step({})
        assert request.request_id in engine.kept
        gates[1].open.set()
        engine.idle()
        assert not engine.kept
        engine.workers[0]._events = list
        assert engine.ask(PROMPT) == 48


def test_pages_that_another_engine_is_writing_are_left_to_it(segment_name: str) -> None:
    with Engine(segment_name, "a") as slow, Engine(segment_name, "b") as engine:
        gate = Gate()
        slow.workers[0]._events = lambda: [gate]
        begun = Request(PROMPT[:16])
        slow.admit(begun)
        slow.compute(begun)
        with Cache.attach(segment_name, readonly=True) as cache:
            while cache.stats().writing < 2:
                pass
            assert engine.ask(PROMPT) == 0
            assert (cache.stats().writing, cache.stats().ready) == (2, 4)
        gate.open.set()
        slow.end(begun)
        slow.idle()
        assert engine.ask(PROMPT) == 48


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_stored_is_told_once(segment_name: str, ranks: int) -> None:
    with Engine(segment_name, ranks=ranks) as engine, Engine(segment_name, "other") as other:
        for each in (engine, other):
            each.scheduler.tells = True
        request = Request(PROMPT)
        engine.admit(request)
        for end in (20, None):  # two chunks: 2 pages of 2 blocks, then 4
            engine.compute(request, end)
        engine.end(request)
        engine.idle()
        told = sorted(engine.scheduler.take_stored(), key=lambda stored: stored.first)
        assert [(stored.request, stored.first, stored.end) for stored in told] == [
            (request, 0, 4),
            (request, 4, 12),
        ]
        assert engine.ask(PROMPT) == other.ask(PROMPT) == 48
        assert engine.scheduler.take_stored() == other.scheduler.take_stored() == []
        other.ask([*PROMPT[:30], *range(100, 130)])
        (stored,) = other.scheduler.take_stored()
        assert (stored.first, stored.end) == (6, 14)


def test_what_was_not_stored_is_not_told(segment_name: str) -> None:
    with Engine(segment_name) as engine, Cache.attach(segment_name) as other:
        engine.scheduler.tells = True
        with other.index.allocate(other.pages - 4):  # there is room for 4 of 6 pages
            engine.ask(PROMPT)
            (stored,) = engine.scheduler.take_stored()
            assert (stored.first, stored.end) == (0, 8)
        gate = Gate()
        engine.workers[0]._events = lambda: [gate]
        before = Request(list(range(200, 240)))
        engine.admit(before)
        engine.compute(before)
        engine.end(before)
        gate.open.set()
        engine.ask(list(range(400, 440)))  # the gate is open: it has ended, and is not taken
        engine.scheduler.reset()
        engine.idle()
        assert engine.scheduler.take_stored() == []


def test_nothing_is_kept_for_events_that_are_off(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        assert engine.scheduler.take_stored() == []


def test_one_prefix_is_saved_once(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        gate = Gate()
        engine.workers[0]._events = lambda: [gate]
        both = [Request(PROMPT), Request([*PROMPT, *range(100, 108)])]
        for request in both:
            engine.admit(request)
            engine.compute(request)
            engine.end(request)
        assert engine.scheduler.take_figures()["offered_pages"] == 6 + 1
        gate.open.set()
        engine.idle()
        engine.workers[0]._events = list
        assert engine.ask([*PROMPT, *range(100, 108)]) == 56


def test_a_save_whose_blocks_were_freed_is_given_up(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightcache.connectors.vllm.worker.SETTLE", 0.01)
    with Engine(segment_name) as engine:
        gate = Gate()
        usual, engine.workers[0]._events = engine.workers[0]._events, lambda: [gate]
        victim, other = Request(PROMPT), Request(list(range(200, 220)))
        engine.admit(victim)
        engine.compute(victim)
        engine.workers[0]._events = usual
        engine.admit(other)
        engine.compute(other, preempted=(victim,))
        for tensors in engine.tensors[0].values():
            tensors[engine.tables[victim.request_id][0]] = 99  # others' by now
        gate.open.set()
        engine.idle()
        engine.end(victim)
        engine.end(other)
        engine.idle()
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == 48


class Registering:
    """A pool of which nothing is registered with the GPU's driver, until `done`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = False
        for name in ("Load", "Offload"):
            begin = getattr(worker, name)
            monkeypatch.setattr(worker, name, partial(self.check, begin))

    def check(self, begin: Any, *arguments: Any, **named: Any) -> Any:
        if not self.done:
            raise NotReady("these pages are not registered yet")
        return begin(*arguments, **named)


def test_a_load_waits_for_pages_to_be_registered(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(segment_name) as first, Engine(segment_name, "other") as second:
        first.ask(PROMPT)
        first.idle()
        driver = Registering(monkeypatch)
        half = second.workers[0]
        received = half.received

        def step() -> set[str]:
            driver.done |= bool(half._early)
            return received()

        monkeypatch.setattr(half, "received", step)
        assert second.ask(PROMPT) == 48  # and what was loaded is compared
        assert driver.done
        assert not second.workers[0].figures["failed_loads"]
        assert not second.workers[0].figures["errors"]


def test_a_save_of_pages_that_are_not_registered_is_dropped(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(segment_name) as engine:
        driver = Registering(monkeypatch)
        assert engine.ask(PROMPT) == 0
        engine.idle()
        with Cache.attach(segment_name) as other:
            report = other.check()
            assert (report.ready, report.writing, report.pins) == (0, 0, 0)
        driver.done = True
        assert engine.ask([1, *PROMPT]) == 0
        engine.idle()
        assert engine.ask([1, *PROMPT]) == 48


def test_a_request_whose_load_failed_is_computed_and_not_offered_again(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        usual = engine.workers[0]._begin_load

        def fails(order: object, part: object) -> None:
            raise RuntimeError("it fails")

        engine.workers[0]._begin_load = fails  # type: ignore[method-assign,assignment]
        request = Request(PROMPT)
        assert engine.admit(request) == 0
        assert engine.scheduler.look(request, 0) == (0, False)
        engine.workers[0]._begin_load = usual  # type: ignore[method-assign]
        engine.compute(request)
        engine.end(request)
        assert engine.ask(PROMPT) == 48
    assert [text for text in warnings_of(caplog) if "it fails" in text]


def test_pages_that_go_before_the_load_begins(segment_name: str) -> None:
    with Engine(segment_name) as engine, Cache.attach(segment_name) as other:
        engine.ask(PROMPT)
        request = Request(PROMPT)
        engine.scheduler.begin(request)
        found = engine.look(request)
        engine.allocate(request, found=found)
        other.clear()
        engine.scheduler.allocated(request, engine.tables[request.request_id], found)
        assert engine.load(request)
        assert engine.scheduler.look(request, 0) == (0, False)
        engine.compute(request)
        engine.end(request)


def test_an_abort_while_loading_ends_with_the_load(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        request = Request(PROMPT)
        engine.scheduler.begin(request)
        found = engine.look(request)
        engine.allocate(request, found=found)
        engine.scheduler.allocated(request, engine.tables[request.request_id], found)
        assert not engine.scheduler.finish(request)  # vLLM keeps its blocks by itself
        assert engine.scheduler._requests
        assert not engine.load(request)
        assert not engine.scheduler._requests
        assert engine.ask(PROMPT) == 48


def test_a_reset_is_of_this_launch_alone(segment_name: str) -> None:
    with Engine(segment_name, "a_dp0") as one, Engine(segment_name, "other") as other:
        one.ask(PROMPT)
        running = Request(list(range(300, 340)))
        one.admit(running)
        one.compute(running, BLOCK)  # with the old weights, and the rest with the new ones
        assert one.scheduler.reset()
        one.compute(running)
        assert one.ask(PROMPT) == 0  # saved again, with the new weights
        assert one.ask(PROMPT) == 48
        assert other.ask(PROMPT) == 48  # with the old ones
        one.end(running)
        one.idle()
        with Engine(segment_name, "a_dp1") as second:
            assert second.ask(PROMPT) == 48
            second.scheduler.reset()
            assert second.ask(PROMPT) == 48
            assert second.ask(running.all_token_ids) == 0


@pytest.mark.parametrize("loaded", [False, True], ids=["loading", "loaded"])
def test_a_reset_while_a_request_loads(segment_name: str, loaded: bool) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT[:26])
        request = Request(PROMPT)
        engine.scheduler.begin(request)
        found = engine.look(request)
        engine.allocate(request, found=found)
        engine.scheduler.allocated(request, engine.tables[request.request_id], found)
        if loaded:
            assert not engine.load(request)
        engine.scheduler.reset()
        engine.weights = 1
        if not loaded:
            assert not engine.load(request)
        request.num_computed_tokens = found
        engine.scheduler.take_figures()
        engine.compute(request)  # with the new weights, on KV of the old ones
        engine.end(request)
        engine.idle()
        assert not engine.scheduler.take_figures()["offered_pages"]
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == 48


@pytest.mark.parametrize("preempted", [False, True])
def test_a_reset_while_a_save_is_under_way(
    segment_name: str, preempted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightcache.connectors.vllm.worker.SETTLE", 0.01)
    monkeypatch.setattr(scheduler, "RESET", 0.01)
    with Engine(segment_name) as engine, Engine(segment_name, "other") as other:
        gate = Gate()
        usual, engine.workers[0]._events = engine.workers[0]._events, lambda: [gate]
        request = Request(PROMPT)
        engine.admit(request)
        engine.compute(request)
        engine.workers[0]._events = usual
        engine.scheduler.reset()
        engine.weights = 1
        if preempted:  # it is computed again, in the same blocks
            request.num_computed_tokens = 0
            engine.compute(request, preempted=(request,))
        gate.open.set()
        engine.end(request)
        engine.idle()
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == 48
        assert other.ask(PROMPT) == (0 if preempted else 48)  # of the old weights


def test_a_reset_that_keeps(segment_name: str) -> None:
    with Engine(segment_name, on_reset="keep") as engine:
        engine.ask(PROMPT)
        assert engine.scheduler.reset()
        assert engine.ask(PROMPT) == 48


def test_a_cache_that_is_disabled_is_a_miss(
    segment_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightcache.connectors.engine_cache.REST", 0.0)
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        _switch(segment_name, None, 1)
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == 0
        assert len([text for text in warnings_of(caplog) if "scheduler" in text]) == 1
        _switch(segment_name, None, 0)
        assert engine.ask(PROMPT) == 48


def test_a_cache_that_was_removed_comes_back(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(segment_name) as engine:
        engine.ask(PROMPT)
        Segment.unlink(segment_name, force=True)
        assert engine.ask(PROMPT) == 0
        found = 0
        while not found:
            found = engine.ask(PROMPT)
        assert found == 48
        assert len([text for text in warnings_of(caplog) if "removed" in text]) == 1


def test_a_full_cache_is_a_miss(segment_name: str) -> None:
    with Engine(segment_name) as engine, Cache.attach(segment_name) as other:
        with other.index.allocate(other.pages):
            assert engine.ask(PROMPT) == 0
            assert engine.ask(PROMPT) == 0
        assert engine.workers[0].take_figures()["absent_pages"] == 12
        engine.ask(PROMPT)
        assert engine.ask(PROMPT) == 48


@pytest.mark.slow
def test_what_was_stored_is_read_after_all_have_gone(segment_name: str, tmp_path: Path) -> None:
    url = f"disk:{tmp_path}?capacity=64MiB"
    with Engine(segment_name, storage=url) as engine:
        engine.ask(PROMPT)
    Segment.unlink(segment_name)
    with Engine(segment_name, storage=url) as engine:
        request = Request(PROMPT)
        engine.scheduler.begin(request)
        found = engine.look(request)
        assert found == 48
        assert engine.scheduler.sources(request, found) == (0, 48)
        engine.scheduler.finish(request)
        assert engine.ask(PROMPT) == 48


@pytest.mark.slow
def test_a_storage_that_cannot_be_opened_leaves_the_cache(
    segment_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait_until: Any,
) -> None:
    monkeypatch.setattr(link, "FIRST", 0.01)
    blocked = tmp_path / "shelf"
    blocked.touch()
    with Engine(segment_name, storage=f"disk:{blocked}?capacity=64MiB") as engine:
        assert (engine.ask(PROMPT), engine.ask(PROMPT)) == (0, 48)
        assert caplog.text.count("open the storage: ") == 1
        blocked.unlink()
        wait_until(lambda: "the storage is used now" in caplog.text, "the storage")
        assert engine.scheduler._link.current.tier is not None


class Hanging:
    """A storage that opens when it is told to."""

    def __init__(self) -> None:
        self.asked, self.there, self.closed = (threading.Event() for _ in range(3))
        self.waits: list[float] = []

    def open(self, cache: Cache, urls: Any, **_: Any) -> Any:
        self.asked.set()
        self.there.wait()
        tier = StorageTier.open(cache, urls)
        usual = tier.close

        def close() -> None:
            usual()
            self.closed.set()

        tier.close = close  # type: ignore[method-assign]
        return tier


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    storage = Hanging()
    monkeypatch.setattr(engine_cache, "open_tier", storage.open)
    monkeypatch.setattr(scheduler, "STORAGE", 0.0)
    monkeypatch.setattr(link, "LATE", 0.01)
    start = link.Link.start

    def starts(self: Any, timeout: float) -> None:
        storage.waits.append(timeout)
        start(self, timeout)

    monkeypatch.setattr(link.Link, "start", starts)
    yield storage
    storage.there.set()


def test_the_cache_is_used_while_its_storage_opens(
    segment_name: str,
    hanging: Hanging,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    wait_until: Any,
) -> None:
    with Engine(segment_name, storage=f"disk:{tmp_path}?capacity=64MiB") as engine:
        assert hanging.asked.wait(30)
        wait_until(lambda: "open the storage: it has not answered" in caplog.text, "a warning")
        assert (engine.ask(PROMPT), engine.ask(PROMPT)) == (0, 48)
        opened = engine.scheduler._link.current
        assert opened.tier is None
        assert sorted(hanging.waits)[0] == scheduler.STORAGE
        hanging.there.set()
        wait_until(lambda: opened.tier is not None, "the storage")
        wait_until(lambda: "the storage is used now" in caplog.text, "a word of it")
        assert engine.ask(PROMPT) == 48
    assert hanging.closed.is_set()
    texts = warnings_of(caplog)
    assert len([text for text in texts if "open the storage" in text]) == 1
    Segment.unlink(segment_name)
    with Engine(segment_name, storage=f"disk:{tmp_path}?capacity=64MiB") as engine:
        wait_until(lambda: engine.scheduler._link.current.tier is not None, "the storage")
        assert engine.ask(PROMPT) == 48  # it has what was saved before it came, as it was used


def test_closing_does_not_wait_for_a_storage_that_opens(
    segment_name: str, hanging: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LEAVE", 0.0)
    with Engine(segment_name, storage=f"disk:{tmp_path}?capacity=64MiB") as engine:
        assert hanging.asked.wait(30)
        thread = engine.scheduler._link.current.storage._thread
    assert thread.is_alive()
    assert not hanging.closed.is_set()
    hanging.there.set()
    thread.join(30)
    assert not thread.is_alive()


def test_a_storage_is_not_waited_for_when_computing_is_faster(
    segment_name: str, tmp_path: Path
) -> None:
    url = f"disk:{tmp_path}?capacity=64MiB"
    with Engine(segment_name, storage=url, prefill_tokens_per_s=1e12) as engine:
        request = Request(PROMPT)
        engine.scheduler.begin(request)
        engine.scheduler.look(request, 0)
        assert engine.scheduler.look(request, 0) == (0, False)


def test_ranks_on_other_hosts_and_reasons_are_said_once(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    from dataclasses import replace

    with Engine(segment_name) as engine:
        hello = engine.workers[0].hello()
        for hellos, words in (
            ([hello, replace(hello, rank=1, host="elsewhere")], "other nodes"),
            ([replace(hello, place=None, why="windows")], "windows"),
        ):
            fresh = Engine.__new__(Engine)
            scheduler = type(engine.scheduler)(engine.scheduler.options, "x")
            scheduler.connect(hellos)
            fresh.scheduler = scheduler
            assert scheduler.look(Request(PROMPT), 0) == (0, False)
            assert len([text for text in warnings_of(caplog) if words in text]) == 1


def test_ranks_that_meet_the_same_trouble_say_it_once(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    form = {"page_bytes": 4096, "page_tokens": 8, "fingerprint": "of another model"}
    with Cache.create(segment_name, pages=4, **form), Engine(segment_name, ranks=2) as engine:
        assert engine.ask(PROMPT) == 0
        (said,) = warnings_of(caplog)
        assert "of another model" in said
        assert "another name" in said
        engine.workers[1].voice.trouble("load", ValueError("later"))
        assert len(warnings_of(caplog)) == 2
        engine.scheduler.close()  # its first link
        told = [
            replace(worker.hello(), troubles=(("OSError", "pin"),)) for worker in engine.workers
        ]
        engine.scheduler.connect(told)
        assert [text for text in warnings_of(caplog) if "pin" in text] == warnings_of(caplog)[2:]
        assert len(warnings_of(caplog)) == 3


def test_names_of_a_launch() -> None:
    assert launch_of("a_dp0") == launch_of("a_dp3") == launch_of("a")
    assert launch_of("a") != launch_of("b")
    assert team_of("a_dp0") != team_of("a_dp1")


# ---- What is worth saving


@pytest.mark.parametrize(
    ("params", "hint"),
    [
        (None, Hint.NONE),
        ({"do_remote_prefill": False}, Hint.NONE),
        ({"lightcache_hint": "ends"}, Hint.ENDS),
        ({"lightcache_hint": "tool_call"}, Hint.TOOL_CALL),
        ({"lightcache_hint": "continues"}, Hint.CONTINUES),
        ({"lightcache_hint": "none"}, None),
        ({"lightcache_hint": 3}, None),
        ({"lightcache_hint": ["ends"]}, None),
        ("ends", Hint.NONE),
    ],
)
def test_hints_of_requests(
    segment_name: str, caplog: pytest.LogCaptureFixture, params: Any, hint: Hint | None
) -> None:
    with Engine(segment_name) as engine:
        request = Request(PROMPT, kv_transfer_params=params)
        assert engine.scheduler._state(request).hint is (hint or Hint.NONE)
        assert bool(warnings_of(caplog)) is (hint is None)


def test_a_session_continues_unless_it_says_otherwise(segment_name: str) -> None:
    with Engine(segment_name) as engine:
        for params, session, hint in (
            (None, "a", Hint.CONTINUES),
            (None, "", Hint.NONE),
            ({"lightcache_hint": "ends"}, "a", Hint.ENDS),
        ):
            request = Request(PROMPT, kv_transfer_params=params, session_id=session)
            assert engine.scheduler._state(request).hint is hint


def test_the_ranks_are_told_the_hint(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def reserve(cache: Cache, *args: Any, usual: Any = Cache.reserve, **how: Any) -> Any:
        told.append(how["hint"])
        return usual(cache, *args, **how)

    monkeypatch.setattr(Cache, "reserve", reserve)
    with Engine(segment_name, ranks=2) as engine:
        engine.ask(PROMPT, kv_transfer_params={"lightcache_hint": "ends"})
        engine.ask([7, *PROMPT])
        assert told == [Hint.ENDS] * 2 + [Hint.NONE] * 2
        assert engine.ask(PROMPT) == 48


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_worth_saving_is_not_ordered(segment_name: str, ranks: int) -> None:
    size = PAGES * 512
    how: dict[str, Any] = {"eviction": "hz", "admission": True}
    with Engine(segment_name, ranks=ranks, size=size, **how) as engine:
        opened = engine.scheduler.usable()
        assert opened is not None
        occupied(opened.cache.index)
        engine.ask([7, *PROMPT])
        engine.ask([8, *PROMPT])
        figures = engine.scheduler.take_figures()
        assert (figures["offered_pages"], figures["not_worth_pages"]) == (0, 12)
        opened.cache.index.drop(prompt(0, PAGES_EACH))
        engine.ask(PROMPT)
        assert engine.ask(PROMPT) == 48


def test_all_is_saved_without_the_option_or_beside_a_storage(
    segment_name: str, tmp_path: Path
) -> None:
    storage = f"disk:{tmp_path}?capacity=1MiB"
    for options in ({}, {"admission": True, "storage": storage}):
        with Engine(segment_name, size=PAGES * 512, eviction="hz", **options) as engine:
            opened = engine.scheduler.usable()
            assert opened is not None
            occupied(opened.cache.index)
            engine.ask(PROMPT)
            assert engine.scheduler.take_figures()["offered_pages"] == 6
        Segment.unlink(segment_name)


def test_an_order_that_admission_does_nothing_with_is_said(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(segment_name, admission=True, eviction="lru") as engine:
        opened = engine.scheduler.usable()
        assert opened is not None
        assert opened.cache.index.eviction == "lru"
        engine.ask(PROMPT)
        assert engine.ask(PROMPT) == 48
    assert any('"lru", expected "hz"' in said for said in warnings_of(caplog))
