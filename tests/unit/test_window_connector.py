"""Models with windows, chunks, shared keys and states alone: the same answers as without a cache,
from what positions need and no more."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.connecting import held  # noqa: E402
from support.hybrid_models import hybrid  # noqa: E402
from support.refusals import refused  # noqa: E402
from support.scripts import with_support  # noqa: E402
from support.tiny_models import assert_same, model, prompt  # noqa: E402
from support.window_models import (  # noqa: E402
    KINDS,
    STATES_ALONE,
    answered,
    opened,
    request,
    windowed,
)

from lightcache import Cache, ConfigError, LayoutMismatch, Router, RouterPolicy  # noqa: E402
from lightcache.connectors import transformers as lct  # noqa: E402
from lightcache.connectors.cache_layers import WindowTail  # noqa: E402
from lightcache.kernels import Rule  # noqa: E402
from lightcache.prompt import Prompt  # noqa: E402

pytestmark = pytest.mark.models


@pytest.fixture
def caches(segment_name: str) -> Iterator[Callable[..., Cache]]:
    """Makes caches for models, in which nothing is held in the end."""
    made: list[Cache] = []

    def make(of: Any, **sizes: Any) -> Cache:
        made.append(opened(f"{segment_name}-{len(made)}", of, **sizes))
        return made[-1]

    yield make
    gc.collect()
    for cache in made:
        assert held(cache) == (0, 0)
        cache.close()


def windows_of(connector: lct.Connector) -> Any:
    """Where the pages of its only windows lie."""
    (windows,) = [
        index
        for rule, index in connector.pages.indexes(connector.cache).items()
        if rule not in (Rule.prefix(), Rule.point())
    ]
    return windows


def together(*parts: Any) -> Any:
    return torch.cat(parts, dim=1)


def ask(connector: lct.Connector, of: Any, ids: Any, *, steps: int = 4) -> tuple[int, Any]:
    """A request, seen to be answered as without a cache: tokens reused, prompt and answer."""
    reused, found = request(connector, of, ids, steps=steps)
    assert_same(found, answered(of, ids, steps=steps))
    return reused, found.tokens


# ---- a router beside it


@pytest.mark.parametrize("kind", ["Llama4", "Gemma2", "Mistral", "Mamba", "Qwen3Next"])
def test_a_router_counts_what_is_restored(caches: Callable[..., Cache], kind: str) -> None:
    made = hybrid(kind) if kind == "Qwen3Next" else windowed(kind)
    every = caches(made, page=4)
    host = lct.describe(made, page_tokens=4).indexes(every)
    policy = RouterPolicy(host_weight=0.0)
    first, counts = prompt(70), []
    turns = [first, together(first[:, :40], prompt(20, seed=1)), together(first, prompt(9, seed=2))]
    with (
        lct.Connector(every, made, chunk=4) as connector,
        Router(host, {"one": None}, policy=policy, spec=every.key_spec()) as router,
    ):
        for ids in [*turns, *turns, *turns]:
            if len(counts) > 5:
                every.evict(1, group=len(counts) % len(host))
            choice = router.route(Prompt(ids[0].tolist()), {"one": 0})
            counts.append(ids.shape[1] - choice.costs["one"])
            assert counts[-1] == ask(connector, made, ids)[0]
    assert len({*counts}) > 2


# ---- two processes

SIDE = """
import json, sys, torch
from support.window_models import opened, request, windowed
from lightcache.connectors import transformers as lct
name = sys.argv[1]
for line in sys.stdin:
    kind, window, page, rows = json.loads(line)
    made = windowed(kind, window=window)
    with opened(name, made, page=page) as caches:
        with lct.Connector(caches, made, chunk=page) as connector:
            print("ready", flush=True)
            for line in sys.stdin:
                ids = json.loads(line)
                if not ids:
                    break
                reused, found = request(connector, made, torch.tensor([ids]))
                print(json.dumps([reused, found.tokens[0].tolist(), found.scores.tolist()]))
                sys.stdout.flush()
    print("closed", flush=True)
