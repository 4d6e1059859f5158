"""The processes of a run: started, watched, replaced when a worker dies, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from lightcache.errors import LightcacheError
from lightcache.shm.sweep import sweep
from lightcache.tools.demo.messages import Failed, Lost, Mailbox
from lightcache.tools.demo.settings import Settings

_TICK = 0.1  # seconds between looks at the processes
_SILENCE = 300.0  # seconds without a word after which a run has failed
_LEAVE = 10.0  # seconds to leave when told to
_LIVES = 5  # of one worker; a worker that dies that often dies of something


def _leave(number: int, frame: object) -> None:
    """As Ctrl-C does: everything is ended and removed on the way out, which a second signal would
    leave half done."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No signal that ends a run is heard meanwhile: a second one would leave what the first one
    began to remove. For what takes seconds at most."""
    heard = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is an exception within."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class RunFailed(LightcacheError):
    """A process of the run could not go on, or died and cannot be replaced."""


@dataclass
class Actor:
    """A process with a role."""

    role: str
    number: int
    life: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    """Its standard error, in an unnamed file."""
    started: float = field(default_factory=time.monotonic)
    killed_at: float | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role} {self.number}" if self.role == "worker" else f"the {self.role}"

    def last_words(self) -> str:
        """How it ended."""
        code = self.process.returncode
        how = f"exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"{how}; {lines[-1]}" if lines else how


@dataclass
class Stage:
    """Router and workers of one run. Its `with` ends them all and removes what they made."""

    settings: Settings
    actors: list[Actor] = field(default_factory=list)

    def __enter__(self) -> Stage:
        self._stack = contextlib.ExitStack()
        self._terminate = signal.signal(signal.SIGTERM, _leave)
        try:
            self.inbox = self._stack.enter_context(Mailbox(self.settings.report_ring))
            self.router = self._stack.enter_context(Mailbox(self.settings.router_ring))
            self.start("router")
            for worker in range(self.settings.workers):
                self.start("worker", worker)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        # A second signal would leave what the first one began to remove; it takes seconds at most.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._end()
        finally:
            signal.signal(signal.SIGTERM, self._terminate)
            signal.signal(signal.SIGINT, interrupt)

    def _end(self) -> None:
        for actor in self.actors:
            actor.process.terminate()
        end = time.monotonic() + _LEAVE
        for actor in self.actors:
            try:
                actor.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                actor.process.kill()
                actor.process.wait()
            actor.errors.close()
        try:
            self._stack.close()
        finally:
            sweep(prefix=f"{self.settings.run}-")

    def start(self, role: str, number: int = 0, lives: int = 0) -> Actor:
        """Start a process: a session of its own, so that Ctrl-C reaches the report alone."""
        arguments = [str(number), str(lives)] if role == "worker" else []
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is buried
        process = subprocess.Popen(
            [
                sys.executable,
                *("-m", f"lightcache.tools.demo.{role}", self.settings.to_json()),
                *arguments,
            ],
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        actor = Actor(role, number, lives, process, errors)
        self.actors.append(actor)
        return actor

    def age(self, worker: int, lives: int) -> float:
        """Seconds since a worker was started."""
        return next(
            time.monotonic() - actor.started
            for actor in self.actors
            if (actor.role, actor.number, actor.life) == ("worker", worker, lives)
        )

    def kill(self, worker: int, lives: int) -> None:
        """SIGKILL, and wait until it is dead."""
        for actor in self.actors:
            if (actor.role, actor.number, actor.life) == ("worker", worker, lives):
                actor.killed_at = time.monotonic()
                actor.process.kill()
                actor.process.wait()

    def events(self) -> Iterator[Any]:
        """What the processes say, and `Lost` where a worker has died: forever. Blocks.

        Raises:
            RunFailed: somebody gave up, or died and is not replaced; or silence.
        """
        heard = time.monotonic()
        while True:
            for message in self._received(_TICK):
                heard = time.monotonic()
                yield message
            for actor in [each for each in self.actors if each.process.poll() is not None]:
                yield from self._received(0)  # what it said before it ended
                yield self._bury(actor)
            if time.monotonic() - heard > _SILENCE:
                raise RunFailed(f"nothing was heard for {_SILENCE:.0f} s; run `lightcache ls`")

    def _received(self, timeout: float) -> Iterator[Any]:
        while (message := self.inbox.receive(timeout)) is not None:
            if isinstance(message, Failed):
                raise RunFailed(f"{message.role}: {message.reason}")
            yield message
            timeout = 0

    def _bury(self, actor: Actor) -> Lost:
        """Somebody has ended: say so to the router, and replace a worker."""
        self.actors.remove(actor)
        words = actor.last_words()
        actor.errors.close()
        if actor.role != "worker" or actor.process.returncode >= 0 or actor.life + 1 >= _LIVES:
            raise RunFailed(f"{actor.name} has ended: {words}")
        lost = Lost(actor.number, actor.life, actor.killed_at or time.monotonic())
        self.router.send(lost)
        self.start("worker", actor.number, actor.life + 1)
        return lost
