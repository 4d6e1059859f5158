"""Default names, and caches of one family: what is unused gives way to one that needs the room; an
attacher compares only what it names."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from lightcache import (
    Cache,
    ConfigError,
    InUse,
    LayoutMismatch,
    NoSpace,
    NotReady,
    cache_name,
    page_index,
)
from lightcache.pool import pool_name
from lightcache.shm import layout, memory, names, ofd, sweep
from lightcache.shm.folders import FOLDER_ITEM
from lightcache.shm.listing import read_segment
from lightcache.shm.objects import OpenObject
from lightcache.shm.wanted import FAMILY_ITEM

PAGE = 1 << 16
FORM: dict[str, Any] = {"page_bytes": PAGE, "secret": bytes(16), "lifetime": "persistent"}


# ---- names


def test_a_name_has_the_model_and_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    name = cache_name("meta-llama/Llama 3:8B", "bf16")
    assert re.fullmatch(r"meta-llama-Llama-3-8B-[0-9a-f]{8}", name)
    names.object_name(name)
    assert name == cache_name("meta-llama/Llama 3:8B", "bf16")
    others = {cache_name("meta-llama/Llama 3:8B", "fp8")}
    monkeypatch.setattr(page_index, "_facts", lambda: "another layout")
    others.add(cache_name("meta-llama/Llama 3:8B", "bf16"))
    monkeypatch.undo()
    monkeypatch.setattr(layout, "ABI", 2)
    others.add(cache_name("meta-llama/Llama 3:8B", "bf16"))
    assert len(others - {name}) == 3
    assert len(cache_name("x" * 300, "bf16")) == 109
    revision = cache_name("meta-llama/Llama 3:8B@5206a32", "bf16")
    assert revision != name
    assert revision[:-8] == name[:-8], "the digest has it, the model's name does not"
    for model, fingerprint in ((None, "bf16"), ("x", b"bf16"), ("", "bf16"), ("//", "bf16")):
        refused(ConfigError, "model", cache_name, model, fingerprint)
    refused(ConfigError, "model", cache_name, "@5206a32", "bf16")


def test_a_model_without_a_name_has_the_default(segment_name: str) -> None:
    form = {**FORM, "pages": 4, "fingerprint": "f", "lifetime": "attached"}
    model = f"{segment_name}@1"
    with Cache.open(model=model, **form) as cache:
        assert cache.name == cache_name(model, "f")
        info = read_segment(cache.name)
        assert info is not None
        assert info.family == segment_name
        with Cache.open(model=model, **{**form, "fingerprint": "g"}) as other:
            assert other.name == cache_name(model, "g")
            refused(ConfigError, f"{other.name}", Cache.attach, model=model)
            with Cache.attach(model=model, fingerprint="g") as attached:
                assert attached.name == other.name
        with (
            Cache.attach(model=segment_name, readonly=True) as only,
            Cache.create(f"{segment_name}-mine", model=model, **form) as named,
        ):
            assert only.name == cache.name
            info = read_segment(named.name)
            assert info is not None
            assert info.family is None, "who gives a name decides when it goes"
        refused(InUse, "it exists", Cache.create, model=model, **form)
    refused(NotReady, "no cache of the model", Cache.attach, model=model)
    for call in (Cache.open, Cache.create):
        refused(ConfigError, "name: expected one, or model=", call, **form)
        refused(ConfigError, "model: expected a name", call, model=7, **form)
    refused(ConfigError, "name: expected one, or model=", Cache.attach)
    refused(ConfigError, "model: expected a name", Cache.attach, model=7)


# ---- the secret, and the file that it is read from


def test_the_secret_of_a_file_that_is_named(
    segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"pages": 4, "page_bytes": PAGE, "page_tokens": 8, "fingerprint": "f"}
    ours, theirs, link = (tmp_path / name for name in ("ours", "theirs", "link"))
    link.symlink_to("ours")  # as Kubernetes mounts a secret
    with Cache.open(segment_name, **form, secret_file=ours) as cache:
        assert cache.key_spec().secret == ours.read_bytes()
        with Cache.open(segment_name, **form, secret=ours.read_bytes()):
            pass
        for how in ({"secret_file": str(link)}, {}):
            monkeypatch.setenv("LIGHTCACHE_SECRET_FILE", str(theirs if how else ours))
            with Cache.attach(segment_name, **how) as other:
                assert other.key_spec() == cache.key_spec()
        monkeypatch.setenv("LIGHTCACHE_SECRET_FILE", str(theirs))
        says = rf"(?s)secret.*from the file {theirs}:.*secret_file= or LIGHTCACHE_SECRET_FILE"
        refused(LayoutMismatch, says, Cache.open, segment_name, **form)
        refused(LayoutMismatch, says, Cache.open, segment_name, **form, secret_file=theirs)
        refused(LayoutMismatch, "from secret=:", Cache.open, segment_name, **form, secret=bytes(16))
        with Cache.attach(segment_name, secret_file=theirs) as other:
            refused(LayoutMismatch, f"another secret.*the file {theirs}", other.key_spec)
        both = {"secret": bytes(16), "secret_file": ours}
        refused(ConfigError, "secret once", Cache.open, segment_name, **form, **both)
        refused(ConfigError, "secret once", Cache.attach, segment_name, **both)


# ---- what is named is compared


def test_an_opener_compares_what_it_names(segment_name: str) -> None:
    made = {"pages": 4, "page_tokens": 8, "algorithm": "blake2b", "kv_groups": ("a", "b")}
    with Cache.create(segment_name, **FORM, **made, fingerprint="f", independent=True) as cache:
        with Cache.open(segment_name, **FORM, pages=4, fingerprint="f") as other:
            assert other.key_spec() == cache.key_spec()
            assert other.index.independent
        with Cache.attach(segment_name, **made, fingerprint="f", page_bytes="64KiB"):
            pass
        wrong = {"pages": 5, "page_tokens": 4, "algorithm": "sha256", "kv_groups": ("a",)}
        for call in (
            lambda: Cache.open(segment_name, **FORM, **wrong, fingerprint="g", independent=False),
            lambda: Cache.attach(segment_name, **wrong, fingerprint="g", independent=False),
        ):
            error = refused_with(call)
            for each in (
                'algorithm: expected "sha256", found "blake2b"',
                'fingerprint: expected "g", found "f"',
                "independent: expected nothing, found true",
                "page_tokens: expected 4, found 8",
                "pages: expected 5, found 4",
            ):
                assert each in error
        other_secret = {**FORM, "secret": bytes(range(16)), "pages": 4, "fingerprint": "f"}
        refused(LayoutMismatch, "The secrets.*secret=:", Cache.open, segment_name, **other_secret)
    assert sweep(prefix=segment_name) == []
    Cache.attach(segment_name, secret=bytes(16)).close()
    OpenObject.open(segment_name, writable=True).remove_locked()  # type: ignore[union-attr]


def refused_with(call: Callable[[], object]) -> str:
    with pytest.raises(LayoutMismatch) as caught:
        call()
    return str(caught.value)


# ---- families


class Room:
    """A /dev/shm of its own size: what this family's pools have is taken from it."""

    def __init__(self, prefix: str, patch: pytest.MonkeyPatch) -> None:
        self.prefix, self.pages, self.elsewhere = prefix, 0, False
        patch.setattr(memory, "available", self.available)
        objects = names._objects  # a full /dev/shm is swept; only what is ours may go
        patch.setattr(names, "_objects", lambda: [full for full in objects() if prefix in full])
        for module in ("cache", "pool"):
            patch.setattr(f"lightcache.{module}.CHUNK_BYTES", PAGE)

    def available(self, **_: Any) -> memory.FreeMemory:
        """Pools alone are counted; indexes are small with "lru"."""
        return memory.FreeMemory(self.pages * PAGE - self.used() + (1 << 20), "free in a test")

    def used(self) -> int:
        if self.elsewhere:
            return 0
        return sum(
            path.stat().st_blocks * 512
            for path in names.FOLDER.iterdir()
            if self.prefix in path.name and "~pool" in path.name
        )


