"""The linker for SGLang over empty classes in the place of SGLang's, and what it says of pools."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from array import array
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.sglang_stand_in import hashes_of

from lightcache import Cache, Changes
from lightcache.connectors.engine_cache import open_engine_cache
from lightcache.connectors.sglang.pools import check_served, describe
from lightcache.errors import ConfigError, LightcacheError
from lightcache.layout import Hint
from lightcache.shm import Segment

torch = pytest.importorskip("torch")
PAGE, TOKENS = 4, 256


class Component(Enum):
    FULL = 0
    SWA = 1
    MAMBA = 2


class PoolName(str, Enum):
    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"


class Wrapper:
    """Of SGLang's tree: calls the linker."""

    def __init__(self, linker: Any, chains: dict[int, list[str]]) -> None:
        self.cache_linker, self.cache = linker, self
        self.chains = chains

    def get_last_hash_value(self, node: int) -> str | None:
        return self.chains[node][-1]

    def get_prefix_hash_values(self, node: int) -> list[str]:
        return self.chains[node]

    def _tail_hashes(self, key: Any, result: Any, device_hit_len: int) -> Any:
        return key  # the rest

    def _offload_node(self, node_id: int, transfers: Any) -> None:
        self.cache_linker.offload(transfers)


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module."""
    mem = "sglang.srt.mem_cache"
    names = (
        "sglang",
        "sglang.version",
        "sglang.srt",
        "sglang.srt.runtime_context",
        mem,
        f"{mem}.hicache_storage",
        f"{mem}.unified_cache",
        f"{mem}.unified_cache.unified_cache_linker",
    )
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["sglang.version"].__version__ = "0.5.23"
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: 2, hf_config=SimpleNamespace(), dtype="torch.float32"
    )
    modules["sglang.srt.runtime_context"].process_model_config = lambda: model
    modules[f"{mem}.hicache_storage"].PoolName = PoolName
    interface = modules[f"{mem}.unified_cache.unified_cache_linker"]
    interface.UnifiedCacheLinker = type("UnifiedCacheLinker", (), {})
    interface.UnifiedCacheLinkerWrapper = type("W", (Wrapper,), dict(vars(Wrapper)))
    modules[f"{mem}.unified_cache"].unified_cache_linker = interface
    own = "lightcache.connectors.sglang.linker"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, own, raising=False)
    yield importlib.import_module(own)
    sys.modules.pop(own, None)


class MHATokenToKVPool:
    """SGLang's, of two layers."""

    def __init__(self, heads: int = 2, width: int = 8) -> None:
        self.dtype = torch.float32
        shape = (TOKENS, heads, width)
        self.k_buffer, self.v_buffer = ([torch.zeros(shape) for _ in range(2)] for _ in "kv")
        self.kv_cache_layout = "nhd"


class MLATokenToKVPool:
    """SGLang's, of two layers."""

    def __init__(self) -> None:
        self.dtype = torch.float32
        self.kv_buffer = [torch.zeros((TOKENS, 1, 24)) for _ in range(2)]


class SWAKVPool:
    """SGLang's, of two layers with a window about one with full attention."""

    def __init__(self) -> None:
        self.dtype = torch.float32
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(width=16), MHATokenToKVPool()
        for planes in (self.full_kv_pool.k_buffer, self.full_kv_pool.v_buffer):
            del planes[1:]
        self.full_layer_nums, self.swa_layer_nums = 1, 2
        self.layers_mapping = {0: (0, True), 1: (0, False), 2: (1, True)}


class HybridLinearKVPool:
    """SGLang's: layers 1 and 2 have attention, 0 and 2 states."""

    def __init__(self, inner: type = MHATokenToKVPool) -> None:
        self.dtype, self.full_kv_pool = torch.float32, inner()
        self.full_attention_layer_id_mapping = {1: 0, 2: 1}


class MambaPool:
    """SGLang's, of two layers."""

    def __init__(self, width: int = 32) -> None:
        self.mamba_cache = SimpleNamespace(
            temporal=torch.zeros((2, 8, 2, width, 3)), conv=[torch.zeros((2, 8, 12, 3))]
        )
        self._slot_siblings = ()


