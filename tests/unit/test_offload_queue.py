"""OffloadQueue: offloads complete in the order of their submission, though nothing polls."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from support.device_sides import Device
from support.interrupts import interrupt_call
from support.keys import prompt
from support.layered import SLOTS, LayeredWorld
from support.refusals import refused
from support.scripts import with_support

from lightcache import (
    Abandoned,
    Cache,
    ConfigError,
    Detached,
    LeaseLost,
    Offload,
    OffloadQueue,
    OutOfPages,
    TransferFailed,
    WaitTimeout,
)
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.moves import Move
from lightcache.kernels.pinned import HostPages


class Gate:
    """What a copy is `after`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.opened, self.error = threading.Event(), error

    def synchronize(self) -> None:
        assert self.opened.wait(60)
        if self.error:
            raise self.error


@pytest.fixture
def world(segment_name: str) -> Iterator[LayeredWorld]:
    made = LayeredWorld(segment_name)
    yield made
    made.close()


def submit(queue: OffloadQueue, world: LayeredWorld, number: int, **how: Any) -> None:
    """Offload a prompt of two pages."""
    slots = world.slots(2, number % 4)
    queue.submit(
        lambda: Offload(world.engine, world.cache.reserve(prompt(number, 2)), slots, **how), number
    )


def written(world: LayeredWorld, number: int) -> bool:
    """Whether the prompt's pages are ready, with the bytes of its slots."""
    with world.cache.match(prompt(number, 2)) as hit:
        move = Move(hit.pages.tolist(), world.slots(2, number % 4))
        return len(hit) == 2 and world.there(world.share.layers, [move])


def errors(queue: OffloadQueue) -> list[tuple[object, type]]:
    """Pop what has completed."""
    return [(result.tag, type(result.error)) for result in pop_all(queue)]


def pop_all(queue: OffloadQueue) -> list[Any]:
    return [queue.pop() for _ in range(queue.completed())]


NONE = type(None)


def test_offloads_complete_though_nothing_polls(world: LayeredWorld, wait_until: Any) -> None:
    queue, gate = OffloadQueue(), Gate()
    for number in range(3):
        submit(queue, world, number, after=[gate])
    assert queue.completed() == 0
    assert len(queue) == 3
    assert world.pins() == 6
    gate.opened.set()
    for number in range(3):
        world.cache.wait(prompt(number, 2), timeout=60)  # in shared memory: nobody asks the queue
        assert written(world, number)
    wait_until(lambda: world.pins() == 0, "the pins")
    assert queue.wait(60)
    assert errors(queue) == [(0, NONE), (1, NONE), (2, NONE)]
    assert len(queue) == 0
    assert queue.close()


def test_a_failed_one_takes_its_turn(world: LayeredWorld) -> None:
    """Whatever fails, and however early, the order is that of `submit`."""
    queue, gate, broken = OffloadQueue(), Gate(), Gate(RuntimeError("lost"))
    broken.opened.set()
    lost = world.cache.reserve(prompt(3, 2))
    lost.release()
    submit(queue, world, 0, after=[gate])
    submit(queue, world, 1, after=[gate, broken])
    submit(queue, world, 2, window="2")
    queue.submit(lambda: Offload(world.engine, lost, world.slots(2)), "lost")
    queue.submit(lambda: 1 / 0, "wrong")  # type: ignore[arg-type, return-value]
    queue.submit(lambda: None, "none")  # type: ignore[arg-type, return-value]
    submit(queue, world, 6)
    assert queue.completed() == 0, "the first is held up"
    assert world.cache.wait(prompt(2, 2), timeout=0) == 0
    assert world.pins() == 6, "what was refused is given back at once"
    gate.opened.set()
    assert queue.wait(60)
    assert errors(queue) == [
        (0, NONE),
        (1, TransferFailed),
        (2, ConfigError),
        ("lost", LeaseLost),
        ("wrong", ZeroDivisionError),
        ("none", ConfigError),
        (6, NONE),
    ]
    assert written(world, 0)
    assert world.cache.peek(prompt(1, 2)) == 0
    assert written(world, 6)