@pytest.fixture
def room(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    yield Room(segment_name, monkeypatch)
    for name in names.segment_names():
        opened = OpenObject.open(name, writable=True) if segment_name in name else None
        if opened is not None:
            with ofd.locked(opened.fd, layout.BYTE_LIFE):
                opened.remove_locked()
            opened.close()


class Family:
    """Default caches of a model, one for each fingerprint."""

    def __init__(self, model: str) -> None:
        self.model = model

    def open(self, fingerprint: str, pages: int = 64, **more: Any) -> Cache:
        how = {"fingerprint": fingerprint, "pages": pages, "grow": False, "eviction": "lru"}
        return Cache.open(**FORM, model=self.model, **how, **more)

    def name(self, fingerprint: str) -> str:
        return cache_name(self.model, fingerprint)

    def exists(self, fingerprint: str) -> bool:
        return read_segment(self.name(fingerprint)) is not None


@pytest.fixture
def family(segment_name: str) -> Family:
    return Family(f"{segment_name}@1")


def full(cache: Cache) -> Cache:
    cache.pool.prefault()
    return cache


def test_unused_ones_give_way_when_room_is_needed(family: Family, room: Room) -> None:
    room.pages = 300
    stranger = Family(f"{family.model.partition('@')[0]}-x")
    mine = {**FORM, "pages": 64, "fingerprint": "f", "grow": False, "model": family.model}
    mine["eviction"] = "lru"
    named = f"{stranger.model}-mine"
    full(family.open("older")).close()
    full(family.open("old")).close()
    full(stranger.open("f")).close()
    full(Cache.open(named, **mine)).close()
    room.pages = 64 * 5
    family.open("new").close()
    assert family.exists("older"), "there is room"
    OpenObject.open(family.name("new"), writable=True).remove_locked()  # type: ignore[union-attr]
    room.pages = 64 * 4
    with Family(f"{family.model}-b").open("new"):
        assert not family.exists("older"), "unused for longest; of another revision"
        assert family.exists("old"), "no more than needed"
    room.pages = 64 * 3
    refused(NoSpace, "the pool needs", family.open, "new", 128)
    assert family.exists("old"), "its memory would not have been enough"
    family.open("new").close()
    assert not family.exists("old")
    assert stranger.exists("f"), "another family"
    assert read_segment(named) is not None, "it was given a name"


def test_one_in_use_stays_and_its_memory_comes_later(
    family: Family, room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    room.pages = 100
    old = family.name("old")
    running = full(family.open("old", role="engine 1"))
    words = r"the pool needs 4.0 MiB.*found .* free in a test;"
    refused(NoSpace, words, Family(f"{family.model.partition('@')[0]}-x").open, "new")
    refused(NoSpace, rf"of the same family '{old}' has 4.. MiB.*engine 1", family.open, "new", 128)
    with caplog.at_level(logging.WARNING), family.open("new") as cache:
        [said] = [each.getMessage() for each in caplog.records]
        assert re.search(rf"'{old}' has 4.. MiB and is in use.*until those have ended", said)
        refused(NoSpace, "grow", cache.pool.prefault)
        assert cache.pool.grown < 64
        assert family.exists("old")
        with Cache.attach(old, readonly=True, secret=bytes(16)):
            running.close()
            refused(NoSpace, "grow", cache.pool.prefault)
            assert family.exists("old"), "a reader lives in it"
        cache.pool.prefault()
        assert cache.pool.grown == 64
        assert not family.exists("old"), "no process uses it, and the new one needs its room"


def test_none_goes_that_a_process_attaches_to(family: Family, room: Room) -> None:
    room.pages = 100
    full(family.open("old")).close()
    held = OpenObject.open(family.name("old"), writable=False)
    assert held is not None
    with ofd.locked(held.fd, layout.BYTE_LIFE, exclusive=False):  # as an attach in progress
        refused(NoSpace, "the pool needs", family.open, "new")
        assert family.exists("old")
    held.close()
    family.open("new").close()
    assert not family.exists("old")


def test_none_goes_if_it_gives_no_room(family: Family, room: Room) -> None:
    """As where the limit is that of our cgroup, and another's memory does not count in it."""
    room.pages = 200
    for end in "abc":
        full(family.open(end)).close()
    room.pages, room.elsewhere = 32, True
    refused(NoSpace, "the pool needs", family.open, "new")
    assert sum(map(family.exists, "abc")) == 2, "tried with one"


def test_a_default_cache_has_the_size_of_its_creator(family: Family, room: Room) -> None:
    room.pages = 200
    with family.open("f", 8) as cache, family.open("f", 64) as other:
        assert (cache.pages, other.pages) == (8, 8)
        given = {"pages": 64, "fingerprint": "f", "model": family.model}
        refused(LayoutMismatch, "pages: expected 64", Cache.open, cache.name, **FORM, **given)


def test_another_users_stays(family: Family, room: Room) -> None:
    if os.geteuid():
        pytest.skip("only root can give an object to another user")
    room.pages = 100
    full(family.open("old")).close()
    path = Path(names.FOLDER, f"lightcache.{family.name('old')}")
    os.chown(path, 1, -1)
    refused(NoSpace, "the pool needs", family.open, "new")
    assert family.exists("old")
    os.chown(path, 0, -1)


# ---- another release


def test_what_keeps_its_place_in_every_release() -> None:
    """Any release removes what another has left: these numbers never change."""
    header = layout.SegmentHeader
    fields = "magic abi uuid lifetime config_bytes config idle_ns used_ns retired ready"
    places = [(getattr(header, name).offset, getattr(header, name).size) for name in fields.split()]
    assert places == [
        (0, 8), (8, 4), (32, 16), (60, 4), (104, 4), (112, 2048),
        (4064, 8), (4072, 8), (4080, 4), (4088, 4),
    ]  # fmt: skip
    assert layout.MAGIC.to_bytes(8, "little") == b"LCLACHE1"
    assert (FAMILY_ITEM, FOLDER_ITEM) == ("family", "pool_path")
    assert (layout.BYTE_LIFE, layout.BYTE_READERS) == (1 << 46, (1 << 46) + 1)
    last = layout.BYTE_MEND + layout.SLOTS
    assert last <= layout.BYTE_READERS + layout.USED_BYTES == layout.BYTE_LIFE + (1 << 16)
    uuid = "0" * 32
    assert names.dependent_name("x", "pool", uuid) == f"/lightcache.x~pool-{uuid}"


OTHER_ABI = layout.ABI + 1


def made_by_another_release(cache: Cache) -> None:
    """All but what keeps its place is other data, as where the other release has moved it."""
    header, keep = layout.SegmentHeader, bytearray(4096)
    path = Path(names.FOLDER, f"lightcache.{cache.name}")
    data = path.read_bytes()[:4096]
    noise = bytes(255 for _ in range(1 << 16))
    fields = "magic uuid lifetime config_bytes config idle_ns used_ns retired ready"
    keep[:] = noise[:4096]
    for field in (getattr(header, name) for name in fields.split()):
        keep[field.offset : field.offset + field.size] = data[field.offset :][: field.size]
    keep[8:12] = OTHER_ABI.to_bytes(4, "little")
    with path.open("r+b") as file:
        file.write(keep)
        file.write(noise[: layout.PAYLOAD_OFFSET - 4096])


def test_what_another_release_has_left_gives_way(family: Family, room: Room) -> None:
    room.pages = 100
    with full(family.open("old")) as cache:
        pool = Path(names.FOLDER, pool_name(cache.index.segment)[1:])
    made_by_another_release(cache)
    held = OpenObject.open(family.name("old"), writable=True)
    assert held is not None
    info = read_segment(family.name("old"))
    assert info is not None
    assert (info.family, info.clients) == (family.model.partition("@")[0], 0)
    lock = layout.LOCK_OFFSET + layout.LockRecord.since_ns.offset  # another word, there
    for offset, value in ((4072, time.time_ns() - 3600 * 10**9), (lock, time.monotonic_ns())):
        os.pwrite(held.fd, value.to_bytes(8, "little"), offset)
    assert held.unused_ns() >= 3600 * 10**9
    for byte in (1, 7, 300, (1 << 16) - 1):  # whatever its processes lock
        with ofd.locked(held.fd, layout.BYTE_LIFE + byte):
            refused(NoSpace, "in use: processes of another release", family.open, "new", 128)
            assert family.exists("old")
    with ofd.locked(held.fd, layout.BYTE_LIFE, exclusive=False):
        refused(NoSpace, "the pool needs", family.open, "new")
    held.close()
    family.open("new").close()
    assert not family.exists("old")
    assert not pool.exists()


@pytest.mark.parametrize("ready", [0, 1])
def test_what_another_release_has_left_is_swept(segment_name: str, ready: int) -> None:
    """That of a dead creator, and that whose clients were all killed; not another program's."""
    Cache.open(segment_name, **FORM, pages=4, fingerprint="f").close()
    path = Path(names.FOLDER, f"lightcache.{segment_name}")
    with path.open("r+b") as file:
        file.seek(8)
        file.write(OTHER_ABI.to_bytes(4, "little"))
    assert sweep(prefix=segment_name) == [], "it is persistent"
    with path.open("r+b") as file:
        for offset, value in ((60, layout.Lifetime.ATTACHED), (4088, ready), (0, 7)):
            file.seek(offset)
            file.write(int(value).to_bytes(4, "little"))
    assert sweep(prefix=segment_name) == []
    with path.open("r+b") as file:
        file.write(b"LCLACHE1")
    assert len(sweep(prefix=segment_name)) == 1
    assert not path.exists()


def test_two_releases_side_by_side(
    family: Family, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own cache of one model and fingerprint; neither removes what the other uses."""
    room.pages = 200
    with full(family.open("f")) as cache:
        monkeypatch.setattr(layout, "ABI", OTHER_ABI)
        with full(family.open("f")) as other:
            assert other.name != cache.name
            room.pages = 130
            says = f"'{cache.name}' has 4.. MiB and is in use: processes of another release"
            refused(NoSpace, says, family.open, "g", 400)
            refused(LayoutMismatch, "version 2 were expected", Cache.attach, cache.name)
        monkeypatch.undo()
        assert family.exists("f")
