"""SharedCounters: rows that outlive their clients, sums, wrapping, damage; and a node's figures."""

import ctypes
import gc
import json
import os
import random
import signal
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.refusals import refused

from lightcache import Cache, errors, shm
from lightcache.manager.stats import ManagerStats, NodeCounters
from lightcache.shm import layout, names
from lightcache.shm.listing import list_segments, read_segment
from lightcache.tools.cli import group
from lightcache.tools.facts import counted
from lightcache.tools.image import read_any
from lightcache.tools.readings import Watch

NAMES = ("requests", "tokens")
TOP = (1 << 64) - 1


@pytest.fixture
def counters(segment_name):
    with shm.SharedCounters.create(segment_name, names=NAMES) as made:
        yield made


def attach(counters, **how):
    return shm.SharedCounters.attach(counters.segment.name, **how)


def test_counts_are_ones_own_and_the_sum_is_everybodys(counters):
    assert counters.names == NAMES
    assert counters.total() == counters.own() == {"requests": 0, "tokens": 0}
    counters.add(requests=1, tokens=100)
    counters.add(tokens=28)
    counters.add()
    with attach(counters) as other:
        other.add(requests=5)
        assert other.own() == {"requests": 5, "tokens": 0}
        assert other.total() == counters.total() == {"requests": 6, "tokens": 128}
    assert counters.own() == {"requests": 1, "tokens": 128}
    assert counters.total() == {"requests": 6, "tokens": 128}, "what has left still counts"
    counters.check()


def test_a_name_may_stand_for_several(segment_name):
    """As a histogram has them; copies of the segment are read by the same names."""
    given = ("requests", "spans[3]")
    names = ("requests", "spans_0", "spans_1", "spans_2")
    with shm.SharedCounters.create(segment_name, names=given) as made, attach(made) as other:
        assert made.names == other.names == names
        made.add(spans_2=5, requests=1)
        other.add(spans_2=2, spans_0=1)
        assert made.total() == {"requests": 1, "spans_0": 1, "spans_1": 0, "spans_2": 7}
        assert made.own() == {"requests": 1, "spans_0": 0, "spans_1": 0, "spans_2": 5}
        made.check()
        assert counted(read_any(segment_name)) == made.total()
        refused(errors.ConfigError, "spans", made.add, spans=1)
        refused(errors.ConfigError, "spans_3", made.add, spans_3=1)
        others = ("requests", "spans[2]", "spans_2")  # as many, and the same
        refused(errors.LayoutMismatch, "names", shm.SharedCounters.open, segment_name, names=others)


def test_leaving_gives_the_slot_back(counters):
    with attach(counters):
        assert len(counters.segment.clients()) == 2
    assert len(counters.segment.clients()) == 1
    other = attach(counters)
    other.close()
    assert len(counters.segment.clients()) == 1


def test_who_takes_a_slot_goes_on_from_what_its_last_client_counted(counters):
    slots = []
    for n in range(1, 4):
        with attach(counters) as other:
            slots.append(other.segment.client.slot)
            assert other.own() == {"requests": 0, "tokens": 0}
            other.add(requests=n)
            assert other.own() == {"requests": n, "tokens": 0}
    assert len(set(slots)) == 1, "the slot was expected to be taken again"
    assert counters.total()["requests"] == 6


@pytest.mark.parametrize("verb", ["open", "attach"])
def test_what_the_killed_had_counted_stays(counters, script, verb):
    """Also when their slots are needed: more processes die than there are slots. They are forks of
    a small process: those of this one take ten times as long."""
    script(
        f"""
import os, signal, sys
from lightcache import shm
names = {{"names": {NAMES!r}}} if {verb!r} == "open" else {{}}
watch = shm.SharedCounters.attach(sys.argv[1], readonly=True)
for n in range({layout.SLOTS + 6}):
    if os.fork() == 0:
        shm.SharedCounters.{verb}(sys.argv[1], **names).add(requests=1, tokens=7)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.wait()[1] == signal.SIGKILL
    assert watch.total()["requests"] == n + 1
""",
        counters.segment.name,
    )
    assert counters.total()["tokens"] == 7 * (layout.SLOTS + 6)
    assert counters.own() == {"requests": 0, "tokens": 0}
    counters.check()


