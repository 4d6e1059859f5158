"""The connector for vLLM without vLLM: its methods, its options, and what a model's pages are."""

from __future__ import annotations

import importlib
import os
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import contracts

from lightcache import Cache
from lightcache.connectors.vllm import Options
from lightcache.connectors.vllm.messages import Report
from lightcache.connectors.vllm.model import describe, measure
from lightcache.connectors.vllm.prompts import Adapters, adapter_bytes, files_digest, prompt_of
from lightcache.errors import ConfigError
from lightcache.prompt import MultimodalItem, Prompt


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, over empty classes in the place of vLLM's."""

    class Base:
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self._kv_transfer_config = vllm_config.kv_transfer_config
            self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config

    class Role(Enum):
        SCHEDULER = 0
        WORKER = 1

    class Stats:
        def __init__(self, data: Any = None) -> None:
            self.data = data or {}

    class Source(str, Enum):
        HOST = "host"
        DISK = "disk"

    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    modules = {
        name: ModuleType(name)
        for name in (v1, f"{v1}.base", f"{v1}.metrics", "vllm.v1.metrics.cache_hit_source")
    }
    for name in ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "SupportsHMA"):
        setattr(modules[f"{v1}.base"], name, type(name, (), {}))
    modules[f"{v1}.base"].KVConnectorWorkerMetadata = type("W", (), {})  # type: ignore[attr-defined]
    modules[f"{v1}.base"].KVConnectorBase_V1 = Base  # type: ignore[attr-defined]
    modules[f"{v1}.base"].KVConnectorRole = Role  # type: ignore[attr-defined]
    modules[v1].base = modules[f"{v1}.base"]  # type: ignore[attr-defined]
    modules[f"{v1}.metrics"].KVConnectorStats = Stats  # type: ignore[attr-defined]
    modules[f"{v1}.metrics"].KVConnectorPromMetrics = type("P", (), {})  # type: ignore[attr-defined]
    modules["vllm.v1.metrics.cache_hit_source"].CacheHitSource = Source  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    own = "lightcache.connectors.vllm.connector"
    monkeypatch.delitem(sys.modules, own, raising=False)
    yield importlib.import_module(own)
    sys.modules.pop(own, None)


def made(connector: Any, role: str, **extra: Any) -> Any:
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra, kv_load_failure_policy="fail", engine_id="x"
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
    )
    spec = SimpleNamespace(block_size=16)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    role = connector.base.KVConnectorRole[role]
    return connector.LightcacheConnector(config, role, groups)


def test_its_methods_are_those_that_vllm_calls(connector: Any) -> None:
    """Those that it does not have are vLLM's own, which the test with the engine compares."""
    own = contracts.parameters([connector.LightcacheConnector], contracts.VLLM)
    missing = {name for name, found in own.items() if found is None}
    assert missing == {
        "bind_kv_cache_manager",
        "get_loaded_kv_cache_group_ids",
        "get_required_kvcache_layout",
        "has_pending_block_frees",
    }
    assert {name: own[name] for name in own if name not in missing} == {
        name: wanted for name, wanted in contracts.VLLM.items() if name not in missing
    }


def test_no_method_raises(connector: Any, caplog: pytest.LogCaptureFixture) -> None:
    scheduler, worker = made(connector, "SCHEDULER"), made(connector, "WORKER")
    broken = object()
    assert scheduler.get_num_new_matched_tokens(broken, 0) == (0, False)
    assert scheduler.request_finished(broken, []) == (False, None)
    assert scheduler.request_finished_all_groups(broken, ()) == (False, None)
    assert scheduler.build_connector_meta(broken).orders.loads == []
    assert scheduler.update_state_after_alloc(broken, broken, 5) is None
    assert scheduler.update_connector_output(broken) is None
    assert scheduler.get_external_cache_hit_sources(broken, 5) == {}
    assert scheduler.on_new_request(broken) is None
    assert scheduler.set_xfer_handshake_metadata_pp_aware({}) is None
    assert scheduler.has_pending_push_work() is False
    assert scheduler.reset_cache() is True
    assert scheduler.take_events() == ()
    assert worker.register_kv_caches({"layer": broken}) is None
    assert worker.start_load_kv(None) is None
    assert worker.wait_for_save() is None
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    assert worker.get_handshake_metadata().hello.place is None
    said = [record for record in caplog.records if "computes instead" in record.message]
    assert len(said) == 2  # of each kind one; the worker's have gone to the scheduler's half
    worker.shutdown()
    scheduler.shutdown()


def test_what_a_failed_load_becomes_is_ours_to_say(connector: Any) -> None:
    assert made(connector, "SCHEDULER")._kv_transfer_config.kv_load_failure_policy == "recompute"
    ends = made(connector, "SCHEDULER", load_failure="fail")
    assert ends._kv_transfer_config.kv_load_failure_policy == "fail"


