"""The scheduler's half: what a request finds, loads and saves. docs/design/vllm.md has the states.

It reads vLLM's requests and outputs and imports nothing of vLLM. No method waits for a lock, a file
or another process, but `reset`, which may.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import os
import re
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from lightcache import Cache
from lightcache._arguments import Keys
from lightcache.connectors.engine_cache import (
    START,
    CacheAndStorage,
    CachePart,
    clear_ended,
    launch_name,
    open_engine_cache,
    role_name,
    storage_link,
    weights_after_reset,
)
from lightcache.connectors.link import Link, Voice
from lightcache.connectors.page_groups import Finder, names_of_groups
from lightcache.connectors.vllm.messages import (
    BlockGroup,
    Hello,
    LoadOrder,
    LoadPart,
    Orders,
    Place,
    Report,
    SaveOrder,
)
from lightcache.connectors.vllm.options import HINT, HINTS, Options
from lightcache.connectors.vllm.prompts import Adapters, is_tokens_alone, keys_of, prompt_of
from lightcache.errors import (
    ConfigError,
    LeaseLost,
    LightcacheError,
    OutOfPages,
)
from lightcache.hashing import KeySpec, PageHasher
from lightcache.layout import Hint
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.notices import Notices
from lightcache.runs import PLAIN
from lightcache.storage.tasks import StorageTask
from lightcache.traces import Recorder

_log = logging.getLogger("lightcache.connectors")
MOST_JOBS = 256
"""Saves under way; what comes then is offered in a later step, but a state is not."""
MOST_HELD = 4
"""States under way hold at most this part of the device's blocks: a quarter."""
STORAGE = 3.0
"""Seconds that the cache waits for its storage. One that is there later joins it then."""
RESET = 5.0
"""Seconds that a reset waits for saves under way."""
MOST_WAIT = 10.0
"""Seconds that a request waits for a storage at most."""
WRITERS = 0.2
"""Seconds that a request waits at most for pages that others are writing."""
ASK = 0.05
"""Seconds for which an answer about a waiting request stands: its pages are pinned meanwhile."""
ADAPTER = 1.0
"""Seconds that a request waits at most until its adapter's files have been looked at."""
RENEWALS = 16
"""Of such answers in a step; the requests at the head of vLLM's queue are asked first."""
LONG = 1024
"""Pages of a prompt that is planned without a look at its first page."""
OLDEST = 20.0
"""Seconds after which an answer is renewed in any case: plans end after a minute."""
BlocksOf = Callable[[str, int], Sequence[int]]
"""Returns the blocks of a request, of the group with a number."""
_KEY_BYTES = 16
_NO_KEYS: Keys = np.empty((0, 2), np.uint64)
ENGINE = "vllm"


def launch_of(engine_id: str) -> str:
    """Names one start of an engine, the same in all its data-parallel ranks: 8 hex digits."""
    return launch_name(re.sub(r"_dp\d+$", "", engine_id))


def team_of(engine_id: str) -> int:
    """What the tensor-parallel ranks of an engine join each other's reservations by."""
    digest = hashlib.blake2b(engine_id.encode(), digest_size=8, person=b"lightcache team").digest()
    return int.from_bytes(digest, "little") or 1


def role_of(launch: str, part: str) -> str:
    """How `lightcache ls` and `dump` show a client of an engine."""
    return role_name(ENGINE, launch, part)


def part_of(rank: int) -> str:
    """A worker, in its role."""
    return f"rank {rank}"


@dataclass
class Opened(CacheAndStorage):
    """What the scheduler's half has open."""

    finder: Finder
    segment: str
    _spec: tuple[Namespace, KeySpec] | None = None

    @property
    def spec(self) -> KeySpec:
        """Of the keys of what is saved and found now."""
        if self._spec is None or self._spec[0] is not self.space:
            self._spec = self.space, self.cache.key_spec(namespace=self.space)
        return self._spec[1]

    @property
    def space(self) -> Namespace:
        """Where pages are found and saved now."""
        return self.finder.space


