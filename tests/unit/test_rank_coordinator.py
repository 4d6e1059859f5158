"""A coordinator and its ranks, order by order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest
from support.crew import PAGE, Crew, Rank
from support.keys import prompt

from lightcache import ClientId
from lightcache.errors import (
    Abandoned,
    ConfigError,
    LockTimeout,
    TransferFailed,
    WaitTimeout,
)
from lightcache.manager.ranks.coordinator import RankCoordinator
from lightcache.manager.ranks.messages import Decisions
from lightcache.shm import SharedLog

TOKENS = np.arange(2 * PAGE)
SLOTS = np.array([8, 9, 10, 11, 4, 5, 6, 7])


@pytest.fixture
def crews(segment_name: str) -> Iterator[Any]:
    made: list[Crew] = []

    def make(**how: Any) -> Crew:
        made.append(Crew(f"{segment_name}{len(made)}", **how))
        return made[-1]

    yield make
    for crew in reversed(made):
        crew.close()


def write(crew: Crew, number: int = 1) -> Any:
    """Every rank has computed two pages; they are ordered to the host."""
    for each in crew.ranks:
        each.compute(TOKENS, SLOTS)
    return crew.coordinator.offload(crew.reserve(number, 2), SLOTS)


def test_every_rank_writes_its_shard_and_reads_it_again(crews: Any) -> None:
    crew = crews()
    made = write(crew)
    assert not made.done()
    assert crew.cache.peek(prompt(1, 2)) == 0
    crew.step()
    assert made.done()
    made.wait(0)
    assert crew.cache.peek(prompt(1, 2)) == 2
    back = np.array([-1, 40, 41, 42, 60, 61, 62, 63])
    loaded = crew.coordinator.load(crew.cache.match(prompt(1, 2)), back, 0)
    told = crew.step()
    assert told.completed == (made.number,)
    assert loaded.done()
    for each in crew.ranks:
        stamps = each.stamps(TOKENS)
        assert (each.device.slots[back[1:]] == stamps[1:]).all()
        assert each.device.slots[0] == 0
    assert crew.step().completed == (loaded.number,)
    crew.settled()


def test_only_new_pages_travel(crews: Any) -> None:
    crew = crews()
    write(crew)
    crew.step()
    more = np.arange(100, 112)
    for each in crew.ranks:
        each.compute(np.arange(12), more)
    made = crew.coordinator.offload(crew.reserve(1, 3), more)
    crew.step()
    assert made.done()
    with crew.cache.match(prompt(1, 3)) as lease:
        for each in crew.ranks:
            assert (each.backend._page(int(lease.pages[2])) == each.stamps(np.arange(12))[8:]).all()
    crew.settled()


def test_the_first_token_arrives(crews: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = crews(ranks=1)
    write(crew)
    crew.step()
    backend = crew.ranks[0].backend
    seen, load = [], backend.load

    def look(lease: Any, slots: Any, first: int) -> Any:
        seen.append((slots.tolist(), first))
        return load(lease, np.concatenate([np.full(first, -1), slots]), 0)

    monkeypatch.setattr(backend, "load", look)
    made = crew.coordinator.load(crew.cache.match(prompt(1, 2)), np.arange(40, 45), 3)
    crew.step()
    assert made.done()
    assert seen == [(list(range(40, 45)), 3)]


def test_a_copy_is_in_flight_until_the_last_rank_is_done(crews: Any) -> None:
    crew = crews()
    for each in crew.ranks:
        each.backend.at_once = False
    made = write(crew)
    assert crew.coordinator.in_flight() == (1, 1, 1)
    crew.step()
    crew.ranks[2].backend.finish()
    crew.poll()
    assert crew.coordinator.in_flight() == (1, 1, 0)
    assert made.unfinished() == [0, 1]
    assert [each.worker.in_flight for each in crew.ranks] == [1, 1, 0]
    with pytest.raises(WaitTimeout, match=re.escape("[0, 1]")):
        made.wait(0)
    assert crew.cache.peek(prompt(1, 2)) == 0
    for each in crew.ranks:
        each.backend.finish()
    assert crew.ended(made)
    assert made.unfinished() == []
    crew.settled()


def test_pages_without_a_key(crews: Any) -> None:
    crew = crews()
    for each in crew.ranks:
        each.compute(TOKENS[:3], SLOTS[:3])
    with crew.cache.index.allocate(1) as held:
        made = crew.coordinator.save(held, SLOTS[:3])
        crew.step()
        assert made.done()
        for each in crew.ranks:
            assert (each.backend._page(int(held.pages[0]))[:3] == each.stamps(TOKENS[:3])).all()
    crew.settled()


def fails(crew: Crew, made: Any, said: str) -> None:
    with pytest.raises(TransferFailed, match=said):
        made.done()
    with pytest.raises(TransferFailed, match=said):
        made.wait()
    assert crew.cache.peek(prompt(1, 2)) == 0
    told = crew.step()
    assert (told.completed, told.failed) == ((), (made.number,))


def test_one_rank_fails_to_write(crews: Any) -> None:
    crew = crews()
    for each in crew.ranks:
        each.backend.at_once = False
    made = write(crew)
    crew.step()
    crew.ranks[1].backend.fail_next = 1
    crew.ranks[1].backend.finish()
    crew.poll()
    assert not made.done()  # the others read their blocks still
    for each in crew.ranks:
        each.backend.finish()
    crew.poll()
    fails(crew, made, r"rank 1 \(client slot \d+\) failed")
    assert [each.worker.failures for each in crew.ranks] == [1, 1, 1]
    crew.settled()
    made = write(crew)
    for each in crew.ranks:
        each.backend.at_once = True
    crew.step()
    assert made.done()


def test_who_comes_after_a_failure_is_not_waited_for(crews: Any) -> None:
    crew = crews()
    made = write(crew)
    told = crew.coordinator.step(Decisions(0))
    crew.ranks[0].backend.fail_next = 1
    assert crew.ranks[0].worker.step(60) == told
    fails_at_once = pytest.raises(TransferFailed, match=r"rank 0 .* failed")
    with fails_at_once:
        made.done()
    for each in crew.ranks[1:]:
        assert each.worker.step(60) == told
        assert each.backend.offloads == 0
        assert each.worker.failures == 0
        assert each.worker.last_error is not None
    crew.settled()


def test_one_rank_fails_to_load(crews: Any) -> None:
    crew = crews()
    write(crew)
    crew.step()
    lease = crew.cache.match(prompt(1, 2))
    crew.ranks[2].backend.fail_next = 1
    made = crew.coordinator.load(lease, SLOTS, 0)
    crew.ranks[0].backend.at_once = False
    told = crew.step()
    assert told.failed == ()
    assert not made.done()  # rank 0 writes its blocks still
    crew.ranks[0].backend.finish()
    crew.poll()
    with pytest.raises(TransferFailed, match=r"rank 2 .* failed"):
        made.done()
    crew.settled()


class Broken:
    """A transfer backend whose driver raises what it likes."""

    def save(self, *what: Any) -> Any:
        raise RuntimeError("arranged")

    load = offload = save


@pytest.mark.parametrize("what", ["load", "offload", "save"])
def test_any_error_is_a_verdict(crews: Any, what: str) -> None:
    crew = crews(ranks=2)
    write(crew)
    crew.step()
    worker = crew.ranks[1].worker
    worker._backends[0] = Broken()
    held = crew.cache.index.allocate(1)
    if what == "load":
        made = crew.coordinator.load(crew.cache.match(prompt(1, 2)), SLOTS, 0)
    elif what == "offload":
        made = crew.coordinator.offload(crew.reserve(2, 1), SLOTS[:4])
    else:
        made = crew.coordinator.save(held, SLOTS[:4])
    crew.step()
    with pytest.raises(TransferFailed, match=r"rank 1 .* failed"):
        made.done()
    assert worker.failures == 1
    assert isinstance(worker.last_error, RuntimeError)
    held.free()
    crew.settled()


def test_a_rank_that_does_not_begin_is_too_late(crews: Any) -> None:
    crew = crews(ranks=2, adopt_timeout=0)
    made = crew.coordinator.load(crew.cache.match(prompt(1, 2)), SLOTS[:0], 0)
    with pytest.raises(TransferFailed, match=r"rank 0 .* did not begin in time, rank 1"):
        made.wait()
    crew.settled()


def test_a_lock_that_is_held_for_long_is_asked_for_again(
    crews: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = crews(ranks=2)
    made = write(crew)
    rank = crew.ranks[0]
    adopt, times = rank.cache.adopt, iter(range(10))

    def late(*what: Any, **how: Any) -> Any:
        if next(times) < 2:
            raise LockTimeout("arranged")
        return adopt(*what, **how)

    monkeypatch.setattr(rank.cache, "adopt", late)
    crew.step()
    assert not made.done()
    assert rank.worker.in_flight == 1
    crew.poll()
    assert crew.ended(made)


def test_a_rank_that_has_left_is_named_and_replaced(crews: Any) -> None:
    crew = crews()
    write(crew)
    crew.step()
    left = crew.ranks[1]
    left.close()
    lease = crew.cache.match(prompt(1, 2))
    with pytest.raises(TransferFailed, match=re.escape("[1]")):
        crew.coordinator.load(lease, SLOTS, 0)
    assert not lease.ended
    crew.ranks[1] = Rank(crew.name, crew.log_name, 1)
    crew.coordinator.replace(1, crew.ranks[1].cache.client_id)
    made = crew.coordinator.load(lease, SLOTS, 0)
    crew.step()
    assert made.done()
    assert (crew.ranks[1].device.slots[SLOTS] == left.stamps(TOKENS)).all()
    crew.settled()


def test_an_order_of_another_rank_is_left_alone(crews: Any) -> None:
    crew = crews()
    extra = Rank(crew.name, crew.log_name, 1)
    made = write(crew)
    crew.step([*crew.ranks, extra])
    assert made.done()
    assert extra.backend.offloads == 0
    assert extra.worker.failures == 0
    extra.close()
    crew.settled()


def test_a_log_that_no_rank_reads(crews: Any) -> None:
    crew = crews(capacity=3, append_timeout=0)
    write(crew)
    crew.step()
    crew.coordinator.step(Decisions(1))
    lease = crew.cache.match(prompt(1, 2))
    with pytest.raises(TransferFailed, match="not ordered"):  # its second part finds no room
        crew.coordinator.load(lease, np.arange(8) * 2, 0)
    assert lease.tokens == 8
    lease.release()
    with pytest.raises(WaitTimeout, match="log reader"):
        crew.coordinator.step(Decisions(2, extra=bytes(100)))
    for each in crew.ranks:
        assert each.worker.step(60).step == 1
    crew.steps = 2
    told = crew.step()
    assert (told.step, told.failed) == (2, ())
    assert crew.coordinator.poll() == 0
    crew.settled()


def test_decisions_of_several_entries(crews: Any) -> None:
    crew = crews()
    told = crew.step(lengths={"a": (8, 16), 3: (0, 0)}, extra=bytes(range(256)), releases=("b", 4))
    assert told.extra == bytes(range(256))
    assert crew.step().lengths == {}


def test_nothing_was_decided(crews: Any) -> None:
    crew = crews(ranks=1)
    with pytest.raises(WaitTimeout):
        crew.ranks[0].worker.step(0)
    crew.ranks[0].backend.at_once = False
    made = write(crew)
    with pytest.raises(WaitTimeout):
        crew.ranks[0].worker.step(0.05)
    assert crew.ranks[0].worker.in_flight == 1
    crew.ranks[0].backend.finish()
    with pytest.raises(WaitTimeout):
        crew.ranks[0].worker.step(0)
    assert made.done()


def test_a_coordinator_that_leaves(crews: Any) -> None:
    crew = crews(ranks=2)
    for each in crew.ranks:
        each.backend.at_once = False
    made = write(crew)
    crew.log.close()
    for each in crew.ranks:
        with pytest.raises(Abandoned):
            each.worker.step(60)
        assert each.worker.in_flight == 0
        assert each.backend.offloads == 1
    assert made.done()
    crew.log = SharedLog.attach(crew.log_name, writer=True)
    crew.coordinator = RankCoordinator(crew.log, crew.coordinator.ranks)
    made = write(crew, 2)
    crew.step()
    for each in crew.ranks:
        each.backend.finish()
    assert crew.ended(made)
    crew.settled()


def test_a_verdict_is_given_while_nothing_is_told(
    crews: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = crews(ranks=1)
    rank = crew.ranks[0]
    rank.backend.at_once = False
    reads, read = Event(), rank.log.read

    def reading(timeout: float | None) -> bytes:
        if rank.worker.in_flight and len(rank.log) == 0:
            reads.set()
        return read(timeout)

    monkeypatch.setattr(rank.log, "read", reading)
    made = write(crew)
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(rank.worker.step, 60)
        assert reads.wait(60)
        rank.backend.finish()
        made.wait(60)
        crew.coordinator.step(Decisions(0))
        assert told.result(60).completed == (made.number,)


class Endless:
    """A copy that never finishes."""

    def done(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> None:
        raise WaitTimeout("arranged")


def test_a_copy_that_hangs_when_the_coordinator_leaves(
    crews: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = crews(ranks=1)
    rank = crew.ranks[0]
    write(crew)
    with monkeypatch.context() as patch:
        patch.setattr(rank.backend, "offload", lambda *what: Endless())
        crew.log.close()
        with pytest.raises(WaitTimeout, match="1 copies are in flight"):
            rank.worker.step(0)
    rank.worker._running.clear()


def test_what_a_coordinator_refuses(crews: Any) -> None:
    crew = crews(ranks=2)
    one = crew.coordinator.ranks[0]
    with pytest.raises(ConfigError, match="ranks"):
        RankCoordinator(crew.log, [])
    with pytest.raises(ConfigError, match="ranks"):
        RankCoordinator(crew.log, [one, one])
    with pytest.raises(ConfigError, match="writer"):
        RankCoordinator(crew.ranks[0].log, [one])
    with pytest.raises(ConfigError, match="rank"):
        crew.coordinator.replace(2, ClientId(60, 1))
    with pytest.raises(ConfigError, match="ranks"):
        crew.coordinator.replace(1, one)
    with crew.cache.reserve(prompt(5, 1)) as new, pytest.raises(ConfigError, match="2 shards"):
        crew.coordinator.offload(new, SLOTS)


def test_the_cache_is_closed_under_a_copy(crews: Any) -> None:
    crew = crews(ranks=1)
    made = write(crew)
    crew.cache.close()
    with pytest.raises(TransferFailed, match="lost"):
        made.done()
    assert crew.coordinator.poll() == 0
