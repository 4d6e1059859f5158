"""Conversations that are made up: one system prompt, several users, histories that fork.

Everything but the answers is drawn from the seed beforehand, and so are the numbers: what is asked
never depends on who answers first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightcache._arguments import count
from lightcache.errors import ConfigError
from lightcache.tools.demo.turns import (
    MAX_COUNT,
    MAX_VOCABULARY,
    Ledger,
    Tokens,
    Turn,
    checked_answer,
    sealed,
)

_ONE_IN = 4  # users who go back once, unless told otherwise


@dataclass(frozen=True)
class _Planned:
    """A turn before anything was answered. Other turns are named by (conversation, turn)."""

    conversation: int
    turn: int
    round: int
    """How many answers come before it at least: turns are numbered in this order."""
    message: Tokens
    history: tuple[int, int] | None
    """The turn whose prompt and answer this one goes on from; None: the system prompt alone."""
    after: tuple[int, int] | None
    """The turn whose answer releases this one; of a branch it is a later one than `history`."""


class Conversations:
    """See `conversations`."""

    def __init__(self, system: Tokens, plan: list[_Planned], vocabulary: int, answer: int) -> None:
        self._plan = sorted(plan, key=lambda one: (one.round, one.conversation))
        self._vocabulary, self._answer_tokens = vocabulary, answer
        self._ledger = Ledger(len(plan))
        numbers = {(one.conversation, one.turn): at for at, one in enumerate(self._plan)}
        self._history_of = [one.history and numbers[one.history] for one in self._plan]
        self._releases: list[list[int]] = [[] for _ in plan]
        self._users_of_history = [0] * len(plan)  # turns to come that go on from each
        for at, one in enumerate(self._plan):
            if one.after is not None and one.history is not None:
                self._releases[numbers[one.after]].append(at)
                self._users_of_history[numbers[one.history]] += 1
        self._system = system
        self._prompts: dict[int, Tokens] = {}  # handed out and not answered
        self._histories: dict[int, Tokens] = {}  # answered, and somebody goes on from it

    @property
    def total(self) -> int:
        """Turns in all, those of the branches included."""
        return len(self._plan)

    @property
    def vocabulary(self) -> int:
        """Token ids are 0 to this, exclusive."""
        return self._vocabulary

    def begin(self) -> list[Turn]:
        """The first turn of every user.

        Raises:
            ConfigError: it was called before.
        """
        self._ledger.begin()
        return [self._hand_out(at) for at, one in enumerate(self._plan) if one.after is None]

    def answered(self, number: int, answer: Sequence[int]) -> list[Turn]:
        """The next turn of this conversation, and the branches that fork now.

        Raises:
            ConfigError: see `Workload.answered`.
        """
        tokens = checked_answer(answer, self._vocabulary)
        number = self._ledger.answer(number)
        prompt = self._prompts.pop(number)
        if self._users_of_history[number]:
            self._histories[number] = np.concatenate((prompt, tokens))
        return [self._hand_out(at) for at in self._releases[number]]

    def _hand_out(self, number: int) -> Turn:
        self._ledger.ask(number)
        one, history = self._plan[number], self._history_of[number]
        before = self._system if history is None else self._histories[history]
        if history is not None:
            self._users_of_history[history] -= 1
            if not self._users_of_history[history]:
                del self._histories[history]
        prompt = self._prompts[number] = sealed(np.concatenate((before, one.message)))
        return Turn(number, one.conversation, one.turn, prompt, self._answer_tokens)


def conversations(
    *,
    seed: int,
    users: int,
    turns: int,
    system_tokens: int,
    message_tokens: int,
    answer_tokens: int,
    vocabulary: int,
    branches: int | None = None,
) -> Conversations:
    """Users who talk to one assistant: a `Workload`.

    All share a system prompt of `system_tokens` (it may be empty). Each prompt is the conversation
    so far, with the answers as they were given, and a new message of `message_tokens` on average,
    evenly between half and one and a half times that. Tokens are drawn evenly from the vocabulary.

    Branches: that many users (at most all, each once; None: one in four, rounded up, if
    there are two turns at least) go back, after one of their answers, to a turn before it that is
    not their first, and ask something else instead. What follows is a conversation of its own,
    numbered from `users`, with the turns that were left from there on. It shares the history up to
    where it forks, the answers included, and nothing behind it.

    Turns are numbered by round, and within a round by conversation, so a number is always higher
    than those it waits for. Memory: the open prompts, and the histories to go on from.

    Raises:
        ConfigError: a count that is none, more branches than users, branches of a single turn.
    """
    seed = count(seed, "seed", 0, (1 << 63) - 1)
    users = count(users, "users", 1, MAX_COUNT)
    turns = count(turns, "turns", 1, MAX_COUNT)
    system_tokens = count(system_tokens, "system_tokens", 0, MAX_COUNT)
    message_tokens = count(message_tokens, "message_tokens", 1, MAX_COUNT)
    answer_tokens = count(answer_tokens, "answer_tokens", 1, MAX_COUNT)
    vocabulary = count(vocabulary, "vocabulary", 2, MAX_VOCABULARY)
    if branches is None:
        branches = -(-users // _ONE_IN) if turns > 1 else 0
    branches = count(branches, "branches (one for each user at most)", 0, users)
    if branches and turns < 2:
        raise ConfigError(f"branches: {branches} need conversations of 2 turns, found turns=1")

    random = np.random.default_rng(seed)
    system = random.integers(0, vocabulary, system_tokens, np.int32)

    def message() -> Tokens:
        length = random.integers(-(-message_tokens // 2), message_tokens * 3 // 2, endpoint=True)
        return random.integers(0, vocabulary, int(length), np.int32)

    def chain(conversation: int, length: int, first_round: int) -> list[_Planned]:
        before = [None, *((conversation, turn) for turn in range(length))]
        return [
            _Planned(conversation, turn, first_round + turn, message(), before[turn], before[turn])
            for turn in range(length)
        ]

    plan = [one for user in range(users) for one in chain(user, turns, 0)]
    leavers = sorted(random.choice(users, branches, replace=False).tolist())
    for conversation, user in enumerate(leavers, start=users):
        fork = int(random.integers(1, turns))  # the turn that is asked differently
        regret = int(random.integers(fork, turns))  # the answer that sends the user back to it
        first, *rest = chain(conversation, turns - fork, regret + 1)
        plan += [replace(first, history=(user, fork - 1), after=(user, regret)), *rest]
    return Conversations(system, plan, vocabulary, answer_tokens)
