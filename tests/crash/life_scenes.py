"""What life_cycle.py kills: scenes of a cache's life, and what must be so behind a death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc

from lightcache import Cache
from lightcache.hashing import load_or_create_secret
from lightcache.shm import (
    Segment,
    SharedDict,
    SharedList,
    SharedLog,
    SharedRing,
    layout,
    names,
    sweep,
)

SHM = Path("/dev/shm")
SECRET = b"a secret of the life cycle"
TOKENS = np.arange(16 * 4)
CONFIG: dict[str, Any] = {
    "pages": 24,
    "page_bytes": 4096,
    "fingerprint": "f",
    "page_tokens": 16,
    "secret": SECRET,
    "grow": False,
    "timeout": 20.0,
}
LARGE = {**CONFIG, "pages": 5, "page_bytes": 16 << 20}  # memory comes in chunks of 64 MiB


@dataclass(frozen=True)
class Site:
    """Where a scene plays: a cache's name, and its configuration."""

    name: str
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)

    @property
    def folder(self) -> Path:
        """On a tmpfs, for a pool that is to lie apart from its segment."""
        return SHM / f"folder-of-{self.name}"

    def open(self, **more: Any) -> Cache:
        """Attach or create."""
        return Cache.open(self.name, **{**self.config, **more})


# ---------------------------------------------------------------- contents


def stamp(cache: Cache, page: int, value: int) -> None:
    """First and last bytes of a page."""
    cache.pool[page][:64] = cache.pool[page][-64:] = value


def fill(cache: Cache, first: int = 0) -> None:
    """Four ready pages, each stamped with its place in the prompt."""
    with cache.reserve(cache.hash_pages(TOKENS + 1000 * first)) as new:
        assert len(new.pages) == 4, f"room for {len(new.pages)} of 4 pages"
        for place, page in enumerate(new.pages.tolist()):
            stamp(cache, page, first + place + 1)
        new.publish()


def verify(cache: Cache, first: int = 0) -> None:
    """The four pages are there, with their bytes."""
    with cache.match(cache.hash_pages(TOKENS + 1000 * first)) as hit:
        assert len(hit) == 4, f"{len(hit)} of 4 ready pages are found"
        for place, page in enumerate(hit.pages.tolist()):
            ends = cache.pool[page][[0, 63, -64, -1]]
            assert (ends == first + place + 1).all(), f"page {page} holds {ends}"


# ---------------------------------------------------------------- what must be so afterwards


def works(cache: Cache) -> None:
    """Sound, nobody's pins in it, and every page can be handed out."""
    cache.reap()
    report = cache.check()
    assert report.clean, report
    cache.evict(cache.pages)
    stats = cache.stats()
    assert (stats.ready, stats.writing, stats.doomed) == (0, 0, 0), stats
    fill(cache, 5)
    verify(cache, 5)


def continued(at: Site) -> None:
    """Open goes on with what there was: the ready pages are found."""
    with at.open() as cache:
        verify(cache)
        works(cache)


def continued_or_new(at: Site) -> None:
    """Open gives the old one, whole, or a new one."""
    with at.open() as cache:
        if cache.peek(cache.hash_pages(TOKENS)):
            verify(cache)
        works(cache)


def replaced_or_not(at: Site) -> None:
    """The old one or the one that was to replace it, whole; and the other can still replace it."""
    with at.open(replace=True) as cache:
        if cache.peek(cache.hash_pages(TOKENS)):
            verify(cache)
        works(cache)


def moved_or_not(at: Site) -> None:
    """The old one in its folder or the new one in the usual place; and the folder holds no more
    than the old one's pool."""
    with at.open(pool_path="/dev/shm", replace=True) as cache:
        assert not list(at.folder.iterdir()), "the pool was replaced and is still there"
        works(cache)


# ---------------------------------------------------------------- scenes


def make_persistent(at: Site) -> None:
    """A cache with ready pages, in which nobody lives."""
    with Cache.create(at.name, **at.config, lifetime="persistent") as cache:
        fill(cache)


def make_idle(at: Site) -> None:
    """The same, unused for longer than its idle limit."""
    with at.open(idle_limit=1e-9) as cache:
        fill(cache)


def make_half(at: Site) -> None:
    """What a creator leaves that dies early."""
    full = names.object_name(at.name)
    posix_ipc.SharedMemory(full, posix_ipc.O_CREX, mode=0o600, size=4096).close_fd()


def make_apart_half(at: Site) -> None:
    """What a creator leaves that dies behind its pool, which lies apart."""
    make_persistent(at)
    with (SHM / names.object_name(at.name)[1:]).open("r+b") as segment:
        segment.seek(layout.SegmentHeader.ready.offset)
        segment.write(bytes(4))


def make_garbage(at: Site) -> None:
    """Things to be swept: a dead creator's leftover, and a dependent without its segment."""
    make_half(Site(f"{at.name}-half"))
    dependent = names.dependent_name(f"{at.name}-gone", "pool", "0" * 32)
    posix_ipc.SharedMemory(dependent, posix_ipc.O_CREX, mode=0o600, size=4096).close_fd()


def alone(at: Site) -> Cache:
    """Attached, with ready pages, and nobody else there."""
    cache = at.open()
    fill(cache)
    return cache


