"""Clients in processes of their own that a test stops, continues and kills; see stopped_side.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi import pausing

TESTS = Path(__file__).parent.parent
DEADLINE = 60.0  # seconds; a watchdog, nothing is measured


class Client:
    """A process of stopped_side.py, attached and waiting for orders."""

    def __init__(self, name: str, role: str, hook: Path, gate: Path) -> None:
        """Start it. `gate`: a file of its own."""
        gate.write_bytes(bytes(16))
        self.role, self.gate = role, np.memmap(gate, np.uint32, "r+")
        program = TESTS / "multi" / "stopped_side.py"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(program), name, role, str(hook), str(gate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": pausing.python_path(TESTS),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        assert self.line() == "ready"

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    def line(self) -> str:
        """Its next line."""
        assert self.process.stdout
        text = self.process.stdout.readline().strip()
        assert text, f"{self.role} ended with {self.process.wait()}"
        return text

    def send(self, order: str) -> None:
        """Tell it what to do."""
        assert self.process.stdin
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What became of it; blocks until it is done."""
        return json.loads(self.line())

    def ask(self, order: str) -> Any:
        """Both."""
        self.send(order)
        return self.answer()

    def stop_at(self, point: int, occurrence: int, order: str) -> None:
        """Let it begin what it is told, and stop it with SIGSTOP where it passes a point. When
        this returns it stands there, and goes on with SIGCONT."""
        self.ask(f"gate {point} {occurrence}")
        self.send(order)
        end = time.monotonic() + DEADLINE
        while not self.gate[0]:
            assert time.monotonic() < end, f"{self.role} did not come to point {point}"
            time.sleep(0.001)
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        self.gate[1] = 1

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; when this returns nothing is left of it, not even in /proc."""
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        """It lets go of what it holds and leaves."""
        self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0


class Clients:
    """Those of one test, on one cache."""

    def __init__(self, name: str, hook: Path, folder: Path) -> None:
        """Nobody yet."""
        self.name, self.hook, self.folder = name, hook, folder
        self.all: list[Client] = []

    def __call__(self, role: str) -> Client:
        """One more."""
        made = Client(self.name, role, self.hook, self.folder / f"gate-{len(self.all)}")
        self.all.append(made)
        return made

    def end(self) -> None:
        """Those that live leave in order."""
        for client in self.all:
            if client.process.poll() is None:
                client.end()

    def kill(self) -> None:
        """Whatever happened, none outlives the test."""
        for client in self.all:
            if client.process.poll() is None:
                client.kill()


def hook_library(folder: Path) -> Path:
    """The library of gates, or a skip that says why there is none."""
    if pausing.missing():
        pytest.skip(pausing.missing())
    return pausing.compile_hook(folder)
