"""A manager that is given its storage as a URL: it opens it, and closes what it has opened."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disks import indexes
from support.manager_case import World, open_cache, tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache import ConfigError, Detached, PermissionDenied, StorageError, WaitTimeout
from lightcache.manager import Prompt, RequestOptions, WritePolicy
from lightcache.storage import StorageSpec, StorageTier, open_storage

PROMPT = Prompt(tokens(18))


def threads() -> set[threading.Thread]:
    every = threading.enumerate()
    return {thread for thread in every if thread.name.startswith("lightcache-storage")}


@pytest.mark.parametrize("write", list(WritePolicy))
@pytest.mark.parametrize("several", [False, True])
def test_a_prompt_outlives_everything_but_its_disk(
    segment_name: str, where: Path, several: bool, write: WritePolicy
) -> None:
    before = threads()
    url: Any = f"disk:{where}?capacity=1MiB"
    for turn in range(2):
        given = ["memory:", url] if several else url
        made = World(f"{segment_name}-{turn}", storage=lambda _, given=given: given, write=write)
        assert threads() - before
        assert indexes(where)
        match = made.run("a", PROMPT)
        assert match.storage == (16 if turn else 0)
        assert match.usable == (16 if turn else 0)
        assert (match.device, match.host) == (0, 0)
        made.backend.finish()
        made.manager.close()  # what is to be written is written
        assert made.cache.check().pins == 0
        stats = made.manager.stats()
        assert (stats.storage_written_bytes > 0) == (turn == 0)
        made.close()
        assert not threads() - before
        assert not indexes(where)


@pytest.mark.parametrize("write", list(WritePolicy))
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (RequestOptions(), 16),
        (RequestOptions(priority=-1), 0),
        (RequestOptions(output=False), 16),
        (RequestOptions(write=False), 0),
        (RequestOptions(tiers=frozenset({"device", "host"})), 0),
        (RequestOptions(tiers=frozenset({"device", "storage"})), 0),
    ],
    ids=["any", "not the host", "the prompt", "nothing", "not storage", "not by the host"],
)
def test_what_is_stored_when_a_request_ends(
    segment_name: str, where: Path, write: WritePolicy, options: RequestOptions, expected: int
) -> None:
    url = f"disk:{where}?capacity=1MiB"
    for turn in range(2):
        made = World(f"{segment_name}-{turn}", storage=lambda _: url, write=write)
        if turn == 0:
            made.run("a", PROMPT, options=options)
        else:
            assert made.run("a", PROMPT).storage == expected
        made.close()


@pytest.mark.parametrize("owned", [True, False])
def test_what_is_demoted_goes_to_the_host_and_then_to_storage(
    segment_name: str, where: Path, owned: bool
) -> None:
    """Of a request that was aborted, which stores nothing itself."""
    url = f"disk:{where}?capacity=1MiB"
    how: dict[str, Any] = {"storage": lambda _: url, "write": WritePolicy.BACK, "owned": owned}
    made = World(f"{segment_name}-0", **how)
    manager, table = made.manager, np.arange(5, dtype=np.int32)
    manager.plan("a", PROMPT)
    manager.take("a", wait=True)
    if owned:
        table = manager.allocate("a", len(PROMPT))
    made.store.write(table, 0, stamps_of(PROMPT.tokens))
    manager.commit("a", len(PROMPT), **({} if owned else {"table": table}))
    manager.release("a", publish=False)
    assert made.cache.stats().ready == 0
    made.backend.at_once = False
    assert (manager.demote(32) if owned else manager.evicting(table)) == 4
    manager.poll()
    tier: Any = manager._storage
    assert tier._executor.wait_idle(60.0)
    assert tier.stats().stored == 0
    made.backend.finish()
    manager.poll()
    assert tier._executor.wait_idle(60.0)
    assert tier.stats().stored == 4
    made.close()
    again = World(f"{segment_name}-1", storage=lambda _: url)
    assert again.run("a", PROMPT).storage == 16
    again.close()


def test_closing_again_does_nothing(segment_name: str, where: Path) -> None:
    world = World(segment_name, storage=lambda _: f"disk:{where}?capacity=1MiB")
    world.manager.close()
    world.manager.close()
    world.close()


def test_a_storage_that_hangs_is_closed_when_it_answers(segment_name: str, wait_until: Any) -> None:
    before = threads()
    world = World(segment_name, storage=lambda _: "flaky:hang=1,seed=1:memory:")
    tier: Any = world.manager._own_storage
    tier._grace = 0.0
    tier.prefetch(np.ones((1, 2), np.uint64))
    assert tier.storage.wait_hanging()
    closing = tier.close
    tier.close = lambda timeout=0.0: closing(0.0)
    refused(WaitTimeout, "have not returned", world.manager.close)
    assert threads() - before
    tier.storage.let_go()
    wait_until(lambda: not threads() - before, "the end of what hung")
    refused(Detached, "", tier.storage.contains, np.ones((1, 2), np.uint64), timeout=1.0)
    world.manager.close()
    world.close()


class Clock:
    """Stands in for `time` in the manager's module."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.perf_counter_ns = time.perf_counter_ns

    def monotonic(self) -> float:
        """See `time`."""
        return self.now


