"""One side of a handoff, in a process of its own, that stops at a stage and waits to be killed.

handoff_side.py CACHE STAGE
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import numpy as np
from support.manager_world import Engine, open_cache

from lightcache import ClientId
from lightcache.manager import Prompt, WritePolicy
from lightcache.manager.handoff import hand_off, receive

PROMPT = Prompt(np.arange(21))
LONGER = Prompt(np.arange(22))
PAGE, PAGES = 8, 16


def say(what: Any) -> None:
    """A line to the test."""
    print(json.dumps(what), flush=True)


def stop(*_: Any, **how: Any) -> None:
    """Here we are killed."""
    del how
    say("stopped")
    while True:
        signal.pause()


def engine_of(name: str, side: str, **config: Any) -> Engine:
    """An engine on the node's cache, which the test holds as well."""
    cache = open_cache(name, PAGES, PAGE)
    how: dict[str, Any] = {"owned": True, "blocks": 16, "block": 4, "page": PAGE, "pages": PAGES}
    return Engine(f"{name}.{side}", cache=cache, **how, **config)


def prefill(name: str, stage: str) -> None:
    """Compute the prompt and hand it off to the client that the test names."""
    engine = engine_of(name, "prefill", write=WritePolicy.BACK)
    engine.begin(1, PROMPT)
    engine.compute(1, 21, [])
    backend: Any = engine.backend
    if stage == "saving":
        backend._save = stop
    elif stage == "writing":
        backend._offload = lambda moving: left.append(moving)  # it never ends
    left: list[Any] = []
    adopter = ClientId(*json.loads(sys.stdin.readline()))
    say(bytes(hand_off(engine.manager, 1, [adopter])).hex())
    stop()


def decode(name: str, stage: str) -> None:
    """Take over what the test hands us."""
    engine = engine_of(name, "decode")
    say(list(engine.cache.client_id))
    handed = bytes.fromhex(json.loads(sys.stdin.readline()))
    manager: Any = engine.manager
    if stage == "named":
        stop()
    elif stage == "adopted":
        engine.cache.wait = stop  # type: ignore[assignment,method-assign]
    elif stage == "taken":
        manager.load = stop
    elif stage == "loading":
        engine.backend.at_once = False
    found = receive(manager, 1, LONGER, handed)
    assert stage == "loading" or found.done()
    stop()


if __name__ == "__main__":
    {"prefill": prefill, "decode": decode}[sys.argv[1]](*sys.argv[2:])
