"""The machine stops: of what was never synced, the disk has any mixture of earlier instants.

Slots are written and never synced, so each sector of them may be as it was at any instant up to
the last; the header is synced when it is replaced, so it is the last one. Every such image must
open, give right bytes or none, know nothing from before the last `clear`, and be of use again.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.disks import ABSENT, CORRUPT, OK, PRESENT, REFUSED, STORED, disk, home

from lightcache.storage import StorageSpec
from lightcache.storage.disk import DiskStorage
from lightcache.storage.testing.conformance import make_keys, pages_of

PAGE_BYTES = 2 * 4096 + 512  # of several blocks, the last of them filled up
SPEC = StorageSpec(PAGE_BYTES, "stops")
SLOTS, SECTOR = 6, 512
ROUNDS = int(os.environ.get("LIGHTCACHE_TEST_EXAMPLES", "16"))
KEYS = make_keys(20, seed=8)
PAGES = pages_of(KEYS, PAGE_BYTES)


def opened(folder: Path) -> DiskStorage:
    return disk(folder, SLOTS, SPEC, threads=1)


def put(storage: DiskStorage, which: list[int]) -> list[object]:
    pages = [PAGES[number] for number in which]
    return list(storage.write(KEYS[which], pages, timeout=60.0).statuses)


def work(folder: Path, chance: random.Random) -> tuple[list[dict[str, bytes]], set[int]]:
    """Write, delete and clear; the slots as they were behind each call, and which keys were
    written since the last clear."""
    images, since = [], set[int]()
    with opened(folder) as storage:
        for _ in range(chance.randrange(2, 10)):
            deed = chance.choices(("write", "delete", "clear"), (8, 2, 1))[0]
            which = chance.sample(range(len(KEYS)), chance.randrange(1, SLOTS))
            if deed == "write":
                put(storage, which)
                since.update(which)
            elif deed == "delete":
                storage.delete(KEYS[which], timeout=60.0)
            else:
                storage.clear(timeout=60.0)
                since.clear()
            files = sorted(home(folder, SPEC).glob("slots-*"))
            images.append({path.name: path.read_bytes() for path in files})
    return images, since


def stop(folder: Path, images: list[dict[str, bytes]], chance: random.Random) -> None:
    """What the disk has when the machine stopped: each sector of some instant."""
    old = chance.random()  # how much of it is of before
    for name, last in images[-1].items():
        parts = [
            (chance.choice(images)[name] if chance.random() < old else last)[at : at + SECTOR]
            for at in range(0, len(last), SECTOR)
        ]
        (home(folder, SPEC) / name).write_bytes(b"".join(parts))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_any_mixture_of_instants(where: Path, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{os.environ.get('LIGHTCACHE_TEST_SEED', '')} {seed}")
    images, since = work(where, chance)
    copy = tmp_path / "after"
    shutil.copytree(where, copy)
    stop(copy, images, chance)
    with opened(copy) as storage:
        into = np.zeros((len(KEYS), PAGE_BYTES), np.uint8)
        found = storage.read(KEYS, list(into), timeout=60.0).statuses
        for number, status in enumerate(found):
            assert status in (OK, ABSENT, CORRUPT)
            assert status is not OK or (into[number] == PAGES[number]).all(), number
            assert status is ABSENT or number in since, f"{number} was cleared"
        assert storage.stats().reads_corrupt == found.count(CORRUPT)
        storage._index.check().raise_if_broken()
        # What hangs on a page of this batch keeps it: so some may be refused, none may be wrong.
        assert set(put(storage, list(range(SLOTS)))) <= {STORED, PRESENT, REFUSED}
        storage.clear(timeout=60.0)
        assert put(storage, list(range(SLOTS))) == [STORED] * SLOTS
        into[:] = 0
        assert storage.read(KEYS[:SLOTS], list(into[:SLOTS]), timeout=60.0).prefix == SLOTS
        assert (into[:SLOTS] == PAGES[:SLOTS]).all()
