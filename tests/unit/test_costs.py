"""Costs: where loading pages and computing them break even, and the file that says so."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from lightcache.costs import Costs
from lightcache.errors import ConfigError

MEASURED: dict[str, Any] = {
    "load_bytes_per_s": 1000.0,
    "per_load_overhead_s": 0.5,
    "page_bytes": 100,
}
GIVEN: dict[str, Any] = {"prefill_tokens_per_s": 80.0, "page_tokens": 16}


def costs(**other: Any) -> Costs:
    return Costs(**{**MEASURED, **GIVEN, **other})


def test_seconds() -> None:
    made = costs()
    assert made.load_seconds(10) == 0.5 + 1.0
    assert made.load_seconds(0) == 0


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, 6),  # a page: 0.1 s loaded, 0.2 s computed; after five pages both take a second
        ({"per_load_overhead_s": 0.49}, 5),
        ({"per_load_overhead_s": 0.05}, 1),
        ({"per_load_overhead_s": 0}, 0),
        ({"prefill_tokens_per_s": 160}, None),  # as fast as loading, without its overhead
        ({"prefill_tokens_per_s": 160, "per_load_overhead_s": 0}, None),
        ({"prefill_tokens_per_s": 1e9}, None),
        ({"per_load_overhead_s": 1e6}, 10_000_000),
    ],
)
def test_where_they_break_even(other: dict[str, Any], expected: int | None) -> None:
    found = costs(**other).break_even_pages()
    if expected is None or found is None or expected < 1000:
        assert found == expected
    else:
        assert found == pytest.approx(expected)


def test_what_is_worth_loading() -> None:
    assert [pages for pages in range(9) if costs().worth_loading(pages)] == [6, 7, 8]
    assert not costs(per_load_overhead_s=0).worth_loading(0), "nothing is not worth it"
    assert costs(per_load_overhead_s=0).worth_loading(1)
    assert not costs(prefill_tokens_per_s=1e9).worth_loading(1 << 40)


def test_the_weight_of_a_token_from_the_host() -> None:
    assert costs().host_weight == 0.5
    assert costs(prefill_tokens_per_s=1e9).host_weight == 1


@given(
    rate=st.floats(1e-3, 1e15),
    overhead=st.one_of(st.just(0.0), st.floats(1e-9, 1e3)),
    prefill=st.floats(1e-3, 1e12),
    page_bytes=st.integers(1, 1 << 40),
    page_tokens=st.integers(1, 1 << 20),
)
def test_break_even_is_where_loading_becomes_faster(
    rate: float, overhead: float, prefill: float, page_bytes: int, page_tokens: int
) -> None:
    made = Costs(rate, overhead, prefill, page_bytes, page_tokens)

    def faster(pages: int) -> bool:
        load = Fraction(overhead) + pages * page_bytes / Fraction(rate)
        return load < pages * page_tokens / Fraction(prefill)

    least = made.break_even_pages()
    if least is None:
        assert not any(faster(pages) for pages in (1, 1000, 1 << 200))
        return
    assert faster(max(least, 1))
    assert least <= 1 or not faster(least - 1)
    assert faster(least + 12345)
    assert (least == 0) == (overhead == 0)
    assert made.worth_loading(max(least, 1))


@pytest.mark.parametrize(
    "other",
    [
        {"load_bytes_per_s": 0},
        {"load_bytes_per_s": math.inf},
        {"load_bytes_per_s": "fast"},
        {"per_load_overhead_s": -1e-9},
        {"per_load_overhead_s": math.nan},
        {"prefill_tokens_per_s": 0},
        {"prefill_tokens_per_s": True},
        {"page_bytes": 0},
        {"page_bytes": 1.5},
        {"page_tokens": 0},
        {"page_tokens": None},
    ],
)
def test_figures_out_of_range(other: dict[str, Any]) -> None:
    refused(ConfigError, next(iter(other)), costs, **other)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**MEASURED, "device": "x", "batches": []}))
    assert Costs.load(path, **GIVEN) == costs()
    refused(ConfigError, r"no prefill_tokens_per_s; give it", Costs.load, path)
    path.write_text(json.dumps({**MEASURED, **GIVEN}))
    assert Costs.load(str(path)) == costs()
    assert Costs.load(path, page_tokens=32) == costs(page_tokens=32), "what is given counts"


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "{}", '{"page_bytes": 1}', "\xff"])
def test_a_file_that_says_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="latin-1")
    refused(ConfigError, "calibrat", Costs.load, path, **GIVEN)
    refused(ConfigError, "calibrat", Costs.load, tmp_path / "none", **GIVEN)
