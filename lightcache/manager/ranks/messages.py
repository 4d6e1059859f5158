"""Messages that a coordinator writes to its log for the ranks: copy orders and step decisions.

A message is a head, JSON and bytes. A message longer than a log entry is split over several. Each
entry says whether a message begins or ends in it. So a reader that joined in the middle of a
message, or whose writer died there, continues with the next one."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import count
from lightcache.errors import CacheCorrupted, ConfigError, LayoutMismatch
from lightcache.leases import TICKET_BYTES
from lightcache.shm import SharedLog

Slots = npt.NDArray[np.int64]
RequestId = int | str
"""A request's id in messages; the same value on both sides."""

VERSION = 2
_PART = struct.Struct("<BB")  # version, flags
_BEGINS, _ENDS = 1, 2
_HEAD = struct.Struct("<BI")  # kind, bytes of JSON
LEAST_ENTRY = 16
"""Least size of a log entry, in bytes."""


class Kind(IntEnum):
    """Kind of a message."""

    LOAD = 1
    OFFLOAD = 2
    SAVE = 3
    """Offload to pages without a key."""
    STEP = 4
    STARTUP = 5
    """Empty. A rank that has read it is ready."""


@dataclass(frozen=True)
class Decisions:
    """The decisions of one scheduler step. Every rank carries out exactly these.

    Raises:
        ConfigError: `step` is no count, the id of a request is neither int nor str, or `extra` is
            not bytes.
    """

    step: int
    """Number of the step."""
    lengths: Mapping[RequestId, tuple[int, int]] = field(default_factory=dict)
    """For each request that begins: tokens on the device, and tokens that need not be computed."""
    extra: bytes = b""
    """Data of the engine: block tables, or their changes."""
    completed: tuple[int, ...] = ()
    """Numbers of the copies that have finished on every rank since the last step."""
    failed: tuple[int, ...] = ()
    """Numbers of the copies that failed on at least one rank, so for all: compute their tokens."""
    releases: tuple[RequestId, ...] = ()
    """Requests that have ended."""

    def __post_init__(self) -> None:
        count(self.step, "step", 0, 1 << 62)
        for request in (*self.lengths, *self.releases):
            if type(request) not in (int, str):
                raise ConfigError(
                    f"request ids in messages: expected int or str, found {request!r}; send a "
                    "number of your own instead"
                )
        if not isinstance(self.extra, bytes):
            raise ConfigError(f"extra: expected bytes, found {type(self.extra).__name__}")


@dataclass(frozen=True, eq=False)
class Order:
    """One copy that every rank makes, each of its own share."""

    kind: Kind
    number: int
    """Number of the order, from 1 on."""
    ticket: bytes
    slots: Slots
    """Slots of all tokens of the ticket's pages from `first` on; -1 skips a token."""
    first: int = 0
    group: int = 0
    """Of the host cache's groups: the one whose pages these are."""
    positions: tuple[int, ...] | None = None
    """Of an offload of pages in parts of which some were there: where the ticket's parts lie among
    all parts of the pages of `slots`. None: all of them are the ticket's."""


Message = Order | Decisions | None
"""None: the startup message."""


# ---- Messages as bytes


