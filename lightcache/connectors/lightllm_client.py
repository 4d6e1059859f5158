"""LightLLM's `CpuKvCacheClient` on a cache that all services of a node share.

One class for three kinds of processes: the manager's, which looks prompts up and keeps their pages
pinned; the router and the ranks, which give these back; the ranks, which write pages. It imports
nothing of LightLLM. docs/design/lightllm.md, section 39, has the protocol.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache import Cache, GiveBack, LeaseLost, LightcacheError, Reservation
from lightcache.connectors.engine_cache import (
    LEAVE,
    launch_name,
    open_engine_cache,
    role_name,
    storage_link,
)
from lightcache.connectors.engine_options import EngineOptions
from lightcache.connectors.link import Voice
from lightcache.connectors.node_tally import NodeTally
from lightcache.errors import ConfigError, LockTimeout, WaitTimeout
from lightcache.leases import Lease
from lightcache.shm import SharedCounters, SharedRing
from lightcache.shm.locking import Hurried
from lightcache.storage.tier import BaseTier

if TYPE_CHECKING:
    from lightcache.hashing import Keys
    from lightcache.shm.clients import ClientInfo

CAPACITY, MESSAGE_BYTES = 256, 1024  # of a ring
MOST = (MESSAGE_BYTES - 8) // 4
"""Pages that one message gives back: 8 bytes are its number."""
TICK = 1.0
"""Seconds after which a process without requests gives back again, or takes what was given back."""
PATIENCE = 0.001
"""Seconds that a lookup waits for a ring's lock."""
READ_LIMIT = 0.5
"""Seconds that a lookup waits for a storage. LightLLM gives a lookup up that has queued as long."""
LOCK = 0.1
"""Seconds that a reservation waits for the index's lock, on the thread that runs the model: with a
holder that is stopped nothing is saved, and the service continues."""
OPEN = 3.0
"""Seconds that the manager's start waits for a storage; later it is used when it is there."""
PIN = 900.0
"""Seconds within which a rank's GPU must have the pool: the driver needs minutes for a TiB."""
NONE = -1
"""In LightLLM's lists, instead of a page: its kernels skip it."""
_log = logging.getLogger("lightcache.connectors")


@dataclass(frozen=True)
class Service:
    """One launch of LightLLM, and the pages of its model."""

    name: str
    """Unique to the launch, and the same in all its processes."""
    model: str
    fingerprint: str
    """All that decides the bytes of a page."""
    pages: int
    """Of a new cache; one that exists keeps its own number."""
    page_tokens: int
    shape: tuple[int, ...]
    """Of a page, in elements."""
    dtype: str
    """Of an element, by torch's name."""
    page_bytes: int
    options: EngineOptions
    """Without a size: that is `pages`."""
    shared: bool = True
    """False: equal hashes of two services may be different content, so each has its own cache,
    which ends with it, and no storage."""

    def role(self, kind: str) -> str:
        """What tells its processes from others in the cache's client table."""
        return role_name("lightllm", launch_name(self.name), kind)

    def object_name(self, what: str) -> str:
        """Of something in shared memory that is this launch's alone."""
        return f"lightllm-{self.name}-{what}"

    def open_cache(self, kind: str, device: bool) -> Cache:
        """Its cache; create it if it is missing.

        Raises:
            As `Cache.open`.
        """
        name = self.options.name if self.shared else f"lightllm-{self.name}"
        return open_engine_cache(
            replace(self.options, name=name, size=self.pages * self.page_bytes),
            model=self.model,
            fingerprint=self.fingerprint,
            page_bytes=self.page_bytes,
            page_tokens=self.page_tokens,
            role=self.role(kind),
            device=device,
            shared=False,  # each client gives back what is its own
            stays=self.shared,
        )


