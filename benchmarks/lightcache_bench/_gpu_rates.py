"""Transfers alone: whole repetitions against the copy engine, and single pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lightcache_bench import Row, meets
from lightcache_bench._gpu_copies import PAGE, Copies
from lightcache_bench._gpu_device import DIRECTIONS
from lightcache_bench._gpu_interface import TIMEOUT
from lightcache_bench._gpu_rig import Bench, verified
from lightcache_bench._gpu_shapes import IN_PARTS, LARGE, SMALL, STATES, Shape, attention
from lightcache_bench._timing import Case, clocked, interleaved, median, spread, tails

BOTH = "both at once"
BOTH_TARGET = ">= 0.95"
Ways = dict[str, Any]
"""Transfer backends by name; the first one is what the others are compared with."""


def plain(bench: Bench) -> Copies:
    """The copy engine moving whole pages: the baseline of everything."""
    made: Copies = bench.once("whole pages", lambda: _verified_copies(bench))
    return made


def _verified_copies(bench: Bench, piece: int = PAGE) -> Copies:
    made = Copies(bench, piece)
    made.verify()
    return made


def baseline_name(bench: Bench) -> str:
    """What moves whole pages here."""
    return "copy engine" if bench.gpu.cuda else "numpy copies"


def rates(samples: Any, nbytes: int) -> Any:
    """Times in microseconds as rates in GB/s (of 10**9 bytes)."""
    return nbytes / np.asarray(samples, float) / 1e3


def run_case(backend: Any, what: str) -> Case:
    """A repetition of a transfer backend, until its last byte is there."""
    if what == BOTH:
        return clocked(lambda i: backend.run_both())
    return clocked(lambda i: backend.run(what))


def compared(bench: Bench, ways: Ways, directions: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """Rates in GB/s of each way in each direction, all repetitions taking turns; one repetition of
    each before is not counted."""
    cases = {f"{way}/{what}": run_case(ways[way], what) for way in ways for what in directions}
    interleaved(cases, 1)
    samples = interleaved(cases, bench.rounds)
    return {
        (way, what): rates(samples[f"{way}/{what}"], ways[way].nbytes * (1 + (what == BOTH)))
        for way in ways
        for what in directions
    }


def rate_row(
    name: str, found: Any, against: tuple[str, Any], target: str | None, **params: Any
) -> Row:
    """A rate, and its share of a baseline's."""
    label, base = against
    value, ratio = median(found), median(found) / median(base)
    params = {**params, **spread(found), "baseline_gbs": round(median(base), 2)}
    met = meets(ratio, target) if target else None
    return Row(name, params, value, "GB/s", label, ratio, target, met)


# ---- the parts


def copy_engine(bench: Bench) -> Iterator[Row]:
    """Whole pages by the copy engine, each direction and both at once."""
    backend, name = plain(bench), baseline_name(bench)
    found = compared(bench, {name: backend}, (*DIRECTIONS, BOTH))
    for (_, what), samples in found.items():
        params = {"pages": "8 MiB", "bytes": backend.nbytes, **spread(samples)}
        yield Row(f"{name}, {what}", params, median(samples), "GB/s")


def large_pages(bench: Bench) -> Iterator[Row]:
    """8 MiB pages whose tokens lie singly all over the device pool."""
    yield from _shape_rows(bench, LARGE, both=BOTH_TARGET)


def small_pages(bench: Bench) -> Iterator[Row]:
    """256 and 32 KiB, many in a call."""
    for shape in SMALL:
        yield from _shape_rows(bench, shape)


def states(bench: Bench) -> Iterator[Row]:
    """Recurrent states: few and large pieces."""
    for shape in STATES:
        yield from _shape_rows(bench, shape)


def states_in_parts(bench: Bench) -> Iterator[Row]:
    """The same in host pages of 1.5 MiB that lie anywhere, against one copy of a whole state."""
    cuda = bench.gpu.cuda
    base = "one copy a state" if cuda else baseline_name(bench)
    for shape in IN_PARTS:
        copies = _verified_copies(bench, shape.share.nbytes) if cuda else plain(bench)
        with verified(bench, shape) as rig:
            found = compared(bench, {base: copies, "engine": rig}, DIRECTIONS)
        for what in DIRECTIONS:
            against = f"{base}, {what}", found[base, what]
            params = {
                "parts": shape.geometry.parts,
                "padding": round(shape.geometry.padding, 4),
                "pages_of_a_call": shape.batch,
            }
            target = shape.target if cuda else None
            yield rate_row(
                f"{what}, {shape.name}", found["engine", what], against, target, **params
            )


def _shape_rows(bench: Bench, shape: Shape, both: str | None = None) -> Iterator[Row]:
    base = baseline_name(bench)
    directions = (*DIRECTIONS, BOTH) if both else DIRECTIONS
    with verified(bench, shape) as rig:
        found = compared(bench, {base: plain(bench), "engine": rig}, directions)
    for what in directions:
        target = (both if what == BOTH else shape.target) if bench.gpu.cuda else None
        against = f"{base}, {what}", found[base, what]
        params = {"pages_of_a_call": shape.batch, "bytes": rig.nbytes}
        yield rate_row(f"{what}, {shape.name}", found["engine", what], against, target, **params)


def single_page(bench: Bench) -> Iterator[Row]:
    """From the call to the last byte of one 256 KiB page, a page at a time."""
    shape = attention("one 256 KiB page", 32, 1, 16, batch=1, target="<= 50 us")
    repeats = 200 if bench.quick else 2000
    with verified(bench, shape) as rig:
        cases = {what: clocked(_one_page(rig, what)) for what in DIRECTIONS}
        copies = Copies(bench, shape.geometry.page_bytes)
        copies.verify()
        cases |= {f"one copy, {what}": clocked(_one_copy(copies, what)) for what in DIRECTIONS}
        interleaved(cases, repeats // 10)
        samples = interleaved(cases, repeats)
    for what in DIRECTIONS:
        base = tails(samples[f"one copy, {what}"])
        for name, at, target in (("p50", 0, shape.target), ("p99", 1, None)):
            value = tails(samples[what])[at]
            target = target if bench.gpu.cuda else None
            yield Row(
                f"{what}, {shape.name}, {name}",
                {"samples": repeats, "baseline_us": round(base[at], 2)},
                value,
                "us",
                f"one copy of a whole page, {name}",
                value / base[at],
                target,
                meets(value, target) if target else None,
            )


def _one_page(rig: Any, direction: str) -> Callable[[int], None]:
    return lambda i: rig.submit(direction, i).wait(TIMEOUT)


def _one_copy(copies: Copies, direction: str) -> Callable[[int], None]:
    return lambda i: copies.one(direction, i).wait(TIMEOUT)
