"""What submissions of one engine share: joined plans, and the streams of each direction."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightcache.kernels.rows import Plan
from lightcache.kernels.staging import Ring

if TYPE_CHECKING:
    from lightcache.kernels.device_transfer import DeviceTransfer
    from lightcache.kernels.launch import Tables


@dataclass(frozen=True)
class Joined:
    """A plan and its tables on the device, kept while transfers use them."""

    plan: Plan
    tables: Tables


class Lane:
    """One direction: its streams, and its ring once something is staged."""

    def __init__(self, device: Any, to_page: bool) -> None:
        """Nothing is allocated yet.

        Args:
            to_page: whether it offloads.
        """
        self.to_page = to_page
        self.kernel, self.copy, self.direct = (device.stream() for _ in range(3))
        self.ring: Ring | None = None
        self.going: deque[DeviceTransfer] = deque()
        """Transfers that may go on, oldest first."""

    @property
    def last(self) -> Any:
        """The stream that ends a staged transfer."""
        return self.copy if self.to_page else self.kernel