def encode(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
        ConfigError: a value is neither a number nor text, or slots are no row of integers.
    """
    if message is None:
        return _packed(Kind.STARTUP, {}, b"")
    if isinstance(message, Order):
        fields: dict[str, Any] = {"n": message.number, "f": message.first}
        if message.group:
            fields["g"] = message.group
        if message.positions is not None:
            fields["p"] = list(message.positions)
        return _packed(message.kind, fields, message.ticket + _runs(message.slots))
    lengths = [[request, int(have), int(use)] for request, (have, use) in message.lengths.items()]
    fields = {
        "n": message.step,
        "l": lengths,
        "c": list(message.completed),
        "f": list(message.failed),
        "r": list(message.releases),
    }
    return _packed(Kind.STEP, fields, message.extra)


def decode(data: bytes) -> Message:
    """The message that `encode` wrote.

    Raises:
        CacheCorrupted: the bytes were not written by `encode`.
    """
    try:
        kind, size = _HEAD.unpack_from(data)
        fields: Any = json.loads(data[_HEAD.size : _HEAD.size + size])
        rest = data[_HEAD.size + size :]
        if Kind(kind) is Kind.STARTUP:
            return None
        if Kind(kind) is not Kind.STEP:
            ticket, runs = rest[:TICKET_BYTES], rest[TICKET_BYTES:]
            parts = fields.get("p")
            return Order(
                Kind(kind),
                int(fields["n"]),
                ticket,
                _slots(runs),
                int(fields["f"]),
                int(fields.get("g", 0)),
                None if parts is None else tuple(int(part) for part in parts),
            )
        return Decisions(
            int(fields["n"]),
            {one: (int(have), int(use)) for one, have, use in fields["l"]},
            rest,
            tuple(int(one) for one in fields["c"]),
            tuple(int(one) for one in fields["f"]),
            tuple(fields["r"]),
        )
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CacheCorrupted(
            f"a coordinator's message of {len(data)} bytes makes no sense ({error}); is its log "
            "written to by something else?"
        ) from error


def _packed(kind: Kind, fields: dict[str, Any], rest: bytes) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    return _HEAD.pack(kind, len(text)) + text + rest


def _runs(slots: Slots) -> bytes:
    """Slots as runs that increase by one, or stay -1. A block is one run, 12 bytes."""
    array = np.ascontiguousarray(slots)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"slots: expected one row of integers, found {array.dtype} {array.shape}")
    wide = array.astype(np.int64)
    continues = np.diff(wide) == (wide[:-1] >= 0)
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(wide)), np.bool_), ~continues]))
    lengths = np.diff(np.append(begins, len(wide))).astype(np.uint32)
    starts = wide[begins]
    return struct.pack("<I", len(starts)) + starts.tobytes() + lengths.tobytes()


def _slots(data: bytes) -> Slots:
    (n,) = struct.unpack_from("<I", data)
    if len(data) != 4 + 12 * n:
        raise ValueError(f"{n} runs of slots in {len(data)} bytes")
    starts = np.frombuffer(data, np.int64, n, 4)
    lengths = np.frombuffer(data, np.uint32, n, 4 + 8 * n).astype(np.int64)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if n else 0) - np.repeat(ends - lengths, lengths)
    first = np.repeat(starts, lengths)
    slots: Slots = np.where(first < 0, first, first + within)
    return slots


# ---- Messages in log entries


def check_entries(log: SharedLog) -> None:
    """Raises ConfigError: the log's entries are too short for messages."""
    if log.message_bytes < LEAST_ENTRY:
        raise ConfigError(
            f"log: expected entries of {LEAST_ENTRY} bytes at least, found {log.message_bytes}; "
            "make it with larger ones, a kilobyte is good"
        )


def parts_of(message: bytes, entry_bytes: int) -> list[bytes]:
    """A message as log entries."""
    room = entry_bytes - _PART.size
    cuts = range(0, max(1, len(message)), room)
    last = cuts[-1]
    return [
        _PART.pack(VERSION, (_BEGINS if begin == 0 else 0) | (_ENDS if begin == last else 0))
        + message[begin : begin + room]
        for begin in cuts
    ]


class Joiner:
    """Joins log entries to messages."""

    def __init__(self) -> None:
        """Waits for a message to begin."""
        self._parts: list[bytes] | None = None

    def take(self, entry: bytes) -> bytes | None:
        """The message that ends with this entry; None: it continues in the next entry, or began
        before we joined.

        Raises:
            LayoutMismatch: written by another release.
            CacheCorrupted: not written by a coordinator.
        """
        if len(entry) < _PART.size:
            raise CacheCorrupted(f"an entry of {len(entry)} bytes is not a coordinator's")
        version, flags = _PART.unpack_from(entry)
        if version != VERSION:
            raise LayoutMismatch(
                f"the coordinator writes version {version} of its log, this process reads "
                f"{VERSION}; run the same release everywhere"
            )
        if flags & _BEGINS:
            self._parts = []
        if self._parts is None:
            return None
        self._parts.append(entry[_PART.size :])
        if not flags & _ENDS:
            return None
        parts, self._parts = self._parts, None
        return b"".join(parts)


def append(log: SharedLog, message: Message, timeout: float) -> None:
    """Append a message. For each entry, blocks while a live reader is too far behind.

    Raises:
        WaitTimeout: a reader was too far behind; readers ignore the entries appended so far.
        PermissionDenied: not the log's writer.
    """
    for part in parts_of(encode(message), log.message_bytes):
        log.append(part, timeout)


__all__ = [
    "LEAST_ENTRY",
    "Decisions",
    "Joiner",
    "Kind",
    "Message",
    "Order",
    "RequestId",
    "append",
    "check_entries",
    "decode",
    "encode",
    "parts_of",
]
