"""A manager that is given its storage as a URL: it opens it, and closes what it has opened."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disks import indexes, where
from support.manager_case import World, open_cache, tokens

from lightcache import ConfigError, Detached, PermissionDenied, StorageError
from lightcache.manager import Prompt
from lightcache.storage import StorageSpec, StorageTier, open_storage

PROMPT = Prompt(tokens(18))

__all__ = ["where"]


def threads() -> int:
    return sum(thread.name.startswith("lightcache-storage") for thread in threading.enumerate())


@pytest.mark.parametrize("several", [False, True])
def test_a_prompt_outlives_everything_but_its_disk(
    segment_name: str, where: Path, several: bool
) -> None:
    before = threads()
    url: Any = f"disk:{where}?capacity=1MiB"
    for turn in range(2):
        given = ["memory:", url] if several else url
        made = World(f"{segment_name}-{turn}", storage=lambda _, given=given: given)
        assert threads() > before
        assert indexes(where)
        match = made.run("a", PROMPT)
        assert match.storage == (16 if turn else 0)
        assert match.usable == (16 if turn else 0)
        assert (match.device, match.host) == (0, 0)
        made.mover.finish()
        made.manager.close()  # what is to be written is written
        assert made.cache.check().pins == 0
        stats = made.manager.stats()
        assert (stats.storage_written_bytes > 0) == (turn == 0)
        made.close()
        assert threads() == before
        assert not indexes(where)


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
    tier.close = lambda: closing(0.0)
    world.manager.close()  # with a warning
    assert threads() > before
    tier.storage.let_go()
    wait_until(lambda: threads() == before, "the end of what hung")
    with pytest.raises(Detached):
        tier.storage.contains(np.ones((1, 2), np.uint64), timeout=1.0)
    world.manager.close()
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
    with pytest.raises(kind, match=what):
        World(segment_name, storage=lambda _: wrong)
    assert threads() == before


def test_opening_a_tier(segment_name: str, where: Path) -> None:
    url = f"disk:{where}?capacity=1MiB"
    with open_cache(segment_name, 32, 4) as cache:
        with pytest.raises(ConfigError, match="threads"):
            StorageTier.open(cache, url, threads=0)
        assert not indexes(where)
        tier = StorageTier.open(cache, url, threads=1)
        assert tier.close()
        assert not indexes(where)
        assert tier.close()
        with type(cache).attach(cache.name, readonly=True) as reader:
            with pytest.raises(PermissionDenied):
                StorageTier.open(reader, url)
        assert not indexes(where)


def test_a_tier_of_another_cache(segment_name: str) -> None:
    with open_cache(segment_name, 32, 4) as cache, open_cache(f"{segment_name}.o", 32, 4) as other:
        with StorageTier.open(other, "memory:") as tier:
            with pytest.raises(ConfigError, match=f"host cache '{segment_name}', found one of"):
                World(f"{segment_name}.w", cache=cache, storage=lambda _: tier)


def test_tokens_that_are_no_count(segment_name: str) -> None:
    with open_cache(segment_name, 32, 4) as cache, StorageTier.open(cache, "memory:") as tier:
        with pytest.raises(ConfigError, match="tokens"):
            tier.write(np.zeros((0, 2), np.uint64), tokens="a")  # type: ignore[arg-type]
