"""One turn of a conversation, and what every workload keeps about its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import count
from lightcache.errors import ConfigError

Tokens = npt.NDArray[np.int32]  # shape (n,)

MAX_COUNT = 1 << 30  # of users, turns, tokens: far beyond any run, and safe in an int32
MAX_VOCABULARY = (1 << 31) - 1


@dataclass(frozen=True, eq=False)  # arrays have no truth value, so turns are compared by `number`
class Turn:
    """A prompt to ask, and how much of an answer is wanted."""

    number: int
    """0 to `total` - 1 within the workload. Depends on nothing but the workload's arguments."""
    conversation: int
    """Which conversation, from 0. A branch is a conversation of its own."""
    turn: int
    """From 0 within the conversation."""
    tokens: Tokens
    """The whole prompt, int32 of shape (n,) with n >= 1, read-only; its receiver owns it."""
    answer_tokens: int
    """How many tokens to generate, at least 1."""


class Ledger:
    """Which turns were handed out, and which were answered. Not thread-safe."""

    def __init__(self, total: int) -> None:
        self._asked = np.zeros(total, bool)
        self._answered = np.zeros(total, bool)
        self._began = False

    def begin(self) -> None:
        """Note that the first turns are handed out.

        Raises:
            ConfigError: it was called before.
        """
        if self._began:
            raise ConfigError("the workload has begun; make another one to begin again")
        self._began = True

    def ask(self, number: int) -> None:
        """Note that a turn is handed out; each is once."""
        assert not self._asked[number], f"turn {number} is handed out twice"
        self._asked[number] = True

    def answer(self, number: int) -> int:
        """Note that a turn was answered, and return its number.

        Raises:
            ConfigError: no such turn, not handed out yet, or answered before.
        """
        number = count(number, "number of the turn", 0, len(self._asked) - 1)
        if not self._asked[number]:
            raise ConfigError(f"turn {number} was not handed out yet; answer what `begin` gave")
        if self._answered[number]:
            raise ConfigError(f"turn {number} was answered before; report each answer once")
        self._answered[number] = True
        return number


def checked_answer(answer: Sequence[int], vocabulary: int) -> Tokens:
    """An answer as int32 of shape (n,).

    Raises:
        ConfigError: not one row of integers of 0 to `vocabulary` - 1.
    """
    try:
        found: npt.NDArray[Any] = np.asarray(answer)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"answer: expected one row of token ids: {problem}") from None
    if found.size == 0:
        return np.zeros(0, np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigError(
            f"answer: expected one row of token ids, found {found.dtype} of shape {found.shape}"
        )
    if found.min() < 0 or found.max() >= vocabulary:
        raise ConfigError(
            f"answer: expected token ids of 0 to {vocabulary - 1}, found {found.min()} to "
            f"{found.max()}; give the workload the vocabulary of the model"
        )
    return found.astype(np.int32)


def sealed(tokens: Tokens) -> Tokens:
    """The array itself, made read-only: a prompt that changes would change its keys."""
    tokens.flags.writeable = False
    return tokens
