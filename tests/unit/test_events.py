"""`lightcache events`: the messages, the sockets, the cache that goes and comes. A router's view is
support/following.py, which has no code of ours."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import zmq
from click.testing import CliRunner
from support.following import Follower
from support.keys import Keys, chain, keys
from support.refusals import refused

from lightcache import Cache, Changes, ConfigError, InUse, PageIndex
from lightcache.runs import Run
from lightcache.shm import Segment
from lightcache.tools import cli, events
from lightcache.tools.events import Identity, Publisher, Sockets, Source, Wire

TOKENS = {"page_tokens": 16}
OWNER = (Identity(b"kv-events", True),)
Wait = Callable[[Callable[[], bool], str], None]


def publish(index: PageIndex, which: Keys, **more: Any) -> None:
    with index.reserve(which, **more) as new:
        new.publish()


def hashes(paths: list[list[int]]) -> set[int]:
    """The first 8 bytes of each key, signed."""
    lows = {pair[0] for path in paths for pair in chain(path)}
    return {int(np.uint64(low).astype(np.int64)) for low in lows}


class End:
    """Signals that never come."""

    def __init__(self) -> None:
        self.end = threading.Event()


class Running:
    """A publisher in a thread of this process."""

    def __init__(self, name: str, identities: tuple[Identity, ...], keep: int, wire: Wire) -> None:
        self._signals = End()
        self._ready = threading.Event()
        self._arguments = name, identities, keep, wire
        self.bound: list[str] = []
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(60)

    def _run(self) -> None:
        name, identities, keep, wire = self._arguments
        try:
            with (
                Source(name, None, keep) as source,
                Sockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as sockets,
            ):
                wire.block_size_of(source.index)
                self.bound = sockets.bound
                self._ready.set()
                Publisher(source, sockets, wire, identities).run(self._signals)  # type: ignore[arg-type]
        except BaseException as error:
            self.problem = error
        finally:
            self._ready.set()

    def stop(self) -> None:
        self._signals.end.set()
        self._thread.join(60)
        assert self.problem is None, self.problem


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans follow one another at once."""
    monkeypatch.setattr(events, "INTERVAL", 0.002)
    monkeypatch.setattr(events, "LOOK", 0.002)
    monkeypatch.setattr(events, "SHARE", 1.0)


@pytest.fixture
def node(segment_name: str, quick: None) -> Iterator[Any]:
    """`publishing(...)` and `following(...)`."""
    with ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.term)

        class Node:
            name = segment_name

            def publishing(
                self, identities: tuple[Identity, ...] = OWNER, keep: int = 1000, **wire: Any
            ) -> Running:
                given = {"medium": "CPU", "as_ints": True, "rank": 0, "block_size": None, **wire}
                running = Running(segment_name, identities, keep, Wire(**given))
                stack.callback(running.stop)
                return running

            @contextmanager
            def following(self, running: Running, topic: str = "") -> Iterator[Follower]:
                follower = Follower(context, *running.bound, topic=topic)
                try:
                    yield follower
                finally:
                    follower.close()

        yield Node()


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=64, config=TOKENS) as made:
        yield made


def until(follower: Follower, blocks: set[Any], wait_until: Wait) -> None:
    def there() -> bool:
        if not follower.take(10):
            follower.ask()  # what was published before its subscription had arrived
        return set(follower.blocks) == blocks

    wait_until(there, f"{len(blocks)} blocks")


def test_a_follower_has_what_the_cache_has(index: PageIndex, node: Any, wait_until: Wait) -> None:
    publish(index, keys(1, 2, 3))
    running = node.publishing()
    with node.following(running) as follower:
        follower.ask()
        until(follower, hashes([[1, 2, 3]]), wait_until)
        publish(index, keys(1, 2, 7))
        until(follower, hashes([[1, 2, 3], [1, 2, 7]]), wait_until)
        first, second, third = chain([1, 2, 7])
        signed = [int(np.uint64(pair[0]).astype(np.int64)) for pair in (first, second, third)]
        assert follower.blocks[signed[2]] == signed[1]
        assert follower.blocks[signed[0]] is None
        index.drop(keys(1, 2, 3), start=2)
        until(follower, hashes([[1, 2, 7]]), wait_until)
        index.clear()
        until(follower, set(), wait_until)
        assert follower.gaps == 0
        stored = [each for each in follower.events if each["type"] == "BlockStored"]
        assert {each["block_size"] for each in stored} == {16}
        assert all(each["token_ids"] == [] for each in stored)
        assert stored[0].keys() >= {"lora_id", "lora_name"}  # vLLM's class wants them


