"""The shared memory of a storage service and its clients: the board, with the service's state and
statistics, and the rings of their messages.

The board is a segment of 64-bit words, each stored atomically. `service` is the slot and epoch of
the segment's client that serves, so it is valid only while that process lives. It is set under the
segment's lock. The service clears it without: it lives until then, so no other process sets it. The
service writes all other words except `given_...`, which count the statistics handed out; any client
changes these by compare-exchange.

All of it is removed with the last attached process. Waits for a ring's lock are short, as a process
may be stopped while it holds one.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lightcache.cache import Cache
from lightcache.errors import Detached, InUse
from lightcache.shm import Segment, SharedRing
from lightcache.shm.layout import SegmentKind
from lightcache.shm.segment import free_dead_slots
from lightcache.shm.sync import AtomicU64, RobustLock
from lightcache.storage.service.messages import ANSWER_BYTES, PART_BYTES, VERSION
from lightcache.storage.tasks import TAKEN, TierStats

COUNTED = ("taken", "malformed", "halves", "late", "orphans", "lost", "full")
"""A service's counters of its messages."""
GAUGES = ("queued", "running", "stuck", "writing")
_COSTS = ("read_call_seconds", "read_page_seconds")
"""Stored as nanoseconds plus 1; 0: None."""
_STATES: tuple[Any, ...] = ("closed", "open", "half-open")
_TIER = tuple(TierStats.__dataclass_fields__)
_TOTALS = tuple(name for name in _TIER if name not in (*GAUGES, *_COSTS, "state"))
_FIGURES = ("clients", "state", *GAUGES, *_COSTS, *_TOTALS, *COUNTED)
_OWN = ("service", "serving", "pid", "since_ns", "grace_us", "looked_us")
_WORDS = (*_OWN, *_FIGURES, *(f"given_{name}" for name in TAKEN))
LAYOUT = f"messages {VERSION}; {' '.join(_WORDS)}"
"""Other releases do not attach."""
_NAME_PART = 120  # characters of the cache's name in ours; UUID and client number need the rest


class Service(NamedTuple):
    """A living service."""

    word: int
    """Its slot and epoch, which identify it among the services of a board."""
    pid: int
    """The pid in its own PID namespace."""


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
    """Living clients that have sent it a message."""
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
    """Answers not delivered at once: the client's ring was full or locked. They are repeated."""
    full: int
    """How often the service left messages in the ring because it had too many tasks."""
    tier: TierStats


class Board:
    """An attachment to the board. Threads may share it."""

    def __init__(self, segment: Segment) -> None:
        """For `open`."""
        self.segment = segment
        self._looking = threading.RLock()  # close waits for readers; a signal handler may nest both
        self._word = 0  # the value of `service`, if this process serves
        self._base: dict[str, int] = {}  # the words as the last service left them
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
            group=_group_of(cache),
            reaper=free_dead_slots,
        )
        try:
            return cls(segment)
        except BaseException:
            segment.close()
            raise

    # ---- the service

    def claim(self, grace: float) -> None:
        """Become the service, until the board is closed or the process ends, and take tasks.

        Args:
            grace: the tier's, which clients add to their own.

        Raises:
            InUse: another process is the service; the message has its pid.
            LockTimeout: a stopped process holds the lock.
        """
        self.segment.join("storage service")
        with RobustLock(self.segment).hold(timeout=2.0):
            serving = self.service()
            if serving is not None:
                raise InUse(
                    f"the cache {self.segment.config['cache']!r} has a storage service already "
                    f"(pid {serving.pid}); stop that one first, or use it with StorageClient"
                )
            self._base = self._load_all()
            self.look()
            self.store(
                pid=os.getpid(), since_ns=time.time_ns(), grace_us=int(min(grace, 1e9) * 1e6)
            )
            self._word = client_word(self.segment)
            self.store(serving=1, service=self._word)

    def service(self) -> Service | None:
        """The service, if one is alive. Takes a few microseconds."""
        self.segment.check_usable()  # before the lock, which may be held in a forked child
        with self._looking:
            word = self.load("service")
            return Service(word, self.load("pid")) if lives(self.segment, word) else None

    def look(self) -> None:
        """Say when the service has last looked at its messages: a client may find it stopped."""
        self.store(looked_us=round(time.monotonic() * 1e6))

    def end(self) -> None:
        """Take no more tasks. May be called again."""
        self._store_own(serving=0)

    def leave(self) -> None:
        """End the service: from here on another one may own the words. May be called again."""
        self._store_own(serving=0, service=0)

    def _store_own(self, **words: int) -> None:
        """Set some words, if this process is the service: otherwise the next one may own them."""
        with contextlib.suppress(Detached):
            if self._word and self.load("service") == self._word:
                self.store(**words)

    # ---- words, statistics

    def load(self, name: str) -> int:
        """A word."""
        return self._words[name].load()

    def _load_all(self) -> dict[str, int]:
        return {name: word.load() for name, word in self._words.items()}

    def store(self, **words: int) -> None:
        """Set some words, in this order."""
        for name, value in words.items():
            self._words[name].store(value)

    def publish(self, tier: TierStats, counted: Mapping[str, int], clients: int) -> None:
        """Store the service's statistics, added to those of earlier services; nothing after
        `leave`. One thread at a time.

        Args:
            counted: by the names of `COUNTED`.
        """
        words = {"clients": clients, "state": _STATES.index(tier.state)}
        words |= {name: getattr(tier, name) for name in GAUGES}
        words |= {name: _cost_word(getattr(tier, name)) for name in _COSTS}
        words |= {name: self._base[name] + getattr(tier, name) for name in _TOTALS}
        words |= {name: self._base[name] + counted[name] for name in COUNTED}
        # In this order: a reader that sees a count sees gauges of the same moment, or later ones.
        new = {name: word for name, word in words.items() if word != self._said.get(name)}
        self._store_own(**new)
        self._said = words

    def stats(self) -> ServiceStats:
        """The statistics. Takes no lock of another process."""
        self.segment.check_usable()
        with self._looking:
            alive = self.service() is not None
            return stats_in(self._load_all(), alive)

    def give(self) -> Counter[str]:
        """The increase of the totals `TAKEN` since the last call by any client. A process killed in
        this method loses it."""
        more: Counter[str] = Counter()
        for name in TAKEN:
            given, now = self._words[f"given_{name}"], self.load(name)
            before = given.load()
            if now > before and given.compare_exchange(before, now):
                more[name] = now - before
        return more

    def close(self) -> None:
        """Close; see `Segment.close`. Waits for other threads that read it."""
        with self._looking:
            self.segment.close()


