"""Producers and consumers of one ring, in processes of their own; some are killed at random.

Every message says who pushed it and which of his it is. A producer notes in a shared word how many
of its pushes have returned, before it begins the next. So of a producer that was killed one message
more may be there than it has noted. A consumer appends what it was given to a file, whole lines at
a time; what it had popped and not yet written when it was killed is lost.
"""

import random
from collections import Counter
from functools import partial

import pytest
from support.traffic import DEADLINE, SECONDS, SEED, STORMS, Storm, ended_well, spawn

from lightcache import shm

BATCH = 5  # messages popped at once, and at most lost with one consumer


def produce(name, notes, who, seed=0, count=1 << 60):
    """Push `who i` for i from 0 on, alone or several at once."""
    chance = random.Random(seed)
    with shm.SharedRing.attach(name) as ring, shm.Segment.attach(notes) as segment:
        segment.join("producer")
        returned, at = shm.AtomicU64(segment, 8 * who), 0
        while at < count:
            if chance.random() < 0.5:
                ring.push(b"%d %d" % (who, at), timeout=DEADLINE)
                at += 1
            else:
                some = range(at, min(count, at + BATCH))
                at += ring.push_many([b"%d %d" % (who, i) for i in some])
            returned.store(at)


def consume(name, path, seed=0):
    """Append what is popped to a file, until `end` comes."""
    chance = random.Random(seed)
    with shm.SharedRing.attach(name) as ring, open(path, "ab", buffering=0) as file:
        while True:
            found = ring.pop_many(BATCH) if chance.random() < 0.5 else []
            found = found or [ring.pop(timeout=DEADLINE)]
            file.write(b"".join(message + b"\n" for message in found))
            if b"end" in found:
                return


def received(paths):
    """Of each file the (producer, number) pairs in it, in order."""
    lines = [[line for line in path.read_text().splitlines() if line != "end"] for path in paths]
    return [[tuple(map(int, line.split())) for line in one] for one in lines]


def check_order(files):
    """Nothing twice, in no file or two; and each producer's numbers go up in each file."""
    counts = Counter(pair for one in files for pair in one)
    assert [pair for pair, n in counts.items() if n > 1] == []
    for one in files:
        last = {}
        for who, number in one:
            assert number > last.get(who, -1), f"{who} {number} came behind {last[who]}"
            last[who] = number


@pytest.fixture
def notes(segment_name):
    """A segment of words, one for each producer."""
    with shm.Segment.create(segment_name + "-notes", 1 << 16) as made:
        made.join("test")
        yield made


@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_nothing_is_lost_or_doubled_or_out_of_order(segment_name, notes, tmp_path, capacity):
    each, producers, paths = 400, 3, [tmp_path / f"consumer{i}" for i in range(2)]
    with shm.SharedRing.create(segment_name, capacity=capacity, message_bytes=24) as ring:
        eaters = [spawn(lambda p=p: consume(segment_name, p, SEED)) for p in paths]
        makers = [
            spawn(lambda w=w: produce(segment_name, notes.name, w, SEED + w, each))
            for w in range(producers)
        ]
        for pid in makers:
            ended_well(pid)
        for _ in eaters:  # one by one: who pops several messages would take the other's as well
            ring.push(b"end", timeout=DEADLINE)
            ended_well()
        ring.check()
        assert len(ring) == 0
    files = received(paths)
    check_order(files)
    assert sorted(pair for one in files for pair in one) == [
        (who, i) for who in range(producers) for i in range(each)
    ]


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(2 * SECONDS + 300)
@pytest.mark.parametrize(("number", "seconds"), STORMS)
def test_producers_and_consumers_are_killed(segment_name, notes, tmp_path, number, seconds):
    fill, drain = partial(produce, segment_name, notes.name), partial(consume, segment_name)
    storm = Storm(tmp_path, 1000 * SEED + number, fill, drain)
    with shm.SharedRing.create(segment_name, capacity=8, message_bytes=24) as ring:
        for producing in (True, True, False, False):
            storm.start(producing)
        kills = storm.run(seconds)
        storm.stop_filling()
        for _ in range(len(storm.living)):
            ring.push(b"end", timeout=DEADLINE)  # nobody blocks behind the dead
            ended_well()
        ring.check()
    files = received(storm.paths)
    returned = [shm.AtomicU64(notes, 8 * who).load() for who in range(storm.started)]
    check_order(files)
    came = Counter(who for one in files for who, _ in one)
    for one in files:
        for who, at in one:
            assert at < returned[who] + BATCH, f"{who} {at} was never pushed"
    lost = sum(returned) - sum(min(came[who], returned[who]) for who in range(storm.started))
    print(f"{kills} kills, {sum(came.values())} messages, {lost} lost with their consumers")
    assert kills > 3
    assert sum(came.values()) > 50
    assert 0 <= lost <= BATCH * kills
