"""Token ids of pages beside a cache: who writes them, what a reader believes, what is refused."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.manager_case import SECRET, TOKEN_BYTES
from support.refusals import refused
from support.storing import empty
from support.vllm_stand_in import Engine

from lightcache import Cache, Changes, PageIndex
from lightcache.connectors.vllm.scheduler import open_cache
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    Detached,
    LayoutMismatch,
    NotReady,
    PermissionDenied,
)
from lightcache.manager import MultimodalItem, Prompt, WritePolicy
from lightcache.shm import Segment, names
from lightcache.shm.sweep import leftovers
from lightcache.storage import StorageTier
from lightcache.storage.service import StorageClient, StorageService
from lightcache.token_records import TokenRecords

SIZE = 4  # tokens of a page
PROMPT = list(range(100, 120))  # 5 pages
FORM: dict[str, Any] = {
    "pages": 32,
    "page_bytes": SIZE * TOKEN_BYTES,
    "page_tokens": SIZE,
    "fingerprint": "stamped",
    "secret": SECRET,
}


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with Cache.create(segment_name, **FORM, token_ids=True) as made:
        yield made


def path_of(cache: Cache | PageIndex) -> Path:
    index = cache if isinstance(cache, PageIndex) else cache.index
    return names.FOLDER / index.segment.dependent_name("tokens")[1:]


def told(cache: Cache, feed: Changes | None = None) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What a reader finds of all pages that became ready: keys, and their tokens or none."""
    with PageIndex.attach(cache.name, readonly=True) as index:
        records = TokenRecords.of(index.segment, index.pages, readonly=True)
        assert records is not None
        found = {}
        for batch in (feed or Changes(index)).scan():
            rows, known = records.read(batch.stored_pages, batch.stored)
            for key, row, is_known in zip(batch.stored.tolist(), rows, known, strict=True):
                found[tuple(key)] = tuple(row.tolist()) if is_known else ()
        records.close()
        return found


def expected(cache: Cache, tokens: list[int], pages: int | None = None, **how: Any) -> Any:
    """All pages of a prompt, the first ones with their tokens."""
    keys = cache.hash_pages(tokens, **how).tolist()
    count = len(keys) if pages is None else pages
    return {
        tuple(key): tuple(tokens[i * SIZE : (i + 1) * SIZE]) if i < count else ()
        for i, key in enumerate(keys)
    }


def put(cache: Cache, tokens: Any, given: Any = None, **how: Any) -> None:
    with cache.reserve(cache.hash_pages(tokens, **how), tokens=given) as new:
        new.publish()


# ---- what is written, and read


@pytest.mark.parametrize("kind", [list, np.array, partial(np.array, dtype=np.uint32)])
def test_tokens_are_those_of_new_pages(cache: Cache, kind: Callable[..., Any]) -> None:
    put(cache, PROMPT[:8])  # two pages, without
    put(cache, PROMPT, kind([*PROMPT, 7]))  # the next page is not full
    first = expected(cache, PROMPT[:8], 0)
    assert told(cache) == {**expected(cache, PROMPT), **first}


def test_of_an_older_page_there_are_none(cache: Cache) -> None:
    put(cache, PROMPT, PROMPT)
    feed = Changes(cache.index)
    feed.scan()
    cache.evict(32)
    other = list(range(20))
    put(cache, other)
    assert told(cache, feed) == expected(cache, other, 0)
    cache.evict(32)
    put(cache, other, other)
    cache.index.drop(cache.hash_pages(other))
    put(cache, other)  # the same key in the same page: what was written before is right
    assert told(cache) == expected(cache, other)


