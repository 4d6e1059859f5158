"""Writing: which pages go to the host, and when."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError
from lightcache.manager.gathering import moved_bytes
from lightcache.manager.matches import WritePolicy
from lightcache.manager.requests import Request, Space, slots_of_blocks
from lightcache.manager.traffic import Movement, unless_taken
from lightcache.reservation_batch import ReservationBatch
from lightcache.reservations import Reservation

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager
    from lightcache.manager.weights import Look

_SEEN = 1 << 16  # pages that SELECTIVE remembers

Span = tuple[Request, int, int]
"""Pages [begin, end) of a request, by their numbers in its prompt: to be written."""


class Writer:
    """Writes what running requests have filled to the host."""

    def __init__(self, manager: KVCacheManager) -> None:
        """Nothing is written yet."""
        self._manager = manager
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._failed = 0
        """Copies of ours that failed, or never began."""

    def due(self, running: list[Request], look: Look) -> None:
        """After a commit: pages of those that have enough of them, or whose prompt is complete."""
        if self._manager.config.write is WritePolicy.BACK:
            return
        group, tokens = self._manager.config.write_group, self._manager.page_tokens
        due: list[Span] = []
        for one in running:
            if one.left_to_others and one.failed_then != self._failed:
                self._take_over(one, look)
            begin = one.written * tokens
            if one.total < begin + tokens:
                continue
            urgent = one.wishes.priority > 0
            # Few, and none of its prompt: nearly always, while tokens are generated.
            few = one.total < begin + group * tokens and begin >= len(one.prompt)
            if few and not urgent:
                continue
            full = one.publishable() // tokens
            if full <= one.written:
                continue
            prompt = len(one.prompt)
            prompt_ends = one.total >= prompt and one.written < prompt // tokens
            if full - one.written >= group or prompt_ends or urgent:
                due += self._span(one, full, look)
        self._write(due)

    def rest(self, ended: list[Request], look: Look) -> None:
        """Requests end: what of them is not written yet. What the host has of them counts as used,
        also where the device had it: else the host would let go of what the device will ask for."""
        used: dict[Space, list[Keys]] = {}
        due: list[Span] = []
        for one in ended:
            if one.left_to_others:  # who fails in another process does not say so
                self._take_over(one, look)
            full = one.publishable() // self._manager.page_tokens
            if self._manager.config.write is not WritePolicy.BACK and full > one.written:
                due += self._span(one, full, look)
            elif one.space is not None and one.wishes.read and (full or one.written):
                keys = one.host_chain.keys[: max(full, one.written)]
                used.setdefault(one.space, []).append(keys)
        self._write(due)
        for space, parts in used.items():
            if look.good(space):
                keys = np.concatenate(parts)  # nothing is reserved: their order means nothing
                self._manager.host.reserve(keys, len(keys), namespace=space.host).release()

    def _take_over(self, one: Request, look: Look) -> None:
        """Others were writing pages of this request, and may have failed: what is not there, and
        nobody writes any more, is written now. Of n samples whose copies all fail each has tried
        once."""
        end, one.left_to_others = one.left_to_others, 0
        if one.space is None or not look.good(one.space):
            return
        begin = self._manager.host.peek(one.host_chain.keys[:end], namespace=one.space.host)
        if begin < end:
            self.write(one, begin, end)

    def write(self, one: Request, begin: int, end: int) -> None:
        """Begin to write these pages now, whatever the policy."""
        self._write([(one, begin, end)])

    def store(self, one: Request) -> None:
        """A request has ended and its copies are over: what the host has of it goes to storage. The
        tier has rules of its own for what is worth it."""
        storage, wishes, space = self._manager._storage, one.wishes, one.space
        if storage is None or space is None or not wishes.write or "storage" not in wishes.tiers:
            return
        pages = one.publishable() // self._manager.page_tokens
        if pages and one.stored and self._manager._weights.good(space):
            keys = one.host_chain.keys[:pages]
            ids = one.token_ids(pages * self._manager.page_tokens)
            storage.write(keys, one.id, tokens=one.total, token_ids=ids, namespace=space.host)

    def _span(self, one: Request, full: int, look: Look) -> list[Span]:
        """What of a request's next pages, up to `full`, is to be written: a span, or none."""
        wishes = one.wishes
        if not wishes.write or "host" not in wishes.tiers or wishes.priority < 0:
            return []
        begin, end = one.written, full
        if self._manager.config.write is WritePolicy.SELECTIVE and wishes.priority <= 0:
            end = begin + self._asked_for(one.host_chain.keys[begin:full])
        one.written = full
        wanted = end > begin and one.space is not None and look.good(one.space)
        return [(one, begin, end)] if wanted else []

    def _asked_for(self, keys: Keys) -> int:
        """Leading pages that were to be written before. Remembers all of them."""
        most, leading, counting = self._manager.config.seen, 0, True
        for key in keys:
            digest = key.tobytes()
            times = self._seen.pop(digest, 0) + 1
            self._seen[digest] = times
            counting &= times >= most
            leading += counting
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return leading

    def _write(self, due: list[Span]) -> None:
        """Begin to write what is due, with one call of the core for each space."""
        by_space: dict[Space, list[Span]] = {}
        tokens, block = self._manager.page_tokens, self._manager.device.block_tokens
        for one, begin, end in due:
            assert one.space is not None
            if len(one.table) * block >= end * tokens:  # else the engine has let go of its blocks
                by_space.setdefault(one.space, []).append((one, begin, end))
        for space, spans in by_space.items():
            try:
                new = self._reserve(space, spans)
            except LightcacheError:
                self._manager._figures.add(failed_offloads=len(spans))
                continue
            with new:  # until each has its own, or all is over
                self._offload(new, spans)

    def _reserve(self, space: Space, spans: list[Span]) -> ReservationBatch:
        """Pages for all of them. The keys are those from the root: all of them count as used."""
        manager = self._manager
        packed: list[bytes] = []
        offsets = [0]
        for one, _, end in spans:
            packed += one.host_chain.packed(0, end)
            offsets.append(offsets[-1] + end)
        keys = np.frombuffer(bytearray().join(packed), np.uint64).reshape(-1, 2)
        return manager.host.index.reserve_batch(
            keys,
            np.array(offsets),
            np.array([begin for _, begin, _ in spans]),
            shards=manager.mover.shards,
            namespace=space.host,
            timeout=manager.config.time_limit,
        )

    def _offload(self, new: ReservationBatch, spans: list[Span]) -> None:
        slots = self._slots(spans)
        for span, own, its in zip(spans, new.split(), slots, strict=True):
            self._offload_one(span, own, its)

    def _offload_one(self, span: Span, new: Reservation, slots: npt.NDArray[np.int64]) -> None:
        one, begin, end = span
        tokens, block = self._manager.page_tokens, self._manager.device.block_tokens
        if len(new.busy):
            one.left_to_others, one.failed_then = int(new.busy[-1]) + 1, self._failed
        pages = len(new.pages)
        if end - begin > pages:
            self._manager._figures.add(no_room_pages=len(new.missing))
            if not pages:
                new.release()
                return
        touched = one.table[begin * tokens // block : -(-end * tokens // block)]
        if self.launch(new, slots, touched, one.movements).over:
            one.movements.pop()  # what is over holds nothing up

    def _slots(self, spans: list[Span]) -> list[npt.NDArray[np.int64]]:
        """Of each span the device slots of all its request's tokens up to its end; -1 for those
        before it."""
        tokens, block = self._manager.page_tokens, self._manager.device.block_tokens
        blocks = [
            one.table[begin * tokens // block : -(-end * tokens // block)]
            for one, begin, end in spans
        ]
        every = slots_of_blocks(np.concatenate(blocks), block)
        whole = np.full(tokens * sum([end for _, _, end in spans]), -1, np.int64)
        found, base, at = [], 0, 0
        for (_, begin, end), its in zip(spans, blocks, strict=True):
            first = at + begin * tokens % block
            slots = whole[base : base + end * tokens]
            slots[begin * tokens :] = every[first : first + (end - begin) * tokens]
            found.append(slots)
            base += end * tokens
            at += len(its) * block
        return found

    def launch(
        self,
        new: Reservation,
        slots: npt.NDArray[np.int64],
        blocks: Pages,
        of: list[Movement],
    ) -> Movement:
        """Begin to write a reservation's new pages. It is the movement's from now on.

        Args:
            slots: of all tokens of the keys that were reserved, from the first of these on.
            blocks: that are read.
            of: movements of whoever holds them; this one is appended.
        """
        manager, pages = self._manager, len(new.pages)

        def over(ok: bool, nbytes: int | None) -> None:
            if ok:
                moved = moved_bytes(manager.host, pages * manager.page_tokens, nbytes)
                manager._figures.add(offloads=1, offloaded_pages=pages, offloaded_bytes=moved)
            else:
                self._failed += 1
                manager._figures.add(failed_offloads=1)

        return manager._traffic.begin(
            blocks, lambda: manager.mover.offload(new, slots), over, unless_taken(new), of
        )


__all__ = ["Writer"]
