"""One storage service, several clients, all processes of their own; any of them is killed."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from multi import pausing
from multi.service_side import PROMPT, prompt
from support.servers import hold
from support.storing import fill, make_cache, nothing_is_held, sound

from lightcache import Cache, NotReady
from lightcache.shm import layout, sweep
from lightcache.storage import StorageSpec, TaskState
from lightcache.storage.disk import DiskStorage
from lightcache.storage.service import StorageClient, board
from lightcache.storage.service.board import ServiceStats, service_stats

pytestmark = [pytest.mark.crash]

TESTS = Path(__file__).parent.parent
LIMIT = 60.0
SLOTS = 256
Wait = Callable[[Callable[[], bool], str], None]


class Side:
    """A process of `service_side.py`."""

    def __init__(self, *arguments: object) -> None:
        program = TESTS / "multi" / "service_side.py"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(program), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS)},
            bufsize=0,
        )

    def says(self) -> str:
        """Its next line; fails when none comes."""
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        assert ready, "it says nothing"
        line = self.process.stdout.readline().decode().strip()
        assert line, f"it ended with {self.process.wait(LIMIT)}"
        return line

    def go_on(self) -> None:
        """It reads a line."""
        assert self.process.stdin
        self.process.stdin.write(b"\n")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Until none of its threads runs any more."""
        hold(self.process.pid)

    def kill(self) -> None:
        """As the kernel does when memory ends."""
        self.process.kill()
        self.process.wait(LIMIT)

    def end(self) -> int:
        """Let it end by itself: its exit status."""
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(LIMIT)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    """Starts processes, and kills what is left of them."""
    made: list[Side] = []

    def start(*arguments: object) -> Side:
        made.append(Side(*arguments))
        return made[-1]

    yield start
    for side in made:
        side.kill()
        for pipe in (side.process.stdin, side.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    """In the end nothing of anybody is left."""
    with make_cache(segment_name) as made:
        yield made
        made.reap()
        nothing_is_held(made)
        sweep(prefix=f"{segment_name}.storage-")
        left = [path.name for path in Path("/dev/shm").iterdir() if ".storage-" in path.name]
        assert [name for name in left if segment_name in name] == []


def serve(sides: Callable[..., Side], cache: Cache, where: Path) -> Side:
    """A service that serves."""
    side = sides("serve", cache.name, where, SLOTS)
    assert side.says() == "serving"
    return side


def figures(service: Side, cache: Cache) -> ServiceStats:
    """Of a service that lives. When it has ended, nobody else may be there, and who has looked at
    its figures last takes them along: then its end is what is wrong, not that there are none."""
    try:
        return service_stats(cache.name)
    except NotReady as error:
        ended = service.process.wait(LIMIT)
        raise AssertionError(f"the service ended with {ended}: {error}") from None


def asking(cache: Cache) -> StorageClient:
    """A client that never takes a service that gets no processor for one that was stopped."""
    return StorageClient(cache, silence=LIMIT)


def spin(seconds: float) -> None:
    """Let others get on, for a time that chance has chosen; nothing depends on it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        os.sched_yield()


def stored_right(cache: Cache, where: Path, seeds: int) -> int:
    """Pages that a disk has of clients' prompts: all of them as they should be."""
    cache.evict(cache.pages)
    with DiskStorage(where, StorageSpec.of(cache), threads=2) as storage:
        found = 0
        for seed in range(seeds):
            for number in range(8):
                keys: Any = prompt(seed, number)
                found += storage.contains(keys, timeout=LIMIT)
                with cache.reserve(keys) as new:
                    pages = [cache.pool[page] for page in new.pages.tolist()]
                    result = storage.read(keys[new.new], pages, timeout=LIMIT)
                    del pages
                    if result.prefix == len(new.new) == PROMPT:
                        new.publish()
                sound(cache, keys)
    return found


@pytest.mark.slow
def test_several_clients_of_one_service(sides: Any, cache: Cache, where: Path) -> None:
    service = serve(sides, cache, where)
    clients = [sides("ask", cache.name, seed) for seed in range(3)]
    for client in clients:
        while client.says() != "20":
            pass
    found = service_stats(cache.name)
    assert found.serving
    assert found.pid == service.process.pid
    assert found.clients == 3
    assert found.tier.stored > 0
    assert found.tier.loaded > 0
    assert (found.malformed, found.halves, found.orphans) == (0, 0, 0)
    for client in clients:
        client.kill()
    assert service.end() == 0
    assert stored_right(cache, where, 3) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_service_is_killed_and_another_comes(
    sides: Any, cache: Cache, where: Path, seed: int
) -> None:
    chance = random.Random(seed)
    clients = [sides("ask", cache.name, number) for number in range(2)]
    for _ in range(3):
        service = serve(sides, cache, where)
        for client in clients:
            for _ in range(chance.randrange(3, 9)):
                client.says()
        spin(chance.random() * 0.01)  # it is somewhere in the middle of what it does
        service.kill()
        assert not service_stats(cache.name).serving
        for client in clients:
            client.says()
            client.says()  # requests go on, without
    service = serve(sides, cache, where)
    while not service_stats(cache.name).tier.stored:  # those before may have ended too early
        for client in clients:
            client.says()
    for client in clients:
        client.kill()
    assert service.end() == 0
    cache.reap()
    assert cache.check().pins == 0
    assert stored_right(cache, where, 2) > 0


@pytest.mark.slow
def test_tasks_end_when_the_service_is_killed(sides: Any, cache: Cache, where: Path) -> None:
    service = serve(sides, cache, where)
    with asking(cache) as client:
        keys: Any = prompt(0, 0)
        fill(cache, keys)
        assert client.write(keys).wait(LIMIT).prefix == PROMPT
        service.stop()
        tasks = [client.prefetch(keys, timeout=600.0) for _ in range(5)]
        service.kill()
        for task in tasks:
            found = task.wait(LIMIT)
            (reason,) = found.reasons
            assert f"is gone (pid {service.process.pid})" in reason
            assert found.failed == found.pages == PROMPT
            assert task.state is TaskState.FAILED
        again = serve(sides, cache, where)
        cache.evict(cache.pages)
        assert client.prefetch(keys).wait(LIMIT).prefix == PROMPT
        assert sound(cache, keys) == PROMPT
        assert again.end() == 0


@pytest.mark.slow
def test_a_stopped_service_holds_nobody_up(sides: Any, cache: Cache, where: Path) -> None:
    service = serve(sides, cache, where)
    client = sides("wait", cache.name, 0)
    while client.says() != "0":  # the service got no processor for so long
        client.go_on()
    service.stop()
    client.go_on()
    assert "has not looked at its messages for 2 s" in client.says()
    assert client.end() == 0
    service.signal(signal.SIGCONT)
    assert service.end() == 0


@pytest.mark.slow
def test_clients_are_killed_in_calls(
    sides: Any, cache: Cache, where: Path, wait_until: Wait
) -> None:
    service = serve(sides, cache, where)
    chance = random.Random(1)
    for seed in range(5):
        client = sides("ask", cache.name, seed)
        for _ in range(chance.randrange(1, 5)):
            client.says()
        spin(chance.random() * 0.005)
        client.kill()
    wait_until(lambda: figures(service, cache).clients == 0, "clients that are gone")
    prefix = f"lightcache.{cache.name}.storage-"
    own = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]
    assert len(own) == 2  # what the service itself needs
    with asking(cache) as client:
        keys: Any = prompt(0, 0)
        fill(cache, keys)
        assert client.write(keys).wait(LIMIT).prefix == PROMPT
    assert service.end() == 0
    assert stored_right(cache, where, 5) > 0