class HybridReqToTokenPool:
    """SGLang's."""

    def __init__(self, **more: Any) -> None:
        self.mamba_pool, self.mamba_map = MambaPool(), {0: 0, 2: 1}
        self.mamba_ckpt_pool, self.counter = None, None
        vars(self).update(more)

    def register_layer_transfer_counter(self, counter: Any) -> None:
        self.counter = counter


def parameters(pool: Any, **more: Any) -> Any:
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    given = {"tp_cache_group": None, "attn_tp_cache_group": None, "page_size": PAGE}
    return SimpleNamespace(token_to_kv_pool_allocator=allocator, **(given | more))


def server_arguments(**more: Any) -> Any:
    given = {"model_path": "tiny", "load_format": "auto", "attention_backend": "torch_native"}
    return SimpleNamespace(**(given | more))


@pytest.fixture
def made(linker: Any, segment_name: str) -> Iterator[Any]:
    """`made(pool)`: a linker over it."""
    found = []

    def make(
        pool: Any,
        components: Any = (Component.FULL,),
        arguments: Any = None,
        options: Any = None,
        **more: Any,
    ) -> Any:
        extra = {"name": segment_name, "size": "1MiB", **(options or {})}
        found.append(
            linker.LightcacheLinker(
                server_arguments(**(arguments or {})),
                parameters(pool, **more),
                components=set(components),
                extra_config=extra,
            )
        )
        return found[-1]

    yield make
    for each in found:
        each.close()
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


def transfer(hashes: list[str], slots: Any = None, name: PoolName = PoolName.KV) -> Any:
    indices = None if slots is None else torch.as_tensor(slots)
    return [SimpleNamespace(name=name, keys=hashes, device_indices=indices)]


HASHES = hashes_of(list(range(40)))
FIRST, SECOND = np.arange(PAGE, 11 * PAGE), np.arange(20 * PAGE, 30 * PAGE)


def pops(one: Any) -> bool:
    while not one.num_completed_offloads():
        pass
    return bool(one.pop_completed_offload())


@pytest.mark.parametrize(
    ("session", "hint"), [("a", Hint.CONTINUES), ("", Hint.NONE), (None, Hint.NONE)]
)
def test_a_session_is_a_hint(
    made: Any, monkeypatch: pytest.MonkeyPatch, session: Any, hint: Hint
) -> None:
    one, hints = made(MHATokenToKVPool()), []
    reserve = Cache.reserve

    def noted(cache: Cache, *arguments: Any, **how: Any) -> Any:
        hints.append(how["hint"])
        return reserve(cache, *arguments, **how)

    monkeypatch.setattr(Cache, "reserve", noted)
    assert one.offload(transfer(HASHES, FIRST), session_id=session)
    assert pops(one)
    assert hints == [hint]


@pytest.mark.parametrize("kind", [MHATokenToKVPool, MLATokenToKVPool])
def test_calls_in_the_order_of_sglang(made: Any, linker: Any, kind: Any) -> None:
    pool = kind()
    one = made(pool)
    tensors = pool.kv_buffer if kind is MLATokenToKVPool else pool.k_buffer + pool.v_buffer
    for number, tensor in enumerate(tensors):
        shape = tensor[FIRST].shape
        tensor[FIRST] = torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) + number
    wrapper = linker.interface.UnifiedCacheLinkerWrapper(one, {1: [], 2: HASHES[:4]})
    wrapper._offload_node(1, transfer(HASHES[:4], FIRST[: 4 * PAGE]))
    wrapper._offload_node(2, transfer(HASHES[4:], FIRST[4 * PAGE :]))
    assert [pops(one), pops(one)] == [True, True]
    assert one.rank.figures["unknown_beginnings"] == 0
    assert one.rank._link.current.cache.evict(5) == 5  # ends first
    wrapper._tail_hashes(None, None, 0)
    assert one.lookup("r", transfer(HASHES)) == [1, 2, 3, 4, 5]
    assert one.before is None
    assert one.load("r", transfer(HASHES[:5], SECOND[: 5 * PAGE]))
    index = one.start_layer_wise_loading()
    counter = one.layer_done_counter
    counter.set_consumer(index)
    counter.wait_until(0)
    counter.wait_until(1)
    assert counter.num_layers == 3
    counter.wait_until(2)
    assert one.finish_layer_wise_loading(index)
    counter.set_consumer(-1)
    counter.wait_until(0)
    for tensor in tensors:
        assert torch.equal(tensor[SECOND[: 5 * PAGE]], tensor[FIRST[: 5 * PAGE]])
    wrapper._tail_hashes(None, SimpleNamespace(last_device_node=2), 4 * PAGE)
    assert one.before == HASHES[3]
    assert not one.rank._used
    wrapper._tail_hashes([], SimpleNamespace(last_device_node=2), 4 * PAGE)  # there is no rest
    assert list(one.rank._used) == [HASHES[3]]
    assert one.rank.voice.count == 0
    one.reset()
    assert one.lookup("r", transfer(HASHES)) == []


