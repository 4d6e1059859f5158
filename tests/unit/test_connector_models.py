"""Which models a cache is for: what `describe` finds, refuses and keeps apart."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.connecting import SECRET, save, small_cache  # noqa: E402
from support.refusals import refused  # noqa: E402
from support.scripts import with_support  # noqa: E402
from support.tiny_models import model, prompt  # noqa: E402

from lightcache import Cache, ConfigError, LayoutMismatch, cache_name  # noqa: E402
from lightcache.connectors import model_pages  # noqa: E402
from lightcache.connectors import transformers as lct  # noqa: E402

pytestmark = pytest.mark.models


def test_what_is_found() -> None:
    pages = lct.describe(model(head_dim=16, dtype=torch.bfloat16), page_tokens=8)
    geometry = pages.geometry
    group = geometry.group("kv")
    assert [(plane.name, plane.heads, plane.row_bytes) for plane in group.planes] == [
        ("k", 2, 32),
        ("v", 2, 32),
    ]
    assert geometry.layers == (0, 1)
    assert geometry.used_bytes == 2 * 2 * 8 * 2 * 32
    assert (pages.attention[0].dtype, pages.device) == (torch.bfloat16, "cpu")
    assert pages.fingerprint.split(" ")[1:] == ["bfloat16", geometry.fingerprint()]
    assert pages.options == {
        "model": "llama",
        "page_bytes": geometry.page_bytes,
        "page_tokens": 8,
        "fingerprint": pages.fingerprint,
        "device": False,
    }
    assert on_a_gpu(pages).options["device"] is True


def on_a_gpu(pages: lct.ModelPages) -> lct.ModelPages:
    first = dataclasses.replace(pages.attention[0], device="cuda:0")
    return dataclasses.replace(pages, attention=(first,))


# ---- fingerprints


def test_equal_models_have_equal_fingerprints(tmp_path: Path) -> None:
    first = model()
    first.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    names = {lct.describe(one).fingerprint for one in (first, model(), loaded)}
    assert len(names) == 1
    loaded.config.use_cache = False
    loaded.config.pad_token_id = 3
    assert lct.describe(loaded).fingerprint in names


def test_without_a_name_each_model_has_a_cache(segment_name: str) -> None:
    how = {"pages": 8, "secret": SECRET, "lifetime": "attached"}
    made, same, other = model(), model(), model(dtype=torch.bfloat16)
    for each, folder in ((made, "/a"), (same, "org"), (other, "/a")):
        each.config._name_or_path = f"{folder}/{segment_name}"
    with lct.open_cache(made, **how) as cache, lct.open_cache(same, **how) as shared:
        with lct.open_cache(other, **how) as apart:
            assert cache.name == shared.name == cache_name(segment_name, cache.fingerprint)
            assert apart.name == cache_name(segment_name, apart.fingerprint)
            assert apart.name != cache.name


@pytest.mark.parametrize(
    ("loaded", "called"),
    [
        ("meta-llama/Llama-3-8B", "Llama-3-8B"),
        ("/hub/models--meta-llama--Llama-3-8B/snapshots/0e9e39f", "Llama-3-8B"),
        ("./models/llama@2/", "llama"),
        ("", "llama"),
        ("/models/@2", "llama"),
    ],
)
def test_what_a_model_is_called(loaded: str, called: str) -> None:
    made = model()
    made.config._name_or_path = loaded
    assert lct.describe(made).options["model"] == called
    assert lct.describe(made, name="meta/x@0e9e39f").options["model"] == "meta/x@0e9e39f"


def changed(name: str) -> Any:
    made = model()
    with torch.no_grad():
        made.get_parameter(name).add_(1e-3)
    return made


DIFFERENT: dict[str, Callable[[], Any]] = {
    "weights": lambda: model(seed=1),
    "one tensor": lambda: changed("model.layers.1.self_attn.v_proj.weight"),
    "a norm": lambda: changed("model.norm.weight"),
    "dtype": lambda: model(dtype=torch.bfloat16),
    "another of as many bytes": lambda: model(dtype=torch.float16),
    "positions": lambda: model(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "layers": lambda: model(num_hidden_layers=3),
    "architecture": lambda: model("Qwen2"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_models_do_not(segment_name: str, kind: str) -> None:
    other = DIFFERENT[kind]()
    mine = model(dtype=torch.bfloat16) if kind == "another of as many bytes" else model()
    assert lct.describe(mine).fingerprint != lct.describe(other).fingerprint
    with small_cache(segment_name, mine) as cache:
        with pytest.raises(LayoutMismatch, match=r"is of another model: .* differ\. It is for"):
            lct.Connector(cache, other)
        refused(
            LayoutMismatch, "", lct.open_cache, other, name=segment_name, pages=32, secret=SECRET
        )


def test_a_mismatch_names_what_differs(segment_name: str) -> None:
    with small_cache(segment_name, model()) as cache:
        with pytest.raises(LayoutMismatch, match="another model: configuration or weights differ"):
            lct.Connector(cache, model(seed=1))
        with pytest.raises(LayoutMismatch, match="another model: dtypes of keys and values differ"):
            lct.Connector(cache, model(dtype=torch.bfloat16))


PRINTED = """
from support.tiny_models import model
from lightcache.connectors import transformers as lct
print(lct.describe(model()).fingerprint)
"""


def test_other_processes_find_the_same(script: Callable[..., Any]) -> None:
    assert script(with_support(PRINTED)).stdout.strip() == lct.describe(model()).fingerprint


def test_a_name_stands_for_the_weights(segment_name: str) -> None:
    pages = lct.describe(model(), name="org/llama@1")
    assert pages.fingerprint.startswith("name:org/llama@1 float32 ")
    with Cache.create(segment_name, pages=8, secret=SECRET, **pages.options) as cache:
        mine = model()
        with lct.Connector(cache, mine) as connector:
            save(connector, mine, prompt(20))
        with lct.Connector(cache, model(seed=1)) as connector:
            with connector.prefix(prompt(20)) as past:
                assert past.reused == 16, "the name is believed"
        refused(LayoutMismatch, "dtypes", lct.Connector, cache, model(dtype=torch.float16))


@pytest.mark.parametrize("name", ["", "two words", "line\n", 7, "x" * 201])
def test_bad_names(name: Any) -> None:
    refused(ConfigError, "name: expected 1 to 200 characters", lct.describe, model(), name=name)


def test_weights_of_any_dtype_and_order() -> None:
    made = model()
    made.register_buffer("eighth", torch.randn(70).to(torch.float8_e4m3fn))
    made.register_buffer("turned", torch.randn(9, 70).t())
    made.register_buffer("none", torch.zeros(0))
    made.register_buffer("scalar", torch.tensor(True))
    names = [lct.describe(made).fingerprint]
    made.turned[69, 8] += 1
    names.append(lct.describe(made).fingerprint)
    made.scalar.logical_not_()
    names.append(lct.describe(made).fingerprint)
    assert len(set(names)) == 3


def test_describing_leaves_the_model_alone() -> None:
    made = model().train()
    before = torch.get_rng_state()
    state = {name: one.clone() for name, one in made.state_dict().items()}
    lct.describe(made)
    assert made.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(state[name], one) for name, one in made.state_dict().items())
    assert all(one.grad is None for one in made.parameters())


def test_a_compiled_model_is_not_compiled_for_it() -> None:
    made = model()
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    made.forward = torch.compile(made.forward, backend=backend)
    assert lct.describe(made).fingerprint == lct.describe(model()).fingerprint
    assert not calls


# ---- refusals


def on_meta() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(model().config)


def spread() -> Any:
    made = model()
    made.model.layers[1].to("meta")
    return made


def without_cache() -> Any:
    made = model()
    forward = made.model.forward
    made.model.forward = lambda *a, **k: forward(*a, **{**k, "past_key_values": None})
    return made


def with_its_own_cache() -> Any:
    def forward(*_: Any, past_key_values: Any, **__: Any) -> None:
        past_key_values.ssm_states[0].zero_()

    made = model()
    made.forward = forward
    return made


def several_dtypes() -> Any:
    made = model()
    layer = made.model.layers[1].double()
    layer.register_forward_pre_hook(lambda _, given: (given[0].double(), *given[1:]))
    layer.register_forward_hook(lambda _, __, found: found.float())
    return made


def of_more_layers() -> Any:
    """A decoder whose cache transformers makes with the layers of its encoder."""
    sizes = {"d_model": 16, "decoder_ffn_dim": 16, "decoder_attention_heads": 2, "vocab_size": 128}
    config = transformers.BartConfig(encoder_layers=1, decoder_layers=2, **sizes)
    return transformers.BartForCausalLM(config).eval()


def tensor_parallel() -> Any:
    made = model()
    made._tp_size = 2
    return made


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: 7, "expected a model of transformers, found int"),
    "another library's": (lambda: torch.nn.Linear(2, 2), "found Linear"),
    "something like a model": (
        lambda: SimpleNamespace(config=model().config),
        "found SimpleNamespace",
    ),
    "encoder and decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, vocab_size=128)
        ),
        "expected only a decoder, found T5ForConditionalGeneration",
    ),
    "not loaded": (on_meta, r"on the CPU or on one CUDA device, found \['meta'\]"),
    "on two devices": (spread, r"found \['cpu', 'meta'\]; load it without device_map"),
    "uses no cache": (without_cache, "cached no keys and values"),
    "a cache of its own": (
        with_its_own_cache,
        "LlamaForCausalLM cannot compute a token with a Dyn",
    ),
    "a cache of fewer layers": (
        of_more_layers,
        "BartForCausalLM cannot compute a token with a Dyn",
    ),
    "several dtypes": (several_dtypes, "expected keys and values of one dtype and as many heads"),
    "rotation that depends on the length": (
        lambda: model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "positions of type 'dynamic', which change with the length",
    ),
    "two rotations": (
        lambda: model(
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 512,
            }
        ),
        "positions of type 'longrope'",
    ),
    "tensor parallel": (tensor_parallel, "found a rank of 2 of tensor parallelism"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(make: Callable[[], Any], message: str, segment_name: str) -> None:
    made = make()
    refused(ConfigError, message, lct.describe, made)
    refused(
        ConfigError, message, lct.open_cache, made, name=segment_name, size="1MiB", secret=SECRET
    )


def test_weights_that_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def opaque(*_: Any) -> bytes:
        raise NotImplementedError("packed")

    monkeypatch.setattr(model_pages, "_sampled", opaque)
    refused(ConfigError, r"cannot be read \(packed\); give describe", lct.describe, model())
    assert lct.describe(model(), name="x").fingerprint.startswith("name:x ")


@pytest.mark.parametrize("page_tokens", [0, -1, 1.5, "16"])
def test_bad_page_tokens(page_tokens: Any, segment_name: str) -> None:
    with pytest.raises(ConfigError, match="page_tokens: expected a whole number >= 1"):
        lct.open_cache(
            model(), name=segment_name, page_tokens=page_tokens, size="1MiB", secret=SECRET
        )


def test_options_that_follow_from_the_model(segment_name: str) -> None:
    with pytest.raises(ConfigError, match="device, page_bytes follow from the model"):
        lct.open_cache(model(), name=segment_name, size="1MiB", page_bytes=4096, device=True)
    refused(ConfigError, "capacity once", lct.open_cache, model(), name=segment_name, secret=SECRET)


def test_caches_that_are_none_of_ours(segment_name: str) -> None:
    refused(ConfigError, "expected a lightcache.Cache, found dict", lct.Connector, {}, model())
    pages = lct.describe(model())
    like = {"pages": 2, "secret": SECRET, "page_bytes": pages.geometry.page_bytes}
    with Cache.create(segment_name, fingerprint="mine", **like) as cache:
        refused(ConfigError, "page_tokens", lct.Connector, cache, model())
    with Cache.create(segment_name, fingerprint="mine", page_tokens=16, **like) as cache:
        with pytest.raises(
            LayoutMismatch, match=r"fingerprints differ\. It is for 'mine', expected"
        ):
            lct.Connector(cache, model())
    options = {**pages.options, "page_bytes": 8 * pages.geometry.page_bytes}
    with Cache.create(segment_name, pages=2, secret=SECRET, **options) as cache:
        refused(LayoutMismatch, "sizes of pages differ", lct.Connector, cache, model())


def test_a_device_must_be_said(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    pages = on_a_gpu(lct.describe(made))
    with small_cache(segment_name, made) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(lct, "describe_for", lambda *_: pages)
            with pytest.raises(ConfigError, match="opened with device=True for a model on a GPU"):
                lct.Connector(cache, made)


MISSING = """
import sys
sys.modules[{module!r}] = None
try:
    import lightcache.connectors.transformers
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("module", ["torch", "transformers", "transformers.cache_utils"])
def test_without_the_library(script: Callable[..., Any], module: str) -> None:
    found = script(MISSING.format(module=module)).stdout.strip()
    assert found.startswith("lightcache.connectors.transformers needs torch and transformers 5.0")
    assert found.endswith("pip install 'lightcache[transformers]'")
    assert sys.version_info >= (3, 10)
