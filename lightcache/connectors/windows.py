"""Keys and values of sliding windows and chunks: pages at the positions from which a prompt can
continue."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np

from lightcache import Lease, Load, Offload
from lightcache._arguments import Keys
from lightcache.connectors.cache_layers import Pair, WindowTail
from lightcache.connectors.model_pages import TokenPages
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.prefix_cache import Counters, empty_rows, planes_of_rows
from lightcache.errors import Abandoned, NoSpace, TransferFailed
from lightcache.groups import Group
from lightcache.namespaces import Namespace


class WindowGroup:
    """Moves the pages of the layers with one window, or one length of chunks."""

    def __init__(self, pool: Pooled, pages: TokenPages, figures: Counters) -> None:
        """Args:
        pool: that moves these pages.
        figures: counters of the connector.
        """
        self.pages, self.cache = pages, pool.cache
        self._pool, self._figures = pool, figures

    def group(self, namespace: Namespace | None) -> Group:
        """For a `GroupSet`."""
        pages = self.pages
        return Group(pages.name, pages.rule, self.cache.index, namespace, pages.run)

    def load(
        self, tails: Mapping[int, WindowTail], lease: Lease, first: int, position: int
    ) -> None:
        """Restore what a position needs into empty layers, and take the lease over as `Load` does.
        Blocks on the CPU; on a GPU the current stream waits.

        Args:
            tails: the layers, by number.
            first: number of the lease's first page in the prompt.
            position: in tokens.

        Raises:
            TransferFailed: the copy failed.
        """
        size = self.pages.geometry.page_tokens
        begin, restored = first * size, position - first * size
        # Attention in chunks is given rows before the chunk, too, and masks them: they must exist,
        # and be finite.
        window = next(iter(tails.values())).sliding_window - 1
        zeros = max(0, min(position, window) - restored)
        rows = empty_rows(self.pages, zeros + restored)
        for number, (keys, values) in rows.items():
            for tensor in (keys, values):
                tensor[:, :, :zeros] = 0
            tails[number].place(keys, values, position, begin)
        if not len(lease.pages):
            return
        self._pool.wait_for(lease.pages)
        slots = np.arange(zeros, zeros + restored)
        load = Load(self._pool.engine, lease, slots, planes=planes_of_rows(self.pages, rows))
        with contextlib.suppress(TransferFailed):  # `done` raises it, and gives the lease back
            load.transfer.wait_on()
        load.done()

    def save(
        self, keys: Keys, namespace: Namespace | None, rows: dict[int, Pair], position: int
    ) -> None:
        """Copy what a position needs into the cache, except pages that are there or that another
        process is writing. Blocks until they are published. Without room, or in a namespace that
        was cleared meanwhile, nothing is saved.

        Args:
            keys: of the prompt's pages.
            rows: from the beginning of the first page that is needed, by layer.
            position: in tokens.

        Raises:
            TransferFailed: the copy failed.
        """
        pages = position // self.pages.geometry.page_tokens
        first = self.pages.rule.first(pages, self.pages.geometry.page_tokens)
        if first == pages:
            return
        run = self.pages.run
        parts = run.keys(np.ascontiguousarray(keys[first:pages]))
        try:
            with self.cache.reserve(parts, independent=True, run=run, namespace=namespace) as held:
                counts = {
                    "saved_pages": len(held.new),
                    "present_pages": len(held.present),
                    "busy_pages": len(held.busy),
                }
                missing, why = len(held.missing), held.why
                if len(held.new) and not missing:
                    self._pool.wait_for(held.pages)
                    slots = np.arange((pages - first) * self.pages.geometry.page_tokens)
                    planes = planes_of_rows(self.pages, rows)
                    Offload(self._pool.engine, held, slots, planes=planes).wait()
        except Abandoned:
            self._figures.add(cleared=1)
            return
        except NoSpace as error:
            counts, missing, why = {}, len(parts), str(error)
        if missing:
            self._figures.no_room(self.cache.name, missing, len(parts), why)
        else:
            self._figures.add(**counts)

    def close(self) -> None:
        """Wait for copies."""
        self._pool.close()


__all__ = ["WindowGroup"]
