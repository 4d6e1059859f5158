"""The disk: pages there and back, who goes first, in which time, and the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disks import (
    ABSENT,
    CORRUPT,
    FAILED,
    KEYS,
    OK,
    PRESENT,
    REFUSED,
    SLOT,
    STORED,
    Medium,
    disk,
    found,
    got,
    indexes,
    put,
    slot_of,
)
from support.refusals import refused
from support.scripts import with_support

from lightcache import ConfigError, Detached, LockTimeout, PageIndex, StorageError
from lightcache.shm.waiting import Condition
from lightcache.storage import StorageSpec, executor, open_storage
from lightcache.storage.common import Deadline
from lightcache.storage.disk import DiskStorage
from lightcache.storage.disk.backend import Dropped, drop
from lightcache.storage.disk.slots import SlotFiles
from lightcache.storage.executor import READ, WRITE, Executor
from lightcache.storage.protocol import ReadStatus
from lightcache.storage.testing.conformance import CHECKS, PAGE_BYTES, SPEC, make_keys, pages_of


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("direct", ["yes", "no"])
def test_conformance(where: Path, direct: str, check: Callable[..., None]) -> None:
    url = f"disk:{where}?capacity={300 * SLOT}&direct={direct}&threads=3"
    check(lambda spec: open_storage(url, spec=spec))


# ---------------------------------------------------------------- any page, any memory


@pytest.mark.parametrize("page_bytes", [1, 512, 4095, 4096, 4097, 3 * 4096 + 1, 1 << 20])
@pytest.mark.parametrize("direct", [True, False])
def test_pages_of_any_size(where: Path, page_bytes: int, direct: bool) -> None:
    spec = StorageSpec(page_bytes)
    pages = np.random.default_rng(page_bytes).integers(0, 256, (3, page_bytes), np.uint8)
    with disk(where, 4, spec, direct=direct) as storage:
        assert not storage.direct or (direct and page_bytes % 4096 == 0)
        assert storage.write(KEYS[:3], list(pages), timeout=60.0).prefix == 3
    with disk(where, 4, spec, direct=not direct) as storage:
        into = np.zeros((3, page_bytes), np.uint8)
        assert storage.read(KEYS[:3], list(into), timeout=60.0).prefix == 3
        assert (into == pages).all()


@pytest.mark.parametrize("shift", [0, 1, 512])
def test_memory_at_any_address(where: Path, shift: int) -> None:
    memory = np.zeros(3 * PAGE_BYTES + shift, np.uint8)
    first = -memory.ctypes.data % 4096 + shift
    page = memory[first : first + PAGE_BYTES]
    with disk(where) as storage:
        page[:] = pages_of(KEYS[:1])[0]
        assert storage.write(KEYS[:1], [page], timeout=60.0).prefix == 1
        page[:] = 0
        assert storage.read(KEYS[:1], [page], timeout=60.0).prefix == 1
        assert (page == pages_of(KEYS[:1])[0]).all()


def test_what_passes_through_the_page_cache_does_not_stay(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    advise = "lightcache.storage.disk.slots.os.posix_fadvise"
    monkeypatch.setattr(advise, lambda *arguments: told.append(arguments[3]))
    monkeypatch.setattr("lightcache.storage.disk.slots._aligned", lambda memory: False)
    with disk(where) as storage:
        put(storage, KEYS[:2])
        assert got(storage, KEYS[:2]) == [OK] * 2
        assert len(told) == 4
    with disk(where, direct=False) as storage:  # its owner wants the page cache
        assert got(storage, KEYS[:2]) == [OK] * 2
        assert len(told) == 4


# ---------------------------------------------------------------- capacity, and who goes first


def test_a_prefix_outlives_what_hangs_on_it(where: Path) -> None:
    prompt, other = make_keys(6, 1), make_keys(3, 2)
    with disk(where, 8) as storage:
        for first in (0, 2, 4):  # three calls, as a tier's groups are
            put(storage, prompt[first : first + 2], parent=prompt[first - 1 : first or None][:1])
        put(storage, other)
        assert found(storage, prompt) == 5
        assert found(storage, other) == 3
        put(storage, make_keys(3, 3))
        assert found(storage, prompt) == 2
        assert storage.stats().evicted == 4
        assert storage.stats().pages == 8


def test_so_it_is_after_a_rebuild(where: Path) -> None:
    prompt = make_keys(6, 1)
    with disk(where, 8) as storage:
        for first in (0, 2, 4):
            before = prompt[first - 1 : first] if first else None
            put(storage, prompt[first : first + 2], parent=before)
    with disk(where, 8) as storage:
        assert storage.rebuilt is not None
        assert storage.rebuilt.pages == 6
        got(storage, prompt[4:])  # used last, and goes first all the same
        put(storage, make_keys(4, 2))
        assert found(storage, prompt) == 4


def test_without_its_parent_the_oldest_goes(where: Path) -> None:
    prompt = make_keys(6, 1)
    with disk(where, 8) as storage:
        for first in (0, 2, 4):
            put(storage, prompt[first : first + 2])
        put(storage, make_keys(4, 2))
        assert found(storage, prompt) < 4


def test_a_batch_larger_than_the_disk(where: Path) -> None:
    with disk(where, 4) as storage:
        assert put(storage, KEYS[:6]) == [STORED] * 4 + [REFUSED] * 2
        assert found(storage, KEYS) == 4


@pytest.mark.parametrize("parent", [KEYS[:2], KEYS[0], "text"])
def test_a_parent_is_one_key(where: Path, parent: Any) -> None:
    with disk(where) as storage, pytest.raises(ConfigError, match="parent"):
        put(storage, KEYS[1:], parent=parent)


# ---------------------------------------------------------------- deleted, cleared


def test_what_was_deleted_no_rebuild_finds(where: Path) -> None:
    with disk(where) as storage:
        put(storage, KEYS[:6])
        assert storage.delete(KEYS[2:4], timeout=60.0) == 2
        assert storage._index.stats().held == 0
    with disk(where) as storage:
        assert got(storage, KEYS[:6]) == [OK, OK, ABSENT, ABSENT, OK, OK]


def test_what_was_cleared_no_rebuild_finds(where: Path) -> None:
    with disk(where) as storage:
        put(storage, KEYS)
        assert storage.clear(timeout=60.0) == 12
        put(storage, KEYS[:3])
    with disk(where) as storage:
        assert got(storage, KEYS) == [OK] * 3 + [ABSENT] * 9
        assert storage.rebuilt is not None
        assert storage.rebuilt.dropped == 0


def test_others_see_that_it_was_cleared(where: Path) -> None:
    with disk(where) as one, disk(where) as other:
        put(one, KEYS[:4])
        assert one.clear(timeout=60.0) == 4
        assert found(other, KEYS) == 0
        put(one, KEYS[:2])
        assert one.clear(timeout=60.0) == 2
        put(one, KEYS[:2])
        assert found(other, KEYS) == 2  # what was written since
        assert one.clear(timeout=60.0) == 2
        assert put(other, KEYS[:4]) == [STORED] * 4  # in the new epoch
        assert got(one, KEYS[:4]) == [OK] * 4
        assert other.clear(timeout=60.0) == 4
        assert one.delete(KEYS, timeout=60.0) == 0
        assert put(one, KEYS[:2]) == [STORED] * 2
    with disk(where) as storage:
        assert found(storage, KEYS) == 2


def test_cleared_in_the_middle_of_a_write(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SlotFiles.write_slot
    with disk(where) as one, disk(where) as other:

        def clearing(*arguments: Any) -> None:
            monkeypatch.undo()
            whole(*arguments)
            other.clear(timeout=60.0)

        monkeypatch.setattr(SlotFiles, "write_slot", clearing)
        assert put(one, KEYS[:3]) == [STORED] * 3  # anew
        assert found(other, KEYS) == 3
    with disk(where) as storage:
        assert got(storage, KEYS[:3]) == [OK] * 3


def test_a_page_that_others_read_is_not_deleted(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SlotFiles.read_slot
    with disk(where) as one, disk(where) as other:
        put(one, KEYS[:2])

        def deleting(*arguments: Any) -> Any:
            with pytest.raises(StorageError, match="1 of 1 pages are being read"):
                other.delete(KEYS[:1], timeout=60.0)
            return whole(*arguments)

        monkeypatch.setattr(SlotFiles, "read_slot", deleting)
        assert got(one, KEYS[:1]) == [OK]
        monkeypatch.undo()
        assert other.delete(KEYS[:1], timeout=60.0) == 1


def test_deleted_by_another_thread_while_it_is_read(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of our own process: its pins do not keep it. That is no corruption."""
    whole = SlotFiles.read_slot
    with disk(where) as storage:
        put(storage, KEYS[:2])

        def deleting(*arguments: Any) -> Any:
            monkeypatch.undo()
            assert storage.delete(KEYS[:1], timeout=60.0) == 1
            assert storage._index.stats().doomed == 1  # nobody gets the slot meanwhile
            return whole(*arguments)

        monkeypatch.setattr(SlotFiles, "read_slot", deleting)
        assert got(storage, KEYS[:1]) == [ABSENT]
        assert storage.stats().reads_corrupt == 0
        assert got(storage, KEYS[:2]) == [ABSENT, OK]
        storage._index.check().raise_if_broken()


