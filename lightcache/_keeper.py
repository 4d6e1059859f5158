"""Who holds the pages of a copy: see `lightcache.transfers`, which says why."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from lightcache.errors import Abandoned, LeaseLost, LightcacheError, TransferFailed
from lightcache.kernels.transfer import Engine, Transfer
from lightcache.leases import Lease
from lightcache.reservations import Reservation, Shard

_in_doubt: list[tuple[Engine, Keeper]] = []
"""Whether these copies have begun, nobody knows."""


class Keeper:
    """Owns a reservation, shard or lease for as long as a copy may touch its pages. Any thread may
    call it."""

    def __init__(self, held: Reservation | Shard | Lease) -> None:
        """Owns nothing yet."""
        self._owns = False
        self._ended = False
        self._held = held
        self._writes = not isinstance(held, Lease)
        # Re-entrant: a garbage collection inside of `over` may drop the Offload, which aborts.
        self._lock = threading.RLock()
        self._given_up = False
        self._publishing = False
        self._error: LightcacheError | None = None
        self.ready: bool | None = None
        """See `Offload.ready`."""

    def begin(self, engine: Engine, call: Callable[[], Transfer]) -> Transfer:
        """Take the pages over and begin the copy; give them back if the engine refuses."""
        self._take()
        transfer = None
        try:
            transfer = call()
            transfer.when_done(self.over)
        except BaseException as error:
            refused = isinstance(error, LightcacheError) and not isinstance(error, TransferFailed)
            if refused and transfer is None:
                self._hand_back()
            else:
                _in_doubt.append((engine, self))
            raise
        return transfer

    # In both of these an interrupt in the middle leaves two owners, of whom the second to end it
    # finds nothing left to end; never none.

    def _take(self) -> None:
        self._owns = True
        self._held._done = True

    def _hand_back(self) -> None:
        self._held._done = False
        self._owns = False

    def over(self, ok: bool) -> None:
        """The copy is over: publish or abandon, and unpin. More than once is once.

        Raises:
            LockTimeout: could not abandon yet; call again.
        """
        with self._lock:
            if self._ended or not self._owns:
                return
            if self._held._index._unusable():  # closed: given back there, or a forked child
                self._error = self._error or Abandoned("the cache was closed before the copy ended")
            else:
                if self._writes:
                    self._publish(ok)
                self._end()
            if self.ready is None:
                self.ready = False
            self._ended = True

    def _publish(self, ok: bool) -> None:
        if self._given_up or not ok:
            return
        if self._publishing:
            self._error = self._error or Abandoned(
                "publish: it was interrupted; the pages may be ready or abandoned, match to see"
            )
            return
        self._publishing = True
        try:
            self.ready = self._publish_held()
        except LightcacheError as error:
            self._error = error

    def _publish_held(self) -> bool:
        held = self._held
        if isinstance(held, Shard):
            return held._publish()
        assert isinstance(held, Reservation)
        if not held._publish_one(0, held.pages):
            raise LeaseLost("publish: the reservation's shard was adopted by another client")
        return held._ready

    def _end(self) -> None:
        if isinstance(self._held, Lease):
            self._held._let_go()
        else:
            self._held._end()

    def abort(self) -> None:
        """Abandon now what is not published; unpin when the copy is over."""
        with self._lock:
            if self._ended or not self._owns or self._held._index._unusable():
                return
            self._given_up = True
            if not isinstance(self._held, Lease):
                self._held._give_up()

    def check(self) -> None:
        """Raise what went wrong when it was over."""
        if self._error is not None:
            raise self._error

    def __del__(self) -> None:
        """The copy is over, and the call that would have said so was lost to an interrupt."""
        if getattr(self, "_owns", False) and not self._ended:
            self._given_up = True
            self.over(False)


def in_doubt(held: object) -> bool:
    """Whether a copy of these pages may have begun, though the call that begins it has raised."""
    return any(keeper._held is held for _, keeper in list(_in_doubt))


def settle() -> None:
    """End what was in doubt, of engines that copy nothing now."""
    for entry in list(_in_doubt):
        engine, keeper = entry
        if engine.poll() == 0:
            keeper.over(False)
            with contextlib.suppress(ValueError):  # another thread was faster
                _in_doubt.remove(entry)
