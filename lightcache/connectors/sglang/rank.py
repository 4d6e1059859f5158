"""A rank's part: what it finds, loads and saves, by SGLang's hashes. docs/design/sglang.md has the
states and the promises.

SGLang's thread plans, takes and begins loads, which takes no lock. Saves are reserved, begun and
published by threads of ours. It imports nothing of SGLang.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import Cache, LayerLoads, Offload, OffloadQueue
from lightcache._arguments import Keys
from lightcache.connectors.engine_cache import (
    LEAVE,
    START,
    CacheAndStorage,
    CachePart,
    clear_ended,
    close_all,
    host_name,
    launch_name,
    open_engine_cache,
    role_name,
    storage_link,
    weights_after_reset,
)
from lightcache.connectors.engine_options import EngineOptions
from lightcache.connectors.link import Link, Voice
from lightcache.connectors.node_tally import NodeTally
from lightcache.connectors.page_groups import Finder, PageGroup, names_of_groups
from lightcache.connectors.sglang.pools import FULL, Format
from lightcache.engine_keys import EngineKeys
from lightcache.errors import Abandoned, Detached, LeaseLost, LightcacheError
from lightcache.kernels.moves import Engine
from lightcache.kernels.pinned import PinnedPages
from lightcache.layout import Hint
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.page_transfers import begun_with
from lightcache.runs import PLAIN
from lightcache.storage.tasks import StorageTask
from lightcache.storage.tier import BaseTier

_log = logging.getLogger("lightcache.connectors")
ENGINE = "sglang"
LIMIT = 900.0
"""Seconds after its last lookup until the pages of a request are given back: SGLang does not say
when a waiting request has gone."""
LOAD = 30.0
"""Seconds that a batch's loads may take; then it has failed."""
LATE = 60.0
"""Seconds between two warnings that a failed load still writes. It is waited for until it has
ended: SGLang gives its slots to other requests then."""
LOCK = 5.0
"""Seconds from a save on in which it may wait for the index's lock: while a holder is stopped,
those that are queued fail together, and not one after the other."""
JOIN = 15.0
"""Seconds that a save waits for a rank that does not begin it."""
QUIET = 10.0
"""Seconds that a reset or a close waits for saves, all in all; then they are given up."""
SLOW = 1.0
"""Seconds from which on a call that SGLang waited for is said in the log, and counted."""
MISSES = 512
"""Requests of which nothing was found that are remembered, so that they are not hashed again."""
USED = 512
"""Prompts that the device has whole, of which one touch keeps the pages here."""
TOUCHED = 4096
"""Pages that one touch names, of the windows of these prompts: it is done on SGLang's thread."""
TOUCH = 1.0
"""Seconds between two touches."""
NEIGHBOURS = 1 << 16
"""Hashes whose predecessor is known, where SGLang's tree does not say it."""
ROOT = ""
"""In place of the hash before a piece: it begins the prompt."""
Slots = Callable[[], npt.NDArray[np.int64]]
"""Returns the token slots of pages; may wait for a device."""


ABSENT: tuple[int, Slots] = (0, lambda: np.empty(0, np.int64))
"""Of a pool of which SGLang has no page of a node."""


def launch_of(drawn: int) -> str:
    """Names one start of the ranks that hold the same tokens, by a number that one of them drew:
    another in each start, also of one process."""
    return launch_name(f"{ENGINE} {host_name()} {drawn}")


@dataclass(frozen=True)
class Options(EngineOptions):
    """What an operator may write into `linker_extra_config`. Each has a default, so `{}` is a
    configuration."""

    given_in = "linker_extra_config"


