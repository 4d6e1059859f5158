"""A router that follows `lightcache events` while the cache's writers are killed. It reads messages
by itself (support/following.py), and ends with exactly what the index has."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from multi.tokens_side import PAGE, SECRET, prompt
from support.following import Follower
from support.keys import array, chain

from lightcache import Cache, Changes, PageIndex
from lightcache.shm import Segment
from lightcache.shm.names import FOLDER

pytestmark = pytest.mark.slow
SIDE = Path(__file__).with_name("events_side.py")
TOKENS = Path(__file__).with_name("tokens_side.py")
EVERY = sorted({pair for a in range(6) for b in range(6) for pair in chain([a, b, *range(6)])})
Wait = Callable[[Callable[[], bool], str], None]


def started(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SIDE.parents[1])},
    )


class Node:
    """The processes of a node, and the router."""

    def __init__(self, name: str, seed: int, stack: ExitStack) -> None:
        self.name, self._stack = name, stack
        self._random = random.Random(seed)
        self._context = stack.enter_context(zmq.Context())
        stack.callback(Segment.unlink, name, force=True)
        self.writers: list[subprocess.Popen[str]] = []

    def publishing(self) -> tuple[subprocess.Popen[str], list[str]]:
        any_port = "tcp://127.0.0.1:*"
        process = started(
            *("-c", "from lightcache.tools.cli import main; main()", "events", self.name),
            *("--endpoint", any_port, "--replay-endpoint", any_port),
        )
        self._stack.callback(self._end, process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip().split(" at ")[1].split(", ")

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def following(self, endpoints: list[str]) -> Follower:
        follower = Follower(self._context, *endpoints)
        self._stack.callback(follower.close)
        return follower

    def writer(self, side: Path = SIDE) -> None:
        process = started(side, self.name, self._random.randrange(1 << 30))
        self._stack.callback(self._end, process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        self.writers.append(process)

    def kill_one(self) -> None:
        self._end(self.writers.pop(self._random.randrange(len(self.writers))))


def in_index(index: PageIndex) -> set[int]:
    """Of all keys that writers make, those that a look-up finds."""
    space = index.namespace()
    found = [pair for pair in EVERY if index.last_ready(array([pair]), namespace=space)]
    return {int(np.uint64(low).astype(np.int64)) for low, _ in found}


def agrees(follower: Follower, index: PageIndex) -> bool:
    if not follower.take(50):
        follower.ask()
    return set(follower.blocks) == in_index(index)


@pytest.fixture
def node(segment_name: str) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(segment_name, 1, stack)


def test_writers_are_killed(node: Node, wait_until: Wait) -> None:
    with PageIndex.create(node.name, pages=48, config={"page_tokens": 16}) as index:
        _, endpoints = node.publishing()
        follower = node.following(endpoints)
        for _ in range(2):
            node.writer()
        for _ in range(5):
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                follower.take()
            node.kill_one()
            node.writer()
        while node.writers:
            node.kill_one()
        index.reap()
        wait_until(lambda: agrees(follower, index), "what the index has")
        assert len(follower.events) > 20
        late = node.following(endpoints)
        wait_until(lambda: agrees(late, index), "what the index has, of one that came late")
        assert index.check().clean


def test_the_publisher_is_killed_and_the_cache_made_anew(node: Node, wait_until: Wait) -> None:
    config: dict[str, Any] = {"page_tokens": 16}
    with PageIndex.create(node.name, pages=48, config=config) as index:
        process, endpoints = node.publishing()
        follower = node.following(endpoints)
        node.writer()
        wait_until(lambda: follower.take() > 0 and bool(follower.blocks), "blocks")
        os.kill(process.pid, signal.SIGKILL)
        process, endpoints = node.publishing()
        other = node.following(endpoints)
        other.blocks, other.next = dict(follower.blocks), follower.next  # what a router knew
        node.kill_one()
        index.reap()
        wait_until(lambda: agrees(other, index), "what the index has, from another publisher")
        Segment.unlink(node.name, force=True)
    wait_until(lambda: not (other.take(50) or other.blocks), "an empty cache")
    with PageIndex.create(node.name, pages=20, config=config) as index:
        node.writer()
        wait_until(lambda: other.take(50) > 0 and bool(other.blocks), "blocks of the new one")
        node.kill_one()
        index.reap()
        wait_until(lambda: agrees(other, index), "what the new one has")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


FORM: dict[str, Any] = {"page_bytes": 64, "page_tokens": PAGE, "fingerprint": "x", "secret": SECRET}


def said(cache: Cache) -> dict[int, tuple[int, ...]]:
    """The tokens of every block that writers make."""
    found = {}
    for a in range(6):
        for b in range(6):
            tokens = prompt(a, b, 6)
            for number, (low, _) in enumerate(cache.hash_pages(tokens).tolist()):
                own = tuple(tokens[number * PAGE : (number + 1) * PAGE])
                found[int(np.uint64(low).astype(np.int64))] = own
    return found


def test_token_ids_are_right_or_none_while_writers_are_killed(node: Node, wait_until: Wait) -> None:
    with Cache.create(node.name, pages=48, token_ids=True, **FORM) as cache:
        right = said(cache)
        _, endpoints = node.publishing()
        follower = node.following(endpoints)
        with_tokens: set[int] = set()
        for _ in range(2):
            node.writer(TOKENS)
        for _ in range(5):
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                follower.take()
                told = {block for block, ids in follower.tokens.items() if ids}
                assert all(follower.tokens[block] == right[block] for block in told)
                with_tokens |= told
            node.kill_one()
            node.writer(TOKENS)
        while node.writers:
            node.kill_one()
        cache.reap()
        assert len(with_tokens) > 10
        assert cache.check().clean


def test_a_creator_dies_after_the_object_is_made(segment_name: str) -> None:
    process = started(TOKENS, segment_name, "create")
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()
    objects = list(FOLDER.glob(f"*{segment_name}*"))
    assert len(objects) == 3
    with Cache.create(segment_name, pages=8, **FORM):
        assert not any(path.exists() for path in objects if "~" in path.name)


@pytest.mark.parametrize("point", ["before", "within", "after"])
def test_a_writer_dies_while_it_notes_token_ids(node: Node, point: str) -> None:
    with Cache.create(node.name, pages=8, token_ids=True, **FORM) as cache:
        right, feed, records = said(cache), Changes(cache.index), cache.token_records
        assert records is not None
        tokens = prompt(1, 2, 3)
        other = [number + 5000 for number in tokens]
        cache.reserve(cache.hash_pages(other), tokens=other).publish()
        cache.evict(8)  # what is in the records now is of other pages
        process = started(TOKENS, node.name, point)
        assert process.wait(60) == -signal.SIGKILL
        assert process.stdout is not None
        process.stdout.close()
        cache.reap()
        feed.scan()
        assert not feed.told
        keys, pages = cache.hash_pages(tokens), np.arange(8)
        whole = sum(records.read(pages, np.tile(key, (8, 1)))[1].sum() for key in keys)
        assert whole == {"before": 0, "within": 2, "after": 5}[point]  # of all pages
        cache.reserve(keys).publish()  # by a writer that gives none
        (batch,) = feed.scan()
        rows, known = records.read(batch.stored_pages, batch.stored)
        assert known.sum() <= whole
        for key, row in zip(batch.stored[known], rows[known], strict=True):
            assert tuple(row.tolist()) == right[int(key[0].astype(np.int64))]
