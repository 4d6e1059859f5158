"""The demo's own storage is removed behind it, by the next demo if need be, and by nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.disks import KEYS, SPEC, put

from lightcache.errors import ConfigError
from lightcache.shm import list_segments
from lightcache.storage import Storage, open_storage
from lightcache.storage.disk import DiskStorage
from lightcache.tools.demo import scratch as module
from lightcache.tools.demo.scratch import Scratch, scratch, sweep_folders

MIB = 1 << 20


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary folders of this test alone, all of them gone in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def opened(folder: Scratch) -> Storage:
    """The disk in it."""
    return open_storage(folder.storage(MIB), spec=SPEC)


def there(names: list[str]) -> bool:
    """Whether shared memory has one of these."""
    return any(info.name in names for info in list_segments())


def test_a_folder_with_a_disk(temporary: Path) -> None:
    with scratch() as folder:
        assert folder.path.parent == temporary
        assert folder.path.name.startswith(f"lightcache-demo-{os.getpid()}-")
        assert folder.path.stat().st_mode & 0o077 == 0
        assert folder.storage(MIB) == f"disk:{folder.path}/pages?capacity={2 * MIB}"
        assert folder.indexes() == []
        with opened(folder) as disk:
            put(disk, KEYS)
            (index,) = folder.indexes()
            assert index == disk.index_name  # type: ignore[attr-defined]
        assert folder.indexes() == []
        with opened(folder) as disk:
            assert disk.contains(KEYS, timeout=10.0) == len(KEYS)
    assert not there([index])


def test_an_error_within() -> None:
    def fail() -> None:
        with scratch() as folder, opened(folder):
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        fail()


def test_an_index_that_stayed_goes_too() -> None:
    """As when every process of a demo was killed."""
    with scratch() as folder:
        url = folder.storage(MIB).partition(":")[2].partition("?")[0]
        DiskStorage(url, SPEC, capacity=MIB, persistent=True).close()
        index = folder.indexes()
        assert there(index)
    assert not there(index)


_KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from lightcache.storage import StorageSpec, open_storage
from lightcache.tools.demo.scratch import scratch

with scratch() as folder:
    disk = open_storage(folder.storage(1 << 20), spec=StorageSpec(4096))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.crash
def test_the_next_demo_removes_what_a_dead_one_left(temporary: Path, script: Any) -> None:
    script(_KILLED, temporary, status=-9)
    (left,) = temporary.iterdir()
    index = Scratch(left).indexes()
    assert there(index)
    with scratch() as folder:
        assert list(temporary.iterdir()) == [folder.path]
        assert folder.path != left
    assert not there(index)


_LIVES = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from lightcache.tools.demo.scratch import scratch

with scratch():
    print("there", flush=True)
    sys.stdin.read()
"""


def test_that_of_a_living_one_stays(temporary: Path) -> None:
    command = [sys.executable, "-c", _LIVES, str(temporary)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=os.sep) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"there\n"
            (theirs,) = temporary.iterdir()
            sweep_folders()
            with scratch() as ours:
                assert set(temporary.iterdir()) == {theirs, ours.path}
            assert theirs.exists()
        finally:
            child.communicate(timeout=60.0)


def test_a_process_that_still_uses_it() -> None:
    """A worker that leaves a moment later than the demo that was killed."""
    folder = Scratch(Path(tempfile.mkdtemp(prefix=module.PREFIX)))
    with opened(folder) as disk:
        put(disk, KEYS)
        sweep_folders()
        assert disk.contains(KEYS, timeout=10.0) == len(KEYS)
        assert folder.path.exists()
    sweep_folders()
    assert not folder.path.exists()


def test_folders_of_others(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, link = temporary / f"{module.PREFIX}x", temporary / f"{module.PREFIX}y"
    theirs.mkdir()
    link.symlink_to(theirs)
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    sweep_folders()
    assert theirs.exists()
    monkeypatch.undo()
    link.unlink()
    theirs.rmdir()


def test_a_folder_that_is_swept_before_it_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its demo makes another one."""
    made: list[Path] = []
    lock = module.fcntl.flock

    def sweeps(file: int, how: int) -> None:
        if not made:
            made.extend(Path(tempfile.gettempdir()).iterdir())
            made[0].rmdir()
        lock(file, how)

    monkeypatch.setattr(module, "fcntl", SimpleNamespace(flock=sweeps, LOCK_EX=2, LOCK_NB=4))
    path, held = module._made()
    os.close(held)
    assert path != made[0]
    path.rmdir()


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch() as folder:
        monkeypatch.setattr(
            module.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * MIB - 1)
        )
        with pytest.raises(ConfigError, match=r"expected 2.0 MiB free in .*--no-restart"):
            folder.storage(MIB)


def test_no_signal_interrupts_removing(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = module._remove
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def disturbed(path: Path) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), each)
        remove(path)

    monkeypatch.setattr(module, "_remove", disturbed)
    with scratch():
        pass
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
