"""The demo's router, over a real cache, with workers that the test plays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from support.demo_desk import (
    PAGE_BYTES,
    PAGE_TOKENS,
    WORKLOAD,
    Desk,
    FakeWorker,
    assert_nothing_is_held,
    settings_of,
)

from lightcache.tools.demo.messages import Finished, Mailbox, Request
from lightcache.tools.demo.router import Router, body
from lightcache.tools.demo.settings import Settings

MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk(segment_name: str) -> Iterator[MakeDesk]:
    with ExitStack() as stack:
        yield lambda **changes: Desk(settings_of(segment_name, **changes), stack)


# ---- what a worker is asked


def test_a_request(make_desk: MakeDesk) -> None:
    desk = make_desk()
    (turn, _) = desk.begin()
    desk.dispatch()
    worker = desk.workers[0]
    request = worker.request()
    assert request.tokens.tolist() == turn.tokens.tolist()
    assert (request.number, request.answer_tokens) == (turn.number, turn.answer_tokens)
    assert (request.cached, request.baseline, request.hold) == (True, True, False)
    keys = worker.cache.hash_pages(request.tokens)
    desk.tell(worker.answer(request))
    with worker.cache.match(keys) as lease:
        found = [int(worker.cache.pool[page][0]) for page in lease.pages]
    assert found == list(range(len(request.tokens) // PAGE_TOKENS))


def test_the_next_turn_loads_and_writes_the_rest(make_desk: MakeDesk) -> None:
    desk = make_desk(workload={**WORKLOAD, "users": 1})
    desk.begin()
    done = desk.serve_all()
    known = 0
    for turn, (_, request) in zip(desk.served, done, strict=True):
        assert turn.reused == {"host": known * PAGE_TOKENS, "device": 0}
        assert turn.loaded_bytes == known * PAGE_BYTES
        after = (len(request.tokens) + request.answer_tokens - 1) // PAGE_TOKENS
        assert turn.stored_bytes == (after - known) * PAGE_BYTES
        known = after


def test_all_of_it(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.begin()
    done = desk.serve_all()
    assert sorted(request.number for _, request in done) == list(range(6))
    assert sorted(turn.number for turn in desk.served) == list(range(6))
    assert_nothing_is_held(desk.workers[0].cache)
    by_number = {request.number: request for _, request in done}
    for turn in desk.served:
        request = by_number[turn.number]
        assert turn.tokens[: turn.prompt].tolist() == request.tokens.tolist()
        assert len(turn.tokens) == turn.prompt + request.answer_tokens
        assert (turn.attempts, turn.life, turn.cached) == (1, 0, True)
        assert turn.waited_s >= 0
        assert (turn.first_s, turn.total_s, turn.steps_s) == (0.25, 2.0, [0.5, 0.5])
        assert turn.turn == 0 or turn.reused["host"] >= WORKLOAD["system_tokens"] // 4 * 4


# ---- who is asked


@pytest.mark.parametrize("workers", [2, 3])
def test_another_worker_each_turn(make_desk: MakeDesk, workers: int) -> None:
    desk = make_desk(workers=workers, workload={**WORKLOAD, "turns": 5})
    desk.begin()
    desk.serve_all()
    at = {(turn.conversation, turn.turn): turn.worker for turn in desk.served}
    assert all(at[c, t] != at[c, t - 1] for c, t in at if t)


def test_random_routing_has_a_seed(segment_name: str) -> None:
    def workers(run: int, seed: int) -> list[int]:
        with ExitStack() as stack:
            settings = settings_of(
                f"{segment_name}-{run}",
                workers=3,
                routing="random",
                seed=seed,
                workload={**WORKLOAD, "users": 1, "turns": 12},
            )
            desk = Desk(settings, stack)
            desk.begin()
            return [worker for worker, _ in desk.serve_all()]

    first, again, other = workers(0, 5), workers(1, 5), workers(2, 6)
    assert first == again != other
    assert set(first) == {0, 1, 2}
    assert any(one == two for one, two in pairwise(first))


def prefix(desk: Desk) -> list[tuple[int, Request]]:
    """All turns, one after the other: a worker answers before the next turn is routed."""
    desk.begin()
    return desk.serve_all()


def test_prefix_routing_stays_where_the_cache_is(make_desk: MakeDesk) -> None:
    desk = make_desk(routing="prefix", kept=4, workload={**WORKLOAD, "turns": 4})
    prefix(desk)
    at: dict[int, set[int]] = {}
    for turn in desk.served:
        at.setdefault(turn.conversation, set()).add(turn.worker)
        assert turn.turn == 0 or turn.reused["device"] > turn.prompt / 2
    assert all(len(workers) == 1 for workers in at.values())
    assert {worker for workers in at.values() for worker in workers} == {0, 1}, "load counts too"


def test_prefix_routing_weighs_load(make_desk: MakeDesk) -> None:
    """Whoever has the prefix is at work: what waits there is more than what would be saved."""
    workload = {**WORKLOAD, "users": 1, "turns": 4}
    desk = make_desk(routing="prefix", kept=4, workload=workload)
    desk.begin()
    first = next(peer for peer in desk.router.peers if peer.waiting)
    desk.dispatch()
    worker = desk.workers[first.number]
    desk.tell(worker.answer(worker.request()))
    (turn,) = first.waiting
    desk.router.prefixes._costs[turn.number] = 1000.0
    assert desk.router.cheapest(turn, desk.router.peers) is not first
    # Less than to load from the host what only its device has.
    desk.router.prefixes._costs[turn.number] = 1.0
    assert desk.router.cheapest(turn, desk.router.peers) is first


@pytest.mark.parametrize("pool", ["private", "none"])
def test_prefix_routing_over_other_pools(make_desk: MakeDesk, pool: str) -> None:
    desk = make_desk(routing="prefix", kept=4, pool=pool, workload={**WORKLOAD, "users": 3})
    assert len(prefix(desk)) == 9
    assert {turn.worker for turn in desk.served} == {0, 1}


def test_prefix_routing_looks_at_a_successor(make_desk: MakeDesk) -> None:
    desk = make_desk(routing="prefix", kept=4, workload={**WORKLOAD, "users": 4, "turns": 4})
    desk.begin()
    desk.dispatch()
    desk.tell(desk.workers[1].answer(desk.workers[1].request()))
    desk.workers[0].die()
    desk.lost(0)
    assert desk.router.prefixes._router is not None
    desk.arrive(0, 1)
    desk.serve_all()
    assert any(turn.life == 1 and turn.reused["device"] for turn in desk.served)


def test_one_turn_at_a_time(make_desk: MakeDesk) -> None:
    desk = make_desk(workers=1)
    desk.begin()
    desk.dispatch()
    desk.dispatch()
    assert desk.workers[0].request() is not None
    assert desk.workers[0].request() is None


def test_every_other_turn_goes_past_the_cache(make_desk: MakeDesk) -> None:
    desk = make_desk(alternate=True)
    desk.begin()
    done = desk.serve_all()
    for _, request in done:
        assert request.cached == (request.number // 2 % 2 == 0)
    assert {(turn.number, turn.cached) for turn in desk.served} == {
        (request.number, request.cached) for _, request in done
    }
    for number in (0, 1):  # one prompt at a time for each worker: as many of either kind
        kinds = [request.cached for worker, request in done if worker == number]
        assert abs(kinds.count(True) - kinds.count(False)) <= 1


def test_without_a_pool(make_desk: MakeDesk) -> None:
    desk = make_desk(pool="none")
    desk.begin()
    done = desk.serve_all()
    assert len(done) == len(desk.served) == 6
    assert not desk.router.caches
    assert not desk.router.lookups


def test_private_pools(make_desk: MakeDesk) -> None:
    desk = make_desk(pool="private", workload={**WORKLOAD, "users": 1, "turns": 4})
    desk.begin()
    desk.serve_all()
    assert len(desk.router.caches) == 2
    assert desk.workers[0].cache.name != desk.workers[1].cache.name
    found = [turn.reused["host"] > 0 for turn in desk.served]
    assert found == [False, False, True, True], "each finds only what itself has computed"
    for worker in desk.workers:
        assert_nothing_is_held(worker.cache)


# ---- the whole process


def test_run(segment_name: str) -> None:
    """The loop itself, with two workers in threads of their own."""
    settings = settings_of(segment_name)
    with ExitStack() as stack:
        report = stack.enter_context(Mailbox(settings.report_ring))
        inbox = stack.enter_context(Mailbox(settings.router_ring))
        stop = threading.Event()

        def work(number: int) -> None:
            with ExitStack() as mine, Mailbox(settings.router_ring) as router:
                worker = FakeWorker(settings, number, 0, mine)
                router.send(worker.hello)
                while not stop.is_set():
                    request = worker.inbox.receive(0.05)
                    if request is not None:
                        router.send(worker.answer(request))

        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            Router(settings, inbox, report, stack).run()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        told: list[Any] = []
        while (message := report.receive(0)) is not None:
            told.append(message)
    assert isinstance(told[-1], Finished)
    assert told[-1].turns == 6
    assert told[-1].seconds > 0
    assert told[-1].lookup_us == 125_000.0
    assert sorted(turn.number for turn in told[:-1]) == list(range(6))


def test_the_router_leaves_when_nobody_looks_after_it(segment_name: str) -> None:
    from lightcache.tools.demo.life import Leave

    settings: Settings = settings_of(segment_name, parent=os.getpid())  # that is not our parent
    with pytest.raises(Leave):
        body(settings, [])
