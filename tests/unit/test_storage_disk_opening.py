"""Opening a disk's folder: who may, what is mended, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.disks import ABSENT, KEYS, OK, SLOT, STORED, disk, found, got, home, indexes, put
from support.refusals import refused
from support.scripts import with_support

from lightcache import ConfigError, InUse, LayoutMismatch, StorageError
from lightcache.shm import ofd
from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.disk import DiskStorage
from lightcache.storage.disk.slots import read_header, write_header
from lightcache.storage.testing.conformance import SPEC, make_keys
from lightcache.storage.urls import check_url

# ---------------------------------------------------------------- capacity


def sizes(where: Path) -> list[int]:
    """Of the slot files."""
    return [path.stat().st_size for path in sorted(home(where).glob("slots-*"))]


@pytest.mark.parametrize(("slots", "files"), [(1, 4), (3, 4), (5, 2), (16, 3)])
def test_files_are_as_large_as_they_may_become(where: Path, slots: int, files: int) -> None:
    with disk(where, slots, files=files) as storage:
        assert storage.slots == slots
    assert sum(sizes(where)) == slots * SLOT
    assert len(sizes(where)) == min(slots, files)
    assert all(path.stat().st_blocks * 512 >= SLOT for path in home(where).glob("slots-*"))


def test_capacity_is_a_bound(where: Path) -> None:
    with DiskStorage(where, SPEC, capacity=10 * SLOT + SLOT - 1) as storage:
        assert storage.slots == 10


def test_a_folder_knows_its_capacity(where: Path) -> None:
    refused(ConfigError, "is new", disk, where, None)
    assert not where.exists()
    with disk(where, 8) as storage:
        put(storage, KEYS)
    with disk(where, None) as storage:
        assert storage.slots == 8


def test_a_larger_capacity_keeps_all(where: Path) -> None:
    with disk(where, 8) as storage:
        put(storage, KEYS[:8])
    with disk(where, 20) as storage:
        assert got(storage, KEYS[:8]) == [OK] * 8
        assert put(storage, KEYS[8:]) == [STORED] * 4
        assert found(storage, KEYS) == 12


def test_a_smaller_capacity_forgets_what_lies_behind(where: Path) -> None:
    with disk(where, 16) as storage:
        put(storage, KEYS)
    with disk(where, 5) as storage:
        assert storage.slots == 5
        assert set(got(storage, KEYS)) == {OK, ABSENT}
        assert got(storage, KEYS).count(OK) == 5
    assert sum(sizes(where)) == 5 * SLOT
    with disk(where, 1) as storage:
        assert storage.slots == 2  # one for each file
    with disk(where, 1) as one, disk(where, 1) as other:
        assert one.slots == other.slots == 2


def test_a_capacity_in_use_stays(where: Path) -> None:
    with disk(where, 8), pytest.raises(InUse, match="has 8 slots, expected 16"):
        disk(where, 16)


def test_no_room(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk(where, 4) as storage:
        put(storage, KEYS[:4])
    before, real = sizes(where), os.posix_fallocate
    calls: list[int] = []

    def full(handle: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 2:
            os.ftruncate(handle, length)  # some file systems leave what they could
            raise OSError(28, os.strerror(28))
        real(handle, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    refused(StorageError, r"12 slots, 98304 bytes in all, do not fit", disk, where, 12)
    assert sizes(where) == before
    calls.clear()
    refused(StorageError, "do not fit", disk, where, 4, StorageSpec(4096, "another"))
    assert not list(home(where, StorageSpec(4096, "another")).glob("slots-*"))
    monkeypatch.undo()
    with disk(where, 4) as storage:
        assert found(storage, KEYS) == 4


def test_a_file_system_that_gives_no_blocks_ahead(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: Any) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with disk(where) as storage:
        assert put(storage, KEYS) == [STORED] * 12
        assert got(storage, KEYS) == [OK] * 12


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"threads": 0}, "threads"),
        ({"files": 0}, "files"),
        ({"retry": -1.0}, "retry"),
        ({"retry": float("nan")}, "retry"),
        ({"capacity": "much"}, "capacity"),
        ({"capacity": SLOT - 1}, "capacity"),
        ({"capacity": 1 << 60}, "capacity"),
    ],
)
def test_bad_arguments(where: Path, how: dict[str, Any], what: str) -> None:
    refused(ConfigError, what, DiskStorage, where, SPEC, **{"capacity": 16 * SLOT, **how})
    assert not where.exists()


@pytest.mark.parametrize(
    "rest",
    [
        *("", "?capacity=1MiB", "/x?size=1MiB", "/x?threads=many", "/x?direct=maybe"),
        *("/x?index=lose", "/x?capacity=much"),
    ],
)
def test_bad_urls(rest: str) -> None:
    refused(ConfigError, "", open_storage, f"disk:{rest}", spec=SPEC)
    refused(ConfigError, "", check_url, f"disk:{rest}")


def test_a_url_is_checked_and_nothing_made(where: Path) -> None:
    check_url(f"disk:{where}?capacity=1TiB&threads=4&files=2&retry=1.5&direct=no&index=keep")
    check_url(f"flaky:read_fail=0.5,seed=1:disk:{where}?capacity=1TiB")
    assert not where.exists()
    for wrong in ("flaky:seed=1:disk:", "flaky:sed=1:memory:", "flaky:", "flaky:seed=1"):
        refused(ConfigError, "", check_url, wrong)
    check_url("memory:?pages=3")
    refused(ConfigError, "found 'tape'", check_url, "tape:")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(StorageError, "give a folder that can be written to", disk, tmp_path / "file")


def test_a_folder_of_another_user(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(where).close()
    real = os.open

    def denied(path: Any, *arguments: Any, **more: Any) -> int:
        if str(path).endswith("lock"):
            raise PermissionError(13, os.strerror(13), str(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", denied)
    refused(StorageError, "Permission denied", disk, where)


# ---------------------------------------------------------------- header and files


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": "1"}', '{"version": 1}', "[" * 100_000]
)
def test_a_damaged_header(where: Path, text: str) -> None:
    disk(where).close()
    (home(where) / "header.json").write_text(text)
    refused(StorageError, "is damaged; remove the folder", disk, where)
    DiskStorage.remove(where, SPEC)
    assert not home(where).exists()


@pytest.mark.slow
def test_a_header_with_one_bit_flipped(where: Path) -> None:
    """Whichever it is: damaged, or the same header where it stands between its words."""
    disk(where).close()
    path = home(where) / "header.json"
    whole, header = path.read_bytes(), read_header(home(where))
    same = 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert read_header(home(where)) == header, f"bit {bit}"
            same += 1
        except StorageError:
            pass
    assert 8 * len(whole) > 1720
    assert same < len(whole)  # a space that has become another one


def test_a_header_without_a_check(where: Path) -> None:
    """Of a release that wrote none."""
    disk(where).close()
    path = home(where) / "header.json"
    found = json.loads(path.read_text())
    del found["check"]
    path.write_text(json.dumps(found))
    disk(where).close()
    assert "check" in json.loads(path.read_text())


def test_a_header_of_another_version(where: Path) -> None:
    disk(where).close()
    header = read_header(home(where))
    assert header is not None
    write_header(home(where), replace(header, version=2))
    refused(LayoutMismatch, "expected 1, found 2", disk, where)


def test_a_folder_under_another_name(where: Path) -> None:
    disk(where).close()
    other = StorageSpec(4096, "another")
    home(where).rename(home(where, other))
    refused(LayoutMismatch, "holds pages of", disk, where, spec=other)


def test_without_its_header_nothing_counts(where: Path) -> None:
    """Nobody knows then which epochs were cleared."""
    with disk(where) as storage:
        put(storage, KEYS)
    (home(where) / "header.json").unlink()
    with disk(where) as storage:
        assert got(storage, KEYS) == [ABSENT] * 12


@pytest.mark.parametrize("harm", ["missing", "short"])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_slot_file_is_made_again(where: Path, harm: str, persistent: bool) -> None:
    with disk(where, persistent=persistent) as storage:
        put(storage, KEYS)
    file = home(where) / "slots-001"
    if harm == "missing":
        file.unlink()
    else:
        os.truncate(file, SLOT)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        statuses = got(storage, KEYS)
        assert statuses.count(OK) == (6 if harm == "missing" else 7)
        assert set(put(storage, KEYS)) >= {STORED}
        assert got(storage, KEYS) == [OK] * 12


def test_a_slot_file_that_vanishes_in_use(where: Path) -> None:
    with disk(where) as one:
        put(one, KEYS)
        (home(where) / "slots-000").unlink()
        refused(StorageError, "was the folder removed", disk, where)
        assert got(one, KEYS) == [OK] * 12


# ---------------------------------------------------------------- the index


def test_an_index_of_before_is_not_trusted(where: Path) -> None:
    """It stayed in shared memory, and the folder was used without it meanwhile."""
    with disk(where, persistent=True) as storage:
        put(storage, KEYS[:6])
    (index,) = indexes(where)
    away = index.with_name(f"{index.name}-away")
    index.rename(away)
    with disk(where) as storage:
        storage.delete(KEYS[:6], timeout=60.0)
        put(storage, make_keys(16, 9))
    away.rename(index)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert found(storage, KEYS) == 0
        assert found(storage, make_keys(16, 9)) == 16


def test_an_index_whose_maker_died_in_the_rebuild(where: Path) -> None:
    with disk(where, persistent=True) as storage:
        put(storage, KEYS[:6])
        header = read_header(home(where))
    assert header is not None
    write_header(home(where), replace(header, rebuilt=header.index - 1))
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert found(storage, KEYS) == 6


@pytest.mark.parametrize("at", [0, 16384 + 32768])
def test_a_damaged_index_is_made_anew(where: Path, at: int) -> None:
    """Its header, or what it says of itself behind that."""
    with disk(where, persistent=True) as storage:
        put(storage, KEYS[:6])
    (index,) = indexes(where)
    with open(index, "r+b") as file:
        file.seek(at)
        file.write(b"?" * 512)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert got(storage, KEYS[:6]) == [OK] * 6


def test_processes_with_another_dev_shm(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightcache.storage.disk.folder._LEAVING", 0.05)
    with disk(where) as storage:
        put(storage, KEYS[:2])
        (index,) = indexes(where)
        away = index.with_name(f"{index.name}-away")
        index.rename(away)
        try:
            refused(InUse, "not in this /dev/shm", disk, where)
        finally:
            away.rename(index)
        assert got(storage, KEYS[:2]) == [OK] * 2


UNSHARED = """
import sys
from support.disks import KEYS, disk, found
from pathlib import Path
from lightcache import InUse
try:
    disk(Path(sys.argv[1]))
