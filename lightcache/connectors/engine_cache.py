"""The cache of an engine's pages: how its processes open it and are named in it, when they may call
on it, and where they continue after a reset."""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from lightcache import Cache
from lightcache.cache import cache_name
from lightcache.connectors.engine_options import EngineOptions, Eviction
from lightcache.connectors.link import Link, Voice
from lightcache.connectors.node_tally import NodeTally
from lightcache.errors import LeaseLost, NoSpace, NotReady
from lightcache.kernels.moves import Engine
from lightcache.shm.listing import read_segment
from lightcache.storage.opening import open_tier
from lightcache.storage.tier import BaseTier

_log = logging.getLogger("lightcache.connectors")
START = 15.0
"""Seconds that the start of an engine waits for the cache."""
LEAVE = 15.0
"""Seconds that a close waits for each of a thread, the storage and the cache."""
REST = 1.0
"""Seconds without a call after an operator has disabled the cache."""
REMEDY = (
    "give more with Docker's --ipc=host or --shm-size, in Kubernetes with an emptyDir of medium "
    "Memory or a hostPath at /dev/shm, and with a higher memory limit"
)


def open_engine_cache(
    options: EngineOptions,
    *,
    model: str,
    fingerprint: str,
    page_bytes: int,
    page_tokens: int,
    role: str,
    device: bool,
    shared: bool = True,
    stays: bool = True,
    kv_groups: Sequence[str] | None = None,
    order: Eviction | None = None,
) -> Cache:
    """The cache that the options name, or the default one of the model and fingerprint. Parts of
    one process share a client.

    Args:
        order: of eviction, of a new cache, if the options name none; None: the cache's default.
        stays: False: it ends with its last client, whatever `idle_limit` says.

    Raises:
        As `Cache.open`.
    """
    eviction = options.eviction
    if eviction is None and read_segment(options.name or cache_name(model, fingerprint)) is None:
        eviction = order
    lifetime: str | None = "attached"
    if stays:
        lifetime = "persistent" if options.idle_limit is None else None
    try:
        cache = Cache.open(
            options.name,
            size=options.size,
            page_bytes=page_bytes,
            page_tokens=page_tokens,
            fingerprint=fingerprint,
            model=model,
            secret_file=options.secret_file,
            lifetime=lifetime,
            idle_limit=options.idle_limit if stays else None,
            numa=options.placement(),
            pool_path=options.pool_path,
            eviction=eviction,
            role=role,
            device=device,
            shared=shared,
            kv_groups=kv_groups,
            token_ids=options.token_ids or None,
        )
    except NoSpace as error:
        raise NoSpace(f"{error}; {REMEDY}") from error
    if options.admission and cache.index.eviction != "hz":
        _log.warning(
            'admission: all pages are saved, as the eviction of the cache %r is "%s", expected '
            '"hz"; create it with `lightcache create --eviction hz`, or give the option "eviction" '
            "for a new one",
            *(cache.name, cache.index.eviction),
        )
    return cache


def close_all(engines: list[Engine]) -> None:
    """Wait for their copies, and close them."""
    for engine in {id(engine): engine for engine in engines}.values():
        engine.close()


def storage_link(cache: Cache, options: EngineOptions, who: str) -> Link[BaseTier]:
    """The way to the storage that the options name. It is not begun."""
    voice = Voice(who, what="the storage", then="it is not used")
    speed = None if options.measures_speed else options.prefill_tokens_per_s
    opens = partial(open_tier, cache, options.storage, prefill_tokens_per_s=speed)
    return Link(voice, opens, methodcaller("close"))


@dataclass
class CacheAndStorage:
    """What a part of a connector that uses the storage has open."""

    cache: Cache
    storage: Link[BaseTier] | None
    tally: NodeTally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = NodeTally(self.cache)

    @property
    def tier(self) -> BaseTier | None:
        """The storage; None: there is none, or none yet: it is still opened, or tried again."""
        return None if self.storage is None else self.storage.current

    def close(self) -> None:
        """Leave: the storage first."""
        if self.storage is not None:
            self.storage.close(LEAVE)
        self.tally.close()
        self.cache.close()


class HasCache(Protocol):
    """What a part of a connector has open."""

    @property
    def cache(self) -> Cache: ...


T = TypeVar("T", bound=HasCache)


class CachePart(Generic[T]):
    """A part of a connector: it calls on the cache while that is open and of use."""

    def __init__(self, voice: Voice, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens nothing: `_link` is the part's to make and to start."""
        self.voice = voice
        self.figures: Counter[str] = Counter()
        """Since the start, or since they were taken last."""
        self._clock = clock
        self._link: Link[T] | None = None
        self._rest_until = 0.0

    def usable(self) -> T | None:
        """What is open, if nothing speaks against a call."""
        link = self._link
        opened = None if link is None else link.current
        if link is None or opened is None or self._clock() < self._rest_until:
            return None
        if opened.cache.index.segment.retired:
            self.voice.trouble("use the cache", LeaseLost("it was removed, or replaced"))
            link.lose(opened)
            return None
        return opened

    def trouble(self, what: str, error: BaseException) -> None:
        """An error of a call: say it once, and learn from it."""
        self.figures["errors"] += 1
        self.voice.trouble(what, error)
        if isinstance(error, NotReady):
            self._rest_until = self._clock() + REST
        opened = None if self._link is None else self._link.current
        if self._link is not None and opened is not None:
            self._link.judge(opened, error)


# ---- Launches: starts of an engine.


def launch_name(facts: str) -> str:
    """Names one start of an engine by what is the same in all its processes and in no other start:
    8 hex digits."""
    return hashlib.blake2b(facts.encode(), digest_size=4, person=b"lightcache run").hexdigest()


def host_name() -> str:
    """Tells machines apart, also of one name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def role_name(engine: str, launch: str, part: str) -> str:
    """How `lightcache ls` and `dump` show a client of an engine."""
    return f"{engine} {launch} {part}"


def weights_after_reset(engine: str, weights: str, launch: str, resets: int) -> str:
    """Names the weights of a launch that was told so many times that they may be others: the same
    in all processes of the launch, and in no other launch."""
    facts = f"{weights}\0{launch}\0{resets}".encode()
    digest = hashlib.blake2b(facts, digest_size=8, person=b"lightcache set").hexdigest()
    return f"{engine}-{launch}-{digest}"


def clear_ended(cache: Cache, engine: str, launch: str) -> None:
    """Clear the namespaces after resets of launches that have ended: there are 256. This launch's
    are kept."""
    begins = f"{engine} "
    living = {
        client.role.split()[1] for client in cache.clients() if client.role.startswith(begins)
    }
    pattern = re.compile(rf"{engine}-([0-9a-f]{{8}})-[0-9a-f]{{16}}")
    for space in cache.index.namespaces():
        found = pattern.fullmatch(space.weights)
        if found and found[1] not in living | {launch}:
            cache.clear(space)


__all__ = [
    "LEAVE",
    "REMEDY",
    "START",
    "CacheAndStorage",
    "CachePart",
    "clear_ended",
    "host_name",
    "launch_name",
    "open_engine_cache",
    "role_name",
    "storage_link",
    "weights_after_reset",
]
