"""The connector for LightLLM: the calls of its three callers, replayed; its processes, killed; the
import hook, in processes of a stand-in.

`THEIRS` is what LightLLM's own class answered, at commit 87881ae, to the same calls
(support/lightllm_calls.py). It cannot be installed from a registry; where it can be imported, its
class is asked as well.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support import lightllm_stand_in
from support.lightllm_calls import SCENES, Manager, Worker, hashes
from support.scripts import with_support
from support.serving import serving

from lightcache import Cache
from lightcache.connectors import lightllm, lightllm_client
from lightcache.connectors.engine_options import EngineOptions
from lightcache.connectors.lightllm_client import MOST, NONE, Client, Service
from lightcache.errors import (
    ConfigError,
    LeaseLost,
    LockTimeout,
    NotInstalled,
    NotReady,
    StorageError,
)
from lightcache.shm import Segment, SharedRing
from lightcache.shm.names import counters_name
from lightcache.storage.tier import StorageTier
from lightcache.tools import cli

PAGES = 64
THEIRS: dict[str, list[Any]] = {
    "hit_and_miss": [[], 20, 0, 20, [], True, True, True, 25, 20, True, []],
    "shared_pages": [True, True, 52, 0, True],
    "several_at_once": [6, 0, True, 64, 0, 0],
    "no_room": [64, True, 0, 64, 0, 4, 4],
    "eviction": [10, 10, 10, 10, 10, 0],
}
SERVICE = """
from lightcache.connectors.engine_options import EngineOptions
from lightcache.connectors.lightllm_client import Client, Service
from support.lightllm_calls import Manager, Worker, hashes
import os, signal, sys
name, home = sys.argv[1:]
options = EngineOptions(name=name, secret_file=home + "/secret")
shape = 64, 16, (8,), "uint8", 4096
service = Service(name + "-service", "m", "fp", *shape, options)
"""


def service_of(name: str, home: Path, how: dict[str, Any]) -> Service:
    """Of these fields, or options."""
    own = {each: how.pop(each) for each in ("name", "shared") if each in how}
    given = {"name": f"{name}-service", **own}
    options = EngineOptions(**{"name": name, "secret_file": f"{home}/secret", **how})
    return Service(
        model="m", fingerprint="fp", pages=PAGES, page_tokens=16, shape=(8,), dtype="uint8",
        page_bytes=4096, options=options, **given,
    )  # fmt: skip


@pytest.fixture
def start(segment_name: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`start(kind)`: a client. At the end the cache is clean, and goes."""
    made: list[Client] = []

    def client(kind: str, **how: Any) -> Client:
        service = service_of(segment_name, tmp_path, how)
        made.append(Client(service, only_create_meta_data=True, init_shm_data=kind == "manager"))
        return made[-1]

    yield client
    for each in reversed(made):
        each.close()
    with Cache.attach(segment_name) as cache:
        report = cache.check()
        assert report.clean, report.message
        assert (report.pins, cache.stats().writing) == (0, 0)
        counters = counters_name(segment_name, cache.index.segment.uuid)
    Segment.unlink(segment_name)
    Segment.unlink(counters)  # there, if a process that counted was killed


