"""What submissions of one engine share: joined plans, and the streams of each direction."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from lightcache.kernels.rows import Plan, RowClass
from lightcache.kernels.staging import Ring
from lightcache.kernels.work import Cuts

if TYPE_CHECKING:
    from lightcache.kernels.device_transfer import DeviceTransfer


class Joined:
    """A plan with its tables on the device and its kernels. Kept while transfers use it."""

    def __init__(self, plan: Plan, device: Any, launcher: Any) -> None:
        """Copies the tables; blocks until they are there."""
        self.plan = plan
        self._launcher = launcher
        self._tables = [torch.from_numpy(each.table).to(device.name) for each in plan.classes]
        self._launches: dict[tuple[bool, bool], list[tuple[RowClass, Any]]] = {}
        self._parts: dict[tuple[int, int], list[slice]] = {}
        self._cuts: dict[int, Cuts] = {}

    def launches(self, packed: bool, to_page: bool) -> list[tuple[RowClass, Any]]:
        """A launch for each class. Compiles what was not asked for before."""
        found = self._launches.get((packed, to_page))
        if found is None:
            found = [
                (each, self._launcher.bind(each, table, packed, to_page))
                for each, table in zip(self.plan.classes, self._tables, strict=True)
            ]
            self._launches[packed, to_page] = found
        return found

    def parts(self, cells: tuple[int, int]) -> list[slice]:
        """For each class, which of its cells are among `cells[0]` to `cells[1] - 1`."""
        found = self._parts.get(cells)
        if found is None:
            found = self._parts[cells] = [each.part(*cells) for each in self.plan.classes]
        return found

    def cuts(self, slot_bytes: int) -> Cuts:
        """How its pages pass through slots of a size."""
        if slot_bytes not in self._cuts:
            self._cuts[slot_bytes] = Cuts(self.plan, slot_bytes)
        return self._cuts[slot_bytes]


class Lane:
    """One direction: its streams, and its ring once something is staged."""

    def __init__(self, device: Any, to_page: bool) -> None:
        """Nothing is allocated yet.

        Args:
            to_page: whether it offloads.
        """
        self.to_page = to_page
        self.kernel, self.copy = device.stream(), device.stream()
        # The index of a load goes with its first pages: on another stream it would wait for those
        # of the transfers before it.
        self.upload = device.stream() if to_page else self.copy
        self.kernel_handle = int(self.kernel.cuda_stream)
        self.directs = deque((device.stream(), device.stream()))
        """Two: while the last programs of one kernel wait for the bus, the next one begins."""
        self.ring: Ring | None = None
        self.going: deque[DeviceTransfer] = deque()
        """Transfers that may go on, oldest first."""

    def next_direct(self) -> Any:
        """The stream for the next direct transfer."""
        self.directs.rotate()
        return self.directs[0]

    @property
    def last(self) -> Any:
        """The stream that ends a staged transfer."""
        return self.copy if self.to_page else self.kernel
