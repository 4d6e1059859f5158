"""Changes: which keys of an index became ready, and which went, since a sequence number.

The index keeps no list of changes. Publishing takes no lock, so such a list would have many
writers, each of which may be killed with a place claimed and not filled, and all of which would pay
for it. A reader compares instead: it reads the state of every page, without a lock, and tells what
differs from what it saw before. docs/design/events.md has the reasons, and what a torn read does.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout
from lightcache._arguments import Keys
from lightcache.errors import ConfigError, Detached, NotReady
from lightcache.layout import PageState
from lightcache.namespaces import Namespace, NamespaceState
from lightcache.page_index import PageIndex
from lightcache.shm import layout as shm_layout

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Refs = npt.NDArray[np.uint32]
Groups = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

BATCH_KEYS = 4096
"""Keys of one batch, at most. A snapshot has all in one."""
KEPT = 10_000
"""Batches that are kept."""
_KEPT_KEYS = 1 << 16  # in them; or as many as the index has pages: more help less than a snapshot

_CHUNK = 1 << 14  # pages: 1 MiB of records, which stay in the processor's cache
_RECORD = ctypes.sizeof(layout.PageRecord)
_COLUMNS = _RECORD // 8
_STATE = layout.PageRecord.gen.offset // 8  # generation and word: one load says both
_QUEUE = (layout.PageRecord.parent.offset - 4) // 8  # the parent is its upper half
_PARENT_GEN = layout.PageRecord.parent_gen.offset // 8
_LOW = np.uint64(0xFFFFFFFF)
_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)
_LINKED = np.array([PageState.WRITING, PageState.READY, PageState.EVICTING], np.uint64)
_JUMPS = 64  # more than the binary digits of any depth: damage may have made a circle
assert layout.PageRecord.gen.offset % 8 == 0
assert layout.PageRecord.word.offset == layout.PageRecord.gen.offset + 4
assert layout.PageRecord.parent.offset % 8 == 4


@dataclass(frozen=True)
class ChangeBatch:
    """What changed between two scans, or a part of it. A key is in one of the two lists only."""

    sequence: int
    """Batches are numbered without gaps, from 0 on if nothing else is said."""
    time: float
    """When it was seen: seconds since 1970."""
    cleared: bool
    """True: whatever was told before is void. Of the first batch, and of a snapshot."""
    removed: Keys
    """Keys that went, uint64 of shape (r, 2)."""
    removed_groups: Groups
    """The KV group of each, uint8 of shape (r,)."""
    stored: Keys
    """Keys that became ready, uint64 of shape (s, 2). A parent stands before its children, and the
    pages of a prompt one after another where that is possible."""
    stored_groups: Groups
    """The KV group of each, uint8 of shape (s,)."""
    stored_pages: Numbers
    """The page that had each, int64 of shape (s,); it may have another key by now."""
    parents: Keys
    """The key of the page before each, uint64 of shape (s, 2)."""
    has_parent: Mask
    """False: the index knows of no page before it. Of the first page of a prompt, and of one whose
    parent went: pages that may go while others hang on them."""

    def __len__(self) -> int:
        """Keys in both lists."""
        return len(self.removed) + len(self.stored)


class Changes:
    """Follows an index: `scan` looks at it, `since` returns what was told.

    Nothing is stored in shared memory, so any number of readers may follow an index, and a kill of
    any process leaves nothing behind. From one thread. It takes 33 bytes of this process's memory a
    page, and as much for what is kept.
    """

    def __init__(self, index: PageIndex, *, kept: int = KEPT, first: int = 0) -> None:
        """Begin to follow an index; read-only is enough. Nothing is told before the first `scan`.

        Args:
            kept: batches that are kept for `since`, 1 at least; fewer, if they have more keys than
                the index has pages, and more than 65,536.
            first: number of the first batch. One above all of an earlier feed tells readers of that
                one, who ask for what they missed, from this: they get the snapshot.

        Raises:
            ConfigError: no number of batches, or no number.
        """
        kept = _arguments.count(kept, "kept", 1, 1 << 30)
        self._batches: deque[ChangeBatch] = deque()
        self._kept = kept
        self._keys_kept = 0
        self._next = _arguments.count(first, "first", 0, 1 << 62)
        self._index: PageIndex | None = None
        self._uuid = ""
        self._stamp: tuple[int, ...] | None = None
        self._begin(index)
        self._append([_batch(cleared=True)])

    @property
    def next_sequence(self) -> int:
        """The number of the next batch."""
        return self._next

    @property
    def told(self) -> int:
        """Number of keys that are ready as far as was told."""
        return int(np.count_nonzero(self._groups))

    def follow(self, index: PageIndex) -> tuple[ChangeBatch, ...]:
        """Continue with another handle. If it is of another index, made anew under the same name,
        all keys that were told have gone, which the returned batches say."""
        if index.segment.uuid == self._uuid:
            self._index = index
            return ()
        gone = self.lose()
        self._begin(index)
        return gone

    def lose(self) -> tuple[ChangeBatch, ...]:
        """The index is gone: so are all keys that were told, which the returned batches say."""
        which = np.flatnonzero(self._groups)
        gone = self._tell(which, np.zeros(0, np.int64))
        self._index, self._uuid = None, ""
        return gone

    def scan(self, *, whole: bool = False) -> tuple[ChangeBatch, ...]:
        """Look at the index, and return what changed since the last scan. Takes no lock, waits for
        no other client.

        If no count of the index has moved this costs about 20 us. Otherwise each page that was ever
        used is looked at: some 20 ns a page, and 4 us for each that changed.

        What changes during the scan may be seen by it or by the next, which then looks again. A
        page that was removed and made again between two scans is no change.

        Args:
            whole: look at the pages though no count has moved. A process that was killed after it
                has made pages ready and before it said so is seen then; else with the next use of
                the index by others.

        Raises:
            Detached: the index was closed or replaced; or `lose` was called: `follow` a new handle.
        """
        if self._index is None:
            raise Detached("scan: the index is gone; follow() a handle of its successor")
        with self._index.segment.busy():
            stamp, quiet = self._read_stamp(self._index)
            if stamp == self._stamp and not whole:
                return ()
            found = self._look(self._index)
        self._stamp = stamp if quiet else None
        return found

    def since(self, sequence: int) -> tuple[ChangeBatch, ...]:
        """The batches from this number on. If not all of them are kept any more, or it was never
        reached (it is of another process's feed), one batch: the snapshot.

        Raises:
            ConfigError: no number from 0 on.
        """
        if type(sequence) is not int or sequence < 0:
            raise ConfigError(f"since: expected a sequence number from 0 on, found {sequence!r}")
        if self._next - len(self._batches) <= sequence <= self._next:
            return tuple(batch for batch in self._batches if batch.sequence >= sequence)
        return (self.snapshot(),)

    def snapshot(self) -> ChangeBatch:
        """All keys that are ready as far as was told. Its number is that of the last batch that it
        has: continue with the next. A second for a million pages."""
        which = np.flatnonzero(self._groups)
        return self._made(np.zeros(0, np.int64), self._ordered(which), self._next - 1, cleared=True)

    # ---- one scan

    def _begin(self, index: PageIndex) -> None:
        self._index, self._uuid = index, index.segment.uuid
        pages = index.pages
        # Of each page, as it was when it was looked at last. A generation is of one life of a page:
        # while it is the same, so is the key.
        self._seen: Words = np.zeros(pages, np.uint64)
        self._keys: Keys = np.zeros((pages, 2), np.uint64)
        self._parents: Words = np.full(pages, _NONE, np.uint64)
        """Page of the parent, and its generation in the upper half."""
        self._groups: Groups = np.zeros(pages, np.uint8)
        """1 + the group; 0: it was not told, or it went."""
        self._open: Refs = np.zeros(layout.NAMESPACES, np.uint32)
        self._stamp = None

    def _read_stamp(self, index: PageIndex) -> tuple[tuple[int, ...], bool]:
        """What moves when a page becomes ready or goes; and whether no lock is held, whose holder
        may have raised its count before this and store after it. It is read before the pages, and
        a publisher counts after it has stored: so a change that the scan missed moves it."""
        address = index.segment.address
        root = _root(index)
        size = ctypes.sizeof(shm_layout.LockRecord)
        text = ctypes.string_at(address + shm_layout.LOCK_OFFSET, size)
        lock = shm_layout.LockRecord.from_buffer_copy(text)
        disabled = _disabled(index)
        stamp = (disabled, lock.acquisitions, root.event & ~1, *root.completed)
        return stamp, not (lock.word & ~shm_layout.LOCK_OTHERS or lock.log_count)

    def _look(self, index: PageIndex) -> tuple[ChangeBatch, ...]:
        refs = _open_namespaces(index)
        if not np.array_equal(refs, self._open):
            self._seen[:] = _NONE  # what is ready is judged again; no page ever has this
            self._open = refs
        records = _records(index)
        changed = self._changed(records)
        state = records[changed, _STATE]
        keys = records[changed, :2]
        parents = records[changed, _QUEUE] >> np.uint64(32)
        parents |= records[changed, _PARENT_GEN] << np.uint64(32)
        # A page that changed meanwhile is looked at again by the next scan.
        steady = (records[changed, _STATE] == state) & (state & np.uint64(1) == 0)
        steady &= _state_of(state) != PageState.EVICTING
        changed, state, keys = changed[steady], state[steady], keys[steady]
        parents = parents[steady]

        word = state >> np.uint64(32)
        space = (word >> np.uint64(layout.NAMESPACE_SHIFT)) & np.uint64(0xFF)
        group = (word >> np.uint64(layout.GROUP_SHIFT)).astype(np.uint8)
        ready = (_state_of(state) == PageState.READY) & (refs[space] != 0)
        told = self._groups[changed] != 0
        same = told & (self._keys[changed] == keys).all(axis=1)
        gone = changed[told & ~(ready & same)]
        new = ready & ~same
        settled = np.ones(len(changed), np.bool_)
        good = _peeked(index, keys[new], refs[space[new]])
        good[good] = self._may_tell(records, changed[new][good], parents[new][good])
        good &= ~self._elsewhere(records, keys[new], gone)
        unsure = np.flatnonzero(new)[~good]  # the next scan looks at them again
        new[unsure], settled[unsure] = False, False
        self._seen[changed[settled]] = state[settled]
        return self._tell(gone, changed[new], keys[new], parents[new], group[new])

    def _may_tell(self, records: Words, pages: Numbers, parents: Words) -> Mask:
        """Whether each page's parent was told, or is among these pages, or is none any more. Until
        then no look-up finds the page, and a reader would take it for the first of a prompt."""
        parent, life = (parents & _LOW).astype(np.int64), parents >> np.uint64(32)
        inside = parent < len(records)
        parent = np.where(inside, parent, 0)
        state = records[parent, _STATE] if len(records) else parents
        alive = inside & (state & _LOW == life) & np.isin(_state_of(state), _LINKED)
        place = np.searchsorted(pages, parent).clip(max=max(0, len(pages) - 1))
        before = np.where(alive & (pages[place] == parent), place, -1) if len(pages) else parent
        _, head = _climbed(before)
        held_back = alive & (before < 0) & (self._groups[parent] == 0)
        found: Mask = ~held_back[head]
        return found

    def _elsewhere(self, records: Words, keys: Keys, gone: Numbers) -> Mask:
        """Which keys were told of another page, that is not seen to have lost them. It has, after
        it was looked at and before the key was given to its new page: so it differs by now. The
        next scan sees both, and that nothing has changed."""
        if not len(keys):
            return np.zeros(0, np.bool_)
        now = self._changed(records)
        going = np.setdiff1d(now[self._groups[now] != 0], gone)
        return _in_both(keys, self._keys[going])[0]

    def _changed(self, records: Words) -> Numbers:
        """Pages whose generation or word is not as it was."""
        found = []
        for start in range(0, len(records), _CHUNK):
            end = min(start + _CHUNK, len(records))
            differs = records[start:end, _STATE] != self._seen[start:end]
            if differs.any():
                found.append(np.flatnonzero(differs) + start)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _tell(
        self,
        gone: Numbers,
        new: Numbers,
        keys: Keys | None = None,
        parents: Words | None = None,
        group: Groups | None = None,
    ) -> tuple[ChangeBatch, ...]:
        """Note pages that went, and pages that are ready, and make batches of both."""
        removed, removed_groups = self._keys[gone], self._groups[gone]
        self._groups[gone] = 0
        if keys is not None and parents is not None and group is not None:
            stays, moved = _in_both(removed, keys)
            removed, removed_groups = removed[~stays], removed_groups[~stays]
            self._keys[new], self._parents[new], self._groups[new] = keys, parents, group + 1
            new = new[~moved]  # it has another page now, which is of no interest
        new = self._ordered(new)
        batches = []
        for start in range(0, len(removed), BATCH_KEYS):
            part = slice(start, start + BATCH_KEYS)
            batches.append(_batch(removed=removed[part], removed_groups=removed_groups[part] - 1))
        for start in range(0, len(new), BATCH_KEYS):
            batches.append(self._made(np.zeros(0, np.int64), new[start : start + BATCH_KEYS]))
        return self._append(batches)

    def _ordered(self, pages: Numbers) -> Numbers:
        """Pages, each after its parent, the pages of a path one after another."""
        count = len(pages)
        pages = np.sort(pages)
        known, parent = self._parent_of(pages)
        place = np.searchsorted(pages, parent).clip(max=max(0, count - 1))
        before = np.where(known & (pages[place] == parent), place, -1) if count else pages
        depth, _ = _climbed(before)
        _, first = np.unique(before, return_index=True)
        continues = np.zeros(count, np.bool_)
        continues[first] = True  # of the children of a page one stands right behind it
        _, head = _climbed(np.where(continues, before, -1))
        return pages[np.lexsort((depth, head, depth[head]))]

    def _parent_of(self, pages: Numbers) -> tuple[Mask, Numbers]:
        """Whether each page's parent is one that was told, and that parent."""
        whole = self._parents[pages]
        parent = (whole & _LOW).astype(np.int64)
        inside = parent < len(self._seen)
        parent = np.where(inside, parent, 0)
        alive = (self._seen[parent] & _LOW) == whole >> np.uint64(32)
        return inside & alive & (self._groups[parent] != 0), parent

    def _made(
        self, gone: Numbers, new: Numbers, sequence: int = 0, *, cleared: bool = False
    ) -> ChangeBatch:
        known, parent = self._parent_of(new)
        return _batch(
            sequence,
            cleared=cleared,
            stored=self._keys[new],
            stored_groups=self._groups[new] - 1,
            stored_pages=new,
            parents=np.where(known[:, None], self._keys[parent], 0),
            has_parent=known,
        )

    # ---- what is kept

    def _append(self, batches: list[ChangeBatch]) -> tuple[ChangeBatch, ...]:
        numbered = tuple(
            replace(batch, sequence=self._next + number) for number, batch in enumerate(batches)
        )
        self._next += len(numbered)
        self._batches.extend(numbered)
        self._keys_kept += sum(map(len, numbered))
        most = max(_KEPT_KEYS, len(self._seen))
        while len(self._batches) > 1 and (
            len(self._batches) > self._kept or self._keys_kept - len(self._batches[0]) >= most
        ):
            self._keys_kept -= len(self._batches.popleft())
        return numbered


# ---- reading


def _root(index: PageIndex) -> layout.RootRecord:
    address = index.segment.address + index.core.places.root
    return layout.RootRecord.from_buffer_copy(
        ctypes.string_at(address, ctypes.sizeof(layout.RootRecord))
    )


def _disabled(index: PageIndex) -> int:
    where = index.segment.address + shm_layout.SegmentHeader.disabled.offset
    return ctypes.c_uint32.from_address(where).value


def _records(index: PageIndex) -> Words:
    """The records of the pages that were ever used, as they are now and while they change. Valid
    within the segment's `busy`."""
    pages = min(_root(index).fresh, index.pages)
    where = index.segment.address + index.core.places.page
    memory = (ctypes.c_uint64 * (pages * _COLUMNS)).from_address(where)
    return np.frombuffer(memory, np.uint64).reshape(pages, _COLUMNS)


_NAMESPACE = np.dtype(layout.NamespaceRecord)


def _open_namespaces(index: PageIndex) -> Refs:
    """The reference of each namespace in which keys are found; 0: of none. All are 0 while an
    operator has disabled the cache, as then nothing is found."""
    if _disabled(index):
        return np.zeros(layout.NAMESPACES, np.uint32)
    address = index.segment.address + index.core.places.namespaces
    text = ctypes.string_at(address, layout.NAMESPACES * _NAMESPACE.itemsize)
    table = np.frombuffer(text, _NAMESPACE)
    entries = np.arange(layout.NAMESPACES, dtype=np.uint32)
    refs = (table["epoch"] & np.uint32(0xFFFFFF)) << np.uint32(8) | entries
    found: Refs = np.where(table["state"] == NamespaceState.NORMAL, refs, 0).astype(np.uint32)
    return found


def _state_of(state: Words) -> Words:
    found: Words = (state >> np.uint64(32)) & np.uint64(layout.STATE_MASK)
    return found


def _peeked(index: PageIndex, keys: Keys, refs: Refs) -> Mask:
    """Whether each key is found in its namespace, now. A lookup reads as any client does, so a key
    that was torn is not found."""
    found = np.zeros(len(keys), np.bool_)
    for ref in np.unique(refs):
        which = np.flatnonzero(refs == ref)
        offsets = np.arange(len(which) + 1, dtype=np.int64)
        space = Namespace("", "", int(ref))
        try:
            counts = index.peek_many(np.ascontiguousarray(keys[which]), offsets, namespace=space)
        except NotReady:  # disabled just now
            continue
        found[which] = counts > 0
    return found


# ---- batches


def _batch(
    sequence: int = 0,
    *,
    cleared: bool = False,
    removed: Keys | None = None,
    removed_groups: Groups | None = None,
    stored: Keys | None = None,
    stored_groups: Groups | None = None,
    stored_pages: Numbers | None = None,
    parents: Keys | None = None,
    has_parent: Mask | None = None,
) -> ChangeBatch:
    no_keys, no_groups = np.zeros((0, 2), np.uint64), np.zeros(0, np.uint8)
    return ChangeBatch(
        sequence=sequence,
        time=time.time(),
        cleared=cleared,
        removed=no_keys if removed is None else removed,
        removed_groups=no_groups if removed_groups is None else removed_groups,
        stored=no_keys if stored is None else stored,
        stored_groups=no_groups if stored_groups is None else stored_groups,
        stored_pages=np.zeros(0, np.int64) if stored_pages is None else stored_pages,
        parents=no_keys if parents is None else parents,
        has_parent=np.zeros(0, np.bool_) if has_parent is None else has_parent,
    )


def _in_both(one: Keys, other: Keys) -> tuple[Mask, Mask]:
    """Which keys of each are in the other, too."""
    first, second = np.isin(one[:, 0], other[:, 0]), np.isin(other[:, 0], one[:, 0])
    if first.any():
        common = _pairs(one[first]) & _pairs(other[second])
        first[first] = [pair in common for pair in map(tuple, one[first].tolist())]
        second[second] = [pair in common for pair in map(tuple, other[second].tolist())]
    return first, second


def _pairs(keys: Keys) -> set[tuple[int, ...]]:
    return set(map(tuple, keys.tolist()))


def _climbed(before: Numbers) -> tuple[Numbers, Numbers]:
    """How far each entry is from the first of its path, and which entry that is, if `before` is the
    one before it, or -1. The steps double, so a path of n entries takes log2(n) of them."""
    jump = before.copy()
    depth = (jump >= 0).astype(np.int64)
    head = np.where(jump >= 0, jump, np.arange(len(before)))
    for _ in range(_JUMPS):
        on = np.flatnonzero(jump >= 0)
        if not len(on):
            break
        to = jump[on]
        depth[on], head[on], jump[on] = depth[on] + depth[to], head[to], jump[to]
    return depth, head
