"""Where prefill and decoding save recurrent state, decided before the forward pass is launched.

A prompt is computed in stretches, one forward pass each, and a pass saves at most one state. The
plan of a stretch has the position of that state, and the position at which the pass must end:

    policy = SavePolicy(grid, Saves.INTERIOR)
    plan = policy.plan(Stretch(begin=0, end=2048, prompt=5000, branching=1024))
    plan.position, plan.offset, plan.end    # 1024, 1024, 2048: compute all, save on the way

Stretches are planned one by one: a step has few, and each takes as long as two or three calls of
numpy. Decoding has hundreds of sequences in a step; `decode_saves` takes them all in one call.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages, count, pages
from lightcache._together import assign, together
from lightcache.errors import ConfigError
from lightcache.kernels.moves import integers

if TYPE_CHECKING:
    from lightcache.hybrid.checkpoints import Checkpoints


# ---- Grid: positions at which recurrent state is saved, each a multiple of several sizes

Tokens = npt.NDArray[np.int64]
_MOST_TOKENS = 1 << 20
_MOST_INTERVAL = 1 << 40


@dataclass(frozen=True, init=False)
class Grid:
    """Positions at which prefill and decoding save. Position n means: after the first n tokens.

    grid = Grid(block_tokens=16, page_tokens=64)
    grid.fine, grid.chunk, grid.grid, grid.interval   # 16, 64, 64, 256
    """

    block_tokens: int
    """Of a device block."""
    page_tokens: int
    """Of a host page."""
    model_chunk: int
    """Tokens of a chunk of the model's kernels. A forward pass has a state after each of its
    chunks, counted from its beginning, and at its end; none inside a chunk."""
    every: int
    """While decoding, the approximate number of tokens between two saved states."""

    def __init__(
        self, block_tokens: int, page_tokens: int, chunk: int = 64, every: int = 256
    ) -> None:
        """Check and keep.

        Args:
            block_tokens, page_tokens: of device and host; one a multiple of the other.
            chunk: of the model: 64 for gated delta nets, its `chunk_size` for Mamba 2.
            every: tokens between states saved while decoding, rounded up to what is reachable.

        Raises:
            ConfigError: a size out of range, sizes that do not fit together, or an interval that no
                sequence reaches.
        """
        for name, value in (
            ("block_tokens", block_tokens),
            ("page_tokens", page_tokens),
            ("model_chunk", chunk),
            ("every", every),
        ):
            object.__setattr__(self, name, count(value, f"grid: {name}", 1, _MOST_TOKENS))
        big, small = sorted((self.block_tokens, self.page_tokens), reverse=True)
        if big % small:
            raise ConfigError(
                "grid: expected the page size to be a multiple of the block size or the reverse, "
                f"found host pages of {self.page_tokens} tokens and device blocks of "
                f"{self.block_tokens}"
            )
        if self.interval > _MOST_INTERVAL:
            raise ConfigError(
                f"grid: states would be saved every {self.interval} tokens, the least common "
                f"multiple of {self.grid} and every={self.every}; choose `every` a multiple or a "
                f"divisor of {self.grid}"
            )

    @cached_property
    def fine(self) -> int:
        """Tokens of the smaller of block and page. Every key, and so every position, is a multiple
        of it."""
        return min(self.block_tokens, self.page_tokens)

    @cached_property
    def chunk(self) -> int:
        """The model's chunk, or `fine` if that is larger: no two states are nearer than this."""
        return max(self.model_chunk, self.fine)

    @cached_property
    def grid(self) -> int:
        """Prefill saves at multiples of it, where KV ends in a whole block and a whole page."""
        return math.lcm(self.chunk, self.block_tokens, self.page_tokens)

    @cached_property
    def interval(self) -> int:
        """Decoding saves at multiples of it."""
        return math.lcm(self.grid, self.every)

    def floor(self, tokens: int) -> int:
        """The last position of the grid within `tokens` tokens; 0 if there is none."""
        return tokens // self.grid * self.grid

    def fine_floor(self, tokens: int) -> int:
        """`floor` over all positions that have a key, where a prompt's last state may be."""
        return tokens // self.fine * self.fine

    def branching(self, kv: int, checkpoint: int) -> int | None:
        """The branching point: the last position of the grid within the cached KV, if it is after
        the last checkpoint, else None.

        Other prompts shared this prefix and left KV but no state. If the coming prefill saves a
        state here, the next prompt with this prefix hits (as SGLang's branching point).

        Args:
            kv: tokens whose KV is cached, in any tier.
            checkpoint: position of the last checkpoint within them; 0 if there is none.
        """
        position = self.floor(kv)
        return position if position > checkpoint else None

    def reachable(self, begin: int, position: int) -> bool:
        """Whether a forward pass that starts at `begin` has a state at `position`, which then is a
        whole number of the model's chunks after `begin`. If `begin` is off the grid, as after a
        stretch that filled a token budget, no position of the grid may be reachable."""
        return position > begin and (position - begin) % self.model_chunk == 0


