"""Ctrl-C at a chosen place of lightcache's Python code."""

from __future__ import annotations

import contextlib
import dis
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightcache
import lightcache.kernels
import lightcache.shm

_PARTS = (lightcache, lightcache.shm, lightcache.kernels)  # in folders of their own, in a clone
_OURS = (*[str(Path(str(part.__file__)).parent) for part in _PARTS], contextlib.__file__)


def _finalizing(frame: FrameType | None) -> bool:
    """Python prints and drops what is raised in a `__del__` or a finalizer of `weakref`: nobody
    could act on it there."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def _ends_a_call(frame: FrameType) -> bool:
    """After these bytecodes, and on entry to a function, CPython looks for signals."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "JUMP_BACKWARD"))


def interrupt(action: Callable[[], object], at: int) -> bool:
    """Run `action` with a KeyboardInterrupt at the `at`-th place within lightcache where a signal
    could be seen. False: it has fewer, and ran to its end."""
    places = 0

    def place() -> None:
        nonlocal places
        places += 1
        if places > at:
            raise KeyboardInterrupt

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS) or _finalizing(frame):
            return None
        frame.f_trace_opcodes = True
        called = False

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal called
            if event == "opcode":
                before, called = called, _ends_a_call(frame)
                if before:
                    place()
            return step

        place()
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupt_call(action: Callable[[], object], at: int) -> bool:
    """The same at the `at`-th entry of a function of lightcache, or return of a C function that
    one of them has called. At these places alone, but at the action's full speed. False: it has
    fewer, and ran to its end."""
    places = 0

    def place(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal places
        if event not in ("call", "c_return"):
            return
        if not frame.f_code.co_filename.startswith(_OURS) or _finalizing(frame):
            return
        places += 1
        if places > at:
            raise KeyboardInterrupt  # which ends the profile as well

    before = sys.getprofile()
    sys.setprofile(place)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False
