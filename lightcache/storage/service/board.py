"""What a storage service and its clients share: the board, with the service and its figures, and
the rings of their messages.

The board is a segment of 64-bit words, each stored at once. `service` is written under the
segment's lock alone: the slot and epoch of the client of this segment that serves, so it ends with
its process. All other words are written by the service, but for `given_...`, which count the
figures handed out, and which any client changes by compare-exchange.

All of it is removed with the last process that is attached. The lock of a ring is waited for only
briefly: a process may be stopped while it holds one.
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
from lightcache.shm import ClientInfo, Segment, SegmentKind, SharedRing
from lightcache.shm.segment import free_dead_slots
from lightcache.shm.sync import AtomicU64, RobustLock
from lightcache.storage.jobs import TierOptions
from lightcache.storage.service.messages import ANSWER_BYTES, PART_BYTES, VERSION
from lightcache.storage.tasks import TAKEN, ReadPolicy, TierStats

_KEPT = (
    *("service", "phase", "pid", "since_ns", "read_policy", "read_us", "grace_us"),
    *("wants_tokens", "beat"),
)
COUNTED = ("taken", "malformed", "halves", "late", "orphans", "lost", "full")
"""What a service counts of its messages."""
GAUGES = ("queued", "running", "stuck", "writing")
COSTS = ("read_call_seconds", "read_page_seconds")
"""Stored as nanoseconds plus 1; 0: None."""
_OTHERS = (*GAUGES, *COSTS, "state")
TOTALS = tuple(name for name in TierStats.__dataclass_fields__ if name not in _OTHERS)
_WORDS = (
    *_KEPT,
    *("clients", "state", *GAUGES, *COSTS, *TOTALS, *COUNTED),
    *(f"given_{name}" for name in TAKEN),
)
_PLACE = {name: 8 * i for i, name in enumerate(_WORDS)}
LAYOUT = f"messages {VERSION}; {' '.join(_WORDS)}"  # other releases do not attach
_POLICIES: tuple[ReadPolicy, ...] = get_args(ReadPolicy)
_STATES: tuple[Any, ...] = ("closed", "open", "half-open")
_NAME_PART = 120  # of the cache's name in ours: the rest is for the UUID and a client's number


class Phase(IntEnum):
    """The state of a service."""

    NONE = 0
    SERVING = 1
    CLOSING = 2
    """It finishes its tasks, and takes no new ones."""


@dataclass(frozen=True)
class Service:
    """A service that is alive."""

    word: int
    """Its slot and epoch: tells services of one board apart."""
    pid: int
    """In its own PID namespace."""


def board_name(cache_name: str, uuid: str) -> str:
    """The name of a cache's board; a cache that was removed and created again has another. Names of
    rings begin with it."""
    return f"{cache_name[:_NAME_PART]}.storage-{uuid[:16]}"


def group_of(cache: Cache) -> int | None:
    """The group whose members may attach to a cache."""
    found = cache.index.segment.stat()
    return found.st_gid if found.st_mode & stat.S_IRGRP else None


class Board:
    """An attachment to the board. Threads may share it."""

    def __init__(self, segment: Segment) -> None:
        """For `open` and `look`."""
        self.segment = segment
        if segment.payload_bytes < 8 * len(_WORDS):
            raise LayoutMismatch(f"the segment {segment.name!r} is too short for figures")
        self._looking = threading.RLock()  # close waits for readers; a signal handler may do both
        self._word = 0  # of `service`, if this process serves
        self._said: dict[str, int] = {}  # by `publish`: what has not changed is not stored again
        self._words = (
            {}
            if segment.readonly
            else {name: AtomicU64(segment, at) for name, at in _PLACE.items()}
        )

    @classmethod
    def open(cls, cache: Cache) -> Board:
        """The board of a cache, created if it does not exist."""
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
        """Attach to the board of a cache read-only, by name.

        Raises:
            NotReady: there is no such cache, or it has neither a service nor a client of one.
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

    # ---- the service

    def claim(self) -> None:
        """Become the service, until this is closed or the process ends.

        Raises:
            InUse: another process is; names its pid.
            LockTimeout: a process was stopped in here.
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
        """The service, if one is alive. Some microseconds."""
        word = self._words["service"].load() if self._words else self.read()["service"]
        with self._look():
            if not word or not self.segment.lives(word & 0xFF, word >> 8):
                return None
        return Service(word, self._load("pid"))

    @property
    def open_for_tasks(self) -> bool:
        """Whether the service takes new tasks."""
        return self._load("phase") == Phase.SERVING

    # ---- words

    def _load(self, name: str) -> int:
        return self._words[name].load() if self._words else self.read()[name]

    def store(self, **words: int) -> None:
        """Set some words, in this order."""
        for name, value in words.items():
            self._words[name].store(value)

    def read(self) -> dict[str, int]:
        """All words; also where it is attached read-only."""
        with self._look(), self.segment.busy():
            words = ctypes.c_uint64 * len(_WORDS)
            where = words.from_address(self.segment.address + self.segment.payload_offset)
            found = np.frombuffer(memoryview(where).cast("B"), np.uint64)
            return dict(zip(_WORDS, found.tolist(), strict=True))

    def publish(self, stats: TierStats, base: dict[str, int], **counted: int) -> None:
        """Store figures of the service, added to those of the services before it. Does nothing
        after the end: the words belong to the next service."""
        if not self._ours:
            return
        words = {"clients": counted["clients"], "state": _STATES.index(stats.state)}
        words |= {name: getattr(stats, name) for name in GAUGES}
        words |= {name: _cost_word(getattr(stats, name)) for name in COSTS}
        words |= {name: base[name] + getattr(stats, name) for name in TOTALS}
        words |= {name: base[name] + counted[name] for name in COUNTED}
        # In this order: a reader that sees a count sees the gauges of that moment, or later ones.
        self.store(**{name: each for name, each in words.items() if each != self._said.get(name)})
        self._said = words

    def begin(self, options: TierOptions, *, wants_tokens: bool) -> None:
        """Serve from now on; stores the tier's options that clients use."""
        limits = (options.read_seconds, options.grace)
        read_us, grace_us = (round(min(seconds, 1e9) * 1e6) for seconds in limits)
        policy = _POLICIES.index(options.read_policy)
        self.store(read_policy=policy, read_us=read_us, grace_us=grace_us)
        self.store(wants_tokens=wants_tokens)
        self.store(phase=Phase.SERVING)  # last: from here on clients use all of it

    def end(self, phase: Phase) -> None:
        """Take no more tasks; with `Phase.NONE`: end the service. May be called again."""
        with contextlib.suppress(Detached):
            if not self._ours:
                return
            self.store(phase=phase)
            if phase is Phase.NONE:
                self.store(clients=0, **dict.fromkeys(GAUGES, 0))
                self.store(service=0)  # last: from here on, all words may be another service's

    @property
    def _ours(self) -> bool:
        return bool(self._word) and self._words["service"].load() == self._word

    def policy(self) -> tuple[ReadPolicy, float, float]:
        """The tier's read policy, its seconds, and its `grace`: of the current or last service."""
        chosen = _POLICIES[self._load("read_policy") % len(_POLICIES)]
        return chosen, self._load("read_us") / 1e6, self._load("grace_us") / 1e6

    def count_beat(self) -> None:
        """For the service: it still looks at its messages."""
        self.store(beat=self._load("beat") + 1)

    @property
    def beat(self) -> int:
        """Counts while the service looks at its messages."""
        return self._load("beat")

    @property
    def wants_tokens(self) -> bool:
        """Whether the storage of the current or last service wants token ids."""
        return bool(self._load("wants_tokens"))

    def give(self) -> Counter[str]:
        """Of `TAKEN`, what was not given before. A process that is killed in here loses it."""
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
        """Leave; see `Segment.close`. Waits for other threads that read it."""
        with self._looking:
            self.segment.close()

    @contextlib.contextmanager
    def _look(self) -> Iterator[None]:
        """Around reads, during which a close would find it in use."""
        self.segment.check_usable()  # before the lock: a forked child may find that taken
        with self._looking:
            yield


