"""A demo's own storage: a disk in a temporary folder, removed behind it whatever happens.

The folder is locked as long as its demo lives. One that nobody has locked was left by a demo that
was killed, and the next one removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightcache._arguments import format_size
from lightcache.errors import ConfigError, LightcacheError
from lightcache.shm.listing import list_segments
from lightcache.storage.disk.folder import index_name, remove_folder
from lightcache.tools.demo.stage import undisturbed

PREFIX = "lightcache-demo-"
_ROOM = 2  # times the host's memory: a storage that has no more than the host is never asked


@dataclass(frozen=True)
class Scratch:
    """The folder, while it is there."""

    path: Path

    def storage(self, nbytes: int) -> str:
        """URL of the disk in it.

        Args:
            nbytes: of each cache whose pages go there.

        Raises:
            ConfigError: there is no room for it.
        """
        wanted, free = _ROOM * nbytes, shutil.disk_usage(self.path).free
        if free < wanted:
            raise ConfigError(
                f"the demo's storage: expected {format_size(wanted)} free in {self.path.parent}, "
                f"found {format_size(free)}; set TMPDIR to a folder with more, give --storage, or "
                "leave the restart out (--no-restart)"
            )
        return f"disk:{self.path / 'pages'}?capacity={wanted}"

    def indexes(self) -> list[str]:
        """What shared memory has of its disk. Nothing, when nobody uses it."""
        names = set()
        for folder in _disks(self.path):
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                names.add(index_name(place))
            finally:
                os.close(place)
        return [info.name for info in list_segments() if info.name in names]


@contextlib.contextmanager
def scratch() -> Iterator[Scratch]:
    """A folder of our own. Removes those that dead ones left, first."""
    sweep_folders()
    path, lock = _made()
    try:
        yield Scratch(path)
    finally:
        with undisturbed():
            _remove(path)
            os.close(lock)


def sweep_folders() -> None:
    """Remove the folders of demos that are dead, and what shared memory has of their disks."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # somebody else's, or gone
            continue
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        except BlockingIOError:  # its demo lives
            pass
        finally:
            os.close(lock)


def _made() -> tuple[Path, int]:
    """A new folder, and its lock. Who sweeps may take it for a dead one's before it is locked: then
    it is gone when we have the lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)


def _disks(path: Path) -> list[Path]:
    return sorted(path.glob("pages/lightcache-*"))


def _remove(path: Path) -> None:
    """All of it; or nothing more while a process of its demo still uses the disk: the next one
    comes by again."""
    try:
        for folder in _disks(path):
            remove_folder(folder)
    except LightcacheError:
        return
    shutil.rmtree(path, ignore_errors=True)


__all__ = ["PREFIX", "Scratch", "scratch", "sweep_folders"]
