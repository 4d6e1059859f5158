"""What is on its way through a device engine, and what it uses meanwhile.

It knows nothing of the engine: transfers refer to it, and an engine that is dropped leaves it
behind until the last copy is over. Staging memory, index buffers and the pages themselves must not
be given to anybody else before.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from lightcache.kernels.lanes import Lane
from lightcache.kernels.pacing import Pacer
from lightcache.kernels.staging import Events, IndexBlock, IndexBlocks
from lightcache.shm.errors import Detached

if TYPE_CHECKING:
    from lightcache.kernels.device_transfer import DeviceTransfer


class Traffic:
    """Transfers of both directions, the buffers that they share, and the pages' memory."""

    def __init__(self, device: Any, copier: Any, memory: Any, rate: float | None) -> None:
        """Acquires the memory, last of all but the pacer.

        Raises:
            Detached: the memory is closed.
        """
        self.device = device
        self.lock = threading.RLock()
        """Held while anything is enqueued, asked about or given back; never while calls are made
        or anything is waited for."""
        self.events, self.blocks = Events(device), IndexBlocks(device, copier)
        self.offload, self.load = Lane(device, True), Lane(device, False)
        self.finished: deque[DeviceTransfer] = deque()
        """Over, but somebody is still to be told."""
        self.closed = False
        self.pacer: Pacer | None = None
        self._pid = os.getpid()
        self._memory: Any = None
        acquire = getattr(memory, "acquire", None)
        if acquire is not None:
            acquire()
            self._memory = memory
        if rate:
            try:
                self.pacer = Pacer(rate)
            except BaseException:
                self._release()
                raise

    def check_open(self) -> None:
        """Raise Detached: closed, or a forked child, which has nothing of the device."""
        if self.closed:
            raise Detached("this transfer engine is closed; make another one")
        if os.getpid() != self._pid:
            raise Detached("this transfer engine belongs to the parent process; make one here")

    # ---- with the lock held

    def recycle(self, lane: Lane) -> None:
        """Take buffers back from what is over, without telling anybody yet."""
        while lane.going and lane.going[0].settle():
            self._finish(lane.going.popleft())

    def _finish(self, transfer: DeviceTransfer) -> None:
        while self.finished and not self.finished[0].waited_for:  # told by `done` or `wait`
            self.finished.popleft()
        if transfer.waited_for:
            self.finished.append(transfer)

    def failed(self, transfer: DeviceTransfer, error: BaseException, streams: list[Any]) -> None:
        """Not all of it went. What did must still be waited for: on these streams."""
        transfer.fail(error)
        for stream in streams:
            try:
                transfer.mark(self.events.recorded(stream))
            except Exception:
                with contextlib.suppress(Exception):  # the device is lost, and nothing in flight
                    stream.synchronize()

    def settled(self, marks: list[Any], block: IndexBlock | None) -> None:
        """Nobody uses these any more."""
        self.events.give(marks)
        if block is not None:
            self.blocks.give(block)

    # ---- without it

    def poll(self) -> int:
        """See `Engine.poll`."""
        if os.getpid() != self._pid:
            self.check_open()
        with self.lock:
            going = 0
            for lane in (self.offload, self.load):
                self.recycle(lane)
                for each in [each for each in lane.going if each.settle()]:
                    lane.going.remove(each)
                    self._finish(each)
                going += len(lane.going)
        self._tell()
        return going

    def _tell(self) -> None:
        """Make the calls of what is over. One that raises holds back none of the others; an
        interrupt leaves those to the next poll."""
        first: Exception | None = None
        while self.finished:
            try:
                transfer = self.finished.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                transfer.run_calls()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Wait for what goes on, tell those who wait, let the memory go. After an interrupt a
        second call does the rest; then nothing, and nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            self.closed = True
        try:
            self._drain()
        finally:
            with self.lock:
                idle = not (self.offload.going or self.load.going)
            if idle:
                self._end()

    def _drain(self) -> None:
        first: Exception | None = None
        going = 1
        while going:
            try:
                going = self.poll()
            except Exception as error:  # of a call, which is not made again
                first = first or error
                continue
            with self.lock:
                left = [*self.offload.going, *self.load.going]
            for transfer in left:
                transfer.sleep()
        if first is not None:
            raise first

    def _end(self) -> None:
        pacer, self.pacer = self.pacer, None
        if pacer is not None:
            pacer.close()
        self.offload.ring = self.load.ring = None
        self.blocks.clear()
        self._release()

    def _release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release()
