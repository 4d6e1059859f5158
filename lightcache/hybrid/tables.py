"""State block tables: the slot that a linear layer reads its state from, and the slot it writes.

For engines that address states as attention addresses KV, by blocks of a sequence: the state after
n tokens is in the slot of the block that holds token n. See `state_block_tables`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages, count, offsets, pages
from lightcache.errors import ConfigError
from lightcache.hybrid.saving import Tokens

_SPAN = 1 << 32  # more than a sequence has blocks
NONE = -1  # no slot: in a table, no block; in `read`, no state


class StateTables:
    """The slots of a batch's sequences, block by block, in any of three forms."""

    def __init__(
        self, slots: Pages, starts: Tokens, lengths: Tokens, keys: Tokens | None = None
    ) -> None:
        """For `padded`, `ragged` and `compact`."""
        self._slots, self._starts, self._lengths, self._keys = slots, starts, lengths, keys

    def __len__(self) -> int:
        """Sequences."""
        return len(self._starts)

    @classmethod
    def padded(cls, table: npt.ArrayLike) -> StateTables:
        """One row for each sequence, as wide as the longest; -1 where it has no block.

        Raises:
            ConfigError: not integers of shape (n, width).
        """
        array = np.asarray(table)
        if array.ndim != 2 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(
                f"table: expected integers of shape (n, width), found {array.dtype} {array.shape}"
            )
        n, width = array.shape
        starts = np.arange(n, dtype=np.int64) * width
        return cls(_slots(array.reshape(-1)), starts, np.full(n, width, np.int64))

    @classmethod
    def ragged(cls, slots: npt.ArrayLike, bounds: npt.ArrayLike) -> StateTables:
        """Rows one after another: sequence i has slots[bounds[i]:bounds[i + 1]].

        Raises:
            ConfigError: not integers, or bounds that do not ascend from 0 to the number of slots.
        """
        flat = _slots(slots)
        ends = offsets(bounds, len(flat))
        return cls(flat, ends[:-1], np.diff(ends))

    @classmethod
    def compact(
        cls, slots: npt.ArrayLike, bounds: npt.ArrayLike, blocks: npt.ArrayLike
    ) -> StateTables:
        """Like `ragged`, with only the blocks that have a state. A linear layer needs slots for the
        blocks at which a state is kept and for the block being written, not for each block.

        Args:
            blocks: number of each slot's block in its sequence, ascending in each sequence.

        Raises:
            ConfigError: as `ragged`; blocks that do not ascend, or not one for each slot.
        """
        tables = cls.ragged(slots, bounds)
        of = np.asarray(blocks)
        if of.shape != tables._slots.shape or (of.size and of.dtype.kind not in "iu"):
            raise ConfigError(
                f"blocks: expected {len(tables._slots)} integers, one for each slot, found "
                f"{of.dtype} {of.shape}"
            )
        rows = np.repeat(np.arange(len(tables), dtype=np.int64), tables._lengths)
        tables._keys = rows * _SPAN + of.astype(np.int64)
        if of.size and (of.min() < 0 or of.max() >= _SPAN or (np.diff(tables._keys) <= 0).any()):
            raise ConfigError("blocks: expected numbers of blocks, ascending in each sequence")
        return tables

    def find(self, blocks: Tokens) -> Pages:
        """The slots of blocks, one or several of each sequence: int32 of the shape of `blocks`,
        whose last dimension is the sequences. -1: the block has no slot."""
        if not len(self._slots):
            return np.full(blocks.shape, NONE, np.int32)
        if self._keys is None:
            places, present = self._starts + blocks, (blocks >= 0) & (blocks < self._lengths)
        else:
            wanted = np.arange(len(self)) * _SPAN + blocks
            places = np.searchsorted(self._keys, wanted)
            present = (blocks >= 0) & (self._keys.take(places, mode="clip") == wanted)
        slots: Pages = self._slots.take(places, mode="clip")
        slots[~present] = NONE
        return slots

    def describe(self, row: int) -> str:
        """A sequence's table, for a message."""
        start, length = int(self._starts[row]), int(self._lengths[row])
        if self._keys is None:
            held = self._slots[start : start + length].tolist()
            while held and held[-1] == NONE:
                held.pop()
            return f"{len(held)} blocks, in slots {_short(held)}" if held else "an empty table"
        blocks = (self._keys[start : start + length] - row * _SPAN).tolist()
        return f"states at blocks {_short(blocks)}" if blocks else "an empty table"


