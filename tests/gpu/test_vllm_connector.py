"""Both halves of the connector for vLLM, called in vLLM's order over tensors of a device in vLLM's
layouts: what is saved and loaded, preemption while copies run, SIGKILL under DMA."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu import vllm_case
from gpu.vllm_case import PAGES_OF_PROMPT, POOL, PROMPTS
from support.scripts import TESTS

from lightcache import Cache
from lightcache.connectors.vllm import worker
from lightcache.shm import Segment

torch = pytest.importorskip("torch")
device = pytest.importorskip("lightcache_bench._vllm_device")
from lightcache_bench._gpu_device import Gpu, find  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STAND_IN = True
"""Without a GPU, on the processor: see conftest.py."""
DEADLINE = 120.0
KILLS = 4


@pytest.fixture
def gpu() -> Gpu:
    return find()


@pytest.fixture
def make(gpu: Gpu, segment_name: str) -> Iterator[Callable[..., Any]]:
    """Makes engines on one cache; both go at the end."""
    with contextlib.ExitStack() as stack:
        stack.callback(Segment.unlink, segment_name, force=True)

        def made(*arguments: Any, **options: Any) -> Any:
            one = vllm_case.engine(gpu, segment_name, *arguments, **options)
            stack.callback(one.close)
            return one

        yield made


def save(engine: Any, stamp: int, pages: int = PAGES_OF_PROMPT, salt: str = "") -> None:
    """A whole request, whose blocks are overwritten once vLLM may."""
    request, orders = engine.compute(stamp, pages, salt)
    engine.stamp(request, stamp)
    engine.begin(orders)
    engine.until_saved()
    engine.stamp(request, 0)
    engine.end(request)


def load(engine: Any, stamp: int, pages: int = PAGES_OF_PROMPT, salt: str = "") -> int:
    """What is found of it, in pages; each byte is compared."""
    request, found, orders = engine.find(stamp, pages, salt)
    engine.stamp(request, 0)
    engine.begin(orders)
    if found:
        engine.until_loaded({request.request_id})
    engine.check(request, found, stamp)
    engine.end(request)
    return found // engine.format.place.page_tokens


def check(engine: Any) -> None:
    """Its cache is clean, and nothing is pinned."""
    with Cache.attach(engine.name, role="test") as cache:
        cache.reap()
        report = cache.check()
        assert report.clean, report.message
        assert report.pins == 0


@pytest.mark.parametrize("layout", device.LAYOUTS)
def test_what_one_engine_saved_another_loads(make: Callable[..., Any], layout: str) -> None:
    first, second = make(layout), make(layout)
    for stamp in range(1, PROMPTS + 1):
        save(first, stamp)
    assert [load(second, stamp) for stamp in range(1, PROMPTS + 1)] == [PAGES_OF_PROMPT] * PROMPTS
    assert load(second, PROMPTS + 1) == 0
    assert first.scheduler.figures["errors"] == first.worker.figures["errors"] == 0


def test_preempted_while_it_is_saved(make: Callable[..., Any]) -> None:
    """The step that overwrites the blocks waits for the copy, or gives it up: a page that is
    published has the old bytes."""
    engine = make()
    complete = 0
    for stamp in range(1, 40):
        salt = f"preempted {stamp}"
        request, orders = engine.compute(stamp, PAGES_OF_PROMPT, salt)
        engine.stamp(request, stamp)
        engine.begin(orders)
        engine.begin(engine.orders({}, preempted=[request.request_id]))
        engine.stamp(request, 0)  # the blocks are another request's by now
        engine.until_saved()
        engine.end(request)
        complete += load(engine, stamp, salt=salt) == PAGES_OF_PROMPT
    assert complete > 0
    check(engine)


def test_a_save_that_hangs_is_given_up(
    make: Callable[..., Any], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's stream stands still, so the copy cannot begin: the preemption does not wait for
    ever, and nothing of it is published, whatever the copy reads later."""
    if not gpu.cuda:
        pytest.skip("copies on the processor wait for no stream")
    from gpu.place import HostGate

    monkeypatch.setattr(worker, "SETTLE", 0.2)
    engine = make()
    save(engine, 1)
    request, orders = engine.compute(2, PAGES_OF_PROMPT)
    engine.stamp(request, 2)
    blocks = engine.indices(request.blocks)
    gate = HostGate(gpu.device)
    torch.cuda.current_stream().wait_event(gate.event)
    engine.begin(orders)
    begin = time.monotonic()
    engine.begin(engine.orders({}, preempted=[request.request_id]))
    took = time.monotonic() - begin
    engine.tensor.index_fill_(1, blocks, 0)
    gate.open()
    engine.until_saved()
    engine.end(request)
    assert engine.worker.figures["given_up_saves"] == 1, took
    assert load(engine, 2) == 0
    assert load(engine, 1) == PAGES_OF_PROMPT


def test_loads_and_saves_at_once(make: Callable[..., Any]) -> None:
    """Several in flight in one step, over the same pool that they evict from."""
    engine = make()
    for stamp in range(1, 60):
        request, orders = engine.compute(stamp, PAGES_OF_PROMPT)
        engine.stamp(request, stamp)
        reader, found, loads = engine.find(max(1, stamp - 1), PAGES_OF_PROMPT)
        engine.stamp(reader, 0)
        orders.loads += loads.loads
        engine.begin(orders)
        if found:
            engine.until_loaded({reader.request_id})
            engine.check(reader, found, max(1, stamp - 1))
        engine.until_saved()
        engine.end(request)
        engine.end(reader)
    check(engine)


@contextlib.contextmanager
def child(name: str, gpu: Gpu, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of vllm_side.py; it is gone afterwards."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(TESTS / "gpu" / "vllm_side.py"), name, gpu.device],
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
def test_killed_under_dma(make: Callable[..., Any], gpu: Gpu, tmp_path: Path) -> None:
    """An engine is killed in the midst of saves and loads: the other continues, every page it finds
    has the bytes of its prompt, and no pin of the dead one stays."""
    survivor = make()
    for kill in range(KILLS):
        log = tmp_path / f"{kill}.log"
        with child(survivor.name, gpu, log) as process:
            assert process.stdout is not None
            ready = select.select([process.stdout], [], [], DEADLINE)[0]
            assert ready, log.read_text()
            assert process.stdout.read(2) == b"0\n", log.read_text()
            save(survivor, 100 + kill)
            end = time.monotonic() + 0.05 * (kill + 1)  # another place in its loop each time
            while time.monotonic() < end:
                load(survivor, 100 + kill)
            process.kill()
            process.wait()
            last = int((process.stdout.read().split() or [0])[-1])
            found = [
                load(survivor, stamp, salt=str(turn))
                for turn in range(max(0, last - 6), last + 2)
                for stamp in range(1, PROMPTS + 1)
            ]
            assert any(found)
            if load(survivor, 100 + kill) != PAGES_OF_PROMPT:  # the dead one had it evicted
                save(survivor, 100 + kill)
                assert load(survivor, 100 + kill) == PAGES_OF_PROMPT
    for stamp in range(1, 2 * POOL // PAGES_OF_PROMPT):  # takes every page that the dead ones held
        save(survivor, stamp, salt="after")
        assert load(survivor, stamp, salt="after") == PAGES_OF_PROMPT
    check(survivor)
