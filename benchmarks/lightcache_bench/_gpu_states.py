"""Recurrent states from slot to slot of the device: what copy on write costs a hybrid model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from lightcache.errors import TransferFailed
from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.kernels.states import Slots, StateCopier
from lightcache_bench import Row, meets
from lightcache_bench._gpu_device import Gpu
from lightcache_bench._gpu_rig import Bench
from lightcache_bench._restoring import SLOTS, restoring
from lightcache_bench._timing import median, spread

LAYERS, HEADS, CHANNELS = 36, 32, 8192
"""Linear layers of Qwen3-Next-80B, their value heads, and the channels of their convolution."""
REQUESTS = 64
TARGET = ">= 0.90"
_WARM = 3
_BUSY = 5_000_000  # cycles, some 3 ms


class States:
    """States of one rank on the device, as engines keep them: two tensors for each layer."""

    def __init__(self, gpu: Gpu, ranks: int, slots: int) -> None:
        """Fill them with random bytes: 73.7 MiB a state, divided among the ranks."""
        heads, channels = HEADS // ranks, CHANNELS // ranks
        conv, recurrent = channels * 3 * 2, heads * 128 * 128 * 4
        self.conv = [gpu.random(slots * conv).view(slots, conv) for _ in range(LAYERS)]
        self.recurrent = [
            gpu.random(slots * recurrent).view(slots, recurrent) for _ in range(LAYERS)
        ]
        parts = [Plane("conv", conv), Plane("recurrent", recurrent)]
        planes = {
            ("state", layer, name): DevicePlane(int(tensor.data_ptr()), tensor.shape[1], slots)
            for name, tensors in (("conv", self.conv), ("recurrent", self.recurrent))
            for layer, tensor in enumerate(tensors)
        }
        self.tensors = [*self.conv, *self.recurrent]
        self.copier = StateCopier(
            PageGeometry([KVGroup.state("state", layers=LAYERS, parts=parts)]),
            DevicePlanes(planes, device=gpu.device, keep=self.tensors),
        )


def state_copies(bench: Bench) -> Iterator[Row]:
    """64 states in one launch, against one large copy of as many bytes on the same device; and what
    restoring those of 64 requests costs the thread that launches it, beside the launch."""
    for ranks in (1, 4):
        yield from _copies(bench, ranks)
    yield from restoring(bench.rounds)
    yield from restoring(bench.rounds, States(bench.gpu, 16, SLOTS).copier)


def _copies(bench: Bench, ranks: int) -> Iterator[Row]:
    gpu = bench.gpu
    states = States(gpu, ranks, 2 * REQUESTS)
    order = np.random.default_rng(7).permutation(2 * REQUESTS)
    sources, targets = order[:REQUESTS], order[REQUESTS:]
    _verify(states, sources, targets)
    nbytes = states.copier.nbytes * REQUESTS
    flat = gpu.torch.empty(2 * nbytes, dtype=gpu.torch.uint8, device=gpu.device)
    where = gpu.torch.from_numpy(np.stack([sources, targets])).to(gpu.device)

    def one_launch() -> None:
        states.copier.copy(sources, targets)

    def layer_by_layer() -> None:
        for tensor in states.tensors:
            tensor.index_copy_(0, where[1], tensor.index_select(0, where[0]))

    cases: dict[str, Callable[[], Any]] = {
        "one copy of as many bytes": lambda: flat[:nbytes].copy_(flat[nbytes:]),
        "one launch": one_launch,
        "index_copy_ of each tensor": layer_by_layer,
    }
    seconds = _interleaved(gpu, cases, bench.rounds)
    base, name = seconds["one copy of as many bytes"], f"TP {ranks}" if ranks > 1 else "whole"
    took = _enqueuing(gpu, one_launch, bench.rounds)
    yield Row(f"enqueue one launch, {name}", {"states": REQUESTS, **spread(took)}, median(took))
    for what, samples in seconds.items():
        rates = [nbytes / each / 1e9 for each in samples]
        ratio = float(np.median([b / s for b, s in zip(base, samples, strict=True)]))
        judged = what == "one launch"
        params = {"states": REQUESTS, "mib_each": round(states.copier.nbytes / 2**20, 1)}
        yield Row(
            f"{what}, {name}",
            {**params, "ms": round(median(samples) * 1e3, 3), **spread(rates)},
            median(rates),
            "GB/s",
            None if samples is base else "one copy of as many bytes",
            None if samples is base else ratio,
            TARGET if judged else None,
            meets(ratio, TARGET) if judged else None,
        )


def _enqueuing(gpu: Gpu, call: Callable[[], Any], rounds: int) -> list[float]:
    """Microseconds of the processor for a call."""
    found = []
    for _ in range(rounds):
        gpu.synchronize()
        begin = perf_counter()
        call()
        found.append((perf_counter() - begin) * 1e6)
    return found


def _interleaved(
    gpu: Gpu, cases: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each case on the device, the cases in turns; the first rounds are not counted. The
    device is kept busy until all is enqueued, as it is by the step before."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(_WARM + rounds):
        for name, call in cases.items():
            begin, end = gpu.event(), gpu.event()
            gpu.torch.cuda._sleep(_BUSY)
            begin.record()
            call()
            end.record()
            gpu.synchronize()
            if turn >= _WARM:
                found[name].append(begin.elapsed_time(end) / 1e3)
    return found


def _verify(states: States, sources: Slots, targets: Slots) -> None:
    """Copy once and compare every byte.

    Raises:
        TransferFailed: a byte is wrong.
    """
    states.copier.copy(sources, targets).wait()
    for tensor in states.tensors:
        if not bool((tensor[targets] == tensor[sources]).all()):
            raise TransferFailed("states were not copied rightly")


__all__ = ["state_copies"]
