"""The processes of a run: started, watched, replaced when they are killed, and ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from lightcache import LightcacheError
from lightcache.shm import sweep
from lightcache.tools.demo.messages import Failed

SILENCE = 300.0  # seconds without a message after which a run has failed
LEAVE = 30.0  # seconds that a process has to leave; it writes what is queued for storage first
_LIVES = 5  # of one worker: one that dies more often has a reason
# Characters of the name of the folder of temporary files: in it multiprocessing has a folder with a
# socket, whose address has 107 characters at most.
_TEMPORARY = 75
# What a process of a model imports, which takes seven seconds of a processor.
_IMPORTED = (
    "lightcache.tools.demo.worker",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_5.modeling_qwen3_5",
)


class RunFailed(LightcacheError):
    """A process could not continue, or died and is not replaced."""


def run_name(kind: str) -> str:
    """A name that no other run has, not even one with the same PID in another container."""
    return f"{kind}-{os.getpid()}-{secrets.token_hex(3)}"


# ---- Signals. Ctrl-C and SIGTERM end a run in the process that was started, and nowhere else.


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: everything is removed on the way out."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Both are delivered at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- One process


def spawn(target: str, *arguments: Any) -> tuple[Any, Connection]:
    """Start a process that runs `module:function`, with a pipe as its last argument. It shall leave
    when the pipe is closed, as it is when this process dies. A signal that comes meanwhile waits:
    one between the two halves of a start would leave a traceback behind.

    It is forked from a process that has imported its modules once for all, and has done nothing
    else: it holds no cache, and has not looked at a GPU. So the environment of all workers is that
    of the first start. If the folder of temporary files has too long a name for the socket of that
    process, each imports its modules itself."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    method = "forkserver" if len(tempfile.gettempdir()) <= _TEMPORARY else "spawn"
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload(list(_IMPORTED))
    ours, theirs = context.Pipe()
    process = context.Process(target=_begin, args=(target, *arguments, theirs), daemon=True)
    resource_tracker.ensure_running()  # its start would unblock both in the block
    with _signals_wait():
        process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return process, ours


def _begin(target: str, *arguments: Any) -> None:
    """In the new process, where both signals are blocked as they were in its parent. Ctrl-C stays
    so: a terminal sends it to all processes."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    pkgutil.resolve_name(target)(*arguments)


# ---- The workers of a run


@dataclass(eq=False)
class WorkerProcess:
    """A worker, from its start to its death."""

    name: str  # its successor has the same
    number: int
    life: int  # dead workers of the same number before it
    process: Any
    pipe: Connection
    killed_at: float | None = None

    @property
    def label(self) -> str:
        """For people."""
        return str(self.number) + "'" * self.life

    def kill(self) -> None:
        """SIGKILL."""
        self.killed_at = time.monotonic()
        self.process.kill()


class Workers:
    """The worker processes of a run."""

    def __init__(self, config: Any, count: int, target: str, stack: ExitStack) -> None:
        """Start them.

        Args:
            config: of the workers; the names of all segments begin with `config.run`.
            target: what each process runs, with the config, its name and its pipe.
            stack: ends them.
        """
        self.count = count
        self._config, self._target = config, target
        self._living: list[WorkerProcess] = []
        stack.callback(self._end)
        for number in range(count):
            self._start(number, 0)

    def _start(self, number: int, life: int) -> None:
        with _signals_wait():  # one that was started is in the list
            name = f"worker-{number}"
            started = spawn(self._target, self._config, name)
            self._living.append(WorkerProcess(name, number, life, *started))

    def messages(self) -> Iterator[tuple[WorkerProcess, Any]]:
        """What workers send, and None where one was killed: its successor is started. Blocks until
        there is any.

        Raises:
            RunFailed: a worker gave up, ended by itself or died too often, or all are silent.
        """
        pipes = {worker.pipe: worker for worker in self._living}
        ready = connection.wait(list(pipes), SILENCE)
        if not ready:
            raise RunFailed(f"no worker said anything for {SILENCE:.0f} s; run `lightcache ls`")
        for worker in (pipes[pipe] for pipe in ready if isinstance(pipe, Connection)):
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                message = None
                self._replace(worker)
            if isinstance(message, Failed):
                raise RunFailed(f"worker {worker.label}: {message.reason}")
            yield worker, message

    def _replace(self, worker: WorkerProcess) -> None:
        self._living.remove(worker)
        worker.killed_at = worker.killed_at or time.monotonic()
        worker.process.join(LEAVE)
        code = worker.process.exitcode
        if code is None or code >= 0 or worker.life + 1 >= _LIVES:
            raise RunFailed(f"worker {worker.label} has ended with exit status {code}")
        self._start(worker.number, worker.life + 1)

    def _end(self) -> None:
        with _signals_wait():
            for worker in self._living:
                worker.pipe.close()
            end = time.monotonic() + LEAVE
            for worker in self._living:
                worker.process.join(max(0.0, end - time.monotonic()))
                worker.process.kill()  # harmless to one that has left
                worker.process.join()
            sweep(prefix=f"{self._config.run}-")  # what killed workers have left
