"""What `doctor` says of shared memory, its limits, and the kinds of pages there are."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

from lightcache._arguments import format_size
from lightcache.shm import list_segments, memory
from lightcache.shm.names import FOLDER
from lightcache.tools.findings import Finding, error, ok, text, warning

_SMALL = 1 << 30  # containers come with 64 MiB of /dev/shm unless told otherwise


def shared_memory() -> list[Finding]:
    """Size and room of /dev/shm."""
    name = str(FOLDER)
    try:
        found = os.statvfs(FOLDER)
    except OSError as problem:
        remedy = "mount a tmpfs there: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        return [error(name, f"missing ({problem.strerror})", remedy)]
    if not os.access(FOLDER, os.W_OK | os.X_OK):
        return [error(name, "not writable for this user", "make its mode 1777")]
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    said = f"{format_size(size)}, {format_size(free)} free"
    if _kind_of(FOLDER) not in ("tmpfs", ""):
        said += f", a {_kind_of(FOLDER)}"
        return [warning(name, said, "mount a tmpfs there: anything else writes to a disk")]
    remedy = "mount -o remount,size=... /dev/shm; in a container: --shm-size, or an emptyDir"
    if size < _SMALL:
        return [warning(name, said, f"too small for a pool: {remedy}")]
    if free < size // 20:
        return [warning(name, said, f"nearly full: `lightcache ls`, and `rm`; {remedy}")]
    return [ok(name, said)]


def _kind_of(folder: Path) -> str:
    kind = ""
    for line in text("/proc/mounts").splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[1] == str(folder):
            kind = fields[2]  # the last mount is the one that is seen
    return kind


def cgroup() -> list[Finding]:
    """The tightest memory limit above us: past it the kernel kills."""
    rooms = memory._cgroup_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    if not rooms:
        return [ok("cgroup memory", "no limit that is visible here")]
    room = min(rooms, key=lambda room: room.bytes)
    said = f"{format_size(room.bytes)} {room.limit}"
    found = os.statvfs(FOLDER) if FOLDER.exists() else None
    if found and room.bytes < found.f_bavail * found.f_frsize:
        remedy = "pages of /dev/shm count against it: raise it above the pools you create"
        return [warning("cgroup memory", f"{said}, less than is free in {FOLDER}", remedy)]
    return [ok("cgroup memory", said)]


def leftovers() -> list[Finding]:
    """Segments that are in nobody's way but their memory."""
    found = list_segments()
    bad = [info.name for info in found if info.problem and info.problem != "being created"]
    if bad:
        shown = ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
        return [warning("segments", f"{len(bad)} of {len(found)} need a look: {shown}", _LEFT)]
    return [ok("segments", f"{len(found)}, all in order" if found else "none")]


_LEFT = "`lightcache ls` says what is wrong; `lightcache sweep` removes what the dead left"


def memlock() -> list[Finding]:
    """The limit on locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [ok("locked memory", "unlimited")]
    remedy = "for pools that an RDMA device registers: ulimit -l unlimited, LimitMEMLOCK=infinity"
    return [warning("locked memory", f"at most {format_size(soft)}", remedy)]


def huge_pages() -> list[Finding]:
    """Transparent huge pages of shared memory, and reserved ones."""
    setting = text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = setting.partition("[")[2].partition("]")[0]
    if not chosen:
        first = ok("huge pages", "this kernel has none for shared memory")
    elif chosen in ("never", "deny"):
        path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
        remedy = f"for --huge-pages: echo advise > {path}"
        first = warning("huge pages", f"shared memory gets none ({chosen})", remedy)
    else:
        first = ok("huge pages", f"shared memory gets transparent ones ({chosen})")
    return [first, ok("hugetlb", _hugetlb())]


def _hugetlb() -> str:
    wanted = ("HugePages_Total", "HugePages_Free", "Hugepagesize")
    lines = (line.partition(":") for line in text("/proc/meminfo").splitlines())
    found = {name: value.strip() for name, _, value in lines if name in wanted}
    if found.get("HugePages_Total", "0") == "0":
        return "none reserved (none are needed)"
    return f"{found['HugePages_Total']} reserved of {found['Hugepagesize']}; --pool-path uses them"


def numa() -> list[Finding]:
    """Memory nodes."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    if nodes == 1:
        return [ok("memory nodes", "1")]
    choice = "--numa interleave, --numa gpu:0, or one cache for each node"
    return [ok("memory nodes", f"{nodes}: consider {choice}")]


PROBES: tuple[Callable[[], list[Finding]], ...] = (
    shared_memory,
    cgroup,
    leftovers,
    memlock,
    huge_pages,
    numa,
)
