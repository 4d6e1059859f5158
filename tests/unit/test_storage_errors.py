"""What an error of a storage leaves behind: no view of a page, no claim, no pause, no password."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.interrupts import interrupt
from support.refusals import refused

from lightcache import ConfigError, StorageError
from lightcache._arguments import parse_size
from lightcache.storage import MemoryStorage, open_storage
from lightcache.storage.common import Calls, Deadline
from lightcache.storage.executor import READ, Executor
from lightcache.storage.protocol import WriteStatus
from lightcache.storage.stacked import StackedStorage
from lightcache.storage.testing.conformance import PAGE_BYTES, SPEC, make_keys, pages_of
from lightcache.storage.urls import check_url

KEYS = make_keys(4, seed=6)
TIMEOUT = 60.0
NOBODY = "redis://127.0.0.1:1?required=no"


@pytest.fixture
def counted_only() -> Iterator[None]:
    """Memory goes when nothing refers to it, and not by and by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def failing(call: Callable[[memoryview], object]) -> Any:
    """A page of memory that a call failed with; only the call may still refer to it."""
    page = np.zeros(PAGE_BYTES, np.uint8)
    refused(StorageError, "", call, memoryview(page))
    return weakref.ref(page)


def raising(view: memoryview) -> None:
    held = view
    raise StorageError(f"{len(held)} bytes did not come")


@pytest.mark.usefixtures("counted_only")
def test_a_piece_that_raises_keeps_no_page() -> None:
    lanes = Executor(2, "test")
    page = failing(lambda view: lanes.run([lambda: raising(view)] * 3, READ, Deadline(TIMEOUT)))
    assert lanes.close(TIMEOUT)
    assert page() is None


@pytest.mark.usefixtures("counted_only")
def test_a_call_of_a_client_that_raises_keeps_no_page() -> None:
    callers = Executor(1, "test")
    page = failing(lambda view: callers.ask(lambda: raising(view), Deadline(TIMEOUT)))
    assert callers.close(TIMEOUT)
    assert page() is None


@pytest.mark.usefixtures("counted_only")
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_server_that_is_not_there_keeps_no_page(verb: str) -> None:
    pytest.importorskip("redis")
    with open_storage(NOBODY, spec=SPEC) as storage:
        call = getattr(storage, verb)
        page = failing(lambda view: call(KEYS[:1], [view], timeout=TIMEOUT))
        assert page() is None


# ---- interrupts


def test_an_interrupt_in_the_near_storage_of_a_stack_does_not_end_its_use() -> None:
    class Near(MemoryStorage):
        """Ctrl-C comes while it is asked."""

        def contains(self, keys: Any, *, timeout: float) -> int:
            raise KeyboardInterrupt

    far = MemoryStorage(SPEC)
    far.write(KEYS, list(pages_of(KEYS)), timeout=TIMEOUT)
    with StackedStorage([Near(SPEC), far]) as stack:
        refused(KeyboardInterrupt, "", stack.contains, KEYS, timeout=TIMEOUT)
        assert not stack._levels[0]._executor.calls


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of generators
def test_an_interrupt_at_any_place_of_deleting_does_not_stop_promotion() -> None:
    at, more = 0, True
    while more:
        with StackedStorage([MemoryStorage(SPEC), MemoryStorage(SPEC)]) as stack:
            more = interrupt(lambda: stack.delete(KEYS, timeout=TIMEOUT), at)
            assert stack._promoter._paused == 0, f"at {at}"
        at += 1
    assert at > 20


def test_signals_while_calls_end_leave_none_counted() -> None:
    calls, main = Calls(), threading.main_thread().ident
    assert main is not None
    ending, armed = threading.Event(), [False]

    def come(number: int, frame: object) -> None:
        if armed[0]:  # only where it is caught: elsewhere it would end the tests
            armed[0] = False
            raise KeyboardInterrupt

    def disturb() -> None:
        while not ending.wait(0.0005):
            signal.pthread_kill(main, signal.SIGINT)

    seen = 0
    thread = threading.Thread(target=disturb)
    before = signal.signal(signal.SIGINT, come)
    try:
        thread.start()
        while seen < 200:
            try:
                armed[0] = True
                while True:
                    with calls.one():
                        pass
            except KeyboardInterrupt:
                seen += 1
    finally:
        ending.set()
        thread.join(TIMEOUT)
        signal.signal(signal.SIGINT, before)
    assert calls._under_way == 0