def test_a_pool_of_windows_is_saved_and_loaded_beside_the_other(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SWAKVPool()
    kinds = (Component.FULL, Component.SWA)
    one = made(pool, kinds, swa_retain_window=2 * PAGE - 1)
    assert {name.name: which for name, which in one.pools.items()} == {"KV": pool, "SWA": pool}
    wholes = pool.full_kv_pool.k_buffer + pool.full_kv_pool.v_buffer
    shorts = pool.swa_kv_pool.k_buffer + pool.swa_kv_pool.v_buffer
    for number, tensor in enumerate(wholes + shorts):
        shape = tensor[FIRST].shape
        tensor[FIRST] = torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) + number
    one.before = ""
    four = transfer(HASHES[:4], FIRST[: 4 * PAGE])
    assert one.offload([*four, *transfer(HASHES[1:4], FIRST[PAGE : 4 * PAGE], PoolName.SWA)])
    one.before = HASHES[3]
    assert one.offload(transfer(HASHES[4:], FIRST[4 * PAGE :]))  # it has none of these windows
    assert [pops(one), pops(one)] == [True, True]
    one.before = ""
    asked = [*transfer(HASHES), *transfer(HASHES[-2:], name=PoolName.SWA)]
    assert one.lookup("r", asked) == [4]
    load = transfer(HASHES[:4], SECOND[: 4 * PAGE])
    assert one.load("r", [*load, *transfer(HASHES[2:4], SECOND[: 2 * PAGE], PoolName.SWA)])
    index = one.start_layer_wise_loading()
    counter = one.layer_done_counter
    counter.set_consumer(index)
    for layer in range(4):  # the last is none of the model
        counter.wait_until(layer)
    waited: list[tuple[int, int]] = []
    for number, loads in enumerate(one.rank._started[index].loads):
        wait = functools.partial(lambda number, layer: waited.append((number, layer)), number)
        monkeypatch.setattr(loads, "wait", wait)
    assert counter.num_layers == 4
    counter.wait_until(counter.num_layers - 1)  # so SGLang's graphs of prefill wait for all
    assert waited == [(0, -1), (1, -1)]
    assert one.finish_layer_wise_loading(index)
    for tensor in wholes:
        assert torch.equal(tensor[SECOND[: 4 * PAGE]], tensor[FIRST[: 4 * PAGE]])
    for tensor in shorts:
        assert torch.equal(tensor[SECOND[: 2 * PAGE]], tensor[FIRST[2 * PAGE : 4 * PAGE]])
    assert one.rank.voice.count == 0
    assert one.load("r", load)  # without the slots of a window
    assert one.finish_layer_wise_loading(one.start_layer_wise_loading()) is False


