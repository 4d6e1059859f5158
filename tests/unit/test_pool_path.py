"""A pool in a folder of its own: made, found, checked, listed, and removed with its segment."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.refusals import refused

from lightcache import (
    Cache,
    CacheCorrupted,
    InUse,
    LayoutMismatch,
    NoSpace,
    NotReady,
    PermissionDenied,
)
from lightcache.shm import Segment, layout, memory, names, sweep
from lightcache.shm.folders import FOLDER_ITEM, Folder, FolderKind, path_of
from lightcache.shm.listing import read_segment

SHM = Path("/dev/shm")
ARGUMENTS: dict[str, Any] = {
    "pages": 4,
    "page_bytes": 4096,
    "fingerprint": "f",
    "secret": b"a secret of tests",
}


@pytest.fixture
def folder(segment_name: str) -> Iterator[Path]:
    """A folder on a tmpfs; every test leaves it empty."""
    made = SHM / f"folder-of-{segment_name}"
    made.mkdir(mode=0o700)
    yield made
    left = [path.name for path in made.iterdir()]
    for path in made.iterdir():
        path.unlink()
    made.rmdir()
    assert not left, f"left in the pool's folder: {left}"


def in_it(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def abandon(name: str, folder: Path, ready: int = 1) -> None:
    """What a killed process leaves: a segment with a pool, in which nobody lives."""
    source = (
        "import os, sys\n"
        "from lightcache import Cache\n"
        "made = Cache.create(sys.argv[1], pages=4, page_bytes=4096, fingerprint='f',\n"
        "                    secret=b'a secret of tests', pool_path=sys.argv[2])\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", source, name, str(folder)], check=True)
    if not ready:
        with open(SHM / names.object_name(name)[1:], "r+b") as segment:
            segment.seek(layout.SegmentHeader.ready.offset)
            segment.write(bytes(4))


def test_it_lies_there_and_is_found(folder: Path, segment_name: str) -> None:
    with Cache.create(segment_name, **ARGUMENTS, pool_path=folder) as cache:
        pool = cache.index.segment.dependent_name("pool")[1:]
        assert in_it(folder) == [pool]
        assert [p.name for p in SHM.iterdir() if segment_name in p.name and "~" in p.name] == []
        assert stat.S_IMODE((folder / pool).stat().st_mode) == 0o600
        cache.pool[2][:] = 7
        with Cache.attach(segment_name, secret=b"a secret of tests") as other:
            assert (other.pool[2] == 7).all()
        with Cache.attach(segment_name, readonly=True) as reader:
            assert (reader.pool.array[2] == 7).all()
        with Cache.open(segment_name, **ARGUMENTS, pool_path=f"{folder}/") as other:
            assert (other.pool[2] == 7).all()
        assert read_segment(segment_name).dependents == (f"{folder}/{pool}",)  # type: ignore[union-attr]
        assert path_of(f"{folder}/{pool}") == folder / pool
    assert in_it(folder) == []


def test_it_grows(folder: Path, segment_name: str) -> None:
    big = {**ARGUMENTS, "page_bytes": 16 << 20, "pages": 6, "grow": False}
    with Cache.create(segment_name, **big, pool_path=folder, numa="interleave") as cache:
        assert cache.pool.grown == 4
        cache.pool.prefault(threads=2)
        assert cache.pool.grown == 6
        cache.pool[5][-1:] = 1


def test_another_folder_is_another_configuration(folder: Path, segment_name: str) -> None:
    with Cache.create(segment_name, **ARGUMENTS, pool_path=folder, lifetime="persistent"):
        pass
    other = {**ARGUMENTS, "pool_path": "/dev/shm"}
    refused(LayoutMismatch, FOLDER_ITEM, Cache.open, segment_name, **other)
    with Cache.open(segment_name, **ARGUMENTS):
        assert len(in_it(folder)) == 1, "a folder that is not named may be any"
    with Cache.open(segment_name, **other, replace=True):
        assert in_it(folder) == [], "replacing removes the old pool where it was"


def test_dev_shm_by_name_is_the_usual_place(segment_name: str) -> None:
    with (
        Cache.create(segment_name, **ARGUMENTS, pool_path="/dev/shm"),
        Cache.open(segment_name, **ARGUMENTS) as other,
    ):
        assert FOLDER_ITEM not in other.index.segment.config


# ---- the end of it


def test_unlink_rm_and_last_leave(folder: Path, segment_name: str) -> None:
    with Cache.create(segment_name, **ARGUMENTS, pool_path=folder, lifetime="persistent"):
        pass
    assert len(in_it(folder)) == 1
    Segment.unlink(segment_name)
    assert in_it(folder) == []


@pytest.mark.parametrize("ready", [0, 1])
def test_what_the_dead_left(folder: Path, segment_name: str, ready: int) -> None:
    abandon(segment_name, folder, ready)
    old = in_it(folder)
    assert len(old) == 1
    if not ready:  # a creator that died behind its pool: whoever comes next starts over
        with Cache.open(segment_name, **ARGUMENTS, pool_path=folder):
            assert len(in_it(folder)) == 1
            assert in_it(folder) != old
        abandon(segment_name, folder, ready)
    assert f"/lightcache.{segment_name}" in sweep(prefix=segment_name)
    assert in_it(folder) == []


def test_retired_but_not_removed(folder: Path, segment_name: str) -> None:
    """Death inside of the removal, before the pool's name went."""
    abandon(segment_name, folder)
    with open(SHM / names.object_name(segment_name)[1:], "r+b") as segment:
        segment.seek(layout.SegmentHeader.retired.offset)
        segment.write((1).to_bytes(4, "little"))
    sweep(prefix=segment_name)
    assert in_it(folder) == []


