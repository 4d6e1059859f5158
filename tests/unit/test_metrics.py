"""Figures of a cache as a registry of prometheus_client has them."""

import os
from dataclasses import fields

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.keys import keys
from support.manager_case import made_worlds
from support.refusals import refused
from support.window_engine import WindowEngine

from lightcache import Cache, ConfigError, PageIndex
from lightcache.groups import Rule
from lightcache.hybrid import Checkpoints
from lightcache.hybrid.checkpoints import CheckpointStats
from lightcache.hybrid.windows import GroupHits, WindowStats
from lightcache.layout import Cause
from lightcache.manager.blocks import DeviceTier
from lightcache.manager.stats import ManagerStats, NodeCounters
from lightcache.metrics import (
    CacheMetrics,
    CheckpointMetrics,
    ManagerMetrics,
    WindowMetrics,
)
from lightcache.runs import Run
from lightcache.shm.layout import LOCK_OFFSET, LockRecord

PAGES, PAGE_BYTES = 8, 4096


@pytest.fixture
def cache(segment_name):
    how = {"pages": PAGES, "page_bytes": PAGE_BYTES, "fingerprint": "f", "secret": b"s" * 16}
    with Cache.create(segment_name, **how, role="engine", eviction="lru") as made:
        made.pool.prefault()
        yield made


@pytest.fixture
def worlds(segment_name):
    yield from made_worlds(segment_name)


def registered(*arguments, **more):
    registry = CollectorRegistry(auto_describe=True)
    registry.register(CacheMetrics(*arguments, **more))
    return registry


class Values:
    """Samples of one scrape: `values(name, label=value)`, with `lightcache_` left out."""

    def __init__(self, registry, cache):
        self._name = cache.name
        self.text = generate_latest(registry).decode()
        families = list(text_string_to_metric_families(self.text))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
        self.families = {family.name: family for family in families}

    def __call__(self, name, **labels):
        labels = {"cache": self._name, "model_name": "", **labels}
        return self.samples[f"lightcache_{name}", frozenset(labels.items())]

    def states(self, tier="host"):
        return {
            s: self("pages", tier=tier, state=s) for s in ("free", "writing", "ready", "doomed")
        }


def publish(index, *path):
    with index.reserve(keys(*path)) as reservation:
        reservation.publish()


def test_pages_by_state(cache):
    registry = registered(cache)
    publish(cache, 1, 2)
    with cache.reserve(keys(3)) as writing, cache.match(keys(1, 2)):
        values = Values(registry, cache)
        assert values.states() == {"free": 5, "writing": 1, "ready": 2, "doomed": 0}
        assert values("pages", tier="host", state="ungrown") == 0
        assert values("capacity_pages", tier="host") == PAGES
        assert values("evictable_pages", tier="host") == 1, "the prefix is not"
        assert values("reservations", tier="host") == 1
        assert values("page_bytes") == PAGE_BYTES
        assert values("uses_total", tier="host") == cache.stats().clock == 3
        writing.publish()
    values = Values(registry, cache)
    assert values.states() == {"free": 5, "writing": 0, "ready": 3, "doomed": 0}
    publish(cache, 4)
    us = [cache.client_id]
    with cache.match(keys(4)) as lease, lease.ticket(us), lease.ticket(us), lease.ticket(us):
        cache.clear()
        values = Values(registry, cache)
        assert values("tickets", tier="host") == 3
        assert values.states() == {"free": 7, "writing": 0, "ready": 0, "doomed": 1}


def test_pages_without_memory(segment_name):
    """They are a state of their own: the states add up to the capacity."""
    with PageIndex.create(segment_name + "-d", pages=9, grown=4) as device:
        how = {"pages": PAGES, "page_bytes": PAGE_BYTES, "fingerprint": "f", "secret": b"s" * 16}
        with Cache.create(segment_name, **how, grow=False) as cache:
            values = Values(registered(cache, device=device), cache)
            assert values("pages", tier="device", state="ungrown") == 5
            assert values("pages", tier="device", state="free") == 4
            for tier in ("host", "device"):
                ungrown = values("pages", tier=tier, state="ungrown")
                total = sum(values.states(tier).values()) + ungrown
                assert total == values("capacity_pages", tier=tier)


