"""Orders of eviction, in process, for `policy` to compare the core with.

All keep the same promise: a block is cached only while the block before it is, so a request's hits
are the cached blocks from its root on, and what is evicted has nothing cached that continues it (a
*leaf*). A request uses its blocks from the last to the first, as the core does: the root is the
youngest. New blocks are always admitted, but by W-TinyLFU, whose filter is its idea.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence

from lightcache_bench._traces import Trace

Order = OrderedDict[int, None]
"""Blocks, the next one to go first."""


class Policy(ABC):
    """A cache of so many pages, one block each."""

    def __init__(self, trace: Trace, pages: int) -> None:
        self.pages = pages
        self.size = 0
        self.cached = bytearray(len(trace.parents))
        self._parents = trace.parents
        self._children = [0] * (len(trace.parents) + 1)  # the last: of no block, for roots

    def request(self, blocks: Sequence[int]) -> int:
        """Use these blocks, and return how many were hit."""
        hits = 0
        for block in blocks:
            if not self.cached[block]:
                break
            hits += 1
        self._use(blocks)
        return hits

    @abstractmethod
    def _use(self, blocks: Sequence[int]) -> None:
        """Blocks of a request become cached, and others go."""

    def _add(self, block: int) -> None:
        self.cached[block] = 1
        self.size += 1
        self._children[self._parents[block]] += 1

    def _drop(self, block: int) -> None:
        self.cached[block] = 0
        self.size -= 1
        self._children[self._parents[block]] -= 1

    def _leaf(self, order: Order, but: int = -1) -> int | None:
        """The first leaf, other than one; None: there is none."""
        for block in order:
            if not self._children[block] and block != but:
                return block
        return None


class LRU(Policy):
    """Least recently used. A block was used after all that continue it, so the oldest is a leaf."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._order: Order = OrderedDict()

    def _use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if not self.cached[block]:
                self._add(block)
            self._order[block] = None
            self._order.move_to_end(block)
        while self.size > self.pages:
            self._drop(self._order.popitem(last=False)[0])


class Ranked(Policy):
    """Evicts the leaf of the lowest rank. Ranks change only where a block is used, and the blocks
    of a request but its last one are no leaves, so the heap gets one entry a request and one for
    each block that becomes a leaf."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._heap: list[tuple[float, float, int]] = []
        self._clock = 0
        """Uses of blocks so far."""

    @abstractmethod
    def _touch(self, block: int, new: bool) -> None:
        """A block was used; `new`: it was not cached."""

    @abstractmethod
    def _rank(self, block: int) -> tuple[float, float]:
        """The lowest goes first."""

    def _evicted(self, block: int) -> None:
        """A leaf goes."""

    def _use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._clock += 1
            new = not self.cached[block]
            if new:
                self._add(block)
            self._touch(block, new)
        if blocks and not self._children[blocks[-1]]:
            self._push(blocks[-1])
        while self.size > self.pages:
            first, second, block = heapq.heappop(self._heap)
            if (
                not self.cached[block]
                or self._children[block]
                or (first, second) != self._rank(block)
            ):
                continue  # it went, or was continued or used since
            self._evicted(block)
            self._drop(block)
            parent = self._parents[block]
            if parent >= 0 and not self._children[parent]:
                self._push(parent)

    def _push(self, block: int) -> None:
        heapq.heappush(self._heap, (*self._rank(block), block))


class LFU(Ranked):
    """Least frequently used, the older one first. Uses of blocks that are not cached count too:
    "perfect LFU"."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._uses, self._last = [0] * len(trace.parents), [0] * len(trace.parents)

    def _touch(self, block: int, new: bool) -> None:
        self._uses[block] += 1
        self._last[block] = self._clock

    def _rank(self, block: int) -> tuple[float, float]:
        return self._uses[block], self._last[block]


