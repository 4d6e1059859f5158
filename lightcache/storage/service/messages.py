"""Messages between clients and the storage service: bytes, checked strictly.

A message to the service is a `Part`: a head and a piece of a task's body (`Ask`). A body is split
into parts, in order; the service joins them (`PartBuffer`). Each answer is one `Answer`. All
integers are little-endian. Times are CLOCK_MONOTONIC, which all processes of a node share.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from lightcache.errors import ConfigError
from lightcache.groups import Rule
from lightcache.namespaces import NAME_BYTES, Namespace
from lightcache.runs import Run
from lightcache.storage.jobs import Groups
from lightcache.storage.protocol import Keys
from lightcache.storage.tasks import COUNTS, TaskState

VERSION = 6
PART_BYTES = 16 << 10
"""Maximum size of a message to the service: about a thousand keys."""
ANSWER_BYTES = 1 << 10
MOST_KEYS = 1 << 16
"""Maximum keys of a task."""
MOST_PARTS = 66
"""Maximum parts of a task: those of `MOST_KEYS` keys, and of the rest of the body."""

_MAGIC = b"lcST"
_HEAD = struct.Struct("<4sBBHIHHQQ")
_ASK = struct.Struct("<ddqQQIIIHHIHH")
_GROUP = struct.Struct("<QQHH")
_ANSWER = struct.Struct(f"<4sBBHQI{len(COUNTS)}I")
_STATES = tuple(TaskState)
_ROOM = PART_BYTES - _HEAD.size
_HAS_REQUEST = 1
_NO_TOKENS = -1


class Malformed(Exception):
    """The bytes are not a valid message."""


class Kind(IntEnum):
    """The kind of a message."""

    WRITE = 1
    PREFETCH = 2
    LAST_READY = 3
    STOP = 4
    """The task starts nothing more."""
    CANCEL = 5
    ANSWER = 6
    """From the service to the client."""


_TASKS = (Kind.WRITE, Kind.PREFETCH, Kind.LAST_READY)


@dataclass(frozen=True)
class Part:
    """A message to the service."""

    kind: Kind
    pid: int
    client: int
    """A random number of the client; with `pid`, it names the ring of the client's answers."""
    task: int
    """The client's number of the task."""
    part: int
    parts: int
    data: bytes
    """A piece of the body."""

    def pack(self) -> bytes:
        """Its bytes."""
        head = (_MAGIC, VERSION, self.kind, 0, self.pid, self.part, self.parts)
        return _HEAD.pack(*head, self.client, self.task) + self.data

    @classmethod
    def unpack(cls, message: bytes) -> Part:
        """Raises Malformed."""
        if len(message) < _HEAD.size:
            raise Malformed(f"{len(message)} bytes are no head")
        magic, version, kind, zero, pid, part, parts, client, task = _HEAD.unpack_from(message)
        data = message[_HEAD.size :]
        known = (magic, version, zero) == (_MAGIC, VERSION, 0) and kind in (*_TASKS, 4, 5)
        has_body = kind in _TASKS
        whole = bool(data) if has_body else not data and parts == 1
        if not (known and pid and 0 <= part < parts and whole):
            raise Malformed(f"head {message[: _HEAD.size].hex()} with {len(data)} bytes")
        return cls(Kind(kind), pid, client, task, part, parts, data)


