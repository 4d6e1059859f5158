"""Which full pages of requests are written to the host, and from there to storage, and when."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, Pages
from lightcache.breaker import CircuitBreaker
from lightcache.errors import Abandoned, LeaseLost, LightcacheError, LockTimeout
from lightcache.kernels.moves import slots_of_blocks
from lightcache.layout import WhyMissing
from lightcache.manager.backend import RanksLost, TransferBackend
from lightcache.manager.limits import nothing
from lightcache.manager.request import CacheScope, Request, RequestOptions, WritePolicy, keys_of
from lightcache.manager.state import ManagerState
from lightcache.manager.stats import OFFLOAD
from lightcache.manager.transfers import BlockTransfer, OnEnd, OnResult, State
from lightcache.notices import Notices
from lightcache.reservations import Reservation

_log = logging.getLogger("lightcache.manager")
_SEEN = 1 << 16  # pages that SELECTIVE remembers
Unwritten = Literal["no_room", "not_worth", "failed", "stale", "refused", "disabled"]
"""Why pages were not written to the host; see `ManagerStats`."""
Span = tuple[Request, int, int]
"""Pages [begin, end) of a request that are to be written, by their positions in its prompt."""


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
    Pages that are not worth writing are not tried again: the host remembers that they were offered,
    and a later request with them counts for them.

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
        if state.config.admission and state.host.index.eviction != "hz":
            _log.warning(
                'admission: all pages are written to the host, as the eviction of %r is "%s", '
                'expected "hz"; create the cache with eviction="hz"',
                *(state.host.name, state.host.index.eviction),
            )

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
        """Of copies to the host, of KV and of windows. Counts those that failed, without those of
        stale pages."""

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
        if cause not in ("disabled", "not_worth"):  # the breaker logs the one, the other is meant
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
                due += self._claim_span(request, full)
        self._write_spans(due)

    def write_rest(self, ended: list[Request]) -> None:
        """Write the remaining pages of requests that end. All their host pages count as used, also
        those that the device had: else the host would evict pages that are needed later."""
        used: dict[CacheScope, list[bytes]] = {}
        due: list[Span] = []
        back = self._state.config.write is WritePolicy.BACK
        for request in ended:
            full = request.publishable() // self._state.page_tokens
            stored = self._claim_for_storage(request, full)
            if stored:
                due += stored
            elif request.unwritten or (full > request.written and not back):
                due += self._claim_span(request, min(full, request.unwritten) if back else full)
            elif request.space is not None and request.options.read and (full or request.written):
                packed = request.host_chain.packed(0, max(full, request.written))
                used.setdefault(request.space, []).extend(packed)
        self._write_spans(due)
        for space, parts in used.items():
            if self._state.weights.is_valid(space):
                keys = keys_of(parts)  # reserves nothing, so their order does not matter
                self._state.host.reserve(keys, len(keys), namespace=space.host).release()

    def write(self, request: Request, begin: int, end: int) -> None:
        """Begin to write these pages now, whatever the policy and whatever they are worth."""
        self._write_spans([(request, begin, end)], admission=False)

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
        if pages and not request.aborted and self._state.weights.is_valid(space):
            keys = request.host_chain.keys[:pages]
            if request.stored_with is not None:
                keys = request.stored_with(keys, space)
            if len(keys):
                task = storage.write(keys, request.id, tokens=request.total, namespace=space.host)
                self._state.tasks.add(task)

    def _claim_for_storage(self, request: Request, full: int) -> list[Span]:
        """Pages of an ending request that are for storage and not on the host yet; `written` is
        past them from now on. They are written to the host whatever the policy, since storage is
        written from there."""
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

    def _claim_span(self, request: Request, full: int) -> list[Span]:
        """The span of a request's next pages to write, up to `full`, and of those that were not
        written before; empty if there is none. `written` is past them from now on."""
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

    def admits(self, options: RequestOptions) -> bool:
        """Whether the host may find pages of such a request not worth writing."""
        stored = self._state.storage is not None and "storage" in options.tiers
        return self._state.config.admission and not stored

    def _write_spans(self, due: list[Span], *, admission: bool = True) -> None:
        """Begin to write these spans, with one call of the core for each space. Spans of a space
        that was cleared are left out. `admission`: as far as they are worth it."""
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
            if self.breaker.opened is not None:
                spans = self._without_disabled(spans)
                if not spans:
                    continue
            slots = self._slots(spans)
            try:
                parts = self._reserve(space, spans, admission)
            except LightcacheError as error:
                late = isinstance(error, LockTimeout)
                self._state.counts.add(**{"errors" if late else "failed_offloads": len(spans)})
                self.count_unwritten(
                    "refused", sum(end - begin for _, begin, end in spans), str(error)
                )
                continue
            for span, part, part_slots in zip(spans, parts, slots, strict=True):
                self._begin_span(span, part, part_slots)

    def _without_disabled(self, spans: list[Span]) -> list[Span]:
        """The spans that may be copied while the breaker is open: the first one to see whether
        copies succeed again, or none."""
        allowed = 1 if self.may_copy() else 0
        self.count_unwritten("disabled", sum(end - begin for _, begin, end in spans[allowed:]))
        return spans[:allowed]

    def _reserve(self, space: CacheScope, spans: list[Span], admission: bool) -> list[Reservation]:
        """Reserve pages for all spans. Keys start at the root: all of them count as used."""
        state = self._state
        packed: list[bytes] = []
        offsets, begins, admissions, hints = [0], [], [], []
        for request, begin, end in spans:
            packed += request.host_chain.packed(0, end)
            offsets.append(offsets[-1] + end)
            begins.append(begin)
            admissions.append(admission and self.admits(request.options))
            hints.append(request.options.hint)
        batch = state.host.index.reserve_batch(
            keys_of(packed),
            np.array(offsets),
            np.array(begins),
            shards=state.backend.shards,
            admission=admissions,
            hints=hints,
            namespace=space.host,
            timeout=state.config.time_limit,
        )
        parts = batch.split()
        if state.host.token_records is not None:
            for (request, begin, end), part in zip(spans, parts, strict=True):
                rows = request.token_rows(begin, end)
                if rows is not None:
                    state.host.note_tokens(part, request.host_chain.keys[begin:end], rows, begin)
        return parts

    def _begin_span(self, span: Span, new: Reservation, slots: npt.NDArray[np.int64]) -> None:
        request, begin, end = span
        assert request.space is not None
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        whole = new.all_new
        if not whole:
            lacking = self.count_missing(new)
            whole = not (len(new.busy) or lacking)
            if not len(new.new):
                new.release()
                if whole:
                    request.unwritten = 0
                return

        def on_end(ok: bool) -> None:
            if not ok:
                request.unwritten = max(request.unwritten, end)

        touched = request.table[begin * tokens // block : -(-end * tokens // block)]
        copy = self.begin_kv(new, slots, touched, request.transfers, request.space, on_end)
        finished = copy.finished
        if finished:
            request.transfers.pop()  # a finished copy delays nothing
        if whole and (not finished or copy.state is State.DONE):
            request.unwritten = 0

    def count_missing(self, new: Reservation) -> int:
        """Count the pages that a reservation does not have. Returns how many of them are to be
        tried again."""
        missing = len(new.missing)
        if new.why_missing in (WhyMissing.WORTH, WhyMissing.HEAD):
            self.count_unwritten("not_worth", missing)
            return 0
        self.count_unwritten("no_room", missing, f"no room, {new.why}")
        return missing

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

    def begin_kv(
        self,
        new: Reservation,
        slots: npt.NDArray[np.int64],
        blocks: Pages,
        of: list[BlockTransfer],
        space: CacheScope,
        on_end: OnEnd | None = None,
    ) -> BlockTransfer:
        """Begin to write a reservation's new pages of KV. The transfer owns it from now on.

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
                moved = pages * state.page_bytes if nbytes is None else nbytes
                took = OFFLOAD.of(time.perf_counter_ns() - begun)
                state.counts.add(offloads=1, offloaded_pages=pages, offloaded_bytes=moved, **took)
            else:
                state.counts.add(failed_offloads=1)

        def on_failure(why: str, stale: bool) -> None:
            self.count_unwritten("stale" if stale else "failed", pages, why)

        return self.copy(
            state.backend, new, slots, blocks, space, on_result, on_failure, of=of, on_end=on_end
        )

    def copy(
        self,
        backend: TransferBackend,
        new: Reservation,
        slots: npt.NDArray[np.int64],
        blocks: Pages,
        space: CacheScope,
        on_result: OnResult,
        on_failure: Callable[[str, bool], None] | None = None,
        *,
        of: list[BlockTransfer] | None = None,
        on_end: OnEnd | None = None,
    ) -> BlockTransfer:
        """Begin a copy to the host, of KV or of a window. The breaker counts it.

        Args:
            slots, space: as for `begin_kv`.
            on_failure: called with why it failed, and whether its pages had become stale.
            blocks, on_result, of, on_end: see `TransferTracker.begin`.
        """
        breaker = self.breaker

        def result(ok: bool, nbytes: int | None) -> None:
            if ok and breaker.failures:
                breaker.success()
            on_result(ok, nbytes)

        def failed(error: Exception) -> None:
            why, stale = str(error) or repr(error), self._is_stale(error, space)
            if on_failure is not None:
                on_failure(why, stale)
            if not stale and not isinstance(error, RanksLost):
                breaker.failure(why)

        into = None
        if breaker.opened is not None:
            breaker.probe()  # its failure opens the breaker for as long again
            into = self, "_probe"
        return self._state.transfers.begin(
            blocks,
            backend,
            backend.offload,
            new,
            (slots,),
            result,
            of=of,
            on_end=on_end,
            on_failure=failed,
            into=into,
        )


__all__ = ["Offloader"]