def test_pages_by_group(segment_name):
    how = {"pages": 16, "page_bytes": PAGE_BYTES, "fingerprint": "f", "secret": b"s" * 16}
    run = Run(1, 3)
    with Cache.create(segment_name, **how, kv_groups=("kv", "states", "window4096")) as cache:
        registry = registered(cache)
        publish(cache, 1, 2)
        with cache.index.reserve(run.keys(keys(1, 2)), independent=True, run=run) as new:
            assert Values(registry, cache)("group_pages", group="states") == 6
            new.publish()
        cache.index.set_minimum(run, 5)
        values = Values(registry, cache)
        for group, pages, minimum in (("kv", 2, 0), ("states", 6, 6), ("window4096", 0, 0)):
            assert values("group_pages", group=group) == pages
            assert values("group_bytes", group=group) == pages * PAGE_BYTES
            assert values("group_minimum_bytes", group=group) == minimum * PAGE_BYTES


def test_pages_by_namespace(cache):
    """As many label sets as there are namespaces in use, with limits where they are set."""
    tenant = cache.namespace("v2", "acme", quota=4 * PAGE_BYTES, minimum=PAGE_BYTES)
    old = cache.namespace("v1", "acme")
    publish(cache, 1)
    for space, n in ((tenant, 3), (old, 2)):
        with cache.reserve(keys(*range(n)), namespace=space) as new:
            new.publish()
    cache.clear(old)
    values = Values(registered(cache), cache)
    found = {
        name: {
            (labels["weights"], labels["tenant"]): number
            for (sample, pairs), number in values.samples.items()
            for labels in [dict(pairs)]
            if sample == f"lightcache_namespace_{name}"
        }
        for name in ("bytes", "quota_bytes", "minimum_bytes")
    }
    assert found == {
        "bytes": {("", ""): PAGE_BYTES, ("v2", "acme"): 3 * PAGE_BYTES},
        "quota_bytes": {("v2", "acme"): 4 * PAGE_BYTES},
        "minimum_bytes": {("v2", "acme"): PAGE_BYTES},
    }
    for i in range(254):
        cache.namespace("w", str(i))
    served = [name for name, _ in Values(registered(cache), cache).samples]
    assert served.count("lightcache_namespace_bytes") == 256
    refused(ConfigError, "labels: tenant", CacheMetrics, cache, labels={"tenant": "x"})


def test_a_cache_without_names_has_no_metrics_of_groups(cache):
    assert "group" not in Values(registered(cache), cache).text
    with pytest.raises(ConfigError, match="labels: group"):
        CacheMetrics(cache, labels={"group": "x"})


def test_the_lock(cache):
    registry = registered(cache)
    before = Values(registry, cache)
    publish(cache, 1)
    values = Values(registry, cache)
    taken = values("lock_takings_total", tier="host") - before("lock_takings_total", tier="host")
    assert taken >= 1
    record = LockRecord.from_address(cache.index.segment.address + LOCK_OFFSET)
    record.contended, record.recoveries, record.undone_words = 5, 6, 7
    record.wait_ns, record.hold_ns, record.hold_max_ns = 1_500_000_000, 2_500_000_000, 500_000_000
    values = Values(registry, cache)
    assert values("lock_waits_total", tier="host") == 5
    assert values("lock_recoveries_total", tier="host") == 6
    assert values("lock_undone_words_total", tier="host") == 7
    assert values("lock_wait_seconds_total", tier="host") == pytest.approx(1.5)
    assert values("lock_hold_seconds_total", tier="host") == pytest.approx(2.5)
    assert values("lock_hold_max_seconds", tier="host") == pytest.approx(0.5)


def test_clients_by_role(cache):
    pid = os.fork()
    if pid == 0:
        kept = Cache.attach(cache.name, secret=b"s" * 16, role='wor"ker\n')
        assert kept.client_id
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    registry = registered(cache)
    with Cache.attach(cache.name, secret=b"s" * 16, role="engine"):
        values = Values(registry, cache)
        assert values("clients", tier="host", role="engine", state="alive") == 2
        assert values("clients", tier="host", role='wor"ker\n', state="dead") == 1
    cache.reap()
    values = Values(registry, cache)
    assert values("clients", tier="host", role="engine", state="alive") == 1
    assert [name for name, _ in values.samples].count("lightcache_clients") == 1


