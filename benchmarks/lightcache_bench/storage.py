"""A disk behind a cache, or any storage: reading and writing, looking up, making the index anew.

- Reading and writing: pages of 2 and 8 MiB by calls of 16 from two threads, as a tier makes them,
  in turns with fio on the same folder: as many threads, one system call a page, direct I/O as well.
  Ours adds a footer and a checksum to each page. Processor time is that of the whole process, so
  the checksums are in it; what the checksum does alone stands beside it.
- Looking up: 2,000 keys that are all stored, against a lookup of the index alone. `bare_us` is what
  a loop in C takes that reads a bucket and a record for each key, of which nothing has to be true.
- The index: of 100,000 slots, each with a page of 4 KiB, from their footers; what that takes
  depends on how many small reads the disk does, not on the size of a page.

- A storage that hangs: the longest call of a scheduler meanwhile (`_hanging`).

The folder decides what is measured: give one on the disk that is meant (`--path`). With `--url` it
is the storage of that URL: reading and writing against a plain loop of its client library, by as
many callers, and looking up (`_remote`).
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import ConfigError, StorageError
from lightcache.page_index import geometry
from lightcache.storage.common import checksum
from lightcache.storage.disk import DiskStorage
from lightcache.storage.disk.slots import slot_bytes
from lightcache.storage.protocol import StorageSpec
from lightcache_bench import Row, _baseline, _fio, _hanging, _remote, meets
from lightcache_bench._rates import Rate, rate_rows, timed
from lightcache_bench._timing import Case, clocked, interleaved, median, spread

MIB = 1 << 20
THREADS, CALLERS, CALL = 8, 2, 16
TIMEOUT = 600.0


def rows(quick: bool, path: str | Path | None = None, url: str | None = None) -> Iterator[Row]:
    """See `Benchmark.rows`.

    Args:
        quick: 128 MiB once, and 2,000 slots.
        path: a folder on the disk that is to be measured; what is made there is removed.
        url: of a storage that is to be measured instead.

    Raises:
        ConfigError: both.
    """
    if url is not None:
        if path is not None:
            raise ConfigError("bench storage: expected --path or --url, found both")
        yield from _remote.rows(url, quick)
        return
    with tempfile.TemporaryDirectory(prefix="lightcache-bench-", dir=path or ".") as made:
        folder = Path(made)
        for page_bytes in (2 * MIB, 8 * MIB):
            yield from _rates(folder, page_bytes, 128 * MIB if quick else 1024 * MIB, quick)
        yield _checksum(quick)
        yield _contains(folder, quick)
        yield _rebuild(folder, 2_000 if quick else 100_000)
    yield from _hanging.rows(quick)


# ---- reading and writing


class _Load:
    """A disk with room for so many bytes of pages, memory for the pages of all calls, and keys."""

    def __init__(self, folder: Path, page_bytes: int, nbytes: int) -> None:
        self.pages, self.page_bytes = nbytes // page_bytes, page_bytes
        spec = StorageSpec(page_bytes, "bench")
        capacity = self.pages * slot_bytes(page_bytes)
        self.storage = DiskStorage(folder, spec, capacity=capacity, threads=THREADS)
        self._memory = mmap.mmap(-1, CALLERS * CALL * page_bytes)
        filled = np.frombuffer(self._memory, np.uint8)
        filled[:] = np.random.default_rng(1).integers(0, 256, len(filled), np.uint8)
        self._buffers = list(filled.reshape(CALLERS, CALL, page_bytes))
        self._turn = 0
        self.keys = _keys(self.pages, 0)

    def write(self) -> Rate:
        """All pages once, in a disk that was cleared."""
        self.storage.clear(timeout=TIMEOUT)
        self._turn += 1
        self.keys = _keys(self.pages, self._turn)
        return self._run(self.storage.write)

    def read(self) -> Rate:
        """The same again."""
        return self._run(self.storage.read)

    def _run(self, verb: Any) -> Rate:
        parts = np.array_split(self.keys, CALLERS)

        def caller(number: int) -> None:
            for first in range(0, len(parts[number]), CALL):
                keys = parts[number][first : first + CALL]
                result = verb(keys, list(self._buffers[number])[: len(keys)], timeout=TIMEOUT)
                if result.prefix < len(keys):
                    raise StorageError(f"bench: {result.reason or 'a page is missing'}")

        return timed(caller, CALLERS, self.pages * self.page_bytes)


def _rates(folder: Path, page_bytes: int, nbytes: int, quick: bool) -> Iterator[Row]:
    load = _Load(folder, page_bytes, nbytes)
    with load.storage as storage:
        direct, alone = storage.direct, _fio.missing()
        found: dict[str, list[Rate]] = {name: [] for name in ("write", "read")}
        fio: dict[str, list[Rate]] = {name: [] for name in found}
        for turn in range(1 if quick else 8):
            for verb, rates in found.items():
                for ours in (True, False) if turn % 2 else (False, True):
                    if ours:
                        rates.append(getattr(load, verb)())
                    elif not alone:
                        plain = _fio.run(folder, verb, page_bytes, nbytes, THREADS, direct)
                        fio[verb].append(plain)
    params: dict[str, Any] = {"page_mib": page_bytes // MIB, "direct": direct}
    if alone:
        params["baseline"] = "fio is not installed"
    for verb in found:
        yield from rate_rows(verb, params, found[verb], fio[verb], "fio")
    DiskStorage.remove(folder, storage.spec)
    (folder / "fio").unlink(missing_ok=True)


def _checksum(quick: bool) -> Row:
    """Of pages that are not in the processor's cache, as those from a disk are not."""
    pages = np.random.default_rng(1).integers(0, 256, (64, 2 * MIB), np.uint8)
    work = clocked(lambda i: checksum(b"k" * 16, pages[i % len(pages)]))
    taken = interleaved({"checksum": work}, 64 if quick else 512)["checksum"]
    rate = 2 * MIB / 1e3 / median(taken)
    return Row("checksum, one thread", {"page_mib": 2, **spread(taken)}, rate, "GB/s")


