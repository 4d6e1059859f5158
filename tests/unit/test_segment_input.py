"""Bad input to a segment: each has its typed error, and nothing is lost or left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    LayoutMismatch,
    NotReady,
    PermissionDenied,
)
from lightcache.shm import Segment, layout, names
from lightcache.shm.listing import read_segment

SHM = Path("/dev/shm")
NOBODY = 65534
Script = Callable[..., Any]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")


def path_of(name: str) -> Path:
    return SHM / names.object_name(name).removeprefix("/")


def patch(name: str, field: str, value: int) -> None:
    """Overwrite a header field from outside."""
    described = getattr(layout.SegmentHeader, field)
    with path_of(name).open("r+b") as raw:
        raw.seek(described.offset)
        raw.write(value.to_bytes(described.size, "little"))


# ---------------------------------------------------------------- arguments


def test_the_longest_name(segment_name: str) -> None:
    longest = segment_name.ljust(names.NAME_BYTES, "x")
    with Segment.create(longest, 1) as made:
        assert len(made.dependent_name("pool")) <= 255
    refused(ConfigError, "dependent", names.dependent_name, "x", "no slash/", "0" * 32)


def test_the_longest_configuration(segment_name: str) -> None:
    with Segment.create(segment_name, 1, config={"x": "y" * 2040}) as made:
        assert Segment.attach(segment_name).config == made.config


# ---------------------------------------------------------------- what stands under the name


@pytest.mark.parametrize("ready", [0, 1])
@pytest.mark.parametrize(("field", "value"), [("magic", 0x1234), ("abi", layout.ABI + 1)])
def test_another_version(segment_name: str, field: str, value: int, ready: int) -> None:
    Segment.create(segment_name, 1, lifetime="persistent").close()
    patch(segment_name, field, value)
    patch(segment_name, "ready", ready)
    with pytest.raises(LayoutMismatch, match=rf"version {layout.ABI} were expected, found"):
        Segment.attach(segment_name)
    refused(LayoutMismatch, "", Segment.open, segment_name, 1)
    info = read_segment(segment_name)
    assert info is not None
    assert "another release" in str(info.problem)
    Segment.open(segment_name, 1, replace=True).close()


def test_truncated(segment_name: str) -> None:
    Segment.create(segment_name, 1 << 20, lifetime="persistent").close()
    os.truncate(path_of(segment_name), 100_000)
    refused(CacheCorrupted, "found 100000", Segment.attach, segment_name)
    refused(CacheCorrupted, "", Segment.open, segment_name, 1 << 20, lifetime="persistent")
    info = read_segment(segment_name)
    assert info is not None
    assert "truncated" in str(info.problem)
    os.truncate(path_of(segment_name), 8192)  # shorter than the tables, and saying so itself
    patch(segment_name, "bytes", 8192)
    refused(CacheCorrupted, "found 8192", Segment.attach, segment_name)
    os.truncate(path_of(segment_name), 100)  # not even a header: as a dead creator's leftover
    refused(NotReady, "died", Segment.attach, segment_name, timeout=0)
    Segment.open(segment_name, 1).close()


@needs_root
def test_of_another_user(segment_name: str, script: Script) -> None:
    with Segment.create(segment_name, 1):
        script(
            "import os, sys\n"
            "from lightcache.errors import PermissionDenied\n"
            "from lightcache.shm import Segment, sweep\n"
            "from lightcache.shm.listing import read_segment\n"
            "Segment.create(sys.argv[1] + '-x', 1).close()\n"  # load all that root may read
            f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            "for call in (Segment.attach, Segment.unlink, lambda n: Segment.open(n, 1),\n"
            "             lambda n: Segment.create(n, 1)):\n"
            "    try: call(sys.argv[1])\n"
            "    except PermissionDenied: continue\n"
            "    sys.exit(3)\n"
            "assert 'belongs to user 0 (root)' in read_segment(sys.argv[1]).problem\n"
            "assert sweep(prefix=sys.argv[1]) == []\n",
            segment_name,
        )
        os.chown(path_of(segment_name), NOBODY, NOBODY)
        refused(PermissionDenied, f"found user {NOBODY}", Segment.attach, segment_name)
        os.chown(path_of(segment_name), 0, 0)


@needs_root
def test_of_a_group(segment_name: str, script: Script) -> None:
    with Segment.create(segment_name, 1, group=NOBODY) as made:
        assert path_of(segment_name).stat().st_gid == NOBODY
        script(
            "import os, sys\n"
            "from lightcache.errors import PermissionDenied\n"
            "from lightcache.shm import Segment\n"
            "Segment.create(sys.argv[1] + '-x', 1).close()\n"
            f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            "try: Segment.attach(sys.argv[1])\n"
            "except PermissionDenied as error: assert 'group' in str(error)\n"
            "else: sys.exit(3)\n"
            f"s = Segment.attach(sys.argv[1], group={NOBODY})\n"
            "s.join('member'); s.view(s.payload_offset, 1)[0] = 9; s.close()\n"
            "try: Segment.create(sys.argv[1] + '-y', 1, group=0)\n"
            "except PermissionDenied as error: assert 'is in' in str(error)\n"
            "else: sys.exit(4)\n",
            segment_name,
        )
        assert made.view(made.payload_offset, 1)[0] == 9
