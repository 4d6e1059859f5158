"""Programs that run in an engine's environment, with this clone's package beside it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.sharing import NAME
from support.servers import bound, free_port

from lightcache.shm import Segment
from lightcache.shm.listing import list_segments

HERE = Path(__file__).parent
# One thread: OpenMP's threads spin, and two of them on a core make each step slow.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "SGLANG_USE_CPU_ENGINE": "1",
}


def command(program: str, *arguments: str) -> list[str]:
    return bound(os.environ["LIGHTCACHE_ENGINE_PYTHON"], HERE / program, *arguments)


def lives(group: int) -> bool:
    """Whether a process of this group runs."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its = file.read_text().rpartition(")")[2].split()[:3]
            if int(its) == group and state not in "ZX":
                return True
    return False


def end_all(process: subprocess.Popen[Any]) -> None:
    """Of a process that leads a session: engines leave children. Python's resource tracker is one
    of them, and has 3 s to remove names after the others have ended."""
    process.kill()
    process.wait()
    end = time.monotonic() + 3
    while lives(process.pid):
        if time.monotonic() >= end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def environment(engine: str, home: Path) -> dict[str, str]:
    folders = [os.environ["LIGHTCACHE_ENGINE_PATH"], str(HERE / engine), str(HERE)]
    return {**os.environ, **SETTINGS, "PYTHONPATH": ":".join(folders), "HOME": str(home)}


@pytest.fixture
def in_engine(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> Callable[..., str]:
    """`in_engine(program, argument...)`: what a file of this folder prints there. What engines have
    compiled is in their home."""
    engine = request.path.stem.removeprefix("test_")
    if os.environ.get("LIGHTCACHE_ENGINE") != engine:
        pytest.skip(f"runs in an environment of its own: .ci/engines {engine}")

    def run(program: str, *arguments: str) -> str:
        process = subprocess.Popen(
            command(program, *arguments),
            cwd=tmp_path,
            env=environment(engine, home),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=500)
        finally:
            end_all(process)
        assert process.returncode == 0, out[-4000:] + errors[-8000:]
        return out

    return run


class Told:
    """A program that does what lines of JSON say, and answers each with a line."""

    def __init__(self, engine: str, home: Path, *arguments: str) -> None:
        self._ended = False
        self._errors = (home / "errors").open("a")
        self._process = subprocess.Popen(
            command(f"{engine}_engine.py", *arguments),
            cwd=home,
            env=environment(engine, home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def until(self, word: str) -> str:
        """The rest of the next line that begins so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        said = Path(self._errors.name).read_text()
        raise AssertionError(f"it ended before {word}: {said[-8000:]}")

    def begin(self, do: str, **how: Any) -> None:
        """Ask, and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self._process.stdin.flush()

    def __call__(self, do: str, **how: Any) -> Any:
        """Ask, and wait for the answer."""
        self.begin(do, **how)
        return json.loads(self.until("OUT"))

    def kill(self) -> None:
        if self._ended:  # its number may be another's by now
            return
        self._ended = True
        end_all(self._process)
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def end(self) -> None:
        """Let it leave."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        status = self._process.wait(120)
        self.kill()
        assert status == 0


class Server:
    """A server that a line of a shell starts, asked over HTTP."""

    def __init__(self, line: str, home: Path, more: dict[str, str]) -> None:
        self._port = free_port()
        self._errors = (home / "errors").open("a")
        self._process = subprocess.Popen(
            bound("sh", "-c", f"exec {line} --host 127.0.0.1 --port {self._port}"),
            cwd=home,
            env=more,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
        )

    def until_ready(self) -> None:
        """Until it answers."""
        while True:
            try:
                self("/health")
                return
            except urllib.error.URLError:
                if self._process.poll() is not None:
                    said = Path(self._errors.name).read_text(errors="replace")
                    raise AssertionError(f"it ended: {said[-8000:]}") from None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.1)

    def __call__(self, path: str, ask: dict[str, Any] | None = None) -> str:
        """What it says."""
        data = None if ask is None else json.dumps(ask).encode()
        url = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        if not self._errors.closed:
            end_all(self._process)
            self._errors.close()


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all engines."""
    return tmp_path_factory.mktemp(request.path.stem.removeprefix("test_"))


@pytest.fixture(scope="module")
def caches() -> Iterator[None]:
    """Removes those of this run when all engines have ended: one that lives makes another."""
    yield
    for segment in list_segments():
        if segment.name == NAME or segment.name.startswith((f"{NAME}-", f"{NAME}.")):
            Segment.unlink(segment.name, force=True)


@pytest.fixture
def serve(
    request: pytest.FixtureRequest, home: Path, caches: None
) -> Iterator[Callable[[str], Server]]:
    """`serve(line)`: a server of the engine, whose command is found as a shell finds it."""
    engine = request.path.stem.removeprefix("test_")
    python, version = os.environ["LIGHTCACHE_ENGINE_PYTHON"], (HERE / "vllm.txt").read_text()
    # The build for CPUs has another name, and its command the address of the folder it was made in.
    version = version.split("==")[1].split()[0] + "+cpu"
    facts = home / "named" / f"vllm-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    command = home / "named" / "vllm"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} -m vllm.entrypoints.cli.main "$@"\n')
    command.chmod(0o755)
    how = environment(engine, home)
    how["PYTHONPATH"] += f":{home}/named"
    how["PATH"] = f"{home}/named:{how['PATH']}"
    how["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    started = []

    def begin(line: str) -> Server:
        started.append(Server(line, home, how))
        started[-1].until_ready()
        return started[-1]

    yield begin
    for one in started:
        one.kill()


@pytest.fixture(scope="module")
def start(
    request: pytest.FixtureRequest, home: Path, caches: None
) -> Iterator[Callable[..., Told]]:
    """`start(argument...)`: a `Told` engine."""
    engine = request.path.stem.removeprefix("test_")
    if os.environ.get("LIGHTCACHE_ENGINE") != engine:
        pytest.skip(f"runs in an environment of its own: .ci/engines {engine}")
    started = []

    def begin(*arguments: str) -> Told:
        started.append(Told(engine, home, *arguments))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
