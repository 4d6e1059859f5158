"""The connector for vLLM without vLLM: its methods, its options, and what a model's pages are."""

from __future__ import annotations

import importlib
import os
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engines import contracts

from lightcache import Cache
from lightcache.connectors import engine_cache, engine_options
from lightcache.connectors.vllm import Options, room
from lightcache.connectors.vllm.messages import Place, Report, one_group
from lightcache.connectors.vllm.model import block_groups, describe, measure, rank_of
from lightcache.connectors.vllm.prompts import (
    Adapters,
    adapter_bytes,
    files_digest,
    keys_of,
    prompt_of,
)
from lightcache.connectors.vllm.scheduler import Stored, open_cache
from lightcache.errors import ConfigError, NoSpace
from lightcache.prompt import MultimodalItem, Prompt
from lightcache.shm import memory
from lightcache.tools.vllm_config import page_of, shape_of


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

    class Results(SimpleNamespace):
        pass

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
    modules[f"{v1}.base"].KVConnectorTransferResults = Results  # type: ignore[attr-defined]
    modules[f"{v1}.base"].KVConnectorRole = Role  # type: ignore[attr-defined]
    modules[v1].base = modules[f"{v1}.base"]  # type: ignore[attr-defined]
    modules[f"{v1}.metrics"].KVConnectorStats = Stats  # type: ignore[attr-defined]
    modules[f"{v1}.metrics"].KVConnectorPromMetrics = type("P", (), {})  # type: ignore[attr-defined]
    modules["vllm.v1.metrics.cache_hit_source"].CacheHitSource = Source  # type: ignore[attr-defined]
    own = "lightcache.connectors.vllm.connector"
    for name, module in (modules | event_modules()).items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in (own, EVENTS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(own)
    for name in (own, EVENTS):
        sys.modules.pop(name, None)


EVENTS = "lightcache.connectors.vllm.events"


def event_modules() -> dict[str, Any]:
    """vLLM's, of which hashes are numbers as text, and extra keys the number of their block."""
    events, utils, specs = (ModuleType(name) for name in ("events", "utils", "specs"))
    events.MEDIUM_CPU = "CPU"  # type: ignore[attr-defined]
    events.AllBlocksCleared = type("AllBlocksCleared", (), {})  # type: ignore[attr-defined]
    events.BlockStored = SimpleNamespace  # type: ignore[attr-defined]

    def resolved(hashes: list[str], hashed: int, block: int) -> list[str]:
        return hashes[block // hashed - 1 :: block // hashed]

    utils.resolve_block_hashes = resolved  # type: ignore[attr-defined]
    utils.maybe_convert_block_hash = int  # type: ignore[attr-defined]
    utils.to_event_extra_keys = list  # type: ignore[attr-defined]
    utils.generate_block_hash_extra_keys = (  # type: ignore[attr-defined]
        lambda request, start, end, item: ((item, start, end), item + 1)
    )
    specs.get_kv_cache_spec_kind = lambda spec: SimpleNamespace(value="full")  # type: ignore[attr-defined]
    return {
        "vllm.distributed.kv_events": events,
        "vllm.v1.core.kv_cache_utils": utils,
        "vllm.v1.kv_cache_interface": specs,
    }


def made(connector: Any, role: str, events: bool | None = None, **extra: Any) -> Any:
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra, kv_load_failure_policy="fail", engine_id="x"
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        kv_events_config=None,
    )
    if events is not None:
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=events)
    spec = FullAttentionSpec(16)
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
    results = worker.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == (set(), set())
    assert worker.build_connector_worker_meta() is None
    assert worker.get_handshake_metadata().hello.place is None
    said = [record for record in caplog.records if "computes instead" in record.message]
    assert len(said) == 2  # of each kind one; the worker's have gone to the scheduler's half
    worker.shutdown()
    scheduler.shutdown()


