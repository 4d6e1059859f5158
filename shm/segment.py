"""A named segment of shared memory: its lifetime, its clients, views of its bytes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Container, Mapping
from types import TracebackType
from typing import Any

from lightcache.shm import _native, clients, folders, layout, lifecycle, names, ofd, wanted
from lightcache.shm.clients import ClientInfo, ClientSlot
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import ConfigError, Detached, InUse, leave
from lightcache.shm.folders import Folder
from lightcache.shm.hold import Hold
from lightcache.shm.layout import Lifetime, SegmentKind

DEFAULT_TIMEOUT = 10.0  # seconds to wait for a creator; laying out a million pages takes less

Hook = Callable[["Segment"], None]
Check = lifecycle.Check


def free_dead_slots(segment: Segment) -> None:
    """The reaper of a segment without a structure, where a dead client leaves only its slot."""
    for slot in range(1, layout.SLOTS):
        code = _native.quick().lcs_slot_free_dead(segment.attachment, slot)
        if code not in (Code.BUSY, Code.MISSING, Code.RANGE):
            check(code, f"free the slot {slot} of {segment.name!r}")


class Segment:
    """This process's handle of a named segment.

    Make one with `create` (fails if the name exists), `attach` (never writes the layout) or `open`
    (attaches to an equal one, else creates), and end it with `close` or a with statement. Threads
    may share it. A forked child may not use it: every method raises Detached there, and `close`
    changes nothing; the child attaches for itself.

    A client attached for writing keeps the segment alive, and takes a slot of the client table with
    `join`. Readers (`readonly=True`) map it PROT_READ and can corrupt nothing.
    """

    def __init__(self, hold: Hold, reaper: Hook | None) -> None:
        """For `create`, `attach` and `open` only."""
        self._hold = hold
        self._client: ClientSlot | None = None
        header = hold.header()
        self.name = hold.opened.name
        self.kind = SegmentKind(header.kind)
        self.lifetime = Lifetime(header.lifetime)
        self.uuid = bytes(header.uuid).hex()
        self.config: Mapping[str, Any] = wanted.config_of(header)
        # A structure's dead clients leave more than a slot; only its own reaper may free them.
        plain = self.kind is SegmentKind.PLAIN
        self._reaper = reaper or (free_dead_slots if plain else None)
        hold.frees_slot = plain
        self._finalizer = weakref.finalize(self, hold.dispose)

    # ---- create, attach, open

    @classmethod
    def create(
        cls,
        name: str,
        payload_bytes: int,
        *,
        kind: SegmentKind = SegmentKind.PLAIN,
        config: Mapping[str, Any] | None = None,
        layout_facts: str = "",
        lifetime: str = "attached",
        idle_limit: float | None = None,
        group: str | int | None = None,
        initialise: Hook | None = None,
        reaper: Hook | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Segment:
        """Create a segment that does not exist yet, with all its memory.

        Args:
            name: ASCII letters, digits, `._-`; at most 180 characters.
            payload_bytes: size of the structure, zeroed, at `payload_offset`.
            config: JSON that attaching processes may compare, at most 2,048 bytes.
            layout_facts: text that describes the records inside; other processes must pass the
                same.
            lifetime: "attached" (unlinked by the last client to leave) or "persistent".
            idle_limit: seconds. A persistent segment that was unused for this long and has no live
                client is removed by the next `open`, `create` or `sweep` that needs its room. None:
                never.
            group: the group whose members may attach too: mode 0660 instead of 0600.
            initialise: lays out the payload, before another process can attach. An exception undoes
                the creation.
            reaper: called by `join` when all slots are taken, to free those of dead clients.
            timeout: seconds to wait for another process that is creating it; None: no limit.

        Raises:
            ConfigError, InUse (it exists), NotReady, NoSpace, PermissionDenied.
        """
        expected = wanted.want(
            name,
            kind=kind,
            payload_bytes=payload_bytes,
            config=config or {},
            layout_facts=layout_facts,
            lifetime=lifetime,
            idle_limit=idle_limit,
            group=group,
        )
        return _Maker(reaper, initialise).create(expected, timeout)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        readonly: bool = False,
        kind: SegmentKind | None = None,
        payload_bytes: int | None = None,
        config: Mapping[str, Any] | None = None,
        layout_facts: str | None = None,
        named: Container[str] | None = None,
        group: str | int | None = None,
        reaper: Hook | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Segment:
        """Attach to an existing segment. Compares only the arguments that are given.

        Args:
            named: items of the configuration that must be equal; None: all. Others may be anything.

        Without `layout_facts` the records of the structure are not compared: for tools that read
        only the header and the clients.

        Raises:
            NotReady: the segment does not exist (at once), or its creator did not finish in
                `timeout` seconds.
            LayoutMismatch: names each item that differs.
            CacheCorrupted, PermissionDenied, ConfigError.
        """
        expected = wanted.want(
            name,
            kind=kind,
            payload_bytes=payload_bytes,
            config=config,
            layout_facts=layout_facts,
            lifetime=None,
            group=group,
            named=named,
        )
        hold = lifecycle.attach(expected, readonly=readonly, timeout=timeout)
        return _Maker(reaper, None).wrap(hold)

    @classmethod
    def open(
        cls,
        name: str,
        payload_bytes: int,
        *,
        kind: SegmentKind = SegmentKind.PLAIN,
        config: Mapping[str, Any] | None = None,
        layout_facts: str = "",
        lifetime: str | None = None,
        idle_limit: float | None = None,
        group: str | int | None = None,
        replace: bool = False,
        check_new: Check | None = None,
        named: Container[str] | None = None,
        initialise: Hook | None = None,
        reaper: Hook | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Segment:
        """Attach to a segment that equals these arguments, or create it. A segment that outlived
        its processes keeps its content.

        Args:
            lifetime: None: keep that of an existing segment; "attached" for a new one.
            idle_limit: seconds. A persistent segment that was unused for this long and has no live
                client is removed by the next `open`, `create` or `sweep` that needs its room. None:
                never. If given with lifetime None, a new segment is persistent.
            replace: remove a segment that differs, if it has no live client.
            check_new: called before one is removed so, with a function that returns the bytes that
                come free at most in a folder (None: in all), and the bytes of the new segment.
                Refuses by an error: then the segment stays, as it does where the new one has no
                room or may not be of the group.
            named: items of the configuration that must be equal, and "bytes" for the size; None:
                all. The rest is what a new segment gets, and an existing one may have otherwise.

        Raises:
            LayoutMismatch: the segment differs and `replace` is False.
            InUse: the segment differs, `replace` is True, and it has a live client.
            Otherwise as `create` and `attach`.
        """
        expected = wanted.want(
            name,
            kind=kind,
            payload_bytes=payload_bytes,
            config=config or {},
            layout_facts=layout_facts,
            lifetime=lifetime,
            idle_limit=idle_limit,
            group=group,
            named=named,
        )
        may = (check_new or (lambda *_: None)) if replace else None
        return _Maker(reaper, initialise).open(expected, may, timeout)

    @staticmethod
    def unlink(
        name: str,
        *,
        force: bool = False,
        group: str | int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> bool:
        """Retire a segment and remove its name and its dependents; False if there is none. Attached
        clients then find it retired.

        Raises:
            InUse: a client is attached, and `force` is False.
            LockTimeout: another process was creating or replacing it for `timeout` seconds.
            PermissionDenied, ConfigError.
        """
        expected = wanted.want(
            name,
            kind=None,
            payload_bytes=None,
            config=None,
            layout_facts=None,
            lifetime=None,
            group=group,
        )
        return lifecycle.unlink(name, expected.group, force=force, timeout=timeout)

    # ---- clients

    def join(
        self,
        role: str = "",
        *,
        device: bool = False,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> ClientSlot:
        """Take a slot of the client table; `close` gives it back. If none is free, takes back those
        of dead clients, and waits for those in quarantine, which ends a second after the last
        client's death at the latest, if its processes end.

        A process that uses a device must attach before it makes the device's context. The kernel
        closes files last-opened first, so the slot then counts as alive for as long as the device
        may write.

        Args:
            role: a label for operators; at most 31 bytes of UTF-8 are kept.
            device: True: this client has a device that may continue to copy after the client's
                death.
            timeout: seconds to wait for a slot that a dead client has left; None: no limit. If
                living clients hold all slots there is no wait.

        Raises:
            InUse: living clients hold all 63 slots, or the rest stayed in quarantine for all of
                `timeout`; names the clients. Or this handle has joined already.
            ConfigError: the segment was made in another time namespace, which has another clock.
            PermissionDenied: attached read-only.
            Detached: closed, retired, or a forked child.
        """
        with self._hold.used():
            if self._client is not None:
                raise InUse(f"join {self.name!r}: joined already, in slot {self._client.slot}")
            what = f"join {self.name!r}"
            self._check_clock(what)
            encoded = clients.role_bytes(role)
            flags = layout.FLAG_DEVICE if device else 0
            claim = _native.quick().lcs_slot_claim
            pause = ofd.Pause(timeout)
            code = claim(self.attachment, encoded, flags)
            while code == Code.FULL and self._reaper is not None:
                self._reaper(self)
                code = claim(self.attachment, encoded, flags)
                if code == Code.FULL and not (self._slot_may_come() and pause.sleep()):
                    break
            if code == Code.FULL:
                raise InUse(f"{what}: more clients than slots: {self._why_full()}")
            if code != Code.TWICE:  # an interrupt came after an earlier claim: the slot is ours
                check(code, what)
            slot = _native.quick().lcs_attachment_slot(self.attachment)
            epoch = _native.quick().lcs_attachment_epoch(self.attachment)
            self._client = ClientSlot(slot, epoch, encoded.decode())
            # From here on the slot's byte shows that this client is alive.
            ofd.unlock(self._hold.opened.fd, layout.BYTE_READERS)
            self._hold.mark_used()
            return self._client

    def _slot_may_come(self) -> bool:
        """Whether a slot is a dead client's, or is being taken or freed at this moment. Such a
        client may look alive: see `reap_as_guest` of the core."""
        if ofd.held(self._hold.opened.fd, layout.BYTE_MEND + 1, layout.SLOTS - 1):
            return True
        table = self.clients()
        return len(table) < layout.SLOTS - 1 or not all(client.alive for client in table)

    def _why_full(self) -> str:
        """The rest of a message: who has the slots, the dead first, and what to do."""
        table = sorted(self.clients(), key=lambda client: client.alive)
        living = all(client.alive for client in table)
        remedy = (
            "close one, or end its process"
            if living
            else "try again when the quarantine has ended; a process that is dead and does not end "
            "is stuck in a driver"
        )
        return f"{clients.slot_use(table)} ({clients.describe(table)}); {remedy}"

    def _check_clock(self, what: str) -> None:
        """Raise in another time namespace: deadlines of tickets and quarantine use CLOCK_MONOTONIC,
        and clients are distinguished by their start times."""
        theirs, ours = self.header().time_namespace, _native.quick().lcs_time_namespace()
        if theirs and ours and theirs != ours:
            raise ConfigError(
                f"{what}: expected a process of the time namespace that it was made in "
                f"(time:[{theirs}]), found one of time:[{ours}], where clocks count from another "
                "instant, so that deadlines would end early or never; run in that namespace "
                "(nsenter --time), attach read-only, or make another cache here"
            )

    @property
    def client(self) -> ClientSlot | None:
        """This client's slot, after `join`."""
        return self._client

    def clients(self) -> list[ClientInfo]:
        """All clients that have a slot, living or dead. About 1 us a slot; takes no lock."""
        with self._hold.used():
            length = layout.SLOTS * ctypes.sizeof(layout.ClientRecord)
            table = ctypes.string_at(self.address + layout.CLIENTS_OFFSET, length)
            own = self._client.slot if self._client else 0
            return clients.read_table(table, self._hold.opened.fd, own)

    def lives(self, slot: int, epoch: int) -> bool:
        """True if the client that took this slot in that epoch is still alive. Makes at most one
        system call; takes no lock.

        Raises:
            ConfigError: the slot is not 1 to 63.
            Detached: closed, retired, or a forked child.
        """
        if not 0 < slot < layout.SLOTS:
            raise ConfigError(f"slot: expected 1 to {layout.SLOTS - 1}, found {slot!r}")
        with self._hold.used():
            own = self._client is not None and self._client.slot == slot
            alive = own or ofd.held(self._hold.opened.fd, layout.BYTE_SLOTS + slot)
            where = self.address + layout.CLIENTS_OFFSET + slot * ctypes.sizeof(layout.ClientRecord)
            # After testing the lock: a client that took the slot over since has another epoch.
            record = layout.ClientRecord.from_address(where)
            taken = record.state != layout.ClientState.FREE
            return alive and taken and int(record.epoch) == epoch

    def mark_used(self) -> None:
        """Record that a client uses the segment now: an idle limit counts from the last such
        moment. Joining, leaving and taking the lock do this by themselves. One store; does nothing
        if attached read-only or closed."""
        self._hold.mark_used()

    # ---- memory

    @property
    def address(self) -> int:
        """Address of the mapping. Only valid while attached; see `busy`.

        Raises:
            Detached: closed, or a forked child, where nothing is mapped.
        """
        if self._hold.inherited or not self._hold.base:
            raise Detached(f"the segment {self.name!r} is not mapped here; attach (again)")
        return self._hold.base

    @property
    def attachment(self) -> int:
        """The address of an `lcs_attachment`, for the core's calls. Valid as long as this object
        lives, also after `close` and in forked children, where the calls report that."""
        return self._hold.attachment

    @property
    def nbytes(self) -> int:
        """Size of the whole segment."""
        return self._hold.bytes

    @property
    def payload_offset(self) -> int:
        """Start of the structure: after header, clients, lock and undo log."""
        return layout.PAYLOAD_OFFSET

    @property
    def payload_bytes(self) -> int:
        """Size from `payload_offset` on, rounded up to whole pages."""
        return self._hold.bytes - layout.PAYLOAD_OFFSET

    @property
    def readonly(self) -> bool:
        """True if it is mapped PROT_READ."""
        return self._hold.readonly

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the segment, from offset 0; read-only if the handle is.

        While the view, or an array made of it, exists, `close` raises InUse. A forked child must
        not touch it: nothing is mapped there.

        Raises:
            ConfigError: not within the segment.
            Detached: closed, retired, or a forked child.
        """
        return self._hold.view(offset, nbytes, self)

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Context for a call that releases the GIL: until it ends, `close` raises InUse.

        Raises:
            Detached: closed, retired, or a forked child.
        """
        return self._hold.used()

    # ---- state

    def check_usable(self) -> None:
        """Raise Detached if closed, retired, or in a forked child."""
        self._hold.check_usable()

    @property
    def closed(self) -> bool:
        """True after `close` of this handle."""
        return self._hold.closed

    @property
    def retired(self) -> bool:
        """True if the segment was replaced or unlinked; close this handle, and open again."""
        try:
            self._hold.check_usable()
        except Detached:
            return not (self.closed or self._hold.inherited)
        return False

    def header(self) -> layout.SegmentHeader:
        """A copy of the header; also of a retired segment.

        Raises:
            Detached: closed, or a forked child.
        """
        _ = self.address
        return self._hold.header()

    def stat(self) -> os.stat_result:
        """Owner, group, mode and size of the object, which its dependents should share.

        Raises:
            Detached: closed, or a forked child.
        """
        _ = self.address
        return os.fstat(self._hold.opened.fd)

    def dependent_name(self, what: str) -> str:
        """Name of an object that is removed together with this segment, such as its pool."""
        return names.dependent_name(self.name, what, self.uuid)

    def folder(self) -> Folder:
        """Open the folder of this segment's dependents; the caller closes it. It is /dev/shm unless
        the configuration names another (`folders.FOLDER_ITEM`).

        Raises:
            NotReady: it does not exist, or is not mounted here.
            PermissionDenied, ConfigError: not accessible, or not in memory.
        """
        return Folder.open(folders.path_in(dict(self.config)) or names.FOLDER)

    # ---- close

    def close(self) -> None:
        """Detach and give back the slot. If the lifetime is "attached" and no other client is left,
        unlink the segment and its dependents; not as a reader whose clients were killed. A second
        call does nothing.

        A structure first takes back what its client holds, then calls `free_slot_on_close`.

        Raises:
            InUse: views exist, or calls are running; nothing was changed.
            Detached: in a forked child.
        """
        self._hold.close()

    def check_closable(self) -> None:
        """Raise InUse while `close` would: views exist, or calls are running."""
        self._hold.check_closable()

    def free_slot_on_close(self) -> None:
        """Declare that this client holds nothing in the structure any more. Otherwise a structure's
        slot stays taken after `close`, and the next reaper finds it dead."""
        self._hold.frees_slot = True

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._hold.inherited:  # a forked child leaves the statement without an error
            leave(self.close, error)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes} bytes"
        return f"<Segment {self.name!r} {self.kind.name} {state}>"


