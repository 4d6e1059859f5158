"""Pages guaranteed to a namespace: others' room-making leaves them."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.index_view import IndexView
from support.keys import Keys, array, pair, prompt
from support.refusals import refused

from lightcache import Cache, ConfigError, NoSpace, PageIndex, PermissionDenied, layout
from lightcache.layout import MAX_PAGES as MOST
from lightcache.namespaces import Namespace
from lightcache.runs import Run
from lightcache.shm import Segment, names
from lightcache.shm.listing import list_segments
from lightcache.shm.objects import OpenObject

PAGES = 16


def record(index: PageIndex, namespace: Namespace) -> layout.NamespaceRecord:
    at = index.segment.address + IndexView(index).geometry.namespaces + 128 * namespace.id
    return layout.NamespaceRecord.from_address(at)


def test_a_chain_at_its_bound_leaves_it(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=64) as index:
        mine = index.namespace("w", minimum_pages=32)

        def meeting(name: int) -> Keys:
            return array([pair([name], 7)])

        for name in range(32):
            with index.reserve(meeting(name), namespace=mine) as new:
                new.publish()
        with index.reserve(meeting(99)) as got:
            assert got.missing.tolist() == [0]
        index.namespace("w", minimum_pages=31)
        with index.reserve(meeting(99)) as got:
            assert got.new.tolist() == [0]


def test_what_cannot_be_promised(index: PageIndex) -> None:
    mine = index.namespace("w", quota_pages=6, minimum_pages=4)
    index.namespace("v", minimum_pages=10)
    refused(ConfigError, r"7 pages.*quota of 6", index.namespace, "w", minimum_pages=7)
    refused(ConfigError, r"4 pages.*quota of 3", index.namespace, "w", quota_pages=3)
    refused(
        ConfigError,
        "3 pages.*the 14 pages that.*index of 16 p",
        index.namespace,
        "u",
        minimum_pages=3,
    )
    refused(ConfigError, "13 pages", index.namespace, "w", quota_pages=0, minimum_pages=13)
    assert (record(index, mine).quota, record(index, mine).minimum) == (6, 4)
    assert index.namespace("u", minimum_pages=2).id == 3, "nothing was made before"
    assert index.namespace("w", quota_pages=0, minimum_pages=0) == mine
    assert (record(index, mine).quota, record(index, mine).minimum) == (0, 0)


def test_what_is_not_given_stays(index: PageIndex) -> None:
    mine = index.namespace("w", quota_pages=6, minimum_pages=4)
    index.namespace("w", quota_pages=8)
    assert (record(index, mine).quota, record(index, mine).minimum) == (8, 4)
    index.namespace("w", minimum_pages=5)
    assert (record(index, mine).quota, record(index, mine).minimum) == (8, 5)


def test_a_damaged_promise_is_named_and_forgotten(index: PageIndex) -> None:
    mine = index.namespace("w", quota_pages=6, minimum_pages=4)
    for value in (7, 1 << 31):
        record(index, mine).minimum = value
        assert index.check().invariant == 65
        index.repair()
        assert index.check().clean
        assert record(index, mine).minimum == 0


STATE = Run(1, 3)


def test_a_group_is_left_its_minimum(index: PageIndex) -> None:
    """Others make room down to it; the group's own calls take it."""

    def put(seed: int) -> int:
        keys = STATE.keys(array([pair([seed], 1)]))
        with index.reserve(keys, independent=True, run=STATE) as new:
            new.publish()
            return len(new.pages)

    index.set_minimum(STATE, 4)  # of whole states: 6 pages
    assert [put(seed) for seed in range(4)] == [3] * 4
    assert index.evict(16) == 6
    assert [(group.pages, group.minimum_pages) for group in index.groups()] == [(6, 6)]
    with index.reserve(prompt(9, 11)) as new:
        assert len(new.missing) == 1
        assert "guaranteed to others" in new.why
        assert index.groups()[0].pages == 10
    assert index.evict(16, group=1) == 6
    assert index.check().clean


def test_what_cannot_be_promised_to_a_group(segment_name: str, index: PageIndex) -> None:
    index.namespace("w", minimum_pages=6)
    index.set_minimum(Run(2), 4)
    refused(ConfigError, r"group 1: a minimum of 9 pages .*the 10 pages.*index of 16 pages",
            index.set_minimum, STATE, 7)  # fmt: skip
    refused(ConfigError, "7 pages.* the 10 pages", index.namespace, "v", minimum_pages=7)
    refused(ConfigError, "expected 0 to", index.set_minimum, STATE, -1)
    refused(ConfigError, "group 1: a minimum of", index.set_minimum, STATE, (1 << 32) - 2)
    index.set_minimum(STATE, 6)
    assert [group.minimum_pages for group in index.groups()] == [6, 4]
    index.set_minimum(STATE, 0)
    assert [group.number for group in index.groups()] == [2]
    with PageIndex.attach(segment_name, readonly=True) as reader:
        refused(PermissionDenied, "read", reader.set_minimum, STATE, 1)


