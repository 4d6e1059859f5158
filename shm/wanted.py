"""The caller's expectations of a segment, and their comparison with an existing one."""

from __future__ import annotations

import ctypes
import grp
import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightcache.shm import _native, layout, names
from lightcache.shm.errors import CacheCorrupted, ConfigError, LayoutMismatch
from lightcache.shm.layout import Lifetime, SegmentHeader, SegmentKind

MOST_BYTES = 1 << 45  # below the bytes that are locked
FAMILY_ITEM = "family"
"""Item of a configuration: segments with the same value give way to each other; see `sweep`. Every
release has it under this name."""
BYTES = "bytes"
"""Stands for the size of a segment among the items of `named`."""
_PAGE = 4096
_MOST_IDLE = 1 << 32


@dataclass(frozen=True)
class AllBut:
    """As `named`: every item but these."""

    items: frozenset[str]

    def __contains__(self, item: object) -> bool:
        return item not in self.items


@dataclass(frozen=True)
class SegmentSpec:
    """Arguments of create, attach and open, checked. None: any value is accepted."""

    name: str
    kind: SegmentKind | None
    base_hash: int  # of the layout that every segment has
    facts_hash: int | None  # of what the structure inside adds
    group: int | None
    payload_bytes: int | None = None
    config: str | None = None
    lifetime: Lifetime | None = None
    idle_ns: int = 0
    named: Container[str] | None = None  # what is compared of configuration and size; None: all

    def names(self, item: str) -> bool:
        """Whether an item of the configuration, or `BYTES`, is compared."""
        return self.named is None or item in self.named

    @property
    def total_bytes(self) -> int:
        """Size of the object, in whole pages."""
        payload = self.payload_bytes or 0
        return (layout.PAYLOAD_OFFSET + payload + _PAGE - 1) // _PAGE * _PAGE

    @property
    def layout_hash(self) -> int:
        """As in the header: the common layout in the upper half, the structure's in the lower."""
        return self.base_hash << 32 | (self.facts_hash or 0)


def want(
    name: str,
    *,
    kind: SegmentKind | None,
    payload_bytes: int | None,
    config: Mapping[str, Any] | None,
    layout_facts: str | None,
    lifetime: str | None,
    group: str | int | None,
    idle_limit: float | None = None,
    named: Container[str] | None = None,
) -> SegmentSpec:
    """Check the arguments that create, attach and open share.

    Raises:
        ConfigError: an argument is invalid; the message says which and why.
    """
    names.object_name(name)
    size: object = payload_bytes
    if size is not None and not (type(size) is int and 0 < size <= MOST_BYTES):
        raise ConfigError(f"payload_bytes is an int from 1 to {MOST_BYTES}, found {size!r}")
    return SegmentSpec(
        name=name,
        kind=None if kind is None else SegmentKind(kind),
        base_hash=_hash(_native.quick().lcs_layout()),
        facts_hash=None if layout_facts is None else _hash(layout_facts.encode()),
        group=_group_id(group),
        payload_bytes=payload_bytes,
        config=None if config is None else _config_text(config),
        lifetime=None if lifetime is None else _lifetime(lifetime),
        idle_ns=0 if idle_limit is None else _idle_ns(idle_limit, lifetime),
        named=named,
    )


def layout_hash(layout_facts: str) -> int:
    """The layout hash of a segment whose structure has these facts."""
    return _hash(_native.quick().lcs_layout()) << 32 | _hash(layout_facts.encode())


def _hash(facts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(facts, digest_size=4).digest(), "little")


def _config_text(config: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(
            dict(config), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the configuration must be a mapping that JSON can hold, without NaN: {error}"
        ) from error
    if len(text.encode()) > layout.CONFIG_BYTES:
        raise ConfigError(
            f"the configuration takes {len(text.encode())} bytes as JSON; the header holds "
            f"{layout.CONFIG_BYTES}: leave large items out and give their digest"
        )
    return text


def _group_id(group: str | int | None) -> int | None:
    if group is None or (isinstance(group, int) and not isinstance(group, bool) and group >= 0):
        return group
    try:
        return grp.getgrnam(str(group)).gr_gid
    except KeyError:
        raise ConfigError(
            f"the group {group!r} does not exist here; give a name from /etc/group or a number"
        ) from None


def _lifetime(lifetime: str) -> Lifetime:
    try:
        return Lifetime[lifetime.upper()]
    except (KeyError, AttributeError):
        raise ConfigError(f'lifetime is "attached" or "persistent", found {lifetime!r}') from None


def _idle_ns(limit: object, lifetime: str | None) -> int:
    if (
        not isinstance(limit, (int, float))
        or isinstance(limit, bool)
        or not 0 < limit <= _MOST_IDLE
    ):
        raise ConfigError(
            f"idle_limit: expected seconds, more than 0 and at most {_MOST_IDLE}, found {limit!r}; "
            "None: it is never removed for room"
        )
    if lifetime is not None and _lifetime(lifetime) is Lifetime.ATTACHED:
        raise ConfigError(
            'idle_limit: expected lifetime="persistent", found "attached", with which it goes when '
            "its last client leaves; leave one of them out"
        )
    return math.ceil(limit * 1e9)


def fill_header(address: int, wanted: SegmentSpec) -> None:
    """Write the header of a new segment, except `ready`. The magic comes last, so a dead creator's
    leftover has either no header or a complete one."""
    header = SegmentHeader.from_address(address)
    config = (wanted.config or "{}").encode()
    header.abi = layout.ABI
    header.kind = wanted.kind or SegmentKind.PLAIN
    header.layout_hash = wanted.layout_hash
    header.bytes = wanted.total_bytes
    ctypes.memmove(ctypes.addressof(header) + SegmentHeader.uuid.offset, uuid.uuid4().bytes, 16)
    header.created_ns = time.time_ns()
    header.creator_pid = os.getpid()
    # A new segment with an idle limit but no lifetime is persistent.
    default = Lifetime.PERSISTENT if wanted.idle_ns else Lifetime.ATTACHED
    header.lifetime = default if wanted.lifetime is None else wanted.lifetime
    header.idle_ns = wanted.idle_ns
    header.used_ns = header.created_ns
    header.boot_id = _boot_id()
    header.time_namespace = _native.quick().lcs_time_namespace()
    header.config_bytes = len(config)
    ctypes.memmove(ctypes.addressof(header) + SegmentHeader.config.offset, config, len(config))
    header.magic = layout.MAGIC


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:39]
    except OSError:
        return b""


