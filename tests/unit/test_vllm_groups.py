"""The connector for vLLM with models of several groups: full attention and windows, in vLLM's order
of calls, over tensors that the groups share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.vllm_stand_in import BLOCK, Chunk, Engine, Request
from unit.test_vllm_halves import Gate

from lightcache import Cache, traces
from lightcache.connectors.vllm import scheduler, worker
from lightcache.connectors.vllm.scheduler import open_cache
from lightcache.errors import LightcacheError, NotReady
from lightcache.runs import Run
from lightcache.shm import Segment

PROMPT = list(range(3, 53))  # 50 tokens: 6 pages of 8, and 2 tokens
WINDOWS = (10, 8)
"""The position after six pages needs two pages of the first group, and one of the second."""


@pytest.fixture(autouse=True)
def engines_apart(monkeypatch: pytest.MonkeyPatch, segment_name: str) -> Iterator[None]:
    for half in ("scheduler", "worker"):
        apart = partial(open_cache, shared=False)
        monkeypatch.setattr(f"lightcache.connectors.vllm.{half}.open_cache", apart)
    monkeypatch.setattr(scheduler, "STORAGE", scheduler.START)  # other work may hold it up
    yield
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


def engine(name: str, identity: str = "a", ranks: int = 1, **how: Any) -> Engine:
    return Engine(name, identity, ranks, windows=WINDOWS, **how)


def drop(engine: Engine, group: int, *pages: int) -> None:
    """Evict pages of the prompt."""
    request = Request(PROMPT)
    engine.scheduler.begin(request)
    keys = engine.scheduler._requests[request.request_id].keys
    engine.scheduler.finish(request)
    with Cache.attach(engine.name) as other:
        for page in pages:
            found = Run(group).keys(np.ascontiguousarray(keys[page : page + 1]))
            assert other.index.drop(found) == 1


def test_another_engine_finds_the_windows_of_a_position(segment_name: str) -> None:
    with engine(segment_name) as first, engine(segment_name, "b") as second:
        assert first.ask(PROMPT) == 0
        assert second.ask(PROMPT) == 48
        assert second.ask([*PROMPT[:30], *range(100, 130)]) == 24
        assert second.ask(PROMPT, device=5 * BLOCK) == 48 - 20
        assert second.ask(PROMPT[:48]) == 40
        with Cache.attach(segment_name) as other:
            report = other.check()
            report.raise_if_broken()
            assert report.pins == 0
            assert [group.name for group in other.index.groups()] == ["full", "window10", "window8"]


@pytest.mark.parametrize(
    ("group", "pages", "found"),
    [(1, [5], 40), (1, [4], 32), (2, [5], 40), (2, [0], 48), (1, [5, 4, 3, 2, 1, 0], 0)],
)
def test_windows_that_were_evicted_make_a_hit_shallower(
    segment_name: str, group: int, pages: list[int], found: int
) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        drop(one, group, *pages)
        assert one.ask(PROMPT) == found
        assert one.ask(PROMPT) == 48  # what was computed is saved again
        assert one.scheduler.take_figures()["failed_loads"] == 0


def test_a_prefix_that_was_evicted_makes_it_shallower(segment_name: str) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        drop(one, 0, 5, 4)
        assert one.ask(PROMPT) == 32


@pytest.mark.parametrize("chunk", [8, 16, 20, 32, 64])
def test_chunks_are_found_from_their_beginning_on(segment_name: str, chunk: int) -> None:
    def engine(identity: str, **how: Any) -> Engine:
        return Engine(segment_name, identity, windows=(Chunk(chunk),), **how)

    with engine("a") as first, engine("b", ranks=2) as second:
        assert first.ask(PROMPT) == 0
        assert second.ask(PROMPT) == 48
        assert second.ask([*PROMPT[:30], *range(100, 130)]) == 24
        assert second.ask(PROMPT, device=5 * BLOCK) == 48 - 20
        assert second.ask(PROMPT[:48]) == 40
        drop(first, 1, *range(6))
        # A position at the beginning of a chunk needs none of its group's pages.
        at = [page for page in range(7) if page * 8 // chunk * chunk // 8 == page]
        assert second.ask(PROMPT) == 8 * max(at)
        assert second.ask(PROMPT) == 48  # what was computed is saved again
        assert second.scheduler.take_figures()["failed_loads"] == 0
    with Cache.attach(segment_name) as other:
        report = other.check()
        report.raise_if_broken()
        assert report.pins == 0
        assert [group.name for group in other.index.groups()] == ["full", f"chunk{chunk}"]


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_ranks_of_another_number_read(segment_name: str, writers: int, readers: int) -> None:
    with engine(segment_name, "a", writers) as first:
        assert first.ask(PROMPT) == 0
        with engine(segment_name, "b", readers) as second:
            assert second.ask(PROMPT) == 48
        with Cache.attach(segment_name, readonly=True) as other:
            assert [group.pages for group in other.index.groups()] == [6, 6, 6]


def test_chunks_of_a_prompt_give_their_blocks_up_while_they_are_saved(segment_name: str) -> None:
    """What a window leaves is given to the next chunk at once: its save ends before."""
    with engine(segment_name) as one, engine(segment_name, "b") as other:
        request = Request(PROMPT)
        one.admit(request)
        for end in (16, 18, 37, 40, 50):
            one.compute(request, end)
        one.end(request)
        one.idle()
        assert one.workers[0].take_figures()["given_up_saves"] == 0
        assert other.ask(PROMPT) == 48


def test_a_save_whose_blocks_a_window_gave_up_is_given_up(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightcache.connectors.vllm.worker.SETTLE", 0.01)
    with engine(segment_name) as one, engine(segment_name, "b") as other:
        gate = Gate()
        usual, one.workers[0]._events = one.workers[0]._events, lambda: [gate]
        request = Request(PROMPT)
        one.admit(request)
        one.compute(request, 32)
        one.workers[0]._events = usual
        one.compute(request)  # it reads what the second chunk has written
        gate.open.set()
        one.end(request)
        one.idle()
        assert one.workers[0].take_figures()["given_up_saves"] == 2
        with Cache.attach(segment_name, readonly=True) as cache:
            assert [group.pages for group in cache.index.groups()] == [6, 2, 2]
        assert other.ask(PROMPT) == 48
        assert other.ask(PROMPT[:40]) == 0  # the windows before were given up


def test_a_step_looks_at_one_block_of_a_group_that_nothing_was_freed_of(segment_name: str) -> None:
    """However many saves of it are under way; and at one more for each that was."""
    with engine(segment_name) as one:
        gate = Gate()
        one.workers[0]._events = lambda: [gate]
        request = Request(PROMPT)
        one.admit(request)
        for end in (16, 24, 32):
            one.compute(request, end)
        half, looks = one.scheduler, []

        class Table(list):  # type: ignore[type-arg]
            def __getitem__(self, place: Any) -> Any:
                looks.append(place)
                return super().__getitem__(place)

        def tables(identity: str, group: int) -> Any:
            return Table(one.tables[identity][group])

        def step() -> tuple[int, int]:
            looks.clear()
            new = SimpleNamespace(new_block_ids=[])
            output = SimpleNamespace(
                num_scheduled_tokens={}, total_num_scheduled_tokens=0,
                preempted_req_ids=(), scheduled_new_reqs=[],
                scheduled_cached_reqs=new, scheduled_spec_decode_tokens={},
            )  # fmt: skip
            assert not half.orders(output, tables).settle
            return len(looks), sum(job.freed for job in half._jobs.values())

        step()
        windows = len(one.windows) - 1
        unfreed = len({job.group for job in half._jobs.values() if not job.freed} - {0})
        assert len(half._jobs) > 2 * windows
        before = step()[1]
        assert step() == (unfreed, before)
        for group in range(1, windows + 1):
            one.tables[request.request_id][group][:] = [0] * len(
                one.tables[request.request_id][group]
            )
        looked, freed = step()
        assert looked == freed - before > 0
        assert freed == sum(job.group > 0 for job in half._jobs.values())
        assert step() == (0, freed)
        assert not half._windowed
        one.release = lambda identity: None  # type: ignore[method-assign]
        gate.open.set()
        one.end(request)
        one.idle()
        assert not half._freed


def test_blocks_of_a_load_are_settled_too(segment_name: str) -> None:
    """Blocks that a window gave up, and a load of another request gets."""
    with engine(segment_name) as one:
        one.ask(PROMPT)
        gate = Gate()
        usual, one.workers[0]._events = one.workers[0]._events, lambda: [gate]
        request = Request(list(range(200, 240)))
        one.admit(request)
        one.compute(request, 32)
        one.workers[0]._events = usual
        loads = Request(PROMPT)
        one.scheduler.begin(loads)
        found = one.look(loads)
        one.grow(request, 32)  # vLLM frees what no later token sees in the next step
        one.tables[loads.request_id] = [[0] * one.unseen(each, found) for each in one.windows]
        one.grow(loads, found)
        one.scheduler.allocated(loads, one.tables[loads.request_id], found)
        settled: list[int] = []
        usual_settle = one.workers[0].settle

        def settle(orders: Any) -> None:
            settled.extend(orders.settle)
            gate.open.set()
            usual_settle(orders)

        one.workers[0].settle = settle  # type: ignore[method-assign]
        assert not one.load(loads)
        assert len(set(settled)) == 2
        loads.num_computed_tokens = found
        one.check(loads)
        for each in (request, loads):
            one.compute(each)
            one.end(each)
        one.idle()


def test_where_vllm_does_not_say_its_blocks_all_saves_are_settled(segment_name: str) -> None:
    with engine(segment_name) as one:
        gate = Gate()
        one.workers[0]._events = lambda: [gate]
        request = Request(PROMPT)
        one.admit(request)
        one.compute(request, 16)
        jobs = set(one.scheduler._jobs)

        def raises(identity: str, group: int) -> list[int]:
            raise RuntimeError("it cannot be asked")

        output = SimpleNamespace(
            num_scheduled_tokens={}, total_num_scheduled_tokens=0, preempted_req_ids=()
        )
        assert set(one.scheduler.orders(output, raises).settle) == jobs
        assert len(jobs) == 3
        gate.open.set()
        one.end(request)
        one.idle()


def test_a_load_of_fewer_tokens_than_were_found(segment_name: str) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        request = Request(PROMPT)
        one.scheduler.begin(request)
        assert one.look(request) == 48
        one.allocate(request, found=32)
        one.scheduler.allocated(request, one.tables[request.request_id], 32)
        assert not one.load(request)
        request.num_computed_tokens = 32
        one.check(request)
        one.compute(request)
        one.end(request)
        one.idle()
        with Cache.attach(segment_name) as other:
            assert other.check().pins == 0


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
        with Cache.attach(segment_name) as other:
            assert other.check().pins == 0


def test_a_load_of_which_a_part_waits_for_the_driver(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(segment_name) as one:
        one.ask(PROMPT)
        begin, refused = worker.Load, [False, True, True, False]

        def load(*arguments: Any, **named: Any) -> Any:
            if refused and refused.pop(0):
                raise NotReady("these pages are not registered yet")
            return begin(*arguments, **named)

        monkeypatch.setattr(worker, "Load", load)
        assert one.ask(PROMPT) == 48
        assert not refused


def test_pages_that_go_before_the_load_begins(segment_name: str) -> None:
    with engine(segment_name) as one, Cache.attach(segment_name) as other:
        one.ask(PROMPT)
        request = Request(PROMPT)
        one.scheduler.begin(request)
        found = one.look(request)
        one.allocate(request, found=found)
        other.clear()
        one.scheduler.allocated(request, one.tables[request.request_id], found)
        assert one.load(request)
        one.compute(request)
        one.end(request)
        one.idle()
        assert other.check().pins == 0


def test_planned_pages_stay_and_a_cancelled_plan_pins_nothing(segment_name: str) -> None:
    with engine(segment_name) as one, Cache.attach(segment_name) as other:
        one.ask(PROMPT)
        request = Request(PROMPT)
        one.scheduler.begin(request)
        assert one.scheduler.look(request, 0) == (48, True)
        assert other.check().pins == 6 + 2 + 1
        one.scheduler.finish(request)
        assert other.check().pins == 0


def test_a_preempted_request_saves_again(segment_name: str) -> None:
    with engine(segment_name) as one:
        gate = Gate()
        usual, one.workers[0]._events = one.workers[0]._events, lambda: [gate]
        victim, other = Request(PROMPT), Request(list(range(200, 220)))
        one.admit(victim)
        one.compute(victim)
        one.workers[0]._events = usual
        gate.open.set()
        one.admit(other)
        one.compute(other, preempted=(victim,))
        for each in (victim, other):
            one.end(each)
        one.idle()
        assert one.ask(PROMPT) == 48


def test_answers_are_saved_with_their_windows(segment_name: str) -> None:
    with engine(segment_name, save_decode=True) as one:
        request = Request(PROMPT[:20])
        one.admit(request)
        one.compute(request)
        for token in range(400, 420):
            request.all_token_ids.append(token)
            one.compute(request)
        one.end(request)
        one.idle()
        assert one.ask([*request.all_token_ids, 1, 2]) == 40


def test_a_page_longer_than_a_window_is_saved_where_a_step_computes_all_of_it(
    segment_name: str,
) -> None:
    with Engine(segment_name, windows=(4,)) as one:
        request = Request(PROMPT)
        one.admit(request)
        for end in (16, 31, 50):  # of page 3, vLLM has given up the first block
            one.compute(request, end)
        one.end(request)
        one.idle()
        with Cache.attach(segment_name, readonly=True) as cache:
            assert [group.pages for group in cache.index.groups()] == [6, 5]
        assert one.ask(PROMPT[:33]) == 24
        assert one.ask(PROMPT) == 48


@pytest.mark.slow
def test_what_was_stored_is_read_after_all_have_gone(segment_name: str, tmp_path: Path) -> None:
    url = f"disk:{tmp_path}?capacity=64MiB"
    with engine(segment_name, storage=url) as one:
        one.ask(PROMPT)
    Segment.unlink(segment_name)
    with engine(segment_name, storage=url) as one:
        request = Request(PROMPT)
        one.scheduler.begin(request)
        found = one.look(request)
        assert found == 48
        assert one.scheduler.sources(request, found) == (0, 48)
        one.scheduler.finish(request)
        assert one.ask(PROMPT) == 48


def test_requests_are_recorded_without_their_tokens(segment_name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with engine(segment_name, record=str(path)) as one:
        for prompt in (PROMPT, PROMPT[:30], [*PROMPT[:30], *range(100, 130)]):
            one.ask(prompt)
    assert path.stat().st_mode & 0o777 == 0o600
    trace = traces.read(path)
    assert trace.tokens.tolist() == [50, 30, 60]
    first, second, third = np.split(trace.blocks, trace.ends[:-1])
    assert second.tolist() == first[: len(second)].tolist() == third[: len(second)].tolist()
    assert not set(first[len(second) :].tolist()) & set(third[len(second) :].tolist())
    assert len(first) == len(PROMPT) // trace.block_tokens


def test_a_record_that_cannot_be_written_is_said_once(
    segment_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(segment_name, record=str(tmp_path / "none" / "trace")) as one:
        for prompt in (PROMPT, PROMPT[:30]):
            one.ask(prompt)
    assert caplog.text.count("nothing is recorded") == 1
