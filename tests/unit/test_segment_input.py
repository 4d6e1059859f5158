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
    NoSpace,
    NotReady,
    PermissionDenied,
)
from lightcache.shm import Segment, layout, names, read_segment

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


@pytest.mark.parametrize(
    "name",
    ["", "/", "a/b", "../x", ".hidden", "-x", "a b", "a~pool-1", "é", "a\0b", "n" * 181, 7, None],
)
def test_names_that_are_not_allowed(name: Any) -> None:
    for call in (
        lambda: Segment.create(name, 1),
        lambda: Segment.open(name, 1),
        lambda: Segment.attach(name),
        lambda: Segment.unlink(name),
        lambda: read_segment(name),
    ):
        refused(ConfigError, "name", call)


def test_the_longest_name(segment_name: str) -> None:
    longest = segment_name.ljust(names.NAME_BYTES, "x")
    with Segment.create(longest, 1) as made:
        assert len(made.dependent_name("pool")) <= 255
    refused(ConfigError, "dependent", names.dependent_name, "x", "no slash/", "0" * 32)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "1", 1 << 46])
def test_sizes_that_are_not_allowed(segment_name: str, size: Any) -> None:
    for make in (Segment.create, Segment.open):
        refused(ConfigError, "payload_bytes", make, segment_name, size)
    assert not path_of(segment_name).exists()


def test_sizes_beyond_what_is_there(segment_name: str) -> None:
    stat = os.statvfs(SHM)
    for make in (Segment.create, Segment.open):
        with pytest.raises(NoSpace, match=r"needs \d+ bytes, and \d+ bytes are"):
            make(segment_name, stat.f_blocks * stat.f_frsize + 1)
        assert not path_of(segment_name).exists()


@pytest.mark.parametrize(
    "config", [{"x": "y" * 2041}, {"x": object()}, {"x": float("nan")}, {"x": {1, 2}}, 7]
)
def test_configurations_that_do_not_fit(segment_name: str, config: Any) -> None:
    refused(ConfigError, "configuration", Segment.create, segment_name, 1, config=config)


def test_the_longest_configuration(segment_name: str) -> None:
    with Segment.create(segment_name, 1, config={"x": "y" * 2040}) as made:
        assert Segment.attach(segment_name).config == made.config


def test_other_arguments(segment_name: str) -> None:
    refused(ConfigError, "lifetime", Segment.create, segment_name, 1, lifetime="for ever")
    refused(ConfigError, "group", Segment.create, segment_name, 1, group="no such group")


# ---------------------------------------------------------------- what stands under the name


def test_nothing_there(segment_name: str) -> None:
    refused(NotReady, "no such segment", Segment.attach, segment_name)


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


def test_another_layout(segment_name: str) -> None:
    with Segment.create(segment_name, 1, layout_facts="record=8"):
        with pytest.raises(LayoutMismatch, match="layout of the structure"):
            Segment.attach(segment_name, layout_facts="record=16")
        refused(LayoutMismatch, "bytes", Segment.attach, segment_name, payload_bytes=1 << 20)
        Segment.attach(segment_name, layout_facts="record=8").close()
        patch(segment_name, "layout_hash", 1)
        refused(LayoutMismatch, "layout of segments", Segment.attach, segment_name)


def test_another_kind(segment_name: str) -> None:
    with Segment.create(segment_name, 1):
        patch(segment_name, "kind", 99)
        with pytest.raises(LayoutMismatch, match=r"kind: expected PLAIN, found unknown \(99\)"):
            Segment.open(segment_name, 1)
        refused(ConfigError, "99", Segment.attach, segment_name)


def test_damaged_configuration(segment_name: str) -> None:
    with Segment.create(segment_name, 1, config={"a": 1}):
        patch(segment_name, "config_bytes", 3)
        for attach in (
            lambda: Segment.attach(segment_name, config={"a": 1}),
            lambda: Segment.attach(segment_name),
        ):
            refused(CacheCorrupted, "JSON object", attach)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_configuration_with_a_number_that_json_cannot_hold(
    segment_name: str, number: str
) -> None:
    with Segment.create(segment_name, 1, config={"a": "x" * 20}):
        text = f'{{"a":{number}}}'.encode().ljust(len(b'{"a":"xxxxxxxxxxxxxxxxxxxx"}'))
        with path_of(segment_name).open("r+b") as raw:
            raw.seek(layout.SegmentHeader.config.offset)
            raw.write(text)
        refused(CacheCorrupted, "JSON object", Segment.attach, segment_name)


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


@pytest.mark.parametrize("what", ["symlink", "fifo", "hard link", "mode"])
def test_something_else_in_its_place(segment_name: str, what: str, tmp_path: Path) -> None:
    path = path_of(segment_name)
    other = path.with_name(path.name + "-other")
    if what == "symlink":
        path.symlink_to(tmp_path / "target")
    elif what == "fifo":
        os.mkfifo(path, 0o600)
    else:
        Segment.create(segment_name, 1, lifetime="persistent").close()
        os.chmod(path, 0o606) if what == "mode" else os.link(path, other)
    try:
        for call in (
            lambda: Segment.attach(segment_name),
            lambda: Segment.attach(segment_name, readonly=True),
            lambda: Segment.open(segment_name, 1, replace=True),
            lambda: Segment.create(segment_name, 1),
            lambda: Segment.unlink(segment_name),
        ):
            refused(PermissionDenied, "", call)
        assert not (tmp_path / "target").exists()
    finally:
        path.unlink()
        other.unlink(missing_ok=True)


@needs_root
def test_of_another_user(segment_name: str, script: Script) -> None:
    with Segment.create(segment_name, 1):
        script(
            "import os, sys\n"
            "from lightcache.errors import PermissionDenied\n"
            "from lightcache.shm import Segment, read_segment, sweep\n"
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
