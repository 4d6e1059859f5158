"""What /proc says of a client, where this process can see it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from lightcache.shm import ClientInfo

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "I": "idle",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "X": "dead",
}


@functools.cache
def own_pid_namespace() -> int:
    """The inode of our PID namespace; 0 where /proc is not mounted."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def state_of(client: ClientInfo, tid: int = 0) -> str:
    """What a client's process (or one thread of it) is doing: "running", "stopped", "gone", or
    "out of sight" when it lives in another PID namespace."""
    if not client.pidns or client.pidns != own_pid_namespace():
        return "out of sight"
    main = _stat(Path(f"/proc/{client.pid}/stat"))
    if main is None or int(main[19]) != client.start_ticks:
        return "gone"
    found = _stat(Path(f"/proc/{client.pid}/task/{tid}/stat")) if tid else main
    return _STATES.get(found[0], found[0]) if found else "gone"


def has_ended(client: ClientInfo) -> bool:
    """Whether a client's process is certainly gone: of our PID namespace, and no process has its
    number. What /proc hides still has it."""
    if not client.pidns or client.pidns != own_pid_namespace():
        return False
    try:
        os.kill(client.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _stat(path: Path) -> list[str] | None:
    """The fields from the third on: the second, the name, may hold blanks and parentheses."""
    try:
        fields = path.read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return [field.decode("ascii", "replace") for field in fields] if len(fields) > 19 else None
