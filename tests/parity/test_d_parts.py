"""Row D13: states of named parts with dtypes of their own, sharded and resharded by head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.manager_case import open_cache, tokens  # noqa: E402
from support.refusals import refused  # noqa: E402
from support.state_team import GEOMETRY, PARTS, StateTeam, open_host_states, state  # noqa: E402

from lightcache.errors import ConfigError  # noqa: E402
from lightcache.hybrid import StatePart, gated_delta_parts, state_groups  # noqa: E402
from lightcache.hybrid.checkpoints import Tier  # noqa: E402
from lightcache.hybrid.copiers import Section, state_bytes  # noqa: E402
from lightcache.kernels import PageGeometry  # noqa: E402

SIZES = (2, 4, 1, 2, 8, 4)
"""Tensor-parallel ranks of teams, each of which reads what the one before has written."""


@contextmanager
def shared(name: str) -> Iterator[Any]:
    """Makes teams one behind the other; the caches stay."""
    host, states = open_cache(f"{name}.kv", 64, 4), open_host_states(f"{name}.states")

    @contextmanager
    def team(number: int, ranks: int) -> Iterator[StateTeam]:
        made = StateTeam(f"{name}.{number}", host, states, ranks)
        try:
            yield made
        finally:
            made.close()

    try:
        yield team
    finally:
        for each in (host, states):
            assert each.check().pins == 0
            each.close()


def test_d13_a_state_of_some_ranks_is_read_by_those_of_another_number(segment_name: str) -> None:
    every = tokens(100)
    with shared(segment_name) as team:
        at = 0
        for number, ranks in enumerate(SIZES):
            with team(number, ranks) as made:
                end = at + 12
                match, slot = made.begin("a", every[: end + 1])
                assert match.usable == at
                assert match.tier is (Tier.HOST if at else None)
                if at:
                    assert made.wrong(slot, state(at)) == []
                made.write(slot, state(end))
                assert made.end("a", end) == end
                at = end


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 1), (1, 8), (8, 2)])
def test_d13_each_of_many_reads_its_heads_of_the_same(
    segment_name: str, writers: int, readers: int
) -> None:
    """Slots are others than those that were written, and on the device a copy is a copy of all
    parts."""
    with shared(segment_name) as team:
        with team(0, writers) as made:
            for seed in (1, 2):
                _, slot = made.begin(seed, tokens(13, seed))
                made.write(slot, state(seed))
                assert made.end(seed, 12) == 12
            match, slot = made.begin("again", tokens(13, 1))
            assert match.tier is Tier.DEVICE
            assert made.wrong(slot, state(1)) == []
            made.end("again", 13)
        with team(1, readers) as made:
            for seed in (2, 1):
                match, slot = made.begin(seed, tokens(13, seed))
                assert (match.usable, match.tier) == (12, Tier.HOST)
                assert made.wrong(slot, state(seed)) == []
                assert made.wrong(slot, state(3 - seed)) != []
                made.end(seed, 13)


def test_d13_every_rank_has_one_run_of_the_page() -> None:
    divided, whole = GEOMETRY.groups
    assert [plane.name for plane in divided.planes] == ["recurrent", "conv_q", "conv_k", "conv_v"]
    assert (divided.head_groups, whole.name, whole.replicated) == (4, "state.whole", True)
    assert GEOMETRY.used_bytes == state_bytes(PARTS)
    for ranks in (1, 2, 4, 8):
        for rank in range(ranks):
            share = GEOMETRY.share(rank, ranks)
            assert share.nbytes == state_bytes(PARTS, ranks)
            if ranks <= 4:
                assert len(share.ranges) <= 2  # its own, and what all have


def test_d13_of_a_models_config() -> None:
    """Qwen3-Next: 16 key heads and 32 value heads."""
    layers = [at for at in range(48) if at % 4 < 3]
    config = SimpleNamespace(
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    parts = gated_delta_parts(config)
    (group,) = state_groups(parts, layers, name="delta")
    geometry = PageGeometry([group])
    assert (group.head_groups, group.layers) == (16, tuple(layers))
    assert {plane.name: plane.heads for plane in group.planes} == {
        "recurrent": 32,
        "conv_q": 16,
        "conv_k": 16,
        "conv_v": 32,
    }
    assert geometry.used_bytes == state_bytes(parts)
    for ranks in (1, 2, 4, 8, 16):
        assert all(len(geometry.share(rank, ranks).ranges) == 1 for rank in range(ranks))
        assert geometry.share(0, ranks).nbytes == state_bytes(parts, ranks)
    # More ranks than key heads: neighbours have the same of these.
    assert state_bytes(parts, 32) * 32 > state_bytes(parts)


def test_d13_parts_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="cover the 40 elements"):
        StatePart("conv", (40, 3), 2, sections=(Section("q", 4, 2), Section("v", 8, 3)))
    with pytest.raises(ConfigError, match="of a sharded part"):
        StatePart("conv", (8, 3), 2, sharded=False, sections=(Section("q", 4, 2),))
    refused(ConfigError, "q: heads", StatePart, "conv", (8, 3), 2, sections=(Section("q", 0, 2),))
    with pytest.raises(ConfigError, match="expected 3 layers"):
        state_groups([StatePart("recurrent", (8, 3), 4)], [0, 1, 3])
    refused(ConfigError, "at least one", state_groups, [], [0])
    with pytest.raises(ConfigError, match="8 heads of plane 'recurrent' cannot be divided among 3"):
        state_bytes([StatePart("recurrent", (8, 3), 4)], 3)
