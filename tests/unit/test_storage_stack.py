"""Storages one behind the other: conformance, who is asked for what, promotion, and URLs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.disks import disk
from support.refusals import refused
from support.stacks import ALL, KEYS, Noting, flaky, get, has, noting, put

from lightcache import ConfigError, Detached, StorageError
from lightcache.storage import MemoryStorage, StorageSpec, open_storage, stacked
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.stacked import Promoter, Promotion, StackedStorage
from lightcache.storage.testing import FlakyStorage
from lightcache.storage.testing.conformance import CHECKS, MOST_PAGES, PAGE_BYTES, SPEC
from lightcache.storage.urls import check_url

OK, ABSENT, CORRUPT = ReadStatus.OK, ReadStatus.ABSENT, ReadStatus.CORRUPT
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT

STACKS: dict[str, Any] = {
    "memory": lambda spec, where: StackedStorage([MemoryStorage(spec), MemoryStorage(spec)]),
    "small above": lambda spec, where: StackedStorage(
        [MemoryStorage(spec, pages=5), MemoryStorage(spec)]
    ),
    "small below": lambda spec, where: StackedStorage(
        [MemoryStorage(spec), MemoryStorage(spec, pages=MOST_PAGES)]
    ),
    "disk": lambda spec, where: StackedStorage([MemoryStorage(spec), disk(where, MOST_PAGES)]),
    "disk above": lambda spec, where: StackedStorage(
        [disk(where, MOST_PAGES), MemoryStorage(spec)]
    ),
    "by URLs": lambda spec, where: open_storage(["memory:"] * 2, spec=spec),
    "flaky above": lambda spec, where: open_storage("stack:flaky::memory:|memory:", spec=spec),
    "flaky below": lambda spec, where: open_storage("stack:memory:|flaky::memory:", spec=spec),
    "flaky in front": lambda spec, where: open_storage("flaky::stack:memory:|memory:", spec=spec),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", STACKS)
def test_conformance(name: str, check: Any, where: Path) -> None:
    check(lambda spec: STACKS[name](spec, where))


# ---------------------------------------------------------------- who is asked for what


def test_every_storage_is_given_every_page() -> None:
    stack, upper, lower = noting()
    with stack:
        assert put(stack, range(5)).statuses == (STORED,) * 5
        assert has(upper) == has(lower) == [0, 1, 2, 3, 4]
        assert put(stack, ALL).statuses == (PRESENT,) * 5 + (STORED,) * 3


def test_a_parent_is_passed_on_to_all() -> None:
    stack, upper, lower = noting()
    with stack:
        put(stack, [4, 5], parent=KEYS[3:4])
        assert upper.parents == lower.parents == [3]


def test_the_furthest_that_has_a_page_says_what_became_of_it() -> None:
    stack, upper, lower = noting(upper=[0, 1], lower=[1, 2])
    with stack:
        assert put(stack, range(4)).statuses == (STORED, PRESENT, PRESENT, STORED)
        assert has(upper) == has(lower) == [0, 1, 2, 3]


def test_a_page_is_read_from_the_nearest() -> None:
    stack, upper, lower = noting(upper=ALL, lower=ALL)
    with stack:
        assert get(stack).prefix == 8
        assert (upper.calls, lower.calls) == ([("read", list(ALL))], [])


def test_only_what_is_missing_is_asked_for_below() -> None:
    stack, _, lower = noting(upper=[0, 1, 4], lower=[1, 2, 3, 5])
    with stack:
        result = get(stack, range(7))
        assert result.statuses == (OK,) * 6 + (ABSENT,)
        assert result.reason == ""
        assert lower.calls == [("read", [2, 3, 5, 6])]
        found = stack.stats()
        assert (found.reads_ok, found.reads_absent) == (6, 1)


def test_a_prefix_over_several_storages() -> None:
    stack, upper, lower = noting(upper=[0, 1, 4, 6], lower=[2, 3, 5, 7])
    with stack:
        assert stack.contains(KEYS, timeout=60.0) == 8
        first = [keys[0] for _, keys in lower.calls]
        assert first == [2, 5, 7]  # never for what the nearer one has said it has
    stack, upper, lower = noting(upper=[0, 1], lower=[0, 1, 2])
    with stack:
        assert stack.contains(KEYS, timeout=60.0) == 3
        assert [keys for _, keys in upper.calls] == [[*ALL], [3, 4, 5, 6, 7]]
        assert [keys for _, keys in lower.calls] == [[2, 3, 4, 5, 6, 7]]
    stack, upper, lower = noting(upper=ALL)
    with stack:
        assert stack.contains(KEYS, timeout=60.0) == 8
        assert lower.calls == []


Holes = st.tuples(*[st.sets(st.integers(0, len(KEYS) - 1))] * 2)


@settings(max_examples=60, deadline=None)
@given(levels=Holes, asked=st.lists(st.integers(0, len(KEYS) - 1), max_size=8))
def test_holes_of_every_pattern(levels: Any, asked: list[int]) -> None:
    storages = [MemoryStorage(SPEC) for _ in levels]
    for storage, which in zip(storages, levels, strict=True):
        put(storage, sorted(which))
    union = set().union(*levels)
    with StackedStorage(storages) as stack:
        expected = next((i for i, one in enumerate(asked) if one not in union), len(asked))
        assert stack.contains(KEYS[asked].copy(), timeout=60.0) == expected
        statuses = [OK if one in union else ABSENT for one in asked]
        assert list(get(stack, asked).statuses) == statuses
        assert stack.settle(60.0)
        for number, storage in enumerate(storages):
            served = set().union(*levels[number:]) - set().union(*levels[:number])
            assert set(has(storage)) == levels[number] | (served & set(asked))


def test_pages_go_through_our_memory_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "PIECE", 3 * PAGE_BYTES)
    stack, upper, lower = noting(upper=[3])
    with stack:
        put(stack, ALL, parent=KEYS[7:])
        assert [keys for _, keys in lower.calls] == [[0, 1, 2], [3, 4, 5], [6, 7]]
        assert lower.parents == [7, 2, 5]
        assert get(stack).prefix == 8
        upper.clear(timeout=60.0)
        lower.calls.clear()
        assert get(stack).prefix == 8
        assert [keys for _, keys in lower.calls] == [[0, 1, 2], [3, 4, 5], [6, 7]]
        assert stack.settle(60.0)
        assert has(upper) == [*ALL]


# ---------------------------------------------------------------- promotion


def test_what_came_from_below_is_written_above() -> None:
    stack, upper, lower = noting(upper=[0, 3], lower=ALL)
    with stack:
        assert get(stack).prefix == 8
        assert stack.settle(60.0)
        assert has(upper) == [*ALL]
        assert [keys for what, keys in upper.calls if what == "write"] == [[1, 2], [4, 5, 6, 7]]
        assert upper.parents == [0, 3]  # each behind the page that it hangs on
        assert [one.promoted for one in stack.levels()] == [6, 0]
        lower.calls.clear()
        assert get(stack).prefix == 8
        assert lower.calls == []


def test_a_page_that_is_corrupt_above_is_repaired() -> None:
    stack, upper, _ = noting(upper=ALL, lower=ALL)
    with stack:
        upper.damage(KEYS[2])
        result = get(stack)
        assert (result.prefix, result.reason) == (8, "")
        assert stack.settle(60.0)
        assert has(upper) == [*ALL]
        assert get(upper).prefix == 8
        assert stack.stats().reads_corrupt == 0
        assert [one.stats.reads_corrupt for one in stack.levels()] == [1, 0]


def test_a_page_that_is_corrupt_below_is_not_promoted() -> None:
    stack, _, lower = noting(lower=[0])
    with stack:
        lower.damage(KEYS[0])
        result = get(stack, [0, 1])
        assert result.statuses == (CORRUPT, ABSENT)
        assert "checksum" in result.reason
        assert "storage 2 of 2" in result.reason
        assert stack.settle(60.0)
        assert has(stack) == []


def test_more_than_two_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected two, the nearer first, found 3; a stack has"):
        StackedStorage([MemoryStorage(SPEC) for _ in range(3)])
    for verb in (check_url, lambda url: open_storage(url, spec=SPEC)):
        for urls in (["memory:"] * 3, "stack:memory:|memory:|memory:"):
            refused(ConfigError, r"expected two URLs, the nearer first.*found 3", verb, urls)


def test_more_below_than_there_is_room_above() -> None:
    upper, lower = MemoryStorage(SPEC, pages=3), MemoryStorage(SPEC)
    with StackedStorage([upper, lower]) as stack:
        assert put(stack, ALL).statuses == (STORED,) * 8
        assert has(upper) == [0, 1, 2]
        assert stack.contains(KEYS, timeout=60.0) == 8
        assert get(stack).prefix == 8
        assert stack.settle(60.0)
        assert len(has(upper)) == 3
        assert stack.stats().pages == 8
        assert stack.stats().evicted == 0  # nothing was lost
        assert get(stack).prefix == 8


class Gated(Noting):
    """Waits in front of a write."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.gate, self.arrived = threading.Event(), threading.Event()

    def write(self, *arguments: Any, **how: Any) -> Any:
        self.arrived.set()
        assert self.gate.wait(60.0)
        return super().write(*arguments, **how)


