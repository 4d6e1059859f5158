"""Disks of tests: small ones in a folder of the test, and ways to harm them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightcache.storage import Storage, StorageSpec
from lightcache.storage.disk import DiskStorage
from lightcache.storage.disk.folder import index_name
from lightcache.storage.disk.slots import file_of, slot_bytes
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.testing.conformance import PAGE_BYTES, SPEC, make_keys, pages_of

SLOT = slot_bytes(PAGE_BYTES)
KEYS = make_keys(12, seed=5)
OK, ABSENT, CORRUPT = ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.CORRUPT
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT
FAILED, REFUSED = WriteStatus.FAILED, WriteStatus.REFUSED


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    """A folder for disks. In the end no index of any is left in shared memory."""
    folder = tmp_path / "disk"
    yield folder
    left = [str(name) for name in indexes(folder)]
    for name in indexes(folder):
        name.unlink()
    assert not left


def indexes(folder: Path) -> list[Path]:
    """What /dev/shm has of these disks."""
    found = []
    for each in folder.glob("lightcache-*"):
        place = os.open(each, os.O_RDONLY | os.O_DIRECTORY)
        found.append(Path("/dev/shm") / f"lightcache.{index_name(place)}")
        os.close(place)
    return [path for path in found if path.exists()]


def disk(where: Path, slots: int | None = 16, spec: StorageSpec = SPEC, **how: Any) -> DiskStorage:
    """One with so many slots; None: as many as it has."""
    given = {"threads": 2, "files": 2, "retry": 0.0, "timeout": 30.0, **how}
    capacity = None if slots is None else slots * slot_bytes(spec.page_bytes)
    return DiskStorage(where, spec, capacity=capacity, **given)


def home(where: Path, spec: StorageSpec = SPEC) -> Path:
    """Where the files of a spec stand."""
    return where / f"lightcache-{spec.name}"


def put(storage: Storage, keys: Any, **how: Any) -> list[WriteStatus]:
    """Write these keys' pages."""
    given = {"timeout": 60.0, **how}
    return list(storage.write(keys, list(pages_of(keys)), **given).statuses)


def got(storage: Storage, keys: Any) -> list[ReadStatus]:
    """Read them; what is OK must be right."""
    into = np.zeros((len(keys), PAGE_BYTES), np.uint8)
    result = storage.read(keys, list(into), timeout=60.0)
    for data, expected, status in zip(into, pages_of(keys), result.statuses, strict=True):
        assert status is not OK or (data == expected).all()
    return list(result.statuses)


def found(storage: Storage, keys: Any) -> int:
    """How many, from the first on."""
    return storage.contains(keys, timeout=60.0)


def slot_of(storage: DiskStorage, key: Any) -> int:
    """Where the page of a key stands."""
    with storage._index.match(key.reshape(1, 2)) as lease:
        (slot,) = lease.pages.tolist()
    return int(slot)


class Medium:
    """The bytes of a folder's slots, past everything."""

    def __init__(self, where: Path, files: int = 2, spec: StorageSpec = SPEC) -> None:
        self._folder, self._files = home(where, spec), files

    def _at(self, slot: int) -> tuple[Path, int]:
        return file_of(self._folder, slot % self._files), slot // self._files * SLOT

    def read(self, slot: int) -> bytes:
        """Page and footer."""
        path, where = self._at(slot)
        with open(path, "rb") as file:
            file.seek(where)
            return file.read(SLOT)

    def write(self, slot: int, data: bytes, offset: int = 0) -> None:
        """Overwrite a part of a slot."""
        path, where = self._at(slot)
        with open(path, "r+b") as file:
            file.seek(where + offset)
            file.write(data)