def test_a_segment_that_outlives_everybody_goes_on(segment_name):
    with shm.SharedCounters.open(segment_name, names=NAMES, lifetime="persistent") as first:
        first.add(tokens=3)
    with shm.SharedCounters.open(segment_name, names=NAMES, lifetime="persistent") as again:
        assert again.own()["tokens"] == 0
        assert again.total()["tokens"] == 3
    shm.Segment.unlink(segment_name)


def test_counters_wrap(counters):
    counters.add(tokens=TOP)
    with attach(counters) as other:
        other.add(tokens=5)
        assert other.total()["tokens"] == 4
        counters.add(tokens=TOP)
        assert counters.own()["tokens"] == TOP - 1
        assert counters.total()["tokens"] == 3
    with attach(counters) as successor:
        successor.add(tokens=TOP)
        assert successor.own()["tokens"] == TOP
        assert successor.total()["tokens"] == 2


def test_readers_read(counters):
    counters.add(requests=2)
    with attach(counters, readonly=True) as reader:
        assert reader.total()["requests"] == 2
        assert reader.own() == {"requests": 0, "tokens": 0}
        reader.check()
        refused(errors.PermissionDenied, "read-only", reader.add, requests=1)
    assert [client.role for client in counters.segment.clients()] == ["counters"]


def test_threads_of_one_process_share_a_row(counters):
    threads = [
        threading.Thread(target=lambda: [counters.add(requests=1) for _ in range(2000)])
        for _ in range(4)
    ]
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert counters.own()["requests"] == counters.total()["requests"] == 8000


def test_a_collection_and_a_signal_may_count_in_the_middle_of_counting(counters):
    class Forgotten:
        def __del__(self):
            counters.add(requests=1)

    previous = signal.signal(signal.SIGALRM, lambda *_: counters.add(requests=1000))
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(5)
        for _ in range(500):
            cycle = [Forgotten()]
            cycle.append(cycle)
            del cycle
            counters.add(requests=1)
        signal.raise_signal(signal.SIGALRM)
        gc.collect()
    finally:
        gc.set_threshold(*thresholds)
        signal.signal(signal.SIGALRM, previous)
    assert counters.own()["requests"] == 500 + 500 + 1000


@pytest.mark.parametrize("bad", [-1, 1 << 64, 1.0, True, "1", None])
def test_bad_counts_count_nothing(counters, bad):
    refused(errors.ConfigError, "tokens: expected an integer", counters.add, requests=1, tokens=bad)
    with pytest.raises(errors.ConfigError, match="no counter 'token'; there are requests, tokens"):
        counters.add(requests=1, token=1)
    assert counters.total() == {"requests": 0, "tokens": 0}


@pytest.mark.parametrize(
    "bad", [[], "requests", ["a", "a"], ["a b"], [""], [1], [f"name{i}" for i in range(300)]]
)
def test_names_are_checked(segment_name, bad):
    refused(errors.ConfigError, "", shm.SharedCounters.create, segment_name, names=bad)


def test_other_names_are_other_counters(counters):
    with pytest.raises(errors.LayoutMismatch, match="names"):
        shm.SharedCounters.open(counters.segment.name, names=("requests", "bytes"))
    refused(errors.InUse, "", shm.SharedCounters.create, counters.segment.name, names=NAMES)
    with pytest.raises(errors.LayoutMismatch, match="kind: expected DICT, found COUNTERS"):
        shm.SharedDict.attach(counters.segment.name)
    refused(errors.NotReady, "", shm.SharedCounters.attach, counters.segment.name + "-2")


def test_the_closed_and_the_forked_say_so(segment_name):
    counters = shm.SharedCounters.create(segment_name, names=NAMES)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (counters.own, counters.total, counters.check, counters.close):
                refused(errors.Detached, "", call)
            refused(errors.Detached, "", counters.add, requests=1)
            with counters:
                pass
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    counters.close()
    counters.close()
    for call in (counters.own, counters.total, counters.check, lambda: counters.add(tokens=1)):
        refused(errors.Detached, "", call)


