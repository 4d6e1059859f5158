"""Whatever stands in a segment: no signal, no endless call, no error but ours, and damage is named.

`hostile.c` does the work, `fuzz.py` runs many of it; here a share of it runs with every test.

LIGHTCACHE_HOSTILE_CASES: cases of the plain harness (10,000), a tenth of it under sanitizers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hostile import fuzz
from support.packages import need

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = int(os.environ.get("LIGHTCACHE_HOSTILE_CASES", "10000"))
WORKERS = min(2, os.cpu_count() or 1)
# Another part of all seeds in every round of the soak.
FIRST = int(os.environ.get("LIGHTCACHE_TEST_SEED", "0")) * 1_000_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the harness is compiled."""
    need("cc")
    return tmp_path_factory.mktemp("hostile")


@pytest.mark.parametrize("eviction", ["lru", "hz"])
@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])
def test_what_found_something_once(folder: Path, sanitize: bool, eviction: str) -> None:
    program = fuzz.build(folder, sanitize=sanitize)
    _, text = fuzz.run(program, ["corpus", str(fuzz.HERE / "corpus.txt")], eviction)
    sums = fuzz.Sums()
    sums.add(text)
    assert sums.findings == []
    lines = (fuzz.HERE / "corpus.txt").read_text().splitlines()
    assert sums.totals["cases"] >= sum(line.startswith("set") for line in lines) > 0


@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])
def test_damage_of_every_kind(folder: Path, sanitize: bool) -> None:
    cases = CASES // 10 if sanitize else CASES
    program = fuzz.build(folder, sanitize=sanitize)
    sums = fuzz.fuzz(program, FIRST, cases, WORKERS)
    fuzz.report(sums, 0)
    assert sums.findings == []
    assert sums.totals["cases"] == cases + cases // 10
    if cases >= 10_000:  # the fuzzer itself works: everything was damaged, and links are told
        assert all(numbers[0] for numbers in sums.fields.values())
        cases_of_heads, _, _, named, *_ = sums.fields["heads.link"]
        assert cases_of_heads == named


def test_damage_where_lists_are_ranked(folder: Path) -> None:
    sums = fuzz.Sums()
    _, text = fuzz.run(fuzz.build(folder), ["seeds", str(FIRST), str(CASES // 5)], "hz")
    sums.add(text)
    assert sums.findings == []
    assert sums.totals["cases"] == CASES // 5
