"""Prompts that come back when others have been asked since: for measuring storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightcache.errors import ConfigError
from lightcache.tools.demo.prompts import Prompts
from lightcache.tools.demo.turns import Turn, checked_answer


class Returning(Prompts):
    """Each prompt is asked; again when `lag` others have been asked for the first time since; and
    once more right behind that. So with a host that has room for fewer than `lag` prompts, the
    first is computed, the second comes from storage, and the third from the host: by turns, one at
    a time."""

    def __init__(self, *, lag: int, **prompts: Any) -> None:
        """Nothing is asked yet.

        Args:
            lag: prompts in between.
            prompts: see `Prompts`, but for `repeats` and `chains`.

        Raises:
            ConfigError: a number below 1.
        """
        super().__init__(**prompts, repeats=3)
        if lag < 1:
            raise ConfigError(f"lag: expected at least 1, found {lag}")
        self._order = [
            (prompt, repeat)
            for at in range(self._count + lag)
            for prompt, repeat in ((at, 0), (at - lag, 1), (at - lag, 2))
            if 0 <= prompt < self._count and (repeat == 0) == (prompt == at)
        ]

    def begin(self) -> list[Turn]:
        """The first.

        Raises:
            ConfigError: it was called before.
        """
        self._ledger.begin()
        return self._next()

    def answered(self, number: int, answer: Sequence[int]) -> list[Turn]:
        """The next one.

        Raises:
            ConfigError: see `Workload.answered`.
        """
        checked_answer(answer, self.vocabulary)
        self._ledger.answer(number)
        return self._next()

    def _next(self) -> list[Turn]:
        return [self._turn(*self._order.pop(0))] if self._order else []
