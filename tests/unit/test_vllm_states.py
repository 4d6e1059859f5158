"""The connector for vLLM with models that have recurrent states, in vLLM's order of calls: beside
full attention, beside windows too, and alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.vllm_stand_in import BLOCK, STATE, Engine, Request
from unit.test_vllm_halves import Gate

from lightcache import Cache
from lightcache.connectors.vllm import scheduler
from lightcache.connectors.vllm.scheduler import open_cache
from lightcache.errors import LightcacheError
from lightcache.runs import Run
from lightcache.shm import Segment

PROMPT = list(range(3, 53))  # 50 tokens: a state after 48, the end of a page of 8
KINDS: dict[str, dict[str, Any]] = {
    "attention and states": {"windows": (STATE, STATE)},
    "attention, a window and states": {"windows": (10, STATE)},
    "states alone": {"windows": (STATE,), "full": False},
}
of_each_kind = pytest.mark.parametrize("how", KINDS.values(), ids=list(KINDS))


@pytest.fixture(autouse=True)
def engines_apart(monkeypatch: pytest.MonkeyPatch, segment_name: str) -> Iterator[None]:
    for half in ("scheduler", "worker"):
        apart = partial(open_cache, shared=False)
        monkeypatch.setattr(f"lightcache.connectors.vllm.{half}.open_cache", apart)
    yield
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


def engine(name: str, identity: str = "a", ranks: int = 1, **how: Any) -> Engine:
    return Engine(name, identity, ranks, **{"windows": (STATE, STATE), **how})


def check_clean(name: str) -> None:
    with Cache.attach(name) as cache:
        report = cache.check()
        report.raise_if_broken()
        assert report.pins == 0


def pages(name: str) -> dict[str, int]:
    with Cache.attach(name, readonly=True) as cache:
        return {group.name: group.pages for group in cache.index.groups()}


def drop(engine: Engine, group: int, prompt: list[int], *numbers: int) -> None:
    """Evict pages of a prompt."""
    request = Request(prompt)
    engine.scheduler.begin(request)
    keys = engine.scheduler._requests[request.request_id].keys
    engine.scheduler.finish(request)
    with Cache.attach(engine.name) as other:
        for number in numbers:
            found = Run(group).keys(np.ascontiguousarray(keys[number : number + 1]))
            assert other.index.drop(found) == 1


@of_each_kind
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_engine_finds_the_last_state(
    segment_name: str, how: dict[str, Any], ranks: int
) -> None:
    first = engine(segment_name, "a", ranks, **how)
    with first, engine(segment_name, "b", ranks, **how) as second:
        assert first.ask(PROMPT) == 0
        assert second.ask(PROMPT) == 48
        assert second.ask([*PROMPT, 1, 2]) == 48
        assert second.ask(PROMPT[:41]) == 0  # a state is of its position alone
        assert second.ask(PROMPT[:41]) == 40
        assert not first.pool.parked | second.pool.parked
        assert not first.pool.held.total() + second.pool.held.total()
    check_clean(segment_name)


def test_a_prefix_that_prompts_share_gets_a_state(segment_name: str) -> None:
    with engine(segment_name) as first, engine(segment_name, "b") as second:
        first.ask(PROMPT)
        assert second.ask([*PROMPT[:30], *range(100, 130)]) == 0  # its step ends after 24
        assert first.ask([*PROMPT[:30], *range(200, 230)]) == 24
        request = Request([*PROMPT[:30], *range(300, 330)], shared_prefix_boundary=28)
        first.scheduler.begin(request)
        assert first.look(request) == 24
        assert request.shared_prefix_boundary == 28  # there is one at 24
        first.scheduler.finish(request)


def test_what_vllm_shares_itself_is_left_to_it(segment_name: str) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        request = Request([*PROMPT[:30], *range(300, 330)])
        one.scheduler.begin(request)
        for own, marked in ((0, 24), (0, 24), (28, 28)):  # the second answer is the first one's
            request.shared_prefix_boundary = own
            assert one.look(request) == 0
            assert request.shared_prefix_boundary == marked
        one.scheduler.finish(request)


@pytest.mark.parametrize("group", [1, 2])
def test_a_state_that_was_evicted_is_a_miss_and_is_saved_again(
    segment_name: str, group: int
) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        drop(one, group, PROMPT, 5)
        assert one.ask(PROMPT) == 0
        assert one.ask(PROMPT) == 48


def test_a_prefix_that_was_evicted_is_a_miss(segment_name: str) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        drop(one, 0, PROMPT, 5)
        assert one.ask(PROMPT) == 0


def test_tokens_that_the_device_has_are_not_loaded(segment_name: str) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        loads: list[Any] = []
        usual = one.workers[0].load

        def load(orders: Any) -> None:
            loads.extend(orders.loads)
            usual(orders)

        one.workers[0].load = load  # type: ignore[method-assign]
        request = Request(PROMPT)
        one.scheduler.begin(request)
        found = one.look(request, 5 * BLOCK)
        assert found == 48 - 5 * BLOCK
        one.allocate(request, 5 * BLOCK, found)
        one.scheduler.allocated(request, one.tables[request.request_id], found)
        assert not one.load(request)
        assert [len(part.blocks) for part in loads[0].parts] == [12 - 5, 1, 1]
        request.num_computed_tokens = 48
        one.check(request)
        one.end(request)
        one.idle()
    check_clean(segment_name)


@of_each_kind
def test_blocks_that_are_saved_are_given_to_no_other(
    segment_name: str, how: dict[str, Any]
) -> None:
    """vLLM sets new blocks to zero before a worker hears of the step."""
    with engine(segment_name, **how) as one, engine(segment_name, "b", **how) as other:
        gate = Gate()
        one.workers[0]._events = lambda: [gate]
        request = Request(PROMPT)
        one.admit(request)
        for end in (16, 32, 48, 50):
            one.compute(request, end)
        assert one.pool.held.total() > 0
        assert one.pool.parked
        another = Request(list(range(200, 240)))
        one.admit(another)
        one.compute(another, 40, preempted=(request,))
        gate.open.set()
        for each in (request, another):
            one.end(each)
        one.idle()
        assert not one.pool.parked
        assert not one.pool.held.total()
        assert one.workers[0].take_figures()["given_up_saves"] == 0
        assert other.ask(PROMPT) == 48
        assert other.ask(PROMPT[:40]) == 32


def test_states_hold_a_part_of_the_device_alone(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(segment_name) as one:
        monkeypatch.setattr(scheduler, "MOST_HELD", one.pool.num_gpu_blocks // 2)  # two
        gate = Gate()
        one.workers[0]._events = lambda: [gate]
        request = Request(PROMPT)
        one.admit(request)
        one.compute(request, 16)
        one.compute(request, 32)
        assert one.scheduler.take_figures()["given_up_saves"] == 2
        gate.open.set()
        one.end(request)
        one.idle()
        assert pages(segment_name) == {"full": 4, "state1": 1, "state2": 1}
        assert one.ask(PROMPT[:33]) == 16


def test_states_between_pages_and_of_the_answer_are_not_saved(segment_name: str) -> None:
    with engine(segment_name) as one, engine(segment_name, "b", save_decode=True) as other:
        for each, saved in ((one, 0), (other, 1)):
            request = Request(PROMPT[:20])
            each.admit(request)
            for end in (12, 20):
                each.compute(request, end)
            for token in range(400, 405):
                request.all_token_ids.append(token)
                each.compute(request, request.num_tokens)
            each.end(request)
            each.idle()
            assert pages(segment_name)["state1"] == saved
        assert one.ask([*PROMPT[:20], *range(400, 405)]) == 24


def test_a_request_of_before_a_reset_saves_no_state(segment_name: str) -> None:
    with engine(segment_name, **KINDS["states alone"]) as one:
        request = Request(PROMPT)
        one.admit(request)
        one.compute(request, 16)
        one.idle()
        one.scheduler.reset()
        one.compute(request)
        one.end(request)
        one.idle()
        assert one.ask(PROMPT) == 0
        assert one.ask(PROMPT) == 48


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_load_of_which_one_group_fails_is_computed(segment_name: str, failing: int) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        usual = one.workers[0]._begin_load

        def begin(order: Any, part: Any) -> Any:
            if part.group == failing:
                raise RuntimeError("it fails")
            return usual(order, part)

        one.workers[0]._begin_load = begin  # type: ignore[method-assign]
        request = Request(PROMPT)
        assert one.admit(request) == 0
        assert one.scheduler.look(request, 0) == (0, False)
        one.workers[0]._begin_load = usual  # type: ignore[method-assign]
        one.compute(request)
        one.end(request)
        one.idle()
        assert one.ask(PROMPT) == 48
    check_clean(segment_name)


def test_a_load_that_ends_within_a_page_is_lost(segment_name: str) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        request = Request(PROMPT)
        one.scheduler.begin(request)
        assert one.look(request) == 48
        one.allocate(request, found=44)
        one.scheduler.allocated(request, one.tables[request.request_id], 44)
        assert one.load(request)
        one.compute(request)
        one.end(request)
        one.idle()
    check_clean(segment_name)


def test_an_abort_while_loading_gives_everything_back(segment_name: str) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        gate = Gate()
        one.workers[0]._events = lambda: [gate]
        request = Request(PROMPT)
        one.scheduler.begin(request)
        found = one.look(request)
        one.allocate(request, found=found)
        one.scheduler.allocated(request, one.tables[request.request_id], found)
        orders = one.scheduler.orders(output(), lambda name, group: one.tables[name][group])
        one.workers[0].load(orders)
        assert not one.scheduler.finish(request)
        gate.open.set()
        while request.request_id not in (got := one.workers[0].received()):
            pass
        one.scheduler.report(None, got)
        assert not one.scheduler._requests
    check_clean(segment_name)


def test_no_states_are_told_or_none_can_be_held(segment_name: str) -> None:
    with engine(segment_name) as one:
        request = Request(PROMPT)
        one.admit(request)
        for told in (None, SimpleNamespace(boundary_state_offloads={"unknown": [(1, 3, 8)]})):
            said = output(kv_connector_block_state=told)
            assert not one.scheduler.orders(said, lambda *_: []).saves
        one.scheduler._pool = None
        one.compute(request)
        one.end(request)
        one.idle()
        assert pages(segment_name) == {"full": 6, "state1": 0, "state2": 0}


def output(**more: Any) -> Any:
    """Of a step that computes nothing."""
    empty = SimpleNamespace(new_block_ids=[])
    usual = {
        "num_scheduled_tokens": {},
        "total_num_scheduled_tokens": 0,
        "scheduled_spec_decode_tokens": {},
        "preempted_req_ids": set(),
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": empty,
        "kv_connector_block_state": None,
    }
    return SimpleNamespace(**{**usual, **more})


@pytest.mark.slow
@of_each_kind
def test_what_was_stored_is_read_after_all_have_gone(
    segment_name: str, tmp_path: Path, how: dict[str, Any]
) -> None:
    url = f"disk:{tmp_path}?capacity=64MiB"
    with engine(segment_name, storage=url, **how) as one:
        one.ask(PROMPT)
        request = Request([*PROMPT[:30], *range(100, 126)])  # its last page has no state yet
        one.admit(request)
        for end in (40, 56):
            one.compute(request, end)
            one.offers = lambda request: []  # type: ignore[method-assign]
        one.end(request)
        one.idle()
    Segment.unlink(segment_name)
    with engine(segment_name, storage=url, **how) as one:
        assert one.ask(PROMPT) == 48
        assert one.ask([*PROMPT[:30], *range(100, 130)]) == 40
