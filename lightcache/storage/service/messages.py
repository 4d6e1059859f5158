"""What clients and the storage service tell each other: bytes, checked strictly.

A ring's message is a `Part`: a head, and as much of a body as fits. A task's body (`Ask`) is split
into as many parts as it takes, in order; whoever reads them puts them together (`Halves`). The
answers are `Answer`s, one message each. All integers are little-endian; times are CLOCK_MONOTONIC,
which the processes of a node have in common.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from lightcache.namespaces import NAME_BYTES, Namespace
from lightcache.storage.protocol import Keys
from lightcache.storage.tasks import COUNTS, TaskState

VERSION = 1
PART_BYTES = 16 << 10
"""Of a message to the service: some thousand keys."""
ANSWER_BYTES = 1 << 10
MOST_KEYS = 1 << 16
"""Of one task: more would not pass through the ring in one piece."""

_MAGIC = b"lcST"
_HEAD = struct.Struct("<4sBBHIHHQQ")
_BODY = struct.Struct("<ddqQQIIIHH")
_ANSWER = struct.Struct(f"<4sBBHQI{len(COUNTS)}I")
_STATES = tuple(TaskState)
_NO_TOKENS = -1


class Malformed(Exception):
    """Bytes that are no message of ours."""


class Kind(IntEnum):
    """What is asked."""

    WRITE = 1
    PREFETCH = 2
    DEEPEST = 3
    STOP = 4
    """Of a task: begin nothing more."""
    CANCEL = 5
    ANSWER = 6
    """The other way."""


_TASKS = (Kind.WRITE, Kind.PREFETCH, Kind.DEEPEST)


@dataclass(frozen=True)
class Part:
    """A message to the service."""

    kind: Kind
    pid: int
    client: int
    """A number that the client drew when it began; with `pid`, the name of its answers' ring."""
    task: int
    """Number of the client's."""
    part: int
    parts: int
    data: bytes
    """Of the body."""

    def pack(self) -> bytes:
        """Its bytes."""
        head = (_MAGIC, VERSION, self.kind, 0, self.pid, self.part, self.parts)
        return _HEAD.pack(*head, self.client, self.task) + self.data

    @classmethod
    def unpack(cls, message: bytes) -> Part:
        """Read one.

        Raises:
            Malformed: it is none.
        """
        if len(message) < _HEAD.size:
            raise Malformed(f"{len(message)} bytes are no head")
        magic, version, kind, zero, pid, part, parts, client, task = _HEAD.unpack_from(message)
        if (magic, version, zero) != (_MAGIC, VERSION, 0):
            raise Malformed(f"magic {magic!r}, version {version}")
        if kind not in Kind.__members__.values() or kind == Kind.ANSWER:
            raise Malformed(f"kind {kind}")
        if not pid or not 0 <= part < parts:
            raise Malformed(f"part {part} of {parts}, pid {pid}")
        data = message[_HEAD.size :]
        if (kind in _TASKS) != bool(data) or (kind not in _TASKS and parts != 1):
            raise Malformed(f"{len(data)} bytes in part {part} of {parts} of kind {kind}")
        return cls(Kind(kind), pid, client, task, part, parts, data)


@dataclass(frozen=True)
class Ask:
    """A task: the body of `WRITE`, `PREFETCH` and `DEEPEST`."""

    end: float
    """When its time is up, by CLOCK_MONOTONIC."""
    timeout: float
    """Seconds that it had."""
    keys: Keys
    namespace: Namespace
    tokens: int | None = None
    """Of a write."""
    request: int | None = None
    """Of a write, of the client's."""
    start: int = 0
    """Of a prefetch."""
    most: int = 0
    """Of a `DEEPEST`."""

    def pack(self) -> bytes:
        """Its bytes."""
        space = self.namespace
        weights, tenant = space.weights.encode(), space.tenant.encode()
        body = _BODY.pack(
            self.end,
            self.timeout,
            _NO_TOKENS if self.tokens is None else self.tokens,
            0 if self.request is None else self.request,
            space.ref,
            self.request is not None,
            self.start,
            self.most,
            len(weights),
            len(tenant),
        )
        return b"".join((body, weights, tenant, self.keys.astype("<u8", copy=False).tobytes()))

    @classmethod
    def unpack(cls, body: bytes) -> Ask:
        """Read one.

        Raises:
            Malformed: it is none.
        """
        if len(body) < _BODY.size:
            raise Malformed(f"{len(body)} bytes are no task")
        end, timeout, tokens, request, ref, has, start, most, weights, tenant = _BODY.unpack_from(
            body
        )
        at = _BODY.size + weights + tenant
        keys = len(body) - at
        if max(weights, tenant) > NAME_BYTES or keys < 0 or keys % 16 or keys // 16 > MOST_KEYS:
            raise Malformed(f"{len(body)} bytes, names of {weights} and {tenant}")
        if math.isnan(end) or math.isnan(timeout) or tokens < _NO_TOKENS or has not in (0, 1):
            raise Malformed(f"end {end}, timeout {timeout}, {tokens} tokens")
        if ref > 0xFFFFFFFF:
            raise Malformed(f"namespace {ref:#x}")
        try:
            names = [body[_BODY.size : at - tenant].decode(), body[at - tenant : at].decode()]
        except UnicodeDecodeError as error:
            raise Malformed(str(error)) from None
        found = np.frombuffer(body, "<u8", offset=at).astype(np.uint64).reshape(-1, 2)
        return cls(
            end=end,
            timeout=timeout,
            keys=found,
            namespace=Namespace(names[0], names[1], ref),
            tokens=None if tokens == _NO_TOKENS else tokens,
            request=request if has else None,
            start=start,
            most=most,
        )


