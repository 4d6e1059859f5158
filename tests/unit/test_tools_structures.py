"""dump, check and reap of lists, dicts, rings, logs, counters and plain segments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.shm import (
    RobustLock,
    Segment,
    SharedCounters,
    SharedDict,
    SharedList,
    SharedLog,
    SharedRing,
    layout,
    names,
    structures,
)
from lightcache.shm.layout import SegmentKind
from lightcache.tools import cli
from lightcache.tools import structures as tool

Run = Callable[..., Result]
Script = Callable[..., Any]
Wait = Callable[[Callable[[], bool], str], None]
PAYLOAD = layout.PAYLOAD_OFFSET


def dumped(run: Run, name: str, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("dump", name, *options, "--json").stdout)
    return found


def a_list(name: str) -> SharedList:
    made = SharedList.create(name, nodes=8, lists=3)
    for node in (1, 2, 5):
        made.push_back(node, 1)
    return made


def a_dict(name: str) -> SharedDict:
    made = SharedDict.create(name, capacity=8)
    made.put(7, 70)
    made.put(1 << 100, 3)
    return made


def a_ring(name: str) -> SharedRing:
    made = SharedRing.create(name, capacity=4, message_bytes=16)
    for message in (b"", b"secret words", b"more"):
        made.push(message)
    made.pop()
    return made


def a_log(name: str) -> SharedLog:
    made = SharedLog.create(name, capacity=4, message_bytes=16)
    made.append(b"secret words")
    return made


def some_counters(name: str) -> SharedCounters:
    made = SharedCounters.create(name, names=["hits", "misses"])
    made.add(hits=4, misses=1)
    return made


MAKERS: dict[str, Callable[[str], Any]] = {
    "list": a_list,
    "dict": a_dict,
    "ring": a_ring,
    "log": a_log,
    "counters": some_counters,
    "plain": lambda name: Segment.create(name, 64, config={"what": "words"}),
}
CONTENT: dict[str, dict[str, Any]] = {
    "list": {"nodes": 8, "lists": 3, "entries": 3, "lists_in_use": {"1": 3}},
    "dict": {"capacity": 8, "entries": 2},
    "ring": {"capacity": 4, "message_bytes": 16, "entries": 2, "pushed": 3},
    "log": {
        "capacity": 4,
        "message_bytes": 16,
        "entries": 0,
        "appended": 1,
        "readers": [],
        "writer": {"slot": 1, "state": "alive"},
    },
    "counters": {"counted": {"hits": 4, "misses": 1}},
    "plain": {"what": "words"},
}


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(segment_name: str, kind: str) -> Iterator[Any]:
    with MAKERS[kind](segment_name) as found:
        yield found


def poke(name: str, offset: int, *words: int) -> None:
    with (names.FOLDER / f"lightcache.{name}").open("r+b") as file:
        file.seek(offset)
        file.write(np.array(words, np.uint32).tobytes())


# ---- what is in it


def test_dump_says_what_is_in_it(run: Run, made: Any, kind: str, segment_name: str) -> None:
    found = dumped(run, segment_name)
    assert found["segment"]["kind"] == kind
    assert found["content"] == CONTENT[kind]
    assert found["lock"]["holder"] is None
    assert [client["pid"] for client in found["clients"]] == [os.getpid()] * (kind != "plain")
    assert (found["not_working"], found["hints"]) == ([], [])
    assert set(dumped(run, segment_name, "--lock")) == {"segment", "lock", "not_working", "hints"}
    shown = run("dump", segment_name).stdout
    for word in ("content", "lock", "clients", *CONTENT[kind]):
        assert word.replace("_", " ") in shown
    assert "secret" not in shown + json.dumps(found)  # nothing of the entries themselves


def test_check_finds_it_in_order(run: Run, made: Any, kind: str, segment_name: str) -> None:
    for options in ((), ("--lock",)):
        assert run("check", segment_name, *options).stdout.startswith(f"{segment_name}: {kind}: ")
    found = json.loads(run("check", segment_name, "--json").stdout)
    assert (found["status"], found["kind"], found["clean"]) == ("clean", kind, True)


def test_a_full_ring_and_a_reader_that_does_not_read(run: Run, segment_name: str) -> None:
    ring, log = f"{segment_name}-ring", f"{segment_name}-log"
    with a_ring(ring) as full, a_log(log) as writer, SharedLog.attach(log) as reader:
        full.push_many([b"", b""])
        for _ in range(4):
            writer.append(b"")
        assert "producers wait: it is full" in dumped(run, ring)["not_working"][0]
        found = dumped(run, log)
        assert found["content"]["readers"] == [{"slot": 2, "position": 1, "behind": 4}]
        assert "the writer waits: reader 2 has 4 unread" in found["not_working"][0]
        reader.read()
        assert dumped(run, log)["not_working"] == []


def test_a_writer_that_was_killed(run: Run, segment_name: str, script: Script) -> None:
    source = (
        "import os, signal, sys\n"
        "from lightcache.shm import SharedLog\n"
        "log = SharedLog.create(sys.argv[1], capacity=4, message_bytes=16)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script(source, segment_name, status=-signal.SIGKILL)
    found = dumped(run, segment_name)
    assert found["content"]["writer"] == {"slot": 1, "state": "dead"}
    assert "its writer was killed" in found["hints"][0]
    assert "1 dead clients" in found["hints"][1]
    run("check", segment_name)
    assert run("reap", segment_name).stdout == f"{segment_name}: 1 dead clients reaped\n"
    assert dumped(run, segment_name)["clients"] == []
    run("rm", segment_name)


def test_reap_takes_the_slots_of_the_dead(run: Run, made: Any, segment_name: str) -> None:
    """Whatever it holds; a child that is killed leaves its slot."""
    pid = os.fork()
    if pid == 0:
        segment = Segment.attach(segment_name)
        segment.join("child")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    before = len(dumped(run, segment_name)["clients"])
    assert "1 dead clients" in run("reap", segment_name).stdout
    assert len(dumped(run, segment_name)["clients"]) == before - 1


# ---- who holds the lock


HOLDER = """
import sys
from lightcache.shm import RobustLock, Segment
with Segment.attach(sys.argv[1]) as segment:
    segment.join("holder")
    with RobustLock(segment).hold():
        print("held", flush=True)
        sys.stdin.read()