@pytest.mark.parametrize("inner", [MHATokenToKVPool, MLATokenToKVPool])
def test_a_pool_of_states_is_saved_and_loaded_beside_that_of_kv(
    made: Any, monkeypatch: pytest.MonkeyPatch, inner: type
) -> None:
    pool, requests = HybridLinearKVPool(inner), HybridReqToTokenPool()
    one = made(pool, (Component.FULL, Component.MAMBA), req_to_token_pool=requests)
    assert [name.name for name in one.pools] == ["KV", "MAMBA"]
    assert requests.counter is one.layer_done_counter
    state = requests.mamba_pool.mamba_cache
    for tensor in (state.temporal, *state.conv):
        tensor[:, 3] = torch.rand(tensor[:, 3].shape)
    one.before = ""
    four = transfer(HASHES[:4], FIRST[: 4 * PAGE])
    assert one.offload([*four, *transfer(HASHES[3:4], [3], PoolName.MAMBA)])
    one.before = HASHES[3]
    assert one.offload(transfer(HASHES[4:], FIRST[4 * PAGE :]))  # its state has gone
    assert [pops(one), pops(one)] == [True, True]
    one.before = ""
    asked = [*transfer(HASHES), *transfer(HASHES[-1:], name=PoolName.MAMBA)]
    assert one.lookup("r", asked) == [4]
    load = transfer(HASHES[:4], SECOND[: 4 * PAGE])
    assert one.load("r", [*load, *transfer(HASHES[3:4], [5], PoolName.MAMBA)])
    index = one.start_layer_wise_loading()
    counter = one.layer_done_counter
    counter.set_consumer(index)
    assert counter.num_layers == 4
    for layer in range(counter.num_layers):
        counter.wait_until(layer)
    waited: list[tuple[int, int]] = []
    for number, loads in enumerate(one.rank._started[index].loads):
        wait = functools.partial(lambda number, layer: waited.append((number, layer)), number)
        monkeypatch.setattr(loads, "wait", wait)
    for layer in range(counter.num_layers):
        counter.wait_until(layer)
    assert waited == [(1, 0), (0, 0), (0, 1), (1, 1), (0, -1), (1, -1)]
    assert one.finish_layer_wise_loading(index)
    for tensor in (state.temporal, *state.conv):
        assert torch.equal(tensor[:, 5], tensor[:, 3])
        assert tensor[:, 5].any()
        assert not tensor[:, 4].any()
    assert one.rank.voice.count == 0
    assert one.load("r", load)  # without the slot of a state
    assert one.finish_layer_wise_loading(one.start_layer_wise_loading()) is False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mamba_pool": SimpleNamespace()}, "found SimpleNamespace of HybridReqToTokenPool"),
        ({"mamba_ckpt_pool": 1}, "found checkpoints of 8 bits"),
        ({"mamba_map": {0: 0}}, "expected states of 1 layers, found"),
        ({"mamba_pool": MambaPool(0)}, ""),  # of convolutions alone: these are served
    ],
)
def test_states_that_are_refused(change: dict[str, Any], said: str) -> None:
    pool, requests = HybridLinearKVPool(), HybridReqToTokenPool(**change)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, hf_config=None, dtype="float32")
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        given = parameters(pool, req_to_token_pool=requests)
        check_served(pool, given, [Component.FULL, Component.MAMBA])
        describe(server_arguments(), model, pool, PAGE, (0, 1), "0.5.23", None, requests)
    requests = HybridReqToTokenPool()
    requests.mamba_pool._slot_siblings = [1]
    with pytest.raises(ConfigError, match="found others beside it"):
        check_served(
            pool,
            parameters(pool, req_to_token_pool=requests),
            [Component.FULL, Component.MAMBA],
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"swa_layer_nums": 0}, "found 1 and 0 of 7 tokens"),
        ({"swa_kv_pool": MLATokenToKVPool()}, "found MLATokenToKVPool"),
    ],
)
def test_pools_of_windows_that_are_refused(change: dict[str, Any], said: str) -> None:
    pool = SWAKVPool()
    vars(pool).update(change)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, hf_config=None, dtype="float32")
    with pytest.raises(ConfigError, match=said):  # noqa: PT012
        check_served(pool, parameters(pool), [Component.FULL, Component.SWA])
        describe(server_arguments(), model, pool, PAGE, (0, 1), "0.5.23", 7)