def test_the_managers_figures(cache):
    with NodeCounters.open(cache) as counters, NodeCounters.open(cache) as others:
        registry = registered(cache, counters)
        counters.add(requests=3, hit_requests=2, device_tokens=10, host_tokens=20)
        others.add(requests=4, storage_tokens=30, prompt_tokens=100, absent_pages=5)
        counters.add(loads=1, loaded_pages=6, offloads=2, offloaded_pages=7)
        counters.add(loaded_bytes=60, offloaded_bytes=70, failed_loads=8, failed_offloads=9)
        counters.add(storage_read_bytes=80, storage_written_bytes=90, no_room_pages=12)
        values = Values(registry, cache)
        tiers = [values("hit_tokens_total", tier=tier) for tier in ("device", "host", "storage")]
        assert tiers == [10, 20, 30]
        assert values("requests_total") == 7
        assert values("hit_requests_total") == 2
        assert values("prompt_tokens_total") == 100
        for direction, over, pages, failed in (("load", 1, 6, 8), ("offload", 2, 7, 9)):
            assert values("transfers_total", direction=direction) == over
            assert values("failed_transfers_total", direction=direction) == failed
            assert values("transferred_pages_total", direction=direction) == pages
            assert values("transferred_bytes_total", direction=direction) == pages * 10
        assert values("storage_bytes_total", direction="read") == 80
        assert values("storage_bytes_total", direction="write") == 90
        assert values("absent_pages_total") == 5
        assert values("unwritten_pages_total", cause="no_room") == 12
        values.families["lightcache_absent_pages"].documentation.index(
            "failures are not counted here"
        )


def test_pages_that_were_not_written_by_cause(cache):
    causes = ("failed", "stale", "refused", "disabled")
    with NodeCounters.open(cache) as counters:
        registry = registered(cache, counters)
        counters.add(**{f"unwritten_{cause}_pages": i for i, cause in enumerate(causes, 1)})
        values = Values(registry, cache)
        assert [values("unwritten_pages_total", cause=cause) for cause in causes] == [1, 2, 3, 4]
        assert "lightcache_unwritten_failed_pages" not in values.families


@pytest.mark.parametrize("part", ["calls", "offloads"])
def test_breakers_of_a_manager(worlds, part):
    world = worlds()
    registry = CollectorRegistry(auto_describe=True)
    registry.register(ManagerMetrics(world.manager))
    parts = ("calls", "offloads")
    values = Values(registry, world.cache)
    assert [values("disabled", part=each) for each in parts] == [0, 0]
    fail_open, offloads = world.manager.state.fail_open, world.manager.offloader.breaker
    for _ in range(3):
        (fail_open._breaker if part == "calls" else offloads).failure("arranged")
    values = Values(registry, world.cache)
    assert [values("disabled", part=each) for each in parts] == [part == each for each in parts]


CAUSES = {
    "device": ("room", "low_water", "demote", "drop", "clear", "engine"),
    "host": ("room", "quota", "drop", "clear", "asked"),
    "storage": ("room",),
}


def test_evictions_by_tier_and_cause(cache):
    with NodeCounters.open(cache) as counters, NodeCounters.open(cache) as others:
        registry = registered(cache, counters)
        each = [(tier, cause) for tier, causes in CAUSES.items() for cause in causes]
        for number, (tier, cause) in enumerate(each):
            counters.add(**{f"{tier}_evicted_{cause}": 1 << number})
            others.add(**{f"{tier}_evicted_{cause}": 1})
        values = Values(registry, cache)
        for number, (tier, cause) in enumerate(each):
            assert values("evictions_total", tier=tier, cause=cause) == (1 << number) + 1
        served = [labels for name, labels in values.samples if name == "lightcache_evictions_total"]
        assert len(served) == len(each)