class _Maker:
    """Wraps a hold into a Segment as soon as the header exists, so that `initialise` gets a
    Segment."""

    def __init__(self, reaper: Hook | None, initialise: Hook | None) -> None:
        self._reaper = reaper
        self._hook = initialise
        self._made: Segment | None = None
        self._wrapped: Hold | None = None

    def wrap(self, hold: Hold) -> Segment:
        if self._made is None or self._wrapped is not hold:
            try:
                self._made, self._wrapped = Segment(hold, self._reaper), hold
            except BaseException as error:
                hold.discard()
                if type(error) is ValueError:  # a kind or lifetime of a later release
                    raise ConfigError(f"the segment {hold.opened.name!r}: {error}") from error
                raise
        return self._made

    def _initialise(self, hold: Hold) -> None:
        segment = self.wrap(hold)
        if self._hook is not None:
            self._hook(segment)

    def create(self, expected: wanted.SegmentSpec, timeout: float | None) -> Segment:
        return self.wrap(lifecycle.create(expected, self._initialise, timeout=timeout))

    def open(
        self, expected: wanted.SegmentSpec, replace: Check | None, timeout: float | None
    ) -> Segment:
        hold = lifecycle.open_or_create(
            expected, self._initialise, replace=replace, timeout=timeout
        )
        return self.wrap(hold)
