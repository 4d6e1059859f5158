"""The play: start, conversations, one kill, the end of everything, a restart, and the checks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from lightcache import Cache, LightcacheError
from lightcache.shm import list_segments, sweep
from lightcache.tools.demo import messages
from lightcache.tools.demo.conversations import Conversations, Turn
from lightcache.tools.demo.messages import SECRET, Answer, ModelSpec, Tokens, WorkerConfig
from lightcache.tools.demo.report import Kill, Outcome, Served, Show
from lightcache.tools.demo.router import Member, Router

_SILENCE = 300.0  # seconds without a message after which a run has failed
_LEAVE = 30.0  # seconds that a worker has to leave; it writes what is queued for storage first
_LIVES = 5  # of one worker: one that dies more often has a reason
_RESUMED = 4  # conversations that continue after the restart
# Characters of the name of the folder of temporary files: in it multiprocessing has a folder with a
# socket, whose address has 107 characters at most.
_TEMPORARY = 75
# What a process of a model imports, which takes seven seconds of a processor.
_IMPORTED = (
    "lightcache.tools.demo.process",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_5.modeling_qwen3_5",
)


class RunFailed(LightcacheError):
    """A process could not continue, or died and is not replaced."""


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    config: WorkerConfig
    talk: Conversations
    workers: int = 2
    kill: bool = True
    restart: bool = True


def run_name(kind: str) -> str:
    """A name that no other run has, not even one with the same PID in another container."""
    return f"{kind}-{os.getpid()}-{secrets.token_hex(3)}"


def run(plan: Plan, show: Show) -> Outcome:
    """All of it. Blocks.

    Raises:
        RunFailed: a process could not continue.
    """
    began, talk = time.monotonic(), plan.talk
    sweep(prefix="demo-")  # of demos whose processes were all killed
    outcome = Outcome(talk.total, plan.kill, plan.restart)
    with _terminable():
        with Stage(plan.config, plan.workers, outcome, show) as stage:
            kill_from = talk.total // 2 if plan.kill else None
            stage.serve(talk.begin(), talk.answered, outcome.turns, talk.total, kill_from)
            stage.check()
        if plan.restart:
            _restart(plan, outcome, show)
        _recompute(plan.config.model, outcome, show)
    outcome.seconds = time.monotonic() - began
    return outcome


def _restart(plan: Plan, outcome: Outcome, show: Show) -> None:
    """Continue some conversations with what storage has. The first turn is asked alone: the cache
    is empty, so whatever it reuses comes from storage."""
    show.say("everything has ended, what is left is in storage; starting again", "yellow")
    config = replace(plan.config, run=f"{plan.config.run}-again")
    first, *others = plan.talk.resume(_RESUMED)
    outcome.wanted_again = 1 + len(others)

    def following(number: int, answer: Tokens) -> list[Turn]:
        return others if number == first.number else []

    with Stage(config, plan.workers, outcome, show) as stage:
        stage.serve([first], following, outcome.again, outcome.wanted_again)
        stage.check()


def _recompute(spec: ModelSpec, outcome: Outcome, show: Show) -> None:
    """Compare the answers that reused tokens with those of a fresh process that has no cache."""
    chosen = outcome.reusing
    show.say(f"computing {len(chosen)} turns again, in a fresh process without a cache")
    process, pipe = spawn(_reference, spec)
    try:
        for served in chosen:
            answer = served.answer
            pipe.send((served.turn.prompt, answer.tokens, answer.logprobs))
            if not pipe.poll(_SILENCE):
                raise RunFailed(f"the reference said nothing for {_SILENCE:.0f} s")
            outcome.compared[served.turn.number] = pipe.recv()
    except (EOFError, OSError):
        process.join(_LEAVE)
        raise RunFailed(f"the reference has ended with exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: everything is removed on the way out."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- Processes


def spawn(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process with a pipe as its last argument. It shall leave when the pipe is closed, as
    it is when this process dies. Ctrl-C does not reach it: this process handles that. A signal that
    comes meanwhile waits: one between the two halves of a start would leave a traceback behind.

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
    with _blocked(signal.SIGINT, signal.SIGTERM):
        process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return process, ours


def _begin(target: Callable[..., None], *arguments: Any) -> None:
    """In the new process, where both signals are blocked as they were in its parent."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    target(*arguments)