# ---- The save policy


class Saves(Enum):
    """Which states of a forward pass an engine can save."""

    INTERIOR = "interior"
    """States between two chunks of the model, counted from the pass's first token, and the last
    state."""
    END_ONLY = "end-only"
    """The last state."""


@dataclass(frozen=True)
class Stretch:
    """Tokens [begin, end) of a prompt that one forward pass computes."""

    begin: int
    end: int
    prompt: int
    """Tokens of the whole prompt: the stretch is its last if it ends there."""
    matched: int = 0
    """Position of the checkpoint that the request began with; 0 if it had none."""
    branching: int | None = None
    """The result of `Grid.branching` for the whole prompt, the same in each of its stretches."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: not integers, no tokens, or tokens outside of the prompt.
        """
        branching = 0 if self.branching is None else self.branching
        try:
            for value in (self.begin, self.end, self.prompt, self.matched, branching):
                operator.index(value)
        except TypeError:
            raise ConfigError(f"stretch: expected counts of tokens, found {self}") from None
        if not 0 <= self.begin < self.end <= self.prompt:
            raise ConfigError(
                f"stretch: expected 0 <= begin < end <= prompt, found tokens {self.begin} to "
                f"{self.end} of {self.prompt}"
            )
        if not 0 <= self.matched <= self.prompt or not 0 <= branching <= self.prompt:
            raise ConfigError(
                f"stretch: expected positions within {self.prompt} tokens, found matched="
                f"{self.matched} and branching={self.branching}"
            )


@dataclass(frozen=True)
class SavePlan:
    """The save of a forward pass."""

    begin: int
    end: int
    """Where the pass must end, at most where the stretch ends. The rest begins the next pass."""
    position: int | None
    """Position of the state to save; None: nothing is saved."""
    needed: bool = False
    """True for the branching point and the prompt's last position; other states are optional. If a
    request gets no slot in exchange, it keeps the branching point: `RequestSlots.keep`."""

    @property
    def offset(self) -> int | None:
        """Tokens of this pass that the state covers."""
        return None if self.position is None else self.position - self.begin

    @property
    def final(self) -> bool:
        """Whether it is the state at the end of the pass."""
        return self.position == self.end


@dataclass(frozen=True)
class SavePolicy:
    """How prefill saves."""

    grid: Grid
    saves: Saves
    tail: bool = False
    """The prompt's last state is at the last key, not at the last position of the grid: a follow-up
    computes at most `Grid.fine` tokens again. Costs one more pass, for the tokens after it."""
    between: bool = True
    """Save in each stretch of a long prompt, not only at the branching point and at the end."""

    def __post_init__(self) -> None:
        if type(self.saves) is not Saves:
            raise ConfigError(f"saves: expected a Saves, found {self.saves!r}")

    def last(self, prompt: int) -> int:
        """The last position at which the prefill of so many tokens saves; 0: none."""
        return self.grid.fine_floor(prompt) if self.tail else self.grid.floor(prompt)

    def plan(self, stretch: Stretch) -> SavePlan:
        """The state to save in this stretch, and where the pass must end for that. Changes nothing,
        so it may be called again for another end.

        A request that ends each pass where its plan says saves its branching point and its last
        position, however its prompt is cut; never two states in one pass, and never the matched
        one.

        Raises:
            ConfigError: a branching point that is not on this grid.
        """
        if stretch.branching is not None and stretch.branching % self.grid.grid:
            raise ConfigError(
                f"stretch: expected a branching point of a grid of {self.grid.grid} tokens, found "
                f"{stretch.branching}"
            )
        position, needed = self._wanted(stretch)
        if position is None:
            return SavePlan(stretch.begin, stretch.end, None)
        return SavePlan(stretch.begin, self._end(stretch, position), position, needed)

    def _wanted(self, stretch: Stretch) -> tuple[int | None, bool]:
        """The position to save, and whether it is needed."""
        known = max(stretch.begin, stretch.matched)
        for position in (stretch.branching, self.last(stretch.prompt)):
            if position is not None and known < position <= stretch.end:
                return position, True
        position = self.grid.floor(stretch.end)
        return (position if self.between and position > known else None), False

    def _end(self, stretch: Stretch, position: int) -> int:
        """The position at which a pass that saves at `position` must end."""
        if self.saves is Saves.END_ONLY or not self.grid.reachable(stretch.begin, position):
            return position  # which also puts the next begin back on the grid
        last = self.last(stretch.prompt)
        if position < last <= stretch.end:
            # The prompt's last state is for the next pass. This pass is as long as possible, so
            # that little of the step's budget is lost, and ends on the grid: `last` is reachable.
            return self.grid.floor(last - 1)
        return stretch.end


