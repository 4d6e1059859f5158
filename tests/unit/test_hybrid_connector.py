"""Hybrid models through `prefix` and `prefill`: the same answers as without a cache, and hits as
deep as predicted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hybrid_connecting import (  # noqa: E402
    ask,
    evict_states,
    joined,
    ready_states,
    saved,
    small_cache,
    states_of,
    superseded,
    together,
)
from support.hybrid_models import KINDS, hybrid  # noqa: E402
from support.scripts import with_support  # noqa: E402
from support.tiny_models import answer, assert_same, model, prompt  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from lightcache.connectors import transformers as lct  # noqa: E402
from lightcache.hybrid import Checkpoints  # noqa: E402

pytestmark = pytest.mark.models

# ---- hits of prefills


@pytest.mark.parametrize(("page", "chunk"), [(16, 64), (8, 24), (32, 48), (64, 16), (1, 10)])
def test_hits_are_the_last_of_the_grid(segment_name: str, qwen: Any, page: int, chunk: int) -> None:
    grid = math.lcm(max(page, chunk), page)
    with joined(segment_name, qwen, page=page, chunk=chunk, pages=1024 // page) as connector:
        assert connector.hybrid
        assert connector.hybrid.grid.grid == grid
        for length in (grid - 1, grid, grid + 1, 2 * grid + page + 1):
            ids = prompt(length, seed=length)
            assert ask(connector, qwen, ids)[0] == 0
            last = (length - 2) // grid * grid  # two tokens are left to compute
            assert ask(connector, qwen, ids)[0] == last
            longer = together(ids, prompt(5, seed=1))
            deepest = last if length % grid else length
            assert ask(connector, qwen, longer)[0] == deepest, "at an aligned end"


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(segment_name: str, kind: str) -> None:
    made = hybrid(kind)
    with joined(segment_name, made) as connector:
        ids = prompt(150)
        assert [ask(connector, made, ids)[0] for _ in range(2)] == [0, 128]
        states = connector.pages.states
        assert states is not None
        assert states.continues == (kind != "Jamba")
        assert ready_states(connector) == 1


def test_prefill_in_pieces(connector: lct.Connector, qwen: Any) -> None:
    """Passes of at most some tokens, or those of transformers' own chunked prefill."""
    ids = prompt(150)
    expected, passes = answer(qwen, ids), []
    hook = qwen.model.register_forward_pre_hook(
        lambda _, __, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with connector.prefix(ids) as past:
        connector.prefill(past, at_most=50)
        assert past.held == 128
        connector.prefill(past)
        assert passes == [50, 50, 28], "the second time nothing more is to do"
        hook.remove()
        assert_same(answer(qwen, ids, past), expected)
    assert saved(connector, ids) == [128]
    longer = together(ids, prompt(100, 1))
    with connector.prefix(longer) as past:
        assert_same(answer(qwen, longer, past, prefill_chunk_size=32), answer(qwen, longer))
    assert saved(connector, longer) == [128, 224], "of 224 and 256; 250 are known"


def test_dense_models_have_nothing_to_prefill(segment_name: str) -> None:
    llama = model()
    found = lct.describe(llama)
    assert found.states is None
    size = 32 * found.geometry.page_bytes
    with lct.open_cache(
        llama, name=segment_name, size=size, secret=bytes(16), lifetime="attached"
    ) as cache:
        with lct.Connector(cache, llama) as connector:
            for reused in (0, 64):
                with connector.prefix(prompt(70)) as past:
                    connector.prefill(past)
                    assert past.reused == past.held == reused
                    assert_same(answer(llama, prompt(70), past), answer(llama, prompt(70)))


# ---- branches


@pytest.mark.parametrize(("page", "chunk", "shared"), [(16, 32, 100), (8, 64, 140), (16, 48, 47)])
def test_the_third_down_a_shared_prefix_hits(
    segment_name: str, qwen: Any, page: int, chunk: int, shared: int
) -> None:
    """The first leaves no state where the second leaves its path; the second saves one there."""
    with joined(segment_name, qwen, page=page, chunk=chunk, pages=128) as connector:
        grid = connector.hybrid.grid.grid if connector.hybrid else 0
        common = prompt(shared)
        at = shared // page * page // grid * grid
        hits = []
        for seed in range(1, 6):
            ids = together(common, prompt(61, seed=seed))
            hits.append(ask(connector, qwen, ids)[0])
            here = {at} if at and seed > 1 else set()
            assert saved(connector, ids, page=page) == sorted(here | {(shared + 59) // grid * grid})
        assert hits == [0, 0, at, at, at]


# ---- turns


def test_decode_hits(connector: lct.Connector, qwen: Any) -> None:
    _, first = ask(connector, qwen, prompt(40), steps=80)
    assert saved(connector, first) == [32, 64, 96], "119 computed"
    assert ask(connector, qwen, together(first, prompt(7, 1)))[0] == 96


def test_decode_hits_where_models_read_layers_themselves(
    connector: lct.Connector, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers 5.17, which asks only whether there is a state."""

    def read(past: Any, layer_idx: int, **_: Any) -> Any:
        there = past.has_previous_state(layer_idx)
        return past.layers[layer_idx].conv_states[0] if there else None

    monkeypatch.setattr(DynamicCache, "get_conv_state", read)
    _, first = ask(connector, qwen, prompt(40), steps=80)
    assert saved(connector, first) == [32, 64, 96], "119 computed"


def test_a_decode_hit_at_what_is_kept(connector: lct.Connector, qwen: Any) -> None:
    """A client that stopped early: the newest state is of tokens that are not kept, the one before
    it is."""
    _, first = ask(connector, qwen, prompt(40), steps=80, keep=50)
    assert saved(connector, first) == [32, 64]
    assert ask(connector, qwen, together(first[:, :90], prompt(7, 1)))[0] == 64


def test_a_conversation_in_one_past(connector: lct.Connector, qwen: Any) -> None:
    ids = prompt(50)
    with connector.prefix(ids) as past:
        for turn in range(4):
            connector.prefill(past, ids)
            found = answer(qwen, ids, past, steps=11)
            assert_same(found, answer(qwen, ids, steps=11))
            past.extend(found.tokens[:, ids.shape[1] :])
            ids = together(found.tokens, prompt(20, seed=turn))
    assert saved(connector, ids) == [32, 64, 96, 128]
    assert ask(connector, qwen, ids)[0] == 128


RESUMING = """
import sys
from support.hybrid_connecting import ask
from support.hybrid_models import hybrid
from support.tiny_models import prompt
from lightcache import Cache
from lightcache.connectors import transformers as lct
made = hybrid()
name = sys.argv[1]
with Cache.attach(name, secret=bytes(16)) as cache:
    with lct.Connector(cache, made) as connector:
        print(ask(connector, made, prompt(250))[0])
"""


def test_another_process_resumes(segment_name: str, qwen: Any, script: Callable[..., Any]) -> None:
    with joined(segment_name, qwen) as connector:
        ask(connector, qwen, prompt(150))
        done = script(with_support(RESUMING), segment_name)
        assert done.stdout.splitlines()[-1] == "128"
        assert ask(connector, qwen, prompt(250))[0] == 192, "and leaves its own"


# ---- evictions, on both sides


def test_states_gone_under_keys_and_values(connector: lct.Connector, qwen: Any) -> None:
    short, long = prompt(90), prompt(150)
    ask(connector, qwen, short)
    ask(connector, qwen, long)
    ask(connector, qwen, short)  # 64 is used again: 128 is the next to go
    assert (saved(connector, long), evict_states(connector, 1)) == ([64, 128], 1)
    assert ask(connector, qwen, long)[0] == 64, "computed from the earlier one"
    assert saved(connector, long) == [64, 128], "and saved again"
    assert ask(connector, qwen, long)[0] == 128
    assert evict_states(connector, 8) == 3, "and one of the short prompt's answer, at 96"
    assert [ask(connector, qwen, long)[0] for _ in range(2)] == [0, 128]


def test_keys_and_values_gone_under_states(connector: lct.Connector, qwen: Any) -> None:
    short, long = prompt(90), prompt(150)
    ask(connector, qwen, short)
    ask(connector, qwen, long)
    assert connector.cache.evict(5, group=0) == 5, "of 9 pages the last ones"
    assert ask(connector, qwen, long)[0] == 64
    assert connector.cache.evict(64, group=0) == 9
    assert saved(connector, long) == [64, 128]
    assert ask(connector, qwen, long)[0] == 0, "nothing to use them with"
    assert ask(connector, qwen, long)[0] == 128


def test_a_state_in_use_stays(segment_name: str, qwen: Any) -> None:
    with joined(segment_name, qwen, pages=7, states=1, chunk=32) as connector:
        one = prompt(100)
        assert [ask(connector, qwen, one, steps=1)[0] for _ in range(2)] == [0, 96]
        keys = connector.cache.hash_pages(one[0].tolist())
        parts = states_of(connector).run.keys(keys[5:6])
        with connector.cache.match(parts) as lease:
            assert len(lease.pages) == len(parts)
            ask(connector, qwen, prompt(100, 2), steps=1)
            ask(connector, qwen, prompt(100, 3), steps=1)
            assert saved(connector, prompt(100, 2)) == [], "the older one, which nothing uses"
            assert saved(connector, one) == [96]


def test_a_pool_that_is_too_small(segment_name: str, qwen: Any) -> None:
    """A prompt's own pages may make room for its state: what is found is right, whatever it is."""
    for pages in (1, 5, 9, 12):
        with joined(f"{segment_name}-{pages}", qwen, pages=pages, states=0, chunk=32) as connector:
            for seed in (0, 0, 1, 0, 1):
                ask(connector, qwen, prompt(150, seed))


def test_salts_and_namespaces_keep_apart(segment_name: str, qwen: Any) -> None:
    with small_cache(segment_name, qwen) as cache:
        with lct.Connector(cache, qwen) as connector:
            ways: list[dict[str, Any]] = [
                {},
                {"salt": "a"},
                {"namespace": cache.namespace("v2")},
            ]
            for reused in (0, 64):
                for way in ways:
                    with connector.prefix(prompt(70), **way) as past:
                        assert past.reused == reused
                        connector.prefill(past)
            assert ready_states(connector) == 3


# ---- passes of one token


@pytest.mark.parametrize("kind", ["Qwen3Next", "NemotronH", "Zamba2"])
def test_no_prompt_ends_with_a_pass_of_one_token(segment_name: str, kind: str) -> None:
    """Some models compute it otherwise than within a chunk, so the answer would be another."""
    made = hybrid(kind)
    passes: list[int] = []
    made.register_forward_pre_hook(
        lambda _, args, named: passes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    made.base_model.register_forward_pre_hook(
        lambda _, args, named: passes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    with joined(segment_name, made, states=16) as connector:
        for ids, reused in (
            (prompt(129), 0),
            (prompt(129), 64),
            (prompt(65), 0),
            (prompt(130), 64),
        ):
            passes.clear()
            with connector.prefix(ids) as past:
                connector.prefill(past, at_most=64)
                found = answer(made, ids, past, steps=1)
            assert past.reused == reused
            assert 1 not in passes, passes
            assert_same(found, answer(made, ids, steps=1))
        assert saved(connector, prompt(130)) == [64, 128]


@pytest.mark.parametrize("layers", [["hybrid", "mamba", "mamba"], ["hybrid", "mamba", "hybrid"]])
def test_a_layer_with_both_may_come_first(segment_name: str, layers: list[str]) -> None:
    made = hybrid("Zamba2", num_hidden_layers=3, layers_block_type=layers)
    with joined(segment_name, made) as connector:
        assert [ask(connector, made, prompt(100))[0] for _ in range(2)] == [0, 64]


# ---- figures, and what is said once


def test_figures_by_tier_and_state(connector: lct.Connector, qwen: Any) -> None:
    common, first = prompt(40), prompt(110)
    ask(connector, qwen, first, keep=0)  # the fixture's grid is 32: a state behind 96 tokens
    ask(connector, qwen, first, keep=0)
    ask(connector, qwen, together(first[:, :70], prompt(50, 1)), keep=0)  # 64 without a state
    ask(connector, qwen, common[:, :20], keep=0)  # and 16
    found = connector.stats()
    assert (found.requests, found.prompt_tokens) == (4, 110 + 110 + 120 + 20)
    assert (found.host_hits, found.host_tokens, found.stateless_tokens) == (1, 96, 80)
    assert (found.saved_pages, found.no_room_pages, found.refused) == (6 + 3 + 0, 0, 0)
    assert found.off_grid == 1
    assert found.states is not None
    assert (found.states.requests, found.states.host_hits) == (4, 1)
    assert (found.states.usable_tokens, found.states.unusable_tokens) == (96, 80)


def test_saves_that_cannot_happen_are_said_once(
    segment_name: str, qwen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with joined(segment_name, qwen, page=48, chunk=64) as connector:
        for seed in range(3):
            ask(connector, qwen, prompt(100, seed), steps=2)
        assert connector.stats().off_grid == 3
        assert saved(connector, prompt(100), page=48) == []
    ours = [line for line in caplog.messages if "states are saved at multiples of 192" in line]
    assert ["common multiple of page_tokens=48 and chunk=64" in line for line in ours] == [
        True,
        False,
    ]
    assert "a prompt of 101 tokens saves no state" in ours[1]


def test_a_fork_that_another_process_saved_is_known(segment_name: str, qwen: Any) -> None:
    """The checkpoint of the other way has gone, so only keys and values tell that prompts part."""
    root = prompt(70)
    ways = [together(root, prompt(70, seed)) for seed in (1, 2)]
    with small_cache(segment_name, qwen, states=16, pages=128) as cache:
        how = {"chunk": 16, "every": 1 << 20, "path_limit": 2}
        with lct.Connector(cache, qwen, **how) as first:
            for ids in ways:
                ask(first, qwen, ids, steps=2)
            assert saved(first, ways[1]) == [64, 128]
            keys = cache.hash_pages(ways[1][0].tolist())
            assert states_of(first).drop(keys[7:8])
        with lct.Connector(cache, qwen, **how) as second:  # remembers nothing
            longer = ways[0]
            for seed in range(5, 8):
                longer = together(longer, prompt(40, seed))
                ask(second, qwen, longer, steps=2)
            ordinary = set(saved(second, longer)) - set(superseded(second, longer))
            assert min(ordinary) == 64
            assert len(ordinary) == 2
            assert second.stats().states.bounded > 0


def test_the_bound_has_one_default(segment_name: str, qwen: Any) -> None:
    with small_cache(segment_name, qwen, states=16, pages=128) as cache:
        with lct.Connector(cache, qwen, chunk=16) as connector:
            ids = prompt(40)
            for seed in range(4):
                ids = together(ids, prompt(40, seed))
                ask(connector, qwen, ids, steps=2)
            first = superseded(connector, ids)
            assert first == saved(connector, ids)[: len(first)]
            assert len(saved(connector, ids)) - len(first) == hybrid_defaults()


def hybrid_defaults() -> int:
    most: int = inspect.signature(Checkpoints.__init__).parameters["most"].default
    return most
