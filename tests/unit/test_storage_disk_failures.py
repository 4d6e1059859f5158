"""The disk when it fails: torn slots, no room, errors, a folder that vanished."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disks import (
    ABSENT,
    CORRUPT,
    FAILED,
    KEYS,
    OK,
    PRESENT,
    REFUSED,
    STORED,
    Medium,
    disk,
    found,
    got,
    home,
    put,
    slot_of,
)
from support.refusals import refused
from support.scripts import with_support

from lightcache import LockTimeout, StorageError
from lightcache.storage.disk import DiskStorage, backend
from lightcache.storage.disk.slots import BLOCK, Footer, SlotFiles, unpack
from lightcache.storage.testing.conformance import PAGE_BYTES, pages_of

LOG = "lightcache.storage"


# ---------------------------------------------------------------- footers


def test_a_footer_is_whole_or_none() -> None:
    footer = Footer(b"s" * 8, 1, 2, b"k" * 16, b"p" * 16, 3, PAGE_BYTES, 4)
    block = footer.pack()
    assert len(block) == BLOCK
    assert unpack(block) == footer
    assert unpack(bytes(BLOCK)) is None
    assert unpack(b"") is None
    for at in range(96):
        damaged = bytearray(block)
        damaged[at] ^= 1
        assert unpack(damaged) is None, at


# ---------------------------------------------------------------- torn slots


def written(where: Path, n: int = 4) -> tuple[Medium, list[int]]:
    """A folder with the first n of KEYS in it; where each stands."""
    with disk(where) as storage:
        put(storage, KEYS[:n])
        return Medium(where), [slot_of(storage, key) for key in KEYS[:n]]


def test_a_page_of_one_write_and_a_footer_of_another(where: Path) -> None:
    medium, slots = written(where)
    medium.write(slots[1], medium.read(slots[2])[:PAGE_BYTES])
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert storage.rebuilt.pages == 4  # what a page holds is looked at when it is read
        assert got(storage, KEYS[:4]) == [OK, CORRUPT, OK, OK]
        assert got(storage, KEYS[:4]) == [OK, ABSENT, OK, OK]
        assert storage.stats().reads_corrupt == 1
        assert put(storage, KEYS[:4]) == [PRESENT, STORED, PRESENT, PRESENT]
        assert got(storage, KEYS[:4]) == [OK] * 4


def test_a_corrupt_page_is_not_found_by_a_rebuild(where: Path) -> None:
    medium, slots = written(where)
    medium.write(slots[1], b"?")
    with disk(where) as storage:
        assert got(storage, KEYS[:4])[1] is CORRUPT
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert (storage.rebuilt.pages, storage.rebuilt.dropped) == (3, 0)


def test_half_a_page(where: Path) -> None:
    medium, slots = written(where)
    medium.write(slots[0], bytes(PAGE_BYTES // 2), PAGE_BYTES // 2)
    with disk(where) as storage:
        assert got(storage, KEYS[:4]) == [CORRUPT, OK, OK, OK]


@pytest.mark.parametrize("harm", ["half", "copied", "magic"])
def test_a_damaged_footer_is_dropped_and_counted(where: Path, harm: str) -> None:
    medium, slots = written(where)
    if harm == "half":
        medium.write(slots[1], bytes(24), PAGE_BYTES + 48)
    elif harm == "copied":  # of another slot, whole
        medium.write(slots[1], medium.read(slots[2])[PAGE_BYTES:], PAGE_BYTES)
    else:
        medium.write(slots[1], b"?", PAGE_BYTES)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert (storage.rebuilt.pages, storage.rebuilt.dropped) == (3, 1)
        assert found(storage, KEYS) == 1
        assert got(storage, KEYS[:4]) == [OK, ABSENT, OK, OK]
        storage._index.check().raise_if_broken()


def test_a_footer_damaged_while_the_index_is_there(where: Path) -> None:
    with disk(where) as storage:
        put(storage, KEYS[:2])
        Medium(where).write(slot_of(storage, KEYS[0]), bytes(BLOCK), PAGE_BYTES)
        assert got(storage, KEYS[:2]) == [CORRUPT, OK]


@pytest.mark.parametrize("change", ["epoch", "spec", "length"])
def test_a_footer_of_other_pages(where: Path, change: str) -> None:
    medium, slots = written(where)
    footer = unpack(medium.read(slots[1])[PAGE_BYTES:])
    assert footer is not None
    other = {"epoch": footer.epoch - 1, "spec": b"another!", "length": 1}[change]
    medium.write(slots[1], replace(footer, **{change: other}).pack(), PAGE_BYTES)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert (storage.rebuilt.pages, storage.rebuilt.dropped) == (3, int(change != "epoch"))
        assert got(storage, KEYS[:4]) == [OK, ABSENT, OK, OK]


def test_of_two_slots_with_a_page_the_newer_counts(where: Path) -> None:
    medium, slots = written(where, 2)
    whole = medium.read(slots[0])
    footer = unpack(whole[PAGE_BYTES:])
    assert footer is not None
    free = next(slot for slot in range(16) if slot not in slots)
    medium.write(free, whole[:PAGE_BYTES])
    newer = replace(footer, slot=free, written=footer.written + 1_000)
    medium.write(free, newer.pack(), PAGE_BYTES)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert (storage.rebuilt.pages, storage.rebuilt.dropped) == (2, 1)
        assert slot_of(storage, KEYS[0]) == free
        assert got(storage, KEYS[:2]) == [OK] * 2


def test_a_footer_in_another_slot_than_it_says(where: Path) -> None:
    """It must not be taken for that slot's: what stands there is something else."""
    medium, slots = written(where)
    footer = medium.read(slots[1])[PAGE_BYTES:]
    medium.write(slots[1], medium.read(slots[1])[:PAGE_BYTES] + bytes(BLOCK))
    medium.write(15, footer, PAGE_BYTES)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert (storage.rebuilt.pages, storage.rebuilt.dropped) == (3, 1)
        assert got(storage, KEYS[:4]) == [OK, ABSENT, OK, OK]


