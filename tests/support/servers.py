"""Servers that tests talk to: real ones, on loopback, started and stopped by fixtures."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LOWEST = 18_000  # of the ports of servers; clients of Mooncake look for theirs below
STARTING = 60.0  # seconds after which a server that does not answer is a failure


def free_port() -> int:
    """A port of loopback that nobody listens on just now. It is below those that the system gives
    to connections: none of another test takes it before a server does, or between two of them."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = LOWEST + secrets.randbelow(first - LOWEST) if first > LOWEST else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody answers on this port of loopback."""
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def hold(process: int) -> None:
    """Stop a process. When this returns none of its threads runs: the signal alone would let them
    answer once more."""
    os.kill(process, signal.SIGSTOP)
    end = time.monotonic() + STARTING
    while any(state not in "Tt" for state in _states(process)):
        assert time.monotonic() < end, f"process {process} does not stop"
        time.sleep(0.001)


def _states(process: int) -> Iterator[str]:
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            yield stat.read_text().rpartition(") ")[2][:1]


def bound(*command: str | Path) -> list[str]:
    """The command of a process that ends with this one: nothing of ours runs when a watchdog ends
    the tests."""
    first = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    return [*first, *map(str, command)]


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], ready: Callable[[], bool], log: Path, **how: object
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that is ready; killed at the end, if it lives.

    Args:
        ready: whether it answers by now.
        log: where its output goes; a failure shows the end of it.
        how: for Popen.
    """
    with log.open("ab") as out:
        server = subprocess.Popen(
            bound(*command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            **how,  # type: ignore[call-overload]
        )
    try:
        end = time.monotonic() + STARTING
        while not ready():
            text = log.read_text(errors="replace")[-2000:]
            assert server.poll() is None, f"{command[0]} ended: {text}"
            assert time.monotonic() < end, f"{command[0]} does not answer: {text}"
            time.sleep(0.01)
        assert server.poll() is None, f"{command[0]} ended; another server has its port"
        yield server
    finally:
        server.kill()
        server.wait()
