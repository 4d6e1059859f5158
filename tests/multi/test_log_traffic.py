"""Writers and readers of one log, in processes of their own; some are killed at random.

Every entry says which it is, who appended it, and then repeats a byte: so it is known whole. Two
processes want to be the writer; one is, and the other succeeds it when it is killed. A reader
writes to a file where it began, and then the numbers that it read, whole lines at a time; what it
had read and not yet written when it was killed is missing at the end of its file, and nowhere else.
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lightcache import shm

SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "1"))
SECONDS = float(os.environ.get("LIGHTCACHE_STORM_SECONDS", "5"))
ROUND = 5.0  # seconds of one storm
DEADLINE = 60.0
BATCH = 5  # entries read at once
BYTES = 64


def spawn(body):
    """Run `body` in a child, which exits 1 if it raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return pid


def entry(number, who, length):
    return (b"%d %d " % (number, who)).ljust(length, bytes([65 + number % 26]))


def number_of(data):
    """Of an entry that is whole."""
    number, who, *_ = data.split(b" ", 2)
    assert data == entry(int(number), int(who), len(data)), data
    return int(number)


def lead(name):
    """Become the writer, as soon as there is none."""
    while True:
        with contextlib.suppress(shm.InUse):
            return shm.SharedLog.attach(name, writer=True)
        time.sleep(0.001)  # not to wait: not to take all of the processor


def write(name, who, count=1 << 60, seed=0):
    """Append until there are `count` entries, or be killed."""
    chance = random.Random(seed)
    with lead(name) as log:
        while (number := log.appended) < count:
            log.append(entry(number, who, chance.randrange(BYTES + 1)), timeout=DEADLINE)


def read(name, path, seed=0, until=b"end"):
    """Note what is read, until the last entry comes, whoever is the writer."""
    chance = random.Random(seed)
    with shm.SharedLog.attach(name) as log, open(path, "wb", buffering=0) as file:
        file.write(b"%d\n" % log.position)
        while True:
            try:
                found = log.read_many(BATCH) if chance.random() < 0.5 else []
                found = found or [log.read(timeout=DEADLINE)]
            except shm.Abandoned:
                time.sleep(0.001)  # until there is another writer
                continue
            numbers = [number_of(data) for data in found if data != until]
            file.write(b"".join(b"%d\n" % number for number in numbers))
            if until in found:
                return


def check_file(path):
    """Where it began and what came: each entry from there on, once, in order. How many came."""
    numbers = [int(line) for line in path.read_text().split("\n")[:-1]]
    if not numbers:
        return 0  # killed before it had written a line
    begin, *came = numbers
    assert came == list(range(begin, begin + len(came)))
    return len(came)


@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_every_reader_reads_what_was_appended_in_order(segment_name, tmp_path, capacity):
    count, paths = 1500, [tmp_path / f"reader{i}" for i in range(3)]
    with shm.SharedLog.open(segment_name, capacity=capacity, message_bytes=BYTES) as mine:
        readers = [spawn(lambda p=p: read(segment_name, p, SEED)) for p in paths]
        writer = spawn(lambda: write(segment_name, 0, count, SEED))
        for number in range(count):
            assert number_of(mine.read(timeout=DEADLINE)) == number
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == 0
        mine.check()
        with pytest.raises(shm.Abandoned):
            mine.read(timeout=DEADLINE)
        with shm.SharedLog.attach(segment_name, writer=True) as log:
            log.append(b"end", timeout=DEADLINE)
            for pid in readers:
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for path in paths:
        begin = int(path.read_text().split("\n")[0])
        assert check_file(path) == count - begin


class Storm:
    """Two who want to write and three who read, each replaced when it was killed."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.folder, self.seed = name, folder, seed
        self.chance = random.Random(seed)
        self.started = 0
        self.paths: list[Path] = []
        self.living: dict[int, bool] = {}  # pid: does it write?

    def start(self, writing: bool) -> None:
        who = self.started
        self.started += 1
        if writing:
            body = lambda: write(self.name, who, seed=self.seed + who)  # noqa: E731
        else:
            path = self.folder / f"reader{who}"
            path.touch()
            self.paths.append(path)
            body = lambda: read(self.name, path, self.seed + who)  # noqa: E731
        self.living[spawn(body)] = writing

    def kill(self, pid: int) -> bool:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "it had ended by itself"
        assert os.WTERMSIG(status) == signal.SIGKILL
        return self.living.pop(pid)

    def run(self, seconds: float, most: int) -> int:
        """Kill and replace for so long; how often."""
        end, kills = time.monotonic() + seconds, 0
        while time.monotonic() < end and self.started < most:
            time.sleep(self.chance.uniform(0.01, 0.06))
            self.start(self.kill(self.chance.choice(list(self.living))))
            kills += 1
        return kills


@pytest.mark.crash
@pytest.mark.timeout(2 * SECONDS + 300)
@pytest.mark.parametrize("number", range(max(1, round(SECONDS / ROUND))))
def test_writers_and_readers_are_killed(segment_name, tmp_path, number):
    """One reader lives through all of it and misses nothing."""
    storm, whole = Storm(segment_name, tmp_path, 1000 * SEED + number), tmp_path / "whole"
    with shm.SharedLog.open(segment_name, capacity=8, message_bytes=BYTES) as mine:
        survivor = spawn(lambda: read(segment_name, whole))
        while not whole.exists() or not whole.read_text():  # it begins at the first entry
            assert mine.read_many(1) == []
        watcher = shm.SharedLog.attach(segment_name, readonly=True)
        mine.close()  # or it would hold the writers up
        for writing in (True, True, False, False, False):
            storm.start(writing)
        kills = storm.run(min(SECONDS, ROUND), most=8000)
        for pid in [pid for pid, writing in storm.living.items() if writing]:
            storm.kill(pid)
        with lead(segment_name) as log:
            log.append(b"end", timeout=DEADLINE)  # nobody blocks behind the dead
            for pid in [survivor, *storm.living]:
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            log.check()
            total = log.appended
        watcher.check()
        watcher.close()
    assert check_file(whole) == total - 1
    came = sum(map(check_file, storm.paths))
    print(f"{kills} kills, {total} entries, {came} read by those who were killed")
    assert kills > 3
    assert total > 50
    assert came > 50
