"""Ranks in processes of their own carry out a manager's decisions: all get the same ones in every
step, and each has its own shard of every page, while a stranger evicts and reserves without pause.
A killed rank is one failed copy to the coordinator, and nothing to the other ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi import pausing
from multi.rank_worker_side import digest_of
from support.crew import PAGE
from support.manager_world import Engine, open_cache
from support.refusals import refused
from support.shard_backend import open_sharded
from support.stamped import stamps_of

from lightcache.errors import TransferFailed
from lightcache.manager import KVCacheManager, LoadHandle, ManagedBlocks, ManagerConfig, Prompt
from lightcache.manager.ranks.coordinator import RankCoordinator
from lightcache.manager.ranks.messages import Decisions
from lightcache.manager.ranks.startup import wait_for_ranks
from lightcache.shm import SharedLog

TESTS = Path(__file__).parent.parent
BLOCKS = 40
PAGES = 48
SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "0"))


def started(script: str, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(TESTS / "multi" / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS), "OPENBLAS_NUM_THREADS": "1"},
    )


def conversation(number: int) -> Prompt:
    return Prompt(np.random.default_rng(number).integers(0, 99, 60))


class Running:
    """A request of the coordinator's scheduler."""

    def __init__(self, prompt: Prompt, table: Any, load: LoadHandle) -> None:
        self.prompt, self.table, self.load = prompt, table, load
        self.computed = False


class Scheduler:
    """A coordinator, its manager, and a scheduler that decides at random."""

    def __init__(self, name: str, ranks: int, doomed: tuple[int, str, str] | None = None) -> None:
        self.random = np.random.default_rng(SEED)
        self.cache = open_sharded(name, PAGES, PAGE, ranks, lock_timeout=30.0)
        self.log = SharedLog.create(f"{name}.log", capacity=16, message_bytes=256)
        self.sides = [self.start(rank, *doomed[1:]) if doomed and rank == doomed[0]
                      else self.start(rank) for rank in range(ranks)]  # fmt: skip
        watch = {f"rank {rank}": side.pid for rank, side in enumerate(self.sides)}
        found = wait_for_ranks(self.cache, self.log, list(watch), 60, watch=watch)
        self.coordinator = RankCoordinator(self.log, found, append_timeout=60)
        self.device = ManagedBlocks(f"{name}.device", block_tokens=PAGE, blocks=BLOCKS)
        config = ManagerConfig(write_group=1, time_limit=30.0)
        self.manager = KVCacheManager(self.cache, self.device, self.coordinator, config=config)
        self.running: dict[int, Running] = {}
        self.requests = self.steps = self.loaded = self.failed = 0
        self.releases: list[int] = []

    def start(self, rank: int, *doom: str) -> subprocess.Popen[str]:
        return started(
            "rank_worker_side.py", self.cache.name, self.log.segment.name, rank, BLOCKS, *doom
        )

    # ---- what it decides

    def prompt(self) -> Prompt:
        """One of a few conversations, at any of its turns."""
        whole = conversation(int(self.random.integers(0, 6)))
        return Prompt(whole.tokens[: int(self.random.integers(2, 60))])

    def begin(self, prompt: Prompt) -> tuple[int, tuple[int, int]]:
        """A request. Its prefix is on its way."""
        self.requests += 1
        request = self.requests
        self.manager.plan(request, prompt)
        match = self.manager.take(request)
        table = self.manager.allocate(request, len(prompt))
        load = self.manager.load(request)
        self.running[request] = Running(prompt, table, load)
        return request, (match.device, match.usable)

    def arrived(self, one: Running) -> bool:
        """Whether its prefix is there, or will not be."""
        try:
            there = one.load.done()
        except TransferFailed:
            self.failed += 1
            there = True
        self.loaded += there and one.load.number is not None
        return there

    def step(self, prompts: list[Prompt], go_on: bool = True) -> str:
        """One step; the digest of what was decided."""
        lengths = dict(self.begin(prompt) for prompt in prompts)
        compute = []
        self.manager.poll()
        for one in self.running.values():
            if not one.computed and self.arrived(one):
                one.computed = True
                tokens = one.prompt.tokens.tolist()
                compute.append([tokens, one.table.tolist(), one.load.tokens])
        told = self.coordinator.step(
            Decisions(
                self.steps,
                lengths,
                json.dumps({"compute": compute, "go_on": go_on}).encode(),
                releases=tuple(self.releases),
            )
        )
        self.steps += 1
        self.releases.clear()
        for request, one in list(self.running.items()):
            if one.computed:
                self.manager.commit(request, len(one.prompt))
                self.manager.release(request)
                del self.running[request]
                self.releases.append(request)
        return digest_of(told)

    def settle(self) -> None:
        """Until no request runs and no copy is in flight."""
        while self.running or self.manager.poll() or self.coordinator.poll():
            self.hear(self.step([]))

    # ---- what the ranks say

    def line(self, rank: int) -> Any:
        out = self.sides[rank].stdout
        assert out
        said = out.readline()
        assert said, f"rank {rank} ended with {self.sides[rank].wait(60)}"
        return json.loads(said)

    def hear(self, digest: str, ranks: Any = None) -> None:
        """Every rank was told just this, and found what it should."""
        for rank in range(len(self.sides)) if ranks is None else ranks:
            assert self.line(rank) == {"step": self.steps - 1, "digest": digest, "wrong": 0}, rank

    def close(self) -> None:
        for side in self.sides:
            side.kill()
            side.wait(60)
            assert side.stdout
            side.stdout.close()
        self.cache.reap()
        self.coordinator.poll()
        self.manager.close()
        self.device.close()
        self.log.close()
        self.cache.close()


