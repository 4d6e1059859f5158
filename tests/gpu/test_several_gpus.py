"""One pool and engines on two GPUs, in one process and in two; whichever device is current."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu.place import DEADLINE, place, places
from gpu.ranks import Model, Worker, create, slots_of, together, wrong_bytes
from support.keys import prompt

from lightcache import Cache, ClientId, Load, Offload

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(places() < 2, reason="fewer than two GPUs"),
]
STAND_IN = True
BOTH = [0, 1]


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with create(segment_name) as made:
        yield made
        report = made.check()
        assert report.clean, report.message
        assert report.pins == 0


@pytest.fixture
def wheres() -> Iterator[list[Any]]:
    made = [place(number) for number in BOTH]
    made[0].make_current()
    yield made
    for each in made:
        each.close()
    made[0].make_current()


def both(cache: Cache, wheres: list[Any], mode: str) -> list[Model]:
    """A model on each; the pool is pinned once, for both."""
    first = Model(wheres[0], cache, mode=mode)
    first.memory.wait(timeout=DEADLINE)
    return [first, Model(wheres[1], cache, mode=mode, memory=first.memory)]


@pytest.mark.parametrize("mode", ["staged", "direct", "auto"])
def test_from_one_to_the_other(cache: Cache, wheres: list[Any], mode: str) -> None:
    """Whichever is current; and it still is afterwards."""
    models = both(cache, wheres, mode)
    for model in models:
        model.warm()
    for source in BOTH:
        for current in BOTH:
            name = 1 + 2 * source + current
            keys, slots, there = prompt(name, 3), slots_of(3, name), slots_of(3, 10 + name)
            writer, reader = models[source], models[1 - source]
            writer.forget()
            reader.forget()
            writer.compute(name, slots)
            for where in wheres:
                where.synchronize()
            wheres[current].make_current()
            Offload(writer.engine, cache.reserve(keys), slots).wait(DEADLINE)
            assert wheres[current].current() == wheres[current].name, "offload changed it"
            with cache.match(keys) as lease:
                assert wrong_bytes(cache, name, lease.pages.tolist()) == 0, (source, current)
            Load(reader.engine, cache.match(keys), there).wait(DEADLINE)
            assert wheres[current].current() == wheres[current].name, "load changed it"
            assert reader.wrong(name, there) == 0, (source, current)
            assert writer.wrong(name, slots) == 0, (source, current)
    for model in models:
        model.close()


def test_first_use_while_the_other_is_current(cache: Cache, wheres: list[Any]) -> None:
    """Tables, streams, rings, kernels and index buffers as well belong to the planes' device."""
    models = both(cache, wheres, "staged")
    slots = slots_of(2, 1)
    models[1].compute(1, slots)
    wheres[1].synchronize()
    Offload(models[1].engine, cache.reserve(prompt(1, 2)), slots).wait(DEADLINE)
    wheres[1].make_current()
    models[0].forget()
    wheres[0].synchronize()
    Load(models[0].engine, cache.match(prompt(1, 2)), slots).wait(DEADLINE)
    assert models[0].wrong(1, slots) == 0
    for model in models:
        model.close()


def test_both_at_once(cache: Cache, wheres: list[Any]) -> None:
    """A thread for each, whose current device is the other one."""
    models = both(cache, wheres, "staged")
    for model in models:
        model.warm()
    wrong: dict[int, Any] = {}

    def work(number: int) -> None:
        model, keys, slots = models[number], prompt(1 + number, 3), slots_of(3, number)
        model.compute(1 + number, slots)
        wheres[number].synchronize()
        wheres[1 - number].make_current()
        Offload(model.engine, cache.reserve(keys), slots).wait(DEADLINE)
        for _ in range(10):
            model.forget()
            wheres[number].synchronize()
            Load(model.engine, cache.match(keys), slots).wait(DEADLINE)
        wrong[number] = model.wrong(1 + number, slots)

    threads = [threading.Thread(target=work, args=(number,)) for number in BOTH]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    assert wrong == {0: 0, 1: 0}, "what threads found; one that is missing ended with an error"
    for model in models:
        model.close()


def test_two_processes(cache: Cache, tmp_path: Path) -> None:
    """A rank on each writes its shard; then each reads all of it."""
    workers = [Worker(tmp_path, number) for number in BOTH]
    try:
        order = {"name": cache.name, "ranks": 2, "mode": "staged", "writing": True}
        orders = [{**order, "rank": at, "number": at} for at in BOTH]
        clients = [ClientId(*told) for told in together(workers, "join", orders)]
        keys, slots = prompt(1, 4), [slots_of(4, at) for at in BOTH]
        with cache.reserve(keys, shards=2) as new, new.ticket(clients) as ticket:
            data = {"ticket": bytes(ticket).hex(), "prompt": 1}
            adopting = [{**data, "shard": at, "slots": slots[at]} for at in BOTH]
            pages = together(workers, "adopt", adopting)
            where = new.new.tolist()
            together(workers, "offload", [{"slots": own, "where": where} for own in slots])
            assert ticket.poll().verdict is True
        assert wrong_bytes(cache, 1, pages[0]) == 0
        together(workers, "leave", [{}] * 2)
        orders = [{**order, "ranks": 1, "rank": 0, "writing": False, "number": at} for at in BOTH]
        together(workers, "join", orders)
        loading = [{"prompt": 1, "pages": 4, "slots": slots_of(4, 20 + at)} for at in BOTH]
        assert together(workers, "load", loading) == [[4, 0]] * 2, "(pages, wrong values)"
        together(workers, "leave", [{}] * 2)
    finally:
        for worker in workers:
            worker.kill()