@dataclass(frozen=True)
class BoardCopy:
    """A board, read from a copy of its segment: for tools, which attach to nothing."""

    words: dict[str, int]
    served: bool
    """A service has begun, and did not end in order."""
    serving: bool
    """It is alive, and takes tasks."""
    tier: TierStats


def board_copy(payload: memoryview, clients: Sequence[ClientInfo]) -> BoardCopy:
    """From the bytes after `payload_offset` of a segment with `LAYOUT`, and its clients."""
    found = np.frombuffer(payload, np.uint64, len(_WORDS))
    words = dict(zip(_WORDS, found.tolist(), strict=True))
    word = words["service"]
    alive = any(one.alive and (one.slot, one.epoch) == (word & 0xFF, word >> 8) for one in clients)
    serving = alive and words["phase"] == Phase.SERVING
    return BoardCopy(words, bool(word), serving, tier_stats(words, alive))


def tier_stats(words: dict[str, int], serving: bool) -> TierStats:
    """The figures of a tier, from the words of `Board.read`. The gauges of a service end with it,
    also where it was killed and could not clear them."""
    counts = {name: words[name] for name in TOTALS}
    counts |= {name: words[name] if serving else 0 for name in GAUGES}
    state: Any = _STATES[words["state"] % len(_STATES)] if serving else "open"
    costs: dict[str, Any] = {
        name: (words[name] - 1) / 1e9 if words[name] else None for name in COSTS
    }
    return TierStats(**counts, **costs, state=state)


