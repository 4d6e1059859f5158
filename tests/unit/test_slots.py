"""Slots of clients: a process that finds none free waits for those of the dead, and is told whose
they are; so are operators."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.index_view import IndexView
from support.refusals import refused

from lightcache import InUse, PageIndex, page_index
from lightcache._core import reap_unjoined
from lightcache.shm import ofd
from lightcache.shm.layout import BYTE_MEND, SLOTS, ClientState
from lightcache.shm.objects import OpenObject

Run = Callable[..., Any]
TESTS = Path(__file__).parents[1]
FOR_GOOD = 1 << 62


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=16, role="engine") as made:
        yield made


@pytest.fixture
def quarantined(index: PageIndex) -> Any:
    """The record of a client that was killed while its device might write, as if it had lived in
    another PID namespace: its quarantine ends when the test says so."""
    child = subprocess.Popen(
        [sys.executable, "-m", "support.doomed_clients", index.name, "device"],
        stdout=subprocess.PIPE,
        cwd=TESTS,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"holding\n"
        [slot] = [client.slot for client in index.clients() if client.role == "doomed"]
        child.kill()
    record = IndexView(index).client(slot)
    record.pidns += 1
    assert index.reap() == 1
    assert record.state == ClientState.QUARANTINE
    record.quarantine_until_ns = FOR_GOOD
    return record


@pytest.fixture
def crowd(index: PageIndex) -> Iterator[Callable[[], list[PageIndex]]]:
    """Clients that take all slots that are free."""
    others: list[PageIndex] = []

    def fill() -> list[PageIndex]:
        while len(index.clients()) < SLOTS - 1:
            others.append(PageIndex.attach(index.name, role="other"))
        return others

    yield fill
    for other in others:
        other.close()


def test_it_waits_for_the_end_of_a_quarantine(
    index: PageIndex, quarantined: Any, crowd: Callable[[], Any]
) -> None:
    crowd()
    message = (
        r"more clients than slots: 62 living, 1 in quarantine, 0 of 63 slots free \(slot 2: "
        r"doomed, pid \d+, in quarantine \(until its process has ended, or for .* s more .*; "
        r"slot 1: engine, pid \d+, living, attached .* ago; .*and 55 more\); try again when"
    )
    refused(InUse, message, PageIndex.attach, index.name, timeout=0)
    quarantined.quarantine_until_ns = time.monotonic_ns() + 20_000_000
    with PageIndex.attach(index.name) as late:
        assert late.client_id.slot == 2
        crowd()
        refused(InUse, "63 living, 0 of 63.*close one", PageIndex.attach, index.name, timeout=None)


def test_it_waits_while_another_frees_a_slot(
    index: PageIndex, crowd: Callable[[], list[PageIndex]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients look alive then: the one that frees acts as the dead client."""
    others, looked, joined = crowd(), threading.Event(), []

    def reap(*arguments: Any) -> None:
        reap_unjoined(*arguments)
        looked.set()

    def join() -> None:
        with PageIndex.attach(index.name) as late:
            joined.append(late.client_id.slot)

    monkeypatch.setattr(page_index, "reap_unjoined", reap)
    held = OpenObject.open(index.name, writable=True)
    assert held is not None
    with contextlib.closing(held), ofd.locked(held.fd, BYTE_MEND + 5):
        thread = threading.Thread(target=join)
        thread.start()
        assert looked.wait(60)
        slot = others[8].client_id.slot
        others[8].close()
        thread.join(60)
    assert joined == [slot]


def test_operators_see_it(
    run: Run, index: PageIndex, quarantined: Any, crowd: Callable[[], Any]
) -> None:
    name = index.name
    [entry] = [one for one in json.loads(run("ls", "--json").stdout) if one["name"] == name]
    counts = [entry[item] for item in ("clients", "dead_clients", "quarantined_clients", "slots")]
    assert counts == [1, 1, 1, 63]
    assert "1 + 1 in quarantine of 63" in run("ls").stdout
    assert "clients: 1 living, 1 in quarantine, 61 of 63 slots free" in run("check", name).stdout
    checked = json.loads(run("check", name, "--json").stdout)
    assert checked["slots"] == "1 living, 1 in quarantine, 61 of 63 slots free"
    shown = run("dump", name).stdout
    assert "1 living, 0 dead, 1 in quarantine, 61 slots free" in shown
    assert "in quarantine, as its device may still copy" in shown
    found = json.loads(run("dump", name, "--json").stdout)
    assert [client["quarantine_s"] is None for client in found["clients"]] == [True, False]
    quarantined.quarantine_until_ns = 1
    assert "quarantine (over: the next" in " ".join(run("dump", name).stdout.split())
    quarantined.quarantine_until_ns = FOR_GOOD
    crowd()
    [note, _] = json.loads(run("dump", name, "--json").stdout)["hints"]
    assert "no slot is free: 62 living, 1 in quarantine" in note
    quarantined.quarantine_until_ns = 1
    index.reap()
    crowd()
    [stop] = json.loads(run("dump", name, "--json").stdout)["not_working"]
    assert "no slot is free: 63 living, 0 of 63 slots free; end a client" in stop