def test_figures_of_ranks_are_added(connector: Any) -> None:
    one = connector.LightcacheConnector.build_kv_connector_stats({"errors": 2})
    both = one.aggregate(connector.LightcacheStats({"errors": 1, "loaded_tokens": 64}))
    assert both.reduce() == {"errors": 3, "loaded_tokens": 64}
    reports = [Report({1: 1}, {"a"}, {0: "x"}), Report({1: 1, 2: 1}, {"b"}, {})]
    whole = connector.OutputMetadata(reports[0]).aggregate(connector.OutputMetadata(reports[1]))
    assert whole.report == Report({1: 2, 2: 1}, {"a", "b"}, {0: "x"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sise": "1GiB"}, "found sise"),
        ({"size": 0}, "size"),
        ({"blocks_per_page": 0}, "blocks_per_page"),
        ({"load_failure": "retry"}, "load_failure"),
        ({"on_reset": "clear"}, "on_reset"),
        ({"name": 5}, "name"),
        ({"name": "a/b"}, "name"),
        ({"size": "64XB"}, "size"),
        ({"size": ["64GiB"]}, "size"),
        ({"weights": "x" * 48}, "weights"),
        ({"save_decode": 1}, "save_decode"),
        ({"idle_limit": 0}, "idle_limit"),
        ({"storage": 5}, "storage"),
        ({"storage": [""]}, "storage"),
        ({"storage": "nosuch:x"}, "scheme"),
        ({"numa": "all"}, "numa"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Options.of(given)


def test_options() -> None:
    assert Options.of({}) == Options()
    disk, shared = "disk:/x?capacity=1GiB", "s3://bucket"
    assert Options.of({"storage": disk}).storage == (disk,)
    assert Options.of({"storage": [disk, shared]}).storage == (disk, shared)


# ---- keys


def request(**how: Any) -> Any:
    given: dict[str, Any] = {
        "request_id": "r",
        "all_token_ids": list(range(40)),
        "num_prompt_tokens": 36,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**{**given, **how})


def test_keys_are_those_of_a_router(segment_name: str) -> None:
    form: dict[str, Any] = {"page_bytes": 4096, "page_tokens": 8, "fingerprint": "x"}
    with Cache.create(segment_name, pages=4, **form) as cache:
        spec = cache.key_spec()
        place = SimpleNamespace(offset=3, length=9)
        item = SimpleNamespace(identifier="image", mm_position=place)
        lora = SimpleNamespace(lora_name="a", lora_path="/b")
        asked = request(cache_salt="s", mm_features=[item], lora_request=lora)
        same = Prompt(
            range(36),
            salt="s",
            lora=adapter_bytes("a", "/b", b"d"),
            items=[MultimodalItem(3, 12, b"image")],
        )
        keys = prompt_of(asked, 8, b"d").keys(spec)
        assert np.array_equal(keys, same.keys(spec))
        assert len(keys) == 4
        others = [
            request(),
            request(cache_salt="s"),
            request(lora_request=lora),
            request(mm_features=[item]),
            request(prompt_embeds=torch.zeros(36, 4)),
            request(prompt_embeds=torch.ones(36, 4)),
        ]
        firsts = {prompt_of(each, 8, b"d").keys(spec)[0].tobytes() for each in others}
        assert len(firsts) == len(others)


def test_overlapping_items_and_large_embeddings_have_no_keys() -> None:
    places = [SimpleNamespace(offset=start, length=9) for start in (3, 5)]
    items = [SimpleNamespace(identifier="x", mm_position=place) for place in places]
    with pytest.raises(ConfigError, match="apart"):
        prompt_of(request(mm_features=items), 8, None)
    with pytest.raises(ConfigError, match="prompt_embeds"):
        prompt_of(request(prompt_embeds=SimpleNamespace(nbytes=1 << 40)), 8, None)


def test_an_adapter_whose_files_were_replaced_is_another(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    before = files_digest(str(tmp_path))
    weights.write_bytes(b"two")
    os.utime(weights, (1, 1))
    assert files_digest(str(tmp_path)) != before
    assert files_digest("owner/on-the-hub") == b""
    adapters = Adapters()
    adapters.ask("r", str(tmp_path))
    while adapters.take("r") is None:
        pass
    assert adapters.take("r") == files_digest(str(tmp_path))
    adapters.forget("r")
    assert adapters.take("r") is None
    adapters.close()


# ---- pages


class FullAttentionSpec:
    block_size = 4


class SlidingWindowSpec:
    block_size = 4


class MLAAttentionSpec:
    block_size = 4


class Layer:
    """A backend's cache update, with keys and values apart in a block, or swapped."""

    dtype = torch.float32

    def __init__(self, swapped: bool = False) -> None:
        self.impl, self.swapped = self, swapped
        self.attn_backend = SimpleNamespace(get_name=lambda: "STAND_IN")

    def parameters(self) -> Any:
        return iter(())

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        tokens = cache.shape[2]
        for at, slot in enumerate(slots.tolist()):
            halves = cache[slot // tokens, :, slot % tokens].chunk(2, dim=-1)
            both = (value[at], key[at]) if self.swapped else (key[at], value[at])
            for half, row in zip(halves, both, strict=True):
                half.copy_(row)


def engine(heads: int, ranks: int = 1, layers: int = 2, **how: Any) -> tuple[Any, Any, Any]:
    """vLLM's configuration of a rank, its groups and its tensors."""
    own = heads // ranks
    names = [f"model.layers.{number}.attn" for number in range(layers)]
    tensors = {name: torch.zeros(6, own, 4, 8) for name in reversed(names)}
    model = SimpleNamespace(
        model="owner/model",
        revision=None,
        quantization=None,
        dtype=torch.float32,
        seed=0,
        hf_config=None,
        get_total_num_kv_heads=lambda: heads,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            **{"tensor_parallel_size": ranks, "pipeline_parallel_size": 1, **how}
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={name: Layer() for name in names}
        ),
    )
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=names)
    return config, SimpleNamespace(kv_cache_groups=[group]), tensors


def test_pages_do_not_depend_on_the_number_of_ranks() -> None:
    places = [
        describe(*engine(4, ranks), rank, Options()).place
        for ranks, rank in ((1, 0), (2, 0), (2, 1), (4, 3))
    ]
    assert len(set(places)) == 1
    assert (places[0].name, places[0].model) == (None, "owner/model")
    assert places[0].page_tokens * 4 * 2 * 8 * 4 >= 1 << 20
    assert places[0].page_tokens * 4 * 2 * 8 * 4 < 2 << 20


def test_what_makes_pages_differ() -> None:
    def place(config: Any, groups: Any, tensors: Any, **options: Any) -> Any:
        return describe(config, groups, tensors, 0, Options(**options)).place

    usual = engine(2)
    changed = []
    for name, value in (("model", "owner/other"), ("quantization", "fp8"), ("revision", "v2")):
        other = engine(2)
        setattr(other[0].model_config, name, value)
        changed.append(place(*other))
    fp8 = engine(2)
    fp8[0].cache_config.cache_dtype = "fp8"
    swapped = engine(2)
    for layer in swapped[0].compilation_config.static_forward_context.values():
        layer.swapped = True
    places = [place(*usual), place(*usual, blocks_per_page=1), place(*fp8), place(*swapped)]
    places += [*changed, place(*engine(2, layers=3)), place(*engine(4))]
    assert len({(each.model, each.fingerprint) for each in places}) == len(places)


def test_a_backend_that_cannot_be_measured_is_named_by_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.1+cpu"))
    config, groups, tensors = engine(2)
    for layer in config.compilation_config.static_forward_context.values():
        layer.impl = None
    assert (
        "layout=release-0.32 " in describe(config, groups, tensors, 0, Options()).place.fingerprint
    )


def test_measuring_leaves_the_tensors_as_they_were() -> None:
    config, _, tensors = engine(2)
    for tensor in tensors.values():
        tensor.fill_(3)
    measure(config.compilation_config.static_forward_context, tensors, 4)
    assert all(bool((tensor == 3).all()) for tensor in tensors.values())


def latent(ranks: int) -> tuple[Any, Any, Any]:
    """As `engine`: vLLM gives each rank the whole latents, as one head."""
    config, groups, tensors = engine(1, layers=3)
    config.cache_config.enable_prefix_caching = True
    config.parallel_config.tensor_parallel_size = ranks
    config.model_config.get_total_num_kv_heads = lambda: 16
    groups.kv_cache_groups[0].kv_cache_spec = MLAAttentionSpec()
    return config, groups, tensors


def test_latents_are_one_head_that_each_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [describe(*latent(ranks), ranks - 1, Options()) for ranks in (1, 2, 8)]
    assert len({each.place for each in found}) == 1
    assert found[0].place.page_bytes == found[0].place.page_tokens * 3 * 8 * 4
    whole = found[2].shard.share().cells
    assert whole == found[0].shard.share().cells
    assert len(found[2].shard.share(writing=True).cells) < len(whole)


def test_latents_are_not_served_where_vllm_does_not_continue_prompts() -> None:
    config, groups, tensors = latent(1)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigError, match="computes wrongly"):
        describe(config, groups, tensors, 0, Options())
    config.scheduler_config.enable_chunked_prefill = True
    describe(config, groups, tensors, 0, Options())


def test_models_that_are_not_served() -> None:
    config, groups, tensors = engine(2)
    groups.kv_cache_groups[0].kv_cache_spec = SlidingWindowSpec()
    with pytest.raises(ConfigError, match="SlidingWindowSpec"):
        describe(config, groups, tensors, 0, Options())
    config, groups, tensors = engine(2)
    groups.kv_cache_groups *= 2
    with pytest.raises(ConfigError, match="one group"):
        describe(config, groups, tensors, 0, Options())
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        describe(*engine(2, pipeline_parallel_size=2), 0, Options())
    config, groups, tensors = engine(2)
    tensors["model.layers.0.attn"] = torch.zeros(6, 2, 4, 16)
    with pytest.raises(ConfigError, match="one shape"):
        describe(config, groups, tensors, 0, Options())