def split(kind: Kind, pid: int, client: int, task: int, body: bytes) -> list[bytes]:
    """The messages of a task, in the order to push them."""
    parts = -(-len(body) // _ROOM)
    return [
        Part(kind, pid, client, task, i, parts, body[i * _ROOM : (i + 1) * _ROOM]).pack()
        for i in range(parts)
    ]


class PartBuffer:
    """Joins the parts of one client. A client pushes the parts of a task in order, so at most one
    task is incomplete. It is dropped when another one begins."""

    def __init__(self) -> None:
        """Empty."""
        self.dropped = 0
        self._parts: list[Part] = []

    def add(self, part: Part) -> bytes | None:
        """Add a part. Returns the body if this part completes it.

        Raises:
            Malformed: the part is out of order or has a wrong length; it is ignored.
        """
        if self._parts:
            last = self._parts[-1]
            same = (last.kind, last.task, last.parts) == (part.kind, part.task, part.parts)
            if not same or part.part != last.part + 1:
                self.dropped += 1
                self._parts.clear()
        if part.part != len(self._parts):
            raise Malformed(f"part {part.part} of {part.parts} without those before it")
        complete = part.part + 1 == part.parts
        if (not complete and len(part.data) != _ROOM) or part.parts > MOST_PARTS:
            self._parts.clear()
            raise Malformed(f"part {part.part} of {part.parts} has {len(part.data)} bytes")
        self._parts.append(part)
        if not complete:
            return None
        body = b"".join(each.data for each in self._parts)
        self._parts.clear()
        return body

    @property
    def waiting(self) -> bool:
        """True if a task is incomplete."""
        return bool(self._parts)


@dataclass(frozen=True)
class Ask:
    """The body of a task."""

    end: float
    """Its deadline, by CLOCK_MONOTONIC."""
    timeout: float
    """Its timeout in seconds."""
    keys: Keys
    namespace: Namespace
    tokens: int | None = None
    """For a write."""
    request: int | None = None
    """For a write: the client's number of the request."""
    start: int = 0
    """For a prefetch, and a `LAST_READY`."""
    most: int = 0
    """For a `LAST_READY`."""
    step: int = 1
    """The same."""
    groups: Groups = ()
    """The same. The names of the rules are not sent."""

    def pack(self) -> bytes:
        """Its bytes."""
        space = self.namespace
        weights, tenant = space.weights.encode(), space.tenant.encode()
        head = _ASK.pack(
            self.end,
            self.timeout,
            _NO_TOKENS if self.tokens is None else self.tokens,
            self.request or 0,
            space.ref,
            _HAS_REQUEST * (self.request is not None),
            self.start,
            self.most,
            self.step,
            len(self.groups),
            len(self.keys),
            len(weights),
            len(tenant),
        )
        keys = self.keys.astype("<u8", copy=False).tobytes()
        numbers = ((rule.align, rule.back, run.group, run.parts) for rule, run in self.groups)
        groups = b"".join(_GROUP.pack(*each) for each in numbers)
        return b"".join((head, groups, weights, tenant, keys))

    @classmethod
    def unpack(cls, body: bytes) -> Ask:
        """Raises Malformed."""
        if len(body) < _ASK.size:
            raise Malformed(f"{len(body)} bytes are no task")
        (end, timeout, tokens, request, ref, has, start, most, step, n, keys, weights, tenant) = (
            _ASK.unpack_from(body)
        )
        names_at = _ASK.size + n * _GROUP.size
        first = names_at + weights + tenant
        bad_number = math.isnan(end) or math.isnan(timeout) or tokens < _NO_TOKENS
        bad_length = max(weights, tenant) > NAME_BYTES or keys > MOST_KEYS
        bad_length = bad_length or len(body) != first + 16 * keys
        bad_flags = has & ~_HAS_REQUEST
        if bad_number or bad_length or bad_flags or ref > 0xFFFFFFFF:
            raise Malformed(f"head {body[: _ASK.size].hex()} of a body of {len(body)} bytes")
        try:
            names = body[names_at : first - tenant].decode(), body[first - tenant : first].decode()
            each = enumerate(_GROUP.iter_unpack(body[_ASK.size : names_at]))
            groups = tuple((Rule(f"rule{i}", *of[:2]), Run(*of[2:])) for i, of in each)
        except (UnicodeDecodeError, ConfigError) as error:
            raise Malformed(str(error)) from None
        return cls(
            end=end,
            timeout=timeout,
            keys=np.frombuffer(body, "<u8", 2 * keys, first).astype(np.uint64).reshape(-1, 2),
            namespace=Namespace(*names, ref),
            tokens=None if tokens == _NO_TOKENS else tokens,
            request=request if has & _HAS_REQUEST else None,
            start=start,
            most=most,
            step=step,
            groups=groups,
        )


@dataclass(frozen=True)
class Answer:
    """The state of a task."""

    task: int
    state: TaskState
    prefix: int
    counts: dict[str, int]
    """By the names of `COUNTS`."""
    reasons: tuple[str, ...]

    def pack(self) -> bytes:
        """Its bytes. Reasons are cut off where they do not fit."""
        counts = [min(self.counts.get(name, 0), 0xFFFFFFFF) for name in COUNTS]
        head = (_MAGIC, VERSION, Kind.ANSWER, _STATES.index(self.state), self.task, self.prefix)
        text = "\0".join(self.reasons).encode("utf-8", "replace")[: ANSWER_BYTES - _ANSWER.size]
        return _ANSWER.pack(*head, *counts) + text.decode("utf-8", "ignore").encode()

    @classmethod
    def unpack(cls, message: bytes) -> Answer:
        """Raises Malformed."""
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


__all__ = [
    "ANSWER_BYTES",
    "MOST_KEYS",
    "MOST_PARTS",
    "PART_BYTES",
    "VERSION",
    "Answer",
    "Ask",
    "Kind",
    "Malformed",
    "Part",
    "PartBuffer",
    "split",
]
