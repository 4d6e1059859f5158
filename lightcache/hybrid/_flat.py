"""What a flat index does, by an index that is not: checkpoints are roots of their own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex


def deepest(index: PageIndex, keys: Keys, space: Namespace) -> int:
    """1 + the position of the last of these keys that is ready, each for itself; 0: none."""
    if not len(keys):
        return 0
    found = index.peek_many(keys, np.arange(len(keys) + 1), namespace=space)
    there = np.flatnonzero(found)
    return int(there[-1]) + 1 if len(there) else 0


def children(index: PageIndex, keys: Keys, space: Namespace) -> npt.NDArray[np.int32]:
    """How many checkpoints hang on each; -1: unknown, or it is not there."""
    del index, space
    return np.full(len(keys), -1, np.int32)


def linked(parent: Keys, key: Keys) -> Keys:
    """The chain under which a checkpoint is put."""
    del parent
    return key


__all__ = ["children", "deepest", "linked"]
