"""What we are measured against, in C: compiled when asked for, from native/baseline.c."""

from __future__ import annotations

import ctypes
import functools
import mmap
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from lightcache._arguments import Keys
from lightcache_bench._timing import Case

SOURCE = Path(__file__).parent / "native" / "baseline.c"
_ADDRESS, _U32 = ctypes.c_void_p, ctypes.c_uint32


class Unavailable(Exception):
    """No compiler: the message says so."""


@functools.cache
def library() -> ctypes.PyDLL:
    """The compiled baseline.

    Raises:
        Unavailable: there is no C compiler, or it failed.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unavailable("no C compiler here to build the baseline with")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "baseline.so"
        done = subprocess.run(
            [compiler, "-std=c11", "-O2", "-D_GNU_SOURCE", "-shared", "-fPIC", SOURCE, "-o", made],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Unavailable(f"{compiler} does not compile the baseline: {done.stderr[:200]}")
        found = ctypes.PyDLL(str(made))
    found.lcb_probe.argtypes = (_ADDRESS, _U32, _ADDRESS, _ADDRESS, _U32, _ADDRESS)
    found.lcb_probe.restype = ctypes.c_uint64
    found.lcb_empty5.argtypes = (_ADDRESS, _ADDRESS, _U32, _U32, _ADDRESS)
    found.lcb_empty2.argtypes = (_ADDRESS, _ADDRESS)
    found.lcb_compare_and_swap.argtypes = (_ADDRESS, _U32, _U32)
    return found


class Probe:
    """Buckets and records as many as the index has, in the same kind of memory, each prompt's
    records all over it; one call reads a bucket and a record for every key."""

    def __init__(self, pages: int, buckets: int, prompts: list[Keys]) -> None:
        self._library = library()
        self._mask = buckets - 1
        memory = mmap.mmap(-1, 4 * buckets + 64 * pages)  # shared, as the index is
        self._buckets = np.frombuffer(memory, np.uint32, buckets)
        self._records = np.frombuffer(memory, np.uint64, 8 * pages, 4 * buckets).reshape(-1, 8)
        self._buckets[:] = 0
        self._records[:] = 0
        order, at = np.random.default_rng(3).permutation(pages).astype(np.uint32), 0
        for keys in prompts:
            taken = order[at : at + len(keys)]
            self._buckets[keys[:, 0] & np.uint64(self._mask)] = taken
            self._records[taken, :2] = keys
            at += len(keys)
        self._prompts = prompts
        self._found = ctypes.c_uint32()

    def case(self, pick: list[int]) -> Case:
        """Repetition i probes prompt pick[i]. Timed inside, without the call from Python."""
        buckets, records = self._buckets.ctypes.data, self._records.ctypes.data
        where = [keys.ctypes.data for keys in self._prompts]
        found = ctypes.byref(self._found)

        def run(i: int) -> float:
            keys = pick[i % len(pick)]
            n = len(self._prompts[keys])
            took: int = self._library.lcb_probe(buckets, self._mask, records, where[keys], n, found)
            return took / 1e3

        return run
