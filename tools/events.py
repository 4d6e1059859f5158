"""`lightcache events`: publish which pages a cache has, as vLLM and SGLang publish theirs.

A message has three frames: a topic, a sequence number as 8 bytes, big-endian, and in msgpack an
array of the time, the events and a rank. An event is a map: `BlockStored`, `BlockRemoved` or
`AllBlocksCleared` under "type", and fields by name; or an array of the same. A request for what was
missed is the number to begin with, at a ROUTER socket; the answer is messages, and one with the
number -1 as the end. So vllm/distributed/kv_events.py and sglang/srt/disaggregation/kv_events.py
have it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from lightcache._arguments import Keys
from lightcache.changes import KEPT, ChangeBatch, Changes, Groups, Mask
from lightcache.errors import ConfigError, Detached, InUse, LightcacheError, NotReady
from lightcache.page_index import PageIndex
from lightcache.prompt import TokenIds
from lightcache.routed_indexes import page_tokens_of
from lightcache.shm.errors import require
from lightcache.shm.listing import read_segment
from lightcache.token_records import TokenRecords
from lightcache.tools.image import cache_in_use, group_option_help
from lightcache.tools.image import require as require_segment
from lightcache.tools.output import fail
from lightcache.tools.settings import Service
from lightcache.tools.storage_service import Signals

INTERVAL = 0.1
"""Seconds between two scans, at least."""
SHARE = 0.02
"""Of a core, for scans: where they cost more, they become rarer."""
WHOLE = 10.0
"""Seconds after which all pages are looked at though no count has moved."""
LOOK = 1.0
"""Seconds between two looks at whether the cache is there, and has clients."""
END = (-1).to_bytes(8, "big", signed=True)
TOPIC = "kv-events"


@click.command(cls=Service)
@click.argument("name")
@click.option(
    "--endpoint",
    default="tcp://127.0.0.1:5557",
    show_default=True,
    help="Where to publish, an address of this machine; tcp://*:5557 for routers of other nodes.",
)
@click.option(
    "--connect", is_flag=True, help="Connect to --endpoint, a router's, instead of listening there."
)
@click.option("--replay-endpoint", help="Where to answer requests for what was missed.")
@click.option("--topic", help=f"Publish as the cache itself, under this topic.  [{TOPIC}]")
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="TOPIC",
    help="Publish as a worker that tells its device's blocks itself, under its topic. Repeatable.",
)
@click.option(
    "--medium",
    default="CPU",
    show_default=True,
    help="What the cache is called: CPU with vLLM, CPU_PINNED with SGLang, STORAGE for a disk's.",
)
@click.option(
    "--hashes",
    type=click.Choice(["int", "bytes"]),
    default="int",
    show_default=True,
    help="A key as its first 8 bytes, a signed number; or all 16.",
)
@click.option(
    "--layout",
    type=click.Choice(["map", "array"]),
    default="map",
    show_default=True,
    help="Events as maps; or as arrays of their fields, as earlier vLLM had them, and llm-d reads.",
)
@click.option(
    "--token-ids/--no-token-ids",
    default=True,
    help="Publish the token ids of blocks, if the cache notes them (create --token-ids): routers "
    "that find blocks by tokens need them. They are what was said.  [on]",
)
@click.option("--rank", type=click.IntRange(0), default=0, help="Data-parallel rank.  [0]")
@click.option(
    "--block-size", type=click.IntRange(1), help="Tokens of a page, if the cache does not say."
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=KEPT,
    show_default=True,
    help="Messages kept for those that missed some.",
)
@click.option("--group", help=group_option_help)
def events(
    name: str,
    endpoint: str,
    connect: bool,
    replay_endpoint: str | None,
    topic: str | None,
    workers: tuple[str, ...],
    medium: str,
    hashes: str,
    layout: str,
    token_ids: bool,
    rank: int,
    block_size: int | None,
    keep: int,
    group: str | None,
) -> None:
    """Publish which pages of the cache NAME become ready and which go, for routers.

    Messages are those of vLLM and SGLang (ZeroMQ, msgpack). It reads the cache ten times a second
    at most, with 2 % of a core at most, and takes no lock and no slot. Answers to those that missed
    some come on top. It waits for a cache that is removed to be made anew, and runs until Ctrl-C or
    SIGTERM.
    """
    for package in ("zmq", "msgspec"):
        require(package, "events", "lightcache events")
    require_segment(cache_in_use(name))
    identities = [Identity(topic.encode(), True)] if topic is not None else []
    identities += [Identity(each.encode(), False) for each in workers]
    identities = identities or [Identity(TOPIC.encode(), True)]
    wire = Wire(medium, hashes == "int", rank, block_size, arrays=layout == "array")
    with Signals() as signals, Source(name, group, keep, token_ids=token_ids) as source:
        wire.block_size_of(source.index)
        with Sockets(endpoint, replay_endpoint, connect=connect) as sockets:
            what = "publishing" if source.tokens is None else "publishing with token ids"
            click.echo(f"{source.index.name}: {what} at {', '.join(sockets.bound)}")
            Publisher(source, sockets, wire, identities).run(signals)


# ---- what is published


@dataclass(frozen=True)
class Identity:
    """As whom events are published."""

    topic: bytes
    is_owner: bool
    """True: the cache itself, which may say that all of its blocks are gone. False: a worker, of
    whom that would be said of its device's blocks as well."""


