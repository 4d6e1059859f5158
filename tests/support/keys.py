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
    return _key(hashlib.blake2b(repr(tuple(prefix)).encode(), digest_size=16).digest(), bucket)


def _key(digest: bytes, bucket: int | None) -> Pair:
    low = int.from_bytes(digest[:8], "little")
    if bucket is not None:
        low = low & ~0xFFFF | bucket
    return low, int.from_bytes(digest[8:], "little")


def array(pairs: Iterable[Pair]) -> Keys:
    """As the index takes them: uint64 of shape (n, 2)."""
    return np.array(list(pairs), np.uint64).reshape(-1, 2)


def chain(path: Sequence[int], bucket: int | None = None) -> list[Pair]:
    """The `pair` of each prefix of a path, as a prompt's pages have them, in linear time."""
    found = []
    text = hashlib.blake2b(digest_size=16)  # of the prefix as a tuple is printed, but for its end
    for number, token in enumerate(path):
        text.update(f", {token!r}".encode() if number else f"({token!r}".encode())
        whole = text.copy()
        whole.update(b")" if number else b",)")
        found.append(_key(whole.digest(), bucket))
    return found


def keys(*path: int) -> Keys:
    """The chain of a path, as an array."""
    return array(chain(path))


def prompt(name: int, pages: int) -> Keys:
    """The chain of a prompt of so many pages; prompts with other names share nothing."""
    return array(chain([name, *range(1, pages)][:pages]))
