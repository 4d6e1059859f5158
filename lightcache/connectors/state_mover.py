"""Moves states between pages and the tensors of one sequence."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightcache import Lease, Reservation
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.state_pages import StatePages, planes_of_states
from lightcache.held import Held
from lightcache.manager.movers import EngineMover, Moving, Slots

States = dict[int, dict[str, Any]]
"""Tensors of one state, by layer and part."""


class StateMover:
    """A `Mover` between host pages and slots that are numbers only while a copy is asked for: each
    stands for tensors of its own."""

    shards = 1

    def __init__(self, pages: StatePages, pool: Pooled) -> None:
        """No slot stands for anything."""
        self._pages, self._pool = pages, pool
        self._lent: dict[int, States] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lent(self, states: States) -> Iterator[int]:
        """A slot that stands for these tensors within the `with`. A copy that goes on behind it
        keeps them alive."""
        with self._lock:
            slot = next(number for number in itertools.count() if number not in self._lent)
            self._lent[slot] = states
        try:
            yield slot
        finally:
            del self._lent[slot]

    def load(self, lease: Lease, slots: Slots, first: int) -> Moving:
        """See `Mover`. Blocks for pages that are not pinned yet, as the others do."""
        self._pool.wait_for(lease.pages)
        return self._engine(slots).load(lease, _places(slots), first)

    def offload(self, new: Reservation, slots: Slots) -> Moving:
        """See `Mover`."""
        try:
            self._pool.wait_for(new.pages)
            return self._engine(slots).offload(new, _places(slots))
        except BaseException:
            new.release()  # also behind what is no error of ours, when nobody else does
            raise

    def save(self, held: Held, slots: Slots) -> Moving:
        """See `Mover`."""
        self._pool.wait_for(held.pages)
        return self._engine(slots).save(held, _places(slots))

    def _engine(self, slots: Slots) -> EngineMover:
        """For the one slot among these."""
        planes = planes_of_states(self._pages, self._lent[int(slots.max())])
        return EngineMover(self._pool.engine, planes=planes)


def _places(slots: Slots) -> Slots:
    """Of tensors that hold one state, the only place is 0."""
    return np.where(slots < 0, -1, 0).astype(np.int64)


__all__ = ["StateMover", "States"]
