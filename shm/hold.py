"""The resources of one attach: the mapping, the descriptor with its locks, and the core's record.

Every `Segment` has exactly one `Hold`. It is a separate object so that it can be released when the
segment is collected or the interpreter ends, and so that only this file unmaps.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from lightcache.shm import _native, layout, ofd
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import ConfigError, Detached, InUse, LightcacheError, LockTimeout
from lightcache.shm.layout import Lifetime
from lightcache.shm.objects import OpenObject, duration

log = logging.getLogger("lightcache")
_LEAVE_SECONDS = 5.0  # wait for the life byte; after that a later sweep does the rest


class Hold:
    """Owns a mapping and an `OpenObject`. Made by `lifecycle`; ends with `close`."""

    def __init__(self, opened: OpenObject, *, readonly: bool) -> None:
        """Nothing is mapped yet; the Hold owns `opened` from now on."""
        self.opened = opened
        self.readonly = readonly
        self.bytes = 0
        self.attachment = 0
        self.frees_slot = True  # False: a reaper of the structure frees the slot
        self._base = ctypes.c_void_p()
        self._usable = _native.quick().lcs_attachment_usable
        self._closing = threading.Lock()
        # Tokens, not a count: a garbage collection may end a view at any point of this code, so
        # adding and removing must be single operations that need no lock.
        self._users: set[object] = set()
        self._views: dict[object, weakref.ref[Any]] = {}
        self._closed = False
        self._left = self._ended = False
        """Progress of the thread `_closer` in `close`, for another call after an interrupt."""
        self._closer = 0

    def map(self, fd: int, length: int) -> None:
        """Map the object through its second descriptor `fd`, and make the core's record."""
        quick = _native.quick()
        check(
            quick.lcs_map(fd, length, not self.readonly, ctypes.byref(self._base)),
            f"map the segment {self.opened.name!r} ({length} bytes)",
        )
        self.bytes = length
        self.attachment = quick.lcs_attachment_new(
            self.base, length, self.opened.fd, 0, 0, self.readonly
        )
        if not self.attachment:
            raise MemoryError("no memory for the record of an attachment")

    @property
    def base(self) -> int:
        """Address of the mapping; 0 if there is none."""
        return self._base.value or 0

    @property
    def inherited(self) -> bool:
        """True if this process is a forked child of the one that attached."""
        return self.opened.inherited

    @property
    def closed(self) -> bool:
        """True once `close` has begun."""
        return self._closed

    def header(self) -> layout.SegmentHeader:
        """A copy of the header. The mapping must exist."""
        return layout.SegmentHeader.from_buffer_copy(
            ctypes.string_at(self.base, ctypes.sizeof(layout.SegmentHeader))
        )

    def check_usable(self) -> None:
        """Raise Detached in a forked child, after close, and if the segment was retired."""
        code = self._usable(self.attachment)
        if code < 0:
            check(code, f"use the segment {self.opened.name!r}")

    # ---- users of the mapping

    def enter(self, token: object) -> None:
        """Register a user; until `leave` removes the token, `close` raises InUse. The caller made
        the token and removes it in any case, even after an interrupt in here.

        Raises:
            Detached: not attached (any more), or another thread is closing.
        """
        self._users.add(token)  # before looking at `_closed`, which `close` sets before counting
        self.check_usable()
        if self._closed:
            check(Code.CLOSED, f"use the segment {self.opened.name!r}")

    def leave(self, token: object) -> None:
        """Remove a user."""
        self._users.discard(token)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Context for a blocking call: keeps the mapping."""
        token = object()
        try:
            self.enter(token)
            yield
        finally:  # not through a function: an interrupt could prevent its call
            self._users.discard(token)

    def view(self, offset: int, length: int, owner: object) -> memoryview:
        """Bytes of the mapping; `owner` and the mapping live until the last view is gone."""
        if offset < 0 or length < 0 or offset + length > self.bytes:
            raise ConfigError(
                f"a view of [{offset}, {offset + length}) was asked for in the segment "
                f"{self.opened.name!r}, which has {self.bytes} bytes"
            )
        token = object()
        try:
            self.enter(token)
            array = (ctypes.c_uint8 * length).from_address(self.base + offset)
            # Every memoryview, numpy array or tensor made of this array keeps it alive. No code
            # runs when it goes, so no interrupt can prevent the clean-up.
            array.owner = owner  # type: ignore[attr-defined]
            for gone in [each for each, view in list(self._views.items()) if view() is None]:
                self._views.pop(gone, None)
            self._views[token] = weakref.ref(array)
        finally:
            self.leave(token)
        view = memoryview(array).cast("B")
        return view.toreadonly() if self.readonly else view

    def _user_count(self) -> int:
        views = [view() for view in list(self._views.values())]
        return len(self._users) + sum([view is not None for view in views])

    # ---- close

    def check_closable(self) -> None:
        """Raise InUse while views exist or calls are running."""
        users = self._user_count()
        if users:
            raise InUse(
                f"close the segment {self.opened.name!r}: {users} views or calls still use its "
                "memory; drop the arrays made of it first"
            )

    def close(self, *, force: bool = False) -> None:
        """Leave the segment; the last process of one of lifetime "attached" unlinks it, but no
        reader where clients were killed. After an interrupt another call does the rest.

        Blocks while another process holds the life byte, at most a few seconds.

        Args:
            force: close in spite of live users; their memory then stays mapped (at the
                interpreter's end).

        Raises:
            InUse: views exist or calls are running; nothing was changed.
            Detached: in a forked child, which holds nothing.
        """
        if self.inherited:
            raise Detached(
                f"close the segment {self.opened.name!r}: this process is a forked child and is "
                "not attached, so it has nothing to close"
            )
        with self._closing:
            if self._closed and (self._ended or self._closer != threading.get_ident()):
                return
            self._closer = threading.get_ident()
            self._closed = True
            users = self._user_count()
            if users and not force:
                self._closed = False
                raise InUse(
                    f"close the segment {self.opened.name!r}: {users} views or calls still use its "
                    "memory; drop the arrays made of it first"
                )
        try:
            if not self._left:
                self._leave_segment()
        except Exception:
            self._end()
            raise
        self._left = True
        self._end()

    def _end(self) -> None:
        """Release the record, the descriptor and the mapping. Can be repeated."""
        if self.attachment:
            _native.quick().lcs_attachment_close(self.attachment)
        self.opened.close()
        if not self._user_count():
            self._unmap()
        self._ended = True

    def discard(self) -> None:
        """Release everything without leaving the segment, after a failed attach or creation."""
        if self.inherited:
            return
        self._closed = True
        self._end()

    def dispose(self) -> None:
        """Close if still open, when the segment is collected or the interpreter ends."""
        if not self.inherited and not self._ended:
            with contextlib.suppress(LightcacheError, OSError):
                self.close(force=True)

    def __del__(self) -> None:
        # Not while the interpreter ends: objects destroyed later may still call the core with it.
        if sys.is_finalizing():
            return
        if not self._closed:  # an interrupt came before a Segment was made of it
            self.discard()
        if self.attachment:
            _native.quick().lcs_attachment_free(self.attachment)

    def _unmap(self) -> None:
        address, self._base.value = self.base, None
        if address:
            _native.quick().lcs_unmap(address, self.bytes)

    def mark_used(self) -> None:
        """See `Segment.mark_used`. One aligned word: a kill leaves the old value or the new one."""
        base = self.base
        if base and not self.readonly and not self.inherited:
            where = base + layout.SegmentHeader.used_ns.offset
            ctypes.c_uint64.from_address(where).value = time.time_ns()

    def _give_up_bytes(self) -> None:
        """Give up the slot, then the reader's byte: from here on this client does not count as
        attached."""
        if self.frees_slot and self.attachment:
            _native.quick().lcs_slot_release(self.attachment)
        slot = _native.quick().lcs_attachment_slot(self.attachment) if self.attachment else 0
        if slot:  # stays TAKEN: a reaper finds it dead
            ofd.unlock(self.opened.fd, layout.BYTE_SLOTS + slot)
        ofd.unlock(self.opened.fd, layout.BYTE_READERS)

    def _leave_segment(self) -> None:
        if not self.base:
            return
        client = bool(_native.quick().lcs_attachment_slot(self.attachment))
        if client:  # without a slot it writes nothing
            self.mark_used()
        # Through a separate descriptor, so that readers with the permission can do it too.
        life = None
        with contextlib.suppress(LightcacheError):
            life = OpenObject.open(self.opened.name, writable=True)
        try:
            if life is None or life.identity != self.opened.identity:
                self._give_up_bytes()
            else:
                self._leave_locked_or_leave_it(life, client)
        finally:
            if life is not None:
                life.close()

    def _leave_locked_or_leave_it(self, life: OpenObject, client: bool) -> None:
        try:
            with ofd.locked(life.fd, layout.BYTE_LIFE, timeout=_LEAVE_SECONDS):
                self._give_up_bytes()
                if not life.is_named() or life.is_occupied():
                    return
                if life.header().lifetime != Lifetime.ATTACHED:
                    if client:
                        _say_that_it_stays(life)
                elif not (self.readonly and self._clients_died()) and life.may_unlink():
                    life.remove_locked()
        except LockTimeout:
            self._give_up_bytes()

    def _clients_died(self) -> bool:
        """There are slots that no client has given back. With none attached, theirs were killed:
        the content is warm, and no matter of a reader."""
        size = ctypes.sizeof(layout.ClientRecord)
        table = ctypes.string_at(self.base + layout.CLIENTS_OFFSET, layout.SLOTS * size)
        records = (layout.ClientRecord * layout.SLOTS).from_buffer_copy(table)
        return any(record.state != layout.ClientState.FREE for record in records[1:])


def _say_that_it_stays(opened: OpenObject) -> None:
    """Log that the last client has left a persistent segment. A warning if it has an idle limit,
    because it may be persistent by default; otherwise its creator asked for that explicitly."""
    header, name = opened.header(), opened.name
    if header.retired:
        return
    limit = (
        f" (after {duration(header.idle_ns / 1e9)} without use it goes when room is needed)"
        if header.idle_ns
        else ""
    )
    log.log(
        logging.WARNING if header.idle_ns else logging.INFO,
        "%s stays in shared memory, %.1f MiB, for the next process%s; remove: `lightcache rm %s`",
        name,
        opened.memory() / 2**20,
        limit,
        name,
    )
