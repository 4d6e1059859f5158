"""`lightcache metrics`, and the collector behind it: caches that come and go, and bad input."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.keys import keys
from support.refusals import refused

from lightcache import Cache, ConfigError, PageIndex
from lightcache.manager.stats import HISTOGRAMS, LOAD, NS, NodeCounters
from lightcache.metrics import CacheMetrics
from lightcache.shm import Segment
from lightcache.tools.cli import group
from lightcache.tools.node_metrics import NodeMetrics

HOW = {"pages": 8, "page_bytes": 4096, "fingerprint": "f", "secret": b"s" * 16}


def made(name, **more):
    cache = Cache.create(name, **HOW, **more)
    cache.pool.prefault()
    return cache


def scraped(page):
    """Samples by name and labels; each family is there once, as its format wants."""
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


class Node:
    """Scrapes of caches with these names."""

    def __init__(self, *names):
        self._registry = CollectorRegistry()
        self._registry.register(NodeMetrics(names))

    def scrape(self):
        return scraped(generate_latest(self._registry).decode())


def value(samples, name, cache, model="", **labels):
    labels = {"cache": cache, "model_name": model, **labels}
    return samples.get((f"lightcache_{name}", frozenset(labels.items())))


def test_all_caches_are_on_one_page(segment_name):
    other = f"{segment_name}-2"
    with made(segment_name, model="org/llama@v1") as cache, made(other) as second:
        with second.reserve(keys(1)) as new:
            new.publish()
        found = Node(segment_name, other).scrape()
        assert value(found, "up", segment_name, "org/llama", part="host") == 1
        pages = [
            value(found, "pages", name, model, tier="host", state="ready")
            for name, model in ((segment_name, "org/llama"), (other, ""))
        ]
        assert pages == [0, 1]
        assert len(cache.clients()) == 1, "an exporter has no slot"


def test_what_a_client_serves_and_what_the_node_does(segment_name):
    """The same samples with the same values, but what the root has not yet: see `_stats`."""
    with made(segment_name, eviction="hz", kv_groups=("kv", "states")) as cache:
        cache.namespace("v2", "acme", quota=8192)
        for name in range(12):
            with cache.reserve(keys(name)) as new:
                new.publish()
        cache.match(keys(11)).release()
        with NodeCounters.open(cache) as counters, cache.reserve(keys(20)):
            counters.add(requests=2, **LOAD.of(5000))
            registry = CollectorRegistry()
            registry.register(CacheMetrics(cache, counters))
            ours, theirs = scraped(generate_latest(registry).decode()), Node(segment_name).scrape()
            assert ours == theirs


def test_the_model_of_a_cache_with_a_default_name():
    name = f"org/m{os.getpid()}"
    with Cache.create(model=f"{name}@v2", **HOW, lifetime="attached") as cache:
        assert value(Node(cache.name).scrape(), "up", cache.name, name, part="host") == 1


def test_caches_come_and_go(segment_name):
    """Also one that is replaced by another of the name. None stays for being served."""
    node = Node(segment_name)
    assert value(node.scrape(), "up", segment_name, part="host") == 0
    with made(segment_name):
        assert value(node.scrape(), "capacity_pages", segment_name, tier="host") == 8
        Segment.unlink(segment_name, force=True)
        with Cache.create(segment_name, **{**HOW, "pages": 5}):
            assert value(node.scrape(), "capacity_pages", segment_name, tier="host") == 5
    found = node.scrape()
    assert value(found, "up", segment_name, part="host") == 0
    assert len(found) == 1


def test_counters_go_with_the_last_process_that_counts(segment_name):
    with made(segment_name) as cache:
        node = Node(segment_name)
        assert value(node.scrape(), "requests_total", segment_name) is None
        for _ in range(2):
            with NodeCounters.open(cache) as counters:
                counters.add(requests=3)
                assert value(node.scrape(), "requests_total", segment_name) == 3
        assert value(node.scrape(), "requests_total", segment_name) is None


def test_device_blocks_are_no_cache(segment_name):
    with PageIndex.create(segment_name, pages=4):
        assert value(Node(segment_name).scrape(), "up", segment_name, part="host") == 0


def test_a_damaged_cache_leaves_the_others(segment_name):
    other = f"{segment_name}-2"
    damaged = Path(f"/dev/shm/lightcache.{segment_name}")
    damaged.write_bytes(b"x" * 8192)
    with contextlib.closing(made(other)) as cache:
        found = Node(segment_name, other).scrape()
        assert value(found, "up", segment_name, part="host") == 0
        assert value(found, "up", cache.name, part="host") == 1
    damaged.unlink()


def test_all_that_are_there(segment_name):
    with made(segment_name):
        caches = {
            sample.labels["cache"]
            for family in NodeMetrics().collect()
            for sample in family.samples
            if family.name == "lightcache_up"
        }
        assert segment_name in caches
    refused(ConfigError, "labels: tier", NodeMetrics, labels={"tier": "x"})


def test_histograms(segment_name):
    with made(segment_name) as cache:
        with NodeCounters.open(cache) as one, NodeCounters.open(cache) as other:
            one.add(**LOAD.of(1_000_000))  # 1 ms: the bucket that ends with it
            other.add(**LOAD.of(1_000_001))
            other.add(**LOAD.of(3600 * NS))
            found = Node(segment_name).scrape()
    where = {"direction": "load"}
    counts = [
        value(found, "transfer_seconds_bucket", segment_name, le=le, **where)
        for le in ("0.0005", "0.001", "0.0025", "50.0", "+Inf")
    ]
    assert counts == [0, 1, 2, 2, 3]
    assert value(found, "transfer_seconds_count", segment_name, **where) == 3
    total = value(found, "transfer_seconds_sum", segment_name, **where)
    assert total == pytest.approx(3600.002000001)


@pytest.mark.parametrize("histogram", HISTOGRAMS, ids=lambda histogram: histogram.name)
def test_each_value_is_in_one_bucket(histogram):
    ends = [round(bound * NS) for bound in histogram.bounds]
    assert ends == sorted(set(ends))
    for i, end in enumerate(ends):
        assert histogram.of(end) == {histogram.buckets[i]: 1, histogram.total: end}
        assert histogram.of(end + 1) == {histogram.buckets[i + 1]: 1, histogram.total: end + 1}
    assert histogram.of(-5) == {histogram.buckets[0]: 1, histogram.total: 0}


# ---- the command


def run(*arguments):
    return CliRunner().invoke(group, ["metrics", *arguments])


def test_once(segment_name):
    with made(segment_name):
        result = run(segment_name, "--once")
        assert result.exit_code == 0
        assert value(scraped(result.output), "up", segment_name, part="host") == 1


def test_a_model_is_all_its_caches(segment_name):
    """Also those of an upgrade, which come while it is served."""
    model = f"org/{segment_name}"
    node, short = Node(model), Node(f"org-{segment_name}")
    assert value(node.scrape(), "up", model, part="host") == 0
    with contextlib.ExitStack() as stack:
        made = []
        for fingerprint in "fg":
            how = {**HOW, "fingerprint": fingerprint, "lifetime": "attached"}
            made.append(stack.enter_context(Cache.create(model=model, **how)).name)
            for found in (node.scrape(), short.scrape()):
                up = {labels for name, labels in found if name == "lightcache_up"}
                assert {dict(labels)["cache"] for labels in up} == set(made)
                assert all(value(found, "up", each, model, part="host") for each in made)
        result = run(model, made[0], "--once")
        assert value(scraped(result.output), "up", made[1], model, part="host") == 1


def test_a_file(segment_name, tmp_path):
    path = tmp_path / "lightcache.prom"
    with made(segment_name):
        assert run(segment_name, "--once", "--textfile", str(path)).exit_code == 0
    assert value(scraped(path.read_text()), "up", segment_name, part="host") == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [each.name for each in tmp_path.iterdir()] == [path.name], "nothing beside it"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--textfile", "{}/missing/x.prom"), "a folder that exists"),
        (("--textfile", "{}/x.txt"), "ends in .prom"),
        (("--textfile", "/proc/x.prom"), "a file that can be written"),
        (("--textfile", "{}/x.prom", "--port", "0"), "not both"),
        (("--once", "--port", "0"), "give --once or --port, not both"),
        (("",), "expected a name"),
    ],
)
def test_bad_input(tmp_path, arguments, said):
    result = run(*(each.format(tmp_path) for each in arguments))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "another may run already" in result.output


@pytest.mark.parametrize("address", ["192.0.2.1", "no host.invalid"])
def test_an_address_of_another_machine(address):
    result = run("--port", "0", "--address", address)
    assert result.exit_code == 2
    assert f"--address: expected one of this machine, found {address!r}: " in result.output
    assert "--port" not in result.output


def test_without_prometheus_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    for name in ("lightcache.metrics", "lightcache.tools.node_metrics"):
        monkeypatch.delitem(sys.modules, name)
    result = run("--once")
    assert result.exit_code == 2
    assert "pip install 'lightcache[metrics]'" in result.output


@pytest.fixture
def exporter():
    """Starts `lightcache metrics`; returns the line that it prints, and the process."""
    started = []
    begin = "from lightcache.tools.cli import main; main()"

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", begin, "metrics", *arguments], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process.stdout.readline(), process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def fetch(line):
    with urllib.request.urlopen(line.split()[1].rstrip(";"), timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return scraped(answer.read().decode())


FALL_NOT = ("_total", "_count", "_bucket", "_sum")


@pytest.mark.slow
def test_counters_never_fall_though_workers_are_killed(segment_name, exporter, script):
    """Two exporters, scraped while processes count and are killed at any instruction, and the slots
    of the dead are taken by others. What has ended in order is counted exactly."""
    with made(segment_name) as cache:
        lines = [exporter("--port", "0", segment_name)[0] for _ in range(2)]
        with NodeCounters.open(cache) as counters:
            counters.add(requests=1)
            ended = threading.Event()
            rounds, fallen = 0, []

            def watch():
                nonlocal rounds
                last = {}
                while not ended.is_set() or rounds < 3:
                    found = fetch(lines[rounds % 2])
                    for (name, labels), number in found.items():
                        if name.endswith(FALL_NOT) and number < last.get((name, labels), 0):
                            fallen.append((name, number, last[name, labels]))
                    last, rounds = found, rounds + 1

            thread = threading.Thread(target=watch)
            thread.start()
            try:
                script(
                    f"""