def test_a_late_follower_gets_what_it_missed(index: PageIndex, node: Any, wait_until: Wait) -> None:
    running = node.publishing()
    with node.following(running) as early:
        early.ask()
        for number in range(5):
            publish(index, keys(number))
            until(early, hashes([[n] for n in range(number + 1)]), wait_until)
        with node.following(running) as late:
            late.next = early.next - 3
            late.blocks = dict.fromkeys(hashes([[0], [1]]))
            late.ask()
            assert set(late.blocks) == set(early.blocks)
            assert (late.snapshots, late.clears, late.next) == (0, 0, early.next)


def test_one_that_is_too_late_gets_a_snapshot(
    index: PageIndex, node: Any, wait_until: Wait
) -> None:
    running = node.publishing(keep=2)
    with node.following(running) as early:
        early.ask()
        for number in range(5):
            publish(index, keys(number))
            until(early, hashes([[n] for n in range(number + 1)]), wait_until)
        with node.following(running) as late:
            late.ask()
            assert set(late.blocks) == set(early.blocks)
            assert (late.snapshots, late.clears, late.next) == (1, 1, early.next)
        with node.following(running) as other:  # it followed a publisher before this one
            other.next = early.next + 10_000
            other.ask()
            assert set(other.blocks) == set(early.blocks)


def test_workers_keep_their_own_blocks(index: PageIndex, node: Any, wait_until: Wait) -> None:
    """As a worker it never says that all is gone: that would be of the device's blocks, too."""
    publish(index, keys(1))
    workers = tuple(Identity(topic, False) for topic in (b"kv@gpu0@llama", b"kv@gpu1@llama"))
    running = node.publishing(workers)
    for topic in ("kv@gpu0", "kv@gpu1"):
        with node.following(running, topic) as follower:
            until(follower, hashes([[1]]), wait_until)
            publish(index, keys(2))
            until(follower, hashes([[1], [2]]), wait_until)
            index.drop(keys(2))
            until(follower, hashes([[1]]), wait_until)
            assert follower.clears == 0


def test_a_cache_that_goes_and_comes_again(node: Any, wait_until: Wait) -> None:
    with PageIndex.create(node.name, pages=16, config=TOKENS) as index:
        publish(index, keys(1, 2))
        running = node.publishing()
        with node.following(running) as follower:
            follower.ask()
            until(follower, hashes([[1, 2]]), wait_until)
            Segment.unlink(node.name, force=True)
            until(follower, set(), wait_until)
            with PageIndex.create(node.name, pages=32, config={"page_tokens": 8}) as index:
                publish(index, keys(2, 3))
                until(follower, hashes([[2, 3]]), wait_until)
                assert follower.events[-1]["block_size"] == 8
                assert follower.gaps == 0
                assert follower.clears == 1
            until(follower, set(), wait_until)


