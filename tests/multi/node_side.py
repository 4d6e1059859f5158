"""Run as a program: a machine of its own, as far as its cache is concerned.

    node_side.py NAME OPTIONS

OPTIONS is JSON: `url` of the storage, `kind` ("plain" or "hybrid"), and of a plain one what decides
its keys: secret, fingerprint, weights, page. Reads orders from standard input, a JSON object a
line, and answers each in a line:

    {"do": "run", "tokens": 42, "seed": 0, "salt": "", "tenant": ""}    a whole request: what of it
        was found where. What was found has been compared with what it must be, byte by byte.
    {"do": "flood", "seed": 7, "most": 9}    so many requests; a line with the number of each
    {"do": "halt", ...}              as "run", but stops for ever with half of its pages stored

The end of standard input ends it.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import ExitStack
from typing import Any

from support.hybrid_case import HybridWorld
from support.manager_case import World, tokens
from support.stamped import TOKEN_BYTES

from lightcache import Cache
from lightcache.manager import Prompt
from lightcache.storage import StorageSpec, StorageTier, open_storage

WAIT = 60.0  # seconds; nothing here takes one


def say(what: Any) -> None:
    """A line for the test."""
    print(json.dumps(what), flush=True)


class Node:
    """A cache and a manager, with a storage behind them that others have, too."""

    def __init__(self, stack: ExitStack, url: str) -> None:
        self.stack, self.url = stack, url
        self.backends: list[Any] = []
        self.tiers: list[StorageTier] = []
        self.requests = 0

    def stored(self, cache: Cache) -> StorageTier:
        """A tier of this cache. Who made the world closes it."""
        backend = open_storage(self.url, spec=StorageSpec.of(cache))
        self.stack.callback(backend.close)
        self.backends.append(backend)
        self.tiers.append(StorageTier(cache, backend, write_pages=cache.pages))
        return self.tiers[-1]

    def settle(self) -> None:
        """What is to be written is written."""
        for tier in self.tiers:
            assert tier._executor.wait_idle(WAIT)
            assert tier.stats().failed == tier.stats().corrupt == 0

    def prompt(self, order: dict[str, Any]) -> Prompt:
        """What is asked."""
        given = {name: order[name] for name in ("salt", "tenant") if name in order}
        return Prompt(tokens(order.get("tokens", 42), order.get("seed", 0)), **given)

    def next_request(self) -> int:
        """A name."""
        self.requests += 1
        return self.requests

    def run(self, prompt: Prompt) -> dict[str, int]:
        """A whole request."""
        raise NotImplementedError


class Plain(Node):
    """Of a model that keeps keys and values alone."""

    def __init__(
        self,
        stack: ExitStack,
        name: str,
        *,
        url: str,
        secret: str = "the secret of two machines",
        fingerprint: str = "stamped",
        weights: str = "",
        page: int = 4,
    ) -> None:
        super().__init__(stack, url)
        self.cache = Cache.open(
            name,
            pages=128,
            page_bytes=page * TOKEN_BYTES,
            page_tokens=page,
            fingerprint=fingerprint,
            secret=secret.encode(),
        )
        stack.callback(self.cache.close)
        self.world = World(
            name,
            cache=self.cache,
            block=page,
            page=page,
            blocks=64,
            weights=weights,
            storage=self.stored,
        )
        stack.callback(self.world.close)

    def run(self, prompt: Prompt) -> dict[str, int]:
        """See `Node`."""
        before = self.world.manager.stats()
        match = self.world.run(self.next_request(), prompt)
        after = self.world.manager.stats()
        self.settle_copies()
        found = {
            name: getattr(after, f"{name}_tokens") - getattr(before, f"{name}_tokens")
            for name in ("device", "host", "storage")
        }
        assert sum(found.values()) == match.usable
        return found

    def settle_copies(self) -> None:
        """What was computed is on the host, and then in storage."""
        self.world.backend.finish()
        self.world.manager.poll()
        self.settle()


class Hybrid(Node):
    """Of a model with recurrent states: two caches, and a storage behind each."""

    def __init__(self, stack: ExitStack, name: str, *, url: str) -> None:
        super().__init__(stack, url)
        self.world = HybridWorld(name, state_storage=self.stored, storage=self.stored)
        stack.callback(self.world.close)

    def run(self, prompt: Prompt) -> dict[str, int]:
        """See `Node`."""
        request = self.next_request()
        match = self.world.begin(request, prompt)
        self.world.step(request, len(prompt))
        self.world.end(request)
        self.world.settle()
        self.settle()
        return {
            "usable": match.usable,
            "device": match.device_tokens,
            "host": match.host_tokens,
            "storage": match.storage_tokens,
            "states": self.world.hybrid.stats().storage_hits,
        }


def halting(backend: Any) -> None:
    """Half of the pages of the next call are written, and it never returns."""
    whole = backend.write

    def write(keys: Any, buffers: Any, **how: Any) -> Any:
        half = len(keys) // 2
        whole(keys[:half], buffers[:half], **how)
        say("half")
        threading.Event().wait()

    backend.write = write


def main(name: str, options: str) -> None:
    """See above."""
    given = json.loads(options)
    kind = {"plain": Plain, "hybrid": Hybrid}[given.pop("kind", "plain")]
    with ExitStack() as stack:
        node = kind(stack, name, **given)
        say("there")
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "flood":
                for number in range(order["most"]):
                    node.run(node.prompt({"seed": order["seed"] + number}))
                    say(number)
                continue
            if order["do"] == "halt":
                halting(node.backends[-1])
            say(node.run(node.prompt(order)))


if __name__ == "__main__":
    main(*sys.argv[1:])