def test_nobody_unmaps_what_is_being_added_up(counters, monkeypatch):
    rows = counters._rows
    monkeypatch.setattr(counters, "_rows", lambda: [rows(), counters.close()][0])
    for call in (counters.total, counters.check):
        refused(errors.InUse, "", call)


def store(counters, word, value):
    at = counters.segment.address + counters.segment.payload_offset + 8 * word
    ctypes.c_uint64.from_address(at).value = value


def test_check_names_what_is_broken(counters, segment_name):
    store(counters, 1, 9)
    refused(errors.CacheCorrupted, "1 counters of slot 0 are not zero", counters.check)
    store(counters, 1, 0)
    counters.check()
    header = layout.SegmentHeader.from_address(counters.segment.address)
    header.config = header.config.replace(b"tokens", b"others")
    refused(errors.CacheCorrupted, r"found .*'others'", counters.check)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({}, "found None"),
        ({"names": "ab"}, "a list of names"),
        ({"names": []}, "at least one"),
        ({"names": [[]]}, "identifiers"),
        ({"names": ["a[0]"]}, "identifiers"),
        ({"names": ["a[9999]"]}, "at most 1024"),
        ({"names": ["a[2]", "a_1"]}, "each name"),
        ({"names": ["a", "a"]}, "once"),
        ({"names": [f"n{i}" for i in range(9)]}, "9 counters take 8192 bytes, found 4096"),
    ],
)
def test_a_segment_that_says_what_no_counters_have(segment_name, config, what):
    with shm.Segment.create(
        segment_name, 4096, kind=layout.SegmentKind.COUNTERS, config=config
    ) as segment:
        with pytest.raises(errors.CacheCorrupted, match=what) as kept:
            shm.SharedCounters.attach(segment_name)
        segment.close()
        assert read_segment(segment_name) is None, f"somebody lives in it after {kept.value}"


def test_hostile_bytes_give_errors_of_ours_alone(segment_name):
    """Header, client table and rows overwritten at random, at rest and while attached."""
    path = Path("/dev/shm") / f"lightcache.{segment_name}"
    chance = random.Random(int(os.environ.get("LIGHTCACHE_TEST_SEED", "1")))
    denied = 0
    for _ in range(150):
        made = shm.SharedCounters.create(segment_name, names=NAMES, lifetime="persistent")
        try:
            with path.open("r+b") as file:
                for _ in range(chance.randrange(1, 4)):
                    file.seek(chance.choice([chance.randrange(2200), chance.randrange(1 << 16)]))
                    file.write(chance.randbytes(chance.choice([1, 4, 40])))
            for readonly in (False, True):
                try:
                    with attach(made, readonly=readonly) as other:
                        other.total(), other.own(), other.check()
                        other.add(tokens=1)
                except errors.LightcacheError:
                    denied += 1
            try:
                made.total(), made.own(), made.add(tokens=1), made.check()
            except errors.LightcacheError:
                denied += 1
        finally:
            made.close()
            path.unlink(missing_ok=True)
    assert denied > 50


def test_tools_know_the_kind(counters):
    info = read_segment(counters.segment.name)
    assert (info.kind, info.problem, info.clients) == ("counters", None, 1)
    shown = CliRunner().invoke(group, ["dump", counters.segment.name, "--json"])
    assert json.loads(shown.output)["segment"]["kind"] == "counters"
    checked = CliRunner().invoke(group, ["check", counters.segment.name])
    assert checked.exit_code == 0
    assert checked.output.endswith("counters: every invariant holds\n")


# ---- a node's figures


@pytest.fixture
def cache(segment_name):
    how = {"pages": 8, "page_bytes": 4096, "fingerprint": "f", "secret": b"s" * 16}
    with Cache.create(segment_name, **how) as made:
        yield made


