"""Operations that an interrupt cannot split.

Python runs signal handlers, and raises their exceptions, between two of its own instructions: after
a call, at the start of a function, at the end of a loop iteration; never inside one call of a C
function. So C functions that a C function calls, all from one instruction, run to the end without
an interrupt: it comes before the first of them or after the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T")
_call: Callable[[partial[Any]], object] = partial.__call__


def together(*calls: partial[Any]) -> None:
    """Make all of these calls or none, with respect to interrupts. Each must call a C function,
    such as `setattr`, `list.append`, `dict.pop`, or a function of the core, because a Python
    function can be interrupted. None of the calls may fail."""
    deque(map(_call, calls), maxlen=0)


def append_to(lists: tuple[list[T], ...], item: T) -> None:
    """Append the item to all of these lists: like `together`, in a third of the time."""
    deque(map(list.append, lists, repeat(item)), maxlen=0)


def assign(objects: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """Set an attribute of each of these objects: like `together`, in a third of the time."""
    deque(map(setattr, objects, names, values), maxlen=0)


def keep_result(box: list[T], call: Callable[..., T], *arguments: Iterable[Any]) -> None:
    """Call, and append the result to `box`. An interrupt comes before the call, inside it, or after
    the append.

    Args:
        arguments: for each argument, an iterable of one element. An iterator still has its element
            if the call was never made.
    """
    box.extend(map(call, *arguments))


__all__ = ["append_to", "assign", "keep_result", "together"]
