"""LightLLM's `CpuKvCacheClient` on a cache that all services of a node share.

One class for three kinds of processes: the manager's, which looks prompts up and keeps their pages
pinned; the router and the ranks, which give these back; the ranks, which write pages. It imports
nothing of LightLLM. docs/design/lightllm.md, section 39, has the protocol.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache import Cache, GiveBack, LeaseLost, LightcacheError, Reservation
from lightcache.errors import ConfigError, WaitTimeout
from lightcache.leases import Lease
from lightcache.shm import SharedRing
from lightcache.shm.locking import Hurried
from lightcache.storage import StorageTier

if TYPE_CHECKING:
    from lightcache.hashing import Keys
    from lightcache.shm.clients import ClientInfo

DAY = 24 * 3600.0
CAPACITY, MESSAGE_BYTES = 256, 1024  # of a ring
MOST = (MESSAGE_BYTES - 8) // 4
"""Pages that one message gives back: 8 bytes are its number."""
TICK = 1.0
"""Seconds after which a manager without requests looks at what was given back."""
PATIENCE = 0.001
"""Seconds that a lookup waits for a ring's lock."""
READ_LIMIT = 0.5
"""Seconds that a lookup waits for a storage. LightLLM gives a lookup up that has queued as long."""
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
    shared: bool = True
    """False: equal hashes of two services may be different content, so each has its own cache."""
    cache_name: str | None = None
    """Of the cache that is shared; None: the model's default."""
    cache: dict[str, Any] = field(default_factory=dict)
    """Further options of `Cache.open`."""
    storage: tuple[str, ...] = ()

    def role(self, kind: str) -> str:
        """What tells its processes from others in the cache's client table."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=4, person=b"lightllm")
        return f"lightllm-{kind}-{digest.hexdigest()}"


class _NoLock:
    """Their callers lock around each call. Ours needs none."""

    def acquire_sleep1ms(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing."""


class _Ledger:
    """The manager's side: what it has pinned for others, and what they give back."""

    def __init__(self, cache: Cache, service: Service) -> None:
        self.ignored = 0
        """Pages that were given back and not lent."""
        self._cache, self._service = cache, service
        self._role = service.role("giver")
        self._lent: Counter[int] = Counter()
        self._rings: dict[tuple[int, int], SharedRing] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._gone: set[tuple[int, int]] = set()
        self._lock, self._ended = threading.RLock(), threading.Event()
        threading.Thread(target=self._tick, name="lightcache-lightllm", daemon=True).start()

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
            self.ignored += named.total() - known.total()
            self._lent -= known
            self._cache.index.unpin(np.fromiter(known.elements(), np.int32, known.total()))

    def collect(self, *, discover: bool = False) -> None:
        """Take what was given back out of the rings; first find those of new processes."""
        with self._lock:
            givers = self._discover() if discover else {}
            for giver, ring in list(self._rings.items()):
                while len(ring):
                    with Hurried(PATIENCE):
                        messages = ring.pop_many(CAPACITY)
                    for message in messages:
                        number = int.from_bytes(message[:8], "little")
                        if number > self._last.get(giver, -1):  # else it was pushed twice
                            self._last[giver] = number
                            self.give_back(np.frombuffer(message, "<i4", offset=8).tolist())
                if discover and not (giver in givers and givers[giver].alive):
                    self._gone.add(giver)
                    self._rings.pop(giver).close()

    def _discover(self) -> dict[tuple[int, int], ClientInfo]:
        clients = self._cache.index.segment.clients()
        givers = {(one.slot, one.epoch): one for one in clients if one.role == self._role}
        for giver in givers.keys() - self._rings.keys() - self._gone:
            # Of a dead one too: what it had said counts, and its ring goes with this process.
            self._rings[giver] = open_ring(self._service, *giver)
        return givers

    def _tick(self) -> None:
        while not self._ended.wait(TICK):
            with contextlib.suppress(LightcacheError):  # the next tick tries again
                self.collect(discover=True)

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            self.give_back(list(self._lent.elements()))
            for ring in self._rings.values():
                ring.close()
            self._rings.clear()


