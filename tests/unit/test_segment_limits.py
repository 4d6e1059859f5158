"""A segment used at the wrong time, and the limits of time and memory."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.refusals import refused

from lightcache.errors import (
    InUse,
    LightcacheError,
    LockTimeout,
    NoSpace,
    NotReady,
    PermissionDenied,
)
from lightcache.shm import Segment, codes, creation, layout, memory, names, ofd
from lightcache.shm.objects import OpenObject

SHM = Path("/dev/shm")
Script = Callable[..., Any]


def test_close_with_live_views(segment_name: str) -> None:
    np = pytest.importorskip("numpy")
    segment = Segment.create(segment_name, 100)
    array = np.frombuffer(segment.view(segment.payload_offset, 64), dtype=np.uint32)[2:]
    refused(InUse, "1 views", segment.close)
    array[:] = 5  # still there, and the segment still works
    with segment.busy(), pytest.raises(InUse, match="2 views or calls"):
        segment.close()
    segment.join()
    del array
    segment.close()


def test_readers_cannot_write(segment_name: str, script: Script) -> None:
    with Segment.create(segment_name, 1) as made:
        reader = Segment.attach(segment_name, readonly=True)
        with pytest.raises(TypeError):
            reader.view(reader.payload_offset, 1)[0] = 1
        refused(PermissionDenied, "read-only", reader.join)
        reader.close()
        script(
            "import ctypes, sys\n"
            "from lightcache.shm import Segment\n"
            "s = Segment.attach(sys.argv[1], readonly=True)\n"
            "ctypes.memset(s.address + s.payload_offset, 1, 1)\n",
            segment_name,
            status=-signal.SIGSEGV,
        )
        assert made.view(made.payload_offset, 1)[0] == 0


# ---------------------------------------------------------------- limits of time and memory


def test_no_space_while_allocating(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look beforehand is a moment old; the allocation itself has the last word."""

    class Full:
        @staticmethod
        def lcs_fallocate(fd: int, offset: int, length: int) -> int:
            return codes.Code.SYS - errno.ENOSPC

    monkeypatch.setattr("lightcache.shm.creation._native.blocking", Full)
    refused(NoSpace, "still missing", Segment.create, segment_name, 1)
    assert names.object_name(segment_name)[1:] not in os.listdir(SHM)


def assert_ctrl_c_ends_waiting(fd: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    # Whoever started us in the background may have had SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))

    def wait() -> None:
        timer.start()
        with ofd.locked(fd, layout.BYTE_LIFE, timeout=None):
            pass

    try:
        refused(KeyboardInterrupt, "", wait)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_waiting_for_a_byte_ends(segment_name: str) -> None:
    with Segment.create(segment_name, 1):
        first, second = (OpenObject.open(segment_name, writable=True) for _ in range(2))
        assert first is not None
        assert second is not None
        with ofd.locked(first.fd, layout.BYTE_LIFE):
            with pytest.raises(LockTimeout, match="held by others"):
                with ofd.locked(second.fd, layout.BYTE_LIFE, timeout=0.01):
                    pass
            refused(LockTimeout, "", Segment.unlink, segment_name, timeout=0.01)
            refused(NotReady, "", Segment.attach, segment_name, timeout=0.01)
            assert_ctrl_c_ends_waiting(second.fd)
        first.close()
        second.close()


def write_group(folder: Path, names_: tuple[str, str, str], limit: str, use: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names_[0]).write_text(f"{limit}\n")
    (folder / names_[1]).write_text(f"{use}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names_[2]} 500\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("files", "base", "line"), [(V1, "memory", "4:cpu,memory:/a/b\n"), (V2, "", "0::/a/b\n")]
)
def test_memory_limits_of_cgroups(
    tmp_path: Path,
    files: tuple[str, str, str],
    base: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statvfs = os.statvfs

    def quiet(path: Path) -> object:
        """Others take and give back memory there at the same time."""
        statvfs(path)  # what is missing is missing
        return SimpleNamespace(f_blocks=1000, f_bavail=900, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", quiet)
    own = tmp_path / "self"
    own.mkdir()
    (own / "cgroup").write_text("1:name=systemd:/x\n" + line)
    groups = tmp_path / "groups"
    room = memory.available(SHM, groups, own)
    assert str(SHM) in room.limit
    write_group(groups / base / "a" / "b", files, "max" if base == "" else str(1 << 62), 0)
    assert memory.available(SHM, groups, own) == room
    write_group(groups / base / "a", files, "5000", 2500)
    tight = memory.available(SHM, groups, own)
    assert (tight.bytes, tight.limit) == (
        3000,
        f"left in the memory limit of {groups / base / 'a'}",
    )
    write_group(groups / base, files, "100", 900)
    assert memory.available(SHM, groups, own).bytes == 0
    (groups / base / files[0]).write_text("nonsense")
    assert memory.available(SHM, groups, own) == tight
    assert memory.available(tmp_path / "missing", groups, own).bytes == 0
    # What comes free in any folder counts for the cgroup, for the file system only that in it.
    coming = {None: 50, SHM: 20}
    after = memory.available(SHM, groups, own, coming.__getitem__)
    assert (after.bytes, after.limit) == (tight.bytes + 50, tight.limit)
    plain, later = (
        memory.available(SHM, tmp_path / "none", own, coming, meminfo(tmp_path, 1 << 60))
        for coming in (memory.nothing, lambda folder: 0 if folder is None else 1 << 50)
    )
    assert later.bytes - plain.bytes > 1 << 49


def meminfo(folder: Path, available: int) -> Path:
    """The kernel's file, of a machine with so many bytes available."""
    file = folder / "meminfo"
    file.write_text(f"MemTotal: 9 kB\nMemFree: 9 kB\nMemAvailable:   {available >> 10} kB\n")
    return file


def test_a_mount_larger_than_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's --shm-size may be, and the kernel kills when it fills."""
    stat = SimpleNamespace(f_blocks=1 << 40, f_bavail=1 << 40, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: stat)
    own = tmp_path / "self"
    room = memory.available(SHM, tmp_path, own, meminfo=meminfo(tmp_path, 3 << 30))
    assert (room.bytes, room.limit) == (3 << 30, "of the machine's memory available")
    later = memory.available(
        SHM, tmp_path, own, lambda folder: 5 if folder is None else 0, meminfo(tmp_path, 3 << 30)
    )
    assert later.bytes == (3 << 30) + 5
    without = memory.available(SHM, tmp_path, own, meminfo=tmp_path / "missing")
    assert 0 < without.bytes < 1 << 50


def test_system_refusals_are_typed(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    for number, kind in ((errno.ENOSPC, NoSpace), (errno.EMFILE, LightcacheError)):
        monkeypatch.setattr(creation.posix_ipc, "SharedMemory", refuse(number))
        refused(kind, "", Segment.create, segment_name, 1)
