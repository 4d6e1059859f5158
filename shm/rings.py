"""SharedRing: a bounded queue of messages, for many producers and consumers."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from lightcache.shm import layout, structures
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import ConfigError, WaitTimeout
from lightcache.shm.layout import SegmentKind
from lightcache.shm.locking import LockedCalls
from lightcache.shm.segment import DEFAULT_TIMEOUT, Segment, free_dead_slots
from lightcache.shm.sync import Event

Message = bytes | bytearray | memoryview

OPERATIONS = {1: "push", 2: "pop", 3: "check"}  # OP_* in native/ring_api.c


class SharedRing:
    """At most `capacity` messages of at most `message_bytes` bytes each, first in, first out.

    Every change takes the segment's lock and is atomic, even if processes are killed
    (`shm/native/ring.h`):

    - All pushes have one order, and messages are popped in it. So the messages of one producer, or
      of one thread of it, arrive in the order in which it pushed them.
    - At most one pop returns a message. The message is lost if its consumer is killed, or leaves
      `pop` by a signal handler's exception, after removing it and before returning it.
    - If a producer is killed, or leaves `push` by such an exception, the message is pushed
      completely or not at all; it is pushed if `push` had returned. No process waits for a dead
      one. Waiters are not served in order.

    A `_many` method moves as much in one step as one hold of the lock allows: at most 256 messages
    and 256 KiB. Put larger data in pages or segments, and send its location.
    """

    def __init__(self, segment: Segment, *, lock_timeout: float = 10.0) -> None:
        """For `create`, `attach` and `open`."""
        self.segment = segment
        self.capacity = structures.item_of(segment, "capacity")
        self.message_bytes = structures.item_of(segment, "message_bytes")
        _check_sizes(self.capacity, self.message_bytes)
        quick = structures.library().quick
        if segment.payload_bytes < quick.lcx_ring_bytes(self.capacity, self.message_bytes):
            raise ConfigError(
                f"the segment {segment.name!r} is too short for {self.capacity} messages of "
                f"{self.message_bytes} bytes"
            )
        if not segment.readonly:
            segment.join("ring")
            segment.free_slot_on_close()  # a client holds nothing else
        self._room_for_one = ctypes.c_char * self.message_bytes
        self._filled = Event(segment, layout.RingRoot.filled.offset)
        self._drained = Event(segment, layout.RingRoot.drained.offset)
        self._calls = LockedCalls(structures.library(), segment, lock_timeout, OPERATIONS)
        self._calls.handle = quick.lcx_ring_open(
            segment.attachment, self.capacity, self.message_bytes
        )
        weakref.finalize(self, quick.lcx_ring_close, self._calls.handle)

    @classmethod
    def create(
        cls,
        name: str,
        *,
        capacity: int,
        message_bytes: int,
        lifetime: str = "attached",
        group: str | int | None = None,
        lock_timeout: float = 10.0,
    ) -> SharedRing:
        """Create a ring that does not exist; see `Segment.create` for name, lifetime, group,
        errors.

        Args:
            lock_timeout: seconds that a call waits for the ring's lock.

        Raises:
            ConfigError: capacity not 1 to 2^24, message_bytes not 1 to 65,536.
        """
        arranged = _arranged(name, capacity, message_bytes)
        segment = Segment.create(**arranged, lifetime=lifetime, group=group)
        return cls._over(segment, lock_timeout)

    @classmethod
    def open(
        cls,
        name: str,
        *,
        capacity: int,
        message_bytes: int,
        lifetime: str = "attached",
        group: str | int | None = None,
        lock_timeout: float = 10.0,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> SharedRing:
        """Attach to an equal ring, with its messages, or create it; see `Segment.open` for
        `timeout`, and `create` for `lock_timeout`."""
        arranged = _arranged(name, capacity, message_bytes)
        segment = Segment.open(**arranged, lifetime=lifetime, group=group, timeout=timeout)
        return cls._over(segment, lock_timeout)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        readonly: bool = False,
        group: str | int | None = None,
        lock_timeout: float = 10.0,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> SharedRing:
        """Attach to an existing ring; see `Segment.attach` for `timeout`, and `create` for
        `lock_timeout`."""
        segment = Segment.attach(
            name,
            readonly=readonly,
            kind=SegmentKind.RING,
            group=group,
            reaper=free_dead_slots,
            timeout=timeout,
        )
        return cls._over(segment, lock_timeout)

    @classmethod
    def _over(cls, segment: Segment, lock_timeout: float) -> SharedRing:
        try:
            return cls(segment, lock_timeout=lock_timeout)
        except BaseException:
            segment.free_slot_on_close()
            segment.close()
            raise

    # ---- push

    def push(self, data: Message, timeout: float | None = None) -> None:
        """Append a message; wait while the ring is full. Blocks; Ctrl-C ends it at once.

        Args:
            data: the bytes, which are copied; may be empty.
            timeout: seconds to wait for room; 0: do not wait; None: no limit. Waiting for the lock
                is limited by `lock_timeout` instead.

        Raises:
            WaitTimeout: there was no room for `timeout` seconds; nothing was pushed.
            ConfigError: not bytes, or too many; or an invalid `timeout`.
            LockTimeout: names the lock's holder, and since when; nothing was pushed.
        """
        message = self._bytes(data)
        length = ctypes.c_uint32(len(message))

        def attempt() -> bool:
            return self._push(message, ctypes.byref(length), 1) == 1

        self._until(attempt, self._drained, timeout, "full")

    def push_many(self, messages: Sequence[Message]) -> int:
        """Append the first of these messages in one step, without waiting for room. Returns their
        number: 0 if the ring is full or `messages` is empty. Push the rest with further calls.

        Raises:
            ConfigError: one of the first 256 is not bytes, or is too long; nothing was pushed.
            LockTimeout: as `push`.
        """
        some = [self._bytes(data) for data in messages[: layout.RING_BATCH]]
        if not some:
            return 0
        lengths = (ctypes.c_uint32 * len(some))(*map(len, some))
        return self._push(b"".join(some), lengths, len(some))

    def _push(self, data: bytes, lengths: Any, n: int) -> int:
        code = self._locked("lcx_ring_push", data, lengths, n, what="push")
        return 0 if code == Code.FULL else check(code, f"push into {self.segment.name!r}")

    def _bytes(self, data: object) -> bytes:
        if not isinstance(data, bytes):
            if not isinstance(data, (bytearray, memoryview)):
                raise ConfigError(
                    f"message: expected bytes, bytearray or memoryview, found {type(data).__name__}"
                )
            data = bytes(data)
        if len(data) > self.message_bytes:
            raise ConfigError(
                f"message: expected at most {self.message_bytes} bytes, found {len(data)}; make "
                "the ring with larger ones, or push where the bytes are"
            )
        return data

    # ---- pop

    def pop(self, timeout: float | None = None) -> bytes:
        """Remove and return the oldest message; wait while there is none. Blocks; Ctrl-C ends it at
        once.

        Args:
            timeout: as for `push`.

        Raises:
            WaitTimeout: there was no message for `timeout` seconds.
            ConfigError: an invalid `timeout`.
            LockTimeout: names the lock's holder, and since when; nothing was removed.
        """
        messages: list[bytes] = []

        def attempt() -> bool:
            out, length = self._room_for_one(), ctypes.c_uint32()
            if self._pop(out, ctypes.byref(length), 1):
                messages.append(bytes(memoryview(out)[: length.value]))
            return bool(messages)

        self._until(attempt, self._filled, timeout, "empty")
        return messages[0]

    def pop_many(self, limit: int) -> list[bytes]:
        """Remove and return the oldest messages, at most `limit`, in one step, without waiting.
        Returns at least one if there is any, and fewer than available if one hold of the lock takes
        no more.

        Raises:
            ConfigError: limit below 1.
            LockTimeout: as `pop`.
        """
        limit = min(structures.size_of(limit, "limit", 1 << 31), layout.RING_BATCH)
        room = max(self.message_bytes, min(limit * self.message_bytes, layout.RING_HOLD))
        out, lengths = (ctypes.c_char * room)(), (ctypes.c_uint32 * limit)()
        ends = list(accumulate(lengths[: self._pop(out, lengths, limit)], initial=0))
        data = bytes(memoryview(out)[: ends[-1]])
        return [data[begin:end] for begin, end in pairwise(ends)]

    def pop_into(
        self, out: ctypes.Array[ctypes.c_char], lengths: ctypes.Array[ctypes.c_uint32]
    ) -> int:
        """`pop_many` into the caller's memory, for a consumer that must not lose a message to an
        interrupt: what was removed is there even if the call does not return. Returns the number of
        messages. 0: the ring is empty, and nothing was written.

        Args:
            out: the messages, one after another; at least `message_bytes` long.
            lengths: the length of each; those after them are left as they are.

        Raises:
            ConfigError: `out` or `lengths` has no room for a message.
            LockTimeout: as `pop`.
        """
        if len(out) < self.message_bytes or not len(lengths):
            raise ConfigError(
                f"pop_into: expected room for a message of {self.message_bytes} bytes, found "
                f"{len(out)} bytes and {len(lengths)} lengths"
            )
        return self._pop(out, lengths, min(len(lengths), layout.RING_BATCH))

    def _pop(self, out: ctypes.Array[ctypes.c_char], lengths: Any, limit: int) -> int:
        code = self._locked("lcx_ring_pop", out, len(out), lengths, limit, what="pop")
        return 0 if code == Code.MISSING else check(code, f"pop from {self.segment.name!r}")

    # ---- inspection

    def __len__(self) -> int:
        """Number of messages. Takes no lock: changes of other processes at this moment may count or
        not."""
        return check(self._calls.quick.lcx_ring_length(self._calls.handle), "len")

    def check(self) -> None:
        """Derive every invariant again.

        Raises:
            CacheCorrupted: names the first that is broken.
        """
        structures.run_check(self._calls, "lcx_ring_check", f"the ring {self.segment.name!r}")

    # ---- internals, close

    def _locked(self, name: str, *arguments: Any, what: str) -> int:
        return self._calls.locked(name, *arguments, what=f"{what} in {self.segment.name!r}")

    def _until(
        self, attempt: Callable[[], bool], event: Event, timeout: float | None, state: str
    ) -> None:
        """Repeat until an attempt succeeds; in between sleep until `event`, or for 50 ms."""
        if attempt():
            return
        try:
            event.wait_for(attempt, timeout)
        except WaitTimeout:
            raise WaitTimeout(
                f"the ring {self.segment.name!r} was {state} for {timeout} s; wait longer, or see "
                "with `lightcache dump` who else lives in it"
            ) from None

    def close(self) -> None:
        """Leave; see `Segment.close`. The messages stay for other clients."""
        self.segment.close()

    def __enter__(self) -> SharedRing:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.segment.__exit__(None, error, None)


def _check_sizes(capacity: int, message_bytes: int) -> None:
    structures.size_of(capacity, "capacity", layout.RING_CAPACITY)
    structures.size_of(message_bytes, "message_bytes", layout.RING_MESSAGE)


def _arranged(name: str, capacity: int, message_bytes: int) -> dict[str, Any]:
    _check_sizes(capacity, message_bytes)
    return {
        "name": name,
        "payload_bytes": structures.library().quick.lcx_ring_bytes(capacity, message_bytes),
        "kind": SegmentKind.RING,
        "config": {"capacity": capacity, "message_bytes": message_bytes},
        "reaper": free_dead_slots,
    }
