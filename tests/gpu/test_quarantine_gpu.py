"""A process is killed with hundreds of copies queued into pages that it had reserved. Whoever takes
one of these pages, as soon as it is offered, is the only one who writes it.

A copy engine outlives a signal: bytes go on changing for milliseconds after SIGKILL. A client that
said it has a device is therefore quarantined; of one that did not say so the pages are offered at
once, and the same test must then see bytes change, or it would prove nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.quarantine_side import PAGE_BYTES, PAGES, SECRET, SWEEPS, TAKEN, byte_of
from support.keys import prompt
from support.scripts import TESTS

from lightcache import Cache, Reservation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STAMP = 0xFF
STRIDE = 65536  # one byte of so many is stamped first, in less than a millisecond
DEADLINE = 120.0  # seconds, of every wait
WATCH = 0.2  # seconds after the last stamp
ROUNDS = 2  # each proves the quarantine again
ATTEMPTS = 10  # to see bytes change without it


@dataclass(frozen=True)
class Found:
    """What one killed client left."""

    in_flight: int
    """Pages that its last sweep had not reached when it was killed."""
    first_ms: float
    """From the kill to the first of its pages that was offered."""
    all_ms: float
    """To when all of them had been offered and stamped."""
    changed: int
    """Stamped bytes that somebody else wrote."""
    last_change_ms: float
    """From the kill to the last change seen; 0 without one."""


@pytest.fixture(autouse=True)
def gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with Cache.create(
        segment_name,
        pages=PAGES,
        page_bytes=PAGE_BYTES,
        fingerprint="quarantine",
        secret=SECRET,
        grow=False,
    ) as made:
        made.pool.prefault()
        yield made


@contextlib.contextmanager
def client(cache: Cache, order: str, kind: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of quarantine_side.py; it is gone afterwards."""
    program = TESTS / "gpu" / "quarantine_side.py"
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(program), cache.name, order, kind],
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE)
        assert process.stdout
        process.stdout.close()


def wait_for_line(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it says that all copies are queued."""
    assert process.stdout
    readable, _, _ = select.select([process.stdout], [], [], DEADLINE)
    said = os.read(process.stdout.fileno(), 100) if readable else b""
    assert said == b"queued\n", f"it said {said!r}, and: {log.read_text()[-3000:]}"


class Taker:
    """Takes pages as soon as they are offered, stamps them, and watches its stamps."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.array = cache.pool.array
        self.samples = self.array[:, ::STRIDE]
        self.keys = [prompt(name, PAGES) for name in range(3, 3 + TAKEN)]
        self.held: list[Reservation] = []
        self.pages: list[int] = []
        self.changed = 0
        self.first_offer = self.last_change = 0.0

    def take(self) -> None:
        """Whatever is offered now."""
        self.cache.reap()
        got = self.cache.reserve(self.keys[len(self.held)])
        new = got.pages.tolist()
        if new and not self.pages:
            self.first_offer = time.monotonic()
        for page in new:
            self.samples[page] = STAMP
        self.pages += new
        if new:
            self.held.append(got)
        else:
            got.release()

    def look(self) -> None:
        """Count the stamps that are not ours any more; they stay changed, so none is missed."""
        changed = int(np.count_nonzero(self.samples[self.pages] != STAMP))
        if changed != self.changed:
            self.changed, self.last_change = changed, time.monotonic()

    def whole(self) -> None:
        """Stamp every byte that still is ours, and see that it stays so."""
        for page in self.pages:
            self.array[page] = STAMP
        end = time.monotonic() + WATCH
        while time.monotonic() < end:
            self.look()
        for page in self.pages:
            self.changed += int(np.count_nonzero(self.array[page] != STAMP))

    def release(self) -> None:
        """Give all of it back."""
        for each in self.held:
            each.release()


def kill_and_take(cache: Cache, order: str, kind: str, log: Path) -> Found:
    """One client, killed in the middle of its copies."""
    mine = cache.reserve(prompt(2, PAGES - TAKEN))  # so that whatever is offered was the client's
    theirs = sorted(set(range(PAGES)) - set(mine.pages.tolist()))
    assert len(theirs) == TAKEN
    array = cache.pool.array
    array[:, ::4096] = 0  # maps every OS page here, so that stamping does not wait for that
    array[:, -1] = 0
    gc.disable()
    try:
        with client(cache, order, kind, log) as process:
            wait_for_line(process, log)
            taker = Taker(cache)
            in_flight = int(np.count_nonzero(array[theirs, -1] != byte_of(SWEEPS - 1)))
            killed = time.monotonic()
            process.kill()
            while len(taker.pages) < TAKEN:
                taker.take()
                late = time.monotonic() - killed
                assert late < DEADLINE, (
                    f"{late:.1f} s after the kill {len(taker.pages)} of {TAKEN} pages were "
                    f"offered; clients: {cache.clients()}"
                )
            offered = time.monotonic()
            while time.monotonic() < offered + WATCH:
                taker.look()
            if not taker.changed:
                taker.whole()
    finally:
        gc.enable()
    taker.release()
    mine.release()
    found = Found(
        in_flight,
        (taker.first_offer - killed) * 1e3,
        (offered - killed) * 1e3,
        taker.changed,
        (taker.last_change - killed) * 1e3 if taker.changed else 0.0,
    )
    print(f"{kind}, lock opened {order} the context: {found}")
    report = cache.check()
    assert report.clean, report.message
    assert report.pins == 0
    return found


def in_flight(cache: Cache, order: str, kind: str, tmp_path: Path) -> Found:
    """One that was killed while its copies went on: a slow test process is given more tries."""
    tried = []
    for attempt in range(ATTEMPTS):
        found = kill_and_take(cache, order, kind, tmp_path / f"{attempt}.log")
        if found.in_flight:
            return found
        tried.append(found)
    return pytest.fail(f"the copies were over each time before the kill came: {tried}")


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_page_that_is_offered_is_written_by_nobody_else(
    cache: Cache, order: str, tmp_path: Path
) -> None:
    for _ in range(ROUNDS):
        found = in_flight(cache, order, "device", tmp_path)
        assert found.changed == 0, found


def test_without_quarantine_bytes_change(cache: Cache, tmp_path: Path) -> None:
    """So the test above would have seen it."""
    seen: list[Any] = []
    for attempt in range(ATTEMPTS):
        order = ("after", "before")[attempt % 2]
        seen.append((order, in_flight(cache, order, "plain", tmp_path)))
        if seen[-1][1].changed:
            print(f"bytes changed in attempt {attempt + 1}")
            return
    pytest.fail(f"no byte changed in {ATTEMPTS} attempts: {seen}")
