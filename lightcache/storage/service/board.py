"""The shared memory of a storage service and its clients: the board, with the service's state and
statistics, and the rings of their messages.

The board is a segment of 64-bit words, each stored atomically. `service` is written only under the
segment's lock. It is the slot and epoch of the segment's client that serves, so it is valid only
while that process lives. The service writes all other words except `given_...`, which count the
statistics handed out; any client changes these by compare-exchange.

All of it is removed with the last attached process. Waits for a ring's lock are short, as a process
may be stopped while it holds one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from lightcache.cache import Cache
from lightcache.errors import Detached, InUse, LayoutMismatch
from lightcache.shm import Segment, SharedRing
from lightcache.shm.layout import SegmentKind
from lightcache.shm.segment import free_dead_slots
from lightcache.shm.sync import AtomicU64, RobustLock
from lightcache.storage.jobs import TierOptions
from lightcache.storage.service.messages import ANSWER_BYTES, PART_BYTES, VERSION
from lightcache.storage.tasks import TAKEN, TierStats

_KEPT = ("service", "phase", "pid", "since_ns", "grace_us", "beat")
COUNTED = ("taken", "malformed", "halves", "late", "orphans", "lost", "full")
"""A service's counters of its messages."""
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
LAYOUT = f"messages {VERSION}; {' '.join(_WORDS)}"  # other releases do not attach
_STATES: tuple[Any, ...] = ("closed", "open", "half-open")
_NAME_PART = 120  # characters of the cache's name in ours; UUID and client number need the rest


class Phase(IntEnum):
    """The state of a service."""

    NONE = 0
    SERVING = 1
    CLOSING = 2
    """It finishes its tasks and takes no new ones."""


@dataclass(frozen=True)
class Service:
    """A living service."""

    word: int
    """Its slot and epoch, which identify it among the services of a board."""
    pid: int
    """The pid in its own PID namespace."""


def board_name(cache_name: str, uuid: str) -> str:
    """The name of a cache's board. A cache that was removed and created again has another one.
    Names of rings begin with it."""
    return f"{cache_name[:_NAME_PART]}.storage-{uuid[:16]}"


def group_of(cache: Cache) -> int | None:
    """The group whose members may attach to a cache."""
    status = cache.index.segment.stat()
    return status.st_gid if status.st_mode & stat.S_IRGRP else None


class Board:
    """An attachment to the board. Threads may share it."""

    def __init__(self, segment: Segment) -> None:
        """For `open`."""
        self.segment = segment
        self._looking = threading.RLock()  # close waits for readers; a signal handler may nest both
        self._word = 0  # the value of `service`, if this process serves
        self._said: dict[str, int] = {}  # last published words: unchanged ones are not stored again
        self._words = {name: AtomicU64(segment, 8 * i) for i, name in enumerate(_WORDS)}

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
        try:
            return cls(segment)
        except BaseException:
            segment.close()
            raise

    # ---- the service

    def claim(self) -> None:
        """Become the service, until the board is closed or the process ends.

        Raises:
            InUse: another process is the service; the message has its pid.
            LockTimeout: a stopped process holds the lock.
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
        """The service, if one is alive. Takes a few microseconds."""
        word = self._words["service"].load()
        with self._look():
            if not _lives(self.segment, word):
                return None
        return Service(word, self._load("pid"))

    @property
    def open_for_tasks(self) -> bool:
        """True if the service takes new tasks."""
        return self._load("phase") == Phase.SERVING

    # ---- words

    def _load(self, name: str) -> int:
        return self._words[name].load()

    def store(self, **words: int) -> None:
        """Set some words, in this order."""
        for name, value in words.items():
            self._words[name].store(value)

    def read(self) -> dict[str, int]:
        """All words."""
        with self._look():
            return _read(self.segment)

    def publish(self, stats: TierStats, base: dict[str, int], **counted: int) -> None:
        """Store the service's statistics, added to those of earlier services. Does nothing after
        `end`: the words may belong to the next service."""
        if not self._ours:
            return
        words = {"clients": counted["clients"], "state": _STATES.index(stats.state)}
        words |= {name: getattr(stats, name) for name in GAUGES}
        words |= {name: _cost_word(getattr(stats, name)) for name in COSTS}
        words |= {name: base[name] + getattr(stats, name) for name in TOTALS}
        words |= {name: base[name] + counted[name] for name in COUNTED}
        # In this order: a reader that sees a count sees gauges of the same moment, or later ones.
        self.store(**{name: each for name, each in words.items() if each != self._said.get(name)})
        self._said = words

    def begin(self, options: TierOptions) -> None:
        """Begin to serve; stores the tier's option that clients use."""
        self.store(grace_us=round(min(options.grace, 1e9) * 1e6))
        self.store(phase=Phase.SERVING)  # last: from here on clients use all words

    def end(self, phase: Phase) -> None:
        """Take no more tasks; with `Phase.NONE`, end the service. May be called again."""
        with contextlib.suppress(Detached):
            if not self._ours:
                return
            self.store(phase=phase)
            if phase is Phase.NONE:
                self.store(clients=0, **dict.fromkeys(GAUGES, 0))
                self.store(service=0)  # last: from here on another service may own the words

    @property
    def _ours(self) -> bool:
        return bool(self._word) and self._words["service"].load() == self._word

    @property
    def grace(self) -> float:
        """`grace` of the current or last service's tier."""
        return self._load("grace_us") / 1e6

    def count_beat(self) -> None:
        """Increment the beat: the service still reads its messages."""
        self.store(beat=self._load("beat") + 1)

    @property
    def beat(self) -> int:
        """A count that grows while the service reads its messages."""
        return self._load("beat")

    def give(self) -> Counter[str]:
        """The increase of the totals `TAKEN` since the last call by any client. A process killed in
        this method loses it."""
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
        """Close; see `Segment.close`. Waits for other threads that read it."""
        with self._looking:
            self.segment.close()

    @contextlib.contextmanager
    def _look(self) -> Iterator[None]:
        """Wrap reads: `close` waits for them."""
        self.segment.check_usable()  # before the lock, which may be held in a forked child
        with self._looking:
            yield