def test_who_reads_does_not_wait_for_promotion() -> None:
    upper, lower = Gated(SPEC), MemoryStorage(SPEC)
    put(lower)
    with StackedStorage([upper, lower], promote_bytes=4 * PAGE_BYTES) as stack:
        assert get(stack, [0, 1]).prefix == 2
        assert upper.arrived.wait(60.0)
        assert get(stack, [2, 3]).prefix == 2
        assert not stack.settle(0.0)
        with pytest.raises(ConfigError, match="timeout: expected seconds"):
            stack.settle(float("nan"))  # for which it would wait for ever
        assert get(stack, [4]).prefix == 1  # the queue is full
        upper.gate.set()
        assert stack.settle(60.0)
        assert has(upper) == [0, 1, 2, 3]


def test_nothing_is_promoted_where_that_is_off() -> None:
    stack, upper, _ = noting(lower=ALL, promote_bytes=0)
    with stack:
        assert get(stack).prefix == 8
        assert stack.settle(0.0)
        assert has(upper) == []


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_what_was_deleted_is_not_promoted(how: str, wait_until: Any) -> None:
    """Neither what waits, nor what is being written just now, nor what was read before."""
    upper, lower = Gated(SPEC), MemoryStorage(SPEC)
    put(lower)
    with StackedStorage([upper, lower]) as stack:
        assert get(stack, [0]).prefix == 1
        assert upper.arrived.wait(60.0)
        assert get(stack, [1]).prefix == 1
        with ThreadPoolExecutor(1) as pool:
            removing = pool.submit(
                (lambda: stack.delete(KEYS, timeout=60.0))
                if how == "delete"
                else (lambda: stack.clear(timeout=60.0))
            )
            wait_until(lambda: stack._promoter._paused > 0, "the removing to begin")
            assert len(has(lower)) == 8  # it waits for the page that is being written
            upper.gate.set()
            assert removing.result(60.0) == 8
        assert stack.settle(60.0)
        assert has(upper) == has(lower) == []
        assert stack.stats().deletes == 8


