"""Slots, who lives in them, and what a fork does to all of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from lightcache.errors import ConfigError, Detached, InUse
from lightcache.shm import Segment, _native, layout
from lightcache.shm.codes import Code
from lightcache.shm.layout import ClientState, SegmentKind
from lightcache.shm.listing import read_segment
from lightcache.shm.objects import OpenObject

Script = Callable[..., Any]
Wait = Callable[[Callable[[], bool], str], None]

JOIN_AND_DIE = (
    "import os, signal, sys\n"
    "from lightcache.shm import Segment\n"
    "from lightcache.shm.layout import SegmentKind\n"
    "kept = [Segment.attach(sys.argv[1]) for _ in range(int(sys.argv[2]))]\n"
    "for i, segment in enumerate(kept): segment.join(f'dead-{i}')\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)


def test_a_slot_says_who_we_are(segment_name: str) -> None:
    with Segment.create(segment_name, 1) as first:
        assert first.client is None
        assert first.clients() == []
        client = first.join("wörker" * 9, device=True)
        assert (client.slot, client.epoch) == (1, 1)
        assert len(client.role.encode()) <= 31
        (info,) = first.clients()
        assert (info.slot, info.state, info.alive, info.epoch) == (1, ClientState.TAKEN, True, 1)
        assert (info.role, info.pid, info.device) == (client.role, os.getpid(), True)
        assert info.pidns == os.stat("/proc/self/ns/pid").st_ino
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        assert info.start_ticks == int(stat[19])
        assert "living" in str(info)
        with Segment.attach(segment_name, readonly=True) as reader:
            assert reader.clients()[0].alive
        with Segment.attach(segment_name) as second:
            assert second.join("second").slot == 2
            assert [seen.role for seen in first.clients()] == [client.role, "second"]
        assert len(first.clients()) == 1
        with Segment.attach(segment_name) as third:
            again = third.join()
            assert (again.slot, again.epoch) == (2, 3)  # raised when given back and when taken


def test_whether_a_client_lives(segment_name: str, script: Script) -> None:
    with Segment.create(segment_name, 1) as segment, Segment.attach(segment_name) as other:
        assert not segment.lives(1, 1)
        mine, theirs = segment.join(), other.join()
        for each in (segment, other):
            assert each.lives(mine.slot, mine.epoch)
            assert each.lives(theirs.slot, theirs.epoch)
            assert not each.lives(theirs.slot, theirs.epoch + 1)
        with Segment.attach(segment_name, readonly=True) as reader:
            assert reader.lives(theirs.slot, theirs.epoch)
        other.close()
        assert not segment.lives(theirs.slot, theirs.epoch)
        script(JOIN_AND_DIE, segment_name, 1, status=-signal.SIGKILL)
        (dead,) = [client for client in segment.clients() if client.role == "dead-0"]
        assert not segment.lives(dead.slot, dead.epoch)
        for slot in (0, 64):
            refused(ConfigError, "slot", segment.lives, slot, 1)
    refused(Detached, "", segment.lives, 1, 1)


def test_a_reader_that_leaves_last_removes_nothing_warm(segment_name: str, script: Script) -> None:
    first = Segment.create(segment_name, 1)
    reader = Segment.attach(segment_name, readonly=True)
    script(JOIN_AND_DIE, segment_name, 1, status=-signal.SIGKILL)
    first.close()
    reader.close()
    assert read_segment(segment_name) is not None
    with Segment.attach(segment_name) as client:
        client.join()  # the next client reaps the dead one, and leaves as the last process
    assert read_segment(segment_name) is None


def test_a_reader_that_leaves_last_removes_what_all_have_left(segment_name: str) -> None:
    client = Segment.create(segment_name, 1)
    client.join()
    reader = Segment.attach(segment_name, readonly=True)
    client.close()
    assert read_segment(segment_name) is not None
    reader.close()
    assert read_segment(segment_name) is None


def test_join_twice(segment_name: str) -> None:
    with Segment.create(segment_name, 1) as segment:
        segment.join()
        refused(InUse, "slot 1", segment.join)


def test_more_clients_than_slots(segment_name: str) -> None:
    with Segment.create(segment_name, 1) as first:
        first.join("number one")
        others = [Segment.attach(segment_name) for _ in range(layout.SLOTS)]
        for other in others[:-2]:
            other.join()
        for late in others[-2:]:
            refused(InUse, r"more clients than slots.*number one.*and \d+ more", late.join)
        others[0].close()
        assert others[-1].join().slot == 2
        for other in others:
            other.close()


def test_dead_clients_make_room(segment_name: str, script: Script) -> None:
    with Segment.create(segment_name, 1) as first:
        first.join()
        script(JOIN_AND_DIE, segment_name, layout.SLOTS - 2, status=-signal.SIGKILL)
        assert [info.alive for info in first.clients()] == [True] + [False] * 62
        with Segment.attach(segment_name) as second:
            client = second.join("second")
            assert (client.slot, client.epoch) == (2, 3)
            assert len(second.clients()) == 2


def test_only_its_reaper_frees_a_structures_slots(segment_name: str, script: Script) -> None:
    with Segment.create(segment_name, 1, kind=SegmentKind.LIST) as first:
        script(JOIN_AND_DIE, segment_name, layout.SLOTS - 1, status=-signal.SIGKILL)
        refused(InUse, "dead", first.join)
        asked = []

        def reap(segment: Segment) -> None:
            asked.append(segment)
            free = _native.quick().lcs_slot_free_dead
            assert free(segment.attachment, 5) == Code.OK
            assert free(segment.attachment, 5) == Code.MISSING
            assert free(segment.attachment, 64) == Code.RANGE

        with Segment.attach(segment_name, reaper=reap) as second:
            assert second.join().slot == 5
            assert asked == [second]
            busy = _native.quick().lcs_slot_free_dead(first.attachment, 5)
            assert busy == Code.BUSY
            own = _native.quick().lcs_slot_free_dead(second.attachment, 5)
            assert own == Code.RANGE


def test_a_structures_slot_stays_for_the_reaper_unless_freed(segment_name: str) -> None:
    with Segment.create(segment_name, 1, kind=SegmentKind.LIST) as first:
        for says_so in (False, True):
            other = Segment.attach(segment_name)
            slot = other.join().slot
            if says_so:
                other.free_slot_on_close()
            other.close()
            left = [(info.slot, info.alive) for info in first.clients()]
            assert ((slot, False) in left) is not says_so


def test_alive_and_thread_gone(segment_name: str, wait_until: Wait) -> None:
    quick = _native.quick()
    gettid = ctypes.CDLL(None).gettid
    with Segment.create(segment_name, 1) as first, Segment.attach(segment_name) as second:
        slot = first.join().slot
        assert quick.lcs_slot_alive(first.attachment, slot) == 1  # the own one
        assert quick.lcs_slot_alive(second.attachment, slot) == 1
        assert quick.lcs_slot_alive(second.attachment, slot + 1) == 0
        assert quick.lcs_slot_alive(second.attachment, 0) == Code.RANGE
        assert quick.lcs_slot_alive(second.attachment, layout.SLOTS) == Code.RANGE
        tids = []
        thread = threading.Thread(target=lambda: tids.append(gettid()))
        thread.start()
        thread.join()
        gone = quick.lcs_thread_gone
        wait_until(lambda: gone(second.attachment, slot, tids[0]), "the thread's end is seen")
        assert not gone(second.attachment, slot, gettid())
        assert not gone(second.attachment, slot, 0)
        assert not gone(second.attachment, slot + 1, tids[0])


def test_a_zombie_is_gone_although_its_record_stands(segment_name: str, wait_until: Wait) -> None:
    source = (
        "import sys\nfrom lightcache.shm import Segment\n"
        "s = Segment.attach(sys.argv[1])\ns.join()\nprint('in', flush=True)\nsys.stdin.read()\n"
    )
    with Segment.create(segment_name, 1) as first:
        child = subprocess.Popen(
            [sys.executable, "-c", source, segment_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"in\n"
            gone = _native.quick().lcs_thread_gone
            assert not gone(first.attachment, 1, child.pid)
            child.kill()
            wait_until(lambda: gone(first.attachment, 1, child.pid), "the kill is seen")
            wait_until(lambda: not first.clients()[0].alive, "the byte is dropped")
        assert not gone(first.attachment, 1, child.pid)  # no evidence any more: the byte decides


# ---------------------------------------------------------------- forks

FORK = """
import ctypes, gc, os, sys
from lightcache.errors import Detached
from lightcache.shm import Segment
name, how = sys.argv[1:]
segment = Segment.create(name, 1)
segment.join("parent")
view = segment.view(segment.payload_offset, 1)
view[0] = 5

