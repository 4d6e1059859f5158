"""Hybrid models: how near answers are to those without a cache, and that the tests would notice a
wrong state."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hybrid_connecting import ask, joined, saved, together  # noqa: E402
from support.hybrid_models import hybrid  # noqa: E402
from support.hybrid_scores import divergence, in_pieces, scores  # noqa: E402
from support.tiny_models import answer, prompt  # noqa: E402

from lightcache.connectors import transformers as lct  # noqa: E402

pytestmark = pytest.mark.models

LENGTH, SAVED = 200, 128


# ---- bfloat16


@pytest.mark.parametrize("kind", ["Qwen3Next", "FalconH1", "NemotronH"])
def test_bfloat16_is_as_near_as_computing_in_pieces(segment_name: str, kind: str) -> None:
    made = hybrid(kind, dtype=torch.bfloat16)
    with joined(segment_name, made) as connector:
        for seed in range(3):
            ids = prompt(LENGTH, seed)
            with connector.prefix(ids[:, :150]) as past:
                connector.prefill(past)
            whole = scores(made, ids)[SAVED:]
            noise = divergence(in_pieces(made, ids, [SAVED])[SAVED:], whole)
            with connector.prefix(ids) as past:
                assert past.reused == SAVED
                found = divergence(scores(made, ids, past), whole)
            assert found <= 0.003
            assert found <= 2 * noise + 1e-7


# ---- speculation


def speculated(model: Any, past: Any, ids: Any, *, steps: int, wrong: int) -> tuple[Any, int]:
    """Greedy, from drafts of four tokens of which every `wrong`-th is not what the model says.

    Returns prompt and answer, and the tokens that were rejected.
    """
    expected = answer(model, ids, steps=steps + 8).tokens
    found, rejected, drafted = ids, 0, 0
    while found.shape[1] < ids.shape[1] + steps:
        begin = found.shape[1]
        draft = expected[:, begin : begin + 4].clone()
        for place in range(draft.shape[1]):
            drafted += 1
            if drafted % wrong == 0:
                draft[0, place] = (draft[0, place] + 1) % 128
        before = past.checkpoint()
        said = scores(model, together(found, draft), past)[-5:].argmax(-1)
        agreed = int((said[:4] == draft[0]).long().cumprod(0).sum())
        if agreed < 4:
            rejected += 4 - agreed
            past.rewind(before)
            scores(model, together(found, draft[:, :agreed]), past)
        found = together(found, draft[:, :agreed], said[agreed].reshape(1, 1))
    return found, rejected


@pytest.mark.parametrize("wrong", [2, 3, 7, 1000])
def test_rejected_tokens_leave_no_trace(connector: lct.Connector, qwen: Any, wrong: int) -> None:
    ids = prompt(40)
    with connector.prefix(ids) as past:
        connector.prefill(past)
        found, rejected = speculated(qwen, past, ids, steps=80, wrong=wrong)
        assert (rejected > 0) == (wrong < 1000)
        past.extend(found[:, ids.shape[1] :])
    assert torch.equal(found, answer(qwen, ids, steps=found.shape[1] - 40).tokens)
    there = saved(connector, found)
    assert there[0] == 32
    # What is saved of the answer lies where a pass happened to end; all of it is right.
    longer = together(found, prompt(9, 1))
    assert ask(connector, qwen, longer)[0] == there[-1]


def test_rejected_tokens_that_are_held_in_the_end(connector: lct.Connector, qwen: Any) -> None:
    """An engine that stops there need not go back: the state knows tokens that nobody names."""
    ids, draft = prompt(40), prompt(24, 1)
    with connector.prefix(ids) as past:
        connector.prefill(past)
        scores(qwen, together(ids, draft), past)
        past.extend(draft[:, :20])
    assert past.held == 64
    assert saved(connector, together(ids, draft)) == [32], "and none at 64"
    assert ask(connector, qwen, together(ids, draft[:, :20], prompt(30, 2)))[0] == 32


def test_a_state_of_rejected_tokens_is_not_saved(connector: lct.Connector, qwen: Any) -> None:
    """Exactly at a position where one would be: 64 tokens, half of them rejected."""
    ids, draft, other = prompt(40), prompt(24, 1), prompt(30, 2)
    with connector.prefix(ids) as past:
        connector.prefill(past)
        scores(qwen, ids, past)
        before = past.checkpoint()
        scores(qwen, together(ids, draft), past)
        past.extend(draft)
        past.look()
        assert [one.tokens for one in past.taken] == [32, 64]
        past.rewind(before)
        assert [one.tokens for one in past.taken] == [32]
        assert past.tokens.tolist() == ids[0].tolist()
        taken = together(ids, other)
        scores(qwen, taken[:, :64], past)
        scores(qwen, taken, past)
        past.extend(other)
    assert saved(connector, taken) == [32, 64]
    assert ask(connector, qwen, together(taken, prompt(3)))[0] == 64