def _lives(segment: Segment, word: int) -> bool:
    """True if the service of this slot and epoch is alive."""
    return bool(word) and segment.lives(word & 0xFF, word >> 8)


def _read(segment: Segment) -> dict[str, int]:
    """All words of a board."""
    if segment.payload_bytes < 8 * len(_WORDS):
        raise LayoutMismatch(f"the segment {segment.name!r} is too short for figures")
    with segment.busy():
        array = ctypes.c_uint8 * (8 * len(_WORDS))
        where = array.from_address(segment.address + segment.payload_offset)
        return words_in(memoryview(where))


def words_in(payload: memoryview) -> dict[str, int]:
    """All words of a board, by its segment's bytes after `payload_offset` (`LAYOUT`)."""
    found = np.frombuffer(payload, np.uint64, len(_WORDS))
    return dict(zip(_WORDS, found.tolist(), strict=True))


def tier_stats(words: dict[str, int], serving: bool) -> TierStats:
    """The statistics of a tier, from the words of `Board.read`. Gauges are 0 without a service, as
    a killed one cannot clear them."""
    counts = {name: words[name] for name in TOTALS}
    counts |= {name: words[name] if serving else 0 for name in GAUGES}
    state: Any = _STATES[words["state"] % len(_STATES)] if serving else "open"
    costs: dict[str, Any] = {
        name: (words[name] - 1) / 1e9 if words[name] else None for name in COSTS
    }
    return TierStats(**counts, **costs, state=state)


def _cost_word(seconds: float | None) -> int:
    return 0 if seconds is None else 1 + round(min(seconds, 1e9) * 1e9)


# ---- Statistics of a service, for any process


@dataclass(frozen=True)
class ServiceStats:
    """Totals of all services of a cache; lost when no service and no client is left."""

    serving: bool
    """Whether a service is alive and takes tasks."""
    pid: int
    """Pid of the current or last service, in its PID namespace; 0: there was none."""
    age_s: float
    """Seconds since it began, by the wall clock."""
    clients: int
    """Living processes that have sent it a message."""
    taken: int
    """Messages taken out of the ring."""
    malformed: int
    """Messages taken and ignored: not one of ours, or not valid at that point."""
    halves: int
    """Tasks that arrived incomplete: their client was killed, or the ring was full."""
    late: int
    """Tasks whose time was up before they were taken."""
    orphans: int
    """Messages of clients that are gone."""
    lost: int
    """Answers not delivered: the client's ring was full or locked, or the answer failed."""
    full: int
    """How often the service left messages in the ring because it had too many tasks."""
    tier: TierStats


def stats_in(words: dict[str, int], alive: bool) -> ServiceStats:
    """The statistics in a board's words.

    Args:
        alive: the process that `service` names lives.
    """
    age = max(0, time.time_ns() - words["since_ns"]) / 1e9 if words["since_ns"] else 0.0
    return ServiceStats(
        serving=alive and words["phase"] == Phase.SERVING,
        pid=words["pid"],
        age_s=age,
        clients=words["clients"] if alive else 0,
        tier=tier_stats(words, alive),
        **{name: words[name] for name in COUNTED},
    )


def stats_of(board: Board) -> ServiceStats:
    """Read the statistics from the board. Takes no lock."""
    return stats_in(board.read(), board.service() is not None)


def service_stats(name: str, *, group: str | int | None = None) -> ServiceStats:
    """Statistics of the storage service of the cache `name`, even if it is stopped or gone.
    Attaches read-only for a moment.

    Raises:
        NotReady: there is no such cache, or it has neither a service nor a client of one.
    """
    kind = SegmentKind.INDEX
    with Segment.attach(name, readonly=True, kind=kind, group=group) as index:
        its = board_name(name, index.uuid)
    with Segment.attach(its, readonly=True, layout_facts=LAYOUT, group=group) as segment:
        words = _read(segment)
        return stats_in(words, _lives(segment, words["service"]))


# ---- The rings: one of tasks for the service, one of answers for each client

TASKS = 256  # messages: 4 MiB, or the keys of 250,000 pages
ANSWERS = 256
LOCK_SECONDS = 0.2
ASKING_SECONDS = 0.04
"""The same for a client, which may be a scheduler in a step."""


def ring_prefix(cache: Cache) -> str:
    """The prefix of the names of all rings of a cache."""
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
    "Phase",
    "Service",
    "ServiceStats",
    "answers_name",
    "board_name",
    "find_answers",
    "make_answers",
    "ring_prefix",
    "service_stats",
    "stats_in",
    "stats_of",
    "tasks_ring",
    "tier_stats",
    "words_in",
]