except InUse as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_a_container_with_a_dev_shm_of_its_own(where: Path, tmp_path: Path) -> None:
    mount = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount namespaces here")
    path = tmp_path / "unshared.py"
    path.write_text(with_support(UNSHARED))
    with disk(where) as storage:
        put(storage, KEYS[:2])
        done = subprocess.run(
            [*inside, sys.executable, str(path), str(where)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "refused: disk:" in done.stdout, done.stderr
        assert got(storage, KEYS[:2]) == [OK] * 2


def test_a_copy_of_a_folder_is_another_one(where: Path, tmp_path: Path) -> None:
    with disk(where) as one:
        put(one, KEYS[:3])
        shutil.copytree(where, tmp_path / "copy")
        with disk(tmp_path / "copy") as copy:
            assert copy.index_name != one.index_name
            assert got(copy, KEYS[:3]) == [OK] * 3
            put(copy, KEYS[3:6])
            assert found(one, KEYS) == 3
            assert got(one, KEYS[:3]) == [OK] * 3


def test_who_opens_while_the_last_one_leaves(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has gone, the folder is still held: that is waited for."""
    leaving = disk(where)
    put(leaving, KEYS[:3])
    leaving._folder.index.close()
    waits: list[int] = []

    def wait(pause: ofd.Pause) -> bool:
        waits.append(1)
        leaving.close()
        return True

    monkeypatch.setattr(ofd.Pause, "sleep", wait)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert found(storage, KEYS) == 3
    assert waits == [1]


def test_several_open_at_once(where: Path) -> None:
    with disk(where) as storage:
        put(storage, KEYS)
    opened: list[DiskStorage] = []
    threads = [threading.Thread(target=lambda: opened.append(disk(where))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60.0)
    assert sorted(each.rebuilt is not None for each in opened) == [False] * 3 + [True]
    for each in opened:
        assert got(each, KEYS) == [OK] * 12
    for each in opened:
        each.close()


def test_somebody_opens_it_for_too_long(where: Path) -> None:
    with disk(where) as storage:
        assert ofd.try_lock(storage._folder._lock, 0)
        refused(StorageError, "timed out: another process was opening", disk, where, timeout=0.0)
        ofd.unlock(storage._folder._lock, 0)


# ---------------------------------------------------------------- removing


def test_removing(where: Path) -> None:
    DiskStorage.remove(where, SPEC)
    with disk(where) as storage:
        put(storage, KEYS)
        refused(InUse, "used by others", DiskStorage.remove, where, SPEC)
    DiskStorage.remove(where, SPEC)
    assert not list(where.iterdir())
