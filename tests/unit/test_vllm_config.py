"""`lightcache vllm-config`: the line, the page of a model, and what speaks against it."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from lightcache import Cache, cache_name
from lightcache.connectors.vllm import Options
from lightcache.shm import Segment, memory
from lightcache.shm.memory import FreeMemory

Run = Callable[..., Result]
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


LATENT = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "available", lambda: FreeMemory(9 << 30, "free in /dev/shm"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Makes the folder of a model."""

    def made(**config: Any) -> Path:
        folder = tmp_path / "a model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return made


def test_with_a_service_the_second_command_is_said(run: Run, model: Callable[..., Path]) -> None:
    """Standard output stays the one line, for `$(...)`."""
    folder = model(**LLAMA)
    options = ("vllm-config", folder, "--size", "4GiB")
    result = run(*options, "--storage", "service:")
    command = "lightcache storage 'a model' --url 'disk:/mnt/nvme/cache?capacity=1TiB'"
    assert f"and, once an engine has made the cache: {command}\n" in result.stderr
    assert result.stdout.count("\n") == 1
    assert json.loads(run(*options, "--storage", "service:", "--json").stdout)["storage_line"] == (
        command
    )
    assert "lightcache storage" not in run(*options).stderr
    assert json.loads(run(*options, "--json").stdout)["storage_line"] is None


def test_the_line_is_what_vllm_reads(run: Run, model: Callable[..., Path]) -> None:
    folder = model(**LLAMA)
    storage = f"disk:{folder}?capacity=1GiB"
    options = ("--size", "4GiB", "--storage", storage, "--numa", "interleave")
    result = run("vllm-config", folder, *options)
    words = shlex.split(result.stdout)
    assert words[:4] == ["vllm", "serve", str(folder), "--kv-transfer-config"]
    value = json.loads(words[4])
    assert value["kv_connector_module_path"] == "lightcache.connectors.vllm"
    found = Options.of(value["kv_connector_extra_config"])
    assert (found.size, found.storage, found.numa) == ("4GiB", (storage,), "interleave")


@pytest.mark.parametrize(
    ("config", "options", "tokens", "size"),
    [
        (LLAMA, (), 16, 2 << 20),
        (LLAMA, ("--kv-cache-dtype", "fp8"), 16, 1 << 20),
        (LLAMA, ("--block-size", 64), 64, 8 << 20),
        (LLAMA, ("--blocks-per-page", 4), 64, 8 << 20),
        ({**LLAMA, "num_key_value_heads": 1}, (), 64, 1 << 20),
        ({**LLAMA, "head_dim": 256, "dtype": "float32"}, (), 16, 4 << 20),
        ({"text_config": LLAMA, "vision_config": {"num_hidden_layers": 9}}, (), 16, 2 << 20),
        (LATENT, (), 32, 32 * 32 * 576 * 2),
        ({**LATENT, "num_hidden_layers": 61}, (), 16, 275 * 4096),
        ({**LLAMA, "num_key_value_heads": None, "multi_query": True}, (), 64, 1 << 20),
        ({**LLAMA, "num_key_value_heads": None, "num_kv_heads": 4}, (), 16, 1 << 20),
        ({**LLAMA, "head_dim": 128, "v_head_dim": 64}, (), 16, 3 << 19),
        ({**LLAMA, "num_kv_shared_layers": 16}, (), 16, 1 << 20),
        ({**LLAMA, "per_layer_config": {"0": {"head_dim": 256}}}, (), 16, 33 << 16),
    ],
    ids=[
        *("bf16", "fp8", "blocks of 64", "4 blocks", "one head", "float32", "of parts", "latents"),
        *("filled up", "falcon", "other words", "other values", "shared", "two shapes"),
    ],
)
def test_the_page_of_a_model(
    run: Run,
    model: Callable[..., Path],
    config: dict[str, Any],
    options: tuple[Any, ...],
    tokens: int,
    size: int,
) -> None:
    found = json.loads(run("vllm-config", model(**config), *options, "--json").stdout)
    assert (found["page"]["tokens"], found["page"]["bytes"]) == (tokens, size)
    assert found["page"]["pages"] == (8 << 30) // size


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"is_encoder_decoder": True}, "not with a connector"),
        ({"layer_types": ["full_attention", "odd_attention"]}, "not served yet: odd_attention"),
    ],
)
def test_models_that_are_not_served(
    run: Run, model: Callable[..., Path], config: dict[str, Any], says: str
) -> None:
    result = run("vllm-config", model(**LLAMA, **config), "--size", "1GiB", status=1)
    assert "does not work" in result.stderr
    assert says in result.stderr
    assert result.stdout.startswith("vllm serve ")


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["linear_attention", "full_attention"]},
        {"text_config": {**LLAMA, "layer_types": ["conv", "full_attention"]}},
        {"layers_block_type": ["attention", "mamba"]},
        {"state_size": 128},
    ],
    ids=["qwen3-next", "lfm2", "zamba2", "mamba"],
)
def test_models_with_states_need_prefix_caching(
    run: Run, model: Callable[..., Path], config: dict[str, Any]
) -> None:
    result = json.loads(
        run("vllm-config", model(**{**LLAMA, **config}), "--size", "1GiB", "--json").stdout
    )
    assert result["line"].endswith(" --enable-prefix-caching")
    assert result["page"] is None
    assert result["problems"] == []
    assert "--mamba-cache-mode, align" in result["notes"][0]
    assert "a state lies in one" in result["notes"][1]
    plain = run("vllm-config", model(**LLAMA), "--size", "1GiB")
    assert "--enable-prefix-caching" not in plain.stdout + plain.stderr