def test_an_offload_without_pages(world: LayeredWorld) -> None:
    """All are there already; or none is left."""
    queue = OffloadQueue()
    submit(queue, world, 0)
    assert queue.wait(60)
    submit(queue, world, 0)

    def more_than_there_are() -> Offload:
        with world.cache.reserve(prompt(9, 40)) as new:
            raise OutOfPages(f"{len(new.missing)} pages")

    queue.submit(more_than_there_are, "full")
    assert queue.wait(60)
    assert errors(queue) == [(0, NONE), (0, NONE), ("full", OutOfPages)]


def test_ranks_publish_their_shards(segment_name: str) -> None:
    world = LayeredWorld(segment_name, rank=0, ranks=2)
    share = world.geometry.share(1, 2)
    device = Device(share, SLOTS, 4)
    caches = [world.cache, Cache.attach(segment_name, secret=bytes(16))]
    memory = HostPages(caches[1].pool.array)
    engines = [world.engine, HostEngine(world.geometry, device.planes, memory, share=share)]
    del memory
    new = world.cache.reserve(prompt(1, 2), shards=2)
    ticket = new.ticket([cache.client_id for cache in caches])
    queues = [OffloadQueue(), OffloadQueue()]
    for shard, queue in enumerate(queues):

        def begin(shard: int = shard) -> Offload:
            held: Any = caches[shard].adopt(bytes(ticket), shard=shard)
            return Offload(engines[shard], held, world.slots(2))

        queue.submit(begin)
        assert queue.wait(60)
        assert queue.pop().error is None
    assert ticket.poll().verdict is True
    assert world.cache.peek(prompt(1, 2)) == 2
    ticket.drop()
    new.release()
    engines.pop().close()
    caches.pop().close()
    world.close()


def test_cleared_meanwhile(world: LayeredWorld) -> None:
    queue, gate = OffloadQueue(), Gate()
    submit(queue, world, 0, after=[gate])
    world.cache.clear()
    gate.opened.set()
    assert queue.wait(60)
    assert errors(queue) == [(0, Abandoned)]
    assert world.pins() == 0


# ---- closing and dropping


def test_close_is_bounded(world: LayeredWorld, wait_until: Any) -> None:
    queue, gate = OffloadQueue(), Gate()
    submit(queue, world, 0)
    assert queue.wait(60)
    submit(queue, world, 1, after=[gate])
    submit(queue, world, 2, after=[gate])
    assert not queue.close(0.01)
    assert errors(queue) == [(0, NONE), (1, WaitTimeout), (2, WaitTimeout)]
    for number in (1, 2):
        assert world.cache.wait(prompt(number, 2), timeout=0) == 0, "its keys were abandoned"
    assert world.pins() == 4, "pages under a copy"
    refused(Detached, "closed", submit, queue, world, 3)
    gate.opened.set()
    wait_until(lambda: queue.close(0), "the copies")
    assert world.pins() == 0
    assert world.cache.peek(prompt(1, 2)) == 0
    assert queue.completed() == 0


def test_a_dropped_queue_completes(world: LayeredWorld, wait_until: Any) -> None:
    queue, gate = OffloadQueue(), Gate()
    submit(queue, world, 0, after=[gate])
    reference = weakref.ref(queue)
    del queue
    gc.collect()
    assert reference() is not None, "its thread has it"
    gate.opened.set()
    assert world.cache.wait(prompt(0, 2), timeout=60) == 2
    wait_until(lambda: reference() is None, "the end of the thread")
    assert world.pins() == 0


def test_the_engine_is_closed_first(world: LayeredWorld) -> None:
    queue = OffloadQueue()
    submit(queue, world, 0)
    submit(queue, world, 1)
    world.engine.close()
    submit(queue, world, 2)
    assert queue.wait(60)
    assert errors(queue) == [(0, NONE), (1, NONE), (2, Detached)]
    assert written(world, 0)


def test_threads_come_and_go(world: LayeredWorld, wait_until: Any) -> None:
    """One while copies are in flight, none while nothing is."""

    def running() -> int:
        return sum(thread.name == "lightcache-offloads" for thread in threading.enumerate())

    queue = OffloadQueue()
    wait_until(lambda: running() == 0, "the end of those of other tests")
    for number in range(3):
        gate = Gate()
        submit(queue, world, number, after=[gate])
        submit(queue, world, number + 4, after=[gate])
        assert running() == 1
        gate.opened.set()
        assert queue.wait(60)
        wait_until(lambda: running() == 0, "the end of the thread")
    assert len(pop_all(queue)) == 6


