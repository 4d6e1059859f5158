"""How a worker serves a hybrid model: keys and values in one cache, recurrent states in another.

By the connector's own `prefix` and `prefill`, without a manager: a worker has one request at a
time, and nothing of it stays on the device. What only storage has is brought to the host before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from lightcache import Reservation
from lightcache._arguments import Keys
from lightcache.connectors import transformers as connector
from lightcache.manager import ManagerStats
from lightcache.tools.demo.generate import Generated, generate
from lightcache.tools.demo.hybrid_storage import HybridStorage
from lightcache.tools.demo.messages import Request, Tokens
from lightcache.tools.demo.settings import SECRET, Settings


class HybridSide:
    """The caches of a worker with a hybrid model, and what uses them."""

    def __init__(self, settings: Settings, name: str, model: Any, role: str, stack: ExitStack):
        """Open the caches: half of the memory is for states.

        Args:
            stack: closes everything.
        """
        half = settings.cache_size // 2
        opened = connector.open_caches(
            name,
            model,
            size=half,
            states=half,
            page_tokens=settings.page_tokens,
            secret=SECRET,
            lifetime="attached",
            role=role,
        )
        self.caches = stack.enter_context(opened)
        self.connector = stack.enter_context(
            connector.Connector(self.caches.kv, model, states=self.caches.states)
        )
        self._model = model
        self._stored: HybridStorage | None = None
        if settings.storage is not None:
            assert self.connector.hybrid is not None
            checkpoints = self.connector.hybrid.checkpoints
            self._stored = HybridStorage(settings.storage, self.caches, checkpoints, stack)

    def serve(
        self, request: Request, hold: Callable[[Reservation, Any], None]
    ) -> tuple[Generated, float, ManagerStats]:
        """Answer a request. Blocks until all of it is published.

        Args:
            hold: called in place of the end of a request that is to be held, with the pages that it
                would write and the transformers cache they are in.

        Returns:
            The answer; seconds to hash, find and pin what there was; what was reused and moved, of
            keys and values.
        """
        before = time.perf_counter()
        brought = 0
        if self._stored is not None:
            brought = self._stored.bring(self.caches.kv.hash_pages(request.tokens, leave_one=True))
        lookup = self._lookup(request.tokens, before)
        with self.connector.prefix(request.tokens) as past:
            self.connector.prefill(past)
            found = generate(self._model, request.tokens, past, request.answer_tokens)
            past.extend(np.array(found.tokens[:-1], np.int64))
            keys = self.caches.kv.hash_pages(past.tokens)
            new = len(keys) - self.caches.kv.peek(keys)
            if request.hold:
                self._hold(keys, past, hold)
        if self._stored is not None:
            self._stored.write(keys, [one.tokens for one in past.taken])
        from_storage = min(past.reused, brought * self.caches.kv.index.page_tokens)
        stats = ManagerStats(
            host_tokens=past.reused - from_storage,
            storage_tokens=from_storage,
            loaded_pages=past.reused // self.caches.kv.index.page_tokens,
            offloaded_pages=new,
        )
        return found, lookup, stats

    def _lookup(self, tokens: Tokens, before: float) -> float:
        """Look up a prompt once more, apart from loading it, only to time that."""
        assert self.connector.hybrid is not None
        keys = self.caches.kv.hash_pages(tokens, leave_one=True)
        checkpoints = self.connector.hybrid.checkpoints
        path = checkpoints.path(keys)
        at = 0 if path is None else checkpoints.deepest(path, self.caches.kv.peek(keys))
        with self.caches.kv.match(keys[:at]):
            return time.perf_counter() - before

    def _hold(self, keys: Keys, past: Any, hold: Callable[[Reservation, Any], None]) -> None:
        with self.caches.kv.reserve(keys) as new:
            if len(new.new):
                hold(new, past)


__all__ = ["HybridSide"]