def child():
    for call in (segment.join, segment.clients, segment.header, segment.check_usable, segment.close,
                 lambda: segment.view(0, 1), lambda: segment.busy().__enter__(),
                 lambda: segment.address):
        try: call()
        except Detached: continue
        raise SystemExit(f"{call} worked in a forked child")
    with segment: pass
    with Segment.attach(name) as own:       # the child attaches for itself
        assert own.join("child").slot == 2
        assert [info.alive for info in own.clients()] == [True, True]
        assert own.view(own.payload_offset, 1)[0] == 5
        if os.fork() == 0:                  # and so does its child
            try: own.join()
            except Detached: os._exit(0)
            os._exit(1)
        assert os.wait()[1] == 0

# PyDLL: libc's fork with the GIL held, which Python knows nothing of
pid = os.fork() if how == "python" else ctypes.PyDLL(None).fork()
if pid == 0:
    child()
    del segment, view
    gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
with Segment.attach(name) as other:
    assert [(info.role, info.alive) for info in other.clients()] == [("parent", True)]
assert view[0] == 5
"""


@pytest.mark.parametrize("how", ["python", "libc"])
def test_a_forked_child_is_not_attached(segment_name: str, script: Script, how: str) -> None:
    script(FORK, segment_name, how)


def test_a_killed_parent_whose_child_lives_on(segment_name: str, wait_until: Wait) -> None:
    source = (
        "import os, signal, sys\nfrom lightcache.shm import Segment\n"
        "s = Segment.attach(sys.argv[1])\ns.join('parent')\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "signal.pause()\n"
    )
    with Segment.create(segment_name, 1) as first:
        parent = subprocess.Popen(
            [sys.executable, "-c", source, segment_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert first.clients()[0].alive
            parent.kill()
            wait_until(lambda: not first.clients()[0].alive, "the parent's byte is dropped")
            os.kill(child, 0)  # it lives, with every descriptor that a fork hands on
            with Segment.attach(segment_name) as other:
                assert other.join().slot == 2


def test_forks_beside_threads_that_open(segment_name: str, script: Script) -> None:
    """No fork falls between opening a description and recording it."""
    script(
        "import os, sys, threading, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # 3.12: fork beside threads
        "from lightcache.shm import Segment\n"
        "name = sys.argv[1]\n"
        "held = Segment.create(name, 1)\n"
        "stop = threading.Event()\n"
        "def churn():\n"
        "    while not stop.is_set(): Segment.attach(name, timeout=None).close()\n"
        "threads = [threading.Thread(target=churn) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "for _ in range(80):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        # Descriptors to map through hold no lock; those that hold one must be closed.
        "        infos = [f'/proc/self/fdinfo/{n}' for n in os.listdir('/proc/self/fd')]\n"
        "        locks = [open(path).read() for path in infos if os.path.exists(path)]\n"
        "        os._exit(any('OFDLCK' in text for text in locks))\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "stop.set()\n"
        "for thread in threads: thread.join()\n"
        "held.close()\n",
        segment_name,
    )


START = """
import multiprocessing, sys
from lightcache.errors import Detached
from lightcache.shm import Segment

