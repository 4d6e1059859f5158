"""A worker of the demo in this process, with a model of milliseconds, and the router beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.demo_desk import WORKLOAD, Desk, settings_of  # noqa: E402
from support.hybrid_models import LINEAR  # noqa: E402
from support.tiny_models import SIZES  # noqa: E402

from lightcache.tools.demo import models  # noqa: E402
from lightcache.tools.demo.generate import compare  # noqa: E402
from lightcache.tools.demo.messages import Mailbox, Request  # noqa: E402
from lightcache.tools.demo.models import ModelChoice  # noqa: E402
from lightcache.tools.demo.worker import Worker  # noqa: E402

pytestmark = pytest.mark.models

_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the demo know a model "tiny"."""
    tiny = {name: SIZES[name] for name in (*_SHAPE, "num_key_value_heads")}
    made_up = {"vocab_size": 128, "head_dim": 8}
    monkeypatch.setattr(models, "SIZES", {**models.SIZES, "tiny": {**tiny, **made_up}})


def tiny_hybrid(monkeypatch: pytest.MonkeyPatch) -> ModelChoice:
    """A hybrid model of milliseconds."""
    tiny = {name: SIZES[name] for name in (*_SHAPE, "num_key_value_heads")}
    form = {**tiny, **LINEAR, "vocab_size": 128}
    monkeypatch.setattr(models, "SIZES", {**models.SIZES, models.HYBRID: form})
    return ModelChoice(size=models.HYBRID)


@pytest.mark.parametrize(
    ("changes", "tiers"),
    [
        ({}, {"host"}),
        ({"kept": 2}, {"host", "device"}),
        ({"kept": 3, "routing": "prefix"}, {"host", "device"}),
        ({"pool": "private"}, {"host"}),
        ({"pool": "none"}, {"host"}),
    ],
)
def test_turns_of_two_workers(
    segment_name: str,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    tiers: set[str],
) -> None:
    """Every answer is that of a model without a cache, and no turn leaves anything behind."""
    tiny_model(monkeypatch)
    workload = {**WORKLOAD, "turns": 4, "vocabulary": 128}
    settings = settings_of(
        segment_name, model=ModelChoice(size="tiny"), workload=workload, size=4 << 20, **changes
    )
    with ExitStack() as stack:
        desk = Desk(settings, stack)
        workers: list[tuple[Any, Mailbox]] = []
        for number in (0, 1):
            inbox = stack.enter_context(Mailbox(settings.worker_ring(number, 0)))
            worker = Worker(settings, number, 0, desk.report, stack)
            workers.append((worker, inbox))
            desk.tell(worker.hello())
        desk.router.route(desk.router.workload.begin())
        while desk.router.answered < desk.router.workload.total:
            desk.dispatch()
            for worker, inbox in workers:
                request = inbox.receive(0)
                if request is not None:
                    desk.tell(worker.serve(request))
        desk.collect()
        assert len(desk.served) == 8
        model = workers[0][0].model
        for turn in desk.served:
            equal, difference = compare(model, turn.prompt, turn.tokens, turn.logprobs)
            assert equal
            assert difference < 1e-4
            assert turn.baseline_s is not None
            if settings.pool == "shared":
                assert turn.turn == 0 or sum(turn.reused.values()) >= 16
            assert turn.reused.keys() <= tiers
        assert {tier for turn in desk.served for tier in turn.reused} == tiers
        assert (settings.pool == "none") == (not any(turn.stored_bytes for turn in desk.served))
        for worker, _ in workers:
            if worker.cache is not None:
                report, stats = worker.cache.check(), worker.cache.stats()
                assert report.clean, report.message
                assert (report.pins, stats.writing) == (0, 0)


