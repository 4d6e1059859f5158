"""PinnedPages over a driver that writes down its calls: no GPU, no torch."""

from __future__ import annotations

import gc
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.fake_driver import FakeDriver
from support.raising import raised
from support.refusals import refused

from lightcache import (
    ConfigError,
    Detached,
    InUse,
    LightcacheError,
    NoSpace,
    NotReady,
    TransferFailed,
    WaitTimeout,
)
from lightcache.kernels.pinned import OS_PAGE, Pieces, PinnedPages, refusal

DEADLINE = 60.0
SMALL: dict[str, Any] = {"first_bytes": 4096, "chunk_bytes": 4 * 4096}
Wait = Callable[[Callable[[], bool], str], None]


def memory(pages: int, page_bytes: int) -> np.ndarray[Any, Any]:
    """Memory that begins with an OS page, as a pool's does."""
    flat = np.frombuffer(mmap.mmap(-1, pages * page_bytes), np.uint8)
    return flat.reshape(pages, page_bytes)


@pytest.fixture
def pin() -> Iterator[Callable[..., PinnedPages]]:
    made: list[PinnedPages] = []

    def start(pages: int = 64, page_bytes: int = 4096, **how: Any) -> PinnedPages:
        how = {"driver": FakeDriver(), **SMALL, **how}
        made.append(PinnedPages(memory(pages, page_bytes), **how))
        return made[-1]

    yield start
    for pinned in made:
        pinned.close()


Pin = Callable[..., PinnedPages]


# ---------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    "page_bytes", [1, 7, 100, 4095, 4096, 5000, 6144, 8192, 12288, 73728, 1 << 20]
)
@pytest.mark.parametrize("chunk_bytes", [1, 4096, 100_000, 1 << 30])
def test_pieces_cut_neither_pages_nor_os_pages(page_bytes: int, chunk_bytes: int) -> None:
    pages = 3 * math.lcm(page_bytes, OS_PAGE) // page_bytes + 1
    pieces = Pieces(1 << 40, pages, page_bytes, (4096, chunk_bytes))
    begin = 1 << 40
    while not pieces.all_cut:
        piece = pieces.cut(pages)
        assert piece is not None
        assert piece.address == begin, "no gap, no overlap"
        assert piece.address == (1 << 40) + piece.first * page_bytes
        assert piece.nbytes == (piece.last - piece.first) * page_bytes > 0
        begin = piece.address + piece.nbytes
        assert begin % OS_PAGE == 0 or piece.last == pages
        pieces.done(piece)
    assert begin == (1 << 40) + pages * page_bytes
    assert pieces.ready == pages
    assert pieces.statistics.nbytes == pages * page_bytes


def test_pieces_wait_for_memory_and_for_the_first() -> None:
    pieces = Pieces(0, 10, 6144, (1, 8 * 6144))  # two pages are three OS pages
    assert pieces.unit == 2
    assert pieces.cut(1) is None, "half an OS page has no memory"
    first = pieces.cut(7)
    assert first is not None
    assert (first.first, first.last) == (0, 2)
    assert pieces.cut(10) is None, "nobody delays the first"
    assert pieces.done(first) == 2
    second = pieces.cut(5)
    assert second is not None
    assert (second.first, second.last) == (2, 4)
    assert pieces.cut(5) is None
    third = pieces.cut(10)
    assert third is not None
    assert (third.first, third.last) == (4, 10)
    assert pieces.done(third) == 8
    assert pieces.ready == 2, "in front of it one is still missing"
    assert pieces.done(second) == 10
    assert pieces.ready == 10


