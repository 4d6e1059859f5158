"""The loads of a forward pass, waited for layer by layer: docs/design/transfers.md, section 19."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError, LeaseLost, TransferFailed, WaitTimeout
from lightcache.kernels.moves import Engine, Move, Transfer
from lightcache.leases import Lease
from lightcache.page_transfers import Keeper, Slots, begun_with

WINDOW_BYTES = 64 << 20
"""Of a batch, that a window has at least: see `LayerLoads`."""


class _Item(NamedTuple):
    """What is to be loaded for a request."""

    lease: Lease
    move: Move


class _Copy(NamedTuple):
    """A transfer, and the requests that fail with it."""

    transfer: Transfer
    requests: tuple[Hashable, ...]


class LayerLoads:
    """The loads of several requests, for one forward pass. No wait for a layer ever raises.

        loads = LayerLoads(engine)
        loads.add("request 1", lease, slots)
        loads.start(after=[event])
        for layer in range(layers):
            loads.wait(layer)               # before the layer reads its KV
            ...
        failed = loads.finish()             # {request: error}

    On a GPU a stream waits, elsewhere the thread. One thread adds and starts; any threads wait.
    A dropped object gives back the leases that it has not started; copies in flight keep theirs
    until they end.
    """

    def __init__(self, engine: Engine, *, timeout: float = 30.0, window: int | None = None) -> None:
        """Nothing is loaded yet.

        Args:
            engine: of this rank.
            timeout: seconds from `start` until every wait ends and unfinished loads count as
                failed.
            window: layers that become ready together; None: as few as have 64 MiB of the batch, a
                power of two.

        Raises:
            ConfigError: numbers out of range.
        """
        if type(timeout) not in (int, float) or not 0 <= timeout <= threading.TIMEOUT_MAX:
            raise ConfigError(f"timeout: expected seconds, 0 or more, found {timeout!r}")
        if window is not None and (type(window) is not int or window < 1):
            raise ConfigError(f"window: expected a number of layers >= 1, found {window!r}")
        self.layers: tuple[int, ...] = engine.share.layers
        """Layers that move. For any other, `wait` waits for all."""
        self._engine, self._timeout, self._window = engine, float(timeout), window
        self._items: dict[Hashable, _Item] = {}
        self._copies: list[_Copy] = []
        self._errors: dict[Hashable, Exception] = {}
        self._end: float | None = None

    # ---- collecting

    def add(
        self,
        request: Hashable,
        lease: Lease,
        slots: Slots,
        *,
        first: int = 0,
        skip: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Load a lease's pages for a request, with the others. Takes the lease over: it is given
        back when its copy has ended, or by `cancel`.

        Args:
            slots, first, skip: see `Load`. Arrays are read in `start`: leave them alone until then.

        Raises:
            ConfigError: not a lease, a request that is here already, or started already; the lease
                is the caller's still.
        """
        if self._end is not None:
            raise ConfigError(
                "add: these loads were started; make new LayerLoads for the next pass"
            )
        if not isinstance(lease, Lease):
            raise ConfigError(f"lease: expected a Lease, found {type(lease).__name__}")
        if request in self._items:
            raise ConfigError(
                f"add: {request!r} is here already; cancel it first, or join its slots"
            )
        pages: Any = () if lease.ended else lease.pages
        self._items[request] = _Item(lease, Move(pages, slots, first, skip))

    def cancel(self, request: Hashable) -> bool:
        """Give back the lease of a request that was added. False: not here, or started before."""
        if self._end is not None or request not in self._items:
            return False
        self._items[request].lease.close()
        del self._items[request]
        return True

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._items)

    @property
    def nbytes(self) -> int:
        """Bytes that its copies move, those that have failed included."""
        return sum(copy.transfer.nbytes for copy in self._copies)

    # ---- the pass

    def start(self, **how: Any) -> None:
        """Begin all loads. Does not wait for them. What cannot begin has failed: see `finish`.

        Args:
            how: for `Engine.load`: streams, after, planes.

        Raises:
            ConfigError: started before.
        """
        if self._end is not None:
            raise ConfigError("start: these loads were started before; make new LayerLoads")
        # Until its copy is known a request has failed: an interrupt may come at any point.
        self._errors = {
            request: LeaseLost(f"{request!r}: its lease was released before its load")
            if item.lease.ended
            else TransferFailed(f"{request!r}: an interrupt came while its load was started")
            for request, item in self._items.items()
        }
        self._end = time.monotonic() + self._timeout
        sound = tuple(request for request, item in self._items.items() if not item.lease.ended)
        refused = self._begin(sound, how) if sound else None
        if refused is None:
            return
        for request in sound:  # each alone: what is wrong with one costs that one
            error: Exception | None = refused
            if len(sound) > 1 and not self._items[request].lease.ended:
                error = self._begin((request,), how)
            if error is not None:
                self._errors[request] = error

    def _begin(self, requests: tuple[Hashable, ...], how: dict[str, Any]) -> Exception | None:
        """Begin one transfer; returns why that was not possible."""
        items = [self._items[request] for request in requests]
        moves = [item.move for item in items]
        engine = self._engine
        try:
            window = self._layers_of(moves)
            given: Any = moves if len(moves) > 1 else moves[0]  # one page of one has a faster way
            call = partial(engine.load, given, window=window, **how)
            transfer = Keeper(*(item.lease for item in items)).begin(engine, call)
        except Exception as error:
            return error
        self._copies.append(_Copy(transfer, requests))
        for request in requests:
            del self._errors[request]
        return None

    def _layers_of(self, moves: Sequence[Move]) -> int | None:
        """Layers of a window; None: all of them in one."""
        layers = len(self.layers)
        if self._window is not None:
            return self._window if self._window < layers else None
        share, tokens = self._engine.share, sum(len(move.slots) for move in moves)
        nbytes = share.nbytes * tokens // self._engine.geometry.page_tokens
        window = 1
        while window < layers and nbytes * window < WINDOW_BYTES * layers:
            window *= 2
        return window if window < layers else None

    def wait(self, layer: int, stream: Any = None) -> None:
        """Wait until a layer is on the device, or its load has failed, or time is up. On a GPU the
        stream (None: the current one) waits, and this thread does not, except for a rate limit.

        Raises:
            ConfigError: not started.
        """
        end = self._started("wait")
        layers = (layer,) if layer in self.layers else self.layers
        for copy in self._copies:
            try:
                for each in layers:
                    left = max(0.0, end - time.monotonic())
                    copy.transfer.wait_layer(each, stream, timeout=left)
            except Exception as error:
                self._fail(copy, error)

    def done(self) -> bool:
        """Whether `finish` returns at once. Does not block.

        Raises:
            ConfigError: not started.
        """
        return time.monotonic() >= self._started("done") or not self.in_flight

    @property
    def in_flight(self) -> bool:
        """Whether copies may still write slots, those of failed requests included: after a deadline
        they do, until they end. Gives back the leases of copies that have ended."""
        return sum(self._going(handle) for handle in self._handles()) > 0

    def finish(self) -> dict[Hashable, Exception]:
        """Wait for the loads, until time is up, and return the requests that failed, with the
        error of each. What they loaded does not count: compute it, or end the request.

        Raises:
            ConfigError: not started.
        """
        end = self._started("finish")
        for copy in self._copies:
            try:
                copy.transfer.wait(max(0.0, end - time.monotonic()))
            except Exception as error:
                self._fail(copy, error)
        for handle in self._interrupted():
            with contextlib.suppress(Exception):  # it has failed, whatever becomes of it
                handle.wait(max(0.0, end - time.monotonic()))
        for item in self._items.values():
            item.lease.close()  # does nothing where a copy has or had it
        return dict(self._errors)

    # ---- inside

    def _started(self, call: str) -> float:
        if self._end is None:
            raise ConfigError(f"{call}: these loads were not started; call start first")
        return self._end

    def _fail(self, copy: _Copy, error: Exception) -> None:
        if isinstance(error, WaitTimeout):
            error = WaitTimeout(
                f"a load is in flight {self._timeout} s after its start; its slots are in use "
                "until `in_flight` is False"
            )
        for request in copy.requests:
            self._errors.setdefault(request, error)

    def _interrupted(self) -> list[Any]:
        """Copies that an engine has begun, though an interrupt, or an error, ended the call."""
        known = {request for copy in self._copies for request in copy.requests}
        leases = [item.lease for request, item in self._items.items() if request not in known]
        return [handle for lease in leases if (handle := begun_with(lease)) is not None]

    def _handles(self) -> list[Any]:
        return [copy.transfer for copy in self._copies] + self._interrupted()

    @staticmethod
    def _going(handle: Any) -> bool:
        try:
            return not handle.done()
        except TransferFailed:
            return False


__all__ = ["LayerLoads"]
