"""Run as a program: some of the workers of a storm, killed and stopped at random, replaced at once.

    storm_nest.py JSON

The JSON holds the fields of `Plan`. Obeys lines on stdin, each answered by a line:

    run SECONDS   start who is missing; kill one worker (or, of a storm of stops, stop it) every
                  `every` seconds on average
    freeze, thaw  stop everybody at whatever instruction, and continue them
    end           half of the workers leave in order, the others are killed while they do
    counts        what happened so far

With a hook (pause_hook.c) workers use the core with pause points, and every other victim falls
soon after it has taken the lock, by a timer of its own. A process by itself, because it forks: it
never attaches to the cache.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multi import pausing
from multi.stress_worker import STORM, TALLY, Board, Worker

# Of lc_base.h: the lock taken; evicting; a key being written, linked; a commit; publishing.
POINTS = (13, 13, 3, 4, 5, 6, 7, 8, 8, 14, 9, 10)
LIVE, DIE, STOP = 0, 1, 2  # gate[1] of pause_hook.c
LONGEST_STOP = 0.3  # seconds
GROWN = 8  # operations that half of the victims have done: a slow machine would see only births

leaving = False


@dataclass(frozen=True)
class Plan:
    """What a nest is told."""

    name: str
    board: str
    workers: int
    """On the board, in all nests."""
    pages: int
    first: int
    """Our workers are numbered from here."""
    count: int
    seed: int
    every: float
    stops: bool
    hook: str
    """The library of pause_hook.c; empty: no pause points."""


def work(plan: Plan, number: int, seed: int, board: Board) -> None:
    """A worker's life, until SIGTERM."""
    status = 1
    try:
        gate = board.gates[number]
        gate[1] = gate[3] = 0
        if plan.hook:
            point = POINTS[seed % len(POINTS)]
            pausing.install_fall(
                Path(plan.hook), gate, point, 1 + seed % 3, 1 << 7 + seed % 8, seed
            )
        worker = Worker(plan.name, number, seed, board, mix=STORM, device=number % 4 == 3)
        while not leaving:
            worker.step()
        worker.release()
        worker.leave()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def leave_soon(*_: object) -> None:
    """SIGTERM: finish what you hold."""
    global leaving
    leaving = True


class Nest:
    """The workers and what befalls them."""

    def __init__(self, plan: Plan) -> None:
        """Nobody lives yet."""
        self.plan = plan
        self.board = Board(Path(plan.board), plan.workers, plan.pages)
        self.chance = random.Random(plan.seed)
        self.workers: dict[int, int] = {}  # pid: number
        self.stopped: dict[int, float] = {}  # pid: when it goes on
        self.born: dict[int, int] = {}  # pid: operations of its predecessors
        self.counts = dict.fromkeys(
            ("kills", "kills inside", "stops", "stops inside", "killed while stopped", "left"), 0
        )

    def start(self, number: int) -> None:
        """Fork a worker."""
        seed = self.chance.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            work(self.plan, number, seed, self.board)
        self.workers[pid] = number
        self.born[pid] = self.operations(number)

    def operations(self, number: int) -> int:
        """What workers of this number have done so far."""
        return int(self.board.tally[number, TALLY.index("operations")])

    # ---- what befalls them

    def fell(self, pid: int, status: int) -> None:
        """Somebody died, and is replaced; or has stopped, and goes on later."""
        number = self.workers[pid]
        inside = int(self.board.gates[number, 3])
        if os.WIFSTOPPED(status):
            self.counts["stops"] += 1
            self.counts["stops inside"] += inside
            self.board.gates[number, 1] = LIVE
            self.stopped[pid] = time.monotonic() + self.chance.random() * LONGEST_STOP
            return
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"worker {number} ended by itself with status {status}")
        self.counts["kills"] += 1
        self.counts["kills inside"] += inside
        self.counts["killed while stopped"] += self.stopped.pop(pid, None) is not None
        del self.workers[pid], self.born[pid]
        self.start(number)

    def look(self) -> None:
        """See to all who fell."""
        while self.workers:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            self.fell(pid, status)

    def strike(self) -> None:
        """One falls, now or soon after it takes the lock; sometimes two or three at one go."""
        young = GROWN if self.chance.random() < 0.5 else 0
        likely = [
            pid
            for pid, number in self.workers.items()
            if pid not in self.stopped and self.operations(number) - self.born[pid] >= young
        ]
        several = 1 if self.chance.random() < 0.9 else self.chance.randint(2, 3)
        for pid in self.chance.sample(likely, min(several, len(likely))):
            stop = self.plan.stops and self.chance.random() < 0.8
            if self.plan.hook and self.chance.random() < 0.5:
                self.board.gates[self.workers[pid], 1] = STOP if stop else DIE
            else:
                os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)

    def wake(self) -> None:
        """Those whose time has come go on; some are killed instead."""
        now = time.monotonic()
        for pid in [pid for pid, when in self.stopped.items() if when <= now]:
            if self.chance.random() < 0.3:
                self.stopped[pid] = now + LONGEST_STOP  # until its death is seen
                os.kill(pid, signal.SIGKILL)
            else:
                del self.stopped[pid]
                os.kill(pid, signal.SIGCONT)

    # ---- orders

    def run(self, seconds: float) -> None:
        """The storm itself."""
        plan = self.plan
        alive = set(self.workers.values())
        for number in range(plan.first, plan.first + plan.count):
            if number not in alive:
                self.start(number)
        now = time.monotonic()
        end, next_strike = now + seconds, now
        while now < end:
            next_strike += self.chance.random() * 2 * plan.every
            while now < min(next_strike, end):
                pause = min(next_strike, end, *self.stopped.values()) - now
                signal.sigtimedwait({signal.SIGCHLD}, max(0.0005, pause))
                self.look()
                self.wake()
                now = time.monotonic()
            if now < end:
                self.strike()

    def freeze(self) -> None:
        """Everybody has stopped, or died, when this returns."""
        for pid in self.workers.keys() - self.stopped.keys():
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Everybody goes on, those too who were stopped before: until the next order nobody would
        wake them, and others wait for a lock that they may hold."""
        self.stopped.clear()
        for pid, number in self.workers.items():
            self.board.gates[number, 1] = LIVE
            os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """See above."""
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
        fates = dict(zip(self.workers, (signal.SIGKILL, signal.SIGTERM) * 64, strict=False))
        for pid, fate in fates.items():
            os.kill(pid, fate)
        for pid, fate in fates.items():
            done, status = os.waitpid(pid, os.WNOHANG)
            while not done:
                # Again and again: a signal that reaches a child just forked is thrown away when
                # the interpreter starts over in it. A stop may just have been on its way.
                os.kill(pid, fate)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)
                done, status = os.waitpid(pid, os.WNOHANG)
            if status and not os.WIFSIGNALED(status):
                sys.exit(f"worker {self.workers[pid]} ended with status {status}")
            self.counts["kills" if status else "left"] += 1
        self.workers.clear()

    def obey(self, line: str) -> None:
        """One order."""
        order, *numbers = line.split()
        if order != "counts":
            getattr(self, order)(*map(float, numbers))
        print(json.dumps(self.counts), flush=True)


def main(plan: Plan) -> None:
    """See above."""
    signal.signal(signal.SIGTERM, leave_soon)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if plan.hook:
        pausing.use()
    nest = Nest(plan)
    try:
        for line in sys.stdin:
            nest.obey(line)
    finally:
        for pid in nest.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
