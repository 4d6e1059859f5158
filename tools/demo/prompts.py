"""Prompts of one length, each asked once or more: for measuring, not for showing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightcache.errors import ConfigError
from lightcache.tools.demo.turns import Ledger, Turn, checked_answer, sealed


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
        self._ledger = Ledger(self.total)

    def begin(self) -> list[Turn]:
        """The first of each chain.

        Raises:
            ConfigError: it was called before.
        """
        self._ledger.begin()
        return [self._turn(prompt, 0) for prompt in range(min(self._chains, self._count))]

    def answered(self, number: int, answer: Sequence[int]) -> list[Turn]:
        """The same prompt once more, or the next one of its chain.

        Raises:
            ConfigError: see `Workload.answered`.
        """
        checked_answer(answer, self.vocabulary)
        prompt, repeat = divmod(self._ledger.answer(number), self._repeats)
        if repeat + 1 < self._repeats:
            return [self._turn(prompt, repeat + 1)]
        following = prompt + self._chains
        return [self._turn(following, 0)] if following < self._count else []

    def _turn(self, prompt: int, repeat: int) -> Turn:
        number = prompt * self._repeats + repeat
        self._ledger.ask(number)
        # Seeds are filled up with zeros, so the two differ by a number that is not 0.
        prefix = np.random.default_rng((self._seed, prompt)).integers(
            self.vocabulary, size=self._prefix
        )
        new = np.random.default_rng((self._seed, prompt, 1 + repeat)).integers(
            self.vocabulary, size=self._new
        )
        tokens = sealed(np.concatenate([prefix, new]).astype(np.int32))
        return Turn(number, prompt, repeat, tokens, self._answer)