class Wire:
    """Makes messages of batches."""

    def __init__(
        self,
        medium: str,
        as_ints: bool,
        rank: int,
        block_size: int | None,
        *,
        arrays: bool = False,
    ) -> None:
        """
        Args:
            block_size: tokens of a page, if the index does not say.
            arrays: an event is an array of its fields, not a map.
        """
        import msgspec

        self._raw = msgspec.Raw
        self._pack = msgspec.msgpack.Encoder().encode
        self._medium, self._as_ints, self._rank = medium, as_ints, rank
        self._given, self._block_size, self._arrays = block_size, 0, arrays

    def block_size_of(self, index: PageIndex) -> None:
        """Take the tokens of a page from an index.

        Raises:
            ConfigError: it does not say, and they were not given.
        """
        found = page_tokens_of(index) or self._given
        if found is None:
            raise ConfigError(
                f"{index.name!r} does not say how many tokens a page has; give --block-size"
            )
        self._block_size = found

    def payload(self, batch: ChangeBatch, owner: bool, tokens: TokenRecords | None = None) -> bytes:
        """A batch in msgpack. `tokens`: where the token ids of its blocks are."""
        events: list[dict[str, Any]] = []
        if batch.cleared and owner:
            events.append({"type": "AllBlocksCleared"})
        for which, group in _by_group(batch.removed_groups):
            event = {"type": "BlockRemoved", "block_hashes": self._hashes(batch.removed[which])}
            events.append({**event, "medium": self._medium, **group})
        events += self._stored(batch, tokens)
        said = list(map(_fields, events)) if self._arrays else events
        found: bytes = self._pack([batch.time, said, self._rank])
        return found

    def _stored(self, batch: ChangeBatch, tokens: TokenRecords | None) -> Iterator[dict[str, Any]]:
        """An event for each path of pages that follow one another, all with token ids or none."""
        keys, parents, groups = batch.stored, batch.parents, batch.stored_groups
        rows, known = _tokens(batch, tokens)
        follows = batch.has_parent[1:] & (parents[1:] == keys[:-1]).all(axis=1)
        follows &= (groups[1:] == groups[:-1]) & (known[1:] == known[:-1])
        starts = [0, *(np.flatnonzero(~follows) + 1), len(keys)] if len(keys) else []
        hashes, before = self._hashes(keys), self._hashes(parents)
        for start, end in itertools.pairwise(starts):
            yield {
                "type": "BlockStored",
                "block_hashes": hashes[start:end],
                "parent_block_hash": before[start] if batch.has_parent[start] else None,
                "token_ids": self._raw(_packed(rows[start:end])) if known[start] else [],
                "block_size": self._block_size,
                "lora_id": None,
                "medium": self._medium,
                "lora_name": None,
                **_group(int(groups[start])),
            }

    def _hashes(self, keys: Keys) -> list[Any]:
        """Each half of a key is as good as any other 64 bits of it: it is a digest. The first is
        what SGLang takes of its own, and signed, as it is there."""
        if self._as_ints:
            halves: list[Any] = keys[:, 0].astype(np.int64).tolist()
            return halves
        data = np.ascontiguousarray(keys, "<u8").tobytes()
        return [data[start : start + 16] for start in range(0, len(data), 16)]


def _fields(event: dict[str, Any]) -> list[Any]:
    """An event as an array: its fields in the order of the map, with that which is left out there
    before the group."""
    fields = list(event.values())
    if event["type"] == "BlockStored" and "group_idx" in event:
        fields.insert(-1, None)  # extra_keys
    return fields


def _tokens(batch: ChangeBatch, records: TokenRecords | None) -> tuple[TokenIds, Mask]:
    """The token ids of each page, and whether they are known. Those of a batch that was told before
    are as the pages have them now: a page that was used again has another key's."""
    if records is None:
        return np.zeros((len(batch.stored), 0), np.uint32), np.zeros(len(batch.stored), np.bool_)
    return records.read(batch.stored_pages, batch.stored)


