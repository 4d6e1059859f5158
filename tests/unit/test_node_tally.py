"""What connectors count for the node: as exactly as managers do, and no more when that fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial

import pytest
from support.keys import keys
from support.vllm_stand_in import BLOCK, Engine

from lightcache import Cache
from lightcache.connectors.node_tally import NodeTally
from lightcache.connectors.vllm.scheduler import open_cache
from lightcache.errors import LightcacheError
from lightcache.manager.stats import HISTOGRAMS, NodeCounters
from lightcache.shm import Segment
from lightcache.shm.names import counters_name

PROMPT = list(range(3, 53))  # 50 tokens: 6 pages of 8 tokens, and 2 tokens
SECRET = b"s" * 16


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, segment_name: str) -> Iterator[None]:
    """Each half of an engine is a client."""
    for half in ("scheduler", "worker"):
        of = partial(open_cache, shared=False)
        monkeypatch.setattr(f"lightcache.connectors.vllm.{half}.open_cache", of)
    yield
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


@pytest.mark.usefixtures("apart")
def test_an_engine_of_vllm_counts_for_the_node(segment_name: str) -> None:
    with Engine(segment_name) as engine, Cache.attach(segment_name, readonly=True) as reader:
        with NodeCounters.open(reader) as counters:
            assert engine.ask(PROMPT) == 0
            assert engine.ask(PROMPT) == 48
            assert engine.ask(PROMPT, device=5 * BLOCK) == 28
            assert engine.ask([1, 2, 3]) == 0
            engine.idle()
            found, histograms = counters.total(), counters.histograms()
    assert (found.requests, found.hit_requests, found.prompt_tokens) == (4, 2, 153)
    assert (found.device_tokens, found.host_tokens) == (20, 48 + 28)
    assert (found.missed_never_seen, found.missed_short) == (1, 1)
    assert found.loads == sum(histograms["load"].counts) == 2
    assert found.offloads == sum(histograms["offload"].counts) == 1
    assert (found.offloaded_pages, found.failed_loads, found.failed_offloads) == (6, 0, 0)
    assert found.loaded_bytes > 0
    assert sum(histograms["hit_share"].counts) == 4
    assert histograms["hit_share"].counts[0] == 2, "two found nothing"
    assert sum(histograms["plan"].counts) >= 3


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    how = {"pages": 4, "page_bytes": 4096, "fingerprint": "f", "secret": SECRET}
    with Cache.create(segment_name, **how, eviction="hz") as made:
        made.pool.prefault()
        yield made


def publish(cache: Cache, name: int) -> None:
    with cache.reserve(keys(name)) as new:
        new.publish()


def test_reasons(cache: Cache) -> None:
    with contextlib.closing(NodeTally(cache)) as tally:
        assert tally.missed(keys(), None) == "short"
        assert tally.missed(keys(1), None) == "never_seen"
        publish(cache, 1)
        assert tally.missed(keys(1), None) == "unused"
        cache.evict(4)
        assert tally.missed(keys(1), None) == "evicted"
        assert tally.missed(keys(2), None) == "never_seen"


def test_counters_that_fail_are_said_once(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(NodeTally(cache)) as tally, caplog.at_level(logging.WARNING):
        tally.request(10, host=5)
        Segment.unlink(counters_name(cache.name, cache.index.segment.uuid), force=True)
        for _ in range(3):
            tally.request(10, host=5)
    assert len(caplog.records) == 1


def test_the_sums_have_names_that_are_counted() -> None:
    assert len({each.total for each in HISTOGRAMS}) == len(HISTOGRAMS)