"""


def test_the_holder_of_a_robust_lock(run: Run, segment_name: str, wait_until: Wait) -> None:
    """Who, in which call, since when; and what waits while it is stopped."""
    command, pipe = [sys.executable, "-c", HOLDER, segment_name], subprocess.PIPE
    with (
        Segment.create(segment_name, 64) as segment,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/") as child,
    ):
        segment.join()
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        try:
            holder = dumped(run, segment_name)["lock"]["holder"]
            assert (holder["pid"], holder["role"], holder["alive"]) == (child.pid, "holder", True)
            assert holder["operation"] == "RobustLock.hold"
            assert holder["held_s"] > 0
            os.kill(child.pid, signal.SIGSTOP)
            wait_until(lambda: bool(dumped(run, segment_name)["not_working"]), "the child to stop")
            (line,) = dumped(run, segment_name)["not_working"]
            assert line.startswith("changes wait: the lock's holder, client 2")
            assert f"kill -CONT {child.pid}" in line
            child.kill()
            child.wait()
            assert "is dead" in dumped(run, segment_name)["hints"][0]
            with RobustLock(segment).hold() as held:
                assert held.owner_died
        finally:
            child.kill()


# ---- damage


DAMAGE: dict[str, tuple[tuple[int, ...], str]] = {
    # kind: (offset in the payload, words), what is found
    "list": ((4, 7), "list 1 has 3 nodes, its count says 7"),
    "dict": ((8, 5), "items (count 5)"),
    "ring": ((0, 9), "messages from slot 9 on"),
    "log": ((8, 0xFFFF), "the writer is said to be 0xffff"),
    "counters": ((0, 3), "counters of slot 0 are not zero"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_check_names_what_is_broken(run: Run, made: Any, kind: str, segment_name: str) -> None:
    (offset, *words), found = DAMAGE[kind]
    poke(segment_name, PAYLOAD + offset, *words)
    said = run("check", segment_name, status=1).stdout
    assert said.startswith(f"{segment_name}: {kind}: broken: ")
    assert found in said
    checked = json.loads(run("check", segment_name, "--json", status=1).stdout)
    assert (checked["status"], checked["clean"]) == ("broken", False)
    run("dump", segment_name)


@pytest.mark.parametrize("kind", ["list", "dict", "ring"])
def test_an_unfinished_step_is_undone_in_the_copy(
    run: Run, made: Any, kind: str, segment_name: str
) -> None:
    """As a holder that was killed in it leaves it: log entry, count, store; and the lock taken."""
    at = PAYLOAD + DAMAGE[kind][0][0]
    path = names.FOLDER / f"lightcache.{segment_name}"
    before = int.from_bytes(path.read_bytes()[at : at + 4], "little")
    count = layout.LOCK_OFFSET + layout.LockRecord.log_count.offset
    poke(segment_name, layout.LOG_OFFSET, at // 4, before)
    poke(segment_name, count, 1)
    poke(segment_name, at, before + 1)
    assert "no holder" in run("check", segment_name, status=1).stdout
    poke(segment_name, layout.LOCK_OFFSET, 1 | 77 << layout.LOCK_EPOCH_SHIFT)
    checked = json.loads(run("check", segment_name, "--json").stdout)
    assert (checked["status"], checked["recovered"]) == ("clean", 1)
    assert "1 log entries of an unfinished step undone" in run("check", segment_name).stdout
    made.check()  # the next to lock does the same
    assert json.loads(run("check", segment_name, "--json").stdout)["recovered"] == 0


def test_an_artefact_is_no_finding(
    run: Run, segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a segment that is never quiet nothing is said to be broken."""
    real = tool.read_any

    def busy(name: str) -> Any:
        copy = real(name)
        copy.steady = False
        return copy

    with a_ring(segment_name):
        poke(segment_name, PAYLOAD, 9)
        monkeypatch.setattr(tool, "read_any", busy)
        said = run("check", segment_name, "--wait", 0, status=2).stderr
        assert "could not be checked" in said
        assert "never quiet" in said
        again = json.loads(run("check", segment_name, "--wait", 0, "--json", status=2).stdout)
        assert (again["status"], again["clean"]) == ("unchecked", None)