@pytest.fixture
def made(segment_name: str) -> Iterator[Any]:
    schedulers: list[Scheduler] = []

    def make(ranks: int, *doomed: Any) -> Scheduler:
        schedulers.append(Scheduler(segment_name, ranks, *doomed))
        return schedulers[-1]

    yield make
    for scheduler in schedulers:
        scheduler.close()


def nothing_is_left(scheduler: Scheduler) -> None:
    """Of anybody, in either tier."""
    scheduler.cache.reap()
    assert scheduler.coordinator.in_flight() == (0,) * len(scheduler.sides)
    for index in (scheduler.cache.index, scheduler.device.index):
        assert index is not None
        index.evict(1)  # collects what was doomed
        found = index.stats()
        assert (found.writing, found.held, found.doomed) == (0, 0, 0), found
        report = index.check()
        assert report.clean, report.message
        assert report.pins == 0


def host_pages_are_whole(scheduler: Scheduler, ranks: int) -> int:
    """Every shard of every page of every conversation; how many pages there are."""
    pages = 0
    for seed in range(6):
        prompt = conversation(seed)
        space = scheduler.manager.state.weights.open_space("")
        with scheduler.cache.match(prompt.keys(space.host_spec), namespace=space.host) as lease:
            for i, page in enumerate(lease.pages.tolist()):
                found = np.frombuffer(bytes(memoryview(scheduler.cache.pool[page])), np.uint64)
                for rank in range(ranks):
                    wanted = stamps_of(prompt.tokens, rank)[i * PAGE : (i + 1) * PAGE]
                    assert (found[rank * PAGE : (rank + 1) * PAGE] == wanted).all(), (seed, i, rank)
            pages += len(lease)
    return pages


def keep_one_conversation(scheduler: Scheduler) -> None:
    """Whatever the stranger evicts, something is left to be loaded."""
    whole = conversation(0)
    scheduler.hear(scheduler.step([whole]))
    scheduler.settle()
    space = scheduler.manager.state.weights.open_space("")
    kept = scheduler.cache.index.protect(whole.keys(space.host_spec), namespace=space.host)
    assert kept == len(whole) // PAGE
    scheduler.device.index.evict(BLOCKS)


@pytest.mark.slow
@pytest.mark.stress
def test_eight_ranks_decide_alike_while_a_stranger_evicts(made: Any) -> None:
    scheduler = made(8)
    keep_one_conversation(scheduler)
    stranger = started("stranger_side.py", scheduler.cache.name)
    try:
        assert stranger.stdout
        stranger.stdout.readline()
        while scheduler.steps < 100 or not scheduler.loaded:
            prompts = [scheduler.prompt() for _ in range(int(scheduler.random.integers(0, 3)))]
            if len(scheduler.running) > 1:  # blocks for two long ones
                prompts = []
            scheduler.hear(scheduler.step(prompts[:1]))
            if scheduler.random.random() < 0.2:  # what is to be loaded must have left the device
                scheduler.device.index.evict(BLOCKS)
        scheduler.settle()
    finally:
        stranger.kill()
        with stranger:
            pass
    assert scheduler.loaded > 0
    assert scheduler.failed == 0
    assert host_pages_are_whole(scheduler, 8) > 0
    nothing_is_left(scheduler)
    scheduler.hear(scheduler.step([], go_on=False))
    assert [side.wait(60) for side in scheduler.sides] == [0] * 8


PROMPT = Prompt(np.arange(30))


