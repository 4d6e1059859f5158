"""What the service and its clients have in common beside messages: who serves, and its figures.

A segment of words, each of 64 bits and stored at once. `service` is written under the segment's
lock alone: the slot and epoch of the client of this segment that serves, so it ends with its
process. All other words are written by whoever serves, but for those that count what was handed
out (`given_...`), which any client changes by compare-exchange.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, get_args

import numpy as np

from lightcache.cache import Cache
from lightcache.errors import Detached, InUse, LayoutMismatch
from lightcache.shm import ClientInfo, Segment, SegmentKind
from lightcache.shm.segment import free_dead_slots
from lightcache.shm.sync import AtomicU64, RobustLock
from lightcache.storage.service.messages import VERSION
from lightcache.storage.tiers import TAKEN, ReadPolicy, TierStats

_KEPT = (
    *("service", "phase", "pid", "since_ns", "read_policy", "read_us", "grace_us"),
    *("wants_tokens", "beat"),
)
COUNTED = ("taken", "malformed", "halves", "late", "orphans", "lost", "full")
"""What a service counts of its messages."""
GAUGES = ("queued", "running", "stuck", "writing")
COSTS = ("read_call_seconds", "read_page_seconds")
"""Kept as nanoseconds and one more; 0: None."""
_OTHERS = (*GAUGES, *COSTS, "state")
TOTALS = tuple(name for name in TierStats.__dataclass_fields__ if name not in _OTHERS)
_WORDS = (
    *_KEPT,
    *("clients", "state", *GAUGES, *COSTS, *TOTALS, *COUNTED),
    *(f"given_{name}" for name in TAKEN),
)
_PLACE = {name: 8 * i for i, name in enumerate(_WORDS)}
LAYOUT = f"messages {VERSION}; {' '.join(_WORDS)}"  # who speaks otherwise does not attach
_POLICIES: tuple[ReadPolicy, ...] = get_args(ReadPolicy)
_STATES: tuple[Any, ...] = ("closed", "open", "half-open")
_NAME_PART = 120  # of the cache's name in ours: the rest is for the UUID and a client's number


class Phase(IntEnum):
    """Of a service."""

    NONE = 0
    SERVING = 1
    CLOSING = 2
    """It finishes what it has, and takes nothing new."""


@dataclass(frozen=True)
class Service:
    """Who serves."""

    word: int
    """Its slot and epoch: tells services of one board apart."""
    pid: int
    """In its own PID namespace."""


def board_name(cache_name: str, uuid: str) -> str:
    """Of the board of a cache's one life; names of its rings begin with it. A cache that was
    removed and made again has another."""
    return f"{cache_name[:_NAME_PART]}.storage-{uuid[:16]}"


def group_of(cache: Cache) -> int | None:
    """The group whose members may attach to a cache."""
    found = cache.index.segment.stat()
    return found.st_gid if found.st_mode & stat.S_IRGRP else None


class Board:
    """An attach to it. Threads may share it."""

    def __init__(self, segment: Segment) -> None:
        """For `open` and `look`."""
        self.segment = segment
        if segment.payload_bytes < 8 * len(_WORDS):
            raise LayoutMismatch(f"the segment {segment.name!r} is too short for figures")
        self._looking = threading.RLock()  # who closes waits for who looks; a signal does both
        self._word = 0  # who serves, where it is us
        self._said: dict[str, int] = {}  # by `publish`: what has not changed is not stored again
        self._words = (
            {}
            if segment.readonly
            else {name: AtomicU64(segment, at) for name, at in _PLACE.items()}
        )

    @classmethod
    def open(cls, cache: Cache) -> Board:
        """That of a cache, made if it is not there. It goes with the last who is attached."""
        segment = Segment.open(
            board_name(cache.name, cache.index.segment.uuid),
            8 * len(_WORDS),
            config={"cache": cache.name},
            layout_facts=LAYOUT,
            lifetime="attached",
            group=group_of(cache),
            reaper=free_dead_slots,
        )
        return cls._over(segment)

    @classmethod
    def look(cls, cache_name: str, *, group: str | int | None = None) -> Board:
        """Read that of a cache, which nobody needs to have opened.

        Raises:
            NotReady: there is no such cache, or nobody has served it or asked for a service.
        """
        with Segment.attach(
            cache_name, readonly=True, kind=SegmentKind.INDEX, group=group
        ) as index:
            name = board_name(cache_name, index.uuid)
        return cls._over(Segment.attach(name, readonly=True, layout_facts=LAYOUT, group=group))

    @classmethod
    def _over(cls, segment: Segment) -> Board:
        try:
            return cls(segment)
        except BaseException:
            segment.close()
            raise

    # ---- who serves

    def claim(self) -> None:
        """Become the one who serves, until this is closed or the process ends.

        Raises:
            InUse: somebody else does; names its pid.
            LockTimeout: somebody who was just becoming it is stopped.
        """
        client = self.segment.join("storage service")
        with RobustLock(self.segment).hold(timeout=2.0):
            serving = self.service()
            if serving is not None:
                raise InUse(
                    f"the cache {self.segment.config['cache']!r} has a storage service already "
                    f"(pid {serving.pid}); stop that one first, or use it with StorageClient"
                )
            self.store(phase=Phase.NONE, pid=os.getpid(), since_ns=time.time_ns(), clients=0)
            self._word = client.slot | client.epoch << 8
            self.store(service=self._word)

    def service(self) -> Service | None:
        """Who serves, if anybody does. Some microseconds."""
        word = self._words["service"].load() if self._words else self.read()["service"]
        with self._look():
            if not word or not self.segment.lives(word & 0xFF, word >> 8):
                return None
        return Service(word, self._load("pid"))

    @property
    def open_for_tasks(self) -> bool:
        """Whether who serves takes new tasks."""
        return self._load("phase") == Phase.SERVING

    # ---- words

    def _load(self, name: str) -> int:
        return self._words[name].load() if self._words else self.read()[name]

    def store(self, **words: int) -> None:
        """Set some, one after another."""
        for name, value in words.items():
            self._words[name].store(value)

    def read(self) -> dict[str, int]:
        """All words, one after another; also where it is attached read-only."""
        with self._look(), self.segment.busy():
            words = ctypes.c_uint64 * len(_WORDS)
            where = words.from_address(self.segment.address + self.segment.payload_offset)
            found = np.frombuffer(memoryview(where).cast("B"), np.uint64)
            return dict(zip(_WORDS, found.tolist(), strict=True))

    def publish(self, stats: TierStats, base: dict[str, int], **counted: int) -> None:
        """Figures of who serves, on top of those of the services before it. Nothing where we do not
        serve any more: the words are the next one's."""
        if not self._ours:
            return
        words = {"clients": counted["clients"], "state": _STATES.index(stats.state)}
        words |= {name: getattr(stats, name) for name in GAUGES}
        words |= {name: _cost_word(getattr(stats, name)) for name in COSTS}
        words |= {name: base[name] + getattr(stats, name) for name in TOTALS}
        words |= {name: base[name] + counted[name] for name in COUNTED}
        # In this order: who sees that something was counted sees what is there no more.
        self.store(**{name: each for name, each in words.items() if each != self._said.get(name)})
        self._said = words

    def begin(
        self, policy: ReadPolicy, read_seconds: float, grace: float, *, wants_tokens: bool
    ) -> None:
        """What clients should know of the tier."""
        read_us, grace_us = (round(min(each, 1e9) * 1e6) for each in (read_seconds, grace))
        self.store(read_policy=_POLICIES.index(policy), read_us=read_us, grace_us=grace_us)
        self.store(wants_tokens=wants_tokens)
        self.store(phase=Phase.SERVING)  # last: from here on clients go by all of it

    def end(self, phase: Phase) -> None:
        """Take no more tasks; with `Phase.NONE`: serve no more. May be called again."""
        with contextlib.suppress(Detached):
            if not self._ours:
                return
            self.store(phase=phase)
            if phase is Phase.NONE:
                self.store(clients=0, **dict.fromkeys(GAUGES, 0))
                self.store(service=0)  # last: from here on, all words may be another one's

    @property
    def _ours(self) -> bool:
        return bool(self._word) and self._words["service"].load() == self._word

    def policy(self) -> tuple[ReadPolicy, float, float]:
        """The read policy of who serves, or did last; its seconds, and the tier's `grace`."""
        chosen = _POLICIES[self._load("read_policy") % len(_POLICIES)]
        return chosen, self._load("read_us") / 1e6, self._load("grace_us") / 1e6

    def count_beat(self) -> None:
        """By who serves: it looks at its messages still."""
        self.store(beat=self._load("beat") + 1)

    @property
    def beat(self) -> int:
        """How often it has."""
        return self._load("beat")

    @property
    def wants_tokens(self) -> bool:
        """Whether the storage of who serves, or did last, wants token ids."""
        return bool(self._load("wants_tokens"))

    def give(self) -> Counter[str]:
        """Of `TAKEN`, what nobody was given before. Who is killed in here takes it along."""
        more: Counter[str] = Counter()
        for name in TAKEN:
            given = self._words[f"given_{name}"]
            while True:
                before, now = given.load(), self._words[name].load()
                if now <= before:
                    break
                if given.compare_exchange(before, now):
                    more[name] = now - before
                    break
        return more

    def close(self) -> None:
        """Leave; see `Segment.close`. Waits for other threads that look at it just now."""
        with self._looking:
            self.segment.close()

    @contextlib.contextmanager
    def _look(self) -> Iterator[None]:
        """For calls during which a close would find it in use."""
        self.segment.check_usable()  # before the lock: a forked child may find that taken
        with self._looking:
            yield