@pytest.mark.parametrize("scene", SCENES)
def test_as_theirs(scene: str, start: Callable[..., Any]) -> None:
    kinds = ("manager", "worker", "router")
    manager, worker, router = (start(kind, eviction="lru") for kind in kinds)
    manager.collect()  # finds the others
    answers = SCENES[scene](Manager(manager), Worker(worker), Worker(router), PAGES)
    assert answers == THEIRS[scene]
    assert manager.collect()[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_side_by_side(scene: str, segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where LightLLM can be imported: its class gives the recorded answers."""
    module = "lightllm.server.multi_level_kv_cache.cpu_cache_client"
    arguments = {"enable_cpu_cache": True, "run_mode": "normal", "model_dir": "x"}
    monkeypatch.setenv("LIGHTLLM_START_ARGS", json.dumps(arguments))
    theirs = pytest.importorskip(module, exc_type=ImportError)
    meta = SimpleNamespace(page_num=PAGES)
    monkeypatch.setattr(theirs, "calcu_cpu_cache_meta", lambda: meta)
    monkeypatch.setattr(theirs, "get_unique_server_name", lambda: segment_name)
    clients = [theirs.CpuKvCacheClient(True, first) for first in (True, False, False)]
    parts = [kind(one) for kind, one in zip((Manager, Worker, Worker), clients, strict=True)]
    assert SCENES[scene](*parts, PAGES) == THEIRS[scene]


def test_two_write_one_page(start: Callable[..., Any]) -> None:
    """Here the answers differ: the page that one request is writing, another does not get. Theirs
    gives it to both, and both write it."""
    manager, worker, other = start("manager"), Worker(start("worker")), Worker(start("worker"))
    prompt = hashes("prompt", 6)
    first, _ = worker.allocate(prompt)
    for writer, done in ((worker, False), (other, True)):
        second, ready = writer.allocate(hashes("rest", 2, prompt))
        assert second[:6] == [-1] * 6
        assert ready == [False] * 6 + [done] * 2
        writer.publish(second)
    worker.publish(first)
    assert manager.query_pages(hashes("rest", 2, prompt))[:6] == first


def test_given_back_too_often(start: Callable[..., Any]) -> None:
    """What was not lent is ignored: it takes no other request's pin."""
    manager, worker = start("manager"), Worker(start("worker"))
    manager.collect()
    prompt = hashes("prompt", 4)
    pages, _ = worker.finish(prompt)
    assert manager.query_pages(prompt) == manager.query_pages(prompt) == pages
    worker.loaded(pages)
    worker.loaded([*pages, -1, 63])
    worker.loaded(pages)
    assert manager.collect() == (0, 5)


def test_a_message_that_comes_twice_counts_once(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, giver = start("manager"), start("worker")
    manager.collect()
    prompt = hashes("prompt", 4)
    pages, _ = Worker(giver).finish(prompt)
    manager.query_pages(prompt)
    manager.query_pages(prompt)
    monkeypatch.setattr(giver, "_numbers", iter([0, 0]))
    giver.deref_pages(pages)
    giver.deref_pages(pages)
    assert manager.collect() == (4, 0)


def test_many_pages_in_one_call(start: Callable[..., Any]) -> None:
    """More than a message has room for, from several requests."""
    manager, worker = start("manager"), Worker(start("worker"))
    manager.collect()
    prompt = hashes("prompt", 60)
    pages, _ = worker.finish(prompt)
    times = MOST // 60 + 2
    for _ in range(times):
        manager.query_pages(prompt)
    worker.loaded(pages * times)
    assert manager.collect() == (0, 0)


def test_one_lookup_for_a_prompt(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, worker = start("manager"), Worker(start("worker"))
    prompt = hashes("prompt", 50)
    pages, _ = worker.finish(prompt)
    calls = itertools.count()
    match = manager.cache.match
    monkeypatch.setattr(manager.cache, "match", lambda *a, **k: (next(calls), match(*a, **k))[1])
    assert manager.query_pages(prompt) == pages
    assert next(calls) == 1
    assert manager.query_one_page(prompt[0]) == (pages[0], True)
    assert manager.query_one_page(7) == (None, False)
    manager.deref_pages([*pages, pages[0]])


def test_recycled(start: Callable[..., Any]) -> None:
    manager, worker = start("manager"), start("worker")
    prompt = hashes("prompt", 4)
    worker.recycle_pages(worker.allocate_pages(prompt)[0])
    assert manager.query_pages(prompt) == []
    assert sum(worker.allocate_pages(prompt)[1]) == 0


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, False),
        ({"admission": True}, True),
        ({"admission": True, "storage": ("memory:",)}, False),
    ],
)
def test_what_is_not_worth_saving_is_refused_if_it_is_asked_for(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    asked: bool,
) -> None:
    worker, told = start("worker", eviction="hz", **options), []
    assert worker.cache.index.eviction == "hz"
    reserve = Cache.reserve

    def noted(cache: Cache, *arguments: Any, **how: Any) -> Any:
        told.append(how["admission"])
        return reserve(cache, *arguments, **how)

    monkeypatch.setattr(Cache, "reserve", noted)
    worker.recycle_pages(worker.allocate_pages(hashes("prompt", 4))[0])
    assert told == [asked]


def test_a_holder_of_the_lock_stops_no_model(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reserves on the thread that runs the model."""
    manager, worker, other = start("manager"), start("worker"), start("worker")
    prompt, waits = hashes("prompt", 4), []
    reserve = Cache.reserve

    def noted(cache: Cache, *arguments: Any, **how: Any) -> Any:
        waits.append(how.get("timeout"))
        return reserve(cache, *arguments, **(how | {"timeout": 0.01}))

    monkeypatch.setattr(Cache, "reserve", noted)
    assert other.cache.index.core.locked("lci_hold", what="test") == 0
    assert worker.allocate_pages(prompt) == ([-1] * 4, [False] * 4)
    worker.update_pages_status_to_ready([-1] * 4)
    other.cache.index.core.quick.lci_let_go(other.cache.index.core.handle)
    Worker(worker).finish(prompt)
    assert len(manager.query_pages(prompt)) == 4
    worker.deref_pages(manager.query_pages(prompt) * 2)
    assert waits == [lightllm_client.LOCK] * 2


def test_errors_are_misses(start: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """An operator disables the cache; then again; a list that was never allocated."""
    manager, worker = start("manager"), start("worker")
    prompt = hashes("prompt", 4)
    Worker(worker).finish(prompt)
    assert CliRunner().invoke(cli.group, ["disable", worker.cache.name]).exit_code == 0
    for _ in range(2):
        assert manager.query_pages(prompt) == []
        assert worker.allocate_pages(prompt) == ([-1] * 4, [False] * 4)
        worker.update_pages_status_to_ready([-1] * 4)  # of which nothing is said
        with worker.holding([(prompt, [0, 1, 2, 3])]):  # the manager lives, so its pins hold
            pass
    worker.recycle_pages([1, 2])
    worker.update_pages_status_to_ready([1, 2])
    assert CliRunner().invoke(cli.group, ["enable", worker.cache.name]).exit_code == 0
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "look up", "reserve", "abandon"
    ]  # fmt: skip


def test_lists_without_new_pages(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal lists of two prompts: of each, what is ready goes to the storage."""
    worker = start("worker")
    stored: list[list[int]] = []
    monkeypatch.setattr(worker, "_store", lambda keys: stored.append(keys.tolist()))
    prompts = hashes("one", 2), hashes("two", 2)
    held = [worker.allocate_pages(prompt)[0] for prompt in prompts]
    lists = [worker.allocate_pages(prompt)[0] for prompt in prompts]
    assert lists == [[NONE, NONE]] * 2
    keys = [worker.cache.engine_keys().encode(prompt).tolist() for prompt in prompts]
    assert stored == keys
    for pages in reversed(held):
        worker.update_pages_status_to_ready(pages)
    assert stored[2:] == keys[::-1]
    for pages in lists:
        worker.update_pages_status_to_ready(pages)
    assert len(stored) == 4
    assert not worker._writing


# ---- Giving back.


def lent(manager: Any, worker: Any, name: str = "prompt") -> list[int]:
    """Pages that the manager's process has pinned for the worker."""
    manager.collect()
    pages, _ = Worker(worker).finish(hashes(name, 4))
    assert manager.query_pages(hashes(name, 4)) == pages
    return pages


@pytest.mark.parametrize("then", ["tick", "close"])
def test_a_ring_that_was_full(
    then: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What did not fit is given back without another call of the engine."""
    manager, worker = start("manager"), start("worker")
    pages = lent(manager, worker)
    with monkeypatch.context() as full:
        full.setattr(SharedRing, "push_many", lambda self, messages: 0)
        worker.deref_pages(pages)
        assert manager.collect() == (4, 0)
    getattr(worker, then)()
    assert manager.collect() == (0, 0)


def test_pages_that_cannot_be_unpinned_stay_noted(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, worker = start("manager"), start("worker")
    first, second = lent(manager, worker, "one"), lent(manager, worker, "two")
    unpin = manager.cache.index.unpin

    def refuses(pages: Any) -> None:
        if first[0] in pages:
            raise LeaseLost("refused")
        unpin(pages)

    with monkeypatch.context() as damaged:
        damaged.setattr(manager.cache.index, "unpin", refuses)
        worker.deref_pages(first)
        worker.deref_pages(second)
        assert manager.collect() == (4, 0)
    assert manager.cache.check().pins == 4  # they go with the manager


def test_a_ring_whose_lock_is_held_holds_no_other_up(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, stopped, other = start("manager"), start("worker"), start("worker")
    one, two = lent(manager, stopped, "one"), lent(manager, other, "two")
    stopped.deref_pages(one)
    other.deref_pages(two)

    def held(limit: int) -> Any:
        raise LockTimeout("held")

    with monkeypatch.context() as waits:
        waits.setattr(next(iter(manager._ledger._rings.values())), "pop_many", held)
        assert manager.collect() == (4, 0)
    assert manager.collect() == (0, 0)


def test_the_tick_survives(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = start("manager")
    calls = itertools.count()

    def fails() -> None:
        next(calls)
        raise RuntimeError("unexpected")

    monkeypatch.setattr(manager, "tick", fails)
    waits = iter([False, False, True])
    monkeypatch.setattr(
        manager, "_ended", SimpleNamespace(wait=lambda seconds: next(waits), set=manager._ended.set)
    )
    manager._tick()
    assert next(calls) >= 2
    assert "give back: unexpected" in caplog.text


# ---- Weights that change.


def test_changed_weights_end_the_use(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In all processes of the service, and in no other service. What was reserved before is of the
    weights before."""
    manager, master, rank = start("manager"), start("worker"), start("worker")
    other = start("manager", name="another-service")
    prompt, begun = hashes("prompt", 4), hashes("begun", 4)
    pages = lent(manager, master)
    reserved, _ = master.allocate_pages(begun)
    rank.end_use()
    for _ in range(2):
        assert manager.query_pages(prompt) == []
        after, ready = master.allocate_pages(hashes("after", 4))
        assert (after, sum(ready)) == ([NONE] * 4, 0)
        master.update_pages_status_to_ready(after)
    master.update_pages_status_to_ready(reserved)
    master.deref_pages(pages)
    assert manager.collect() == (0, 0)
    assert other.query_pages(prompt) == pages
    assert other.query_pages(begun) == reserved
    assert other.query_pages(hashes("after", 4)) == []
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "LightLLM: its weights have changed"
    ]


@pytest.mark.parametrize("call", lightllm.CHANGING)
def test_updates_are_heard(call: str) -> None:
    """The use ends before the weights change; an update that cannot say so does not happen."""
    told: list[str] = []

    class RlBackendOps:
        def __init__(self, **backend: Any) -> None:
            self.backend = SimpleNamespace(**backend)

        def update(self, request: str) -> str:
            told.append(f"{call} {request}")
            return "done"

    module: Any = SimpleNamespace(RlBackendOps=RlBackendOps)
    for name in lightllm.CHANGING:
        setattr(RlBackendOps, name, RlBackendOps.update)
    lightllm.end_at_updates(module)
    client = SimpleNamespace(end_use=lambda: told.append("end"))
    arguments = SimpleNamespace(enable_cpu_cache=True)
    one = {"args": arguments, "multi_level_cache_module": SimpleNamespace(cpu_cache_client=client)}
    assert getattr(RlBackendOps(**one), call)("new") == "done"
    assert told == ["end", f"{call} new"]
    with pytest.raises(AttributeError):
        getattr(RlBackendOps(args=arguments), call)("new")
    arguments.enable_cpu_cache = False
    assert getattr(RlBackendOps(args=arguments), call)("other") == "done"
    assert told[2:] == [f"{call} other"]


# ---- Storage.


def test_a_disk_of_ours(start: Callable[..., Any], tmp_path: Path) -> None:
    """What memory has lost is found again."""
    disk = {"storage": (f"disk:{tmp_path}/disk?capacity=4MiB",)}
    manager, worker = start("manager", **disk), start("worker", **disk)
    manager.collect()
    prompt = hashes("prompt", 10)
    worker._tier(60.0)
    Worker(worker).finish(prompt)
    worker._storage.close(60.0)  # writes what is queued
    worker.cache.index.evict(PAGES)
    assert worker.cache.peek(worker.cache.engine_keys().encode(prompt)) == 0
    pages = manager.query_pages(prompt)
    assert len(pages) == 10
    worker.deref_pages(pages)
    assert manager.collect() == (0, 0)


def test_the_storage_service(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk of ours, by the service of the cache."""
    monkeypatch.setattr(lightllm_client, "READ_LIMIT", 60.0)  # other work may hold it up
    how = {"storage": ("service:",)}
    manager, worker = start("manager", **how), start("worker", **how)
    manager.collect()
    prompt = hashes("prompt", 10)
    worker._tier(60.0)
    with serving(worker.cache.name):
        Worker(worker).finish(prompt)
        worker._storage.close(60.0)  # waits for the writes
        worker.cache.index.evict(PAGES)
        pages = manager.query_pages(prompt)
        assert len(pages) == 10
        worker.deref_pages(pages)
        assert manager.collect() == (0, 0)


def test_a_storage_that_does_not_open(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no call up, and memory is found without it."""
    opens = threading.Event()

    def hangs(*given: Any, **how: Any) -> Any:
        assert opens.wait(60)
        raise StorageError("no answer")

    monkeypatch.setattr(StorageTier, "open", hangs)
    monkeypatch.setattr(lightllm_client, "OPEN", 0.0)
    how = {"storage": ("disk:/none?capacity=4MiB",)}
    manager, worker = start("manager", **how), start("worker", **how)
    try:
        pages = lent(manager, worker)
        assert manager.query_pages([*hashes("prompt", 4), 7]) == pages
        worker.deref_pages(pages * 2)
    finally:
        opens.set()


def test_a_storage_that_fails(
    start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What memory has is found all the same."""
    how = {"storage": (f"disk:{tmp_path}/disk?capacity=4MiB",)}
    manager, worker = start("manager", **how), start("worker", **how)
    for each in (manager, worker):
        each._tier(60.0)
        each._storage.current.close()
    pages = lent(manager, worker)
    assert manager.query_pages([*hashes("prompt", 4), 7]) == pages
    worker.deref_pages(pages * 2)
    assert manager.collect() == (0, 0)
    said = {record.getMessage().split(": ")[1] for record in caplog.records}
    assert {"write to the storage", "read from the storage"} <= said


# ---- Kills.

DIES = with_support(
    SERVICE
    + """
client = Client(service, True, MANAGES)
DEED
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.fixture
def dies(segment_name: str, tmp_path: Path) -> Callable[..., None]:
    """`dies(deed)`: a process of the service does this, and dies."""

    def run(deed: str, manages: bool = False) -> None:
        source = DIES.replace("MANAGES", str(manages)).replace("DEED", deed)
        command = [sys.executable, "-c", source, segment_name, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, "ready\n"), done.stderr

    return run


def test_a_rank_dies_while_it_writes(start: Callable[..., Any], dies: Callable[..., None]) -> None:
    """Its pages are free again, and another writes them."""
    manager, worker = start("manager"), Worker(start("worker"))
    dies("client.allocate_pages(hashes('prompt', 40))")
    manager.collect()  # finds its ring, and removes it
    manager.cache.reap()
    prompt = hashes("prompt", 40)
    assert Manager(manager).match(prompt) == []
    pages, ready = worker.finish(prompt)
    assert (len(set(pages)), sum(ready)) == (40, 0)


def test_a_rank_dies_before_it_gives_back(
    start: Callable[..., Any], dies: Callable[..., None]
) -> None:
    """What it had given back counts; the rest stays pinned until the manager ends, as LightLLM then
    ends the service."""
    manager, worker = start("manager"), Worker(start("worker"))
    prompt = hashes("prompt", 10)
    pages, _ = worker.finish(prompt)
    assert manager.query_pages(prompt) == pages
    dies(f"Worker(client).loaded({pages[:4]})")
    assert manager.collect() == manager.collect() == (6, 0)


def test_the_manager_dies(start: Callable[..., Any], dies: Callable[..., None]) -> None:
    """Its pins go. A rank that copies holds its own; one that finds other pages than it was told
    says so instead of loading them."""
    worker = start("worker")
    prompt = hashes("prompt", 10)
    pages, _ = Worker(worker).finish(prompt)
    dies(f"assert client.query_pages(hashes('prompt', 10)) == {pages}", manages=True)
    with worker.holding([(prompt, pages), (prompt[:3], pages[:3]), ([], [])]):
        worker.cache.reap()
        assert worker.cache.check().pins == 13
        crowd, _ = Worker(worker).finish(hashes("crowd", PAGES))
        assert not set(crowd) & set(pages)
    Worker(worker).finish(hashes("another crowd", PAGES))  # takes them
    with pytest.raises(LeaseLost, match="the manager's process has died, and 10 pages"):
        with worker.holding([(prompt, pages)]):
            pass


def test_two_services_share(start: Callable[..., Any]) -> None:
    """One finds what the other has computed; each gives back to its own manager."""
    first = start("manager"), Worker(start("worker"))
    second = (
        start("manager", name="another-service"),
        Worker(start("worker", name="another-service")),
    )
    prompt = hashes("prompt", 10)
    pages, _ = first[1].finish(prompt)
    for manager, _ in (first, second):
        manager.collect()
        assert manager.query_pages(prompt) == pages
    second[1].loaded(pages)
    assert first[0].collect() == (10, 0)
    assert second[0].collect() == (0, 0)
    first[1].loaded(pages)


# ---- The start.


def run_stand_in(name: str, home: Path, *arguments: str) -> str:
    lightllm_stand_in.make(home)
    (home / "model").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "lightcache.connectors.lightllm", *arguments]
    done = subprocess.run(
        [*command, "--model_dir", str(home / "model")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(home), "HOME": str(home), "STAND_IN_SERVICE": name},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_hook_in_spawned_processes(segment_name: str, tmp_path: Path) -> None:
    """Manager, router, and a rank that the router starts: all have our client; a second service
    finds what the first has written."""
    pytest.importorskip("torch")
    options = json.dumps({"name": segment_name})
    outputs = [
        run_stand_in(f"{segment_name}-{number}", tmp_path, "--lightcache", options)
        for number in (1, 2)
    ]
    assert outputs[0].splitlines() == [
        "request 1: found 0, wrote 8",
        "request 2: found 8, wrote 0",
        "pins, ignored: (0, 0)",
    ]
    assert outputs[1].splitlines()[0] == "request 1: found 8, wrote 0"
    Segment.unlink(segment_name)


@pytest.mark.slow
def test_images_are_not_shared(segment_name: str, tmp_path: Path) -> None:
    """Each service counts image tokens from the same number: nothing is found of another, and
    nothing stays. A storage would find it."""
    pytest.importorskip("torch")
    for number in (1, 2):
        lines = run_stand_in(f"{segment_name}-{number}", tmp_path, "--multimodal").splitlines()
        assert lines[0] == "request 1: found 0, wrote 8"
    disk = json.dumps({"storage": f"disk:{tmp_path}/disk?capacity=4MiB"})
    with pytest.raises(AssertionError, match="ConfigError: --lightcache: expected no storage for"):
        run_stand_in(f"{segment_name}-3", tmp_path, f"--lightcache={disk}", "--multimodal")
    assert not (tmp_path / "disk").exists()


def test_a_cache_of_its_own(segment_name: str, tmp_path: Path) -> None:
    """It has the options that a shared one has, and ends with the service."""
    how = {"shared": False, "pool_path": str(tmp_path)}
    with pytest.raises(ConfigError, match="neither tmpfs nor hugetlbfs"):
        Client(service_of(segment_name, tmp_path, how), True, True)
    client = Client(service_of(segment_name, tmp_path, {"shared": False}), True, True)
    name = client.cache.name
    assert name == f"lightllm-{segment_name}-service"
    client.close()
    with pytest.raises(NotReady):
        Cache.attach(name, timeout=0)


def test_options() -> None:
    read = lightllm.Options.read
    assert read('{"storage": "memory:"}').storage == ("memory:",)
    assert read('{"storage": ["memory:", "disk:/x"]}').storage[1] == "disk:/x"
    for wrong in ("", "[]", '{"size": 1}', '{"weights": "v"}', '{"on_reset": "keep"}', "{"):
        with pytest.raises(ConfigError, match="--lightcache: expected"):
            read(wrong)
    for name in ("storage", "name", "secret_file", "pool_path", "numa", "idle_limit"):
        for value in ({}, "none of these") if name == "numa" else (True, {}):
            with pytest.raises(ConfigError, match=f"^{name}: expected"):
                read(json.dumps({name: value}))
    for value in ("null", "5"):
        with pytest.raises(ConfigError, match="storage: expected a URL or a list"):
            read(f'{{"storage": {value}}}')


@pytest.mark.parametrize("given", [["--lightcache", "{"], ["--lightcache={"], ["--lightcache"]])
def test_both_ways_to_give_options(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lightllm.VARIABLE, "{}")
    with pytest.raises(ConfigError, match="--lightcache: expected a JSON object"):
        lightllm.main([*given, "--model_dir", "x"])


def test_what_does_not_go_together() -> None:
    plain = lightllm.Options()
    images = {"enable_multimodal": True}
    lightllm.refuse({}, lightllm.Options(name="n", storage=("memory:",)))
    lightllm.refuse(images, replace(plain, secret_file="s"))
    with pytest.raises(ConfigError, match="enable_disk_cache"):
        lightllm.refuse({"enable_disk_cache": True}, plain)
    for options, words in (
        ({"storage": ("memory:",)}, "expected no storage for"),
        ({"name": "n"}, "expected no name for"),
        ({"name": "n", "storage": ("memory:",)}, "expected no name and no storage for"),
    ):
        with pytest.raises(ConfigError, match=words):
            lightllm.refuse(images, lightllm.Options(**options))


def test_no_lightllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lightllm.VARIABLE, "{}")
    with pytest.raises(NotInstalled, match="lightllm is not installed"):
        lightllm.main(["--model_dir", "x"])


def test_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names all that decides the bytes of a page, and the ranks only if their packing counts."""
    (tmp_path / "weights").write_text("1")
    usual = {"model_dir": str(tmp_path), "tp": 1, "llm_kv_type": "None"}
    shape, packed = (2, 16, 4, 8), (1, 1, 1, 4096)
    first = lightllm.fingerprint(usual, shape, "float16")
    assert lightllm.fingerprint({**usual, "tp": 2}, shape, "float16") == first
    assert lightllm.fingerprint({**usual, "llm_kv_type": "int8kv"}, shape, "float16") != first
    assert lightllm.fingerprint(usual, shape, "bfloat16") != first
    assert lightllm.fingerprint(usual, packed, "uint8") != lightllm.fingerprint(
        {**usual, "tp": 2}, packed, "uint8"
    )
    for name, other in {
        "expert_dtype": "fp4",
        "llm_prefill_att_backend": ["triton"],
        "llm_decode_att_backend": ["fa3"],
    }.items():
        assert lightllm.fingerprint({**usual, name: other}, shape, "float16") != first, name
    with monkeypatch.context() as later:
        later.setattr(lightllm, "release", lambda: "9.9")
        assert lightllm.fingerprint(usual, shape, "float16") != first
    (tmp_path / "weights").write_text("two")
    assert lightllm.fingerprint(usual, shape, "float16") != first


def test_another_release_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected CpuKvCacheClient in lightllm, as at commit"):
        lightllm.replace_client(type(sys)("lightllm"))