def test_a_read_that_was_under_way_while_something_was_deleted_promotes_nothing() -> None:
    stack, _, lower = noting(lower=ALL)
    with stack:
        read = lower.read

        def deleting(*arguments: Any, **how: Any) -> Any:
            result = read(*arguments, **how)
            assert stack.delete(KEYS, timeout=60.0) == 8
            return result

        lower.read = deleting  # type: ignore[method-assign]
        assert get(stack).prefix == 8
        assert stack.settle(60.0)
        assert has(stack) == []


def test_a_promotion_between_the_two_halves_of_deleting_is_dropped() -> None:
    stack, upper, _ = noting(lower=ALL)
    with stack:
        delete = upper.delete

        def reading(*arguments: Any, **how: Any) -> Any:
            gone = delete(*arguments, **how)
            assert get(stack).prefix == 8
            return gone

        upper.delete = reading  # type: ignore[method-assign]
        assert stack.delete(KEYS, timeout=60.0) == 8
        assert stack.settle(60.0)
        assert has(stack) == []


def test_deleting_waits_no_longer_than_its_time_for_a_promotion() -> None:
    upper, lower = Gated(SPEC), MemoryStorage(SPEC)
    put(lower)
    with StackedStorage([upper, lower]) as stack:
        get(stack, [0])
        assert upper.arrived.wait(60.0)
        refused(StorageError, "still being promoted", stack.delete, KEYS, timeout=0.01)
        upper.gate.set()
        assert stack.settle(60.0)
        assert stack.delete(KEYS, timeout=60.0) == 8


def test_without_a_thread_nothing_is_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with MemoryStorage(SPEC) as storage:
        stack = StackedStorage([storage, MemoryStorage(SPEC)])
        promoter = Promoter(stack._levels[0], 1 << 20, 1.0)
        monkeypatch.setattr(threading.Thread, "start", none)
        pages = np.zeros((1, PAGE_BYTES), np.uint8)
        assert not promoter.put(Promotion(KEYS[:1], pages, None, PAGE_BYTES), 0)
        monkeypatch.undo()
        stack.close()


