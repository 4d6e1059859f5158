"""What a cache, its secret and its pool refuse."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Table, tried

from lightcache import (
    Cache,
    CacheCorrupted,
    ConfigError,
    Detached,
    InUse,
    LayoutMismatch,
    NoSpace,
    NotReady,
    PageIndex,
    PermissionDenied,
    StorageError,
    pool,
)
from lightcache._arguments import parse_size
from lightcache.hashing import load_or_create_secret
from lightcache.page_index import MAX_PAGES, geometry
from lightcache.pool import CHUNK_BYTES
from lightcache.shm import memory

SECRET = b"a secret of tests"
GOOD: dict[str, Any] = {
    "pages": 8,
    "page_bytes": 4096,
    "fingerprint": "model/bf16/16",
    "page_tokens": 16,
    "secret": SECRET,
}
TOKENS = np.arange(64)
NO_COUNTS = (-1, 1.5, None, "1", True)


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with Cache.create(segment_name, **GOOD) as made:
        yield made


@pytest.fixture
def attach(cache: Cache) -> Iterator[Callable[..., Cache]]:
    """A second client; what was refused has left again."""
    yield lambda secret=SECRET, **how: Cache.attach(cache.name, secret=secret, **how)
    assert len(cache.clients()) == 1


@pytest.fixture
def open_again(cache: Cache) -> Iterator[Callable[..., Cache]]:
    yield lambda **how: Cache.open(cache.name, **{**GOOD, **how})
    assert len(cache.clients()) == 1


@pytest.fixture
def plain(segment_name: str) -> Iterator[Cache]:
    """Without `page_tokens`."""
    with Cache.create(f"{segment_name}-plain", **{**GOOD, "page_tokens": None}) as made:
        yield made


@pytest.fixture
def stranger(cache: Cache) -> Iterator[Cache]:
    with Cache.attach(cache.name, secret=b"another secret, as long") as made:
        yield made


@pytest.fixture
def half(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    """4 of its 8 pages have memory, and the system has no more."""
    big = {**GOOD, "page_bytes": CHUNK_BYTES // 4}
    with Cache.create(f"{segment_name}-half", **big, grow=False) as made:
        room = memory.FreeMemory(4096, "in this test")
        monkeypatch.setattr(memory, "available", lambda: room)
        yield made
        assert made.check().pins == 0
        assert made.pool.grown == 4


@pytest.fixture
def closed(cache: Cache) -> Cache:
    other = Cache.attach(cache.name, secret=SECRET, grow=False)
    other.close()
    return other


def path_of(cache: Cache) -> Path:
    """Of its pool's object."""
    return Path("/dev/shm") / cache.index.segment.dependent_name("pool").removeprefix("/")


@pytest.fixture
def gone(cache: Cache) -> None:
    path_of(cache).unlink()


@pytest.fixture
def longer(cache: Cache) -> Iterator[None]:
    os.truncate(path_of(cache), 8192 * 8)
    yield
    os.truncate(path_of(cache), 4096 * 8)


@pytest.fixture
def two_names(cache: Cache) -> Iterator[None]:
    other = path_of(cache).with_name(f"{path_of(cache).name}-link")
    other.hardlink_to(path_of(cache))
    yield
    other.unlink()


@pytest.fixture
def of_another_user(cache: Cache) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can change owners")
    os.chown(path_of(cache), 65534, -1)
    yield
    os.chown(path_of(cache), 0, -1)


@pytest.fixture
def folder(segment_name: str) -> Iterator[Path]:
    """One for pools, with a file, and with a link to it beside it."""
    made = Path(f"/dev/shm/{segment_name}-folder")
    made.mkdir()
    (made / "file").touch()
    made.with_name(f"{made.name}-link").symlink_to(made)
    yield made
    shutil.rmtree(made)
    made.with_name(f"{made.name}-link").unlink()


def made(**changed: Any) -> list[Callable[[str], Any]]:
    """Making a cache, in both ways."""
    given = {**GOOD, **changed}
    return [lambda segment_name, call=call: call(segment_name, **given) for call in CALLS]


def indexed(**changed: Any) -> list[Callable[[str], Any]]:
    """The same of an index."""
    calls = (PageIndex.create, PageIndex.open)
    return [lambda segment_name, call=call: call(segment_name, **changed) for call in calls]


def encoded(hashes: Any, **how: Any) -> Callable[[Cache], object]:
    return lambda cache: cache.engine_keys(**how).encode(hashes)


