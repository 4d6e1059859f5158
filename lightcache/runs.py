"""Runs: pages of a group that are larger than the pages of the index.

A state of a recurrent model is tens of MiB, a page of KV one or two. One index holds both: a page
of a group lies in several pages of the index, its *parts*, anywhere in the pool. Each part has a
key of its own, made from the page's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache import _arguments, layout
from lightcache._arguments import Keys
from lightcache.errors import ConfigError
from lightcache.shm.codes import check


@dataclass(frozen=True)
class Run:
    """How the pages of one group lie in an index."""

    group: int = 0
    """The group's number in its index, 0 to 31. Part of the keys, so pages of different groups
    never share one. 0: pages have their own keys, and one part."""
    parts: int = 1
    """Pages of the index for a page of the group, 1 to 4,096."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: out of range.
        """
        _arguments.count(self.group, "group", 0, layout.NUMBERS - 1)
        _arguments.count(self.parts, "parts", 1, layout.PARTS)
        if self.group == 0 and self.parts > 1:
            raise ConfigError(
                f"a run: expected a group from 1 on for pages of {self.parts} parts, found 0; its "
                "pages have one"
            )

    def keys(self, keys: Keys) -> Keys:
        """Keys of all parts of each page, uint64 of shape (n * parts, 2): page by page, in order.
        About 3 ns a part.

        Raises:
            ConfigError: as `PageIndex.peek`.
        """
        return self._made(keys, 0, self.parts)

    def last(self, keys: Keys) -> Keys:
        """The key of each page's last part, shape (n, 2). A run is evicted from its last part on,
        so a page whose last part is not ready is not there.

        Raises:
            ConfigError: as `PageIndex.peek`.
        """
        return self._made(keys, self.parts - 1, self.parts)

    def _made(self, keys: Keys, first: int, end: int) -> Keys:
        where, n = _arguments.keys(keys)
        if self.group == 0:
            return keys
        made = np.empty((n * (end - first), 2), np.uint64)
        quick = layout.load().quick
        out = _arguments.address(made) if len(made) else None
        check(quick.lci_part_keys(where, n, self.group, first, end, out), "keys of parts")
        return made


PLAIN = Run()
"""Pages of the index as they are."""

# ---- Names of the groups, for operators

NAMES_ITEM = "kv_groups"
"""The item of an index's configuration with the names of its groups: that of group i is the i-th.
Its creator writes it, and `open` compares it."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,31}")


def checked_names(names: Sequence[str]) -> list[str]:
    """The names of the groups 0, 1, ... of an index.

    Raises:
        ConfigError: none, more than an index can have, two alike, or one that is no name.
    """
    listed = list(names) if isinstance(names, (list, tuple)) else []
    if not _are_names(listed):
        raise ConfigError(
            f"kv_groups: expected 1 to {layout.NUMBERS} different names of 1 to 31 letters, digits "
            f"and `_.-`, found {names!r}"
        )
    return listed


def names_of(config: Mapping[str, Any]) -> list[str]:
    """The names in the configuration of an index. Empty: its creator named none, or another writer
    has damaged them."""
    names = config.get(NAMES_ITEM)
    return names if isinstance(names, list) and _are_names(names) else []


def _are_names(names: list[Any]) -> bool:
    return (
        1 <= len(names) <= layout.NUMBERS
        and all(isinstance(name, str) and _NAME.fullmatch(name) for name in names)
        and len(set(names)) == len(names)
    )


__all__ = ["NAMES_ITEM", "PLAIN", "Run", "checked_names", "names_of"]
