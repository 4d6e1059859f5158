"""Run as a program: a process that fills a disk, until it is killed.

    disk_side.py WHERE SEED            writes prompts for ever; a line for each that is stored
    disk_side.py WHERE SEED POINT N    the same; stops for ever when it comes to POINT the N-th time

Each page is a function of its key, and the keys are those of SEED and the prompt's number.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from support.disks import KEYS, disk, put

from lightcache import PageIndex
from lightcache.storage.disk import folder
from lightcache.storage.disk.slots import SlotFiles
from lightcache.storage.testing.conformance import make_keys, pages_of

PROMPT, SLOTS = 6, 40
POINTS = {
    "before the page": 60,
    "half a page": 60,
    "the page without its footer": 60,
    "half a footer": 60,
    "behind the page": 60,
    "before publishing": 20,
    "behind publishing": 20,
    "dropped, not erased": 8,
    "erased, not free": 8,
    "cleared the epoch, not the index": 4,
}
"""Which time is the last: slots are used again by then, and have footers of evicted pages."""


def prompt(seed: int, number: int) -> Any:
    """The keys of one."""
    return make_keys(PROMPT, seed * 100_000 + number)


class Stop:
    """Stops for ever at a point, and says so."""

    def __init__(self, point: str, times: int) -> None:
        self.point, self.left = point, times
        self.lock = threading.Lock()

    def at(self, point: str) -> None:
        """Here we are."""
        with self.lock:
            self.left -= point == self.point
            here = point == self.point and self.left == 0
        if here:
            print("stopped", flush=True)
            threading.Event().wait()

    def around(self, place: Any, name: str, before: str = "", behind: str = "") -> None:
        """Points in front of a call, and behind it."""
        whole = getattr(place, name)

        def call(*arguments: Any, **how: Any) -> Any:
            self.at(before)
            found = whole(*arguments, **how)
            self.at(behind)
            return found

        setattr(place, name, call)

    def tear(self) -> None:
        """Slots that are written in parts, as when the machine stops in the middle of it."""
        parts = {
            "half a page": (0, 2048),
            "the page without its footer": (0, 4096),
            "half a footer": (0, 4096 + 48),
        }
        whole = SlotFiles.write_slot

        def write(slots: SlotFiles, slot: int, page: memoryview, footer: bytes) -> None:
            self.at("before the page")
            if self.point in parts and self.left == 1:
                first, end = parts[self.point]
                data = (bytes(page) + footer)[first:end]
                number = slot % len(slots._plain)
                os.pwrite(slots._plain[number], data, slot // len(slots._plain) * slots.slot_bytes)
                self.at(self.point)
            elif self.point in parts:
                self.left -= 1
            whole(slots, slot, page, footer)
            self.at("behind the page")

        SlotFiles.write_slot = write  # type: ignore[method-assign]

    def install(self) -> None:
        """All points."""
        from lightcache.reservations import Reservation

        self.tear()
        self.around(Reservation, "publish", "before publishing", "behind publishing")
        self.around(SlotFiles, "erase", "dropped, not erased", "erased, not free")
        self.around(PageIndex, "clear", "cleared the epoch, not the index")


def main(where: str, seed: str, point: str = "", times: str = "1") -> None:
    """See above."""
    if point == "rebuilding":
        stop = Stop(point, int(times))
        stop.around(folder, "unpack", "rebuilding")
    elif point == "rebuilt":
        stop = Stop(point, int(times))
        stop.around(folder, "rebuild", behind="rebuilt")
    elif point:
        Stop(point, int(times)).install()
    storage = disk(Path(where), SLOTS, threads=1 if point else 4)
    for number in range(1 << 30):
        keys = prompt(int(seed), number)
        half = PROMPT // 2
        put(storage, keys[:half])
        put(storage, keys[half:], parent=keys[half - 1 : half])
        into = [page.copy() for page in pages_of(KEYS[:2])]
        storage.read(keys[:2], into, timeout=60.0)
        print(number, flush=True)
        if "erase" in point:
            storage.delete(keys[1:2], timeout=60.0)
        if "epoch" in point:
            storage.clear(timeout=60.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
