"""Page keys for tests, cheaper to read than digests of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Pair = tuple[int, int]


def pair(prefix: Sequence[int], bucket: int | None = None) -> Pair:
    """The key of one page, made from the path that leads to it.

    Args:
        bucket: make the low 16 bits these, so that keys meet in one chain of a small index.
    """
    digest = hashlib.blake2b(repr(tuple(prefix)).encode(), digest_size=16).digest()
    low = int.from_bytes(digest[:8], "little")
    if bucket is not None:
        low = low & ~0xFFFF | bucket
    return low, int.from_bytes(digest[8:], "little")


def array(pairs: Iterable[Pair]) -> Keys:
    """As the index takes them: uint64 of shape (n, 2)."""
    return np.array(list(pairs), np.uint64).reshape(-1, 2)


def chain(path: Sequence[int], bucket: int | None = None) -> list[Pair]:
    """Keys of all prefixes of a path, as a prompt's pages have them."""
    return [pair(path[: i + 1], bucket) for i in range(len(path))]


def keys(*path: int) -> Keys:
    """The chain of a path, as an array."""
    return array(chain(path))


def prompt(name: int, pages: int) -> Keys:
    """The chain of a prompt of so many pages; prompts with other names share nothing."""
    return array(chain([name, *range(1, pages)][:pages]))