def test_what_does_not_fit_is_said_when_the_configuration_is_made(
    connector: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = memory.FreeMemory(64 << 20, "free in /dev/shm")
    monkeypatch.setattr(memory, "available", lambda: docker)
    room.warn_of_shortage.cache_clear()
    asked = connector.LightcacheConnector.requires_piecewise_for_cudagraph
    assert not any(asked({"size": size}) for size in ("900TiB", "900TiB", "1MiB"))
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    for words in ("needs 900.0 TiB, found 64.0 MiB free in /dev/shm", "--shm-size", "--ipc=host"):
        assert words in said
    assert not asked({"size": "1GiB", "pool_path": "/no/such/folder"})
    assert "the folder /no/such/folder is not there" in caplog.text
    with pytest.raises(ConfigError, match="found sise"):
        asked({"sise": "1GiB"})


def test_the_memory_of_caches_counts_as_free(
    segment_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was there before a restart is found again; another may give way."""
    none = memory.FreeMemory(0, "free in /dev/shm")
    how: dict[str, Any] = {"page_bytes": 1 << 20, "fingerprint": "x", "grow": False}
    with Cache.create(segment_name, size="64MiB", **how) as cache:
        cache.pool.prefault()
        monkeypatch.setattr(memory, "available", lambda: none)
        room.warn_of_shortage.cache_clear()
        room.warn_of_shortage(Options(size="64MiB"))
        assert not caplog.records
        assert room.shortage(Options(size="64MiB"))


def test_a_cache_for_which_there_is_no_room_says_what_to_do(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = memory.FreeMemory(64 << 20, "free in /dev/shm")
    monkeypatch.setattr(memory, "available", lambda: docker)
    place = Place(segment_name, "model", "x", 1 << 20, 16, one_group(16))
    with pytest.raises(NoSpace, match=r"found 64.0 MiB free in /dev/shm.*--shm-size"):
        open_cache(place, Options(size="1GiB"), role="r")


def test_a_table_reads_the_blocks_that_are_asked_for(connector: Any) -> None:
    class Block:
        def __init__(self, number: int) -> None:
            self.number, self.read = number, 0

        @property
        def block_id(self) -> int:
            self.read += 1
            return self.number

    blocks = [Block(number) for number in range(7, 27)]
    table = connector.Table(blocks)
    assert (len(table), table[3], table[4:6], table[20:21]) == (20, 10, [11, 12], [])
    assert [block.read for block in blocks] == [0, 0, 0, 1, 1, 1, *[0] * 14]
    assert list(table) == list(range(7, 27))


def test_events(connector: Any) -> None:
    off = made(connector, "SCHEDULER", events=False)
    assert not off.of_scheduler.tells
    one = made(connector, "SCHEDULER", events=True)
    assert one.of_scheduler.tells
    device = SimpleNamespace(hash_block_size=8, kv_event_queue=[])
    for each in (off, one):
        each.bind_gpu_block_pool(device)
    (cleared,) = device.kv_event_queue
    assert type(cleared).__name__ == "AllBlocksCleared"
    lora = SimpleNamespace(adapter_id=5, name="tuned")
    asked = SimpleNamespace(
        block_hashes=list(map(str, range(10))),
        all_token_ids=list(range(80)),
        lora_request=lora,
        session_id="s",
    )
    plain = SimpleNamespace(**{**vars(asked), "lora_request": None})
    beyond = Stored(asked, 4, 6)
    one.of_scheduler._stored = [Stored(asked, 1, 3), Stored(plain, 0, 1), beyond]
    second, first = one.take_events()
    assert vars(second) == {
        "block_hashes": [3, 5],
        "parent_block_hash": 1,
        "token_ids": list(range(16, 48)),
        "block_size": 16,
        "lora_id": 5,
        "medium": "CPU",
        "lora_name": "tuned",
        "extra_keys": [(0, 16, 32), (1, 32, 48)],
        "group_idx": 0,
        "kv_cache_spec_kind": "full",
        "locality": "LOCAL",
        "session_id": "s",
    }
    assert (first.parent_block_hash, first.lora_id, first.lora_name) == (None, None, None)
    assert one.take_events() == []


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
        ({"eviction": "fifo"}, "eviction"),
        ({"eviction": ["hz"]}, "eviction"),
        ({"admission": 1}, "admission"),
        ({"record": 1}, "record"),
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


@pytest.mark.parametrize(
    ("given", "nodes", "wanted"),
    [
        (None, {0, 1}, "interleave"),
        (None, {1}, None),
        (None, set(), None),
        (0, {0, 1}, 0),
        ("interleave", {0}, "interleave"),
    ],
)
def test_a_pool_is_placed_over_the_nodes_of_gpus(
    monkeypatch: pytest.MonkeyPatch, given: Any, nodes: set[int], wanted: Any
) -> None:
    monkeypatch.setattr(engine_options, "nodes_of_gpus", lambda: nodes)
    asked: dict[str, Any] = {}
    opens = SimpleNamespace(open=lambda name, **how: asked.update(how))
    monkeypatch.setattr(engine_cache, "Cache", opens)
    place = Place("any", "model", "x", 1 << 20, 16, one_group(16))
    open_cache(place, Options(numa=given), role="r")
    assert asked["numa"] == wanted


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
        for each in (asked, *others):
            keys = prompt_of(each, 8, b"d").keys(spec)
            assert np.array_equal(keys_of(each, spec, b"d"), keys)


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


def test_an_adapter_that_was_loaded_with_other_files_has_no_digest(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    adapters, path = Adapters(), str(tmp_path)

    def looked_at(*asks: tuple[str, int | None]) -> list[bytes | None]:
        for name, number in asks:
            adapters.ask(name, path, number)
        while adapters.take(asks[-1][0]) is None:  # they are looked at in turn
            pass
        return [adapters.take(name) for name, _ in asks]

    weights.write_bytes(b"one")
    before = files_digest(path)
    assert looked_at(("a", 1), ("b", 1)) == [before, before]
    weights.write_bytes(b"others")
    after = files_digest(path)
    assert after != before
    assert looked_at(("c", 1), ("d", None), ("e", 2)) == [None, after, after]
    adapters.close()


# ---- pages


class FullAttentionSpec:
    def __init__(self, block_size: int = 4) -> None:
        self.block_size = block_size


class SlidingWindowSpec:
    block_size = 4

    def __init__(self, sliding_window: int = 12, extra_retained_tokens: int = 0) -> None:
        self.sliding_window, self.extra_retained_tokens = sliding_window, extra_retained_tokens


class MambaSpec:
    def __init__(self, mode: str = "align", replicated: bool = False, block_size: int = 4) -> None:
        self.mamba_cache_mode, self.tp_replicated = mode, replicated
        self.block_size, self.num_speculative_blocks = block_size, 0
        self.shapes, self.dtypes = ((3, 4), (2, 8)), (torch.float32, torch.float32)
        self.mamba_type = SimpleNamespace(name="MAMBA2")


class ChunkedLocalAttentionSpec:
    block_size, attention_chunk_size = 4, 24


class UniformTypeKVCacheSpecs:
    block_size = 4

    def __init__(self, specs: dict[str, Any]) -> None:
        self.kv_cache_specs = specs


class OddSpec:
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
    whole = found[2].groups[0].shard.share().cells
    assert whole == found[0].groups[0].shard.share().cells
    assert len(found[2].groups[0].shard.share(writing=True).cells) < len(whole)


def test_latents_are_not_served_where_vllm_does_not_continue_prompts() -> None:
    config, groups, tensors = latent(1)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigError, match="computes wrongly"):
        describe(config, groups, tensors, 0, Options())
    config.scheduler_config.enable_chunked_prefill = True
    describe(config, groups, tensors, 0, Options())


def staged(rank: int, ranks: int, layers: int = 4) -> Any:
    """What a rank of a pipeline of two stages describes."""
    config, groups, tensors = engine(2, ranks, layers, pipeline_parallel_size=2, rank=rank)
    begin = rank // ranks % 2 * (layers // 2)
    model, (group,) = config.model_config, groups.kv_cache_groups
    model.get_total_num_hidden_layers = lambda: layers
    model.get_layers_start_end_indices = lambda parallel: (begin, begin + layers // 2)
    group.layer_names = group.layer_names[begin : begin + layers // 2]
    return config, groups, {name: tensors[name] for name in group.layer_names}


def parts_of(found: Any) -> set[tuple[int, int]]:
    """Layers and heads of a rank."""
    cells = found.groups[0].shard.share().cells
    return {(cell.layer, cell.head) for cell in cells}


def test_stages_of_a_pipeline_share_pages_with_engines_without() -> None:
    (whole, *rest) = [describe(*engine(2, layers=4), 0, Options())] + [
        describe(*staged(rank, 2), rank, Options()) for rank in range(4)
    ]
    assert {each.place for each in rest} == {whole.place}
    assert [each.ranks for each in (whole, *rest)] == [1, 4, 4, 4, 4]
    written = [parts_of(each) for each in rest]
    assert sum(map(len, written)) == len(set().union(*written))
    assert set().union(*written) == parts_of(whole)
    of_second = [rank_of(staged(rank, 2)[0].parallel_config) for rank in (4, 7)]
    assert of_second == [0, 3]  # of another data-parallel engine


def test_pipelines_that_are_not_served() -> None:
    config, groups, tensors = staged(0, 1)
    del tensors["model.layers.1.attn"]
    with pytest.raises(ConfigError, match="each of layers 0 to 1"):
        describe(config, groups, tensors, 0, Options())
    config, groups, tensors = hybrid()
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="one group of layers of one shape with pipeline"):
        describe(config, groups, tensors, 0, Options())


def test_models_that_are_not_served() -> None:
    config, groups, tensors = engine(2)
    groups.kv_cache_groups[0].kv_cache_spec = OddSpec()
    with pytest.raises(ConfigError, match="found 1 of OddSpec"):
        describe(config, groups, tensors, 0, Options())
    states = dict(zip("ab", (MambaSpec(), MambaSpec()), strict=True))
    groups.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(states)
    with pytest.raises(ConfigError, match="states of one shape"):
        describe(config, groups, tensors, 0, Options())
    config, groups, tensors = engine(2)
    groups.kv_cache_groups *= 17
    with pytest.raises(ConfigError, match="1 to 16 groups"):
        describe(config, groups, tensors, 0, Options())
    config, groups, tensors = engine(2)
    groups.kv_cache_groups[0].host_resident = True
    with pytest.raises(ConfigError, match="not moved"):
        describe(config, groups, tensors, 0, Options())
    with pytest.raises(ConfigError, match="decode_context_parallel_size"):
        describe(*engine(2, decode_context_parallel_size=2), 0, Options())
    config, groups, tensors = engine(2)
    tensors["model.layers.0.attn"] = torch.zeros(6, 2, 4, 16)
    with pytest.raises(ConfigError, match="one shape"):
        describe(config, groups, tensors, 0, Options())


def shaped(ranks: int = 1) -> tuple[Any, Any, Any]:
    """Layers of 4 and of 8 heads in turns, and an indexer, in one group."""
    config, groups, tensors = engine(8, ranks, layers=5)
    names = groups.kv_cache_groups[0].layer_names
    specs: dict[str, Any] = {name: FullAttentionSpec() for name in names}
    for name in names[::2]:
        tensors[name] = torch.zeros(6, 4 // ranks, 4, 8)
    specs[names[3]] = MLAAttentionSpec()
    tensors[names[3]] = torch.zeros(6, 1, 4, 12, dtype=torch.uint8)
    groups.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(specs)
    config.cache_config.enable_prefix_caching = True
    return config, groups, tensors


def test_layers_of_several_shapes_lie_in_one_page(release: SimpleNamespace) -> None:
    one = describe(*shaped(), 0, Options())
    (group,) = one.place.groups
    assert (group.name, group.run.group, group.block_tokens) == ("full", 0, 4)
    assert one.place.page_bytes >= 1 << 20
    forms = [
        (each.name, len(each.layers), each.head_groups) for each in one.groups[0].geometry.groups
    ]
    assert forms == [("kv0", 3, 4), ("kv1", 1, 8), ("kv2", 1, 1)]
    assert one.groups[0].geometry.used_bytes == one.place.page_tokens * (3 * 128 + 256 + 12)
    assert len(one.groups[0].planes.planes) == 5
    both = [describe(*shaped(2), rank, Options()) for rank in (0, 1)]
    assert {each.place for each in both} == {one.place}
    written = [each.groups[0].shard.share(writing=True).nbytes for each in both]
    assert sum(written) == one.groups[0].geometry.used_bytes
    with pytest.raises(ConfigError, match="expected 2 of 8 KV heads"):
        describe(*shaped(4), 0, Options())  # 4 heads, or fewer and copies of them
    config, groups, tensors = shaped()
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="or their shapes"):
        describe(config, groups, tensors, 0, Options())


def hybrid(ranks: int = 1, window: int = 12) -> tuple[Any, Any, Any]:
    """Windows in five layers and full attention in two, in groups of at most two as vLLM has them:
    all lie in the tensors of the first."""
    config, _, tensors = engine(2, ranks, layers=7)
    names = sorted(tensors)
    shared = [tensors[names[0]], tensors[names[1]]]
    split = [[names[2], names[5]], names[0:2], names[3:5], names[6:]]
    specs = [FullAttentionSpec(), *(SlidingWindowSpec(window) for _ in "123")]
    made = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=layers)
        for spec, layers in zip(specs, split, strict=True)
    ]
    aliased = {name: shared[at] for layers in split for at, name in enumerate(layers)}
    return config, SimpleNamespace(kv_cache_groups=[made[1], made[0], *made[2:]]), aliased


def test_each_group_has_the_heads_of_its_own_layers() -> None:
    class Layers(dict[int, Any]):
        per_layer_overrides: ClassVar[Any] = [{}]

    config, groups, tensors = hybrid()
    usual = describe(config, groups, tensors, 0, Options()).place
    config.model_config.get_total_num_kv_heads = lambda: 5  # of layers of another kind
    heads = Layers({number: SimpleNamespace(total_num_kv_heads=2) for number in range(7)})
    config.model_config.model_arch_config = heads
    assert describe(config, groups, tensors, 0, Options()).place == usual
    heads[5].total_num_kv_heads = 1
    with pytest.raises(ConfigError, match="as many KV heads"):
        describe(config, groups, tensors, 0, Options())


def test_groups_have_numbers_rules_and_pages_of_one_size() -> None:
    for ranks, rank in ((1, 0), (2, 1)):
        found = describe(*hybrid(ranks), rank, Options())
        groups = found.place.groups
        assert [(each.name, each.rule.name, each.run.group) for each in groups] == [
            ("window12", "window11", 1),
            ("full", "prefix", 0),
            ("window12-2", "window11", 2),
            ("window12-3", "window11", 3),
        ]
        assert found.place == describe(*hybrid(), 0, Options()).place
        # Two blocks of four tokens: four would be longer than the window.
        assert found.place.page_tokens == 8
        assert {each.geometry.part_bytes for each in found.groups} == {found.place.page_bytes}
        assert found.groups[3].geometry.used_bytes * 2 == found.place.page_bytes
    other = describe(*hybrid(window=13), 0, Options()).place
    assert other.fingerprint != found.place.fingerprint
    config, parts, tensors = hybrid()
    for number in (0, 2, 3):
        parts.kv_cache_groups[number].kv_cache_spec = ChunkedLocalAttentionSpec()
    place = describe(config, parts, tensors, 0, Options()).place
    assert [(each.name, each.rule.name, each.run.group) for each in place.groups] == [
        ("chunk24", "chunk24", 1),
        ("full", "prefix", 0),
        ("chunk24-2", "chunk24", 2),
        ("chunk24-3", "chunk24", 3),
    ]
    assert place.page_tokens == 16  # 32 are more than a chunk


def test_vllm_config_says_the_page_that_the_connector_makes() -> None:
    usual = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
    kinds = ["full_attention" if number in (2, 5) else "sliding_attention" for number in range(7)]
    windows = {**usual, "num_hidden_layers": 7, "sliding_window": 12, "layer_types": kinds}
    latents = {**usual, "num_hidden_layers": 3, "kv_lora_rank": 8}
    for config, given in ((usual, engine(2)), (windows, hybrid()), (latents, latent(1))):
        place = describe(*given, 0, Options()).place
        page = page_of(shape_of(config), 4, 4, Options())
        assert (page.tokens, page.bytes) == (place.page_tokens, place.page_bytes)
        assert page.groups == len(place.groups)


def test_drafts_keep_more_of_a_window() -> None:
    spec = SlidingWindowSpec(8, extra_retained_tokens=2)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[])
    (found,) = block_groups(SimpleNamespace(kv_cache_groups=[group]))
    assert (found.rule.back, found.run.group) == (9, 1)


def recurrent(
    ranks: int = 1, alone: bool = False, **how: Any
) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """As vLLM has a model with states: each lies in the bytes of a block, after them nothing."""
    config, groups, tensors = engine(2, ranks)
    names = ["model.layers.2.mixer", "model.layers.3.mixer"]
    # A rank's part of 112 bytes, in blocks that are as far apart as those of attention.
    block = 2 // ranks * 4 * 8 * 4
    for name in names:
        tensors[name] = torch.zeros(6, 1, 1, block, dtype=torch.int8)[..., : 224 // ranks]
    states = SimpleNamespace(kv_cache_spec=MambaSpec(**how), layer_names=names)
    full = [] if alone else groups.kv_cache_groups
    return config, SimpleNamespace(kv_cache_groups=[states, *full]), tensors


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(__version__="0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def test_a_state_is_a_page_of_one_block(release: SimpleNamespace) -> None:
    found = describe(*recurrent(), 0, Options())
    assert [(each.name, each.rule.name, each.run.group) for each in found.place.groups] == [
        ("state", "point", 1),
        ("full", "prefix", 0),
    ]
    assert found.place.page_tokens == 4  # one block, however few bytes it has
    assert {each.geometry.part_bytes for each in found.groups} == {found.place.page_bytes}
    assert found.groups[0].geometry.used_bytes == 2 * 224
    assert found.place.page_bytes == 2 * 2 * 4 * 8 * 4
    assert [group.slots for group in found.place.groups] == [1, 4]
    (alone,) = describe(*recurrent(alone=True), 0, Options()).place.groups
    assert (alone.name, alone.run.group, alone.state) == ("state", 1, True)


def test_ranks_write_parts_of_a_state(release: SimpleNamespace) -> None:
    both = [describe(*recurrent(2), rank, Options()) for rank in (0, 1)]
    assert both[0].place == both[1].place != describe(*recurrent(), 0, Options()).place
    parts = [parts_of(SimpleNamespace(groups=each.groups[:1])) for each in both]
    assert not parts[0] & parts[1]
    assert both[0].groups[0].geometry.used_bytes == 2 * 224
    same = [
        describe(*recurrent(ranks, alone=True, replicated=True), 0, Options()).groups[0]
        for ranks in (1, 2)
    ]
    assert len({each.shard.ranks for each in same}) == 2
    assert parts_of(SimpleNamespace(groups=same[1:])) == parts_of(SimpleNamespace(groups=same[:1]))


def test_what_makes_states_differ(
    release: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(**changed: Any) -> str:
        config, groups, tensors = recurrent()
        for name, value in changed.items():
            setattr(groups.kv_cache_groups[0].kv_cache_spec, name, value)
        return describe(config, groups, tensors, 0, Options()).place.fingerprint

    usual = fingerprint()
    assert "layout=release-0.32-cpu" in usual
    found = {
        usual,
        fingerprint(shapes=((4, 3), (2, 8))),
        fingerprint(dtypes=(torch.float32, torch.bfloat16)),
        fingerprint(mamba_type=SimpleNamespace(name="GDN_ATTN")),
        fingerprint(num_speculative_blocks=1),
    }
    release.__version__ = "0.33.0"
    assert len(found | {fingerprint()}) == 6


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_that_vllm_does_not_keep_at_blocks(mode: str) -> None:
    with pytest.raises(ConfigError, match="--enable-prefix-caching --mamba-cache-mode align") as it:
        describe(*recurrent(mode=mode), 0, Options())
    assert f"found '{mode}'" in str(it.value)


def test_states_of_another_form() -> None:
    config, groups, tensors = recurrent()
    tensors["model.layers.2.mixer"] = torch.zeros(6, 2, 1, 224, dtype=torch.int8)
    tensors["model.layers.3.mixer"] = torch.zeros(6, 2, 1, 224, dtype=torch.int8)
    with pytest.raises(ConfigError, match="one state in a block"):
        describe(config, groups, tensors, 0, Options())


def test_blocks_are_held_for_models_whose_new_blocks_vllm_sets_to_zero(connector: Any) -> None:
    for zeroes in (True, False):
        one = made(connector, "SCHEDULER")
        one._kv_cache_config.needs_kv_cache_zeroing = zeroes
        pool = object()
        one.bind_gpu_block_pool(pool)
        assert one.of_scheduler._pool is (pool if zeroes else None)
