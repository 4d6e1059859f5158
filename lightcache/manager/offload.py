"""What a commit does with full blocks and pages, and what becomes of them before they are evicted.

`FullBlocks` gives full blocks their keys in the device's index. `Offloader` says which pages are
written to the host and to storage, and when. `KVWriteBack` writes blocks to the host before the
device evicts them: a host page may span several blocks, and when the last of them is named, it
notes the blocks and the key of the page.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, Pages
from lightcache.breaker import CircuitBreaker
from lightcache.errors import Abandoned, LeaseLost, LightcacheError, LockTimeout
from lightcache.kernels.moves import slots_of_blocks
from lightcache.layout import KeyStatus
from lightcache.leases import NamingResult
from lightcache.manager.backend import RanksLost
from lightcache.manager.blocks import MirroredBlocks
from lightcache.manager.limits import nothing
from lightcache.manager.request import (
    HELD,
    PINNED,
    CacheScope,
    Owed,
    Request,
    WritePolicy,
    keys_of,
)
from lightcache.manager.state import ManagerState
from lightcache.manager.transfers import BlockTransfer, OnEnd, State
from lightcache.manager.write_back import BlockWriteBack, WrittenBack
from lightcache.notices import Notices
from lightcache.reservations import Reservation

if TYPE_CHECKING:
    from lightcache.page_index import PageIndex

_log = logging.getLogger("lightcache.manager")
_SEEN = 1 << 16  # pages that SELECTIVE remembers
Unwritten = Literal["no_room", "failed", "stale", "refused", "disabled"]
"""Why pages were not written to the host; see `ManagerStats`."""
Span = tuple[Request, int, int]
"""Pages [begin, end) of a request that are to be written, by their positions in its prompt."""
NOTHING: Mapping[int, int] = {}
"""No block to exchange."""
_KINDS = bytes(
    PINNED if status in (KeyStatus.NEW, KeyStatus.PRESENT) else HELD for status in range(256)
)
"""The kind of a block in its request's table, by the status that the index returned for its key."""
Filled = tuple[Request, int, int]
"""A request, the number of its named blocks, and of its full blocks."""


# ---- From the device to the host, and from there to storage