@contextlib.contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """These signals are delivered at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker(config: WorkerConfig, name: str, pipe: Connection) -> None:
    from lightcache.tools.demo import process  # torch is imported in the worker's process alone

    process.run(config, name, pipe)


def _reference(spec: ModelSpec, pipe: Connection) -> None:
    from lightcache.tools.demo import model

    model.reference(spec, pipe)


class Crew:
    """The workers of a run: started, watched, replaced. Its `with` ends them all."""

    def __init__(self, config: WorkerConfig, target: Callable[..., None] = _worker) -> None:
        """Args:
        target: what each process runs, as `lightcache.tools.demo.process.run`.
        """
        self._config, self._target = config, target
        self.members: list[Member] = []

    def start(self, number: int, life: int = 0) -> Member:
        """Start a worker."""
        with _blocked(signal.SIGINT, signal.SIGTERM):  # one that was started is a member
            spawned = spawn(self._target, self._config, f"worker-{number}-{life}")
            self.members.append(Member(number, life, *spawned))
        return self.members[-1]

    def messages(self) -> Iterator[tuple[Member, Any]]:
        """What workers send, and None where one was killed: its successor is started. Blocks until
        there is any.

        Raises:
            RunFailed: a worker gave up, ended by itself or died too often, or all are silent.
        """
        pipes = {member.pipe: member for member in self.members}
        ready = connection.wait(list(pipes), _SILENCE)
        if not ready:
            raise RunFailed(f"no worker said anything for {_SILENCE:.0f} s; run `lightcache ls`")
        for member in (pipes[pipe] for pipe in ready if isinstance(pipe, Connection)):
            try:
                message = member.pipe.recv()
            except (EOFError, OSError):
                message = None
                self._replace(member)
            if isinstance(message, messages.Failed):
                raise RunFailed(f"worker {member.label}: {message.reason}")
            yield member, message

    def _replace(self, member: Member) -> None:
        self.members.remove(member)
        member.killed_at = member.killed_at or time.monotonic()
        member.process.join(_LEAVE)
        code = member.process.exitcode
        if code is None or code >= 0 or member.life + 1 >= _LIVES:
            raise RunFailed(f"worker {member.label} has ended with exit status {code}")
        self.start(member.number, member.life + 1)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        with _blocked(signal.SIGINT, signal.SIGTERM):
            for member in self.members:
                member.pipe.close()
            end = time.monotonic() + _LEAVE
            for member in self.members:
                member.process.join(max(0.0, end - time.monotonic()))
                member.process.kill()  # harmless to one that has left
                member.process.join()
            sweep(prefix=f"{self._config.run}-")  # what killed workers have left


# ---- One life of workers, cache and router


class Stage:
    """Everything that a restart replaces. Its `with` begins when all workers are ready, and ends
    them."""

    def __init__(self, config: WorkerConfig, workers: int, outcome: Outcome, show: Show) -> None:
        self._config, self._workers = config, workers
        self._outcome, self._show = outcome, show
        self._crew = Crew(config)
        self._stack = contextlib.ExitStack()
        self._cache: Cache | None = None
        self._router: Any = None
        self._absent = set(range(workers))
        """Numbers of the workers that are not ready, or not again."""

    def __enter__(self) -> Stage:
        self._stack.enter_context(self._crew)
        try:
            for number in range(self._workers):
                self._crew.start(number)
            while self._absent:
                self._hear()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        left = [info.name for info in list_segments()]
        self._outcome.left += [name for name in left if name.startswith(f"{self._config.run}-")]

    def serve(
        self,
        turns: list[Turn],
        following: Callable[[int, Tokens], list[Turn]],
        served: list[Served],
        total: int,
        kill_from: int | None = None,
    ) -> None:
        """Have turns answered, and those that their answers make possible.

        Args:
            following: of a turn's number and its answer.
            served: answered turns are appended to it.
            kill_from: after so many answers, a worker is killed in the middle of an offload.
        """
        held: int | None = None  # the turn whose worker is to be killed
        self._router.ask(turns)
        while len(served) < total or self._absent:
            hold = kill_from is not None and len(served) >= kill_from
            hold = hold and held is None and self._outcome.kill is None
            while (number := self._router.send(hold=hold)) is not None:
                held, hold = (number, False) if hold else (held, hold)
            for result in self._hear():
                served.append(result)
                self._show.add(result)
                if result.turn.number == held:
                    held = None  # it had too little to write: the next turn then
                self._router.ask(following(result.turn.number, result.answer.tokens))

    def check(self) -> None:
        """Derive every invariant of the cache again."""
        self._show.say("checking the index: every invariant, derived again")
        if self._cache is not None:
            self._outcome.checks.append(self._cache.check())

    # ---- what workers say

    def _hear(self) -> list[Served]:
        """Handle the next messages. Returns the turns that were answered."""
        served = []
        for member, message in self._crew.messages():
            if message is None:
                self._on_death(member)
            elif isinstance(message, messages.Ready):
                self._on_ready(member, message)
            elif isinstance(message, messages.Holding):
                self._on_holding(member, message)
            else:
                served.append(self._on_answer(member, message))
        return served

    def _on_ready(self, member: Member, ready: messages.Ready) -> None:
        seconds = time.monotonic() - member.started
        self._show.say(f"worker {member.label} is ready (pid {ready.pid}, {seconds:.1f} s)")
        if self._router is None:
            name = self._config.cache
            cache = Cache.attach(name, secret=SECRET, role="router", grow=False)
            self._cache = self._stack.enter_context(cache)
            self._router = Router(cache)
            self._stack.callback(self._router.close)
        member.device_index = ready.device_index
        self._router.join(member)
        self._absent.discard(member.number)

    def _on_holding(self, member: Member, holding: messages.Holding) -> None:
        self._show.say(
            f"worker {member.label} has copied {holding.copied} of {holding.pages} pages of turn "
            f"{holding.number}: killing it (SIGKILL)",
            "yellow",
        )
        member.holding, member.killed_at = holding, time.monotonic()
        member.process.kill()

    def _on_death(self, member: Member) -> None:
        assert member.killed_at is not None
        self._absent.add(member.number)
        doomed = 0 if self._router is None else self._router.lose(member)
        seconds = time.monotonic() - member.killed_at
        if (held := member.holding) is not None:
            self._outcome.kill = Kill(
                member.label, held.number, held.copied, held.pages, doomed, seconds
            )
        self._show.say(
            f"worker {member.label} is dead: {doomed} pages were doomed, and can be used again "
            f"after {seconds * 1e3:.0f} ms",
            "yellow",
        )

    def _on_answer(self, member: Member, answer: Answer) -> Served:
        turn = self._router.answered(member)
        return Served(turn, answer, member.label, self._router.attempts[turn.number])
