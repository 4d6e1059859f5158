"""What `bench serve` asks: repeated prompts, prompts that return later, and conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from lightcache.tools.demo.conversations import Conversations
from lightcache.tools.demo.messages import Tokens, Turn

_VOCABULARY = 4096  # token ids that prompts are made of


class Workload(Protocol):
    """Turns, each of which may be asked as soon as it is returned."""

    total: int
    """Turns in all."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""

    def begin(self) -> list[Turn]:
        """The first turns."""

    def answered(self, turn: Turn, answer: Sequence[int]) -> list[Turn]:
        """The turns that an answer makes possible."""


class Prompts:
    """`count` prompts that share nothing. Each is asked `repeats` times in a row, with the same
    prefix and new tokens after it: all of the prefix can be reused, and no more."""

    def __init__(
        self,
        *,
        seed: int,
        count: int,
        prefix_tokens: int,
        new_tokens: int,
        answer_tokens: int,
        repeats: int = 1,
        chains: int = 1,
    ) -> None:
        """Args:
        chains: prompts that are asked at once.
        """
        self.total = count * repeats
        self._seed, self._repeats = seed, repeats
        self._sizes = prefix_tokens, new_tokens, answer_tokens
        self._chains = [self._order(range(at, count, chains)) for at in range(min(chains, count))]
        self._chain_of: dict[int, int] = {}

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return sum(self._sizes)

    def _order(self, prompts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs of a prompt and how often it was asked before."""
        return ((prompt, repeat) for prompt in prompts for repeat in range(self._repeats))

    def begin(self) -> list[Turn]:
        """The first of each chain."""
        return [turn for chain in range(len(self._chains)) for turn in self._next(chain)]

    def answered(self, turn: Turn, answer: Sequence[int]) -> list[Turn]:
        """The next of the same chain."""
        return self._next(self._chain_of.pop(turn.number))

    def _next(self, chain: int) -> list[Turn]:
        for prompt, repeat in self._chains[chain]:
            prefix_tokens, new_tokens, answer_tokens = self._sizes
            prefix = self._draw(0, prompt, 0, prefix_tokens)
            tokens = np.concatenate([prefix, self._draw(1, prompt, repeat, new_tokens)])
            number = prompt * self._repeats + repeat
            self._chain_of[number] = chain
            return [Turn(number, prompt, repeat, tokens, answer_tokens)]
        return []

    def _draw(self, kind: int, prompt: int, repeat: int, count: int) -> Tokens:
        # A seed is filled up with zeros, so it ends with a number that is none.
        random = np.random.default_rng((self._seed, kind, prompt, repeat, 1))
        return random.integers(0, _VOCABULARY, count, np.int32)


class Returning(Prompts):
    """Each prompt is asked; again after `lag` others were asked for the first time; and once more
    right after that. With a host that has room for fewer than `lag` prompts, the first is computed,
    the second comes from storage, and the third from the host."""

    def __init__(self, *, lag: int, count: int, **prompts: Any) -> None:
        """As `Prompts`, one at a time."""
        self._lag = lag
        super().__init__(count=count, repeats=3, **prompts)

    def _order(self, prompts: Sequence[int]) -> Iterator[tuple[int, int]]:
        for at in range(len(prompts) + self._lag):
            if at < len(prompts):
                yield at, 0
            if at >= self._lag:
                yield at - self._lag, 1
                yield at - self._lag, 2


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "conversations": Conversations,
    "prompts": Prompts,
    "returning": Returning,
}

__all__ = ["WORKLOADS", "Prompts", "Returning", "Workload"]
