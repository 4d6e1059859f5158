"""The libraries with pause points, and what hangs on them; for processes of the tests.

The folder is LIGHTCACHE_TEST_BUILD, made by `make pause`. A process that is to pause calls `use`
before it touches anything of lightcache, and then installs a hook.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import layout
from lightcache.shm import _native as shm_native

BUILD = Path(os.environ.get("LIGHTCACHE_TEST_BUILD") or "/nonexistent")
SOURCE = Path(__file__).with_name("pause_hook.c")


def missing() -> str:
    """Why nothing can be paused here; empty if it can."""
    if not (BUILD / "_index.so").exists():
        return "LIGHTCACHE_TEST_BUILD names no libraries with pause points; run `make test`"
    return "" if shutil.which("cc") else "there is no C compiler"


def python_path(tests: Path) -> str:
    """PYTHONPATH of a program of the tests: what it was, and the folder of the tests."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(tests))))


def compile_hook(folder: Path) -> Path:
    """Build the hooks; the library's path."""
    library = folder / "pause_hook.so"
    command = ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([*command, "-o", str(library), str(SOURCE), "-lrt"], check=True)
    return library


def use() -> None:
    """From here on this process uses the libraries with pause points."""
    index, shm = layout.load, shm_native.load
    shm_native.load = lambda path=None: shm(path or BUILD / "_shm.so")  # type: ignore[assignment]
    layout.load = lambda path=None: index(path or BUILD / "_index.so")  # type: ignore[assignment]


def _install(hook: Any) -> None:
    library = layout.load().quick
    place = ctypes.c_void_p.in_dll(library, "lc_pause_hook")
    place.value = ctypes.cast(hook, ctypes.c_void_p).value


def install_gate(library: Path, gate: npt.NDArray[np.uint32], point: int, occurrence: int) -> None:
    """Stop at the n-th passing of a point until `gate[1]` is set; `gate[0]` says that we stand."""
    hooks = ctypes.CDLL(os.fspath(library))
    hooks.set_gate(ctypes.c_void_p(gate.ctypes.data), point, ctypes.c_uint32(occurrence))
    _install(hooks.gate_hook)


def install_fall(
    library: Path,
    gate: npt.NDArray[np.uint32],
    point: int,
    one_in: int,
    nanoseconds: int,
    seed: int,
) -> None:
    """Once in `one_in` times die (while `gate[1]` is 1) or stop (while it is 2) within so many ns
    after a point, unless the lock has been given back by then. `gate[3]` is 1 while the lock is
    held."""
    hooks = ctypes.CDLL(os.fspath(library))
    where = ctypes.c_void_p(gate.ctypes.data)
    chance, limit = ctypes.c_uint32(one_in), ctypes.c_uint32(nanoseconds)
    if hooks.set_fall(where, point, chance, limit, ctypes.c_uint64(seed)):
        raise OSError("timer_create failed")
    _install(hooks.fall_hook)
