"""A published request trace as a workload: Mooncake's JSON lines (Qin et al., FAST 2025).

Each line is one request: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`,
one for each block of 512 tokens, the last of which may be partial. Equal ids are equal prefixes.
The trace has no text: tokens are made from the ids, so that what was shared is shared again.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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

BLOCK_TOKENS = 512
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_LONGEST_LINE = 1 << 20  # bytes; a prompt of a million tokens has 2000 ids
_MAX_ID = (1 << 63) - 1


@dataclass(frozen=True)
class _Request:
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class Trace:
    """See `trace`."""

    def __init__(self, requests: list[_Request], blocks: Blocks, vocabulary: int) -> None:
        self._requests, self._blocks, self._vocabulary = requests, blocks, vocabulary
        self._ledger = Ledger(len(requests))
        # By induction over the file: requests that share a second block share a conversation, and
        # no others do. So two ids say which it is, as long as equal ids are equal prefixes.
        conversations: dict[tuple[int, ...], int] = {}
        turns: defaultdict[int, list[int]] = defaultdict(list)
        self._place: list[tuple[int, int]] = []  # (conversation, turn) of each request
        self._next: list[int | None] = [None] * len(requests)
        for number, request in enumerate(requests):
            opening = request.hash_ids[:2] if len(request.hash_ids) > 1 else (number,)
            conversation = conversations.setdefault(opening, len(conversations))
            if turns[conversation]:
                self._next[turns[conversation][-1]] = number
            self._place.append((conversation, len(turns[conversation])))
            turns[conversation].append(number)

    @property
    def total(self) -> int:
        """Requests in all: the limit, or fewer where the file has fewer."""
        return len(self._requests)

    @property
    def vocabulary(self) -> int:
        """Token ids are 0 to this, exclusive."""
        return self._vocabulary

    def begin(self) -> list[Turn]:
        """The first request of every conversation. Their prompts are made here: O(their tokens).

        Raises:
            ConfigError: it was called before.
        """
        self._ledger.begin()
        return [self._hand_out(at) for at, (_, turn) in enumerate(self._place) if turn == 0]

    def answered(self, number: int, answer: Sequence[int]) -> list[Turn]:
        """The next request of this conversation. Its prompt is the file's: the answer is not in it.

        Raises:
            ConfigError: see `Workload.answered`.
        """
        checked_answer(answer, self._vocabulary)
        after = self._next[self._ledger.answer(number)]
        return [] if after is None else [self._hand_out(after)]

    def _hand_out(self, number: int) -> Turn:
        self._ledger.ask(number)
        request, (conversation, turn) = self._requests[number], self._place[number]
        prompt = self._blocks.prompt(request.hash_ids, request.input_length)
        wanted = self._blocks.scaled(request.output_length)
        return Turn(number, conversation, turn, sealed(prompt), wanted)


class Blocks:
    """Tokens of blocks by their ids.

    A block begins with its id, shuffled by a bijection and written in base `vocabulary`, lowest
    digit first, in as many digits as 63 bits take. So full blocks of different ids differ, as far
    as there are as many blocks. What follows is drawn from the seed and the id.
    """

    def __init__(self, seed: int, scale: float, vocabulary: int) -> None:
        self._seed, self._scale, self._vocabulary = seed, scale, vocabulary
        self.tokens = self.scaled(BLOCK_TOKENS)
        self._digits = 1
        while self._digits < self.tokens and vocabulary**self._digits <= _MAX_ID:
            self._digits += 1
        self.different = vocabulary**self._digits
        """Ids below this are told apart."""
        random = np.random.default_rng(seed)
        self._factor = int(random.integers(1 << 62, 1 << 63))
        while math.gcd(self._factor, vocabulary) != 1:  # else it would not be a bijection
            self._factor += 1
        self._shift = int(random.integers(1 << 62))

    def scaled(self, tokens: int) -> int:
        """A count of tokens of the trace, in tokens here: at least 1."""
        return max(1, round(tokens * self._scale))

    def prompt(self, hash_ids: Sequence[int], length: int) -> Tokens:
        """The tokens of blocks of which the last may be partial; `length` is the trace's.

        Blocks are scaled one by one, or a shared one would be shifted against itself. So the result
        may differ from `scaled(length)` by half a token for each block.
        """
        rest = self.scaled(length - (len(hash_ids) - 1) * BLOCK_TOKENS)
        *full, last = (self._block(hash_id) for hash_id in hash_ids)
        return np.concatenate((*full, last[:rest]))

    def _block(self, hash_id: int) -> Tokens:
        code, digits = (hash_id * self._factor + self._shift) % self.different, []
        for _ in range(self._digits):
            code, digit = divmod(code, self._vocabulary)
            digits.append(digit)
        random = np.random.default_rng([self._seed, hash_id])
        drawn = random.integers(0, self._vocabulary, self.tokens - self._digits, np.int32)
        return np.concatenate((np.array(digits, np.int32), drawn))


def trace(
    path: str | os.PathLike[str], *, scale: float, limit: int, vocabulary: int, seed: int = 0
) -> Trace:
    """The first `limit` requests of a trace, or all there are: a `Workload`.

    A block of 512 tokens becomes one of round(512 * scale), at least 1; the last block of a prompt
    and the answers' lengths likewise. Equal ids become equal tokens, different ids different ones;
    only a partial block of few tokens may be another one's beginning.

    Requests that share more than the first block, which holds the system prompt that all
    share, are turns of one conversation. Each is asked after the one before it was answered, in the
    order of the file. Answers are not used, and neither are the times.

    Reads `limit` lines and keeps their ids and lengths: 40 bytes for each id, about.

    Raises:
        ConfigError: a scale that is not in (0, 1], a limit below 1; a file that is missing, empty
            or not of this format (the message has file and line); ids that the tokens of a
            block cannot tell apart.
    """
    found: object = scale
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found <= 1:
        raise ConfigError(f"scale: expected a number above 0 and at most 1, found {scale!r}")
    limit = count(limit, "limit", 1, MAX_COUNT)
    vocabulary = count(vocabulary, "vocabulary", 2, MAX_VOCABULARY)
    blocks = Blocks(count(seed, "seed", 0, _MAX_ID), scale, vocabulary)
    requests = []
    for where, line in _lines(path):
        requests.append(_request(line, where, blocks))
        if len(requests) == limit:
            break
    if not requests:
        raise ConfigError(f"{os.fspath(path)}: expected JSON lines, found an empty file")
    return Trace(requests, blocks, vocabulary)


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, bytes]]:
    """(file and line number, content) of each line that is not blank."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            # Bounded, because the rest of a line that never ends would fill the memory.
            for at, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
                where = f"{name}, line {at}"
                if len(line) > _LONGEST_LINE:
                    raise ConfigError(
                        f"{where}: expected at most {_LONGEST_LINE} bytes, found more; is this a "
                        "trace of JSON lines?"
                    )
                if line.strip():
                    yield where, line
    except OSError as problem:
        raise ConfigError(
            f"{name}: expected a file of JSON lines, found: {problem.strerror}"
        ) from None


