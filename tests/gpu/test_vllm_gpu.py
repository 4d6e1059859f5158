"""The halves of the connector for vLLM over tensors of a GPU, called in vLLM's order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest
from support.vllm_stand_in import BLOCK, Engine, Request

from lightcache import Cache
from lightcache.connectors.vllm.scheduler import open_cache
from lightcache.errors import LightcacheError
from lightcache.shm import Segment

pytestmark = pytest.mark.gpu
PROMPT = list(range(3, 53))


@pytest.fixture(autouse=True)
def engines_apart(monkeypatch: pytest.MonkeyPatch, segment_name: str) -> Iterator[None]:
    for half in ("scheduler", "worker"):
        apart = partial(open_cache, shared=False)
        monkeypatch.setattr(f"lightcache.connectors.vllm.{half}.open_cache", apart)
    yield
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 2), (4, 1)])
def test_engines_find_each_others_pages(segment_name: str, writers: int, readers: int) -> None:
    with Engine(segment_name, "a", writers, "cuda:0") as first:
        assert first.ask(PROMPT) == 0
        with Engine(segment_name, "b", readers, "cuda:0") as second:
            assert second.ask(PROMPT) == 48
            assert second.ask(PROMPT, device=5 * BLOCK) == 48 - 20
    with Cache.attach(segment_name) as cache:
        report = cache.check()
        report.raise_if_broken()
        assert (report.ready, report.pins) == (6, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_windows(segment_name: str, ranks: int) -> None:
    """Blocks that a window gives up are overwritten at once."""
    how = {"device": "cuda:0", "windows": (10, 8)}
    with (
        Engine(segment_name, "a", ranks, **how) as first,
        Engine(segment_name, "b", **how) as other,
    ):
        for turn in range(10):
            request = Request([turn, *PROMPT])
            first.admit(request)
            for end in (16, 30, 41, 51):
                first.compute(request, end)
            first.end(request)
            first.idle()
            assert other.ask([turn, *PROMPT]) == 48
    with Cache.attach(segment_name) as cache:
        report = cache.check()
        report.raise_if_broken()
        assert report.pins == 0


def test_a_preemption_while_a_save_runs(segment_name: str) -> None:
    with Engine(segment_name, device="cuda:0") as engine:
        for turn in range(10):
            victim, other = Request([turn, *PROMPT]), Request([turn, *range(200, 220)])
            engine.admit(victim)
            engine.compute(victim)
            engine.admit(other)
            engine.compute(other, preempted=(victim,))
            for tensors in engine.tensors[0].values():
                tensors[engine.tables[victim.request_id][0]] = 99  # others' by now
            engine.end(victim)
            engine.end(other)
            engine.idle()
            engine.ask([turn, *PROMPT])
            assert engine.ask([turn, *PROMPT]) == 48
