"""A Mooncake cluster that stops, dies, and comes back, under a storage in it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.mooncake_server import Cluster
from support.refusals import refused
from support.servers import hold

from lightcache import Detached, StorageError
from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.remote.mooncake import backend
from lightcache.storage.testing.conformance import PAGE_BYTES, make_keys, pages_of

pytestmark = pytest.mark.servers

KEYS = make_keys(12, seed=6)
PAGES = list(pages_of(KEYS))
TIMEOUT = 60.0
SHORT = 0.2  # seconds: of calls that are to fail


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks a master that does not answer for a second at most, not for five."""
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1000")


@pytest.fixture
def storage(own_cluster: Cluster) -> Iterator[Any]:
    """In a cluster of its own, with pages."""
    with open_storage(own_cluster.url, spec=StorageSpec(PAGE_BYTES)) as made:
        assert made.write(KEYS, PAGES, timeout=TIMEOUT).prefix == 12
        yield made


def read(storage: Any, timeout: float = TIMEOUT) -> tuple[Any, Any]:
    into = np.full((12, PAGE_BYTES), 0xEE, np.uint8)
    return storage.read(KEYS, list(into), timeout=timeout), into


def settled(storage: Any) -> bool:
    """No call of the client is under way."""
    staging = storage._staging
    return len(staging._free) == staging.slots


def stop(process: Any) -> None:
    hold(process.pid)


def go_on(process: Any) -> None:
    process.send_signal(signal.SIGCONT)


def test_a_master_that_stops_answering(storage: Any, own_cluster: Cluster, wait_until: Any) -> None:
    stop(own_cluster.master)
    result, into = read(storage, SHORT)
    assert result.statuses == (ReadStatus.FAILED,) * 12
    assert result.reason.startswith("timed out")
    for call in (storage.contains, storage.delete):
        refused(StorageError, "timed out", call, KEYS, timeout=SHORT)
    refused(StorageError, "timed out", storage.clear, timeout=SHORT)
    wrote = storage.write(make_keys(12, seed=9), PAGES, timeout=SHORT)
    assert wrote.statuses == (WriteStatus.FAILED,) * 12
    assert storage.stats().timeouts == 5
    go_on(own_cluster.master)

    def answers() -> bool:
        try:
            return bool(storage.contains(KEYS, timeout=TIMEOUT) >= 0)
        except StorageError:
            return False

    wait_until(answers, "the master to answer again")
    wait_until(lambda: settled(storage), "the client to come back")
    assert (into == 0xEE).all()
    assert storage.write(KEYS, PAGES, timeout=TIMEOUT).prefix == 12
    assert read(storage)[0].prefix == 12


