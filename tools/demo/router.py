"""The router: gives each turn to a worker, by what the cache has of it and by what waits where.

It looks into the cache itself: finding a prefix is a read of shared memory, not a message. It
needs neither torch nor a model. `Router.choose` is what a router of your own needs; the rest sends
turns, hears of answers, and takes back what dead workers held.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import lightcache
from lightcache.manager import Prompt
from lightcache.tools.demo.messages import SECRET, Answer, Holding, Ready, Turn, WorkerConfig
from lightcache.tools.demo.processes import WorkerProcess, Workers
from lightcache.tools.demo.report import Show, milliseconds


@dataclass(eq=False)
class Queue:
    """What a worker that is ready has to answer."""

    worker: WorkerProcess
    running: Turn | None = None
    waiting: deque[Turn] = field(default_factory=deque)
    costs: dict[int, float] = field(default_factory=dict)  # of these turns, in tokens of prefill
    holding: Holding | None = None  # the worker waits to be killed


class Router:
    """Gives each turn to the worker at which it costs least, and each worker one turn at a time."""

    def __init__(
        self, workers: Workers, config: WorkerConfig, show: Show, stack: ExitStack
    ) -> None:
        """Wait until all workers are ready, and attach to their cache. The stack closes it."""
        self._workers, self._show = workers, show
        self._queues: dict[str, Queue] = {}  # of the workers that are ready, by name
        self._unrouted: deque[Turn] = deque()  # while no worker is ready
        self._last: dict[int, str] = {}  # the worker that had the last turn of each conversation
        self.kill: Holding | None = None  # the worker that was killed in an offload
        while not self._queues:
            self._hear()
        cache = lightcache.Cache.attach(config.cache, secret=SECRET, role="router", grow=False)
        self.cache = stack.enter_context(cache)
        while len(self._queues) < workers.count:
            self._hear()
        # A dead worker's successor has its name and its index of blocks, so this router knows it.
        blocks = {name: config.blocks(name) for name in self._queues}
        router = lightcache.Router(self.cache, blocks, spec=self.cache.key_spec())
        self._router = stack.enter_context(router)

    # ---- which worker gets which turn

    @property
    def busy(self) -> bool:
        """Whether a turn has no answer yet, or a dead worker no successor."""
        waiting = self._unrouted or any(queue.costs for queue in self._queues.values())
        return bool(waiting) or len(self._queues) < self._workers.count

    def ask(self, turns: Iterable[Turn]) -> None:
        """Choose a worker for each turn."""
        self._unrouted += turns
        while self._unrouted and self._queues:
            turn = self._unrouted.popleft()
            name = self.choose(turn)
            self._queues[name].waiting.append(turn)
            self._last[turn.conversation] = name

    def choose(self, turn: Turn) -> str:
        """The worker at which the turn costs least. Not the one that had the turn before, if there
        is another: the demo shows that elsewhere it is a hit as well. An engine wants the opposite,
        and leaves `among=` out."""
        last = self._last.get(turn.conversation)
        others = [name for name in self._queues if name != last] or list(self._queues)
        loads = {name: sum(queue.costs.values()) for name, queue in self._queues.items()}
        choice = self._router.route(Prompt(turn.prompt), loads, among=others)
        cost = choice.costs[choice.worker] - loads[choice.worker]
        self._queues[choice.worker].costs[turn.number] = cost
        return choice.worker

    def step(self, *, kill: bool = False) -> list[Answer]:
        """Send turns to idle workers and handle the next messages. Blocks until there are any.
        Returns the answers.

        Args:
            kill: have a worker stop in the middle of an offload, and kill it.
        """
        for queue in self._queues.values():
            if queue.running is None and queue.waiting:
                self._send(queue, kill)
        return self._hear()

    def _send(self, queue: Queue, hold: bool) -> None:
        """Send the next turn. Only its worker finds out whether there are pages to offload, so one
        turn at a time is to be held there, until a worker has died of it."""
        hold = hold and not any(q.running and q.running.hold for q in self._queues.values())
        turn = queue.waiting.popleft()
        queue.running = replace(
            turn,
            worker=queue.worker.label,
            attempts=turn.attempts + 1,
            sent=time.monotonic(),
            hold=hold,
        )
        with contextlib.suppress(OSError):  # it has just died: `_on_death` asks again
            queue.worker.pipe.send(queue.running)

    # ---- what workers say

    def _hear(self) -> list[Answer]:
        """Handle the next messages. Returns the answers."""
        answers = []
        for worker, message in self._workers.messages():
            match message:
                case Ready():
                    self._on_ready(worker)
                case Answer():
                    queue = self._queues[worker.name]
                    queue.running = None
                    queue.costs.pop(message.turn.number)
                    answers.append(message)
                case Holding():
                    self._on_holding(worker, message)
                case None:
                    self._on_death(worker)
        return answers

    def _on_ready(self, worker: WorkerProcess) -> None:
        self._show.say(f"worker {worker.label} is ready (pid {worker.process.pid})")
        self._queues[worker.name] = Queue(worker)
        self.ask([])  # those that have waited for it

    def _on_holding(self, worker: WorkerProcess, holding: Holding) -> None:
        self._show.say(
            f"worker {worker.label} has copied {holding.copied_pages} of {holding.pages} pages of "
            f"turn {holding.turn}: killing it (SIGKILL)",
            "yellow",
        )
        self._queues[worker.name].holding = holding
        worker.kill()

    def _on_death(self, worker: WorkerProcess) -> None:
        """Take back what a dead worker held, and give its turns to the others."""
        assert worker.killed_at is not None
        queue = self._queues.pop(worker.name, None)
        if queue is None:
            self._show.say(f"worker {worker.label} is dead, before it was ready", "yellow")
            return
        self.cache.reap()
        # Pages that it was writing have no key any more. Only a process that finds no other room
        # takes them, so the number is that of this death.
        doomed = self.cache.check().doomed
        seconds = time.monotonic() - worker.killed_at
        self._show.say(
            f"worker {worker.label} is dead: {doomed} pages were doomed, and can be used again "
            f"after {milliseconds(seconds)}",
            "yellow",
        )
        if queue.holding is not None:
            self.kill = replace(queue.holding, doomed_pages=doomed, recovered_s=seconds)
        self.ask([*filter(None, [queue.running]), *queue.waiting])
