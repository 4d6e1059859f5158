"""Ctrl-C at a chosen instruction of lightcache's Python code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightcache

_OURS = (str(Path(lightcache.__file__).parent), contextlib.__file__)


def _finalizing(frame: FrameType | None) -> bool:
    """Python prints and drops what is raised in a `__del__`: nobody could act on it there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupt(action: Callable[[], object], at: int) -> bool:
    """Run `action` with a KeyboardInterrupt before its `at`-th traced step: each call, line,
    bytecode and return within lightcache is one. False: it has fewer, and ran to its end."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        if not frame.f_code.co_filename.startswith(_OURS) or _finalizing(frame):
            return None
        frame.f_trace_opcodes = True
        steps += 1
        if steps > at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