@pytest.mark.parametrize(
    ("timeout", "copies", "left"), [(10.0, 4.0, 6.0), (3.0, 5.0, 0.0), (None, 4.0, 1e9)]
)
def test_closing_has_one_deadline(
    segment_name: str,
    monkeypatch: pytest.MonkeyPatch,
    timeout: float | None,
    copies: float,
    left: float,
) -> None:
    """What waiting for copies takes is not there for the storage."""
    world, clock = World(segment_name, storage=lambda _: "memory:"), Clock()
    manager, waits = world.manager, list[float]()
    tier: Any = manager._own_storage
    closing, waiting = tier.close, manager.state.transfers.wait

    def close(timeout: float) -> Any:
        waits.append(timeout)
        return closing(60.0)

    def wait(*arguments: Any) -> None:
        waiting(*arguments)
        clock.now += copies

    monkeypatch.setattr("lightcache.manager.manager.time", clock)
    monkeypatch.setattr(tier, "close", close)
    monkeypatch.setattr(manager.state.transfers, "wait", wait)
    manager.close(timeout)
    assert len(waits) == 1
    assert waits[0] == left if timeout is not None else waits[0] > left
    monkeypatch.undo()
    world.close()


def test_closing_tells_what_was_not_written(
    segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(segment_name, storage=lambda _: "memory:")
    tier: Any = world.manager._own_storage
    closing = tier.close
    tier._executor.count_unstored("ended", 5, "arranged")  # told before

    def close(timeout: float = 60.0) -> Any:
        if not tier._executor.closing:
            tier._executor.count_unstored("ended", 7, "arranged")
        return closing(60.0)

    tier.close = close
    world.manager.close()
    assert "close: 7 pages were not written to the storage in time" in caplog.text
    world.close()
    assert caplog.text.count("close: ") == 1


def test_what_the_host_lost_before_storage_had_it_is_counted(segment_name: str) -> None:
    with open_cache(segment_name, 32, 4) as cache, StorageTier.open(cache, "memory:") as tier:
        world = World(f"{segment_name}.w", cache=cache, storage=lambda _: tier)
        world.backend.fail_next = 2
        world.run("a", PROMPT)
        stats = world.manager.stats()
        assert (stats.storage_absent_pages, stats.storage_skipped_pages) == (4, 4)
        world.close()


def test_a_tier_that_is_given_stays_open(segment_name: str) -> None:
    with open_cache(segment_name, 32, 4) as cache:
        storage = open_storage("memory:", spec=StorageSpec.of(cache))
        with StorageTier(cache, storage) as tier:
            world = World(f"{segment_name}.w", cache=cache, storage=lambda _: tier)
            world.manager.close()
            assert tier.write(np.zeros((0, 2), np.uint64)).wait(60).stored == 0
            world.close()


@pytest.mark.parametrize(
    ("wrong", "kind", "what"),
    [
        ("tape:", ConfigError, "scheme"),
        ("disk", ConfigError, "expected a URL"),
        (["stack:memory:"], ConfigError, "two URLs"),
        (7, ConfigError, "expected a StorageTier, a StorageClient, or a URL"),
        ("disk:/proc/nothing?capacity=1MiB", StorageError, "disk"),
        ("memory:?pages=no", ConfigError, "pages"),
    ],
)
def test_what_is_no_storage(segment_name: str, wrong: Any, kind: type, what: str) -> None:
    before = threads()
    refused(kind, what, World, segment_name, storage=lambda _: wrong)
    assert not threads() - before


def test_opening_a_tier(segment_name: str, where: Path) -> None:
    url = f"disk:{where}?capacity=1MiB"
    with open_cache(segment_name, 32, 4) as cache:
        refused(ConfigError, "threads", StorageTier.open, cache, url, threads=0)
        assert not indexes(where)
        tier = StorageTier.open(cache, url, threads=1)
        assert tier.close()
        assert not indexes(where)
        assert tier.close()
        with type(cache).attach(cache.name, readonly=True) as reader:
            refused(PermissionDenied, "", StorageTier.open, reader, url)
        assert not indexes(where)


def test_a_tier_of_another_cache(segment_name: str) -> None:
    with open_cache(segment_name, 32, 4) as cache, open_cache(f"{segment_name}.o", 32, 4) as other:
        with StorageTier.open(other, "memory:") as tier:
            with pytest.raises(ConfigError, match=f"host cache '{segment_name}', found one of"):
                World(f"{segment_name}.w", cache=cache, storage=lambda _: tier)


def test_tokens_that_are_no_count(segment_name: str) -> None:
    with open_cache(segment_name, 32, 4) as cache, StorageTier.open(cache, "memory:") as tier:
        refused(ConfigError, "tokens", tier.write, np.zeros((0, 2), np.uint64), tokens="a")