class LRU2(Ranked):
    """LRU-2: the last use but one decides; blocks used once go first. No time of correlated
    references, and what was evicted is remembered for ever."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._before, self._last = [0] * len(trace.parents), [0] * len(trace.parents)

    def _touch(self, block: int, new: bool) -> None:
        self._before[block] = self._last[block]
        self._last[block] = self._clock

    def _rank(self, block: int) -> tuple[float, float]:
        return self._before[block], self._last[block]


class GDSF(LFU):
    """Greedy-Dual-Size-Frequency: uses while cached, above the rank of the last one that went when
    the block was used. Size and cost of all blocks are 1."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._base, self._age = [0] * len(trace.parents), 0

    def _touch(self, block: int, new: bool) -> None:
        if new:
            self._uses[block] = 0
        super()._touch(block, new)
        self._base[block] = self._age

    def _rank(self, block: int) -> tuple[float, float]:
        return self._base[block] + self._uses[block], self._last[block]

    def _evicted(self, block: int) -> None:
        self._age = max(self._age, self._base[block] + self._uses[block])


class Belady(Ranked):
    """The leaf whose next use is the furthest goes first: no order of eviction hits more."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._ahead: list[list[float]] = [[math.inf] for _ in trace.parents]
        for number in range(len(trace.requests) - 1, -1, -1):
            for block in trace.requests[number]:
                self._ahead[block].append(number)

    def _touch(self, block: int, new: bool) -> None:
        self._ahead[block].pop()

    def _rank(self, block: int) -> tuple[float, float]:
        return -self._ahead[block][-1], 0


class ARC(Policy):
    """Adaptive replacement: recent and frequent blocks in two lists, whose shares follow hits in
    the ghosts of both (Megiddo and Modha, FAST 2003)."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._recent, self._frequent = Order(), Order()
        self._recent_ghosts, self._frequent_ghosts = Order(), Order()
        self._share = 0.0
        """Pages that the recent list may have."""

    def _use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self.cached[block]:
                self._recent.pop(block, None)
                self._frequent.pop(block, None)
                self._frequent[block] = None
            elif block in self._recent_ghosts or block in self._frequent_ghosts:
                self._returned(block)
            else:
                self._new(block)

    def _returned(self, block: int) -> None:
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        was_frequent = block in self._frequent_ghosts
        if was_frequent:
            self._share = max(0.0, self._share - max(1.0, recent / frequent))
        else:
            self._share = min(float(self.pages), self._share + max(1.0, frequent / recent))
        self._replace(was_frequent)
        self._recent_ghosts.pop(block, None)
        self._frequent_ghosts.pop(block, None)
        self._frequent[block] = None
        self._add(block)

    def _new(self, block: int) -> None:
        ghosts = len(self._recent_ghosts)
        if len(self._recent) + ghosts >= self.pages and not ghosts:
            self._forget(self._recent)
        else:
            if len(self._recent) + ghosts >= self.pages:
                self._recent_ghosts.popitem(last=False)
            elif self.size + ghosts + len(self._frequent_ghosts) >= 2 * self.pages:
                self._frequent_ghosts.popitem(last=False)
            self._replace(False)
        self._recent[block] = None
        self._add(block)

    def _replace(self, was_frequent: bool) -> None:
        """Make room, if there is none."""
        if self.size < self.pages:
            return
        recent = len(self._recent)
        if recent > self._share or (was_frequent and recent == self._share):
            order = self._recent
        else:
            order = self._frequent
        gone, order = self._forget(order)
        ghosts = self._recent_ghosts if order is self._recent else self._frequent_ghosts
        ghosts[gone] = None

    def _forget(self, order: Order) -> tuple[int, Order]:
        """Evict the first leaf of a list, or of the other one if it has none. Returns it and the
        list that had it."""
        other = self._frequent if order is self._recent else self._recent
        for each in (order, other):
            block = self._leaf(each)
            if block is not None:
                del each[block]
                self._drop(block)
                return block, each
        raise AssertionError("a cache that is full has a leaf")


