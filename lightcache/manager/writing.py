"""Writing: which pages go to the host, and when."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, Pages
from lightcache.errors import LightcacheError, LockTimeout
from lightcache.layout import KeyStatus
from lightcache.leases import Lease, NamingResult
from lightcache.manager.device import AttachedDevice, OwnedDevice
from lightcache.manager.foreign import nothing
from lightcache.manager.requests import (
    HELD,
    PINNED,
    Owed,
    Request,
    Space,
    WritePolicy,
    slots_of_blocks,
)
from lightcache.manager.state import ManagerState
from lightcache.manager.statistics import moved_bytes
from lightcache.manager.traffic import Movement, State
from lightcache.reservations import Reservation, ReservationBatch

if TYPE_CHECKING:
    from lightcache.manager.weights import Look
    from lightcache.page_index import PageIndex


# ---- Naming: full blocks of running requests get their keys.

NOTHING: Mapping[int, int] = {}
"""No block is to be exchanged."""
_KINDS = bytes(
    PINNED if status in (KeyStatus.NEW, KeyStatus.PRESENT) else HELD for status in range(256)
)
"""What a block becomes, by what the index said of its key."""
Filled = tuple[Request, int, int]
"""A request, how many of its blocks have names, and how many are full."""


def _keys(packed: list[bytes]) -> Keys:
    """Of `Chain.packed`."""
    return np.frombuffer(bytearray().join(packed), np.uint64).reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class Naming:
    """Blocks of requests that the device's index is asked to name. It fills `named` in the same
    call; an interrupt behind that leaves it to the manager's next call to tell the requests."""

    members: list[Filled]
    ours: Pages
    named: NamingResult