def secret_of(size: int) -> Callable[[Path], object]:
    def call(tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(bytes(size))
        (tmp_path / "secret").chmod(0o600)
        load_or_create_secret(tmp_path / "secret")

    return call


def readable_secret(mode: int) -> Callable[[Path], object]:
    def call(tmp_path: Path) -> None:
        load_or_create_secret(tmp_path / "secret")
        (tmp_path / "secret").chmod(mode)
        load_or_create_secret(tmp_path / "secret")

    return call


def secret_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_create_secret(tmp_path / "secret")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    load_or_create_secret(tmp_path / "secret")


def no_plain_file(kind: str) -> Callable[[Path], object]:
    def call(tmp_path: Path) -> None:
        if kind == "link":
            load_or_create_secret(tmp_path / "secret")
            (tmp_path / kind).symlink_to("secret")
        elif kind == "fifo":
            os.mkfifo(tmp_path / kind, 0o600)
        else:
            (tmp_path / kind).mkdir(mode=0o700)
        load_or_create_secret(tmp_path / kind)

    return call


def secret_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    load_or_create_secret(tmp_path / "file" / "secret")


CALLS = (Cache.create, Cache.open)
NO_SIZES = ("", "0", "-1", "0.1", "GiB", "1 XiB", "1e9", "1,5 GiB", "1..5", "1 GiB x", "inf", "nan")
NOT_SIZES = (0, -1, 1.5, None, True, b"1", "\u0661")
PATHS = ("relative", "", "/", "/dev/shm/..", "/dev/shm/a\0b")

TABLE: Table = {
    ("gave a size or page size", ConfigError): [
        *(("pool size", lambda n=n: parse_size(n, "pool size")) for n in (*NO_SIZES, *NOT_SIZES)),
        ("less than 4 EiB", lambda: parse_size("9" * 400), lambda: parse_size("9999PiB")),
        *(("pages", *made(pages=n)) for n in (0, -1, 1.5)),
        *(("size", *made(pages=None, size=n)) for n in (0, "-1")),
        *(("page_bytes", *made(page_bytes=n)) for n in (0, -4096, "8 Mbit", 1 << 41)),
    ],
    ("gave both `pages` and `size`", ConfigError): [
        ("capacity", *made(pages=None), *made(size="1MiB"))
    ],
    ("gave a size below one page", ConfigError): [
        ("less than one page", *made(pages=None, size="4095")),
        *(("pages", *indexed(pages=n)) for n in (0, -1, MAX_PAGES + 1, 1.0, "8", None, True)),
        *(("pages", lambda n=n: geometry(n)) for n in (0, -1, MAX_PAGES + 1, 1.0, "8", None, True)),
        *(("grown", *indexed(pages=4, grown=n)) for n in (-1, 5, 1.0)),
    ],
    ("gave an idle limit", ConfigError): [
        *(
            ("idle_limit: expected seconds", *made(idle_limit=n))
            for n in (0, -1, math.nan, math.inf, 1 << 40, "1", True)
        ),
        ('idle_limit: expected lifetime="persistent"', *made(lifetime="attached", idle_limit=5)),
    ],
    ("gave an empty fingerprint", ConfigError): [
        ("fingerprint", *made(fingerprint=""), *made(fingerprint=None)),
        ("algorithm", *made(algorithm="md5")),
        ("secret", *made(secret=b"short"), *made(secret="a text instead of bytes")),
        ("secret file", secret_of(0), secret_of(15), secret_of(1025)),
    ],
    ("used another secret", LayoutMismatch): [
        (
            "another secret",
            lambda stranger: stranger.hash_pages(TOKENS),
            lambda stranger: stranger.hasher(),
            lambda stranger: stranger.key_spec(),
            lambda stranger: stranger.engine_keys(),
        )
    ],
    ("attached with another fingerprint", LayoutMismatch): [
        ("model/bf16/16", lambda attach: attach(fingerprint="another")),
        ("pages", lambda open_again: open_again(pages=9)),
        ("fingerprint", lambda open_again: open_again(fingerprint="other")),
        ("kv_groups", lambda open_again: open_again(kv_groups=("kv", "states"))),
        ("secret", lambda open_again: open_again(secret=bytes(32))),
    ],
    ("attached to an index as a `Cache`", ConfigError): [
        ("without a host pool", lambda index: Cache.attach(index.name, secret=SECRET))
    ],
    ("gave another `page_tokens`", ConfigError): [
        ("16 tokens a page, found 32", lambda cache: cache.hash_pages(TOKENS, 32)),
        ("page_tokens", lambda plain: plain.hash_pages(TOKENS)),
        *(("page_tokens", *made(page_tokens=n)) for n in (-1, 1.5, 0)),
    ],
    ("gave hashes of an engine", ConfigError): [
        (
            "in a list",
            *(
                encoded(one)
                for one in ("ab" * 16, bytes(16), 7, None, iter([7]), {7}, np.uint64(7))
            ),
        ),
        ("float", encoded([1.5]), encoded([7, 1.5])),
        ("of one kind", encoded([7, bytes(16)]), encoded([True]), encoded([None])),
        ("array of int64", encoded(np.arange(4)), encoded(np.zeros((4, 2), np.int64))),
        ("array of uint64", *(encoded(np.zeros(n, np.uint64)) for n in ((4, 3), (4, 2, 1), ()))),
        ("- 1, found -1", encoded([7, -1])),
        ("- 1, found 3", encoded([7, 1 << 128])),
        ("64-bit hash give h %", encoded([-7])),
        ("32 to 128 hex digits, found lengths .16]", encoded(["ab" * 8])),
        ("found lengths .33]", encoded(["ab" * 16 + "a"])),
        ("found lengths .32, 64]", encoded(["ab" * 16, "ab" * 32])),
        ("found lengths .130]", encoded(["ab" * 65])),
        ("16 to 64 bytes, found lengths .8]", encoded([bytes(8)])),
        ("found lengths .65]", encoded([bytes(65)])),
        ("number 1 has a character", *(encoded(["ab" * 16, c * 32]) for c in "g -\u0661")),
        ("number 0 has a character", encoded([" " + "ab" * 15 + " "])),
        ("must be bytes", encoded([7], lora=5), encoded([7], salt=5)),
    ],
    ("gave a `pool_path`", ConfigError): [
        *(("absolute", *made(pool_path=path)) for path in PATHS),
        ("not there", *made(pool_path="/dev/shm/there-is-no-such-folder")),
        ("neither tmpfs nor hugetlbfs", *made(pool_path="/proc")),
        (
            "link",
            lambda folder, segment_name: Cache.create(
                segment_name, **GOOD, pool_path=folder.with_name(f"{folder.name}-link")
            ),
        ),
        (
            "folder",
            lambda folder, segment_name: Cache.create(
                segment_name, **GOOD, pool_path=folder / "file"
            ),
        ),
    ],
    ("gave an `eviction`", ConfigError): [
        *(("eviction", *made(eviction=order)) for order in ("fifo", "", 1, [])),
    ],
    ("gave a `numa`", ConfigError): [
        *(
            ("numa", *made(numa=n))
            for n in (-1, 99999, True, 1.0, "gpu", "gpu:", "gpu:x", "nodes", "", [])
        ),
        ("numa", lambda attach: attach(numa="everywhere"), lambda: pool.parse_numa("-1")),
    ],
    ("asked for a page that", ConfigError): [
        *(
            ("page", lambda cache, n=n: cache.pool[n])
            for n in (-1, 8, 1.0, "0", None, True, slice(0, 1))
        )
    ],
    ("let the pool grow beyond", NoSpace): [
        ("4 of 8 pages", lambda half: half.pool.grow(1), lambda half: half.pool.prefault())
    ],
    ("the pool's object is gone", NotReady): [("", lambda attach, gone: attach())],
    ("the pool's object has another length", CacheCorrupted): [
        ("", lambda attach, longer: attach())
    ],
    ("the pool's object has another owner", PermissionDenied): [
        ("", lambda attach, two_names: attach(), lambda attach, of_another_user: attach())
    ],
    ("created what exists", InUse): [
        ("", lambda cache: Cache.create(cache.name, **GOOD)),
        ("", lambda open_again: open_again(pages=9, replace=True)),
    ],
    ("attached to what does not exist", NotReady): [
        ("no such segment", lambda segment_name: Cache.attach(segment_name, secret=SECRET)),
        ("no such segment", lambda segment_name: PageIndex.attach(segment_name)),
    ],
    ("the secret's file is readable", PermissionDenied): [
        *(
            (f"mode {mode:04o}, expected 0600", readable_secret(mode))
            for mode in (0o640, 0o604, 0o660, 0o644, 0o610)
        )
    ],
    ("the secret's file cannot", StorageError): [
        ("cannot be read or created", secret_below_a_file)
    ],
    ("", PermissionDenied): [
        ("belongs to user", secret_of_another),
        ("plain file", *(no_plain_file(kind) for kind in ("link", "fifo", "folder"))),
    ],
    ("", ConfigError): [
        *(
            ("kv_groups: expected 1 to 32 different names", *made(kv_groups=names))
            for names in (
                *((), "kv", 3, ("kv", "kv"), ("kv", ""), ("kv", 1), ("k v",), ("x" * 32,)),
                [f"g{i}" for i in range(33)],
            )
        ),
        *(("pages", lambda cache, n=n: cache.pool.grow(n)) for n in NO_COUNTS),
        *(("threads", lambda cache, n=n: cache.pool.grow(1, threads=n)) for n in (0, *NO_COUNTS)),
        *(
            ("seconds", lambda cache, n=n: cache.index.no_memory(n))
            for n in (-1, "1", None, math.nan)
        ),
        *(
            ("n:", lambda index, n=n: index.evict(n))
            for n in (-1, 1.0, "1", None, True, MAX_PAGES + 1)
        ),
    ],
    ("", Detached): [
        ("", lambda closed: closed.pool.grow(1)),
        ("", lambda closed: closed.pool.prefault()),
    ],
}


test_refused = tried(TABLE)