# ---------------------------------------------------------------- registering


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("pages", "page_bytes"), [(64, 4096), (5, 5000), (4097, 5000), (1, 1)])
def test_everything_is_registered_once(pin: Pin, pages: int, page_bytes: int, threads: int) -> None:
    driver = FakeDriver()
    seen: list[tuple[int, int]] = []
    pinned = pin(
        pages, page_bytes, driver=driver, threads=threads, progress=lambda *at: seen.append(at)
    )
    pinned.wait(timeout=DEADLINE)
    held = driver.registered()
    assert held[0][0] == pinned.address
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(held)), held
    assert sum(n for _, n in held) == pages * page_bytes == pinned.statistics.nbytes
    assert pinned.statistics.pieces == len(held)
    assert pinned.ready == pages
    begins = [(at - pinned.address) // page_bytes for at, _ in held]
    numbers = pinned.registration(np.arange(pages))
    assert numbers.tolist() == (np.searchsorted(begins, np.arange(pages), "right") - 1).tolist()
    assert pinned.check([0, pages - 1]).tolist() == [0, pages - 1]
    pinned.close()
    assert (pages, pages) in seen
    assert driver.registered() == []
    assert [call for call, *_ in driver.calls].count("unregister") == len(held)


def test_the_first_pages_before_the_rest(pin: Pin) -> None:
    driver = FakeDriver(gates={at * 4096: threading.Event() for at in (1, 5)})
    pinned = pin(driver=driver, threads=2)
    pinned.wait([0], DEADLINE)
    assert pinned.ready == 1
    assert pinned.check([0, 0]).tolist() == [0, 0]
    assert pinned.statistics.first_seconds > 0
    error = raised(lambda: pinned.check([0, 5]))
    assert isinstance(error, NotReady)
    assert "page 5 is not registered with the GPU driver yet: 1 of 64 pages" in str(error)
    assert isinstance(raised(lambda: pinned.wait([5], 0.0)), WaitTimeout)
    for gate in driver.gates.values():
        gate.set()
    pinned.wait([5], DEADLINE)
    assert pinned.check([5]).tolist() == [5]


def test_pieces_that_finish_out_of_order(pin: Pin, wait_until: Wait) -> None:
    driver = FakeDriver(gates={4096: threading.Event()})
    pinned = pin(13, driver=driver, threads=2)  # pieces of 1, 4, 4 and 4 pages
    wait_until(lambda: len(driver.registered()) == 3, "the pieces behind the one held up")
    assert pinned.ready == 1
    assert isinstance(raised(lambda: pinned.check([12])), NotReady), "its front is not whole"
    driver.gates[4096].set()
    pinned.wait(timeout=DEADLINE)
    assert pinned.ready == 13


def test_memory_that_is_not_there_is_not_touched(pin: Pin, wait_until: Wait) -> None:
    driver, grown = FakeDriver(), [3]
    pinned = pin(12, 6144, driver=driver, grown=lambda: grown[0], chunk_bytes=1 << 20)
    pinned.wait([1], DEADLINE)
    for more, front in ((3, 2), (4, 4), (9, 8), (12, 12)):
        grown[0] = more
        wait_until(lambda front=front: pinned.ready == front, f"{front} pages")  # type: ignore[misc]
        end = max(address + length for address, length in driver.registered())
        assert end == pinned.address + front * 6144
        if front < 12:
            assert isinstance(raised(lambda front=front: pinned.wait([front], 0.0)), WaitTimeout)  # type: ignore[misc]
    pinned.wait(timeout=DEADLINE)


def test_somebody_gives_it_memory(pin: Pin) -> None:
    grown = [0]

    def grow() -> None:
        grown[0] += 5

    pinned = pin(20, driver=FakeDriver(), grown=lambda: grown[0], grow=grow)
    pinned.wait(timeout=DEADLINE)
    assert grown[0] == 20


def test_no_memory_to_be_had(pin: Pin, wait_until: Wait) -> None:
    grown, driver = [0], FakeDriver()

    def grow() -> None:
        if grown[0] == 4:
            raise NoSpace("the file system is full")
        grown[0] += 4

    pinned = pin(20, driver=driver, grown=lambda: grown[0], grow=grow)
    pinned.wait([3], DEADLINE)
    error = raised(lambda: pinned.wait([4], DEADLINE))
    assert isinstance(error, NoSpace)
    assert "full (4 of 20 pages are pinned" in str(error)
    grown[0] = 20  # somebody else had room
    pinned.wait(timeout=DEADLINE)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("code", "kind", "remedy"),
    [
        (1, TransferFailed, "grow the pool"),
        (2, NoSpace, "chunk_bytes"),
        (304, TransferFailed, "dmesg"),
        (712, TransferFailed, "registered already"),
        (800, TransferFailed, "container"),
        (801, TransferFailed, "host path"),
        (999, TransferFailed, "code 999"),
    ],
)
def test_what_a_refusal_says(code: int, kind: type[LightcacheError], remedy: str) -> None:
    error = refusal(code, "register something")
    assert type(error) is kind
    assert remedy in str(error)
    assert str(error).startswith("register something: the GPU driver refused it with code")


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_refusal_leaves_what_there_is(pin: Pin, at: int) -> None:
    driver = FakeDriver(refuse_at=at)
    pinned = pin(driver=driver, threads=1)
    error = raised(lambda: pinned.wait(timeout=DEADLINE))
    assert isinstance(error, NoSpace)
    ready = [0, 1, 5, 9][at]
    assert f"({ready} of 64 pages are pinned and can be used)" in str(error)
    assert pinned.ready == ready
    pinned.check(list(range(ready)))
    assert type(raised(lambda: pinned.check([ready]))) is NoSpace
    pinned.close()
    assert driver.registered() == []


