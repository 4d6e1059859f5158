"""Only what is true is published: models that cannot share pages are refused, and a pass that
computes something else than the named tokens raises and leaves nothing in the cache."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.connecting import ready, save, small_cache  # noqa: E402
from support.tiny_models import answer, assert_same, model, prompt  # noqa: E402

from lightcache import Cache, ConfigError, LayoutMismatch  # noqa: E402
from lightcache.connectors import transformers as lct  # noqa: E402

pytestmark = pytest.mark.models

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}

# ---- models that cannot share pages


def bert(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    return transformers.BertLMHeadModel(transformers.BertConfig(**SMALL)).to(dtype).eval()


def not_causal() -> Any:
    made = model(num_hidden_layers=3)
    made.config.is_causal = False
    for layer in made.model.layers:
        layer.self_attn.is_causal = False
    return made


def bidirectional() -> Any:
    config = transformers.Gemma3TextConfig(
        **SMALL,
        head_dim=8,
        num_key_value_heads=2,
        layer_types=["full_attention"] * 3,
        use_bidirectional_attention=True,
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(config).eval()


def own_rows() -> Any:
    sizes = {"hidden_size": 32, "dim_head": 8, "dim_ff": 48, "num_attention_heads": 4}
    config = transformers.CpmAntConfig(vocab_size=128, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    return transformers.CpmAntForCausalLM(config).eval()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "BERT": (bert, r"tokens that follow: .*\(is_decoder=False"),
    "BERT in bfloat16": (lambda: bert(torch.bfloat16), r"expected causal attention"),
    "not causal": (not_causal, r"tokens that follow: .*\(is_causal=False"),
    "Gemma": (bidirectional, r"tokens that follow: .*\(use_bidirectional_attention=True"),
    "CPM-Ant": (own_rows, r"one row of keys for each token, found 33 rows for one token"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_whose_pages_cannot_be_shared_are_refused(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(ConfigError, match=message):
        lct.describe(make())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mixtral", "Gemma", "GPTNeoX", "Bloom", "OPT"])
def test_causal_models_are_not(kind: str, dtype: Any) -> None:
    more: dict[str, Any] = {"Mixtral": {"num_local_experts": 4}}.get(kind, {})
    lct.describe(model(kind, dtype=dtype, **more))


def test_a_decoder_of_bert_is_taken() -> None:
    config = transformers.BertConfig(**SMALL, is_decoder=True)
    assert lct.describe(transformers.BertLMHeadModel(config).eval()).geometry.layers == (0, 1, 2)


def test_dropout_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"LlamaAttention is in training mode with attention_drop"
    ):
        lct.describe(model(attention_dropout=0.1).train())
    with pytest.raises(ConfigError, match=r"Dropout is in training mode with p=0\.1.*model\.eval"):
        lct.describe(model("GPTNeoX", hidden_dropout=0.1).train())
    lct.describe(model().train())  # nothing is a matter of chance there


# ---- what a model is given

LONG = prompt(70)


@contextlib.contextmanager
def nothing_published(cache: Cache, *prompts: Any) -> Any:
    """The body raises a ConfigError, and neither prompt nor anything else is stored."""
    before = cache.stats().ready
    yield
    assert cache.stats().ready == before
    for ids in prompts:
        assert ready(cache, ids) == 0


def refused(
    connector: lct.Connector,
    ids: Any,
    act: Callable[[Any], object],
    match: str,
    error: type[Exception] = ConfigError,
) -> None:
    """What is done within `prefix` raises, or leaving it does."""
    with pytest.raises(error, match=match), connector.prefix(ids) as past:
        act(past)


def test_another_prompt_than_the_named_one_is_published_under_no_name(segment_name: str) -> None:
    mine, other = model(), prompt(70, seed=9)
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with nothing_published(cache, LONG, other):
            message = r"was given token \d+ at position \d+, expected"
            refused(connector, LONG, lambda past: answer(mine, other, past), message)
        save(connector, mine, LONG)
        with connector.prefix(LONG) as past:
            assert past.reused == 64
            assert_same(answer(mine, LONG, past), answer(mine, LONG))


def test_another_rest_behind_a_hit_is_seen(segment_name: str) -> None:
    mine = model()
    other = torch.cat([LONG[:, :66], LONG[:, 66:] + 1], dim=1) % 128
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        save(connector, mine, LONG)
        refused(connector, LONG, lambda past: answer(mine, other, past), "at position 66")


def test_a_caught_error_publishes_nothing_either(segment_name: str) -> None:
    mine = model()
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with nothing_published(cache, LONG):
            with connector.prefix(LONG) as past:
                for _ in range(2):  # nor may the cache be used again
                    with pytest.raises(ConfigError):
                        answer(mine, prompt(70, seed=9), past)


def test_names_of_what_was_not_generated_are_refused(segment_name: str) -> None:
    mine, ids = model(), prompt(20)
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with connector.prefix(ids) as past:
            made = answer(mine, ids, past, steps=30).tokens[:, 20:]
            with pytest.raises(ConfigError, match=r"extend: expected the computed tokens"):
                past.extend((made + 1) % 128)
            past.extend(made)
        assert ready(cache, torch.cat([ids, made], dim=1)) == 3


def test_another_model_of_the_same_kind_is_not_taken_for_it(segment_name: str) -> None:
    mine, other = model(), model(seed=1)
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with nothing_published(cache, LONG):
            message = "not computed by the connector's model"
            refused(connector, LONG, lambda past: answer(other, LONG, past), message)


@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize("kind", ["Mpt", "Llama"])
def test_a_whole_input_in_each_step_is_seen(segment_name: str, kind: str, hit: bool) -> None:
    more = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256} if kind == "Mpt" else {}
    mine = model(kind, **more)
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        if hit:
            with connector.prefix(LONG) as past:
                mine(LONG, past_key_values=past, use_cache=True)
        mine.generation_config.use_cache = False
        before = cache.stats().ready
        refused(connector, LONG, lambda past: answer(mine, LONG, past), "use_cache=True")
        assert cache.stats().ready == before == (4 if hit else 0)


MASKS: dict[str, Callable[[], Any]] = {
    "a pad token inside": lambda: torch.ones(1, 70).index_fill_(1, torch.tensor([30]), 0),
    "on the left": lambda: torch.ones(1, 70).index_fill_(1, torch.arange(5), 0),
    "all to all": lambda: torch.ones(1, 1, 70, 70, dtype=torch.bool),
    "of numbers": lambda: torch.zeros(1, 1, 70, 70),
    "too short": lambda: torch.ones(1, 60),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_that_hide_something_are_refused(segment_name: str, kind: str) -> None:
    mine = model()
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with nothing_published(cache, LONG):
            given = {"attention_mask": MASKS[kind]()}
            message = "attention_mask: expected"
            refused(
                connector, LONG, lambda past: mine(LONG, **given, past_key_values=past), message
            )


def test_causal_masks_are_taken(segment_name: str) -> None:
    mine = model()
    causal = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        for mask in (torch.ones(1, 70), causal, torch.where(causal, 0.0, -torch.inf)):
            with connector.prefix(LONG, salt=str(mask.shape) + str(mask.dtype)) as past:
                mine(LONG, attention_mask=mask, past_key_values=past)
            assert past.reused == 0
        assert cache.stats().ready == 12


def test_a_pad_token_that_generate_masks_by_itself_is_seen(segment_name: str) -> None:
    mine = model(pad_token_id=5)
    mine.generation_config.update(pad_token_id=5, max_new_tokens=2)
    ids = LONG.clone()
    ids[0, 30] = 5
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with nothing_published(cache, ids):
            message = r"attention_mask=torch\.ones_like\(input_ids\)"
            refused(connector, ids, lambda past: mine.generate(ids, past_key_values=past), message)
        with connector.prefix(ids) as past:
            answer(mine, ids, past)
        assert ready(cache, ids) == 4


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "embeddings": ({"inputs_embeds": torch.zeros(1, 70, 32), "input_ids": None}, "inputs_embeds"),
    "positions": ({"position_ids": torch.arange(1, 71)[None]}, "position_ids: expected"),
    "kinds of tokens": ({"token_type_ids": torch.ones(1, 70, dtype=torch.long)}, "token_type_ids"),
    "images": ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "given pixel_values"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_no_key_knows_is_refused(segment_name: str, kind: str) -> None:
    more, message = OTHERS[kind]
    mine = model()
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with nothing_published(cache, LONG):
            given = {"input_ids": LONG, **more}
            refused(connector, LONG, lambda past: mine(**given, past_key_values=past), message)


def test_autocast_to_another_dtype_is_refused(segment_name: str) -> None:
    """Keys come out in the dtype of the model, rounded to the other one."""
    mine = model()
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with nothing_published(cache, LONG), torch.autocast("cpu", dtype=torch.bfloat16):
            message = r"under autocast to torch\.bfloat16, expected torch\.float32"
            refused(connector, LONG, lambda past: answer(mine, LONG, past), message)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            save(connector, mine, LONG)
        assert ready(cache, LONG) == 4


def test_arguments_by_position_are_seen(segment_name: str) -> None:
    mine = model()
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        mask = MASKS["on the left"]()
        refused(connector, LONG, lambda past: mine(LONG, mask, None, past), "attention_mask: exp")
        with connector.prefix(LONG) as past:
            mine.model(LONG, torch.ones(1, 70), None, past)  # without a head
        assert ready(cache, LONG) == 4


def test_training_mode_with_dropout_is_seen(segment_name: str) -> None:
    mine = model(attention_dropout=0.5)
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        parts = (mine, mine.model.layers[1])  # that of the layer is seen when it would be saved
        with nothing_published(cache, LONG):
            mine.train()
            refused(connector, LONG, lambda _: None, "training mode")
            for part in parts:
                mine.eval()
                refused(
                    connector,
                    LONG,
                    lambda past, part=part: answer(part.train() and mine, LONG, past),
                    "training mode",
                )
            mine.eval()
        save(connector, mine, LONG)
        assert ready(cache, LONG) == 4


def test_a_pass_that_broke_off_publishes_nothing(segment_name: str) -> None:
    mine = model()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    def interrupted(past: Any) -> None:
        hook = mine.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            answer(mine, LONG, past)
        hook.remove()

    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        with nothing_published(cache, LONG):
            refused(connector, LONG, interrupted, "did not finish")
        with connector.prefix(LONG) as past:
            hook = mine.model.layers[0].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="no memory"):
                answer(mine, LONG, past)
            hook.remove()
            answer(mine, LONG, past)  # nothing had been computed
        assert ready(cache, LONG) == 4


# ---- weights


def in_place(mine: Any) -> None:
    with torch.no_grad():
        mine.model.layers[0].mlp.up_proj.weight[3, 1] += 1.0  # which no sample sees


def past_the_counters(mine: Any) -> None:
    for one in mine.parameters():
        one.data.mul_(1.01)


def replaced(mine: Any) -> None:
    mine.model.norm.weight = torch.nn.Parameter(mine.model.norm.weight.detach().clone())


def by_a_step(mine: Any) -> None:
    mine(LONG, labels=LONG).loss.backward()
    torch.optim.SGD(mine.parameters(), lr=0.1).step()


@pytest.mark.parametrize("change", [in_place, past_the_counters, replaced, by_a_step])
def test_weights_that_change_behind_a_connector_publish_nothing(
    segment_name: str, change: Callable[[Any], None]
) -> None:
    mine, longer = model(), prompt(90)
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        save(connector, mine, LONG)

        def changed(past: Any) -> None:
            answer(mine, longer, past)
            change(mine)

        message = "weights of LlamaForCausalLM changed"
        refused(connector, longer, changed, message, LayoutMismatch)
        with pytest.raises(LayoutMismatch, match=r"namespace=cache\.namespace"):
            with connector.prefix(LONG):
                raise AssertionError("nothing stale is given either")
        assert cache.stats().ready == 4


def test_versions_of_weights_have_namespaces(segment_name: str) -> None:
    mine = model()
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        for step in range(3):
            space = cache.namespace(weights=f"step-{step}")
            for reused in (0, 64):
                with connector.prefix(LONG, namespace=space) as past:
                    assert past.reused == reused
                    assert_same(answer(mine, LONG, past), answer(mine, LONG))
            in_place(mine)
        with pytest.raises(LayoutMismatch, match="as version 'step-1'"):
            with connector.prefix(LONG, namespace=cache.namespace(weights="step-1")):
                pass


def test_weights_that_are_no_numbers_do_not_seem_to_change(segment_name: str) -> None:
    mine = model()
    with torch.no_grad():
        mine.lm_head.weight.fill_(torch.nan)
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        for _ in range(2):
            with connector.prefix(LONG) as past:
                mine(LONG[:, past.reused :], past_key_values=past)
        assert (past.reused, ready(cache, LONG)) == (64, 4)


# ---- hooks


def hooks(mine: Any) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in mine.modules())


def test_a_closed_connector_leaves_no_hook(segment_name: str) -> None:
    mine = model()
    with small_cache(segment_name, mine) as cache:
        connector = lct.Connector(cache, mine)
        assert hooks(mine) > 0
        connector.close()
        assert hooks(mine) == 0
        with lct.prefix(cache, mine, LONG) as past:
            answer(mine, LONG, past)
        assert hooks(mine) == 0


def test_copies_of_the_model_carry_hooks_that_do_nothing(segment_name: str) -> None:
    mine = model()
    with small_cache(segment_name, mine) as cache, lct.Connector(cache, mine) as connector:
        for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
            assert_same(answer(twin, LONG), answer(mine, LONG))
            message = "not computed by the connector's model"
            refused(connector, LONG, lambda past, twin=twin: answer(twin, LONG, past), message)


def test_two_connectors_of_one_model_do_not_disturb_each_other(segment_name: str) -> None:
    mine = model()
    with (
        small_cache(segment_name, mine) as cache,
        lct.Connector(cache, mine) as one,
        lct.Connector(cache, mine) as other,
    ):
        save(one, mine, LONG)
        with other.prefix(LONG) as past:
            assert past.reused == 64
            assert_same(answer(mine, LONG, past), answer(mine, LONG))
