"""Rows D2 to D5 and D9, as far as they plan: a prefix cache for hybrid models."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from lightcache.errors import ConfigError
from lightcache.hybrid.saving import (
    Drafts,
    Features,
    Grid,
    RequestSlots,
    Rest,
    Saved,
    SavePolicy,
    Saves,
    Stretch,
    decode_saves,
)

GRIDS = [Grid(1, 64), Grid(16, 64), Grid(64, 64), Grid(64, 128), Grid(528, 528)]


def prefill(policy: SavePolicy, prompt: int, budget: int, kv: int, checkpoint: int) -> list[int]:
    """Compute a prompt by so many tokens at a time; the positions saved."""
    begin, found = checkpoint, []
    branching = policy.grid.branching(kv, checkpoint)
    while begin < prompt:
        end = min(prompt, begin + budget)
        plan = policy.plan(Stretch(begin, end, prompt, checkpoint, branching))
        if plan.position is not None:
            found.append(plan.position)
        begin = plan.end
    return found


# ---- D2


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("saves", Saves)
def test_d2_the_third_prompt_down_a_shared_prefix_hits(grid: Grid, saves: Saves) -> None:
    policy = SavePolicy(grid, saves)
    shared = 5 * grid.grid + 3
    kept: set[int] = set()  # positions of states on what is shared
    hits = []
    for first in (True, False, False):
        kv = 0 if first else shared
        usable = max((position for position in kept if position <= kv), default=0)
        hits.append(usable)
        saved = prefill(policy, shared + 3 * grid.grid, 10 * grid.grid, kv, usable)
        kept |= {position for position in saved if position <= shared}
    assert hits == [0, 0, grid.floor(shared)]


def test_d2_no_branching_point_where_a_state_is_as_deep() -> None:
    grid = Grid(16, 64)
    assert grid.branching(kv=330, checkpoint=0) == 320
    assert grid.branching(kv=330, checkpoint=320) is None
    assert grid.branching(kv=319, checkpoint=256) is None


# ---- D3


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("saves", Saves)
def test_d3_saves_at_the_branching_point_else_at_the_last_of_the_grid(
    grid: Grid, saves: Saves
) -> None:
    policy, step = SavePolicy(grid, saves), grid.grid
    prompt = 9 * step + 5
    branching = 2 * step
    plan = policy.plan(Stretch(0, 4 * step + 1, prompt, branching=branching))
    assert (plan.position, plan.offset) == (branching, branching)
    plan = policy.plan(Stretch(plan.end, prompt, prompt, branching=branching))
    assert plan.position == 9 * step
    aligned = policy.plan(Stretch(0, 3 * step, prompt))
    assert (aligned.position, aligned.final, aligned.end) == (3 * step, True, 3 * step)


def test_d3_an_engine_that_saves_only_at_the_end_is_cut_there() -> None:
    stretch = Stretch(0, 1000, 5000)
    interior = SavePolicy(Grid(16, 64), Saves.INTERIOR).plan(stretch)
    assert (interior.position, interior.offset, interior.end) == (960, 960, 1000)
    end_only = SavePolicy(Grid(16, 64), Saves.END_ONLY).plan(stretch)
    assert (end_only.position, end_only.offset, end_only.end) == (960, 960, 960)


def test_d3_positions_are_reached_from_where_the_stretch_begins() -> None:
    policy = SavePolicy(Grid(16, 64), Saves.INTERIOR)
    plan = policy.plan(Stretch(1000, 2000, 5000))  # chunks of it end at 1064, 1128, ...
    assert (plan.position, plan.end, plan.final) == (1984, 1984, True)
    assert policy.plan(Stretch(plan.end, 3000, 5000)).end == 3000


# ---- D4


@pytest.mark.parametrize("ahead", [False, True])
def test_d4_decoding_never_writes_what_may_still_be_read(ahead: bool) -> None:
    grid = Grid(16, 16, chunk=16, every=32)
    slots = RequestSlots(0, range(1, 1 + RequestSlots.needed(ahead)), ahead=ahead)
    flying: deque[tuple[int, int] | None] = deque()
    skipped = 0
    for tokens in range(1, 600):
        due = decode_saves(grid, [tokens - 1], [tokens]).positions.tolist()
        slot = slots.begin_save(due[0]) if due else None
        skipped += bool(due) and slot is None
        if slot is not None and ahead and slots.newest is not None:
            assert slot != slots.newest.slot
        flying.append((due[0], slot) if slot is not None else None)
        if len(flying) > ahead:
            over = flying.popleft()
            if over is not None:
                slots.confirm(over[0])
                assert slots.newest == Saved(over[1], over[0])
    assert skipped == 0
    assert slots.newest is not None
    assert slots.newest.position == 576


def test_d4_the_newest_confirmed_stays_while_the_other_is_being_written() -> None:
    slots = RequestSlots(0, (1, 2), ahead=True)
    assert slots.begin_save(32) == 1
    slots.confirm(32)
    assert slots.begin_save(64) == 2
    assert slots.begin_save(96) is None  # rather than 1: the request may have ended before 64
    assert slots.donate(40) == Saved(1, 32)


def test_d4_two_slots_running_ahead_and_one_otherwise() -> None:
    assert (RequestSlots.needed(True), RequestSlots.needed(False)) == (2, 1)
    with pytest.raises(ConfigError, match="expected 2"):
        RequestSlots(0, [1], ahead=True)


# ---- D5


def test_d5_the_newest_confirmed_within_what_is_kept_is_donated() -> None:
    def of(*confirmed: int) -> RequestSlots:
        slots = RequestSlots(0, (1, 2), ahead=True)
        for position in confirmed:
            slots.begin_save(position)
            slots.confirm(position)
        return slots

    assert of(256, 512).donate(600) == Saved(2, 512)
    assert of(256, 512).donate(511) == Saved(1, 256)  # else the previous one
    assert of(256, 512).donate(255) is None  # else none
    slots = of(256)
    slots.begin_save(512)
    assert slots.donate(600) == Saved(1, 256)  # 512 is not confirmed
    assert slots.rest() == Rest(free=(), busy=(0, 2))


def test_d5_donating_in_mid_prefill_needs_a_slot_in_exchange() -> None:
    slots = RequestSlots(0, (1, 2), ahead=True)
    slots.begin_save(1024)
    assert slots.exchange(3) is None  # not confirmed yet
    slots.confirm(1024)
    assert slots.exchange(None) is None
    assert slots.newest == Saved(1, 1024)  # it keeps its own
    assert slots.exchange(3) == Saved(1, 1024)
    assert [slots.begin_save(2048), slots.begin_save(3072)] == [2, 3]


# ---- D9


@pytest.mark.parametrize("drafted", [1, 3, 7])
def test_d9_room_follows_the_running_requests(drafted: int) -> None:
    for running in (1, 8):
        room = Drafts.room(running, drafted)
        assert room == running * (drafted + 1)
        drafts = Drafts(range(room), running=running, drafted=drafted)
        assert np.unique(drafts.writes(range(running))).size == room
        features = Features(
            Grid(16, 64), Saves.END_ONLY, running, 0, drafted=drafted, draft_slots=room - 1
        )
        assert any("draft_slots" in text for text in features.conflicts())


@pytest.mark.parametrize(
    ("parents", "branch"),
    [([-1, 0, 1, 2], [0, 1, 2]), ([-1, 0, 0, 2], [0, 2, 3]), ([-1, 0, 0, 0], [0, 3])],
    ids=["top-k 1", "a tree", "a bush"],
)
def test_d9_what_is_accepted_is_copied_to_the_working_slot(
    parents: list[int], branch: list[int]
) -> None:
    drafts = Drafts(range(10, 18), running=2, drafted=3)
    read, written = drafts.reads([1], parents, [5])[0], drafts.writes([1])[0]
    state = {5: ("before",)}
    for node in range(4):
        state[int(written[node])] = (*state[int(read[node])], str(node))
    for source, destination in drafts.accept([1], [branch[-1]], [5]).tolist():
        state[destination] = state[source]
    assert state[5] == ("before", *map(str, branch))


def test_d9_rejected_tokens_fall_back_to_a_saved_state() -> None:
    slots = RequestSlots(0, (1,), ahead=False)
    slots.begin_save(256)
    slots.confirm(256)
    assert slots.reject(300) == Saved(1, 256)  # copy it to the working slot
    assert slots.reject(255) is None  # computed from tokens that do not count
    assert slots.donate(1000) is None
