"""Pages from slots to where the caller wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightcache._arguments import Keys
from lightcache.storage.arguments import Deadline, checksum
from lightcache.storage.disk.folder import Folder
from lightcache.storage.disk.footers import unpack
from lightcache.storage.lanes import READ, Lanes
from lightcache.storage.protocol import ReadResult, ReadStatus


@dataclass(frozen=True)
class Read:
    """What came of it."""

    result: ReadResult
    bad: list[int]
    """Keys whose pages are corrupt, or that the disk does not give any more: to be dropped, or
    they could never be stored anew."""
    late: bool


class _Page:
    """One page to be read."""

    def __init__(self, folder: Folder, name: bytes, slot: int, view: memoryview) -> None:
        self._folder, self._name, self._slot, self._view = folder, name, slot, view
        self.status: ReadStatus | None = None  # None: its turn did not come in time
        self.why = ""
        self.unreadable = False

    def __call__(self) -> None:
        try:
            self.status, self.why = self._read()
        except OSError as error:
            self.status, self.why = ReadStatus.FAILED, f"disk: slot {self._slot}: {error}"
            self.unreadable = True

    def _read(self) -> tuple[ReadStatus, str]:
        footer = unpack(self._folder.slots.read(self._slot, self._view))
        if footer is None:
            return ReadStatus.CORRUPT, f"corrupt: slot {self._slot} does not say what it holds"
        if footer.key != self._name or footer.checksum != checksum(self._name, self._view):
            return ReadStatus.CORRUPT, f"corrupt: the checksum of page {self._name.hex()} is wrong"
        return ReadStatus.OK, ""


def read_pages(
    folder: Folder,
    lanes: Lanes,
    keys: Keys,
    names: Sequence[bytes],
    slots: Sequence[int],
    views: Sequence[memoryview],
    deadline: Deadline,
) -> Read:
    """Read pages that are pinned; of those with slot -1 nothing is stored."""
    every = zip(names, slots, views, strict=True)
    work = [None if slot < 0 else _Page(folder, name, slot, view) for name, slot, view in every]
    lanes.run([page for page in work if page is not None], READ, deadline)
    statuses, bad, reason, late = [], [], "", False
    for at, page in enumerate(work):
        status = ReadStatus.ABSENT if page is None else page.status
        why = "" if page is None else page.why
        if status is None:
            status, why, late = ReadStatus.FAILED, deadline.reason, True
        if status is ReadStatus.CORRUPT and not folder.index.peek(keys[at : at + 1]):
            status, why = ReadStatus.ABSENT, ""  # another thread deleted it while we read it
        if status is ReadStatus.CORRUPT or (page is not None and page.unreadable):
            bad.append(at)
        statuses.append(status)
        reason = reason or why
    return Read(ReadResult(tuple(statuses), reason), bad, late)


__all__ = ["Read", "read_pages"]