def test_time_that_never_ends_is_waited_for(wait_until: Any) -> None:
    upper, lower = Gated(SPEC), Gated(SPEC)
    upper.gate.set()
    with StackedStorage([upper, lower]) as stack, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(put, stack, [0], timeout=float("inf"))
        assert lower.arrived.wait(60.0)
        lower.gate.set()
        assert writing.result(60.0).statuses == (STORED,)
        upper.clear(timeout=60.0)
        upper.gate.clear()
        upper.arrived.clear()
        assert get(stack, [0]).prefix == 1
        assert upper.arrived.wait(60.0)
        clearing = pool.submit(stack.clear, timeout=float("inf"))
        wait_until(lambda: stack._promoter._paused > 0, "the clearing to begin")
        upper.gate.set()
        assert clearing.result(60.0) == 1


# ---------------------------------------------------------------- figures, and what is refused


def test_figures_of_each() -> None:
    stack, _, _ = noting(upper=[0], lower=[0, 1], names=["near", "far"])
    with stack:
        get(stack, [0, 1, 2])
        near, far = stack.levels()
        assert (near.name, far.name) == ("storage 1 of 2, near", "storage 2 of 2, far")
        assert (near.stats.reads_ok, near.stats.reads_absent) == (1, 2)
        assert (far.stats.reads_ok, far.stats.reads_absent) == (1, 1)
        assert (near.state, near.hanging, far.state, far.hanging) == ("closed", 0, "closed", 0)
        assert stack.stats().reads_ok == 2


def test_what_it_refuses() -> None:
    one, other = MemoryStorage(SPEC), MemoryStorage(SPEC)
    bad: list[tuple[Any, dict[str, Any]]] = [
        ([], {}),
        ([one, one], {}),
        (one, {}),
        ("memory:", {}),
        ([one, "memory:"], {}),
        ([one, MemoryStorage(StorageSpec(8192))], {}),
        ([one, other], {"names": ["near"]}),
        ([one, other], {"failures": 0}),
        ([one, other], {"retry": -1.0}),
        ([one, other], {"promote_bytes": -1}),
        ([one, other], {"promote_seconds": "1"}),
    ]
    for storages, how in bad:
        refused(ConfigError, "", StackedStorage, storages, **how)


def test_closing_closes_all_also_when_one_raises() -> None:
    class Reluctant(MemoryStorage):
        refusals = 1

        def close(self) -> None:
            if self.refusals:
                self.refusals -= 1
                raise StorageError("a call hangs")
            super().close()

    upper, lower = Reluctant(SPEC), MemoryStorage(SPEC)
    stack = StackedStorage([upper, lower])
    refused(StorageError, "a call hangs; close it again", stack.close)
    refused(Detached, "", lower.contains, KEYS, timeout=60.0)
    refused(Detached, "", stack.contains, KEYS, timeout=60.0)
    stack.close()
    refused(Detached, "", upper.contains, KEYS, timeout=60.0)


@pytest.mark.parametrize("verb", ["contains", "read", "write", "delete"])
def test_closing_in_the_middle_of_a_call(verb: str) -> None:
    stack, upper, _ = noting(upper=ALL)

    def closing(*arguments: Any, **how: Any) -> Any:
        stack.close()
        raise StorageError("closed under us")

    setattr(upper, verb, closing)
    calls = {
        "contains": lambda: stack.contains(KEYS, timeout=60.0),
        "read": lambda: get(stack),
        "write": lambda: put(stack),
        "delete": lambda: stack.delete(KEYS, timeout=60.0),
    }
    refused(Detached, "", calls[verb])


# ---------------------------------------------------------------- URLs


def test_a_stack_by_url(where: Path) -> None:
    url = f"stack:?promote=1MiB&failures=2&retry=5|memory:?pages=3|disk:{where}?capacity=1MiB"
    with open_storage(url, spec=SPEC) as stack:
        assert isinstance(stack, StackedStorage)
        assert [one.name for one in stack.levels()] == [
            "storage 1 of 2, memory:",
            "storage 2 of 2, disk:",
        ]
        assert stack._promoter.most_bytes == 1 << 20
        put(stack)
    with open_storage(["memory:", f"disk:{where}"], spec=SPEC) as again:
        assert get(again).prefix == 8