@dataclass(slots=True)
class _Request:
    """A request that vLLM has not forgotten yet."""

    request: Any
    begun: float = 0.0
    adapter: bytes | None = None
    spec: KeySpec | None = None
    """Of `keys`; None: there are none yet."""
    keys: Keys = field(default_factory=lambda: _NO_KEYS)
    hasher: PageHasher | None = None
    offered: int = 0
    """Pages that were offered to be saved, or are there."""
    stated: int = 0
    """Pages before the last state of which this is so."""
    device: int = 0
    """Tokens that the device had at the last look."""
    due: float = 0.0
    """Computed tokens with which there are more pages to offer."""
    planned: bool = False
    fresh: bool = False
    """What comes next was not there at the last look, or the last time that pages were offered."""
    shared: int = 0
    """Tokens of a prefix that others have, but no state after it: it is worth saving one there."""
    missed: bool = False
    """It has counted as one that nothing was found of."""
    answer: _Answer | None = None
    """Of the last look, while its plan stands."""
    leases: list[Lease] = field(default_factory=list)
    """Of a load under way, one for each group."""
    started: bool = False
    barred: bool = False
    """A load of it has failed, or it cannot be keyed: it is offered nothing."""
    stale: bool = False
    """It has KV of weights before a reset: it saves nothing."""
    hint: Hint = Hint.NONE
    worthless: float = math.inf
    """The page from which on its pages are not worth saving."""
    jobs: set[int] = field(default_factory=set)
    ended: bool = False
    kept: bool = False
    """vLLM keeps its blocks until it is told."""
    written: float = math.inf
    """When it no longer waits for pages that are being written."""
    read: StorageTask | None = None
    until: float = math.inf
    """When it no longer waits for the storage."""
    host: int = 0
    """Pages that were in memory before the storage was asked."""
    loaded: int = 0
    """Tokens that a load brings."""
    counted: bool = False
    """The node has counted it."""


class _Answer(NamedTuple):
    """What `look` has said of a request, and of what."""

    opened: Opened
    tokens: tuple[int, int]
    """Computed, and all."""
    until: float
    found: int


@dataclass(slots=True)
class _Job:
    request: str
    left: int
    keys: bytes
    group: int
    first: int
    """Of its blocks, the first one's place in the request's table."""
    blocks: tuple[int, ...]
    freed: bool = False
    """vLLM has given up the first of them: a window has moved on."""
    held: list[Any] = field(default_factory=list)
    """The same blocks, as vLLM's pool has them, if they are held."""
    source: Any = None
    """The request itself, if its pages are to be told of."""


@dataclass(frozen=True)
class Stored:
    """Blocks of a request whose pages a save has brought into the cache: places in its table."""

    request: Any
    first: int
    end: int


