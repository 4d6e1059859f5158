"""The indexes that a router looks at: attached read-only, let go when their owner is gone, and
attached again when they appear."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np

from lightcache import namespaces
from lightcache._arguments import Keys, Offsets, Pages
from lightcache.errors import ConfigError, LightcacheError
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.shm import names
from lightcache.shm.codes import Code, check

_NOT_YET = "was not looked at so far"
_DEAD = "nobody who writes it lives"


class Source:
    """One index by name, or none. Nothing that becomes of it is an error here: it is `stale` then,
    and has no pages.

    A handle that the caller gave is used as long as it is usable, and never closed. Our own are
    read-only: they take no slot and cannot change anything.
    """

    def __init__(self, given: PageIndex | str | None, *, owned: bool) -> None:
        """Nothing is attached yet.

        Args:
            owned: it is of no use when no client that is attached for writing lives.

        Raises:
            ConfigError: neither an index nor a segment's name.
        """
        if given is not None and not isinstance(given, (PageIndex, str)):
            raise ConfigError(f"expected a PageIndex, its name or None, found {given!r}")
        self._index = given if isinstance(given, PageIndex) else None
        self._ours = False
        self._owned = owned
        self.name = given.name if isinstance(given, PageIndex) else given
        if self.name is not None:
            names.object_name(self.name)
        self.problem: str | None = None if given is None else _NOT_YET
        """Why it counts as having no pages; None: it has those that are found."""
        self._refs: dict[tuple[str, str], Namespace | None] = {}

    def refresh(self) -> None:
        """Look whether it is there, and whose. Does not block; some 60 us, and as much again if it
        has to be attached."""
        if self.name is None:
            return
        self._refs.clear()
        self.problem = None
        if self._index is not None and not self._usable(self._index):
            self.let_go()
        try:
            if self._index is None:
                self._index = PageIndex.attach(self.name, readonly=True, timeout=0)
                self._ours = True
            living = not self._owned or any(client.alive for client in self._index.clients())
        except LightcacheError as error:
            self._fail(error)
            return
        if not living:
            # A reader keeps a segment from being replaced: its next owner may want another one.
            self.let_go()
            self.problem = _DEAD

    def _usable(self, index: PageIndex) -> bool:
        with contextlib.suppress(LightcacheError):
            index.segment.check_usable()
            return True
        return False

    def _fail(self, error: LightcacheError) -> None:
        self.problem = str(error)

    def let_go(self) -> None:
        """Close what is ours."""
        index, self._index = self._index, None
        if index is not None and self._ours:
            with contextlib.suppress(LightcacheError):
                index.close()
        self._ours = False

    def peek(self, keys: Keys, weights: str, tenant: str) -> int:
        """Pages of the longest ready prefix; 0 if it is stale."""
        try:
            space = self._space(weights, tenant)
            if space is not None and self._index is not None:
                return self._index.peek(keys, namespace=space)
        except LightcacheError as error:
            self._fail(error)
        return 0

    def peek_many(self, keys: Keys, offsets: Offsets, weights: str, tenant: str) -> Pages:
        """The same for many requests: int32 of shape (requests,)."""
        try:
            space = self._space(weights, tenant)
            if space is not None and self._index is not None:
                return self._index.peek_many(keys, offsets, namespace=space)
        except LightcacheError as error:
            self._fail(error)
        return np.zeros(len(offsets) - 1, np.int32)

    def _space(self, weights: str, tenant: str) -> Namespace | None:
        """The namespace of these names as this index numbers it; it is looked for once between two
        refreshes, since clearing gives the name another number."""
        if self.problem is not None or self._index is None:
            return None
        wanted = weights, tenant
        if wanted not in self._refs:
            found = ctypes.c_uint32()
            encoded = namespaces.encoded(weights, "weights"), namespaces.encoded(tenant, "tenant")
            code = self._index._quick.lci_namespace_find(
                self._index._handle, *encoded, ctypes.byref(found)
            )
            if code != Code.MISSING:
                check(code, "look for a namespace")
            self._refs[wanted] = None if code else Namespace(weights, tenant, found.value)
        return self._refs[wanted]


__all__ = ["Source"]
