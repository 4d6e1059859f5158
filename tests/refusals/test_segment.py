"""What a segment, its lock and what lies in one refuse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.refusals import Table, tried

from lightcache import (
    CacheCorrupted,
    ConfigError,
    Detached,
    InUse,
    LayoutMismatch,
    NoSpace,
    NotReady,
    PageIndex,
    PermissionDenied,
)
from lightcache.shm import RobustLock, Segment, layout, names
from lightcache.shm.layout import SegmentKind
from lightcache.shm.listing import read_segment

SHM = Path("/dev/shm")


def path_of(name: str) -> Path:
    return SHM / names.object_name(name).removeprefix("/")


def patch(name: str, field: str, value: int) -> None:
    """Overwrite a header field from outside."""
    described = getattr(layout.SegmentHeader, field)
    with path_of(name).open("r+b") as raw:
        raw.seek(described.offset)
        raw.write(value.to_bytes(described.size, "little"))


@pytest.fixture
def segment(segment_name: str) -> Iterator[Segment]:
    with Segment.create(segment_name, 1, config={"a": "x" * 20}, layout_facts="record=8") as made:
        yield made


@pytest.fixture
def closed(segment: Segment) -> Segment:
    other = Segment.attach(segment.name)
    for _ in range(2):
        other.close()
    assert other.closed
    assert not other.retired
    return other


@pytest.fixture
def left(segment_name: str) -> Iterator[str]:
    """The name of one in which nobody lives."""
    Segment.create(segment_name, 1 << 20, lifetime="persistent").close()
    yield segment_name
    path_of(segment_name).unlink(missing_ok=True)


def patched(*fields: tuple[str, int], **how: Any) -> Callable[[str], object]:
    """Attach to one with these words in its header."""

    def call(left: str) -> None:
        for field, value in fields:
            patch(left, field, value)
        Segment.attach(left, **how)

    return call


def with_number(number: str) -> Callable[[Segment], object]:
    def call(segment: Segment) -> None:
        text = f'{{"a":{number}}}'.encode().ljust(len(b'{"a":"xxxxxxxxxxxxxxxxxxxx"}'))
        with path_of(segment.name).open("r+b") as raw:
            raw.seek(layout.SegmentHeader.config.offset)
            raw.write(text)
        Segment.attach(segment.name)

    return call


def damaged_config(segment: Segment, **how: Any) -> None:
    patch(segment.name, "config_bytes", 3)
    Segment.attach(segment.name, **how)


def truncated(left: str) -> None:
    os.truncate(path_of(left), 100_000)
    Segment.attach(left)


def another_kind(segment: Segment, call: Callable[[str], object]) -> None:
    patch(segment.name, "kind", 99)
    call(segment.name)


def in_its_place(what: str) -> Iterator[Callable[..., None]]:
    """Every call that opens a segment, where something else stands under its name."""
    for call in OPENING:

        def refuse(segment_name: str, tmp_path: Path, call: Any = call) -> None:
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
                call(segment_name)
            finally:
                assert not (tmp_path / "target").exists()
                path.unlink()
                other.unlink(missing_ok=True)

        yield refuse


def too_large() -> int:
    stat = os.statvfs(SHM)
    return stat.f_blocks * stat.f_frsize + 1


OPENING: list[Callable[[Any], object]] = [
    Segment.attach,
    lambda name: Segment.attach(name, readonly=True),
    lambda name: Segment.open(name, 1, replace=True),
    lambda name: Segment.create(name, 1),
    Segment.unlink,
]
NO_NAMES = ("", "/", "a/b", "../x", ".hidden", "-x", "a b", "a~pool-1", "é", "a\0b", "n" * 181, 7)
WAYS = (Segment.create, Segment.open)
VERSION = rf"version {layout.ABI} were expected, found"

TABLE: Table = {
    ("gave a name with a slash", ConfigError): [
        *(
            ("name", lambda name=name, call=call: call(name))
            for name in (*NO_NAMES, None)
            for call in (*OPENING, read_segment)
        )
    ],
    ("created what exists", InUse): [
        ("it exists", lambda segment: Segment.create(segment.name, 1))
    ],
    ("attached to what does not exist", NotReady): [
        ("no such segment", lambda segment_name: Segment.attach(segment_name))
    ],
    ("attached to one of another version", LayoutMismatch): [
        (VERSION, patched(("magic", 0x1234))),
        ("layout of the structure", lambda left: Segment.attach(left, layout_facts="record=16")),
        ("bytes", lambda segment: Segment.attach(segment.name, payload_bytes=1 << 20)),
        ("layout of segments", patched(("layout_hash", 1))),
        (
            r"kind: expected PLAIN, found unknown \(99\)",
            lambda segment: another_kind(segment, lambda name: Segment.open(name, 1)),
        ),
    ],
    ("attached to one that is truncated", CacheCorrupted): [
        ("found 100000", truncated),
        (
            "JSON object",
            lambda segment: damaged_config(segment),
            lambda segment: damaged_config(segment, config={"a": 1}),
            *(with_number(number) for number in ("1e999", "-1e999", "NaN", "Infinity")),
        ),
    ],
    ("opened one of another user", PermissionDenied): [
        ("", *in_its_place("symlink"), *in_its_place("fifo")),
        ("", *in_its_place("hard link"), *in_its_place("mode")),
    ],
    ("took the `RobustLock`", PermissionDenied): [
        ("", lambda segment: RobustLock(segment).hold().__enter__())
    ],
    ("asked for more than /dev/shm", NoSpace): [
        *(
            (
                r"needs \d+ bytes, and \d+ bytes are",
                lambda segment_name, make=make: make(segment_name, too_large()),
            )
            for make in WAYS
        )
    ],
    ("used it after `close`", Detached): [
        *(
            ("close|mapped", call)
            for call in (
                lambda closed: closed.join(),
                lambda closed: closed.clients(),
                lambda closed: closed.header(),
                lambda closed: closed.stat(),
                lambda closed: closed.check_usable(),
                lambda closed: closed.view(0, 1),
                lambda closed: closed.busy().__enter__(),
                lambda closed: closed.address,
            )
        )
    ],
    ("", ConfigError): [
        *(
            ("payload_bytes", lambda segment_name, n=n, make=make: make(segment_name, n))
            for n in (0, -1, True, 1.5, "1", 1 << 46)
            for make in WAYS
        ),
        *(
            ("configuration", lambda segment_name, c=c: Segment.create(segment_name, 1, config=c))
            for c in ({"x": "y" * 2041}, {"x": object()}, {"x": float("nan")}, {"x": {1, 2}}, 7)
        ),
        ("lifetime", lambda segment_name: Segment.create(segment_name, 1, lifetime="for ever")),
        ("group", lambda segment_name: Segment.create(segment_name, 1, group="no such group")),
        *(
            ("view", lambda segment, at=at, n=n: segment.view(at, n))
            for at, n in ((-1, 1), (0, -1), (0, 1 << 40), (1 << 40, 1))
        ),
        ("99", lambda segment: another_kind(segment, Segment.attach)),
    ],
    ("", LayoutMismatch): [
        ("", lambda left: PageIndex.attach(left)),
        ("INDEX", lambda left: Segment.attach(left, kind=SegmentKind.INDEX)),
    ],
}
test_refused = tried(TABLE)