def test_checking_opens_no_disk(where: Path) -> None:
    check_url(f"stack:memory:|disk:{where}?capacity=1GiB")
    check_url(["memory:", f"disk:{where}?capacity=1GiB"])
    check_url(f"stack:flaky:seed=1:disk:{where}?capacity=1GiB|memory:")
    check_url(f"flaky::stack:memory:|disk:{where}?capacity=1GiB")
    assert not where.exists()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("stack:", "two URLs.*found 1.*quotes"),
        ("stack:memory:", "two URLs.*found 1"),
        ("stack:?missing=skip|memory:", "found 1"),
        ("stack:memory:|", "found none as 2"),
        ("stack:memory:|tape:", "tape"),
        ("stack:flaky:luck=1:memory:|memory:", "luck"),
        ("stack:flaky:seed=1:|memory:", "the URL of another storage"),
        ("flaky:seed=1:stack:memory:", "found 1"),
        ("stack:memory:|stack:memory:", "a stack in a stack"),
        ("stack:memory:?speed=9|memory:", "memory: expected capacity, pages"),
        ("stack:?speed=9|memory:|memory:", "expected promote, failures, retry, missing"),
        ("stack:?promote=much|memory:|memory:", "promote"),
        ("stack:?failures=0|memory:|memory:", "failures"),
        ("stack:?failures=x|memory:|memory:", "failures"),
        ("stack:?retry=nan|memory:|memory:", "retry"),
        ("stack:?missing=no|memory:|memory:", "raise or skip"),
        ("stack:?missing|memory:|memory:", "name=value"),
        (["stack:memory:"], "found 1"),
        ([], "found 0"),
        (["memory:", 5], "found 5"),
        (5, "found 5"),
    ],
)
def test_urls_that_are_refused(url: Any, why: str) -> None:
    for verb in (check_url, lambda url: open_storage(url, spec=SPEC)):
        refused(ConfigError, why, verb, url)


@pytest.mark.parametrize("urls", [["memory:"], ("stack:memory:|memory:",)])
def test_a_list_of_one_is_that_one(urls: Any) -> None:
    check_url(urls)
    with open_storage(urls, spec=SPEC) as alone, open_storage(urls[0], spec=SPEC) as same:
        assert type(alone) is type(same)


def test_options_reach_it() -> None:
    found = stacked.parse({"promote": "no", "failures": "7", "retry": "2.5"})
    assert found == {"skip": False, "promote_bytes": 0, "failures": 7, "retry": 2.5}


def test_one_that_cannot_be_opened(tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    bad = f"disk:{file}?capacity=1MiB"
    with pytest.raises(StorageError, match=r"storage 2 of 2, disk: cannot be opened.*missing=skip"):
        open_storage(f"stack:memory:|{bad}", spec=SPEC)
    with open_storage(f"stack:?missing=skip|{bad}|memory:", spec=SPEC) as stack:
        assert isinstance(stack, StackedStorage)
        assert len(stack.levels()) == 1
        assert "1 of 2, disk: cannot be opened and is left out" in caplog.text
    with open_storage(f"stack:?missing=skip|memory:|{bad}", spec=SPEC) as alone:
        assert isinstance(alone, StackedStorage)
        assert [level.name for level in alone.levels()] == ["storage 1 of 1, memory:"]
    refused(StorageError, "none of 2", open_storage, f"stack:?missing=skip|{bad}|{bad}", spec=SPEC)


def test_a_wrong_url_makes_nothing(where: Path) -> None:
    made = f"disk:{where}?capacity=1MiB"
    wrong = ("redis://h?speed=9", "tape:", "flaky:luck=1:memory:", "flaky:seed=1:tape:")
    for url in (*(f"stack:{made}|{each}" for each in wrong), f"flaky:luck=1:{made}"):
        refused(ConfigError, "", open_storage, url, spec=SPEC)
    assert not list(where.glob("*"))


@pytest.mark.parametrize("parent", [5, "key", KEYS[0], KEYS[:2], KEYS[:1].astype(np.int64)])
@pytest.mark.parametrize("name", ["memory", "disk above", "flaky in front", "alone"])
def test_a_parent_that_is_no_key_is_the_callers_mistake(
    name: str, parent: Any, where: Path
) -> None:
    """And no failure of a storage."""
    with STACKS[name](SPEC, where) if name != "alone" else MemoryStorage(SPEC) as storage:
        for _ in range(4):
            with pytest.raises(ConfigError, match=r"parent: expected one key|keys: expected"):
                put(storage, [0], parent=parent)
        assert storage.stats().writes_failed == 0
        assert put(storage, [0], parent=KEYS[1:2]).prefix == 1


def test_those_that_were_opened_are_closed_again(tmp_path: Path) -> None:
    opened: list[FlakyStorage] = []

    def one(url: str, spec: StorageSpec) -> Any:
        if url == "bad:":
            raise StorageError("gone")
        opened.append(flaky())
        return opened[-1]

    with pytest.raises(StorageError, match="storage 2 of 2, bad:"):
        stacked.open_stack(["memory:", "bad:"], SPEC, one)
    for each in opened:
        refused(Detached, "", each.contains, KEYS, timeout=60.0)
