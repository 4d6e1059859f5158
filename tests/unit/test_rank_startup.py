"""Ranks that start, and those that do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.crew import PAGE, Rank
from support.scripts import with_support
from support.shard_backend import open_sharded

from lightcache import Cache
from lightcache.errors import Abandoned, ConfigError, WaitTimeout
from lightcache.manager.ranks.coordinator import RankCoordinator
from lightcache.manager.ranks.messages import Decisions, append
from lightcache.manager.ranks.startup import RankStage, StartupBarrier, wait_for_ranks
from lightcache.shm import SharedLog

NAMES = ["rank 0", "rank 1"]


class Place:
    """Where ranks are to start."""

    def __init__(self, name: str) -> None:
        self.cache = open_sharded(name, 8, PAGE, 2)
        self.log = SharedLog.create(f"{name}.log", capacity=1, message_bytes=64)
        self.ranks: list[Rank] = []

    def attach(self, rank: int) -> Rank:
        self.ranks.append(Rank(self.cache.name, self.log.segment.name, rank))
        return self.ranks[-1]

    def close(self) -> None:
        for each in self.ranks:
            each.close()
        self.log.close()
        self.cache.close()


@pytest.fixture
def place(segment_name: str) -> Iterator[Place]:
    made = Place(segment_name)
    yield made
    made.close()


def test_one_stage_after_the_other(place: Place) -> None:
    barrier = StartupBarrier(place.cache, place.log, NAMES)
    assert barrier.look() == dict.fromkeys(NAMES, RankStage.ABSENT)
    name = place.cache.name
    with Cache.attach(name, secret=b"a secret of tests", role="rank 1"):
        assert barrier.look() == {"rank 0": RankStage.ABSENT, "rank 1": RankStage.ATTACHED}
        zero = place.attach(0)
        # Both are of this process: which of them its one reader is, cannot be seen.
        assert barrier.look() == {"rank 0": RankStage.JOINED, "rank 1": RankStage.ATTACHED}
        zero.worker.ready(60)
        assert barrier.look() == {"rank 0": RankStage.READY, "rank 1": RankStage.ATTACHED}
    with pytest.raises(Abandoned, match="rank 1 had attached"):
        barrier.look()


def test_ready_ranks_work(place: Place) -> None:
    barrier = StartupBarrier(place.cache, place.log, NAMES)
    ranks = [place.attach(rank) for rank in (0, 1)]
    # The log has one entry: its second reader is called when the first has answered.
    barrier.look()
    for each in ranks:
        each.worker.ready(60)
    assert set(barrier.look().values()) == {RankStage.READY}
    found = wait_for_ranks(place.cache, place.log, [], 0)
    assert found == []
    assert barrier.clients() == [each.cache.client_id for each in ranks]
    coordinator = RankCoordinator(place.log, barrier.clients())
    told = coordinator.step(Decisions(5))
    assert [each.worker.step(60) for each in ranks] == [told, told]


def test_a_rank_that_joins_later_is_called_too(place: Place) -> None:
    barrier = StartupBarrier(place.cache, place.log, NAMES)
    zero = place.attach(0)
    barrier.look()
    one = place.attach(1)
    assert barrier.look()["rank 1"] is not RankStage.READY  # no room: the first has yet to answer
    zero.worker.ready(60)
    barrier.look()
    one.worker.ready(60)
    # Rank 0 has read the second call or has not, and is ready all the same.
    assert set(barrier.look().values()) == {RankStage.READY}


def test_what_others_are_told_is_not_for_a_rank_that_starts(place: Place) -> None:
    rank = place.attach(0)
    append(place.log, Decisions(3), 0)
    with pytest.raises(WaitTimeout):
        rank.worker.ready(0)
    append(place.log, None, 0)
    rank.worker.ready(0)


def test_a_call_is_nothing_to_those_that_run(place: Place) -> None:
    zero = place.attach(0)
    barrier = StartupBarrier(place.cache, place.log, NAMES[:1])
    barrier.look()
    zero.worker.ready(60)
    again = StartupBarrier(place.cache, place.log, NAMES[:1])
    again.look()
    with pytest.raises(WaitTimeout):
        zero.worker.step(0)
    assert again.look() == {"rank 0": RankStage.READY}


def test_a_timeout_names_the_missing_and_their_stages(place: Place) -> None:
    place.attach(1)
    said = r"rank 0 has not attached to the cache; rank 1 has joined the log and has not called"
    with pytest.raises(WaitTimeout, match=said):
        wait_for_ranks(place.cache, place.log, NAMES, 0)
    with pytest.raises(WaitTimeout):
        place.ranks[0].worker.ready(0) or place.ranks[0].worker.ready(0)


DIES = with_support(
    """
import os, signal, sys
from lightcache import Cache
cache = Cache.attach(sys.argv[1], secret=b"a secret of tests", role="rank 1")
print(flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_a_rank_that_dies_is_named_at_once(place: Place, tmp_path: Any) -> None:
    path = tmp_path / "dies.py"
    path.write_text(DIES)
    command = [sys.executable, str(path), place.cache.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        barrier = StartupBarrier(place.cache, place.log, NAMES)
        assert barrier.look()["rank 1"] is RankStage.ATTACHED
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == -signal.SIGKILL
        with pytest.raises(Abandoned, match=f"rank 1 .pid {process.pid}. has died"):
            barrier.look()
        # Another one in a slot behind the dead one's.
        with Cache.attach(place.cache.name, secret=b"a secret of tests", role="rank 1"):
            again = StartupBarrier(place.cache, place.log, NAMES)
            assert again.look()["rank 1"] is RankStage.ATTACHED
        place.cache.reap()
        with pytest.raises(Abandoned, match="rank 1 had attached"):
            barrier.look()
        with pytest.raises(WaitTimeout):  # from now on it is one that is yet to come
            wait_for_ranks(place.cache, place.log, NAMES, 0)


def test_a_process_that_ends_before_it_attaches(place: Place) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = {"rank 0": process.pid}
    with pytest.raises(WaitTimeout):
        wait_for_ranks(place.cache, place.log, NAMES, 0, watch=watch)
    open_before = len(os.listdir("/proc/self/fd"))
    barrier = StartupBarrier(place.cache, place.log, NAMES, watch=watch)
    process.communicate(b"\n")
    with pytest.raises(Abandoned, match="process of rank 0 has ended"):
        barrier.look()
    barrier.close()
    with pytest.raises(Abandoned, match="process of rank 0 has ended"):
        wait_for_ranks(place.cache, place.log, NAMES, watch=watch)
    assert len(os.listdir("/proc/self/fd")) <= open_before


def test_what_is_refused(place: Place) -> None:
    rank = place.attach(0)
    for wrong in (["a", "a"], [""]):
        with pytest.raises(ConfigError, match="names"):
            StartupBarrier(place.cache, place.log, wrong)
    with pytest.raises(ConfigError, match="watch"):
        StartupBarrier(place.cache, place.log, NAMES, watch={"rank 7": os.getpid()})
    with pytest.raises(ConfigError, match="writer"):
        StartupBarrier(place.cache, rank.log, NAMES)


def test_a_scheduler_that_dies_while_ranks_start(place: Place) -> None:
    rank = place.attach(0)
    place.log.close()
    with pytest.raises(Abandoned):
        rank.worker.ready(60)
    place.log = SharedLog.attach(place.log.segment.name, writer=True)
