"""The storage of SGLang's HiCache, over host pools of our own and empty classes in the place of
SGLang's."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import learned_traffic
from support.keys import prompt
from support.refusals import refused
from support.serving import serving
from support.sglang_stand_in import hashes_of

from lightcache import Cache
from lightcache.connectors import engine_cache
from lightcache.connectors.engine_cache import open_engine_cache
from lightcache.connectors.sglang.pools import HOST_AXES
from lightcache.errors import ConfigError, LightcacheError
from lightcache.shm import Segment
from lightcache.storage.tasks import StorageTask
from lightcache.tools.maintenance import _switch

torch = pytest.importorskip("torch")
PAGE, PAGES, LAYERS, WIDTH = 4, 32, 2, 8
HASHES = hashes_of(list(range(40)))
FIRST, SECOND = np.arange(PAGE, 11 * PAGE), np.arange(20 * PAGE, 30 * PAGE)
SIZES = {"t": PAGES * PAGE, "b": PAGES, "n": PAGE, "l": LAYERS, "c": WIDTH}


class MHATokenToKVPoolHost:
    """SGLang's, in one of its layouts."""

    kinds = 2

    def __init__(self, layout: str = "layer_first", heads: int = 2) -> None:
        self.layout, self.page_size, self.dtype = layout, PAGE, torch.float32
        self.layer_num = LAYERS
        axes = HOST_AXES[layout]
        self.axes = f"k{axes}" if self.kinds > 1 else axes
        sizes = SIZES | {"h": heads, "k": self.kinds}
        self.kv_buffer = torch.zeros([sizes[axis] for axis in self.axes])
        self.cleared = 0

    def clear(self) -> None:
        """SGLang has dropped its tree."""
        self.cleared += 1

    def _view(self) -> Any:
        """K and V, layers, blocks if it has them, tokens, heads, elements."""
        whole, axes = self.kv_buffer.numpy(), self.axes
        if self.kinds == 1:
            whole, axes = whole[None], f"k{axes}"
        order = "klbnhc" if "b" in axes else "klthc"
        return whole.transpose([axes.index(axis) for axis in order])

    def _place(self, slots: Any) -> Any:
        if "b" in self.axes:
            return (slice(None), slice(None), slots // PAGE, slots % PAGE)
        return (slice(None), slice(None), slots)

    def tokens(self, slots: Any) -> Any:
        """What slots have: of equal shape in all layouts."""
        return self._view()[self._place(slots)]

    def compute(self, slots: Any, mark: int = 0) -> Any:
        """Give these slots content of their own."""
        shape = self.tokens(slots).shape
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * mark + 1
        self._view()[self._place(slots)] = values
        return values


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    """Latents: one row, no heads."""

    kinds = 1

    def __init__(self, layout: str = "layer_first", heads: int = 1) -> None:
        super().__init__(layout, 1)


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]


