"""Checkpoints: states that were copied while a model computed, and the cache that keeps them.

A checkpoint behind n tokens has the key of the page of keys and values that ends there, in a cache
of its own, whose pages are one state each. There it is found, evicted and counted apart from keys
and values; what joins the two is a match, see `Connector.prefix`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightcache import Cache, Lease, Namespace, hybrid
from lightcache._arguments import Keys
from lightcache.connectors.cache_layers import parts_of
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.prefix_cache import PrefixCache
from lightcache.connectors.state_mover import StateMover, States
from lightcache.connectors.state_pages import StatePages, planes_of_states, prepare
from lightcache.errors import Abandoned, LightcacheError, TransferFailed
from lightcache.hybrid.spaces import Path, Tier
from lightcache.manager.fetching import wait_on
from lightcache.namespaces import NamespaceState

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.manager.traffic import Movement


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state behind the first tokens of a sequence; nothing changes it."""

    tokens: int
    """How many it knows: everything about them, and of nothing else."""
    states: States = field(repr=False)
    """Tensors by layer and part."""
    named: int = 0
    """Tokens whose ids were known when it was taken, computed or not."""


def copied(past: PrefixCache, layers: tuple[int, ...], named: int) -> Checkpoint:
    """A checkpoint of what these layers keep now. On a GPU the copies are enqueued."""
    states = {
        at: {name: one.clone() for name, one in parts_of(past.layers[at]).items()} for at in layers
    }
    return Checkpoint(past.held, states, named)


class Checkpoints:
    """The checkpoints of one model in one cache: `lightcache.hybrid.Checkpoints` with a host and no
    slots, for here every state is in tensors of its own."""

    def __init__(
        self,
        kv: Cache,
        states: Cache,
        pages: StatePages,
        config: Any,
        pinned: PinnedPages | None,
        most: int | None,
    ) -> None:
        """Args:
        kv, states: of keys and values, and of the states.
        config: of the model.
        pinned: see `Connector`.
        most: on one path; None: any number.
        """
        self.pages = pages
        seen = PrefixCache(config)  # every transfer brings planes of its own
        prepare(pages, seen)
        self.cache = states
        self._kv = kv.index
        planes = planes_of_states(pages, self._states(seen))
        self._pool = Pooled(states, pages.geometry, planes, pages.device, pinned)
        self._mover = StateMover(pages, self._pool)
        self._all = hybrid.Checkpoints(None, states, self._mover, most=most)

    def _states(self, past: PrefixCache) -> States:
        return {at: parts_of(past.layers[at]) for at in self.pages.geometry.layers}

    def path(self, keys: Keys, namespace: Namespace | None = None) -> Path | None:
        """The positions of a prompt: of keys and values, and in their namespace. None: that was
        cleared.

        Raises:
            OutOfPages, LockTimeout: as `Cache.namespace`, of the states' cache.
        """
        kv = self._kv.default_namespace if namespace is None else namespace

        def good() -> bool:
            return self._kv.namespace_state(kv) is NamespaceState.NORMAL

        with self._all.lock:
            space = self._all.spaces.beside(kv, good)
        return None if space is None else Path(keys, space)

    def deepest(self, path: Path, most: int | None = None) -> int:
        """How many of a prompt's first pages the deepest checkpoint of it knows, by looking only;
        0: there is none. Looks from the last of them, or of the first `most`, to the front: a few
        ns a page."""
        found = self._all.deepest(path, most)
        return 0 if found is None else found[1]

    def match(self, path: Path, count: int) -> Lease:
        """The checkpoint behind so many pages, pinned and marked as used; an empty lease: it is
        gone."""
        return self.cache.match(path.key(count), namespace=path.space.of(Tier.HOST))

    def load(self, past: PrefixCache, lease: Lease) -> None:
        """Restore a state into an empty cache, and take the lease over as `Load` does. Blocks on
        the CPU; on a GPU the current stream waits.

        Raises:
            TransferFailed: the copy failed; or what it raised, if that is none of our errors.
        """
        self._all.poll()
        prepare(self.pages, past)
        with self._mover.lent(self._states(past)) as slot:
            with self._all.lock:
                movement = self._all.traffic.load(lease, slot)
            with self._told(movement):
                wait_on(movement, None)
                movement.done()

    def save(self, path: Path, count: int, found: Checkpoint, *, fork: bool = False) -> None:
        """Copy a checkpoint into the cache, behind the deepest one before it, unless it is there or
        somebody writes it just now. Blocks until it is published. Without room, or in a namespace
        that was cleared meanwhile, it is not saved.

        Args:
            count: pages of the path that it knows.
            fork: prompts part there.

        Raises:
            TransferFailed: the copy failed; or what it raised, if that is none of our errors.
        """
        self._all.poll()
        with self._mover.lent(found.states) as slot:
            movement = self._all.donate(slot, path, count, fork=fork)
            if movement is None:
                return
            with self._told(movement):
                try:
                    movement.wait()
                except TransferFailed:
                    if not isinstance(movement.error, Abandoned):
                        raise

    @contextlib.contextmanager
    def _told(self, movement: Movement) -> Iterator[None]:
        """An exception that is none of our errors is for whoever waits for the copy, here and now,
        and not for the next call, which polls."""
        foreign = self._all.traffic.moves.foreign
        try:
            yield
        except TransferFailed:
            foreign.tell()
            raise
        except LightcacheError:
            raise
        except Exception:  # of the wait itself, which fails the copy as well
            with contextlib.suppress(Exception):
                movement.wait()  # else it fails behind us, and the next call is told
            try:
                foreign.tell()
            except Exception as other:
                if other is not movement.error:
                    foreign.note(other)
            raise

    def close(self) -> None:
        """Wait for copies, and let go of the cache."""
        self._pool.close()  # which ends every copy; nothing else is held between calls


__all__ = ["Checkpoint", "Checkpoints", "copied"]
