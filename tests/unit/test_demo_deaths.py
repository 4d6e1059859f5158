"""The demo's router when workers die: what they held is free, and their turns are asked again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.demo_desk import (
    WAIT,
    WORKLOAD,
    Desk,
    assert_nothing_is_held,
    settings_of,
)
from support.scripts import with_support

from lightcache.shm import list_segments
from lightcache.tools.demo.messages import Hello, Lost, Request

MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk(segment_name: str) -> Iterator[MakeDesk]:
    with ExitStack() as stack:
        yield lambda **changes: Desk(settings_of(segment_name, **changes), stack)


def test_lost_before_its_first_request(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.begin()
    desk.workers[0].cache.close()
    found = desk.lost(0)
    assert (found.worker, found.number, found.doomed) == (0, None, 0)
    done = _answered_by(desk, 1, turns=2)
    assert sorted(request.number for _, request in done) == [0, 1]
    desk.arrive(0, 1)
    desk.serve_all()
    assert all(turn.attempts == 1 for turn in desk.served)
    assert {turn.worker for turn in desk.served[2:]} == {0, 1}
    assert {turn.life for turn in desk.served if turn.worker == 0} == {1}


def _answered_by(desk: Desk, number: int, turns: int) -> list[tuple[int, Request]]:
    """Let one worker answer so many turns while the other is gone."""
    done = []
    for _ in range(turns):
        desk.dispatch()
        worker = desk.workers[number]
        request = worker.request()
        assert request is not None
        done.append((number, request))
        desk.tell(worker.answer(request))
    desk.collect()
    return done


def test_lost_before_its_hello(make_desk: MakeDesk) -> None:
    """A worker that dies while it loads its model: the router has never seen it."""
    desk = make_desk()
    desk.tell(Lost(0, 0, 0.0))
    desk.arrive(0, 1)
    desk.arrive(1)
    desk.tell(Lost(0, 0, 0.0))  # of a life that is over
    assert desk.router.peers[0].inbox is not None
    desk.router.route(desk.router.workload.begin())
    desk.serve_all()
    assert not desk.recovered


def test_two_deaths_in_a_row(make_desk: MakeDesk) -> None:
    """Its successor dies before it has said anything; the third one takes over."""
    desk = make_desk(workers=1)
    desk.begin()
    desk.dispatch()
    desk.workers[0].cache.close()
    assert desk.lost(0).number == 0
    desk.tell(Lost(0, 1, 0.0))
    desk.collect()
    assert len(desk.recovered) == 1
    desk.arrive(0, 2)
    desk.serve_all()
    first = desk.served[0]
    assert (first.number, first.life, first.attempts) == (0, 2, 2)
    assert_nothing_is_held(desk.workers[0].cache)


@pytest.mark.parametrize("adopted", [False, True])
def test_lost_with_a_request(make_desk: MakeDesk, adopted: bool) -> None:
    """It leaves with its request unread, or when it has just loaded."""
    desk = make_desk(workload={**WORKLOAD, "users": 1})
    desk.begin()
    desk.dispatch()
    desk.tell(desk.workers[0].answer(desk.workers[0].request()))
    desk.dispatch()
    if adopted:
        assert desk.workers[1].load(desk.workers[1].request())
    desk.workers[1].cache.close()
    found = desk.lost(1)
    assert (found.worker, found.number) == (1, 1)
    assert found.seconds >= 0
    assert_nothing_is_held(desk.workers[0].cache)
    ((_, request),) = _answered_by(desk, 0, turns=1)
    assert request.number == 1, "the same turn, from another worker"
    assert request.lease
    assert desk.served[-1].attempts == 2
    desk.arrive(1, 1)
    desk.serve_all()
    assert [turn.attempts for turn in desk.served] == [1, 2, 1]


def test_an_answer_before_the_death_counts(make_desk: MakeDesk) -> None:
    desk = make_desk(workload={**WORKLOAD, "users": 1})
    desk.begin()
    desk.dispatch()
    desk.outbox.send(desk.workers[0].answer(desk.workers[0].request()))
    desk.workers[0].cache.close()
    desk.outbox.send(Lost(0, 0, 0.0))
    desk.router.handle()
    desk.router.handle()
    desk.collect()
    assert [turn.number for turn in desk.served] == [0]
    assert desk.recovered[0].number is None


def test_dead_when_its_ticket_is_given_twice(make_desk: MakeDesk) -> None:
    """The router learns it from the cache before anybody tells it, and again of the successor."""
    desk = make_desk(workload={**WORKLOAD, "users": 1}, workers=1)
    desk.begin()
    for life in (0, 1):
        desk.workers[0].cache.close()
        desk.dispatch()
        assert desk.workers[0].request() is None
        assert desk.router.peers[0].going is None
        desk.dispatch()  # nothing more is tried with it
        assert desk.router.attempts == {0: life + 1}
        assert desk.lost(0).number is None
        desk.arrive(0, life + 1)
    assert_nothing_is_held(desk.workers[0].cache)
    desk.serve_all()
    assert [turn.attempts for turn in desk.served] == [3, 1, 1]
    assert {turn.life for turn in desk.served} == {2}


def test_lost_without_a_pool(make_desk: MakeDesk) -> None:
    desk = make_desk(pool="none", workers=1)
    desk.begin()
    desk.dispatch()
    found = desk.lost(0)
    assert (found.number, found.doomed, found.clients) == (0, 0, 0)
    desk.arrive(0, 1)
    assert len(desk.serve_all()) == 6
    assert desk.served[0].attempts == 2


def test_a_private_pool_ends_with_its_worker(make_desk: MakeDesk) -> None:
    desk = make_desk(pool="private")
    desk.begin()
    desk.dispatch()
    name = desk.workers[0].cache.name
    desk.workers[0].cache.close()
    assert desk.lost(0).number == 0
    assert name not in [info.name for info in list_segments()]
    assert list(desk.router.caches) == [desk.workers[1].cache.name]
    desk.arrive(0, 1)
    assert desk.workers[0].cache.name != name
    assert len(desk.serve_all()) == 6


# ---- the kill that is arranged


def test_the_turn_to_hold(make_desk: MakeDesk) -> None:
    desk = make_desk(hold_at=3)
    desk.begin()
    holds = [(request.number, request.hold) for _, request in desk.serve_all()]
    assert sum(hold for _, hold in holds) == 1
    assert [hold for _, hold in holds].index(True) >= 3


def test_a_turn_asked_again_is_not_held(make_desk: MakeDesk) -> None:
    """The one to be killed is the next turn's worker: this death was another one."""
    desk = make_desk(hold_at=0, workers=1, workload={**WORKLOAD, "users": 1})
    desk.begin()
    desk.workers[0].cache.close()
    desk.dispatch()  # not even asked: it has died before
    desk.lost(0)
    desk.arrive(0, 1)
    holds = [(request.number, request.hold) for _, request in desk.serve_all()]
    assert holds == [(0, False), (1, True), (2, False)]


