"""Whether this machine has the shared memory that a demo needs, asked before anything is made."""

from __future__ import annotations

from lightcache._arguments import format_size, parse_size
from lightcache.errors import ConfigError
from lightcache.shm import memory
from lightcache.shm.names import FOLDER
from lightcache.tools.doctor import Level, shared_memory

BESIDE_POOL = 16 << 20  # bytes for the index, the rings and what else is not the pool


def preflight(pool_bytes: int) -> None:
    """Return if a pool of `pool_bytes` bytes and what belongs to it fit into shared memory now.

    Makes nothing and does not block. What it finds is a moment old when it is used: another process
    may take the room, and then making the cache fails in its own words.

    Raises:
        ConfigError: no size; /dev/shm is missing or not writable, or it or the memory limit of a
            cgroup has less room than the pool and 16 MiB. The message has both figures and the
            remedy.
    """
    wanted = parse_size(pool_bytes, "pool") + BESIDE_POOL
    for finding in shared_memory():
        if finding.level is Level.ERROR:
            raise ConfigError(f"{finding.name}: {finding.found}; {finding.remedy}")
    room = memory.available()
    if room.bytes >= wanted:
        return
    size = f"{-(-wanted // (1 << 20))}m"
    if room.limit == f"free in {FOLDER}":  # 64 MiB in a container unless told otherwise
        remedy = (
            f"in a container: docker run --shm-size={size}; elsewhere: mount -o "
            f"remount,size={size} {FOLDER}; or remove old caches (lightcache ls, rm), or ask for a "
            "smaller pool"
        )
    else:
        remedy = "raise that limit (docker run --memory), or ask for a smaller pool"
    raise ConfigError(
        f"the demo needs {_figure(wanted)} of shared memory, found {_figure(room.bytes)} "
        f"{room.limit}; {remedy}"
    )


def _figure(size: int) -> str:
    return f"{format_size(size)} ({size} bytes)"
