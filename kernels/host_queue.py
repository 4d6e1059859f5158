"""Which transfer of a host engine runs next."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from lightcache.kernels.host_engine import HostTransfer
from lightcache.shm.errors import Detached


class TransferQueue:
    """Runs transfers of one direction one after another, and keeps each until its end is noticed.

    Appending to `open` is all that it takes to begin one: a thread that is interrupted right behind
    that leaves a transfer that the next `begin`, `poll` or `close` sets going. The threads hold
    this queue and not the engine, so an engine that is dropped still finishes what it began.
    """

    def __init__(self, threads: int) -> None:
        """With so many helpers, shared by both directions; each has a thread of its own as well."""
        name = "lightcache-copy"
        self.open: list[HostTransfer] = []
        self._threads = threads
        self._lock = threading.Lock()
        self._helpers = ThreadPoolExecutor(threads, f"{name}-helper")
        self._lines = [ThreadPoolExecutor(1, f"{name}-{way}") for way in ("load", "offload")]
        self._last: list[Future[None] | None] = [None, None]

    def begin(self, transfer: HostTransfer) -> None:
        """Run it behind those before it. Does not block.

        Raises:
            Detached: closed meanwhile; it does not run.
        """
        with self._lock:
            self.open[:] = [each for each in self.open if not each.over or each.waited_for]
        self.open.append(transfer)
        try:
            self._go_on(transfer.to_host)
        except RuntimeError as error:  # closed by another thread, or Python is ending
            with self._lock:
                if transfer.claimed:  # all the same
                    return
                transfer.claimed = True
                self.open.remove(transfer)
            raise Detached(f"the engine takes no transfers any more: {error}") from None

    def _go_on(self, to_host: bool) -> None:
        self._last[to_host] = self._lines[to_host].submit(self._drain, to_host)

    def _drain(self, to_host: bool) -> None:
        while (transfer := self._claim(to_host)) is not None:
            transfer.run(self._helpers.submit, self._threads)

    def _claim(self, to_host: bool) -> HostTransfer | None:
        with self._lock:
            for transfer in self.open:
                if transfer.to_host == to_host and not transfer.claimed:
                    transfer.claimed = True
                    return transfer
        return None

    def poll(self) -> int:
        """Make the calls that wait for transfers that are over; how many are not."""
        for transfer in list(self.open):
            if transfer.over:
                transfer.notice()
                with self._lock:
                    self.open[:] = [each for each in self.open if each is not transfer]
            elif not transfer.claimed:
                last = self._last[transfer.to_host]
                if last is None or last.done():
                    self._go_on(transfer.to_host)
        return len(self.open)

    def close(self) -> None:
        """Wait for all of them, and end the threads. May be called again."""
        for transfer in list(self.open):
            if not transfer.claimed:
                self._go_on(transfer.to_host)
        for line in self._lines:
            line.shutdown()
        self._helpers.shutdown()
        self.poll()


__all__ = ["TransferQueue"]