"""


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Another process that answers prompts."""
    path = tmp_path_factory.mktemp("side") / "side.py"
    path.write_text(with_support(SIDE))
    with subprocess.Popen(
        [sys.executable, str(path), f"windows-{path.parent.name}-{id(path)}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()
        assert process.wait(60) == 0


def told(side: subprocess.Popen[str], what: Any) -> str:
    """Send a line, and return the answer."""
    assert side.stdin
    assert side.stdout
    side.stdin.write(json.dumps(what) + "\n")
    side.stdin.flush()
    return side.stdout.readline().strip()


def tree(count: int, seed: int) -> Iterator[Any]:
    """Prompts: new ones, the same again, turns with their answers, and branches; send the answer
    of each."""
    chance, known = random.Random(seed), [prompt(30)]
    for number in range(count):
        before = chance.choice(known)
        length = before.shape[1]
        cut = chance.choice([length, length, chance.randrange(1, length), 0])
        ids = together(before[:, :cut], prompt(chance.randrange(1, 24), seed=1000 + number))
        ids = chance.choice([before, ids, ids])
        known.append((yield ids))


@pytest.mark.parametrize("window", [9, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_in_turn(side: subprocess.Popen[str], kind: str, window: int) -> None:
    if kind in STATES_ALONE and window != 9:
        pytest.skip("it has no window")
    made, page, name = windowed(kind, window=window), 4, side.args[2]  # type: ignore[index]
    assert told(side, [kind, window, page, 34]) == "ready"
    rows, hits = tree(34, seed=window), 0
    with opened(name, made, page=page) as caches:
        with lct.Connector(caches, made, chunk=page) as connector:
            ids = next(rows)
            for number in range(34):
                expected = answered(made, ids)
                if number % 2:
                    reused, found = request(connector, made, ids)
                    tokens, scores = found.tokens, found.scores
                else:
                    reused, tokens, scores = json.loads(told(side, ids[0].tolist()))
                assert torch.equal(torch.as_tensor(tokens).reshape(1, -1), expected.tokens)
                torch.testing.assert_close(
                    torch.as_tensor(scores), expected.scores, atol=1e-4, rtol=0
                )
                hits += reused > 0
                if number < 33:
                    ids = rows.send(expected.tokens)
    assert told(side, []) == "closed"
    assert hits >= 8


# ---- what is written, and what is found


def stored(index: Any, connector: lct.Connector, ids: Any) -> list[int]:
    """Numbers of the pages of a prompt that an index has."""
    keys = connector.cache.hash_pages(ids[0].tolist())
    return [at for at in range(len(keys)) if index.last_ready(keys[at : at + 1])]


def test_only_windows_of_positions_are_written(caches: Any) -> None:
    made = windowed(window=9)  # 8 tokens before its own: two or three pages
    cache = caches(made)
    with lct.Connector(cache, made) as connector:
        window = windows_of(connector)
        ids = prompt(48)
        ask(connector, made, ids, steps=1)
        # 44, which leaves tokens to compute, and 48, from which longer prompts continue.
        assert stored(window, connector, ids) == [9, 10, 11]
        assert stored(cache.index, connector, ids) == list(range(12))
        assert connector.stats().saved_pages == 15
        # The stored pages go to 28 without a window there, so the second saves one for the third.
        branches = [together(ids[:, :30], prompt(13, seed)) for seed in (1, 2, 3)]
        assert [ask(connector, made, each)[0] for each in branches] == [0, 28, 28]
        assert stored(window, connector, ids) == [5, 6, 9, 10, 11]
        _, tokens = ask(connector, made, ids, steps=20)
        assert stored(window, connector, tokens) == [5, 6, 9, 10, 11, 14, 15], "68 are held"
        longer = together(tokens, prompt(3, 4))
        assert ask(connector, made, longer)[0] == 64


def test_windows_while_decoding(caches: Any) -> None:
    """At multiples of `every`, for an answer of which fewer tokens are named than were computed."""
    made = windowed(window=9)
    with lct.Connector(caches(made), made, every=16) as connector:
        window = windows_of(connector)
        ids = prompt(10)
        with connector.prefix(ids) as past:
            tokens = answered(made, ids, past, steps=80).tokens
            past.extend(tokens[:, 10:75])
        # 80 and 64 were copied; the last page that is named ends at 72: too little of it is held.
        assert stored(window, connector, tokens) == [0, 1, 14, 15]
        assert ask(connector, made, together(tokens[:, :75], prompt(5, 1)))[0] == 64


@pytest.mark.parametrize(("kind", "window"), [("Gemma2", 3), ("Gemma2", 40), ("Llama4", 8)])
@pytest.mark.parametrize("page", [4, 16])
def test_any_length(caches: Any, kind: str, window: int, page: int) -> None:
    """Windows shorter than a page, of several pages, and longer than the prompt."""
    made = windowed(kind, window=window)
    with lct.Connector(caches(made, page=page), made) as connector:
        for length in (1, page, page + 1, window - 1, window, window + 1, 3 * page, 61):
            ids = prompt(length, seed=length)
            hits = [ask(connector, made, each)[0] for each in (ids, ids, together(ids, ids))]
            last = (length - 1) // page * page
            assert hits[:2] == [0, last]
            assert hits[2] >= last


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2"])
def test_a_page_evicted_from_the_middle(caches: Any, kind: str) -> None:
    """The position that needs it is refused; what is left is found, and everything is right."""
    made = windowed(kind, window=20)
    with lct.Connector(caches(made), made) as connector:
        window = windows_of(connector)
        ids = prompt(41)
        ask(connector, made, ids[:, :21], steps=1)
        ask(connector, made, ids, steps=1)
        keys = connector.cache.hash_pages(ids[0].tolist())
        assert window.drop(keys[7:8])
        # Its window is pages 5 to 9, that of 20 is pages 0 to 4; together they serve 28 as well.
        assert ask(connector, made, ids)[0] == 28
        assert ask(connector, made, ids)[0] == 40, "and is written again"


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "Llama4"])
@pytest.mark.parametrize("wrong", ["shifted", "stale"])
def test_wrong_windows_would_be_noticed(caches: Any, kind: str, wrong: str) -> None:
    """Keys of the tokens beside the right ones, or of the window's first token."""
    made = windowed(kind, window=12)
    rows_of = WindowTail.rows_of

    def shifted(tail: WindowTail, position: int) -> Any:
        rows = rows_of(tail, position)
        return rows and (rows[0].roll(1, dims=2), rows[1])

    def stale(tail: WindowTail, position: int) -> Any:
        rows = rows_of(tail, position)
        return rows and tuple(one[:, :, :1].repeat(1, 1, one.shape[2], 1) for one in rows)

    with lct.Connector(caches(made), made) as connector:
        ids = prompt(47)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WindowTail, "rows_of", shifted if wrong == "shifted" else stale)
            request(connector, made, ids, steps=1)
        with pytest.raises(AssertionError):
            ask(connector, made, ids)


def test_shared_keys_are_stored_once() -> None:
    """Layers that read other layers' keys have no page of their own; shapes share a page."""
    pages = lct.describe(windowed("Gemma4"), page_tokens=4)
    assert [(of.name, of.geometry.layers) for of in pages.attention] == [
        ("kv", (1,)),
        ("window9", (0,)),
    ]
    assert [of.geometry.groups[0].planes[0].row_bytes for of in pages.attention] == [64, 32]


def test_layers_of_several_shapes(caches: Any) -> None:
    made = model()
    attention = made.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(32, 8, bias=False)
    attention.v_proj = torch.nn.Linear(32, 8, bias=False)
    attention.num_key_value_groups = 4
    groups = lct.describe(made).geometry.groups
    assert [(group.name, group.layers) for group in groups] == [("kv", (0,)), ("kv2", (1,))]
    with lct.Connector(caches(made), made) as connector:
        assert [ask(connector, made, prompt(30))[0] for _ in range(2)] == [0, 28]


def test_a_conversation_in_one_past(caches: Any) -> None:
    made = windowed(window=9)
    with lct.Connector(caches(made), made) as connector:
        ids = prompt(30)
        with connector.prefix(ids) as past:
            for turn in range(3):
                connector.prefill(past, ids)
                found = answered(made, ids, past)
                assert_same(found, answered(made, ids))
                past.extend(found.tokens[:, ids.shape[1] :])
                ids = together(found.tokens, prompt(11, seed=turn))
        assert ask(connector, made, ids)[0] == 60, "63 are held"


# ---- going back


def test_cropping_within_what_is_kept(caches: Any) -> None:
    made = windowed(window=9)
    with lct.Connector(caches(made), made) as connector:
        ids = prompt(40)
        with connector.prefix(ids) as past:
            with torch.no_grad():
                made(ids, past_key_values=past)
                past.crop(-5)
                other = prompt(7, 1)
                found = made(other, past_key_values=past).logits
                whole = made(together(ids[:, :35], other)).logits
            torch.testing.assert_close(found, whole[:, 35:], atol=1e-4, rtol=0)
            with pytest.raises(ConfigError, match="crop: expected tokens whose windows are held"):
                past.crop(-30)
            assert past.held == 42


def test_rewinding_as_far_as_a_checkpoint(caches: Any) -> None:
    made = windowed(window=9)
    with lct.Connector(caches(made), made) as connector:
        ids = prompt(60)
        with connector.prefix(ids) as past:
            with torch.no_grad():
                made(ids[:, :20], past_key_values=past)
                before = past.checkpoint()
                made(ids[:, 20:], past_key_values=past)
                past.rewind(before)
                found = made(ids[:, 20:], past_key_values=past).logits
                whole = made(ids).logits[:, 20:]
            torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)
        assert ask(connector, made, ids)[0] == 56