@dataclass(frozen=True, eq=False)
class DecodeSaves:
    """The sequences of a decoding step with a state to save. Rows ascend."""

    rows: npt.NDArray[np.int64]
    positions: Tokens
    """Of each of these rows, in the same order."""
    behind: Tokens
    """Tokens of the step after that position. 0: it is the state at the end of the step. More: with
    speculative decoding, it is the state of a draft (`Drafts.ancestors`)."""

    def __len__(self) -> int:
        return len(self.rows)


def decode_saves(grid: Grid, before: npt.ArrayLike, after: npt.ArrayLike) -> DecodeSaves:
    """The sequences that cross a multiple of `grid.interval`.

    Args:
        before: tokens in each sequence's state before the step, shape (n,).
        after: the same after the step: one more, or with speculative decoding the accepted tokens
            more. If a step crosses several multiples, the last counts.

    Raises:
        ConfigError: not two rows of integers of one length, or a sequence that goes back.
    """
    old = integers(before, "decode_saves: before")
    new = integers(after, "decode_saves: after").astype(np.int64, copy=False)
    if len(old) != len(new):
        raise ConfigError(
            f"decode_saves: expected rows of one length, found {len(old)} and {len(new)}"
        )
    positions = new // grid.interval * grid.interval
    if (new < old).any():
        row = int(np.argmax(new < old))
        raise ConfigError(f"decode_saves: row {row} goes back from {old[row]} to {new[row]} tokens")
    rows = np.flatnonzero(positions > old)
    return DecodeSaves(rows, positions[rows], (new - positions)[rows])


# ---- Settings of a hybrid manager


@dataclass(frozen=True)
class HybridConfig:
    """What the engine supports, and what it saves."""

    saves: Saves = Saves.INTERIOR
    """Which states of a forward pass the engine can save."""
    tail: bool = False
    """Prompts also save at their last key, and lookups try every key."""
    between: bool = True
    """Long prompts save in each stretch of their prefill."""
    ahead: bool = False
    """The scheduler launches a step before it has the results of the previous step."""
    alternating: bool = True
    """Running requests have slots beside their working slot, to save states in."""
    running: int | None = None
    """Number of requests that run at a time. The manager checks its settings as one `Features`;
    None: without what depends on this number."""
    drafted: int = 0
    """Drafted tokens of a request in a step."""
    draft_slots: int = 0
    """Device slots for drafts."""
    state_block_tokens: int | None = None
    """Tokens of a block if the engine addresses states by blocks: `state_block_tables`. None: it
    addresses them by slots."""
    drop_tails: bool = False
    """When a request ends, evict KV after the last checkpoint of its path, unless another request
    uses it: no request can begin there. For managed blocks and the host."""

    def __post_init__(self) -> None:
        if type(self.saves) is not Saves:
            raise ConfigError(f"saves: expected a Saves, found {self.saves!r}")
        if self.running is not None:
            count(self.running, "running", 1, 1 << 31)
        if self.state_block_tokens is not None:
            count(self.state_block_tokens, "state_block_tokens", 1, 1 << 20)
        for name in ("drafted", "draft_slots"):
            count(getattr(self, name), name, 0, 1 << 31)


# ---- Slots for the states of drafted tokens: speculative decoding with recurrent layers.
#
# Attention rejects a token by dropping its row. A recurrent state cannot remove a token, so every
# drafted token has a state of its own, and accepting a token copies its state. The number of slots
# follows from the running requests, not from the checkpoints: drafts never wait for a slot.

_MOST_DRAFTED = 1 << 31


