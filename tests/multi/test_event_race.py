"""A notification between the moment a waiter compares the count and the moment it sleeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from multi import pausing

COMPARED = 21  # LC_AT_EVENT_COMPARED
SCRIPT = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from multi import pausing
pausing.use()
from lightcache import shm
from lightcache.shm import structures
from lightcache.shm.codes import Code

with shm.Segment.create(sys.argv[2], 4096) as segment:
    segment.join("test")
    event, library, passed = shm.Event(segment, 0), structures.library(), []

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def hook(point):
        if point == int(sys.argv[3]):
            passed.append(point)
            event.notify()

    where = ctypes.c_void_p.in_dll(library.blocking, "lc_pause_hook")
    where.value = ctypes.cast(hook, ctypes.c_void_p).value
    seen = ctypes.c_uint32()
    at, offset = segment.attachment, event._at
    assert library.quick.lcs_event_read(at, offset, ctypes.byref(seen)) == 0
    code = library.blocking.lcs_event_wait(at, offset, seen, 1_000_000)
    where.value = None
    assert passed, "the pause point was not passed"
    assert code == 0, Code(code)
"""


def test_a_notification_before_the_sleep_is_not_slept_through(script, segment_name):
    if pausing.missing():
        pytest.skip(pausing.missing())
    script(SCRIPT, Path(__file__).parents[1], segment_name, COMPARED)
