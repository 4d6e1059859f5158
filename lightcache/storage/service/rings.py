"""The rings of a storage service: one for what is asked of it, one for the answers of each client.

All of them go with the last who is attached. A lock of theirs is waited for a short time only: a
process that is stopped while it holds one is not waited for.
"""

from __future__ import annotations

from lightcache.cache import Cache
from lightcache.shm import SharedRing
from lightcache.storage.service.board import board_name, group_of
from lightcache.storage.service.messages import ANSWER_BYTES, PART_BYTES

TASKS = 256  # messages: 4 MiB, or the keys of 250,000 pages
ANSWERS = 256
LOCK_SECONDS = 0.2
ASKING_SECONDS = 0.04
"""The same of a client that asks: it may be a scheduler, in a step."""


def prefix(cache: Cache) -> str:
    """Of the names of all rings of a cache."""
    return f"{board_name(cache.name, cache.index.segment.uuid)}-"


def tasks(cache: Cache, lock_timeout: float = LOCK_SECONDS) -> SharedRing:
    """That of what is asked, made if it is not there."""
    return SharedRing.open(
        f"{prefix(cache)}tasks",
        capacity=TASKS,
        message_bytes=PART_BYTES,
        group=group_of(cache),
        lock_timeout=lock_timeout,
    )


def answers_name(cache: Cache, pid: int, client: int) -> str:
    """Of a client's answers."""
    return f"{prefix(cache)}{pid}-{client:016x}"


def make_answers(cache: Cache, pid: int, client: int) -> SharedRing:
    """A client's own."""
    return SharedRing.create(
        answers_name(cache, pid, client),
        capacity=ANSWERS,
        message_bytes=ANSWER_BYTES,
        group=group_of(cache),
        lock_timeout=LOCK_SECONDS,
    )


def find_answers(cache: Cache, pid: int, client: int) -> SharedRing:
    """Somebody else's.

    Raises:
        NotReady: it is gone; or its client was stopped while it left it, or while it was swept.
    """
    return SharedRing.attach(
        answers_name(cache, pid, client),
        group=group_of(cache),
        lock_timeout=LOCK_SECONDS,
        timeout=LOCK_SECONDS,
    )


__all__ = ["ANSWERS", "LOCK_SECONDS", "find_answers", "make_answers", "prefix", "tasks"]
