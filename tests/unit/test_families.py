"""Default names, and caches of one family: what is unused gives way to one that needs the room; an
attacher compares only what it names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from lightcache import Cache, ConfigError, LayoutMismatch, NoSpace, cache_name, page_index
from lightcache.shm import layout, memory, names, ofd, read_segment, sweep
from lightcache.shm.objects import OpenObject

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
    for model, fingerprint in ((None, "bf16"), ("x", b"bf16"), ("", "bf16"), ("//", "bf16")):
        refused(ConfigError, "model", cache_name, model, fingerprint)


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
        refused(LayoutMismatch, "The secrets.*share ~/", Cache.open, segment_name, **other_secret)
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

    def available(self) -> memory.FreeMemory:
        """Pools alone are counted; indexes are small."""
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


def opened(name: str, family: str | None, pages: int = 64, **more: Any) -> Cache:
    return Cache.open(name, **FORM, pages=pages, fingerprint="f", family=family, grow=False, **more)


def full(cache: Cache) -> Cache:
    cache.pool.prefault()
    return cache


def exists(name: str) -> bool:
    return read_segment(name) is not None


def test_unused_ones_give_way_when_room_is_needed(segment_name: str, room: Room) -> None:
    room.pages = 200
    old, older, stranger, new = (f"{segment_name}-{end}" for end in ("b", "a", "x", "n"))
    for name, family in ((older, "m"), (old, "m"), (stranger, "other")):
        full(opened(name, family)).close()
    room.pages = 64 * 4
    opened(new, "m").close()
    assert exists(older), "there is room"
    OpenObject.open(new, writable=True).remove_locked()  # type: ignore[union-attr]
    room.pages = 200
    with opened(new, "m"):
        assert not exists(older), "unused for longest"
        assert exists(old), "no more than needed"
        assert exists(stranger), "another family"


def test_one_in_use_stays_and_its_memory_comes_later(
    segment_name: str, room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    room.pages = 100
    old, new = f"{segment_name}-o", f"{segment_name}-n"
    running = full(opened(old, "m", role="engine 1"))
    words = r"the pool needs 4.0 MiB.*found .* free in a test;"
    refused(NoSpace, words, opened, new, None)
    refused(NoSpace, rf"of the same family '{old}' has 4.. MiB.*engine 1", opened, new, "m", 128)
    with caplog.at_level(logging.WARNING), opened(new, "m") as cache:
        [said] = [each.getMessage() for each in caplog.records]
        assert re.search(rf"'{old}' has 4.. MiB and is in use.*until those have ended", said)
        refused(NoSpace, "grow", cache.pool.prefault)
        assert cache.pool.grown < 64
        assert exists(old)
        with Cache.attach(old, readonly=True, secret=bytes(16)):
            running.close()
            refused(NoSpace, "grow", cache.pool.prefault)
            assert exists(old), "a reader lives in it"
        cache.pool.prefault()
        assert cache.pool.grown == 64
        assert not exists(old), "nobody lives in it, and the new one needs its room"


def test_none_goes_that_a_process_attaches_to(segment_name: str, room: Room) -> None:
    room.pages = 100
    old, new = f"{segment_name}-o", f"{segment_name}-n"
    full(opened(old, "m")).close()
    held = OpenObject.open(old, writable=False)
    assert held is not None
    with ofd.locked(held.fd, layout.BYTE_LIFE, exclusive=False):  # as an attach in progress
        refused(NoSpace, "the pool needs", opened, new, "m")
        assert exists(old)
    held.close()
    opened(new, "m").close()
    assert not exists(old)


def test_none_goes_if_it_gives_no_room(segment_name: str, room: Room) -> None:
    """As where the limit is that of our cgroup, and another's memory does not count in it."""
    room.pages = 200
    for end in "abc":
        full(opened(f"{segment_name}-{end}", "m")).close()
    room.pages, room.elsewhere = 32, True
    refused(NoSpace, "the pool needs", opened, f"{segment_name}-n", "m")
    assert sum(exists(f"{segment_name}-{end}") for end in "abc") == 2, "tried with one"


def test_a_family_has_the_size_of_its_creator(segment_name: str, room: Room) -> None:
    room.pages = 200
    with opened(segment_name, "m", 8) as cache, opened(segment_name, "m", 64) as other:
        assert (cache.pages, other.pages) == (8, 8)
        refused(LayoutMismatch, "pages: expected 64", opened, segment_name, None, 64)
    for family in ("", 1):
        refused(ConfigError, "family: expected", opened, segment_name, family)


def test_another_users_stays(segment_name: str, room: Room) -> None:
    if os.geteuid():
        pytest.skip("only root can give an object to another user")
    room.pages = 100
    old = f"{segment_name}-o"
    full(opened(old, "m")).close()
    path = Path(names.FOLDER, f"lightcache.{old}")
    os.chown(path, 1, -1)
    refused(NoSpace, "the pool needs", opened, f"{segment_name}-n", "m")
    assert exists(old)
    os.chown(path, 0, -1)
