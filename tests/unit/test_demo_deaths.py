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

from lightcache.manager import Prompt
from lightcache.shm import list_segments, sweep
from lightcache.tools.demo.messages import Hello, Lost, Request

MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk(segment_name: str) -> Iterator[MakeDesk]:
    with ExitStack() as stack:
        yield lambda **changes: Desk(settings_of(segment_name, **changes), stack)


def test_lost_before_its_first_request(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.begin()
    desk.workers[0].die()
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
    desk.workers[0].die()
    assert desk.lost(0).number == 0
    desk.tell(Lost(0, 1, 0.0))
    desk.collect()
    assert len(desk.recovered) == 1
    desk.arrive(0, 2)
    desk.serve_all()
    first = desk.served[0]
    assert (first.number, first.life, first.attempts) == (0, 2, 2)
    assert_nothing_is_held(desk.workers[0].cache)


@pytest.mark.parametrize("taken", [False, True])
def test_lost_with_a_request(make_desk: MakeDesk, taken: bool) -> None:
    """It leaves with its request unread, or when it has just pinned what there is."""
    desk = make_desk(workload={**WORKLOAD, "users": 1})
    desk.begin()
    desk.dispatch()
    desk.tell(desk.workers[0].answer(desk.workers[0].request()))
    desk.dispatch()
    if taken:
        manager, prompt = desk.workers[1].manager, Prompt(desk.workers[1].request().tokens)
        assert manager.plan(1, prompt).host
        manager.take(1)
        assert desk.workers[0].cache.check().pins
    desk.workers[1].die()
    found = desk.lost(1)
    assert (found.worker, found.number) == (1, 1)
    assert found.seconds >= 0
    assert_nothing_is_held(desk.workers[0].cache)
    ((_, request),) = _answered_by(desk, 0, turns=1)
    assert request.number == 1, "the same turn, from another worker"
    assert desk.served[-1].attempts == 2
    assert desk.served[-1].reused["host"]
    desk.arrive(1, 1)
    desk.serve_all()
    assert [turn.attempts for turn in desk.served] == [1, 2, 1]


def test_an_answer_before_the_death_counts(make_desk: MakeDesk) -> None:
    desk = make_desk(workload={**WORKLOAD, "users": 1})
    desk.begin()
    desk.dispatch()
    desk.outbox.send(desk.workers[0].answer(desk.workers[0].request()))
    desk.workers[0].die()
    desk.outbox.send(Lost(0, 0, 0.0))
    desk.router.handle()
    desk.router.handle()
    desk.collect()
    assert [turn.number for turn in desk.served] == [0]
    assert desk.recovered[0].number is None


def test_dead_when_it_is_asked(make_desk: MakeDesk) -> None:
    """The request goes to nobody; it is asked again when somebody says so."""
    desk = make_desk(workload={**WORKLOAD, "users": 1}, workers=1)
    desk.begin()
    for life in (0, 1):
        desk.workers[0].die()
        desk.dispatch()
        desk.dispatch()  # nothing more is tried with it
        assert desk.router.attempts == {0: life + 1}
        assert desk.lost(0).number == 0
        desk.arrive(0, life + 1)
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
    desk.workers[0].die()
    assert desk.lost(0).number == 0
    assert name not in [info.name for info in list_segments()]
    assert list(desk.router.caches) == [desk.workers[1].cache.name]
    desk.arrive(0, 1)
    assert desk.workers[0].cache.name != name
    assert len(desk.serve_all()) == 6


# ---- the kill that is arranged


def test_the_turn_to_hold(make_desk: MakeDesk) -> None:
    desk = make_desk(hold_at=3, workers=1)
    desk.begin()
    holds = [request.hold for _, request in desk.serve_all()]
    assert holds == [False] * 3 + [True] * 3, "the first one from there on, if it writes anything"


def test_one_that_writes_nothing_is_not_killed(make_desk: MakeDesk) -> None:
    """It answers; then the next turn is held, until somebody is."""
    desk = make_desk(hold_at=0, workers=1, workload={**WORKLOAD, "users": 1})
    desk.begin()
    holds = [(request.number, request.hold) for _, request in desk.serve_all()]
    assert holds == [(0, True), (1, True), (2, True)]


def test_two_are_never_held_at_once(make_desk: MakeDesk) -> None:
    desk = make_desk(hold_at=0)
    desk.begin()
    desk.dispatch()
    assert [worker.request().hold for worker in desk.workers] == [True, False]


def test_what_goes_past_the_cache_is_not_held(make_desk: MakeDesk) -> None:
    desk = make_desk(hold_at=0, alternate=True)
    desk.begin()
    assert all(request.cached or not request.hold for _, request in desk.serve_all())


def test_a_turn_asked_again_is_not_held(make_desk: MakeDesk) -> None:
    """The one to be killed is the next turn's worker: this death was another one."""
    desk = make_desk(hold_at=0, workers=1, workload={**WORKLOAD, "users": 1})
    desk.begin()
    desk.workers[0].die()
    desk.router.held = True  # so this one is not the arranged one
    desk.dispatch()
    desk.router.held = False
    desk.lost(0)
    desk.arrive(0, 1)
    holds = [(request.number, request.hold) for _, request in desk.serve_all()]
    assert holds == [(0, False), (1, True), (2, True)]


_WRITES_AND_DIES = with_support("""
import os, signal, sys
from contextlib import ExitStack
from support.demo_desk import WAIT, FakeWorker, PlayedMover
from lightcache.tools.demo.messages import Mailbox
from lightcache.tools.demo.settings import Settings

def die(self, new, slots):
    self.cache.pool[new.pages[0]][:] = 1
    print(len(new.pages), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

PlayedMover.offload = die
settings = Settings.from_json(sys.argv[1])
worker = FakeWorker(settings, 1, 0, ExitStack())
with Mailbox(settings.router_ring) as router:
    router.send(worker.hello)
request = worker.inbox.receive(WAIT)
if request is None:
    os._exit(3)
worker.answer(request)
""")


@pytest.mark.crash
@pytest.mark.parametrize("pool", ["shared", "private"])
def test_killed_while_it_writes(make_desk: MakeDesk, pool: str) -> None:
    """A real process, killed with SIGKILL: its pages are doomed, and free again."""
    desk = make_desk(pool=pool, workload={**WORKLOAD, "users": 2})
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITES_AND_DIES, desk.settings.to_json()], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
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
        written = int(child.stdout.read())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    desk.tell(Lost(1, 0, 0.0))
    desk.collect()
    found = desk.recovered[0]
    assert (found.worker, found.number, found.clients) == (1, 1, 1)
    assert found.doomed == written >= 1
    assert_nothing_is_held(desk.workers[0].cache)
    desk.arrive(1, 1)
    desk.serve_all()
    again = [turn for turn in desk.served if turn.attempts == 2]
    assert [turn.number for turn in again] == [1]
    for worker in desk.workers:
        assert_nothing_is_held(worker.cache)
    (gone,) = sweep(prefix=f"{desk.settings.run}-")
    assert gone.endswith(desk.settings.device_index(1, 0)), "nobody else was in there"