@dataclass(frozen=True, eq=False)
class StateBlocks:
    """For each sequence of a batch, int32 of shape (n,)."""

    read: Pages
    """The slot with its state before the step; -1: the sequence begins, its state is zero."""
    write: Pages
    """The slot for its state after the step. The same as `read` unless the step crosses the end of
    a block; then the state in `read` stays, and is not written any more."""

    @property
    def table(self) -> Pages:
        """Both, int32 of shape (n, 2). Linear layers need no more, however long the sequences
        are."""
        return np.stack([self.read, self.write], axis=1)


def state_block_tables(
    tables: StateTables,
    prev_tokens: npt.ArrayLike,
    total_tokens: npt.ArrayLike,
    *,
    block_tokens: int,
    names: Sequence[Hashable] | None = None,
) -> StateBlocks:
    """The slots that a step reads and writes, for a whole batch. Some tens of microseconds for 256
    sequences, without a loop over them, for every form of the tables.

    The state after n tokens is in block (n - 1) // block_tokens, counted from 0. So a step reads
    the block of the last token before it, and writes the block of its own last token.

    *Why both counts.* Their difference changes from step to step and from sequence to sequence: a
    stretch of prefill, one decoded token, several accepted tokens. From the total alone it is not
    known whether the step has crossed the end of a block, and so whether the state it begins with
    is in the block it ends in, in the block before, or many blocks before. The fill of the last
    block does not tell either: at the end of a block it is full, as for a sequence with one block
    more or less. And a sequence without previous tokens must read nothing, though its first block
    may hold an older state of another sequence.

    *Why it is correct for a batch.* A row depends only on that sequence's own two counts and its
    own table, not on lengths, padding, order or neighbours in the batch. All layers of a step run
    over the whole batch, so a slot that one sequence writes must not be read or written by another;
    this is checked. Several sequences may read the same slot: they share a prefix.

    Args:
        tables: blocks without a state may be missing, except those read and written.
        prev_tokens: tokens in each sequence's state now, shape (n,); 0: none.
        total_tokens: the same after the step; not fewer.
        block_tokens: tokens of a block of these tables. It is never inferred.
        names: names of the sequences in messages; by default their rows.

    Raises:
        ConfigError: names the first sequence with an empty table, no tokens, more tokens before
            than after, a block that is missing or beyond the table's end, or a slot that another
            sequence writes.
    """
    block = count(block_tokens, "block_tokens", 1, 1 << 20)
    old, new = _counts(prev_tokens, "prev_tokens"), _counts(total_tokens, "total_tokens")
    if not len(old) == len(new) == len(tables) or (names is not None and len(names) != len(old)):
        raise ConfigError(
            f"state tables: expected one row of each for every sequence, found {len(tables)} "
            f"tables, {len(old)} prev_tokens, {len(new)} total_tokens"
            + (f", {len(names)} names" if names is not None else "")
        )
    both = np.stack([old, new])
    both -= 1
    read, write = tables.find(both // block)
    # Without tokens there is no block, so `write < 0` finds two of the mistakes.
    wrong = (write < 0) | ((read < 0) & (old != 0)) | (old > new)
    if wrong.any():
        row = int(np.argmax(wrong))
        name = row if names is None else names[row]
        raise ConfigError(
            f"sequence {name!r}: " + _what(tables, row, int(old[row]), int(new[row]), block)
        )
    _check_apart(read, write, names)
    return StateBlocks(read, write)


def _what(tables: StateTables, row: int, old: int, new: int, block: int) -> str:
    if new < 1:
        return (
            f"expected total_tokens of 1 or more, found {new}; leave out sequences that compute "
            "nothing"
        )
    if not 0 <= old <= new:
        return f"expected prev_tokens of 0 to total_tokens, found {old} of {new}"
    column = (new - 1) // block
    if tables.find(np.where(np.arange(len(tables)) == row, column, NONE))[row] >= 0:
        column = (old - 1) // block
    return (
        f"expected a slot for its block {column} of {block} tokens (prev_tokens={old}, "
        f"total_tokens={new}), found {tables.describe(row)}"
    )


def _check_apart(read: Pages, write: Pages, names: Sequence[Hashable] | None) -> None:
    """Check that no sequence uses a slot that another one writes."""
    order = np.argsort(write)
    written = write[order]
    twice = np.flatnonzero(written[1:] == written[:-1])
    moved = np.flatnonzero(read != write)  # other sequences read the slot that only they write
    places = np.searchsorted(written[:-1], read[moved])
    foreign = np.flatnonzero(written[places] == read[moved]) if len(moved) else moved
    if not len(twice) and not len(foreign):
        return
    if len(twice):
        one, other = int(order[twice[0]]), int(order[twice[0] + 1])
        slot = int(write[one])
    else:
        one, other = int(moved[foreign[0]]), int(order[places[foreign[0]]])
        slot = int(read[one])
    ids = [row if names is None else names[row] for row in (one, other)]
    raise ConfigError(
        f"sequence {ids[0]!r}: its slot {slot} is written by sequence {ids[1]!r} in the same step; "
        "each needs a slot of its own, and a shared state is copied before it is written"
    )


@dataclass(frozen=True)
class Capacity:
    """KV blocks and states that fit into a memory."""

    blocks: int
    """KV blocks."""
    states: int
    """State slots, including those of running requests."""


def capacity(
    budget: int,
    *,
    block_bytes: int,
    state_bytes: int,
    block_tokens: int,
    running_states: int,
    tokens_per_state: int,
) -> Capacity:
    """Divide a device's memory between KV blocks and states in one calculation, so that neither
    takes the memory of the other.

    Args:
        budget: bytes for both.
        block_bytes: of a KV block in all attention layers.
        state_bytes: of a state in all linear layers.
        block_tokens: of a KV block.
        running_states: slots that requests need to run: for each one working and its alternating
            ones, and those of drafts. They are taken first.
        tokens_per_state: of KV for each checkpoint beyond these; `best_split` of the benchmarks'
            package says how many.

    Raises:
        ConfigError: figures out of range, or no room for one block beside the running states.
    """
    limit = 1 << 62
    count(budget, "budget", 1, limit)
    for name, value in (("block_bytes", block_bytes), ("state_bytes", state_bytes)):
        count(value, name, 1, limit)
    count(block_tokens, "block_tokens", 1, 1 << 20)
    count(running_states, "running_states", 0, 1 << 31)
    count(tokens_per_state, "tokens_per_state", 1, 1 << 40)
    rest = budget - running_states * state_bytes
    if rest < block_bytes:
        raise ConfigError(
            f"budget: {running_states} states of running requests and one KV block need "
            f"{running_states * state_bytes + block_bytes} bytes, found {budget}; run fewer at a "
            "time, or draft fewer tokens"
        )
    # A state goes with this much KV; blocks being whole, that may be a few states too many.
    states = rest * block_tokens // (tokens_per_state * block_bytes + block_tokens * state_bytes)
    blocks = (rest - states * state_bytes) // block_bytes
    while states * tokens_per_state > blocks * block_tokens:
        states -= 1
        blocks = (rest - states * state_bytes) // block_bytes
    return Capacity(blocks, running_states + states)


def _slots(values: npt.ArrayLike) -> Pages:
    """Slots or -1, int32."""
    array = np.asarray(values)
    if array.size and array.dtype.kind in "iu" and array.ndim == 1 and int(array.min()) == NONE:
        return array.astype(np.int32) if int(array.max()) < 1 << 31 else pages(array)
    return pages(array)


def _counts(values: npt.ArrayLike, name: str) -> Tokens:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name}: expected one row of integers, found {array.dtype} {array.shape}"
        )
    return array.astype(np.int64, copy=False)


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


__all__ = ["NONE", "Capacity", "StateBlocks", "StateTables", "capacity", "state_block_tables"]