@pytest.mark.parametrize("kind", ["list", "dict", "ring", "log", "counters"])
def test_a_header_that_says_nonsense(run: Run, made: Any, kind: str, segment_name: str) -> None:
    """No signal and no traceback: one line, and a status that is not 0."""
    path = names.FOLDER / f"lightcache.{segment_name}"
    at, length = layout.SegmentHeader.config.offset, layout.SegmentHeader.config_bytes
    for config in (
        b'{"nodes":-1}',
        b'{"capacity":16777216,"message_bytes":65536}',
        b'{"names":[]}',
    ):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(config)
            file.seek(length.offset)
            file.write(len(config).to_bytes(4, "little"))
        checked = CliRunner().invoke(cli.group, ["check", segment_name])
        assert checked.exit_code in (1, 2), checked.output
        assert len((checked.stdout + checked.stderr).splitlines()) == 1
        dump = CliRunner().invoke(cli.group, ["dump", segment_name, "--json"])
        assert dump.exit_code in (0, 2), (dump.output, dump.exception)


def test_every_byte_of_a_copy_may_be_anything(segment_name: str) -> None:
    """Checking a damaged copy ends, and touches nothing outside of it."""
    random = np.random.default_rng(5)
    for kind in ("list", "dict", "ring"):
        with MAKERS[kind](f"{segment_name}-{kind}") as made:
            path = names.FOLDER / f"lightcache.{segment_name}-{kind}"
            whole = np.frombuffer(path.read_bytes(), np.uint8)
            for _ in range(300):
                copy = whole.copy()
                where = random.integers(PAYLOAD, min(len(copy), PAYLOAD + 1024), 4)
                copy[where] = random.integers(0, 256, 4)
                report = structures.check_copy(
                    made.segment.kind, made.segment.config, copy.ctypes.data, len(copy)
                )
                assert isinstance(report.problem, str)


def test_kinds_that_cannot_be_copied() -> None:
    refused(ConfigError, "log", structures.check_copy, SegmentKind.LOG, {}, 0, 0)


def test_a_lock_of_a_plain_segment(run: Run, segment_name: str, tmp_path: Path) -> None:
    with Segment.create(segment_name, 64) as segment:
        segment.join()
        with RobustLock(segment).hold():
            assert "in order" in run("check", segment_name).stdout
        poke(segment_name, layout.LOCK_OFFSET + layout.LockRecord.log_count.offset, 1)
        assert "unfinished step" in run("check", segment_name, status=1).stdout