def _packed(rows: TokenIds) -> bytes:
    """Token ids as an array in msgpack. A list of a million pages' would take gigabytes."""
    found = np.empty(rows.size, [("is", "u1"), ("id", ">u4")])
    found["is"], found["id"] = 0xCE, rows.ravel()  # a uint32 of 4 bytes
    return b"\xdd" + rows.size.to_bytes(4, "big") + found.tobytes()


def _group(number: int) -> dict[str, int]:
    """The KV group of a page; 0, the only one of most models, is not said."""
    return {"group_idx": number} if number else {}


def _by_group(groups: Groups) -> Iterator[tuple[Any, dict[str, int]]]:
    for number in np.unique(groups):
        yield groups == number, _group(int(number))


# ---- where it comes from


class Source:
    """The changes of a cache, by name: of one after another, if it is made anew, or if a model has
    another one that clients use.

    A reader keeps a segment from being replaced. So this one lets go of a cache in which no
    client lives, where nothing can change, and takes it up again when one comes, or has come.
    """

    def __init__(self, name: str, group: str | None, keep: int, *, token_ids: bool = True) -> None:
        """Attach to it. `token_ids`: open what it notes of them, if it does.

        Raises:
            As `PageIndex.attach`.
        """
        self._given, self._group, self._token_ids = name, group, token_ids
        self.index = self._attach()
        self.tokens: TokenRecords | None = None
        """The token ids of its pages; None: it has none, or we may not read them."""
        self._open_tokens()
        # A publisher before this one had lower numbers, as it told less than 1,000 a second.
        self.changes = Changes(self.index, kept=keep, first=time.time_ns() // 1_000_000)
        self._uuid = self.index.segment.uuid
        self._attached = True
        self._looked = self._left = time.monotonic()
        self._whole = -WHOLE
        self._problem = ""

    def _attach(self) -> PageIndex:
        name = cache_in_use(self._given)
        return PageIndex.attach(name, readonly=True, group=self._group, timeout=0)

    def _open_tokens(self) -> None:
        """Those of the index, in place of those of the one before."""
        self._close_tokens()
        if not self._token_ids:
            return
        try:
            self.tokens = TokenRecords.of(self.index.segment, self.index.pages, readonly=True)
        except LightcacheError as error:
            fail(f"no token ids are published: {error}")

    def take(self, wire: Wire) -> tuple[ChangeBatch, ...]:
        """What changed since the last call."""
        now = time.monotonic()
        batches: tuple[ChangeBatch, ...] = ()
        look = now - self._looked >= LOOK
        if look:
            self._looked = now
        if look and not self._attached:
            batches += self._again(wire)
        if not self._attached:
            return batches
        whole = now - self._whole >= WHOLE
        try:
            batches += self.changes.scan(whole=whole)
            if whole:
                self._whole = now
            if look and self._idle():
                batches += self.changes.scan(whole=True)  # also what the last one did
                self._let_go()
        except Detached:
            self._let_go()
            batches += self._lost()
        return batches

    def _idle(self) -> bool:
        """No client lives in it."""
        return not any(client.alive for client in self.index.clients())

    def _again(self, wire: Wire) -> tuple[ChangeBatch, ...]:
        """Take it up again, if there is something to be seen."""
        info = read_segment(cache_in_use(self._given))
        if info is None or info.retired:
            return self._lost()
        used = info.clients or info.unused_s < time.monotonic() - self._left  # and has gone again
        if not info.ready or (info.uuid == self._uuid and not used):
            return ()
        try:
            index = self._attach()
        except NotReady:
            return ()
        except LightcacheError as error:
            self._say(str(error))
            return self._lost()
        try:
            wire.block_size_of(index)
        except ConfigError as error:
            index.close()
            self._say(str(error))
            return self._lost()
        self.index, self._attached, self._uuid = index, True, index.segment.uuid
        self._problem, self._whole = "", -WHOLE
        self._open_tokens()
        return self.changes.follow(index)

    def _close_tokens(self) -> None:
        if self.tokens is not None:
            self.tokens.close()
            self.tokens = None

    def _lost(self) -> tuple[ChangeBatch, ...]:
        self._uuid = ""
        self._close_tokens()
        return self.changes.lose()

    def _say(self, problem: str) -> None:
        """Once, until it is another."""
        if problem != self._problem:
            fail(problem)
        self._problem = problem

    def _let_go(self) -> None:
        """Of the index; what was told is kept, and its token ids, which need no client."""
        self._attached, self._left = False, time.monotonic()
        with contextlib.suppress(LightcacheError):
            self.index.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._attached:
            self._let_go()
        self._close_tokens()


# ---- where it goes


class Sockets:
    """The two sockets. Use it in a with statement, from one thread."""

    def __init__(self, endpoint: str, replay: str | None, *, connect: bool = False) -> None:
        """Bind them. `connect`: connect the first to a router's instead.

        Raises:
            ConfigError: no endpoint, or, to bind to, none of this machine's.
            InUse: another socket is bound to it.
        """
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._context.term)
        self.bound: list[str] = []
        self._replay: Any = None
        with contextlib.ExitStack() as failing:
            failing.callback(self._stack.close)
            self._publish = self._socket(zmq.PUB, "--endpoint", endpoint, connect)
            if replay is not None:
                self._replay = self._socket(zmq.ROUTER, "--replay-endpoint", replay)
            failing.pop_all()

    def _socket(self, kind: int, option: str, endpoint: str, connect: bool = False) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        self._stack.callback(socket.close, linger=0)
        socket.set_hwm(100_000)
        socket.ipv6 = "[" in endpoint
        port = re.fullmatch(r"tcp://.*:(\d+)", endpoint)
        if port and int(port[1]) > 65535:  # which would become another one
            raise ConfigError(f"{option}: expected a port up to 65535, found {port[1]}")
        try:
            if connect:
                socket.connect(endpoint)
            else:
                socket.bind(endpoint)
            self.bound.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise InUse(
                    f"{option}: {endpoint} is taken by another socket, perhaps an engine's or "
                    "another `lightcache events`; give another port"
                ) from error
            expected = (
                "a router's, such as tcp://router:5557"
                if connect
                else "one of this machine, such as tcp://*:5557, or --connect"
            )
            raise ConfigError(
                f"{option}: expected an endpoint, {expected}; found {endpoint!r}: {error}"
            ) from error
        return socket

    def publish(self, topic: bytes, sequence: int, payload: bytes) -> None:
        """Send a message to all that listen. Does not wait for any of them."""
        self._publish.send_multipart((topic, sequence.to_bytes(8, "big"), payload))

    def wait(self, seconds: float, signals: Signals) -> tuple[bytes, int] | None:
        """Wait for a request, or as long as this. Returns who asks, and from which number on."""
        if self._replay is None:
            signals.end.wait(seconds)
        elif self._replay.poll(max(1, int(seconds * 1000))):
            who, *_, number = self._replay.recv_multipart()
            if len(number) == 8:
                return who, int.from_bytes(number, "big")
        return None

    def answer(self, who: bytes, messages: Sequence[tuple[bytes, int, bytes]]) -> None:
        """Send what was asked for, and the end."""
        for topic, sequence, payload in messages:
            self._replay.send_multipart((who, b"", topic, sequence.to_bytes(8, "big"), payload))
        self._replay.send_multipart((who, b"", b"", END, b""))

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


