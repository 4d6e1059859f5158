"""Token ids through a storage service, to a storage that wants them, and to no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.serving import ServedTier
from support.storing import KEYS, PAGE_TOKENS, Recorder, fill, make_cache

from lightcache import Cache, ConfigError
from lightcache.storage import MemoryStorage, StorageSpec, TaskState
from lightcache.storage.service import StorageClient, StorageService
from lightcache.storage.service.messages import PART_BYTES
from lightcache.storage.testing.conformance import make_keys

IDS = np.arange(1000, 1000 + 20 * PAGE_TOKENS, dtype=np.uint32)
ROWS = IDS.reshape(20, PAGE_TOKENS)


def keeping(cache: Cache) -> MemoryStorage:
    return MemoryStorage(StorageSpec.of(cache), tokens=True)


def kept(storage: MemoryStorage, keys: Any) -> list[list[int] | None]:
    """Token ids of each key."""
    found = [storage.tokens_of(key) for key in keys]
    return [None if each is None else each.tolist() for each in found]


@pytest.mark.parametrize("kind", [list, np.asarray, lambda ids: np.asarray(ids, np.int64)])
def test_a_service_passes_them_on(cache: Cache, kind: Any) -> None:
    fill(cache, KEYS)
    storage = keeping(cache)
    with ServedTier(cache, storage, group=3) as tier:
        assert tier.wants_tokens
        ids = kind([*IDS.tolist(), 7])  # an end that fills no page
        assert tier.write(KEYS, token_ids=ids).wait(60.0).stored == 20
    assert kept(storage, KEYS) == ROWS.tolist()


def test_those_of_a_lease_and_none(cache: Cache) -> None:
    fill(cache, KEYS)
    storage = keeping(cache)
    with ServedTier(cache, storage) as tier:
        assert tier.write(KEYS[:4].copy()).wait(60.0).stored == 4
        with cache.match(KEYS[:10].copy()) as lease:
            task = tier.write(KEYS, lease=lease, token_ids=IDS[: 10 * PAGE_TOKENS])
            assert task.wait(60.0).stored == 6
    assert kept(storage, KEYS) == [*[None] * 4, *ROWS[4:10].tolist(), *[None] * 10]


def test_by_tokens_in_many_pieces(segment_name: str) -> None:
    with make_cache(segment_name, pages=1100) as cache:
        ids = np.arange(1000 * PAGE_TOKENS + 5, dtype=np.uint32)
        keys = cache.hash_pages(ids)
        fill(cache, keys)
        storage = keeping(cache)
        with ServedTier(cache, storage, group=500, write_pages=1100) as tier:
            assert ids.nbytes > 3 * PART_BYTES
            assert tier.write_tokens(ids).wait(60.0).stored == 1000
        assert kept(storage, keys) == ids[: 1000 * PAGE_TOKENS].reshape(1000, -1).tolist()


def test_who_does_not_want_them_is_not_given_any(cache: Cache) -> None:
    fill(cache, KEYS)
    sent: list[bytes] = []
    with ServedTier(cache, Recorder(StorageSpec.of(cache))) as tier:  # it takes no such argument
        assert not tier.wants_tokens
        whole = tier._push
        tier._push = lambda parts: (sent.extend(parts), whole(parts))[1]  # type: ignore
        assert tier.write(KEYS, token_ids=IDS).wait(60.0).stored == 20
    assert len(sent) == 1
    assert IDS[:PAGE_TOKENS].tobytes() not in sent[0]


def test_a_client_goes_by_the_service_that_serves(cache: Cache) -> None:
    client = StorageClient(cache)
    assert not client.wants_tokens
    with StorageService(cache, keeping(cache)):
        assert client.wants_tokens
    assert client.wants_tokens  # as that which served last
    with StorageService(cache, Recorder(StorageSpec.of(cache))):
        assert not client.wants_tokens
    client.close()
    assert not client.wants_tokens


def test_more_than_one_task_may_have(segment_name: str) -> None:
    with make_cache(segment_name, page_tokens=4096) as cache:
        keys = make_keys(250, seed=4)
        with ServedTier(cache, keeping(cache)) as tier:
            task = tier.write(keys, token_ids=np.zeros(250 * 4096, np.uint32))
            assert (task.state, task.result.failed) == (TaskState.FAILED, 250)
            assert "250 keys with their token ids are 4100" in task.result.reasons[0]
            assert "StorageTier" in task.result.reasons[0]


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (IDS[: 4 * PAGE_TOKENS - 1], "64 or more for 4 pages, found 63"),
        (5, "found 5"),
        ([1.5] * 64, "integers"),
        ([-1] * 64, "token"),
    ],
)
def test_ids_that_are_none(cache: Cache, ids: Any, why: str) -> None:
    with ServedTier(cache, keeping(cache)) as tier, pytest.raises(ConfigError, match=why):
        tier.write(KEYS[:4].copy(), token_ids=ids)


def test_ids_need_a_cache_with_tokens(segment_name: str) -> None:
    with make_cache(segment_name, page_tokens=None) as plain:
        with (
            ServedTier(plain, keeping(plain)) as tier,
            pytest.raises(ConfigError, match="without page_tokens"),
        ):
            tier.write(make_keys(1), token_ids=IDS)