@dataclass(frozen=True)
class BoardCopy:
    """A board as a copy of its segment shows it: for tools, which attach to nothing."""

    words: dict[str, int]
    served: bool
    """A service has begun, and did not end in order."""
    serving: bool
    """It is alive, and takes tasks."""
    tier: TierStats


def board_copy(payload: memoryview, clients: Sequence[ClientInfo]) -> BoardCopy:
    """Of the bytes behind `payload_offset` of a segment with `LAYOUT`, and its clients."""
    found = np.frombuffer(payload, np.uint64, len(_WORDS))
    words = dict(zip(_WORDS, found.tolist(), strict=True))
    word = words["service"]
    alive = any(one.alive and (one.slot, one.epoch) == (word & 0xFF, word >> 8) for one in clients)
    serving = alive and words["phase"] == Phase.SERVING
    return BoardCopy(words, bool(word), serving, tier_stats(words, alive))


def tier_stats(words: dict[str, int], serving: bool) -> TierStats:
    """The figures of a tier out of the words of `Board.read`. What it has at hand ends with it,
    also where it was killed and could not say so."""
    counts = {name: words[name] for name in TOTALS}
    counts |= {name: words[name] if serving else 0 for name in GAUGES}
    state: Any = _STATES[words["state"] % len(_STATES)] if serving else "open"
    costs: dict[str, Any] = {
        name: (words[name] - 1) / 1e9 if words[name] else None for name in COSTS
    }
    return TierStats(**counts, **costs, state=state)


def _cost_word(seconds: float | None) -> int:
    return 0 if seconds is None else 1 + round(min(seconds, 1e9) * 1e9)


__all__ = [
    "COUNTED",
    "LAYOUT",
    "Board",
    "BoardCopy",
    "Phase",
    "Service",
    "board_copy",
    "board_name",
    "group_of",
    "tier_stats",
]
