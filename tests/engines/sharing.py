"""What the tests of all engines ask of the cache that two of them share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import msgpack
from support.keys import keys

from lightcache import Cache, Changes
from lightcache.tools.events import Wire

NAME = f"engines-{os.getpid()}"
"""The names of all caches of a run begin so; what is left of them goes with the last engine."""


TOKENS = [*range(46), 70_000, (1 << 32) - 2]


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
    how: dict[str, Any] = {"page_bytes": 64, "fingerprint": "x", "secret": bytes(16)}
    with Cache.create(name, pages=64, page_tokens=16, token_ids=True, **how) as cache:
        changes, wire = Changes(cache.index), Wire(medium, True, 0, None)
        wire.block_size_of(cache.index)
        cache.reserve(keys(1, 2, 3), tokens=TOKENS).publish()
        cache.reserve(keys(1, 2, 7)).publish()
        changes.scan()
        cache.index.drop(keys(1, 2, 3), start=2)
        changes.scan()
        records = cache.token_records
        messages = [wire.payload(batch, True, records) for batch in changes.since(0)]
    said = in_engine("events_decoded.py", module, *(message.hex() for message in messages))
    decoded = json.loads(said.split("OUT")[-1])
    sent = [event for message in messages for event in msgpack.unpackb(message)[1]]
    assert [event["type"] for event in sent] == [
        "AllBlocksCleared",
        "BlockStored",
        "BlockStored",
        "BlockRemoved",
    ]
    assert [event.get("token_ids") for event in sent] == [None, TOKENS, [], None]
    for ours, theirs in zip(sent, decoded, strict=True):
        assert {field: ours.get(field) for field in theirs} == theirs


def tokens_agree(name: str, prompts: list[list[int]]) -> None:
    """The token ids of a page and of those before it are those of a prompt, as far as both go; and
    nearly all pages have some."""
    with Cache.attach(name, readonly=True) as cache:
        records, paths = cache.token_records, dict[bytes, list[int]]()
        assert records is not None
        pages = 0
        for batch in Changes(cache.index).scan():
            rows, known = records.read(batch.stored_pages, batch.stored)
            pages += len(known)
            for number in known.nonzero()[0].tolist():
                before = batch.parents[number].tobytes()
                path = paths.get(before) if batch.has_parent[number] else []
                if path is not None:
                    paths[batch.stored[number].tobytes()] = path + rows[number].tolist()
        for path in paths.values():
            assert any(path[: len(ids)] == ids[: len(path)] for ids in prompts), path
        assert len(paths) > 0.9 * pages > 10
