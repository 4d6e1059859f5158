"""Hybrid models: what is refused, and that nothing leaks on the way."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.connecting import SECRET, held  # noqa: E402
from support.hybrid_connecting import (  # noqa: E402
    ask,
    joined,
    saved,
    small_cache,
    together,
)
from support.hybrid_models import hybrid  # noqa: E402
from support.refusals import refused  # noqa: E402
from support.tiny_models import answer, model, prompt  # noqa: E402

from lightcache import Cache, ConfigError, Detached, LayoutMismatch  # noqa: E402
from lightcache.connectors import hybrid as hybrid_file  # noqa: E402
from lightcache.connectors import transformers as lct  # noqa: E402
from lightcache.manager import backend  # noqa: E402

pytestmark = pytest.mark.models

# ---- what is found


def test_what_is_found() -> None:
    pages = lct.describe(hybrid(dtype=torch.bfloat16), page_tokens=8)
    states = pages.states
    assert states is not None
    assert (pages.geometry.layers, states.geometry.layers) == ((3,), (0, 1, 2))
    assert [(part.name, part.shape, part.dtype) for part in states.parts] == [
        ("conv", (1, 64, 4), torch.bfloat16),
        ("recurrent", (1, 4, 8, 8), torch.float32),
    ]
    assert states.geometry.used_bytes == 3 * (64 * 4 * 2 + 4 * 8 * 8 * 4)
    assert states.dtypes == "conv:bfloat16,recurrent:float32"
    assert states.geometry.part_bytes == pages.geometry.page_bytes
    assert (states.run.group, states.run.parts) == (1, states.geometry.parts)
    assert pages.fingerprint.split(" ")[1:] == [
        "bfloat16",
        pages.geometry.fingerprint(),
        states.dtypes,
        states.geometry.fingerprint(),
    ]
    assert pages.options == {
        "model": "qwen3_next",
        "page_bytes": pages.geometry.page_bytes,
        "page_tokens": 8,
        "fingerprint": pages.fingerprint,
        "device": False,
        "kv_groups": ("kv", "states"),
    }


def test_a_model_that_ignores_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with several tokens nor with one: nothing can be resumed."""
    made = hybrid()
    mixer = type(made.model.layers[0].linear_attn)
    forward = mixer.forward

    def forgetful(self: Any, *arguments: Any, cache_params: Any, **more: Any) -> Any:
        cache_params.layers[self.layer_idx].has_previous_state[0] = False
        return forward(self, *arguments, cache_params=cache_params, **more)

    monkeypatch.setattr(mixer, "forward", forgetful)
    refused(ConfigError, "expected a state from which the next token can be", lct.describe, made)


def test_states_of_several_shapes() -> None:
    made = hybrid("FalconH1")
    other = hybrid("FalconH1", mamba_d_state=4)
    made.model.layers[1] = other.model.layers[1]
    refused(ConfigError, "expected states of one shape in every layer", lct.describe, made)


# ---- caches


def test_caches_that_do_not_fit(segment_name: str, qwen: Any) -> None:
    with small_cache(segment_name, qwen) as cache:
        for made, message in (
            (hybrid(seed=1), "configuration or weights"),
            (hybrid(dtype=torch.bfloat16), "dtypes of keys and values"),
            (model(), "kinds of layers"),
        ):
            with pytest.raises(LayoutMismatch, match=f"another model: {message} differ"):
                lct.Connector(cache, made)
        refused(
            ConfigError, "cache: expected a lightcache.Cache, found int", lct.Connector, 7, qwen
        )


def test_pages_that_are_evicted_in_another_order(segment_name: str, qwen: Any) -> None:
    options = lct.describe(qwen).options | {"independent": True}
    with Cache.create(segment_name, pages=2, secret=SECRET, **options) as made:
        refused(ConfigError, "made with independent=False, found", lct.Connector, made, qwen)
        assert held(made) == (0, 0)


def test_settings_out_of_range(segment_name: str, qwen: Any) -> None:
    with small_cache(segment_name, qwen) as cache:
        for message, how in (
            ("path_limit: expected 0 to", {"path_limit": -1}),
            ("grid: model_chunk: expected 1 to", {"chunk": 0}),
            ("states would be saved every", {"chunk": 1048575, "every": 1048573}),
        ):
            with pytest.raises(ConfigError, match=message):
                lct.Connector(cache, qwen, **how)


def test_one_size_is_all_that_is_asked_for(segment_name: str, qwen: Any) -> None:
    with pytest.raises(ConfigError, match="page_bytes follow from the model"):
        lct.open_cache(qwen, name=segment_name, size="1MiB", page_bytes=1)
    with lct.open_cache(
        qwen, name=segment_name, size="1MiB", secret=SECRET, lifetime="attached"
    ) as cache:
        assert (1 << 20) - cache.page_bytes < cache.pages * cache.page_bytes <= 1 << 20
        with lct.Connector(cache, qwen) as connector:
            assert [ask(connector, qwen, prompt(100))[0] for _ in range(2)] == [0, 64]


# ---- use