def test_a_corrupt_page_that_was_stored_anew_stays(where: Path) -> None:
    with disk(where) as one, disk(where) as other:
        put(one, KEYS[:1])
        Medium(where).write(slot_of(one, KEYS[0]), b"?" * 8)
        assert got(other, KEYS[:1]) == [CORRUPT]
        put(other, make_keys(1, 8))  # takes the slot that is free now
        put(other, KEYS[:1])
        before = np.array([slot_of(one, make_keys(1, 8)[0])], np.int32)
        assert drop(one._folder, KEYS[:1], before) == Dropped(0, 0)
        assert found(one, KEYS[:1]) == 1


# ---------------------------------------------------------------- time


def test_a_batch_of_which_some_were_written_in_time(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first page takes until the time is up: the others are not begun, and none is found."""
    whole, began = SlotFiles.write_slot, []

    def slow(*arguments: Any) -> None:
        began.append(1)
        threading.Timer(0.05, passed.set).start()
        passed.wait()
        whole(*arguments)

    passed = threading.Event()
    monkeypatch.setattr(SlotFiles, "write_slot", slow)
    monkeypatch.setattr(Deadline, "passed", property(lambda self: passed.is_set()))
    with disk(where, threads=1) as storage:
        result = storage.write(KEYS[:3], list(pages_of(KEYS[:3])), timeout=60.0)
        monkeypatch.undo()
        assert list(result.statuses) == [FAILED] * 3
        assert result.reason.startswith("timed out")
        assert len(began) == 1
        assert storage.stats().timeouts == 1
        assert found(storage, KEYS) == 0
        assert put(storage, KEYS[:3]) == [STORED] * 3


class Gate:
    """A piece that tells that it runs, and ends when it may."""

    def __init__(self) -> None:
        self.began, self.may = threading.Event(), threading.Event()
        self.over = False

    def __call__(self) -> None:
        self.began.set()
        assert self.may.wait(60.0)
        self.over = True


def test_what_has_not_begun_is_left_out_though_all_threads_hang() -> None:
    lanes, hanging = Executor(1, "test", spare=0), Gate()
    first = threading.Thread(target=lanes.run, args=([hanging], READ, Deadline(60.0)))
    first.start()
    assert hanging.began.wait(60.0)
    done: list[int] = []
    lanes.run([lambda: done.append(1)] * 3, READ, Deadline(0.01))  # returns: nothing of it runs
    hanging.may.set()
    first.join(60.0)
    lanes.run([lambda: done.append(2)], READ, Deadline(60.0))
    assert lanes.close(60.0)
    assert done == [2]


def test_what_has_begun_is_waited_for() -> None:
    lanes, hanging = Executor(1, "test", spare=0), Gate()

    def let_go() -> None:
        assert hanging.began.wait(60.0)
        threading.Timer(0.05, hanging.may.set).start()

    letting = threading.Thread(target=let_go)
    letting.start()
    while not hanging.began.is_set():  # so short a time may be over before a thread takes it
        lanes.run([hanging], READ, Deadline(0.01))
    letting.join(60.0)
    assert hanging.over
    assert lanes.close(60.0)


def test_reads_go_before_writes() -> None:
    lanes, hanging = Executor(1, "test", spare=0), Gate()
    order: list[str] = []
    calls = [
        threading.Thread(target=lanes.run, args=([piece], kind, Deadline(60.0)))
        for piece, kind in (
            (hanging, WRITE),
            (lambda: order.append("write"), WRITE),
            (lambda: order.append("read"), READ),
        )
    ]
    calls[0].start()
    assert hanging.began.wait(60.0)
    for call in calls[1:]:
        call.start()
        while len(lanes.queue) < calls.index(call):
            pass
    hanging.may.set()
    for call in calls:
        call.join(60.0)
    assert lanes.close(60.0)
    assert order == ["read", "write"]


def test_an_error_of_a_piece_is_its_callers() -> None:
    lanes, done = Executor(1, "test", spare=0), []

    def wrong() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        lanes.run([wrong, lambda: done.append(1)], READ, Deadline(60.0))
    lanes.run([lambda: done.append(2)], READ, Deadline(60.0))  # its thread lives
    assert lanes.close(60.0)
    assert done == [1, 2]


def test_ctrl_c_waits_for_what_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is interrupted may give the memory to others: nothing may still write to it, nor
    begin to. It comes a second time while that is waited for."""
    leaving = threading.Event()

    class Telling(Condition):
        def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
            if timeout is None:
                leaving.set()
            return super().wait_for(predicate, timeout)

    lanes, hanging = Executor(1, "test", spare=0), Gate()
    began: list[int] = []
    main = threading.get_ident()

    def interrupt() -> None:
        assert hanging.began.wait(60.0)
        signal.pthread_kill(main, signal.SIGINT)
        while not leaving.wait(2.0):  # it came just before the main thread slept: once more
            signal.pthread_kill(main, signal.SIGINT)
        signal.pthread_kill(main, signal.SIGINT)
        threading.Timer(0.3, hanging.may.set).start()

    monkeypatch.setattr(executor, "Condition", Telling)
    thread = threading.Thread(target=interrupt)
    # A shell that starts us in the background has SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lanes.run([hanging, lambda: began.append(1)], READ, Deadline(60.0))
        thread.join(60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert hanging.over
    assert lanes.close(60.0)
    assert not began


def test_no_time_limit(where: Path) -> None:
    with disk(where) as storage:
        put(storage, KEYS[:2], timeout=float("inf"))
        assert storage.contains(KEYS, timeout=float("inf")) == 2
        refused(ConfigError, "timeout", storage.contains, KEYS, timeout=float("nan"))


# ---------------------------------------------------------------- the end


def test_closing_waits_for_calls(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SlotFiles.read_slot
    storage = disk(where)
    put(storage, KEYS[:1])
    closer = threading.Thread(target=storage.close)

    def closing(*arguments: Any) -> Any:
        closer.start()
        while not storage._calls._closed:
            pass
        return whole(*arguments)

    monkeypatch.setattr(SlotFiles, "read_slot", closing)
    assert got(storage, KEYS[:1]) == [OK]
    closer.join(60.0)
    refused(Detached, "closed", put, storage, KEYS)


def test_a_call_that_hangs_holds_closing_up(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightcache.storage.common.CLOSING", 0.01)
    whole, hanging = SlotFiles.read_slot, Gate()
    storage = disk(where)
    put(storage, KEYS[:1])

    def slow(*arguments: Any) -> Any:
        hanging()
        return whole(*arguments)

    monkeypatch.setattr(SlotFiles, "read_slot", slow)
    statuses: list[ReadStatus] = []
    call = threading.Thread(target=lambda: statuses.extend(got(storage, KEYS[:1])))
    call.start()
    assert hanging.began.wait(60.0)
    refused(StorageError, "1 calls have not returned", storage.close)
    hanging.may.set()
    call.join(60.0)
    assert statuses == [OK]
    storage.close()
    storage.close()
    assert storage.stats().reads_ok == 1


def test_closing_that_failed_is_done_again(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(index: PageIndex) -> None:
        raise LockTimeout("on purpose")

    storage = disk(where)
    monkeypatch.setattr(PageIndex, "close", held)
    refused(LockTimeout, "", storage.close)
    monkeypatch.undo()
    storage.close()
    assert not indexes(where)


def test_its_index_was_removed(where: Path) -> None:
    with disk(where) as storage:
        put(storage, KEYS[:2])
        storage._index.segment.unlink(storage.index_name, force=True)
        for call in (lambda: found(storage, KEYS), lambda: got(storage, KEYS)):
            refused(StorageError, "index was removed", call)
        refused(StorageError, "index was removed", put, storage, KEYS)


FORKS = """
import os, sys, threading, warnings
from lightcache import Detached
from support.disks import KEYS, disk, got, put, found, OK
from pathlib import Path
warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
where = Path(sys.argv[1])
with disk(where) as storage:
    put(storage, KEYS[:2])
    held, forked = threading.Event(), threading.Event()
    def hold():
        with storage._calls._state:  # nobody gives it back in the child
            held.set()
            forked.wait()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (put, got, found):
            try:
                call(storage, KEYS)
            except Detached:
                refused += 1
        assert storage.stats().pages == 0
        try:
            storage.close()
        except Detached:
            refused += 1
        storage.__exit__(None, None, None)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    forked.set()
    holder.join()
    assert got(storage, KEYS[:2]) == [OK] * 2
holder_r, holder_w = os.pipe()
storage = disk(where)
child = os.fork()
if child == 0:
    os.close(holder_w)
    os.read(holder_r, 1)  # lives on, with our descriptors
    os._exit(0)
storage.close()
with disk(where) as storage:
    assert storage.rebuilt is not None  # the child does not count as somebody who uses it
    assert got(storage, KEYS[:2]) == [OK] * 2
os.write(holder_w, b"x")
os.waitpid(child, 0)
"""

LEAVES = """
import sys
from support.disks import KEYS, disk, put
from pathlib import Path
storage = disk(Path(sys.argv[1]))
put(storage, KEYS[:2])
"""


def test_forked(where: Path, script: Any) -> None:
    script(with_support(FORKS), where)


def test_a_process_that_ends_without_closing(where: Path, script: Any) -> None:
    script(with_support(LEAVES), where)
    with disk(where) as storage:
        assert found(storage, KEYS) == 2


def test_the_index_goes_with_the_last_or_stays(where: Path) -> None:
    with disk(where) as one:
        put(one, KEYS[:3])
        other = disk(where)
        assert other.rebuilt is None
        assert len(indexes(where)) == 1
    assert found(other, KEYS) == 3
    other.close()
    assert not indexes(where)
    with disk(where, persistent=True):
        pass
    assert len(indexes(where)) == 1
    with disk(where) as again:
        assert again.rebuilt is None
        assert got(again, KEYS[:3]) == [OK] * 3
    DiskStorage.remove(where, SPEC)
    assert not indexes(where)


def test_present_is_not_written_again(where: Path) -> None:
    with disk(where) as one, disk(where) as other:
        assert put(one, KEYS[:3]) == [STORED] * 3
        assert put(other, KEYS[:4]) == [PRESENT] * 3 + [STORED]
        assert put(other, KEYS[[4, 4]]) == [STORED, PRESENT]