def killed(node: Any, script: Any, lifetime: str) -> None:
    """A cache with two pages, whose only client was killed."""
    script(
        f"""
import os, signal, sys
sys.path.insert(0, {sys.path[0]!r})
from lightcache import PageIndex
from support.keys import keys
index = PageIndex.create({node.name!r}, pages=16, config={TOKENS}, lifetime={lifetime!r})
index.reserve(keys(1, 2)).publish()
os.kill(os.getpid(), signal.SIGKILL)
""",
        status=-9,
    )


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether no client lived, each time that the publisher looked."""
    found: list[bool] = []
    idle = Source._idle
    monkeypatch.setattr(Source, "_idle", lambda self: found.append(idle(self)) or found[-1])
    return found


def test_it_holds_no_cache_without_a_client(node: Any, wait_until: Wait, script: Any) -> None:
    """A warm cache, whose clients were killed, may be replaced by one of another shape; until then
    its blocks are told."""
    killed(node, script, "persistent")
    running = node.publishing()
    with node.following(running) as follower:
        follower.ask()
        until(follower, hashes([[1, 2]]), wait_until)

        def replaced() -> bool:
            try:
                other = PageIndex.open(node.name, pages=99, config=TOKENS, replace=True)
            except events.InUse:
                return False
            with other:
                publish(other, keys(5))
                until(follower, hashes([[5]]), wait_until)
            return True

        wait_until(replaced, "the publisher to let go")


def test_it_removes_no_warm_cache(
    node: Any, wait_until: Wait, script: Any, looks: list[bool]
) -> None:
    """The last process to leave an attached one removes it: not this one, whose clients were
    killed."""
    killed(node, script, "attached")
    running = node.publishing()
    with node.following(running) as follower:
        wait_until(lambda: any(looks), "the publisher to let go")
        follower.ask()
        until(follower, hashes([[1, 2]]), wait_until)
        with PageIndex.open(node.name, pages=16, config=TOKENS) as index:
            assert index.peek(keys(1, 2)) == 2
    running.stop()
    Segment.unlink(node.name)  # there is one if the publisher was the last to leave


def test_a_writer_between_two_looks_is_seen(
    segment_name: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOK", 0.0)
    wire = Wire("CPU", True, 0, 4)
    persistent: dict[str, Any] = {"pages": 64, "config": TOKENS, "lifetime": "persistent"}
    with PageIndex.open(segment_name, **persistent) as index:
        publish(index, keys(1))
    with Source(segment_name, None, 1000) as source:
        assert [len(batch.stored) for batch in source.take(wire)] == [1]
        assert source.take(wire) == ()
        with PageIndex.open(segment_name, **persistent) as index:
            publish(index, keys(2, 3))
        assert [len(batch.stored) for batch in source.take(wire)] == [2]
        assert source.take(wire) == ()
    Segment.unlink(segment_name)


def test_of_a_model_the_cache_that_is_used_is_followed(
    segment_name: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOK", 0.0)
    wire = Wire("CPU", True, 0, 4)
    form: dict[str, Any] = {"model": segment_name, "pages": 8, "page_bytes": 64, "page_tokens": 4}
    with Cache.open(**form, fingerprint="old") as old:
        publish(old.index, keys(1))
        with Source(segment_name, None, 1000) as source:
            assert [len(batch.stored) for batch in source.take(wire)] == [1]
            with Cache.open(**form, fingerprint="new") as new:
                publish(new.index, keys(2, 3))
                old.close()
                found: list[Any] = []
                while len(found) < 2:
                    found += source.take(wire)
                assert [(len(b.stored), len(b.removed)) for b in found] == [(0, 1), (2, 0)]
                assert source.index.name == new.name


def test_hashes_as_bytes_and_groups(index: PageIndex) -> None:
    from lightcache.changes import Changes
    from lightcache.runs import Run

    feed = Changes(index)
    publish(index, keys(1))
    publish(index, Run(3, 2).keys(keys(9)), run=Run(3, 2))
    batches = feed.scan()
    wire = Wire("STORAGE", False, 4, None)
    wire.block_size_of(index)
    _, told, rank = msgpack.unpackb(wire.payload(batches[0], True))
    assert rank == 4
    by_group = {each.get("group_idx"): each for each in told}
    low, high = chain([1])[0]
    whole = low.to_bytes(8, "little") + high.to_bytes(8, "little")
    assert by_group[None]["block_hashes"] == [whole]
    assert by_group[3]["medium"] == "STORAGE"
    assert sum(len(each["block_hashes"]) for each in told if each.get("group_idx") == 3) == 2
    index.clear()
    _, told, _ = msgpack.unpackb(wire.payload(feed.scan()[0], True))
    assert {each.get("group_idx"): len(each["block_hashes"]) for each in told} == {None: 1, 3: 2}


# ---- token ids

FORM: dict[str, Any] = {"page_bytes": 64, "page_tokens": 16, "fingerprint": "x"}
FORM |= {"secret": bytes(16), "token_ids": True}
FIRST, SECOND = list(range(48)), [*range(32), *range(1000, 1032)]


def said(cache: Cache, *prompts: list[int]) -> dict[int, tuple[int, ...]]:
    """The tokens of each block of prompts, by its hash."""
    return {
        int(np.uint64(low).astype(np.int64)): tuple(prompt[number * 16 : number * 16 + 16])
        for prompt in prompts
        for number, (low, _) in enumerate(cache.hash_pages(prompt).tolist())
    }


def test_token_ids_are_told_where_they_are_noted(
    segment_name: str, node: Any, wait_until: Wait
) -> None:
    with Cache.create(segment_name, pages=16, **FORM) as cache:
        publish_tokens(cache, FIRST, FIRST[:48])
        running = node.publishing(keep=2)
        with node.following(running) as follower:
            until(follower, set(said(cache, FIRST)), wait_until)
            assert follower.tokens == said(cache, FIRST)
            publish_tokens(cache, SECOND, None)
            until(follower, set(said(cache, FIRST, SECOND)), wait_until)
            none = dict.fromkeys(said(cache, SECOND), ())
            assert follower.tokens == {**none, **said(cache, FIRST)}
            publish_tokens(cache, [*SECOND, *range(16)], [*SECOND, *range(16)])
            whole = said(cache, [*SECOND, *range(16)])
            until(follower, {*said(cache, FIRST), *whole}, wait_until)
            assert follower.tokens == {**whole, **none, **said(cache, FIRST)}
            cache.evict(16)
            publish_tokens(cache, FIRST, FIRST)  # in other pages, perhaps
            until(follower, set(said(cache, FIRST)), wait_until)
            assert follower.tokens == said(cache, FIRST)
            with node.following(running) as late:
                late.next = 1  # not kept any more: it gets the snapshot
                late.ask()
                assert late.tokens == said(cache, FIRST)
        Segment.unlink(segment_name, force=True)
    with Cache.create(segment_name, pages=4, **FORM) as cache, node.following(running) as late:
        publish_tokens(cache, FIRST, FIRST)
        until(late, set(said(cache, FIRST)), wait_until)
        assert late.tokens == said(cache, FIRST)  # of a cache made anew


def test_token_ids_stay_while_no_client_lives(
    segment_name: str, node: Any, wait_until: Wait, script: Any, looks: list[bool]
) -> None:
    script(
        f"""
