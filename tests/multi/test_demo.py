"""The demo, with real models in real processes: that it holds, and what deaths leave behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lightcache
from lightcache.shm import sweep
from lightcache.tools.demo.scratch import PREFIX, Scratch, sweep_folders
from lightcache.tools.demo.settings import SECRET

pytest.importorskip("transformers")
# Models, several processes and demos on two cores.
pytestmark = [pytest.mark.models, pytest.mark.timeout(300)]

WaitUntil = Callable[[Callable[[], bool], str], None]
_SMALL = ("--users", "2", "--turns", "3")
_COMMAND = (sys.executable, "-c", "from lightcache.tools.cli import main; main()", "demo", *_SMALL)


def left(pid: int) -> list[str]:
    """Segments and temporary folders of the demo with that PID."""
    segments = [path.name for path in Path("/dev/shm").iterdir() if f".demo-{pid}-" in path.name]
    folders = Path(tempfile.gettempdir()).glob(f"{PREFIX}{pid}-*")
    return segments + [path.name for path in folders]


def processes(pid: int, role: str = "") -> list[int]:
    """Living processes of a role in the demo with that PID."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:  # it is gone
            continue
        if f'"run": "demo-{pid}-' in line and f"lightcache.tools.demo.{role}" in line:
            found.append(int(path.parts[2]))
    return found


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A demo, ended whatever happens."""
    process = subprocess.Popen(
        [*_COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        for each in processes(process.pid):
            os.kill(each, signal.SIGKILL)
        sweep(prefix=f"demo-{process.pid}-")
        sweep_folders()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Its output up to the first line that has the pattern."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"{pattern!r} was never said:\n{seen}")


def came_back(facts: dict[str, Any]) -> bool:
    """Whether all conversations went on behind a restart, the first from storage alone."""
    found = facts["restart"]
    assert found["turns"] == found["reused_turns"] == 3
    assert facts["hit_tokens"].get("storage", 0) == 0
    assert sum(found["hit_tokens"].values()) < found["prompt_tokens"]
    return bool(found["hit_tokens"]["storage"] > found["prompt_tokens"] / found["turns"] / 2)


@pytest.mark.slow
@pytest.mark.crash
def test_all_of_it_holds() -> None:
    with started("--json") as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    facts = json.loads(out)
    assert facts["problems"] == []
    assert facts["turns"] >= 6
    assert 0 < facts["hit_tokens"]["host"] < facts["prompt_tokens"]
    assert facts["killed"]["doomed_pages"] >= 1
    assert facts["clean"]
    assert came_back(facts)
    assert facts["verified_turns"] == facts["reused_turns"] + facts["restart"]["reused_turns"]
    assert facts["largest_difference"] < 1e-4
    assert facts["loaded_bytes"] > 0
    assert facts["offloaded_bytes"] > 0
    assert left(process.pid) == []


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("routing", ["random", "prefix"])
def test_it_holds_however_turns_are_routed(routing: str) -> None:
    with started("--json", "--no-restart", "--routing", routing) as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    facts = json.loads(out)
    assert facts["problems"] == []
    assert facts["killed"]["doomed_pages"] >= 1
    assert facts["restart"] is None
    assert facts["hit_tokens"]["host"] > 0
    assert (facts["hit_tokens"].get("device", 0) > 0) == (routing == "prefix")
    assert left(process.pid) == []


@pytest.mark.slow
@pytest.mark.crash
def test_a_hybrid_model() -> None:
    """Keys and values, and recurrent states, of one worker serve the other."""
    with started("--json", "--model", "hybrid") as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    facts = json.loads(out)
    assert facts["problems"] == []
    assert facts["killed"]["doomed_pages"] >= 1
    assert 0 < facts["hit_tokens"]["host"] < facts["prompt_tokens"]
    assert facts["hit_tokens"]["host"] % 64 == 0, "only up to states, which are on the grid"
    assert came_back(facts)
    assert sum(facts["restart"]["hit_tokens"].values()) % 64 == 0
    assert facts["largest_difference"] < 1e-4
    assert left(process.pid) == []


@pytest.mark.slow
def test_a_pool_that_is_too_small_has_storage_behind_it() -> None:
    """One worker, who has all of what is in its memory."""
    small = ("--workers", "1", "--size", "5MiB", "--storage", "memory:", "--no-kill")
    with started("--json", *small) as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    facts = json.loads(out)
    assert facts["problems"] == []
    assert facts["hit_tokens"]["storage"] > 0
    assert facts["hit_tokens"]["host"] > 0
    assert facts["verified_turns"] == facts["reused_turns"]
    assert left(process.pid) == []


@pytest.mark.slow
def test_a_storage_that_was_given_stays(tmp_path: Path) -> None:
    """With its index gone: a second demo finds from its first turn on what the first one stored."""
    url = f"disk:{tmp_path}/pages?capacity=64MiB"
    for expected in (0, 400):
        with started("--json", "--no-kill", "--no-restart", "--storage", url) as process:
            out, _ = process.communicate()
        assert process.returncode == 0, out
        facts = json.loads(out)
        assert facts["problems"] == []
        assert facts["hit_tokens"].get("storage", 0) >= expected
        assert left(process.pid) == []
        (folder,) = (tmp_path / "pages").iterdir()
        assert Scratch(tmp_path).indexes() == [], "of the disk"
        assert any(folder.glob("slots-*"))


@pytest.mark.slow
def test_nothing_from_storage_behind_a_restart_is_a_problem(tmp_path: Path) -> None:
    url = f"flaky:read_fail=1:disk:{tmp_path}/pages?capacity=64MiB"
    with started("--json", "--no-kill", "--workers", "1", "--storage", url) as process:
        out, _ = process.communicate()
    assert process.returncode == 1, out
    facts = json.loads(out[out.index("{") :])
    (problem,) = facts["problems"]
    assert problem.startswith("nothing came from storage behind the restart")
    assert facts["restart"]["hit_tokens"].get("storage", 0) == 0
    assert left(process.pid) == []


@pytest.mark.slow
@pytest.mark.crash
def test_a_worker_killed_behind_a_restart_is_replaced() -> None:
    with started("--no-kill") as process:
        seen = read_until(process, r"^starting anew")
        seen += read_until(process, r"is there")
        os.kill(processes(process.pid, "worker")[0], signal.SIGKILL)
        out, _ = process.communicate()
    assert process.returncode == 0, seen + out
    assert "is there again" in out
    assert "All of it held" in out
    assert left(process.pid) == []


@pytest.mark.slow
@pytest.mark.crash
def test_a_killed_worker_is_replaced() -> None:
    """Killed at any moment, not where it was arranged."""
    with started("--no-kill", "--no-restart") as process:
        seen = read_until(process, r"^turn ")
        os.kill(processes(process.pid, "worker")[0], signal.SIGKILL)
        out, _ = process.communicate()
    assert process.returncode == 0, seen + out
    assert "is dead" in out
    assert "is there again" in out
    assert "All of it held" in out
    assert left(process.pid) == []


@pytest.mark.slow
@pytest.mark.crash
def test_a_killed_router_ends_the_demo() -> None:
    with started() as process:
        seen = read_until(process, r"is there")
        os.kill(processes(process.pid, "router")[0], signal.SIGKILL)
        out, _ = process.communicate()
        assert process.returncode == 2, seen + out
        assert out.splitlines()[-1] == "error: the router has ended: killed by SIGKILL"
        assert processes(process.pid) == []
        assert left(process.pid) == []


@pytest.mark.slow
@pytest.mark.crash
def test_nobody_outlives_a_killed_report(wait_until: WaitUntil) -> None:
    with started() as process:
        read_until(process, r"^turn ")
        process.kill()
        process.wait()
        wait_until(lambda: not processes(process.pid), "the processes of the demo leave")
        sweep(prefix="demo-")  # as the next demo does when it begins
        sweep_folders()
        assert left(process.pid) == []


def seeds() -> list[int]:
    """LIGHTCACHE_DEMO_KILLS of them, from LIGHTCACHE_TEST_SEED on."""
    first = int(os.environ.get("LIGHTCACHE_TEST_SEED", "0")) * 1000
    return list(range(first, first + int(os.environ.get("LIGHTCACHE_DEMO_KILLS", "2"))))


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("seed", seeds())
def test_whoever_is_killed_the_cache_goes_on(seed: int, wait_until: WaitUntil) -> None:
    """Any process at any moment, with somebody else attached, who goes on afterwards."""
    chance = random.Random(seed)
    with started("--no-kill", "--no-restart") as process:
        read_until(process, r"^turn ")
        (name,) = [each for each in left(process.pid) if each.endswith("-cache")]
        name = name.removeprefix("lightcache.")
        with lightcache.Cache.attach(name, secret=SECRET, role="stranger") as cache:
            for _ in range(chance.randrange(5)):
                read_until(process, r"^turn |^checking")
            time.sleep(chance.random() / 5)  # the moment, within a turn
            role = chance.choice(["worker", "router", "report"])
            victims = processes(process.pid, role) or [process.pid]
            os.kill(victims[0], signal.SIGKILL)
            out = process.communicate()[0] if role != "report" else ""
            process.wait()
            assert process.returncode == {"worker": 1, "router": 2, "report": -9}[role], out
            if role == "worker":  # all of it held, but that we are in the cache still
                problems = [line for line in out.splitlines() if "it did not hold" in line]
                assert [line.endswith("-cache was not removed") for line in problems] == [True]
            wait_until(lambda: not processes(process.pid), "the processes of the demo leave")

            cache.reap()
            cache.evict(1)  # whoever makes room collects the doomed pages
            assert cache.check().clean, cache.check().message
            stats = cache.stats()
            assert (stats.writing, stats.doomed, stats.reservations, stats.tickets) == (0, 0, 0, 0)
            keys = cache.hash_pages(range(seed, seed + 160))
            with cache.reserve(keys) as new:
                assert len(new.pages) == 10
                new.publish()
            with cache.match(keys) as lease:
                assert len(lease) == 10
    sweep(prefix=f"demo-{process.pid}-")  # as the next demo does when it begins
    assert left(process.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", [r"^starting", r"^turn ", r"^everything has ended"])
def test_an_interrupt_ends_and_removes_everything(
    sent: signal.Signals, status: int, moment: str
) -> None:
    with started() as process:
        seen = read_until(process, moment)
        process.send_signal(sent)
        out, _ = process.communicate()
        assert process.returncode == status, seen + out
        assert "Traceback" not in out
        assert processes(process.pid) == []
        assert left(process.pid) == []


@pytest.mark.slow
def test_two_at_once() -> None:
    with started("--no-kill") as one, started("--no-kill", "--no-restart", "--seed", "1") as other:
        outs = [process.communicate()[0] for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], "\n".join(outs)
    assert left(one.pid) == left(other.pid) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda:77"], "cpu works everywhere"),
        (["--device", "hamster"], "cpu works everywhere"),
        (["--trace", "/nowhere"], "/nowhere"),
        (["--size", "lots"], "lots"),
        (["--svg", "/nowhere/x.svg"], "/nowhere/x.svg"),
        (["--svg", "/tmp"], "expected a file that can be written, found '/tmp'"),
        (["--storage", "hamster"], "expected a URL such as 'memory:', found 'hamster'"),
        (["--storage", "redis://127.0.0.1:1"], "127.0.0.1:1"),
        (["--storage", "stack:memory:|tape:"], "expected a scheme of"),
        (["--storage", "disk:/nowhere/x?capacity=few"], "few"),
        (["--storage", "memory:?pages=few"], "pages: expected a number, found 'few'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    with started(*arguments) as process:
        out, _ = process.communicate()
    assert process.returncode == 2, out
    last = out.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert "Traceback" not in out
    if "--device" not in arguments:  # which only a worker can tell
        assert "starting" not in out
    assert left(process.pid) == []
