"""Attaching a process to the segment of an index, and leaving it again."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lightcache import _arguments, _native, layout
from lightcache._core import Core, reap_unjoined
from lightcache.errors import CacheCorrupted, ConfigError, Detached, LayoutMismatch
from lightcache.shm import ClientInfo, Kind, Segment
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import Code, check

if TYPE_CHECKING:
    from lightcache.page_index import PageIndex

T = TypeVar("T", bound="Attached")
MAX_PAGES = 40_000_000  # what the undo log can address: an index of 8 GiB

Hook = Callable[[Segment], None]


def geometry(pages: int) -> layout.Geometry:
    """Where an index of so many pages keeps what.

    Raises:
        ConfigError: not 1 to 40 million pages.
    """
    _arguments.count(pages, "pages", 1, MAX_PAGES)
    found = layout.Geometry()
    check(_native.load().quick.lci_geometry_of(pages, ctypes.byref(found)), "pages")
    return found


def _facts() -> str:
    facts: bytes = _native.load().quick.lci_layout()
    return facts.decode()


def _arranged(
    name: str, pages: int, config: Mapping[str, Any] | None, flat: bool
) -> dict[str, Any]:
    place = geometry(pages)
    if config and "flat" in config:
        raise ConfigError('config: "flat" is a word of the index itself; say flat= instead')
    return {
        "name": name,
        "payload_bytes": place.end - shm_layout.PAYLOAD_OFFSET,
        "kind": Kind.INDEX,
        "config": {**(config or {}), "pages": pages, **({"flat": True} if flat else {})},
        "layout_facts": _facts(),
    }


def _reaper(segment: Segment) -> None:
    reap_unjoined(segment, int(segment.config["pages"]))


class Attached:
    """An attach to an index without its calls: see `PageIndex`."""

    def __init__(self, segment: Segment, *, role: str, device: bool, lock_timeout: float) -> None:
        """For `create`, `attach` and `open`."""
        self._closed = True
        self._segment = segment
        pages = segment.config.get("pages")
        if segment.kind is not Kind.INDEX or not isinstance(pages, int):
            raise ConfigError(
                f"{segment.name!r} holds a {segment.kind.name.lower()}, expected an index; "
                "see `lightcache ls`"
            )
        if not 1 <= pages <= MAX_PAGES:
            raise CacheCorrupted(
                f"{segment.name!r}: its configuration says {pages} pages, expected 1 to "
                f"{MAX_PAGES}; remove it with `lightcache rm`"
            )
        self.pages = pages
        """Pages of the medium."""
        self.flat: bool = segment.config.get("flat", False) is True
        """Whether a page may go while others hang on it."""
        self._places = geometry(pages)
        if not segment.readonly:
            segment.join(role, device=device)
        self._core = Core(segment, pages, lock_timeout)
        self._quick = self._core.quick
        self._locked = self._core.locked
        self._handle = self._core.handle
        self._closed = False
        # Not at the interpreter's end: what is destroyed later may still call the core with it.
        weakref.finalize(self, self._core.free).atexit = False

    @property
    def _whole(self) -> PageIndex:
        """Ourselves, for the parts of a `PageIndex`: nothing else is ever made of them."""
        return cast("PageIndex", self)

    # ---- making one

    @classmethod
    def create(
        cls: type[T],
        name: str,
        *,
        pages: int,
        config: Mapping[str, Any] | None = None,
        grown: int | None = None,
        flat: bool = False,
        lifetime: str = "attached",
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        initialise: Hook | None = None,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Create an index that does not exist yet. Takes 206 bytes a page, all at once.

        Args:
            name: ASCII letters, digits and `._-`, at most 180.
            pages: of the medium, 1 to 40 million.
            config: what others must give alike to `attach` or `open` it (JSON); say here what the
                medium is, how large a page is and what model it is for.
            grown: pages whose memory is there already; None: all. More with `grow`.
            flat: a page may be evicted while others hang on it, least recently used first; these
                hang on nothing from then on. For what is worth something without what it hangs on,
                as checkpoints of recurrent state are. False: prefixes outlive what hangs on them.
            lifetime: "attached" (it goes with the last client) or "persistent".
            group: whose members may attach too (mode 0660).
            role: who we are, for people, at most 31 bytes.
            device: we have a device that may go on writing pages after our death: pages that we
                were writing stay in quarantine until that is over.
            initialise: called once, before anybody can attach: make the medium here. Objects
                named by `segment.dependent_name` are removed together with the segment.
            lock_timeout: seconds to wait for the lock before LockTimeout.
            timeout: seconds to wait for somebody who is creating it.

        Raises:
            ConfigError, InUse (it exists), NoSpace, NotReady, PermissionDenied.
        """
        wanted = _arranged(name, pages, config, flat)
        available = _arguments.count(pages if grown is None else grown, "grown", 0, pages)
        segment = Segment.create(
            **wanted,
            lifetime=lifetime,
            group=group,
            timeout=timeout,
            reaper=_reaper,
            initialise=lambda made: _format(made, pages, available, flat, initialise),
        )
        return cls._joined(segment, role, device, lock_timeout)

    @classmethod
    def attach(
        cls: type[T],
        name: str,
        *,
        readonly: bool = False,
        config: Mapping[str, Any] | None = None,
        flat: bool | None = None,
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to an index that exists; never changes its layout.

        Args:
            readonly: only `peek`, `wait`, `stats`, `clients`, `check`; takes no slot and can
                corrupt nothing.
            config: what it must have been created with, without `pages`; None: anything.
            flat: whether it must be flat; None: either.
            Otherwise as `create`.

        Raises:
            NotReady: there is none, or its creator did not finish in time.
            LayoutMismatch: another version, another configuration, or it is flat or is not.
            InUse: all 63 slots are taken by the living.
            CacheCorrupted, PermissionDenied, ConfigError.
        """
        segment = Segment.attach(
            name,
            readonly=readonly,
            kind=Kind.INDEX,
            config=config,
            layout_facts=_facts(),
            group=group,
            reaper=_reaper,
            timeout=timeout,
        )
        found = segment.config.get("flat", False) is True
        if flat is not None and found != flat:
            segment.close()
            raise LayoutMismatch(
                f"the index {name!r}: flat: expected {flat}, found {found}; attach to another one, "
                "or open your own"
            )
        return cls._joined(segment, role, device, lock_timeout)

    @classmethod
    def open(
        cls: type[T],
        name: str,
        *,
        pages: int,
        config: Mapping[str, Any] | None = None,
        grown: int | None = None,
        flat: bool = False,
        lifetime: str | None = None,
        group: str | int | None = None,
        replace: bool = False,
        role: str = "",
        device: bool = False,
        initialise: Hook | None = None,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to an index with exactly this configuration, or create it. One whose processes
        have all died goes on warm.

        Args:
            lifetime: None: whatever it has, "attached" for a new one.
            replace: remove one that differs, if nobody lives in it.
            Otherwise as `create`.

        Raises:
            LayoutMismatch: it differs and `replace` is False.
            InUse: it differs, `replace` is True, and somebody lives in it.
            Otherwise as `create` and `attach`.
        """
        wanted = _arranged(name, pages, config, flat)
        available = _arguments.count(pages if grown is None else grown, "grown", 0, pages)
        segment = Segment.open(
            **wanted,
            lifetime=lifetime,
            group=group,
            replace=replace,
            timeout=timeout,
            reaper=_reaper,
            initialise=lambda made: _format(made, pages, available, flat, initialise),
        )
        return cls._joined(segment, role, device, lock_timeout)

    @classmethod
    def _joined(cls: type[T], segment: Segment, role: str, device: bool, lock_timeout: float) -> T:
        try:
            return cls(segment, role=role, device=device, lock_timeout=lock_timeout)
        except BaseException:
            segment.close()
            raise

    def clients(self) -> list[ClientInfo]:
        """Everybody who is attached for writing, the dead ones not yet reaped included."""
        return self._segment.clients()

    @property
    def segment(self) -> Segment:
        """The segment underneath: name, configuration, header."""
        return self._segment

    @property
    def name(self) -> str:
        """Name of the segment."""
        return self._segment.name

    @property
    def readonly(self) -> bool:
        """Whether it was attached read-only."""
        return self._segment.readonly

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, if the configuration says so (`page_tokens`).

        Raises:
            ConfigError: it does not.
        """
        tokens = self._segment.config.get("page_tokens")
        if not isinstance(tokens, int):
            raise ConfigError("tokens: this index was created without page_tokens")
        return tokens

    # ---- the end

    def _unusable(self) -> bool:
        """Closed or inherited by a fork: what is held here was given back, or is not ours. Freed:
        we are garbage together with what asks."""
        if self._core.handle is None:
            return True
        try:
            self._segment.check_usable()
        except Detached:
            return not self._segment.retired
        return False

    def close(self) -> None:
        """Leave. Leases and reservations still held are given back; their pages are lost to us.
        The last client of a lifetime "attached" removes the segment. A second call does nothing.

        Raises:
            InUse: views live or calls are under way.
            LockTimeout: the lock's holder did not give it back; call again.
            Detached: in a forked child.
        """
        if self._closed:
            return
        if not self._segment.readonly and not self._segment.closed:
            self._segment.check_closable()  # before anything is given back
            code = self._locked("lci_leave", what="leave", leaving=True)
            if code == Code.FORKED:
                check(code, "close")
            if code == Code.OK:
                self._segment.free_slot_on_close()
        self._segment.close()
        self._closed = True

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._unusable():
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.pages} pages"
        return f"<{type(self).__name__} {self._segment.name!r} {state}>"


def _format(segment: Segment, pages: int, grown: int, flat: bool, more: Hook | None) -> None:
    code = _native.load().quick.lci_format(segment.address, segment.nbytes, pages, grown, flat)
    check(code, f"lay out an index of {pages} pages")
    if more is not None:
        more(segment)