class Drafts:
    """For each running request a row of slots, one for each node of its tree of drafted tokens.

    Node 0 is the last accepted token: its state is always valid. The others are drafted, each after
    its parent: `chain` for top-k 1, any tree otherwise. In a step node k reads the state of its
    parent (node 0 the working slot), and writes its own slot:

        read = drafts.reads(rows, parents, working)     # int32 of shape (n, drafted + 1)
        write = drafts.writes(rows)                     # of the same shape
        pairs = drafts.accept(rows, nodes, working)     # one launch copies them all
    """

    def __init__(self, slots: npt.ArrayLike, *, running: int, drafted: int) -> None:
        """Slots that the caller has allocated.

        Args:
            slots: int32 of shape (n,), each once; at least `room(running, drafted)`.
            running: maximum number of requests at a time. The caller assigns the rows 0 to
                running - 1 to requests, and may change that in each step.
            drafted: maximum number of drafted tokens of a request in one step, in all branches.

        Raises:
            ConfigError: invalid numbers, or slots that are too few or not distinct.
        """
        self.running = count(running, "running", 1, _MOST_DRAFTED)
        self.drafted = count(drafted, "drafted", 1, _MOST_DRAFTED)
        slot_pages, wanted = pages(slots), self.room(running, drafted)
        if len(slot_pages) < wanted:
            raise ConfigError(
                f"drafts: expected slots for {running} requests of {drafted} drafted tokens and "
                f"one more, {wanted}, found {len(slot_pages)}"
            )
        if len(np.unique(slot_pages)) != len(slot_pages):
            raise ConfigError("drafts: expected each slot once")
        self._slots = slot_pages[:wanted].reshape(running, drafted + 1).copy()

    @staticmethod
    def room(running: int, drafted: int) -> int:
        """Slots for so many requests: one for each drafted token, and one for the last accepted
        token."""
        return running * (drafted + 1)

    @property
    def chain(self) -> Tokens:
        """Parents for top-k 1: each node follows the previous one."""
        return np.arange(-1, self.drafted, dtype=np.int64)

    def writes(self, rows: npt.ArrayLike) -> Pages:
        """The slot that each node of these rows writes, int32 of shape (n, drafted + 1).

        Raises:
            ConfigError: no such row, or a row twice.
        """
        written: Pages = self._slots[self._rows(rows)]
        return written

    def reads(self, rows: npt.ArrayLike, parents: npt.ArrayLike, working: npt.ArrayLike) -> Pages:
        """The slot that each node reads, int32 of shape (n, drafted + 1).

        Args:
            parents: of each node, of shape (drafted + 1,) for all or (n, drafted + 1). A parent
                comes before its children; node 0 has -1.
            working: the working slot of each row, shape (n,).

        Raises:
            ConfigError: invalid rows, parents that are no tree, or not one working slot a row.
        """
        written = self.writes(rows)
        tree = self._tree(parents, len(written))
        read: Pages = np.take_along_axis(written, np.maximum(tree, 0), axis=1)
        read[:, 0] = self._working(working, len(written))
        return read

    def accept(self, rows: npt.ArrayLike, nodes: npt.ArrayLike, working: npt.ArrayLike) -> Pages:
        """Pairs (source, destination), int32 of shape (n, 2), to copy the state of the last
        accepted node to the working slot. Node 0: all drafted tokens are rejected.

        Raises:
            ConfigError: invalid rows, no such node, or not one node and working slot a row.
        """
        written = self.writes(rows)
        chosen = self._nodes(nodes, len(written))
        source = written[np.arange(len(written)), chosen]
        return np.stack([source, self._working(working, len(written))], axis=1)

    def ancestors(
        self, parents: npt.ArrayLike, nodes: npt.ArrayLike, behind: npt.ArrayLike
    ) -> Tokens:
        """The node so many tokens before an accepted node on its branch, shape (n,). Its state is
        the one to copy to an alternating slot if a step has crossed a position to save
        (`DecodeSaves.behind`).

        Raises:
            ConfigError: parents that are no tree, no such node, or tokens before this step's.
        """
        steps = _integers(behind, "behind", self.drafted)
        checked = self._nodes(nodes, steps.size)
        tree = self._tree(parents, len(checked))
        order = np.arange(len(checked))
        for step in range(int(steps.max(initial=0))):
            checked[steps > step] = tree[order, checked][steps > step]
            if (checked < 0).any():
                row = int(np.argmin(checked))
                raise ConfigError(
                    f"ancestors: row {row}: expected at most the {step} tokens that this step "
                    f"computed before its node, found {steps[row]}"
                )
        return checked

    # ---- arguments

    def _rows(self, rows: npt.ArrayLike) -> Tokens:
        row_numbers = _integers(rows, "rows", self.running - 1)
        if len(np.unique(row_numbers)) != len(row_numbers):
            raise ConfigError(f"rows: expected each once, found {row_numbers.tolist()}")
        return row_numbers

    def _nodes(self, nodes: npt.ArrayLike, wanted: int) -> Tokens:
        numbers = _integers(nodes, "nodes", self.drafted)
        if len(numbers) != wanted:
            raise ConfigError(f"nodes: expected {wanted}, found {len(numbers)}")
        return numbers

    def _working(self, working: npt.ArrayLike, wanted: int) -> Pages:
        working_slots = pages(working)
        if len(working_slots) != wanted:
            raise ConfigError(f"working: expected {wanted} slots, found {len(working_slots)}")
        return working_slots

    def _tree(self, parents: npt.ArrayLike, wanted: int) -> Tokens:
        tree, nodes = np.asarray(parents), self.drafted + 1
        if tree.shape not in ((nodes,), (wanted, nodes)) or tree.dtype.kind not in "iu":
            raise ConfigError(
                f"parents: expected integers of shape ({nodes},) or ({wanted}, {nodes}), found "
                f"{tree.dtype} {tree.shape}"
            )
        inner = tree[..., 1:]
        if (tree[..., 0] != -1).any() or (inner < 0).any() or (inner >= np.arange(1, nodes)).any():
            raise ConfigError("parents: expected -1 for node 0, and an earlier node for the others")
        return np.broadcast_to(tree.astype(np.int64), (wanted, nodes))