def test_a_page_under_another_key(where: Path) -> None:
    """The index says one thing, the slot another: a lost write, and the page of before."""
    with disk(where, 4) as storage:
        put(storage, KEYS[:4])
        medium, slot = Medium(where), slot_of(storage, KEYS[3])
        before = medium.read(slot)
        put(storage, KEYS[4:5])  # in the slot of KEYS[3], which was at the end
        assert slot_of(storage, KEYS[4]) == slot
        medium.write(slot, before)
        assert got(storage, KEYS[4:5]) == [CORRUPT]


# ---------------------------------------------------------------- writing fails


class Failing:
    """Writes of slots that fail, as long as they are to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verb: str, number: int) -> None:
        self.number: int | None = number
        self.calls = 0
        whole = getattr(SlotFiles, verb)

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.number is not None:
                raise OSError(self.number, os.strerror(self.number))
            return whole(*arguments)

        monkeypatch.setattr(SlotFiles, verb, call)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_cannot_be_written(
    where: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    now = [100.0]
    with disk(where, retry=30.0, clock=lambda: now[0]) as storage:
        put(storage, KEYS[:2])
        failing = Failing(monkeypatch, "write_slot", number)
        result = storage.write(KEYS[2:4], [bytes(PAGE_BYTES)] * 2, timeout=60.0)
        assert list(result.statuses) == [FAILED] * 2
        assert os.strerror(number) in result.reason
        tried = failing.calls
        assert put(storage, KEYS[2:4]) == [REFUSED] * 2  # not tried
        assert failing.calls == tried
        assert os.strerror(number) in storage.write_trouble
        assert got(storage, KEYS[:2]) == [OK] * 2  # reads go on
        assert found(storage, KEYS) == 2
        now[0] += 30.0
        assert put(storage, KEYS[2:4]) == [FAILED] * 2  # tried, and still so
        failing.number = None
        assert put(storage, KEYS[2:4]) == [REFUSED] * 2
        now[0] += 30.0
        assert put(storage, KEYS[2:4]) == [STORED] * 2
        assert storage.write_trouble == ""
        assert got(storage, KEYS[:4]) == [OK] * 4
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "written to again" in caplog.records[-1].getMessage()


FULL = """
import contextlib, os, sys
from pathlib import Path
from lightcache import StorageError
from support.disks import FAILED, KEYS, OK, PRESENT, STORED, disk, found, got, home, put
where = Path(sys.argv[1])
try:
    disk(where, 200)
