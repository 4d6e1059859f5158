"""Transfers beside the work of a model: how much of the copy engine they keep, and how much longer
the work takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lightcache_bench import Row, meets
from lightcache_bench._gpu_device import DIRECTIONS
from lightcache_bench._gpu_rates import compared, plain
from lightcache_bench._gpu_rig import Bench, TransferBackend, verified
from lightcache_bench._gpu_shapes import LARGE
from lightcache_bench._gpu_steps import Decode, Product, Step
from lightcache_bench._gpu_window import Feed, Window, windows
from lightcache_bench._timing import median, spread, tails

RATE = 25e9
"""Bytes a second of a transfer that is to be noticed less."""
PRODUCT_TARGET = "<= 1.01"
KEPT_TARGET = ">= 0.90"
DECODE_TARGET = "<= 1.05"
LIMITED_TARGET = "<= 1.02"


def product(bench: Bench) -> Step:
    """The matrix product, made once."""
    made: Step = bench.once("product", lambda: Product(bench.gpu))
    return made


def decode(bench: Bench) -> Step:
    """The decode step, made once."""
    made: Step = bench.once("decode", lambda: Decode(bench.gpu))
    return made


def feed(backend: TransferBackend, direction: str) -> Feed:
    """Transfers of a transfer backend without end."""
    return Feed(lambda i: backend.submit(direction, i), backend.piece)


def step_windows(
    bench: Bench, step: Step, feeds: Mapping[str, Feed | None], rounds: int, count: int
) -> dict[str, list[Window]]:
    """Few and short ones if the run is to be quick."""
    if bench.quick:
        rounds, count = 2, min(count, 10)
    return windows(bench.gpu, step, feeds, rounds, count)


# ---- beside the product


def beside_product(bench: Bench) -> Iterator[Row]:
    """Beside a loop of 8192-cube bf16 products on another stream."""
    base, step = plain(bench), product(bench)
    with verified(bench, LARGE) as rig:
        alone = compared(bench, {"copy engine": base}, DIRECTIONS)
        feeds: dict[str, Feed | None] = {"alone": None}
        for direction in DIRECTIONS:
            feeds[direction] = feed(rig, direction)
            feeds[f"copy engine, {direction}"] = feed(base, direction)
        found = step_windows(bench, step, feeds, rounds=6, count=80)
    for name in feeds:
        if name != "alone":
            engine = alone["copy engine", name.split(", ")[-1]]
            yield from product_rows(name, found, engine, judged=name in DIRECTIONS)


def product_rows(
    name: str, found: Mapping[str, list[Window]], engine: Any, judged: bool
) -> Iterator[Row]:
    """How much longer the product takes beside these transfers, and what they keep of the copy
    engine alone."""
    beside, alone = (
        [float(np.mean(each.steps)) / Product.EACH for each in found[key]]
        for key in (name, "alone")
    )
    ratio = median(beside) / median(alone)
    params = {**spread(beside), "alone_ms": round(median(alone), 4)}
    target = PRODUCT_TARGET if judged else None
    met = meets(ratio, PRODUCT_TARGET) if judged else None
    row = f"product beside {name}"
    yield Row(row, params, median(beside), "ms", "product alone", ratio, target, met)
    kept = [each.rate for each in found[name]]
    ratio = median(kept) / median(engine)
    params = {**spread(kept), "baseline_gbs": round(median(engine), 2)}
    target = KEPT_TARGET if judged else None
    met = meets(ratio, KEPT_TARGET) if judged else None
    row = f"{name} beside product"
    yield Row(row, params, median(kept), "GB/s", "copy engine alone", ratio, target, met)


# ---- beside the decode step


def beside_decode(bench: Bench) -> Iterator[Row]:
    """Beside a decode step of 8B-shaped layers, batch 64, replayed as a CUDA graph."""
    step, base = decode(bench), plain(bench)
    limits: dict[str, str | None] = {}
    with verified(bench, LARGE) as rig, verified(bench, LARGE, rate=RATE) as limited:
        feeds: dict[str, Feed | None] = {"alone": None}
        for direction in DIRECTIONS:
            ways: tuple[tuple[str, TransferBackend, str | None], ...] = (
                (direction, rig, DECODE_TARGET),
                (f"{direction} limited to {RATE / 1e9:.0f} GB/s", limited, LIMITED_TARGET),
                (f"copy engine, {direction}", base, None),
            )
            for name, backend, target in ways:
                feeds[name], limits[name] = feed(backend, direction), target
        found = step_windows(bench, step, feeds, rounds=4, count=100)
    for name, target in limits.items():
        yield from decode_rows(name, found, target)


def decode_rows(name: str, found: Mapping[str, list[Window]], target: str | None) -> Iterator[Row]:
    """Time between tokens beside these transfers against alone, p50 and p99 of all steps."""
    beside, alone = (np.concatenate([each.steps for each in found[key]]) for key in (name, "alone"))
    rate = median([each.rate for each in found[name]])
    for tail, at, limit in (("p50", 0, None), ("p99", 1, target)):
        value, base = tails(beside)[at], tails(alone)[at]
        params = {"steps": len(beside), "alone_ms": round(base, 3)}
        if not math.isnan(rate):
            params["gbs"] = round(rate, 2)
        met = meets(value / base, limit) if limit else None
        row = f"decode {tail} beside {name}"
        yield Row(row, params, value, "ms", f"decode {tail} alone", value / base, limit, met)


# ---- the same for other ways of moving


def beside_both(bench: Bench, ways: Mapping[str, tuple[TransferBackend, str]]) -> Iterator[Row]:
    """Product and decode step beside each of these transfer backends and directions, without
    promises."""
    engine = compared(bench, {"copy engine": plain(bench)}, DIRECTIONS)
    for make in (product, decode):
        feeds: dict[str, Feed | None] = {"alone": None}
        feeds |= {name: feed(backend, direction) for name, (backend, direction) in ways.items()}
        found = step_windows(bench, make(bench), feeds, rounds=2, count=40)
        for name, (_, direction) in ways.items():
            if make is product:
                yield from product_rows(name, found, engine["copy engine", direction], judged=False)
            else:
                yield from decode_rows(name, found, None)
