"""What a worker of the stress and kill tests does: everything at random, and it looks hard.

Every page's bytes say whose they are: four slices, each with the page's key, the serial number of
the write and words that follow from these. Whoever holds a page reads all of it when it gets it
and again before it lets go, and the two must be the same write of the right key. Whoever writes a
page writes it twice and reads it back each time. So one page handed out wrongly, made ready
early, or reused under a holder is seen by somebody.

What a worker holds it also notes on a `Board` outside of the cache's memory.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import lightcache
from lightcache import Abandoned, Cache, InUse, Lease, LeaseLost, LockTimeout, OutOfPages
from lightcache.errors import WaitTimeout
from lightcache.layout import KeyStatus
from lightcache.namespaces import Namespace
from lightcache.reservations import ReservationShard

PAGE_BYTES = 512
SLICES, WORDS = 4, 16
SECRET = b"stress stress stress"
TENANTS = ("", "one", "two")
CELL = 32  # bytes of a mailbox: taken, shard, shards, 5 spare, ticket (16), spare
TICKET_SECONDS = 0.4
TALLY = (  # what is counted on the board, where it outlives who counted
    "operations",
    "pages verified",
    "lock timeouts",
    "matched",
    "published",
    "shards",
    "abandoned",
    "evicted",
    "clears",
    "tickets",
    "adopted",
)

# What a client says that waited in vain: who holds the lock, for what, since when.
_BLAMES = re.compile(
    r"(client \d+ \(\S.*, pid \d+\) "
    r"(has held the lock for \d+\.\d{3} s in [a-z]+|has just taken the lock)"
    r"|client \d+ has|the lock was contended)"  # it was dead by then, or let go
)

Keys = npt.NDArray[np.uint64]
Stamps = npt.NDArray[np.uint64]

_MIX = (np.arange(WORDS - 3, dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * np.uint64(
    0x9E3779B97F4A7C15
)


def stamps(keys: Keys, serials: Stamps) -> Stamps:
    """What pages of these keys hold: (n, 4, 16) words for serials of shape (n, 4)."""
    made = np.empty((len(keys), SLICES, WORDS), np.uint64)
    made[:, :, 0] = keys[:, 0, None]
    made[:, :, 1] = keys[:, 1, None]
    made[:, :, 2] = serials
    base = keys[:, 0, None] ^ (keys[:, 1, None] << np.uint64(1)) ^ serials
    made[:, :, 3:] = base[:, :, None] * _MIX
    return made


def create(name: str, pages: int, *, lifetime: str = "attached") -> Cache:
    """The cache that workers attach to."""
    return Cache.create(
        name,
        pages=pages,
        page_bytes=PAGE_BYTES,
        fingerprint="stress",
        secret=SECRET,
        role="parent",
        lifetime=lifetime,
        lock_timeout=60.0,
    )


def words_of(cache: Cache) -> npt.NDArray[np.uint64]:
    """The pool as `stamps` fills it: (pages, 4, 16) words, shared."""
    words: npt.NDArray[np.uint64] = cache.pool.array.view(np.uint64)
    return words.reshape(cache.pages, SLICES, WORDS)


class Board:
    """A file that all map, beside the cache: what each worker holds and has done so far, and
    mailboxes for tickets."""

    def __init__(self, path: Path, workers: int, pages: int) -> None:
        """Map it; made by the first who does."""
        tally, gates, holds = workers * len(TALLY) * 8, workers * 16, workers * pages * 2
        size = tally + gates + holds + workers * workers * CELL
        if not path.exists():
            path.write_bytes(bytes(size))
        whole = np.memmap(path, np.uint8, "r+", shape=(size,))
        self.tally = whole[:tally].view(np.uint64).reshape(workers, len(TALLY))
        whole = whole[tally:]
        self.gates = whole[:gates].view(np.uint32).reshape(workers, 4)
        self.holds = whole[gates : gates + holds].view(np.uint16).reshape(workers, pages)
        self.mail = whole[gates + holds :].reshape(workers, workers, CELL)
        self.workers = workers

    def send(self, sender: int, to: int, ticket: bytes, shard: int, shards: int) -> None:
        """Leave a ticket, unless the last one has not been taken; `shards` 0: a lease's."""
        cell = self.mail[sender, to]
        if cell[0]:
            return
        cell[1], cell[2] = shard, shards
        cell[8:24] = np.frombuffer(ticket, np.uint8)
        cell[0] = 1

    def receive(self, to: int) -> list[tuple[bytes, int, int]]:
        """Tickets for us. A torn one (its sender was killed) is refused by the cache."""
        found = []
        for sender in range(self.workers):
            cell = self.mail[sender, to]
            if cell[0]:
                found.append((bytes(cell[8:24]), int(cell[1]), int(cell[2])))
                cell[0] = 0
        return found


