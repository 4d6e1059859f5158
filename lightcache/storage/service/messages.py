"""Messages between clients and the storage service: bytes, checked strictly.

A message to the service is a `Part`: a head and a piece of a task's body (`Ask`). A body is split
into parts, in order; the service joins them (`PartBuffer`). Each answer is one `Answer`. All
integers are little-endian. Times are CLOCK_MONOTONIC, which all processes of a node share.
"""

from __future__ import annotations

import json
import operator
import struct
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from lightcache.errors import ConfigError
from lightcache.groups import Rule
from lightcache.namespaces import Namespace
from lightcache.runs import Run
from lightcache.storage.protocol import Keys
from lightcache.storage.tasks import COUNTS, TaskState

VERSION = 8
PART_BYTES = 16 << 10
"""Maximum size of a message to the service: about a thousand keys."""
ANSWER_BYTES = 1 << 10
MOST_KEYS = 1 << 16
"""Maximum keys of a task."""
MOST_PARTS = 66
"""Maximum parts of a task: those of `MOST_KEYS` keys, and of the rest of the body."""

_MAGIC = b"lcST"
_HEAD = struct.Struct("<4sBHHQQ")
_LENGTH = struct.Struct("<I")
_ANSWER = struct.Struct(f"<4sBBQI{len(COUNTS)}I")
_STATES = tuple(TaskState)
_NOWHERE = Namespace("", "", 0)
_ROOM = PART_BYTES - _HEAD.size
_UNREADABLE = (struct.error, ValueError, TypeError, AttributeError, RecursionError, ConfigError)


class Malformed(Exception):
    """The bytes are not a valid message."""


_ARGUMENTS: dict[str, set[str]] = {
    "write": {"request", "tokens"},
    "prefetch": {"start"},
    "prefetch_last_ready": {"groups", "start", "step", "most"},
    "stop": set(),
    "cancel": set(),
}
"""The calls, by the names of methods of `BaseTier`, and of `StorageTask` for a task that was begun;
and the arguments that are sent with each."""


@dataclass(frozen=True)
class Part:
    """A message to the service."""

    client: int
    """Its `client_word` in the ring of tasks."""
    task: int
    """The client's number of the task."""
    part: int
    parts: int
    data: bytes
    """A piece of the body."""

    def pack(self) -> bytes:
        """Its bytes."""
        head = (_MAGIC, VERSION, self.part, self.parts, self.client, self.task)
        return _HEAD.pack(*head) + self.data

    @classmethod
    def unpack(cls, message: bytes) -> Part:
        """Raises Malformed."""
        data = message[_HEAD.size :]
        try:
            magic, version, part, parts, client, task = _HEAD.unpack_from(message)
        except struct.error as error:
            raise Malformed(str(error)) from None
        known = (magic, version) == (_MAGIC, VERSION)
        if not (known and part < parts <= MOST_PARTS and data):
            raise Malformed(f"head {message[: _HEAD.size].hex()} with {len(data)} bytes")
        return cls(client, task, part, parts, data)


def split(client: int, task: int, body: bytes) -> list[bytes]:
    """The messages of a body, in the order to push them."""
    pieces = [body[at : at + _ROOM] for at in range(0, len(body), _ROOM)]
    parts = [Part(client, task, i, len(pieces), piece) for i, piece in enumerate(pieces)]
    return [part.pack() for part in parts]


class PartBuffer:
    """Joins the parts of one client. A client pushes the parts of a task in order, so at most one
    task is incomplete. It is dropped when another one begins, and counted in `halves`."""

    def __init__(self, counted: Counter[str]) -> None:
        """Empty."""
        self._counted = counted
        self._parts: list[Part] = []

    def add(self, part: Part) -> bytes | None:
        """Add a part. Returns the body if this part completes it.

        Raises:
            Malformed: the part is out of order; it is ignored.
        """
        if self._parts and part != replace(self._parts[0], part=len(self._parts), data=part.data):
            self.drop()
        if part.part != len(self._parts):
            raise Malformed(f"part {part.part} of {part.parts} without those before it")
        self._parts.append(part)
        if len(self._parts) < part.parts:
            return None
        body = b"".join(each.data for each in self._parts)
        self._parts.clear()
        return body

    def drop(self) -> None:
        """Forget an incomplete task."""
        self._counted["halves"] += bool(self._parts)
        self._parts.clear()


