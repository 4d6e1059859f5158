"""The transfer benchmark's windows, and the parts for a device, on a device that is none."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.plain_engine import PlainEngine
from support.refusals import refused

from lightcache import WaitTimeout
from lightcache_bench import (
    Row,
    _gpu_alternatives,
    _gpu_beside,
    _gpu_device,
    _gpu_rates,
    _gpu_shapes,
    _gpu_steps,
    _gpu_window,
)
from lightcache_bench._gpu_rig import Bench, Sizes

torch = pytest.importorskip("torch")
# ---- windows


class Clock:
    """Time that passes when somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


class Slow:
    """A transfer that is over after a few looks, in its turn."""

    def __init__(self, log: list[str], looks: int = 3) -> None:
        self.log, self.looks = log, looks

    def done(self) -> bool:
        self.looks -= 1
        if self.looks == 0:
            self.log.append("done")
        return self.looks <= 0

    def wait(self, timeout: float | None = None) -> None:
        self.log.append("waited for")


def test_feed() -> None:
    log: list[str] = []
    started: list[int] = []

    def submit(i: int) -> Any:
        started.append(i)
        return Slow(log)

    feed = _gpu_window.Feed(submit, 5_000_000, depth=2, clock=Clock())
    feed.start()
    assert len(feed.ends) == 2
    assert started == [0, 1, 2, 3]  # two under way whatever is over
    for _ in range(30):
        feed.top_up()
    assert len(started) == len(feed.ends) + 2
    # One every millisecond of this clock, however many there were before and after.
    assert feed.rate(feed.ends[2], feed.ends[-2]) == pytest.approx(5.0)
    assert np.isnan(feed.rate(feed.ends[0], feed.ends[1]))
    feed.drain()
    assert log[-2:] == ["waited for"] * 2


class FakeDevice:
    """A stream that does what was queued, one thing at each look. The first steps after a pause
    are slow."""

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.time, self.last_ready, self.launched = 0.0, 0, 0

    def launch(self) -> None:
        self.queue.append(9.0 if self.launched < _gpu_window._LEAD else 2.5)
        self.launched += 1
        self.last_ready = max(
            self.last_ready, sum(isinstance(entry, float) for entry in self.queue)
        )

    def advance(self) -> None:
        if self.queue:
            entry = self.queue.popleft()
            if isinstance(entry, float):
                self.time += entry
            else:
                entry.at = self.time

    def synchronize(self) -> None:
        while self.queue:
            self.advance()
        self.launched = 0

    def event(self) -> Any:
        return Mark(self)

    @property
    def stream(self) -> FakeDevice:
        return self


class Mark:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at: float | None = None

    def record(self, stream: FakeDevice) -> None:
        stream.queue.append(self)

    def query(self) -> bool:
        self.device.advance()
        return self.at is not None

    def elapsed_time(self, other: Mark) -> float:
        assert self.at is not None
        assert other.at is not None
        return other.at - self.at


def test_window() -> None:
    device: Any = FakeDevice()
    log: list[str] = []
    feed = _gpu_window.Feed(lambda i: Slow(log), 1000)
    found = _gpu_window.windows(device, device, {"alone": None, "beside": feed}, 2, 20)
    assert {name: len(each) for name, each in found.items()} == {"alone": 2, "beside": 2}
    for window in itertools.chain.from_iterable(found.values()):
        assert window.steps.tolist() == [2.5] * 20
    assert device.time == 2 * (2.5 * (2 * 20 + 2) + 9.0 * 3 * _gpu_window._LEAD)
    assert 1 < device.last_ready <= _gpu_window._AHEAD
    assert all(np.isnan(window.rate) for window in found["alone"])
    assert all(window.rate > 0 for window in found["beside"])
    assert log.count("waited for") == 3 * 3  # no window leaves transfers to the next


def test_window_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_window, "TIMEOUT", 0.0)
    device: Any = FakeDevice()
    refused(WaitTimeout, "5 steps", _gpu_window.window, device, device, 2, None)


# ---- the parts that need a device, with one that is none


class Instant:
    """An event of a device that has done everything already."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: Any) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Instant) -> float:
        return (other.at - self.at) * 1e3


class SmallProduct(_gpu_steps.Product):
    def __init__(self, gpu: Any) -> None:
        super().__init__(gpu, size=64)


class SmallDecode(_gpu_steps.Decode):
    LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, DIM = 2, 32, 64, 4, 2, 8
    BATCH, CONTEXT = 2, 16


class Graph:
    """A CUDA graph that only counts."""

    replays = 0

    def replay(self) -> None:
        type(self).replays += 1


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch, plain_engine: type[PlainEngine]) -> Iterator[Bench]:
    """Work and transfers of the real parts, small, on the processor."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(_gpu_device.Gpu, "event", lambda self: Instant())
    monkeypatch.setattr(_gpu_beside, "Product", SmallProduct)
    monkeypatch.setattr(_gpu_beside, "Decode", SmallDecode)
    tiny = _gpu_shapes.attention("pages", 2, 8, 64, batch=2, target=None)
    monkeypatch.setattr(_gpu_beside, "LARGE", tiny)
    sizes = Sizes(16 << 20, 64 << 20, 32 << 20, rounds=1)
    with contextlib.closing(Bench(_gpu_device.Gpu("cpu"), True, sizes)) as made:
        yield made


