"""The namespaces of an index: opening, choosing and forgetting them."""

from __future__ import annotations

import ctypes

from lightcache import _arguments, layout, namespaces
from lightcache.attached import Attached
from lightcache.errors import CacheCorrupted, ConfigError, LeaseLost, OutOfPages
from lightcache.namespaces import Namespace, NamespaceState
from lightcache.shm.codes import Code, check

_RECORD = ctypes.sizeof(layout.NamespaceRecord)


class Namespaced(Attached):
    """Part of `PageIndex`: see there."""

    _namespace: int
    default_namespace: Namespace
    """What calls without `namespace=` mean."""

    def namespace(
        self,
        weights: str = "",
        tenant: str = "",
        *,
        quota: int | None = None,
        minimum: int | None = None,
    ) -> Namespace:
        """The namespace of a weights version and a tenant, made if need be (256 at most).

        Args:
            quota: most pages it may have at a time, then it evicts its own; 0: no limit; None:
                as it is.
            minimum: pages that making room for others never takes from it: while it has no more
                than these only its own calls, `drop`, `discard` and `clear` do. 0: none; None: as
                it is. It ends with `clear`.

        Raises:
            OutOfPages: all 256 entries are taken.
            LeaseLost: read-only, and there is none of that name.
            ConfigError: a name longer than 47 bytes; a minimum above the quota; or minimums of
                more pages than the index has. Nothing was changed then.
        """
        names = namespaces.encoded(weights, "weights"), namespaces.encoded(tenant, "tenant")
        found = ctypes.c_uint32()
        if self._segment.readonly:
            code = self._quick.lci_namespace_find(self._handle, *names, ctypes.byref(found))
            if code == Code.MISSING:
                raise LeaseLost(f"namespace: there is none of weights {weights!r}, {tenant!r}")
        else:
            limits = layout.NamespaceLimits(
                quota=_limit(quota, "quota"), minimum=_limit(minimum, "minimum")
            )
            asked = ctypes.byref(limits)
            code = self._locked(
                "lci_namespace_limits", *names, asked, ctypes.byref(found), what="open a namespace"
            )
            if code == Code.FULL:
                raise OutOfPages("namespace: all 256 are in use; clear those of old weights")
            if code == Code.RANGE:
                raise ConfigError(
                    f"namespace: a minimum of {limits.minimum} pages does not go with a quota of "
                    f"{limits.quota or 'no limit'}, and the {limits.others} that other namespaces "
                    f"were promised, in an index of {self.pages}; lower one of them"
                )
        check(code, "namespace")
        return Namespace(weights, tenant, found.value)

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget a namespace (None: the default one): from the first instant no lookup finds
        anything of it, in flight included, and nothing is accepted under it. Pages that are
        pinned keep their bytes until released. Clearing again does nothing.

        The same name can be opened again and is empty then: here this is done at once if it was our
        default. Other clients hold on to the cleared one, find nothing and may reserve nothing
        until they do so too (`use(namespace(...))`): they have to know that what they compute is
        of the new weights. Takes the lock, in pieces; about 10 ns a page of the pool.
        """
        cleared = self.default_namespace if namespace is None else namespace
        check(self._locked("lci_clear", self._ref(namespace), what="clear"), "clear")
        if cleared.ref == self._namespace:
            self.use(self.namespace(cleared.weights, cleared.tenant))

    def namespace_state(self, namespace: Namespace | None = None) -> NamespaceState:
        """Whether a namespace (None: the default one) is in use, or has been cleared, by whatever
        process. No lock, about a microsecond.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        ref = self._ref(namespace)
        if check(self._quick.lci_namespace_good(self._handle, ref), "namespace_state"):
            return NamespaceState.NORMAL
        found = self._namespace_record(ref & 0xFF)
        if found.epoch & 0xFFFFFF != ref >> 8:
            return NamespaceState.CLEARED  # and its entry is another's by now
        return _state_of(found, ref & 0xFF)

    def namespaces(self) -> list[Namespace]:
        """Those in use, whoever opened them. No lock; others may open and clear meanwhile.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        found = []
        for entry in range(layout.NAMESPACES):
            one = self._namespace_record(entry)
            if _state_of(one, entry) is NamespaceState.NORMAL:
                names = one.weights.decode(errors="replace"), one.tenant.decode(errors="replace")
                found.append(Namespace(*names, (one.epoch & 0xFFFFFF) << 8 | entry))
        return found

    def _namespace_record(self, entry: int) -> layout.NamespaceRecord:
        with self._segment.busy():
            at = self._segment.address + self._places.namespaces + entry * _RECORD
            return layout.NamespaceRecord.from_buffer_copy(ctypes.string_at(at, _RECORD))

    def use(self, namespace: Namespace) -> None:
        """From now on calls of this handle without `namespace=` mean this one."""
        self._namespace = self._ref(namespace)
        self.default_namespace = namespace

    def _find_default(self) -> Namespace:
        found = ctypes.c_uint32()
        code = self._quick.lci_namespace_find(self._handle, b"", b"", ctypes.byref(found))
        if code == Code.MISSING and not self._segment.readonly:
            return self.namespace()
        return Namespace("", "", found.value)

    def _ref(self, namespace: Namespace | None) -> int:
        if namespace is None:
            return self._namespace
        if not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {namespace!r}")
        return namespace.ref


def _limit(pages: int | None, what: str) -> int:
    limit = namespaces.NO_CHANGE if pages is None else pages
    return _arguments.count(limit, what, 0, namespaces.NO_CHANGE)


def _state_of(found: layout.NamespaceRecord, entry: int) -> NamespaceState:
    try:
        return NamespaceState(found.state)
    except ValueError:
        raise CacheCorrupted(
            f"namespace {entry}: state {found.state} is none; run `lightcache check`"
        ) from None


__all__ = ["Namespaced"]