def test_cropping(connector: lct.Connector, qwen: Any) -> None:
    with connector.prefix(prompt(40)) as past:
        answer(qwen, prompt(40), past, steps=1)
        refused(ConfigError, "cannot be cropped; take a `checkpoint`", past.crop, -1)
        assert past.held == 40, "and nothing was"
        ahead = past.checkpoint()
        past.reset()
        answer(qwen, prompt(50, 1), past, steps=1)
        refused(ConfigError, "of tokens that it still holds, found Checkpoint", past.rewind, ahead)
        with connector.prefix(prompt(40)) as other:
            answer(qwen, prompt(40), other, steps=1)
            with pytest.raises(ConfigError, match="a checkpoint that this cache made"):
                other.rewind(past.checkpoint())


def test_back_to_the_beginning(connector: lct.Connector, qwen: Any) -> None:
    with connector.prefix(prompt(40)) as past:
        begin = past.checkpoint()
        first = answer(qwen, prompt(40), past)
        past.rewind(begin)
        assert past.held == 0
        assert torch.equal(answer(qwen, prompt(40), past).scores, first.scores)
        past.reset()
        assert torch.equal(answer(qwen, prompt(40), past).scores, first.scores)


def test_several_tokens_behind_a_state_that_takes_one(segment_name: str) -> None:
    jamba = hybrid("Jamba")
    with joined(segment_name, jamba, chunk=32) as connector:
        ask(connector, jamba, prompt(50))
        with pytest.raises(ConfigError, match=r"one token at a time .*, found 18: .* call connect"):
            with connector.prefix(prompt(50)) as past:
                answer(jamba, prompt(50), past)


def test_rows(connector: lct.Connector, qwen: Any) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="a batch of one row, found 3"):
            with connector.prefix(prompt(40)) as past:
                answer(qwen, prompt(40), past, num_beams=3)
        with pytest.raises(ConfigError, match="a batch of one row, found 2"):
            with connector.prefix(prompt(40)) as past:
                qwen(prompt(80).reshape(2, 40), past_key_values=past)
        ask(connector, qwen, prompt(40))


def test_keys_and_values_without_their_state(connector: lct.Connector, qwen: Any) -> None:
    ids = prompt(40)
    ask(connector, qwen, ids)
    past = connector.empty()
    keys = connector.cache.hash_pages(ids[0].tolist())
    connector.load(past, connector.cache.match(keys[:2])).wait()
    with pytest.raises(ConfigError, match="expected the state after the 32 tokens"):
        qwen(ids[:, 32:], past_key_values=past)
    with connector.cache.match(keys[:2]) as lease:
        with pytest.raises(ConfigError, match="restore: expected a model of full attention alone"):
            connector.restore(lease)
    assert connector.hybrid
    checkpoints = connector.hybrid.checkpoints
    assert checkpoints
    path = checkpoints.path(keys)
    assert path
    checkpoints.load(past, checkpoints.match(path, 2))
    with torch.no_grad():
        found = qwen(ids[:, 32:], past_key_values=past).logits
        torch.testing.assert_close(found, qwen(ids).logits[:, 32:], atol=1e-4, rtol=0)


def test_prefill_of_something_else(connector: lct.Connector, qwen: Any) -> None:
    ids = prompt(40)
    with connector.prefix(ids) as past:
        answer(qwen, ids, past, steps=1)
        for other in (prompt(60, 1), ids[:, :30]):
            with pytest.raises(ConfigError, match="begins with the 40 tokens held, 40 of them"):
                connector.prefill(past, other)
        with pytest.raises(ConfigError, match="at_most: expected a whole number >= 1, found 0"):
            connector.prefill(past, at_most=0)
    refused(ConfigError, "expected a cache of this connector's `prefix`", connector.prefill, None)
    refused(ConfigError, "found none; begin another `prefix`", connector.prefill, connector.empty())
    for length in (0, 1):
        with connector.prefix(prompt(length)) as past:
            connector.prefill(past)
            assert past.held == 0


def test_an_exception_saves_nothing(connector: lct.Connector, qwen: Any) -> None:
    with contextlib.suppress(KeyError), connector.prefix(prompt(70)) as past:
        connector.prefill(past)
        raise KeyError
    assert saved(connector, prompt(70)) == []
    assert connector.cache.stats().ready == 0


BREAK: dict[str, tuple[Any, str]] = {
    "loading": (backend.EngineBackend, "load"),
    "preparing": (hybrid_file, "prepare"),
    "saving": (backend.EngineBackend, "offload"),
    "looking": (lct.HybridPrefixCache, "look"),
}


@pytest.mark.parametrize("where", BREAK)
def test_an_error_on_the_way_leaks_nothing(
    connector: lct.Connector, qwen: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError(where)

    ids = prompt(70)
    if where in ("loading", "preparing"):
        ask(connector, qwen, ids)
    with monkeypatch.context() as patch:
        patch.setattr(*BREAK[where], broken)
        refused(MemoryError, where, ask, connector, qwen, ids)
    assert held(connector.cache) == (0, 0)
    longer = together(ids, prompt(70, 1))
    before = 64 if where in ("loading", "preparing") else 0
    assert [ask(connector, qwen, longer)[0] for _ in range(2)] == [before, 128]


def test_closed(segment_name: str, qwen: Any) -> None:
    with small_cache(segment_name, qwen) as cache:
        made = lct.Connector(cache, qwen)
        ask(made, qwen, prompt(70))
        made.close()
        made.close()
        refused(Detached, "connector is closed", made.prefill, None)
