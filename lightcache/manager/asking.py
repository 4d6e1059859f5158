"""What is asked of a plan: the arguments of `KVCacheManager.plan` and `plan_many`, checked, as one
thing that goes from call to call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from lightcache.manager.matches import ANY, Wishes
from lightcache.manager.prompts import Prompt

# Tuples with names: one is made for each call, and a frozen dataclass takes a microsecond longer;
# by `_make` it is half of what it is by name.


class Asked(NamedTuple):
    """What one request asks. Who asks for an equal one again has asked for the same."""

    prompt: Prompt
    wishes: Wishes = ANY
    limit: int | None = None
    """Most tokens to reuse; None: no limit."""

    @property
    def most(self) -> int:
        """Tokens that may be reused at most: the limit, and one is left to compute."""
        most = max(0, len(self.prompt) - 1)
        return most if self.limit is None else min(most, self.limit)

    def up_to(self, limit: int | None) -> Asked:
        """The same with another limit."""
        return Asked._make((self[0], self[1], limit))


class AskedMany(NamedTuple):
    """What a whole queue asks; sequences of one length."""

    requests: Sequence[Hashable]
    prompts: Sequence[Prompt]
    wishes: Sequence[Wishes]
    limits: Sequence[int | None]
    given: Sequence[int] | None
    """Tokens of each that an engine has found on its device itself; None: look there."""


__all__ = ["Asked", "AskedMany"]