@pytest.mark.slow
def test_beside_product(as_device: Bench) -> None:
    rows = {row.name: row for row in _gpu_beside.beside_product(as_device)}
    assert len(rows) == 8
    for name in ("offload", "load"):
        product, kept = rows[f"product beside {name}"], rows[f"{name} beside product"]
        assert (product.unit, product.target, kept.target) == ("ms", "<= 1.01", ">= 0.90")
        assert product.met is not None
        assert kept.met is not None
        assert rows[f"product beside copy engine, {name}"].target is None


@pytest.mark.slow
def test_beside_decode(as_device: Bench) -> None:
    rows = {row.name: row for row in _gpu_beside.beside_decode(as_device)}
    assert Graph.replays > 0
    assert len(rows) == 12
    targets = {row.name: row.target for row in rows.values() if row.target}
    assert targets == {
        "decode p99 beside offload": "<= 1.05",
        "decode p99 beside offload limited to 25 GB/s": "<= 1.02",
        "decode p99 beside load": "<= 1.05",
        "decode p99 beside load limited to 25 GB/s": "<= 1.02",
    }


def test_figures_beside() -> None:
    alone = [_gpu_window.Window(np.full(100, 4.0), float("nan"))] * 3
    slower = [_gpu_window.Window(np.r_[np.full(98, 4.0), 4.4, 4.4], rate) for rate in (45, 50, 48)]
    found = {"alone": alone, "offload": slower}
    product, kept = _gpu_beside.product_rows("offload", found, np.asarray([60.0, 50, 50]), True)
    assert product.value == pytest.approx(4.008 / _gpu_steps.Product.EACH)
    assert (product.ratio, product.met) == (pytest.approx(1.002), True)
    assert (kept.value, kept.ratio, kept.met) == (48, 0.96, True)
    p50, p99 = _gpu_beside.decode_rows("offload", found, "<= 1.05")
    assert (p50.ratio, p50.target, p50.params["gbs"]) == (1.0, None, 48)
    assert (p99.ratio, p99.met) == (pytest.approx(1.1), False)


def test_decode_reads_everything() -> None:
    """A step whose output did not depend on a weight would not have to read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
        step = SmallDecode(_gpu_device.Gpu("cpu"))
    before = step._step()
    assert before.shape == (SmallDecode.BATCH, SmallDecode.HIDDEN)
    assert torch.isfinite(before).all()
    for layer in step._layers:
        for name, weight in layer.items():
            if name == "qkv":
                continue  # of which the first columns count
            saved = weight.clone()
            weight.mul_(3.0)
            assert not torch.equal(step._step(), before), name
            weight.copy_(saved)


@pytest.mark.slow
def test_alternatives(as_device: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_alternatives, "PROGRAMS", (8,))
    monkeypatch.setattr(_gpu_rates, "LARGE", _gpu_beside.LARGE)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    kernel = _gpu_alternatives._kernel_alone
    monkeypatch.setattr(_gpu_alternatives, "_kernel_alone", _with_small_pages(kernel))
    rows = list(_gpu_alternatives.alternatives(as_device))
    failed = [row for row in rows if "failed" in row.params]
    assert [row.name for row in failed] == [
        "one batched driver call, 128 KiB chunks",
        "one batched driver call, whole pages",
    ]
    assert all("install it" in row.params["failed"] for row in failed)
    measured = [row.name for row in rows if row not in failed]
    assert measured[:4] == [
        "offload, one copy call a 128 KiB chunk",
        "load, one copy call a 128 KiB chunk",
        "offload, index_select and a copy",
        "load, index_select and a copy",
    ]
    assert measured[4:] == [
        "offload, kernel alone, 8 programs",
        "load, kernel alone, 8 programs",
        "product beside offload, kernel alone, 8 programs",
        "offload, kernel alone, 8 programs beside product",
        "product beside load, kernel alone, 8 programs",
        "load, kernel alone, 8 programs beside product",
        "decode p50 beside offload, kernel alone, 8 programs",
        "decode p99 beside offload, kernel alone, 8 programs",
        "decode p50 beside load, kernel alone, 8 programs",
        "decode p99 beside load, kernel alone, 8 programs",
    ]


def _with_small_pages(part: Any) -> Any:
    def run(*arguments: Any) -> Iterator[Row]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_gpu_alternatives, "LARGE", _gpu_beside.LARGE)
            yield from part(*arguments)

    return run