@dataclass
class Opened(CacheAndStorage):
    """What a rank has open."""

    readers: tuple[Engine, ...]
    """Of each pool."""
    writers: tuple[Engine, ...]
    """Others than `readers` only where ranks hold the same heads: each writes a part."""
    memory: PinnedPages | None
    """None: the tensors are in host memory."""
    groups: tuple[PageGroup, ...] = (FULL,)
    page_tokens: int = 1
    part: str = ""
    """What the keys have beside the hash; see `pools.describe_host`."""
    _spaces: dict[str, tuple[Namespace, EngineKeys]] = field(default_factory=dict)
    _finders: dict[str, Finder] = field(default_factory=dict)

    def space(self, weights: str) -> tuple[Namespace, EngineKeys]:
        """The namespace of a version of the weights, and its keys. May take the lock the first
        time."""
        if weights not in self._spaces:
            space = self.cache.namespace(weights)
            keys = self.cache.engine_keys(namespace=space, salt=self.part)
            self._spaces[weights] = space, keys
        return self._spaces[weights]

    def finder(self, weights: str) -> Finder:
        """What finds pages of all pools in that namespace."""
        if weights not in self._finders:
            space, _ = self.space(weights)
            self._finders[weights] = Finder(self.cache, space, self.groups, self.page_tokens)
        return self._finders[weights]

    @property
    def can_load(self) -> bool:
        """Whether any page can be loaded: the driver registers the pool in the background."""
        return self.memory is None or self.memory.ready >= self.cache.pages

    def close(self) -> None:
        """Wait for copies, and leave."""
        close_all([*self.readers, *self.writers])
        super().close()


@dataclass
class _Promise:
    """What the last lookup of a request has said."""

    opened: Opened
    weights: str
    hashes: list[str]
    keys: Keys
    after: Keys | None
    until: float = 0.0
    planned: bool = False
    missed: bool = False
    """It has counted as one that nothing was found of."""
    read: StorageTask | None = None


@dataclass
class _Queued:
    """A load that the next batch begins."""

    opened: Opened | None
    leases: list[Lease]
    """Of each pool; none: the pages have gone, so the batch fails."""
    slots: tuple[Slots, ...] = ()


@dataclass
class _Batch:
    """Loads of a forward pass."""

    loads: list[LayerLoads]
    """Of each pool; none: nothing can be loaded."""
    lost: bool
    tally: NodeTally | None = None
    pages: list[int] = field(default_factory=list)
    """Of each pool."""
    begun_ns: int = 0


@dataclass
class _Save:
    """An offload, from SGLang's call to the report of its end."""

    opened: Opened | None
    queue: OffloadQueue
    weights: str
    hashes: list[str]
    pools: tuple[tuple[int, Slots], ...]
    """Of each pool the number of last pages that SGLang still has of it, and their slots: of a
    window some or none, of states one or none."""
    before: str | None
    after: list[Any]
    end: float
    """When it waits for the index's lock no longer: of a queue of saves each has waited."""
    hint: Hint = Hint.NONE
    """Of its new pages."""
    tokens: Sequence[int] = ()
    """Token ids of its pages; empty: they are not noted."""
    absent: int = 0
    """Pages for which there was no room, or whose beginning has gone."""
    offloads: dict[int, Offload] = field(default_factory=dict)
    """By pool."""


class _Settled(Exception):
    """Nothing is to be saved: all is there, is being written, or has no room."""


class Neighbours:
    """The hash before each of the last ones that were seen. Bounded."""

    def __init__(self, most: int = NEIGHBOURS) -> None:
        """Knows nothing."""
        self._before: dict[bytes, bytes] = {}
        self._most = most

    def see(self, hashes: list[str], before: str | None = None) -> None:
        """Consecutive hashes, and the one before them if it is known."""
        whole = [ROOT if before is None else before, *hashes]
        skipped = 1 if before is None else 0
        for one, other in zip(whole[skipped:], whole[skipped + 1 :], strict=False):
            self._before[bytes.fromhex(other)] = bytes.fromhex(one)
        while len(self._before) > self._most:
            del self._before[next(iter(self._before))]

    def before(self, name: str) -> str | None:
        """The hash before this one; None: not known."""
        known = self._before.get(bytes.fromhex(name))
        return None if known is None else known.hex()


