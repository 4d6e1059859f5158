"""Handles of one process on the same cache that share one client: `Cache.open(shared=True)`.

No store into the segment: which handles there are is known to their process alone.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from lightcache.errors import ConfigError
from lightcache.shm.objects import ForkWord


class Handle(Protocol):
    """What is needed of a `Cache`."""

    index: Any
    opening: Opening | None


T = TypeVar("T", bound=Handle)
# What an opener has who gives none of it: then it takes what the first has. A role only names the
# client, so that of the first stands.
DEFAULTS: Mapping[str, Any] = {
    "role": "",
    "device": False,
    "huge_pages": False,
    "numa": None,
    "group": None,
    "grow": True,
    "lock_timeout": 10.0,
}


class Opening:
    """One client, and the handles that share it. They keep it alive; it does not keep them."""

    def __init__(self, name: str, options: Mapping[str, Any], lock: threading.RLock) -> None:
        """`options`: those of `DEFAULTS`, as the first gave them."""
        self._name, self._options, self._lock = name, dict(options), lock
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()

    def handle(self) -> Any:
        """One of its handles that is open, with a segment that was not replaced; None: there is
        none."""
        for handle in self._handles:
            if not handle.index.core.unusable() and not handle.index.segment.retired:
                return handle
        return None

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises ConfigError: another gives options that the first did not."""
        differences = [
            f"{item}: expected {value!r}, found {self._options[item]!r}"
            for item, value in options.items()
            if item != "role" and value not in (DEFAULTS[item], self._options[item])
        ]
        if differences:
            raise ConfigError(
                f"share the cache {self._name!r}, which this process has open: "
                f"{'; '.join(differences)}; give the first opening in this process these options, "
                "or open one of its own (shared=False)"
            )

    def add(self, handle: Handle) -> None:
        """Count a handle."""
        handle.opening = self
        self._handles.add(handle)

    @contextlib.contextmanager
    def leaving(self, handle: Handle) -> Iterator[bool]:
        """Give up a handle, if the body of the with statement raises nothing. True: it is the last,
        so the body closes the client."""
        with self._lock:
            last = handle in self._handles and len(self._handles) == 1
            yield last
            self._handles.discard(handle)


class _Place:
    """Where the openings of one name are looked up in this process. Of a forked child's parent it
    is useless: its lock may be held by a thread that the child does not have."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.word = ForkWord()
        self.opening: Callable[[], Opening | None] = lambda: None


_places: dict[tuple[str, int, int], _Place] = {}


def _place(name: str) -> _Place:
    for number in itertools.count():  # more than one only if a child has its parent's number
        place = _places.setdefault((name, os.getpid(), number), _Place())
        if not place.word.inherited:
            return place
    raise AssertionError


def share(
    name: str, options: Mapping[str, Any], make: Callable[[], T], verify: Callable[[T], None]
) -> T:
    """Return another handle on the client that this process has in a cache, or make the first.

    Args:
        options: those of `DEFAULTS`.
        make: opens the cache.
        verify: raises an error if a handle's cache is not what is expected.

    Raises:
        ConfigError: the client has other options.
    """
    place = _place(name)
    with place.lock:
        opening = place.opening()
        first: T | None = None if opening is None else opening.handle()
        handle: T
        if opening is None or first is None:
            handle = make()
            opening = Opening(name, options, place.lock)
            place.opening = weakref.ref(opening)
        else:
            opening.check(options)
            verify(first)
            handle = copy.copy(first)
        opening.add(handle)
        return handle


__all__ = ["DEFAULTS", "Opening", "share"]