def test_a_nodes_figures(cache):
    with NodeCounters.open(cache) as ours, NodeCounters.open(cache) as theirs:
        ours.add(requests=1, prompt_tokens=100, host_tokens=60)
        theirs.add(requests=2, prompt_tokens=20)
        assert ours.own() == ManagerStats(requests=1, prompt_tokens=100, host_tokens=60)
        assert ours.total() == theirs.total()
        assert ours.total() == ManagerStats(requests=3, prompt_tokens=120, host_tokens=60)
        assert ours.total().hit_ratio == 0.5
        for field in fields(ManagerStats):
            theirs.add(**{field.name: 1})
        assert theirs.total().errors == theirs.total().loads == 1
        name = ours._counters.segment.name
        assert [info.kind for info in list_segments() if info.name == name]
    assert read_segment(name) is None, "they go with the last"


ENGINE = """
import os, signal, sys
from lightcache import Cache
from lightcache.manager.stats import NodeCounters
cache = Cache.attach(sys.argv[1], secret=b"s" * 16)
counters = NodeCounters.open(cache)
counters.add(requests=7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_another_cache_of_the_name_begins_at_zero(segment_name, script):
    """`rm` takes the counters of killed engines with the cache, and where it cannot, as their
    names differ nothing is mixed."""
    how = {"pages": 8, "page_bytes": 4096, "fingerprint": "f", "secret": b"s" * 16}
    for removes in (True, False):
        with Cache.create(segment_name, **how, lifetime="persistent") as first:
            script(ENGINE, segment_name, status=-signal.SIGKILL)
            left = names.counters_name(segment_name, first.index.segment.uuid)
        with Cache.attach(segment_name, secret=b"s" * 16) as again, Watch() as watch:
            assert watch.read()[segment_name].counts.total["requests"] == 7
            with NodeCounters.open(again) as theirs:
                assert theirs.total().requests == 7, "the cache is the same, so they continue"
                theirs.add(requests=1)
            script(ENGINE, segment_name, status=-signal.SIGKILL)
        if removes:
            assert not CliRunner().invoke(group, ["rm", segment_name]).exit_code
        else:
            shm.Segment.unlink(segment_name)
        assert (read_segment(left) is None) == removes
        with Cache.create(segment_name, **how) as new, Watch() as watch:
            assert watch.read()[segment_name].counts is None
            with NodeCounters.open(new) as ours:
                assert ours.total() == ManagerStats()
                ours.add(requests=1)
                assert watch.read()[segment_name].counts.total["requests"] == 1
    shm.Segment.unlink(left)


@pytest.mark.parametrize("force", [True, False])
def test_rm_takes_counters_in_use_only_by_force(segment_name, force):
    how = {"pages": 8, "page_bytes": 4096, "fingerprint": "f", "secret": b"s" * 16}
    made = Cache.create(segment_name, **how, lifetime="persistent")
    with NodeCounters.open(made) as ours:
        made.close()
        done = CliRunner().invoke(group, ["rm", segment_name, *(["--force"] if force else [])])
        assert (done.exit_code, done.output) == (0, f"removed {segment_name}\n")
        if force:
            refused(errors.Detached, "", ours.total)
        else:
            ours.add(requests=1)
            assert ours.total().requests == 1


def test_a_reader_of_a_cache_reads_its_figures(cache):
    with Cache.attach(cache.name, readonly=True) as reader:
        refused(errors.NotReady, "", NodeCounters.open, reader)
        with NodeCounters.open(cache) as ours, NodeCounters.open(reader) as theirs:
            ours.add(errors=4)
            assert theirs.total().errors == 4
            refused(errors.PermissionDenied, "", theirs.add, errors=1)


def test_figures_are_for_the_group_that_the_cache_is_for(segment_name):
    how = {"pages": 8, "page_bytes": 4096, "fingerprint": "f", "secret": b"s" * 16}
    group = os.getgid()
    with Cache.create(segment_name, **how, group=group) as made, NodeCounters.open(made) as ours:
        access = ours._counters.segment.stat()
        assert (access.st_mode & 0o777, access.st_gid) == (0o660, group)