except StorageError as error:
    assert "do not fit" in str(error), error
assert not list(home(where).glob("slots-*"))
def unsupported(*arguments):
    raise OSError(95, "no blocks ahead here")
os.posix_fallocate = unsupported
with disk(where, 200) as storage:
    stored = 0
    while put(storage, KEYS[stored : stored + 1]) == [STORED]:
        stored += 1
        with contextlib.suppress(OSError):
            (where / f"filler-{stored}").write_bytes(bytes(32 << 10))
    assert 0 < stored < 10
    assert "No space left" in storage.write_trouble, storage.write_trouble
    assert got(storage, KEYS[:stored]) == [OK] * stored
    for each in where.glob("filler-*"):
        each.unlink()
    assert put(storage, KEYS) == [PRESENT] * stored + [STORED] * (12 - stored)
    assert storage.write_trouble == ""
print("full")
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A tmpfs in a mount namespace; without blocks ahead, where a full disk shows when written."""
    mount = 'mount -t tmpfs -o size=256k tmpfs "$1" && shift && exec "$@"'
    small = tmp_path / "small"
    small.mkdir()
    inside = ["unshare", "--mount", "sh", "-c", mount, "sh", str(small)]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount namespaces here")
    path = tmp_path / "full.py"
    path.write_text(with_support(FULL))
    done = subprocess.run(
        [*inside, sys.executable, str(path), str(small / "disk")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "full\n", done.stderr


def test_one_page_of_a_batch_fails(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the batch is found; what was written of it may be, by a rebuild, and is right."""
    whole, failed = SlotFiles.write_slot, []

    def second(self: SlotFiles, slot: int, *arguments: Any) -> None:
        if not failed and slot % 2:
            failed.append(slot)
            raise OSError(errno.EIO, "on purpose")
        whole(self, slot, *arguments)

    monkeypatch.setattr(SlotFiles, "write_slot", second)
    with disk(where) as storage:
        assert put(storage, KEYS[:4]) == [FAILED] * 4
        assert found(storage, KEYS) == 0
    with disk(where) as storage:
        assert got(storage, KEYS[:4]).count(OK) == 3
        assert OK in got(storage, KEYS[:4])
        assert set(put(storage, KEYS[:4])) == {PRESENT, STORED}


