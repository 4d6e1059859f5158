"""Copies of states between slots of one device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages
from lightcache.errors import ConfigError


class Copying(Protocol):
    """Copies that were launched."""

    def done(self) -> bool:
        """Whether they have been executed: whoever reads on whatever stream finds them. Does not
        block.

        Raises:
            TransferFailed: the device has failed.
        """


class StateCopier(Protocol):
    """Copies states from slot to slot. A launch for all pairs; launches of one stream happen in
    order, and before what is launched there later."""

    def copy(self, sources: Pages, targets: Pages, stream: Any = None) -> Copying:
        """Copy slot sources[i] to slot targets[i], int32. No slot is both a source and a target, or
        a target twice. Without any pair it tells when all that was launched on the stream before
        has been executed.

        Args:
            stream: of the device; None: the current one, on which the model computes.
        """

    def zero(self, slots: Pages, stream: Any = None) -> Copying:
        """Set slots to zero: the state before the first token."""


class _Done:
    """Nothing goes on."""

    def done(self) -> bool:
        return True


class ArrayCopier:
    """For states in an array of the host, slot by slot: copies at once."""

    def __init__(self, states: npt.NDArray[Any]) -> None:
        """Args:
        states: of shape (slots, ...).
        """
        self.states = states

    def copy(self, sources: Pages, targets: Pages, stream: Any = None) -> Copying:
        """See `StateCopier`."""
        del stream
        if len(sources) != len(targets) or len(np.intersect1d(sources, targets)):
            raise ConfigError(
                f"copy: expected pairs of slots, none both read and written, found {sources} to "
                f"{targets}"
            )
        self.states[targets] = self.states[sources]
        return _Done()

    def zero(self, slots: Pages, stream: Any = None) -> Copying:
        """See `StateCopier`."""
        del stream
        self.states[slots] = 0
        return _Done()


__all__ = ["ArrayCopier", "Copying", "StateCopier"]
