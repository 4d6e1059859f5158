"""A storage in the memory of a Mooncake cluster."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError, StorageError
from lightcache.shm.waiting import Condition
from lightcache.storage.common import CLOSING, Deadline
from lightcache.storage.executor import Call, Executor
from lightcache.storage.protocol import ReadStatus, StorageSpec, WriteStatus
from lightcache.storage.remote.base import (
    TRAILER_BYTES,
    Read,
    RemoteStorage,
    Wrote,
    judge_page,
    make_trailer,
)
from lightcache.storage.remote.mooncake.client import (
    ANSWERING,
    BATCH,
    FAILED,
    LEASE_OVER,
    NOT_READY,
    SMALLER,
    Client,
    MooncakeOptions,
    absent,
    meaning,
    no_room,
)

# ---- Staging memory, through which pages pass to the store and back
#
# The store's client stops waiting for a transfer after a time of its own and leaves it running, so
# its bytes may arrive after the call has returned. So it never gets a caller's buffer.

_ALIGNED = 64  # bytes: each slot begins on a new cache line


class Staging:
    """Slots for a page and its trailer. Any thread may take slots and give them back."""

    def __init__(self, nbytes: int, page_bytes: int) -> None:
        """Maps the memory.

        Raises:
            ConfigError: it is too small for one page.
        """
        self.page_bytes = page_bytes
        self.value_bytes = page_bytes + TRAILER_BYTES
        self._stride = -(-self.value_bytes // _ALIGNED) * _ALIGNED
        self.slots = nbytes // self._stride
        if not self.slots:
            raise ConfigError(
                f"mooncake: buffer: expected {self._stride} bytes or more, a page and what stands "
                f"beside it, found {nbytes}"
            )
        self._memory = np.frombuffer(mmap.mmap(-1, self.slots * self._stride), np.uint8)
        self._changed = Condition()
        self._free = list(range(self.slots))
        self._lost = 0

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return int(self._memory.ctypes.data)

    @property
    def nbytes(self) -> int:
        """The bytes of all slots."""
        return self._memory.nbytes

    @property
    def lost(self) -> int:
        """The number of slots that the store may still write to."""
        with self._changed:
            return self._lost

    def take(self, most: int, deadline: Deadline | None) -> list[int]:
        """Take up to `most` free slots; waits for one until the deadline, if there is one."""
        with self._changed:
            if deadline is not None:
                left = min(deadline.left, threading.TIMEOUT_MAX)
                self._changed.wait_for(lambda: self._free or self._lost == self.slots, left)
            taken = self._free[-most:]  # the most recently used, still in the processor's caches
            del self._free[-most:]
            return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Return slots that are not used any more."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def lose(self, slots: Sequence[int]) -> None:
        """Give slots up, as the store may still touch them for an unknown time."""
        with self._changed:
            self._lost += len(slots)
            self._changed.notify_all()

    def addresses(self, slots: Iterable[int]) -> list[int]:
        """The address of each slot."""
        return [self.address + slot * self._stride for slot in slots]

    def fill(self, slot: int, key: bytes, page: memoryview) -> None:
        """Copy a page into a slot, with its trailer."""
        whole = self._whole(slot)
        np.copyto(whole[: self.page_bytes], np.frombuffer(page, np.uint8))
        whole[self.page_bytes :] = np.frombuffer(make_trailer(key, page), np.uint8)

    def empty(self, slot: int, page: memoryview) -> bytes:
        """Copy a page out of a slot. Returns the trailer, which verifies the copy: no other process
        can change the copy."""
        whole = self._whole(slot)
        np.copyto(np.frombuffer(page, np.uint8), whole[: self.page_bytes])
        return whole[self.page_bytes :].tobytes()

    def _whole(self, slot: int) -> npt.NDArray[np.uint8]:
        first = slot * self._stride
        return self._memory[first : first + self.value_bytes]


# ---- The storage

GROUP = 8 << 20  # bytes of pages in one call of the client, large enough to hide its overhead
PATIENCE = 55.0  # seconds; after 60 the client gives up on a transfer, which may continue
Flight = tuple[range, list[int], Call[list[int]]]
"""A group in flight: its positions in the batch, their slots, and the call that returns codes."""


class MooncakeStorage(RemoteStorage):
    """Values in memory that processes of the cluster lend. Pages pass through our staging memory
    (see above). Several groups of a call are in flight while others are copied."""

    scheme = "mooncake"
    asking = BATCH

    def __init__(self, options: MooncakeOptions, spec: StorageSpec) -> None:
        """Join the cluster.

        Raises:
            ConfigError: the buffer has no room for a page.
            StorageError: see `Client`.
        """
        super().__init__(spec)
        self._threads = options.threads
        self._staging = Staging(options.buffer, spec.page_bytes)
        share = max(1, self._staging.slots // (options.threads + 1))
        self._group = max(1, min(share, GROUP // spec.page_bytes, BATCH))
        try:  # before joining the cluster, as leaving it takes a second
            self._callers = Executor(options.threads, "mooncake")
            self._callers.start()
        except RuntimeError as error:
            raise StorageError(f"mooncake: {error}; give fewer threads=") from error
        memory = self._staging.address, self._staging.nbytes
        try:
            self._client = Client(options, self._staging, *memory)
        except BaseException:
            self._callers.close(0.0)
            raise

    def __repr__(self) -> str:
        return f"<MooncakeStorage {self.spec.name}, {self._staging.slots} slots>"

    # ---- see `RemoteStorage`

    def _exists(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        whole = self._names(names)
        return self._callers.ask(lambda: self._client.exists(whole), deadline)

    def _fetch(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Read]:
        unlike = list(dict.fromkeys(names))  # the client fills only one buffer of a repeated name
        wanted: dict[bytes, list[int]] = {name: [] for name in unlike}
        for i, name in enumerate(names):
            wanted[name].append(i)
        results: list[Read | None] = [None] * len(names)

        def landed(part: range, slots: Sequence[int], found: Sequence[int]) -> None:
            for which, slot, code in zip(part, slots, found, strict=True):
                for i in wanted[unlike[which]]:
                    results[i] = self._landed(names[i], views[i], slot, code)

        why = self._fly(unlike, deadline, lambda which, slot: None, self._get, landed)
        return [each or (ReadStatus.FAILED, why) for each in results]

    def _put(
        self, names: Sequence[bytes], views: Sequence[memoryview], deadline: Deadline
    ) -> list[Wrote]:
        found: list[Wrote | None] = [None] * len(names)

        def loaded(i: int, slot: int) -> None:
            self._staging.fill(slot, names[i], views[i])

        def landed(part: range, slots: Sequence[int], results: Sequence[int]) -> None:
            for i, code in zip(part, results, strict=True):
                found[i] = _wrote(code)

        why = self._fly(names, deadline, loaded, self._send, landed)
        return [each or (WriteStatus.FAILED, why) for each in found]

    def _remove(self, names: Sequence[bytes], deadline: Deadline) -> int:
        whole = self._names(names)
        results = self._callers.ask(lambda: self._client.remove(whole), deadline)
        if bad := next((code for code in results if code and not absent(code)), 0):
            raise StorageError(f"mooncake: {meaning(bad)}")
        return results.count(0)

    def _remove_all(self, deadline: Deadline) -> int:
        pattern = f"^{self.object_name(b'')}[0-9a-f]+$"
        removed = self._callers.ask(lambda: self._client.remove_all(pattern), deadline)
        if removed < 0:
            raise StorageError(f"mooncake: {meaning(removed)}")
        return removed

    def _release(self) -> None:
        if not self._callers.close(CLOSING):
            raise StorageError("mooncake: close: a call of its client hangs; close it again")
        try:
            asking = Executor(1, "mooncake-leave")  # the call may hang, and is left then
            asking.start()
        except RuntimeError:  # the system starts no more threads: the master cannot be asked
            self._client.leave()
            return
        try:
            asking.ask(lambda: self._client.exists(["lightcache"]), Deadline(ANSWERING))
        except (StorageError, TimeoutError):
            self._client.leave()
        else:
            self._client.close()
        finally:
            asking.close(0.0)

    def _names(self, names: Sequence[bytes]) -> list[str]:
        return [self.object_name(name) for name in names]

    # ---- groups in flight

    def _fly(
        self,
        names: Sequence[bytes],
        deadline: Deadline,
        load: Callable[[int, int], None],
        call: Callable[[Sequence[bytes], Sequence[int]], list[int]],
        land: Callable[[range, Sequence[int], Sequence[int]], None],
    ) -> str:
        """Move pages group by group. Groups that have not landed when the time is up are left. If a
        group fails, no more groups begin; those in flight are waited for, as they may succeed.

        Args:
            load: prepares key number i and its slot before the call.
            call: moves a group, in another thread, without access to the caller's buffers.
            land: handles the codes of a group; called in order.

        Returns:
            Why the other groups have not landed.

        Raises:
            StorageError: a group failed, and none landed.
        """
        flights: deque[Flight] = deque()
        first = landed = 0
        failed = ""  # a text, as a traceback would keep the caller's views alive
        try:
            while flights or (first < len(names) and not failed):
                full = failed or len(flights) > self._threads  # one more keeps all threads busy
                try:
                    slots = [] if full else self._slots(len(names) - first, flights, deadline)
                    if slots:
                        part = range(first, first + len(slots))
                        first = part.stop
                        flights.append(self._start(names, part, slots, load, call, deadline))
                        continue
                    if not flights or not flights[0][2].wait(deadline):
                        break  # no slots or no answer in time
                    part, slots, task = flights[0]
                    try:
                        land(part, slots, task.result())
                    finally:
                        task.leave()
                        flights.popleft()
                    landed += 1
                except Exception as error:
                    failed = failed or self._said(error)
        finally:
            for _, _, task in flights:
                task.leave()
        if failed and not landed:
            raise StorageError(failed)
        return (
            f"{deadline.reason}: {failed}"
            if failed and deadline.passed
            else (failed or deadline.reason)
        )

    def _slots(self, left: int, flights: Sequence[Flight], deadline: Deadline) -> list[int]:
        """Slots for the next group. A call with groups in flight does not wait for slots: two such
        calls could wait for each other."""
        if not left or deadline.passed:
            return []
        slots = self._staging.take(min(left, self._group), None if flights else deadline)
        if not slots and self._staging.lost == self._staging.slots:
            raise StorageError(
                "mooncake: transfers hang in all of the buffer; close this storage and open it anew"
            )
        return slots

    def _start(
        self,
        names: Sequence[bytes],
        part: range,
        slots: list[int],
        load: Callable[[int, int], None],
        call: Callable[[Sequence[bytes], Sequence[int]], list[int]],
        deadline: Deadline,
    ) -> Flight:
        kept = list(slots)  # slots to give back; lost ones are removed

        def after() -> None:
            self._staging.give_back(kept)

        try:
            for i, slot in zip(part, slots, strict=True):
                load(i, slot)
        except BaseException:
            after()
            raise
        wanted = [names[i] for i in part]

        def called() -> list[int]:
            began = time.monotonic()
            try:
                return call(wanted, slots)
            finally:
                if time.monotonic() - began > PATIENCE:
                    self._staging.lose(kept)
                    kept.clear()

        return part, slots, self._callers.submit(called, deadline.left, after=after)

    # ---- in threads of the executor

    def _get(self, names: Sequence[bytes], slots: Sequence[int]) -> list[int]:
        whole = self._names(names)
        size = self._staging.value_bytes
        found = self._client.get(whole, self._staging.addresses(slots), size)
        for i, code in enumerate(found):
            if code in (SMALLER, FAILED):  # either may be a value of another length
                length = self._client.size(whole[i])
                if length != size and (length >= 0 or absent(length)):
                    found[i] = length
        return found

    def _send(self, names: Sequence[bytes], slots: Sequence[int]) -> list[int]:
        whole = self._names(names)
        size = self._staging.value_bytes
        found = self._client.put(whole, self._staging.addresses(slots), size)
        good = [i for i, code in enumerate(found) if not code]
        there = self._client.ask([whole[i] for i in good]) if good else []
        for i, known in zip(good, there, strict=True):
            if known != 1:  # "stored" but absent: another process has begun to write it
                found[i] = known or NOT_READY
        return found

    def _landed(self, name: bytes, view: memoryview, slot: int, code: int) -> Read:
        if code == self._staging.value_bytes or code == LEASE_OVER:
            found = judge_page(name, view, self._staging.empty(slot, view))
            if code > 0 or found[0] is ReadStatus.OK:  # an expired lease is harmless if it is whole
                return found
        elif code >= 0:
            why = f"corrupt: page {name.hex()} is stored as {code} bytes, "
            return ReadStatus.CORRUPT, f"{why}not {self._staging.value_bytes}"
        elif absent(code):
            return ReadStatus.ABSENT, ""
        return ReadStatus.FAILED, f"mooncake: {meaning(code)}"


def _wrote(code: int) -> Wrote:
    if not code:
        return WriteStatus.STORED, ""
    if no_room(code):
        return WriteStatus.REFUSED, f"mooncake: {meaning(code)}"
    if code == NOT_READY:
        return WriteStatus.FAILED, "mooncake: another process is writing this page, or died in it"
    return WriteStatus.FAILED, f"mooncake: {meaning(code)}"


__all__ = ["MooncakeStorage", "Staging"]
