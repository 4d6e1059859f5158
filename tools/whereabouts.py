"""Where the pages of some keys are, as a copy of an index tells: their states, who writes or pins
them, and what is remembered of those that went. Nothing is pinned, locked or counted as a use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import layout
from lightcache._arguments import Keys
from lightcache.evictions import ghosts_of
from lightcache.layout import PageState
from lightcache.runs import Run, names_of
from lightcache.tools import facts
from lightcache.tools.facts import Facts
from lightcache.tools.image import Image, undo

Ints = npt.NDArray[np.int64]
_NAMED = (PageState.WRITING, PageState.READY, PageState.EVICTING)


@dataclass(frozen=True)
class _Sorted:
    """Pages by the low words of their keys."""

    lo: npt.NDArray[np.uint64]
    hi: npt.NDArray[np.uint64]
    pages: Ints

    def find(self, keys: Keys) -> Ints:
        """The page of each key; -1: there is none."""
        found = np.full(len(keys), -1, np.int64)
        if len(self.lo):
            at = np.minimum(np.searchsorted(self.lo, keys[:, 0]), len(self.lo) - 1)
            same = (self.lo[at] == keys[:, 0]) & (self.hi[at] == keys[:, 1])
            found[same] = self.pages[at[same]]
        return found


class PageTable:
    """The pages of a copied index, by key."""

    def __init__(self, image: Image) -> None:
        """Undoes an unfinished critical section in the copy, as `dump` does. Takes 0.1 s for a
        million pages."""
        self.image = image
        undo(image)
        used = min(image.root.fresh, image.pages)
        self._records = facts.records(image)[:used]
        self._rows = facts.rows(image)
        state = self._records["word"] & layout.STATE_MASK
        self._named = self._sorted(np.isin(state, _NAMED))
        self._doomed = self._sorted(state == PageState.DOOMED)
        self._reservations = {each["reservation"]: each for each in facts.reservations(image)}
        self._clients = {each.slot: each for each in image.clients}
        self.ranked = bool(image.root.eviction)
        self._now = facts.now_of(image)

    def _sorted(self, chosen: npt.NDArray[np.bool_]) -> _Sorted:
        pages = np.flatnonzero(chosen)
        lo, hi = self._records["lo"][pages], self._records["hi"][pages]
        order = np.argsort(lo)
        return _Sorted(lo[order], hi[order], pages[order])

    # ---- counts

    def ready(self, keys: Keys, namespace: int | None) -> npt.NDArray[np.bool_]:
        """Which keys have a page that is ready in this namespace; None: in any."""
        pages = self._named.find(keys)
        there: npt.NDArray[np.bool_] = pages >= 0
        word = self._records["word"][pages[there]]
        fits = word & layout.STATE_MASK == PageState.READY
        if namespace is not None:
            fits &= word >> layout.NAMESPACE_SHIFT & 0xFF == namespace
        there[there] = fits
        return there

    def gone(self, keys: Keys) -> int:
        """How many of the keys had a page that went, as far as that is remembered. 0 for a few of
        many: ghosts of other keys look like them."""
        image = self.image
        known = np.isfinite(ghosts_of(image.data, image.place, keys, self._now))
        count = int(np.count_nonzero(known & (self._named.find(keys) < 0)))
        return count if 100 * count > len(keys) else 0

    # ---- one page after the other

    def describe(self, keys: Keys, namespace: int | None) -> list[Facts]:
        """Of each key: its state, and what is known of its page.

        Args:
            namespace: the number of the one that is asked; None: there is none of its names.
        """
        pages, doomed = self._named.find(keys), self._doomed.find(keys)
        ghosts = ghosts_of(self.image.data, self.image.place, keys, self._now)
        found = []
        for page, unlinked, ghost in zip(
            pages.tolist(), doomed.tolist(), ghosts.tolist(), strict=True
        ):
            if page >= 0:
                found.append(self._named_page(page, namespace))
            elif unlinked >= 0:
                found.append({**_NOTHING, "state": "doomed", "pinned_by": self._pinned(unlinked)})
            elif ghost == ghost:
                found.append({**_NOTHING, "state": "evicted", "unused_s": ghost})
            else:
                found.append(dict(_NOTHING))
        return found

    def _named_page(self, page: int, namespace: int | None) -> Facts:
        record = self._records[page]
        word, used = int(record["word"]), int(record["used"])
        state = facts.name_of(PageState, word & layout.STATE_MASK)
        number = word >> layout.NAMESPACE_SHIFT & 0xFF
        return {
            "state": state if namespace == number else "other namespace",
            "namespace": number,
            **facts.unused_of(self.image, used),
            "hits": facts.hits_of(self.image, used),
            "kept": bool(word & layout.KEPT),
            "pinned_by": self._pinned(page),
            "writer": self._writer(word),
        }

    def _pinned(self, page: int) -> list[str]:
        return [self._client(int(slot)) for slot in np.flatnonzero(self._rows[:, page])]

    def _writer(self, word: int) -> Facts | None:
        """Of a page that is being written: the owner of its reservation."""
        number = word >> layout.RESERVATION_SHIFT & layout.RESERVATION_MASK
        if word & layout.STATE_MASK != PageState.WRITING or not number:
            return None
        reservation = self._reservations.get(number - 1)
        if reservation is None:
            return None
        return {
            "client": self._client(reservation["owner"]),
            "alive": reservation["owner_alive"],
            "waits_for": [self._client(slot) for slot in reservation["pending_slots"]],
        }

    def _client(self, slot: int) -> str:
        if slot == 0:
            return "a ticket"
        client = self._clients.get(slot)
        if client is None:
            return f"client {slot}, which is gone"
        dead = "" if client.alive else ", dead"
        return f"client {slot} ({client.role or 'no role'}, pid {client.pid}{dead})"

    # ---- what hangs on a page

    def continuations(self, key: Keys) -> int:
        """How many pages hang on the page of this key: prompts that go on after it."""
        page = int(self._named.find(key)[0])
        if page < 0:
            return 0
        same = self._records["parent"] == page
        same &= self._records["parent_gen"] == self._records["gen"][page]
        state = self._records["word"] & layout.STATE_MASK
        first = self._records["word"] >> layout.GROUP_SHIFT == 0
        return int(np.count_nonzero(same & first & np.isin(state, _NAMED)))

    def groups(self, keys: Keys, namespace: int | None) -> list[Facts]:
        """Of the other KV groups of the index: the pages of which the first part is there. How many
        parts a page has is not in the index."""
        names = names_of(self.image.config)
        return [
            {
                "group": name,
                "pages": np.flatnonzero(self.ready(Run(number).keys(keys), namespace)).tolist(),
            }
            for number, name in enumerate(names)
            if number and name != "none"  # connectors leave a number out so
        ]


_NOTHING: Mapping[str, Any] = {
    "state": "absent",
    "namespace": None,
    "unused_s": None,
    "unused_calls": None,
    "hits": None,
    "kept": False,
    "pinned_by": [],
    "writer": None,
}


def leading(there: npt.NDArray[np.bool_]) -> int:
    """How many stand at the beginning, one after the other."""
    return len(there) if there.all() else int(there.argmin())  # `all` of none is true


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers for people: "0-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


__all__ = ["PageTable", "leading", "ranges"]
