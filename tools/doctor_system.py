"""What `doctor` says of the kernel and of the namespaces this process lives in."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
from collections.abc import Callable

from lightcache.tools.findings import Finding, error, ok, text, warning

_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23


def kernel() -> list[Finding]:
    """Machine and kernel."""
    machine, release = platform.machine(), platform.release()
    said = f"{platform.system()} {release}, {machine}"
    if platform.system() != "Linux":
        return [error("kernel", said, "lightcache needs Linux: its life locks are the kernel's")]
    if machine not in ("x86_64", "aarch64"):
        return [warning("kernel", said, "tested on x86_64 and aarch64 only: run the tests here")]
    return [ok("kernel", said)]


def namespaces() -> list[Finding]:
    """The PID namespace, and whether /proc shows it."""
    try:
        seen = os.readlink("/proc/self")
        inode = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        remedy = "mount -t proc proc /proc: without it a death is noticed later, never missed"
        return [warning("PID namespace", "/proc is not mounted", remedy)]
    if seen != str(os.getpid()):
        remedy = "mount -t proc proc /proc inside the namespace: deaths are noticed sooner then"
        return [warning("PID namespace", f"{inode}, and /proc shows another one", remedy)]
    hidden = "hidepid" in next(
        (line for line in text("/proc/mounts").splitlines() if line.split()[1:2] == ["/proc"]), ""
    )
    if hidden:
        remedy = "where clients run as several users, mount /proc without hidepid"
        return [warning("PID namespace", f"{inode}; /proc hides other users' processes", remedy)]
    return [ok("PID namespace", f"{inode}, /proc shows it")]


def byte_locks() -> list[Finding]:
    """Open-file-description locks: how a client proves that it lives."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return [error("OFD locks", "this Python does not know them", "use CPython for Linux")]
    fd = os.memfd_create("lightcache-doctor")
    try:
        # struct flock: type, whence, start, length, pid
        wanted = _Flock(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, bytes(wanted))
    except OSError as problem:
        remedy = "the kernel must offer them (Linux 3.15); a sandbox may forbid them"
        return [error("OFD locks", f"refused ({problem.strerror})", remedy)]
    finally:
        os.close(fd)
    return [ok("OFD locks", "work")]


class _Flock(ctypes.Structure):
    _fields_ = [
        ("l_type", ctypes.c_short),
        ("l_whence", ctypes.c_short),
        ("l_start", ctypes.c_int64),
        ("l_len", ctypes.c_int64),
        ("l_pid", ctypes.c_int),
    ]


def pidfd() -> list[Finding]:
    """How the end of a dead client's device copies is seen."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        remedy = "with Linux 5.3 quarantine of device pages ends as soon as the process is gone"
        return [warning("pidfd", "not available", remedy)]
    return [ok("pidfd", "works")]


def advice() -> list[Finding]:
    """Kinds of madvise that matter."""
    found = []
    if _advised(_MADV_WIPEONFORK):
        found.append(ok("WIPEONFORK", "works"))
    else:
        remedy = "needs Linux 4.14: without it a forked child cannot be told from its parent"
        found.append(error("WIPEONFORK", "refused", remedy))
    if _advised(_MADV_POPULATE_WRITE):
        found.append(ok("POPULATE_WRITE", "works"))
    else:
        remedy = "with Linux 5.14 a pool gets its memory in fewer system calls"
        found.append(warning("POPULATE_WRITE", "refused", remedy))
    return found


def _advised(kind: int) -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError, ValueError):
            memory.madvise(kind)
            return True
    return False


PROBES: tuple[Callable[[], list[Finding]], ...] = (kernel, namespaces, byte_locks, pidfd, advice)
