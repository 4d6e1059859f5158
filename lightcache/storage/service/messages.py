"""What clients and the storage service tell each other: bytes, checked strictly.

A ring's message is a `Part`: a head, and as much of a body as fits. A task's body (see `bodies`) is
split into as many parts as it takes, in order; whoever reads them puts them together (`Halves`).
The answers are `Answer`s, one message each. All integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from lightcache.storage.tiers import COUNTS, TaskState

VERSION = 2
PART_BYTES = 16 << 10
"""Of a message to the service: some thousand keys."""
ANSWER_BYTES = 1 << 10
MOST_PARTS = 240
"""Of one task: more would not pass through the ring in one piece, with those of others."""

_MAGIC = b"lcST"
_HEAD = struct.Struct("<4sBBHIHHQQ")
_ANSWER = struct.Struct(f"<4sBBHQI{len(COUNTS)}I")
_STATES = tuple(TaskState)


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
    PUBLISH = 7
    """Of a prefetch with `hold`: a task of its own."""


_TASKS = (Kind.WRITE, Kind.PREFETCH, Kind.DEEPEST, Kind.PUBLISH)
MOST_BYTES = MOST_PARTS * (PART_BYTES - _HEAD.size)
"""Of a body."""


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
        if (part.part + 1 < part.parts and len(part.data) != room) or part.parts > MOST_PARTS:
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


__all__ = [
    "ANSWER_BYTES",
    "MOST_BYTES",
    "MOST_PARTS",
    "PART_BYTES",
    "VERSION",
    "Answer",
    "Halves",
    "Kind",
    "Malformed",
    "Part",
    "split",
]
