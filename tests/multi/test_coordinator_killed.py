"""A killed coordinator: its ranks finish their copies, give pages back, and serve the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi import pausing
from support.crew import PAGE, Rank
from support.keys import prompt
from support.shard_backend import open_sharded
from support.stamped import stamps_of

from lightcache.errors import Abandoned
from lightcache.manager.ranks.coordinator import RankCoordinator
from lightcache.manager.ranks.messages import Decisions
from lightcache.shm import SharedLog

TESTS = Path(__file__).parent.parent
TOKENS = np.arange(2 * PAGE)

COORDINATES = """
import json, signal, sys
import numpy as np
from lightcache import ClientId
from lightcache.manager.ranks.coordinator import RankCoordinator
from lightcache.manager.ranks.messages import Decisions
from lightcache.manager.ranks.messages import Kind, Order, encode, parts_of
from lightcache.shm import SharedLog
from support.crew import PAGE
from support.keys import prompt
from support.shard_backend import open_sharded

name, stage = sys.argv[1:]
cache = open_sharded(name, 16, PAGE, 2)
log = SharedLog.create(name + ".log", capacity=64, message_bytes=64)
print(flush=True)
coordinator = RankCoordinator(log, [ClientId(*each) for each in json.loads(sys.stdin.readline())])
if stage != "nothing":
    new = cache.reserve(prompt(1, 2), shards=2)
    made = coordinator.offload(new, np.arange(2 * PAGE))
if stage == "reserved":
    more = cache.reserve(prompt(2, 2), shards=2)
if stage == "not ordered":  # killed between a ticket and its order
    lease = cache.match(prompt(0, 2))
    ticket = lease.ticket(list(coordinator.ranks), timeout=3600)
if stage == "half an order":
    lease = cache.match(prompt(0, 2))
    ticket = bytes(lease.ticket(list(coordinator.ranks), timeout=3600))
    order = encode(Order(Kind.LOAD, 9, ticket, np.arange(0, 16 * PAGE, 2)))
    log.append(parts_of(order, 64)[0])
if stage == "half a message":
    log.append(parts_of(encode(Decisions(1, extra=bytes(200))), 64)[0])
print(flush=True)
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize(
    "stage",
    ["nothing", "ordered", "reserved", "half a message", "not ordered", "half an order"],
)
@pytest.mark.parametrize("begun", [False, True])
def test_ranks_outlive_their_coordinator(segment_name: str, stage: str, begun: bool) -> None:
    with open_sharded(segment_name, 16, PAGE, 2) as cache:
        with cache.reserve(prompt(0, 2)) as new:
            new.publish()
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-c", COORDINATES, segment_name, stage],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS)},
        ) as process:
            assert process.stdin
            assert process.stdout
            process.stdout.readline()
            ranks = [Rank(segment_name, f"{segment_name}.log", rank) for rank in (0, 1)]
            clients = [each.cache.client_id for each in ranks]
            print(json.dumps(clients), file=process.stdin, flush=True)
            assert process.stdout.readline()
            for each in ranks:
                each.compute(TOKENS, TOKENS)
                each.backend.at_once = False
                if begun:  # else they read all of it when its writer is dead already
                    with pytest.raises(TimeoutError):
                        each.worker.step(0.01)
            process.kill()
            process.wait(60)
        for each in ranks:
            with pytest.raises(Abandoned):
                each.worker.step(60)
            assert each.worker.in_flight == 0
            assert not each.backend.going
        written = 0 if stage == "nothing" else 2
        assert cache.peek(prompt(1, 2)) == written  # the ranks had all that was left to do
        nothing_is_left(cache)
        another_leads(cache, ranks)
        for each in ranks:
            each.close()


def nothing_is_left(cache: Any) -> None:
    cache.reap()
    cache.evict(1)  # collects what was doomed
    found = cache.stats()
    assert (found.writing, found.held, found.doomed, found.tickets) == (0, 0, 0, 0), found
    report = cache.check()
    assert report.clean, report.message
    assert report.pins == 0


def another_leads(cache: Any, ranks: list[Rank]) -> None:
    with SharedLog.attach(ranks[0].log.segment.name, writer=True) as log:
        coordinator = RankCoordinator(log, [each.cache.client_id for each in ranks])
        made = coordinator.offload(cache.reserve(prompt(3, 2), shards=2), TOKENS)
        told = coordinator.step(Decisions(7, extra=bytes(100)))
        for each in ranks:
            each.backend.at_once = True
            assert each.worker.step(60) == told
        made.wait(60)
        with cache.match(prompt(3, 2)) as lease:
            for each in ranks:
                found = each.backend._page(int(lease.pages[1]))
                assert (found == stamps_of(TOKENS, each.rank)[PAGE:]).all()
        del made, coordinator
    nothing_is_left(cache)