def test_pages_that_went_from_an_index(segment_name):
    how = {"pages": PAGES, "page_bytes": PAGE_BYTES, "fingerprint": "f", "secret": b"s" * 16}
    with Cache.create(segment_name, **how, eviction="hz") as cache:
        cache.pool.prefault()
        index = cache.index
        for turn in range(4):  # 12 pages in turn through 8
            for name in range(12):
                index.set_clock(1 + 12 * turn + name)
                if not index.peek(keys(name)):
                    publish(index, name)
        index.evict(PAGES)
        values, told = Values(registered(cache), cache), index.evictions()
        room = values("evicted_pages_total", tier="host", cause="room")
        assert room == told.pages[Cause.ROOM] > 4
        assert values("evicted_pages_total", tier="host", cause="asked") == PAGES
        for name in ("eviction_idle_seconds", "eviction_age_seconds"):
            spans = [values(f"{name}_bucket", tier="host", le=le) for le in ("1.0", "32.0", "+Inf")]
            assert spans[0] < spans[1] <= spans[2] == room + PAGES
        sample = told.sample
        assert values("sampled_named_pages_total", tier="host") == sample.named
        twice = values("sampled_returned_pages_total", tier="host", size="2")
        assert twice == sample.returned[2.0] > 0


def test_a_cache_with_lru_has_no_figures_of_a_sample(cache):
    values = Values(registered(cache), cache)
    assert values("evicted_pages_total", tier="host", cause="room") == 0
    assert "sampled" not in values.text
    assert "eviction_idle" not in values.text


def test_every_figure_is_served(cache):
    """Also one that a later release counts: each raised alone moves some sample."""
    with NodeCounters.open(cache) as counters:
        metrics = CacheMetrics(cache, counters)

        def samples():
            counted = metrics.of({"host": None}, (counters.total(), counters.histograms()))
            return [(each.name, each.labels, each.value) for of in counted for each in of.samples]

        before = samples()
        for field in fields(ManagerStats):
            counters.add(**{field.name: 1})
            before, after = samples(), before
            assert before != after, field.name


def test_names_are_as_prometheus_wants_them(cache):
    with NodeCounters.open(cache) as counters:
        values = Values(registered(cache, counters, device=cache.index), cache)
        assert len(values.families) > 30
        for family in values.families.values():
            assert family.name.startswith("lightcache_")
            assert family.documentation.endswith(".")
            assert family.type in ("counter", "gauge", "histogram")
            for sample in family.samples:
                assert sample.name.endswith("_total") == (family.type == "counter")
            if family.type == "histogram":
                assert family.name.endswith(("_seconds", "_ratio")), "a base unit, at the end"


@pytest.fixture
def checkpoints(segment_name):
    with PageIndex.create(f"{segment_name}.slots", pages=2, independent=True) as slots:
        made = Checkpoints(slots, None)
        yield made
        made.close()


def test_every_figure_of_checkpoints_is_served(checkpoints):
    registry = CollectorRegistry(auto_describe=True)
    registry.register(CheckpointMetrics(checkpoints, labels={"model": "m"}))
    for field in fields(CheckpointStats):
        before = Values(registry, checkpoints.slots).samples
        checkpoints.counts.update(**{field.name: 1})
        after = Values(registry, checkpoints.slots)
        moved = {name for name, _ in after.samples if before[name, _] != after.samples[name, _]}
        assert moved, field.name
    for family in after.families.values():
        assert family.name.startswith("lightcache_checkpoint_")
        assert "The checkpoints'" not in family.documentation, "nobody has said what it is"
    refused(ConfigError, "labels: tier", CheckpointMetrics, checkpoints, labels={"tier": "x"})


def test_figures_of_checkpoints(checkpoints):
    registry = CollectorRegistry(auto_describe=True)
    registry.register(CheckpointMetrics(checkpoints))
    checkpoints.counts.update(requests=9, device_hits=4, host_hits=3, storage_hits=1)
    checkpoints.counts.update(loads=5, offloads=6, failed_loads=7, failed_offloads=8)
    checkpoints.counts.update(usable_tokens=100)
    values = Values(registry, checkpoints.slots)
    hits = [values("checkpoint_hits_total", tier=at) for at in ("device", "host", "storage")]
    assert hits == [4, 2, 1]
    for direction, well, failed in (("load", 5, 7), ("offload", 6, 8)):
        assert values("checkpoint_transfers_total", direction=direction) == well
        assert values("checkpoint_failed_transfers_total", direction=direction) == failed
    checkpoints.counts.subtract(usable_tokens=40)  # a request that began anew
    assert Values(registry, checkpoints.slots)("checkpoint_usable_tokens_total") == 100
    checkpoints.counts.update(usable_tokens=50)
    assert Values(registry, checkpoints.slots)("checkpoint_usable_tokens_total") == 110


