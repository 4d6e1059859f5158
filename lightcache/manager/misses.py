"""Why nothing was found for a prompt: of requests without any usable token, the reason."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightcache.cache import Cache
from lightcache.errors import LightcacheError
from lightcache.hashing import Keys
from lightcache.namespaces import Namespace

if TYPE_CHECKING:
    from lightcache.prompt import Prompt

Absence = Literal["never_seen", "evicted", "absent", "other_namespace"]
REASONS = ("short", "never_seen", "evicted", "absent", "other_namespace", "unused", "failed")
"""Each is a counter `missed_REASON` of `ManagerStats`."""
MOST = 16
"""Other namespaces in which a missing page is looked for."""
KNOWN = 10.0
"""Seconds for which the list of namespaces is used: reading it takes as long as a plan."""


class Absences:
    """Tells why first pages are not in a cache. Costs a few microseconds, and some for each other
    namespace; only requests without a hit pay it."""

    def __init__(self, cache: Cache) -> None:
        """Reads nothing yet."""
        self._cache = cache
        self._spaces: list[Namespace] = []
        self._until = 0.0

    def of_key(self, first: Keys) -> Absence:
        """Why the page of this key is absent.

        Args:
            first: uint64 of shape (1, 2).

        Raises:
            Detached: the cache is closed, or was replaced.
        """
        gone = self._cache.index.remembers(first)
        if gone is None:
            return "absent"
        return "evicted" if gone else "never_seen"

    def of_prompt(self, prompt: Prompt, space: Namespace) -> Absence:
        """The same of a prompt's first page, looked for in other namespaces as well.

        Raises:
            As `of_key`.
        """
        spec = self._cache.key_spec(namespace=space)
        reason = self.of_key(_key(prompt.first_key(spec)))
        if reason != "evicted" and any(self._has(other, prompt) for other in self._others(space)):
            return "other_namespace"
        return reason

    def _others(self, space: Namespace) -> list[Namespace]:
        now = time.monotonic()
        if now >= self._until:
            self._until = now + KNOWN
            self._spaces = self._cache.index.namespaces()
        return [other for other in self._spaces if other != space][:MOST]

    def _has(self, other: Namespace, prompt: Prompt) -> bool:
        try:
            key = prompt.first_key(self._cache.key_spec(namespace=other))
            return self._cache.index.peek(_key(key), namespace=other) > 0
        except LightcacheError:  # it was cleared meanwhile
            return False


def _key(data: bytes) -> Keys:
    return np.frombuffer(data, np.uint64).reshape(1, 2)


__all__ = ["REASONS", "Absence", "Absences"]
