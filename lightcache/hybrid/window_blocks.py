"""WindowBlocks: device blocks of layers that see a window or a chunk, and tables of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from lightcache._arguments import Pages
from lightcache._together import assign, together
from lightcache.errors import ConfigError
from lightcache.groups import Rule
from lightcache.layout import KeyStatus
from lightcache.leases import Allocation, Lease, NamingResult
from lightcache.manager.backend import TransferBackend
from lightcache.manager.blocks import ManagedBlocks
from lightcache.manager.request import HELD, PINNED
from lightcache.manager.state import check_blocks, check_run
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.runs import PLAIN, Run

_KEPT = (KeyStatus.NEW, KeyStatus.PRESENT)

# ---- The device blocks of one rule


def is_window(rule: object) -> bool:
    """Whether it is a rule of pages with tokens, other than full attention's."""
    return type(rule) is Rule and rule not in (Rule.prefix(), Rule.point())


class WindowBlocks(ManagedBlocks):
    """Device blocks of the layers with one rule, a window or a chunk, which a `HybridManager`
    allocates. Full ones are found by the keys of their tokens, and evicted by last use alone."""

    independent = True

    def __init__(
        self,
        name: str,
        *,
        rule: Rule,
        block_tokens: int,
        blocks: int,
        backend: TransferBackend | None = None,
        run: Run = PLAIN,
        role: str = "scheduler",
        lock_timeout: float = 1.0,
    ) -> None:
        """Creates the index. The caller closes it, after the managers.

        Args:
            name, block_tokens, blocks, role, lock_timeout: as for `ManagedBlocks`.
            rule: what these layers need: `Rule.window`, `Rule.chunk`, or one of your own.
            backend: moves bytes between these blocks and host pages; None: they stay on the device.
            run: how a page of these layers lies in the host cache, with a backend: the number of
                the group there, which no other layers have, and the pages that it takes.

        Raises:
            ConfigError: another rule, a backend without a run, or more blocks than it has room for.
            Otherwise as `ManagedBlocks`.
        """
        if not is_window(rule):
            raise ConfigError(
                f"rule: expected Rule.window(tokens) or Rule.chunk(tokens), found {rule!r}; blocks "
                "of full attention are ManagedBlocks, states have Checkpoints"
            )
        if (backend is None) != (run == PLAIN):
            raise ConfigError(
                f"run: expected one with a group from 1 on together with a backend, found {run} "
                f"and backend {backend!r}; group 0 is full attention"
            )
        check_run(backend, run)
        check_blocks(backend, blocks, block_tokens)
        self.rule, self.backend, self.run = rule, backend, run
        super().__init__(
            name, block_tokens=block_tokens, blocks=blocks, role=role, lock_timeout=lock_timeout
        )

    def _began(self) -> None:
        self._beside: dict[tuple[str, str], Namespace] = {}

    @property
    def open_index(self) -> PageIndex:
        """The index.

        Raises:
            ConfigError: it is closed.
        """
        if self.index is None:
            raise ConfigError(f"the window blocks {self.name!r} are closed; make others")
        return self.index

    def beside(self, kv: Namespace) -> Namespace:
        """The namespace for the weights and tenant of a namespace of KV. If KV was cleared since,
        or has other weights, what these blocks had of that is forgotten.

        Raises:
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        names = kv.weights, kv.tenant
        if self._beside.get(names) != kv:
            for weights in {known for known, _ in self._spaces} - {kv.weights}:
                self.clear_weights(weights)
            self.clear_tenant(*names)
            self._beside[names] = kv
        return self.space(*names)


# ---- The table of a request


@dataclass(eq=False)
class WindowTable:
    """Blocks of one rule for one request."""

    window: WindowBlocks
    blocks: Pages
    """By number of the block in the sequence; -1 before `begin`. Replaced, never changed: the
    engine has it."""
    kind: bytearray
    """HELD or PINNED, of each."""
    begin: int
    """The first block that it has."""
    named: int
    """Blocks before this were named, or their naming was tried."""
    host: Lease | None = None
    """Host pages that were found, until they are loaded."""
    naming: tuple[NamingResult, int] | None = None
    """A naming whose result is not in the table yet, and its first block."""

    def grow(self, tokens: int, hold: Callable[[int], Allocation]) -> None:
        """Add blocks up to so many tokens, as `hold` gives them. Raises OutOfPages; nothing
        changed."""
        missing = -(-tokens // self.window.block_tokens) - len(self.blocks)
        if missing > 0:
            fresh = hold(missing)
            blocks = np.concatenate([self.blocks, fresh.pages])
            kind = self.kind + bytes([HELD]) * missing
            assign((self, self, fresh), ("blocks", "kind", "ended"), (blocks, kind, True))

    def settle(self) -> dict[int, int]:
        """Note what a naming has done. Returns blocks that were exchanged, by position."""
        if self.naming is None:
            return {}
        naming, first = self.naming
        end = first + naming.settled
        kind, blocks = bytearray(self.kind), self.blocks.copy()
        kind[first:end] = bytes(
            PINNED if status in _KEPT else HELD for status in naming.status[: end - first]
        )
        blocks[first:end] = naming.pages[: end - first]
        changed = np.flatnonzero(blocks != self.blocks)
        values = blocks, kind, max(end, self.named), None
        assign((self,) * 4, ("blocks", "kind", "named", "naming"), values)
        return dict(zip(changed.tolist(), blocks[changed].tolist(), strict=True))

    def give_back(self, end: int) -> Allocation | None:
        """Give back the blocks before this one. Returns those without a key, to be freed."""
        end, core = min(end, len(self.blocks)), self.window.open_index.core
        if end <= self.begin:
            return None
        given = self.blocks[self.begin : end]
        kinds = np.frombuffer(bytes(self.kind[self.begin : end]), np.uint8)
        pinned, take_pinned = Lease.attached_to(core, given[kinds == PINNED])
        held, take_held = Allocation.attached_to(core, given[kinds == HELD])
        left = self.blocks.copy()
        left[:end] = -1
        together(
            partial(setattr, self, "blocks", left),
            partial(setattr, self, "begin", end),
            take_pinned,
            take_held,
        )
        pinned.close()
        return held


__all__ = ["WindowBlocks", "WindowTable", "is_window"]
