"""Structures whose users are killed while they change them: nothing half done is seen.

The children use the build with pause points and kill themselves at one, so that every death falls
between two stores of a critical section.
"""

import contextlib
import ctypes
import os
import random
import signal
from pathlib import Path

import pytest

from lightcache import errors, shm
from lightcache.shm import _native, layout, structures

AT_COMMIT, AT_KEY_ODD, AT_KEY_WRITTEN, AT_UNLOCK = 14, 6, 7, 15  # LC_AT_* in lc_base.h
AT_LOG_WRITTEN, AT_LOG_ANNOUNCED, AT_LOG_COPIED = 25, 26, 27
HOOK = ctypes.CFUNCTYPE(None, ctypes.c_int)


@pytest.fixture
def pause_library():
    folder = os.environ.get("LIGHTCACHE_TEST_BUILD")
    if not folder or not (Path(folder) / "_shm.so").exists():
        pytest.skip("LIGHTCACHE_TEST_BUILD names no build with pause points; use make test")
    return Path(folder) / "_shm.so"


def recoveries(segment):
    where = segment.address + layout.LOCK_OFFSET
    return layout.LockRecord.from_address(where).recoveries


def die_at(path, point, count):
    """Make this process, a fork, kill itself the `count`-th time it comes to this point."""
    left = [count]

    def hook(at):
        if at == point:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    library = _native.load(path)
    structures.library.cache_clear()
    structures._native.load = lambda: library
    kept = HOOK(hook)
    ctypes.c_void_p.in_dll(library.quick, "lc_pause_hook").value = ctypes.cast(
        kept, ctypes.c_void_p
    ).value
    return kept


def kill_at_every_point(pause_library, points, attach, steps, verify):
    """For each point and count fork a child that goes through `steps` until it dies there."""
    for point in points:
        for count in range(1, 9):
            pid = os.fork()
            if pid == 0:
                try:
                    kept = die_at(pause_library, point, count)
                    mine, chance = attach(), random.Random(count)
                    while kept:
                        steps(mine, chance)
                finally:
                    os._exit(1)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), f"point {point}: the child ended by itself"
            verify()


@pytest.mark.slow
@pytest.mark.crash
def test_a_dict_survives_its_users(segment_name, pause_library):
    untouched = 1 << 100
    with shm.SharedDict.create(segment_name, capacity=24) as table:
        table[untouched] = 77

        def steps(mine, chance):
            key = chance.randrange(20)
            mine.put(key, key * key)
            mine.pop(chance.randrange(20))

        def verify():
            table.check()
            assert table[untouched] == 77
            assert all(value == key * key for key, value in table.items() if key != untouched)
            assert not table.put(1 << 90, 5)
            assert table.pop(1 << 90) == 5

        points = [AT_COMMIT, AT_KEY_ODD, AT_KEY_WRITTEN, AT_UNLOCK]
        attach = lambda: shm.SharedDict.attach(segment_name)  # noqa: E731
        kill_at_every_point(pause_library, points, attach, steps, verify)
        assert recoveries(table.segment) > 10


@pytest.mark.crash
def test_a_list_survives_its_users(segment_name, pause_library):
    with shm.SharedList.create(segment_name, nodes=16, lists=2) as lists:

        def steps(mine, chance):
            mine.move_back(chance.randrange(16), chance.randrange(2))
            mine.move_front(chance.randrange(16), chance.randrange(2))
            mine.pop_front(chance.randrange(2))

        def verify():
            lists.check()
            for which in range(2):
                assert len(set(lists.snapshot(which))) == lists.length(which)

        attach = lambda: shm.SharedList.attach(segment_name)  # noqa: E731
        kill_at_every_point(pause_library, [AT_COMMIT, AT_UNLOCK], attach, steps, verify)
        assert recoveries(lists.segment) == 8, "each death at a commit leaves a log to undo"


@pytest.mark.crash
def test_a_ring_survives_its_users(segment_name, pause_library):
    """A push that died before its commit is not there, one behind it is; and the like of pops."""
    with shm.SharedRing.create(segment_name, capacity=6, message_bytes=8) as ring:
        last = [-1]

        def steps(mine, chance):
            newest = last[0]
            for _ in range(chance.randrange(1, 5)):
                some = [b"%d" % (newest + 1 + i) for i in range(chance.randrange(1, 4))]
                newest += mine.push_many(some)
            for _ in range(chance.randrange(1, 3)):
                mine.pop_many(chance.randrange(1, 4))
            last[0] = newest

        def verify():
            ring.check()
            numbers = [int(message) for message in ring.pop_many(6)]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else 1
            last[0] = -1
            assert len(ring) == 0
            ring.push(b"after", timeout=0)
            assert ring.pop(timeout=0) == b"after"

        attach = lambda: shm.SharedRing.attach(segment_name)  # noqa: E731
        kill_at_every_point(pause_library, [AT_COMMIT, AT_UNLOCK], attach, steps, verify)
        assert recoveries(ring.segment) == 8, "each death at a commit leaves a log to undo"


@pytest.mark.slow
@pytest.mark.crash
def test_a_log_survives_its_users(segment_name, pause_library):
    """A child writes and reads. An entry whose writer died before counting it is not there, one
    behind it is; a reader that died while joining, or with entries copied, holds nobody up."""
    with shm.SharedLog.open(segment_name, capacity=64, message_bytes=8) as reader:
        came = []

        def attach():
            return [shm.SharedLog.attach(segment_name, writer=writing) for writing in (True, False)]

        def steps(mine, chance):
            for _ in range(chance.randrange(1, 4)):
                mine[0].append(b"%d" % mine[0].appended, timeout=0)
            mine[1].read_many(chance.randrange(1, 4))
            for one in mine:
                one.close()
            mine[:] = attach()

        def read_all():
            with contextlib.suppress(errors.Abandoned):
                while True:
                    came.extend(map(int, reader.read_many(9)))
            assert came == list(range(reader.appended))

        def verify():
            reader.check()
            read_all()
            with shm.SharedLog.attach(segment_name, writer=True) as heir:
                for _ in range(2 * heir.capacity):
                    heir.append(b"%d" % heir.appended, timeout=0)
                    came.append(int(reader.read(timeout=0)))
                assert [one.slot for one in heir.behind()] == [reader.segment.client.slot]
            read_all()

        points = [AT_LOG_WRITTEN, AT_LOG_ANNOUNCED, AT_LOG_COPIED, AT_COMMIT, AT_UNLOCK]
        kill_at_every_point(pause_library, points, attach, steps, verify)
        assert recoveries(reader.segment) == 8, "each death at a commit leaves a log to undo"