def test_a_path_is_a_models_folder_or_its_config(
    run: Run, model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model(**LLAMA)
    given, itself = (
        run("vllm-config", path, "--size", "1GiB").stdout
        for path in (folder / "config.json", folder)
    )
    assert given == itself
    for path in (tmp_path / "absent", "./absent", tmp_path / "absent" / "config.json"):
        found = run("vllm-config", path, status=2)
        assert f"{path}: expected a model's folder or its config.json, found" in found.stderr
        assert found.stdout == ""


GEMMA = {  # 10 layers with full attention, 52 with windows: 6 groups of 8 or 9
    **LLAMA,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
GEMMA_PAGE = (16, 10 * 16 * 256 * 2 * 16, 7)
GPT_OSS = {
    **LLAMA,
    "num_hidden_layers": 24,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
LLAMA_4 = {
    **LLAMA,
    "num_hidden_layers": 48,
    "attention_chunk_size": 8192,
    "layer_types": [*["chunked_attention"] * 3, "full_attention"] * 12,
}
OLD_LLAMA_4 = {**LLAMA_4, "layer_types": None, "model_type": "llama4_text"}


@pytest.mark.parametrize(
    ("config", "tokens", "size", "groups"),
    [
        (GEMMA, *GEMMA_PAGE),
        (GPT_OSS, 64, 12 * 8 * 128 * 2 * 64, 2),
        (LLAMA_4, 32, 12 * 8 * 256 * 2 * 32, 4),
        ({**GEMMA, "sliding_window_pattern": None, "model_type": "gemma3_text"}, *GEMMA_PAGE),
        ({**LLAMA, "sliding_window": 4096, "model_type": "gemma2"}, 16, 1 << 20, 2),
        ({**OLD_LLAMA_4, "no_rope_layers": []}, 32, 12 * 8 * 256 * 2 * 32, 4),
        ({**OLD_LLAMA_4, "no_rope_layers": [1, 1, 1, 0] * 12}, 32, 12 * 8 * 256 * 2 * 32, 4),
        ({**LLAMA, "sliding_window": 32, "num_key_value_heads": 1}, 32, 1 << 19, 1),
    ],
    ids=[
        *("gemma 3", "gpt-oss", "llama 4", "gemma 3, no pattern", "gemma 2", "llama 4, no types"),
        *("llama 4, ropes", "windows alone, shorter than a page of 1 MiB"),
    ],
)
def test_the_page_of_a_model_with_windows(
    run: Run,
    model: Callable[..., Path],
    config: dict[str, Any],
    tokens: int,
    size: int,
    groups: int,
) -> None:
    result = run("vllm-config", model(**config), "--json")
    page = json.loads(result.stdout)["page"]
    assert (page["tokens"], page["bytes"], page["groups"]) == (tokens, size, groups)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model_type": "gemma4_text"}, "all tokens: 16 heads of 512"),
        ({"per_layer_config": {"5": {"num_key_value_heads": 4}}}, "all tokens: 4 heads of 128"),
        ({"kv_lora_rank": 512, "index_topk": 2048}, "an indexer"),
        ({"num_key_value_heads": [1, 2]}, "usual words"),
    ],
    ids=["gemma 4", "by layer", "indexer", "a list"],
)
def test_pages_that_vllm_decides(
    run: Run, model: Callable[..., Path], more: dict[str, Any], says: str
) -> None:
    found = json.loads(
        run("vllm-config", model(**{**GEMMA, **more}), "--size", "1GiB", "--json").stdout
    )
    assert found["page"] is None
    assert found["problems"] == []
    assert says in found["notes"][0]


@pytest.mark.parametrize(
    "more",
    [
        {"num_hidden_layers": -2},
        {"num_hidden_layers": 10**12},
        {"num_attention_heads": 0},
        {"hidden_size": "x"},
        {"hidden_size": 1},
        {"head_dim": True},
        {"layer_types": 5},
        {"layer_types": [["full_attention"]], "sliding_window": -1},
        {"kv_lora_rank": [512]},
        {"num_kv_shared_layers": 32},
        {"per_layer_config": {"0": 5}},
        {"per_layer_config": {"0": {"hidden_size": -4096}}},
    ],
    ids=str,
)
def test_numbers_and_lists_that_are_none(
    run: Run, model: Callable[..., Path], more: dict[str, Any], tmp_path: Path
) -> None:
    folder = model(**{**LLAMA, **more})
    found = json.loads(run("vllm-config", folder, "--size", "1GiB", "--json").stdout)
    assert found["page"] is None
    assert "usual words" in found["notes"][0]
    given = ("create", "--model", folder, "--size", "1MiB")
    assert "usual words" in run(*given, status=2).stderr
    (tmp_path / "t").write_text('{"hash_ids": [1]}\n')
    assert "usual words" in run("replay", tmp_path / "t", "--model", folder, status=2).stderr


def test_a_window_that_is_switched_off(run: Run, model: Callable[..., Path]) -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False}
    run("vllm-config", model(**LLAMA, **off), "--size", "1GiB")


