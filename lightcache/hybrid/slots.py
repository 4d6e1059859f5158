"""The device slots of a running request, and which saved state is in which.

A request has a *working* slot, which its layers read and write at every step, and *alternating*
slots for what it saves. Why two of these: a scheduler that runs one step ahead has launched the
step that overwrites a saved state before it knows that the request ended with the step before. With
two it overwrites the older one, and the newest that is confirmed is there to be donated.

Everything here is bookkeeping: nothing asks the device. What the device did is known because the
engine says so: `confirm`, when the results of a step have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightcache._arguments import count
from lightcache.errors import ConfigError

_MOST = (1 << 31) - 1


class Saved(NamedTuple):
    """A state behind `position` tokens, in a slot."""

    slot: int
    position: int


@dataclass(frozen=True)
class Rest:
    """What a request leaves. Each slot is in one of the two, and the caller's from now on."""

    free: tuple[int, ...]
    """Nothing reads or writes these any more."""
    busy: tuple[int, ...]
    """A step that was launched may still write these, or a copy read them: they are free when it is
    over. Until then only work that comes later on the same stream may touch them, no load on
    another."""


class _Write:
    """A save that was launched. No longer valid: its state was rejected."""

    __slots__ = ("position", "slot", "valid")

    def __init__(self, slot: int, position: int) -> None:
        self.slot, self.position, self.valid = slot, position, True


