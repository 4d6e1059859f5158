"""Ranks in processes of their own write the pages of one reservation together, shard by shard;
ranks of other group sizes read them. One that is killed takes the reservation with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi import pausing
from multi.rank_side import GEOMETRIES, PAGES, SECRET, SLOTS
from support.keys import prompt
from support.refusals import refused

from lightcache import Cache, ClientId, ConfigError, Reservation

TESTS = Path(__file__).parent.parent
NAME = 1  # of the prompt


class Worker:
    """A process of rank_side.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(TESTS / "multi" / "rank_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": pausing.python_path(TESTS),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )

    def __call__(self, do: str, **order: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps({"do": do, **order}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, f"{do}: the worker ended with {self.process.wait(60)}"
        return json.loads(line)

    def end(self, kill: bool = False) -> None:
        with self.process:
            if kill:
                self.process.kill()


class Pool:
    """Eight ranks that write, then four that read; each is started when it is needed."""

    def __init__(self) -> None:
        self.made: dict[int, Worker] = {}

    def __getitem__(self, which: slice) -> list[Worker]:
        numbers = range(12)[which]
        for number in numbers:
            if number not in self.made:
                self.made[number] = Worker()
        return [self.made[number] for number in numbers]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    for worker in made.made.values():
        worker.end()


def together(calls: Sequence[Any]) -> list[Any]:
    """All of them at once, one thread each."""
    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        return [future.result(60) for future in [threads.submit(call) for call in calls]]


class Scheduler:
    """Holds the cache, and tells ranks what to do."""

    def __init__(self, name: str, kind: str) -> None:
        self.kind, self.geometry = kind, GEOMETRIES[kind]
        self.tokens = self.geometry.page_tokens
        self.cache = Cache.create(
            name,
            pages=PAGES,
            page_bytes=self.geometry.page_bytes,
            page_tokens=self.tokens,
            fingerprint=f"model {self.geometry.fingerprint()}",
            secret=SECRET,
        )

    def slots(self, pages: int, seed: int) -> list[int]:
        """Device blocks of two tokens, scattered."""
        blocks = np.random.default_rng(seed).permutation(SLOTS // 2)
        found = (blocks[:, None] * 2 + np.arange(2)).reshape(-1)
        if self.tokens == 1:
            found = np.random.default_rng(seed).permutation(SLOTS)
        return [int(slot) for slot in found[: pages * self.tokens]]

    def join(self, worker: Worker, rank: int, ranks: int, **how: Any) -> ClientId:
        order = {"name": self.cache.name, "geometry": self.kind, "rank": rank, "ranks": ranks}
        told = worker("join", **order, seed=rank + ranks, **how)
        assert isinstance(told, list), told
        return ClientId(*told)

    def write(self, workers: list[Worker], clients: list[ClientId], new: Reservation) -> list[Any]:
        """One ticket for all; each adopts its shard, writes it and publishes it."""
        pages = int(new.new.max()) + 1
        with new.ticket(clients) as ticket:

            def one(shard: int) -> Any:
                slots = self.slots(pages, shard)
                workers[shard]("compute", slots=slots)
                adopted = workers[shard]("adopt", ticket=bytes(ticket).hex(), shard=shard)
                assert adopted == new.pages.tolist()
                return workers[shard]("offload", slots=slots, positions=new.new.tolist())

            told = together([lambda shard=shard: one(shard) for shard in range(len(workers))])
            assert ticket.poll().verdict is True
        return told

    def pins(self) -> int:
        report = self.cache.check()
        assert report.clean, report.message
        return report.pins


@pytest.fixture
def scheduler(segment_name: str, request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    with (made := Scheduler(segment_name, request.param)).cache:
        yield made


STAGES = [[0, 1, 2], [3, 4]]


def read_back(scheduler: Scheduler, readers: list[Worker], ranks: int, pages: int) -> None:
    """Every byte, by a group of this size."""

    def one(rank: int) -> None:
        worker, window = readers[rank], [None, 1, 2][rank % 3]
        scheduler.join(worker, rank, ranks)
        share = scheduler.geometry.share(rank, ranks)
        slots = scheduler.slots(pages, 100 + rank)
        total, moved, wrong = worker("load", prompt=NAME, pages=pages, slots=slots, window=window)
        assert (total, moved, wrong) == (pages * share.nbytes, pages * share.nbytes, 0)
        worker("leave")

    together([lambda rank=rank: one(rank) for rank in range(ranks)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "read_at"),
    [("heads", [4, 2, 1]), ("fewer heads", [4, 2, 1]), ("latent", [2, 1]), ("state", [4, 1])],
    indirect=["scheduler"],
)
def test_written_by_eight_read_by_fewer(
    scheduler: Scheduler, read_at: list[int], pool: Pool
) -> None:
    writers, readers = pool[:8], pool[8:]
    clients = together(
        [
            lambda rank=rank: scheduler.join(writers[rank], rank, 8, writing=True)
            for rank in range(8)
        ]
    )
    for first, pages in ((0, 2), (2, 5)):  # then more of the same prompt: two present, three new
        with scheduler.cache.reserve(prompt(NAME, pages), shards=8) as new:
            assert new.present.tolist() == list(range(first))
            assert scheduler.cache.peek(prompt(NAME, pages)) == first
            told = scheduler.write(writers, clients, new)
        assert [ready for ready, _ in told].count(True) == 1, "the last shard alone makes it ready"
        written = sum(nbytes for _, nbytes in told)
        assert written == (pages - first) * scheduler.geometry.used_bytes, "each byte once"
        assert scheduler.cache.peek(prompt(NAME, pages)) == pages
    assert scheduler.pins() == 0
    for writer in writers:
        writer("leave")
    for ranks in read_at:
        read_back(scheduler, readers, ranks, 5)
    assert scheduler.pins() == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["stages"], indirect=True)
def test_tensor_by_pipeline(scheduler: Scheduler, pool: Pool) -> None:
    """Two stages of two ranks each write four shards."""
    writers = pool[:4]
    clients = together(
        [
            lambda at=at: scheduler.join(
                writers[at], at % 2, 2, layers=STAGES[at // 2], writing=True
            )
            for at in range(4)
        ]
    )
    with scheduler.cache.reserve(prompt(NAME, 3), shards=4) as new:
        told = scheduler.write(writers, clients, new)
    assert sum(nbytes for _, nbytes in told) == 3 * scheduler.geometry.used_bytes
    for writer in writers:
        writer("leave")
    for ranks in (4, 2, 1):
        read_back(scheduler, pool[8:], ranks, 3)
    assert scheduler.pins() == 0


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("scheduler", ["heads"], indirect=True)
def test_a_killed_rank_dooms_its_pages(
    scheduler: Scheduler, pool: Pool, device: bool, wait_until: Any
) -> None:
    """Killed between adopting and publishing; one rank has published before, two come after."""
    victim = Worker()
    workers, keys = [*pool[:3], victim], prompt(NAME, 3)
    clients = [
        scheduler.join(worker, rank, 4, writing=True, device=device)
        for rank, worker in enumerate(workers)
    ]
    slots, where = scheduler.slots(3, 0), [0, 1, 2]
    with scheduler.cache.reserve(keys, shards=4) as new, new.ticket(clients) as ticket:
        for shard, worker in enumerate(workers):
            worker("adopt", ticket=bytes(ticket).hex(), shard=shard)
        assert workers[0]("offload", slots=slots, positions=where)[0] is False
        assert ticket.poll().verdict is None
        victim.end(kill=True)
        assert scheduler.cache.wait(keys, timeout=60) == 0
        assert ticket.poll().verdict is False
        for worker in workers[1:3]:
            told = worker("offload", slots=slots, positions=where)
            assert told["error"] == "Abandoned", told
    wait_until(lambda: scheduler.cache.reap() == 0, "everything of the dead rank is given back")
    assert scheduler.pins() == 0
    assert scheduler.cache.peek(keys) == 0
    with scheduler.cache.reserve(prompt(2, PAGES)) as again:
        assert len(again.new) == PAGES, "its pages came back"
    for worker in workers[:3]:
        worker("leave")


@pytest.mark.parametrize("scheduler", ["heads"], indirect=True)
def test_a_rank_outside_its_group(scheduler: Scheduler, pool: Pool) -> None:
    order = {"name": scheduler.cache.name, "geometry": "heads"}
    (worker,) = pool[:1]
    for rank, ranks in ((8, 8), (-1, 8), (0, 3), (0, 0)):
        told = worker("join", **order, rank=rank, ranks=ranks)
        assert told["error"] == "ConfigError", told
        refused(ConfigError, "", scheduler.geometry.share, rank, ranks)
    client = scheduler.join(worker, 0, 1, writing=True)
    with scheduler.cache.reserve(prompt(NAME, 2), shards=1) as new, new.ticket([client]) as ticket:
        data, slots = bytes(ticket).hex(), scheduler.slots(2, 0)
        assert worker("adopt", ticket=data, shard=1)["error"] == "ConfigError"
        worker("adopt", ticket=data, shard=0)
        assert worker("offload", slots=slots, positions=[0, 1])[0] is True
    worker("leave")
    assert scheduler.pins() == 0