class _NoLock:
    """Their callers lock around each call. Ours needs none."""

    def acquire_sleep1ms(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing."""


@dataclass
class _Write:
    """Of a list of `allocate_pages`."""

    new: Reservation | None = None
    """None: there was none."""
    keys: Keys | None = None
    """To publish and to store; None: nothing is new."""


class _Ledger:
    """The manager's side: what it has pinned for others, and what they give back."""

    def __init__(self, cache: Cache, service: Service, voice: Voice) -> None:
        self.ignored = 0
        """Pages that were given back and not lent."""
        self._cache, self._service, self._voice = cache, service, voice
        self._role = service.role("giver")
        self._lent: Counter[int] = Counter()
        self._rings: dict[tuple[int, int], SharedRing] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._gone: set[tuple[int, int]] = set()
        self._lock = threading.RLock()

    @property
    def pages(self) -> int:
        """Pins that are out."""
        return self._lent.total()

    def lend(self, lease: Lease) -> list[int]:
        """Keep a lookup's pins until its pages are given back."""
        pages: list[int] = lease.pages.tolist()
        with self._lock:
            self._lent.update(pages)
            lease.detach()
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Unpin pages, each as often as it is named and lent."""
        with self._lock:
            named = Counter(pages)
            known = named & self._lent
            # An error of this leaves all pinned, and noted, until `close`.
            self._cache.index.unpin(np.fromiter(known.elements(), np.int32, known.total()))
            self._lent -= known
            self.ignored += named.total() - known.total()

    def collect(self, *, discover: bool = False) -> None:
        """Take what was given back out of the rings; first find those of new processes. A ring that
        cannot be read now is left to the next call, and holds no other up."""
        with self._lock:
            givers = self._discover() if discover else {}
            for giver, ring in list(self._rings.items()):
                with self._tried():
                    self._empty(giver, ring)
                    if discover and not (giver in givers and givers[giver].alive):
                        self._gone.add(giver)
                        self._rings.pop(giver).close()

    def _empty(self, giver: tuple[int, int], ring: SharedRing) -> None:
        while len(ring):
            with Hurried(PATIENCE):
                messages = ring.pop_many(CAPACITY)
            for message in messages:
                number = int.from_bytes(message[:8], "little")
                if number > self._last.get(giver, -1):  # else it was pushed twice
                    self._last[giver] = number
                    with self._tried():
                        self.give_back(np.frombuffer(message, "<i4", offset=8).tolist())

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        """An error of this ring is not one of the others."""
        try:
            yield
        except LockTimeout:
            pass  # a process that was stopped in a call
        except LightcacheError as error:
            self._voice.trouble("take back", error)

    def _discover(self) -> dict[tuple[int, int], ClientInfo]:
        clients = self._cache.index.segment.clients()
        givers = {(one.slot, one.epoch): one for one in clients if one.role == self._role}
        for giver in givers.keys() - self._rings.keys() - self._gone:
            # Of a dead one too: what it had said counts, and its ring goes with this process.
            with self._tried():
                self._rings[giver] = open_ring(self._service, *giver)
        return givers

    def close(self) -> None:
        with self._lock:
            with self._tried():
                self.give_back(list(self._lent.elements()))
            for ring in self._rings.values():
                ring.close()
            self._rings.clear()


def open_ring(service: Service, slot: int, epoch: int) -> SharedRing:
    """The ring through which a process gives back to the manager's."""
    name = service.object_name(f"{slot}-{epoch}")
    return SharedRing.open(name, capacity=CAPACITY, message_bytes=MESSAGE_BYTES)


class Client:
    """In place of `CpuKvCacheClient`: its constructor, and the calls of its callers. Of a call that
    cannot be served the answer is that of an empty, or a full, cache. Threads may share it."""

    def __init__(self, service: Service, only_create_meta_data: bool, init_shm_data: bool) -> None:
        """Open the cache; create it if it is missing.

        Args:
            only_create_meta_data: the router's: without the pages' bytes.
            init_shm_data: the manager's, the first of all. A rank's has neither.

        Raises:
            WaitTimeout: the rank's GPU did not get the pool.
            Otherwise as `Cache.open`.
        """
        manages = init_shm_data
        rank = not (init_shm_data or only_create_meta_data)
        self.lock = _NoLock()
        self._service, self._voice = service, Voice("LightLLM")
        kind = "manager" if manages else "giver"
        self.cache = service.open_cache(kind, device=rank and _has_cuda())
        self.page_num = self.cache.index.pages
        self._keys = self.cache.engine_keys()
        self._tally = NodeTally(self.cache) if manages else None
        """Of look-ups; LightLLM copies by itself."""
        self._updates = SharedCounters.open(service.object_name("updates"), names=["begun"])
        self._used = True
        options = service.options
        self._storage = storage_link(self.cache, options, "LightLLM")
        self._storage_begun = not options.storage
        self._once = threading.Lock()  # for what happens once, though threads share this
        self._writing: defaultdict[tuple[int, ...], deque[_Write]] = defaultdict(deque)
        self._writing_lock = threading.Lock()
        self._ledger: _Ledger | None = None
        self._ring: SharedRing | None = None
        if manages:
            self._ledger = _Ledger(self.cache, service, self._voice)
            self._tier(OPEN)
        else:
            own = self.cache.index.client_id
            self._ring = open_ring(service, own.slot, own.epoch)
            self._gives, self._numbers = GiveBack(self._ring), itertools.count()
            self._put = threading.Lock()
        if not only_create_meta_data:
            self.cpu_kv_cache_tensor = self._tensor(pinned=rank)
        self._ended = threading.Event()
        self._ticks = threading.Thread(target=self._tick, name="lightcache-lightllm", daemon=True)
        self._ticks.start()

    def _tensor(self, pinned: bool) -> Any:
        """The pages, in the shape of theirs; of a rank registered with its GPU."""
        import torch

        if pinned and _has_cuda():
            self.cache.pin(device=torch.cuda.current_device()).wait(timeout=PIN)
        flat = self.cache.pool.tensor().view(getattr(torch, self._service.dtype))
        return flat.view(self.page_num, *self._service.shape)

    def _tick(self) -> None:
        """A process without requests gives back, or takes what was given back."""
        while not self._ended.wait(TICK):
            try:
                self.tick()
            except Exception as error:  # the next one tries again
                self._voice.trouble("give back", error)

    def tick(self) -> None:
        """What is done once a second."""
        if self._ledger is not None:
            self._uses()
            self._ledger.collect(discover=True)
        else:
            with self._put:
                self._gives.flush()

    # ---- weights that change

    def end_use(self) -> None:
        """The weights are about to change: from now on no process of the service finds or saves
        anything. What was found or reserved before is of the weights before.

        It is not resumed under other names: a page that a request saves later may have been
        computed before, and LightLLM does not say so.
        """
        self._updates.add(begun=1)

    def _uses(self) -> bool:
        """Whether the weights are still those of the start."""
        with self._once:
            if self._used and self._updates.total()["begun"]:
                self._used = False
                if self._ledger is not None:  # once for the service
                    _log.warning(
                        "LightLLM: its weights have changed, or their memory was given away; "
                        "nothing is found or saved until the service starts again"
                    )
            return self._used

    # ---- the manager's process

    def query_pages(self, hashes: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix, pinned until they are given back; one lookup for
        a prompt. Waits for a storage, for a limited time."""
        assert self._ledger is not None
        try:
            with contextlib.suppress(LightcacheError):  # what cannot be had now waits
                self._ledger.collect()
            if not hashes or not self._uses():
                return []
            begun = time.perf_counter_ns()
            keys = self._keys.encode(hashes)
            with self.cache.match(keys) as lease:
                self._looked(keys, len(lease), begun)
                if len(lease) < len(keys) and (grown := self._read(keys, lease)):
                    return grown
                return self._ledger.lend(lease)
        except Exception as error:
            self._voice.trouble("look up", error)
            return []

    def _looked(self, keys: Keys, found: int, begun_ns: int) -> None:
        assert self._tally is not None
        self._tally.looked(begun_ns)
        size = self._service.page_tokens
        missed = "" if found else self._tally.missed(keys, None)
        self._tally.request(len(keys) * size, host=found * size, missed=missed)

    def collect(self) -> tuple[int, int]:
        """Unpin what other processes have given back; a thread does so once a second. Returns the
        pins that are out, and how many pages were given back that were not."""
        assert self._ledger is not None
        self._ledger.collect(discover=True)
        return self._ledger.pages, self._ledger.ignored

    def query_one_page(self, hash_key: int) -> tuple[int | None, bool]:
        """As `query_pages`, for a caller that asks page by page."""
        pages = self.query_pages([hash_key])
        return (pages[0], True) if pages else (None, False)

    def _read(self, keys: Keys, lease: Lease) -> list[int]:
        """Look again after a read of what the lease lacks; none if it is of no use."""
        assert self._ledger is not None
        tier = self._tier()
        if tier is None:
            return []
        try:
            task = tier.prefetch(keys, start=len(lease))
            if self._tally is not None:
                self._tally.watch(task)
            with contextlib.suppress(WaitTimeout):
                task.wait(READ_LIMIT)
            task.stop()
            with self.cache.match(keys, count=False) as grown:
                return self._ledger.lend(grown) if len(grown) > len(lease) else []
        except Exception as error:  # what memory has is found all the same
            self._voice.trouble("read from the storage", error)
            self._storage.judge(tier, error)
            return []

    def check_allpages_ready(self, page_list: Sequence[int]) -> bool:
        """True: a lookup finds ready pages only."""
        return True

    # ---- the router's and the ranks' processes

    def deref_pages(self, page_list: Sequence[int]) -> None:
        """Give back pages that the manager's process has pinned. Never waits for it."""
        pages = [page for page in page_list if page != NONE]
        try:
            if self._ledger is not None:
                self._ledger.give_back(pages)
                return
            with self._put:  # numbers rise in the order of the messages
                for begin in range(0, len(pages), MOST):
                    part = np.array(pages[begin : begin + MOST], np.int32)
                    self._gives.put(next(self._numbers), part)
                self._gives.flush()
        except Exception as error:
            self._voice.trouble("give back", error)

    def deref_one_page(self, page_index: int) -> None:
        """As `deref_pages`, for one."""
        self.deref_pages([page_index])

    @contextlib.contextmanager
    def holding(self, prompts: Iterable[tuple[Sequence[int], list[int]]]) -> Iterator[None]:
        """Pin for this process what it is going to copy: of each prompt its hashes and the pages
        that the manager's process has found.

        Raises:
            LeaseLost: the manager's process has died, and pages are not those that it has found.
        """
        with contextlib.ExitStack() as held:
            for hashes, pages in prompts:
                found: list[int] = []
                with contextlib.suppress(LightcacheError):
                    keys = self._keys.encode(hashes[: len(pages)])
                    lease = held.enter_context(self.cache.match(keys, count=False))
                    found = lease.pages.tolist()
                # Else the cache was cleared or disabled meanwhile, and the manager's pins hold.
                if found != pages and not self._manager_lives():
                    raise LeaseLost(
                        f"load: the manager's process has died, and {len(pages)} pages that it had "
                        "found may hold something else by now; restart the service"
                    )
            yield

    def _manager_lives(self) -> bool:
        role = self._service.role("manager")
        clients = self.cache.index.segment.clients()
        return any(client.alive for client in clients if client.role == role)

    def allocate_pages(
        self, hash_keys: Sequence[int], disk_offload_enable: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Pages to write for a prompt: of each hash the page, and whether it is ready already. -1:
        another request or service is writing it, or there is no room."""
        pages, ready = [NONE] * len(hash_keys), [False] * len(hash_keys)
        write = _Write()
        try:
            if self._uses():
                write = self._reserve(hash_keys, pages, ready)
        except Exception as error:
            self._voice.trouble("reserve", error)
        with self._writing_lock:
            self._writing[tuple(pages)].append(write)
        return pages, ready

    def _reserve(self, hash_keys: Sequence[int], pages: list[int], ready: list[bool]) -> _Write:
        keys = self._keys.encode(hash_keys)
        options = self._service.options
        admission = options.admission and not options.storage
        new = self.cache.reserve(keys, admission=admission, timeout=LOCK)
        for position, page in zip(new.new.tolist(), new.pages.tolist(), strict=True):
            pages[position] = page
        for position, page in zip(new.present.tolist(), new.present_pages.tolist(), strict=True):
            pages[position], ready[position] = page, True
        if len(new.new):
            self._tier()  # so that it is open when they are published
            return _Write(new, keys)
        self._store(keys)
        return _Write(new)

    def update_pages_status_to_ready(
        self,
        page_list: Sequence[int],
        deref: bool = True,
        disk_offload_enable: bool = False,
        token_num_in_page_list: int | None = None,
    ) -> None:
        """Publish what `allocate_pages` gave, and give it back. Ready pages go to the storage."""
        try:
            write = self._written(page_list)
            if write.new is not None:
                with write.new:
                    if write.keys is not None:
                        write.new.publish()
            if write.keys is not None:
                self._store(write.keys)
        except Exception as error:
            self._voice.trouble("publish", error)

    def recycle_pages(self, page_list: Sequence[int]) -> None:
        """Give back what `allocate_pages` gave, unwritten."""
        try:
            write = self._written(page_list)
            if write.new is not None:
                write.new.abandon()
        except Exception as error:
            self._voice.trouble("abandon", error)

    def _written(self, page_list: Sequence[int]) -> _Write:
        """What was noted for a list. Of two equal ones either may be taken: a page that is being
        written is in one list only, and of the others only the pins are given back."""
        listed = tuple(page_list)
        with self._writing_lock:
            waiting = self._writing.get(listed)
            if not waiting:
                raise ConfigError(
                    f"pages: expected a list that allocate_pages has returned, found {len(listed)} "
                    "others; nothing is published"
                )
            write = waiting.popleft()
            if not waiting:
                del self._writing[listed]
        return write

    # ---- all

    def _tier(self, timeout: float = 0.0) -> BaseTier | None:
        """The storage; None: there is none, or it is not open yet. The first call of a process that
        reads or writes begins to open it: of a service's ranks one writes."""
        with self._once:
            if not self._storage_begun:
                self._storage_begun = True
                self._storage.start(timeout)
        return self._storage.current

    def _store(self, keys: Keys) -> None:
        """Write ready pages to the storage. What comes before it is open stays in memory alone."""
        if (tier := self._tier()) is not None:
            try:
                tier.write(keys)
            except Exception as error:
                self._voice.trouble("write to the storage", error)
                self._storage.judge(tier, error)

    def close(self) -> None:
        """Give back everything and leave the cache. LightLLM does not call it: its processes are
        killed."""
        self._ended.set()
        self._ticks.join()
        for waiting in self._writing.values():
            for write in waiting:
                if write.new is not None:
                    write.new.release()
        self._writing.clear()
        if self._ledger is not None:
            self._ledger.close()
        if self._ring is not None:
            with self._put:
                self._gives.flush()
            self._ring.close()
        self._storage.close(LEAVE)
        self._updates.close()
        if self._tally is not None:
            self._tally.close()
        self.cpu_kv_cache_tensor = None
        self.cache.close()


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


__all__ = ["Client", "Service"]
