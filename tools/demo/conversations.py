"""What is asked: conversations of several users that share one system prompt, made up of a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightcache.tools.demo.messages import Tokens, Turn

_VOCABULARY = 4096  # token ids that prompts are made of: every model has as many


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
        self._shortest, self._longest = (message_tokens + 1) // 2, message_tokens * 3 // 2
        self._answer = answer_tokens
        self._system = self._draw(0, 0, 0, system_tokens)
        self._said: dict[int, Tokens] = {}
        """Of each conversation, the last prompt and its answer; in the order of the answers."""
        self._asked = 0
        self.total = users * turns

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, of the turns after a restart as well."""
        return len(self._system) + (self._turns + 1) * (self._longest + self._answer)

    def begin(self) -> list[Turn]:
        """The first turn of every user."""
        return [self._ask(user, 0, self._system) for user in range(self._users)]

    def answered(self, turn: Turn, answer: Sequence[int]) -> list[Turn]:
        """The turn that an answer makes possible, if the conversation has another."""
        tokens = np.concatenate([turn.prompt, np.array(answer, np.int32)])
        self._said.pop(turn.conversation, None)
        self._said[turn.conversation] = tokens
        following = turn.turn + 1
        return [self._ask(turn.conversation, following, tokens)] if following < self._turns else []

    def resume(self, most: int) -> list[Turn]:
        """One more turn of the conversations that were answered last."""
        last = list(self._said.items())[-most:]
        return [self._ask(conversation, self._turns, tokens) for conversation, tokens in last]

    def _ask(self, conversation: int, turn: int, tokens: Tokens) -> Turn:
        message = self._draw(1, conversation, turn, self._longest)
        length = self._shortest + int(message[0]) % (self._longest - self._shortest + 1)
        prompt = np.concatenate([tokens, message[:length]])
        self._asked += 1
        return Turn(self._asked - 1, conversation, turn, prompt, self._answer)

    def _draw(self, *key_and_count: int) -> Tokens:
        *key, count = key_and_count
        random = np.random.default_rng((self._seed, *key))
        return random.integers(0, _VOCABULARY, count, np.int32)