def test_sizes_of_a_cache(segment_name: str) -> None:
    how: dict[str, Any] = {"page_bytes": 4096, "fingerprint": "f", "secret": bytes(16)}
    with Cache.create(segment_name, size="64KiB", **how) as cache:
        mine = cache.namespace("w", quota="8191", minimum=1)
        assert (record(cache.index, mine).quota, record(cache.index, mine).minimum) == (1, 1)
        cache.namespace("w", quota="1TiB", minimum="9 KB")
        assert (record(cache.index, mine).quota, record(cache.index, mine).minimum) == (MOST, 3)
        cache.namespace("w", quota=0)
        assert (record(cache.index, mine).quota, record(cache.index, mine).minimum) == (0, 3)
        refused(ConfigError, r"quota: expected a page of 4096 bytes.*'4KB'",
                cache.namespace, "w", quota="4KB")  # fmt: skip
        for wrong in ("a lot", -1, 1.5, True):
            refused(ConfigError, "quota: expected", cache.namespace, "w", quota=wrong)
            refused(ConfigError, "minimum: expected", cache.namespace, "w", minimum=wrong)
        cache.index.set_minimum(STATE, 4)
        refused(ConfigError, r"11 pages \(44.0 KiB\).*6 pages \(24.0 KiB\).*16 pages \(64.0 KiB\)",
                cache.namespace, "w", minimum="44KiB")  # fmt: skip
        refused(ConfigError, r"has one group, found \['kv'\]",
                cache.set_minimums, {"kv": 1})  # fmt: skip


def test_minimums_of_groups_by_name(segment_name: str) -> None:
    """Where a cache is opened, or later; each handle that opens it may change them."""
    how: dict[str, Any] = {"page_bytes": 4096, "fingerprint": "f", "secret": bytes(16)}
    how |= {"size": "64KiB", "name": segment_name}

    def least(cache: Cache) -> list[int]:
        return [group.minimum_pages for group in cache.index.groups()]

    with Cache.open(
        **how, kv_groups=("kv", "states"), shared=True, minimums={"states": "13KiB"}
    ) as cache:
        assert least(cache) == [0, 4]
        Cache.open(**how, minimums={"kv": 4096}, shared=True).close()
        assert least(cache) == [1, 4]
        cache.set_minimums({"kv": "60KiB", "states": 0})  # the room of one goes to the other
        assert least(cache) == [15, 0]
        cache.set_minimums({"kv": 0, "states": "64KiB"})
        assert least(cache) == [0, 16]
        for wrong in ("a lot", -1, 1.5, True):
            refused(ConfigError, "minimum: expected", cache.set_minimums, {"kv": wrong})
        refused(ConfigError, r"pages \(16.0 TiB\)", cache.set_minimums, {"states": "3EiB"})
        refused(ConfigError, "sizes by group.*'1MB'", cache.set_minimums, "1MB")
        refused(ConfigError, r"'kv', 'states'\], found \['window5'\]",
                Cache.open, **how, minimums={"window5": 1, "states": 0})  # fmt: skip
        assert least(cache) == [0, 16]
        assert len(cache.index.clients()) == 1, "the refused one has left"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "minimums", [{"kv": "60KiB", "states": "5KiB"}, {"window5": 1}, {"kv": "a lot"}, "1MB"]
)
def test_a_refused_minimum_makes_no_cache(segment_name: str, minimums: Any, shared: bool) -> None:
    how: dict[str, Any] = {"page_bytes": 4096, "fingerprint": "f", "secret": bytes(16)}
    how |= {"size": "64KiB", "name": segment_name, "kv_groups": ("kv", "states")}
    how |= {"lifetime": "persistent", "shared": shared}
    refused(ConfigError, "minimum", Cache.open, **how, minimums=minimums)
    assert segment_name not in [info.name for info in list_segments()]
    assert not names.dependents(segment_name)
    with Cache.open(**how, minimums={"kv": "60KiB", "states": "4KiB"}) as cache:
        assert [group.minimum_pages for group in cache.index.groups()] == [15, 1]
    refused(ConfigError, "minimum", Cache.open, **how, minimums=minimums)
    with Cache.attach(segment_name, secret=bytes(16)) as cache:  # it was there before, and stays
        assert [group.minimum_pages for group in cache.index.groups()] == [15, 1]
    Segment.unlink(segment_name)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"minimums": {"kv": "60KiB", "states": "8KiB"}}, ConfigError, "at most its 16 pages"),
        ({"minimums": {"window5": 1}}, ConfigError, "found .'window5'"),
        ({"pages": 1 << 20, "size": None, "page_bytes": "1GiB"}, NoSpace, "the pool needs"),
        ({"numa": "gpu:1234"}, ConfigError, "gpu:1234"),
        ({"group": 4321}, PermissionDenied, "for group 4321"),
    ],
)
def test_what_cannot_be_made_replaces_nothing(
    segment_name: str,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Any,
    kind: type[Exception],
    message: str,
) -> None:
    how: dict[str, Any] = {"page_bytes": 4096, "fingerprint": "f", "secret": bytes(16)}
    how |= {"size": "64KiB", "name": segment_name, "kv_groups": ("kv", "states")}
    keys = np.arange(1, 3, dtype=np.uint64).reshape(1, 2)
    with Cache.open(**how, lifetime="persistent") as old, old.reserve(keys) as new:
        new.publish()
    other = {**how, "fingerprint": "other", "replace": True, "shared": "minimums" in wrong}
    if "group" in wrong:
        monkeypatch.setattr(OpenObject, "check_access", lambda self, group: None)
        monkeypatch.setattr(os, "fchown", Mock(side_effect=PermissionError("of another group")))
    refused(kind, message, Cache.open, **{**other, **wrong})
    monkeypatch.undo()
    with Cache.open(**how) as old:
        assert old.peek(keys) == 1, "it is the old one, with its pages"
    with Cache.open(**other, minimums={"kv": "60KiB", "states": "4KiB"}) as cache:
        assert cache.peek(keys) == 0
        assert [group.minimum_pages for group in cache.index.groups()] == [15, 1]