def test_two_threads_submit(world: LayeredWorld) -> None:
    queue = OffloadQueue()

    def run(half: int) -> None:
        for number in range(6):

            def begin(number: int = number) -> Offload:
                new = world.cache.reserve(prompt(100 * half + number, 1))
                return Offload(world.engine, new, world.slots(1, half))

            queue.submit(begin, (half, number))

    threads = [threading.Thread(target=run, args=(half,)) for half in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert queue.wait(60)
    popped = pop_all(queue)
    for half in range(2):
        assert [tag[1] for tag in (r.tag for r in popped) if tag[0] == half] == list(range(6))
    assert all(result.error is None for result in popped)


# ---- interrupts, forks, input


@pytest.mark.slow
def test_interrupts_anywhere(world: LayeredWorld, wait_until: Any) -> None:
    """In `submit`, `completed`, `wait` or `pop`: nothing stays pinned, and the queue works on."""
    at, more, queue = 0, True, OffloadQueue()
    while more:

        def step() -> None:
            submit(queue, world, 1)
            queue.completed()
            queue.wait(60)
            pop_all(queue)

        more = interrupt_call(step, at)
        assert queue.wait(60), at
        pop_all(queue)
        wait_until(lambda: world.engine.poll() == 0, "the copies")
        gc.collect()
        wait_until(lambda: world.pins() == 0, f"the pins, interrupted at {at}")
        world.cache.evict(100)
        at += 1
    assert at > 50


def test_a_forked_child(world: LayeredWorld, script: Any) -> None:
    queue, gate = OffloadQueue(), Gate()
    submit(queue, world, 0, after=[gate])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            calls = (queue.completed, queue.pop, lambda: queue.wait(0))
            for call in (*calls, lambda: submit(queue, world, 1)):
                refused(Detached, "parent", call)
            status = 0 if queue.close() is False else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    gate.opened.set()
    assert queue.wait(60)
    assert written(world, 0)


def test_pop_asks_first(world: LayeredWorld) -> None:
    queue, gate = OffloadQueue(), Gate()
    refused(ConfigError, "completed", queue.pop)
    submit(queue, world, 0, after=[gate])
    refused(ConfigError, "completed", queue.pop)
    assert not queue.wait(0)
    gate.opened.set()
    assert queue.wait(60)
    assert queue.pop().error is None


# ---- deaths

VICTIM = """
import os, signal, sys, threading
import numpy as np
from support.keys import prompt
from support.device_sides import Device
from support.layered import GEOMETRIES, SLOTS
from lightcache import Cache, LayerLoads, Offload, OffloadQueue

name, = sys.argv[1:]
geometry = GEOMETRIES["keys and values"]
cache = Cache.attach(name, secret=bytes(16))
device = Device(geometry.share(), SLOTS, 3)
engine = cache.transfer_engine(geometry, device.planes, threads=2)
gate = threading.Event()
loads = LayerLoads(engine, window=1)
loads.add("a", cache.match(prompt(1, 3)), np.arange(12))
loads.add("b", cache.match(prompt(2, 2)), np.arange(12, 20))
loads.start(after=[gate])
queue = OffloadQueue()
for number in (5, 6):
    new = cache.reserve(prompt(number, 2))
    queue.submit(lambda: Offload(engine, new, np.arange(8), after=[gate]))
print(loads.done(), queue.completed(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_leaves_nothing(world: LayeredWorld, script: Any) -> None:
    world.fill(1, 3)
    world.fill(2, 2)
    done = script(with_support(VICTIM), world.cache.name, status=None)
    assert (done.returncode, done.stdout.split()) == (-9, ["False", "0"]), done.stderr
    assert world.pins() == 9
    world.cache.reap()
    assert world.pins() == 0
    assert world.cache.stats().writing == 0
    assert world.cache.peek(prompt(1, 3)) == 3
    assert world.cache.peek(prompt(5, 2)) == 0
    with world.cache.reserve(prompt(99, 24)) as new:
        assert len(new.new) == 24, "every page can be had"