def test_labels(cache):
    values = Values(registered(cache, labels={"model": "llama"}), cache)
    assert values("up", part="host", model="llama") == 1
    assert all(("model", "llama") in labels for _, labels in values.samples)
    with pytest.raises(ConfigError, match="labels: role, tier"):
        CacheMetrics(cache, labels={"tier": "x", "role": "y", "model": "z"})


def test_a_reader_serves_them(cache):
    with Cache.attach(cache.name, readonly=True) as reader:
        assert Values(registered(reader), reader)("capacity_pages", tier="host") == PAGES


def test_a_part_that_is_gone_leaves_the_others(segment_name):
    how = {"pages": PAGES, "page_bytes": PAGE_BYTES, "fingerprint": "f", "secret": b"s" * 16}
    cache = Cache.create(segment_name, **how)
    counters = NodeCounters.open(cache)
    device = DeviceTier(segment_name + "-d", block_tokens=16, blocks=5)
    registry = registered(cache, counters, device)
    parts = ("host", "device", "counters")

    def up():
        values = Values(registry, cache)
        return values, [values.samples.get(key(part)) for part in parts]

    def key(part):
        labels = {"cache": segment_name, "model_name": "", "part": part}
        return "lightcache_up", frozenset(labels.items())

    values, found = up()
    assert found == [1, 1, 1]
    assert values("capacity_pages", tier="device") == 5
    device.index.close()
    values, found = up()
    assert found == [1, 0, 1]
    device.index = None
    values, found = up()
    assert found == [1, None, 1], "how many blocks there are is not known: no fault"
    assert values("capacity_pages", tier="host") == PAGES
    counters.close()
    values, found = up()
    assert found == [1, None, 0]
    assert "requests_total" not in values.text
    cache.close()
    values, found = up()
    assert found == [0, None, 0]
    assert len(values.samples) == 2


def test_two_of_them_in_one_registry_are_refused(cache):
    registry = registered(cache)
    refused(ValueError, "Duplicated", registry.register, CacheMetrics(cache))


@pytest.fixture
def windows(segment_name):
    engine = WindowEngine(segment_name, (Rule.window(11), Rule.chunk(24)))
    yield engine
    engine.close()


def test_every_figure_of_windows_is_served(windows):
    registry = CollectorRegistry(auto_describe=True)
    registry.register(WindowMetrics(windows.manage, labels={"model": "m"}))
    of_requests = {"requests", "usable_tokens", "unusable_tokens"}
    own = [field.name for field in fields(WindowStats) if field.name != "groups"]
    names = [name if name in of_requests else f"windows:{name}" for name in own]
    names += [f"chunk24:{field.name}" for field in fields(GroupHits)]
    for name in names:
        before = Values(registry, windows.host).samples
        windows.manage.parts.windows._counts[name] += 1
        after = Values(registry, windows.host)
        assert {key for key in after.samples if before[key] != after.samples[key]}, name
    for family in after.families.values():
        assert family.name.startswith(("lightcache_window_", "lightcache_group_"))
        assert "The windows'" not in family.documentation
    refused(ConfigError, "labels: group", WindowMetrics, windows.manage, labels={"group": "x"})


def test_figures_of_windows(windows):
    """By the names of the cache's groups."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(WindowMetrics(windows.manage))
    counts = windows.manage.parts.windows._counts
    counts.update({"windows:host_hits": 5, "windows:storage_hits": 2, "windows:device_hits": 1})
    counts.update(
        {"prefix:device_tokens": 64, "prefix:host_tokens": 48, "prefix:storage_tokens": 8}
    )
    counts.update({"window11:limited_tokens": 30, "window11:limited_requests": 3})
    values = Values(registry, windows.host)
    for tier, hits, tokens in (("device", 1, 64), ("host", 3, 40), ("storage", 2, 8)):
        assert values("window_hits_total", tier=tier) == hits
        assert values("group_hit_tokens_total", group="kv", tier=tier) == tokens
    assert values("group_limited_tokens_total", group="window11") == 30
    assert values("group_limited_requests_total", group="window11") == 3
    counts.subtract({"prefix:device_tokens": 64})  # a request that began anew
    again = Values(registry, windows.host)
    assert again("group_hit_tokens_total", group="kv", tier="device") == 64