import os, random, signal
from lightcache import Cache
from lightcache.manager.stats import LOAD
from lightcache.manager.stats import NodeCounters
from lightcache.metrics import CacheMetrics
counted = NodeCounters.open(Cache.attach({segment_name!r}, readonly=True))
def count():
    counters = NodeCounters.open(Cache.attach({segment_name!r}, secret=b"s" * 16))
    while True:
        counters.add(requests=1, loads=1, **LOAD.of(random.randrange(10**9)))
for n in range(12):
    before, most = counted.total().requests, random.randrange(1, 300)
    child = os.fork()
    if not child:
        count()
    while counted.total().requests < before + most:
        pass
    os.kill(child, signal.SIGKILL)
    os.wait()
"""
                )
            finally:
                ended.set()
                thread.join()
            assert not fallen
            found = [fetch(line) for line in lines]
            assert [value(each, "requests_total", segment_name) for each in found] == [
                counters.total().requests
            ] * 2
            observed = value(found[0], "transfer_seconds_count", segment_name, direction="load")
            loads = value(found[0], "transfers_total", segment_name, direction="load")
            assert 0 <= loads - observed <= 12, "a kill loses one observation at most"


def test_a_cache_that_disappears_while_it_is_served(segment_name, exporter):
    line, process = exporter("--port", "0", segment_name)
    with made(segment_name):
        assert value(fetch(line), "up", segment_name, part="host") == 1
    assert value(fetch(line), "up", segment_name, part="host") == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_a_file_that_is_written_again(segment_name, tmp_path, exporter):
    path = tmp_path / "x.prom"
    _, process = exporter("--textfile", str(path), "--every", "0.1", segment_name)

    def up():
        return value(scraped(path.read_text()), "up", segment_name, part="host")

    assert up() == 0
    with made(segment_name):
        end = time.monotonic() + 60
        while up() != 1:
            assert time.monotonic() < end
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert not path.exists(), "its figures would look as if they were of now"
