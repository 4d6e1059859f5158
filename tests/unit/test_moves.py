"""Moves, flattened: against a plain loop over tokens, and every way in which they can be wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.refusals import refused

from lightcache import ConfigError
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.moves import Batch, Move, check_sides, check_slots, flatten, token_limit
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlane, DevicePlanes

TOKENS = 16
PAGES = 40


def geometry(unit_tokens: int = 1) -> PageGeometry:
    return PageGeometry(
        [KVGroup.opaque("o", layers=2, row_bytes=8, page_tokens=TOKENS, unit_tokens=unit_tokens)]
    )


GEOMETRY = geometry()
MEMORY = HostPages(np.zeros((PAGES, GEOMETRY.page_bytes), np.uint8))
Row = tuple[int, int, int]


def rows(batch: Batch, unit_tokens: int = 1) -> list[Row]:
    found = batch.rows(unit_tokens)
    return list(zip(found.page.tolist(), found.unit.tolist(), found.slot.tolist(), strict=True))


def oracle(moves: list[Move], unit_tokens: int = 1) -> list[Row]:
    """What moves where, one token after the other."""
    found = []
    for move in moves:
        for number, slot in enumerate(move.slots):
            page, token = divmod(move.first + number, TOKENS)
            left_out = move.skip is not None and move.skip[page]
            if slot >= 0 and not left_out and token % unit_tokens == 0:
                found.append(
                    (int(move.pages[page]), token // unit_tokens, int(slot) // unit_tokens)
                )
    return found


def any_move(rng: random.Random, unit: int = 1) -> Move:
    pages = rng.sample(range(PAGES), rng.randrange(5))
    room = len(pages) * TOKENS
    first = rng.randrange(0, room + 1, unit)
    count = rng.randrange(room - first + 1)
    units = [rng.choice([-1, rng.randrange(500)]) for _ in range(-(-count // unit))]
    slots = [at * unit + t if at >= 0 else -1 for at in units for t in range(unit)][:count]
    skip = np.array([rng.random() < 0.3 for _ in pages], np.bool_) if rng.random() < 0.5 else None
    kind = rng.choice([np.int32, np.int64])
    strided = np.repeat(np.array(slots, kind), 2)[::2] if rng.random() < 0.5 else slots
    return Move(rng.choice([pages, np.array(pages, np.int32)]), strided, first, skip)


@pytest.mark.parametrize("unit", [1, 4, 16])
@pytest.mark.parametrize("seed", range(40))
def test_against_a_loop_over_tokens(seed: int, unit: int) -> None:
    rng = random.Random(seed)
    moves = [any_move(rng, unit) for _ in range(rng.randrange(6))]
    batch = flatten(moves, geometry(unit), MEMORY)
    assert rows(batch, unit) == oracle(moves, unit)
    assert len(batch.counts) == len(moves)
    assert sum(batch.counts) == len(batch.pages)
    assert batch.slots.flags.c_contiguous
    assert batch.slots.dtype in (np.int32, np.int64)
    for page, start, first, end in zip(
        batch.pages, batch.start, batch.first, batch.end, strict=True
    ):
        assert 0 <= first < end <= TOKENS
        assert 0 <= page < PAGES
        assert 0 <= start + first < start + end <= len(batch.slots)


def test_one_page_goes_the_short_way_to_the_same() -> None:
    for first in (0, 3, 15):
        for count in range(TOKENS - first + 1):
            move = Move([7], np.arange(count) + 100, first)
            batch = flatten(move, GEOMETRY, MEMORY)
            beside = flatten([move, Move([], [])], GEOMETRY, MEMORY)
            assert rows(batch) == rows(beside) == oracle([move])
            for name in ("pages", "start", "first", "end"):
                one, other = getattr(batch, name), getattr(beside, name)
                assert one.dtype == other.dtype
                assert one.tolist() == other.tolist()
            assert batch.tokens == count


def test_a_skipped_page_need_not_exist() -> None:
    move = Move([3, -1, 99], np.arange(48), skip=np.array([False, True, True]))
    assert flatten(move, GEOMETRY, MEMORY).pages.tolist() == [[3]]


def test_what_is_left_out_may_have_any_slot() -> None:
    slots = np.arange(32)
    slots[:16] = 1 << 40
    check_slots(flatten(Move([0, 1], slots, skip=np.array([True, False])), GEOMETRY, MEMORY), 32)
    with pytest.raises(ConfigError, match="expected 0 to 31"):
        check_slots(flatten(Move([0, 1], slots), GEOMETRY, MEMORY), 32)


class OnDevice:
    """As torch answers for a tensor that is not in host memory."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