@pytest.mark.slow
def test_a_client_is_killed_between_two_parts(
    sides: Any, cache: Cache, where: Path, wait_until: Wait
) -> None:
    service = serve(sides, cache, where)
    client = sides("half", cache.name)
    assert client.says() == "half"
    wait_until(lambda: figures(service, cache).clients == 1, "its half")
    client.kill()
    wait_until(lambda: figures(service, cache).halves == 1, "the half that is dropped")
    assert figures(service, cache).clients == 0
    assert service.end() == 0


def write_one(cache: Cache) -> None:
    """Have the first prompt stored, and out of the cache."""
    with asking(cache) as client:
        keys: Any = prompt(0, 0)
        fill(cache, keys)
        assert client.write(keys).wait(LIMIT).prefix == PROMPT
        cache.evict(cache.pages)


@pytest.mark.slow
def test_two_services(sides: Any, cache: Cache, where: Path, tmp_path: Path) -> None:
    first = serve(sides, cache, where)
    second = sides("serve", cache.name, where, SLOTS)
    assert second.process.wait(LIMIT) == 1
    first.kill()
    serve(sides, cache, where).end()


@pytest.mark.slow
def test_a_client_that_was_stopped_hears_what_became_of_its_task(
    sides: Any, cache: Cache, where: Path, wait_until: Wait
) -> None:
    service = serve(sides, cache, where)
    write_one(cache)
    client = sides("ready", cache.name, 0)
    assert client.says() == "ready"
    with board.tasks_ring(cache) as ring:
        at = ring.segment.address + layout.LOCK_OFFSET
        lock = layout.LockRecord.from_address(at)
        service.stop()
        while lock.word:  # stopped in a pop, it would keep the client from pushing
            service.signal(signal.SIGCONT)
            service.stop()
        client.go_on()
        # Behind its push: with the lock it would hold up the others.
        wait_until(lambda: len(ring) == 1 and lock.word == 0, "what it asks for")
        client.stop()
    service.signal(signal.SIGCONT)
    keys: Any = prompt(0, 0)
    wait_until(lambda: cache.peek(keys) == PROMPT, "its pages")
    with asking(cache) as other:
        assert other.prefetch(keys).wait(LIMIT).present == PROMPT
    client.signal(signal.SIGCONT)
    assert client.says() == str(PROMPT)
    client.go_on()
    assert client.end() == 0
    assert service.end() == 0