def test_less_was_written_than_a_slot(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    with disk(where) as storage:
        monkeypatch.setattr(os, "pwritev", lambda *some: real(*some) // 2)
        result = storage.write(KEYS[:1], [bytes(PAGE_BYTES)], timeout=60.0)
        assert list(result.statuses) == [FAILED]
        assert "of 8192 bytes were written" in result.reason
        monkeypatch.undo()


# ---------------------------------------------------------------- reading fails


def test_a_page_that_cannot_be_read_is_stored_anew(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk(where) as storage:
        put(storage, KEYS[:3])
        failing = Failing(monkeypatch, "read_slot", errno.EIO)
        into = np.zeros((3, PAGE_BYTES), np.uint8)
        result = storage.read(KEYS[:3], list(into), timeout=60.0)
        assert list(result.statuses) == [FAILED] * 3
        assert os.strerror(errno.EIO) in result.reason
        failing.number = None
        assert got(storage, KEYS[:3]) == [ABSENT] * 3
        assert put(storage, KEYS[:3]) == [STORED] * 3
        assert got(storage, KEYS[:3]) == [OK] * 3


def test_a_file_cut_short_under_us(where: Path) -> None:
    with disk(where, files=1) as storage:
        put(storage, KEYS[:8])
        os.truncate(home(where) / "slots-000", 4 * 8192 + 100)
        statuses = got(storage, KEYS[:8])
        assert statuses.count(OK) == 4
        assert statuses.count(FAILED) == 4
        assert statuses.count(OK) + put(storage, KEYS[:8]).count(STORED) == 8
        assert got(storage, KEYS[:8]) == [OK] * 8


def test_footers_that_cannot_be_read(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, slots = written(where)
    whole = SlotFiles.read_footer

    def bad(self: SlotFiles, slot: int) -> bytes:
        if slot == slots[2]:
            raise OSError(errno.EIO, "on purpose")
        return whole(self, slot)

    monkeypatch.setattr(SlotFiles, "read_footer", bad)
    with disk(where) as storage:
        assert storage.rebuilt is not None
        assert (storage.rebuilt.pages, storage.rebuilt.unreadable) == (3, 1)
        assert got(storage, KEYS[:4]) == [OK, OK, ABSENT, OK]


def test_a_footer_that_cannot_be_erased(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium, slots = written(where)
    medium.write(slots[1], b"?")
    Failing(monkeypatch, "erase", errno.EROFS)
    with disk(where) as storage:
        assert got(storage, KEYS[:4])[1] is CORRUPT
        assert got(storage, KEYS[:4])[1] is ABSENT


# ---------------------------------------------------------------- the folder vanishes


def test_a_folder_that_vanished(
    where: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    storage = disk(where, retry=30.0, clock=lambda: now[0])
    try:
        put(storage, KEYS[:2])
        os.rename(where, tmp_path / "away")
        for _ in range(3):
            result = storage.write(KEYS[2:3], [bytes(PAGE_BYTES)], timeout=60.0)
            assert list(result.statuses) == [REFUSED]
            assert "removed or unmounted" in result.reason
        assert got(storage, KEYS[:2]) == [OK] * 2
        refused(StorageError, "removed", storage.clear, timeout=60.0)
        assert len(caplog.records) == 1
        os.rename(tmp_path / "away", where)
        now[0] += 30.0
        assert put(storage, KEYS[2:3]) == [STORED]
    finally:
        storage.close()


def test_another_folder_in_its_place(where: Path) -> None:
    with disk(where) as storage:
        put(storage, KEYS[:2])
        shutil.rmtree(where)
        with disk(where) as other:  # which is at once as good as any
            assert put(other, KEYS[:3]) == [STORED] * 3
            result = storage.write(KEYS[3:4], [bytes(PAGE_BYTES)], timeout=60.0)
            assert list(result.statuses) == [REFUSED]
            assert "another one" in result.reason
            assert got(storage, KEYS[:2]) == [OK] * 2
            assert got(other, KEYS[:3]) == [OK] * 3
        assert isinstance(storage, DiskStorage)


# ---------------------------------------------------------------- a part of a call


def test_what_was_stored_counts_though_the_rest_fails(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk(where) as storage:
        put(storage, KEYS[:4])
        with monkeypatch.context() as patch:
            patch.setattr(storage._writer, "_fill_slots", _locked)
            result = storage.write(KEYS[:6], list(pages_of(KEYS[:6])), timeout=60.0)
            assert list(result.statuses) == [PRESENT] * 4 + [FAILED] * 2
            assert result.reason == "disk: the index is locked"
            refused(StorageError, "disk: the index is locked", put, storage, KEYS[6:8])
        assert put(storage, KEYS[:8]) == [PRESENT] * 4 + [STORED] * 4


def test_what_was_read_counts_though_what_is_corrupt_cannot_be_dropped(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium, slots = written(where)
    medium.write(slots[1], b"?")
    with disk(where) as storage:
        with monkeypatch.context() as patch:
            patch.setattr(backend, "drop", _locked)
            assert got(storage, KEYS[:4]) == [OK, CORRUPT, OK, OK]
        assert got(storage, KEYS[:4]) == [OK, CORRUPT, OK, OK]
        assert got(storage, KEYS[:4]) == [OK, ABSENT, OK, OK]


def _locked(*given: Any) -> Any:
    raise LockTimeout("the index is locked")