def _finite(text: str) -> float:
    """A number of the configuration. Raises for values that `_config_text` refuses to write."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number that JSON can hold")
    return number


def family_of(header: SegmentHeader) -> str | None:
    """The family of a segment of any release; None: it has none.

    Raises:
        CacheCorrupted: its configuration is not readable.
    """
    family = config_of(header).get(FAMILY_ITEM) if header.magic == layout.MAGIC else None
    return family if isinstance(family, str) else None


def config_of(header: SegmentHeader) -> dict[str, Any]:
    """The configuration in a header.

    Raises:
        CacheCorrupted: it is not a JSON object.
    """
    start = SegmentHeader.config.offset
    raw = bytes(header)[start : start + min(header.config_bytes, layout.CONFIG_BYTES)]
    try:
        parsed = json.loads(raw, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise CacheCorrupted(
            "the configuration in the segment's header was expected to be a JSON object, found "
            f"{raw[:40]!r}; replace the segment"
        )
    return parsed


def verify_header(header: SegmentHeader, size: int, wanted: SegmentSpec) -> None:
    """Compare a ready segment with the specification.

    Raises:
        LayoutMismatch: names every item that differs.
        CacheCorrupted: the object was truncated or its configuration is not readable.
    """
    remedy = (
        "use what it was created with or another name, or start over: `lightcache rm "
        f"{wanted.name}`, or open with replace=True"
    )
    if header.is_foreign:
        raise LayoutMismatch(
            f"the segment {wanted.name!r}: magic {layout.MAGIC:#x} and version {layout.ABI} were "
            f"expected, found {header.magic:#x} and {header.abi}; another release made it: {remedy}"
        )
    if header.bytes != size or size < layout.PAYLOAD_OFFSET:
        raise CacheCorrupted(
            f"the segment {wanted.name!r}: {max(header.bytes, layout.PAYLOAD_OFFSET)} bytes were "
            f"expected, found {size}; it was truncated or extended: replace or unlink it"
        )
    differences = [
        f"{item}: expected {expected}, found {found}"
        for item, expected, found in _items(header, wanted)
        if expected != found
    ]
    if differences:
        raise LayoutMismatch(f"the segment {wanted.name!r}: {'; '.join(differences)}; {remedy}")


def _items(header: SegmentHeader, wanted: SegmentSpec) -> list[tuple[str, object, object]]:
    items: list[tuple[str, object, object]] = []
    if wanted.kind is not None:
        items.append(("kind", wanted.kind.name, _name(SegmentKind, header.kind)))
    base, facts = header.layout_hash >> 32, header.layout_hash & 0xFFFFFFFF
    items.append(("layout of segments", f"{wanted.base_hash:08x}", f"{base:08x}"))
    if wanted.facts_hash is not None:
        items.append(("layout of the structure", f"{wanted.facts_hash:08x}", f"{facts:08x}"))
    if wanted.payload_bytes is not None and wanted.names(BYTES):
        items.append(("bytes", wanted.total_bytes, header.bytes))
    if wanted.lifetime is not None:
        items.append(("lifetime", wanted.lifetime.name, _name(Lifetime, header.lifetime)))
    if wanted.config is not None:
        expected_config, found_config = json.loads(wanted.config), config_of(header)
        for key in sorted(expected_config.keys() | found_config.keys()):
            absent = "nothing"
            shown = (_shown(expected_config, key, absent), _shown(found_config, key, absent))
            if wanted.names(key):
                items.append((key, *shown))
    return items


def _shown(config: dict[str, Any], key: str, absent: str) -> str:
    return json.dumps(config[key], ensure_ascii=False) if key in config else absent


def _name(enum: type[SegmentKind] | type[Lifetime], value: int) -> str:
    try:
        return enum(value).name
    except ValueError:
        return f"unknown ({value})"