class SchedulerHalf(CachePart[Opened]):
    """See the module."""

    def __init__(
        self,
        options: Options,
        engine_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens nothing: the ranks say where the cache is; see `connect`."""
        super().__init__(Voice("lightcache, scheduler"), clock)
        self.options, self.launch = options, launch_of(engine_id)
        self.tells = False
        """Whether what was stored is collected, for `take_stored`: of the group with keys of its
        own (`PLAIN`)."""
        self._stored: list[Stored] = []
        self._recorder = None if options.record is None else Recorder(options.record)
        self._page = 0
        self._groups: tuple[BlockGroup, ...] = ()
        self._windows = self._states = self._prefixes = False
        self._pool: Any = None
        """vLLM's, if its blocks are held while they are saved."""
        self._place: Place | None = None
        self._part, self._device = "scheduler", False
        self._segments: dict[int, str] = {}
        self._agreed = ""
        """The segment that all ranks have open; empty: they differ."""
        self._notices = Notices(_log)
        self._adapters = Adapters()
        self._requests: dict[str, _Request] = {}
        self._jobs: dict[int, _Job] = {}
        self._offering: dict[str, _Request] = {}
        """Requests that may have more pages to offer."""
        self._writing: dict[bytes, _Job] = {}
        """By the first key of what they save."""
        self._windowed: dict[tuple[str, int], deque[int]] = {}
        """Jobs by request and group of a window, whose first blocks stood in its table at the last
        step: windows give up the first ones first."""
        self._freed: dict[int, int] = {}
        """Jobs by blocks that they read and vLLM may give to others."""
        self._checked: Opened | None = None
        """What was found usable since the last step."""
        self._given: list[int] = []
        """Blocks that were given to requests that wait for a load, since the last step."""
        self._orders = Orders()
        self._number = self._resets = self._renewed = 0
        self._weights = options.weights
        self._speed = _Speed(clock, options.prefill_tokens_per_s)

    # ---- the cache

    def connect(self, hellos: Iterable[Hello]) -> None:
        """What the ranks have said: open the cache where they have it."""
        ranks = sorted(hellos, key=lambda hello: hello.rank)
        for hello in ranks:
            self.voice.pass_on(hello.troubles)
        reasons = {hello.why for hello in ranks if hello.place is None}
        if not ranks or reasons:
            self.voice.trouble("not used", "; ".join(sorted(reasons)) or "no rank has said hello")
            return
        if len({hello.place for hello in ranks}) > 1:
            self.voice.trouble("not used", "the ranks describe different pages")
            return
        if len({hello.host for hello in ranks}) > 1:
            self.voice.trouble("not used", "ranks on other nodes")
            return
        place = self._place = ranks[0].place
        assert place is not None
        self._page, self._groups = place.page_tokens, place.groups
        self._windows = not all(group.whole for group in place.groups)
        self._states = any(group.state for group in place.groups)
        self._prefixes = any(group.whole for group in place.groups)
        self._note_segments({hello.rank: hello.segment for hello in ranks})
        self._part, self._device = "scheduler", False
        for hello in ranks:
            if hello.process == os.getpid():  # they share a client, so it must be the same
                self._part, self._device = part_of(hello.rank), hello.device
        self._link = Link(self.voice, self._open, Opened.close)
        self._link.start(START)

    def _open(self) -> Opened:
        assert self._place is not None
        role = role_of(self.launch, self._part)
        cache = open_cache(self._place, self.options, role=role, device=self._device)
        try:
            if self._resets:
                clear_ended(cache, ENGINE, self.launch)
            finder = self._finder(cache)
            storage = None
            if self.options.storage:
                storage = storage_link(cache, self.options, "lightcache, scheduler")
                storage.start(STORAGE)
        except BaseException:
            cache.close()
            raise
        return Opened(cache, storage, finder, cache.index.segment.uuid)

    def _finder(self, cache: Cache) -> Finder:
        """For the weights that are in use now."""
        return Finder(cache, cache.namespace(self._weights), self._groups, self._page)

    def _note_segments(self, segments: Mapping[int, str]) -> None:
        self._checked = None
        self._segments |= segments
        first, *others = {*self._segments.values()}
        self._agreed = "" if others else first

    def usable(self) -> Opened | None:
        """What is open, if all ranks have the same open and nothing speaks against a call. Looked
        at once while a step is made: what is removed meanwhile raises an error in a later call."""
        opened = None if self._link is None else self._link.current
        if opened is not None and opened is self._checked:
            return opened
        opened = super().usable()
        if opened is None or opened.segment != self._agreed:
            return None
        self._checked = opened
        return opened

    def trouble(self, what: str, error: BaseException) -> None:
        """An error of a call: say it once, and learn from it."""
        self._checked = None
        super().trouble(what, error)

    def close(self) -> None:
        """Leave the cache. What loads and saves is the workers'."""
        for state in self._requests.values():
            self._release(state)
        self._requests.clear()
        self._offering.clear()
        if self._recorder is not None:
            self._recorder.close()
        self._adapters.close()
        if self._link is not None:
            self._link.close(START)

    def hold_blocks(self, pool: Any) -> None:
        """From now on hold the blocks that are saved by a reference in vLLM's pool, so that it
        gives them to no other request: for models whose new blocks vLLM sets to zero, as it may do
        so before it calls `handle_preemptions`."""
        self._pool = pool

    # ---- requests

    def begin(self, request: Any) -> None:
        """A new request: hash its prompt, if the cache is there."""
        state = self._state(request)
        if request.lora_request is not None:
            lora = request.lora_request
            inplace = getattr(lora, "load_inplace", False)
            number = None if inplace else getattr(lora, "lora_int_id", None)
            self._adapters.ask(request.request_id, lora.lora_path, number)
        opened = self.usable()
        if opened is not None:
            self._keyed(state, opened)

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            barred = bool(getattr(request, "resumable", False))
            state = _Request(request, self._clock(), barred=barred, hint=self._hint(request))
            self._requests[request.request_id] = self._offering[request.request_id] = state
        return state

    def _hint(self, request: Any) -> Hint:
        """What the request's sender expects to follow it. Of a session: another turn, unless it
        says otherwise."""
        session = getattr(request, "session_id", None)
        given = getattr(request, "kv_transfer_params", None)
        text = given.get(HINT) if isinstance(given, Mapping) else None
        if text is None:
            return Hint.CONTINUES if session else Hint.NONE
        if isinstance(text, str) and text in HINTS:
            return HINTS[text]
        known = ", ".join(HINTS)
        self._notices.first(HINT, "%s: expected one of %s, found %r", HINT, known, text)
        return Hint.NONE

    def _keyed(self, state: _Request, opened: Opened) -> bool:
        """Whether the request has keys now."""
        spec = opened.spec
        if state.spec is spec:
            return True
        if state.barred:
            return False
        request = state.request
        if request.lora_request is not None and state.adapter is None:
            state.adapter = self._adapters.take(request.request_id)
            if state.adapter is None:
                return False
            self._adapters.forget(request.request_id)
        try:
            if self.options.save_decode:
                prompt = prompt_of(request, self._page, state.adapter)
                state.keys, state.hasher = prompt.keys(spec), prompt.hasher(spec)
            else:
                state.keys = keys_of(request, spec, state.adapter)
        except ConfigError as error:
            state.barred = True
            self.figures["without_keys"] += 1
            _log.info("lightcache: a request has no keys: %s", error)
            return False
        if self._recorder is not None and state.spec is None:
            count = request.num_prompt_tokens
            self._recorder.note(count, state.keys[: count // self._page], self._page)
        state.spec = spec
        return True

    def _asks(self, state: _Request) -> bool:
        """Whether it is worth waiting for the digest of the request's adapter."""
        known = state.request.lora_request is None or self._adapters.known(state.request.request_id)
        return not known and self._clock() < state.begun + ADAPTER

    def look(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded after the `computed` ones that the device has, and whether they
        are; None: ask again in the next step."""
        state = self._state(request)
        state.device = computed
        if request.skip_reading_prefix_cache or state.barred or state.stale:
            return 0, False
        opened = self.usable()
        if opened is None:
            return 0, False
        counts, last = (computed, request.num_tokens), state.answer
        if last is not None and last.opened is opened and last.tokens == counts:
            now = self._clock()
            if now < last.until or (self._renewed >= RENEWALS and now < last.until + OLDEST):
                self._mark(state)
                return last.found, last.found > 0
            self._renewed += 1
        asks = state.spec is None and self._asks(state)  # first: it may become known meanwhile
        if not self._keyed(state, opened):
            return (None if asks else 0), False
        limit = min((request.num_tokens - 1) // self._page, len(state.keys))
        if limit * self._page <= computed:
            self._cancel(state, opened)
            return 0, False
        ended = state.read is not None and state.read.ended  # before the plan, which finds it then
        begun = time.perf_counter_ns()
        found = self._plan(state, opened, limit)
        opened.tally.looked(begun)
        if self._rest_until:
            self._rest_until = 0.0
            self.voice.well()
        if found < limit and state.planned and self._coming(state, opened, found, limit):
            return None, False
        lacking = found < limit and opened.tier is not None and not ended
        if lacking and self._reading(state, opened, found, limit):
            return None, False
        tokens = max(0, found * self._page - computed)
        if not tokens:
            self._cancel(state, opened)
        state.answer = _Answer(opened, counts, self._clock() + ASK, tokens)
        self._mark(state)
        return tokens, tokens > 0

    def _mark(self, state: _Request) -> None:
        """Tell vLLM of a prefix that this prompt shares with others and that has no state yet: it
        ends a step there, as it does for a prefix that its own index has, and keeps the state."""
        if self._states and state.shared > state.request.shared_prefix_boundary:
            state.request.shared_prefix_boundary = state.shared

    @staticmethod
    def _release(state: _Request) -> None:
        """Give back the pages of a load."""
        leases, state.leases = state.leases, []
        for lease in leases:
            with contextlib.suppress(LightcacheError):  # of a cache that has gone
                lease.release()

    def _plan(self, state: _Request, opened: Opened, limit: int) -> int:
        """The pages of the deepest position that can be loaded, pinned. Where the first page is
        neither there nor being written, nothing is planned: a plan takes ten times as long as to
        see that. Of a long prompt it is little beside hashing, so the look is left out."""
        looked = limit < LONG or state.missed
        state.fresh = looked and not state.planned and opened.finder.nothing(state.keys)
        if state.fresh:
            if not state.missed:
                opened.cache.index.core.count_lookup(limit, 0)
            state.missed = True
            return 0
        found, whole = opened.finder.plan(state.request.request_id, state.keys, limit)
        state.planned = True
        state.missed |= not found
        state.shared = whole * self._page if self._prefixes and whole > found else 0
        return found

    def _cancel(self, state: _Request, opened: Opened | None) -> None:
        state.answer = None
        if state.planned:
            state.planned = False
            if opened is not None:
                opened.finder.cancel(state.request.request_id)

    def _coming(self, state: _Request, opened: Opened, found: int, limit: int) -> bool:
        """Whether the request waits for pages after the found ones that clients who live are
        writing: once, and not longer than computing what the device lacks of them would take."""
        now = self._clock()
        if now >= state.written:
            return False
        ahead = opened.finder.ahead(state.keys[:limit], found)
        gain = (found + ahead) * self._page - max(found * self._page, state.device)
        if gain <= 0:
            return False
        if state.written == math.inf:
            state.written = now + min(WRITERS, self._speed.seconds(gain))
        return now < state.written

    def _reading(self, state: _Request, opened: Opened, found: int, limit: int) -> bool:
        """Whether the request waits for the storage to read what the host lacks."""
        assert opened.tier is not None
        now = self._clock()
        if state.read is None:
            state.host = found
            told = self._tokens_of(opened, state.request, 0, limit)
            ids = np.frombuffer(told, np.uint32) if told else None
            state.read = opened.finder.read(opened.tier, state.keys[:limit], found, ids)
            opened.tally.watch(state.read)
            state.until = now + min(MOST_WAIT, self._speed.seconds((limit - found) * self._page))
            if state.read.ended:
                return False  # there is nothing to read
        if now < state.until:
            return True
        state.read.stop()
        return False

    def allocated(self, request: Any, blocks: Sequence[list[int]], external: int) -> None:
        """vLLM has given the request blocks, of each group, and waits for a load of `external`
        tokens if they are more than none. Then it is loaded, or told to be lost: nothing else ends
        its wait."""
        if external <= 0:
            return
        state = self._state(request)
        state.started = True  # from here on it has KV of the weights of now
        if self._windows and self._pool is None:
            self._given += itertools.chain.from_iterable(blocks)
        try:
            order = self._load(state, blocks, state.device, state.device + external)
        except Exception as error:
            state.barred = True
            self._orders.lost.append(request.request_id)
            self.trouble("begin a load", error)
            return
        self._orders.loads.append(order)

    def _load(
        self, state: _Request, blocks: Sequence[list[int]], begin: int, end: int
    ) -> LoadOrder:
        opened = self.usable()
        if opened is None:
            raise LeaseLost("the cache has gone since the request was planned")
        identity, pages = state.request.request_id, -(-end // self._page)
        state.planned, state.answer = False, None
        # From here on given back with the load, also one that is lost.
        state.leases = opened.finder.take(identity, state.keys, pages)
        parts = []
        for number, group in enumerate(self._groups):
            table, lease = blocks[number], state.leases[number]
            there = opened.finder.first(group, pages)
            start = max(begin, there * self._page)
            if group.state:
                if end != pages * self._page:
                    raise LeaseLost(f"expected a load up to a page's end, found {end} tokens")
                start = there * self._page
                mine = table[end // group.block_tokens - 1 :][:1]
            else:
                if not group.whole:
                    start = max(start, _unseen(table) * group.block_tokens)
                mine = table[start // group.block_tokens : end // group.block_tokens]
            if start >= end:
                continue  # at the beginning of a chunk no page of it is needed
            first = start // self._page
            numbers = np.ascontiguousarray(lease.pages[first - there :], np.int32)
            generations = opened.cache.index.generations(numbers)
            parts.append(
                LoadPart(
                    number,
                    numbers.tobytes(),
                    generations.tobytes(),
                    start - first * self._page,
                    tuple(mine),
                )
            )
        state.offered = max(state.offered, pages)
        state.stated = max(state.stated, pages)
        state.loaded = end - begin
        self.figures["loaded_tokens"] += end - begin
        return LoadOrder(identity, opened.segment, tuple(parts))

    def sources(self, request: Any, external: int) -> tuple[int, int]:
        """Of the tokens that a load brings, how many were in memory, and how many in a storage."""
        state = self._requests.get(request.request_id)
        if state is None or state.read is None:
            return external, 0
        host = max(0, min(external, state.host * self._page - state.device))
        return host, external - host

    def _count(self, state: _Request, opened: Opened | None) -> None:
        """A request that is computed for the first time, for the node."""
        state.counted = True
        if opened is None:
            return
        request = state.request
        host, storage = self.sources(request, state.loaded)
        tokens, missed = request.num_prompt_tokens, ""
        device = min(state.device, tokens)
        if not state.loaded and not device:
            missed = "failed"
            if state.spec is opened.spec:
                whole = max(0, tokens - 1) // self._page
                missed = opened.tally.missed(state.keys[:whole], opened.space)
        opened.tally.request(tokens, device=device, host=host, storage=storage, missed=missed)

    # ---- a step

    def orders(self, output: Any, blocks_of: BlocksOf) -> Orders:
        """Of this step. `blocks_of` returns the blocks of a request, of the group with a number."""
        self._speed.note(output.total_num_scheduled_tokens)
        orders, self._orders = self._orders, Orders()
        self._renewed = 0
        try:
            self._settle(orders, output.preempted_req_ids or ())
            if self._windows and self._pool is None:
                self._settle_freed(orders, output, blocks_of)
            opened = self.usable()
            drafts = output.scheduled_spec_decode_tokens
            scheduled, offering = output.num_scheduled_tokens, self._offering
            few, many = scheduled, offering
            if len(offering) < len(scheduled):
                few, many = offering, scheduled
            for identity in [each for each in few if each in many]:
                state = offering[identity]
                state.started = True
                if not state.counted:
                    self._count(state, opened)
                if state.stale or state.barred:
                    del offering[identity]
                    continue
                computed = state.request.num_computed_tokens + scheduled[identity]
                if drafts:
                    computed -= len(drafts.get(identity, ()))
                if computed >= state.due and opened is not None:
                    self._offer(orders, opened, state, computed, blocks_of)
                    if state.due == math.inf:
                        del offering[identity]
            if opened is not None and self._states:
                self._offer_states(orders, opened, output.kv_connector_block_state)
        except Exception as error:
            if self._pool is None:
                orders.settle += self._jobs  # which blocks are overwritten may not be known
            self.trouble("save what was computed", error)
        self._checked = None
        return orders

    def _settle(self, orders: Orders, preempted: Iterable[str]) -> None:
        for identity in preempted:
            state = self._requests.get(identity)
            if state is not None:
                if self._pool is None:
                    orders.settle += state.jobs
                state.offered, state.due, state.fresh = 0, 0.0, False
                self._offering[identity] = state

    def _settle_freed(self, orders: Orders, output: Any, blocks_of: BlocksOf) -> None:
        """A window moves on while its request runs: vLLM may give blocks that are being saved to
        others. The jobs of those that it does give must end before the step."""
        for (identity, group), numbers in list(self._windowed.items()):
            table: Sequence[int] | None = None
            while numbers:
                job = self._jobs.get(numbers[0])
                if job is not None:
                    table = blocks_of(identity, group) if table is None else table
                    if list(table[job.first : job.first + 1]) == [job.blocks[0]]:
                        break
                    job.freed = True
                    self._freed |= dict.fromkeys(job.blocks, numbers[0])
                numbers.popleft()
            if not numbers:
                del self._windowed[identity, group]
        given, self._given = self._given, []
        if not self._freed:
            return
        tables = [new.block_ids for new in output.scheduled_new_reqs]
        tables += [new for new in output.scheduled_cached_reqs.new_block_ids if new]
        blocks = itertools.chain(given, *itertools.chain.from_iterable(tables))
        orders.settle += {self._freed[block] for block in blocks if block in self._freed}

    def _offer(
        self,
        orders: Orders,
        opened: Opened,
        state: _Request,
        computed: int,
        blocks_of: BlocksOf,
    ) -> None:
        request = state.request
        known = request.num_tokens if self.options.save_decode else request.num_prompt_tokens
        upto = min(computed, known) // self._page
        if upto > state.offered and (
            len(self._jobs) >= MOST_JOBS * len(self._groups) or not self._keyed(state, opened)
        ):
            return
        due = (upto + 1) * self._page
        state.due = due if self.options.save_decode or due <= known else math.inf
        if upto <= state.offered:
            return
        if upto > len(state.keys):
            self._extend(state)
        begin, state.offered = state.offered, upto
        fresh, state.fresh = state.fresh, True
        upto = self._worth(opened, state, begin, upto)
        for number, group in enumerate(self._groups):
            if begin < upto and not group.state:
                self._save(orders, opened, state, number, begin, upto, fresh, blocks_of)

    def _worth(self, opened: Opened, state: _Request, begin: int, upto: int) -> int:
        """The end of those of the pages [begin, upto) that are worth saving. It is decided here,
        for all ranks: each reserves what the order says."""
        weighs = any(group.whole and group.run == PLAIN for group in self._groups)
        if not self.options.admission or not weighs or opened.tier is not None:
            return upto
        end = begin + opened.cache.worth(
            state.keys[:upto],
            begin,
            refused=begin >= state.worthless,
            hint=state.hint,
            namespace=opened.space,
        )
        if end < upto:
            state.worthless = min(state.worthless, end)
            self.figures["not_worth_pages"] += upto - end
        return end

    def _offer_states(self, orders: Orders, opened: Opened, told: Any) -> None:
        """vLLM tells in which blocks the step leaves states that later requests may begin with, and
        after how many tokens each is: group, block and tokens. It keeps them for this step alone,
        so those that are not held now cannot be saved later."""
        if told is None or self._pool is None:
            return
        room = self._pool.num_gpu_blocks // MOST_HELD
        room -= sum(self._groups[job.group].state for job in self._jobs.values())
        for identity, states in told.boundary_state_offloads.items():
            state = self._requests.get(identity)
            if state is None or state.stale or state.barred or not self._keyed(state, opened):
                continue
            for number, block, tokens in states:
                group, pages = self._groups[number], tokens // self._page
                if not group.state or tokens % self._page:
                    continue
                if pages > len(state.keys):
                    self._extend(state)
                if not 0 < pages <= len(state.keys) or pages > state.worthless:
                    continue  # of the answer, or behind pages that are not saved
                key = group.run.keys(state.keys[pages - 1 : pages])
                there = opened.cache.index.peek(key, namespace=opened.space)
                if not there and key.tobytes() not in self._writing:
                    if room <= 0 or len(self._jobs) >= MOST_JOBS * len(self._groups):
                        self.figures["given_up_saves"] += 1
                        continue
                    room -= 1
                    first = tokens // group.block_tokens - 1
                    self._order(orders, opened, state, number, key, 0, first, (block,))
                state.stated = max(state.stated, pages)

    def _save(
        self,
        orders: Orders,
        opened: Opened,
        state: _Request,
        number: int,
        begin: int,
        upto: int,
        fresh: bool,
        blocks_of: BlocksOf,
    ) -> None:
        """Order to save these pages of a group, those that are new. Fresh ones are not looked for:
        if another engine has saved them since the last look, the worker finds that."""
        group, identity = self._groups[number], state.request.request_id
        each = self._page // group.block_tokens
        table = blocks_of(identity, number)
        if not group.whole:
            begin = max(begin, -(-_unseen(table) // each))
        keys = group.run.keys(state.keys[:upto]) if group.run.group else state.keys
        start = begin
        if not fresh:
            start += opened.cache.index.peek(keys[begin:upto], namespace=opened.space)
        while start < upto and (other := self._writing.get(keys[start].tobytes())) is not None:
            start += _alike(other.keys, keys[start:upto])  # by another request of this engine
        state.fresh &= start == begin
        if start < upto:
            blocks = tuple(table[start * each : upto * each])
            self._order(orders, opened, state, number, keys[:upto], start, start * each, blocks)

    def _order(
        self,
        orders: Orders,
        opened: Opened,
        state: _Request,
        number: int,
        keys: Keys,
        start: int,
        first: int,
        blocks: tuple[int, ...],
    ) -> None:
        """Order to save the pages of `keys[start:]`, which lie in these blocks: the first one has
        this place in the request's table."""
        group, identity = self._groups[number], state.request.request_id
        noted = group.whole and group.run == PLAIN
        self._number += 1
        root = start == 0 or not group.whole
        data = keys[start if root else start - 1 :].tobytes()
        new = data if root else data[_KEY_BYTES:]
        source = state.request if self.tells and group.run == PLAIN else None
        job = _Job(identity, len(self._segments), new, number, first, blocks, source=source)
        self._jobs[self._number] = self._writing[new[:_KEY_BYTES]] = job
        state.jobs.add(self._number)
        self.figures["offered_pages"] += len(keys) - start
        if self._pool is not None:
            held = [self._pool.blocks[block] for block in blocks]
            self._pool.touch(held)
            job.held = held
        elif not group.whole:
            self._windowed.setdefault((identity, number), deque()).append(self._number)
        orders.saves.append(
            SaveOrder(
                self._number,
                number,
                opened.segment,
                opened.space.weights,
                data,
                root,
                blocks,
                state.hint,
                self._tokens_of(opened, state.request, start, len(keys)) if noted else b"",
            )
        )

    def _tokens_of(self, opened: Opened, request: Any, start: int, end: int) -> bytes:
        """Ids of the tokens of pages [start, end), packed; empty if the cache does not note them,
        or they alone do not decide the keys."""
        if opened.cache.token_records is None or not is_tokens_alone(request):
            return b""
        return array("I", request.all_token_ids[start * self._page : end * self._page]).tobytes()

    def _extend(self, state: _Request) -> None:
        """Hash what was decoded since."""
        if state.hasher is not None:
            new = list(state.request.all_token_ids[state.hasher.tokens :])
            state.keys = np.concatenate((state.keys, state.hasher.update(new)))

    def report(self, report: Report | None, received: Iterable[str]) -> set[str]:
        """What the workers say of a step. Returns the requests whose blocks vLLM may free now."""
        free: set[str] = set()
        if report is not None:
            if report.segments:
                self._note_segments(report.segments)
            for identity in report.failed:
                self.figures["failed_loads"] += 1
                if (state := self._requests.get(identity)) is not None:
                    state.barred = True
            for job, ranks in report.saved.items():
                self._saved(job, ranks, free)
        for identity in received:
            state = self._requests.get(identity)
            if state is None:
                continue
            self._release(state)
            if state.ended:
                self._forget(identity, state)
        self._checked = None
        return free

    def _saved(self, number: int, ranks: int, free: set[str]) -> None:
        job = self._jobs.get(number)
        if job is None:
            return
        job.left -= ranks
        if job.left > 0:
            return
        del self._jobs[number]
        first = job.keys[:_KEY_BYTES]
        if self._writing.get(first) is job:
            del self._writing[first]
        if job.held:
            self._pool.free_blocks(reversed(job.held))  # the head is the last to be given away
        if job.freed:
            for block in job.blocks:
                if self._freed.get(block) == number:
                    del self._freed[block]
        if job.source is not None:
            self._tell(job)
        state = self._requests.get(job.request)
        if state is None:
            return
        state.jobs.discard(number)
        if state.ended and not state.jobs:
            if state.kept:
                free.add(job.request)
            if not state.leases:
                self._forget(job.request, state)

    def _tell(self, job: _Job) -> None:
        """Of the pages of a save that has ended, well or not, those that are there now."""
        opened = self.usable()
        if opened is None:
            return
        keys = np.frombuffer(job.keys, np.uint64).reshape(-1, 2)
        pages = opened.cache.peek(keys, namespace=opened.space)  # none, if it is of before a reset
        if pages:
            blocks = pages * (self._page // self._groups[job.group].block_tokens)
            self._stored.append(Stored(job.source, job.first, job.first + blocks))

    def take_stored(self) -> list[Stored]:
        """What was stored since the last call."""
        taken, self._stored = self._stored, []
        return taken

    def finish(self, request: Any) -> bool:
        """The request has ended. True: keep its blocks until `report` names it."""
        identity = request.request_id
        state = self._requests.get(identity)
        if state is None:
            return False
        state.ended = True
        opened = None if self._link is None else self._link.current
        self._cancel(state, opened)
        if state.read is not None:
            state.read.stop()
        if state.leases:
            return False  # vLLM keeps the blocks of a load by itself
        state.kept = bool(state.jobs)
        if not state.jobs:
            self._forget(identity, state)
        return state.kept

    def _forget(self, identity: str, state: _Request) -> None:
        """All of it is done: what was computed may go to the storage."""
        del self._requests[identity]
        self._offering.pop(identity, None)
        self._adapters.forget(identity)
        if not self.options.storage or state.stale or not state.offered:
            return
        opened = self.usable()
        if opened is not None and opened.tier is not None and opened.spec is state.spec:
            pages = min(state.offered, state.stated) if self._states else state.offered
            if pages:
                opened.tally.watch(*opened.finder.write(opened.tier, state.keys[:pages], identity))

    @property
    def pending(self) -> bool:
        """Whether the engine is to make steps though it has no request: saves are under way."""
        return bool(self._jobs)

    def reset(self) -> bool:
        """vLLM has dropped its own index: the weights may be others now. Pages saved before are not
        found by this launch any more; those of others stay. Waits for the saves under way."""
        if self.options.on_reset == "keep":
            return True
        self._resets += 1
        self._weights = weights_after_reset(ENGINE, self.options.weights, self.launch, self._resets)
        self._stored.clear()
        link = self._link
        opened = None if link is None else link.current
        for state in self._requests.values():
            state.stale = state.stale or state.started
            self._cancel(state, opened)
        if link is None or opened is None:
            return True
        try:
            writing = b"".join(job.keys for job in self._jobs.values())
            keys = np.frombuffer(writing, np.uint64).reshape(-1, 2)
            if len(keys):
                opened.cache.wait(keys, timeout=RESET, namespace=opened.space)
        except LightcacheError as error:
            self.trouble("wait for saves", error)
        try:
            clear_ended(opened.cache, ENGINE, self.launch)
            opened.finder = self._finder(opened.cache)
        except (LightcacheError, OutOfPages) as error:
            self.trouble("forget the old weights", error)
            link.lose(opened)  # it is opened again, with the new ones
        return True

    def take_figures(self) -> Mapping[str, int]:
        """The figures since the last call."""
        opened = None if self._link is None else self._link.current
        if opened is not None and opened.tier is not None:
            opened.tally.stored(opened.tier.take_figures())
        taken, self.figures = self.figures, Counter()
        return taken


def _alike(data: bytes, keys: Keys) -> int:
    """Pages at the head of both, of which the first is the same: keys are those of prefixes."""
    own = np.frombuffer(data, np.uint64).reshape(-1, 2)
    count = min(len(own), len(keys))
    same = own[:count, 0] == keys[:count, 0]
    return count if same[-1] else int(same.argmin())


def _unseen(table: Sequence[int]) -> int:
    """Blocks at the head of a window's table that no later token sees: vLLM's block 0 stands
    there."""
    return next((place for place, block in enumerate(table) if block), len(table))


class _Speed:
    """Tokens that the engine computes in a second, to compare with a storage."""

    def __init__(self, clock: Callable[[], float], given: float | None) -> None:
        """`given` is never changed."""
        self._clock, self._given = clock, given
        self._rate = 0.0
        self._last: tuple[float, int] | None = None

    def note(self, tokens: int) -> None:
        """A step begins, of so many tokens."""
        now = self._clock()
        if self._last is not None and self._last[1] and now > self._last[0]:
            rate = self._last[1] / (now - self._last[0])
            self._rate = max(rate, 0.9 * self._rate)  # of prefills: decode steps have few tokens
        self._last = now, tokens

    def seconds(self, tokens: int) -> float:
        """How long so many take; without a figure, long."""
        rate = self._given or self._rate
        return tokens / rate if rate else math.inf


def open_cache(
    place: Place, options: Options, *, role: str, device: bool = False, shared: bool = True
) -> Cache:
    """The cache of a place. Parts of one process share a client."""
    return open_engine_cache(
        replace(options, name=place.name),
        model=place.model,
        fingerprint=place.fingerprint,
        page_bytes=place.page_bytes,
        page_tokens=place.page_tokens,
        role=role,
        device=device,
        shared=shared,
        kv_groups=names_of_groups(place.groups),
    )


__all__ = [
    "Opened",
    "SchedulerHalf",
    "Stored",
    "launch_of",
    "open_cache",
    "part_of",
    "role_of",
    "team_of",
]
