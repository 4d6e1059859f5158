"""Run as a program: workers as in the stress test, killed again and again, replaced at once.

    kill_race.py NAME BOARD WORKERS PAGES SEED FIRST COUNT SECONDS INSIDE CHECKS HOOK

Forks COUNT workers, numbered from FIRST among WORKERS, on the cache NAME. Kills until SECONDS have
passed and INSIDE of the victims have died inside a critical section. HOOK is the library of
pause_hook.c: then workers use the core with pause points, and most of them set a timer that kills
them at a random instruction soon after they have taken the lock; "-": only we kill, at any time.
With CHECKS all workers are stopped now and then at whatever instruction they are, and a copy of the
segment, with the lock's log undone, must pass both checkers. Ends half of the workers in order and
kills the others; prints what it counted as JSON.

A process of its own, because it forks: it never attaches to the cache itself.
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
from pathlib import Path

import numpy as np
from checker import raw
from multi import pausing
from multi.stress_worker import LOCKED, Board, Worker

from lightcache import snapshot

# Of lc_base.h: the lock taken; evicting; a key being written, linked; a commit; publishing.
POINTS = (13, 13, 3, 4, 5, 6, 7, 8, 8, 14, 9, 10)

stopping = False


def work(name: str, number: int, seed: int, board: Board, hook: Path | None) -> None:
    """A worker's life, until SIGTERM."""
    status = 1
    try:
        if hook:
            gate = board.gates[number]
            gate[3] = 0
            point = POINTS[seed % len(POINTS)]
            pausing.install_death(hook, gate, point, 1 + seed % 41, 1 << 7 + seed % 8, seed)
        worker = Worker(name, number, seed, board, mix=LOCKED)
        while not stopping:
            worker.step()
        worker.release()
        worker.leave()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def stop_soon(*_: object) -> None:
    """SIGTERM: finish what you hold."""
    global stopping
    stopping = True


class Race:
    """The workers and their killer."""

    def __init__(
        self, name: str, board: Board, pages: int, seed: int, first: int, hook: Path | None
    ) -> None:
        """Nobody lives yet."""
        self.name, self.board, self.pages, self.first = name, board, pages, first
        self.chance = random.Random(seed)
        self.hook = hook
        self.workers: dict[int, int] = {}  # pid: number
        self.kills = self.inside = self.checks = 0
        path = Path("/dev/shm") / f"lightcache.{name}"
        self.segment = np.memmap(path, np.uint8, "r")

    def start(self, number: int) -> None:
        """Fork a worker."""
        seed = self.chance.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            work(self.name, number, seed, self.board, self.hook)
        self.workers[pid] = number

    def stop(self, pid: int) -> None:
        """Stop it wherever it is; it has stopped, or died, when this returns."""
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def bury(self, flags: int) -> bool:
        """Replace one who has died; False: nobody has."""
        pid, status = os.waitpid(-1, flags)
        if pid == 0:
            return False
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"worker {self.workers[pid]} ended by itself with status {status}")
        number = self.workers.pop(pid)
        self.kills += 1
        self.inside += int(self.board.gates[number, 3])
        self.start(number)
        return True

    def kill_some(self) -> None:
        """Kill one, or several at one go, after a moment of chance."""
        time.sleep(self.chance.random() ** 3 * 0.02)
        several = 1 if self.chance.random() < 0.8 else self.chance.randint(2, 3)
        for pid in self.chance.sample(sorted(self.workers), several):
            os.kill(pid, signal.SIGKILL)

    def freeze_and_check(self) -> None:
        """Everybody stops wherever they are; the next holder of the lock would find all sound."""
        for pid in self.workers:
            self.stop(pid)
        copy = np.array(self.segment)
        for pid in self.workers:
            os.kill(pid, signal.SIGCONT)
        found = raw.check(copy.copy(), quiet=False)
        core = snapshot.check_copy(copy, self.pages, quiet=False)
        if found or not core.clean:
            sys.exit(f"after {self.kills} kills: {found}; the core says: {core.message}")
        self.checks += 1

    def run(self, count: int, seconds: float, inside: int, checks: bool) -> None:
        """The race itself."""
        for number in range(self.first, self.first + count):
            self.start(number)
        end, next_check = time.monotonic() + seconds, 4
        while time.monotonic() < end or self.inside < inside:
            if not self.hook or self.chance.random() < 0.2:
                self.kill_some()
            self.bury(0)
            while self.bury(os.WNOHANG):
                pass
            if checks and self.kills >= next_check:
                self.freeze_and_check()
                next_check = self.kills + 4

    def finish(self) -> None:
        """Half of them leave in order, the others are killed while they do."""
        for at, pid in enumerate(self.workers):
            os.kill(pid, signal.SIGTERM if at % 2 else signal.SIGKILL)
        for at, pid in enumerate(self.workers):
            done, status = os.waitpid(pid, os.WNOHANG)
            while not done:
                # Again and again: a signal that reaches a child just forked is thrown away when
                # the interpreter starts over in it.
                os.kill(pid, signal.SIGTERM if at % 2 else signal.SIGKILL)
                time.sleep(0.01)
                done, status = os.waitpid(pid, os.WNOHANG)
            if status and not os.WIFSIGNALED(status):
                sys.exit(f"worker {self.workers[pid]} ended with status {status}")
        self.workers.clear()


def main(arguments: list[str]) -> None:
    """See above."""
    name, board = arguments[0], Path(arguments[1])
    workers, pages, seed, first, count = map(int, arguments[2:7])
    seconds, inside, checks = float(arguments[7]), int(arguments[8]), bool(int(arguments[9]))
    hook = None if arguments[10] == "-" else Path(arguments[10])
    signal.signal(signal.SIGTERM, stop_soon)
    if hook:
        pausing.use()
    race = Race(name, Board(board, workers, pages), pages, seed, first, hook)
    try:
        race.run(count, seconds, inside, checks)
        race.finish()
    finally:
        for pid in race.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    print(json.dumps({"kills": race.kills, "inside": race.inside, "checks": race.checks}))


if __name__ == "__main__":
    main(sys.argv[1:])
