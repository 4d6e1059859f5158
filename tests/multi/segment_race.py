"""Run as a program: many processes create and open one name, some are killed, always one inode.

    segment_race.py NAME ROUNDS WORKERS SEED

A process of its own, because it forks and must be free of threads. Each round begins with a dead
creator's leftover under the name (or with none); all workers open it at once while some of them
are killed; whoever got in says which inode and UUID it is in. Then all come, go and replace as fast
as they can, and each looks whether what it is in stays the one under the name. Ends with status 0,
or says what broke.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from lightcache.errors import InUse, LayoutMismatch
from lightcache.shm import Segment, names
from lightcache.shm.listing import read_segment

PAYLOAD = 20_000


@dataclass
class Worker:
    """A forked child, and the pipes to talk to it."""

    pid: int
    orders: int
    answers: int


def take_part(name: str, seed: int) -> str:
    """Come in by one of the ways there are; what we came into, as `inode uuid`."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        segment = Segment.open(name, PAYLOAD, timeout=None)
    else:
        try:
            segment = Segment.create(name, PAYLOAD, timeout=None)
        except InUse:
            segment = Segment.open(name, PAYLOAD, timeout=None)
    segment.join(f"worker {os.getpid()}")
    global entered
    entered = segment
    return f"{segment._hold.opened.identity[1]} {segment.uuid}"


entered: Segment


def come_and_go(name: str, seed: int) -> str:
    """Nobody may replace or unlink what somebody is in. `churned`, or what was broken."""
    chance = random.Random(seed)
    for _ in range(8):
        replace = chance.random() < 0.3
        size = PAYLOAD * 2 if replace else PAYLOAD
        try:
            segment = Segment.open(name, size, replace=replace, timeout=None)
        except (InUse, LayoutMismatch):
            continue  # somebody lives in one of the other size
        if chance.random() < 0.5:
            segment.join()
        for _ in range(chance.randrange(3)):
            if segment.retired or not segment._hold.opened.is_named():
                return f"{segment!r} was taken from under a client"
            os.sched_yield()
        if segment.retired or not segment._hold.opened.is_named():
            return f"{segment!r} was taken from under a client"
        segment.close()
    return "churned"


def worker_main(name: str, orders: int, answers: int) -> None:
    """Orders are lines: `enter`, `leave` or `churn`, and a seed."""
    with os.fdopen(orders, "r") as lines:
        for line in lines:
            order, seed = line.split()
            if order == "leave":
                entered.close()
                result = "left"
            elif order == "enter":
                result = take_part(name, int(seed))
            else:
                result = come_and_go(name, int(seed))
            os.write(answers, f"{result}\n".encode())
    os._exit(0)


def start(name: str, others: list[Worker]) -> Worker:
    """Fork a worker that keeps no pipe of the others: theirs must end with us."""
    order_out, order_in = os.pipe()
    answer_out, answer_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for fd in (order_in, answer_out, *(fd for w in others for fd in (w.orders, w.answers))):
                os.close(fd)
            worker_main(name, order_out, answer_in)
        finally:
            os._exit(1)
    os.close(order_out)
    os.close(answer_in)
    return Worker(pid, order_in, answer_out)


def answer(worker: Worker) -> str:
    """The next line, or nothing when it has died."""
    text = b""
    while not text.endswith(b"\n"):
        got = os.read(worker.answers, 4096)
        if not got:
            return ""
        text += got
    return text.decode().strip()


def bury(workers: list[Worker], dead: list[Worker]) -> None:
    """Wait for the killed to be gone, and with them their locks."""
    for worker in dead:
        os.kill(worker.pid, signal.SIGKILL)
    for worker in dead:
        status = os.waitpid(worker.pid, 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"worker failed: {status}"
        os.close(worker.orders)
        os.close(worker.answers)
        workers.remove(worker)


def leave_leftover(name: str, chance: random.Random) -> None:
    size = chance.choice((None, 0, 100, 4096, 100_000))
    if size is not None:
        full = names.object_name(name)
        posix_ipc.SharedMemory(full, posix_ipc.O_CREX, mode=0o600, size=size).close_fd()


def order(worker: Worker, what: str, chance: random.Random) -> None:
    """Send it, also to a victim that is dead already."""
    with contextlib.suppress(BrokenPipeError):
        os.write(worker.orders, f"{what} {chance.getrandbits(32)}\n".encode())


def churn(name: str, workers: list[Worker], chance: random.Random) -> None:
    """All come and go, some are killed at it."""
    victims = chance.sample(workers, chance.randrange(3))
    for worker in workers:
        order(worker, "churn", chance)
    survivors = [worker for worker in workers if worker not in victims]
    answers = [answer(survivors[0])]
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    answers += [answer(worker) for worker in survivors[1:]]
    bury(workers, victims)
    broken = set(answers) - {"churned"}
    assert not broken, broken
    Segment.unlink(name)  # what a victim may have left


def one_round(name: str, workers: list[Worker], chance: random.Random) -> int:
    """Returns how many were killed before they had come in."""
    path = Path("/dev/shm") / names.object_name(name).removeprefix("/")
    leave_leftover(name, chance)
    victims = chance.sample(workers, chance.randrange(len(workers) // 3))
    chance.shuffle(workers)
    for worker in workers:
        order(worker, "enter", chance)
        if victims and chance.random() < 0.3:
            os.kill(victims[chance.randrange(len(victims))].pid, signal.SIGKILL)
    survivors = [worker for worker in workers if worker not in victims]
    first = answer(survivors[0])
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    answers = [first] + [answer(worker) for worker in survivors[1:]]
    early = sum(answer(victim) == "" for victim in victims)
    bury(workers, victims)
    assert len(set(answers)) == 1, f"several segments under one name: {sorted(set(answers))}"
    inode, uuid = answers[0].split()
    info = read_segment(name)
    assert info is not None, "the name is gone while all live in it"
    assert (str(path.stat().st_ino), info.uuid) == (inode, uuid), "the name leads elsewhere"
    assert info.clients == len(survivors), f"{info.clients} of {len(survivors)} clients live"
    late = chance.sample(survivors, chance.randrange(3))
    for worker in survivors:
        order(worker, "leave", chance)
    bury(workers, late)
    for worker in survivors:
        if worker not in late:
            assert answer(worker) == "left", "a worker failed to leave"
    if late:  # nobody may have seen that it was the last
        Segment.unlink(name)
    assert not path.exists(), "the last to leave did not unlink"
    return early


def main() -> None:
    """See the module."""
    name = sys.argv[1]
    rounds, count, seed = map(int, sys.argv[2:])
    chance = random.Random(seed)
    workers: list[Worker] = []
    early = 0
    for _ in range(rounds):
        while len(workers) < count:
            workers.append(start(name, workers))
        early += one_round(name, workers, chance)
        while len(workers) < count:
            workers.append(start(name, workers))
        churn(name, workers, chance)
    bury(workers, list(workers))
    print(early)


if __name__ == "__main__":
    main()