def test_half_a_record_and_hostile_bytes_are_no_record(cache: Cache) -> None:
    put(cache, PROMPT, PROMPT)
    path, size = path_of(cache), 24 + 4 * SIZE
    text = path.read_bytes()
    (key, *_) = cache.hash_pages(PROMPT)
    place = text.index(key.tobytes())
    whole = expected(cache, PROMPT)
    for start, new in ((8 + 12, 9), (16, 1), (-8, 3)):  # a token, another, the check
        changed = bytearray(text)
        changed[place + start] ^= new
        path.write_bytes(changed)
        os.truncate(path, len(text))
        assert told(cache) == {**whole, tuple(key.tolist()): ()}
    random = np.random.default_rng(1)
    path.write_bytes(random.bytes(len(text)))
    assert set(told(cache).values()) == {()}
    path.write_bytes(text)
    os.truncate(path, place - 8 + size // 2)  # cut while it is open
    with PageIndex.attach(cache.name, readonly=True) as index:
        reader = cache.token_records
        assert reader is not None
        (batch,) = Changes(index).scan()
        assert not reader.read(batch.stored_pages, batch.stored)[1].any()
    put(cache, list(range(4)), list(range(4)))  # writes beyond the end


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([-1] * 20, "token 0 is -1"),
        ([1 << 32] * 20, "token 0"),
        ([0.5] * 20, "integers"),
        ([["a"]], "one dimension"),
        (PROMPT[:19], "5 keys, 20 or more, found 19"),
    ],
)
def test_wrong_tokens_reserve_nothing(cache: Cache, wrong: Any, words: str) -> None:
    keys = cache.hash_pages(PROMPT)
    refused(ConfigError, words, cache.reserve, keys, tokens=wrong)
    assert len(cache.reserve(keys).new) == 5


def test_without_records_tokens_are_ignored(segment_name: str) -> None:
    with Cache.create(segment_name, **FORM) as cache:
        assert cache.token_records is None
        put(cache, PROMPT, "no tokens")
        assert not path_of(cache).exists()
    refused(
        ConfigError, "page_tokens", Cache.create, segment_name, pages=4, page_bytes=64,
        fingerprint="x", secret=SECRET, token_ids=True,
    )  # fmt: skip


def test_where_more_than_tokens_decides_there_are_none(cache: Cache) -> None:
    rows = np.zeros((5, FORM["page_bytes"]), np.uint8)
    for how in ({"salt": "a"}, {"lora": b"b"}, {"extra": {0: b"c"}}):
        cache.put(PROMPT, rows, **how)
    cache.put(PROMPT, rows, namespace=cache.namespace(tenant="team-7"))
    found = told(cache)
    assert set(found.values()) == {()}
    assert len(found) == 20
    cache.evict(32)
    cache.put(PROMPT, rows)
    assert told(cache) == expected(cache, PROMPT)