import os, signal
from lightcache import Cache
cache = Cache.create({segment_name!r}, pages=16, lifetime="persistent", **{FORM})
tokens = {FIRST}
cache.reserve(cache.hash_pages(tokens), tokens=tokens).publish()
os.kill(os.getpid(), signal.SIGKILL)
""",
        status=-9,
    )
    running = node.publishing(keep=2)
    whole = {tuple(FIRST[start : start + 16]) for start in (0, 16, 32)}
    wait_until(lambda: any(looks), "the publisher to let go")
    with node.following(running) as late:
        late.ask()
        assert set(late.tokens.values()) == whole
    with Cache.attach(segment_name, secret=FORM["secret"]) as cache:
        publish_tokens(cache, SECOND, SECOND)  # the client that comes back
        with node.following(running) as other:
            until(other, set(said(cache, FIRST, SECOND)), wait_until)
            assert other.tokens == said(cache, FIRST, SECOND)
        Segment.unlink(segment_name, force=True)
    wait_until(lambda: not open_tokens(segment_name), "the publisher to close those of a lost one")


def open_tokens(name: str) -> list[str]:
    """Open descriptors of this process, of token ids of the cache."""
    links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [path for path in found if name in path and "~tokens" in path]


def publish_tokens(cache: Cache, prompt: list[int], tokens: list[int] | None) -> None:
    with cache.reserve(cache.hash_pages(prompt), tokens=tokens) as new:
        new.publish()


def test_token_ids_can_be_left_out(segment_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Cache.create(segment_name, pages=8, **FORM) as cache:
        with Source(segment_name, None, 10, token_ids=False) as source:
            assert source.tokens is None
        os.truncate(f"/dev/shm{cache.index.segment.dependent_name('tokens')}", 1)
        with Source(segment_name, None, 10) as source:
            assert source.tokens is None
            assert "no token ids are published: " in capsys.readouterr().err


def test_events_as_arrays(segment_name: str) -> None:
    """Decoded by classes whose fields are those of vLLM before events were maps."""

    class Event(msgspec.Struct, array_like=True, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None = None
        medium: str | None = None
        lora_name: str | None = None
        extra_keys: list[Any] | None = None
        group_idx: int | None = None

    class BlockRemoved(Event):
        block_hashes: list[int]
        medium: str | None = None
        group_idx: int | None = None

    class AllBlocksCleared(Event):
        pass

    kinds = BlockStored | BlockRemoved | AllBlocksCleared
    decode = msgspec.msgpack.Decoder(tuple[float, list[kinds], int]).decode  # type: ignore[valid-type]
    with Cache.create(segment_name, pages=16, **FORM) as cache:
        feed, records = Changes(cache.index), cache.token_records
        publish_tokens(cache, FIRST, FIRST)
        publish(cache.index, Run(3, 2).keys(keys(9)), run=Run(3, 2))
        feed.scan()
        cache.clear()
        feed.scan()
        wire = Wire("CPU", True, 2, None, arrays=True)
        wire.block_size_of(cache.index)
        found = [decode(wire.payload(batch, True, records)) for batch in feed.since(0)]
        own = list(said(cache, FIRST))
    (cleared,), stored, removed = (events for _, events, _ in found)
    assert cleared == AllBlocksCleared()
    others = {None: 3, 3: 2}
    assert {each.group_idx: len(each.block_hashes) for each in removed} == others
    whole = [each for each in stored if each.group_idx is None]
    assert whole == [BlockStored(own, None, FIRST, 16, medium="CPU")]
    assert sum(len(each.block_hashes) for each in stored if each.group_idx == 3) == 2


@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (3, 5)])
def test_token_ids_in_msgpack(shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(1).integers(0, 1 << 32, shape, np.uint32)
    assert msgpack.unpackb(events._packed(rows)) == rows.ravel().tolist()


def fails(*arguments: object) -> str:
    done = CliRunner().invoke(cli.group, ["events", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    assert done.output.count("\n") == 1
    return done.output


def test_what_was_said_does_not_leave_the_machine_unasked() -> None:
    (endpoint,) = (option for option in events.events.params if option.name == "endpoint")
    assert endpoint.default == "tcp://127.0.0.1:5557"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "*", "[::1]", "[::]"])
def test_it_listens_at_an_address_of_this_machine(host: str) -> None:
    if ":" in host and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("a machine without IPv6")
    with Sockets(f"tcp://{host}:*", f"tcp://{host}:*") as sockets:
        for endpoint in sockets.bound:
            port = endpoint.rpartition(":")[2]
            near = {"*": "127.0.0.1", "[::]": "[::1]"}.get(host, host).strip("[]")
            socket.create_connection((near, int(port)), 60).close()


def test_it_connects_to_a_router_that_listens(wait_until: Wait) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe(b"")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with Sockets(f"tcp://127.0.0.1:{port}", None, connect=True) as sockets:
            assert sockets.bound == [f"tcp://127.0.0.1:{port}"]
            wait_until(lambda: sent(sockets) and bool(router.poll(10)), "a message")
            assert router.recv_multipart()[::2] == [b"topic", b"payload"]


def sent(sockets: Sockets) -> bool:
    sockets.publish(b"topic", 1, b"payload")
    return True


def test_wrong_input(segment_name: str, index: PageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        taken = f"tcp://127.0.0.1:{port}"
        free = "tcp://127.0.0.1:*"
        told = fails(segment_name, "--endpoint", free, "--replay-endpoint", taken)
        assert "--replay-endpoint" in told
        assert "is taken" in told
        for endpoint in (taken, f"tcp://*:{port}"):
            refused(InUse, "--endpoint: .* is taken", Sockets, endpoint, None)
    refused(ConfigError, "65535", Sockets, "tcp://*:99999", None)
    for wrong in ("nonsense", "tcp://*:http", "tcp://192.0.2.1:5557"):  # not of this machine
        told = fails(segment_name, "--endpoint", wrong)
        assert "expected an endpoint, one of this machine" in told
        assert "--connect" in told
    told = fails(segment_name, "--connect", "--endpoint", "tcp://*:5557")
    assert "expected an endpoint, a router's" in told
    assert "no cache" in fails(segment_name + "-other")
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert "pip install 'lightcache[events]'" in fails(segment_name)


def test_a_cache_that_does_not_say_its_block_size(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8) as index:
        assert "--block-size" in fails(segment_name)
        refused(ConfigError, "--block-size", Wire("CPU", True, 0, None).block_size_of, index)
        Wire("CPU", True, 0, 32).block_size_of(index)