def test_nothing_is_raised_and_a_load_is_always_true(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(5, "on purpose")

    one = made(MHATokenToKVPool())
    for name in ("lookup", "load", "begin", "finish", "offload", "completed", "pop", "cancel_load"):
        monkeypatch.setattr(one.rank, name, fails)
    with monkeypatch.context() as patch:
        for name in ("reset", "close"):
            patch.setattr(one.rank, name, fails)
        assert one.lookup("r", transfer(HASHES)) == []
        assert one.load("r", transfer(HASHES, FIRST)) is True
        assert one.start_layer_wise_loading() == -1
        assert one.finish_layer_wise_loading(0) is False
        assert one.offload(transfer(HASHES, FIRST)) is True
        assert one.num_completed_offloads() == 0
        assert one.pop_completed_offload() is False
        assert one.cancel_queued_load("r") is False
        one.reset()
        one.close()
    assert one.rank.voice.count == 10


def test_a_call_that_takes_long_is_said_and_counted(
    made: Any, linker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(MHATokenToKVPool())
    assert one.lookup("r", transfer(HASHES)) == []
    assert one.rank.figures["slow_calls"] == 0
    monkeypatch.setattr(linker, "SLOW", 0.0)
    one.lookup("r", transfer(HASHES))
    one.layer_done_counter.wait_until(0)
    assert one.rank.figures["slow_calls"] == 2
    assert "rank 0: lookup took" in caplog.text
    assert "rank 0: wait_until took" in caplog.text


def test_a_save_that_cannot_begin_has_its_turn(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(MHATokenToKVPool())
    assert one.offload([]) is False
    assert one.offload(transfer(HASHES)) is True  # it names no slots
    with monkeypatch.context() as patch:
        patch.setattr(one, "_events", lambda: 1 / 0)
        assert one.offload(transfer(HASHES, FIRST)) is True
    assert one.offload(transfer(HASHES, FIRST)) is True
    assert [pops(one) for _ in range(3)] == [False, False, True]


def test_each_start_is_a_launch_of_its_own(made: Any) -> None:
    """Two engines of one program count their resets each for itself."""
    one, two = made(MHATokenToKVPool()), made(MHATokenToKVPool())
    assert one.rank.launch != two.rank.launch
    one.reset()
    two.reset()
    names = {space.weights for space in one.rank._link.current.cache.index.namespaces()}
    assert len([name for name in names if name.startswith("sglang-")]) == 2


def test_a_load_without_pages_fails_its_batch(made: Any) -> None:
    one = made(MHATokenToKVPool())
    assert one.load("r", transfer(HASHES, FIRST))
    index = one.start_layer_wise_loading()
    assert index == 0
    one.layer_done_counter.set_consumer(index)
    one.layer_done_counter.wait_until(0)
    assert one.finish_layer_wise_loading(index) is False
    assert one.start_layer_wise_loading() == -1


def test_a_tree_that_tells_nothing_is_said_once(
    made: Any, linker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(linker.interface.UnifiedCacheLinkerWrapper, "_tail_hashes")
    monkeypatch.delattr(Wrapper, "_tail_hashes")
    one = made(MHATokenToKVPool())
    assert one.rank.voice.count == 1
    one.offload(transfer(HASHES, FIRST))
    assert pops(one)
    assert one.rank.figures["unknown_beginnings"] == 1
    assert one.lookup("r", transfer(HASHES)) == list(range(1, 11))


def test_a_tree_that_fails_is_said_once_and_neighbours_are_used(made: Any, linker: Any) -> None:
    one = made(MHATokenToKVPool())
    wrapper = linker.interface.UnifiedCacheLinkerWrapper(one, {1: []})
    for _ in range(2):
        wrapper._tail_hashes(None, SimpleNamespace(last_device_node=2), 4 * PAGE)
    assert one.rank.voice.count == 1
    one.lookup("r", transfer(HASHES))
    wrapper._offload_node(1, transfer(HASHES[:4], FIRST[: 4 * PAGE]))
    wrapper._offload_node(2, transfer(HASHES[4:], FIRST[4 * PAGE :]))
    assert [pops(one), pops(one)] == [True, True]
    assert one.rank.figures["unknown_beginnings"] == 0
    assert one.rank.voice.count == 1


def test_token_ids_of_a_node_are_noted_where_they_alone_decide_its_hashes(
    made: Any, linker: Any, segment_name: str
) -> None:
    tokens, cuts = list(range(40)), [0, 2, 3, 4, 5, 6, 7, 8]

    def node(begin: int, end: int, ids: Any = None, **key: Any) -> Any:
        ids = array("q", tokens[begin * PAGE : end * PAGE] if ids is None else ids)
        given = {"is_bigram": False, "extra_key": None, "cache_salt": None, **key}
        text = SimpleNamespace(raw_token_ids=lambda: ids, **given)
        return SimpleNamespace(hash_values=HASHES[begin:end], key=text)

    nodes = [
        node(0, 2),
        node(2, 3, extra_key="adapter"),
        node(3, 4, cache_salt="salt"),
        node(4, 5, is_bigram=True),
        node(5, 6, ids=[1 << 40] * PAGE),  # an image's
        node(5, 6),  # of other hashes than those of the call
        node(7, 8, ids=[1]),
        None,
    ]
    one = made(MHATokenToKVPool(), options={"token_ids": True})
    chains = {number: HASHES[:cut] for number, cut in enumerate(cuts)}
    wrapper = linker.interface.UnifiedCacheLinkerWrapper(one, chains)
    wrapper.tree_core = SimpleNamespace(snapshot_buffer_backup=lambda number, _: nodes[number])
    for number, (begin, end) in enumerate(itertools.pairwise([*cuts, 9])):
        wrapper._offload_node(number, transfer(HASHES[begin:end], FIRST[begin * PAGE : end * PAGE]))
        assert pops(one)
    wrapper.tree_core = None  # asking fails
    wrapper._offload_node(len(nodes) - 1, transfer(HASHES[8:9], FIRST[8 * PAGE : 9 * PAGE]))
    assert pops(one)
    assert one.rank.voice.count == 0
    with Cache.attach(segment_name, readonly=True) as cache:
        assert cache.token_records is not None
        (batch,) = Changes(cache.index).scan()
        rows, known = cache.token_records.read(batch.stored_pages, batch.stored)
        assert len(batch.stored) == 9
        assert rows[known].tolist() == [tokens[:PAGE], tokens[PAGE : 2 * PAGE]]


def test_a_release_without_the_wrapper_is_served(
    made: Any, linker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(linker.interface, "UnifiedCacheLinkerWrapper")
    one = made(MHATokenToKVPool())
    assert one.rank.voice.count == 1
    one.offload(transfer(HASHES, FIRST))
    assert pops(one)


@pytest.mark.parametrize("name", ["_place", "_agree"])
def test_ranks_that_cannot_agree_run_without_the_cache(
    made: Any, linker: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(linker, name, lambda *_: 1 / 0)
    one = made(MHATokenToKVPool())
    assert one.rank.voice.count == 1
    assert one.offload(transfer(HASHES, FIRST)) is False  # alone, as far as it knows
    assert one.lookup("r", transfer(HASHES)) == []


def test_a_rank_that_alone_cannot_agree_has_the_turns_of_the_others(
    made: Any, linker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count completed saves in common, in order: one that has fewer locks nodes for ever."""
    module = importlib.import_module("lightcache.connectors.sglang.rank")
    monkeypatch.setattr(module, "JOIN", 0.05)
    monkeypatch.setattr(
        module, "open_engine_cache", functools.partial(open_engine_cache, shared=False)
    )
    ranks = []
    for rank in range(2):
        monkeypatch.setattr(linker, "_place", lambda _, place=(rank, 2): place)
        monkeypatch.setattr(linker, "_agree", (lambda *_: (7, "")) if rank else lambda *_: 1 / 0)
        ranks.append(made(MHATokenToKVPool(heads=1)))
    assert [one.rank.serves for one in ranks] == [False, True]
    assert ranks[1].rank.launch == linker.launch_of(7)  # as all that agree
    for _ in range(2):
        assert [one.offload(transfer(HASHES, FIRST)) for one in ranks] == [True, True]
    assert ranks[0].offload([object()]) is ranks[1].offload([object()]) is True
    assert ranks[0].offload([]) is ranks[1].offload([]) is False
    for left in (3, 2, 1):
        assert ranks[0].num_completed_offloads() == left
        assert min([pops(one) for one in ranks]) is False  # what SGLang takes
    assert [one.lookup("r", transfer(HASHES)) for one in ranks] == [[], []]
    assert ranks[0].offload(transfer(HASHES, FIRST))
    for one in ranks:
        one.reset()
        assert one.num_completed_offloads() == 0


def test_figures_are_counters(made: Any, linker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Metric:
        def __init__(self, name: str, documentation: str, labelnames: Any) -> None:
            self.values: dict[str, int] = {}
            metrics[name] = self

        def labels(self, model_name: str, rank: str) -> Any:
            where = f"{model_name} {rank}"
            add = self.values.__setitem__
            return SimpleNamespace(inc=lambda more: add(where, self.values.get(where, 0) + more))

    metrics: dict[str, Metric] = {}
    client: Any = ModuleType("prometheus_client")
    client.Counter = Metric
    monkeypatch.setitem(sys.modules, "prometheus_client", client)
    figures = importlib.import_module("lightcache.connectors.sglang.figures")
    figures._counters.cache_clear()
    now = [0.0]
    monkeypatch.setattr(linker, "Meter", functools.partial(figures.Meter, clock=lambda: now[0]))
    how = {"enable_metrics": True, "served_model_name": "m"}
    one = made(MHATokenToKVPool(), arguments=how)
    grown = iter([{}, {"written_bytes": 5}, {}, {"written_bytes": 2, "read_bytes": 1}])
    tier = SimpleNamespace(take_figures=lambda: next(grown), write=lambda *_, **__: None)
    one.rank._link.current.storage = SimpleNamespace(current=tier, close=lambda _: None)
    assert set(metrics) == {f"sglang:lightcache_{name}" for name in figures.FIGURES}
    assert one.offload(transfer(HASHES, FIRST))
    assert pops(one)
    for _ in range(2):  # it adds what is new alone
        now[0] += 1
        one.num_completed_offloads()
    page = one.rank._link.current.cache.pool.page_bytes
    assert metrics["sglang:lightcache_offered_pages"].values == {"m 0": 10}
    assert metrics["sglang:lightcache_saved_bytes"].values == {"m 0": 10 * page}
    assert metrics["sglang:lightcache_storage_written_bytes"].values == {"m 0": 5}
    one.rank.figures["errors"] += 1
    one.num_completed_offloads()
    assert metrics["sglang:lightcache_errors"].values == {}
    now[0] += figures.INTERVAL
    one.num_completed_offloads()
    assert metrics["sglang:lightcache_errors"].values == {"m 0": 1}
    assert metrics["sglang:lightcache_storage_written_bytes"].values == {"m 0": 7}
    figures._counters.cache_clear()


def test_transfers_that_cannot_be_read_are_lost_in_their_turn(made: Any) -> None:
    one = made(MHATokenToKVPool())
    assert one.offload([object()]) is True
    assert one.offload(transfer(HASHES, FIRST)) is True
    assert [pops(one), pops(one)] == [False, True]
    assert one.lookup("r", transfer(HASHES)) == list(range(1, 11))
    assert one.load("r", [object()]) is True
    assert one.finish_layer_wise_loading(one.start_layer_wise_loading()) is False
    assert one.load("r", transfer(HASHES, SECOND)) is True
    assert one.load("r", []) is True
    assert one.start_layer_wise_loading() == 1
    assert one.finish_layer_wise_loading(1) is False


def test_what_is_not_served_runs_without_the_cache(made: Any) -> None:
    one = made(MHATokenToKVPool(), (Component.FULL, Component.MAMBA))
    assert one.rank.voice.count == 1
    assert one.pools == {}
    assert one.lookup("r", transfer(HASHES)) == []
    assert one.offload(transfer(HASHES, FIRST)) is False  # True would lock a node for ever
    assert one.num_completed_offloads() == 0


@pytest.mark.parametrize(
    ("more", "components", "said"),
    [
        ({}, "FULL SWA", "expected a pool of SWAKVPool for a model with FULL, SWA, found MHA"),
        (
            {},
            "FULL MAMBA",
            "expected a pool of HybridLinearKVPool for a model with FULL, MAMBA",
        ),
        ({"pp_size": 2}, "FULL", "expected pp_size 1, found 2"),
        ({"attn_cp_size": 2}, "FULL", "expected attn_cp_size 1, found 2"),
        ({"is_eagle": True}, "FULL", "speculative"),
        ({"sidecar_draft_device_pools": (1,)}, "FULL", "speculative"),
    ],
)
def test_what_is_refused(more: dict[str, Any], components: str, said: str) -> None:
    kinds = [Component[name] for name in components.split()]
    with pytest.raises(ConfigError, match=said):
        check_served(MHATokenToKVPool(), parameters(None, **more), kinds)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kv_cache_layout", "hnd", "tokens first"),
        ("k_scale_buffer", [1], "without scales"),
    ],
)
def test_pools_that_are_refused(name: str, value: Any, said: str) -> None:
    pool = MHATokenToKVPool()
    setattr(pool, name, value)
    with pytest.raises(ConfigError, match=said):
        check_served(pool, parameters(pool), [Component.FULL])
    other = type("MHATokenToKVPoolFP4", (MHATokenToKVPool,), {})()
    with pytest.raises(ConfigError, match="found MHATokenToKVPoolFP4"):
        check_served(other, parameters(other), [Component.FULL])


def described(place: tuple[int, int] = (0, 1), release: str = "0.5.23", **more: Any) -> Any:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, hf_config=None, dtype="float32")
    pool = MHATokenToKVPool(2 // place[1])
    return describe(server_arguments(**more), model, pool, PAGE, place, release)


def test_what_makes_states_differ() -> None:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, hf_config=None, dtype="float32")

    def fingerprint(
        place: tuple[int, int] = (0, 1), width: int = 32, half: bool = False, **more: Any
    ) -> str:
        pool, requests = HybridLinearKVPool(), HybridReqToTokenPool(mamba_pool=MambaPool(width))
        pool.full_kv_pool = MHATokenToKVPool(2 // place[1])
        if half:
            cache = requests.mamba_pool.mamba_cache
            cache.temporal = cache.temporal.to(torch.bfloat16)
        arguments = server_arguments(**more)
        return describe(arguments, model, pool, PAGE, place, "0.5.23", None, requests).fingerprint

    assert fingerprint((0, 2)) == fingerprint((1, 2))
    others = [
        fingerprint(),
        fingerprint((0, 2)),  # what ranks have is opaque
        fingerprint(width=16),
        fingerprint(half=True),
        fingerprint(width=16, half=False, linear_attn_backend="triton"),
        fingerprint(mamba_backend="flashinfer"),
    ]
    assert len(set(others)) == len(others)


def test_what_makes_pages_differ(tmp_path: Path) -> None:
    one = described()
    assert described((0, 2)).fingerprint == described((1, 2)).fingerprint == one.fingerprint
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "weights").write_text("1")
    lora = {"lora_paths": [SimpleNamespace(lora_name="a", lora_path=str(adapter))]}
    with_adapter = described(**lora).fingerprint
    assert described(**lora).fingerprint == with_adapter
    (adapter / "weights").write_text("12")
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    with_scales = described(quantization_param_path=str(scales)).fingerprint
    scales.write_text('{"layers": 1}')
    others = [
        with_scales,
        described(quantization_param_path=str(scales)).fingerprint,
        described(release="0.5.24").fingerprint,
        described(model_path="other").fingerprint,
        described(attention_backend="triton").fingerprint,
        described(quantization="fp8").fingerprint,
        described(**lora).fingerprint,
        with_adapter,
        one.fingerprint,
    ]
    assert len(set(others)) == len(others)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2)
    with pytest.raises(ConfigError, match="expected 1 of 2 KV heads in rank 0 of 2"):
        describe(server_arguments(), model, MHATokenToKVPool(2), PAGE, (0, 2), "")


def test_what_the_device_has_whole_is_used(
    made: Any, linker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`match` of a prompt that ends with a page asks nothing of the linker."""
    wrapper = linker.interface.UnifiedCacheLinkerWrapper
    monkeypatch.setattr(wrapper, "match", lambda self, key, req, result: "found", raising=False)
    one, used = made(MHATokenToKVPool()), []
    monkeypatch.setattr(one, "used", used.append)
    tree = wrapper(one, {1: HASHES[:4]})
    for whole, known in ((4 * PAGE, 1), (4 * PAGE - 1, 1), (0, 1), (4 * PAGE, 2)):
        result = SimpleNamespace(device_prefix_len=whole, last_device_node=known)
        assert tree.match([0] * 4 * PAGE, None, result) == "found"
    assert used == [[HASHES[3]]]
    assert one.rank.voice.count == 1  # of node 2


def test_the_window_of_what_the_device_has_whole_is_used(
    made: Any, linker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may begin in the nodes before."""
    one, used = made(SWAKVPool(), (Component.FULL, Component.SWA), swa_retain_window=8), []
    assert one.window == 2
    monkeypatch.setattr(one, "used", used.append)
    tree = linker.interface.UnifiedCacheLinkerWrapper(one, {1: HASHES[:3], 2: HASHES[:4]})
    nodes = {1: HASHES[:3], 2: HASHES[3:4]}
    tree.tree_core = SimpleNamespace(
        get_hash_values=nodes.__getitem__,
        get_prefix_hash_values=lambda node: HASHES[:3] if node == 2 else [],
    )
    for node in (1, 2):
        tree._tail_hashes([], SimpleNamespace(last_device_node=node), 4 * PAGE)
    assert used == [HASHES[1:3], HASHES[2:4]]
    assert one.rank.voice.count == 0
