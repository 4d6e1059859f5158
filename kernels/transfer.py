"""What a transfer is asked for (`Move`) and how it is waited for (`Transfer`), on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import PageGeometry

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Move:
    """The pages of one request and the device slots they belong to.

    `slots[i]` is the place of token `first + i`, counted from the first token of `pages[0]`. So a
    request that begins or ends within a page has `first > 0` or fewer slots than its pages have
    tokens: only the rows of its own tokens are touched. For a group whose units are several tokens
    the slots still are tokens' slots, of which each unit takes its first one's, divided by the
    tokens of a unit. For recurrent states a slot is a state.
    """

    pages: Sequence[int] | npt.NDArray[Any]
    """Numbers of host pages, int."""
    slots: Sequence[int] | npt.NDArray[Any]
    """Device slots in host memory, int32 or int64; a negative one leaves its token out."""
    first: int = 0
    skip: npt.NDArray[np.bool_] | None = None
    """Pages to leave out, bool of shape (pages,): ready already, or missing."""


class Transfer(Protocol):
    """One call's copies. It is over when they all are; nothing cancels one."""

    nbytes: int
    """Bytes that move; from and to a device, those of tokens with a negative slot included."""

    def done(self) -> bool:
        """Whether it is over. Does not block.

        Raises:
            TransferFailed: it is over, and failed.
        """

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is over.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            WaitTimeout: it goes on; wait again.
            TransferFailed: it is over, and failed: nothing that it should have written counts.
        """

    def wait_on(self, stream: Any = None) -> None:
        """Let a stream of the device wait for it (None: the current one), not this thread. Under a
        rate limit, and without a device, this thread waits.

        Raises:
            TransferFailed: it has failed, as far as is known now.
        """

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Let a stream wait for the window that holds a layer, as `wait_on` does for all. Without
        windows: for all of it.

        Raises:
            ConfigError: a layer that is in none of its windows.
            TransferFailed: it has failed, as far as is known now.
        """

    def when_done(self, call: Callable[[bool], None]) -> None:
        """Call `call(ok)` once when it is over: from `done`, `wait`, or the engine's `poll` or
        `close`, or at once if it is over already."""


class Engine(Protocol):
    """Moves pages between a host pool and one rank's planes."""

    geometry: PageGeometry
    """Of the pages."""

    def offload(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Any = None,
        after: Any = (),
        window: int | None = None,
        planes: Any = None,
    ) -> Transfer:
        """Device to pages.

        Args:
            streams: that produce the source; None: the current one.
            after: events of whoever may still touch the destination.
            window: layers that `wait_layer` waits for together.
            planes: other DevicePlanes, for this call.
        """

    def load(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Any = None,
        after: Any = (),
        window: int | None = None,
        planes: Any = None,
    ) -> Transfer:
        """Pages to device."""

    def poll(self) -> int:
        """Notice transfers that are over, run their `when_done` calls; how many go on."""

    def close(self) -> None:
        """Wait for what goes on, give everything back."""