def doom(scheduler: Scheduler, victim: int, kind: str) -> list[int]:
    """Work until the victim stops in its copy; the ranks that go on."""
    others = [rank for rank in range(len(scheduler.sides)) if rank != victim]
    scheduler.hear(scheduler.step([PROMPT]))  # computed, and on its way to the host behind it
    if kind == "load":
        scheduler.settle()
        scheduler.device.index.evict(BLOCKS)
        # The load is ordered before its step: the victim never comes to that.
        scheduler.hear(scheduler.step([PROMPT]), others)
    return others


@pytest.mark.crash
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("load", "adopted"),
        ("offload", "copying"),
        pytest.param("load", "verdict", marks=pytest.mark.slow),
        pytest.param("load", "copying", marks=pytest.mark.slow),
        pytest.param("offload", "adopted", marks=pytest.mark.slow),
        pytest.param("offload", "verdict", marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed_and_another_takes_its_place(made: Any, kind: str, stage: str) -> None:
    victim = 1
    scheduler = made(3, (victim, kind, stage))
    others = doom(scheduler, victim, kind)
    assert scheduler.line(victim) == {"stopped": stage}
    (made_of_it,) = scheduler.coordinator._running.values()
    scheduler.sides[victim].kill()
    scheduler.sides[victim].wait(60)
    while scheduler.coordinator.poll():  # it notices the death itself
        pass
    refused(TransferFailed, rf"rank {victim} .* died", made_of_it.done)
    before = scheduler.manager.stats()
    scheduler.manager.poll()
    after = scheduler.manager.stats()
    failed = after.failed_loads - before.failed_loads, after.failed_offloads
    assert failed == ((1, 0) if kind == "load" else (0, 1))
    # Without it nothing is copied, and everything is computed.
    for _ in range(4):
        scheduler.hear(scheduler.step([scheduler.prompt()]), others)
    with pytest.raises(TransferFailed, match="have died or left"):
        scheduler.coordinator.load(
            scheduler.cache.match(PROMPT.keys(spec(scheduler))), np.arange(0), 0
        )
    while scheduler.running or scheduler.manager.poll():
        scheduler.hear(scheduler.step([]), others)
    # Another one: its device is empty, so what the manager knows of the device is not true of it.
    scheduler.device.index.evict(BLOCKS)
    assert scheduler.sides[victim].stdout
    scheduler.sides[victim].stdout.close()
    scheduler.sides[victim] = scheduler.start(victim)
    (client,) = wait_for_ranks(scheduler.cache, scheduler.log, [f"rank {victim}"], 60)
    scheduler.coordinator.replace(victim, client)
    loaded = scheduler.loaded
    for _ in range(2):
        scheduler.hear(scheduler.step([PROMPT]))
        scheduler.settle()
        scheduler.device.index.evict(BLOCKS)
    assert scheduler.loaded > loaded
    host_pages_are_whole(scheduler, 3)
    nothing_is_left(scheduler)


def spec(scheduler: Scheduler) -> Any:
    return scheduler.manager.state.weights.open_space("").host_spec


WRITES = """
import sys
from multi.test_rank_decisions import rank_zero
rank_zero(sys.argv[1])
"""


def rank_zero(name: str) -> None:
    """A data-parallel rank, with a device and a manager of its own."""
    engine = Engine(f"{name}", owned=True, blocks=32, block=4, page=8, pages=32)
    engine.begin(1, Prompt(np.arange(30)))
    engine.compute(1, 30, [])
    engine.end(1, publish=True)
    print(engine.manager.stats().offloaded_pages, flush=True)
    sys.stdin.readline()
    engine.close()


def hits_what_another_wrote(one: Engine) -> None:
    """24 of 30 tokens: 3 pages of the host."""
    match = one.manager.plan(1, Prompt(np.arange(30)))
    assert (match.device, match.host) == (0, 24)
    one.manager.cancel(1)
    assert one.begin(1, Prompt(np.arange(30)))
    assert one.compute(1, 30, [])  # looks at every stamp
    assert one.manager.stats().host_tokens == 24
    one.settle()


def test_data_parallel_ranks_share_the_host(segment_name: str) -> None:
    command = [sys.executable, "-W", "error", "-c", WRITES, segment_name]
    path = pausing.python_path(TESTS)
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as zero:
        assert zero.stdout
        assert zero.stdout.readline() == "3\n"
        with open_cache(segment_name, 32, 8) as cache:
            how: dict[str, Any] = {"blocks": 32, "block": 4, "page": 8, "pages": 32}
            one = Engine(f"{segment_name}.one", owned=True, cache=cache, **how)
            try:
                hits_what_another_wrote(one)
            finally:
                one.close()
        zero.communicate("\n", 60)
        assert zero.returncode == 0
