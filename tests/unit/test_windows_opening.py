"""From an engine's tensors to a manager of full attention and windows, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.refusals import refused

from lightcache import cache_name
from lightcache.errors import ConfigError, InUse, LayoutMismatch
from lightcache.groups import Rule
from lightcache.hybrid import open_hybrid
from lightcache.hybrid.checkpoints import Tier
from lightcache.hybrid.opening import Windows
from lightcache.manager import ManagedBlocks, Prompt

WINDOW, CHUNK = Rule.window(5), Rule.chunk(16)
PROMPT = Prompt(list(range(42)))
STATES = {"conv": [np.zeros((4, 30))]}


def layers(count: int, blocks: int = 32) -> list[Any]:
    return [np.zeros((2, blocks, 4, 2, 8), np.float32) for _ in range(count)]


def open_(name: str, windows: Any = None, **how: Any) -> Windows:
    given: dict[str, Any] = {"model": "m", "axes": "kbnhc", "page_tokens": 4, "pages": 64}
    given["windows"] = {WINDOW: layers(4), CHUNK: layers(1)} if windows is None else windows
    return open_hybrid(layers(2), name=f"{name}-pool", secret=bytes(16), **{**given, **how})


def test_without_a_name_each_configuration_has_a_cache(segment_name: str) -> None:
    how = {"model": f"{segment_name}@1", "axes": "kbnhc", "pages": 64, "secret": bytes(16)}
    windows = {"windows": {WINDOW: layers(4)}, "page_tokens": 4}
    with open_hybrid(layers(2), **how, **windows) as one:
        fingerprint = one.kv.cache.fingerprint
        assert one.kv.cache.name == cache_name(how["model"], fingerprint)
        with open_hybrid(layers(2), **how, **{**windows, "page_tokens": 8}) as other:
            assert other.kv.cache.name != one.kv.cache.name


def test_the_bytes_of_all_groups_come_back(segment_name: str) -> None:
    full, window, chunk = layers(2), layers(4, 14), layers(1, 15)
    tensors = {"prefix": full, WINDOW.name: window, CHUNK.name: chunk}
    how: dict[str, Any] = {"model": "m", "axes": "kbnhc", "page_tokens": 4, "pages": 64}
    with open_hybrid(
        full,
        name=segment_name,
        windows={WINDOW: window, CHUNK: chunk},
        secret=bytes(16),
        minimums={WINDOW.name: 1},
        **how,
    ) as opened:
        groups = opened.kv.cache.index.groups()
        assert [group.name for group in groups] == ["kv", "window5", "chunk16"]
        assert [group.minimum_pages for group in groups] == [0, 1, 0]
        manager = opened.manager(f"{segment_name}-gpu", every=8)
        assert (manager.parts.windows.every, [each.blocks for each in manager.windows]) == (
            8,
            [14, 15],
        )
        manager.plan("a", PROMPT)
        manager.take("a")
        for end in (20, 42):
            tables = manager.allocate("a", end)
            for name, each in tensors.items():
                for number, tensor in enumerate(each):
                    for token in range(end - 22 if end == 42 else 0, end):
                        tensor[:, tables[name][token // 4], token % 4] = 100 * number + token
            manager.commit("a", end)
        manager.release("a")
        while manager.poll():
            pass
        # A page of four layers takes two of the cache; chunks begin at 16 and 32.
        ready = {group.name: group.pages for group in opened.kv.cache.index.groups()}
        assert ready == {"kv": 10, "window5": 20, "chunk16": 6}
        for blocks in (manager.manager.device, *manager.windows):
            blocks.index.evict(64)
        for each in tensors.values():
            for tensor in each:
                tensor[:] = 0
        manager.plan("b", PROMPT)
        match = manager.take("b")
        assert match.usable == 40
        assert match.tiers == {"window5": Tier.HOST, "chunk16": Tier.HOST}
        tables = manager.allocate("b", 40)
        manager.load("b").wait(60)
        for name, first in (("prefix", 0), ("window5", 35), ("chunk16", 32)):
            for number, tensor in enumerate(tensors[name]):
                for token in range(first, 40):
                    rows = tensor[:, tables[name][token // 4], token % 4]
                    assert (rows == 100 * number + token).all(), (name, number, token)


def test_all_is_closed_by_one_with(segment_name: str) -> None:
    """With a request that runs, and a storage of the manager's own."""
    for _ in range(2):  # whose names are free again
        with open_(segment_name) as opened:
            manager = opened.manager(f"{segment_name}-gpu", storage="memory:")
            manager.plan("a", PROMPT)
            manager.take("a", wait=True)
            manager.allocate("a", 42)
            manager.commit("a", 42)


def test_a_manager_that_cannot_be_made_leaves_nothing(segment_name: str) -> None:
    with open_(segment_name) as opened:
        taken = ManagedBlocks(f"{segment_name}-gpu-chunk16", block_tokens=4, blocks=4)
        refused(InUse, "", opened.manager, f"{segment_name}-gpu")
        taken.close()
        opened.manager(f"{segment_name}-gpu")


def test_what_is_refused(segment_name: str) -> None:
    refused(ConfigError, "found neither; a model of full attention alone", open_, segment_name, {})
    for rule in (Rule.prefix(), Rule.point(), "window"):
        wrong = {rule: layers(1)}
        refused(ConfigError, "windows: expected Rule.window", open_, segment_name, wrong)
    for name in ("index", "slots", "layers"):
        how: dict[str, Any] = {name: 1}
        refused(ConfigError, "are of states; leave them out", open_, segment_name, **how)
    refused(ConfigError, "kv_groups follow", open_, segment_name, kv_groups=("a",))
    with open_(segment_name):
        other = {WINDOW: layers(3), CHUNK: layers(1)}
        refused(LayoutMismatch, "", open_, segment_name, other)


def test_padding_is_said(segment_name: str, caplog: Any) -> None:
    wide = [np.zeros((2, 8, 16, 16, 64), np.float32)]
    narrow = [np.zeros((2, 8, 16, 9, 64), np.float32) for _ in range(2)]
    how: dict[str, Any] = {"model": "m", "axes": "kbnhc", "page_tokens": 16, "pages": 9}
    with open_hybrid(wide, name=segment_name, windows={WINDOW: narrow}, secret=bytes(16), **how):
        pass
    assert "window5: 147456 bytes take up 2 x 131072 bytes of the pool" in caplog.text
