"""What does not go together is said at once, and all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hybrid.saving import Features, Grid, Saves

GOOD = Features(
    Grid(16, 64), Saves.INTERIOR, running=8, device_slots=100, ahead=True, alternating=2
)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"drafted": 3, "draft_slots": 32},
        {"ahead": False, "alternating": 1},
        {"saves": Saves.END_ONLY, "alternating": 0},
        {"device_states": 0, "host_states": 10},  # no checkpoint on the device at all
        {"device_slots": 24, "host_states": 10},
        {"device_states": 76},
        {"host_states": 10, "storage": True},
        {"tail": True},
        {"saves": Saves.END_ONLY, "tail": True},
        {"running": None, "device_slots": 3},
        {"state_block_tokens": 64},
        {"saves": Saves.END_ONLY, "state_block_tokens": 16},
    ],
)
def test_what_goes_together(more: dict[str, Any]) -> None:
    made = replace(GOOD, **more)
    assert made.conflicts() == ()
    made.check()


CONFLICTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"alternating": 1}, ["alternating=1: a scheduler that runs ahead needs 2"]),
    ({"ahead": False}, ["alternating=2: a scheduler that does not run ahead needs 1"]),
    ({"alternating": 0}, ["interior saves: .*alternating=2"]),
    ({"drafted": 3}, ["draft_slots=0: 3 drafted tokens for each of 8 requests need 32"]),
    ({"drafted": 3, "draft_slots": 31}, ["draft_slots=31"]),
    ({"draft_slots": 1}, ["nothing is drafted"]),
    ({"device_slots": 23, "host_states": 1}, ["device_slots=23: .* need 1 more"]),
    ({"device_slots": 24}, ["device_slots=24: .* no checkpoint would be kept"]),
    ({"device_states": 0}, ["device_states=0: a donated state stays"]),
    ({"device_states": 77}, ["device_states=77: of 100 device slots, .* leave 76"]),
    ({"storage": True}, ["storage: "]),
    ({"grid": Grid(64, 64), "tail": True}, ["tail: "]),
    ({"state_block_tokens": 128}, ["every 64 tokens, not always at the end"]),
    ({"state_block_tokens": 32}, ["only every 64 tokens"]),
    (
        {"saves": Saves.END_ONLY, "tail": True, "state_block_tokens": 32},
        ["every 16 tokens, not always at the end"],
    ),
    ({"running": None, "ahead": False, "draft_slots": 1}, ["alternating=2", "nothing is drafted"]),
    (
        {"drafted": 3, "draft_slots": 32, "saves": Saves.END_ONLY, "state_block_tokens": 2},
        ["may cross more than one block"],
    ),
    (
        {
            "alternating": 1,
            "drafted": 3,
            "device_states": 0,
            "storage": True,
            "state_block_tokens": 48,
        },
        [
            "alternating=1",
            "draft_slots=0",
            "device_states=0",
            "storage: ",
            "end of a",
            "only every",
        ],
    ),
]


@pytest.mark.parametrize(("more", "texts"), CONFLICTS)
def test_what_does_not(more: dict[str, Any], texts: list[str]) -> None:
    made = replace(GOOD, **more)
    assert len(made.conflicts()) == len(texts)
    lines = r"\n.*".join(f"{number}. .*{text}.*" for number, text in enumerate(texts, 1))
    refused(ConfigError, f"{len(texts)} of its settings.*\n" + lines, made.check)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grid", 64),
        ("saves", "interior"),
        ("running", 0),
        ("device_slots", -1),
        ("alternating", True),
        ("drafted", 1.5),
        ("draft_slots", -1),
        ("device_states", -1),
        ("host_states", None),
        ("state_block_tokens", 0),
    ],
)
def test_figures_that_are_none(name: str, value: Any) -> None:
    refused(ConfigError, name, replace, GOOD, **{name: value})
