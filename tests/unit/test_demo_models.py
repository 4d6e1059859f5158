"""Models of the demo: made up alike everywhere, or from a directory that is looked at first."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightcache.errors import ConfigError
from lightcache.tools.demo import models
from lightcache.tools.demo.models import SIZES, ModelChoice, ModelFacts, build, preflight

pytestmark = pytest.mark.models

transformers: Any = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
Broken = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModelChoice:
    """A made-up model that takes milliseconds."""
    monkeypatch.setattr(models, "SIZES", {**SIZES, "tiny": TINY})
    return ModelChoice(size="tiny")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of another family than the made-up ones, in two files of weights."""
    folder = tmp_path_factory.mktemp("model")
    form = {name: TINY[name] for name in TINY if name != "head_dim"}
    config = transformers.Qwen2Config(**form, max_position_embeddings=100)
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Broken:
    """A copy of that, with changes to its config.json; None takes an entry away."""

    def copy(**changes: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(saved, folder)
        config = {**json.loads((folder / "config.json").read_text()), **changes}
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        return folder

    return copy


def answer(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens, and how far each leads the second best in log-probability."""
    found, margins, cache = [], [], transformers.DynamicCache()
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(prompt, past_key_values=cache, use_cache=True).logits[0, -1]
            best = logits.float().log_softmax(-1).topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            prompt = best.indices[:1].view(1, 1)
            found.append(int(prompt))
    return found, margins


# ---- made up


def test_facts_need_no_torch(script: Callable[..., Any]) -> None:
    source = (
        "import sys\n"
        "from lightcache.tools.demo.models import ModelChoice, preflight\n"
        "for size, dtype in (('small', 'float32'), ('8b', 'bfloat16')):\n"
        "    facts = preflight(ModelChoice(size=size, dtype=dtype))\n"
        "    print(facts.vocabulary, facts.layers, facts.kv_bytes_per_token)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    assert script(source).stdout == "4096 8 8192\n128256 32 131072\n"


def test_the_small_model_answers_clearly() -> None:
    choice = pickle.loads(pickle.dumps(ModelChoice(seed=3)))
    model = build(choice)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config.vocab_size == preflight(choice).vocabulary == 4096
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 4096, (1, 40), generator=random) for _ in range(3)]
    answers, margins = zip(*(answer(model, prompt, 24) for prompt in prompts), strict=True)
    assert all(len(set(one)) > 12 for one in answers)
    leads = torch.tensor(margins)
    assert (leads > 0.01).float().mean() > 0.9
    assert leads.median() > 0.1
    # the far end of the prompt counts as well
    other = torch.cat([prompts[1][:, :10], prompts[0][:, 10:]], dim=1)
    assert answer(model, other, 24)[0] != answers[0]


def test_a_seed_makes_one_model(tiny: ModelChoice) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build(tiny).state_dict()
    assert torch.equal(torch.rand(3), expected)  # the caller's random state is left alone
    torch.rand(7)
    again, other = (build(ModelChoice(size="tiny", seed=seed)).state_dict() for seed in (0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(tiny: ModelChoice, dtype: str) -> None:
    choice = ModelChoice(size="tiny", dtype=dtype)
    model = build(choice)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert torch.get_default_dtype() == torch.float32
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    assert preflight(choice) == ModelFacts(64, 3, 2, 8, size, 1 << 17)
    assert preflight(choice).kv_bytes_per_token == 2 * 3 * 2 * 8 * size


@pytest.mark.parametrize(("size", "millions"), [("small", 35), ("medium", 101), ("8b", 8030)])
def test_models_are_made_where_they_stay(size: str, millions: int) -> None:
    """On "meta", which has no memory, no byte may be anywhere else."""
    with torch.random.fork_rng(devices=[]):
        model = models._allocated(SIZES[size], torch.device("meta"), "bfloat16")
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    # rotary frequencies in bfloat16 would be wrong by whole turns after some hundred tokens
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert round(sum(one.numel() for one in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": "huge"}, "size: expected one of small, medium, 8b, hybrid, found 'huge'"),
        ({"dtype": "int8"}, "dtype: expected one of float32"),
        ({"seed": -1}, "seed"),
    ],
)
def test_choices_there_are_not(changes: dict[str, Any], said: str) -> None:
    for ask in (preflight, build):
        with pytest.raises(ConfigError, match=said):
            ask(ModelChoice(**changes))


@pytest.mark.parametrize("device", ["quantum", "cpu:x", "cuda:99", "", "meta", None])
def test_devices_there_are_not(tiny: ModelChoice, device: str) -> None:
    with pytest.raises(ConfigError, match="device: expected one that torch can use") as caught:
        build(ModelChoice(size="tiny", device=device))
    assert "\n" not in str(caught.value)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    for ask in (preflight, build):
        with pytest.raises(ConfigError, match=r"torch and transformers.*'lightcache\[demo\]'"):
            ask(ModelChoice())


# ---- from a directory


def test_a_directory(saved: Path) -> None:
    choice = ModelChoice(directory=str(saved))
    assert preflight(choice) == ModelFacts(64, 3, 2, 8, 4, 100)
    model = build(choice)
    assert not model.training
    expected = transformers.Qwen2ForCausalLM.from_pretrained(saved)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    half = build(ModelChoice(directory=str(saved), dtype="bfloat16"))
    assert half.dtype == torch.bfloat16


def test_nothing_is_printed(saved: Path, script: Callable[..., Any]) -> None:
    source = (
        "from lightcache.tools.demo.models import ModelChoice, build\n"
        f"build(ModelChoice(directory={str(saved)!r}))\n"
        "from transformers.utils import logging\n"
        "assert logging.is_progress_bar_enabled()\n"
        "import os\n"
        "assert 'HF_HUB_OFFLINE' not in os.environ\n"
    )
    done = script(source)
    assert (done.stdout, done.stderr) == ("", "")


def refused(directory: Path, said: str, *, by_both: bool = True) -> None:
    choice = ModelChoice(directory=str(directory))
    for ask in (preflight, build) if by_both else (build,):
        with pytest.raises(ConfigError, match=said) as caught:
            ask(choice)
        assert str(directory) in str(caught.value)
        assert "\n" not in str(caught.value)
    if not by_both:
        preflight(choice)


def test_no_such_directory(tmp_path: Path) -> None:
    refused(tmp_path / "none", "expected a directory with a model, found nothing")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "found a file")
    refused(tmp_path, "there is no config.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "no JSON"), ("[]", "expected an object"), ("{}", "model_type None"), ("\0", "no JSON")],
)
def test_a_damaged_configuration(changed: Broken, text: str, said: str) -> None:
    folder = changed()
    (folder / "config.json").write_text(text)
    refused(folder, said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "unheard"}, "does not know the model_type 'unheard'; upgrade"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}},
            "custom code of its own, which is never run here",
        ),
        ({"model_type": []}, r"does not know the model_type \[\]"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "is not a causal language model"),
        ({"model_type": "t5", "architectures": None}, "t5 is not a causal language model"),
        ({"hidden_size": "many"}, "config.json"),
    ],
)
def test_models_that_cannot_be_served(changed: Broken, changes: dict[str, Any], said: str) -> None:
    refused(changed(**changes), said)


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("Mistral", {"sliding_window": 16}, "sliding_attention are not supported yet"),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "sliding_attention are not supported yet",
        ),
        ("Qwen3Next", {}, "linear_attention are not supported yet"),
        ("Bamba", {"attn_layer_indices": [1]}, "(linear_attention|mamba) are not supported yet"),
        ("Mamba", {}, "linear_attention are not supported yet|no attention heads"),
        ("Rwkv", {}, "no attention heads"),
        ("DeepseekV3", {}, "latent attention are not supported yet"),
        ("T5", {}, "t5 is not a causal language model"),
        ("ViT", {}, "vit is not a causal language model"),
    ],
)
def test_families_that_cannot_be_served(
    changed: Broken, family: str, more: dict[str, Any], said: str
) -> None:
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=4, **more)
    folder = changed()
    config.to_json_file(folder / "config.json")
    refused(folder, said)


def test_families_without_a_window_are_served(changed: Broken) -> None:
    folder = changed()
    for family in ("Mistral", "Llama", "Qwen3", "GPT2"):
        more = {"sliding_window": None} if family == "Mistral" else {}
        config = getattr(transformers, f"{family}Config")(num_hidden_layers=4, **more)
        config.to_json_file(folder / "config.json")
        assert preflight(ModelChoice(directory=str(folder))).layers == 4


def test_damaged_weights(changed: Broken) -> None:
    folder = changed()
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    whole = first.read_bytes()
    for damage in (whole[:-1], whole + b"x", whole[:5], b"", b"\xff" * 64, whole[:8] + b"[1]"):
        first.write_bytes(damage)
        refused(folder, "damaged or cut off")
    first.write_bytes(whole)
    second.unlink()
    refused(folder, f"there is no {second.name}")
    for index in (b"{}", b"[", b'{"weight_map": 1}'):
        (folder / "model.safetensors.index.json").write_bytes(index)
        refused(folder, "weight_map|no JSON")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "there is no model.safetensors; weights are read from safetensors only")


def test_weights_of_another_model(changed: Broken) -> None:
    refused(changed(num_hidden_layers=4, layer_types=None), "weights are missing", by_both=False)


def test_a_width_of_another_model(changed: Broken) -> None:
    refused(changed(intermediate_size=64), "weights", by_both=False)


def test_a_cache_unlike_its_configuration(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ModelFacts(64, 3, 4, 8, 4, 100)
    monkeypatch.setattr(models, "_facts", lambda *_: wrong)
    with pytest.raises(ConfigError, match=r"shape \(1, 4, 1, 8\) .* found .*\(1, 2, 1, 8\)"):
        build(ModelChoice(directory=str(saved)))
