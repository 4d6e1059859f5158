"""Donating: saved states of requests become checkpoints, and slots of ended ones go back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Pages
from lightcache.errors import ConfigError, LeaseLost, LightcacheError
from lightcache.hybrid.requests import HybridRequest
from lightcache.hybrid.slots import RequestSlots, Saved
from lightcache.hybrid.spaces import Path
from lightcache.hybrid.tails import Tails
from lightcache.manager.traffic import Movement, State

if TYPE_CHECKING:
    from lightcache.hybrid.manager import HybridManager


class Donor:
    """Saves and endings of one `HybridManager`. Its lock is around every call."""

    def __init__(self, owner: HybridManager) -> None:
        """Nobody saves yet."""
        self._owner = owner
        self._going: list[HybridRequest] = []
        self._tails = Tails(owner)
        self._lent: list[tuple[Movement, RequestSlots, int]] = []
        """Slots of running requests that the host is getting a copy of."""

    # ---- while it runs

    def saving(self, one: HybridRequest, position: int) -> int | None:
        """See `HybridManager.saving`."""
        slots = _slots_of(one)
        if position < 1 or position % self._owner.step:
            raise ConfigError(
                f"saving {one.id!r}: expected a position that is a multiple of "
                f"{self._owner.step}, found {position}; ask `save_plan`"
            )
        if one.states is None:
            return None
        self._exchange(one, slots)  # what found no slot in exchange, or waited for a load
        return slots.begin_save(position)

    def save(self, running: list[HybridRequest], positions: list[int], stream: Any) -> list[bool]:
        """See `HybridManager.save`."""
        pairs: list[tuple[HybridRequest, int, int]] = []
        saved = []
        for one, position in zip(running, positions, strict=True):
            slot = self.saving(one, position)
            saved.append(slot is not None)
            if slot is not None:
                pairs.append((one, _slots_of(one).working, slot))
        if pairs:
            self._copy(pairs, stream)
        return saved

    def _copy(self, pairs: list[tuple[HybridRequest, int, int]], stream: Any) -> None:
        owner = self._owner
        sources = np.array([pair[1] for pair in pairs], np.int32)
        targets = np.array([pair[2] for pair in pairs], np.int32)
        copying = owner.copier.copy(sources, targets, stream)
        copied = owner.checkpoints.traffic.copied(copying, targets, [])
        for one, _, _ in pairs:
            one.copies.append(copied)

    def saved(self, one: HybridRequest, position: int) -> bool:
        """See `HybridManager.saved`."""
        slots = _slots_of(one)
        slots.confirm(position)
        newest = slots.newest
        if newest is None or newest.position != position or position > len(one.prompt):
            return False  # rejected; or of decoding, of which the last is donated at the end
        if self._owner.checkpoints.slots is None:
            return self._lend(one, slots, newest)
        return position in self._exchange(one, slots)

    def _exchange(self, one: HybridRequest, slots: RequestSlots) -> list[int]:
        """Saved states of the prompt become checkpoints, if another slot can be had for each; that
        to keep first. Returns the positions of those that did."""
        checkpoints = self._owner.checkpoints
        waiting = [state for state in slots.confirmed if state.position <= len(one.prompt)]
        if checkpoints.slots is None or not waiting or not one.sound():
            return []
        made = []
        for state in sorted(waiting, key=lambda each: each.position != slots.keep):
            if self._path(one, state.position) is None:
                continue
            try:
                (replacement,) = checkpoints.acquire(1).tolist()
            except LightcacheError:
                break
            given = slots.exchange(replacement, state.position)
            assert given is not None
            if self._give(one, given):
                made.append(given.position)
        return made

    def _lend(self, one: HybridRequest, slots: RequestSlots, newest: Saved) -> bool:
        """Without device slots for checkpoints: the host gets a copy, the slot stays."""
        if not one.sound():
            return False
        slots.begin_read(newest.slot)  # first: an interrupt leaves a copy that may read it for ever
        if not self._give(one, newest):
            slots.end_read(newest.slot)
            return False
        if newest.position == slots.keep:
            slots.keep = None
        self._lent.append((one.movements[-1], slots, newest.slot))
        self._look_at_lent()
        return True

    def _look_at_lent(self) -> None:
        for entry in list(self._lent):
            movement, slots, slot = entry
            if movement.over:
                slots.end_read(slot)
                self._lent.remove(entry)

    def _give(self, one: HybridRequest, state: Saved) -> bool:
        """A slot becomes a checkpoint. It is not the request's any more."""
        owner = self._owner
        path = self._path(one, state.position)
        if path is None:
            owner.checkpoints.give_back([state.slot])
            return False
        movement = owner.checkpoints.donate(
            state.slot,
            path,
            state.position // owner.step,
            host="host" in one.wishes.tiers,
            fork=state.position == one.match.branching,
            of=one.movements,
        )
        return owner.checkpoints.slots is not None or movement is not None

    def _path(self, one: HybridRequest, position: int) -> Path | None:
        """None: it may not be saved, or its keys are not known: its tokens were not reported."""
        owner, running = self._owner, self._owner.inner.running(one.id)
        if one.states is None or running is None or running.space is None:
            return None
        every = running.device_chain if owner.by_blocks else running.host_chain
        keys = owner.strided(every.keys)
        return Path(keys, one.states) if len(keys) >= position // owner.step else None

    # ---- when it ends

    def end(
        self, one: HybridRequest, kept: int | None, at: int | None, publish: bool, stream: Any
    ) -> int:
        """See `HybridManager.release`. Returns the position of the deepest state donated."""
        one.let_go()
        if one.loading is not None and one.loading.state is State.QUEUED:
            one.loading.cancel()
        self._going.append(one)  # first: whatever is raised behind this, its slots go back
        position, left = 0, []
        try:
            left = self._last(one, kept, at) if publish else []
            while left:
                if self._give(one, left[0]):
                    position = max(position, left[0].position)
                del left[0]
        finally:
            self._take_back(left)
            self._leave(one, at, stream)
            self._tails.note(one)
        return position

    def _take_back(self, states: list[Saved]) -> None:
        """States that were to be given, when giving one has failed. Nobody else can have got its
        slot meanwhile, under the manager's lock."""
        for state in states:
            with contextlib.suppress(LeaseLost):  # it has a key already, or went back
                self._owner.checkpoints.give_back([state.slot])

    def _leave(self, one: HybridRequest, at: int | None, stream: Any) -> None:
        """What a request still has goes back when no copy touches it."""
        if one.slots is None:
            return
        rest = one.slots.rest(idle=at is not None)
        one.leaving = [*rest.free]
        if rest.busy:  # a step that was launched may write them still
            self._mark(one, np.array(rest.busy, np.int32), stream)
            one.leaving += rest.busy  # not behind an interrupt: nobody knows how long it does

    def _mark(self, one: HybridRequest, busy: Pages, stream: Any) -> None:
        """Notice when all that was launched before has been executed."""
        nothing = np.zeros(0, np.int32)
        try:
            mark = self._owner.copier.copy(nothing, nothing, stream)
        except Exception as error:  # a device that failed writes nothing more
            self._owner.checkpoints.traffic.moves.foreign.note(error)
        else:
            one.copies.append(self._owner.checkpoints.traffic.copied(mark, busy, []))

    def _last(self, one: HybridRequest, kept: int | None, at: int | None) -> list[Saved]:
        """The saved states that are donated: the newest, and before it the one to keep."""
        running, slots = self._owner.inner.running(one.id), one.slots
        if slots is None or running is None or one.states is None or not one.sound():
            return []
        most = running.publishable()
        if kept is not None:
            most = min(most, kept)
        # At the checkpoint itself nothing was computed, and the copy may still be on its way.
        fits = at is not None and at % self._owner.step == 0 and at > one.match.checkpoint
        newest = slots.donate(most, working_at=at if fits else None)
        return [state for state in (slots.donate_kept(most), newest) if state is not None]

    def poll(self) -> None:
        """Give back what no copy touches."""
        self._look_at_lent()
        still, checkpoints = [], self._owner.checkpoints
        for one in self._going:
            if one.busy:
                still.append(one)
            else:
                checkpoints.give_back(one.leaving)
        self._going = still
        self._tails.poll()

    @property
    def going(self) -> int:
        """Requests that have ended and hold slots still."""
        return len(self._going)


def _slots_of(one: HybridRequest) -> RequestSlots:
    if one.slots is None:
        raise ConfigError(f"the request {one.id!r} has no slots; restore it first")
    return one.slots


__all__ = ["Donor"]
