"""What is taken from an index and given back: once, by name, by leaving a `with`, or with the last
reference to it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightcache.page_index import PageIndex


class Borrowed:
    """Base of `Lease`, `Held`, `Reservation` and `Shard`: how they end.

    An object is made before the call that takes, and holds what the core wrote into its arrays. In
    `__init__` `_done` is to be True, or not there, until there is something to give back; in `_end`
    it is to become True behind the call that gives back, which may be made again. So an interrupt
    at any point leaks nothing, and gives nothing back that is another's.
    """

    __slots__ = ()

    _index: PageIndex
    _done: bool
    """Given back, or never taken."""

    def _end(self) -> None:
        """Give it back. May be called again after an interrupt anywhere in it."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Give it back without a word when there is nothing left to give back: closed, forked."""
        if not self._index._unusable():
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._done:
            self._let_go()

    def __del__(self) -> None:
        # getattr: an interrupt may come before __init__ has set it.
        if not getattr(self, "_done", True) and not self._index._unusable():
            self._let_go()


__all__ = ["Borrowed"]
