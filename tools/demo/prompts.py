"""Prompts of one length, each asked once or more: for measuring, not for showing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightcache.errors import ConfigError
from lightcache.tools.demo.turns import Turn


class Prompts:
    """`count` prompts that share nothing; each is asked `repeats` times, one after the other. What
    follows a prompt's prefix is new every time, so all of the prefix can be reused and no more."""

    def __init__(
        self,
        *,
        seed: int,
        count: int,
        prefix_tokens: int,
        new_tokens: int,
        answer_tokens: int,
        vocabulary: int,
        repeats: int = 1,
        chains: int = 1,
    ) -> None:
        """Nothing is asked yet.

        Args:
            chains: how many prompts are asked at once.

        Raises:
            ConfigError: a number below 1.
        """
        for name, value in (
            ("count", count),
            ("prefix_tokens", prefix_tokens),
            ("new_tokens", new_tokens),
            ("answer_tokens", answer_tokens),
            ("repeats", repeats),
            ("chains", chains),
        ):
            if value < 1:
                raise ConfigError(f"{name}: expected at least 1, found {value}")
        self.vocabulary = vocabulary
        self.total = count * repeats
        self._count, self._repeats, self._chains = count, repeats, chains
        self._prefix, self._new, self._answer = prefix_tokens, new_tokens, answer_tokens
        self._seed = seed

    def begin(self) -> list[Turn]:
        """The first of each chain."""
        return [self._turn(number) for number in range(min(self._chains, self.total))]

    def answered(self, number: int, answer: Sequence[int]) -> list[Turn]:
        """The next of its chain."""
        following = number + self._chains
        return [self._turn(following)] if following < self.total else []

    def _turn(self, number: int) -> Turn:
        prompt, repeat = divmod(number, self._repeats)
        prefix = np.random.default_rng((self._seed, prompt)).integers(
            self.vocabulary, size=self._prefix
        )
        new = np.random.default_rng((self._seed, prompt, repeat)).integers(
            self.vocabulary, size=self._new
        )
        tokens = np.concatenate([prefix, new]).astype(np.int32)
        return Turn(number, prompt, repeat, tokens, self._answer)
