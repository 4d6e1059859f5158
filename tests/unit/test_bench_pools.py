"""The transfer benchmark's pools: how soon they are pinned, what other processes do with them."""

from __future__ import annotations

from typing import Any

import pytest

from lightcache import TransferFailed
from lightcache.shm import memory
from lightcache.shm.listing import read_segment
from lightcache_bench import _gpu_device, _gpu_many, _gpu_pinning
from lightcache_bench._gpu_pinning import Times
from lightcache_bench._gpu_rig import Bench, Sizes

torch = pytest.importorskip("torch")


@pytest.fixture
def bench() -> Any:
    made = Bench(_gpu_device.Gpu("cpu"), False, Sizes(1 << 20, 2 << 20, 2 << 20, rounds=1))
    yield made
    made.close()


def test_pinning(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured the second time counts, and sizes without room are left out."""
    runs = iter([Times(5.0, 9.0), Times(0.5, 2.0)])
    monkeypatch.setattr(_gpu_pinning, "in_background", lambda gpu, nbytes: next(runs))
    monkeypatch.setattr(_gpu_pinning, "one_after_the_other", lambda gpu, nbytes: Times(4.0, 4.0))
    monkeypatch.setattr(_gpu_pinning, "several", lambda gpu, count, nbytes: iter(()))
    monkeypatch.setattr(memory, "available", lambda: memory.FreeMemory(5 << 30, "left"))
    first, whole, skipped = _gpu_pinning.pinning(bench)
    assert (first.value, first.ratio, first.met) == (0.5, 0.125, True)
    assert first.params["first_run_s"] == 5.0
    assert (whole.value, whole.ratio) == (pytest.approx((4 << 30) / 2e9), 2.0)
    assert (skipped.name, skipped.params) == ("pool of 32 GiB", {"skipped": "5 GiB left"})


def test_pinned_in_background(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Pages:
        def wait(self, pages: Any = None, timeout: Any = None) -> None:
            waited.append(pages)

    monkeypatch.setattr(_gpu_pinning, "pin_pool", lambda gpu, cache: Pages())
    times = _gpu_pinning.in_background(bench.gpu, 16 << 20)
    assert waited == [[0], None]
    assert 0 < times.first <= times.whole


@pytest.mark.slow
def test_several_processes_register() -> None:
    rows = list(_gpu_pinning.several(_gpu_device.Gpu("cpu"), 2, 64 << 20))
    assert [row.name.rpartition(", ")[2] for row in rows] == list(_gpu_pinning.WAYS)
    assert rows[0].ratio == 1
    assert [row.params["gib_of_each"] for row in rows] == [0.06, 0.03]


def test_a_pool_goes_with_an_error() -> None:
    """An error while views of the pool live is told as it is, and the pool is gone."""

    def fails(array: Any) -> None:
        raise TransferFailed("refused")

    with pytest.raises(TransferFailed, match="refused"), _gpu_pinning.new_cache(16 << 20) as cache:
        fails(cache.pool.array)
    assert read_segment(cache.name) is None


@pytest.mark.slow
def test_several_devices() -> None:
    pytest.importorskip("lightcache.kernels.host_engine")
    sizes = Sizes(128 << 20, 256 << 20, 256 << 20, rounds=1)
    row = _gpu_many.at_once(["cpu", "cpu"], sizes, 1, seconds=0.01)
    assert row.value > 0
    assert row.params["samples"] == 1
