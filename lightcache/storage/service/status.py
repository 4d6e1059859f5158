"""What a storage service says of itself to whoever asks, without asking it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lightcache.storage.service.board import COUNTED, Board, Phase, tier_stats
from lightcache.storage.tiers import TierStats


@dataclass(frozen=True)
class ServiceStats:
    """Of the services of a cache, since the first of them, or of their clients, came: it is
    forgotten when none of them is left."""

    serving: bool
    """Whether one is alive, and takes tasks."""
    pid: int
    """Of the one that is alive, in its PID namespace, or was last; 0: there was none."""
    age_s: float
    """Seconds since it began, by the wall clock."""
    clients: int
    """That it knows: such as have asked it for something, and live."""
    taken: int
    """Messages that were taken out of the ring."""
    malformed: int
    """Of these, passed over: no message of ours, or not one that could be asked just then."""
    halves: int
    """Tasks that came without their end: their client was killed, or the ring was full."""
    late: int
    """Tasks whose time was up before they were taken."""
    orphans: int
    """Messages of clients that are gone."""
    lost: int
    """Answers that their client had no room for, or did not let in; or that could not be made."""
    full: int
    """Times that the service had so much to do that it left messages in the ring."""
    tier: TierStats


def stats_of(board: Board) -> ServiceStats:
    """Read them. No lock."""
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
    """Of the storage service of the cache `name`; also of one that is stopped, or is gone. Attaches
    read-only for a moment.

    Raises:
        NotReady: no such cache, or neither a service nor a client of one is or was there.
    """
    board = Board.look(name, group=group)
    try:
        return stats_of(board)
    finally:
        board.close()


__all__ = ["ServiceStats", "service_stats", "stats_of"]
