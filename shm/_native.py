"""The C core of this layer, loaded through ctypes and checked.

It is loaded twice. Calls that cannot block go through `quick` (PyDLL), which keeps the GIL: beside
a busy thread, releasing it costs milliseconds. Calls that may block go through `blocking` (CDLL).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightcache.shm import errors, layout
from lightcache.shm.codes import Code, check, error

Signature = tuple[Any, tuple[Any, ...]]

ANY_NODE, ALL_NODES = -1, -2  # instead of a memory node's number; see native/process.h

INT_OUT = ctypes.POINTER(ctypes.c_int)
U64_OUT = ctypes.POINTER(ctypes.c_uint64)
POINTER_OUT = ctypes.POINTER(ctypes.c_void_p)

# name: (result, arguments). Attachments and addresses are plain integers (c_void_p).
SIGNATURES: Mapping[str, Signature] = {
    "lcs_layout": (ctypes.c_char_p, ()),
    "lcs_fork_word": (ctypes.c_void_p, ()),
    "lcs_time_namespace": (ctypes.c_uint64, ()),
    "lcs_map": (ctypes.c_int, (ctypes.c_int, ctypes.c_uint64, ctypes.c_int, POINTER_OUT)),
    "lcs_unmap": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint64)),
    "lcs_advise": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int),
    ),
    "lcs_collapse": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint64)),
    "lcs_populate": (
        ctypes.c_int,
        (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64),
    ),
    "lcs_fallocate": (ctypes.c_int, (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)),
    "lcs_life_open": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_int, INT_OUT)),
    "lcs_life_open_at": (
        ctypes.c_int,
        (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, INT_OUT),
    ),
    "lcs_folder_kind": (ctypes.c_int, (ctypes.c_int, U64_OUT)),
    "lcs_life_close": (None, (INT_OUT,)),
    "lcs_byte_lock": (ctypes.c_int, (ctypes.c_int, ctypes.c_int64, ctypes.c_int)),
    "lcs_byte_unlock": (ctypes.c_int, (ctypes.c_int, ctypes.c_int64)),
    "lcs_byte_held": (ctypes.c_int, (ctypes.c_int, ctypes.c_int64, ctypes.c_int64)),
    "lcs_attachment_new": (
        ctypes.c_void_p,
        (
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.c_int,
        ),
    ),
    "lcs_attachment_close": (None, (ctypes.c_void_p,)),
    "lcs_attachment_free": (None, (ctypes.c_void_p,)),
    "lcs_attachment_slot": (ctypes.c_uint32, (ctypes.c_void_p,)),
    "lcs_attachment_epoch": (ctypes.c_uint32, (ctypes.c_void_p,)),
    "lcs_attachment_usable": (ctypes.c_int, (ctypes.c_void_p,)),
    "lcs_ready_store": (None, (ctypes.c_void_p,)),
    "lcs_ready_load": (ctypes.c_uint32, (ctypes.c_void_p,)),
    "lcs_retire": (None, (ctypes.c_void_p,)),
    "lcs_slot_claim": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32)),
    "lcs_slot_release": (ctypes.c_int, (ctypes.c_void_p,)),
    "lcs_slot_alive": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint32)),
    "lcs_slot_free_dead": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint32)),
    "lcs_thread_gone": (ctypes.c_bool, (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)),
}


@dataclass(frozen=True)
class Library:
    """One shared library, loaded for quick calls and for blocking calls."""

    path: Path
    quick: ctypes.PyDLL
    blocking: ctypes.CDLL

    def declare(self, signatures: Mapping[str, Signature]) -> None:
        """Set result and argument types of these functions on both handles.

        Raises:
            LayoutMismatch: the library lacks one of them.
        """
        for name, (result, arguments) in signatures.items():
            for handle in (self.quick, self.blocking):
                try:
                    function = getattr(handle, name)
                except AttributeError:
                    raise errors.LayoutMismatch(
                        f"{self.path} has no function {name}, which this version of the package "
                        "calls; reinstall lightcache so that both come from one version"
                    ) from None
                function.restype = result
                function.argtypes = arguments


def find(folder: Path, stem: str) -> Path:
    """The library `stem` in `folder`, with any suffix.

    Raises:
        LightcacheError: it is missing.
    """
    names = sorted(folder.glob(f"{stem}*.so"), key=lambda path: "abi3" not in path.name)
    if not names:
        raise errors.LightcacheError(
            f"the C core {stem}.abi3.so is missing in {folder}; install lightcache with pip on a "
            "machine with a C compiler; in the root of a clone: pip install -e ."
        )
    return names[0]


def open_library(path: Path) -> Library:
    """Load a library for both kinds of calls, without declaring or checking anything.

    Raises:
        LightcacheError: the loader refuses it (built for another machine, truncated).
    """
    try:
        return Library(path, ctypes.PyDLL(os.fspath(path)), ctypes.CDLL(os.fspath(path)))
    except OSError as error:
        raise errors.LightcacheError(
            f"{path} cannot be loaded ({error}); reinstall lightcache for this machine"
        ) from error


@functools.cache
def load(path: Path | None = None) -> Library:
    """The core of this layer, checked against `layout`; loaded once for each path.

    Args:
        path: another build of it (tests load one with pause points); None: the one in this package.

    Raises:
        LayoutMismatch: compiled from another layout or version.
        LightcacheError: missing or not loadable.
    """
    library = open_library(path or find(Path(__file__).parent, "_shm"))
    library.declare(SIGNATURES)
    text = library.quick.lcs_layout().decode()
    layout.verify(text, layout.STRUCTURES, layout.CONSTANTS, library=str(library.path))
    return library


def quick() -> ctypes.PyDLL:
    """Calls that never block and keep the GIL."""
    return load().quick


def blocking() -> ctypes.CDLL:
    """Calls that may block and release the GIL."""
    return load().blocking


__all__ = [
    "ALL_NODES",
    "ANY_NODE",
    "SIGNATURES",
    "Code",
    "Library",
    "blocking",
    "check",
    "error",
    "find",
    "load",
    "open_library",
    "quick",
]
