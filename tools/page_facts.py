"""The pages of a copy, one by one, for `dump --pages`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import layout
from lightcache.layout import PageState
from lightcache.tools.facts import Facts, name_of, records, rows
from lightcache.tools.image import Image


def pages(image: Image, limit: int) -> Facts:
    """Pages that are not free, in order; at most `limit` of them (0: all)."""
    found, pins = records(image), rows(image)
    used = np.flatnonzero(found["word"] & layout.STATE_MASK)
    shown = used[:limit] if limit else used
    return {
        "in_use": len(used),
        "shown": len(shown),
        "pages": [_page(found, pins, int(page)) for page in shown],
    }


def _page(found: npt.NDArray[Any], pins: npt.NDArray[np.uint16], page: int) -> Facts:
    record = found[page]
    word, used, parent = int(record["word"]), int(record["used"]), int(record["parent"])
    valid = parent < len(found) and found[parent]["gen"] == record["parent_gen"]
    reservation = word >> layout.RESERVATION_SHIFT
    held = word & layout.STATE_MASK == PageState.HELD  # then its client stands there
    return {
        "page": page,
        "state": name_of(PageState, word & layout.STATE_MASK),
        "key": f"{int(record['hi']) >> 32:08x}",
        "namespace": None if held else word >> layout.NAMESPACE_SHIFT & 0xFF,
        "held_by": word >> layout.NAMESPACE_SHIFT & 0xFF if held else None,
        "generation": int(record["gen"]),
        "pins": {str(slot): int(pins[slot, page]) for slot in np.flatnonzero(pins[:, page])},
        "tick": used >> 16,
        "hits": used & 0xFFFF,
        "parent": parent if valid else None,
        "children": int(record["children"]),
        "reservation": reservation - 1 if reservation else None,
        "kept": bool(word & layout.KEPT),
    }