class S3FIFO(Policy):
    """Three queues: a tenth of the pages for what is new, the rest for what was used there, and
    ghosts (Yang and others, SOSP 2023). One use in the small queue is enough to leave it. A block
    that is continued waits for another turn of its queue."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._small, self._main, self._ghosts = Order(), Order(), Order()
        self._uses = bytearray(len(trace.parents))
        self._limit = max(1, pages // 10)

    def _use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self.cached[block]:
                self._uses[block] = min(3, self._uses[block] + 1)
                continue
            queue = self._small
            if block in self._ghosts:
                del self._ghosts[block]
                queue = self._main
            queue[block] = None
            self._uses[block] = 0
            self._add(block)
            if self.size > self.pages:
                self._evict()

    def _evict(self) -> None:
        while self.size > self.pages:
            small = len(self._small) > self._limit or not self._main
            if self._leaf(self._small if small else self._main) is None:
                small = not small  # a queue may have no leaf: then the other one has
            if small:
                self._turn_small()
            else:
                self._turn_main()

    def _turn_small(self) -> None:
        block, _ = self._small.popitem(last=False)
        if self._uses[block]:
            self._uses[block] = 0
            self._main[block] = None
        elif self._children[block]:
            self._small[block] = None
        else:
            self._drop(block)
            self._ghosts[block] = None
            if len(self._ghosts) > self.pages - self._limit:
                self._ghosts.popitem(last=False)

    def _turn_main(self) -> None:
        block, _ = self._main.popitem(last=False)
        if self._uses[block] or self._children[block]:
            self._uses[block] = max(0, self._uses[block] - 1)
            self._main[block] = None
        else:
            self._drop(block)


class SIEVE(Policy):
    """One queue, and a hand that goes from its oldest block to its newest one, evicts the first
    that was not used since it passed, and stays there (Zhang and others, NSDI 2024). It passes
    blocks that are continued."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._passed, self._ahead = Order(), Order()
        """The queue, cut at the hand."""
        self._used = bytearray(len(trace.parents))

    def _use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if self.cached[block]:
                self._used[block] = 1
                continue
            if self.size >= self.pages:
                self._evict()
            self._used[block] = 0
            self._ahead[block] = None
            self._add(block)

    def _evict(self) -> None:
        while True:
            if not self._ahead:
                self._passed, self._ahead = self._ahead, self._passed
            block, _ = self._ahead.popitem(last=False)
            if not self._used[block] and not self._children[block]:
                self._drop(block)
                return
            self._used[block] = 0
            self._passed[block] = None


class WTinyLFU(Policy):
    """W-TinyLFU: a window of a hundredth of the pages; what leaves it stays if it was used more
    often than what would go in its place (Einziger and others, 2017). The rest is a segmented LRU,
    four fifths of it protected. Uses are counted exactly up to 15, where others have a sketch, and
    halved after 10 uses a page, then after every 5. A block that is continued stays."""

    def __init__(self, trace: Trace, pages: int) -> None:
        super().__init__(trace, pages)
        self._window, self._probation, self._protected = Order(), Order(), Order()
        self._window_limit = max(1, pages // 100)
        self._protected_limit = 4 * (pages - self._window_limit) // 5
        self._uses: dict[int, int] = {}
        self._until_halved = 10 * pages

    def _use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._count(block)
            if block in self._window:
                self._window.move_to_end(block)
            elif self.cached[block]:
                self._probation.pop(block, None)
                self._protected[block] = None
                self._protected.move_to_end(block)
                if len(self._protected) > self._protected_limit:
                    self._probation[self._protected.popitem(last=False)[0]] = None
            else:
                self._window[block] = None
                self._add(block)
            if len(self._window) > self._window_limit:
                self._leave_window()

    def _count(self, block: int) -> None:
        self._uses[block] = min(15, self._uses.get(block, 0) + 1)
        self._until_halved -= 1
        if not self._until_halved:
            self._uses = {block: uses // 2 for block, uses in self._uses.items() if uses > 1}
            self._until_halved = 5 * self.pages

    def _leave_window(self) -> None:
        block, _ = self._window.popitem(last=False)
        self._probation[block] = None
        if self.size <= self.pages:
            return
        order, victim = self._probation, self._leaf(self._probation, but=block)
        if victim is None:
            order, victim = self._protected, self._leaf(self._protected)
        stays = victim is not None and (
            self._children[block] or self._uses.get(block, 0) > self._uses.get(victim, 0)
        )
        if victim is None or not stays:
            order, victim = self._probation, block
        del order[victim]
        self._drop(victim)


POLICIES: dict[str, Callable[[Trace, int], Policy]] = {
    "lru": LRU,
    "arc": ARC,
    "lfu": LFU,
    "s3-fifo": S3FIFO,
    "sieve": SIEVE,
    "w-tinylfu": WTinyLFU,
    "lru-2": LRU2,
    "gdsf": GDSF,
    "belady": Belady,
}
BOUND = "belady"
"""No order of eviction, but what they are measured by: it is not among the best of them."""