class RequestSlots:
    """Of one request. For one thread, the scheduler's; nothing blocks.

    An alternating slot is *free*, *writing* (a step that writes it was launched, and its results
    are not here yet) or *confirmed*:

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
    ) -> None:
        """Slots that the caller has allocated.

        Args:
            working: what the layers read and write.
            alternating: as many as `needed(ahead)` says, or none, and nothing is saved beside.
            ahead: whether the scheduler launches a step before it has seen the results of the
                one before.
            keep: a position whose state nothing overwrites until it is given away: the branching
                point. Others come by again, and this one only if the prefill is done again.

        Raises:
            ConfigError: numbers that are no slots, one of them twice, or not as many as needed.
        """
        every = [count(slot, "slot", 0, _MOST) for slot in (working, *alternating)]
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
        self._over = self._rested = False

    @staticmethod
    def needed(ahead: bool) -> int:
        """Alternating slots of a request. Without running ahead one is enough: when the step that
        overwrites it is launched, all results are known, and the request has not ended."""
        return 2 if ahead else 1

    # ---- saving

    def begin_save(self, position: int) -> int | None:
        """The slot that the step being launched writes the state behind `position` to.

        Never one that is being written or read, nor that of the state to `keep`, and of two others
        never the newest confirmed one. None: there is no other, and the step saves nothing. So it
        is while two saves in a row are not both confirmed; for a request without alternating slots,
        or whose only one is kept; and where this position or a later one is saved already, as
        behind a fall-back that computes tokens again.

        Raises:
            ConfigError: no position, or the request is over.
        """
        self._check_running()
        count(position, "position", 1, 1 << 62)
        if any(position <= state.position for state in self._states()):
            return None
        slot = self._to_overwrite()
        if slot is not None:
            self._writes.append(_Write(slot, position))
        return slot

    def _to_overwrite(self) -> int | None:
        for slot in self._free:
            if slot not in self._read:
                self._free.remove(slot)
                return slot
        # Of two confirmed ones the older that is not kept. The only one when nothing is in flight
        # that might be the request's last: without running ahead.
        spare = [state for state in self._confirmed if state.position != self.keep]
        enough = len(self._confirmed) > (1 if self.ahead else 0)
        if not enough or not spare or spare[0].slot in self._read:
            return None
        self._confirmed.remove(spare[0])
        return spare[0].slot

    def confirm(self, position: int) -> None:
        """The results of the step that saved this have arrived: its write is over. Once for each
        `begin_save` that gave a slot, in their order, whether or not the state was rejected.

        Raises:
            ConfigError: the oldest write in flight is another, or there is none.
        """
        if not self._writes or self._writes[0].position != position:
            found = f"that of {self._writes[0].position}" if self._writes else "none"
            raise ConfigError(
                f"confirm: expected the oldest write in flight, {found}, found {position}; confirm "
                "each once, in the order of launching"
            )
        write = self._writes.popleft()
        if write.valid:
            self._confirmed.append(Saved(write.slot, position))
        else:
            self._free.append(write.slot)

    def reject(self, accepted: int) -> Saved | None:
        """Only the first `accepted` tokens count: speculation went wrong. Saved states behind them
        are void, also those still being written.

        Returns:
            Where to go on from if the working slot's state is behind them, too, and no draft's
            state can be accepted: the newest confirmed state, to be copied to `working` on the
            stream that computes, ahead of the next step. Tokens behind its position are computed
            again. None: from the checkpoint that the request began with, or from nothing.
        """
        self._check_running()
        for write in self._writes:
            write.valid = write.valid and write.position <= accepted
        # A confirmed write is over, so what is void may be written again at once.
        self._free += [state.slot for state in self._confirmed if state.position > accepted]
        self._confirmed = [state for state in self._confirmed if state.position <= accepted]
        return self.newest

    @property
    def confirmed(self) -> tuple[Saved, ...]:
        """The states whose write is confirmed, in the order of their positions."""
        return tuple(self._confirmed)

    @property
    def newest(self) -> Saved | None:
        """The newest state whose write is confirmed."""
        return self._confirmed[-1] if self._confirmed else None

    # ---- reading on another stream

    def begin_read(self, slot: int) -> None:
        """A copy from a confirmed state is launched that steps do not wait for.

        Raises:
            ConfigError: no confirmed state of this request is there.
        """
        if slot not in [state.slot for state in self._confirmed]:
            raise ConfigError(f"begin_read: expected one of {self._confirmed}, found slot {slot}")
        self._read.add(slot)

    def end_read(self, slot: int) -> None:
        """That copy is over."""
        self._read.discard(slot)

    # ---- giving away

    def exchange(self, replacement: int | None, position: int | None = None) -> Saved | None:
        """Give away a confirmed state while the request goes on, to be named.

        Args:
            replacement: a free slot, which takes its place. None: none could be had.
            position: of the state; None: the newest.

        Returns:
            What to name. None: nothing is confirmed there, or there is no replacement. Then the
            request keeps its own, no checkpoint is made, and a replacement stays the caller's.

        Raises:
            ConfigError: the replacement is one of the request's own, or the request is over.
        """
        self._check_running()
        wanted = [state for state in self._confirmed if position in (None, state.position)]
        if replacement is None or not wanted:
            return None
        if count(replacement, "replacement", 0, _MOST) in self._every():
            raise ConfigError(f"replacement: slot {replacement} is the request's own")
        self._free.append(replacement)
        self._confirmed.remove(wanted[-1])
        return wanted[-1]

    def donate(self, kept: int, *, working_at: int | None = None) -> Saved | None:
        """The request ends: the state that becomes a checkpoint. Its slot is no longer one of the
        request's; `rest` says what becomes of the others.

        The newest state not behind the tokens that are kept, else the one before, else none. Only
        those whose write is confirmed: a request may end while a step of it runs.

        Args:
            kept: tokens whose KV stays in the cache.
            working_at: position of the working slot's state, if that has a key and no step of the
                request is in flight: it is as good as the others then.

        Raises:
            ConfigError: the request is over already.
        """
        self._check_running()
        self._over = True
        found = [state for state in self._confirmed if state.position <= kept]
        if working_at is not None and 0 < working_at <= kept:
            found.append(Saved(self.working, working_at))
        if not found:
            return None
        best = max(found, key=lambda state: state.position)
        self._given.add(best.slot)
        return best

    def donate_kept(self, kept: int) -> Saved | None:
        """Behind `donate`: the state to `keep`, which becomes a checkpoint as well. None: it is not
        confirmed, beyond the tokens that are kept, or what was donated."""
        for state in self._confirmed:
            if state.position != self.keep or state.position > kept:
                continue
            if state.slot not in self._given:
                self._given.add(state.slot)
                return state
        return None

    def rest(self, *, idle: bool = False) -> Rest:
        """The slots that the request still had, now the caller's. It is over; ask once.

        Args:
            idle: no step of the request is in flight.

        Raises:
            ConfigError: asked before.
        """
        if self._rested:
            raise ConfigError("rest: these slots were given back before")
        self._over = self._rested = True
        every = [slot for slot in self._every() if slot not in self._given]
        written = set() if idle else {self.working, *(write.slot for write in self._writes)}
        busy = written | self._read
        return Rest(
            tuple(slot for slot in every if slot not in busy),
            tuple(slot for slot in every if slot in busy),
        )

    # ---- helpers

    def _states(self) -> list[Saved]:
        """Those that are saved or being saved, and were not rejected."""
        writing = [Saved(write.slot, write.position) for write in self._writes if write.valid]
        return self._confirmed + writing

    def _every(self) -> list[int]:
        saved = [state.slot for state in self._confirmed]
        return [self.working, *self._free, *saved, *(write.slot for write in self._writes)]

    def _check_running(self) -> None:
        if self._over:
            raise ConfigError("slots: the request is over")


__all__ = ["RequestSlots", "Rest", "Saved"]