def test_speculative_decoding(caches: Any) -> None:
    made, draft = windowed(window=9), windowed(window=9, seed=1)
    with lct.Connector(caches(made), made) as connector:
        ids = prompt(40)
        with connector.prefix(ids) as past:  # transformers feeds a prefix that is held once more
            found = made.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=past,
                assistant_model=draft,
                max_new_tokens=24,
                do_sample=False,
            )
            past.extend(found[:, 40:])
        assert torch.equal(found, answered(made, ids, steps=24).tokens)
        assert ask(connector, made, found)[0] == 60


# ---- states alone


@pytest.mark.parametrize("kind", STATES_ALONE)
def test_states_alone(caches: Any, kind: str) -> None:
    made = windowed(kind)
    cache = caches(made)
    assert cache.index.independent
    with lct.Connector(cache, made, chunk=16) as connector:
        ids = prompt(40)
        _, tokens = ask(connector, made, ids)
        assert ask(connector, made, ids)[0] == 32
        assert ask(connector, made, together(tokens, prompt(9, 1)))[0] == 32
        stats = connector.stats()
        assert stats.states is not None
        assert (stats.host_hits, stats.states.host_hits, stats.states.offloads) == (2, 2, 2)


def test_the_whole_prompt_after_its_state(caches: Any) -> None:
    """`generate` would feed it once more, silently: also if every token is the same."""
    made = windowed("Mamba")
    with lct.Connector(caches(made), made, chunk=4) as connector:
        for ids, message in (
            (prompt(40), "tokens held once more.*past.rest"),
            (torch.full((1, 40), 7), "tokens held once more"),
        ):
            ask(connector, made, ids)
            with connector.prefix(ids) as past:
                assert past.reused == 36
                with pytest.raises(ConfigError, match=message):
                    made.generate(ids, cache_params=past, max_new_tokens=2)
            with connector.prefix(ids) as past:
                with pytest.raises(ConfigError, match=r"given token .* give `generate` past.rest"):
                    made.generate(ids[:, :3] + 1, cache_params=past, max_new_tokens=2)
        assert connector.stats().refused == 4


