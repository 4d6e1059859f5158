"""Engines that use a storage through the storage service of their cache."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.serving import Served, serving
from support.sglang_stand_in import Engine as SglangEngine
from support.sglang_stand_in import hashes_of
from support.storing import make_cache
from support.vllm_stand_in import Engine, Request

from lightcache import Cache
from lightcache.connectors.lightllm import Options as LightLlmOptions
from lightcache.connectors.sglang.rank import Options as SglangOptions
from lightcache.connectors.vllm import scheduler
from lightcache.connectors.vllm.options import Options
from lightcache.connectors.vllm.scheduler import open_cache
from lightcache.errors import ConfigError, LightcacheError
from lightcache.manager.state import storage_of
from lightcache.shm import Segment, sweep
from lightcache.storage import open_storage
from lightcache.storage.service import StorageClient
from lightcache.storage.service.board import service_stats

PROMPT = list(range(3, 53))  # 6 pages of 8 tokens, and 2 tokens
OTHER = list(range(103, 153))
SERVICE = {"storage": "service:"}
PATIENT: dict[str, Any] = {**SERVICE, "prefill_tokens_per_s": 1}  # it waits for reads
Wait = Callable[[Callable[[], bool], str], None]


@pytest.fixture(autouse=True)
def engines_apart(monkeypatch: pytest.MonkeyPatch, segment_name: str) -> Iterator[None]:
    """Engines are processes of their own: here each half is a client. Caches outlive them."""
    for half in ("scheduler", "worker"):
        apart = partial(open_cache, shared=False)
        monkeypatch.setattr(f"lightcache.connectors.vllm.{half}.open_cache", apart)
    monkeypatch.setattr(scheduler, "STORAGE", scheduler.START)  # other work may hold it up
    monkeypatch.setattr(scheduler, "MOST_WAIT", 60.0)
    yield
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)
    sweep(prefix=f"{segment_name}.storage-")  # of services that were killed


def stored(name: str) -> int:
    """Pages, by all services of the cache."""
    return service_stats(name).tier.stored


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def from_storage(engine: Engine, tokens: list[int]) -> int:
    """Serve a prompt of which the host has nothing; the tokens that were read, and are right."""
    request = Request(tokens)
    found = engine.admit(request)
    assert engine.scheduler.sources(request, found) == (0, found)
    engine.compute(request)
    engine.end(request)
    return found


# ---- What may be written.


KINDS: list[Any] = [Options, SglangOptions, LightLlmOptions]


@pytest.mark.parametrize("kind", KINDS)
def test_the_option(kind: Any) -> None:
    assert kind.of(SERVICE).storage == kind.of({"storage": ["service:"]}).storage == ("service:",)
    for wrong in (
        "service:llama",
        ["service:", "memory:"],
        ["memory:", "service:"],
        "stack:service:|memory:",
        "flaky:seed=1:service:",
    ):
        refused(ConfigError, "expected 'service:' alone.*--url", kind.of, {"storage": wrong})
    fast = {**SERVICE, "prefill_tokens_per_s": 1e4}
    if kind is Options:
        assert kind.of(fast).prefill_tokens_per_s == 1e4
    else:
        refused(ConfigError, "prefill_tokens_per_s.*--prefill-tokens-per-s N", kind.of, fast)


def test_it_is_no_storage_of_its_own() -> None:
    with pytest.raises(ConfigError, match="the storage service of the cache"):
        open_storage("service:", page_bytes=4096)


def test_a_manager_takes_it_as_well(segment_name: str) -> None:
    with make_cache(segment_name) as cache:
        tier = storage_of(cache, "service:")
        assert isinstance(tier, StorageClient)
        tier.close()


# ---- Through a service of this process.


def test_vllm_before_with_and_after_a_service(
    segment_name: str, caplog: pytest.LogCaptureFixture, wait_until: Wait
) -> None:
    """Each is said once, and the cache's memory is used as ever."""
    with Engine(segment_name, **PATIENT) as engine, Cache.attach(segment_name) as cache:
        assert (engine.ask(PROMPT), engine.ask(PROMPT)) == (0, 48)
        (said,) = warnings_of(caplog)
        assert f"`lightcache storage {segment_name} --url" in said
        with serving(segment_name):
            assert engine.ask(PROMPT) == 48  # what memory has is stored now
            wait_until(lambda: stored(segment_name) == 6, "the pages")
            cache.evict(cache.pages)
            assert from_storage(engine, PROMPT) == 48
        caplog.clear()
        cache.evict(cache.pages)
        assert (engine.ask(PROMPT), engine.ask(PROMPT)) == (0, 48)
        assert len(warnings_of(caplog)) == 1


