"""A client that is killed while it holds nearly everything starves no other: a call that would give
less than it was asked for takes back what the dead one held, and nothing calls `reap`."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.index_view import IndexView
from support.keys import prompt
from support.refusals import refused
from support.scripts import with_support

from lightcache import OutOfPages, PageIndex
from lightcache.shm.layout import ClientState

pytestmark = pytest.mark.crash

PAGES, MOST = 200, 190
Script = Callable[..., subprocess.CompletedProcess[str]]
Wait = Callable[[Callable[[], bool], str], None]

DIE = """
import os, signal
from support.keys import prompt
from lightcache import PageIndex
name, device, what, n = sys.argv[1], sys.argv[2] == "True", sys.argv[3], int(sys.argv[4])
index = PageIndex.attach(name, role="doomed", device=device)
space = index.namespace("w", "small") if what == "quota" else None
if what == "ready":
    with index.reserve(prompt(7, n)) as new:
        new.publish()
    held = index.match(prompt(7, n))
elif what == "held":
    held = index.allocate(n)
elif what == "reservations":
    held = [index.reserve(prompt(1000 + i, 1)) for i in range(n)]
elif what == "tickets":
    other = [c for c in index.clients() if c.role == "other"][0]
    to = [(other.slot, other.epoch)]
    lease = index.match(prompt(7, 2))
    held = [lease.ticket(to, timeout=0.0) for _ in range(n)]
elif what == "clients":
    held = [PageIndex.attach(name) for _ in range(n)]
else:
    held = index.reserve(prompt(1, n), namespace=space)
    assert len(held.new) == n
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)\n"
WAIT = "print('holding', flush=True)\nsignal.pause()\n"


@pytest.fixture
def index(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageIndex]:
    def by_hand(self: PageIndex) -> int:
        raise AssertionError("nobody reaps by hand here")

    monkeypatch.setattr(PageIndex, "reap", by_hand)
    with PageIndex.create(segment_name, pages=PAGES, role="other") as made:
        yield made


@pytest.fixture
def killed(script: Script, segment_name: str) -> Callable[..., None]:
    """Have a client hold something and be killed; all of it has gone when this returns."""

    def run(what: str, n: int = MOST, *, device: bool = False) -> None:
        source = with_support(DIE + KILL)
        script(source, segment_name, device, what, n, status=-signal.SIGKILL)

    return run


def looks(index: PageIndex) -> tuple[int, int, int]:
    root = IndexView(index).raw_root()
    return root.looking_ns, root.looked_ns, root.reaped


def sound(index: PageIndex) -> None:
    assert [c.role for c in index.clients() if not c.alive] == []
    index.check().raise_if_broken()


PORTION = 4096  # pages being written that one call takes back (LCI_REAP_MOST)
CHUNK = 62  # a list's pages are worked off in pieces of so many
MANY = 10_000


@pytest.fixture
def large(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=MANY, role="other") as made:
        yield made


def test_one_call_takes_back_a_portion(large: PageIndex, script: Script, segment_name: str) -> None:
    """Whoever asks pays for a portion, and sees a dead client until the last of them."""
    script(with_support(DIE + KILL), segment_name, False, "writing", MANY, status=-signal.SIGKILL)
    back = 0
    while back < MANY:
        assert [c.role for c in large.clients() if not c.alive] == ["doomed"]
        assert not large.can_allocate(MANY + 1)
        now = large.stats()
        assert 0 < MANY - now.writing - back < PORTION + CHUNK
        assert now.reservations == (now.writing > 0)
        back = MANY - now.writing
        large.check().raise_if_broken()
    sound(large)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["writing", "held", "ready"])
def test_large_requests_are_met_after_some_calls(
    large: PageIndex, script: Script, segment_name: str, what: str
) -> None:
    script(with_support(DIE + KILL), segment_name, False, what, MANY, status=-signal.SIGKILL)
    with large.reserve(prompt(2, MOST)) as got:
        assert len(got.new) == MOST, "a portion is enough"
    for _ in range(MANY // PORTION):
        with contextlib.suppress(OutOfPages), large.allocate(MANY):
            pass
    with large.allocate(MANY) as held:
        assert len(held.pages) == MANY
    sound(large)


@pytest.mark.parametrize("device", [False, True])
def test_reserving_what_a_dead_client_was_writing(
    index: PageIndex, killed: Callable[..., None], device: bool
) -> None:
    killed("writing", device=device)
    with index.reserve(prompt(2, MOST)) as got:
        assert len(got.new) == MOST
        assert got.why == ""
    sound(index)


@pytest.mark.parametrize("device", [False, True])
def test_a_zombie_holds_nothing(
    index: PageIndex, tmp_path: Path, wait_until: Wait, segment_name: str, device: bool
) -> None:
    path = tmp_path / "doomed.py"
    path.write_text(with_support(DIE + WAIT))
    command = [sys.executable, str(path), segment_name, str(device), "writing", str(MOST)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"holding\n"
        with index.reserve(prompt(3, MOST)) as little:
            assert len(little.new) == PAGES - MOST, "it lives: nothing of it is taken"
        child.send_signal(signal.SIGKILL)
        wait_until(lambda: not all(c.alive for c in index.clients()), "its death to be seen")
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # all of it has ended: a zombie
        with index.reserve(prompt(2, MOST)) as got:
            assert len(got.new) == MOST
    sound(index)


def test_pages_that_a_dead_client_had_pinned(index: PageIndex, killed: Callable[..., None]) -> None:
    killed("ready")
    with index.reserve(prompt(2, MOST)) as got:
        assert len(got.new) == MOST
    sound(index)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["writing", "held", "ready"])
def test_allocating(index: PageIndex, killed: Callable[..., None], what: str) -> None:
    killed(what)
    assert index.can_allocate(MOST)
    with index.allocate(MOST) as held:
        assert len(held.pages) == MOST
    sound(index)


def test_asking_whether_it_could_takes_back(index: PageIndex, killed: Callable[..., None]) -> None:
    killed("held")
    assert not index.can_allocate(PAGES + 1)
    sound(index)


def test_a_batch(index: PageIndex, killed: Callable[..., None]) -> None:
    killed("writing")
    keys = np.concatenate([prompt(2, 95), prompt(3, 95)])
    with index.reserve_batch(keys, np.array([0, 95, MOST], np.int64)) as got:
        assert got.all_new
    sound(index)


def test_a_state_is_acquired(
    segment_name: str, worlds: Any, tmp_path: Path, script: Script
) -> None:
    world = worlds(slots=4)
    script(with_support(DIE + KILL), world.slots.name, False, "held", 4, status=-signal.SIGKILL)
    world.checkpoints.acquire(4).free()
    sound(world.slots)


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Any]:
    from support.hybrid_case import HybridWorld
    from support.manager_case import made_worlds

    yield from made_worlds(segment_name, HybridWorld)