@pytest.fixture
def hicache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module."""
    mem = "sglang.srt.mem_cache"
    names = ("sglang", "sglang.version", "sglang.srt", "sglang.srt.runtime_context", mem)
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["sglang.version"].__version__ = "0.5.23"
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: 2, hf_config=SimpleNamespace(), dtype="torch.float32"
    )
    server = SimpleNamespace(model_path="tiny", load_format="auto")
    context = modules["sglang.srt.runtime_context"]
    context.process_model_config, context.get_server_args = lambda: model, lambda: server
    interface: Any = ModuleType(f"{mem}.hicache_storage")
    interface.HiCacheStorage = type("HiCacheStorage", (), {})
    interface.PoolTransferResult = PoolTransferResult
    modules[f"{mem}.hicache_storage"] = modules[mem].hicache_storage = interface
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    own = "lightcache.connectors.sglang.hicache"
    monkeypatch.delitem(sys.modules, own, raising=False)
    module = importlib.import_module(own)
    # Ranks are processes of their own: here each is a client.
    monkeypatch.setattr(module, "open_engine_cache", partial(open_engine_cache, shared=False))
    yield module
    sys.modules.pop(own, None)


Made = Callable[..., Any]


@pytest.fixture
def made(hicache: Any, segment_name: str) -> Iterator[Made]:
    """`made(pool, rank, ranks, option=...)`: a storage of a rank over it."""
    found: list[Any] = []

    def make(pool: Any, rank: int = 0, ranks: int = 1, config: Any = None, **options: Any) -> Any:
        given = {"name": segment_name, "size": "1MiB", "interface_v1": 1, **options}
        given |= {"backend_name": "lightcache", "module_path": "m", "class_name": "c"}
        more = {"tp_rank": rank, "tp_size": ranks, "enable_storage_metrics": True}
        one = hicache.LightcacheStorage(
            SimpleNamespace(extra_config=given, **(more | (config or {}))), {}
        )
        found.append(one)
        one.register_mem_pool_host(pool)
        return one

    yield make
    for each in found:
        each.close()
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


def indices(slots: Any) -> Any:
    return torch.as_tensor(slots)


def after(*hashes: str) -> Any:
    return SimpleNamespace(prefix_keys=list(hashes))


def pins(name: str) -> int:
    with Cache.attach(name) as cache:
        report = cache.check()
        report.raise_if_broken()
        return int(report.pins)


@pytest.mark.parametrize("kind", [MHATokenToKVPoolHost, MLATokenToKVPoolHost])
@pytest.mark.parametrize("layout", list(HOST_AXES))
def test_pages_of_any_layout_are_found_in_another(
    made: Made, segment_name: str, kind: Any, layout: str
) -> None:
    one_pool, other_pool = kind(layout), kind("page_first")
    one, other = made(one_pool), made(other_pool)
    values = one_pool.compute(FIRST)
    assert one.batch_exists(HASHES) == 0
    assert one.batch_set_v1(HASHES, indices(FIRST)) == [True] * 10
    assert other.batch_exists(HASHES) == other.batch_exists_v2(HASHES).kv_hit_pages == 10
    assert other.exists(HASHES[0])
    assert other.batch_get_v1(HASHES, indices(SECOND)) == [True] * 10
    np.testing.assert_array_equal(other_pool.tokens(SECOND), values)
    assert torch.count_nonzero(other_pool.kv_buffer) == values.size  # no other slot was written
    assert one.voice.count == other.voice.count == 0
    assert pins(segment_name) == 0
    stats = other.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([10], [])
    assert stats.prefetch_bandwidth[0] > 0
    assert other.get_stats().prefetch_pgs == []


def test_ranks_have_pages_of_their_own(made: Made) -> None:
    pools = [MHATokenToKVPoolHost(heads=1) for _ in range(2)]
    ranks = [made(pool, rank, 2) for rank, pool in enumerate(pools)]
    values = [pool.compute(FIRST, rank) for rank, pool in enumerate(pools)]
    assert ranks[0].batch_set_v1(HASHES, indices(FIRST)) == [True] * 10
    assert [rank.batch_exists(HASHES) for rank in ranks] == [10, 0]
    assert ranks[1].batch_set_v1(HASHES, indices(FIRST)) == [True] * 10
    for rank, pool, wanted in zip(ranks, pools, values, strict=True):
        assert all(rank.batch_get_v1(HASHES, indices(SECOND)))
        np.testing.assert_array_equal(pool.tokens(SECOND), wanted)
    # Of four ranks two hold the same head: they find what one of two has saved.
    four = made(MHATokenToKVPoolHost(heads=1), 3, 4)
    assert all(four.batch_get_v1(HASHES, indices(SECOND)))
    np.testing.assert_array_equal(four.mem_pool_host.tokens(SECOND), values[1])


def test_latents_are_of_all_ranks(made: Made) -> None:
    pools = [MLATokenToKVPoolHost() for _ in range(2)]
    one, other = (made(pool, rank, 2) for rank, pool in enumerate(pools))
    values = pools[0].compute(FIRST)
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))
    assert all(other.batch_get_v1(HASHES, indices(SECOND)))
    np.testing.assert_array_equal(pools[1].tokens(SECOND), values)
    assert all(other.batch_set_v1(HASHES, indices(SECOND)))  # all is there
    assert other.figures["saved_pages"] == 0


def test_pages_that_have_gone_are_not_found(made: Made) -> None:
    pool = MHATokenToKVPoolHost()
    one = made(pool)
    pool.compute(FIRST)
    assert all(one.batch_set_v1(HASHES[:4], indices(FIRST[: 4 * PAGE])))
    rest = FIRST[4 * PAGE :]
    assert all(one.batch_set_v1(HASHES[4:], indices(rest), after(*HASHES[:4])))
    cache = one._link.current.cache
    assert cache.evict(3) == 3  # the end goes first, as SGLang has said what is before the rest
    assert one.batch_exists(HASHES) == 7
    assert one.batch_get_v1(HASHES, indices(SECOND)) == [True] * 7 + [False] * 3
    assert one.batch_exists(HASHES[4:], after(*HASHES[:4])) == 3
    assert cache.evict(7) == 7
    # A beginning that has gone: its rest is of no use.
    assert one.batch_set_v1(HASHES[4:], indices(rest), after(*HASHES[:4])) == [False] * 6
    assert one.figures["absent_pages"] == 6
    assert one.batch_get_v1(HASHES, indices(SECOND)) == [False] * 10


def test_a_full_cache_saves_what_it_can(made: Made) -> None:
    pool = MHATokenToKVPoolHost()
    one = made(pool, size="4KiB")  # a page has 1 KiB
    cache = one._link.current.cache
    assert cache.pages < 10
    pool.compute(FIRST)
    saved = one.batch_set_v1(HASHES, indices(FIRST))
    assert saved == [True] * sum(saved) + [False] * (10 - sum(saved))
    assert 0 < sum(saved) <= cache.pages
    assert one.batch_exists(HASHES) == sum(saved)


def test_a_clear_is_of_one_launch(made: Made) -> None:
    pool = MHATokenToKVPoolHost()
    one, keeps = made(pool), made(pool, on_reset="keep")
    pool.compute(FIRST)
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))
    assert one.clear() is keeps.clear() is True
    assert one.batch_exists(HASHES) == 0
    assert keeps.batch_exists(HASHES) == 10
    assert all(one.batch_set_v1(HASHES[:4], indices(FIRST[: 4 * PAGE])))
    assert made(pool).batch_exists(HASHES) == 4  # made again by the same launch
    one.clear()
    assert one.batch_exists(HASHES) == 0


def test_a_flush_is_a_clear(made: Made) -> None:
    """SGLang does not say it to a storage: it empties the host pool."""
    pool, other = MHATokenToKVPoolHost(), MHATokenToKVPoolHost()
    one, keeps = made(pool), made(other, on_reset="keep")
    pool.compute(FIRST)
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))
    pool.clear()
    assert one.batch_exists(HASHES) == 0
    other.clear()
    assert keeps.batch_exists(HASHES) == 10
    clears = one.clears
    one.close()
    pool.clear()
    assert (one.clears, pool.cleared, other.cleared) == (clears + 1, 2, 1)


def test_a_flush_without_a_storage_is_a_clear_of_the_next(made: Made) -> None:
    pool = MHATokenToKVPoolHost()
    one = made(pool)
    pool.compute(FIRST)
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))
    one.close()
    assert made(pool).batch_exists(HASHES) == 10  # it was away, and nothing has changed
    made(pool).close()
    pool.clear()
    clears, again = one.clears, made(pool)
    assert again.batch_exists(HASHES) == 0
    assert made(pool, on_reset="keep").batch_exists(HASHES) == 10
    pool.clear()  # wrapped once, whatever was made over it
    assert (again.clears, pool.cleared) == (clears, 2)


def test_ranks_that_find_no_latents_after_a_clear_say_so(made: Made) -> None:
    config = {"is_mla_model": True}
    ranks = [made(MLATokenToKVPoolHost(), rank, 2, config) for rank in range(2)]
    for one in ranks:
        one.clear()
        one.clear()
    assert [one.voice.count for one in ranks] == [0, 2]


def test_a_flush_that_takes_long_is_said_and_counted(
    made: Made, hicache: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = MHATokenToKVPoolHost()
    one = made(pool)
    pool.clear()
    assert one.figures["slow_calls"] == 0
    monkeypatch.setattr(hicache, "SLOW", 0.0)
    pool.clear()
    assert one.figures["slow_calls"] == 1
    assert "HiCache of rank 0: clear took" in caplog.text


def test_the_storage_service_is_asked_by_a_lookup(
    made: Made,
    hicache: Any,
    segment_name: str,
    wait_until: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hicache, "READ", 60.0)  # other work may hold it up
    pool = MHATokenToKVPoolHost()
    one = made(pool, storage="service:")
    values = pool.compute(FIRST)
    with serving(segment_name) as service, Cache.attach(segment_name) as cache:
        assert all(one.batch_set_v1(HASHES, indices(FIRST)))
        wait_until(lambda: service.stats().tier.stored == 10, "the pages")
        cache.evict(cache.pages)
        with ThreadPoolExecutor(1) as hicache_thread:  # that which made it would not wait
            assert hicache_thread.submit(one.batch_exists, HASHES).result() == 10
        assert all(one.batch_get_v1(HASHES, indices(SECOND)))
    np.testing.assert_array_equal(pool.tokens(SECOND), values)


@pytest.mark.slow
def test_a_storage_is_read_by_a_lookup(made: Made, segment_name: str, tmp_path: Path) -> None:
    pool = MHATokenToKVPoolHost()
    disk = f"disk:{tmp_path}/disk?capacity=64MiB"
    one = made(pool, storage=disk)
    values = pool.compute(FIRST)
    assert all(one.batch_set_v1(HASHES[:4], indices(FIRST[: 4 * PAGE])))
    rest = FIRST[4 * PAGE :]
    assert all(one.batch_set_v1(HASHES[4:], indices(rest), after(*HASHES[:4])))
    one.close()
    Segment.unlink(segment_name)
    other = made(pool, storage=disk)
    with ThreadPoolExecutor(1) as hicache_thread:  # that which made it would not wait
        ask = partial(hicache_thread.submit, other.batch_exists)
        assert ask(HASHES[:4]).result() == 4
        assert ask(HASHES[4:], after(*HASHES[:4])).result() == 6
    assert other.figures["read_pages"] == 10
    assert all(other.batch_get_v1(HASHES, indices(SECOND)))
    np.testing.assert_array_equal(pool.tokens(SECOND), values)


def test_nothing_is_raised(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(5, "on purpose")

    pool = MHATokenToKVPoolHost()
    one = made(pool)
    assert one.batch_set_v1(HASHES, indices(FIRST[:-1])) == [False] * 10
    assert one.voice.count == 1
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))
    assert one.batch_get_v1(HASHES, indices(SECOND[:-1])) == [False] * 10
    assert one.voice.count == 2
    monkeypatch.setattr(one, "_encoded", fails)
    assert one.batch_exists(HASHES) == 0
    assert one.batch_exists_v2(HASHES).kv_hit_pages == 0
    assert one.batch_get_v1(HASHES, indices(SECOND)) == [False] * 10
    assert one.batch_set_v1(HASHES, indices(FIRST)) == [False] * 10
    assert one.voice.count == 6
    assert one.batch_exists([]) == 0
    assert one.batch_set_v1([], indices(FIRST[:0])) == []
    assert one.get("a") is None
    assert one.batch_get(["a", "b"]) == [None, None]
    assert one.set("a") is one.batch_set(["a"]) is False


def test_disabled_and_removed(made: Made, segment_name: str) -> None:
    now = [0.0]
    pool = MHATokenToKVPoolHost()
    one = made(pool)
    one._clock = lambda: now[0]
    values = pool.compute(FIRST)
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))
    _switch(segment_name, None, 1)
    assert one.batch_exists(HASHES) == 0
    assert one.voice.count == 1
    _switch(segment_name, None, 0)
    assert one.batch_exists(HASHES) == 0  # not asked for a while
    now[0] = engine_cache.REST
    assert one.batch_exists(HASHES) == 10
    Segment.unlink(segment_name, force=True)
    assert one.batch_get_v1(HASHES, indices(SECOND)) == [False] * 10
    assert one.voice.count == 2
    while one._link.current is None:
        pass
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))
    assert all(one.batch_get_v1(HASHES, indices(SECOND)))
    np.testing.assert_array_equal(pool.tokens(SECOND), values)


def test_kinds_of_fp8_share_nothing(hicache: Any) -> None:
    """Host pools keep them all as bytes."""
    server, model, release = hicache._engine()
    pool = MHATokenToKVPoolHost()
    pool.dtype = torch.uint8
    found = set()
    for kind in ("fp8_e5m2", "fp8_e4m3"):
        server.kv_cache_dtype = kind
        found.add(hicache.describe_host(server, model, pool, (0, 1), release)[0].fingerprint)
    assert len(found) == 2


def test_other_pools_beside_kv_are_refused(made: Made) -> None:
    pool = MHATokenToKVPoolHost()
    one = made(pool)
    pool.compute(FIRST)
    one.register_mem_host_pool_v2(pool, "kv")
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))
    state = SimpleNamespace(name="mamba", keys=HASHES[-1:])
    assert one.batch_exists_v2(HASHES, [state]) == PoolTransferResult(0, {})
    assert one.batch_get_v2([state]) == one.batch_set_v2([state]) == {"mamba": [False]}
    one.register_mem_host_pool_v2(pool, "mamba")
    assert one.voice.count == 1
    assert one.batch_exists(HASHES) == 0
    assert one.batch_set_v1(HASHES, indices(FIRST)) == [False] * 10


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"layout": "page_unified"}, {}),
        ({"kv_buffer": None}, {}),
        ({"storage_format_tag": "fp4"}, {}),
        ({"target_layer_num": 1}, {}),
        ({"head_dim": 8, "v_head_dim": 4}, {}),
        ({}, {"pp_size": 2}),
        ({}, {"attn_cp_size": 2}),
        ({}, {"dcp_size": 2}),
        ({}, {"tp_size": 2}),
    ],
)
def test_what_is_not_served_is_a_miss(
    made: Made, changes: dict[str, Any], config: dict[str, Any]
) -> None:
    pool = MHATokenToKVPoolHost()
    vars(pool).update(changes)
    one = made(pool, config=config)
    assert one.voice.count == 1
    assert one.batch_exists(HASHES) == 0
    assert one.batch_set_v1(HASHES, indices(FIRST)) == [False] * 10
    assert one.clear() is True
    assert one.voice.count == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [({"interface_v1": 0}, "expected interface_v1 1, found 0"), ({"sizes": 1}, "found sizes")],
)
def test_wrong_options_end_the_start(made: Made, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(MHATokenToKVPoolHost(), **options)


def test_a_release_before_the_linker_is_asked_for_its_model(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = sys.modules.pop("sglang.srt.runtime_context")
    arguments: Any = ModuleType("sglang.srt.server_args")
    arguments.get_global_server_args = context.get_server_args
    models: Any = ModuleType("sglang.srt.configs.model_config")
    models.ModelConfig = SimpleNamespace(from_server_args=lambda _: context.process_model_config())
    for module in (arguments, models, ModuleType("sglang.srt.configs")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    one = made(MHATokenToKVPoolHost())
    assert one.voice.count == 0
    assert all(one.batch_set_v1(HASHES, indices(FIRST)))


def test_the_thread_of_the_model_waits_for_no_storage(
    made: Made, segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, waits = MHATokenToKVPoolHost(), []
    disk = f"disk:{tmp_path}/disk?capacity=64MiB"
    one = made(pool, storage=disk)
    monkeypatch.setattr(StorageTask, "wait", lambda self, limit: waits.append(limit))
    assert one.batch_exists(HASHES[:4]) == 0
    assert waits == []
    with ThreadPoolExecutor(1) as hicache_thread:
        assert hicache_thread.submit(one.batch_exists, HASHES[:4]).result() == 0
    assert waits == [importlib.import_module(type(one).__module__).READ]
    monkeypatch.undo()


def test_what_is_not_worth_saving_is_not_saved(made: Made, segment_name: str) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    bytes_of_page = made(pool).usable().cache.page_bytes
    Segment.unlink(segment_name, force=True)
    one = made(pool, size=learned_traffic.PAGES * bytes_of_page, eviction="hz", admission=True)
    index = one.usable().cache.index
    assert index.pages == learned_traffic.PAGES
    learned_traffic.occupied(index)
    pool.compute(FIRST)
    assert one.batch_set_v1(HASHES, indices(FIRST)) == [False] * 10
    index.drop(prompt(0, learned_traffic.PROMPT)[4:])
    others = [f"{number:064x}" for number in range(10)]
    assert one.batch_set_v1(others, indices(FIRST))[:6] == [True] * 6  # as many are free
    refused(ConfigError, "where several ranks save", made, pool, 0, 2, admission=True)