def open_ring(service: Service, slot: int, epoch: int) -> SharedRing:
    """The ring through which a process gives back to the manager's."""
    name = f"lightllm-{service.name}-{slot}-{epoch}"
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
            As `Cache.open`.
        """
        manages = init_shm_data
        rank = not (init_shm_data or only_create_meta_data)
        self.lock = _NoLock()
        self._service, self._said = service, set[type]()
        kind = "manager" if manages else "giver"
        name = service.cache_name if service.shared else f"lightllm-{service.name}"
        lasting: dict[str, Any] = {"lifetime": "persistent", "idle_limit": DAY}
        self.cache = Cache.open(
            name,
            model=service.model,
            pages=service.pages,
            page_bytes=service.page_bytes,
            page_tokens=service.page_tokens,
            fingerprint=service.fingerprint,
            role=service.role(kind),
            device=rank and _has_cuda(),
            **((lasting | service.cache) if service.shared else {"lifetime": "attached"}),
        )
        self.page_num = self.cache.index.pages
        self._keys = self.cache.engine_keys()
        self._tier: StorageTier | None = None
        self._tier_lock = threading.Lock()
        self._writing: defaultdict[tuple[int, ...], deque[tuple[Keys, Reservation]]]
        self._writing = defaultdict(deque)
        self._ledger: _Ledger | None = None
        self._ring: SharedRing | None = None
        if manages:
            self._ledger = _Ledger(self.cache, service)
        else:
            own = self.cache.index.client_id
            self._ring = open_ring(service, own.slot, own.epoch)
            self._gives, self._numbers = GiveBack(self._ring), itertools.count()
            self._put = threading.Lock()
        if not only_create_meta_data:
            self.cpu_kv_cache_tensor = self._tensor(pinned=rank)

    def _tensor(self, pinned: bool) -> Any:
        """The pages, in the shape of theirs; of a rank registered with its GPU."""
        import torch

        if pinned and _has_cuda():
            self.cache.pin(device=torch.cuda.current_device()).wait()
        flat = self.cache.pool.tensor().view(getattr(torch, self._service.dtype))
        return flat.view(self.page_num, *self._service.shape)

    # ---- the manager's process

    def query_pages(self, hashes: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix, pinned until they are given back; one lookup for
        a prompt. Waits for a storage, for a limited time."""
        assert self._ledger is not None
        try:
            with contextlib.suppress(LightcacheError):  # what cannot be had now waits
                self._ledger.collect()
            if not hashes:
                return []
            keys = self._keys.encode(hashes)
            with self.cache.match(keys) as lease:
                if len(lease) < len(keys) and self._service.storage:
                    return self._read(keys, lease)
                return self._ledger.lend(lease)
        except Exception as error:
            self._miss("look up", error)
            return []

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
        """Look again after a read of what the lease lacks."""
        assert self._ledger is not None
        task = self._storage().prefetch(keys, start=len(lease))
        with contextlib.suppress(WaitTimeout):
            task.wait(READ_LIMIT)
        task.stop()
        with self.cache.match(keys, count=False) as grown:
            return self._ledger.lend(grown)

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
            self._miss("give back", error)

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
        refuse_disk(disk_offload_enable)
        pages, ready = [NONE] * len(hash_keys), [False] * len(hash_keys)
        try:
            keys = self._keys.encode(hash_keys)
            new = self.cache.reserve(keys)
        except Exception as error:
            self._miss("reserve", error)
            return pages, ready
        for position, page in zip(new.new.tolist(), new.pages.tolist(), strict=True):
            pages[position] = page
        for position, page in zip(new.present.tolist(), new.present_pages.tolist(), strict=True):
            pages[position], ready[position] = page, True
        # Equal lists are of equal content: a page that is being written is in one of them only.
        self._writing[tuple(pages)].append((keys, new))
        return pages, ready

    def update_pages_status_to_ready(
        self,
        page_list: Sequence[int],
        deref: bool = True,
        disk_offload_enable: bool = False,
        token_num_in_page_list: int | None = None,
    ) -> None:
        """Publish what `allocate_pages` gave, and give it back. Ready pages go to the storage."""
        refuse_disk(disk_offload_enable or not deref)
        try:
            keys, new = self._ended(page_list)
            with new:
                if len(new.new):
                    new.publish()
            if self._service.storage:
                self._storage().write(keys)
        except Exception as error:
            self._miss("publish", error)

    def recycle_pages(self, page_list: Sequence[int]) -> None:
        """Give back what `allocate_pages` gave, unwritten."""
        try:
            _, new = self._ended(page_list)
            new.abandon()
        except Exception as error:
            self._miss("abandon", error)

    def _ended(self, page_list: Sequence[int]) -> tuple[Keys, Reservation]:
        listed = tuple(page_list)
        waiting = self._writing.get(listed)
        if not waiting:
            raise ConfigError(
                f"pages: expected a list that allocate_pages has returned, found {len(listed)} "
                "others; nothing is published"
            )
        ended = waiting.popleft()
        if not waiting:
            del self._writing[listed]
        return ended

    # ---- all

    def _storage(self) -> StorageTier:
        """Opened by the first process that reads or writes: one rank of a service writes."""
        with self._tier_lock:
            if self._tier is None:
                urls = self._service.storage
                self._tier = StorageTier.open(self.cache, urls if len(urls) > 1 else urls[0])
            return self._tier

    def _miss(self, what: str, error: Exception) -> None:
        if type(error) not in self._said:
            self._said.add(type(error))
            _log.warning("LightLLM: %s: %s; the engine computes instead", what, error)

    def close(self) -> None:
        """Give back everything and leave the cache. LightLLM does not call it: its processes are
        killed."""
        for waiting in self._writing.values():
            for _, new in waiting:
                new.release()
        self._writing.clear()
        if self._ledger is not None:
            self._ledger.close()
        if self._ring is not None:
            self._ring.close()
        if self._tier is not None:
            self._tier.close()
        self.cpu_kv_cache_tensor = None
        self.cache.close()


def refuse_disk(asked: bool) -> None:
    """Of LightLLM's own disk cache.

    Raises:
        ConfigError: it is asked for.
    """
    if asked:
        raise ConfigError(
            "enable_disk_cache: LightLLM's disk cache keeps pages in a way of its own; leave it "
            'out, and give --lightcache \'{"storage": "disk:/path?capacity=1TiB"}\''
        )


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


__all__ = ["Client", "Service", "refuse_disk"]
