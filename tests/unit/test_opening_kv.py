"""`open_kv`: from an engine's tensors to a cache, transfers and a manager, in one call."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest
from support.refusals import refused

from lightcache import cache_name
from lightcache.errors import ConfigError, Detached, InUse, LayoutMismatch
from lightcache.manager import KVCacheManager, ManagerConfig, Prompt, open_kv
from lightcache.shm import Segment
from lightcache.shm.listing import read_segment

BLOCKS, BLOCK, HEADS, DIM, LAYERS, PAGE = 12, 4, 2, 8, 3, 8
SHAPES = {
    "kbnhc": (2, BLOCKS, BLOCK, HEADS, DIM),
    "bknhc": (BLOCKS, 2, BLOCK, HEADS, DIM),
    "bhnc": (BLOCKS, HEADS, BLOCK, 2 * DIM),
    "lbhnc": (LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM),
    "bnhc": (BLOCKS, BLOCK, HEADS, 2 * DIM),
    "bnc": (BLOCKS, BLOCK, 5),
}
TOKENS = list(range(3, 3 + 3 * PAGE))
MODEL = {"model": "tiny@1", "pages": 16, "page_tokens": PAGE}


def kv_caches(axes: str, dtype: Any = np.float16) -> Any:
    """Full of distinct numbers."""
    random = np.random.default_rng(1)
    one = [random.standard_normal(SHAPES[axes]).astype(dtype) for _ in range(LAYERS)]
    return one[0] if "l" in axes else one


def rows(tensors: Any, axes: str, slots: Any) -> np.ndarray:
    """The numbers of some token slots, with the token first."""
    whole = np.stack(tensors) if isinstance(tensors, list) else tensors
    letters = axes if "l" in axes else "l" + axes
    ordered = np.moveaxis(whole, [letters.index("b"), letters.index("n")], [0, 1])
    return ordered.reshape(BLOCKS * BLOCK, -1)[slots]


@pytest.mark.parametrize("axes", SHAPES)
def test_what_one_engine_offloads_another_loads(segment_name: str, axes: str) -> None:
    mine, theirs = kv_caches(axes), kv_caches(axes)
    from_slots, to_slots = np.arange(24)[::-1].copy(), np.arange(20, 44)
    kept = rows(mine, axes, from_slots).copy()
    with open_kv(mine, name=segment_name, axes=axes, **MODEL) as kv:
        keys = kv.cache.hash_pages(TOKENS)
        kv.offload(keys, from_slots).wait()
        with open_kv(theirs, name=segment_name, axes=axes, **MODEL) as other:
            load = other.load(other.cache.hash_pages([*TOKENS, *TOKENS]), np.tile(to_slots, 2))
            load.wait()
            assert load.tokens == 3 * PAGE
            assert np.array_equal(rows(theirs, axes, to_slots), kept)


def test_a_manager_of_all_blocks(segment_name: str) -> None:
    with open_kv(kv_caches("kbnhc"), name=segment_name, axes="kbnhc", **MODEL) as kv:
        manager = kv.manager(f"{segment_name}-gpu0")
        assert isinstance(manager, KVCacheManager)
        assert (manager.device.blocks, manager.device.block_tokens) == (BLOCKS, BLOCK)
        manager.plan("a", Prompt(TOKENS))
        manager.take("a")
        manager.allocate("a", len(TOKENS))
        manager.commit("a", len(TOKENS))
        manager.release("a")
        assert manager.plan("b", Prompt([*TOKENS, 1])).usable == len(TOKENS)
        manager.cancel("b")


def test_counters_that_were_removed_stop_nothing(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache works on, and the log has it once."""
    with open_kv(kv_caches("kbnhc"), name=segment_name, axes="kbnhc", **MODEL) as kv:
        manager = kv.manager(f"{segment_name}-gpu0", config=ManagerConfig(failures=1))
        manager.plan("a", Prompt(TOKENS))
        manager.take("a")
        manager.release("a")
        assert manager.node_stats().requests == 1
        assert kv._counters is not None
        assert Segment.unlink(kv._counters._counters.segment.name, force=True)
        for name in "bcd":
            manager.plan(name, Prompt(TOKENS))
            manager.take(name)
            manager.release(name)
            manager._add_at = 0.0
            manager.poll()
        assert manager.stats().requests == 4
        assert (manager.stats().errors, manager.disabled) == (0, False)
        refused(Detached, "", manager.node_stats)
    assert caplog.text.count("does not count for the node") == 1


