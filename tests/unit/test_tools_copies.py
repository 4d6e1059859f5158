"""dump and check: copies of caches that are busy, stuck, or damaged."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.keys import keys

from lightcache import Cache, PageIndex, layout, runs, snapshot
from lightcache.layout import Cause
from lightcache.manager.stats import NodeCounters
from lightcache.page_index import geometry
from lightcache.shm import Segment, names
from lightcache.shm import layout as shm_layout
from lightcache.shm.objects import OpenObject
from lightcache.tools import check as check_module
from lightcache.tools import cli, image
from lightcache.tools.facts import state_of
from lightcache.tools.image import read

Run = Callable[..., Result]
Wait = Callable[[Callable[[], bool], str], None]

PAGES = 64
SECRET = b"this secret must not be seen anywhere"
ROOT = geometry(PAGES).root
HINTS = {"not_working", "hints"}
HEADER_END = ctypes.sizeof(shm_layout.SegmentHeader)


@pytest.fixture
def made(segment_name: str) -> Iterator[str]:
    """A persistent cache with six ready pages, in which nobody lives."""
    with (
        Cache.create(
            segment_name,
            pages=PAGES,
            page_bytes=4096,
            page_tokens=16,
            fingerprint="tools",
            secret=SECRET,
            lifetime="persistent",
        ) as cache,
        cache.reserve(cache.hash_pages(np.arange(100))) as new,
    ):
        new.publish()
    yield segment_name
    Segment.unlink(segment_name, force=True)


def path(name: str) -> Path:
    return names.FOLDER / f"lightcache.{name}"


def poke(name: str, offset: int, value: bytes) -> None:
    with path(name).open("r+b") as file:
        file.seek(offset)
        file.write(value)


def field(name: str, offset: int) -> int:
    return int.from_bytes(path(name).read_bytes()[offset : offset + 4], "little")


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


HOLDER = """
import sys
from lightcache import PageIndex
index = PageIndex.attach(sys.argv[1], role="holder")
index.core.locked("lci_hold", what="test")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(name: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock and sleeps."""
    command = [sys.executable, "-c", HOLDER, name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


def load(run: Run, name: str, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("dump", name, *options, "--json").stdout)
    return found


# ---- dump


def test_dump_of_a_quiet_cache(run: Run, made: str) -> None:
    found = load(run, made)
    assert (found["not_working"], found["hints"]) == ([], [])
    assert found["segment"]["state"] == "ready"
    assert found["segment"]["pool_bytes"]["length"] == PAGES * 4096
    totals = found["totals"]
    assert (totals["ready"], totals["free"], totals["writing"]) == (6, 58, 0)
    assert totals["accounting_holds"]
    assert found["lock"]["holder"] is None
    assert "pages" not in found
    shown = run("dump", made).stdout
    for word in ("ready", "accounting", "holds", "none", "clients", "namespaces"):
        assert word in shown


@pytest.mark.parametrize("eviction", ["lru", "hz"])
def test_dump_of_evictions(run: Run, segment_name: str, eviction: str) -> None:
    with PageIndex.create(segment_name, pages=8, eviction=eviction) as index:
        for turn in range(20):  # 12 pages in turn through 8
            for name in range(12):
                index.set_clock(1 + 0.1 * (12 * turn + name))
                with index.match(keys(name)) as found:
                    if not len(found):
                        with index.reserve(keys(name)) as new:
                            new.publish()
        told, found_pages = index.evictions(), load(run, segment_name, "--evictions")["evictions"]
        assert found_pages["pages"] == {c.name.lower(): n for c, n in told.pages.items()}
        shown = run("dump", segment_name, "--evictions").stdout
        assert f"room {told.pages[Cause.ROOM]:,}" in shown
        if eviction == "lru":
            assert found_pages["sample"] is None
            return
        sample = found_pages["sample"]
        assert sample["hit_ratio"] == pytest.approx(1 - sample["named"] / 240)
        ratios = [each["hit_ratio"] for each in sample["returned"]]
        assert sample["hit_ratio"] <= ratios[0] <= ratios[-1] == pytest.approx(1 - 12 / 240)
        assert "unused for" in shown
        assert f"{100 * ratios[3]:.1f} % with 2" in " ".join(shown.split())


@pytest.mark.parametrize("kv_groups", [None, ("kv", "states", "window8")])
def test_dump_by_group(run: Run, segment_name: str, kv_groups: tuple[str, ...] | None) -> None:
    how: dict[str, Any] = {"pages": PAGES, "page_bytes": 1 << 20, "fingerprint": "f"}
    names = kv_groups or ("0", "1")
    with Cache.create(segment_name, **how, secret=SECRET, kv_groups=kv_groups, grow=False) as cache:
        cache.pool.grow(PAGES)
        keys, states = cache.hash_pages(np.arange(48), 16), runs.Run(1, 5)
        with cache.reserve(keys) as new:
            new.publish()
        with cache.index.reserve(states.keys(keys[:2]), independent=True, run=states) as new:
            new.publish()
        cache.index.set_minimum(states, 11)
        with cache.index.reserve(states.keys(keys[2:]), independent=True, run=states):
            groups = load(run, segment_name)["totals"]["groups"]
            shown = run("dump", segment_name).stdout
    counts = [(3, 0), (15, 15), (0, 0)]
    assert groups == [
        {
            "number": i,
            "name": name,
            "pages": pages,
            "minimum_pages": minimum,
            "bytes": pages << 20,
            "minimum_bytes": minimum << 20,
        }
        for i, (name, (pages, minimum)) in enumerate(zip(names, counts, strict=False))
    ]
    expected = f"{names[0]} 3 (3.0 MiB), {names[1]} 15 (15.0 MiB, at least 15.0 MiB)"
    assert expected in " ".join(shown.split())


def test_names_of_groups_that_are_damaged(run: Run, segment_name: str) -> None:
    how: dict[str, Any] = {"pages": 8, "page_bytes": 4096, "fingerprint": "f", "secret": SECRET}
    with Cache.create(segment_name, **how, kv_groups=("kv", "states")) as cache:
        header = path(segment_name).read_bytes()[:HEADER_END]
        poke(segment_name, header.index(b'"states"'), b'"k\\tvww"')
        assert load(run, segment_name)["totals"]["groups"] == []
        with Cache.attach(segment_name, secret=SECRET) as other:
            assert other.index.groups() == ()
        poke(segment_name, 0, header)
        assert cache.index.groups()[1].name == "states"


def test_dump_shows_who_holds_what(run: Run, made: str) -> None:
    with Cache.attach(made, secret=SECRET, role="[red]\x1b[31m", grow=False) as cache:
        keys = cache.hash_pages(np.arange(100))
        tenant = cache.namespace("v2", "acme", quota=9 * 4096 + 4095, minimum="9KiB")
        assert cache.index.protect(keys[:2]) == 2
        with cache.match(keys) as lease, cache.reserve(cache.hash_pages(np.arange(7, 107))) as new:
            ticket = lease.ticket([cache.client_id], timeout=60.0)
            found = load(run, made)
            pages = load(run, made, "--pages", "--limit", "7")["pages"]
            shown = run("dump", made).stdout + run("dump", made, "--pages").stdout
            assert len(new.pages) == 6
            ticket.drop()
    (client,) = found["clients"]
    assert (client["pins"], client["pinned_pages"], client["alive"]) == (12, 12, True)
    assert (client["hit_rate"], client["pid"]) == (1.0, os.getpid())
    (reservation,) = (entry for entry in found["reservations"] if entry["state"] == "active")
    assert (reservation["owner"], reservation["owner_alive"]) == (client["slot"], True)
    assert (reservation["pages"], reservation["shards_left"]) == (6, 1)
    (shown_ticket,) = found["tickets"]
    assert (shown_ticket["pages"], shown_ticket["adopters"]) == (6, [client["slot"]])
    assert found["totals"]["ticket_pins"] == 6
    (space,) = (entry for entry in found["namespaces"] if entry["tenant"] == "acme")
    assert (space["quota_pages"], space["minimum_pages"]) == (9, 3)
    assert (space["weights"], space["quota_bytes"], space["minimum_bytes"]) == (
        "v2",
        9 * 4096,
        3 * 4096,
    )
    assert found["totals"]["kept"] == 2
    assert [page["kept"] for page in pages["pages"]] == [True, True] + [False] * 5
    for word in ("kept", "minimum", "36.0 KiB", "12.0 KiB"):
        assert word in shown
    assert tenant.id in [entry["namespace"] for entry in found["namespaces"]]
    assert (pages["in_use"], pages["shown"], len(pages["pages"])) == (12, 7, 7)
    first = pages["pages"][0]
    assert (first["state"], first["hits"], first["children"]) == ("ready", 1, 1)
    assert first["pins"] == {"0": 1, str(client["slot"]): 1}
    assert pages["pages"][1]["parent"] == first["page"]
    assert "\x1b" not in shown
    assert "[red]" in shown


def test_dump_shows_neither_tokens_nor_secrets(run: Run, made: str) -> None:
    with Cache.attach(made, secret=SECRET, grow=False) as cache:
        keys = cache.hash_pages(np.arange(100))
        check_word = cache.index.segment.config["secret"]
        with cache.match(keys) as lease:
            ticket = lease.ticket([cache.client_id], timeout=60.0)
            options = ("--pages", "--clients", "--lock", "--reservations", "--tickets")
            said = "".join(
                run("dump", made, *options, "--namespaces", *more).stdout + run("ls", *more).stdout
                for more in ((), ("--json",))
            )
            ticket.drop()
    hidden = [SECRET.decode(), SECRET.hex(), check_word, bytes(ticket).hex(), "secret"]
    hidden += [f"{int(word):016x}" for word in keys.ravel()] + [str(int(w)) for w in keys.ravel()]
    for word in hidden:
        assert word not in said


def test_dump_sections(run: Run, made: str) -> None:
    assert set(load(run, made, "--lock")) == {"segment", "lock", *HINTS}
    assert set(load(run, made, "--pages", "--tickets")) == {"segment", "tickets", "pages", *HINTS}
    assert load(run, made, "--pages", "--limit", "0")["pages"]["shown"] == 6
    assert "--limit" in run("dump", made, "--limit", "-1", status=2).stderr


def test_dump_of_a_plain_segment(run: Run, segment_name: str) -> None:
    with Segment.create(segment_name, 100) as segment:
        segment.join("somebody")
        found = load(run, segment_name)
        assert (found["segment"]["kind"], found["segment"]["clients"]) == ("plain", 1)
        assert "plain" in run("dump", segment_name).stdout
        assert "header, clients and lock are in order" in run("check", segment_name).stdout
        assert "expected INDEX, found PLAIN" in run("repair", segment_name, status=2).stderr


# ---- a holder of the lock that does not go on


def test_stopped_holder(run: Run, made: str, tmp_path: Path, wait_until: Wait) -> None:
    with holder(made, tmp_path) as child:
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(read(made).clients[0]) == "stopped", "the child to stop")
        found = load(run, made)
        who = found["lock"]["holder"]
        assert (who["alive"], who["process"], who["role"]) == (True, "stopped", "holder")
        assert (who["pid"], who["operation"]) == (child.pid, "check")
        assert f"kill -CONT {child.pid}" in found["not_working"][0]
        shown = run("dump", made).stdout
        assert "alive, stopped" in shown
        assert who["held_s"] > 0
        assert re.search(r"doing\s+check, for [\d.]+ s", shown)
        assert json.loads(run("check", made, "--json").stdout)["status"] == "clean"


def test_a_holder_stopped_before_it_said_anything(run: Run, made: str, tmp_path: Path) -> None:
    with holder(made, tmp_path):
        sequence = field(made, shm_layout.LOCK_OFFSET + shm_layout.LockRecord.sequence.offset)
        at = shm_layout.LOCK_OFFSET + shm_layout.LockRecord.holder.offset + 4
        poke(made, at, u32(sequence - 1))
        who = load(run, made)["lock"]["holder"]
        assert (who["role"], who["operation"], who["held_s"]) == ("holder", None, None)
        assert "it has just taken the lock" in run("dump", made).stdout
        poke(made, at, u32(sequence))


def test_dead_holder(run: Run, made: str, tmp_path: Path) -> None:
    with holder(made, tmp_path) as child:
        child.kill()
        child.wait()
    found = load(run, made)
    assert (found["lock"]["holder"]["alive"], found["lock"]["holder"]["process"]) == (False, "gone")
    assert "is dead" in found["hints"][0]
    assert "every invariant holds" in run("check", made).stdout
    run("reap", made)
    assert load(run, made)["lock"]["holder"] is None


def test_check_undoes_what_a_dead_holder_left(run: Run, made: str, tmp_path: Path) -> None:
    """By hand, a critical section that had stored one word: log entry, count, store."""
    with holder(made, tmp_path) as child:
        child.kill()
        child.wait()
    at = ROOT + layout.RootRecord.named.offset
    old = field(made, at)
    poke(made, shm_layout.LOG_OFFSET, u32(at // 4) + u32(old))
    poke(made, shm_layout.LOCK_OFFSET + shm_layout.LockRecord.log_count.offset, u32(1))
    poke(made, at, u32(old + 1))
    checked = json.loads(run("check", made, "--json").stdout)
    assert (checked["status"], checked["recovered"]) == ("clean", 1)
    assert "1 log entries" in run("check", made).stdout
    found = load(run, made)
    assert found["totals"]["accounting_holds"]
    assert found["lock"]["log_entries"] == 1
    assert field(made, at) == old + 1  # in the copy only
    run("reap", made)
    assert field(made, at) == old


# ---- the pool


def pool_of(name: str) -> Path:
    (found,) = names.dependents(name)
    return names.FOLDER / found.object_name.removeprefix("/")


def shorter(pool: Path) -> None:
    os.truncate(pool, 4096)


def emptied(pool: Path) -> None:
    """The same length as before, and none of the bytes."""
    length = pool.stat().st_size
    os.truncate(pool, 0)
    os.truncate(pool, length)


def linked(pool: Path) -> None:
    moved = pool.with_name(f"{pool.name}.moved")
    pool.rename(moved)
    pool.symlink_to(moved)


def named_twice(pool: Path) -> None:
    os.link(pool, pool.with_name(f"{pool.name}.twice"))


def foreign(pool: Path) -> None:
    os.chown(pool, 65534, -1)


def open_to_all(pool: Path) -> None:
    pool.chmod(0o666)


def a_folder(pool: Path) -> None:
    pool.unlink()
    pool.mkdir()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (Path.unlink, "is gone"),
        (shorter, f"expected {PAGES * 4096} bytes, found 4096"),
        (emptied, "something has taken it away"),
        (linked, "found a symbolic link"),
        (named_twice, "2 links"),
        (foreign, "found user 65534"),
        (open_to_all, "mode 0666"),
        (a_folder, "no regular file"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--lock",)])
def test_check_looks_at_the_pool(
    run: Run, made: str, damage: Callable[[Path], None], found: str, options: tuple[str, ...]
) -> None:
    """Of a pool that is not what it was made as, `check` and `dump` say so and what to do."""
    if damage is foreign and os.geteuid() != 0:
        pytest.skip("only root can give an object away")
    assert "in memory" in run("check", made, *options).stdout
    pool = pool_of(made)
    damage(pool)
    try:
        result = run("check", made, *options, status=1)
        assert found in result.stdout
        assert "every invariant holds" not in result.stdout
        assert "create" in result.stdout
        assert "`lightcache rm`" not in result.stdout, "of which cache?"
        checked = json.loads(run("check", made, *options, "--json", status=1).stdout)
        assert (checked["status"], checked["clean"]) == ("broken", True)
        assert found in checked["pool"]["problem"]
        (line,) = load(run, made)["not_working"]
        assert found in line
        shown = run("dump", made).stdout
        assert found in shown[shown.index("not working now") :]
    finally:
        for left in pool.parent.glob(f"{pool.name}*"):
            left.rmdir() if left.is_dir() else left.unlink()


def test_check_of_an_index_without_a_pool(run: Run, segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=4):
        assert json.loads(run("check", segment_name, "--json").stdout)["pool"] is None


# ---- damage


def test_check_names_what_is_broken(run: Run, made: str) -> None:
    at = ROOT + layout.RootRecord.named.offset
    poke(made, at, u32(9))
    result = run("check", made, status=1)
    assert "invariant 35" in result.stdout
    assert "lightcache repair" in result.stdout
    assert json.loads(run("check", made, "--json", status=1).stdout)["status"] == "broken"
    assert "counters disagree" in " ".join(load(run, made)["hints"])
    assert "does not hold" in run("dump", made).stdout
    assert "every invariant holds" in run("repair", made).stdout
    run("check", made)
    run("check", made, "--lock")


def test_check_of_an_interrupted_repair(run: Run, made: str) -> None:
    poke(made, ROOT + layout.RootRecord.repairing.offset, u32(1))
    assert "a repair was killed" in run("check", made, "--wait", 0, status=1).stdout
    assert "a repair is running" in " ".join(load(run, made)["hints"])
    run("repair", made)
    run("check", made)


def test_check_of_a_damaged_log(run: Run, made: str) -> None:
    poke(made, shm_layout.LOG_OFFSET, u32(1) + u32(0))  # the header is none of its business
    poke(made, shm_layout.LOCK_OFFSET + shm_layout.LockRecord.log_count.offset, u32(1))
    assert "undo log names words outside" in run("check", made, status=1).stdout
    assert "undo log is damaged" in " ".join(load(run, made)["not_working"])
    run("repair", made)
    run("check", made)


def test_check_of_a_damaged_root(run: Run, made: str) -> None:
    poke(made, ROOT, u32(PAGES + 1))
    assert "the root says" in run("check", made, status=1).stdout


@pytest.mark.parametrize("left", [shm_layout.PAYLOAD_OFFSET, ROOT + 100, 8192])
def test_truncated(run: Run, made: str, left: int) -> None:
    os.truncate(path(made), left)
    assert "bytes were expected" in run("dump", made, status=2).stderr
    result = run("check", made, status=1)
    assert "bytes were expected" in result.stdout
    assert json.loads(run("check", made, "--json", status=1).stdout)["invariant"] == -1
    run("rm", made)


def test_truncated_to_nothing(run: Run, made: str) -> None:
    os.truncate(path(made), 100)
    for command in ("dump", "check"):
        assert "lightcache sweep" in run(command, made, status=2).stderr


def test_a_creator_that_died_early(run: Run, segment_name: str) -> None:
    """Before it wrote the header."""
    path(segment_name).write_bytes(bytes(1 << 16))
    path(segment_name).chmod(0o600)
    for command in ("dump", "check", "top"):
        said = run(command, segment_name, status=2).stderr
        assert "its creator died before finishing; `lightcache sweep`" in said
    run("rm", segment_name)


def test_another_release(run: Run, made: str) -> None:
    poke(made, shm_layout.SegmentHeader.abi.offset, u32(99))
    for command in ("dump", "check"):
        said = run(command, made, status=2).stderr
        assert "another release" in said
        assert f"`lightcache rm {made}`" in said


def test_a_link_in_its_place(run: Run, segment_name: str, tmp_path: Path) -> None:
    path(segment_name).symlink_to(tmp_path / "elsewhere")
    try:
        for command in ("dump", "check", "rm", "disable"):
            assert "symbolic link" in run(command, segment_name, status=2).stderr
    finally:
        path(segment_name).unlink()


@pytest.mark.slow
def test_whatever_stands_in_it(run: Run, made: str) -> None:
    """Random words anywhere behind the header: an answer each time, and never a signal."""
    whole = path(made).read_bytes()
    for seed in range(60):
        chance = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 30, 3000])):
            at = chance.randrange(HEADER_END, len(whole) - 8) & ~3
            word = chance.choice([0xFFFFFFFF, chance.getrandbits(32), chance.randrange(100)])
            damaged[at : at + 4] = u32(word)
        path(made).write_bytes(damaged)
        for command in (
            ("dump",),
            ("dump", "--json"),
            ("dump", "--pages"),
            ("check", "--wait", "0"),
        ):
            result = CliRunner().invoke(cli.group, [command[0], made, *command[1:]])
            assert result.exit_code in (0, 1, 2), (seed, command, result.output, result.exception)
            assert not isinstance(result.exception, Exception), (seed, result.exception)


# ---- findings that may be artefacts of copying


def test_a_cache_that_is_never_quiet(run: Run, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(name: str) -> Any:
        image = read(name)
        image.steady = False
        return image

    monkeypatch.setattr(check_module, "read", torn)
    run("check", made, "--wait", 0)  # clean, although torn, is clean
    poke(made, ROOT + layout.RootRecord.named.offset, u32(9))
    result = run("check", made, "--wait", 0, status=2)
    assert "could not be checked" in result.stderr
    assert "--lock" in result.stderr


def test_pins_in_motion(run: Run, made: str, tmp_path: Path, wait_until: Wait) -> None:
    """A count without its bit is what a client leaves in the middle of pinning."""
    place = geometry(PAGES)
    idle = HOLDER.replace("index.core.locked", "(lambda *_, **__: 0)")
    command = [sys.executable, "-c", idle, made]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            (client,) = read(made).clients
            page = PAGES - 1
            at = place.rows + (client.slot * place.row_stride + page) * 2
            poke(made, at, (1).to_bytes(2, "little"))
            assert "pins it, its bit is not set" in run("check", made, status=1).stdout
            os.kill(child.pid, signal.SIGSTOP)
            wait_until(lambda: state_of(read(made).clients[0]) == "stopped", "the child to stop")
            assert "pins were not checked" in run("check", made, "--wait", 0).stdout
            child.kill()
            child.wait()
            assert "pins were not checked" in run("check", made, "--wait", 0).stdout
            run("reap", made)
            assert "pins" not in run("check", made).stdout.splitlines()[-1].removesuffix("0 pins")
        finally:
            child.kill()


def test_check_while_others_work(run: Run, made: str) -> None:
    with PageIndex.attach(made, role="us") as index:
        assert index.check().clean
        assert json.loads(run("check", made, "--json").stdout)["quiet"]


# ---- what others have counted


def test_dump_says_what_managers_did_without(run: Run, made: str) -> None:
    with Cache.attach(made, secret=SECRET, grow=False) as cache, NodeCounters.open(cache) as counts:
        assert load(run, made)["hints"] == []
        counts.add(requests=3, no_room_pages=4, storage_failed_pages=5, failed_loads=1, errors=2)
        assert load(run, made)["hints"] == [
            "so far 4 pages were not kept on the host, which had no room",
            "so far 5 pages were not stored: the storage failed",
            "so far 1 loads failed",
            "so far 2 calls of managers continued without the cache after an error",
        ]
    assert load(run, made)["hints"] == []  # they went with the last who counted


# ---- what can be had


@pytest.mark.parametrize(("timeout", "late"), [(0, 6), (3600, 0)])
def test_dump_says_what_can_be_had(run: Run, made: str, timeout: float, late: int) -> None:
    """Doomed pages without a pin count; pins of tickets that were not adopted in time do not."""
    with Cache.attach(made, secret=SECRET, grow=False) as cache:
        lease = cache.match(cache.hash_pages(np.arange(100)))
        cache.clear()
        ticket = lease.ticket([cache.client_id], timeout=timeout)
        assert load(run, made)["totals"]["available"] == PAGES - 6
        lease.release()
        found = load(run, made)
        totals = found["totals"]
        assert (totals["free"], totals["doomed"]) == (PAGES - 6, 6)
        assert totals["available"] == PAGES - 6 + late
        assert totals["available"] == cache.stats().free
        assert (totals["ticket_pins"], totals["late_ticket_pins"]) == (6 - late, late)
        said = " ".join(found["hints"])
        assert ("6 pins belong to tickets that were not adopted in time" in said) == bool(late)
        assert "without evicting" in run("dump", made).stdout
        checked = run("check", made).stdout
        assert f"{6 - late} pins" in checked
        assert ("6 more pins are of tickets that were not adopted in time" in checked) == bool(late)
        ticket.drop()


def test_processes_that_ask_for_the_lock_change_no_stamp(made: str) -> None:
    """Neither those that wait for it, nor those that have waited for long: nothing is stored."""
    with (
        PageIndex.attach(made) as index,
        contextlib.closing(
            OpenObject.open(made, writable=False) or pytest.fail("it is gone")
        ) as opened,
    ):
        at = index.segment.address + shm_layout.LOCK_OFFSET
        lock = shm_layout.LockRecord.from_address(at)
        stamps = []
        for word in (0, shm_layout.LOCK_WAITERS, shm_layout.LOCK_STARVED, 1):
            lock.word |= word
            stamps.append((snapshot._stamp(index.core), image._stamp(opened)))
            lock.word &= ~word
    assert stamps[0] == stamps[1] == stamps[2]
    assert stamps[3][0] != stamps[0][0]
    assert stamps[3][1] != stamps[0][1]