@pytest.mark.parametrize(
    ("move", "why"),
    [
        (Move([0], [0.5]), "slots: expected whole numbers"),
        (Move([0], np.zeros(2, np.float32)), "slots: expected whole numbers"),
        (Move([0], np.zeros(2, np.bool_)), "slots: expected whole numbers"),
        (Move([0], np.zeros(2, np.uint32)), "slots: expected int32 or int64"),
        (Move([0], np.zeros(2, np.int16)), "slots: expected int32 or int64"),
        (Move([0], np.zeros((1, 2), np.int64)), "one dimension"),
        (Move([0], OnDevice()), "cpu()"),  # type: ignore[arg-type]
        (Move(OnDevice(), [0]), "pages: expected whole numbers in host memory"),  # type: ignore[arg-type]
        (Move([0], None), "slots"),  # type: ignore[arg-type]
        (Move([0], [1 << 70]), "slots"),
        (Move([0], ["a"]), "slots"),  # type: ignore[list-item]
        (Move(0, [0]), "pages"),  # type: ignore[arg-type]
        (Move([0.0], [0]), "pages"),  # type: ignore[list-item]
        (Move([PAGES], [0]), "another cache"),
        (Move([-1], [0]), "another cache"),
        (Move([0, PAGES], np.arange(32)), "another cache"),
        (Move(np.array([1 << 63], np.uint64), [0]), "another cache"),
        (Move([0], np.arange(17)), "name every page"),
        (Move([0], np.arange(16), 1), "name every page"),
        (Move([], [0]), "name every page"),
        (Move([0], [0], -1), "first"),
        (Move([0], [0], 1.0), "first"),  # type: ignore[arg-type]
        (Move([0], [0], skip=np.zeros(2, np.bool_)), "skip"),
        (Move([0], [0], skip=np.zeros(1, np.int8)), "skip"),  # type: ignore[arg-type]
        (Move([0], [0], skip=[False]), "skip"),  # type: ignore[arg-type]
        (17, "expected a Move"),
    ],
)
def test_wrong_moves(move: Any, why: str) -> None:
    for moves in ([move], [Move([1], [1]), move]):
        with pytest.raises(ConfigError, match=why.replace("(", r"\(").replace(")", r"\)")):
            flatten(moves, GEOMETRY, MEMORY)


def test_units_of_several_tokens_begin_together() -> None:
    blocks = geometry(4)
    with pytest.raises(ConfigError, match="inside of a unit of 4"):
        flatten(Move([0], np.arange(4), 2), blocks, MEMORY)
    refused(ConfigError, "no multiple of 4", flatten, Move([0], np.arange(4) + 2), blocks, MEMORY)
    # A last unit that is not full moves whole; the slots of its other tokens say nothing.
    assert rows(flatten(Move([5], [8, 9, 10, 11, 4]), blocks, MEMORY), 4) == [(5, 0, 2), (5, 1, 1)]


def test_limits_of_planes() -> None:
    planes = {
        ("o", 0, "opaque"): DevicePlane(64, 8, slots=10),
        ("o", 1, "opaque"): DevicePlane(64, 8, slots=7),
    }
    for unit, limit in ((1, 7), (4, 28)):
        share = geometry(unit).share()
        assert token_limit(geometry(unit), DevicePlanes(planes), share) == limit
    assert token_limit(GEOMETRY, DevicePlanes({}), GEOMETRY.share(layers=[])) > 1 << 60
    with pytest.raises(ConfigError, match="layer 1"):
        token_limit(
            GEOMETRY, DevicePlanes({("o", 0, "opaque"): planes["o", 0, "opaque"]}), GEOMETRY.share()
        )


def test_sides_of_other_formats() -> None:
    check_sides(GEOMETRY, MEMORY, GEOMETRY.share())
    check_sides(GEOMETRY, MEMORY, geometry().share())
    with pytest.raises(ConfigError, match="share: expected one of"):
        check_sides(GEOMETRY, MEMORY, geometry(4).share())
    with pytest.raises(ConfigError, match="page_bytes=geometry"):
        check_sides(GEOMETRY, HostPages(np.zeros((2, 16), np.uint8)), GEOMETRY.share())
