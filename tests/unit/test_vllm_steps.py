"""What the scheduler's half of the connector for vLLM does in a step, and what it leaves out; its
benchmark."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightcache import Cache
from lightcache.connectors.vllm import scheduler
from lightcache.connectors.vllm.messages import Report
from lightcache.errors import ConfigError
from lightcache.prompt import Prompt
from lightcache.reservations import Reservation
from lightcache_bench import vllm
from lightcache_bench._vllm_stand_in import Request, Scheduler, schedulers

PAGE = 4
PROMPT = [*range(100, 100 + 5 * PAGE), 0]


@pytest.fixture
def one() -> Iterator[Scheduler]:
    with schedulers(1, 1, 256, PAGE) as (made,):
        yield made


@pytest.fixture
def plans(one: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that were planned."""
    seen: list[str] = []
    plan = type(one.cache.index).plan

    def noted(index: Any, request: str, *arguments: Any, **more: Any) -> int:
        seen.append(request)
        return plan(index, request, *arguments, **more)

    monkeypatch.setattr(type(one.cache.index), "plan", noted)
    return seen


def waiting(one: Scheduler, count: int) -> list[Request]:
    made = [Request(f"waiting {number}", PROMPT) for number in range(count)]
    for request in made:
        one.half.begin(request)
        assert one.half.look(request, 0) == (5 * PAGE, True)
    return made


def test_an_answer_stands_for_a_while(one: Scheduler, plans: list[str]) -> None:
    one.serve(Request("first", PROMPT))
    (request,) = waiting(one, 1)
    plans.clear()
    assert one.half.look(request, 0) == (5 * PAGE, True)
    assert plans == []
    assert one.half.look(request, PAGE) == (4 * PAGE, True)  # of other tokens it is another one
    one.now += 2 * scheduler.ASK
    assert one.half.look(request, PAGE) == (4 * PAGE, True)
    assert len(plans) == 2


@pytest.fixture
def writer(one: Scheduler) -> Iterator[Callable[[], Reservation]]:
    """Another engine's client. It begins to write the pages of `PROMPT`."""
    with Cache.attach(one.cache.name) as other:
        keys = Prompt(PROMPT).keys(other.key_spec())
        yield lambda: other.reserve(keys)


def test_a_request_waits_for_what_another_writes(
    one: Scheduler, writer: Callable[[], Reservation]
) -> None:
    request = Request("first", PROMPT)
    one.half.begin(request)
    with writer() as writing:
        for _ in range(3):
            assert one.half.look(request, 0) == (None, False)
            one.now += scheduler.WRITERS / 4
        writing.publish()
    assert one.half.look(request, 0) == (5 * PAGE, True)


@pytest.mark.parametrize("speed", [None, 1e3])
def test_the_wait_for_a_writer_ends(
    one: Scheduler, writer: Callable[[], Reservation], speed: float | None
) -> None:
    request = Request("first", PROMPT)
    one.half.begin(request)
    one.half._speed = scheduler._Speed(lambda: one.now, speed)
    longest = 5 * PAGE / speed if speed else scheduler.WRITERS
    with writer():
        assert one.half.look(request, 0) == (None, False)
        one.now += 0.9 * longest
        assert one.half.look(request, 0) == (None, False)
        one.now += 0.2 * longest
        assert one.half.look(request, 0) == (0, False)
        one.now += 2 * scheduler.ASK
        assert one.half.look(request, 0) == (0, False)  # it waits once


def test_no_wait_for_what_is_given_up_or_on_the_device(
    one: Scheduler, writer: Callable[[], Reservation]
) -> None:
    request, other = Request("first", PROMPT), Request("other", [*PROMPT, *range(2 * PAGE)])
    for each in (request, other):
        one.half.begin(each)
    with writer() as writing:
        assert one.half.look(other, 5 * PAGE) == (0, False)
        assert one.half.look(request, 0) == (None, False)
        writing.abandon()
    assert one.half.look(request, 0) == (0, False)


def test_few_answers_are_renewed_in_a_step(one: Scheduler, plans: list[str]) -> None:
    one.serve(Request("first", PROMPT))
    requests = waiting(one, 2 * scheduler.RENEWALS)
    one.step({}, {})
    plans.clear()
    one.now += 1.0
    for request in requests:
        assert one.half.look(request, 0) == (5 * PAGE, True)
    assert plans == [request.request_id for request in requests[: scheduler.RENEWALS]]
    one.now += 2 * scheduler.OLDEST
    plans.clear()
    for request in requests:
        one.half.look(request, 0)
    assert len(plans) == len(requests)