def test_some_from_the_device_and_some_from_the_host(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that comes back goes on in its seat, behind what another worker computed."""
    tiny_model(monkeypatch)
    settings = settings_of(segment_name, model=ModelChoice(size="tiny"), size=4 << 20, kept=1)
    with ExitStack() as stack:
        report = stack.enter_context(Mailbox(settings.report_ring))
        one, other = (Worker(settings, number, 0, report, stack) for number in (0, 1))
        tokens, found = np.arange(20, dtype=np.int32), []
        for number, worker in enumerate((one, other, one, one)):
            asked = Request(number, 6, 0.0, True, False, False, tokens=tokens)
            found.append(worker.serve(asked))
            equal, difference = compare(
                one.model,
                len(tokens),
                np.concatenate([tokens, found[-1].tokens]),
                found[-1].logprobs,
            )
            assert equal
            assert difference < 1e-4
            tokens = np.concatenate([tokens, found[-1].tokens, tokens[:8]])
        assert [each.reused for each in found] == [
            {"host": 0},
            {"host": 24},
            {"host": 12, "device": 24},
            {"host": 0, "device": 52},
        ]
        page_bytes = one.cache.page_bytes
        assert [each.loaded_bytes // page_bytes for each in found] == [0, 6, 3, 0]
        assert [each.stored_bytes // page_bytes for each in found] == [6, 3, 4, 3]
        index = one.manager.device.index
        assert index.stats().ready == len(one.seats._left[0].tokens) // 4
        past = one.serve(Request(9, 2, 0.0, True, False, False, tokens=tokens[::-1].copy()))
        assert past.reused == {"host": 0}
        assert index.stats().ready == len(tokens) // 4, "the other one has left its blocks"


def test_a_hybrid_model(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one worker left, keys, values and states, is found by the other."""
    settings = settings_of(segment_name, model=tiny_hybrid(monkeypatch), size=8 << 20)
    with ExitStack() as stack:
        report = stack.enter_context(Mailbox(settings.report_ring))
        one, other = (Worker(settings, number, 0, report, stack) for number in (0, 1))
        tokens, found = np.arange(150, dtype=np.int32) % 128, []
        for number, worker in enumerate((one, other, one)):
            asked = Request(number, 6, 0.0, True, False, False, tokens=tokens)
            found.append(worker.serve(asked))
            whole = np.concatenate([tokens, found[-1].tokens])
            equal, difference = compare(one.model, len(tokens), whole, found[-1].logprobs)
            assert equal
            assert difference < 1e-4
            tokens = np.concatenate([whole, tokens[:60]])
        assert [each.reused["host"] for each in found] == [0, 128, 192]
        page = one.cache.page_bytes * settings.page_tokens
        pages = [settings.page_tokens * each.stored_bytes // page for each in found]
        assert pages == [155 // 4, 221 // 4 - 155 // 4, 287 // 4 - 221 // 4]
        held: list[int] = []
        monkeypatch.setattr(
            one, "_hold", lambda _, new, past: held.extend((len(new.new), past.held))
        )
        one.serve(Request(3, 2, 0.0, True, False, True, tokens=tokens[::-1].copy()))
        assert held == [(len(tokens) + 1) // 4, len(tokens) + 1]
        for cache in (one.hybrid.caches.kv, one.hybrid.caches.states):
            assert cache.check().clean
            assert (cache.check().pins, cache.stats().writing) == (0, 0)


@pytest.mark.parametrize(("url", "pages"), [("memory:", 4), ("flaky:read_fail=1:memory:", 0)])
def test_what_the_host_has_evicted_comes_from_storage(
    segment_name: str,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[[Callable[[], bool], str], None],
    url: str,
    pages: int,
) -> None:
    """And from a storage that fails nothing does: then it is computed."""
    tiny_model(monkeypatch)
    settings = settings_of(segment_name, model=ModelChoice(size="tiny"), size=4 << 20, storage=url)
    with ExitStack() as stack:
        report = stack.enter_context(Mailbox(settings.report_ring))
        worker = Worker(settings, 0, 0, report, stack)
        tier: Any = worker.storage
        tokens, found = np.arange(20, dtype=np.int32), []
        for number in (0, 1):
            found.append(worker.serve(Request(number, 2, 0.0, True, False, False, tokens=tokens)))
            wait_until(lambda: not tier.stats().running + tier.stats().queued, "it is written")
            worker.cache.evict(worker.cache.pages)
        assert found[1].tokens.tolist() == found[0].tokens.tolist()
        answers = np.concatenate([tokens, found[1].tokens])
        equal, difference = compare(worker.model, len(tokens), answers, found[1].logprobs)
        assert equal
        assert difference < 1e-4
        loaded = {"storage": pages * settings.page_tokens} if pages else {}
        assert found[1].reused == {"host": 0, **loaded}
        assert (tier.stats().loaded, tier.stats().failed) == (pages, 4 - pages)


def settled(worker: Worker, wait_until: Callable[[Callable[[], bool], str], None]) -> None:
    """What it writes is written."""
    assert worker.hybrid is not None
    stored: Any = worker.hybrid._stored
    for tier in (stored._kv_tier, stored._states_tier):
        wait_until(lambda: not tier.stats().running + tier.stats().queued, "it is written")  # noqa: B023


def test_a_hybrid_model_behind_a_restart(
    segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values come back, and the states with them, up to a state and no further."""
    settings = settings_of(
        segment_name,
        model=tiny_hybrid(monkeypatch),
        size=8 << 20,
        storage=f"disk:{tmp_path}?capacity=8MiB",
    )
    tokens, found = np.arange(150, dtype=np.int32) % 128, []
    for number in range(2):
        with ExitStack() as stack:
            report = stack.enter_context(Mailbox(settings.report_ring))
            worker = Worker(settings, 0, number, report, stack)
            asked = Request(number, 6, 0.0, True, False, False, tokens=tokens)
            found.append(worker.serve(asked))
            whole = np.concatenate([tokens, found[-1].tokens])
            equal, difference = compare(worker.model, len(tokens), whole, found[-1].logprobs)
            assert equal
            assert difference < 1e-4
            tokens = np.concatenate([whole, tokens[:60]])
    assert [each.reused for each in found] == [{"host": 0}, {"host": 0, "storage": 128}]


@pytest.mark.parametrize(("states", "kv"), [(True, True), (True, False), (False, True)])
def test_what_the_host_of_a_hybrid_model_has_evicted(
    segment_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[[Callable[[], bool], str], None],
    states: bool,
    kv: bool,
) -> None:
    """Of either cache, or of both."""
    settings = settings_of(
        segment_name,
        model=tiny_hybrid(monkeypatch),
        size=8 << 20,
        storage=f"disk:{tmp_path}?capacity=8MiB",
    )
    with ExitStack() as stack:
        report = stack.enter_context(Mailbox(settings.report_ring))
        worker = Worker(settings, 0, 0, report, stack)
        assert worker.hybrid is not None
        tokens, found = np.arange(150, dtype=np.int32) % 128, []
        for number in range(2):
            found.append(worker.serve(Request(number, 2, 0.0, True, False, False, tokens=tokens)))
            settled(worker, wait_until)
            for evict, cache in (
                (states, worker.hybrid.caches.states),
                (kv, worker.hybrid.caches.kv),
            ):
                if evict:
                    assert cache is not None
                    cache.evict(cache.pages)
        assert found[1].tokens.tolist() == found[0].tokens.tolist()
        assert sum(found[1].reused.values()) == 128
        assert found[1].reused.get("storage", 0) == (128 if kv else 0)


def test_a_hybrid_models_keys_and_values_that_storage_has_not(
    segment_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[[Callable[[], bool], str], None],
) -> None:
    """A state that is deeper than they reach is of no use: the one before it is."""
    settings = settings_of(
        segment_name,
        model=tiny_hybrid(monkeypatch),
        size=8 << 20,
        storage=f"disk:{tmp_path}?capacity=8MiB",
    )
    with ExitStack() as stack:
        report = stack.enter_context(Mailbox(settings.report_ring))
        worker = Worker(settings, 0, 0, report, stack)
        assert worker.hybrid is not None
        stored, caches = worker.hybrid._stored, worker.hybrid.caches
        assert stored is not None
        every = np.arange(150, dtype=np.int32) % 128
        for number, tokens in enumerate((every[:100], every)):
            worker.serve(Request(number, 2, 0.0, True, False, False, tokens=tokens))
            settled(worker, wait_until)
        for cache in (caches.states, caches.kv):
            assert cache is not None
            cache.evict(cache.pages)
        keys = caches.kv.hash_pages(every)
        backend = stored._kv_tier.storage
        assert backend.delete(keys[64 // settings.page_tokens :], timeout=60.0)
        found = worker.serve(Request(2, 2, 0.0, True, False, False, tokens=every))
        assert found.reused == {"host": 0, "storage": 64}
        whole = np.concatenate([every, found.tokens])
        assert compare(worker.model, len(every), whole, found.logprobs)[0]