@pytest.mark.slow
def test_of_services_that_come_at_once_one_serves(sides: Any, cache: Cache, where: Path) -> None:
    several = [sides("serve", cache.name, where, SLOTS) for _ in range(3)]
    pipes = {each.process.stdout: each for each in several}
    serving: list[Side] = []
    while pipes:
        ready, _, _ = select.select(list(pipes), [], [], LIMIT)
        assert ready, "they say nothing"
        for pipe in ready:
            side = pipes.pop(pipe)
            if pipe.readline():
                serving.append(side)
            else:
                assert side.process.wait(LIMIT) == 1
    (one,) = serving
    assert figures(one, cache).pid == one.process.pid
    write_one(cache)
    assert one.end() == 0


@pytest.mark.slow
def test_all_of_them_are_killed(
    sides: Any, segment_name: str, where: Path, wait_until: Wait
) -> None:
    with make_cache(segment_name) as cache:
        service = serve(sides, cache, where)
        client = sides("ask", cache.name, 0)
        client.says()
        client.kill()
        service.kill()
        answers = list(Path("/dev/shm").glob(f"*{cache.name}.storage-*-*-*"))
        assert len(answers) == 1
        again = serve(sides, cache, where)
        wait_until(lambda: not answers[0].exists(), "the ring that nobody has")
        assert all(each.alive for each in cache.index.segment.clients())  # the dead were reaped
        report = cache.check()
        assert (report.clean, report.pins) == (True, 0)
        assert again.end() == 0
        assert sweep(prefix=f"{segment_name}.storage-") == []  # and leaves nothing
