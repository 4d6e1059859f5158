"""What is asked: conversations of several users that share one system prompt, made up of a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightcache.tools.demo.messages import Tokens

_VOCABULARY = 4096  # token ids that prompts are made of: every model has as many


@dataclass(frozen=True)
class Turn:
    """One prompt of a conversation: all turns before it with their answers, and a new message."""

    number: int
    conversation: int
    turn: int
    prompt: Tokens
    answer_tokens: int


class Conversations:
    """Hands out turns, and makes the next ones from the answers."""

    def __init__(
        self,
        *,
        seed: int,
        users: int,
        turns: int,
        system_tokens: int = 384,
        message_tokens: int = 48,
        answer_tokens: int = 16,
    ) -> None:
        """Nothing is asked yet.

        Args:
            turns: of each conversation.
            message_tokens: on average; drawn evenly from half to one and a half times that.
        """
        self._seed, self._users, self._turns = seed, users, turns
        self._message, self._answer = message_tokens, answer_tokens
        self._system = self._draw(0, 0, 0, system_tokens)
        self._asked: dict[int, Turn] = {}
        self._said: dict[int, Tokens] = {}
        """Of each conversation, the last prompt and its answer; in the order of the answers."""
        self._numbers = 0
        self.total = users * turns

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, of the turns after a restart as well."""
        return len(self._system) + (self._turns + 1) * (self._message * 3 // 2 + self._answer)

    def begin(self) -> list[Turn]:
        """The first turn of every user."""
        return [self._ask(user, 0, self._system) for user in range(self._users)]

    def answered(self, number: int, answer: Tokens) -> list[Turn]:
        """The turn that an answer makes possible, if there is one."""
        turn = self._asked.pop(number)
        tokens = np.concatenate([turn.prompt, answer])
        self._said.pop(turn.conversation, None)
        self._said[turn.conversation] = tokens
        last = turn.turn + 1 == self._turns
        return [] if last else [self._ask(turn.conversation, turn.turn + 1, tokens)]

    def resume(self, most: int) -> list[Turn]:
        """One more turn of the conversations that were asked last."""
        last = list(self._said.items())[-most:]
        return [self._ask(conversation, self._turns, tokens) for conversation, tokens in last]

    def _ask(self, conversation: int, turn: int, tokens: Tokens) -> Turn:
        most = self._message * 3 // 2
        message = self._draw(1, conversation, turn, most)
        length = (self._message + 1) // 2 + int(message[0]) % (most - (self._message + 1) // 2 + 1)
        prompt = np.concatenate([tokens, message[:length]])
        following = Turn(self._numbers, conversation, turn, prompt, self._answer)
        self._asked[following.number] = following
        self._numbers += 1
        return following

    def _draw(self, *key_and_count: int) -> Tokens:
        *key, count = key_and_count
        random = np.random.default_rng((self._seed, *key))
        return random.integers(0, _VOCABULARY, count, np.int32)