def work(name, inherited):
    if inherited is not None:
        try: inherited.check_usable()
        except Detached: pass
        else: sys.exit(3)
    with Segment.attach(name) as own:
        own.join("worker")
        own.view(own.payload_offset, 1)[0] += 1

if __name__ == "__main__":
    name, method = sys.argv[1:]
    context = multiprocessing.get_context(method)
    with Segment.create(name, 1) as segment:
        segment.join("parent")
        for _ in range(2):
            given = segment if method == "fork" else None
            worker = context.Process(target=work, args=(name, given))
            worker.start()
            worker.join()
            assert worker.exitcode == 0, worker.exitcode
        assert segment.view(segment.payload_offset, 1)[0] == 2
        assert len(segment.clients()) == 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_start_methods(segment_name: str, script: Script, method: str) -> None:
    script(START, segment_name, method)


def test_closed_descriptions_are_not_somebody_elses(segment_name: str) -> None:
    with Segment.create(segment_name, 1):
        opened = OpenObject.open(segment_name, writable=False)
        assert opened is not None
        number = opened.fd
        opened.close()
        reused = os.open("/dev/null", os.O_RDONLY)
        assert reused == number
        wrong = ctypes.c_int(reused)
        _native.quick().lcs_life_close(ctypes.byref(wrong))
        os.close(reused)  # was not closed behind our back
