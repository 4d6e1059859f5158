"""What the tests of all engines ask of the cache that two of them share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import msgpack
from support.keys import keys

from lightcache import Cache, Changes, PageIndex
from lightcache.tools.events import Wire

NAME = f"engines-{os.getpid()}"
"""The names of all caches of a run begin so; what is left of them goes with the last engine."""


def until(asked: Callable[[], Any]) -> None:
    """Ask until the answer is not 0."""
    end = time.monotonic() + 60
    while not asked():
        assert time.monotonic() < end


def check_clean(name: str) -> None:
    """All invariants hold; and nothing is pinned when copies and storage have ended."""
    with Cache.attach(name) as cache:

        def unpinned() -> bool:
            cache.reap()
            report = cache.check()
            report.raise_if_broken()
            return not report.pins

        until(unpinned)


def events_agree(in_engine: Callable[..., str], module: str, name: str, medium: str) -> None:
    """An engine's classes of KV events find in our messages what msgpack finds in them."""
    with PageIndex.create(name, pages=64, config={"page_tokens": 16}) as index:
        changes, wire = Changes(index), Wire(medium, True, 0, None)
        wire.block_size_of(index)
        for path in ([1, 2, 3], [1, 2, 7]):
            index.reserve(keys(*path)).publish()
        changes.scan()
        index.drop(keys(1, 2, 3), start=2)
        changes.scan()
        messages = [wire.payload(batch, True) for batch in changes.since(0)]
    said = in_engine("events_decoded.py", module, *(message.hex() for message in messages))
    decoded = json.loads(said.split("OUT")[-1])
    sent = [event for message in messages for event in msgpack.unpackb(message)[1]]
    assert [event["type"] for event in sent] == [
        "AllBlocksCleared",
        "BlockStored",
        "BlockStored",
        "BlockRemoved",
    ]
    for ours, theirs in zip(sent, decoded, strict=True):
        assert {field: ours.get(field) for field in theirs} == theirs