class Namer:
    """Gives full blocks of running requests their keys. The manager's lock is around every call."""

    def __init__(self, state: ManagerState, demotion: Demotion) -> None:
        """Nothing is being named."""
        self._state, self._demotion = state, demotion
        self._naming: Naming | None = None
        """For `settle`."""

    def name(self, running: list[Request], look: Look) -> None:
        """Name what is full and has no name yet, in one call for each space. Blocks of which others
        hold the content already are exchanged, and `Request.owed` says so."""
        by_space: dict[Space, list[Filled]] = {}
        block = self._state.device.block_tokens
        for one in running:
            if one.total < (one.named + 1) * block or not one.on_device:
                continue  # nearly always, while single tokens are generated
            full = min(one.publishable() // block, len(one.table))
            if full > one.named:
                assert one.space is not None
                members = by_space.get(one.space)
                if members is None:
                    members = by_space[one.space] = []
                members.append((one, one.named, full))
        for space, members in by_space.items():
            if look.good(space):
                self._name(space, members)

    def _name(self, space: Space, members: list[Filled]) -> None:
        blocks: list[Pages] = []
        packed: list[bytes] = []
        starts: list[int] = []
        offsets, count = [0], 0
        for one, first, full in members:
            begin = (
                first - 1 if first else 0
            )  # the key before the first new one: what that hangs on
            blocks.append(one.table[first:full])
            packed += one.device_chain.packed(begin, full)
            starts.append(first - begin)
            count += full - begin
            offsets.append(count)
        assert space.device is not None
        ours = np.concatenate(blocks)
        keys = _keys(packed)
        naming = self._naming = Naming(members, ours, NamingResult(len(ours)))
        try:
            self._state.device.name_many(
                ours, keys, np.array(offsets), np.array(starts), space.device, naming.named
            )
        finally:
            self.settle()

    def settle(self) -> None:
        """The requests learn what became of the blocks that were to be named last: which are
        pinned, and which have been exchanged. Once more does no harm."""
        naming = self._naming
        if naming is None:
            return
        settled, at = naming.named.settled, 0
        kinds = naming.named.status.tobytes().translate(_KINDS)
        owned, back = self._state.device.owned, self._state.config.write is WritePolicy.BACK
        if owned and settled:
            self._exchange(naming, settled)
        for one, first, full in naming.members:
            end = full
            if settled < at + full - first:  # interrupted before its last block was named
                end = first + max(0, settled - at)
            if owned:
                one.kind[first:end] = kinds[at : at + end - first]
            if back and end > first:
                self._demotion.note(one, first, end)
            if end > one.named:
                one.named = end
            at += full - first
        self._naming = None

    def _exchange(self, naming: Naming, settled: int) -> None:
        """Where another block holds what ours did, it takes its place."""
        theirs, ours = naming.named.pages[:settled], naming.ours[:settled]
        if theirs.tobytes() == ours.tobytes():
            return
        exchanged = np.flatnonzero(theirs != ours)
        at = 0
        for one, first, full in naming.members:
            mine = exchanged[(exchanged >= at) & (exchanged < at + full - first)]
            if len(mine):
                changed = dict(
                    zip((mine - at + first).tolist(), theirs[mine].tolist(), strict=True)
                )
                before = {} if one.owed is None or one.owed.told else one.owed.changed
                one.owed = Owed({**before, **changed})
                for position, block in changed.items():
                    one.table[position] = block
            at += full - first
        self._state.figures.add(duplicates=len(exchanged))


# ---- Write-back: blocks that the device needs for something else go to the host first.
#
# A host page may be several blocks. When the last of them gets its name, here is noted of which
# blocks and under which key the page would be written; nothing of it is needed for anything but
# writing back.


@dataclass(frozen=True, eq=False)
class Origin:
    """A host page that could be written from the device."""

    space: Space
    device_key: bytes
    """Of its last block: the block is still this one's."""
    host_keys: Keys
    """Of its prompt's pages from the first on, its own the last. Those of one request share their
    memory."""
    to_storage: bool
    """Whether it goes there, too, once the host has it."""
    blocks: Pages
    offset: int
    """Where it begins, in tokens of the first of them."""
    lives: Any = None
    """Attached devices: of each of the blocks, what says that it is the same still. Of an owned
    one prefixes stay as long as what hangs on them, so the last block's key says it for all."""


@dataclass(frozen=True, eq=False)
class Home:
    """Where the host has a block's content, if it has it."""

    space: Space
    device_key: Keys
    """As long as this is the block's, shape (1, 2)."""
    host_key: Keys
    """Of the page in which the block ends, shape (1, 2)."""


@dataclass(eq=False)
class Group:
    """Blocks on their way out, pinned until their copies are over."""

    lease: Lease
    movements: list[Movement]
    homes: dict[int, Home]
    """Of those that lie in a page of the host, by their numbers."""
    cause: str
    """"room", "low_water" or "demote"."""
    stay: bool
    """The host did not answer: not all of it is written, so the blocks are not given up."""
    written: list[Origin] = field(default_factory=list)
    """What is on its way to the host, and goes to storage when it is there."""


class Demotion:
    """The write-back of one manager. Its lock is around every call."""

    def __init__(self, state: ManagerState, writer: Writer) -> None:
        """Nothing is on its way."""
        self._state, self._writer = state, writer
        self._origins: dict[int, dict[bytes, Origin]] = {}
        """By the last block of each, and the host page's key."""
        self._homes: dict[int, Home] = {}
        """Owned devices, by block. A stale one is known by its key."""
        self._groups: list[Group] = []
        self._evicting: list[tuple[list[Movement], list[Origin]]] = []
        """Attached devices: copies of what the engine is going to evict, and what they write."""

    @property
    def going(self) -> int:
        """Blocks on their way out."""
        return sum(len(group.lease) for group in self._groups)

    def note(self, one: Request, begin: int, end: int) -> None:
        """Blocks [begin, end) of a request's table got their names."""
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        assert one.space is not None
        device, wishes = self._state.device, one.wishes
        goes = "host" in wishes.tiers and wishes.priority >= 0
        keys = one.host_chain.keys
        for page in range(begin * block // tokens, end * block // tokens):
            # The page's last token lies in this block; a page may be a part of one.
            first, last = page * tokens // block, ((page + 1) * tokens - 1) // block
            if not goes or (device.owned and HELD in one.kind[first : last + 1]):
                # Without a name it is gone as soon as the request is. What was noted of this block
                # may have begun in others.
                self._origins.pop(int(one.table[last]), None)
                continue
            made = Origin(
                one.space,
                one.device_chain.keys[last].tobytes(),
                keys[: page + 1],
                "storage" in wishes.tiers,
                one.table[first : last + 1].copy(),
                page * tokens % block,
                self._lives(one.table[first : last + 1]),
            )
            known = self._origins.setdefault(int(made.blocks[-1]), {})
            if known and next(iter(known.values())).device_key != made.device_key:
                known.clear()
            # The same key in the same block once more: what it hangs on may lie elsewhere by now.
            known[made.host_keys[-1].tobytes()] = made
            if device.owned:
                own = made.host_keys[-1:].copy()
                for at in range(first, last + 1):
                    key = one.device_chain.keys[at : at + 1].copy()
                    home = Home(one.space, key, own)
                    self._homes[int(one.table[at])] = home

    def _lives(self, blocks: Pages) -> Any:
        device = self._state.device
        return device.lives(blocks) if isinstance(device, AttachedDevice) else None

    def demote(self, n: int, cause: str) -> int:
        """Begin to write back up to n blocks, those that eviction would take next. They are free
        when that is over, but for those that somebody came for. Returns how many are on their
        way.

        Args:
            cause: under which they are counted: "room", "low_water" or "demote".
        """
        device = self._state.device
        if not isinstance(device, OwnedDevice) or device.index is None or n < 1:
            return 0
        oldest = device.index.oldest(min(n, 4096))
        blocks = oldest.pages.copy()
        homes = self._homes_of(blocks, oldest.keys)
        group = Group(oldest.lease, [], homes, cause, stay=True)
        self._groups.append(group)
        group.stay = not self.write(blocks, oldest.keys, group.movements, group.written)
        self.poll()
        return len(blocks)

    def evicting(self, blocks: Pages, keys: Keys) -> int:
        """Attached devices: see `KVCacheManager.evicting`. Returns how many copies were begun."""
        begun: list[Movement] = []
        written: list[Origin] = []
        self._evicting.append((begun, written))
        self.write(blocks, keys, begun, written)
        self.poll()
        return len(begun)

    def make_room(self, wanted: int) -> None:
        """Begin to write back what stands in the way of so many free blocks, if they can be had.
        What is over was looked at just now."""
        device = self._state.device
        assert isinstance(device, OwnedDevice)
        assert device.index is not None
        made = device.free + self.going
        while made < wanted and device.index.can_allocate(wanted - self.going):
            self.demote(wanted - made, "room")
            before, made = made, device.free + self.going
            if made <= before:
                return  # they stay, for whatever reason

    def running(self) -> Movement | None:
        """A copy that blocks on their way out wait for, and that goes on; None: there is none."""
        movements = (each for group in self._groups for each in group.movements)
        return next((each for each in movements if each.state is State.RUNNING), None)

    def write(
        self, blocks: Pages, keys: Keys, begun: list[Movement], written: list[Origin]
    ) -> bool:
        """Begin to write the pages that end in these blocks. Whether all were begun that the host
        had room for: the first error ends it, for each may be a long wait. What was noted stays:
        the host may lose a page before the device does.

        Args:
            keys: that the device has them under.
            begun: the copies are appended here.
            written: what they write is appended here, for `store`.
        """
        refused: set[bytes] = set()
        for i in range(len(blocks) - 1, -1, -1):  # prefixes first: host pages hang on each other
            for origin in self._origins.get(int(blocks[i]), {}).values():
                lives = self._lives(origin.blocks)
                same = lives is None or (lives == origin.lives).all()
                if not same or origin.device_key != keys[i].tobytes():
                    continue
                try:
                    self._write(origin, begun, written, refused)
                except LightcacheError:
                    self._state.figures.add(failed_offloads=1)
                    return False
        return True

    def _write(
        self,
        origin: Origin,
        begun: list[Movement],
        written: list[Origin],
        refused: set[bytes],
    ) -> None:
        """Unless the host has it already, or no room for it.

        Args:
            refused: keys of pages that there was no room for. What hangs on one of them would
                never be found, and drive out what is.
        """
        state, hangs_on = self._state, origin.host_keys[-2:]
        before = len(hangs_on) - 1
        own = hangs_on[before].tobytes()
        if before and hangs_on[0].tobytes() in refused:
            refused.add(own)
            state.figures.add(no_room_pages=1)
            return
        new = state.host.reserve(
            hangs_on,
            before,
            shards=state.mover.shards,
            namespace=origin.space.host,
            timeout=state.config.time_limit,
        )
        if len(new.new):
            self._writer.launch(new, self._slots(origin, before), origin.blocks, begun)
            written.append(origin)
            return
        if len(new.missing):
            refused.add(own)
        state.figures.add(no_room_pages=len(new.missing))
        new.release()

    def _slots(self, origin: Origin, before: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        own = origin.blocks.astype(np.int64)[:, None] * block + np.arange(block)
        flat = own.reshape(-1)[origin.offset : origin.offset + tokens]
        return np.concatenate([np.full(before * tokens, -1, np.int64), flat])

    def poll(self) -> None:
        """Give up blocks whose copies are over. They stay where an index does not answer."""
        if self._evicting:
            every, self._evicting = self._evicting, []
            for begun, written in every:
                if all(each.over for each in begun):
                    self._guard_store(written)
                else:
                    self._evicting.append((begun, written))
        over = [group for group in self._groups if all(each.over for each in group.movements)]
        if not over:
            return
        self._groups = [group for group in self._groups if group not in over]
        for group in over:
            give_up = partial(self._give_up, group)
            self._state.guard.run(give_up, group.lease.close, proves=False)
            self._guard_store(group.written)

    def _guard_store(self, written: list[Origin]) -> None:
        self._state.guard.run(partial(self._store, written), nothing, proves=False)

    def _store(self, written: list[Origin]) -> None:
        """What demotion has written to the host goes to storage, each prompt as far as it was
        written. Requests store what they computed when they end; this is what they could not."""
        storage, deepest = self._state.storage, dict[bytes, Origin]()
        if storage is None:
            return
        for origin in sorted(written, key=lambda each: len(each.host_keys)):
            if origin.to_storage and self._state.weights.good(origin.space):
                if len(origin.host_keys) > 1:
                    deepest.pop(origin.host_keys[-2].tobytes(), None)
                deepest[origin.host_keys[-1].tobytes()] = origin
        for origin in deepest.values():
            try:
                task = storage.write(origin.host_keys, namespace=origin.space.host)
                self._state.tasks.add(task)
            except LightcacheError:
                self._state.figures.add(errors=1)
            except Exception as error:
                self._state.traffic.foreign.note(error)

    def _give_up(self, group: Group) -> None:
        index, n = self._state.device.index, len(group.lease)
        if group.stay or index is None:
            group.lease.close()
            return
        gone = index.discard(group.lease)
        ask = partial(self._on_host, group, index)
        there = min(gone, self._state.guard.run(ask, lambda: 0, proves=False))
        self._state.figures.add(
            demotions=there,
            demotions_lost=gone - there,
            kept_by_match=n - gone,
            **{f"device_evicted_{group.cause}": gone},
        )

    def _homes_of(self, blocks: Pages, keys: Keys) -> dict[int, Home]:
        """Of those of these blocks that lie in a page of the host."""
        found = {}
        for block, key in zip(blocks.tolist(), keys, strict=True):
            home = self._homes.get(block)
            if home is not None and (home.device_key == key).all():
                found[block] = home
        return found

    def _on_host(self, group: Group, index: PageIndex) -> int:
        """Blocks of a group that the device has given up and the host has. It is asked, so that
        what was there before counts, and what did not get there does not."""
        there, host = 0, self._state.host
        for block, home in group.homes.items():
            if index.peek(home.device_key, namespace=home.space.device):
                continue  # it stayed
            if self._homes.get(block) is home:
                del self._homes[block]
            there += host.peek(home.host_key, namespace=home.space.host)
        return there

    def close(self) -> None:
        """Keep what is on its way where it is."""
        for group in self._groups:
            group.lease.release()
        self._groups.clear()
        self._evicting.clear()
        self._origins.clear()
        self._homes.clear()


# ---- Writing: which pages go to the host, and when.

_SEEN = 1 << 16  # pages that SELECTIVE remembers
Span = tuple[Request, int, int]
"""Pages [begin, end) of a request, by their numbers in its prompt: to be written."""


class Writer:
    """Writes what running requests have filled to the host."""

    def __init__(self, state: ManagerState) -> None:
        """Nothing is written yet."""
        self._state = state
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._failed = 0
        """Copies of ours that failed, or never began."""

    def due(self, running: list[Request], look: Look) -> None:
        """After a commit: pages of those that have enough of them, or whose prompt is complete."""
        if self._state.config.write is WritePolicy.BACK:
            return
        group, tokens = self._state.config.write_group, self._state.page_tokens
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
        used: dict[Space, list[bytes]] = {}
        due: list[Span] = []
        for one in ended:
            if one.left_to_others:  # who fails in another process does not say so
                self._take_over(one, look)
            full = one.publishable() // self._state.page_tokens
            stored = self._for_storage(one, full, look)
            if stored:
                due += stored
            elif self._state.config.write is not WritePolicy.BACK and full > one.written:
                due += self._span(one, full, look)
            elif one.space is not None and one.wishes.read and (full or one.written):
                packed = one.host_chain.packed(0, max(full, one.written))
                used.setdefault(one.space, []).extend(packed)
        self._write(due)
        for space, parts in used.items():
            if look.good(space):  # nothing is reserved: their order means nothing
                keys = _keys(parts)
                self._state.host.reserve(keys, len(keys), namespace=space.host).release()

    def _take_over(self, one: Request, look: Look) -> None:
        """Others were writing pages of this request, and may have failed: what is not there, and
        nobody writes any more, is written now. Of n samples whose copies all fail each has tried
        once."""
        end, one.left_to_others = one.left_to_others, 0
        if one.space is None or not look.good(one.space):
            return
        begin = self._state.host.peek(one.host_chain.keys[:end], namespace=one.space.host)
        if begin < end:
            self.write(one, begin, end)

    def write(self, one: Request, begin: int, end: int) -> None:
        """Begin to write these pages now, whatever the policy."""
        self._write([(one, begin, end)])

    def store(self, one: Request) -> None:
        """A request has ended and its copies are over: what the host has of it goes to storage. The
        tier has rules of its own for what is worth it."""
        storage, wishes, space = self._state.storage, one.wishes, one.space
        if storage is None or space is None or not wishes.write or "storage" not in wishes.tiers:
            return
        pages = one.publishable() // self._state.page_tokens
        if pages and one.stored and self._state.weights.good(space):
            keys = one.host_chain.keys[:pages]
            ids = one.token_ids(pages * self._state.page_tokens)
            state = self._state
            state.tasks.add(
                storage.write(keys, one.id, tokens=one.total, token_ids=ids, namespace=space.host)
            )

    def _for_storage(self, one: Request, full: int, look: Look) -> list[Span]:
        """What of a request that ends goes to storage and is not on the host, whatever the policy:
        storage is written from there."""
        wishes, begin = one.wishes, one.written
        if self._state.storage is None or one.space is None or not wishes.write:
            return []
        if not {"host", "storage"} <= wishes.tiers or wishes.priority < 0:
            return []
        if not full or not look.good(one.space):
            return []
        one.written = max(begin, full)
        if self._state.config.write is WritePolicy.SELECTIVE:  # some were passed over
            begin = self._state.host.peek(one.host_chain.keys[:full], namespace=one.space.host)
        return [(one, begin, full)] if full > begin else []

    def _span(self, one: Request, full: int, look: Look) -> list[Span]:
        """What of a request's next pages, up to `full`, is to be written: a span, or none."""
        wishes = one.wishes
        if not wishes.write or "host" not in wishes.tiers or wishes.priority < 0:
            return []
        begin, end = one.written, full
        if self._state.config.write is WritePolicy.SELECTIVE and wishes.priority <= 0:
            end = begin + self._asked_for(one.host_chain.keys[begin:full])
        one.written = full
        wanted = end > begin and one.space is not None and look.good(one.space)
        return [(one, begin, end)] if wanted else []

    def _asked_for(self, keys: Keys) -> int:
        """Leading pages that were to be written before. Remembers all of them."""
        most, leading, counting = self._state.config.seen, 0, True
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
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        for one, begin, end in due:
            assert one.space is not None
            if len(one.table) * block >= end * tokens:  # else the engine has let go of its blocks
                by_space.setdefault(one.space, []).append((one, begin, end))
        for space, spans in by_space.items():
            try:
                new = self._reserve(space, spans)
            except LockTimeout:
                self._state.figures.add(errors=1)
                for one, begin, _ in spans:  # a later commit, or its end, comes back to them
                    one.written = min(one.written, begin)
                continue
            except LightcacheError:
                self._state.figures.add(failed_offloads=len(spans))
                continue
            with new:  # until each has its own, or all is over
                self._offload(new, spans)

    def _reserve(self, space: Space, spans: list[Span]) -> ReservationBatch:
        """Pages for all of them. The keys are those from the root: all of them count as used."""
        state = self._state
        packed: list[bytes] = []
        offsets = [0]
        for one, _, end in spans:
            packed += one.host_chain.packed(0, end)
            offsets.append(offsets[-1] + end)
        return state.host.index.reserve_batch(
            _keys(packed),
            np.array(offsets),
            np.array([begin for _, begin, _ in spans]),
            shards=state.mover.shards,
            namespace=space.host,
            timeout=state.config.time_limit,
        )

    def _offload(self, new: ReservationBatch, spans: list[Span]) -> None:
        slots = self._slots(spans)
        for span, own, its in zip(spans, new.split(), slots, strict=True):
            self._offload_one(span, own, its)

    def _offload_one(self, span: Span, new: Reservation, slots: npt.NDArray[np.int64]) -> None:
        one, begin, end = span
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
        if not new.all_new:
            if len(new.busy):
                one.left_to_others, one.failed_then = int(new.busy[-1]) + 1, self._failed
            self._state.figures.add(no_room_pages=len(new.missing))
            if not len(new.new):
                new.release()
                return
        touched = one.table[begin * tokens // block : -(-end * tokens // block)]
        if self.launch(new, slots, touched, one.movements).over:
            one.movements.pop()  # what is over holds nothing up

    def _slots(self, spans: list[Span]) -> list[npt.NDArray[np.int64]]:
        """Of each span the device slots of all its request's tokens up to its end; -1 for those
        before it."""
        tokens, block = self._state.page_tokens, self._state.device.block_tokens
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
        state, pages, begun = self._state, len(new.pages), time.perf_counter_ns()

        def over(ok: bool, nbytes: int | None) -> None:
            if ok:
                moved = moved_bytes(state.host, pages * state.page_tokens, nbytes)
                taken = time.perf_counter_ns() - begun
                state.figures.add(
                    offloads=1, offloaded_pages=pages, offloaded_bytes=moved, offload_ns=taken
                )
            else:
                self._failed += 1
                state.figures.add(failed_offloads=1)

        return state.traffic.begin(blocks, state.mover, "offload", new, slots, over, of=of)


__all__ = ["NOTHING", "Demotion", "Namer", "Writer"]