# ---- time


def test_many_keys_take_no_longer_than_they_may() -> None:
    """Those of others are found in one look at each key, not at all pairs."""
    looks = 0

    class Counted(bytes):
        """A name that counts comparisons."""

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return bytes.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = bytes.__hash__

    from unit.test_storage_remote import DictStorage

    with DictStorage(SPEC) as storage:
        names = [Counted(i.to_bytes(16, "little")) for i in range(300)]
        page = memoryview(bytes(PAGE_BYTES))
        found = storage._write_each(dict.fromkeys(names, page), Deadline(TIMEOUT))
    assert {status for status, _ in found.values()} == {WriteStatus.STORED}
    assert looks < 50 * len(names)


def test_closing_holds_up_no_call_that_comes_then() -> None:
    calls, begun, end = Calls(), threading.Event(), threading.Event()

    def release() -> None:
        begun.set()
        assert end.wait(TIMEOUT)

    closer = threading.Thread(target=calls.end, args=(release,))
    closer.start()
    assert begun.wait(TIMEOUT)
    told = threading.Event()

    def call() -> None:
        with pytest.raises(Exception, match="closed"):
            with calls.one():
                pass
        told.set()

    late = threading.Thread(target=call)
    late.start()
    assert told.wait(TIMEOUT)
    end.set()
    for thread in (closer, late):
        thread.join(TIMEOUT)


def test_a_storage_of_a_stack_that_failed_is_not_asked_again_in_a_call() -> None:
    class Failing(MemoryStorage):
        """Counts what it is asked."""

        asked = 0

        def contains(self, keys: Any, *, timeout: float) -> int:
            self.asked += 1
            raise StorageError("no")

    near, failing = MemoryStorage(SPEC), Failing(SPEC)
    near.write(KEYS[:2], list(pages_of(KEYS[:2])), timeout=TIMEOUT)
    with StackedStorage([near, failing]) as stack:
        assert stack.contains(KEYS, timeout=TIMEOUT) == 2
        assert failing.asked == 1


# ---- what is said


def test_a_part_of_a_password_is_not_shown() -> None:
    for verb in (check_url, lambda url: open_storage(url, spec=SPEC)):
        with pytest.raises(ConfigError, match="%7C") as raised:
            verb("stack:redis://u:pa|ss@host/0|memory:")
        assert "ss@host" not in str(raised.value)


def test_a_password_file_that_goes_away(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    with open_storage(f"{NOBODY}&password_file={secret}", spec=SPEC) as storage:
        secret.unlink()
        refused(StorageError, "secret", storage.contains, KEYS, timeout=TIMEOUT)


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_that_can_be_none(host: str) -> None:
    pytest.importorskip("redis")
    with open_storage(f"redis://{host}?required=no", spec=SPEC) as storage:
        refused(StorageError, "not known", storage.contains, KEYS, timeout=TIMEOUT)


@pytest.mark.parametrize("text", ["9" * 400, "9999PiB"])
def test_a_size_beyond_all_measure(text: str) -> None:
    refused(ConfigError, "less than 4 EiB", parse_size, text)
    refused(ConfigError, "expected", check_url, f"memory:?capacity={text}")
    refused(ConfigError, "expected a number", check_url, f"redis://host?connections={'9' * 5000}")


def test_s3_in_a_forked_child() -> None:
    pytest.importorskip("obstore")
    url = "s3://bucket?endpoint=http://127.0.0.1:1&wait=0&anonymous=yes"
    open_storage(url, spec=SPEC).close()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            open_storage(url, spec=SPEC)
        except StorageError as error:
            status = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
