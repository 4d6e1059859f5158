"""Row D11 once more, as test_d_equality.py: drafts that are rejected, bfloat16, and checkpoints
that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hybrid_drafting import Drafting, drafted_wrongly  # noqa: E402
from support.hybrid_engine import FINE, alone, made_engines  # noqa: E402
from support.hybrid_models import FEW_EXPERTS, hybrid  # noqa: E402
from support.hybrid_scores import (  # noqa: E402
    ask,
    divergence,
    ids,
    in_pieces,
    same,
    scores,
)
from support.refusals import refused  # noqa: E402
from support.tiny_models import answer  # noqa: E402

from lightcache.hybrid import Drafts  # noqa: E402

pytestmark = pytest.mark.models

AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["no overlap", "overlap"])


@pytest.fixture(scope="module")
def qwen() -> Any:
    return hybrid(**FEW_EXPERTS)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    yield from alone()


@pytest.fixture
def engines(segment_name: str, qwen: Any) -> Iterator[Any]:
    yield from made_engines(segment_name, qwen)


# ---- D11: speculative decoding

TREES = {"top-k 1": [-1, 0, 1, 2], "top-k 2": [-1, 0, 0, 1, 1, 2], "a bush": [-1, 0, 0, 0]}


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
@pytest.mark.parametrize("wrong", [2, 3, 1000])
def test_d11_speculation_with_rejections(
    engines: Any, qwen: Any, parents: list[int], wrong: int
) -> None:
    """Every `wrong`-th drafted token of the right branch is not what the model says. States of
    accepted tokens are saved where a step crosses a position, and hit."""
    running, drafted = 2, len(parents) - 1
    engine = engines(**FINE, spare=Drafts.room(running, drafted))
    first = ids(37)
    expected = answer(qwen, torch.tensor([first]), steps=32).tokens[0].tolist()
    drafting = Drafting(engine, parents, running)
    request = engine.begin(first, 24)
    rejected = drafting.run(request, expected, wrong)
    assert (rejected > 0) == (wrong < 1000)
    one = drafting.one
    same(engine, one)
    every = one.answer().tokens[0].tolist()
    computed = engine.end(request)
    assert computed == one.at // 16 * 16 >= 48
    assert ask(engine, [*every[: one.at], *ids(5, 1)])[0] == computed


@AHEAD
@pytest.mark.parametrize("accepted", [33, 47, 48])
def test_d11_rejected_tokens_fall_back_to_a_saved_state(
    engines: Any, ahead: bool, accepted: int
) -> None:
    """Without slots for drafts: drafted tokens went into the working slot, over a position that
    was saved. Only so many count; it goes on from a state that was saved before."""
    engine = engines(**FINE, ahead=ahead)
    first = ids(20)
    request = engine.begin(first, 40)
    while engine.running[request].at < 35:
        engine.step()
    one = drafted_wrongly(engine, request, accepted, until=50)
    assert one.at == (48 if accepted == 48 else 32)  # the newest saved state that counts
    while request in engine.running:
        engine.step()
    same(engine, one)
    every = one.answer().tokens[0].tolist()
    assert ask(engine, [*every[:47], *ids(5, 1)])[0] == 16, "of the answer only the last stays"
    assert ask(engine, [*every, *ids(5, 1)])[0] == 48


# ---- D11: bfloat16


@AHEAD
def test_d11_bfloat16_is_as_near_as_computing_in_pieces(engines: Any, ahead: bool) -> None:
    """Prefill hits and decode hits; the noise is that of the same tokens without a cache in passes
    of the same lengths, and in passes that end 27 tokens earlier."""
    model = hybrid(dtype=torch.bfloat16, **FEW_EXPERTS)
    engine = engines(model, **FINE, ahead=ahead)
    found, noise = [], []
    for seed in range(2):
        first = ids(76, seed)
        (one,) = engine.serve([first], 6)
        decoded = one.answer().tokens[0].tolist()
        for tokens, hit, cuts in (
            ([*first, *ids(60, seed + 50)], 64, [64]),
            ([*decoded, *ids(60, seed + 60)], 80, [64, *range(76, 81)]),
        ):
            (one,) = engine.serve([tokens], 1)
            assert one.match.usable == hit
            every = torch.tensor([tokens])
            whole = scores(model, every)[hit:]
            found.append(divergence(torch.cat(one.scores)[: len(whole)], whole))
            for earlier in (0, 27):
                pieces = in_pieces(model, every, [cut - earlier for cut in cuts])
                noise.append(divergence(pieces[hit:], whole) / 2)
    assert max(found) <= 0.003
    assert sum(found) <= 2 * sum(noise) + 1e-6  # what differs by the comparison's own rounding


# ---- D11: the test fails on a wrong checkpoint


WHOLE = ["a chunk short", "a token short", "a token long", "of another prompt", "zero"]
PARTS = ["conv", "recurrent", "one layer"]
WRONG = [*WHOLE, *PARTS]


@pytest.mark.parametrize("kind", [*WRONG, "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_d11_fails_on_a_stale_checkpoint(engines: Any, dtype: Any, kind: str) -> None:
    """By the comparisons above. The state that is found is overwritten in its slot: all of it, or a
    part or a layer with that of another prompt."""
    model = hybrid(dtype=dtype, **FEW_EXPERTS)
    engine = engines(model, spare=1, states=None)
    tokens = ids(80)
    store, spare, table = engine.store, engine.slots.pages, list(range(8))
    (one,) = engine.serve([tokens], 1)
    position = {"a chunk short": 32, "a token short": 63, "a token long": 65}.get(kind, 64)
    store.put(spare, {key: one * 0 for key, one in store.copy_of(spare).items()})
    if kind != "zero":
        source = ids(80, 1) if kind in ("of another prompt", *PARTS) else tokens
        wrong = engines(model)  # computed beside, where nobody's KV is touched
        wrong.store.put(0, store.copy_of(spare))
        wrong.store.run(source[:position], table, 0, 0, 0)
        store.put(spare, wrong.store.copy_of(0))
    state = store.copy_of(spare)
    if kind in PARTS:
        layer = sorted(at for at, _ in state)[1]
        state = {
            key: one
            for key, one in state.items()
            if kind in key or (kind == "one layer" and key[0] == layer)
        }
    with engine.slots.oldest(1) as found:
        store.put(int(found.pages[0]), state)
    (one,) = engine.serve([tokens], 1 if dtype == torch.bfloat16 else 3)
    assert one.match.usable == 64
    if dtype == torch.float32:
        if kind == "right":
            same(engine, one)
        else:
            refused(AssertionError, "", same, engine, one)
        return
    whole = scores(model, torch.tensor([tokens]))[64:]
    assert (divergence(torch.cat(one.scores), whole) > 0.003) == (kind != "right")
