"""What no interrupt may split.

Python runs signal handlers, and raises what they raise, between two instructions of its own: behind
a call, at the beginning of a function, at the end of a turn of a loop. Inside of one call of a C
function it does neither. So C functions that are called by a C function, all from one instruction,
are made one after another to the end, and an interrupt comes before the first of them or behind the
last.
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
    """Make all of these calls, or none, as far as interrupts go. Each is one of a C function, such
    as `setattr`, `list.append`, `dict.pop`, or a function of the core: one of Python's would be
    interrupted like any other. None of them may fail."""
    deque(map(_call, calls), maxlen=0)


def append_to(lists: tuple[list[T], ...], item: T) -> None:
    """Append it to all of these lists: as `together`, in a third of the time."""
    deque(map(list.append, lists, repeat(item)), maxlen=0)


def assign(objects: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """Set an attribute of each of these objects: as `together`, in a third of the time."""
    deque(map(setattr, objects, names, values), maxlen=0)


def keep_result(box: list[T], call: Callable[..., T], *arguments: Iterable[Any]) -> None:
    """Call, and append what it returns to `box`: an interrupt comes before the call, inside of it,
    or behind the appending.

    Args:
        arguments: an iterable for each argument, which has one element. An iterator still has its
            element if the call was never made.
    """
    box.extend(map(call, *arguments))


__all__ = ["append_to", "assign", "keep_result", "together"]
