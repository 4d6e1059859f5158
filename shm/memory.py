"""How much shared memory can be allocated: /dev/shm, the machine's memory, and the memory limits of
our cgroups.

tmpfs reports a full file system, but a cgroup and a machine do not: beyond their memory the kernel
kills. So these are checked in advance; all figures are a moment old when they are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightcache.shm.names import FOLDER

Coming = Callable[[Path | None], int]
"""Bytes that will come free in a folder; None: in all folders together."""

_UNLIMITED = 1 << 60  # cgroup v1 writes about 2^63 for "no limit"


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that can still be allocated, and what limits them."""

    bytes: int
    limit: str


def nothing(folder: Path | None) -> int:
    """Nothing will come free."""
    return 0


def available(
    folder: Path = FOLDER,
    cgroups: Path = Path("/sys/fs/cgroup"),
    own: Path = Path("/proc/self"),
    coming: Coming = nothing,
    meminfo: Path = Path("/proc/meminfo"),
) -> FreeMemory:
    """The tightest of all limits that apply to this process, with what is `coming`: for the file
    system what comes free in this folder, for the others what comes free anywhere, at most."""
    rooms = []
    try:
        stat = os.statvfs(folder)
        if stat.f_blocks:  # else it is mounted without a limit
            free = stat.f_bavail * stat.f_frsize + coming(folder)
            rooms.append(FreeMemory(free, f"free in {folder}"))
    except OSError:
        rooms.append(FreeMemory(0, f"{folder} is missing; mount a tmpfs there"))
    others = [machine_room(meminfo), *cgroup_rooms(cgroups, own / "cgroup")]
    rooms += [FreeMemory(room.bytes + coming(None), room.limit) for room in others]
    return min(rooms, key=lambda room: room.bytes)


def machine_room(meminfo: Path) -> FreeMemory:
    """What the kernel would give without swapping: a mount may be larger than the memory."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return FreeMemory(int(found[1]) << 10, "of the machine's memory available")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return FreeMemory(free, "of the machine's memory free")


def huge_available(
    folder: Path,
    page_bytes: int,
    pools: Path = Path("/sys/kernel/mm/hugepages"),
    coming: Coming = nothing,
) -> FreeMemory:
    """Like `available`, for a folder on hugetlbfs: free huge pages that are not reserved, or the
    rest of the mount's own limit. Memory limits of cgroups do not count them."""
    pool = pools / f"hugepages-{page_bytes >> 10}kB"
    try:
        free, promised = (
            int((pool / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
        more = int((pool / "nr_overcommit_hugepages").read_text())
        more -= int((pool / "surplus_hugepages").read_text())
    except (OSError, ValueError):
        return FreeMemory(0, f"of huge pages, of which {pool} says nothing")
    remedy = f"(see {pool}/nr_hugepages)"
    rooms = [
        FreeMemory(
            max(0, free - promised + more) * page_bytes + coming(None),
            f"of free huge pages {remedy}",
        )
    ]
    stat = os.statvfs(folder)
    if stat.f_blocks:  # else the mount has no limit of its own
        rooms.append(
            FreeMemory(
                stat.f_bavail * stat.f_frsize + coming(folder),
                f"free in {folder} (its size= option)",
            )
        )
    return min(rooms, key=lambda room: room.bytes)


def cgroup_rooms(root: Path, membership: Path) -> list[FreeMemory]:
    """The remaining memory of our cgroup and of each one above it."""
    rooms = []
    for folder, version in _memory_groups(root, membership):
        room = _room_of(folder, version)
        if room is not None:
            rooms.append(FreeMemory(room, f"left in the memory limit of {folder}"))
    return rooms


def _memory_groups(root: Path, membership: Path) -> list[tuple[Path, int]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups: list[tuple[Path, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root, 2
        elif "memory" in controllers.split(","):
            base, version = root / "memory", 1
        else:
            continue
        # In a container the path may be the host's; then only the mounted root exists.
        parts = Path(path.lstrip("/"))
        for folder in (base / parts, *(base / parent for parent in parts.parents), base):
            if (folder, version) not in groups:
                groups.append((folder, version))
    return groups


def _room_of(folder: Path, version: int) -> int | None:
    """Limit minus use, without file pages that the kernel would drop."""
    limit_file, use_file, file_key = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        limit_text = (folder / limit_file).read_text().strip()
        if limit_text == "max" or int(limit_text) >= _UNLIMITED:
            return None
        use = int((folder / use_file).read_text())
        stat = (folder / "memory.stat").read_text().split()
        droppable = dict(zip(stat[::2], stat[1::2], strict=False)).get(file_key, "0")
        return max(0, int(limit_text) - max(0, use - int(droppable)))
    except (OSError, ValueError):
        return None