def test_a_quota(index: PageIndex, killed: Callable[..., None]) -> None:
    space = index.namespace("w", "small", quota_pages=10)
    killed("quota", 10)
    with index.reserve(prompt(2, 8), namespace=space) as got:
        assert len(got.new) == 8
    sound(index)


def test_all_reservations(index: PageIndex, killed: Callable[..., None]) -> None:
    killed("reservations", PAGES)  # as many as there are records
    with index.reserve(prompt(2, 3)) as got:
        assert len(got.new) == 3
    sound(index)


def test_all_tickets(index: PageIndex, killed: Callable[..., None]) -> None:
    with index.reserve(prompt(7, 2)) as new:
        new.publish()
    killed("tickets", PAGES)
    with index.match(prompt(7, 2)) as lease:
        lease.ticket([index.client_id]).drop()
    sound(index)


def test_all_slots_of_the_client_table(
    index: PageIndex, killed: Callable[..., None], segment_name: str
) -> None:
    killed("clients", 61)
    assert len(index.clients()) == 63
    with PageIndex.attach(segment_name) as other:
        assert len(other.clients()) == 2


def test_evicting_looks_in_turn(index: PageIndex, killed: Callable[..., None]) -> None:
    """Small requests succeed by evicting what is of use; so evicting looks, too."""
    with index.reserve(prompt(5, PAGES)) as new:
        new.publish()
    with index.reserve(prompt(6, 10)) as new:  # evicts, and it is its turn
        new.publish()
    looked = looks(index)[0]
    assert looked > 0
    killed("writing", 50)
    IndexView(index).raw_root().looking_ns = 0  # a second passes
    with index.reserve(prompt(8, 10)) as got:
        assert len(got.new) == 10
    sound(index)
    # Evicts again, within the second: on a busy machine not at the first attempt.
    for number in itertools.count(9):
        looked = IndexView(index).raw_root().looking_ns = time.monotonic_ns()
        with index.reserve(prompt(number, 60)) as got:
            assert len(got.new) == 60
        if time.monotonic_ns() - looked < 1_000_000_000:
            break
    assert looks(index)[0] == looked


def test_what_the_living_hold_is_no_reason(index: PageIndex, segment_name: str) -> None:
    space = index.namespace("w", "small", quota_pages=5)
    with PageIndex.attach(segment_name, role="living") as other, other.allocate(MOST):
        with index.reserve(prompt(2, 20)) as got:
            assert len(got.new) == 10
        assert not index.can_allocate(11)
        refused(OutOfPages, "", index.allocate, 11)
        with index.reserve(prompt(3, 8), namespace=space) as got:
            assert len(got.new) == 5
        assert looks(index)[2] == 0, "nothing was taken back"
        assert [c.state for c in index.clients()] == [ClientState.TAKEN] * 2


def test_a_giver_is_spared_while_its_ticket_is_awaited(
    index: PageIndex, script: Script, segment_name: str
) -> None:
    """Who evicts leaves the work of a dead giver to those who are to adopt it; who would get less
    does not."""
    source = with_support(DIE.replace("timeout=0.0", "timeout=600.0") + KILL)
    with index.reserve(prompt(7, 2)) as new:
        new.publish()
    script(source, segment_name, False, "tickets", 1, status=-signal.SIGKILL)
    with index.reserve(prompt(5, PAGES - 2)) as new:
        new.publish()
    IndexView(index).raw_root().looking_ns = 0
    assert index.evict(1) == 1
    assert [c.alive for c in index.clients()] == [True, False]
    with index.reserve(prompt(6, PAGES)) as got:
        assert len(got.new) == PAGES - 2, "the ticket still pins its two pages"
    sound(index)
    assert index.refuse_orphans() == 1