# ---- caches


def test_caches_that_do_not_fit(caches: Any, segment_name: str) -> None:
    made, other = windowed(window=9), windowed(window=12)
    for given, message in (
        (caches(other), "another model: .* differ"),
        (caches(model()), "another model: kinds of layers differ"),
    ):
        refused(LayoutMismatch, message, lct.Connector, given, made)
    options = lct.describe(made, page_tokens=4).options
    assert options["kv_groups"] == ("kv", "window9")
    with lct.open_cache(
        made, name=f"{segment_name}-3", pages=4, minimums={"window9": 1}, lifetime="attached"
    ) as least:
        assert [group.minimum_pages for group in least.index.groups()] == [0, 1]
    how = {"pages": 4, "secret": bytes(16), **options}
    with Cache.create(segment_name, independent=True, **how) as wrong:
        refused(ConfigError, "made with independent=False, found", lct.Connector, wrong, made)
    mistral = windowed("Mistral")
    how |= lct.describe(mistral, page_tokens=4).options | {"independent": False}
    with Cache.create(f"{segment_name}-2", **how) as wrong:
        refused(ConfigError, "made with independent=True, found", lct.Connector, wrong, mistral)


def test_calls_for_full_attention_alone(caches: Any) -> None:
    made, mistral = windowed(), windowed("Mistral")
    with lct.Connector(caches(made), made) as connector:
        ask(connector, made, prompt(20))
        with connector.cache.match(connector.cache.hash_pages(prompt(20)[0].tolist())) as lease:
            refused(ConfigError, "restore: expected a model of full", connector.restore, lease)
    with lct.Connector(caches(mistral), mistral) as connector:
        ask(connector, mistral, prompt(20))
        with connector.cache.match(connector.cache.hash_pages(prompt(20)[0].tolist())) as lease:
            past = connector.empty()
            refused(ConfigError, "a model with layers of full", connector.load, past, lease)


def test_a_cleared_namespace_has_nothing_of_any_layer(caches: Any) -> None:
    made = windowed()
    cache = caches(made)
    with lct.Connector(cache, made) as connector:
        ids = prompt(30)
        ask(connector, made, ids)
        cache.clear()
        assert cache.stats().ready == 0
        assert [ask(connector, made, ids)[0] for _ in range(2)] == [0, 28]


def test_no_room_for_windows_is_said(
    caches: Any, segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = windowed(window=40)
    pages = lct.describe(made, page_tokens=4)
    with Cache.create(segment_name, pages=18, secret=bytes(16), **pages.options) as few:
        with lct.Connector(few, made) as connector, connector.prefix(prompt(60)) as past:
            kept = connector.cache.hash_pages(prompt(60)[0].tolist())
            answered(made, prompt(60), past)
            with few.reserve(kept[:12]) as held_:
                held_.publish()
                few.index.protect(kept[:12])
        assert connector.stats().no_room_pages > 0
    assert "no room for" in caplog.text


# ---- refusals


def test_states_outside_of_the_cache() -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        lru_width=32,
    )
    made = transformers.RecurrentGemmaForCausalLM(config).eval()
    refused(ConfigError, "keeps its states elsewhere .RecurrentGemma", lct.describe, made)
