"""Clients in another time namespace, where CLOCK_MONOTONIC and the starts of processes count from
another instant: they may read, and are told why they may not join."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from lightcache import PageIndex
from lightcache.shm import Segment

APART = ("unshare", "--time", "--monotonic", "100000", "--boottime", "100000", "--fork")

CHILD = """
import sys
import numpy as np
from lightcache import LightcacheError, PageIndex

keys = np.arange(12, dtype=np.uint64).reshape(6, 2)
with PageIndex.attach(sys.argv[1], readonly=True) as index:
    print(index.peek(keys))
try:
    with PageIndex.attach(sys.argv[1]) as index:
        print("joined")
except LightcacheError as error:
    print(type(error).__name__, error)
"""


def child(name: str, *before: str) -> list[str]:
    """What it prints."""
    done = subprocess.run(
        [*before, sys.executable, "-c", CHILD, name], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def unshared() -> None:
    """Skip where no time namespace can be made."""
    try:
        done = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode:
        pytest.skip(f"no time namespace can be made here: {done.stderr.strip()}")


def test_a_client_of_another_time_namespace_may_read_and_is_told_why_it_may_not_join(
    segment_name: str,
) -> None:
    unshared()
    with PageIndex.create(segment_name, pages=16) as index:
        with index.reserve(np.arange(12, dtype=np.uint64).reshape(6, 2)) as made:
            made.publish()
        read, joined = child(segment_name, *APART)
        assert read == "6"
        assert joined.startswith(f"ConfigError join {segment_name!r}: expected a process of the")
        assert f"time:[{index.segment.header().time_namespace}]" in joined
        assert "read-only" in joined
        assert [client.slot for client in index.clients()] == [1]
        assert child(segment_name) == ["6", "joined"]


def test_where_proc_says_nothing_of_time_a_client_may_join(segment_name: str) -> None:
    with Segment.create(segment_name, 4096) as segment:
        header = segment.header()
        assert header.time_namespace
        at = type(header).time_namespace.offset
        segment.view(0, segment.nbytes)[at : at + 8] = bytes(8)
        segment.join("unknown")
