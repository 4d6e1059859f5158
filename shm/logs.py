"""SharedLog: a bounded log of entries with one writer; every reader reads all entries in order."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NoReturn

from lightcache.shm import layout, log_parts, structures
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import (
    Abandoned,
    ConfigError,
    InUse,
    LightcacheError,
    PermissionDenied,
    WaitTimeout,
    leave,
)
from lightcache.shm.layout import SegmentKind
from lightcache.shm.locking import LockedCalls
from lightcache.shm.log_parts import LogReader
from lightcache.shm.segment import Segment
from lightcache.shm.sync import Event

Entry = bytes | bytearray | memoryview

OPERATIONS = {1: "lead", 2: "leave", 3: "check"}  # LCX_LOG_* in native/log_handle.h


def _leave_log(calls: LockedCalls, timeout: float | None) -> None:
    with contextlib.suppress(LightcacheError):
        calls.locked("lcx_log_leave", what="leave", timeout=timeout, leaving=True)
    calls.segment.free_slot_on_close()


def _end(calls: LockedCalls) -> None:
    """Runs when the log is dropped or the interpreter ends: leave if still attached, and free the
    handle."""
    segment = calls.segment
    if not segment.closed and not segment.readonly and segment.client is not None:
        with contextlib.suppress(LightcacheError):
            segment.check_usable()
            _leave_log(calls, 1.0)
    structures.library().quick.lcx_log_close(calls.handle)


class SharedLog:
    """Entries of at most `message_bytes` bytes each, appended by one writer and read by up to 63
    readers. No reader may fall more than `capacity` entries behind.

    Appending and reading take no lock; an entry exists completely or not at all, even if processes
    are killed (`shm/native/log.h`):

    - A reader reads every entry that is appended after it joined, in order, each once; no earlier
      ones. It loses an entry only if it leaves `read` by a signal handler's exception after taking
      the entry: `position` tells.
    - If a writer is killed, or leaves `append` by such an exception, the entry is appended
      completely or not at all; it is appended if `append` had returned. Any process may then become
      the writer; readers continue.
    - A killed reader delays no other process. A living reader that does not read stops the writer,
      which is told its name.

    Threads of a process that share a reader get each entry once in total.
    """

    def __init__(
        self, segment: Segment, *, writer: bool = False, lock_timeout: float = 10.0
    ) -> None:
        """For `create`, `attach` and `open`. `lock_timeout` limits, in seconds, `check` and the
        calls that start or end being the writer."""
        self.segment = segment
        self.capacity = structures.item_of(segment, "capacity")
        self.message_bytes = structures.item_of(segment, "message_bytes")
        log_parts.check_sizes(self.capacity, self.message_bytes)
        quick = structures.library().quick
        if segment.payload_bytes < quick.lcx_log_bytes(self.capacity, self.message_bytes):
            raise ConfigError(
                f"the segment {segment.name!r} is too short for {self.capacity} entries of "
                f"{self.message_bytes} bytes"
            )
        self.is_writer = writer
        if not segment.readonly:
            segment.join("log writer" if writer else "log reader")
        self._room_for_one = ctypes.c_char * self.message_bytes
        self._news = Event(segment, layout.LogRoot.news.offset)
        self._room = Event(segment, layout.LogRoot.room.offset)
        self._calls = LockedCalls(structures.library(), segment, lock_timeout, OPERATIONS)
        self._calls.handle = quick.lcx_log_open(
            segment.attachment, self.capacity, self.message_bytes
        )
        weakref.finalize(self, _end, self._calls)
        if not segment.readonly:
            try:
                self._lead() if writer else self._join()
            except BaseException:  # an interrupt may have come after the call
                self._leave()
                raise

    @classmethod
    def create(
        cls, name: str, *, capacity: int, message_bytes: int, lifetime: str = "attached"
    ) -> SharedLog:
        """Create a log that does not exist, as its writer; see `Segment.create` for name, lifetime
        and errors.

        Raises:
            ConfigError: capacity not 1 to 2^24, message_bytes not 1 to 65,536.
        """
        made = log_parts.arranged(name, capacity, message_bytes)
        return cls._made(Segment.create(**made, lifetime=lifetime), writer=True)

    @classmethod
    def open(
        cls,
        name: str,
        *,
        capacity: int,
        message_bytes: int,
        writer: bool = False,
        lifetime: str = "attached",
    ) -> SharedLog:
        """Attach to an equal log, as reader or writer, or create it; see `Segment.open`. So ranks
        and writer may start in any order: a reader of a log without a writer waits for one.

        Raises:
            InUse: `writer` is True, and a living writer exists.
        """
        made = log_parts.arranged(name, capacity, message_bytes)
        return cls._made(Segment.open(**made, lifetime=lifetime), writer=writer)

    @classmethod
    def attach(cls, name: str, *, writer: bool = False, readonly: bool = False) -> SharedLog:
        """Attach to an existing log; see `Segment.attach`.

        Args:
            writer: True: become the writer, after the last one has left or was killed. Its readers
                continue with the next entry. False: become a reader of entries appended from now
                on.
            readonly: become neither, and only inspect: `len`, `appended`, `behind`, `check`.

        Raises:
            InUse: `writer` is True, and a living writer exists; the message names it.
            ConfigError: both are True.
            LockTimeout: names the holder of the lock, which becoming the writer takes.
        """
        if writer and readonly:
            raise ConfigError("writer, readonly: expected one of them at most, found both")
        reaper = log_parts.free_dead_readers
        segment = Segment.attach(name, readonly=readonly, kind=SegmentKind.LOG, reaper=reaper)
        return cls._made(segment, writer=writer)

    @classmethod
    def _made(cls, segment: Segment, *, writer: bool) -> SharedLog:
        """Make the log; if it cannot become reader or writer, leave the segment."""
        try:
            return cls(segment, writer=writer)
        except BaseException:
            segment.close()
            raise

    def _lead(self) -> None:
        what = f"become the writer of {self.segment.name!r}"
        code = self._calls.locked("lcx_log_lead", what=what)
        if code == Code.OWNER:
            raise InUse(f"{what}: {self._writer()}; close that one, or attach as a reader")
        check(code, what)

    def _join(self) -> None:
        code = self._calls.quick.lcx_log_join(self._calls.handle)
        check(code, f"become a reader of {self.segment.name!r}")

    def _writer(self) -> str:
        """Name of the writer, for messages."""
        slot = self._calls.quick.lcx_log_writer(self._calls.handle)
        writer = next((str(client) for client in self.segment.clients() if client.slot == slot), "")
        return f"it has a writer ({writer})" if slot > 0 and writer else "another one came first"

    # ---- append

    def append(self, data: Entry, timeout: float | None = None) -> None:
        """Append an entry; wait while a living reader has `capacity` entries still to read. Blocks;
        Ctrl-C ends it at once. Takes no lock.

        Args:
            data: the bytes, which are copied; may be empty.
            timeout: seconds to wait for room; 0: do not wait; None: no limit.

        Raises:
            WaitTimeout: there was no room for `timeout` seconds; names the slow readers. Nothing
                was appended.
            ConfigError: not bytes, or too many.
            PermissionDenied: not attached as the writer.
        """
        if not self.is_writer:
            raise PermissionDenied(
                f"append to {self.segment.name!r}: attached to read; attach with writer=True"
            )
        entry = log_parts.entry_bytes(data, self.message_bytes)
        what = f"append to {self.segment.name!r}"

        def attempt() -> bool:
            code = self._calls.quick.lcx_log_append(self._calls.handle, entry, len(entry))
            return code != Code.FULL and check(code, what) == Code.OK

        self._until(attempt, self._room, timeout, self._too_slow)

    def _too_slow(self, timeout: float | None) -> NoReturn:
        slow = [
            reader for reader in self.behind() if reader.behind >= self.capacity and reader.alive
        ]
        names = "; ".join(map(str, slow)) or "just now none of them"
        raise WaitTimeout(
            f"the log {self.segment.name!r} was full for {timeout} s: of its {self.capacity} "
            f"entries none has been read by ({names}); continue or kill who does not read"
        )

    # ---- read

    def read(self, timeout: float | None = None) -> bytes:
        """Return the next entry; wait while there is none. Blocks; Ctrl-C ends it at once. Takes no
        lock.

        Args:
            timeout: as for `append`.

        Raises:
            WaitTimeout: no entry came for `timeout` seconds.
            Abandoned: the writer has left or was killed, and this reader has read all its entries.
                Reading continues once there is another writer.
            PermissionDenied: attached as the writer, or read-only.
        """
        entries: list[bytes] = []

        def attempt() -> bool:
            entries.extend(self._read(self._room_for_one(), 1))
            return bool(entries)

        self._until(attempt, self._news, timeout, self._nothing_came)
        return entries[0]

    def _nothing_came(self, timeout: float | None) -> NoReturn:
        raise WaitTimeout(
            f"nothing was appended to the log {self.segment.name!r} for {timeout} s; wait longer, "
            "or see with `lightcache dump` what its writer does"
        )

    def read_many(self, limit: int) -> list[bytes]:
        """Return the available entries, at most `limit`, in order, without waiting. Returns at
        least one if there is any, and at most 256 entries or 256 KiB.

        Raises:
            ConfigError: limit below 1.
            Abandoned, PermissionDenied: as `read`.
        """
        limit = min(structures.size_of(limit, "limit", 1 << 31), layout.LOG_BATCH)
        room = max(self.message_bytes, min(limit * self.message_bytes, layout.LOG_HOLD))
        return self._read((ctypes.c_char * room)(), limit)

    def _read(self, out: ctypes.Array[ctypes.c_char], limit: int) -> list[bytes]:
        what, lengths = self._reading(), (ctypes.c_uint32 * limit)()
        quick, handle = self._calls.quick, self._calls.handle
        code = quick.lcx_log_read(handle, out, len(out), lengths, limit)
        if code == Code.MISSING:
            if check(quick.lcx_log_ended(handle), what):
                raise Abandoned(
                    f"{what}: its writer has left or was killed, and all that it appended was read "
                    "here; read on when another client has attached with writer=True"
                )
            return []
        ends = list(accumulate(lengths[: check(code, what)], initial=0))
        data = bytes(memoryview(out)[: ends[-1]])
        return [data[begin:end] for begin, end in pairwise(ends)]

    def _reading(self) -> str:
        """The description of a read, for messages. Raises unless this is a reader."""
        what = f"read from {self.segment.name!r}"
        if self.is_writer:
            raise PermissionDenied(f"{what}: attached as its writer; attach once more to read")
        return what

    # ---- inspection

    @property
    def position(self) -> int:
        """Number, from 0, of the entry that this reader reads next. Takes no lock.

        Raises:
            PermissionDenied: attached as the writer, or read-only.
        """
        what = self._reading()
        return check(self._calls.quick.lcx_log_position(self._calls.handle), what)

    @property
    def appended(self) -> int:
        """Number of entries ever appended. Takes no lock."""
        return self._behind()[0]

    def behind(self) -> tuple[LogReader, ...]:
        """Each reader, with the number of entries that it has still to read. About 1 us a slot;
        takes no lock."""
        counts = self._behind()[1]
        clients = {client.slot: client for client in self.segment.clients()}
        readers = []
        for slot, count in enumerate(counts):
            client = clients.get(slot)
            if count >= 0:
                who = (client.pid, client.role, client.alive) if client else (0, "", False)
                readers.append(LogReader(slot, *who, behind=count))
        return tuple(readers)

    def __len__(self) -> int:
        """Number of entries that the slowest reader has still to read: `capacity` if the log is
        full, 0 without readers. Takes no lock: it may change at this moment."""
        return max(0, *self._behind()[1])

    def _behind(self) -> tuple[int, list[int]]:
        counts = (ctypes.c_int64 * layout.SLOTS)()
        code = self._calls.quick.lcx_log_behind(self._calls.handle, counts)
        return check(code, f"look at {self.segment.name!r}"), list(counts)

    def check(self) -> None:
        """Derive every invariant again, while other processes append and read. Takes the lock,
        unless attached read-only.

        Raises:
            CacheCorrupted: names the first that is broken.
            LockTimeout: names the lock's holder, and since when.
        """
        structures.run_check(self._calls, "lcx_log_check", f"the log {self.segment.name!r}")

    # ---- internals, close

    def _until(
        self,
        attempt: Callable[[], bool],
        event: Event,
        timeout: float | None,
        give_up: Callable[[float | None], NoReturn],
    ) -> None:
        """Repeat until an attempt succeeds; in between sleep until `event`, or for 50 ms."""
        if attempt():
            return
        with contextlib.suppress(WaitTimeout):
            event.wait_for(attempt, timeout)
            return
        give_up(timeout)

    def close(self) -> None:
        """Leave, as reader or writer; see `Segment.close`. The entries stay for other clients. A
        writer takes the lock; if the lock is held for too long, the next writer still finds that
        this one has left."""
        if not self.segment.closed and not self.segment.readonly:
            self.segment.check_closable()
            self._leave()
        self.segment.close()

    def _leave(self) -> None:
        """Stop being reader or writer. The slot may be given back only after this."""
        _leave_log(self._calls, None)

    def __enter__(self) -> SharedLog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if structures.library().quick.lcs_attachment_usable(self.segment.attachment) == Code.FORKED:
            return  # a forked child leaves the statement without an error
        leave(self.close, error)

    def __repr__(self) -> str:
        if self.segment.closed:
            state = "closed"
        elif self.segment.readonly:
            state = "readonly"
        else:
            state = "writer" if self.is_writer else "reader"
        return f"<SharedLog {self.segment.name!r} {state}>"
