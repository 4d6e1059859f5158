"""How soon a new pool can be used, and how soon all of it is pinned."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightcache import Cache
from lightcache.errors import LightcacheError, TransferFailed
from lightcache.shm import memory
from lightcache_bench import Row, meets
from lightcache_bench._gpu_device import Gpu
from lightcache_bench._gpu_interface import TIMEOUT, pin_pool
from lightcache_bench._gpu_rig import Bench
from lightcache_bench._pool import Helper

SECRET = b"of the transfer benchmark"
PAGE = 8 << 20
SIZES = (4 << 30, 32 << 30)
PROCESSES = (2, 4)
WAYS = ("all of it by each", "a part by each")


@dataclass(frozen=True)
class Times:
    """Seconds from the call of `create`."""

    first: float
    whole: float


@contextlib.contextmanager
def new_cache(nbytes: int) -> Iterator[Cache]:
    """A cache of so many bytes that goes with this process; its memory comes when it is asked
    for."""
    cache = Cache.create(
        f"bench-transfer-{os.getpid()}",
        size=nbytes,
        page_bytes=PAGE,
        fingerprint="bench transfer",
        secret=SECRET,
        role="bench",
        device=True,
        grow=False,
    )
    try:
        yield cache
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # views in them would keep the pool open
        raise
    finally:
        cache.close()


def in_background(gpu: Gpu, nbytes: int) -> Times:
    """As an engine does it: threads give memory, and others register what has some."""
    begin = time.perf_counter()
    with new_cache(nbytes) as cache:
        pages = pin_pool(gpu, cache)
        pages.wait([0], timeout=TIMEOUT)
        first = time.perf_counter() - begin
        pages.wait(timeout=2 * TIMEOUT)
        whole = time.perf_counter() - begin
    return Times(first, whole)


def one_after_the_other(gpu: Gpu, nbytes: int) -> Times:
    """Everything in one thread: memory for all of it, then one registration of all of it."""
    begin = time.perf_counter()
    with new_cache(nbytes) as cache:
        cache.pool.prefault(threads=1)
        address = int(cache.pool.array.ctypes.data)
        register(gpu, address, nbytes)
        whole = time.perf_counter() - begin
        gpu.torch.cuda.cudart().cudaHostUnregister(address)
    return Times(whole, whole)


def register(gpu: Gpu, address: int, nbytes: int) -> None:
    """One registration.

    Raises:
        TransferFailed: the driver refused.
    """
    error = int(gpu.torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if error:
        raise TransferFailed(f"cudaHostRegister of {nbytes} bytes: error {error}")


def pinning(bench: Bench) -> Iterator[Row]:
    """From `create` to the first and to the last page. The memory of a fresh machine may grow on
    first touch, so that everything is done twice and the second time reported."""
    for nbytes in (1 << 30,) if bench.quick else SIZES:
        size = f"{nbytes >> 30} GiB"
        room = memory.available()
        if room.bytes < nbytes * 9 // 8:
            yield Row(
                f"pool of {size}",
                {"skipped": f"{room.bytes >> 30} GiB {room.limit}"},
                float("nan"),
                "",
            )
            continue
        before = in_background(bench.gpu, nbytes)
        ours, base = in_background(bench.gpu, nbytes), one_after_the_other(bench.gpu, nbytes)
        params: dict[str, Any] = {"first_run_s": round(before.first, 3)}
        params["one_thread_s"] = round(base.first, 3)
        yield Row(
            f"create to first usable page, {size}",
            params,
            ours.first,
            "s",
            "prefault and registration in one thread",
            ours.first / base.first,
            "<= 1 s",
            meets(ours.first, "<= 1 s"),
        )
        value, alone = (nbytes / times.whole / 1e9 for times in (ours, base))
        params = {"seconds": round(ours.whole, 2), "first_run_s": round(before.whole, 2)}
        params["one_thread_s"] = round(base.whole, 2)
        name = f"create to the whole pool pinned, {size}"
        label = "prefault and registration in one thread"
        yield Row(name, params, value, "GB/s", label, value / alone)
    for count in PROCESSES[:1] if bench.quick else PROCESSES:
        yield from several(bench.gpu, count, (1 << 30) if bench.quick else SIZES[0])


def several(gpu: Gpu, count: int, nbytes: int) -> Iterator[Row]:
    """The same pool registered by several processes at once: all of it by each, or a part by
    each."""
    with new_cache(nbytes) as cache, contextlib.ExitStack() as stack:
        cache.pool.prefault()
        common: dict[str, Any] = {"parts": count, "device": gpu.device}
        helpers = [
            stack.enter_context(
                Helper("register", module="_gpu_roles", name=cache.name, part=i, **common)
            )
            for i in range(count)
        ]
        for helper in helpers:
            helper.answer()
        found: dict[str, list[dict[str, Any]]] = {}
        for what in ("warm-up", *WAYS):
            for helper in helpers:
                helper.go_on()
            found[what] = [helper.answer() for helper in helpers]
    for what in WAYS:
        each, seconds = found[what], _together(found[what])
        params = {
            "gib_of_each": round(each[0]["bytes"] / 2**30, 2),
            "seconds_of_each": " ".join(f"{one['end'] - one['begin']:.2f}" for one in each),
            "sum_gbs": round(sum(one["bytes"] for one in each) / seconds / 1e9, 2),
        }
        name = f"{count} processes register a pool of {nbytes >> 30} GiB, {what}"
        yield Row(name, params, seconds, "s", WAYS[0], seconds / _together(found[WAYS[0]]))


def _together(answers: list[dict[str, Any]]) -> float:
    """Seconds from the first beginning to the last end, by the clock of the machine."""
    seconds = max(one["end"] for one in answers) - min(one["begin"] for one in answers)
    if not 0 < seconds < TIMEOUT:
        raise LightcacheError(f"processes took {seconds} s; expected less than {TIMEOUT} s")
    return float(seconds)