def _cost_word(seconds: float | None) -> int:
    return 0 if seconds is None else 1 + round(min(seconds, 1e9) * 1e9)


# ---- Figures of a service, for any process.


@dataclass(frozen=True)
class ServiceStats:
    """Totals of all services of a cache; forgotten when no service and no client is left."""

    serving: bool
    """Whether a service is alive, and takes tasks."""
    pid: int
    """Of the current or last service, in its PID namespace; 0: there was none."""
    age_s: float
    """Seconds since it began, by the wall clock."""
    clients: int
    """Processes that have asked it for something, and are alive."""
    taken: int
    """Messages taken out of the ring."""
    malformed: int
    """Of these, ignored: no message of ours, or not one that could come just then."""
    halves: int
    """Tasks that came without their end: their client was killed, or the ring was full."""
    late: int
    """Tasks whose time was up before they were taken."""
    orphans: int
    """Messages of clients that are gone."""
    lost: int
    """Answers for which the client's ring had no room, or was locked; or that could not be made."""
    full: int
    """Times that the service had so many tasks that it left messages in the ring."""
    tier: TierStats


def stats_of(board: Board) -> ServiceStats:
    """Read them from the board. No lock."""
    words = board.read()
    alive = board.service() is not None
    age = max(0, time.time_ns() - words["since_ns"]) / 1e9 if words["since_ns"] else 0.0
    return ServiceStats(
        serving=alive and words["phase"] == Phase.SERVING,
        pid=words["pid"],
        age_s=age,
        clients=words["clients"] if alive else 0,
        tier=tier_stats(words, alive),
        **{name: words[name] for name in COUNTED},
    )


def service_stats(name: str, *, group: str | int | None = None) -> ServiceStats:
    """Figures of the storage service of the cache `name`; also of one that is stopped, or gone.
    Attaches read-only for a moment.

    Raises:
        NotReady: no such cache, or it has neither a service nor a client of one.
    """
    board = Board.look(name, group=group)
    try:
        return stats_of(board)
    finally:
        board.close()


# ---- The rings: one of tasks for the service, one of answers for each client.

TASKS = 256  # messages: 4 MiB, or the keys of 250,000 pages
ANSWERS = 256
LOCK_SECONDS = 0.2
ASKING_SECONDS = 0.04
"""The same for a client that asks: it may be a scheduler, in a step."""


def ring_prefix(cache: Cache) -> str:
    """With which the names of all rings of a cache begin."""
    return f"{board_name(cache.name, cache.index.segment.uuid)}-"


def tasks_ring(cache: Cache, lock_timeout: float = LOCK_SECONDS) -> SharedRing:
    """The ring of tasks, created if it does not exist."""
    return SharedRing.open(
        f"{ring_prefix(cache)}tasks",
        capacity=TASKS,
        message_bytes=PART_BYTES,
        group=group_of(cache),
        lock_timeout=lock_timeout,
    )


def answers_name(cache: Cache, pid: int, client: int) -> str:
    """The name of the ring of a client's answers."""
    return f"{ring_prefix(cache)}{pid}-{client:016x}"


def make_answers(cache: Cache, pid: int, client: int) -> SharedRing:
    """Create the ring of a client's answers."""
    return SharedRing.create(
        answers_name(cache, pid, client),
        capacity=ANSWERS,
        message_bytes=ANSWER_BYTES,
        group=group_of(cache),
        lock_timeout=LOCK_SECONDS,
    )


def find_answers(cache: Cache, pid: int, client: int) -> SharedRing:
    """Attach to the ring of a client's answers.

    Raises:
        NotReady: it is gone; or its client was stopped while it left it, or while it was swept.
    """
    return SharedRing.attach(
        answers_name(cache, pid, client),
        group=group_of(cache),
        lock_timeout=LOCK_SECONDS,
        timeout=LOCK_SECONDS,
    )


__all__ = [
    "ANSWERS",
    "LAYOUT",
    "TASKS",
    "Board",
    "BoardCopy",
    "Phase",
    "Service",
    "ServiceStats",
    "answers_name",
    "board_copy",
    "board_name",
    "find_answers",
    "make_answers",
    "ring_prefix",
    "service_stats",
    "stats_of",
    "tasks_ring",
    "tier_stats",
]