def test_sglang_by_a_linker(segment_name: str, wait_until: Wait) -> None:
    hashes = hashes_of(PROMPT)
    with SglangEngine(segment_name, ranks=2, **SERVICE) as engine, serving(segment_name):
        engine.ask(PROMPT)
        wait_until(lambda: stored(segment_name) == len(hashes), "the pages")
        with Cache.attach(segment_name) as cache:
            cache.evict(cache.pages)
        assert engine.lookup("r", hashes) == 0
        read = engine.ranks[0]._misses["r"].read
        assert read is not None
        read.wait(60)
        assert engine.lookup("r", hashes) == len(hashes)
        assert engine.load("r", PROMPT, hashes)


# ---- Through a process.


def serve(served: Callable[..., Served], name: str, url: str) -> Served:
    service = served(name, "--url", url)
    assert service.begun.startswith("serving")
    return service


@pytest.mark.slow
def test_another_engine_reads_what_the_service_wrote(
    segment_name: str, served: Callable[..., Served], tmp_path: Path, wait_until: Wait
) -> None:
    """The cache is gone meanwhile, and its service with it."""
    disk = f"disk:{tmp_path}?capacity=64MiB"
    with Engine(segment_name, **PATIENT) as engine:
        first = serve(served, segment_name, disk)
        assert engine.ask(PROMPT) == 0
        wait_until(lambda: stored(segment_name) == 6, "the pages")
    Segment.unlink(segment_name, force=True)
    first.process.wait(60)
    with Engine(segment_name, "another", **PATIENT) as engine:
        second = serve(served, segment_name, disk)
        assert from_storage(engine, PROMPT) == 48
        assert second.end()[0] == 0


@pytest.mark.slow
def test_a_service_that_is_killed_is_not_in_the_way(
    segment_name: str,
    served: Callable[..., Served],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    wait_until: Wait,
) -> None:
    """A request waits for a read of it; later ones find that it is gone, and then the next one."""
    with Engine(segment_name, **PATIENT) as engine:
        first = serve(served, segment_name, "flaky:hang=1:memory:")
        request = Request(PROMPT)
        engine.scheduler.begin(request)
        assert engine.scheduler.look(request, 0) == (None, False)  # it waits
        read = engine.scheduler._requests[request.request_id].read
        assert read is not None
        wait_until(lambda: service_stats(segment_name).tier.running == 1, "the read")
        first.process.kill()
        assert engine.look(request) == 0
        assert "is gone" in read.result.reasons[0]
        engine.scheduler.finish(request)
        caplog.clear()
        assert (engine.ask(PROMPT), engine.ask(PROMPT), engine.ask(OTHER)) == (0, 48, 0)
        assert len(warnings_of(caplog)) == 1
        second = serve(served, segment_name, f"disk:{tmp_path}?capacity=64MiB")
        engine.ask(PROMPT)
        wait_until(lambda: stored(segment_name) == 6, "the pages")
        assert second.end()[0] == 0
    with Cache.attach(segment_name) as cache:
        report = cache.check()
        report.raise_if_broken()
        assert report.pins == 0