def _request(line: bytes, where: str, blocks: Blocks) -> _Request:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{where}: expected a JSON object, found no JSON: {problem}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: expected a JSON object, found a {type(found).__name__}")
    missing = [key for key in _KEYS if key not in found]
    if missing:
        raise ConfigError(f"{where}: expected the keys {', '.join(_KEYS)}; {missing} are missing")
    ids = found["hash_ids"]
    if not isinstance(ids, list):
        raise ConfigError(f"{where}: hash_ids: expected a list, found {ids!r:.40}")
    length = count(found["input_length"], f"{where}: input_length", 1, MAX_COUNT)
    if len(ids) != -(-length // BLOCK_TOKENS):
        raise ConfigError(
            f"{where}: input_length {length} has {-(-length // BLOCK_TOKENS)} blocks of "
            f"{BLOCK_TOKENS} tokens, found {len(ids)} hash_ids"
        )
    ids = tuple(count(hash_id, f"{where}: hash_ids", 0, _MAX_ID) for hash_id in ids)
    if max(ids) >= blocks.different:
        raise ConfigError(
            f"{where}: {blocks.tokens} tokens of a block tell {blocks.different} hash_ids apart, "
            f"found {max(ids)}; choose a larger scale"
        )
    wanted = count(found["output_length"], f"{where}: output_length", 0, MAX_COUNT)
    return _Request(length, wanted, ids)
