"""A cache with a disk behind it: written, restarted, found again; and when the disk fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disks import Medium, indexes, slot_of
from support.storing import PAGE_TOKENS, fill, make_cache, nothing_is_held, sound

from lightcache.storage import StorageSpec, StorageTier, TaskState, open_storage
from lightcache.storage.disk import DiskStorage
from lightcache.storage.disk.slots import SlotFiles

TOKENS = np.arange(10 * PAGE_TOKENS)


def opened(where: Path, cache: Any, **how: Any) -> Any:
    url = f"disk:{where}?capacity=1MiB&threads=2"
    return StorageTier(cache, open_storage(url, spec=StorageSpec.of(cache)), group=4, **how)


def run(where: Path, name: str, work: Any, secret: bytes | None = None) -> Any:
    """One life of a cache with a disk: all of it ends with the return."""
    how = {} if secret is None else {"secret": secret}
    with make_cache(name, **how) as cache:
        tier = opened(where, cache)
        try:
            return work(cache, tier)
        finally:
            assert tier.close()
            tier.storage.close()
            nothing_is_held(cache)


def first(cache: Any, tier: StorageTier) -> None:
    """Compute and store."""
    keys = cache.hash_pages(TOKENS)
    fill(cache, keys)
    assert tier.write_tokens(TOKENS, "request").wait().stored == 10


def again(cache: Any, tier: StorageTier) -> int:
    """What is there, as far as it is right."""
    keys = cache.hash_pages(TOKENS)
    prefix = tier.prefetch(keys).wait(60.0).prefix
    assert sound(cache, keys) == prefix
    return int(prefix)


def test_a_restarted_cache_finds_its_pages(where: Path, segment_name: str) -> None:
    run(where, segment_name, first)
    assert not indexes(where)
    assert run(where, segment_name, again) == 10


def test_with_another_secret_it_finds_nothing(where: Path, segment_name: str) -> None:
    """Keys are seeded with it: so it has to move with the disk."""
    run(where, segment_name, first)
    assert run(where, segment_name, again, b"another secret of tests") == 0
    assert run(where, segment_name, again) == 10


def test_a_damaged_page_ends_the_prefix(where: Path, segment_name: str) -> None:
    run(where, segment_name, first)

    def harm(cache: Any, tier: StorageTier) -> int:
        storage: Any = tier.storage
        slot = slot_of(storage, cache.hash_pages(TOKENS)[6])
        Medium(where, 4, storage.spec).write(slot, b"?" * 16)
        return again(cache, tier)

    assert run(where, segment_name, harm) == 6


def test_requests_go_on_without_the_disk(
    where: Path, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(where, segment_name, first)

    def failing(cache: Any, tier: StorageTier) -> None:
        def refuse(*arguments: Any) -> None:
            raise OSError(errno.EIO, "on purpose")

        monkeypatch.setattr(SlotFiles, "write_slot", refuse)
        other = np.arange(1000, 1000 + 10 * PAGE_TOKENS)
        fill(cache, cache.hash_pages(other))
        task = tier.write_tokens(other, "request 2")
        assert task.wait(60.0).stored == 0
        assert "on purpose" in "".join(task.result.reasons)
        assert again(cache, tier) == 10
        monkeypatch.setattr(SlotFiles, "read_slot", refuse)
        assert cache.evict(96) == 20
        task = tier.prefetch(cache.hash_pages(TOKENS))
        assert task.wait(60.0).prefix == 0
        assert task.state in (TaskState.FINISHED, TaskState.FAILED)
        monkeypatch.undo()

    run(where, segment_name, failing)


def test_two_caches_share_a_disk(where: Path, segment_name: str) -> None:
    """Of the same model, and of another one, whose pages are its own."""

    def both(cache: Any, tier: StorageTier) -> None:
        first(cache, tier)
        with make_cache(f"{segment_name}-2", fingerprint="another/bf16/16") as other:
            with opened(where, other) as lonely:
                assert again(other, lonely) == 0
            lonely.storage.close()
            DiskStorage.remove(where, lonely.storage.spec)
        with make_cache(f"{segment_name}-3") as twin:
            with opened(where, twin) as same:
                assert same.storage.rebuilt is None
                assert again(twin, same) == 10
            same.storage.close()

    run(where, segment_name, both)
