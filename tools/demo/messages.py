"""What the processes of a demo say to each other, and how it travels through rings.

A message is a frozen dataclass. On its way it is a JSON object, with the token ids behind it as
they are; larger ones go in several pieces, because a ring's messages have a largest size.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.errors import WaitTimeout
from lightcache.shm import SharedRing

Tokens = npt.NDArray[np.int32]

_PIECES = 64  # room in a ring
_PIECE_BYTES = 8192
_HEAD = struct.Struct("<QQHH")  # sender, message, piece, pieces
_LENGTH = struct.Struct("<I")
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Message:
    """What every message has."""

    tokens: Tokens = field(default_factory=lambda: _NO_TOKENS, kw_only=True, compare=False)
    """Token ids, int32 of shape (n,)."""


@dataclass(frozen=True)
class Hello(Message):
    """Worker to router and report: the model is there, and the inbox open."""

    worker: int
    life: int
    """0 for the first of this number, 1 for its successor."""
    pid: int
    cache: str | None
    """Name of its cache."""
    device: str | None
    """Name of the index of its device's blocks."""


@dataclass(frozen=True)
class Request(Message):
    """Router to worker: a prompt (`tokens`)."""

    number: int
    answer_tokens: int
    sent: float
    """Seconds, `time.monotonic()`: one clock for all processes."""
    cached: bool
    """Whether it goes through the cache."""
    baseline: bool
    """Compute the first token from nothing as well, afterwards, to compare."""
    hold: bool
    """Stop in the middle of the first offload, if there is one, and wait to be killed."""


@dataclass(frozen=True)
class Answer(Message):
    """Worker to router: the answer (`tokens`)."""

    number: int
    worker: int
    life: int
    logprobs: list[float]
    """Of each token of the answer."""
    reused: dict[str, int]
    """Tokens that were not computed, by the tier they came from."""
    loaded_bytes: int
    stored_bytes: int
    first_s: float
    """From `Request.sent` to the first token."""
    steps_s: list[float]
    """Between tokens."""
    total_s: float
    """From `Request.sent` until all is published."""
    lookup_s: float | None
    """Finding what there is of the prompt, and pinning it; None: it went past the cache."""
    baseline_s: float | None
    """To the first token, computed from nothing in the same process."""


@dataclass(frozen=True)
class Holding(Message):
    """Worker to report: in the middle of an offload, waiting to be killed."""

    number: int
    worker: int
    life: int
    copied: int
    pages: int


@dataclass(frozen=True)
class Lost(Message):
    """Report to router: a worker has ended."""

    worker: int
    life: int
    at: float
    """When this was noticed, or the signal sent; seconds, `time.monotonic()`."""


@dataclass(frozen=True)
class Recovered(Message):
    """Router to report: what a dead worker held can be used again."""

    worker: int
    number: int | None
    """The turn that it was at, which is asked again."""
    doomed: int
    """Pages of it that nobody may read."""
    clients: int
    """Dead clients that were reaped."""
    seconds: float
    """From `Lost.at` until its pages were given back."""


@dataclass(frozen=True)
class Served(Answer):
    """Router to report: a turn is over. `tokens` are the prompt, then the answer."""

    conversation: int
    turn: int
    prompt: int
    """Tokens of it."""
    attempts: int
    waited_s: float
    """From when the turn could be asked until its worker had time."""
    cached: bool
    """Whether it went through the cache."""


@dataclass(frozen=True)
class Finished(Message):
    """Router to report: every turn is answered."""

    turns: int
    seconds: float
    """From the first request to the last answer."""
    lookup_us: float
    """The median of `Answer.lookup_s`, in microseconds."""


@dataclass(frozen=True)
class Verify(Message):
    """Report to reference: compute this again. `tokens` are the prompt, then the answer."""

    number: int
    prompt: int
    logprobs: list[float]


@dataclass(frozen=True)
class Verified(Message):
    """Reference to report."""

    number: int
    equal: bool
    """Whether every token of the answer is the one that is chosen here."""
    difference: float
    """The largest between log-probabilities."""


@dataclass(frozen=True)
class Failed(Message):
    """Anybody to report: cannot go on, and why, in a line."""

    role: str
    reason: str


_TYPES = {each.__name__: each for each in (*Message.__subclasses__(), Served)}


def encode(message: Message) -> bytes:
    """A message as bytes."""
    fields = {
        each.name: getattr(message, each.name)
        for each in dataclasses.fields(message)
        if each.name != "tokens"
    }
    head = json.dumps([type(message).__name__, fields]).encode()
    return _LENGTH.pack(len(head)) + head + np.asarray(message.tokens, "<i4").tobytes()


def decode(data: bytes) -> Any:
    """What `encode` was given."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    name, fields = json.loads(data[_LENGTH.size : end])
    return _TYPES[name](**fields, tokens=np.frombuffer(data, "<i4", offset=end).astype(np.int32))


class Mailbox:
    """A ring that several processes send messages to and one receives them from."""

    def __init__(self, name: str) -> None:
        """Open it; whoever comes first creates it."""
        self._ring = SharedRing.open(name, capacity=_PIECES, message_bytes=_PIECE_BYTES)
        self._sender = int.from_bytes(os.urandom(8), "little")
        self._sent = 0
        self._pieces: dict[tuple[int, int], list[bytes]] = {}
        self._whole: deque[Any] = deque()

    def send(self, message: Message, timeout: float = 30.0) -> None:
        """Blocks while the ring is full.

        Raises:
            WaitTimeout: it was full for so long: nobody receives.
        """
        data = encode(message)
        size = _PIECE_BYTES - _HEAD.size
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        self._sent += 1
        for number, piece in enumerate(pieces):
            head = _HEAD.pack(self._sender, self._sent, number, len(pieces))
            self._ring.push(head + piece, timeout)

    def receive(self, timeout: float) -> Any:
        """The next message; None after `timeout` seconds without one. For one process, one thread.

        What a sender that was killed has sent in part never becomes a message.
        """
        end = time.monotonic() + timeout
        while not self._whole:
            try:
                self._take(self._ring.pop(max(0.0, end - time.monotonic())))
            except WaitTimeout:
                return None
        return self._whole.popleft()

    def _take(self, data: bytes) -> None:
        sender, message, number, count = _HEAD.unpack_from(data)
        pieces = self._pieces.setdefault((sender, message), [])
        if number != len(pieces):  # cannot be: one sender's pieces keep their order
            raise AssertionError(f"piece {number} of a message came after {len(pieces)}")
        pieces.append(data[_HEAD.size :])
        if len(pieces) == count:
            del self._pieces[sender, message]
            self._whole.append(decode(b"".join(pieces)))

    def close(self) -> None:
        """Leave. What is in it stays for the receiver."""
        self._ring.close()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
