"""Lists, dicts, rings, logs, counters and plain segments, for `dump` and `check`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache.errors import CacheCorrupted
from lightcache.shm import SharedCounters, SharedLog, layout, logs, rings, structures
from lightcache.shm.layout import SegmentKind
from lightcache.tools import facts, hints
from lightcache.tools.facts import Facts
from lightcache.tools.image import Copy, guest, read_any

_UNNAMED: Mapping[int, str] = {0: "a change"}  # lists and dicts do not name it
_OPERATIONS: Mapping[SegmentKind, Mapping[int, str]] = {
    SegmentKind.RING: rings.OPERATIONS,
    SegmentKind.LOG: logs.OPERATIONS,
    SegmentKind.PLAIN: {0: "RobustLock.hold"},
}
_LISTS_SHOWN = 64
_DICT_COUNT = 8  # offset of the count in the root of native/dict_api.c


def document(name: str) -> Facts:
    """The output of `dump`, from a copy: totals, the lock and the clients, without the entries."""
    copy = read_any(name)
    kind = _kind(copy)
    lock = facts.lock(copy, _OPERATIONS.get(kind, _UNNAMED))
    try:
        content = _content(kind, copy)
    except ValueError:  # of numpy and ctypes, for data that is too short
        raise CacheCorrupted(
            f"{name!r}: {len(copy.data)} bytes are too few for the {kind.name.lower()} that its "
            f"header describes: {dict(copy.config)}; remove it with `lightcache rm {name}`"
        ) from None
    notes = hints.of_structure(copy, lock, content)
    return {
        "content": content,
        "lock": lock,
        "clients": [facts.member(client) for client in copy.clients],
        **hints.sections(notes),
    }


def _kind(copy: Copy) -> SegmentKind:
    try:
        return SegmentKind[copy.info.kind.upper()]
    except KeyError:
        raise CacheCorrupted(
            f"{copy.info.name!r} holds a segment of {copy.info.kind} kind; see `lightcache ls`"
        ) from None


def _content(kind: SegmentKind, copy: Copy) -> Facts:
    offset = layout.PAYLOAD_OFFSET
    make: Mapping[SegmentKind, Callable[[Copy, memoryview], Facts]] = {
        SegmentKind.LIST: _list,
        SegmentKind.DICT: _dict,
        SegmentKind.RING: _ring,
        SegmentKind.LOG: _log,
        SegmentKind.COUNTERS: _counters,
    }
    facts = make[kind](copy, copy.data.data[offset:]) if kind in make else {}
    return {**{key: value for key, value in copy.config.items() if key != "names"}, **facts}


def _size(copy: Copy, item: str, most: int) -> int:
    """An item of the configuration, limited: another program may have written it."""
    value = copy.config.get(item)
    return min(value, most) if type(value) is int and value > 0 else 0


def _list(copy: Copy, payload: memoryview) -> Facts:
    count = _size(copy, "lists", len(payload) // 4)
    lengths = np.frombuffer(payload, np.uint32, count)
    shown = {str(i): int(lengths[i]) for i in np.flatnonzero(lengths)[:_LISTS_SHOWN]}
    return {"entries": int(lengths.sum(dtype=np.int64)), "lists_in_use": shown}


def _dict(copy: Copy, payload: memoryview) -> Facts:
    return {"entries": int.from_bytes(payload[_DICT_COUNT : _DICT_COUNT + 4], "little")}


def _ring(copy: Copy, payload: memoryview) -> Facts:
    root = layout.RingRoot.from_buffer_copy(payload)
    return {"entries": root.count, "pushed": root.pushed}


def _log(copy: Copy, payload: memoryview) -> Facts:
    root = layout.LogRoot.from_buffer_copy(payload)
    capacity = _size(copy, "capacity", layout.LOG_CAPACITY)
    readers = []
    for slot, cursor in enumerate(root.cursors):
        if cursor.next:
            entry = (cursor.next & ~(1 << 63)) - 1
            unread = max(0, min(capacity, root.appended - entry))
            readers.append({"slot": slot, "position": entry, "behind": unread})
    word, slot = root.writer, root.writer & layout.LOCK_SLOT_MASK
    writer = next((c for c in copy.clients if c.slot == slot), None)
    if not word:
        state = "none so far"
    elif word == layout.LOG_LEFT:
        state = "has left"
    else:
        same = writer and (writer.epoch & layout.LOCK_EPOCH_MASK) == word >> layout.LOCK_EPOCH_SHIFT
        state = "alive" if writer and same and writer.alive else "dead"
    return {
        "entries": max((reader["behind"] for reader in readers), default=0),
        "appended": root.appended,
        "writer": {"slot": slot or None, "state": state},
        "readers": readers,
    }


def _counters(copy: Copy, payload: memoryview) -> Facts:
    return {"counted": facts.counted(copy)}


# ---- check


@dataclass(frozen=True)
class Checked:
    """The result of a check of a structure."""

    clean: bool | None
    """None: it was never quiet for the time of a copy, and a finding may be an artefact."""
    message: str
    recovered: int = 0


def check(name: str, kind: SegmentKind, wait: float) -> Checked:
    """Check a segment without an index. Lists, dicts and rings are checked in copies, as an index;
    logs and counters, which change without the lock, in place, as a reader."""
    if kind is SegmentKind.LOG:
        return _read_only(name, lambda: SharedLog.attach(name, readonly=True))
    if kind is SegmentKind.COUNTERS:
        return _read_only(name, lambda: SharedCounters.attach(name, readonly=True))
    if kind is SegmentKind.PLAIN:
        return _plain(read_any(name))
    return _copied(name, kind, wait)


def _read_only(name: str, attach: Callable[[], Any]) -> Checked:
    with guest(name), attach() as structure:
        try:
            structure.check()
        except CacheCorrupted as error:
            return Checked(False, str(error))
    return Checked(True, "every invariant holds")


def _plain(copy: Copy) -> Checked:
    if copy.lock.log_count and copy.steady:
        return Checked(False, "its undo log has an unfinished step; create it again")
    return Checked(True, "header, clients and lock are in order; its content was not checked")


def _copied(name: str, kind: SegmentKind, wait: float) -> Checked:
    """A finding counts if it is of one instant and the next copy repeats it."""
    end, before = time.monotonic() + wait, ""
    while True:
        copy = read_any(name)
        where, nbytes = copy.data.ctypes.data, len(copy.data)
        report = structures.check_copy(kind, copy.config, where, nbytes)
        if not report.problem:
            return Checked(True, "every invariant holds", report.recovered)
        if copy.steady and report.problem == before:
            return Checked(False, f"{report.problem}; create it again", report.recovered)
        if time.monotonic() >= end:
            return Checked(None, report.problem, report.recovered)
        before = report.problem if copy.steady else ""