def test_engines_of_a_cache_add_up_and_a_fork_adds_nothing(segment_name: str) -> None:
    how = {"name": segment_name, "axes": "kbnhc", **MODEL}
    with open_kv(kv_caches("kbnhc"), **how) as kv, open_kv(kv_caches("kbnhc"), **how) as other:
        managers = [kv.manager(f"{segment_name}-gpu0"), other.manager(f"{segment_name}-gpu1")]
        for manager in managers:
            manager.plan("a", Prompt(TOKENS))
            manager.take("a")
            manager.release("a")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for manager in managers:
                    manager._add_to_node()  # says that it counts no more
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        managers[0].node_stats()
        assert managers[1].node_stats().requests == 2


def test_leaving_closes_all_of_it(segment_name: str) -> None:
    with open_kv(kv_caches("kbnhc"), name=segment_name, axes="kbnhc", **MODEL) as kv:
        manager = kv.manager(f"{segment_name}-gpu0")
        kv.offload(kv.cache.hash_pages(TOKENS), np.arange(24))
    for closed in (lambda: manager.plan("a", Prompt(TOKENS)), lambda: kv.cache.stats()):
        refused(Exception, "close", closed)


def test_pages_that_are_there_are_not_copied(segment_name: str) -> None:
    with open_kv(kv_caches("kbnhc"), name=segment_name, axes="kbnhc", **MODEL) as kv:
        keys = kv.cache.hash_pages(TOKENS)
        kv.offload(keys[:2], np.arange(16)).wait()
        again = kv.offload(keys, np.arange(24))
        again.wait()
        assert again.nbytes == kv.cache.page_bytes


def test_a_refused_call_holds_nothing(segment_name: str) -> None:
    with open_kv(kv_caches("kbnhc"), name=segment_name, axes="kbnhc", **MODEL) as kv:
        keys = kv.cache.hash_pages(TOKENS)
        for call in (kv.offload, kv.load):
            refused(ConfigError, "3 pages, 24, found 23", call, keys, np.arange(23))
            refused(ConfigError, "whole numbers", call, keys, np.zeros(24))
        assert kv.cache.stats().free == 16
        kv.offload(keys, np.arange(24)).wait()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"axes": "kbnq"}, "axes"),
        ({"axes": "kbnh"}, "expected 4 axes"),
        ({"axes": "bnhc", "value_dim": DIM}, "expected"),
        ({"fingerprint": "x"}, "fingerprint follow"),
        ({"page_bytes": 4096}, "page_bytes follow"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"tensors": []}, "at least one layer"),
        ({"tensors": "all"}, "open_kv"),
        ({"tensors": [1, 2]}, "open_kv"),
        ({"pages": None}, "pages"),
    ],
)
def test_refusals(segment_name: str, how: dict[str, Any], says: str) -> None:
    given = {"tensors": kv_caches("kbnhc"), "axes": "kbnhc", **MODEL, **how}
    refused(ConfigError, says, open_kv, name=segment_name, **given)


def test_rows_that_are_no_key_and_value(segment_name: str) -> None:
    odd = [np.zeros((BLOCKS, BLOCK, HEADS, 5), np.float16)]
    with pytest.raises(ConfigError, match="a key and a value, found 5"):
        open_kv(odd, name=segment_name, axes="bnhc", **MODEL)


def test_kv_of_other_tensors_is_not_mixed(segment_name: str) -> None:
    with open_kv(kv_caches("kbnhc"), name=segment_name, axes="kbnhc", **MODEL):
        for tensors, model in (
            (kv_caches("kbnhc", np.float32), {}),
            (kv_caches("kbnhc"), {"model": "x"}),
        ):
            with pytest.raises(LayoutMismatch):
                open_kv(tensors, name=segment_name, axes="kbnhc", **{**MODEL, **model})


def test_without_a_name_each_configuration_has_a_cache(segment_name: str) -> None:
    given = {**MODEL, "model": f"{segment_name}@5206a32", "axes": "kbnhc"}
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(open_kv(tensors, **{**given, **how}))
            for tensors, how in (
                (kv_caches("kbnhc"), {}),
                (kv_caches("kbnhc"), {}),
                (kv_caches("kbnhc", np.float32), {}),
                (kv_caches("kbnhc"), {"model": f"{segment_name}@0e9e39f"}),
                (kv_caches("kbnhc"), {"page_tokens": 2 * given["page_tokens"]}),
            )
        ]
        names = [kv.cache.name for kv in opened]
        assert names[0] == names[1] == cache_name(given["model"], opened[0].cache.fingerprint)
        assert len(set(names)) == 4
        for name in names:
            info = read_segment(name)
            assert info is not None
            assert info.family == segment_name


def test_two_managers_of_one_index(segment_name: str) -> None:
    with open_kv(kv_caches("kbnhc"), name=segment_name, axes="kbnhc", **MODEL) as kv:
        kv.manager(f"{segment_name}-gpu0")
        refused(InUse, "", kv.manager, f"{segment_name}-gpu0")
