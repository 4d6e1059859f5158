"""The index of a disk, made anew from what its slots say of themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from lightcache._arguments import Keys, Pages
from lightcache.page_index import PageIndex
from lightcache.storage.disk.footers import NO_PARENT, Footer, unpack
from lightcache.storage.disk.header import Header
from lightcache.storage.disk.slots import SlotFiles

_THREADS = 16  # a footer is one small read: a disk needs many at a time
_PART = 64  # slots that one of them reads before it is given others: a hand-over takes some 30 us


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild found, in slots."""

    slots: int
    pages: int
    """Known now."""
    dropped: int
    """With a footer that is damaged, of another slot, or of a page that stands elsewhere, too. Not
    those that were never written."""
    unreadable: int
    seconds: float


def rebuild(index: PageIndex, slots: SlotFiles, header: Header) -> Rebuilt:
    """Fill a fresh index with the slots of the header's epoch, in the order in which they were
    written. What a page holds is not looked at: its checksum is verified when it is read."""
    begin = time.monotonic()
    spec, length = bytes.fromhex(header.spec.name), header.page_bytes
    held = index.allocate(index.pages)
    numbers = held.detach()  # of a fresh index: all, in order
    newest: dict[bytes, Footer] = {}
    dropped = unreadable = 0
    for slot, block in _footers(slots, index.pages):
        footer = None if block is None else unpack(block)
        unreadable += block is None
        if footer is None:
            dropped += block is not None and any(block)
            continue
        if (footer.spec, footer.slot, footer.length) != (spec, slot, length):
            dropped += 1
        elif footer.epoch == header.epoch:
            other = newest.get(footer.key)
            dropped += other is not None
            if other is None or other.written < footer.written:
                newest[footer.key] = footer
    _name(index, sorted(newest.values(), key=lambda each: each.written))
    empty = np.ones(len(numbers), bool)
    empty[[footer.slot for footer in newest.values()]] = False
    index.free(np.ascontiguousarray(numbers[empty][::-1]))  # what is freed last is used first
    seconds = time.monotonic() - begin
    return Rebuilt(index.pages, len(newest), dropped, unreadable, seconds)


def _footers(slots: SlotFiles, count: int) -> Iterator[tuple[int, bytes | None]]:
    """The footer's block of each slot, in order; None: it could not be read."""

    def read(first: int) -> list[bytes | None]:
        return [_footer(slots, slot) for slot in range(first, min(first + _PART, count))]

    with ThreadPoolExecutor(_THREADS) as pool:
        for turn in range(0, count, _PART * _THREADS):
            parts = range(turn, min(turn + _PART * _THREADS, count), _PART)
            for first, blocks in zip(parts, pool.map(read, parts), strict=True):
                yield from enumerate(blocks, first)


def _footer(slots: SlotFiles, slot: int) -> bytes | None:
    try:
        return slots.read_footer(slot)
    except OSError:
        return None


def _name(index: PageIndex, footers: list[Footer]) -> None:
    """Older ones first: a page stands before what hangs on it, and is used before it."""
    known: set[bytes] = set()
    keys, offsets, starts = [], [0], []
    for footer in footers:
        before = footer.parent != NO_PARENT and footer.parent in known
        keys += [footer.parent, footer.key] if before else [footer.key]
        starts.append(int(before))
        offsets.append(len(keys))
        known.add(footer.key)
    if not footers:
        return
    pages: Pages = np.array([footer.slot for footer in footers], np.int32)
    every: Keys = np.frombuffer(b"".join(keys), "<u8").astype(np.uint64).reshape(-1, 2)
    index.name_many(pages, every, np.array(offsets, np.int64), np.array(starts, np.int64))
    index.unpin(pages)


__all__ = ["Rebuilt", "rebuild"]
