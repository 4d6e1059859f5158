"""Writers and readers of one log, in processes of their own; some are killed at random.

Every entry says which it is, who appended it, and then repeats a byte: so it is known whole. Two
processes want to be the writer; one is, and the other succeeds it when it is killed. A reader
writes to a file where it began, and then the numbers that it read, whole lines at a time; what it
had read and not yet written when it was killed is missing at the end of its file, and nowhere else.
"""

import contextlib
import random
import time
from functools import partial

import pytest
from support.refusals import refused
from support.traffic import DEADLINE, SECONDS, SEED, STORMS, Storm, ended_well, spawn

from lightcache import errors, shm

BATCH = 5  # entries read at once
BYTES = 64


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
        with contextlib.suppress(errors.InUse):
            return shm.SharedLog.attach(name, writer=True)
        time.sleep(0.001)  # not to wait: not to take all of the processor


def write(name, who, seed=0, count=1 << 60):
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
            except errors.Abandoned:
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
def test_every_reader_reads_what_was_appended_in_order(
    segment_name, tmp_path, capacity, wait_until
):
    count, paths = 1500, [tmp_path / f"reader{i}" for i in range(3)]
    with shm.SharedLog.open(segment_name, capacity=capacity, message_bytes=BYTES) as mine:
        readers = [spawn(lambda p=p: read(segment_name, p, SEED)) for p in paths]
        writer = spawn(lambda: write(segment_name, 0, SEED, count))
        for number in range(count):
            assert number_of(mine.read(timeout=DEADLINE)) == number
        ended_well(writer)
        mine.check()
        refused(errors.Abandoned, "", mine.read, timeout=DEADLINE)
        with shm.SharedLog.attach(segment_name, writer=True) as log:
            # One that begins behind the last entry waits for another.
            wait_until(
                lambda: all(path.exists() and path.stat().st_size for path in paths), "the readers"
            )
            log.append(b"end", timeout=DEADLINE)
            for pid in readers:
                ended_well(pid)
    for path in paths:
        begin = int(path.read_text().split("\n")[0])
        assert check_file(path) == count - begin


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(2 * SECONDS + 300)
@pytest.mark.parametrize(("number", "seconds"), STORMS)
def test_writers_and_readers_are_killed(segment_name, tmp_path, number, seconds, wait_until):
    """One reader lives through all of it and misses nothing."""
    fill, drain, whole = (
        partial(write, segment_name),
        partial(read, segment_name),
        tmp_path / "whole",
    )
    storm = Storm(tmp_path, 1000 * SEED + number, fill, drain)
    with shm.SharedLog.open(segment_name, capacity=8, message_bytes=BYTES) as mine:
        survivor = spawn(lambda: read(segment_name, whole))
        while not whole.exists() or not whole.read_text():  # it begins at the first entry
            assert mine.read_many(1) == []
        watcher = shm.SharedLog.attach(segment_name, readonly=True)
        mine.close()  # or it would hold the writers up
        for writing in (True, True, False, False, False):
            storm.start(writing)
        kills = storm.run(seconds)
        storm.stop_filling()
        # One that begins behind the last entry would wait for another.
        wait_until(lambda: all(path.stat().st_size for path in storm.living.values()), "readers")
        with lead(segment_name) as log:
            log.append(b"end", timeout=DEADLINE)  # nobody blocks behind the dead
            for pid in [survivor, *storm.living]:
                ended_well(pid)
            log.check()
            total = log.appended
        watcher.check()
        watcher.close()
    # As others were killed, a reader that leaves last lets it stay.
    shm.Segment.unlink(segment_name)
    assert check_file(whole) == total - 1
    came = sum(map(check_file, storm.paths))
    print(f"{kills} kills, {total} entries, {came} read by those who were killed")
    assert kills > 3
    assert total > 50
    assert came > 50