def structures(at: Site) -> None:
    """A list, a dict, a ring and a log, made, used and closed."""
    with (
        SharedDict.open(f"{at.name}-dict", capacity=64) as table,
        SharedList.open(f"{at.name}-list", nodes=64) as items,
        SharedRing.open(f"{at.name}-ring", capacity=64, message_bytes=64) as ring,
        SharedLog.open(f"{at.name}-log", capacity=64, message_bytes=64, writer=True) as log,
        SharedLog.attach(f"{at.name}-log") as reader,
    ):
        table.put(7, 3)
        items.move_back(5)
        assert (table[7], items.snapshot()) == (3, (5,))
        ring.push(b"message", timeout=0)
        assert ring.pop(timeout=0) == b"message"
        log.append(b"entry", timeout=0)
        assert reader.read(timeout=0) == b"entry"
        for one in (table, items, ring, log):
            one.check()


def secret_file(at: Site) -> Path:
    """In a folder of its own."""
    return at.folder / "secret"


def secret_is_whole(at: Site) -> None:
    """If the file is there it is whole; and it stays the same."""
    path = secret_file(at)
    first = load_or_create_secret(path)
    assert len(first) == 32
    assert load_or_create_secret(path) == first
    path.unlink()
    for draft in path.parent.glob(".secret.*"):  # what the dead one was writing
        draft.unlink()
    path.parent.rmdir()


@dataclass(frozen=True)
class Scene:
    """`before` is done by a process that leaves again; `prepare` and `act` by the victim, `act`
    step by step; `after` by a survivor."""

    act: Callable[[Site, Any], object]
    after: Callable[[Site], None]
    before: Callable[[Site], None] = lambda at: None
    prepare: Callable[[Site], Any] = lambda at: None
    lived_in: bool = False  # somebody is attached all the time
    kept: bool = True  # and still finds its pages behind the death
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    apart: bool = False  # the pool lies in a folder of its own

    def site(self, name: str) -> Site:
        """Where it plays."""
        at = Site(name, self.config)
        return replace(at, config={**at.config, "pool_path": at.folder}) if self.apart else at


def _readonly(at: Site) -> Cache:
    return Cache.attach(at.name, readonly=True, secret=SECRET)


def _bigger(at: Site) -> Cache:
    return at.open(pages=48, replace=True)


def _moved(at: Site) -> Cache:
    """From its folder to the usual place."""
    return at.open(pool_path="/dev/shm", replace=True)


SCENES = {
    "create": Scene(lambda at, _: at.open(), continued_or_new),
    "open": Scene(lambda at, _: at.open(), continued, make_persistent),
    "open-beside-others": Scene(lambda at, _: at.open(), continued, lived_in=True),
    "attach-readonly": Scene(lambda at, _: _readonly(at), continued, lived_in=True),
    "open-behind-a-dead-creator": Scene(lambda at, _: at.open(), continued_or_new, make_half),
    "close-last": Scene(lambda at, cache: cache.close(), continued_or_new, prepare=alone),
    "close-beside-others": Scene(
        lambda at, cache: cache.close(), continued, prepare=Site.open, lived_in=True
    ),
    "replace": Scene(lambda at, _: _bigger(at), replaced_or_not, make_persistent),
    "unlink": Scene(lambda at, _: Segment.unlink(at.name), continued_or_new, make_persistent),
    "unlink-beside-others": Scene(
        lambda at, _: Segment.unlink(at.name, force=True),
        continued_or_new,
        lived_in=True,
        kept=False,
    ),
    "grow": Scene(
        lambda at, cache: cache.pool.prefault(threads=1),
        continued,
        prepare=Site.open,
        lived_in=True,
        config=LARGE,
    ),
    "sweep": Scene(lambda at, _: sweep(prefix=at.name), continued_or_new, make_garbage),
    "close-last-persistent": Scene(
        lambda at, cache: cache.close(), continued, make_idle, prepare=Site.open
    ),
    "sweep-idle": Scene(lambda at, _: sweep(prefix=at.name), continued_or_new, make_idle),
    "sweep-idle-beside-others": Scene(
        lambda at, _: sweep(prefix=at.name),
        continued,
        lambda at: at.open(idle_limit=1e-9).close(),
        lived_in=True,
    ),
    "structures": Scene(lambda at, _: structures(at), structures),
    "create-apart": Scene(lambda at, _: at.open(), continued_or_new, apart=True),
    "open-behind-a-dead-creator-apart": Scene(
        lambda at, _: at.open(), continued_or_new, make_apart_half, apart=True
    ),
    "open-apart": Scene(lambda at, _: at.open(), continued, lived_in=True, apart=True),
    "close-last-apart": Scene(
        lambda at, cache: cache.close(), continued_or_new, prepare=alone, apart=True
    ),
    "replace-apart": Scene(lambda at, _: _bigger(at), replaced_or_not, make_persistent, apart=True),
    "move": Scene(lambda at, _: _moved(at), moved_or_not, make_persistent, apart=True),
    "sweep-idle-apart": Scene(
        lambda at, _: sweep(prefix=at.name), continued_or_new, make_idle, apart=True
    ),
    "unlink-apart": Scene(
        lambda at, _: Segment.unlink(at.name), continued_or_new, make_persistent, apart=True
    ),
    "sweep-apart": Scene(
        lambda at, _: sweep(prefix=at.name), continued_or_new, make_apart_half, apart=True
    ),
    "secret": Scene(lambda at, _: load_or_create_secret(secret_file(at)), secret_is_whole),
}
