"""Lists and dicts whose users are killed while they change them: nothing half done is ever seen."""

import os
import random
import signal

import pytest

from lightcache import shm
from lightcache.shm import layout

ROUNDS = 60


def recoveries(segment):
    where = segment.address + layout.LOCK_OFFSET
    return layout.LockRecord.from_address(where).recoveries


def child(work):
    """Fork a process that does `work(random)` without end, and tells when it has begun."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            step = work()
            os.write(tell, b"1")
            while True:
                step()
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(told, 1) == b"1"
    os.close(told)
    return pid


def kill_many(segment, work, verify):
    """Kill ROUNDS children at random instants; returns how many died holding the lock."""
    chance = random.Random(4)
    before = recoveries(segment)
    for _ in range(ROUNDS):
        pid = child(work)
        for _ in range(chance.randrange(200)):  # our own calls are the clock
            segment.clients()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        verify()
    return recoveries(segment) - before


@pytest.mark.crash
def test_a_dict_survives_its_users(segment_name):
    with shm.SharedDict.create(segment_name, capacity=64) as table:
        table[1 << 100] = 77  # a key that nobody touches

        def work():
            mine = shm.SharedDict.attach(segment_name)
            chance = random.Random(os.getpid())

            def step():
                key = chance.randrange(40)  # value is the key's square, always
                if chance.random() < 0.5:
                    mine.put(key, key * key)
                else:
                    mine.pop(key)
                assert mine[1 << 100] == 77

            return step

        def verify():
            table.check()
            assert table[1 << 100] == 77
            assert all(value == key * key for key, value in table.items() if key < 40)

        kill_many(table.segment, work, verify)


@pytest.mark.crash
def test_a_list_survives_its_users(segment_name):
    with shm.SharedList.create(segment_name, nodes=16, lists=2) as lists:

        def work():
            mine = shm.SharedList.attach(segment_name)
            chance = random.Random(os.getpid())

            def step():
                move = chance.choice([mine.move_back, mine.move_front])
                move(chance.randrange(16), chance.randrange(2))
                if chance.random() < 0.3:
                    mine.pop_front(chance.randrange(2))

            return step

        def verify():
            lists.check()
            for which in range(2):
                assert len(set(lists.snapshot(which))) == lists.length(which)

        recovered = kill_many(lists.segment, work, verify)
        assert recovered > 0, "no kill fell between two stores: the test proves nothing"