def test_nothing_else_is_removed(folder: Path, segment_name: str) -> None:
    """Neither what another life of the segment named, nor what is not a plain file of its owner."""
    other = names.dependent_name(segment_name, "pool", "0" * 32)[1:]
    (folder / other).touch()
    (folder / "notes").touch()
    with Cache.create(segment_name, **ARGUMENTS, pool_path=folder) as cache:
        link = cache.index.segment.dependent_name("link")[1:]
        (folder / link).symlink_to(folder / "notes")
    assert in_it(folder) == sorted([link, other, "notes"])
    sweep(prefix=segment_name)
    assert in_it(folder) == sorted([link, other, "notes"])
    for name in (link, other, "notes"):
        (folder / name).unlink()


def test_a_failed_creation_leaves_nothing(
    folder: Path, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightcache import pool as pool_file

    def full(*_: object) -> None:
        raise NoSpace("full")

    monkeypatch.setattr(pool_file, "_allocate", full)
    refused(NoSpace, "", Cache.create, segment_name, **ARGUMENTS, pool_path=folder)
    assert in_it(folder) == []
    assert read_segment(segment_name) is None


def test_no_room_says_where(
    folder: Path, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = memory.FreeMemory(8192, f"free in {folder}")
    monkeypatch.setattr(memory, "available", lambda path=SHM: room if path == folder else _plenty())
    with pytest.raises(
        NoSpace, match=rf"16\.0 KiB \(16384 bytes\), found 8\.0 KiB free in {folder}"
    ):
        Cache.create(segment_name, **ARGUMENTS, pool_path=folder)
    assert in_it(folder) == []


def _plenty() -> memory.FreeMemory:
    return memory.FreeMemory(1 << 40, "in this test")


def test_a_live_view_keeps_both(folder: Path, segment_name: str) -> None:
    cache = Cache.create(segment_name, **ARGUMENTS, pool_path=folder)
    view = cache.pool[0]
    refused(InUse, "", cache.close)
    assert len(in_it(folder)) == 1
    del view
    cache.close()


# ---- what is refused


@pytest.mark.parametrize("damage", ["gone", "linked", "longer", "symlink", "mode"])
def test_a_pool_that_is_not_what_it_was(folder: Path, segment_name: str, damage: str) -> None:
    cache = Cache.create(segment_name, **ARGUMENTS, pool_path=folder)
    pool, aside = folder / in_it(folder)[0], folder / "aside"
    expected: Any = PermissionDenied
    if damage == "linked":
        aside.hardlink_to(pool)
    elif damage == "symlink":
        pool.rename(aside)
        pool.symlink_to(aside)
    elif damage == "longer":
        os.truncate(pool, 8 * 4096)
        expected = CacheCorrupted
    elif damage == "mode":
        pool.chmod(0o606)
    else:
        pool.rename(aside)
        expected = NotReady
    refused(expected, str(folder), Cache.attach, segment_name, secret=b"a secret of tests")
    if damage == "symlink":
        pool.unlink()
    aside.unlink(missing_ok=True)
    cache.close()


@pytest.fixture
def unseen(folder: Path, segment_name: str) -> Iterator[Path]:
    """A cache that nobody lives in, and whose folder cannot be seen for the time of the test."""
    abandon(segment_name, folder)
    moved = folder.with_name(folder.name + "-moved")
    folder.rename(moved)
    yield moved
    if moved.exists():
        moved.rename(folder)


def test_who_cannot_see_the_folder_takes_nothing(unseen: Path, segment_name: str) -> None:
    """Being the last to leave, a failed attach must not take away what others can use."""
    refused(NotReady, "mount that here", Cache.attach, segment_name, secret=b"a secret of tests")
    assert sweep(prefix=segment_name) == []
    found = read_segment(segment_name)
    assert found is not None
    assert (found.problem, found.dependents) == (None, ())
    unseen.rename(unseen.with_name(f"folder-of-{segment_name}"))
    Cache.attach(segment_name, secret=b"a secret of tests").close()


def test_a_leftover_whose_folder_cannot_be_seen(
    unseen: Path, folder: Path, segment_name: str
) -> None:
    with open(SHM / names.object_name(segment_name)[1:], "r+b") as segment:
        segment.seek(layout.SegmentHeader.ready.offset)
        segment.write(bytes(4))
    for call in (Cache.open, Cache.create):
        refused(NotReady, rf"{folder} is not there.*lightcache rm", call, segment_name, **ARGUMENTS)
    Segment.unlink(segment_name)  # said by its name
    for pool in unseen.iterdir():
        pool.unlink()


@pytest.mark.parametrize("said", [7, "relative", ""])
def test_a_header_that_names_nonsense(segment_name: str, said: Any) -> None:
    """Whoever may write the segment may have written anything."""
    config = {
        "page_bytes": 4096,
        "page_tokens": None,
        "fingerprint": "f",
        "algorithm": "xxh3_128",
        "secret": "0",
        FOLDER_ITEM: said,
    }
    from lightcache import PageIndex

    with PageIndex.create(segment_name, pages=2, config=config):
        refused(CacheCorrupted, "folder", Cache.attach, segment_name, secret=b"a secret of tests")
        assert read_segment(segment_name).dependents == ()  # type: ignore[union-attr]


def test_a_header_that_names_a_disk(segment_name: str, tmp_path: Path) -> None:
    """Nothing is removed there, however it is called."""
    with Folder.open(SHM) as there:
        assert there.kind is FolderKind.TMPFS
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        if Folder(tmp_path, fd).kind is not FolderKind.OTHER:
            pytest.skip("temporary files are in memory here")
    finally:
        os.close(fd)
    with Segment.create(segment_name, 1, config={FOLDER_ITEM: str(tmp_path)}) as segment:
        bait = tmp_path / segment.dependent_name("pool")[1:]
        bait.touch()
        assert read_segment(segment_name).dependents == ()  # type: ignore[union-attr]
    assert bait.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
def test_what_another_user_put_there(folder: Path, segment_name: str) -> None:
    with Segment.create(segment_name, 1, config={FOLDER_ITEM: str(folder)}) as segment:
        bait = folder / segment.dependent_name("pool")[1:]
        bait.touch()
        os.chown(bait, 65534, -1)
        assert read_segment(segment_name).dependents == ()  # type: ignore[union-attr]
    assert bait.exists()
    bait.unlink()


# ---- huge pages, as far as a machine without them can show it


def test_lengths_are_rounded_up_for_huge_pages(folder: Path) -> None:
    with Folder.open(folder) as found:
        assert found.length(5000) == 5000
        found.kind, found.page_bytes = FolderKind.HUGETLBFS, 2 << 20
        assert [found.length(size) for size in (1, 2 << 20, (2 << 20) + 1)] == [
            2 << 20,
            2 << 20,
            4 << 20,
        ]


def test_room_in_huge_pages(tmp_path: Path) -> None:
    pool = tmp_path / "hugepages-2048kB"
    pool.mkdir()
    figures = {"free": 10, "resv": 3, "surplus": 1, "nr_overcommit": 5}
    for name, figure in figures.items():
        (pool / f"{name}_hugepages").write_text(f"{figure}\n")
    room = memory.huge_available(tmp_path, 2 << 20, tmp_path)
    assert room.bytes <= 11 * (2 << 20)
    assert room.bytes == 11 * (2 << 20) or "size=" in room.limit
    none = memory.huge_available(tmp_path, 1 << 30, tmp_path)
    assert none.bytes == 0
    assert "hugepages-1048576kB" in none.limit


def test_room_where_the_mount_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs of size=0 reports no blocks at all, which does not mean that it is full."""
    limitless = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: limitless)
    room = memory.available(tmp_path, tmp_path, tmp_path)
    assert room.bytes > 0
    assert "of the machine's memory" in room.limit


def small_shm(
    patch: pytest.MonkeyPatch, mine: str, capacity: int, elsewhere: int = 1 << 40
) -> None:
    """Give /dev/shm so many bytes for the objects of one name, and other folders free ones."""

    def statvfs(path: Path) -> SimpleNamespace:
        objects = [each for each in SHM.iterdir() if mine in each.name and each.is_file()]
        used = sum(each.stat().st_blocks * 512 for each in objects)
        free = capacity - used if path == SHM else elsewhere
        return SimpleNamespace(f_blocks=1, f_bavail=free, f_frsize=1)

    every = names._objects  # what others have left must not count
    patch.setattr(names, "_objects", lambda: [full for full in every() if mine in full])
    patch.setattr(os, "statvfs", statvfs)
    patch.setattr(memory, "cgroup_rooms", lambda *_: [])


BIG: dict[str, Any] = {**ARGUMENTS, "page_bytes": 1 << 20, "lifetime": "persistent"}


def test_index_and_pool_must_fit_together(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the old cache is removed: either alone would fit in its room."""
    Cache.create(segment_name, **BIG).close()
    more = {**BIG, "pages": 6, "replace": True}
    small_shm(monkeypatch, segment_name, (6 << 20) + 4096)
    refused(NoSpace, "beside the index", Cache.open, segment_name, **more)
    with Cache.open(segment_name, **BIG) as old:
        assert old.pages == 4
    small_shm(monkeypatch, segment_name, 8 << 20)
    with Cache.open(segment_name, **more) as new:
        assert new.pages == 6
    assert Segment.unlink(segment_name)


def test_what_another_folder_frees_makes_no_room_here(
    folder: Path, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cache.create(segment_name, **BIG, pool_path=folder).close()
    small_shm(monkeypatch, segment_name, 3 << 20)
    here = {**BIG, "pool_path": "/dev/shm", "replace": True}
    refused(NoSpace, "free in /dev/shm", Cache.open, segment_name, **here)
    assert len(in_it(folder)) == 1
    small_shm(monkeypatch, segment_name, 6 << 20)
    Cache.open(segment_name, **here).close()
    assert in_it(folder) == []
    # and in that folder the index needs no room
    small_shm(monkeypatch, segment_name, 5 << 20, 40 << 20)
    Cache.open(segment_name, **{**here, "pool_path": folder, "pages": 40}).close()
    assert len(in_it(folder)) == 1
    assert Segment.unlink(segment_name)


def _hugetlbfs() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        fields = line.split()
        if fields[2] == "hugetlbfs" and os.access(fields[1], os.W_OK):
            with Folder.open(Path(fields[1])) as found:
                if found.room().bytes >= 3 * found.page_bytes:
                    return found.path
    return None


@pytest.mark.skipif(_hugetlbfs() is None, reason="no hugetlbfs with three free pages here")
def test_a_pool_of_huge_pages(segment_name: str) -> None:
    folder = _hugetlbfs()
    assert folder
    with Folder.open(folder) as found:
        huge = found.page_bytes
    arguments = {**ARGUMENTS, "page_bytes": 5000, "pages": 2 * huge // 5000 + 1, "grow": False}
    with Cache.create(segment_name, **arguments, pool_path=folder) as cache:
        cache.pool.prefault(threads=2)
        cache.pool.array[:, 0] = np.arange(cache.pages) % 251
        with Cache.attach(segment_name, secret=b"a secret of tests") as other:
            assert (other.pool.array[:, 0] == np.arange(cache.pages) % 251).all()
        assert (folder / cache.index.segment.dependent_name("pool")[1:]).stat().st_size == 3 * huge
    assert not [path for path in folder.iterdir() if segment_name in path.name]


# ---- tools


def test_ls_dump_and_rm(
    folder: Path, segment_name: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    secret = folder / "secret"
    run(
        *("create", segment_name, "--size", "1MiB", "--page-bytes", "64KiB", "--fingerprint", "f"),
        *("--pool-path", str(folder), "--numa", "interleave", "--secret-file", str(secret)),
    )
    pool = next(path for path in folder.iterdir() if path.name.startswith("lightcache."))
    entries = json.loads(run("ls", "--json").stdout)
    (listed,) = [entry for entry in entries if entry["name"] == segment_name]
    assert listed["dependents"] == [str(pool)]
    assert listed["pool_bytes"] == listed["pool_allocated_bytes"] == 1 << 20
    assert "1.0 MiB in" in run("ls").stdout
    dumped = json.loads(run("dump", segment_name, "--json").stdout)["segment"]
    assert dumped["pool"] == str(pool)
    assert dumped["pool_bytes"] == {"length": 1 << 20, "allocated": 1 << 20}
    assert f"in {folder}" in run("dump", segment_name).stdout
    assert "pool is gone" not in run("dump", segment_name).stdout
    run("rm", segment_name)
    secret.unlink()
    assert in_it(folder) == []
