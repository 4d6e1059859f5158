"""The comparison of engines, without engines."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from lightcache.errors import ConfigError
from lightcache_bench import engines


def test_turns_continue_what_was_said_and_half_share_a_beginning() -> None:
    asked = engines.conversations(1, 4, 3)
    assert asked == engines.conversations(1, 4, 3)
    assert {which for which, _ in asked} == {0, 1}
    prompts = [ids for _, ids in asked]
    firsts, lasts = prompts[:4], prompts[-4:]
    for first in firsts:
        assert sum(last[: len(first)] == first for last in lasts) == 1
    assert len({tuple(first[:384]) for first in firsts}) == 2
    assert max(map(len, prompts)) < 1536


class Stand:
    """An engine that finds what any of its kind was asked before, if they share."""

    asked: list[list[int]]

    def __init__(self, asked: list[list[int]], order: list[str], name: str) -> None:
        self.asked, self.order, self.name = asked, order, name

    def ask(self, ids: list[int] | None = None, **_: Any) -> dict[str, Any]:
        if ids is None:
            return {}
        self.order.append(self.name)
        found = max((len(one) for one in self.asked if ids[: len(one)] == one), default=0)
        self.asked.append(ids)
        return {"cached": [found], "s": 0.1 + len(ids) - found, "first": [1]}


def test_what_was_found_is_counted_and_caches_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.System, "memory", lambda self: 100.0)
    monkeypatch.setattr(engines.System, "cpu", lambda self: 1.0)
    order: list[str] = []
    apart = engines.System("none", "vllm", "", None)
    apart.engines = [Stand([], order, "none") for _ in "12"]  # type: ignore[misc]
    shared: list[list[int]] = []
    one = engines.System("lightcache", "vllm", "", {})
    one.engines = [Stand(shared, order, "lightcache") for _ in "12"]  # type: ignore[misc]
    asked = engines.conversations(1, 4, 3)
    rows = list(engines.served([apart, one], asked))
    found = {row.params["with"]: row.value for row in rows if row.name == "tokens found"}
    assert found["lightcache"] > found["none"] > 0
    first = {row.params["with"]: row for row in rows if row.name == "first token"}
    assert first["none"].ratio == 1
    assert (first["lightcache"].ratio or 1) < 1
    assert order[:4] == ["none", "lightcache", "lightcache", "none"]
    assert len(order) == 2 * len(asked)


def test_without_an_engine_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs vLLM or SGLang"):
        list(engines.rows(True))
