"""Where prefill and decoding save recurrent state: decided before the work is launched.

A prompt is computed in stretches, one forward pass each, and a pass saves at most one state. Which
one, and whether the pass must end there, is all that an engine has to know:

    policy = SavePolicy(grid, Saves.INTERIOR)
    plan = policy.plan(Stretch(begin=0, end=2048, prompt=5000, branching=1024))
    plan.position, plan.offset, plan.end    # 1024, 1024, 2048: compute all, save on the way

Nothing here is an array: a step has few stretches, and one is planned in the time of two or three
calls of numpy. Decoding has hundreds of sequences in a step, and `decode_saves` takes them at once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError
from lightcache.hybrid.grids import Grid, Tokens


class Saves(Enum):
    """Which states of a forward pass an engine can save."""

    INTERIOR = "interior"
    """Those between two chunks of the model, counted from the pass's first token; and the last."""
    END_ONLY = "end-only"
    """The last."""


@dataclass(frozen=True)
class Stretch:
    """Tokens [begin, end) of a prompt, to be computed in one forward pass."""

    begin: int
    end: int
    prompt: int
    """Tokens of the whole prompt: the stretch is its last if it ends there."""
    matched: int = 0
    """Position of the checkpoint that the request began with; 0 if it had none."""
    branching: int | None = None
    """As `Grid.branching` said, for the whole prompt: the same in each of its stretches."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: not integers, no tokens, or tokens that the prompt does not have.
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
    """What a forward pass saves."""

    begin: int
    end: int
    """Where the pass must end: at most where the stretch does. What is cut off begins the next."""
    position: int | None
    """Of the state to be saved; None: nothing is saved."""
    needed: bool = False
    """It is the branching point or the prompt's last. The others are welcome, no more. Of these two
    the branching point stays where a request gets no slot in exchange: `RequestSlots.keep`."""

    @property
    def offset(self) -> int | None:
        """Tokens of this pass that the state has behind it."""
        return None if self.position is None else self.position - self.begin

    @property
    def final(self) -> bool:
        """It is the state that the pass leaves behind anyway."""
        return self.position == self.end


@dataclass(frozen=True)
class SavePolicy:
    """How prefill saves."""

    grid: Grid
    saves: Saves
    tail: bool = False
    """The prompt's last state is at the last key, not at the last position of the grid: a follow-up
    computes at most `Grid.fine` tokens again. Costs a pass of its own for what lies behind."""
    between: bool = True
    """Save in each stretch of a long prompt, not only at the branching point and at the end."""

    def __post_init__(self) -> None:
        if type(self.saves) is not Saves:
            raise ConfigError(f"saves: expected a Saves, found {self.saves!r}")

    def last(self, prompt: int) -> int:
        """The last position of a prompt of so many tokens at which its prefill saves; 0: none."""
        return self.grid.fine_floor(prompt) if self.tail else self.grid.floor(prompt)

    def plan(self, stretch: Stretch) -> SavePlan:
        """What to save in this stretch, and where it must end for that. Changes nothing, so it may
        be asked again for another end.

        A request that ends each pass where its plan says saves its branching point and its last
        position, however its prompt is cut; never two in one pass, and never what was matched.

        Raises:
            ConfigError: a branching point that is none of this grid.
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
        """The one position to be saved, and whether it is needed."""
        known = max(stretch.begin, stretch.matched)
        for position in (stretch.branching, self.last(stretch.prompt)):
            if position is not None and known < position <= stretch.end:
                return position, True
        position = self.grid.floor(stretch.end)
        return (position if self.between and position > known else None), False

    def _end(self, stretch: Stretch, position: int) -> int:
        """Where a pass must end that saves there."""
        if self.saves is Saves.END_ONLY or not self.grid.reachable(stretch.begin, position):
            return position  # which also puts the next begin back on the grid
        last = self.last(stretch.prompt)
        if position < last <= stretch.end:
            # The prompt's last is for the next pass. This one goes on as far as it can, so that
            # little of the step's budget is lost, and ends on the grid, where `last` is in reach.
            return self.grid.floor(last - 1)
        return stretch.end


@dataclass(frozen=True, eq=False)
class DecodeSaves:
    """Which sequences of a decoding step have a state to be saved. Ascending rows."""

    rows: npt.NDArray[np.int64]
    positions: Tokens
    """Of each of these rows, in the same order."""
    behind: Tokens
    """Tokens of the step behind that position: 0, and it is the state that the step leaves; more,
    and with speculative decoding it is a draft's (`Drafts.ancestors`)."""

    def __len__(self) -> int:
        return len(self.rows)


def decode_saves(grid: Grid, before: npt.ArrayLike, after: npt.ArrayLike) -> DecodeSaves:
    """The sequences that cross a multiple of `grid.interval`.

    Args:
        before: tokens behind which each sequence's state was before the step, shape (n,).
        after: the same after it: one more, or with speculative decoding what was accepted. Where
            a step crosses several multiples, the last counts.

    Raises:
        ConfigError: not two rows of integers of one length, or a sequence that goes back.
    """
    old, new = np.asarray(before), np.asarray(after)
    integers = old.dtype.kind in "iu" and new.dtype.kind in "iu"
    if old.ndim != 1 or old.shape != new.shape or not (integers or old.size == 0):
        raise ConfigError(
            f"decode_saves: expected two rows of integers of one length, found {old.dtype} "
            f"{old.shape} and {new.dtype} {new.shape}"
        )
    new = new.astype(np.int64, copy=False)
    positions = new // grid.interval * grid.interval
    if (new < old).any():
        row = int(np.argmax(new < old))
        raise ConfigError(f"decode_saves: row {row} goes back from {old[row]} to {new[row]} tokens")
    rows = np.flatnonzero(positions > old)
    return DecodeSaves(rows, positions[rows], (new - positions)[rows])


__all__ = ["DecodeSaves", "SavePlan", "SavePolicy", "Saves", "Stretch", "decode_saves"]
