"""Looking up each key for itself, where an index has a few of many: checkpoints along a prompt."""

from __future__ import annotations

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Keys, Offsets, Pages
from lightcache.attached import Attached
from lightcache.namespaces import Namespace
from lightcache.shm.codes import check


class Sparse(Attached):
    """Part of `PageIndex`: see there."""

    def deepest(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """How many keys there are up to the last that is ready, whatever of those before it is; 0:
        none is. Goes from the end to the front and stops at the first it finds: a few ns for each
        key that is not there. Advisory, as `peek`: to use its page, `match(keys[n - 1 : n])`.
        No lock, no write; also read-only.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(keys)
        ref = self._whole._ref(namespace)
        found: int = self._quick.lci_deepest1(self._handle, where, n, ref)
        if found < 0:
            check(found, "deepest")
        return found

    def deepest_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """`deepest` for many requests in one call: int32 of shape (requests,)."""
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        counts = np.zeros(len(bounds) - 1, np.int32)
        code = self._quick.lci_deepest(
            self._handle,
            where,
            _arguments.address(bounds),
            len(counts),
            self._whole._ref(namespace),
            _arguments.address(counts),
        )
        check(code, "deepest")
        return counts

    def children(self, keys: Keys, *, namespace: Namespace | None = None) -> Pages:
        """How many pages hang on each key's page, int32 of shape (n,): those reserved or named
        right behind it, ready or still being written, that have not gone since; -1: the key is not
        ready. Two and more: here prompts part. Each was so at about some instant of the call. No
        lock, no write; also read-only.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(keys)
        counts = np.zeros(n, np.int32)
        ref = self._whole._ref(namespace)
        code = self._quick.lci_children(self._handle, where, n, ref, _arguments.address(counts))
        check(code, "children")
        return counts


__all__ = ["Sparse"]
