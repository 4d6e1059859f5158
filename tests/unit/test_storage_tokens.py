"""Token ids beside keys: for backends that want them, and never for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.manager_case import World, tokens
from support.refusals import refused
from support.storing import KEYS, PAGE_TOKENS, Recorder, fill, make_cache

from lightcache import Cache, ConfigError
from lightcache.manager import Prompt
from lightcache.manager.request import RequestOptions
from lightcache.storage import (
    MemoryStorage,
    StackedStorage,
    Storage,
    StorageSpec,
    StorageTier,
    TaskState,
    open_storage,
)
from lightcache.storage.testing import Fault, FlakyStorage
from lightcache.storage.testing.conformance import CHECKS, SPEC, check_tokens, make_keys, pages_of

IDS = np.arange(1000, 1000 + 20 * PAGE_TOKENS, dtype=np.uint32)
ROWS = IDS.reshape(20, PAGE_TOKENS)


def keeping(spec: StorageSpec = SPEC) -> MemoryStorage:
    return MemoryStorage(spec, tokens=True)


def put(storage: Any, keys: Any, rows: Any, **how: Any) -> Any:
    return storage.write(keys, list(pages_of(keys)), timeout=60.0, tokens=rows, **how)


def kept(storage: MemoryStorage, keys: Any) -> list[list[int] | None]:
    """Token ids of each key."""
    found = [storage.tokens_of(key) for key in keys]
    return [None if each is None else each.tolist() for each in found]


# ---------------------------------------------------------------- backends


BACKENDS: dict[str, Any] = {
    "memory": keeping,
    "flaky": lambda spec: FlakyStorage(keeping(spec)),
    "stack, above": lambda spec: StackedStorage([keeping(spec), MemoryStorage(spec)]),
    "stack, below": lambda spec: StackedStorage([MemoryStorage(spec), keeping(spec)]),
    "url": lambda spec: open_storage("memory:?tokens=yes", spec=spec),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", BACKENDS)
def test_conformance(name: str, check: Any) -> None:
    with BACKENDS[name](SPEC) as storage:
        assert storage.wants_tokens
    check(BACKENDS[name])


class Careless(MemoryStorage):
    """Keeps what it is given, whatever that is."""

    def write(self, *arguments: Any, tokens: Any = None, **how: Any) -> Any:
        return super().write(*arguments, tokens=None, **how)


def test_conformance_sees_a_backend_that_takes_anything() -> None:
    refused(AssertionError, "tokens", check_tokens, lambda spec: Careless(spec, tokens=True))


def test_who_does_not_want_them() -> None:
    for storage in (MemoryStorage(SPEC), FlakyStorage(MemoryStorage(SPEC)), Recorder(SPEC)):
        assert not storage.wants_tokens
        storage.close()
    with MemoryStorage(SPEC) as storage:
        put(storage, KEYS[:2], ROWS[:2])
        assert kept(storage, KEYS[:2]) == [None, None]


def test_what_is_kept_is_a_copy() -> None:
    rows = ROWS[:2].copy()
    with keeping() as storage:
        put(storage, KEYS[:2], rows)
        rows[:] = 0
        told = storage.tokens_of(KEYS[0])
        assert told is not None
        told[:] = 0
        assert kept(storage, KEYS[:3]) == [*ROWS[:2].tolist(), None]


def test_a_flaky_one_passes_on_those_of_the_pages_that_it_passes_on() -> None:
    inner = keeping()
    with FlakyStorage(inner, script={"write": [Fault("fail", at=1)]}) as storage:
        put(storage, KEYS[:3], ROWS[:3])
        assert kept(inner, KEYS[:3]) == [ROWS[0].tolist(), None, ROWS[2].tolist()]


def test_a_stack_gives_them_to_those_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightcache.storage.stacked.PIECE", 2 * 4096)
    spec = SPEC
    for near, far in ((keeping(), Recorder(spec)), (Recorder(spec), keeping())):
        with StackedStorage([near, far]) as storage:
            put(storage, KEYS[:5], ROWS[:5])
            wanting, other = (near, far) if near.wants_tokens else (far, near)
            assert isinstance(wanting, MemoryStorage)
            assert isinstance(other, Recorder)
            assert kept(wanting, KEYS[:5]) == ROWS[:5].tolist()
            parts = [n for what, n in other.calls if what == "write"]
            assert parts == ([2, 2, 1] if other is far else [5])
    first = keeping()
    with StackedStorage([first, keeping()]) as storage:
        put(storage, KEYS[:5], ROWS[:5])
        first.clear(timeout=60.0)
        into = list(np.zeros((5, 4096), np.uint8))
        assert storage.read(KEYS[:5], into, timeout=60.0).prefix == 5
        assert storage.settle(60.0)
        assert kept(first, KEYS[:5]) == [None] * 5  # a read does not bring any


@pytest.mark.parametrize("text", ["memory:?tokens=maybe", "memory:?tokens"])
def test_an_option_that_is_none(text: str) -> None:
    refused(ConfigError, "", open_storage, text, spec=SPEC)


# ---------------------------------------------------------------- the tier


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, lambda ids: np.asarray(ids, np.int64)])
def test_a_tier_passes_them_on(cache: Cache, kind: Any) -> None:
    fill(cache, KEYS)
    storage = keeping(StorageSpec.of(cache))
    with StorageTier(cache, storage, group=3) as tier:
        ids = kind([*IDS.tolist(), 7])  # an end that fills no page
        assert tier.write(KEYS, token_ids=ids).wait(60.0).stored == 20
    assert kept(storage, KEYS) == ROWS.tolist()


def test_without_them_a_tier_writes_as_before(cache: Cache) -> None:
    fill(cache, KEYS)
    storage = keeping(StorageSpec.of(cache))
    with StorageTier(cache, storage) as tier:
        assert tier.write(KEYS[:4].copy()).wait(60.0).stored == 4
        with cache.match(KEYS[:10].copy()) as lease:
            assert tier.write(KEYS, lease=lease, token_ids=IDS[: 10 * PAGE_TOKENS]).wait(60.0)
    assert kept(storage, KEYS) == [*[None] * 4, *ROWS[4:10].tolist(), *[None] * 10]


@pytest.mark.parametrize("wanted", [True, False])
def test_writing_by_tokens_gives_them(cache: Cache, wanted: bool) -> None:
    ids = IDS[: 3 * PAGE_TOKENS + 5]
    keys = cache.hash_pages(ids)
    fill(cache, keys)
    spec = StorageSpec.of(cache)
    storage = keeping(spec) if wanted else Recorder(spec)  # which takes no such argument
    with StorageTier(cache, storage) as tier:
        task = tier.write_tokens(ids)
        assert (task.wait(60.0).stored, task.state) == (3, TaskState.FINISHED)
        assert tier.write(keys, token_ids=ids).wait(60.0).present == 3
    assert kept(storage, keys) == (ROWS[:3].tolist() if wanted else [None] * 3)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (IDS[: 4 * PAGE_TOKENS - 1], "64 or more for 4 pages, found 63"),
        (5, "found 5"),
        ([1.5] * 64, "integers"),
        ([-1] * 64, "token"),
        (np.zeros((64, 2), np.uint32), "dimension"),
    ],
)
def test_ids_that_are_none(cache: Cache, ids: Any, why: str) -> None:
    fill(cache, KEYS[:4].copy())
    with StorageTier(cache, keeping(StorageSpec.of(cache))) as tier:
        refused(ConfigError, why, tier.write, KEYS[:4].copy(), token_ids=ids)
        assert cache.check().pins == 0


def test_too_few_are_refused_by_everybody(cache: Cache) -> None:
    """What is wrong does not depend on which storage there is."""
    with (
        StorageTier(cache, Recorder(StorageSpec.of(cache))) as tier,
        pytest.raises(ConfigError, match="or more for 20 pages"),
    ):
        tier.write(KEYS, token_ids=[1])


def test_ids_need_a_cache_with_tokens(segment_name: str) -> None:
    with make_cache(segment_name, page_tokens=None) as plain:
        with (
            StorageTier(plain, keeping(StorageSpec.of(plain))) as tier,
            pytest.raises(ConfigError, match="without page_tokens"),
        ):
            tier.write(make_keys(1), token_ids=IDS)


# ---------------------------------------------------------------- the manager


def over(storage: Any) -> Any:
    return lambda cache: StorageTier(cache, storage(StorageSpec.of(cache)))


def stored_by(world: World, prompt: Any, generated: Any, **how: Any) -> Storage:
    """Run a request that generates tokens; its storage when all is written."""
    every = np.concatenate((prompt, generated))
    world.start("a", prompt, **how)
    world.compute("a", every, 0, len(prompt))
    for at in range(len(prompt), len(every), 3):
        world.compute("a", every, at, min(at + 3, len(every)))
    world.manager.release("a", wait=True)
    tier = world.manager._storage
    assert tier is not None
    assert tier._executor.wait_idle(60.0)
    return tier.storage


def test_a_manager_gives_those_of_prompt_and_output(worlds: Any) -> None:
    world = worlds(storage=over(keeping))
    prompt, generated = np.asarray(tokens(10), np.uint32), np.arange(500, 511, dtype=np.uint32)
    storage = stored_by(world, prompt, generated)
    every = np.concatenate((prompt, generated))
    keys = Prompt(every).keys(world.cache.key_spec())
    assert len(keys) == 5
    assert isinstance(storage, MemoryStorage)
    assert kept(storage, keys) == every[:20].reshape(5, 4).tolist()


def test_a_manager_keeps_none_that_nobody_wants(worlds: Any) -> None:
    seen: list[Any] = []
    world = worlds(storage=over(Recorder))
    note = world.manager.offloader.write_to_storage
    world.manager.offloader.write_to_storage = lambda ended: (
        seen.extend(one.generated for one in ended),
        note(ended),
    )
    storage = stored_by(world, np.asarray(tokens(10), np.uint32), np.arange(500, 511))
    assert seen == [None]
    assert storage.stats().pages == 5


def test_a_manager_keeps_none_of_a_request_that_is_not_stored(worlds: Any) -> None:
    world = worlds(storage=over(keeping))
    world.start("a", tokens(10), options=RequestOptions(tiers=frozenset({"device", "host"})))
    assert world.manager.request("a").generated is None
    world.manager.release("a")
