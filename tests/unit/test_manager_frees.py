"""Frees of ended requests that must wait."""

from __future__ import annotations

from typing import Any

import pytest
from support.manager_case import tokens
from support.raising import raising
from support.refusals import refused

from lightcache import Lease
from lightcache.errors import CacheCorrupted, InUse, LockTimeout
from lightcache.leases import Allocation
from lightcache.manager import Prompt

PROMPT = Prompt(tokens(18))


@pytest.mark.parametrize("how", ["release", "poll", "close"])
def test_blocks_for_which_the_lock_does_not_come(
    world: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """They are given back when it does."""
    manager, free = world.manager, world.device.free
    for request, seed in (("a", 0), ("b", 2)):
        world.run(request, Prompt(tokens(18, seed)), keep=True)
    if how == "poll":
        world.backend.at_once = False
        world.compute("a", [*PROMPT.tokens, *tokens(8, 3)], 18, 26)
    with monkeypatch.context() as patch:
        patch.setattr(Allocation, "_free", raising(LockTimeout))
        manager.release_many("ab")
        world.backend.finish()
        if how == "close":
            manager.close()
        for _ in range(2):
            assert manager.poll() == 0
        assert manager.gauges().leaving == 2
        refused(InUse, "0 requests run", manager.set_blocks, 32)
    held = world.index.stats().held
    assert held > 0
    getattr(manager, "close" if how == "close" else "poll")()
    assert (world.index.stats().held, manager.gauges().leaving) == (0, 0)
    assert world.device.available == free


def test_blocks_without_a_key_go_though_those_with_one_do_not(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.manager.plan("a", PROMPT)
    world.manager.take("a")
    world.manager.allocate("a", 18)
    world.manager.commit("a", 18)
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_give_back", raising(CacheCorrupted))
        refused(CacheCorrupted, "", world.manager.release, "a")
    assert world.index.stats().held == 0