def _integers(values: npt.ArrayLike, name: str, most: int) -> Tokens:
    array = integers(values, name).astype(np.int64)
    if array.size and not 0 <= array.min() <= array.max() <= most:
        raise ConfigError(f"{name}: expected 0 to {most}, found {array.tolist()}")
    return array


# ---- The device slots of a running request, and which saved state is in which.
#
# A request has a *working* slot, which its layers read and write at every step, and *alternating*
# slots for the states that it saves. A scheduler that runs one step ahead launches the step that
# overwrites a saved state before it knows that the request ended with the step before. So it needs
# two of them: it overwrites the older one, and the newest confirmed state remains to be donated.
#
# This is bookkeeping only: it never asks the device. The engine calls `confirm` when the results of
# a step have arrived.

_MOST_SLOT = (1 << 31) - 1


class Saved(NamedTuple):
    """A state after `position` tokens, in a slot."""

    slot: int
    position: int


@dataclass(frozen=True)
class Rest:
    """The slots that a request leaves, each in one of the two lists. The caller owns them from now
    on."""

    free: tuple[int, ...]
    """Nothing reads or writes these any more."""
    busy: tuple[int, ...]
    """A launched step may still write these, or a copy may read them. They are free when it has
    finished. Until then only later work on the same stream may use them, no load on another
    stream."""


class _Write:
    """A launched save. `valid` is False if its state was rejected."""

    __slots__ = ("position", "slot", "valid")

    def __init__(self, slot: int, position: int) -> None:
        self.slot, self.position, self.valid = slot, position, True


