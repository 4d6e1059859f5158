"""Offload: which pages are written to the host and to storage, and when."""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import partial

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError, LockTimeout
from lightcache.kernels.moves import slots_of_blocks
from lightcache.manager.limits import nothing
from lightcache.manager.request import CacheScope, Request, WritePolicy, keys_of
from lightcache.manager.state import ManagerState
from lightcache.manager.transfers import BlockTransfer
from lightcache.reservations import Reservation

_SEEN = 1 << 16  # pages that SELECTIVE remembers
Span = tuple[Request, int, int]
"""Pages [begin, end) of a request that are to be written, by their positions in its prompt."""


class Offloader:
    """Writes full pages of requests to the host, and from there to storage when the request has
    ended. The manager's lock is around every call."""

    def __init__(self, state: ManagerState) -> None:
        """No page is written yet."""
        self._state = state
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._failed = 0
        """Number of our copies that failed, or never began."""

    def write_due(self, running: list[Request]) -> None:
        """After a commit: write pages of requests that have enough, or whose prompt is complete."""
        if self._state.config.write is WritePolicy.BACK:
            return
        group, tokens = self._state.config.write_group, self._state.page_tokens
        due: list[Span] = []
        for request in running:
            if request.left_to_others and request.failed_then != self._failed:
                self._take_over(request)
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
        for request in ended:
            if request.left_to_others:  # other processes' failures are not in `_failed`
                self._take_over(request)
            full = request.publishable() // self._state.page_tokens
            stored = self._for_storage(request, full)
            if stored:
                due += stored
            elif self._state.config.write is not WritePolicy.BACK and full > request.written:
                due += self._span(request, full)
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

    def _take_over(self, request: Request) -> None:
        """Write pages that other requests were writing, if they are neither there nor being written
        now. Of n samples whose copies all fail, each tries once."""
        end, request.left_to_others = request.left_to_others, 0
        if request.space is None:
            return
        begin = self._state.host.peek(request.host_chain.keys[:end], namespace=request.space.host)
        if begin < end:
            self.write(request, begin, end)

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
            ids = request.token_ids(pages * self._state.page_tokens)
            if request.stored_with is not None:
                keys, ids = request.stored_with(keys, ids)
            if len(keys):
                task = storage.write(
                    keys, request.id, tokens=request.total, token_ids=ids, namespace=space.host
                )
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
        if self._state.config.write is WritePolicy.SELECTIVE:  # it has skipped some pages
            begin = self._state.host.peek(request.host_chain.keys[:full], namespace=space.host)
        return [(request, begin, full)] if full > begin else []

    def _span(self, request: Request, full: int) -> list[Span]:
        """The span of a request's next pages to write, up to `full`; empty if there is none."""
        options = request.options
        if not options.write or "host" not in options.tiers or options.priority < 0:
            return []
        begin, end = request.written, full
        if self._state.config.write is WritePolicy.SELECTIVE and options.priority <= 0:
            end = begin + self._asked_for(request.host_chain.keys[begin:full])
        request.written = full
        return [(request, begin, end)] if end > begin and request.space is not None else []

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
            slots = self._slots(spans)
            try:
                parts = self._reserve(space, spans)
            except LockTimeout:
                self._state.counts.add(errors=1)
                for request, begin, _ in spans:  # a later commit, or the end, tries again
                    request.written = min(request.written, begin)
                continue
            except LightcacheError:
                self._state.counts.add(failed_offloads=len(spans))
                continue
            for span, part, part_slots in zip(spans, parts, slots, strict=True):
                self._launch_span(span, part, part_slots)

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
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        if not new.all_new:
            if len(new.busy):
                request.left_to_others, request.failed_then = int(new.busy[-1]) + 1, self._failed
            self._state.counts.add(no_room_pages=len(new.missing))
            if not len(new.new):
                new.release()
                return
        touched = request.table[begin * tokens // block : -(-end * tokens // block)]
        if self.launch(new, slots, touched, request.transfers).finished:
            request.transfers.pop()  # a finished copy delays nothing

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
    ) -> BlockTransfer:
        """Begin to write a reservation's new pages. The transfer owns it from now on.

        Args:
            slots: slots of all tokens of the reserved keys, from the first one.
            blocks: device blocks that are read.
            of: list of transfers of these blocks' owner, to which this one is appended.
        """
        state, pages, begun = self._state, len(new.pages), time.perf_counter_ns()

        def on_result(ok: bool, nbytes: int | None) -> None:
            if ok:
                moved = pages * state.page_bytes if nbytes is None else nbytes
                elapsed = time.perf_counter_ns() - begun
                state.counts.add(
                    offloads=1, offloaded_pages=pages, offloaded_bytes=moved, offload_ns=elapsed
                )
            else:
                self._failed += 1
                state.counts.add(failed_offloads=1)

        backend = state.backend
        return state.transfers.begin(
            blocks, backend, backend.offload, new, (slots,), on_result, of=of
        )


__all__ = ["Offloader"]