def test_no_memory_loses_records_and_no_pages(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for begin in (0, 100):
        tokens = list(range(begin, begin + 8))
        put(cache, tokens, tokens)
    monkeypatch.setattr(os, "pwrite", lambda _, data, __: len(data) // 2)
    put(cache, PROMPT, PROMPT)
    assert cache.token_records is not None
    assert cache.token_records.lost == 4 + 2
    assert [each.message for each in caplog.records] == [
        f"{cache.name}: token ids of 2 pages were not written: No space left on device; their "
        "events have none, and this is said once"
    ]
    assert len(told(cache)) == 7


# ---- the object


def test_the_object_is_the_owners_alone_and_goes_with_the_cache(
    segment_name: str, run: Any
) -> None:
    former = os.umask(0)
    try:
        made = Cache.create(
            segment_name, **FORM, token_ids=True, lifetime="persistent", group=os.getgid()
        )
    finally:
        os.umask(former)
    path = path_of(made)
    assert made.index.segment.stat().st_mode & 0o777 == 0o660
    assert path.stat().st_mode & 0o7777 == 0o600
    assert path.stat().st_size == 32 * (24 + 4 * SIZE)
    put(made, PROMPT, PROMPT)
    assert "token ids" in run("dump", segment_name).output
    assert '"token_ids_bytes": 4096' in run("dump", segment_name, "--json").output
    listed = run("ls", "--json").output
    assert path.name in listed
    pool = FORM["pages"] * FORM["page_bytes"]
    assert f'"pool_bytes": {pool},' in listed
    files = len(os.listdir("/proc/self/fd"))
    made.close()
    assert len(os.listdir("/proc/self/fd")) < files - 1
    with Cache.attach(segment_name, secret=SECRET, readonly=True) as reader:
        assert reader.token_records is not None
    Segment.unlink(segment_name)
    assert not path.exists()


def test_the_object_is_in_shared_memory_wherever_the_pool_is(segment_name: str) -> None:
    folder = names.FOLDER / f"{segment_name}-folder"
    folder.mkdir()
    try:
        with Cache.create(segment_name, **FORM, token_ids=True, pool_path=folder) as cache:
            put(cache, PROMPT, PROMPT)
            assert told(cache) == expected(cache, PROMPT)
            assert len(list(folder.iterdir())) == 1
            path = path_of(cache)
            assert path.exists()
        assert not path.exists()
    finally:
        folder.rmdir()


def test_an_object_whose_segment_is_gone_is_swept(cache: Cache, run: Any) -> None:
    orphan = path_of(cache).with_name(path_of(cache).name[:-32] + "0" * 32)
    orphan.write_bytes(b"")
    orphan.chmod(0o600)
    assert [left.object_name for left in leftovers(cache.name)] == [f"/{orphan.name}"]
    run("rm", cache.name, "--force")
    assert not orphan.exists()
    assert not path_of(cache).exists()


def broken(cache: Cache) -> Callable[[], None]:
    """A process attaches."""

    def attach() -> None:
        with PageIndex.attach(cache.name) as index:
            TokenRecords.of(index.segment, index.pages, readonly=False)

    return attach


def test_a_strange_object_is_refused_and_the_cache_works(
    cache: Cache, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path, attach = path_of(cache), broken(cache)
    kept = path.with_name(path.name + "x")

    def warned() -> str:
        caplog.clear()
        with Cache.attach(cache.name, secret=SECRET) as other:
            assert other.token_records is None
            put(other, PROMPT, PROMPT)
            assert len(told_by_index(other)) == 5
        (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
        return record.message

    path.chmod(0o640)
    refused(PermissionDenied, "expected one regular file .* found .* mode 0640", attach)
    assert "mode 0640" in warned()
    path.chmod(0o600)
    os.link(path, kept)
    refused(PermissionDenied, "2 links", attach)
    kept.unlink()
    os.truncate(path, path.stat().st_size - 1)
    refused(CacheCorrupted, "expected 1280 bytes, found 1279", attach)
    assert "1279" in warned()
    path.unlink()
    refused(NotReady, "are gone", attach)
    assert "are gone" in warned()
    path.symlink_to(tmp_path)
    refused(PermissionDenied, "link", attach)


def told_by_index(cache: Cache) -> Any:
    return Changes(cache.index).scan()[0].stored


def test_a_header_that_lies(cache: Cache) -> None:
    for wrong in (0, -1, True, "4", 1 << 21, None):
        config = {**cache.index.segment.config, "page_tokens": wrong}
        lies = SimpleNamespace(config=config, name=cache.name)
        refused(CacheCorrupted, "in its header", TokenRecords.of, lies, 32, readonly=True)


def test_another_users_object(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    with PageIndex.attach(cache.name) as index:
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            refused(
                PermissionDenied, "user 12345", TokenRecords, index.segment, 32, SIZE, readonly=True
            )


def test_what_opening_compares(segment_name: str, caplog: pytest.LogCaptureFixture) -> None:
    opens = partial(Cache.open, segment_name, **FORM)
    with opens(token_ids=True) as first, opens() as second:
        assert first.token_records is not None
        assert second.token_records is not None
        refused(LayoutMismatch, "token_ids", opens, token_ids=False)
    with opens(token_ids=False) as plain:
        assert plain.token_records is None
        refused(LayoutMismatch, "token_ids", opens, token_ids=True)
    form = {**FORM, "model": segment_name}
    with Cache.open(**form) as plain:
        try:
            assert not caplog.records
            with Cache.open(**form, token_ids=True) as other:
                assert other.token_records is None
            assert "it notes no token ids, which were asked for" in caplog.text
        finally:
            Segment.unlink(plain.name, force=True)


def test_a_closed_cache_writes_nothing(segment_name: str) -> None:
    cache = Cache.create(segment_name, **FORM, token_ids=True)
    records, keys = cache.token_records, cache.hash_pages(PROMPT)
    assert records is not None
    cache.close()
    records.close()  # once more
    rows = records.rows(PROMPT, 5)
    refused(Detached, "after close", records.write, np.arange(5, dtype=np.int32), keys, rows)


# ---- who writes them


def test_managers_note_prompts_and_what_was_generated(cache: Cache, worlds: Any) -> None:
    world = worlds(cache=cache)
    tokens, late = list(range(100, 110)), [7, 8, 9, 10, 11, 12, 13]
    world.run("one", Prompt(tokens), keep=True)
    world.manager.allocate("one", 17)
    for number in range(7):
        world.manager.commit("one", 11 + number, new_tokens=late[number : number + 1])
    world.manager.release("one")
    world.backend.finish()
    world.manager.poll()
    whole = [*tokens, *late]
    assert told(cache) == expected(cache, whole)
    cache.evict(32)
    item = MultimodalItem(0, 2, b"digest")
    for how in ({"salt": "a"}, {"lora": b"b"}, {"tenant": "t"}, {"items": [item]}):
        world.run(str(how), Prompt(tokens, **how))
    assert set(told(cache).values()) == {()}


def test_write_back_notes_them(cache: Cache, worlds: Any) -> None:
    world = worlds(cache=cache, write=WritePolicy.BACK, blocks=8, low_water=0.0)
    world.run("first", Prompt(list(range(18))))
    world.run("second", Prompt(list(range(50, 80))))
    found = told(cache)
    assert (
        found.items()
        <= {
            **expected(cache, list(range(18))),
            **expected(cache, list(range(50, 80))),
        }.items()
    )
    assert len(found) >= 4


def test_vllm_sends_them_with_the_keys(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for half in ("scheduler", "worker"):
        apart = partial(open_cache, shared=False)
        monkeypatch.setattr(f"lightcache.connectors.vllm.{half}.open_cache", apart)
    prompt = list(range(3, 53))
    with Engine(segment_name, ranks=2, token_ids=True) as engine:
        engine.ask(prompt)
        engine.ask([*prompt[:30], *range(100, 130)])  # behind pages that are there
        engine.ask(prompt[:20], cache_salt="a")
        engine.idle()
        with Cache.attach(segment_name) as cache:
            found = told(cache)
            keys = [*cache.hash_pages(prompt), *cache.hash_pages([*prompt[:30], *range(100, 130)])]
            ids = [*prompt[:48], *prompt[:30], *range(100, 126)]
            for i, key in enumerate(keys):
                assert found.pop(tuple(key.tolist()), tuple(ids[i * 8 : i * 8 + 8])) == tuple(
                    ids[i * 8 : i * 8 + 8]
                )
            assert set(found.values()) == {()}
            assert len(found) == 2
    Segment.unlink(segment_name)


def test_a_storage_brings_pages_back_with_them(cache: Cache) -> None:
    with StorageTier.open(cache, "memory:") as tier:
        keys = cache.hash_pages(PROMPT)
        put(cache, PROMPT, PROMPT)
        assert tier.write(keys).wait(60.0).stored == 5
        cache.evict(32)
        put(cache, list(range(40)), list(range(40)))  # in the same pages
        cache.evict(32)
        tier.prefetch(keys[:2]).wait(60.0)
        tier.prefetch(keys[:4], 2, tokens=PROMPT).wait(60.0)
        task = tier.prefetch(keys, 4, tokens=PROMPT, hold=True)
        task.wait(60.0)
        task.publish(1).wait(60.0)
        refused(ConfigError, "found 19", tier.prefetch, keys, tokens=PROMPT[:19])
        assert told(cache) == {**expected(cache, PROMPT), **expected(cache, PROMPT[:8], 0)}


def test_a_storage_service_is_not_told_them(cache: Cache) -> None:
    with (
        StorageService(cache, empty(cache)),
        StorageClient(cache) as client,
    ):
        keys = cache.hash_pages(PROMPT)
        put(cache, PROMPT, PROMPT)
        assert client.write(keys).wait(60.0).stored == 5
        cache.evict(32)
        put(cache, list(range(40)), list(range(40)))
        cache.evict(32)
        assert client.prefetch(keys, tokens=PROMPT).wait(60.0).prefix == 5
        assert told(cache) == expected(cache, PROMPT, 0)


def test_a_manager_reads_pages_from_a_storage_with_them(
    cache: Cache, worlds: Any, wait_until: Any
) -> None:
    with StorageTier.open(cache, "memory:") as tier:
        put(cache, PROMPT, PROMPT)
        tier.write(cache.hash_pages(PROMPT)).wait(60.0)
        cache.evict(32)
        put(cache, list(range(40)), list(range(40)))
        cache.evict(32)
        world = worlds(cache=cache, storage=lambda _: tier)
        world.manager.prefetch(Prompt(PROMPT[:8])).wait(60.0)
        assert told(cache) == expected(cache, PROMPT[:8])
        world.manager.plan("one", Prompt([*PROMPT, 1]))
        wait_until(lambda: told(cache) == expected(cache, PROMPT), "its pages")
        world.manager.cancel("one")