class Rank(CachePart[Opened]):
    """See the module. One thread calls, but for `wait`."""

    def __init__(
        self,
        options: Options,
        launch: str,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens nothing; see `start`.

        Args:
            launch: the same in all schedulers of a start of SGLang.
        """
        super().__init__(
            Voice(f"lightcache, rank {rank}", then="SGLang continues without it"), clock
        )
        self.options, self.launch, self.rank = options, launch, rank
        self._format: Format | None = None
        self._team: int | None = None
        self._weights = options.weights
        self._resets = 0
        self._neighbours: Neighbours | None = None
        self._promises: OrderedDict[str, _Promise] = OrderedDict()
        """Of requests with pages that are pinned, the one that ends first in front."""
        self._misses: OrderedDict[str, _Promise] = OrderedDict()
        self._used: dict[str, list[str]] = {}
        """The last hash of a prompt, and those of the window that ends there."""
        self._used_pages = 0
        """Hashes in it, of all windows."""
        self._touch_at = 0.0
        self._queued: dict[str, _Queued] = {}
        self._started: dict[int, _Batch] = {}
        self._batches = -1
        self._offloads = OffloadQueue()
        self._saves: queue.SimpleQueue[_Save | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.serves = False
        """Whether it was started, and not closed."""

    # ---- the cache

    def start(self, form: Format, team: int | None = None) -> None:
        """The engine's tensors: open the cache for them.

        Args:
            team: what the ranks of this engine write together by; None: there is one.
        """
        if self.options.admission and team is not None:
            self.refuse("admission: expected false where several ranks save, found true")
            return
        self._format, self._team = form, team
        self.serves = True
        self._keep_saving()
        self._link = Link(self.voice, self._open, Opened.close)
        with self._noted("start"):
            self._link.start(START)

    def slow(self, call: str, seconds: float) -> None:
        """SGLang has waited for this call so long. Any thread."""
        self.figures["slow_calls"] += 1
        _log.warning("lightcache, rank %d: %s took %.1f s", self.rank, call, seconds)

    def refuse(self, why: str) -> None:
        """The cache is of no use for this engine."""
        self.voice.trouble("not used", why)

    def guess_beginnings(self, why: str) -> None:
        """The hash before a piece is not told: say so once, and remember from now on what was
        seen."""
        if self._neighbours is None:
            self._neighbours = Neighbours()
            self.voice.trouble(
                "save pieces of prompts",
                f"{why}, so beginnings of prompts may be evicted under their rests",
            )

    def _open(self) -> Opened:
        of = self._format
        assert of is not None
        device = of.device != "cpu"
        cache = open_engine_cache(
            self.options,
            model=of.model,
            fingerprint=of.fingerprint,
            page_bytes=of.geometry.page_bytes,
            page_tokens=of.page_tokens,
            role=role_name(ENGINE, self.launch, f"rank {self.rank}"),
            device=device,
            kv_groups=names_of_groups(of.groups),
            order="lru",  # SGLang does not say which pages its device serves
        )
        readers: list[Engine] = []
        writers: list[Engine] = []
        try:
            memory = cache.pin(device=of.device) if device else None
            how: dict[str, Any] = {"memory": memory} if device else {"threads": 1}
            for pool in of.pools:
                make = partial(cache.transfer_engine, pool.geometry, pool.planes, **how)
                whole, part = pool.shard.share(), pool.shard.share(writing=True)
                readers.append(make(share=whole))
                same = part.cells == whole.cells
                writers.append(readers[-1] if same else make(share=part))
            if self._resets:
                clear_ended(cache, ENGINE, self.launch)
            engines = tuple(readers), tuple(writers)
            storage = self._storage(cache)
            opened = Opened(cache, storage, *engines, memory, of.groups, of.page_tokens)
            opened.space(self._weights)
        except BaseException:
            close_all(readers + writers)
            cache.close()
            raise
        return opened

    def _storage(self, cache: Cache) -> Link[BaseTier] | None:
        """Of one rank: pages of a storage are those of all ranks."""
        if not self.options.storage or self.rank:
            return None
        storage = storage_link(cache, self.options, f"lightcache, rank {self.rank}")
        storage.start(START)
        return storage

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """An error is said, and what follows is done all the same."""
        try:
            yield
        except Exception as error:
            self.trouble(what, error)

    # ---- lookups

    def lookup(self, request: str, hashes: list[str], before: str | None) -> int:
        """Pages of this prefix of the hashes that are in memory; they are pinned for `load`. Of a
        model with windows or states: the deepest prefix with the window and the state that end
        there.

        Args:
            before: the hash before them; `ROOT`: there is none; None: it is not known.
        """
        opened = self.usable()
        if opened is None or not opened.can_load:
            return 0
        self._lapse()
        new = request not in self._promises and request not in self._misses
        promise, begun = self._promise(request, opened, hashes, before), time.perf_counter_ns()
        index = opened.cache.index
        space, _ = opened.space(promise.weights)
        if not promise.planned and not index.peek(promise.keys[:1], namespace=space):
            if not promise.missed:
                index.core.count_lookup(len(hashes), 0)
                promise.missed = True
            found = 0
        else:
            found, _ = opened.finder(promise.weights).plan(
                request, promise.keys, len(promise.keys), after=promise.after, timeout=LIMIT
            )
            promise.planned = True
        if self._rest_until:
            self._rest_until = 0.0
            self.voice.well()
        if not found and promise.planned:
            promise.planned = False
            opened.finder(promise.weights).cancel(request)
        self._keep(request, promise)
        opened.tally.looked(begun)
        if new and not self.rank:
            self._count(opened, promise, found)
        if found < len(hashes):
            with self._noted("read a storage"):
                self._read(opened, promise, found)
        return found

    def _count(self, opened: Opened, promise: _Promise, found: int) -> None:
        """A request that is looked up for the first time, for the node: of what the device lacks,
        which is all that SGLang asks for. One rank counts for all."""
        space, _ = opened.space(promise.weights)
        missed = "" if found else opened.tally.missed(promise.keys, space)
        size = opened.page_tokens
        opened.tally.request(len(promise.keys) * size, host=found * size, missed=missed)

    def lengths(self, found: int) -> range:
        """Of what a lookup has found, the prefixes for which all is pinned: only the found one with
        states, and with windows if the window does not begin at the first page."""
        of = self._format
        first = 1
        if of is not None and any(each.rule.first(found, of.page_tokens) for each in of.groups):
            first = found
        return range(first, found + 1)

    def _promise(
        self, request: str, opened: Opened, hashes: list[str], before: str | None
    ) -> _Promise:
        """Of this request, for these hashes. The plan of other hashes stays pinned until
        the next plan has replaced it."""
        promise = self._promises.get(request) or self._misses.get(request)
        known = promise is not None and promise.opened is opened
        if (
            promise is None
            or not known
            or promise.weights != self._weights
            or promise.hashes != hashes
        ):
            if self._neighbours is not None:
                before = before if before is not None else self._neighbours.before(hashes[0])
                self._neighbours.see(hashes, before)
            _, keys = opened.space(self._weights)
            planned = promise is not None and known and promise.planned
            encoded = keys.encode([before, *hashes] if before else hashes)
            rest, after = (encoded[1:], encoded[:1]) if before else (encoded, None)
            promise = _Promise(opened, self._weights, list(hashes), rest, after, planned=planned)
        return promise

    def _keep(self, request: str, promise: _Promise) -> None:
        """Remember it until its plan ends; what has none, as room allows."""
        promise.until = self._clock() + LIMIT
        kept, other = self._promises, self._misses
        if not promise.planned:
            kept, other = other, kept
        other.pop(request, None)
        kept[request] = promise
        kept.move_to_end(request)
        if len(self._misses) > MISSES:
            self._misses.popitem(last=False)

    def _lapse(self) -> None:
        """End the plans of requests that have not been looked up for long. One comparison, if
        there are none."""
        now = self._clock()
        while self._promises:
            request, promise = next(iter(self._promises.items()))
            if promise.until > now:
                return
            self._unpin(request, self._promises.pop(request))

    def _read(self, opened: Opened, promise: _Promise, found: int) -> None:
        """Begin to read what is not in memory, once: it is found later."""
        if opened.tier is None or promise.read is not None:
            return
        keys, start = promise.keys, found
        if promise.after is not None:
            keys, start = np.concatenate((promise.after, keys)), found + 1
        promise.read = opened.finder(promise.weights).read(opened.tier, keys, start)
        opened.tally.watch(promise.read)

    @property
    def layers(self) -> int:
        """Of the model; 0: not known."""
        return 0 if self._format is None else self._format.layers

    @property
    def window(self) -> int:
        """The most pages that a position needs of a pool other than the first; 0: there is none."""
        of = self._format
        if of is None:
            return 0
        return max((each.rule.most(of.page_tokens) for each in of.groups[1:]), default=0)

    def used(self, last: list[str]) -> None:
        """The device has all of a prompt up to the last of these hashes, so nothing else says that
        it is used. `completed` touches the page, and with it those before it; of a window each.
        No more are noted than one touch may take."""
        if len(self._used) < USED and self._used_pages < TOUCHED:
            self._used_pages += len(last) - len(self._used.get(last[-1], ()))
            self._used[last[-1]] = last

    def _touch(self) -> None:
        """All at once and not often, as it encodes hashes on SGLang's thread."""
        if not self._used or self._clock() < self._touch_at:
            return
        self._touch_at = self._clock() + TOUCH
        used, self._used, self._used_pages = self._used, {}, 0
        with self._noted("use pages"):
            if (opened := self.usable()) is None:
                return
            space, keys = opened.space(self._weights)
            touched = list(keys.encode(list(used))[:, None])
            for group in opened.groups[1:]:
                most = group.rule.most(opened.page_tokens)
                touched += [group.run.keys(keys.encode(last[-most:])) for last in used.values()]
            for each in touched:
                with opened.cache.index.match(each, count=False, namespace=space) as lease:
                    lease.count_use()

    # ---- loads

    def load(self, request: str, hashes: list[str], *slots: Slots) -> None:
        """The next batch loads these pages, of which all ranks have said that they are there. If
        they have gone nevertheless, that batch fails: nothing else may differ between ranks.

        Args:
            slots: of each pool: of windows those of the last pages, of states the one.
        """
        self.cancel_load(request)
        queued = self._queued[request] = _Queued(None, [], slots)
        promise = self._promises.pop(request, None)
        self._misses.pop(request, None)
        try:
            opened = self.usable()
            if opened is None:
                raise LeaseLost("the cache has gone since the request was looked up")
            queued.opened = opened
            queued.leases = self._leases(request, promise, opened, hashes)
        except Exception as error:
            if promise is not None:  # its plan may be there still
                self._unpin(request, promise)
            self.trouble("load", error)

    def lose(self, request: str, error: Exception) -> None:
        """A load that SGLang has asked for and that cannot be made: the next batch fails by it."""
        queued = self._queued.setdefault(request, _Queued(None, []))
        leases, queued.leases = queued.leases, []
        self._give_back(leases)
        self.trouble("load", error)

    def _leases(
        self, request: str, promise: _Promise | None, opened: Opened, hashes: list[str]
    ) -> list[Lease]:
        finder, pages = opened.finder(self._weights), len(hashes)
        if promise is not None and promise.opened is opened and promise.planned:
            if promise.hashes[:pages] == hashes and promise.weights == self._weights:
                with contextlib.suppress(LeaseLost):  # it has lapsed
                    return finder.take(request, promise.keys, pages)
            else:
                opened.finder(promise.weights).cancel(request)
        space, keys = opened.space(self._weights)
        encoded = keys.encode(hashes)
        leases: list[Lease] = []
        for group in opened.groups:
            wanted = group.run.keys(encoded[finder.first(group, pages) :])
            leases.append(opened.cache.index.match(wanted, count=False, namespace=space))
            if (found := len(leases[-1])) < len(wanted):
                self._give_back(leases)
                raise LeaseLost(
                    f"expected {len(wanted)} pages, found {found}: the others have gone"
                )
        for lease in leases:  # all are there
            lease.count_use()
        return leases

    def cancel_load(self, request: str) -> bool:
        """Give up a load that has not begun. False: there is none."""
        queued = self._queued.pop(request, None)
        if queued is None:
            return False
        self._give_back(queued.leases)
        return True

    def _give_back(self, leases: list[Lease]) -> None:
        for lease in leases:
            with self._noted("give back"), contextlib.suppress(LightcacheError):
                lease.close()  # an error: its cache has gone

    def begin(self, after: Callable[[], list[Any]]) -> int:
        """Begin the loads of a batch; returns its number, -1: there are none.

        Args:
            after: returns the events that they wait for.
        """
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        self._batches += 1
        batch = self._started[self._batches] = _Batch([], True)
        try:
            batch.lost = not self._begin(batch, queued, after())
        except Exception as error:
            self.trouble("load", error)
            for each in queued.values():  # does nothing where a copy has it
                self._give_back(each.leases)
        return self._batches

    def _begin(self, batch: _Batch, queued: dict[str, _Queued], after: list[Any]) -> bool:
        """Whether nothing is lost by now."""
        whole = True
        for request, each in queued.items():
            if not each.leases or each.opened is None:
                whole = False
                continue
            if not batch.loads:
                opened = each.opened
                batch.loads = [LayerLoads(reader, timeout=LOAD) for reader in opened.readers]
                batch.tally, batch.pages = opened.tally, [0] * len(batch.loads)
            try:
                if each.opened is not opened:
                    raise LeaseLost("the cache was replaced since the request was looked up")
                parts = zip(batch.loads, each.leases, each.slots, strict=True)
                for pool, (loads, lease, slots) in enumerate(parts):
                    pages = len(lease)
                    loads.add(request, lease, slots())
                    self.figures["loaded_pages"] += pages
                    batch.pages[pool] += pages
            except Exception as error:
                whole = False
                for loads in batch.loads:
                    loads.cancel(request)
                self._give_back(each.leases)
                self.trouble("load", error)
        batch.begun_ns = time.perf_counter_ns()
        for loads in batch.loads:
            loads.start(after=after)
        return whole

    def wait(self, number: int, layer: int) -> None:
        """Wait until a layer of a batch is there, or its loads have failed. Any thread."""
        batch, of = self._started.get(number), self._format
        if batch is None or of is None:
            return
        places = of.places(layer)
        for pool, loads in enumerate(batch.loads):
            if pool in places:
                loads.wait(places[pool])

    def finish(self, number: int) -> bool:
        """Wait for a batch; whether all of it was loaded. None of its copies writes any more."""
        batch = self._started.pop(number, None)
        if batch is None:
            return False  # its start has failed
        whole = not batch.lost
        for pool, loads in enumerate(batch.loads):
            landed = False
            with self._noted("load"):
                errors = loads.finish()
                landed = not errors
                for error in errors.values():
                    self.trouble("load", error)
            whole = whole and landed
            self._count_load(batch, pool, landed)
            self._wait_for_copies(loads)
        self.figures["failed_batches"] += not whole
        return whole

    def _count_load(self, batch: _Batch, pool: int, landed: bool) -> None:
        if batch.tally is None or not batch.pages[pool]:
            return
        if landed:
            nbytes = batch.loads[pool].nbytes
            batch.tally.moved("load", batch.pages[pool], nbytes, batch.begun_ns)
        else:
            batch.tally.add(failed_loads=1)

    def _wait_for_copies(self, loads: LayerLoads) -> None:
        """However long it takes: SGLang frees the slots next, and a copy would write into those of
        another request. A device that is lost ends its copies."""
        warn = time.monotonic() + LATE
        while True:
            with self._noted("wait for a load"):
                if not loads.in_flight:
                    return
            if time.monotonic() >= warn:
                warn = time.monotonic() + LATE
                self.figures["late_loads"] += 1
                _log.error(
                    "lightcache, rank %d: a load that has failed still writes after %g s; SGLang "
                    "waits for it, as its slots would be given to another request",
                    self.rank,
                    LATE,
                )
            time.sleep(1e-3)

    def count_storage(self) -> Counter[str]:
        """The figures, with those of the storage."""
        opened = None if self._link is None else self._link.current
        if opened is not None and opened.tier is not None:
            figures = opened.tier.take_figures()
            for name, value in figures.items():
                self.figures[f"storage_{name}"] += value
            opened.tally.stored(figures)
        return self.figures

    # ---- saves

    @property
    def notes_tokens(self) -> bool:
        """Whether the cache that is open notes token ids."""
        opened = None if self._link is None else self._link.current
        return opened is not None and opened.cache.token_records is not None

    def offload(
        self,
        hashes: list[str],
        slots: Slots,
        before: str | None,
        after: list[Any],
        *others: tuple[int, Slots],
        hint: Hint = Hint.NONE,
        tokens: Sequence[int] = (),
    ) -> None:
        """Save pages. It is reported by `completed` in its turn, whatever becomes of it: ranks that
        save the same report the same number.

        Args:
            others: of each other pool the number of the last pages that SGLang has of it, and their
                slots; `ABSENT`: it has none.
            hint: what is expected of new pages.
            tokens: token ids of these pages; empty: not known, or they alone do not decide them.
        """
        others += (ABSENT,) * (self._parts - 1 - len(others))
        save = _Save(
            None,
            self._offloads,
            self._weights,
            hashes,
            ((len(hashes), slots), *others),
            before,
            after,
            self._clock() + LOCK,
            hint,
            tokens,
        )
        self.figures["offered_pages"] += len(hashes)
        try:
            with self._noted("save"):
                save.opened = self.usable()
                if self._neighbours is not None:
                    if before is None:
                        save.before = self._neighbours.before(hashes[0])
                    self._neighbours.see(hashes, save.before)
                if save.before is None:
                    self.figures["unknown_beginnings"] += 1
                self._forget_computed(hashes)
        finally:
            self._saves.put(save)

    def _keep_saving(self) -> None:
        """Start the thread of saves, or another in place of one that has died."""
        if not self.serves or (self._thread is not None and self._thread.is_alive()):
            return
        with self._noted("save"):
            thread = threading.Thread(target=self._run, name="lightcache-saves", daemon=True)
            thread.start()
            self._thread = thread

    def _forget_computed(self, hashes: list[str]) -> None:
        """Give back what was promised to requests that have computed it: SGLang had no room for
        their load, or another rank had nothing. Others that wait look it up again."""
        computed = set(hashes)
        requests = [name for name, each in self._promises.items() if each.hashes[0] in computed]
        for request in requests:
            self._unpin(request, self._promises.pop(request))

    def _unpin(self, request: str, promise: _Promise) -> None:
        with self._noted("give back"), contextlib.suppress(LightcacheError):  # its cache has gone
            promise.opened.finder(promise.weights).cancel(request)

    def completed(self) -> int:
        """Saves that `pop` returns. SGLang asks in each step, also an idle one: so plans lapse, and
        a thread that could not be started is tried again."""
        self._lapse()
        self._touch()
        self._keep_saving()
        return self._offloads.completed() // self._parts

    @property
    def _parts(self) -> int:
        """Places in the queue that each save has, one for each pool: so ranks count alike."""
        return 1 if self._format is None else len(self._format.pools)

    def _popped(self) -> tuple[_Save, Exception | None]:
        ended = self._offloads.pop()
        assert isinstance(ended.tag, _Save)
        return ended.tag, ended.error

    def pop(self) -> bool:
        """Whether the oldest save has succeeded, of all pools."""
        saved = True
        for pool in range(self._parts):
            save, error = self._popped()
            if isinstance(error, Abandoned):
                self.figures["lost_saves"] += 1  # by another rank, or cleared
            elif error is not None and not isinstance(error, _Settled):
                self.trouble("save", error)
            saved = saved and (error is None or isinstance(error, _Settled))
            opened = save.opened
            if error is None:
                copy = save.offloads[pool]
                self.figures["saved_bytes"] += copy.nbytes
                if opened is not None:
                    opened.tally.moved("offload", copy.page_count, copy.nbytes, copy.begun_ns)
            elif opened is not None and not isinstance(error, _Settled):
                opened.tally.add(failed_offloads=1)
        self.figures["absent_pages"] += save.absent
        if save.absent and save.opened is not None:
            save.opened.tally.add(no_room_pages=save.absent)
        saved = saved and not save.absent
        if saved:
            with self._noted("write to a storage"):
                self._store(save)
        return saved

    def _store(self, save: _Save) -> None:
        """Write it to the storage: all ranks have published it by now."""
        opened = self.usable()
        if opened is None or opened is not save.opened or opened.tier is None:
            return
        _, keys = opened.space(save.weights)
        finder = opened.finder(save.weights)
        tasks = finder.write(opened.tier, keys.encode(save.hashes), save.hashes[0])
        opened.tally.watch(*tasks)

    def _run(self) -> None:
        """The thread of saves: begins them in order."""
        while (save := self._saves.get()) is not None:
            if isinstance(save, threading.Event):
                save.set()
            else:
                for pool in range(self._parts):
                    self._submit(save, pool)
            del save  # it keeps the offload, and that the pool's pages

    def _submit(self, save: _Save, pool: int) -> None:
        try:
            save.queue.submit(partial(self._begin_save, save, pool), save)
        except Detached:
            pass  # a reset has closed the queue
        except Exception as error:  # it has its turn, and fails in it
            with self._noted("save"):
                save.queue.submit(partial(_fail, error), save)

    def _begin_save(self, save: _Save, pool: int) -> Offload:
        opened, of = save.opened, self._format
        if opened is None or of is None:
            raise LeaseLost("the cache is not open")
        count, slots = save.pools[pool]
        if pool and (save.absent or not count):
            raise _Settled  # without the pages of the first pool the others are of no use
        group = of.pools[pool].group
        space, keys = opened.space(save.weights)
        alone = self._team is None and group.run == PLAIN and opened.tier is None
        left = max(0.05, save.end - self._clock())  # each tries: the lock may be free by now
        how: dict[str, Any] = {"namespace": space, "timeout": left, "run": group.run}
        how |= {"admission": alone and self.options.admission, "hint": save.hint}
        if group.whole:
            if group.run == PLAIN and len(save.tokens) >= len(save.hashes) * of.page_tokens:
                how["tokens"] = save.tokens
            encoded = keys.encode([save.before, *save.hashes] if save.before else save.hashes)
            if save.before:
                encoded, how["after"] = encoded[1:], encoded[:1]
        else:
            encoded = group.run.keys(keys.encode(save.hashes[-count:]))
            how["independent"] = True
        if self._team is not None:
            how |= {"shards": of.shard.ranks, "shard": of.shard.rank, "team": self._team}
            how["join_timeout"] = JOIN
        numbers = slots()
        held = opened.cache.reserve(encoded, **how)
        save.absent += len(held.missing)
        try:
            if not len(held.new):
                raise _Settled
            if save.queue is not self._offloads:
                raise LeaseLost("SGLang has dropped its tree since")
            writer = opened.writers[pool]
            offload = Offload(writer, held, numbers, positions=held.new, after=save.after)
        except BaseException:
            if begun_with(held) is None:
                (held.abandon if len(held.new) else held.release)()
            raise
        save.offloads[pool] = offload
        return offload

    def _quiet(self) -> None:
        """No save reads the device any more, or what it reads is given up."""
        end = time.monotonic() + QUIET
        marker = threading.Event()
        former, self._offloads = self._offloads, OffloadQueue()
        if self._thread is not None and self._thread.is_alive():
            self._saves.put(marker)
            marker.wait(QUIET)
        former.close(max(0.0, end - time.monotonic()))

    # ---- the end

    def reset(self) -> None:
        """SGLang has dropped its tree: the weights may be others now. Pages saved before are not
        found by this launch any more; those of others stay. Waits for copies under way."""
        keeps = self.options.on_reset == "keep"
        if not keeps:  # first: SGLang believes the reset, whatever fails in it
            self._resets += 1
            self._weights = weights_after_reset(
                ENGINE, self.options.weights, self.launch, self._resets
            )
        self._drop()
        link = self._link
        opened = None if link is None else link.current
        if keeps or link is None or opened is None:
            return
        try:
            clear_ended(opened.cache, ENGINE, self.launch)
            opened.space(self._weights)
        except Exception as error:
            self.trouble("forget the old weights", error)
            link.lose(opened)  # it is opened again, with the new ones

    def _drop(self) -> None:
        """Give back all that requests have, and wait for copies. What fails is said, and the others
        are given back all the same."""
        for request in list(self._queued):
            with self._noted("cancel a load"):
                self.cancel_load(request)
        for number in list(self._started):
            with self._noted("wait for a load"):
                self.finish(number)
        with self._noted("wait for saves"):
            self._quiet()
        while self._promises:
            self._unpin(*self._promises.popitem())
        self._misses.clear()

    def close(self) -> None:
        """Finish the copies under way, and leave the cache."""
        self._drop()
        self.serves = False
        if self._thread is not None:
            self._saves.put(None)
            self._thread.join(LEAVE)
            self._thread = None
        if self._link is not None:
            with self._noted("close"):
                self._link.close(LEAVE)
            self._link = None


def _fail(error: Exception) -> Any:
    raise error


__all__ = ["ABSENT", "ROOT", "Neighbours", "Opened", "Options", "Rank", "launch_of"]