def test_bytes_that_come_late_do_not_reach_the_pages(
    storage: Any, own_cluster: Cluster, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[list[int]] = []
    arrived = threading.Event()
    real = storage._client.get

    def get(*given: Any) -> list[int]:
        arrived.set()
        came.append(real(*given))
        return came[-1]

    monkeypatch.setattr(storage._client, "get", get)
    lender = own_cluster.lenders[0]
    stop(lender)
    result, into = read(storage, 2.0)
    assert arrived.is_set()
    assert result.statuses == (ReadStatus.FAILED,) * 12
    into[:] = 0x11  # the pages are somebody else's now
    go_on(lender)
    wait_until(lambda: bool(came) and settled(storage), "the bytes to come")
    moved = [code for code in came[0] if code in (storage._staging.value_bytes, -707)]
    assert moved, came
    assert (into == 0x11).all()
    assert read(storage)[0].prefix == 12


def test_a_page_of_a_write_that_is_late_may_change(
    storage: Any, own_cluster: Cluster, wait_until: Any
) -> None:
    lender = own_cluster.lenders[0]
    stop(lender)
    others = make_keys(12, seed=9)
    pages = pages_of(others)
    wrote = storage.write(others, list(pages), timeout=0.5)
    assert wrote.statuses == (WriteStatus.FAILED,) * 12
    pages[:] = 0x11  # somebody else's now
    go_on(lender)
    wait_until(lambda: settled(storage), "the client to come back")
    into = np.zeros_like(pages)
    result = storage.read(others, list(into), timeout=TIMEOUT)
    for status, page, expected in zip(result.statuses, into, pages_of(others), strict=True):
        assert status in (ReadStatus.OK, ReadStatus.ABSENT)
        assert status is ReadStatus.ABSENT or (page == expected).all()


def test_a_master_that_dies_and_comes_back(
    storage: Any, own_cluster: Cluster, wait_until: Any
) -> None:
    own_cluster.master.kill()
    own_cluster.master.wait()
    result, _ = read(storage)
    assert result.statuses == (ReadStatus.FAILED,) * 12
    assert "master does not answer" in result.reason
    refused(StorageError, "master does not answer", storage.contains, KEYS, timeout=TIMEOUT)
    refused(StorageError, "master does not answer", storage.delete, KEYS, timeout=TIMEOUT)
    own_cluster.start_master()

    def stored_anew() -> bool:
        try:
            return bool(storage.write(KEYS, PAGES, timeout=TIMEOUT).prefix == 12)
        except StorageError:
            return False

    wait_until(stored_anew, "client and lender to find the new master")
    result, into = read(storage)
    assert result.prefix == 12
    assert (into == PAGES).all()


def test_a_lender_that_dies(storage: Any, own_cluster: Cluster, wait_until: Any) -> None:
    lender = own_cluster.lenders[0]
    lender.kill()
    lender.wait()
    result, _ = read(storage)
    assert set(result.statuses) <= {ReadStatus.FAILED, ReadStatus.ABSENT}
    own_cluster.lend()

    def noticed() -> bool:
        return bool(storage.contains(KEYS, timeout=TIMEOUT) == 0)

    wait_until(noticed, "the master to notice")
    assert read(storage)[0].statuses == (ReadStatus.ABSENT,) * 12
    wait_until(lambda: storage.write(KEYS, PAGES, timeout=TIMEOUT).prefix == 12, "the other lender")
    assert read(storage)[0].prefix == 12


def test_a_copy_in_memory_of_another_survives(own_cluster: Cluster, wait_until: Any) -> None:
    own_cluster.lend()
    with open_storage(f"{own_cluster.url}&replicas=2", spec=StorageSpec(PAGE_BYTES)) as storage:
        assert storage.write(KEYS, PAGES, timeout=TIMEOUT).prefix == 12
        own_cluster.lenders[0].kill()
        own_cluster.lenders[0].wait()

        def found() -> bool:
            result, into = read(storage)
            for status, page, expected in zip(result.statuses, into, PAGES, strict=True):
                assert status is not ReadStatus.OK or (page == expected).all()
            return bool(result.prefix == 12)

        wait_until(found, "the master to point at the other copies")


def test_other_threads_run_while_one_waits(
    own_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them lets the master answer: else the wait would end with its time."""
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "60000")
    begun, never = threading.Event(), threading.Event()

    def turn() -> None:
        assert begun.wait(TIMEOUT)
        for _ in range(100):
            never.wait(0.001)
        go_on(own_cluster.master)

    with open_storage(own_cluster.url, spec=StorageSpec(PAGE_BYTES)) as storage:
        assert storage.write(KEYS, PAGES, timeout=TIMEOUT).prefix == 12
        stop(own_cluster.master)
        other = threading.Thread(target=turn)
        other.start()
        begun.set()
        result, _ = read(storage)
        other.join(TIMEOUT)
        assert result.prefix == 12


def test_calls_end_before_those_of_the_client_do(
    own_cluster: Cluster, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "60000")
    ended: list[str] = []
    with open_storage(own_cluster.url, spec=StorageSpec(PAGE_BYTES)) as storage:
        client: Any = storage._client  # type: ignore[attr-defined]
        for name in ("exists", "remove"):
            real = getattr(client, name)
            monkeypatch.setattr(
                client,
                name,
                lambda names, real=real, name=name: (real(names), ended.append(name))[0],
            )
        stop(own_cluster.master)
        refused(StorageError, "timed out", storage.contains, KEYS, timeout=SHORT)
        refused(StorageError, "timed out", storage.delete, KEYS, timeout=SHORT)
        assert read(storage, SHORT)[0].statuses == (ReadStatus.FAILED,) * 12  # no thread is left
        assert not ended
        go_on(own_cluster.master)
        wait_until(lambda: len(ended) == 2, "the client to come back")
        assert read(storage)[0].statuses == (ReadStatus.ABSENT,) * 12


def test_close_while_a_call_hangs(
    storage: Any, own_cluster: Cluster, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(own_cluster.lenders[0])
    assert read(storage, 2.0)[0].reason.startswith("timed out")
    assert not settled(storage)
    monkeypatch.setattr(backend, "CLOSING", 0.01)
    refused(StorageError, "hangs; close it again", storage.close)
    go_on(own_cluster.lenders[0])
    wait_until(lambda: settled(storage), "the client to come back")
    monkeypatch.undo()
    storage.close()
    refused(Detached, "", storage.contains, KEYS, timeout=TIMEOUT)
