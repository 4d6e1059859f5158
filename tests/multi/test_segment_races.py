"""Segments under contention, killed processes, other PID namespaces and a full /dev/shm."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightcache.shm import Segment

RACE = Path(__file__).parent / "segment_race.py"
Script = Callable[..., Any]
Wait = Callable[[Callable[[], bool], str], None]


@functools.cache
def refused(*command: str) -> str:
    """Why this machine does not let us, or nothing."""
    try:
        done = subprocess.run(
            [*command, "true"], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip() or (f"status {done.returncode}" if done.returncode else "")


def need(*command: str) -> None:
    reason = refused(*command)
    if reason:
        pytest.skip(f"`{' '.join(command)}` is not permitted here: {reason}")


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.timeout(300)
def test_always_one_inode(segment_name: str) -> None:
    seed = os.environ.get("LIGHTCACHE_TEST_SEED", "1")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(RACE), segment_name, "25", "20", seed],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "nobody was killed before it had come in"


# ---------------------------------------------------------------- PID namespaces

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
MEMBER = """
import os, sys
from lightcache.shm import Segment
s = Segment.open(sys.argv[1], 100)
print(s.join(sys.argv[2]).slot, os.getpid(), flush=True)
sys.stdin.read()
print([(info.role, info.alive) for info in s.clients()], flush=True)
"""


def test_kills_across_pid_namespaces(segment_name: str, wait_until: Wait) -> None:
    """In every container the first process is number 1; only the locks tell them apart."""
    need(*CONTAINER)
    with Segment.open(segment_name, 100) as watcher:
        members = [
            subprocess.Popen(
                [*CONTAINER, sys.executable, "-c", MEMBER, segment_name, role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for role in ("left", "right")
        ]
        lines = [member.stdout.readline() for member in members if member.stdout]
        assert sorted(lines) == ["1 1\n", "2 1\n"]
        left, right = sorted(watcher.clients(), key=lambda info: info.role)
        assert left.pid == right.pid == 1
        assert left.pidns != right.pidns
        members[0].kill()  # and with it its child, whose number here we need not know
        members[0].wait()  # before its child's input ends: it would leave in order
        members[0].communicate()
        wait_until(
            lambda: [info.alive for info in watcher.clients() if info.role == "left"] == [False],
            "the kill in the other namespace is seen",
        )
        report, _ = members[1].communicate("")
        assert "('left', False)" in report
        assert "('right', True)" in report
        assert members[1].returncode == 0


# ---------------------------------------------------------------- a small /dev/shm

SMALL = 'mount -t tmpfs -o size={size}k tmpfs /dev/shm && exec "$@"'


def run_in_small_shm(size: int, source: str, path: Path) -> None:
    need("unshare", "-m", "sh", "-c", SMALL.format(size=64), "sh")
    path.write_text(source)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", SMALL.format(size=size), "sh", sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_full_shm_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    run_in_small_shm(
        512,
        """
import os
from lightcache.errors import NoSpace
from lightcache.shm import Segment, memory
first = Segment.create("first", 200_000)
first.join()
for check in (True, False):     # found beforehand, and found by the allocation itself
    for make in (Segment.create, Segment.open):
        try: make("second", 400_000)
        except NoSpace as error: text = str(error)
        else: raise SystemExit("there was room")
        assert "needs 450560 bytes" in text and "free in /dev/shm" in text, text
        assert os.listdir("/dev/shm") == ["lightcache.first"]
    room = memory.available()
    memory.available = lambda: memory.FreeMemory(1 << 40, "free in /dev/shm")
third = Segment.create("third", 200_000 - 49152)    # what is left is usable to the last page
third.view(0, third.nbytes)[-1]
third.close(); first.close()
assert os.listdir("/dev/shm") == []
""",
        tmp_path / "full.py",
    )


def test_what_the_dead_left_is_swept_before_no_space(tmp_path: Path) -> None:
    run_in_small_shm(
        512,
        """
import os, signal
from lightcache.errors import NoSpace
from lightcache.shm import Segment, memory
for lifetime in ("attached", "persistent"):
    for blind in (False, True):
        pid = os.fork()
        if pid == 0:
            dead = Segment.create("dead", 200_000, lifetime=lifetime)
            dead.join()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        usual = memory.available
        if blind:               # the look beforehand sees room; the allocation does not find it
            memory.available = lambda: memory.FreeMemory(1 << 40, "free in /dev/shm")
        try: Segment.create("living", 300_000).close()
        except NoSpace: assert lifetime == "persistent"
        else: assert lifetime == "attached"
        memory.available = usual
        assert Segment.unlink("dead") is (lifetime == "persistent")
assert os.listdir("/dev/shm") == []
""",
        tmp_path / "swept.py",
    )