def test_what_does_not_fit(run: Run, model: Callable[..., Path]) -> None:
    result = run("vllm-config", model(**LLAMA), "--size", "64GiB", status=1)
    assert "found 9.0 GiB free in /dev/shm; set size to 8294MiB" in result.stderr
    assert "--shm-size" in result.stderr
    assert "at least a page" in run(
        "vllm-config", model(**LLAMA), "--size", "1MiB", status=1
    ).stderr  # fmt: skip
    result = run("vllm-config", model(**LLAMA), "--pool-path", "/no/such/folder", status=1)
    assert "the folder /no/such/folder is not there" in result.stderr


def test_a_disk_without_room(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 30))

    def said(url: str, status: int = 0) -> list[str]:
        options = ("--size", "1GiB", "--storage", "memory:", "--storage", url)
        problems: list[str] = json.loads(
            run("vllm-config", "org/name", *options, "--json", status=status).stdout
        )["problems"]
        return problems

    absent = tmp_path / "mount" / "cache"
    (found,) = said(f"disk:{absent}?capacity=1TiB", 1)
    assert f"{absent} is to have 1.0 TiB, found 3.0 GiB free" in found
    assert f"not there yet: the file system is that of {tmp_path}" in found
    (found,) = said(f"disk:{tmp_path}?capacity=1TiB", 1)
    assert "not there yet" not in found
    assert "capacity= is needed" in said(f"disk:{absent}", 1)[0]
    assert said(f"disk:{absent}?capacity=2GiB") == []
    (absent / "lightcache-0123").mkdir(parents=True)  # it has its files, and its capacity
    assert said(f"disk:{absent}?capacity=1TiB") == said(f"disk:{absent}") == []


def test_a_cache_that_is_there_needs_no_room(
    run: Run, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = cache_name(segment_name, "of another layout")
    monkeypatch.setattr(memory, "available", lambda: FreeMemory(1 << 20, "left"))
    assert run("vllm-config", segment_name, "--size", "1GiB", status=1)
    how = {"pages": 4, "page_bytes": 4096, "fingerprint": "f", "grow": False, "eviction": "lru"}
    with Cache.create(name, **how):
        run("vllm-config", segment_name, "--size", "1GiB")
    assert not Segment.unlink(name)


def test_what_vllm_refuses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--use-replayssm" in run("vllm-config", "org/name", "--size", "1GiB").stderr
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    refused = run("vllm-config", "org/name", "--size", "1GiB", status=1)
    assert "does not work: vLLM refuses PYTORCH_CUDA_ALLOC_CONF" in refused.stderr


def test_a_name_on_the_hub(run: Run, tmp_path: Path) -> None:
    """Nothing is fetched; of one in the hub's cache the configuration is read."""
    unknown = json.loads(run("vllm-config", "org/name", "--size", "1GiB", "--json").stdout)
    assert unknown["page"] is None
    assert "org/name is not on this machine" in unknown["notes"][0]
    folder = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    known = json.loads(run("vllm-config", "org/name", "--size", "1GiB", "--json").stdout)
    assert known["page"]["pages"] == 512


def test_bad_input(run: Run, tmp_path: Path, model: Callable[..., Path]) -> None:
    assert "no config.json" in run("vllm-config", tmp_path, status=2).stderr
    folder = model(**LLAMA)
    assert "size" in run("vllm-config", folder, "--size", "many", status=2).stderr
    assert "nosuch" in run("vllm-config", folder, "--storage", "nosuch:x", status=2).stderr
    (folder / "config.json").write_text("[]")
    assert "expected the configuration" in run("vllm-config", folder, status=2).stderr
    (folder / "config.json").write_text(json.dumps({"model_type": "odd"}))
    assert "usual words" in run("vllm-config", folder, "--size", "1GiB").stderr