def test_a_device_with_addresses_of_its_own(pin: Pin) -> None:
    driver = FakeDriver(elsewhere=True)
    pinned = pin(driver=driver)
    assert "finds it at" in str(raised(lambda: pinned.wait(timeout=DEADLINE)))
    assert driver.registered() == []


def test_unregistering_that_is_refused(pin: Pin) -> None:
    driver = FakeDriver(unregister_code=713)
    pinned = pin(driver=driver)
    pinned.wait(timeout=DEADLINE)
    count = len(driver.registered())
    error = raised(pinned.close)
    assert f"({count} registrations)" in str(error), "all of them were tried"
    assert pinned.closed
    pinned.close()


def test_a_driver_that_shuts_down_has_given_it_back(pin: Pin) -> None:
    pinned = pin(driver=FakeDriver(unregister_code=4))
    pinned.wait(timeout=DEADLINE)
    pinned.close()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "how", [{"threads": 0}, {"threads": 1.5}, {"chunk_bytes": 0}, {"chunk_bytes": "1"}]
)
def test_counts_that_are_none(pin: Pin, how: dict[str, Any]) -> None:
    driver = FakeDriver()
    refused(ConfigError, next(iter(how)), pin, driver=driver, **how)
    assert driver.calls == []


def test_memory_that_cannot_be_pinned() -> None:
    whole = memory(3, 4096)
    fixed = whole.view()
    fixed.flags.writeable = False
    odd = whole.reshape(-1)[16 : 16 + 8192].reshape(2, 4096)
    for array in (fixed, odd, memory(3, 4096)[:0]):
        refused(ConfigError, "page memory", PinnedPages, array, driver=FakeDriver())


@pytest.mark.parametrize("pages", [[-1], [64], [0.5], [[0]], ["0"]])
def test_pages_that_are_none(pin: Pin, pages: Any) -> None:
    pinned = pin()
    for call in (pinned.check, pinned.wait):
        refused(ConfigError, "pages", call, pages)


# ---------------------------------------------------------------- the end


def test_engines_keep_it(pin: Pin) -> None:
    driver = FakeDriver()
    pinned = pin(driver=driver)
    pinned.acquire()
    pinned.wait(timeout=DEADLINE)
    refused(InUse, "1 engines", pinned.close)
    assert driver.registered()
    assert pinned.check([63]).tolist() == [63]
    pinned.release()
    pinned.close()
    assert driver.registered() == []


def test_closed(pin: Pin) -> None:
    pinned = pin()
    pinned.wait(timeout=DEADLINE)
    pinned.close()
    pinned.close()
    assert pinned.closed
    assert pinned.ready == 0
    assert pinned.array.size == 0
    for call in (lambda: pinned.check([0]), lambda: pinned.wait([0]), pinned.wait, pinned.acquire):
        assert isinstance(raised(call), Detached)


def test_closing_in_the_middle(pin: Pin, wait_until: Wait) -> None:
    """What is under way is waited for and undone; who waits for the rest is told."""
    driver = FakeDriver(gates={5 * 4096: threading.Event()})
    pinned = pin(driver=driver, threads=1)
    wait_until(lambda: driver.count == 3, "the third registration")
    assert pinned.ready == 5
    told: list[LightcacheError] = []
    waiter = threading.Thread(target=lambda: told.append(raised(pinned.wait)))
    waiter.start()
    closer = threading.Thread(target=pinned.close)
    closer.start()
    waiter.join(DEADLINE)
    assert not waiter.is_alive()
    assert [type(error) for error in told] == [Detached]
    assert not pinned.closed
    assert driver.registered(), "nothing is undone while a call is under way"
    driver.gates[5 * 4096].set()
    closer.join(DEADLINE)
    assert pinned.closed
    assert driver.registered() == []
    assert driver.count == 3, "nothing was begun afterwards"


def test_forgotten(pin: Pin) -> None:
    driver = FakeDriver()
    pinned = PinnedPages(memory(8, 4096), driver=driver, **SMALL)
    pinned.wait(timeout=DEADLINE)
    for thread in pinned._threads:
        thread.join(DEADLINE)
    del pinned, thread
    gc.collect()
    assert driver.registered() == []


def test_a_forked_child_has_nothing_of_it(pin: Pin) -> None:
    driver = FakeDriver()
    pinned = pin(driver=driver)
    pinned.wait(timeout=DEADLINE)
    pinned._pid = os.getpid() + 1  # as it looks to a child
    pinned.close()
    assert not pinned.closed
    assert driver.registered()
    pinned._pid = os.getpid()