@dataclass(frozen=True)
class Ask:
    """The body of a call."""

    call: str
    """Its name."""
    end: float = 0.0
    """Its deadline, by CLOCK_MONOTONIC."""
    keys: Keys = field(default_factory=lambda: np.empty((0, 2), np.uint64))
    namespace: Namespace = _NOWHERE
    arguments: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the method. The tier checks their values."""

    @property
    def kind(self) -> Literal["read", "write"]:
        """See `StorageTask.kind`."""
        return "write" if self.call == "write" else "read"

    @property
    def pages(self) -> int:
        """The number of pages that are asked for."""
        start: int = self.arguments.get("start", 0)
        return len(self.keys) - start

    def pack(self) -> bytes:
        """Its bytes: a head in JSON, and the keys. The names of groups' rules are not sent."""
        space, how = self.namespace, dict(self.arguments)
        if "groups" in how:
            how["groups"] = [(r.align, r.back, run.group, run.parts) for r, run in how["groups"]]
        fields = (self.call, self.end, space.weights, space.tenant, space.ref, how)
        head = json.dumps(fields, default=operator.index).encode()
        return _LENGTH.pack(len(head)) + head + self.keys.astype("<u8", copy=False).tobytes()

    @classmethod
    def unpack(cls, body: bytes) -> Ask:
        """Raises Malformed."""
        try:
            start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
            call, end, weights, tenant, ref, how = json.loads(body[_LENGTH.size : start])
            keys = np.frombuffer(body[start:], "<u8").astype(np.uint64).reshape(-1, 2)
            types = tuple(map(type, (call, end, weights, tenant, ref)))
            if types != (str, float, str, str, int) or how.keys() != _ARGUMENTS.get(call):
                raise Malformed(f"{call!r} of {types} with {set(how)}")
            first = how.get("start", 0)
            if type(first) is not int or not 0 <= first <= len(keys):
                raise Malformed(f"a start of {first!r} in {len(keys)} keys")
            if not 0 <= ref <= 0xFFFFFFFF or end != end:
                raise Malformed(f"a number is out of range: {ref}, {end}")
            if "groups" in how:
                how["groups"] = [
                    (Rule(f"rule{i}", align, back), Run(group, parts))
                    for i, (align, back, group, parts) in enumerate(how["groups"])
                ]
        except _UNREADABLE as error:
            raise Malformed(str(error)) from None
        return cls(call, end, keys, Namespace(weights, tenant, ref), how)


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
        counts = (self.counts.get(name, 0) for name in COUNTS)
        state = _STATES.index(self.state)
        head = _ANSWER.pack(_MAGIC, VERSION, state, self.task, self.prefix, *counts)
        return (head + "\0".join(self.reasons).encode("utf-8", "replace"))[:ANSWER_BYTES]

    @classmethod
    def unpack(cls, message: bytes) -> Answer:
        """Raises Malformed."""
        try:
            magic, version, state, task, prefix, *counts = _ANSWER.unpack_from(message)
        except struct.error as error:
            raise Malformed(str(error)) from None
        if (magic, version) != (_MAGIC, VERSION) or state >= len(_STATES):
            raise Malformed(f"magic {magic!r}, version {version}, state {state}")
        text = message[_ANSWER.size :].decode("utf-8", "ignore")  # its end may be cut off
        reasons = tuple(text.split("\0")) if text else ()
        return cls(task, _STATES[state], prefix, dict(zip(COUNTS, counts, strict=True)), reasons)
