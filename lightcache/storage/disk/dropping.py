"""Pages that are to be found no more, by nobody."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from lightcache._arguments import Keys, Pages
from lightcache.errors import InUse, LeaseLost, LightcacheError
from lightcache.storage.disk.folder import Folder


@dataclass(frozen=True)
class Dropped:
    """What became of them."""

    gone: int
    kept: int
    """Others read them just now."""


def drop(folder: Folder, keys: Keys, slots: Pages | None = None) -> Dropped:
    """Take pages from the index, then their footers from the disk, so that no rebuild finds them.

    In this order: a slot that is ours alone is written by nobody else. If we die in between, a
    rebuild may find the page again; what was corrupt is found out again then.

    Args:
        slots: a page only counts if it still stands there; None: wherever it stands.
    """
    gone = kept = 0
    for row in range(len(keys)):
        with folder.index.match(keys[row : row + 1]) as lease:
            pages = lease.detach()
        if not len(pages):
            continue
        if slots is not None and pages[0] != slots[row]:  # stored anew meanwhile
            folder.index.unpin(pages)
            continue
        try:
            folder.index.unname(pages)
        except LightcacheError as error:
            folder.index.unpin(pages)
            if not isinstance(error, (InUse, LeaseLost)):
                raise
            kept += isinstance(error, InUse)  # LeaseLost: others have cleared it
            continue
        with contextlib.suppress(OSError):  # then its checksum is all that speaks against it
            folder.slots.erase(int(pages[0]))
        folder.index.free(pages)
        gone += 1
    return Dropped(gone, kept)


__all__ = ["Dropped", "drop"]