class Publisher:
    """Publishes until it is told to end."""

    def __init__(
        self, source: Source, sockets: Sockets, wire: Wire, identities: Sequence[Identity]
    ) -> None:
        """Publishes nothing yet."""
        self._source, self._sockets, self._wire = source, sockets, wire
        self._identities = identities
        self._first = source.changes.since(source.changes.next_sequence - 1)

    def run(self, signals: Signals) -> None:
        """Until a signal comes."""
        due = 0.0
        while not signals.end.is_set():
            now = time.monotonic()
            if now >= due:
                began = time.process_time()
                self._publish()
                due = now + max(INTERVAL, (time.process_time() - began) / SHARE)
            pause = min(INTERVAL, max(0.0, due - time.monotonic()))
            asked = self._sockets.wait(pause, signals)
            if asked is not None:
                who, first = asked
                messages = [
                    each
                    for batch in self._source.changes.since(first)
                    for each in self._messages(batch)
                ]
                self._sockets.answer(who, messages)

    def _publish(self) -> None:
        for batch in (*self._first, *self._source.take(self._wire)):
            for message in self._messages(batch):
                self._sockets.publish(*message)
        self._first = ()

    def _messages(self, batch: ChangeBatch) -> Iterator[tuple[bytes, int, bytes]]:
        made: dict[bool, bytes] = {}
        for each in self._identities:
            if each.is_owner not in made:
                made[each.is_owner] = self._wire.payload(batch, each.is_owner, self._source.tokens)
            yield each.topic, batch.sequence, made[each.is_owner]
