"""Branching conversations as token ids: what the hybrid benchmark's requests are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Visit:
    """One request: what it asks, and what it is answered. Token ids, int64."""

    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True)
class Traffic:
    """Conversations of groups. Lengths are drawn evenly from ranges of tokens; none of them knows
    of pages."""

    groups: int = 45
    """Each has a document of its own, or examples, that its conversations begin with."""
    live: int = 40
    """Conversations that go on at a time; who asks next is drawn."""
    system: int = 1_213
    """A prompt that everybody begins with."""
    document: tuple[int, int] = (1_000, 10_000)
    conversations: tuple[int, int] = (3, 8)
    """Of a group. Every second one begins with a part of the document only, cut anywhere."""
    turns: tuple[int, int] = (1, 7)
    question: tuple[int, int] = (20, 600)
    answer: tuple[int, int] = (40, 900)
    again: float = 0.15
    """Of turns: the answer is generated once more, and the conversation goes on from that."""
    edited: float = 0.1
    """Of turns: an earlier one is asked in other words, and the conversation goes on from there."""
    fans: float = 0.12
    """Of turns: agents are sent out from the history with one instruction and a task each."""
    agents: tuple[int, int] = (3, 6)
    instruction: tuple[int, int] = (100, 700)
    seed: int = 0

    def visits(self) -> list[Visit]:
        """All requests, in the order of their arrival; the same for the same seed."""
        return list(_Talk(self).visits())


class _Talk:
    """Draws it."""

    def __init__(self, traffic: Traffic) -> None:
        self._of, self._chance = traffic, np.random.default_rng(traffic.seed)
        self._system = self._tokens(traffic.system)

    def visits(self) -> Iterator[Visit]:
        waiting = self._openings()
        live = [self._conversation(opening) for opening in _first(waiting, self._of.live)]
        while live:
            at = int(self._chance.integers(len(live)))
            visit = next(live[at], None)
            if visit is not None:
                yield visit
                continue
            live.pop(at)
            live += [self._conversation(opening) for opening in _first(waiting, 1)]

    def _openings(self) -> Iterator[Tokens]:
        """What each conversation begins with."""
        for _ in range(self._of.groups):
            document = self._some(self._of.document)
            for number in range(self._length(self._of.conversations)):
                whole = len(document)
                used = int(self._chance.integers(whole // 2, whole)) if number % 2 else whole
                yield np.concatenate([self._system, document[:used]])

    def _conversation(self, history: Tokens) -> Iterator[Visit]:
        before = [history]
        for _ in range(self._length(self._of.turns)):
            if self._happens(self._of.fans):
                yield from self._fan(history)
            if self._happens(self._of.edited):
                history = before[int(self._chance.integers(len(before)))]
            prompt = np.concatenate([history, self._some(self._of.question)])
            visit = self._answered(prompt)
            yield visit
            if self._happens(self._of.again):
                visit = self._answered(prompt)
                yield visit
            history = np.concatenate([prompt, visit.answer])
            before.append(history)

    def _fan(self, history: Tokens) -> Iterator[Visit]:
        shared = np.concatenate([history, self._some(self._of.instruction)])
        for _ in range(self._length(self._of.agents)):
            yield self._answered(np.concatenate([shared, self._some(self._of.question)]))

    def _answered(self, prompt: Tokens) -> Visit:
        return Visit(prompt, self._some(self._of.answer))

    def _happens(self, share: float) -> bool:
        return bool(self._chance.random() < share)

    def _length(self, span: tuple[int, int]) -> int:
        return int(self._chance.integers(span[0], span[1] + 1))

    def _some(self, span: tuple[int, int]) -> Tokens:
        return self._tokens(self._length(span))

    def _tokens(self, n: int) -> Tokens:
        return self._chance.integers(0, 150_000, n)


def _first(waiting: Iterator[Tokens], n: int) -> list[Tokens]:
    return [opening for _, opening in zip(range(n), waiting, strict=False)]


__all__ = ["Tokens", "Traffic", "Visit"]