class RequestSlots:
    """The slots of one request. For one thread, the scheduler's; nothing blocks.

    An alternating slot is *free*, *writing* (a step that writes it was launched, and its results
    have not arrived) or *confirmed*:

        slot = slots.begin_save(position)     # launching a step; None: this one is not saved
        slots.confirm(position)               # that step's results have arrived
        saved = slots.donate(kept)            # the request ends: name this slot, copy nothing
        rest = slots.rest()                   # and give these back
    """

    def __init__(
        self,
        working: int,
        alternating: Sequence[int] = (),
        *,
        ahead: bool,
        keep: int | None = None,
        loose: list[int] | None = None,
    ) -> None:
        """Slots that the caller has allocated.

        Args:
            working: the slot that the layers read and write.
            alternating: `needed(ahead)` slots; or none: no state is saved in a slot beside it.
            ahead: whether the scheduler launches a step before it has the results of the previous
                step.
            keep: the branching point; its state is not overwritten until it is given away. Other
                positions come again, this one only if the prefill is repeated.
            loose: a slot enters this list in the instruction in which it is given away, so that no
                interrupt loses it: `Checkpoints.loose`. None: the caller needs no such list.

        Raises:
            ConfigError: invalid slots, a slot twice, or not as many as needed.
        """
        every = [count(slot, "slot", 0, _MOST_SLOT) for slot in (working, *alternating)]
        if len(set(every)) != len(every):
            raise ConfigError(f"slots: expected each once, found {every}")
        if len(every) - 1 not in (0, self.needed(ahead)):
            raise ConfigError(
                f"slots: expected {self.needed(ahead)} alternating ones, or none, where the "
                f"scheduler {'runs' if ahead else 'does not run'} ahead, found {len(every) - 1}"
            )
        self.working, self.ahead, self.keep = every[0], ahead, keep
        self._free = every[1:]
        self._confirmed: list[Saved] = []  # ascending positions
        self._writes: deque[_Write] = deque()  # in the order of their launch
        self._read: set[int] = set()
        self._given: set[int] = set()
        self._loose = [] if loose is None else loose
        self._over = False

    @staticmethod
    def needed(ahead: bool) -> int:
        """Alternating slots of a request. Without running ahead one is enough: when the step that
        overwrites it is launched, all results are known, and the request has not ended."""
        return 2 if ahead else 1

    # ---- saving

    def begin_save(self, position: int) -> int | None:
        """The slot that the step being launched writes the state after `position` tokens to.

        Never a slot that is being written or read, nor that of the state to `keep`, and of two
        others never the newest confirmed one. None: no slot is available, and the step saves
        nothing. This happens while two saves in a row are not both confirmed; if the request has no
        alternating slot, or keeps its only one; and if this position or a later one is saved
        already, as after a fall-back that computes tokens again.

        Raises:
            ConfigError: an invalid position, or the request has ended.
        """
        self._check_running()
        count(position, "position", 1, 1 << 62)
        if any(position <= state.position for state in self._states()):
            return None
        found = self._to_overwrite()
        if found is None:
            return None
        slot, leave = found
        together(leave, partial(self._writes.append, _Write(slot, position)))
        return slot

    def next_slot(self, position: int) -> int | None:
        """As `begin_save`, but the state after `position` tokens stays in the working slot. The
        step being launched reads that slot, and writes the returned one, which is the working slot
        from now on. None: the state is not saved, and the step writes the working slot.

        Raises:
            ConfigError: as `begin_save`.
        """
        slot = self.begin_save(position)
        if slot is not None:
            self._writes[-1].slot, self.working = self.working, slot
        return slot

    def _to_overwrite(self) -> tuple[int, partial[Any]] | None:
        """The slot, and the call that takes it from where it is."""
        for slot in self._free:
            if slot not in self._read:
                return slot, partial(self._free.remove, slot)
        # Of two confirmed states, the older that is not kept. A single one only without running
        # ahead: then no step is in flight that might be the request's last.
        spare = [state for state in self._confirmed if state.position != self.keep]
        enough = len(self._confirmed) > (1 if self.ahead else 0)
        if not enough or not spare or spare[0].slot in self._read:
            return None
        return spare[0].slot, partial(self._confirmed.remove, spare[0])

    def confirm(self, position: int) -> None:
        """Confirm a save: the results of its step have arrived. Call once for each `begin_save`
        that returned a slot, in their order, whether or not the state was rejected.

        Raises:
            ConfigError: the oldest write in flight is another, or there is none.
        """
        if not self._writes or self._writes[0].position != position:
            expected = f"that of {self._writes[0].position}" if self._writes else "none"
            raise ConfigError(
                f"confirm: expected the oldest write in flight, {expected}, found {position}; "
                "confirm each once, in the order of launching"
            )
        write = self._writes[0]
        known: partial[Any] = partial(self._free.append, write.slot)
        if write.valid:
            known = partial(self._confirmed.append, Saved(write.slot, position))
        together(partial(self._writes.popleft), known)

    def reject(self, accepted: int) -> Saved | None:
        """Speculation failed and only the first `accepted` tokens count. Saved states after them
        are void, also those still being written.

        Returns:
            The state to continue from if the working slot's state is also after them and no draft's
            state can be accepted: the newest confirmed one. Copy it to `working` on the stream that
            computes, before the next step, and compute the tokens after its position again. None:
            continue from the checkpoint that the request began with, or from the beginning.
        """
        self._check_running()
        for write in self._writes:
            write.valid = write.valid and write.position <= accepted
        # A confirmed write has finished, so void slots may be written again immediately.
        free = [state.slot for state in self._confirmed if state.position > accepted]
        kept = [state for state in self._confirmed if state.position <= accepted]
        assign((self, self), ("_free", "_confirmed"), (self._free + free, kept))
        return self.newest

    @property
    def confirmed(self) -> tuple[Saved, ...]:
        """The confirmed states, in the order of their positions."""
        return tuple(self._confirmed)

    @property
    def newest(self) -> Saved | None:
        """The newest confirmed state."""
        return self._confirmed[-1] if self._confirmed else None

    # ---- reading on another stream

    def begin_read(self, slot: int) -> None:
        """Note the launch of a copy from a confirmed state that steps do not wait for.

        Raises:
            ConfigError: this slot has no confirmed state of this request.
        """
        if slot not in [state.slot for state in self._confirmed]:
            raise ConfigError(f"begin_read: expected one of {self._confirmed}, found slot {slot}")
        self._read.add(slot)

    def end_read(self, slot: int) -> None:
        """Note that the copy has finished."""
        self._read.discard(slot)

    # ---- giving away

    def exchange(
        self, replacement: int | None, position: int | None = None, *calls: partial[Any]
    ) -> Saved | None:
        """Give away a confirmed state, to be named, while the request runs.

        Args:
            replacement: a free slot, which takes its place. None: no slot was available.
            position: of the state; None: the newest.
            calls: C functions to call in the same instruction, as for `together`.

        Returns:
            The state to name. None: no state is confirmed there, or there is no replacement. Then
            the request keeps its slot, no checkpoint is made, and the caller keeps the replacement.

        Raises:
            ConfigError: the replacement is one of the request's own, or the request has ended.
        """
        self._check_running()
        wanted = [state for state in self._confirmed if position in (None, state.position)]
        if replacement is None or not wanted:
            return None
        if count(replacement, "replacement", 0, _MOST_SLOT) in self._every():
            raise ConfigError(f"replacement: slot {replacement} is the request's own")
        state = wanted[-1]
        together(
            partial(self._free.append, replacement),
            partial(self._confirmed.pop, self._confirmed.index(state)),
            partial(self._loose.append, state.slot),
            *calls,
        )
        return state

    def donate(self, kept: int, *, working_at: int | None = None) -> Saved | None:
        """The request ends: the state that becomes a checkpoint. Its slot leaves the request;
        `rest` returns the others.

        It is the newest confirmed state within the kept tokens; None if there is none. A state that
        is being written does not count: a request may end while a step of it runs.

        Args:
            kept: tokens whose KV stays in the cache.
            working_at: position of the working slot's state, if it has a key and no step of the
                request is in flight: then it counts as well.

        Raises:
            ConfigError: the request has ended already.
        """
        self._check_running()
        self._over = True
        confirmed = [state for state in self._confirmed if state.position <= kept]
        if working_at is not None and 0 < working_at <= kept:
            confirmed.append(Saved(self.working, working_at))
        if not confirmed:
            return None
        best = max(confirmed, key=lambda state: state.position)
        self._give_away(best)
        return best

    def donate_kept(self, kept: int) -> Saved | None:
        """After `donate`: the state to `keep`, which also becomes a checkpoint. None: it is not
        confirmed, is after the kept tokens, or was donated."""
        for state in self._confirmed:
            if state.position != self.keep or state.position > kept:
                continue
            if state.slot not in self._given:
                self._give_away(state)
                return state
        return None

    def rest(self, *, idle: bool = False) -> Rest:
        """The slots that the request still had, now the caller's. The request has ended.

        Args:
            idle: no step of the request is in flight.
        """
        self._over = True
        every = [slot for slot in self._every() if slot not in self._given]
        written = set() if idle else {self.working, *(write.slot for write in self._writes)}
        busy = written | self._read
        return Rest(
            tuple(slot for slot in every if slot not in busy),
            tuple(slot for slot in every if slot in busy),
        )

    # ---- helpers

    def _give_away(self, state: Saved) -> None:
        together(
            partial(self._given.add, state.slot),
            partial(self._loose.append, state.slot),
        )

    def _states(self) -> list[Saved]:
        """States that are saved or being saved, and were not rejected."""
        writing = [Saved(write.slot, write.position) for write in self._writes if write.valid]
        return self._confirmed + writing

    def _every(self) -> list[int]:
        saved = [state.slot for state in self._confirmed]
        return [self.working, *self._free, *saved, *(write.slot for write in self._writes)]

    def _check_running(self) -> None:
        if self._over:
            raise ConfigError("slots: the request has ended")