# ---- looking up


def _contains(folder: Path, quick: bool) -> Row:
    keys, page = _keys(2_000, 1), np.zeros(4096, np.uint8)
    spec = StorageSpec(4096, "bench")
    with DiskStorage(folder, spec, capacity=2_100 * slot_bytes(4096)) as storage:
        storage.write(keys, [page] * len(keys), timeout=TIMEOUT)
        if storage.contains(keys, timeout=TIMEOUT) != len(keys):
            raise StorageError("bench: not all keys are stored")
        cases = {
            "contains": clocked(lambda i: storage.contains(keys, timeout=TIMEOUT)),
            "peek": clocked(lambda i: storage._index.peek(keys)),
            **_bare(storage._index.pages, keys),
        }
        taken = interleaved(cases, 20 if quick else 300, 20)
    DiskStorage.remove(folder, spec)
    value, alone, target = median(taken["contains"]), median(taken["peek"]), "<= 15"
    params = {"keys": len(keys), "peek_us": round(alone, 2), **spread(taken["contains"])}
    if "bare" in taken:
        params["bare_us"] = round(median(taken["bare"]), 2)
    against = "peek of the index alone"
    met = meets(value, target)
    return Row("contains", params, value, "us", against, value / alone, target, met)


def _bare(pages: int, keys: Keys) -> dict[str, Case]:
    """A loop in C over as many buckets and records: how fast the machine is in the same second."""
    try:
        return {"bare": _baseline.Probe(pages, geometry(pages).buckets, [keys]).case([0])}
    except _baseline.Unavailable:
        return {}


# ---- the index


def _rebuild(folder: Path, slots: int) -> Row:
    spec = StorageSpec(4096, "bench")
    keys, page = _keys(slots, 2), np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    with DiskStorage(folder, spec, capacity=slots * slot_bytes(4096), threads=16) as storage:
        for first in range(0, slots, 1_000):
            part = keys[first : first + 1_000]
            storage.write(part, [page] * len(part), timeout=TIMEOUT)
    with DiskStorage(folder, spec) as storage:
        found = storage.rebuilt
        if found is None or found.pages != slots:
            raise StorageError(f"bench: expected to find {slots} pages again, found {found}")
    DiskStorage.remove(folder, spec)
    each = found.seconds / slots * 1e6
    return Row("rebuild", {"slots": slots, "us_a_slot": round(each, 1)}, found.seconds, "s")


def _keys(n: int, seed: int) -> Keys:
    return np.random.default_rng(seed).integers(0, 1 << 63, (n, 2), np.uint64)
