"""Token ids of pages, for routers that find blocks by their tokens: an object of its own.

It exists if the cache's creator asked for it, has a record for each page, and is the owner's alone
(mode 0600): token ids are what was said, which keys do not reveal. A record has the key that it is
of, and a digest of key and tokens. So it says of itself whose tokens it has and whether it is
whole, and no process has to be told when it changes. docs/design/events.md has the design.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lightcache._arguments import Keys, Pages
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    LightcacheError,
    NotReady,
    PermissionDenied,
)
from lightcache.hashing import Tokens, pack_tokens
from lightcache.notices import Notices
from lightcache.prompt import TokenIds
from lightcache.shm import Segment, names, owners
from lightcache.shm.folders import Folder
from lightcache.shm.objects import memory_of

Mask = npt.NDArray[np.bool_]

TOKENS_ITEM = "token_ids"
"""Item of a configuration: the cache has token records."""
_CHECKED = 8  # bytes of a record before what its digest is of
_MODE = 0o600
_WHAT = "tokens"  # in the object's name
_log = logging.getLogger("lightcache.tokens")


def make_token_records(segment: Segment, pages: int, page_tokens: int) -> None:
    """Make the object, before another process can attach. It has its length and no memory: a record
    takes some when it is written. If this fails, the segment's creator removes the object together
    with the segment.

    Raises:
        PermissionDenied, LightcacheError: it may not or cannot be made.
    """
    with Folder.open(names.FOLDER) as folder:
        name = _name(segment)
        try:
            fd = folder.make(name, _MODE)
            try:
                os.fchmod(fd, _MODE)  # the umask may have narrowed it
                os.ftruncate(fd, pages * _record(page_tokens).itemsize)
            finally:
                os.close(fd)
        except OSError as error:
            kind = PermissionDenied if isinstance(error, PermissionError) else LightcacheError
            raise kind(f"make the token records {folder.path}{name}: {error.strerror}") from error


def memory(cache: str, uuid: str, config: Mapping[str, Any]) -> int | None:
    """Bytes of memory that the token records of a cache take, by what its header says. None: it has
    none."""
    if not config.get(TOKENS_ITEM):
        return None
    return memory_of(names.dependent_name(cache, _WHAT, uuid))


class TokenRecords:
    """This process's handle of the token records of a cache.

    Records are read and written by system calls, not through a mapping: memory that lacks, or an
    object that another process has cut, is an error then instead of a signal.
    """

    def __init__(self, segment: Segment, pages: int, page_tokens: int, *, readonly: bool) -> None:
        """Open those of an attached index.

        Raises:
            NotReady: the object is gone.
            PermissionDenied: its owner, mode or links are wrong, or it is another user's.
            CacheCorrupted: it has another length.
        """
        self.page_tokens = page_tokens
        self._segment = segment
        self._record = _record(page_tokens)
        self._notices = Notices(_log)
        self.lost = 0
        """Records that this process could not write."""
        with Folder.open(names.FOLDER) as folder:
            path = f"{folder.path}{_name(segment)}"
            fd = folder.open_object(_name(segment), writable=not readonly)
        if fd is None:
            raise NotReady(
                f"the token records {path} are gone; events have no token ids until the cache is "
                "made anew"
            )
        self._fd = fd
        try:
            _check(os.fstat(fd), pages * self._record.itemsize, path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, segment: Segment, pages: int, *, readonly: bool) -> TokenRecords | None:
        """Those of an attached index, by its configuration, which is not trusted. None: it has
        none.

        Raises:
            As the constructor. CacheCorrupted: its configuration says no tokens of a page.
        """
        if not segment.config.get(TOKENS_ITEM):
            return None
        tokens = segment.config.get("page_tokens")
        if type(tokens) is not int or not 1 <= tokens <= 1 << 20:
            raise CacheCorrupted(
                f"{segment.name!r} has token records for pages of {tokens!r} tokens in its header; "
                f"remove it with `lightcache rm {segment.name}`"
            )
        return cls(segment, pages, tokens, readonly=readonly)

    def rows(self, tokens: Tokens, pages: int) -> TokenIds:
        """The ids of a prompt's first pages, uint32 of shape (pages, page_tokens).

        Raises:
            ConfigError: no token ids, or too few.
        """
        ids, wanted = np.frombuffer(pack_tokens(tokens), "<u4"), pages * self.page_tokens
        if len(ids) < wanted:
            raise ConfigError(
                f"tokens: expected those of {pages} keys, {wanted} or more, found {len(ids)}"
            )
        return ids[:wanted].reshape(pages, self.page_tokens)

    def write(self, pages: Pages, keys: Keys, rows: TokenIds) -> None:
        """Write the records of pages that this client has reserved and not published. What cannot
        be written is counted and logged once: their events have no token ids.

        Args:
            keys, rows: of each page.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        records = np.empty(len(pages), self._record)
        records["key"], records["tokens"] = keys, rows
        records["check"] = self._digests(records)
        data, size = records.view(np.uint8).data, self._record.itemsize
        with self._segment.busy():
            for start, end in _runs(pages):
                part = data[start * size : end * size]
                try:
                    written = os.pwrite(self._fd, part, int(pages[start]) * size)
                    problem = f"{written} of {len(part)} bytes fitted"
                except OSError as error:
                    written, problem = 0, str(error.strerror)
                if lost := end - start - written // size:
                    self._count_lost(lost, problem)

    def read(self, pages: npt.NDArray[np.int64], keys: Keys) -> tuple[TokenIds, Mask]:
        """The token ids of pages, as (rows, known): uint32 of shape (n, page_tokens), and which of
        them are those of the page's key. The others mean nothing: no writer gave any, the record
        is of another life of the page, or it is being written, or was by a process that was killed.

        Takes no lock. The caller keeps it open meanwhile; its index may be gone.
        """
        records = np.zeros(len(pages), self._record)
        data, size = records.view(np.uint8).data, self._record.itemsize
        for start, end in _runs(pages):
            part = data[start * size : end * size]
            os.preadv(self._fd, [part], int(pages[start]) * size)  # cut: the rest is zeros
        known: Mask = (records["key"] == keys).all(axis=1)
        known &= records["check"] == self._digests(records)
        return records["tokens"], known

    def _digests(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
        data, size = records.view(np.uint8).data, self._record.itemsize
        ends = range(size, len(data) + 1, size)
        digests = [xxhash.xxh3_64_intdigest(data[end - size + _CHECKED : end]) for end in ends]
        return np.array(digests, np.uint64)

    def _count_lost(self, records: int, why: str) -> None:
        self.lost += records
        self._notices.first(
            "lost",
            "%s: token ids of %d pages were not written: %s; their events have none, and this is "
            "said once",
            *(self._segment.name, records, why),
        )

    def close(self) -> None:
        """Close it, after the index. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _name(segment: Segment) -> str:
    return segment.dependent_name(_WHAT)


def _record(page_tokens: int) -> np.dtype[np.void]:
    fields = [("check", "<u8"), ("key", "<u8", 2), ("tokens", "<u4", (page_tokens,))]
    return np.dtype(fields)


def _runs(pages: npt.NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """Bounds of the runs of pages that lie one after another."""
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    return itertools.pairwise([0, *cuts.tolist(), len(pages)] if len(pages) else [])


def _check(status: os.stat_result, length: int, path: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    whole = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    if not whole or status.st_uid != os.geteuid() or mode & 0o077:
        raise PermissionDenied(
            f"the token records {path}: expected one regular file of user "
            f"{owners.user(os.geteuid())}, mode 0600, found user {owners.user(status.st_uid)}, "
            f"{status.st_nlink} links, mode {mode:04o}; run as the cache's owner, or find out who "
            "changed it"
        )
    if status.st_size != length:
        raise CacheCorrupted(
            f"the token records {path}: expected {length} bytes, found {status.st_size}; create "
            "the cache anew to have token ids"
        )


__all__ = ["TOKENS_ITEM", "TokenRecords", "make_token_records"]
