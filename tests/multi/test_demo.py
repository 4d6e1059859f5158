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
from lightcache.tools.demo.messages import DENSE, SECRET, ModelSpec

pytest.importorskip("transformers")
# Models, several processes and demos on two cores.
pytestmark = [pytest.mark.models, pytest.mark.timeout(300)]

BuiltOnce = Callable[[str, Callable[[Path], object]], Path]
WaitUntil = Callable[[Callable[[], bool], str], None]
_SMALL = ("demo", "--users", "2", "--turns", "3")
_COMMAND = (sys.executable, "-c", "from lightcache.tools.cli import main; main()", *_SMALL)
_READY = r"^worker \d'* is ready \(pid (\d+)"
_TURN = r"^ *\d+ +\d+\.\d+ "


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """One with a short name: multiprocessing has a socket in it."""
    with tempfile.TemporaryDirectory(prefix="lc-") as folder:
        yield Path(folder)


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo whose temporary files are in a folder, ended whatever happens."""
    process = subprocess.Popen(
        [*_COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()  # its workers see the end of their pipes
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        sweep(prefix=f"demo-{process.pid}-")


@pytest.fixture(scope="module")
def tiny(built_once: BuiltOnce) -> str:
    """A checkpoint that computes a hundred times as fast as the model of `make demo`, and whose KV
    has the same size."""

    def save(folder: Path) -> None:
        from lightcache.tools.demo import model

        form = {**DENSE, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
        model.build(ModelSpec(form)).save_pretrained(folder)

    return str(built_once("demo-model", save))


def ran(*arguments: str, folder: Path, status: int = 0) -> str:
    """The output of a demo."""
    with started(*arguments, folder=folder) as process:
        out, _ = process.communicate()
        assert process.returncode == status, out
        assert left(process.pid) == []
    return out


def left(pid: int) -> list[str]:
    """Segments of the demo with that PID."""
    return [path.name for path in Path("/dev/shm").iterdir() if f".demo-{pid}-" in path.name]


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line that has the pattern."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"{pattern!r} was never printed:\n{seen}")


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def check_facts(facts: dict[str, Any]) -> None:
    """Hits that were shared, a kill, a restart, and equal answers."""
    assert facts["problems"] == []
    assert facts["turns"] == 6
    assert set(facts["hit_tokens"]) == {"host"}
    assert 0 < facts["hit_tokens"]["host"] < facts["prompt_tokens"]
    assert facts["killed"]["doomed_pages"] >= facts["killed"]["pages"] >= 2
    restart = facts["restart"]
    assert restart["turns"] == restart["reusing"] == 2
    assert restart["hit_tokens"]["storage"] > restart["prompt_tokens"] / 4
    assert facts["compared"] == facts["reusing"] + restart["reusing"]
    assert facts["largest_difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.crash
def test_all_of_it_holds(tiny: str, tmp_path: Path) -> None:
    check_facts(json.loads(ran("--json", "--model", tiny, folder=tmp_path)))
    assert list(tmp_path.glob("lightcache-demo-*")) == []


@pytest.mark.slow
@pytest.mark.crash
def test_a_hybrid_model(tmp_path: Path) -> None:
    """KV and recurrent states of one worker serve the other: up to saved states, on the grid."""
    facts = json.loads(ran("--json", "--model", "hybrid", folder=tmp_path))
    check_facts(facts)
    assert facts["hit_tokens"]["host"] % 64 == 0
    assert sum(facts["restart"]["hit_tokens"].values()) % 64 == 0


@pytest.mark.slow
def test_a_pool_that_is_too_small_has_storage(tiny: str, tmp_path: Path) -> None:
    """`memory:` ends with its worker: no restart."""
    small = ("--model", tiny, "--workers", "1", "--size", "5MiB", "--no-kill")
    facts = json.loads(ran("--json", "--storage", "memory:", *small, folder=tmp_path))
    assert facts["restart"] is None
    assert facts["hit_tokens"]["storage"] > 0


@pytest.mark.slow
def test_a_storage_that_was_given_stays(tiny: str, tmp_path: Path) -> None:
    given = ("--model", tiny, "--storage", f"disk:{tmp_path}/pages?capacity=64MiB")
    for least in (0, 300):
        out = ran("--json", "--no-kill", "--no-restart", *given, folder=tmp_path)
        assert json.loads(out)["hit_tokens"].get("storage", 0) >= least


@pytest.mark.slow
def test_nothing_from_storage_after_the_restart_is_a_problem(tiny: str, tmp_path: Path) -> None:
    given = ("--model", tiny, "--storage", f"flaky:read_fail=1:disk:{tmp_path}/x?capacity=64MiB")
    out = ran("--no-kill", "--workers", "1", *given, folder=tmp_path, status=1)
    assert "it did not hold: nothing came from storage after the restart" in out
    assert "All of it held" not in out


@pytest.mark.slow
@pytest.mark.crash
def test_a_worker_that_is_killed_twice_is_replaced_twice(tiny: str, tmp_path: Path) -> None:
    """Killed at any moment, not where the demo kills one; then its successor. All turns wait."""
    alone = ("--no-kill", "--no-restart", "--workers", "1", "--model", tiny)
    with started(*alone, folder=tmp_path) as process:
        pid = int(read_until(process, _READY)[1])
        read_until(process, _TURN)
        os.kill(pid, signal.SIGKILL)
        os.kill(int(read_until(process, r"' is ready \(pid (\d+)")[1]), signal.SIGKILL)
        out, _ = process.communicate()
        assert process.returncode == 0, out
        assert "'' is ready" in out
        assert "All of it held" in out
        assert left(process.pid) == []


def seeds() -> list[int]:
    """LIGHTCACHE_DEMO_KILLS of them, from LIGHTCACHE_TEST_SEED on."""
    first = int(os.environ.get("LIGHTCACHE_TEST_SEED", "0")) * 1000
    return list(range(first, first + int(os.environ.get("LIGHTCACHE_DEMO_KILLS", "1"))))


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("seed", seeds())
def test_any_process_is_killed_and_the_cache_goes_on(
    seed: int, wait_until: WaitUntil, tmp_path: Path
) -> None:
    """A worker, or the router's process, at any moment; a stranger who is attached goes on."""
    chance = random.Random(seed)
    with started("--no-kill", "--no-restart", folder=tmp_path) as process:
        workers = [int(read_until(process, _READY)[1]) for _ in range(2)]
        read_until(process, _TURN)
        (name,) = [each for each in left(process.pid) if each.endswith("-kv")]
        name = name.removeprefix("lightcache.")
        with lightcache.Cache.attach(name, secret=SECRET, role="stranger") as cache:
            for _ in range(chance.randrange(5)):
                read_until(process, _TURN)
            time.sleep(chance.random() / 5)  # the moment, within a turn
            victim = chance.choice([*workers, process.pid])
            os.kill(victim, signal.SIGKILL)
            out, _ = process.communicate()
            assert process.returncode == (-9 if victim == process.pid else 1), out
            if victim != process.pid:  # all of it held, but that the stranger keeps the cache
                problems = [line for line in out.splitlines() if "it did not hold" in line]
                assert problems
                assert all(name in line and "was not removed" in line for line in problems)
            for worker in workers:
                wait_until(lambda worker=worker: gone(worker), "the workers leave")  # type: ignore[misc]
            cache.reap()
            cache.evict(1)  # whoever makes room collects the doomed pages
            assert cache.check().clean, cache.check().message
            stats = cache.stats()
            assert (stats.writing, stats.doomed, stats.reservations, stats.tickets) == (0, 0, 0, 0)
            keys = cache.hash_pages(range(seed, seed + 160))
            with cache.reserve(keys) as new:
                new.publish()
            with cache.match(keys) as lease:
                assert len(lease) == 10
        sweep(prefix=f"demo-{process.pid}-")  # as the next demo does when it begins
        assert left(process.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status", "moment"),
    [
        (signal.SIGTERM, 143, _READY),
        (signal.SIGINT, 130, _TURN),
        (signal.SIGTERM, 143, r"^everything has ended"),
    ],
)
def test_an_interrupt_ends_and_removes_everything(
    sent: signal.Signals, status: int, moment: str, tiny: str, tmp_path: Path
) -> None:
    with started("--model", tiny, folder=tmp_path) as process:
        read_until(process, moment)
        if sent == signal.SIGINT:  # Ctrl-C: a terminal sends it to the whole group
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        out, _ = process.communicate()
        assert process.returncode == status, out
        assert "Traceback" not in out
        assert left(process.pid) == []
    assert list(tmp_path.glob("lightcache-demo-*")) == []


