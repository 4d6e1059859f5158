"""The benchmark of hybrid plans measures what it says."""

from __future__ import annotations

import pytest

from lightcache_bench import _hybrid_plans


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hybrid_plans, "TOKENS", 1024)
    monkeypatch.setattr(_hybrid_plans, "QUEUE", 3)
    rows = list(_hybrid_plans.rows(quick=True))
    places = {(row.params["page_tokens"], row.params["found"]) for row in rows}
    assert places == {(size, at) for size in (16, 64) for at in _hybrid_plans.PLACES}
    assert len(rows) == 6 * 9
    assert [row.target for row in rows if row.target] == ["<= 100"]
    assert all(row.value > 0 and row.baseline == "the core: and pins" for row in rows)
