"""The deepest position that every group of a model accepts, by trying each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

Need = Callable[[int], int]
"""Of a position in tokens: the first token that it needs; those from there to it are needed."""


def prefix() -> Need:
    return lambda position: 0


def window(tokens: int) -> Need:
    return lambda position: max(0, position - tokens)


def chunk(tokens: int) -> Need:
    return lambda position: position - position % tokens


def point() -> Need:
    return lambda position: max(0, position - 1)


def needed(need: Need, pages: int, page_tokens: int) -> set[int]:
    """The pages that hold these tokens."""
    position = pages * page_tokens
    return {token // page_tokens for token in range(need(position), position)}


def deepest(
    groups: Sequence[tuple[Need, AbstractSet[int]]], pages: int, page_tokens: int, step: int
) -> tuple[int, set[int]]:
    """The position in pages, and which groups refuse the next one.

    Args:
        groups: what each needs, and the pages that it has.
        pages: of the sequence.
        step: positions are multiples of so many pages.
    """
    refusing: set[int] = set()
    for position in range(pages // step * step, 0, -step):
        lacking = {
            i
            for i, (need, present) in enumerate(groups)
            if not needed(need, position, page_tokens) <= present
        }
        if not lacking:
            return position, refusing
        refusing = lacking
    return 0, refusing
