"""One attached handle of the page index's core."""

from __future__ import annotations

from lightcache import layout
from lightcache.errors import CacheCorrupted
from lightcache.shm import Segment
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import check
from lightcache.shm.locking import LockedCalls

_OPERATIONS = {operation.value: operation.name.lower() for operation in layout.Operation}


class Core(LockedCalls):
    """The library and a handle on one segment."""

    def __init__(self, segment: Segment, pages: int, lock_timeout: float) -> None:
        """Open a handle on an attached segment of an index with this many pages.

        Raises:
            CacheCorrupted: the segment does not hold an index of that size, flat as it says.
        """
        super().__init__(layout.load(), segment, lock_timeout, _OPERATIONS)
        self.pages = pages
        self.handle = self.quick.lci_open(segment.attachment, pages)
        flat = segment.config.get("flat", False) is True
        if not self.handle or bool(self.quick.lci_is_flat(self.handle)) is not flat:
            self.free()
            raise CacheCorrupted(
                f"the segment {segment.name!r} says it holds {'a flat' if flat else 'an'} index of "
                f"{pages} pages, but its own figures differ; remove it with `lightcache rm`"
            )

    def free(self) -> None:
        """Free the handle. Nothing may call it any more."""
        handle, self.handle = self.handle, None
        self.quick.lci_close(handle)


def reap_unjoined(segment: Segment, pages: int) -> None:
    """Free slots of dead clients for a process that has none yet. The reaper of `Segment.join`."""
    core = Core(segment, pages, lock_timeout=10.0)
    try:
        for slot in range(1, shm_layout.SLOTS):
            code = core.locked("lci_reap_unjoined", slot, what="take back from the dead")
            if code < 0:
                check(code, "take back what a dead client held")
    finally:
        core.free()
