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

from lightcache.tools.demo.messages import Finished, Mailbox
from lightcache.tools.demo.router import Router, body
from lightcache.tools.demo.settings import Settings

MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk(segment_name: str) -> Iterator[MakeDesk]:
    with ExitStack() as stack:
        yield lambda **changes: Desk(settings_of(segment_name, **changes), stack)


# ---- what a worker is asked


def test_a_request_has_what_is_missing(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.begin()
    desk.dispatch()
    worker = desk.workers[0]
    request = worker.request()
    assert request.lease == ""
    assert request.positions == list(range(len(request.tokens) // PAGE_TOKENS))
    assert (request.cached, request.baseline, request.hold) == (True, True, False)
    answer = worker.answer(request)
    assert answer.stored_bytes == len(request.positions) * PAGE_BYTES
    keys = worker.cache.hash_pages(request.tokens)
    assert worker.cache.peek(keys) == len(keys), "the worker has published all of them"
    desk.tell(answer)
    with worker.cache.match(keys) as lease:
        found = [int(worker.cache.pool[page][0]) for page in lease.pages]
    assert found == request.positions, "each page was written at the position of its key"


def test_the_next_turn_loads_and_writes_the_rest(make_desk: MakeDesk) -> None:
    desk = make_desk(workload={**WORKLOAD, "users": 1})
    desk.begin()
    desk.dispatch()
    first = desk.workers[0].request()
    desk.tell(desk.workers[0].answer(first))
    desk.dispatch()
    second = desk.workers[1].request()
    known = len(first.tokens) // PAGE_TOKENS
    assert second.positions == list(range(known, len(second.tokens) // PAGE_TOKENS))
    pages = desk.workers[1].load(second)
    assert len(pages) == known
    assert [int(desk.workers[1].cache.pool[page][0]) for page in pages] == first.positions


def test_a_token_is_left_to_compute(make_desk: MakeDesk) -> None:
    """A prompt that is known to its end is not loaded to its end."""
    workload = {
        "kind": "prompts",
        "seed": 1,
        "count": 1,
        "prefix_tokens": 2 * PAGE_TOKENS,
        "new_tokens": PAGE_TOKENS,
        "answer_tokens": 1,
        "vocabulary": 9,
    }
    desk = make_desk(workers=1, workload=workload)
    (turn,) = desk.router.workload.begin()
    worker = desk.arrive(0)
    keys = worker.cache.hash_pages(turn.tokens)
    worker.cache.reserve(keys).publish()
    desk.router.route([turn])
    desk.dispatch()
    request = worker.request()
    assert len(worker.load(request)) == len(keys) - 1
    assert (request.shard, request.positions) == ("", []), "the last page is there as well"


def test_a_pool_that_is_full_asks_for_less(make_desk: MakeDesk) -> None:
    desk = make_desk(size=2 * PAGE_BYTES, workers=1)
    desk.begin()
    desk.dispatch()
    request = desk.workers[0].request()
    assert request.positions == [0, 1]
    desk.tell(desk.workers[0].answer(request))
    assert_nothing_is_held(desk.workers[0].cache)


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


def test_nothing_is_held_between_turns(make_desk: MakeDesk) -> None:
    """Seventy turns, more than the smallest cache has records of tickets."""
    desk = make_desk(workload={**WORKLOAD, "users": 10, "turns": 7})
    desk.begin()
    assert len(desk.serve_all()) == 70
    assert desk.workers[0].cache.stats().tickets == 0
    assert_nothing_is_held(desk.workers[0].cache)


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
        if not request.cached:
            assert (request.lease, request.shard, request.positions) == ("", "", [])
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
    assert all((one.lease, one.shard, one.positions) == ("", "", []) for _, one in done)
    assert len(done) == len(desk.served) == 6
    assert not desk.router.caches
    assert not desk.router.lookups


def test_private_pools(make_desk: MakeDesk) -> None:
    desk = make_desk(pool="private", workload={**WORKLOAD, "users": 1, "turns": 4})
    desk.begin()
    done = desk.serve_all()
    assert len(desk.router.caches) == 2
    assert desk.workers[0].cache.name != desk.workers[1].cache.name
    leases = [request.lease != "" for _, request in done]
    assert leases == [False, False, True, True], "each finds only what itself has computed"
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
    assert told[-1].lookup_us > 0
    assert sorted(turn.number for turn in told[:-1]) == list(range(6))


def test_the_router_leaves_when_nobody_looks_after_it(segment_name: str) -> None:
    from lightcache.tools.demo.life import Leave

    settings: Settings = settings_of(segment_name, parent=os.getpid())  # that is not our parent
    with pytest.raises(Leave):
        body(settings, [])