# ---- Statistics, for any process


def words_in(payload: memoryview) -> dict[str, int]:
    """All words of a board, by its segment's bytes after `payload_offset` (`LAYOUT`)."""
    found = np.frombuffer(payload, np.uint64, len(_WORDS))
    return dict(zip(_WORDS, found.tolist(), strict=True))


def stats_in(words: Mapping[str, int], alive: bool) -> ServiceStats:
    """The statistics in a board's words. Gauges are 0 without a service, as a killed one cannot
    clear them.

    Args:
        alive: the process that `service` names lives.
    """
    tier: dict[str, Any] = {name: words[name] for name in _TOTALS}
    tier |= {name: words[name] if alive else 0 for name in GAUGES}
    tier |= {name: (words[name] - 1) / 1e9 if words[name] else None for name in _COSTS}
    tier["state"] = _STATES[words["state"] % len(_STATES)] if alive else "open"
    return ServiceStats(
        serving=alive and bool(words["serving"]),
        pid=words["pid"],
        age_s=max(0, time.time_ns() - words["since_ns"]) / 1e9 if words["since_ns"] else 0.0,
        clients=words["clients"] if alive else 0,
        tier=TierStats(**tier),
        **{name: words[name] for name in COUNTED},
    )


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
        return Board(segment).stats()


def client_word(segment: Segment) -> int:
    """The slot and epoch of a segment's client, this process. No other client ever has them."""
    own = segment.client
    assert own is not None
    return own.slot | own.epoch << 8


def lives(segment: Segment, word: int) -> bool:
    """True if the client of a `client_word` is alive. Makes at most one system call.

    Raises:
        ConfigError: the word names no slot, and is not 0.
    """
    return bool(word) and segment.lives(word & 0xFF, word >> 8)


def _cost_word(seconds: float | None) -> int:
    return 0 if seconds is None else 1 + round(min(seconds, 1e9) * 1e9)


# ---- Names, and the rings: one of tasks for the service, one of answers for each client

MESSAGES = 256  # of tasks: 4 MiB, or the keys of 250,000 pages
LOCK_SECONDS = 0.2
ASKING_SECONDS = 0.04
"""The same for a client, which may be a scheduler in a step."""


def board_name(cache_name: str, uuid: str) -> str:
    """The name of a cache's board. A cache that was removed and created again has another one.
    Names of rings begin with it."""
    return f"{cache_name[:_NAME_PART]}.storage-{uuid[:16]}"


def ring_prefix(cache: Cache) -> str:
    """The prefix of the names of all rings of a cache."""
    return f"{board_name(cache.name, cache.index.segment.uuid)}-"


def tasks_ring(cache: Cache, lock_timeout: float = LOCK_SECONDS) -> SharedRing:
    """The ring of tasks, created if it does not exist."""
    how = {"message_bytes": PART_BYTES, "lock_timeout": lock_timeout}
    return _ring(cache, "tasks", how)


def answers_ring(cache: Cache, tasks: SharedRing, client: int) -> SharedRing:
    """The ring of a client's answers, created if it does not exist.

    Args:
        client: its `client_word` in the ring of tasks.

    Raises:
        NotReady: its client was stopped while it left it, or while it was swept.
    """
    how = {"message_bytes": ANSWER_BYTES, "lock_timeout": LOCK_SECONDS, "timeout": LOCK_SECONDS}
    return _ring(cache, f"{tasks.segment.uuid[:8]}-{client:x}", how)


def _ring(cache: Cache, name: str, how: dict[str, Any]) -> SharedRing:
    group = _group_of(cache)
    return SharedRing.open(f"{ring_prefix(cache)}{name}", capacity=MESSAGES, group=group, **how)


def _group_of(cache: Cache) -> int | None:
    """The group whose members may attach to a cache."""
    status = cache.index.segment.stat()
    return status.st_gid if status.st_mode & stat.S_IRGRP else None
