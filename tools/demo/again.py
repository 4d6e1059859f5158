"""What is asked after a restart: the next turn of conversations that were begun before it.

They travel in a file: the prompts of a trace are too long for a command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightcache.errors import ConfigError
from lightcache.tools.demo.messages import Served
from lightcache.tools.demo.turns import Ledger, Turn, checked_answer, sealed

_MESSAGE = 32  # tokens that are asked next


class Again:
    """Turns that another run has left: see `write_again`. The first is asked alone, so that what it
    finds nobody has brought there for it; its answer releases all others."""

    def __init__(self, *, path: str, first: int, vocabulary: int, seed: int = 0) -> None:
        """Read them all.

        Args:
            path: of the file.
            first: number of the first turn.
            seed: of no matter, like all that was drawn before.

        Raises:
            ConfigError: it cannot be read, or there is no turn in it.
        """
        try:
            found = json.loads(Path(path).read_text())
            turns = [_turn(first + at, each) for at, each in enumerate(found)]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"path: expected turns that `write_again` wrote, found {path!r}: {error}"
            ) from None
        if not turns:
            raise ConfigError(f"path: expected one turn at least, found none in {path!r}")
        self.vocabulary, self.total = vocabulary, len(turns)
        self._turns, self._first = turns, first
        self._ledger = Ledger(len(turns))

    def begin(self) -> list[Turn]:
        """The first turn.

        Raises:
            ConfigError: it was called before.
        """
        self._ledger.begin()
        return self._hand_out(0, 1)

    def answered(self, number: int, answer: Sequence[int]) -> list[Turn]:
        """All others, behind the first answer.

        Raises:
            ConfigError: see `Workload.answered`.
        """
        checked_answer(answer, self.vocabulary)
        at = self._ledger.answer(number - self._first)
        return [] if at else self._hand_out(1, self.total)

    def _hand_out(self, begin: int, end: int) -> list[Turn]:
        for at in range(begin, end):
            self._ledger.ask(at)
        return self._turns[begin:end]


def _turn(number: int, found: Any) -> Turn:
    tokens = sealed(np.array(found["tokens"], np.int32))
    return Turn(number, found["conversation"], found["turn"], tokens, found["answer_tokens"])


def write_again(
    path: Path,
    served: Iterable[Served],
    count: int,
    *,
    vocabulary: int,
    positions: int | None,
    seed: int,
) -> int:
    """Write the next turns of the conversations that were asked last, the one of the lowest number
    first: prompt and answer of their last turn, and a new message.

    Args:
        served: turns as they were answered.
        count: of conversations, at most.
        positions: tokens that the model can take; None: any number. A conversation that is too long
            to go on is asked its last turn again.
        seed: of the messages.

    Returns:
        Turns that were written.
    """
    last = {turn.conversation: turn for turn in served}
    newest = sorted(last.values(), key=lambda turn: turn.number)[-count:]
    random = np.random.default_rng((seed, len(last)))
    written = []
    for turn in sorted(newest, key=lambda turn: turn.conversation):
        answer = len(turn.tokens) - turn.prompt
        message = random.integers(0, vocabulary, _MESSAGE, np.int32)
        following, tokens = turn.turn + 1, np.concatenate([turn.tokens, message])
        if positions is not None and len(tokens) + answer > positions:
            following, tokens = turn.turn, turn.tokens[: turn.prompt]
        written.append(
            {
                "conversation": turn.conversation,
                "turn": following,
                "tokens": tokens.tolist(),
                "answer_tokens": answer,
            }
        )
    path.write_text(json.dumps(written))
    return len(written)


__all__ = ["Again", "write_again"]
