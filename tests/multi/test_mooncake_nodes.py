"""Processes in one Mooncake cluster: what one stores others find, and deaths of all kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi import pausing
from multi.mooncake_side import PAGE_BYTES, PROMPT, SPEC, prompt
from support.mooncake_server import Cluster
from support.servers import hold

from lightcache.storage import open_storage
from lightcache.storage.protocol import ReadStatus, WriteStatus
from lightcache.storage.testing.conformance import pages_of

pytestmark = [pytest.mark.crash, pytest.mark.servers]

TESTS = Path(__file__).parent.parent
TIMEOUT = 60.0


@contextmanager
def node(url: str, *arguments: object, impatient: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process of the cluster; killed in the end, if it lives.

    Args:
        impatient: its client gives a master up that does not answer within a second.
    """
    patience = {"MC_RPC_TIMEOUT_MS": "1000"} if impatient else {}
    child = subprocess.Popen(
        [sys.executable, str(TESTS / "multi" / "mooncake_side.py"), url, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS), **patience},
    )
    assert child.stdin
    assert child.stdout
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def lines(child: subprocess.Popen[str], most: int) -> list[str]:
    """So many of what it says."""
    assert child.stdout
    said = [child.stdout.readline().strip() for _ in range(most)]
    assert all(said), f"it ended by itself: {said}"
    return said


def opened(cluster: Cluster) -> Any:
    return open_storage(cluster.url, spec=SPEC)


def sound(storage: Any, seed: int, number: int) -> list[ReadStatus]:
    """Of one prompt: what is found is right."""
    keys = prompt(seed, number)
    into = np.zeros((PROMPT, PAGE_BYTES), np.uint8)
    found = storage.read(keys, list(into), timeout=TIMEOUT)
    for status, page, expected in zip(
        found.statuses, into, pages_of(keys, PAGE_BYTES), strict=True
    ):
        assert status in (ReadStatus.OK, ReadStatus.ABSENT), found.reason
        assert status is ReadStatus.ABSENT or (page == expected).all()
    return list(found.statuses)


def test_what_one_node_stores_others_find_when_it_has_left(own_cluster: Cluster) -> None:
    with node(own_cluster.url, 1, "leave", 2) as child:
        assert lines(child, 3) == [str(PROMPT), str(PROMPT), "closed"]
        assert child.wait(TIMEOUT) == 0
    with opened(own_cluster) as storage:
        for number in range(2):
            assert sound(storage, 1, number) == [ReadStatus.OK] * PROMPT


def test_memory_that_a_node_lends_goes_with_it(own_cluster: Cluster, wait_until: Any) -> None:
    [lender] = own_cluster.lenders
    lender.kill()
    lender.wait()
    with opened(own_cluster) as storage:
        refused = (WriteStatus.REFUSED,) * PROMPT
        pages = list(pages_of(prompt(1, 0), PAGE_BYTES))

        def gone() -> bool:
            return bool(storage.write(prompt(1, 0), pages, timeout=TIMEOUT).statuses == refused)

        wait_until(gone, "the master to notice that nobody lends")
        with node(f"{own_cluster.url}&segment=16MiB", 1, "wait", 1) as child:
            assert lines(child, 1) == [str(PROMPT)]
            assert sound(storage, 1, 0) == [ReadStatus.OK] * PROMPT
            child.stdin.close()  # type: ignore[union-attr]
            assert lines(child, 1) == ["closed"]
            assert child.wait(TIMEOUT) == 0
        assert sound(storage, 1, 0) == [ReadStatus.ABSENT] * PROMPT


@pytest.mark.parametrize("prompts", [1, 2, 5, 9])
def test_a_node_is_killed_while_it_writes(
    own_cluster: Cluster, prompts: int, wait_until: Any
) -> None:
    # No more than the lender has room for: it may write them all before it is killed.
    with node(own_cluster.url, 2, "wait", prompts + 3) as child:
        assert set(lines(child, prompts)) == {str(PROMPT)}
    with opened(own_cluster) as storage:
        for number in range(prompts):
            assert sound(storage, 2, number) == [ReadStatus.OK] * PROMPT
        last = prompts
        while ReadStatus.OK in sound(storage, 2, last):
            last += 1
        pages = list(pages_of(prompt(2, last), PAGE_BYTES))

        def stored() -> bool:
            return bool(storage.write(prompt(2, last), pages, timeout=TIMEOUT).prefix == PROMPT)

        wait_until(stored, "what the dead one had begun")
        assert sound(storage, 2, last) == [ReadStatus.OK] * PROMPT


def test_a_node_is_killed_with_a_page_half_written(own_cluster: Cluster, wait_until: Any) -> None:
    with opened(own_cluster) as storage:
        with node(own_cluster.url, 3, "middle") as child:
            assert lines(child, 1) == ["stopped"]
            assert sound(storage, 3, 0) == [ReadStatus.ABSENT] * PROMPT
        assert sound(storage, 3, 0) == [ReadStatus.ABSENT] * PROMPT
        pages = list(pages_of(prompt(3, 0), PAGE_BYTES))
        wait_until(
            lambda: storage.write(prompt(3, 0), pages, timeout=TIMEOUT).prefix == PROMPT,
            "what the dead one had begun",
        )
        assert sound(storage, 3, 0) == [ReadStatus.OK] * PROMPT


@pytest.mark.parametrize("which", ["master", "lender"])
def test_a_node_leaves_a_cluster_that_does_not_answer(own_cluster: Cluster, which: str) -> None:
    with node(own_cluster.url, 4, "wait", 1, impatient=True) as child:
        assert lines(child, 1) == [str(PROMPT)]
        stopped = own_cluster.master if which == "master" else own_cluster.lenders[0]
        hold(stopped.pid)
        child.stdin.close()  # type: ignore[union-attr]
        assert lines(child, 1) == ["closed"]
        assert child.wait(TIMEOUT) == 0