def prompt_keys(seed: int, prompts: int, length: int, buckets: int) -> list[Keys]:
    """Prompts that share prefixes like the branches of a tree. `buckets`: how many chains the keys
    fall into (a power of two), so that chains of a small index become long."""
    chance = np.random.default_rng(seed)
    made: list[Keys] = []
    for i in range(prompts):
        keys = chance.integers(0, 1 << 64, (length, 2), np.uint64)
        keys[:, 0] -= keys[:, 0] % np.uint64(1 << 16) - keys[:, 0] % np.uint64(buckets)
        if i:
            shared = int(chance.integers(0, length))
            keys[:shared] = made[(i - 1) // 2][:shared]
        made.append(keys)
    return made


@dataclass
class Held:
    """Pages that this worker pins, what they held at first, and how to let go."""

    pages: npt.NDArray[np.int32]
    keys: Keys
    serials: Stamps
    let_go: Callable[[], None]


@dataclass
class Writing:
    """A reservation whose shards others may be writing."""

    reservation: Any
    ticket: Any
    keys: Keys


@dataclass(frozen=True)
class Mix:
    """How often each operation is drawn."""

    match: int = 30
    reserve: int = 30
    ticket: int = 6
    team: int = 6
    evict: int = 3
    allocate: int = 10
    clear: int = 1
    wait: int = 5
    release: int = 20
    check: int = 1
    reap: int = 0
    impatient: int = 0


CALM = Mix()
STORM = Mix(
    match=15,
    reserve=35,
    team=14,
    evict=15,
    allocate=15,
    clear=4,
    wait=1,
    check=0,
    reap=4,
    impatient=4,
)


class Worker:
    """An attached process; `step` does one thing."""

    def __init__(
        self,
        name: str,
        number: int,
        seed: int,
        board: Board,
        *,
        mix: Mix = CALM,
        wide: int = 0,
        device: bool = False,
    ) -> None:
        """Attach. `wide`: longest prompt; 0: after the number of pages. `device`: as if we had
        one, so that what we were writing when we die goes into quarantine."""
        self.number = number
        self.chance = random.Random(seed)
        self.board = board
        self.cache = Cache.attach(
            name,
            role=f"worker {number}",
            secret=SECRET,
            lock_timeout=600.0,  # on a slow machine: the watchdog is elsewhere
            timeout=60.0,
            device=device,
        )
        pages = self.cache.pages
        length = wide or max(3, min(200, pages // 2))
        small = pages <= 64
        self.prompts = prompt_keys(pages, 12 if small else 300, length, 4 if small else 1 << 16)
        self.words = words_of(self.cache)
        self.held: list[Held] = []
        self.writing: list[Writing] = []
        self.given: list[Any] = []
        self.serial = (number + 1) << 40 | (seed & 0xFF) << 32
        self.spaces: dict[str, Namespace] = {}
        self.counts: dict[str, int] = {}
        names = [f for f in vars(mix) if getattr(mix, f)]
        self.ops = [getattr(self, f"do_{f}") for f in names]
        self.weights = [getattr(mix, f) for f in names]
        board.holds[number] = 0

    def step(self) -> None:
        """Read the mail, look after what is being written, do one thing."""
        self.count("operations")
        for ticket, shard, shards in self.board.receive(self.number):
            self.take(ticket, shard, shards)
        self.look_after()
        operation = self.chance.choices(self.ops, self.weights)[0]
        operation()
        if len(self.held) > 4:
            self.do_release()

    def count(self, what: str, by: int = 1) -> None:
        """How often things happened: a test that never got there would prove nothing."""
        self.counts[what] = self.counts.get(what, 0) + by
        if what in TALLY:
            self.board.tally[self.number, TALLY.index(what)] += by

    # ---- bytes

    def read(self, pages: Any, keys: Keys, what: str) -> Stamps:
        """Read pages that must hold these keys; their serials, (n, 4)."""
        found = self.words[pages]
        self.count("pages verified", len(found))
        serials = found[:, :, 2].copy()
        wrong = np.argwhere((found != stamps(keys, serials)).any(axis=2))
        if len(wrong):
            n, piece = wrong[0]
            raise AssertionError(
                f"worker {self.number}, {what}: page {pages[n]} slice {piece} holds "
                f"{[hex(int(w)) for w in found[n, piece][:4]]}, expected the key "
                f"{[hex(int(k)) for k in keys[n]]}"
            )
        return serials

    def write(self, pages: Any, keys: Keys, pieces: slice, what: str) -> None:
        """Write our slices twice, and each time read them back."""
        for _ in range(2):
            self.serial += 1
            made = stamps(keys, np.full((len(keys), SLICES), self.serial, np.uint64))[:, pieces]
            self.words[pages, pieces] = made
            if not (self.words[pages, pieces] == made).all():
                raise AssertionError(f"worker {self.number}, {what}: somebody else wrote our page")

    # ---- holding

    def hold(self, pages: Any, keys: Keys, let_go: Callable[[], None], what: str) -> None:
        """From the moment we have the pages: read them, and note it."""
        pages = np.array(pages, np.int32)
        np.add.at(self.board.holds[self.number], pages, 1)
        self.held.append(Held(pages, keys, self.read(pages, keys, what), let_go))

    def drop(self, held: Held) -> None:
        """Read again, let go."""
        again = self.read(held.pages, held.keys, "before letting go")
        if not (again == held.serials).all():
            raise AssertionError(f"worker {self.number}: pages were written while we held them")
        np.subtract.at(self.board.holds[self.number], held.pages, 1)
        held.let_go()

    def pick(self) -> tuple[Namespace, Keys]:
        """A prompt of a tenant, cut somewhere."""
        tenant = self.chance.choice(TENANTS)
        if tenant not in self.spaces:
            pages = self.cache.pages
            quota = max(1, pages // 3) if tenant == "two" else 0
            self.spaces[tenant] = self.cache.index.namespace("stress", tenant, quota_pages=quota)
        keys = self.chance.choice(self.prompts)
        keys = keys[: self.chance.randint(1, len(keys))].copy()
        keys[:, 1] ^= np.uint64(TENANTS.index(tenant))
        return self.spaces[tenant], keys

    def forget(self, space: Namespace) -> None:
        """It was cleared: open it anew next time."""
        self.spaces.pop(space.tenant, None)
        self.count("cleared")

    # ---- operations

    def do_match(self) -> None:
        space, keys = self.pick()
        if self.chance.random() < 0.3:
            self.cache.peek(keys, namespace=space)
        if self.chance.random() < 0.2:
            cuts = sorted(self.chance.randint(0, len(keys)) for _ in range(2))
            offsets = np.array([0, *cuts, len(keys)])
            with self.cache.match_many(keys, offsets, namespace=space) as batch:
                for i in range(3):
                    pages = batch[i]
                    self.read(pages, keys[offsets[i] : offsets[i] + len(pages)], "match_many")
            return
        lease = self.cache.match(keys, namespace=space)
        self.count("matched", len(lease))
        self.hold(lease.pages, keys[: len(lease)], lease.release, "match")

    def do_reserve(self, team: bool = False) -> None:
        space, keys = self.pick()
        with self.cache.match(keys, namespace=space) as lease:
            start = len(lease) if self.chance.random() < 0.7 else 0
            shards = 1 + self.chance.randrange(4) if not team else self.chance.choice((2, 4))
            try:
                got = self.cache.reserve(keys, start, shards=shards, namespace=space)
            except Abandoned:
                return self.forget(space)
            except OutOfPages:
                return self.count("out of pages")
        if len(np.unique(got.pages)) != len(got.pages):
            raise AssertionError(f"worker {self.number}: reserve gave one page twice")
        self.count("reserved", len(got.pages))
        self.read(got.present_pages, keys[got.present], "reserve, present")
        if team and len(got.pages):
            return self.start_team(got, keys[got.new])
        return self.write_alone(got, keys, space)

    def write_alone(self, got: Any, keys: Keys, space: Namespace) -> None:
        new = keys[got.new]
        everything = slice(0, SLICES)
        self.write(got.pages, new, everything, "reserve")
        end = self.chance.random()
        try:
            if end < 0.15:
                self.count("abandoned")
                return got.abandon()
            if end < 0.25:  # some shards only, then the rest is abandoned
                for shard in range(self.chance.randrange(got.shards)):
                    got.publish(shard)
                return got.release()
            if end < 0.5:
                order = self.chance.sample(range(got.shards), got.shards)
                ready = [got.publish(shard) for shard in order]
                assert ready[-1], "the last shard did not make the pages ready"
            else:
                assert got.publish(), "publish did not make the pages ready"
        except Abandoned:  # cleared meanwhile
            got.release()
            return self.forget(space)
        self.count("published", len(got.pages))
        pages = np.concatenate([got.pages, got.present_pages])
        held = np.concatenate([new, keys[got.present]])
        return self.hold(pages, held, got.release, "published")

    def do_allocate(self) -> None:
        """Pages without a key: written, then named, or not; some lose their names again."""
        space, keys = self.pick()
        index = self.cache.index
        keys = keys[: self.chance.randint(1, 8)]
        try:
            held = index.allocate(len(keys))
        except OutOfPages:
            return self.count("out of pages")
        with held:
            self.write(held.pages, keys, slice(0, SLICES), "allocate")
            if self.chance.random() < 0.3:
                return self.count("freed", len(held))
            try:
                named = index.name_pages(held.pages, keys, namespace=space)
            except Abandoned:  # cleared meanwhile
                return self.forget(space)
        pinned = (named.status == KeyStatus.NEW) | (named.status == KeyStatus.PRESENT)
        pages, keys = named.pages[pinned], keys[pinned]
        self.count("named", int((named.status == KeyStatus.NEW).sum()))
        unread = len(pages) and not self.board.holds[self.number, pages[-1]]  # by ourselves
        if unread and self.chance.random() < 0.3:
            return self.unname(pages, keys)
        return self.hold(pages, keys, lambda: index.unpin(pages), "named")

    def unname(self, pages: Any, keys: Keys) -> None:
        """Take the last page's name, if nobody else uses it: then it is ours to write."""
        index, last = self.cache.index, pages[-1:]
        try:
            index.unname(last)
        except (InUse, LeaseLost):  # or cleared meanwhile
            return self.hold(pages, keys, lambda: index.unpin(pages), "named")
        self.count("unnamed")
        self.write(last, keys[-1:], slice(0, SLICES), "unname")
        index.free(last)
        return index.unpin(pages[:-1])

    def do_evict(self) -> None:
        self.count("evicted", self.cache.evict(self.chance.randint(1, 8)))

    def do_clear(self) -> None:
        tenant = self.chance.choice(TENANTS[1:])
        if tenant in self.spaces:
            self.cache.clear(self.spaces[tenant])
            self.spaces.pop(tenant)
            self.count("clears")

    def do_wait(self) -> None:
        space, keys = self.pick()
        with contextlib.suppress(WaitTimeout):
            self.cache.wait(keys, timeout=0.02, namespace=space)

    def do_release(self) -> None:
        if self.held:
            self.drop(self.held.pop(self.chance.randrange(len(self.held))))

    def do_check(self) -> None:
        self.cache.check().raise_if_broken()

    def do_reap(self) -> None:
        self.count("reaped", self.cache.reap())

    def do_impatient(self) -> None:
        """Reserve, but wait for the lock only a moment: then the error says who is to blame."""
        space, keys = self.pick()
        try:
            self.cache.reserve(keys, timeout=0.002, namespace=space).release()
        except Abandoned:
            self.forget(space)
        except LockTimeout as error:
            self.count("lock timeouts")
            if not _BLAMES.search(str(error)):
                raise AssertionError(f"this blames nobody: {error}") from error

    # ---- tickets

    def others(self, most: int) -> dict[int, Any]:
        """Some other workers that live: number and client id."""
        living = {}
        for client in self.cache.clients():
            if client.alive and client.role.startswith("worker "):
                number = int(client.role.split()[1])
                if number != self.number:
                    living[number] = lightcache.ClientId(client.slot, client.epoch)
        chosen = self.chance.sample(sorted(living), min(most, len(living)))
        return {number: living[number] for number in chosen}

    def do_ticket(self) -> None:
        """Hand what we match to others."""
        space, keys = self.pick()
        with self.cache.match(keys, namespace=space) as lease:
            others = self.others(self.chance.randint(1, 3))
            if not len(lease) or not others:
                return
            self.read(lease.pages, keys[: len(lease)], "ticket")
            try:
                ticket = lease.ticket(list(others.values()), timeout=TICKET_SECONDS)
            except (OutOfPages, LeaseLost):  # no ticket left; an adopter just died
                return
            for number in others:
                self.board.send(self.number, number, bytes(ticket), 0, 0)
            self.given.append(ticket)
            self.count("tickets")

    def do_team(self) -> None:
        """Reserve, write a shard, and let others write the other shards."""
        if len(self.writing) < 2:
            self.do_reserve(team=True)

    def start_team(self, got: Any, keys: Keys) -> None:
        others = self.others(got.shards - 1)
        self.write(got.pages, keys, slice(0, SLICES, got.shards), "team")
        try:
            if len(others) < got.shards - 1:
                return got.abandon()
            ticket = got.ticket(list(others.values()), timeout=TICKET_SECONDS)
            for shard, number in enumerate(others, 1):
                self.board.send(self.number, number, bytes(ticket), shard, got.shards)
            got.publish(0)
        except (OutOfPages, LeaseLost, Abandoned):
            return got.release()
        self.count("teams")
        return self.writing.append(Writing(got, ticket, keys))

    def take(self, ticket: bytes, shard: int, shards: int) -> None:
        """Adopt what somebody sent us."""
        try:
            adopted = self.cache.adopt(ticket, shard=shard if shards else None)
        except (LeaseLost, lightcache.ConfigError):
            return
        pages = adopted.pages
        keys = self.words[pages, 0, :2].copy()
        if isinstance(adopted, Lease):
            self.count("adopted")
            self.hold(pages, keys, adopted.release, "adopted")
            self.cache.done(ticket, self.chance.random() < 0.9)
            return
        assert isinstance(adopted, ReservationShard)
        assert shards in (2, 4)
        self.write(pages, keys, slice(shard, SLICES, shards), "adopted shard")
        if self.chance.random() < 0.9:
            with contextlib.suppress(Abandoned, LeaseLost):
                ready = adopted.publish()
                self.count("shards")
                if ready:
                    self.read(pages, keys, "last shard")
        if not adopted.ended:
            adopted.release()

    def look_after(self) -> None:
        """End what others have finished or will not finish."""
        for at in [w for w in self.writing if w.ticket.poll().verdict is not None]:
            self.writing.remove(at)
            if at.ticket.poll().verdict:
                self.count("teams done")
            at.ticket.drop()
            at.reservation.release()
        for ticket in [t for t in self.given if t.poll().verdict is not None]:
            self.given.remove(ticket)
            ticket.drop()

    # ---- the end

    def stop(self) -> None:
        """Finish what others work on with us; keep what we hold."""
        for at in self.writing:
            at.ticket.drop()
            at.reservation.release()
        for ticket in self.given:
            ticket.drop()
        self.writing, self.given = [], []

    def release(self) -> None:
        """Let go of everything."""
        self.stop()
        while self.held:
            self.drop(self.held.pop())

    def leave(self) -> None:
        """Detach."""
        del self.words
        self.cache.close()


@dataclass
class Orders:
    """What a spawned worker is told, and answers."""

    name: str
    board: Path
    workers: int
    pages: int
    number: int
    seed: int
    mix: Mix = field(default_factory=Mix)


def spawned(orders: Orders, pipe: Connection) -> None:
    """A worker's main: obeys `run SECONDS`, `release`, `leave`; answers each."""
    try:
        board = Board(orders.board, orders.workers, orders.pages)
        worker = Worker(orders.name, orders.number, orders.seed, board, mix=orders.mix)
        pipe.send("ready")
        while True:
            order, argument = pipe.recv()
            if order == "run":
                end = time.monotonic() + argument
                while time.monotonic() < end:
                    worker.step()
                worker.stop()
            elif order == "release":
                worker.release()
            else:
                worker.leave()
            pipe.send(dict(worker.counts))
            if order == "leave":
                return
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