class Offloader:
    """Writes full pages of requests to the host, and from there to storage when the request has
    ended. The manager's lock is around every call.

    **Pages that were not written** (there was no room, the copy failed, its reservation went stale,
    the index refused them, copies are disabled, another request was writing them) are tried again
    with the request's next write, from the first page that the host lacks: when its next group of
    pages is full, or its prompt complete, or when it ends. So a retry has no timer and no
    reservation of its own, their number is bounded by the pages that the request fills, and what
    another has written meanwhile is not copied again. A copy that fails after `release` is not
    tried again. `Request.unwritten` is the mark: it is set before pages are reserved, and removed
    when all of them are there or on their way; so an interrupt in between costs a retry only.

    **A circuit breaker** opens when copies fail in a row: see `may_copy`.
    """

    def __init__(self, state: ManagerState) -> None:
        """No page is written yet."""
        self._state = state
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._notices = Notices(_log)
        self._probe: BlockTransfer | None = None
        """The last copy that was begun while the breaker was open."""
        retry = state.config.offload_retry

        def text(row: int, why: str) -> str:
            return (
                f"no page is written to the host after {row} failed copies in a row, the last: "
                f"{why}; requests are computed as before, and one copy is tried every {retry:g} s"
            )

        self.breaker = CircuitBreaker(
            state.config.failures,
            retry,
            text=text,
            works="a copy to the host succeeded, pages are written again",
            log=_log,
        )
        """Of copies to the host. It counts those that failed, without those of stale pages."""

    def may_copy(self) -> bool:
        """Whether a copy to the host is begun now. While the breaker is open none is; later one at
        a time, until one succeeds."""
        if not self.breaker.shut:
            return True
        probe = self._probe
        return self.breaker.state == "half-open" and (probe is None or probe.finished)

    def count_unwritten(self, cause: Unwritten, pages: int, why: str = "") -> None:
        """Count pages that were not written to the host; log the first of each cause."""
        if not pages:
            return
        name = "no_room_pages" if cause == "no_room" else f"unwritten_{cause}_pages"
        self._state.counts.add(**{name: pages})
        if cause != "disabled":  # the breaker logs that
            self._notices.first(
                cause,
                "%d pages were not written to the host: %s; `%s` of the manager's stats counts such"
                " pages, and this is said once",
                *(pages, why, name),
            )

    def write_due(self, running: list[Request]) -> None:
        """After a commit: write pages of requests that have enough, or whose prompt is complete."""
        if self._state.config.write is WritePolicy.BACK:
            return
        group, tokens = self._state.config.write_group, self._state.page_tokens
        due: list[Span] = []
        for request in running:
            begin = request.written * tokens
            if request.total < begin + tokens:
                continue
            urgent, prompt = request.options.priority > 0, len(request.prompt.tokens)
            # Few pages, none of the prompt: nearly always, while tokens are generated.
            few = request.total < begin + group * tokens and begin >= prompt
            if few and not urgent:
                continue
            full = request.publishable() // tokens
            if full <= request.written:
                continue
            prompt_ends = request.total >= prompt and request.written < prompt // tokens
            if full - request.written >= group or prompt_ends or urgent:
                due += self._span(request, full)
        self._write_spans(due)

    def write_rest(self, ended: list[Request]) -> None:
        """Write the remaining pages of requests that end. All their host pages count as used, also
        those that the device had: else the host would evict pages that are needed later."""
        used: dict[CacheScope, list[bytes]] = {}
        due: list[Span] = []
        back = self._state.config.write is WritePolicy.BACK
        for request in ended:
            full = request.publishable() // self._state.page_tokens
            stored = self._for_storage(request, full)
            if stored:
                due += stored
            elif request.unwritten or (full > request.written and not back):
                due += self._span(request, min(full, request.unwritten) if back else full)
            elif request.space is not None and request.options.read and (full or request.written):
                packed = request.host_chain.packed(0, max(full, request.written))
                used.setdefault(request.space, []).extend(packed)
        self._write_spans(due)
        for space, parts in used.items():
            if self._state.weights.is_valid(
                space
            ):  # reserves nothing, so the order of the keys does not matter
                keys = keys_of(parts)
                self._state.host.reserve(keys, len(keys), namespace=space.host).release()

    def write(self, request: Request, begin: int, end: int) -> None:
        """Begin to write these pages now, whatever the policy."""
        self._write_spans([(request, begin, end)])

    def write_to_storage(self, ended: list[Request]) -> None:
        """Begin to write the pages of ended requests, whose copies have finished, from the host to
        storage. The tier decides which pages are worth storing. Errors are counted or noted."""
        state = self._state
        if state.storage is None:
            return
        for request in ended:
            try:
                state.fail_open.run(partial(self._write_to_storage, request), nothing)
            except LightcacheError:
                state.counts.add(errors=1)
            except Exception as error:
                state.transfers.foreign.note(error)

    def _write_to_storage(self, request: Request) -> None:
        storage, options, space = self._state.storage, request.options, request.space
        if storage is None or space is None or not options.write or "storage" not in options.tiers:
            return
        pages = request.publishable() // self._state.page_tokens
        if pages and request.publish and self._state.weights.is_valid(space):
            keys = request.host_chain.keys[:pages]
            if request.stored_with is not None:
                keys = request.stored_with(keys)
            if len(keys):
                task = storage.write(keys, request.id, tokens=request.total, namespace=space.host)
                self._state.tasks.add(task)

    def _for_storage(self, request: Request, full: int) -> list[Span]:
        """Pages of an ending request that are for storage and not on the host yet. They are written
        to the host whatever the policy, since storage is written from there."""
        options, begin, space = request.options, request.written, request.space
        if self._state.storage is None or space is None or not options.write:
            return []
        if not {"host", "storage"} <= options.tiers or options.priority < 0:
            return []
        if not full:
            return []
        request.written = max(begin, full)
        # SELECTIVE has skipped some pages.
        if request.unwritten or self._state.config.write is WritePolicy.SELECTIVE:
            begin = self._state.host.peek(request.host_chain.keys[:full], namespace=space.host)
        return [(request, begin, full)] if full > begin else []

    def _span(self, request: Request, full: int) -> list[Span]:
        """The span of a request's next pages to write, up to `full`, and of those that were not
        written before; empty if there is none."""
        options, space = request.options, request.space
        if not options.write or "host" not in options.tiers or options.priority < 0:
            return []
        if space is None:
            return []
        begin, end = request.written, full
        if self._state.config.write is WritePolicy.SELECTIVE and options.priority <= 0:
            end = begin + self._asked_for(request.host_chain.keys[begin:full])
        if request.unwritten:
            again = request.host_chain.keys[: min(request.unwritten, full)]
            present = self._state.host.peek(again, namespace=space.host)
            if present < len(again):
                begin, end = min(begin, present), max(end, len(again))
            request.unwritten = len(again) if end > begin else 0
        request.written = max(request.written, full)
        return [(request, begin, end)] if end > begin else []

    def _asked_for(self, keys: Keys) -> int:
        """Number of leading pages that were seen often enough. Counts all these pages."""
        seen, leading, counting = self._state.config.seen, 0, True
        for key in keys:
            digest = key.tobytes()
            times = self._seen.pop(digest, 0) + 1
            self._seen[digest] = times
            counting &= times >= seen
            leading += counting
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return leading

    def _write_spans(self, due: list[Span]) -> None:
        """Begin to write these spans, with one call of the core for each space. Spans of a space
        that was cleared are left out."""
        by_space: dict[CacheScope, list[Span]] = {}
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        for request, begin, end in due:
            assert request.space is not None
            if len(request.table) * block >= end * tokens:  # else the engine has freed its blocks
                by_space.setdefault(request.space, []).append((request, begin, end))
        for space, spans in by_space.items():
            if not self._state.weights.is_valid(space):
                continue  # the host accepts nothing of it
            for request, _, end in spans:
                request.unwritten = max(request.unwritten, end)
            spans = self._without_disabled(spans)
            if not spans:
                continue
            slots = self._slots(spans)
            try:
                parts = self._reserve(space, spans)
            except LightcacheError as error:
                late = isinstance(error, LockTimeout)
                self._state.counts.add(**{"errors" if late else "failed_offloads": len(spans)})
                self.count_unwritten(
                    "refused", sum(end - begin for _, begin, end in spans), str(error)
                )
                continue
            for span, part, part_slots in zip(spans, parts, slots, strict=True):
                self._launch_span(span, part, part_slots)

    def _without_disabled(self, spans: list[Span]) -> list[Span]:
        """The spans that may be copied now: all of them, the first one to see whether copies
        succeed again, or none."""
        if not self.breaker.shut:
            return spans
        allowed = 1 if self.may_copy() else 0
        self.count_unwritten("disabled", sum(end - begin for _, begin, end in spans[allowed:]))
        return spans[:allowed]

    def _reserve(self, space: CacheScope, spans: list[Span]) -> list[Reservation]:
        """Reserve pages for all spans. Keys start at the root: all of them count as used."""
        state = self._state
        packed: list[bytes] = []
        offsets, begins = [0], []
        for request, begin, end in spans:
            begins.append(begin)
            packed += request.host_chain.packed(0, end)
            offsets.append(offsets[-1] + end)
        batch = state.host.index.reserve_batch(
            keys_of(packed),
            np.array(offsets),
            np.array(begins),
            shards=state.backend.shards,
            namespace=space.host,
            timeout=state.config.time_limit,
        )
        return batch.split()

    def _launch_span(self, span: Span, new: Reservation, slots: npt.NDArray[np.int64]) -> None:
        request, begin, end = span
        assert request.space is not None
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        whole = new.all_new or not (len(new.busy) or len(new.missing))
        if not whole:
            self.count_unwritten("no_room", len(new.missing), f"no room, {new.why}")
        if not new.all_new and not len(new.new):
            new.release()
            if whole:
                request.unwritten = 0
            return

        def on_end(ok: bool) -> None:
            if not ok:
                request.unwritten = max(request.unwritten, end)

        touched = request.table[begin * tokens // block : -(-end * tokens // block)]
        copy = self.launch(new, slots, touched, request.transfers, request.space, on_end)
        if copy.finished:
            request.transfers.pop()  # a finished copy delays nothing
        if whole and (copy.state is State.DONE or not copy.finished):
            request.unwritten = 0

    def _is_stale(self, error: Exception, space: CacheScope) -> bool:
        """Whether a copy failed because its pages could not be published any more. Ranks report
        that as a copy that failed, so the space is asked too."""
        if isinstance(error, (Abandoned, LeaseLost)):
            return True
        try:
            return not self._state.weights.is_valid(space)
        except LightcacheError:  # the host is closed
            return True

    def _slots(self, spans: list[Span]) -> list[npt.NDArray[np.int64]]:
        """For each span, the device slots of its request's tokens up to the span's end; -1 for
        tokens before the span."""
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        blocks: list[Pages] = []
        pages = 0
        for request, begin, end in spans:
            blocks.append(request.table[begin * tokens // block : -(-end * tokens // block)])
            pages += end
        every = slots_of_blocks(np.concatenate(blocks), block)
        whole = np.full(tokens * pages, -1, np.int64)
        parts, base, offset = [], 0, 0
        for (_, begin, end), own in zip(spans, blocks, strict=True):
            first = offset + begin * tokens % block
            slots = whole[base : base + end * tokens]
            slots[begin * tokens :] = every[first : first + (end - begin) * tokens]
            parts.append(slots)
            base += end * tokens
            offset += len(own) * block
        return parts

    def launch(
        self,
        new: Reservation,
        slots: npt.NDArray[np.int64],
        blocks: Pages,
        of: list[BlockTransfer],
        space: CacheScope,
        on_end: OnEnd | None = None,
    ) -> BlockTransfer:
        """Begin to write a reservation's new pages. The transfer owns it from now on.

        Args:
            slots: slots of all tokens of the reserved keys, from the first one.
            blocks: device blocks that are read.
            of: list of transfers of these blocks' owner, to which this one is appended.
            space: of the reserved keys.
            on_end: see `TransferTracker.begin`.
        """
        state, pages, begun = self._state, len(new.pages), time.perf_counter_ns()

        def on_result(ok: bool, nbytes: int | None) -> None:
            if ok:
                if self.breaker.failures:
                    self.breaker.success()
                moved = pages * state.page_bytes if nbytes is None else nbytes
                elapsed = time.perf_counter_ns() - begun
                state.counts.add(
                    offloads=1, offloaded_pages=pages, offloaded_bytes=moved, offload_ns=elapsed
                )
            else:
                state.counts.add(failed_offloads=1)

        def on_failure(error: Exception) -> None:
            why, stale = str(error) or repr(error), self._is_stale(error, space)
            self.count_unwritten("stale" if stale else "failed", pages, why)
            if not stale and not isinstance(error, RanksLost):
                self.breaker.failure(why)

        into = None
        if self.breaker.shut:
            self.breaker.probe()  # its failure opens the breaker for as long again
            into = self, "_probe"
        backend = state.backend
        return state.transfers.begin(
            blocks,
            backend,
            backend.offload,
            new,
            (slots,),
            on_result,
            of=of,
            on_end=on_end,
            on_failure=on_failure,
            into=into,
        )


# ---- Before the device evicts


@dataclass(frozen=True, eq=False)
class _Origin:
    """A host page that can be written from the device."""

    space: CacheScope
    device_key: bytes
    """Key of its last block. While the block has this key, it holds the page."""
    host_keys: Keys
    """Keys of the prompt's pages from the first to this one. Arrays of one request share memory."""
    to_storage: bool
    """Whether it is written to storage after the host has it."""
    blocks: Pages
    offset: int
    """Token of the first block at which it begins."""
    lives: Any = None
    """Mirrored blocks: for each block a number that changes with its content. For managed blocks a
    block stays as long as its descendants, so the last block's key is enough."""


@dataclass(frozen=True, eq=False)
class _Home:
    """The key under which the host has a block's content, if it has it."""

    space: CacheScope
    device_key: Keys
    """Valid while the block has this key, shape (1, 2)."""
    host_key: Keys
    """Key of the page in which the block ends, shape (1, 2)."""


@dataclass(eq=False)
class _Batch(WrittenBack):
    """Blocks of KV that are being written back."""

    homes: dict[int, _Home] = field(default_factory=dict)
    """Homes of the blocks that lie in a host page, by block number."""
    written: list[_Origin] = field(default_factory=list)
    """Pages that are being written to the host, and to storage afterwards."""


class KVWriteBack(BlockWriteBack):
    """The write-back of one manager's KV. Its lock is around every call."""

    _new = _Batch

    def __init__(self, state: ManagerState, offloader: Offloader) -> None:
        """No block is being written back."""
        super().__init__(state, state.device)
        self._offloader = offloader
        self._origins: dict[int, dict[bytes, _Origin]] = {}
        """Pages by last block and page key."""
        self._homes: dict[int, _Home] = {}
        """Managed blocks: homes by block. A home is stale if its block has another key by now."""
        self._evicting: list[tuple[list[BlockTransfer], list[_Origin]]] = []
        """Mirrored blocks: copies of blocks that the engine is going to evict, and their pages."""

    def note(self, request: Request, begin: int, end: int) -> None:
        """Note that blocks [begin, end) of a request's table were named."""
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        space, options, table = request.space, request.options, request.table
        device = self._state.device
        assert space is not None
        goes = "host" in options.tiers and options.priority >= 0
        keys = request.host_chain.keys
        for page in range(begin * block // tokens, end * block // tokens):
            # `last` is the block of the page's last token; a page may be part of one block.
            first, last = page * tokens // block, ((page + 1) * tokens - 1) // block
            if not goes or (device.owned and HELD in request.kind[first : last + 1]):
                # A block without a name is freed with its request. An earlier note of this block
                # may be for a page that begins in other blocks.
                self._origins.pop(int(table[last]), None)
                continue
            origin = _Origin(
                space,
                request.device_chain.keys[last].tobytes(),
                keys[: page + 1],
                "storage" in options.tiers,
                table[first : last + 1].copy(),
                page * tokens % block,
                self._lives(table[first : last + 1]),
            )
            known = self._origins.setdefault(int(origin.blocks[-1]), {})
            if known and next(iter(known.values())).device_key != origin.device_key:
                known.clear()
            # Replaces an equal key: its parents may lie in other blocks by now.
            known[origin.host_keys[-1].tobytes()] = origin
            if device.owned:
                host_key = origin.host_keys[-1:].copy()
                for position in range(first, last + 1):
                    device_key = request.device_chain.keys[position : position + 1].copy()
                    self._homes[int(table[position])] = _Home(space, device_key, host_key)

    def _lives(self, blocks: Pages) -> Any:
        device = self._state.device
        return device.lives(blocks) if isinstance(device, MirroredBlocks) else None

    def demote(self, n: int, cause: str = "demote") -> int:
        """See `WriteBack`. While copies are disabled none: allocating evicts blocks unwritten, as
        if the host had no room."""
        return super().demote(n, cause) if self._offloader.may_copy() else 0

    def _write(self, batch: WrittenBack, pages: Pages, keys: Keys) -> bool:
        assert isinstance(batch, _Batch)
        batch.homes = self._homes_of(pages, keys)
        return self.write(pages, keys, batch.transfers, batch.written)

    def evicting(self, blocks: Pages, keys: Keys) -> int:
        """Mirrored blocks: see `KVCacheManager.evicting`. Returns how many copies were begun."""
        begun: list[BlockTransfer] = []
        written: list[_Origin] = []
        self._evicting.append((begun, written))
        self.write(blocks, keys, begun, written)
        self.poll()
        return len(begun)

    def write(
        self, blocks: Pages, keys: Keys, begun: list[BlockTransfer], written: list[_Origin]
    ) -> bool:
        """Begin to write the pages that end in these blocks. Returns False after an error; the
        first one ends the loop, since each may be a long wait. Pages without room on the host are
        skipped. The notes stay: the host may evict a page before the device does.

        Args:
            keys: device keys of the blocks.
            begun: the copies are appended here.
            written: their pages are appended here, for `_store`.
        """
        refused: set[bytes] = set()
        for i in range(len(blocks) - 1, -1, -1):  # prefixes first: a host page needs its parent
            for origin in self._origins.get(int(blocks[i]), {}).values():
                lives = self._lives(origin.blocks)
                same = lives is None or (lives == origin.lives).all()
                if not same or origin.device_key != keys[i].tobytes():
                    continue
                if not self._offloader.may_copy():
                    self._offloader.count_unwritten("disabled", 1)
                    return False
                try:
                    self._write_page(origin, begun, written, refused)
                except LightcacheError as error:
                    self._state.counts.add(failed_offloads=1)
                    self._offloader.count_unwritten("refused", 1, str(error))
                    return False
        return True

    def _write_page(
        self,
        origin: _Origin,
        begun: list[BlockTransfer],
        written: list[_Origin],
        refused: set[bytes],
    ) -> None:
        """Begin to write a page, unless the host has it already or has no room.

        Args:
            refused: keys of pages without room. Their children are skipped: they would never be
                found, and would evict pages that can be.
        """
        state, keys = self._state, origin.host_keys[-2:]  # its own key, after its parent's
        before = len(keys) - 1
        key = keys[before].tobytes()
        if before and keys[0].tobytes() in refused:
            refused.add(key)
            self._offloader.count_unwritten("no_room", 1, "the page before them has no room")
            return
        new = state.host.reserve(
            keys,
            before,
            shards=state.backend.shards,
            namespace=origin.space.host,
            timeout=state.config.time_limit,
        )
        if len(new.new):
            slots = self._slots(origin, before)
            self._offloader.launch(new, slots, origin.blocks, begun, origin.space)
            written.append(origin)
            return
        if len(new.missing):
            refused.add(key)
        self._offloader.count_unwritten("no_room", len(new.missing), f"no room, {new.why}")
        new.release()

    def _slots(self, origin: _Origin, before: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        own = slots_of_blocks(origin.blocks, block, first=origin.offset, tokens=tokens)
        return np.concatenate([np.full(before * tokens, -1, np.int64), own])

    def poll(self) -> None:
        """Free blocks whose copies have finished. If an index fails, they stay."""
        if self._evicting:
            every, self._evicting = self._evicting, []
            for begun, written in every:
                if all(transfer.finished for transfer in begun):
                    store = partial(self._store_pages, written)
                    self._state.fail_open.run(store, nothing, proves=False)
                else:
                    self._evicting.append((begun, written))
        super().poll()

    def _store(self, batch: WrittenBack) -> None:
        assert isinstance(batch, _Batch)
        self._store_pages(batch.written)

    def _store_pages(self, written: list[_Origin]) -> None:
        """Write pages that were written back from the host to storage, each prompt as far as it was
        written. The host did not have these pages when their request ended."""
        last = dict[bytes, _Origin]()
        for origin in sorted(written, key=lambda each: len(each.host_keys)):
            if origin.to_storage and self._state.weights.is_valid(origin.space):
                if len(origin.host_keys) > 1:
                    last.pop(origin.host_keys[-2].tobytes(), None)
                last[origin.host_keys[-1].tobytes()] = origin
        for origin in last.values():
            self._write_to_storage(origin.host_keys, origin.space)

    def _freed(self, batch: WrittenBack, index: PageIndex, listed: int, freed: int) -> None:
        assert isinstance(batch, _Batch)
        ask = partial(self._on_host, batch, index)
        present = min(freed, self._state.fail_open.run(ask, lambda: 0, proves=False))
        self._state.counts.add(
            demotions=present,
            demotions_lost=freed - present,
            kept_by_match=listed - freed,
            **{f"device_evicted_{batch.cause}": freed},
        )

    def _homes_of(self, blocks: Pages, keys: Keys) -> dict[int, _Home]:
        """Homes of those blocks that lie in a host page."""
        homes = {}
        for block, key in zip(blocks.tolist(), keys, strict=True):
            home = self._homes.get(block)
            if home is not None and (home.device_key == key).all():
                homes[block] = home
        return homes

    def _on_host(self, batch: _Batch, index: PageIndex) -> int:
        """Number of a batch's blocks that the device has freed and the host has. Looks on the host:
        pages that were there before count, and pages whose copy failed do not."""
        present, host = 0, self._state.host
        for block, home in batch.homes.items():
            if index.peek(home.device_key, namespace=home.space.device):
                continue  # it stayed on the device
            if self._homes.get(block) is home:
                del self._homes[block]
            present += host.peek(home.host_key, namespace=home.space.host)
        return present

    def close(self) -> None:
        """Stop: blocks that are being written back stay on the device."""
        super().close()
        self._evicting.clear()
        self._origins.clear()
        self._homes.clear()


# ---- Keys of full blocks


@dataclass(frozen=True, eq=False)
class _RequestNaming:
    """Full blocks of requests that the device's index is naming. It fills `named` in the same call.
    After an interrupt, the manager's next call updates the requests."""

    members: list[Filled]
    ours: Pages
    named: NamingResult


class FullBlocks:
    """Names full blocks of running requests. The manager's lock is around every call."""

    def __init__(self, state: ManagerState, write_back: KVWriteBack) -> None:
        """No block is being named."""
        self._state, self._write_back = state, write_back
        self._naming: _RequestNaming | None = None
        """The last naming, for `settle`."""

    def cache_blocks(self, running: list[Request]) -> None:
        """Name full blocks that have no name yet, in one call for each space. If another block has
        the same content already, it replaces the request's block, and `Request.owed` has the
        exchange."""
        by_space: dict[CacheScope, list[Filled]] = {}
        block = self._state.device.block_tokens
        for request in running:
            if request.total < (request.named + 1) * block or not request.on_device:
                continue  # nearly always, while single tokens are generated
            full = min(request.publishable() // block, len(request.table))
            if full > request.named:
                assert request.space is not None
                members = by_space.get(request.space)
                if members is None:
                    members = by_space[request.space] = []
                members.append((request, request.named, full))
        for space, members in by_space.items():
            if self._state.weights.is_valid(space):
                self._name(space, members)

    def _name(self, space: CacheScope, members: list[Filled]) -> None:
        blocks: list[Pages] = []
        packed: list[bytes] = []
        starts: list[int] = []
        offsets, count = [0], 0
        for request, first, full in members:
            begin = first - 1 if first else 0  # includes the parent key of the new blocks
            blocks.append(request.table[first:full])
            packed += request.device_chain.packed(begin, full)
            starts.append(first - begin)
            count += full - begin
            offsets.append(count)
        assert space.device is not None
        ours = np.concatenate(blocks)
        keys = keys_of(packed)
        naming = self._naming = _RequestNaming(members, ours, NamingResult(len(ours)))
        try:
            self._state.device.name_many(
                ours, keys, np.array(offsets), np.array(starts), space.device, naming.named
            )
        finally:
            self.settle()

    def settle(self) -> None:
        """Update the requests whose blocks were named last: kinds, exchanges, and `named`. Safe to
        repeat."""
        naming = self._naming
        if naming is None:
            return
        settled, offset = naming.named.settled, 0
        kinds = naming.named.status.tobytes().translate(_KINDS)
        owned, back = self._state.device.owned, self._state.config.write is WritePolicy.BACK
        if owned and naming.named.pages[:settled].tobytes() != naming.ours[:settled].tobytes():
            self._exchange(naming, settled)
        for request, first, full in naming.members:
            end = full
            if settled < offset + full - first:  # interrupted before its last block was named
                end = first + max(0, settled - offset)
            if owned:
                request.kind[first:end] = kinds[offset : offset + end - first]
            if back and end > first:
                self._write_back.note(request, first, end)
            if end > request.named:
                request.named = end
            offset += full - first
        self._naming = None

    def _exchange(self, naming: _RequestNaming, settled: int) -> None:
        """Replace our blocks by blocks that have the same content already."""
        theirs = naming.named.pages[:settled]
        exchanged = np.flatnonzero(theirs != naming.ours[:settled])
        offset = 0
        for request, first, full in naming.members:
            mine = exchanged[(exchanged >= offset) & (exchanged < offset + full - first)]
            if len(mine):
                positions = (mine - offset + first).tolist()
                changed = dict(zip(positions, theirs[mine].tolist(), strict=True))
                owed = request.owed
                before = {} if owed is None or owed.told else owed.changed
                request.owed = Owed({**before, **changed})
                for position, block in changed.items():
                    request.table[position] = block
            offset += full - first
        self._state.counts.add(duplicates=len(exchanged))


__all__ = ["NOTHING", "FullBlocks", "KVWriteBack", "Offloader"]