# The signal comes when a new process is asked for and what it shall run has not been sent.
_HALF = """
import os, signal, sys
from multiprocessing import reduction
from lightcache.tools.demo import processes

def half(*arguments, before=reduction.sendfds):
    os.kill(os.getpid(), signal.SIGTERM)
    before(*arguments)

processes._IMPORTED = ()
reduction.sendfds = half
with processes.terminable():
    processes.spawn("builtins:print")
"""


def test_a_signal_in_the_middle_of_a_start_waits() -> None:
    command = [sys.executable, "-c", _HALF]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 143, process.stderr
    assert process.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "lots"], "lots"),
        (["--svg", "/nowhere/x.svg"], "/nowhere/x.svg"),
        (["--storage", "hamster"], "expected a URL such as"),
        (["--model", "/nowhere"], "expected `hybrid`, or a folder with a config.json"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    out = ran(*arguments, folder=tmp_path, status=2)
    assert out.startswith("error: ")
    assert words in out
    assert len(out.splitlines()) == 1


@pytest.mark.slow
def test_what_a_worker_refuses_ends_the_demo(tmp_path: Path) -> None:
    out = ran("--device", "hamster", folder=tmp_path, status=2)
    assert re.search(r"^error: worker \d: device: expected one that torch can use", out, re.M)
    assert "Traceback" not in out


def test_the_model_and_its_wrong_answer_are_told_apart(tmp_path: Path) -> None:
    """A checkpoint is served, and an answer that is not the model's is found."""
    import numpy as np
    import transformers

    from lightcache.tools.demo import model
    from lightcache.tools.demo.messages import Answer, ModelSpec, Turn

    form = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=4096, intermediate_size=32, **form)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    built = model.build(ModelSpec(directory=str(tmp_path)))
    prompt = np.arange(20, dtype=np.int32)
    token, logprob = model.forward(built, prompt, None)

    def compared(token: int, logprob: float) -> tuple[bool, float]:
        turn = Turn(0, 0, 0, prompt, answer_tokens=1)
        return model.compare(built, Answer(turn, {}, [token], [logprob]))

    assert compared(token, logprob)[0]
    assert compared(token, logprob)[1] < 1e-5
    assert compared(token, logprob - 1)[1] == pytest.approx(1, abs=1e-5)
    assert not compared((token + 1) % 4096, logprob)[0]
