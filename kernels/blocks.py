"""Block tables as slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.shm.errors import ConfigError


def slots_of_blocks(
    blocks: Sequence[int] | npt.NDArray[Any],
    block_tokens: int,
    *,
    first: int = 0,
    tokens: int | None = None,
) -> npt.NDArray[np.int64]:
    """The slots of a request's tokens from its block table, for `Move` and `Offload`.

        Move(pages, slots_of_blocks(block_table, 16, first=n), first=n)

    Block `blocks[i]` holds tokens `i * block_tokens` on, as slots `blocks[i] * block_tokens` on.

    Args:
        blocks: numbers of device blocks, of shape (blocks,); all tokens of a negative one get -1,
            which leaves them out.
        block_tokens: of a device block; pages may have more tokens or fewer.
        first, tokens: only so many tokens, from this one on; None: to the end of the blocks.

    Returns:
        int64 of shape (tokens,).

    Raises:
        ConfigError: no whole numbers, or tokens that the blocks do not have.
    """
    table = np.asarray(blocks)
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise ConfigError(
            f"blocks: expected whole numbers in one dimension, found {table.dtype} {table.shape}"
        )
    if type(block_tokens) is not int or block_tokens < 1:
        raise ConfigError(f"block_tokens: expected a whole number >= 1, found {block_tokens!r}")
    total = len(table) * block_tokens
    count = total - first if tokens is None else tokens
    if not (0 <= first <= total and 0 <= count <= total - first):
        raise ConfigError(
            f"blocks: {len(table)} of {block_tokens} tokens hold tokens 0 to {total - 1}, expected "
            f"{count} from token {first} on"
        )
    starts = table.astype(np.int64)[:, None]
    slots = np.where(starts < 0, -1, starts * block_tokens + np.arange(block_tokens))
    found: npt.NDArray[np.int64] = slots.ravel()[first : first + count]
    return found


__all__ = ["slots_of_blocks"]