# ---- Conflicting settings: checked once, when a model is configured, in one message

_COUNTS = ("alternating", "drafted", "draft_slots", "host_states")


@dataclass(frozen=True)
class Features:
    """Settings for serving a hybrid model. `check` verifies them."""

    grid: Grid
    saves: Saves
    running: int | None
    """Requests at a time; None: unknown, and what depends on it is not checked."""
    device_slots: int
    """For all states on the device: of requests, drafts, checkpoints."""
    ahead: bool = False
    """The scheduler launches a step before it has the results of the previous step."""
    alternating: int = 0
    """Slots of a request beside its working slot, for the states that it saves while it runs."""
    drafted: int = 0
    """Drafted tokens of a request in a step; 0: no speculative decoding."""
    draft_slots: int = 0
    """Of `device_slots`, those for drafts."""
    device_states: int | None = None
    """Checkpoints that may stay on the device; None: in all slots that are left."""
    host_states: int = 0
    """Checkpoints that the host has room for."""
    storage: bool = False
    """Checkpoints are written from the host to storage."""
    tail: bool = False
    """Save at a prompt's last key: `SavePolicy.tail`."""
    state_block_tokens: int | None = None
    """Tokens of a block if the engine addresses states by blocks: `state_block_tables`. None: it
    addresses them by slots."""

    def __post_init__(self) -> None:
        """Check each value by itself.

        Raises:
            ConfigError: an invalid value.
        """
        for name, kind in (("grid", Grid), ("saves", Saves)):
            if type(getattr(self, name)) is not kind:
                raise ConfigError(
                    f"{name}: expected a {kind.__name__}, found {getattr(self, name)!r}"
                )
        if self.running is not None:
            count(self.running, "running", 1, 1 << 31)
        for name in _COUNTS:
            count(getattr(self, name), name, 0, 1 << 31)
        count(self.device_slots, "device_slots", 0, 1 << 31)
        if self.device_states is not None:
            count(self.device_states, "device_states", 0, 1 << 31)
        if self.state_block_tokens is not None:
            count(self.state_block_tokens, "state_block_tokens", 1, 1 << 20)

    def check(self) -> None:
        """Refuse conflicting settings.

        Raises:
            ConfigError: names every conflict, not only the first, each with what to change.
        """
        conflicts = self.conflicts()
        if conflicts:
            raise ConfigError(
                f"hybrid model: {len(conflicts)} of its settings conflict:\n"
                + "\n".join(f"{number}. {text}" for number, text in enumerate(conflicts, 1))
            )

    def conflicts(self) -> tuple[str, ...]:
        """The conflicts that `check` reports."""
        return (*self._of_slots(), *self._of_checkpoints(), *self._of_tables())

    @property
    def spare_slots(self) -> int | None:
        """Device slots that running requests and drafts leave to checkpoints; negative: so many
        slots are missing. None: the number of requests is unknown."""
        if self.running is None:
            return None
        return self.device_slots - self.running * (1 + self.alternating) - self.draft_slots

    def _of_slots(self) -> Iterator[str]:
        wanted = RequestSlots.needed(self.ahead)
        if self.alternating not in (0, wanted):
            yield (
                f"alternating={self.alternating}: a scheduler that "
                f"{'runs' if self.ahead else 'does not run'} ahead needs {wanted} for each "
                "request, or none"
            )
        room = Drafts.room(self.running, self.drafted) if self.running and self.drafted else 0
        if self.draft_slots < room:
            yield (
                f"draft_slots={self.draft_slots}: {self.drafted} drafted tokens for each of "
                f"{self.running} requests need {room}, as a rejected token cannot be taken out of "
                "a state"
            )
        if self.draft_slots and not self.drafted:
            yield f"draft_slots={self.draft_slots}: nothing is drafted; give them to checkpoints"
        if self.spare_slots is not None and self.spare_slots < 0:
            yield (
                f"device_slots={self.device_slots}: {self.running} requests with "
                f"{self.alternating} alternating slots, and {self.draft_slots} for drafts, need "
                f"{-self.spare_slots} more"
            )

    def _of_checkpoints(self) -> Iterator[str]:
        on_device = self.device_states is None or self.device_states > 0
        if not on_device and not self.host_states:
            yield (
                "device_states=0: a donated state stays in its device slot, and there is no host "
                "to take it; give host_states, or slots on the device"
            )
        if self.storage and not self.host_states:
            yield "storage: states are written to storage from the host; give host_states"
        spare = self.device_slots if self.spare_slots is None else max(0, self.spare_slots)
        if self.device_states is not None and self.device_states > spare:
            yield (
                f"device_states={self.device_states}: of {self.device_slots} device slots, "
                f"requests and drafts leave {spare}"
            )
        if self.device_states is None and self.spare_slots == 0 and not self.host_states:
            yield (
                f"device_slots={self.device_slots}: requests and drafts need all of them, so no "
                "checkpoint would be kept; give more slots, or host_states"
            )
        if self.saves is Saves.INTERIOR and not self.alternating:
            yield (
                f"interior saves: a state inside a pass needs a slot beside the working slot; "
                f"give alternating={RequestSlots.needed(self.ahead)}, or save end-only"
            )
        if self.tail and self.grid.fine == self.grid.grid:
            yield (
                f"tail: keys and grid both have steps of {self.grid.grid} tokens, so there is no "
                "key after the grid's last position; use smaller blocks or pages, or turn it off"
            )

    def _of_tables(self) -> Iterator[str]:
        block = self.state_block_tokens
        if block is None:
            return
        step = self.grid.fine if self.tail else self.grid.grid
        if step % block:
            yield (
                f"state_block_tokens={block}: states are saved every {step} tokens, not always at "
                "the end of a block, and the rest of the block would overwrite them; use a divisor"
            )
        if self.saves is Saves.INTERIOR and block % self.grid.chunk:
            yield (
                f"state_block_tokens={block}: inside a pass states exist only every "
                f"{self.grid.chunk} tokens, so blocks would end without one; use a multiple, or "
                "save end-only"
            )
        if self.drafted and block < self.drafted + 1:
            yield (
                f"state_block_tokens={block}: a step of {self.drafted} drafted tokens may cross "
                "more than one block, and a table has one slot to write to; use larger blocks, or "
                "address states by slots"
            )


def check_features(config: HybridConfig, checkpoints: Checkpoints, grid: Grid) -> None:
    """Check a manager's settings. Without device slots for checkpoints, requests use the engine's
    own slots.

    Raises:
        ConfigError: see `Features.check`; or an invalid value.
    """
    alternating = RequestSlots.needed(config.ahead) if config.alternating else 0
    slots, host = checkpoints.slots, checkpoints.host
    needed = (config.running or 1) * (1 + alternating) + config.draft_slots
    Features(
        grid,
        config.saves,
        config.running,
        device_slots=needed if slots is None else slots.pages,
        ahead=config.ahead,
        alternating=alternating,
        drafted=config.drafted,
        draft_slots=config.draft_slots,
        device_states=0 if slots is None else None,
        host_states=0 if host is None else host.pages,
        storage=checkpoints.storage is not None,
        tail=config.tail,
        state_block_tokens=config.state_block_tokens,
    ).check()


__all__ = [
    "DecodeSaves",
    "Drafts",
    "Features",
    "Grid",
    "HybridConfig",
    "RequestSlots",
    "Rest",
    "SavePlan",
    "SavePolicy",
    "Saved",
    "Saves",
    "Stretch",
    "check_features",
    "decode_saves",
]