def test_an_answer_ends_with_its_plan(one: Scheduler) -> None:
    one.serve(Request("first", PROMPT))
    reset, taken = waiting(one, 2)
    one.half.allocated(taken, [list(range(9))], 5 * PAGE)
    assert len(one.step({taken.request_id: taken}, {}).loads) == 1
    one.half.reset()
    assert one.half.look(reset, 0) == (0, False)


def test_each_page_is_offered_once_and_again_after_a_preemption(one: Scheduler) -> None:
    request = Request("first", PROMPT, blocks=list(range(9)))
    running = {"first": request}
    one.half.begin(request)
    offered = []
    for tokens in (PAGE, PAGE - 1, 1, 3 * PAGE + 1, 1, 1):
        orders = one.step(running, {"first": tokens})
        offered.append([len(order.blocks) for order in orders.saves])
    assert offered == [[1], [], [1], [3], [], []]
    request.num_computed_tokens = 0
    again = one.half.orders(
        vllm.Output({}, {"first"}), lambda identity, _: running[identity].blocks
    )
    assert len(again.settle) == 3
    # Nothing of it was published: the jobs have ended, and all pages are offered once more.
    one.half.report(Report(saved=dict.fromkeys(again.settle, 1)), ())
    (order,) = one.step(running, {"first": len(PROMPT)}).saves
    assert len(order.blocks) == 5


def test_what_is_offered_follows_what_was_saved_by_it_and_by_others(one: Scheduler) -> None:
    request, other = (Request(name, PROMPT, blocks=list(range(9))) for name in ("one", "other"))
    running = {"one": request, "other": other}
    offered = []
    for name, tokens in (("one", PAGE), ("one", PAGE), ("other", 4 * PAGE), ("one", 3 * PAGE)):
        one.half.begin(running[name])
        orders = one.step(running, {name: tokens})
        one.run(orders)
        offered.append([order.blocks for order in orders.saves])
    # After a page that was new the next ones are not looked for: who saves them finds the other's.
    assert offered == [[(0,)], [(1,)], [(2, 3)], [(2, 3, 4)]]
    assert one.cache.stats().ready == 5
    running["one"].num_computed_tokens = 0  # preempted
    again = vllm.Output({"one": len(PROMPT)}, {"one"})
    assert not one.half.orders(again, lambda identity, _: running[identity].blocks).saves


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected parts such as 1,2 of 1 to 6, found '7'"):
        next(vllm.rows(True, only="7"))
    with pytest.raises(ConfigError, match="part 3 needs a trace"):
        next(vllm.rows(True, only="3"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="part 6 needs vLLM"):
        next(vllm.rows(True, only="6"))


def test_one_pool_finds_more_than_a_pool_each() -> None:
    requests = [[conversation, conversation + 1, 7 + turn] for turn in range(4)
                for conversation in range(10, 40, 2)]  # fmt: skip
    routes = [number % vllm.ENGINES for number in range(len(requests))]
    one = vllm.replay(requests, routes, 1, 400)
    each = vllm.replay(requests, routes, vllm.ENGINES, 400)
    assert one == 15 * 3 * 2
    assert each < one


@pytest.mark.slow
def test_steps() -> None:
    rows = list(vllm.steps(True))
    assert [row.name for row in rows][::2] == [
        "step, 64 running, 64 waiting",
        "step, 64 running, 0 % hits",
    ]
    assert all(row.value > 0 for row in rows)


def test_a_prompt_that_finds_nothing_is_not_planned_and_counted_once(
    one: Scheduler, plans: list[str]
) -> None:
    request = Request("first", PROMPT)
    one.half.begin(request)
    before = own(one)
    for _ in range(3):
        assert one.half.look(request, 0) == (0, False)
        one.now += 2 * scheduler.ASK
    assert plans == []
    assert own(one) - before == 5
    one.serve(Request("second", PROMPT))  # meanwhile the pages are there
    assert one.half.look(request, 0) == (5 * PAGE, True)
    assert plans == ["first"]


def own(one: Scheduler) -> int:
    """Pages that this client has missed."""
    (client,) = one.cache.clients()
    return client.missed_pages


def test_a_long_prompt_that_is_missed_is_counted_once(
    one: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LONG", 1)
    request = Request("first", PROMPT)
    one.half.begin(request)
    before = sum(client.lookups for client in one.cache.clients())
    for _ in range(3):
        assert one.half.look(request, 0) == (0, False)
        one.now += 2 * scheduler.ASK
    assert sum(client.lookups for client in one.cache.clients()) == before + 1