@dataclass(frozen=True)
class Answer:
    """How far a task has come."""

    task: int
    state: TaskState
    prefix: int
    counts: dict[str, int]
    """By the names of `COUNTS`."""
    reasons: tuple[str, ...]

    def pack(self) -> bytes:
        """Its bytes. Reasons that do not fit are cut off."""
        counts = [min(self.counts.get(name, 0), 0xFFFFFFFF) for name in COUNTS]
        head = (_MAGIC, VERSION, Kind.ANSWER, _STATES.index(self.state), self.task, self.prefix)
        text = "\0".join(self.reasons).encode("utf-8", "replace")[: ANSWER_BYTES - _ANSWER.size]
        return _ANSWER.pack(*head, *counts) + text.decode("utf-8", "ignore").encode()

    @classmethod
    def unpack(cls, message: bytes) -> Answer:
        """Read one.

        Raises:
            Malformed: it is none.
        """
        if len(message) < _ANSWER.size:
            raise Malformed(f"{len(message)} bytes are no answer")
        magic, version, kind, state, task, prefix, *counts = _ANSWER.unpack_from(message)
        if (magic, version, kind) != (_MAGIC, VERSION, Kind.ANSWER) or state >= len(_STATES):
            raise Malformed(f"magic {magic!r}, version {version}, kind {kind}, state {state}")
        try:
            text = message[_ANSWER.size :].decode()
        except UnicodeDecodeError as error:
            raise Malformed(str(error)) from None
        reasons = tuple(text.split("\0")) if text else ()
        return cls(task, _STATES[state], prefix, dict(zip(COUNTS, counts, strict=True)), reasons)


def split(kind: Kind, pid: int, client: int, task: int, body: bytes) -> list[bytes]:
    """The messages of a task, in the order in which they are to be pushed."""
    room = PART_BYTES - _HEAD.size
    parts = -(-len(body) // room)
    return [
        Part(kind, pid, client, task, i, parts, body[i * room : (i + 1) * room]).pack()
        for i in range(parts)
    ]


class Halves:
    """One client's parts, put together. A client pushes the parts of a task one behind another, so
    there is one task at most that is not whole: what a client began and left is dropped when it
    asks for something else."""

    def __init__(self) -> None:
        """Nothing has come."""
        self.dropped = 0
        self._parts: list[Part] = []

    def add(self, part: Part) -> bytes | None:
        """The body, when this part makes it whole.

        Raises:
            Malformed: not one that can follow; it is passed over.
        """
        if self._parts and not _follows(self._parts[-1], part):
            self.dropped += 1
            self._parts.clear()
        if part.part != len(self._parts):
            raise Malformed(f"part {part.part} of {part.parts} without those before it")
        room = PART_BYTES - _HEAD.size
        if (part.part + 1 < part.parts and len(part.data) != room) or part.parts > _MOST_PARTS:
            self._parts.clear()
            raise Malformed(f"part {part.part} of {part.parts} has {len(part.data)} bytes")
        self._parts.append(part)
        if part.part + 1 < part.parts:
            return None
        whole = b"".join(self._bodies())
        self._parts.clear()
        return whole

    @property
    def waiting(self) -> bool:
        """Whether a task has begun that is not whole."""
        return bool(self._parts)

    def _bodies(self) -> Iterator[bytes]:
        return (part.data for part in self._parts)


def _follows(before: Part, part: Part) -> bool:
    same = (before.kind, before.task, before.parts) == (part.kind, part.task, part.parts)
    return same and part.part == before.part + 1


_MOST_PARTS = -(-(_BODY.size + 2 * NAME_BYTES + 16 * MOST_KEYS) // (PART_BYTES - _HEAD.size))

__all__ = [
    "ANSWER_BYTES",
    "MOST_KEYS",
    "PART_BYTES",
    "Answer",
    "Ask",
    "Halves",
    "Kind",
    "Malformed",
    "Part",
    "split",
]
