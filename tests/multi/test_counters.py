"""Processes that count while others are killed: the total is what they had counted.

A child counts one, and then notes in a word of a plain segment of the test's that it has. So of a
child that was killed one more may be in the total than it has noted, and never less.
"""

import os
import random
import signal

import pytest

from lightcache import shm

SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "1"))
DEADLINE = 60.0
WORKERS, KILLS, ENOUGH = 4, 12, 300


def worker(name, notes, who):
    """Count until killed, or until there is a word at the end of the notes; the process's id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with shm.SharedCounters.attach(name) as mine, shm.Segment.attach(notes) as segment:
            segment.join("worker")
            noted, stop = shm.AtomicU64(segment, 8 * who), shm.AtomicU64(segment, 4088)
            while not stop.load():
                mine.add(steps=1, tokens=3)
                noted.add(1)
            status = 0 if mine.own() == {"steps": noted.load(), "tokens": 3 * noted.load()} else 2
    finally:
        os._exit(status)


@pytest.mark.crash
@pytest.mark.stress
def test_the_total_is_what_the_living_and_the_dead_had_counted(segment_name, wait_until):
    chance, notes = random.Random(SEED), f"{segment_name}-notes"
    names = ("steps", "tokens")
    with shm.Segment.create(notes, 4096) as segment:
        segment.join("test")
        noted = [shm.AtomicU64(segment, 8 * who) for who in range(WORKERS + KILLS)]
        with shm.SharedCounters.create(segment_name, names=names) as counters:
            living = {worker(segment_name, notes, who): who for who in range(WORKERS)}
            before = counters.total()
            for who in range(WORKERS, WORKERS + KILLS):
                victim = chance.choice(list(living))
                goal = noted[living[victim]].load() + chance.randrange(1, 30)
                wait_until(lambda v=victim, g=goal: noted[living[v]].load() >= g, "some counting")
                os.kill(victim, signal.SIGKILL)
                os.waitpid(victim, 0)
                del living[victim]
                living[worker(segment_name, notes, who)] = who
                now = counters.total()
                assert all(now[name] >= before[name] for name in names), "a total went down"
                before = now
            wait_until(lambda: all(noted[who].load() > ENOUGH for who in living.values()), "work")
            shm.AtomicU64(segment, 4088).store(1)
            ends = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in living}
            assert ends == {0}, "somebody's own figures were not what it had counted"
            done = sum(word.load() for word in noted)
            total = counters.total()
            assert done <= total["steps"] <= done + KILLS
            assert 3 * done <= total["tokens"] <= 3 * total["steps"]
            counters.check()
