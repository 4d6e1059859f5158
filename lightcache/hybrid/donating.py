"""What requests leave: saved states become checkpoints, and slots, blocks and tails go back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Pages
from lightcache.errors import LightcacheError
from lightcache.hybrid.checkpoints import Path
from lightcache.hybrid.planning import HybridParts
from lightcache.hybrid.requests import HybridRequest
from lightcache.hybrid.saving import RequestSlots, Rest, Saved
from lightcache.leases import Allocation
from lightcache.manager.request import Request
from lightcache.manager.transfers import OnEnd, State

if TYPE_CHECKING:
    from lightcache.hybrid.copiers import Copying, StateCopier

# ---- Tail eviction: KV after the last checkpoint of a path


class TailEviction:
    """Evicts KV of ended requests after the last position from which a request could continue."""

    def __init__(self, parts: HybridParts) -> None:
        """Notes no request yet."""
        self._parts = parts
        self._waiting: list[tuple[Request, Path]] = []

    def note(self, request: HybridRequest) -> None:
        """Note a request that ends, before the KV manager releases it."""
        path = self._parts.path_so_far(request)
        if path is not None:
            self._waiting.append((request.inner, path))

    def poll(self) -> None:
        """Evict tails that no copy uses any more."""
        still = []
        for running, path in self._waiting:
            if self._parts.manager.has_ended(running):
                with contextlib.suppress(LightcacheError):  # then eviction takes it in its order
                    self._drop(running, path)
            else:
                still.append((running, path))
        self._waiting = still

    def _drop(self, request: Request, path: Path) -> None:
        parts, space = self._parts, request.space
        if space is None or not parts.inner.weights.is_valid(space):
            return
        last_ready = parts.checkpoints.last_ready(path)
        begin = 0 if last_ready is None else last_ready[1] * parts.step
        dropped = parts.manager.drop_keys(
            space, request.host_chain.keys, request.device_chain.keys, begin
        )
        parts.checkpoints.counts.update(dropped_tokens=sum(dropped.values()))


# ---- Promotion: saved states become checkpoints, and slots of ended requests are given back


class Donor:
    """Saves and ends of requests for one `HybridManager`, which holds its lock around every
    call."""

    def __init__(self, parts: HybridParts, drop_tails: bool) -> None:
        """No request saves yet.

        Args:
            drop_tails: see `HybridConfig`.
        """
        self._parts = parts
        self.ending: list[HybridRequest] = []
        """Ended requests that still hold slots, or blocks of windows."""
        self._tails = TailEviction(parts) if drop_tails else None

    @property
    def _copier(self) -> StateCopier:
        copier = self._parts.checkpoints.copier
        assert copier is not None  # a manager with states was made with one
        return copier

    # ---- while a request runs

    def copy(self, pairs: list[tuple[HybridRequest, int, int]], stream: Any) -> tuple[Pages, Pages]:
        """Copy from slot to slot of each request, in one launch. Takes over checkpoints that are
        being restored. Returns the sources and targets."""
        requests, sources, targets = zip(*pairs, strict=True)
        slots = slot_array(sources), slot_array(targets)
        self._launch(requests, self._copier.copy, (*slots, stream), slots[1])
        return slots

    def zero(self, running: list[HybridRequest], stream: Any) -> Pages:
        """Set the working slots of these requests to zero. Returns them."""
        slots = slot_array([request.own_slots.working for request in running])
        if running:
            self._launch(running, self._copier.zero, (slots, stream), slots)
        return slots

    def _launch(
        self,
        running: Sequence[HybridRequest],
        call: Callable[..., Copying],
        arguments: tuple[Any, ...],
        written: Pages,
    ) -> None:
        """Launch what writes these slots of these requests. What it reads of checkpoints stays
        pinned until it has been executed.

        Args:
            arguments: of the call; the last one is the stream.
        """
        restoring = [request for request in running if request.found is not None]
        self._parts.checkpoints.transfers.launch(
            written,
            call,
            arguments,
            lambda: self._copier.copy(*_NO_SLOTS, arguments[-1]),
            *(partial(setattr, request, "found", None) for request in restoring),
            of=[request.transfers for request in running],
            leases=[request.found[1] for request in restoring if request.found is not None],
        )

    def exchange(self, request: HybridRequest, slots: RequestSlots) -> list[int]:
        """Turn saved states of the prompt into checkpoints, if a replacement slot is free for each;
        first the state to keep. Returns the positions of the new checkpoints."""
        checkpoints = self._parts.checkpoints
        waiting = [state for state in slots.confirmed if state.position <= request.match.tokens]
        if checkpoints.slots is None or not waiting or not request.sound():
            return []
        donated = []
        for state in sorted(waiting, key=lambda each: each.position != slots.keep):
            if self._path(request, state.position) is None:
                continue
            with checkpoints.lock:  # while a slot is loose
                try:
                    replacement = checkpoints.acquire(1)
                except LightcacheError:
                    break
                with replacement:
                    (slot,) = replacement.pages.tolist()
                    slots.exchange(slot, state.position, taking_over(replacement))
                if self._give(request, state):
                    donated.append(state.position)
        return donated

    def lend(self, request: HybridRequest, slots: RequestSlots, newest: Saved) -> bool:
        """Without device slots for checkpoints: the host gets a copy, the request keeps the
        slot."""
        if not request.sound():
            return False
        slots.begin_read(newest.slot)  # before the copy begins, which reports its end
        known = len(request.transfers)
        try:
            donated = self._give(request, newest, lambda _: slots.end_read(newest.slot))
        finally:
            if len(request.transfers) == known:
                slots.end_read(newest.slot)
        if donated and newest.position == slots.keep:
            slots.keep = None
        return donated

    def _give(self, request: HybridRequest, state: Saved, on_end: OnEnd | None = None) -> bool:
        """Turn a slot into a checkpoint. The request no longer owns it."""
        parts = self._parts
        path = self._path(request, state.position)
        if path is None:
            parts.checkpoints.give_back([state.slot])
            return False
        transfer = parts.checkpoints.donate(
            state.slot,
            path,
            state.position // parts.step,
            host="host" in request.inner.options.tiers,
            fork=state.position == request.match.branching,
            of=request.transfers,
            on_end=on_end,
        )
        return parts.checkpoints.slots is not None or transfer is not None

    def _path(self, request: HybridRequest, position: int) -> Path | None:
        """None: the request may not save, or its keys are unknown since its tokens were not
        reported."""
        path = self._parts.path_so_far(request)
        long = path is not None and len(path.keys) >= position // self._parts.step
        return path if long else None

    # ---- when a request ends

    def end(
        self,
        running: list[HybridRequest],
        kept: Sequence[int | None],
        at: Sequence[int | None],
        publish: bool,
    ) -> list[int]:
        """See `HybridManager.release_many`. The requests are in `ending` already: slots are given
        back also after an exception. Returns the position of the last state that each donated."""
        positions = []
        try:
            for request in running:
                request.let_go()
                if request.loading is not None and request.loading.state is State.QUEUED:
                    request.loading.cancel()
            for request, limit, position in zip(running, kept, at, strict=True):
                positions.append(self._donate_last(request, limit, position) if publish else 0)
        finally:
            self._leave(running)
            if self._tails is not None:
                for request in running:
                    self._tails.note(request)
        return positions

    def _donate_last(self, request: HybridRequest, kept: int | None, at: int | None) -> int:
        with self._parts.checkpoints.lock:  # while slots are loose
            states = self._last(request, kept, at)
            return max((each.position for each in states if self._give(request, each)), default=0)

    def _leave(self, running: list[HybridRequest]) -> None:
        """Note the remaining slots of requests whose last steps were on one stream: they go back
        once no copy uses them. May be repeated after an interrupt: `leaving` is set last."""
        rests = [(request, _rest(request)) for request in running if request.leaving is None]
        busy = [slot for _, rest in rests for slot in rest.busy]  # a launched step may write them
        if busy:
            writing = [request for request, rest in rests if rest.busy]
            nothing = *_NO_SLOTS, running[0].ended[1]
            try:  # it tells when all work launched before has been executed
                self._launch(writing, self._copier.copy, nothing, slot_array(busy))
            except Exception as error:  # the device failed: it writes nothing more
                self._parts.checkpoints.transfers.foreign.note(error)
        for request, rest in rests:
            request.leaving = [*rest.free, *rest.busy]

    def _last(self, request: HybridRequest, kept: int | None, position: int | None) -> list[Saved]:
        """The saved states to donate: the newest, preceded by the one to keep."""
        running, slots = self._parts.inner.requests.get(request.inner.id), request.slots
        if slots is None or running is None or request.states is None or not request.sound():
            return []
        limit = running.publishable()
        if kept is not None:
            limit = min(limit, kept)
        # At the checkpoint itself nothing was computed, and its copy may still be in flight.
        fits = (
            position is not None
            and position % self._parts.step == 0
            and position > request.match.usable
        )
        newest = slots.donate(limit, working_at=position if fits else None)
        return [state for state in (slots.donate_kept(limit), newest) if state is not None]

    def poll(self) -> None:
        """Give back slots and blocks that no copy uses."""
        still, checkpoints, windows = [], self._parts.checkpoints, self._parts.windows
        for request in self.ending:
            self._leave([request])
            windows.leave(request)
            if request.busy:
                still.append(request)
                continue
            windows.give_all_back(request)
            if request.leaving:
                checkpoints.give_back(request.leaving)
        self.ending = still
        if self._tails is not None:
            self._tails.poll()

    @property
    def going(self) -> int:
        """Number of ended requests that still hold slots or blocks."""
        return len(self.ending)

    @property
    def slots_alone(self) -> int:
        """Of these, those whose KV has been given back already."""
        has_ended = self._parts.manager.has_ended
        return sum([has_ended(request.inner) for request in self.ending])


def slot_array(numbers: Sequence[int]) -> Pages:
    """Slots as the core and copiers take them."""
    return np.array(numbers, np.int32)


_NO_SLOTS = slot_array([]), slot_array([])


def taking_over(slots: Allocation) -> partial[None]:
    """For `together`: the slots are no longer those of the object that took them."""
    return partial(setattr, slots, "ended", True)


def _rest(request: HybridRequest) -> Rest:
    return Rest((), ()) if request.slots is None else request.slots.rest(idle=request.ended[0])


__all__ = ["Donor", "TailEviction", "slot_array", "taking_over"]
