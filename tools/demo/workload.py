"""What is asked in a demo or a benchmark: conversations that are made up, or a published trace.

A workload is a state machine in the process that asks: pure Python and numpy, it never waits and is
not thread-safe. The same arguments and the same answers give the same turns with the same numbers,
in whatever order the answers arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightcache.tools.demo.conversations import conversations
from lightcache.tools.demo.traces import trace
from lightcache.tools.demo.turns import Turn

__all__ = ["Turn", "Workload", "conversations", "trace"]


class Workload(Protocol):
    """Turns, each of which may be asked as soon as it is returned, and is returned once."""

    @property
    def total(self) -> int:
        """Turns in all, known from the start."""
        ...

    @property
    def vocabulary(self) -> int:
        """Token ids are 0 to this, exclusive."""
        ...

    def begin(self) -> list[Turn]:
        """The turns that wait for nothing, by number. To be called once.

        Raises:
            ConfigError: it was called before.
        """
        ...

    def answered(self, number: int, answer: Sequence[int]) -> list[Turn]:
        """Report the answer to a turn, and get the turns that it makes possible, by number.

        Raises:
            ConfigError: no such turn, not handed out, answered before, or no token ids of the
                vocabulary. The turn still waits for its answer in the last case.
        """
        ...