_ADOPTS_AND_DIES = with_support("""
import os, signal, sys
from contextlib import ExitStack
from support.demo_desk import WAIT, FakeWorker
from lightcache.tools.demo.messages import Holding, Mailbox
from lightcache.tools.demo.settings import Settings

settings = Settings.from_json(sys.argv[1])
worker = FakeWorker(settings, 1, 0, ExitStack())
with Mailbox(settings.router_ring) as router:
    router.send(worker.hello)
request = worker.inbox.receive(WAIT)
if request is None:
    os._exit(3)
lease = worker.cache.adopt(bytes.fromhex(request.lease)) if request.lease else None
shard = worker.cache.adopt(bytes.fromhex(request.shard), shard=0)
worker.cache.pool[shard.pages[0]][:] = 1
os.kill(os.getpid(), signal.SIGKILL)
""")


@pytest.mark.crash
@pytest.mark.parametrize("pool", ["shared", "private"])
def test_killed_while_it_writes(make_desk: MakeDesk, pool: str) -> None:
    """A real process, killed with SIGKILL: its pages are doomed, and free again."""
    desk = make_desk(pool=pool, workload={**WORKLOAD, "users": 2})
    child = subprocess.Popen([sys.executable, "-c", _ADOPTS_AND_DIES, desk.settings.to_json()])
    try:
        desk.arrive(0)
        message = desk.inbox.receive(WAIT)
        assert isinstance(message, Hello)
        desk.router.on_hello(message)
        desk.router.route(desk.router.workload.begin())
        if pool == "shared":  # the system prompt is there, so it has something to load as well
            desk.router.dispatch(0)
            desk.tell(desk.workers[0].answer(desk.workers[0].request()))
        desk.router.dispatch(1)
        assert child.wait(WAIT) == -9
    finally:
        child.kill()
        child.wait()
    going = desk.router.peers[1].going
    assert going is not None
    assert going.new is not None
    written = going.new.pages.tolist()
    desk.tell(Lost(1, 0, 0.0))
    desk.collect()
    found = desk.recovered[0]
    assert (found.worker, found.number, found.clients) == (1, 1, 1)
    assert found.doomed == len(written) >= 1
    assert_nothing_is_held(desk.workers[0].cache)
    desk.arrive(1, 1)
    desk.serve_all()
    again = [turn for turn in desk.served if turn.attempts == 2]
    assert [turn.number for turn in again] == [1]
    for worker in desk.workers:
        assert_nothing_is_held(worker.cache)
