"""Names of segments and of their objects.

The segment `llama` is the POSIX object `/lightcache.llama`. A dependent of it (a page pool) is a
separate object whose name has the segment's UUID: `/lightcache.llama~pool-<32 hex digits>`. A
segment's name has no tilde, so the two kinds of names cannot be confused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightcache.shm.errors import ConfigError

PREFIX = "/lightcache."
FOLDER = Path("/dev/shm")  # where Linux keeps POSIX shared memory
NAME_BYTES = 180  # the system allows 255; the rest is for the prefix and a dependent's suffix

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_DEPENDENT = re.compile(r"(?P<name>[^~]+)~(?P<what>[a-z0-9]+)-(?P<uuid>[0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True)
class Dependent:
    """An object that belongs to a segment: `object_name` begins with a slash."""

    object_name: str
    segment: str
    what: str
    uuid: str


def object_name(name: str) -> str:
    """The POSIX object of the segment `name`.

    Raises:
        ConfigError: longer than 180 bytes, or characters other than ASCII letters, digits, `._-`.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a segment's name is a str, found {type(name).__name__}")
    if len(name) > NAME_BYTES:
        raise ConfigError(
            f"the name {name[:40]!r}... has {len(name)} characters; at most {NAME_BYTES} fit"
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the name {name!r} is not allowed: expected an ASCII letter or digit, followed by "
            "letters, digits, '.', '_' or '-' (no slash)"
        )
    return PREFIX + name


def dependent_name(name: str, what: str, uuid: str) -> str:
    """The object `what` (lower case letters and digits) of the segment `name` with that UUID."""
    full = f"{object_name(name)}~{what}-{uuid}"
    if parse_dependent(full) is None or len(full) > 255:
        raise ConfigError(
            f"{full!r} cannot name a dependent object: `what` is a few lower case letters or "
            "digits, and the UUID has 32 hexadecimal digits"
        )
    return full


def counters_name(cache_name: str, uuid: str) -> str:
    """The segment of the counters of a cache's managers. A cache that was removed and created again
    has others."""
    return f"{cache_name}.counters-{uuid[:16]}"


def parse_dependent(full: str) -> Dependent | None:
    """The parts of a dependent's object name, or None if it is not one."""
    match = _DEPENDENT.fullmatch(full.removeprefix(PREFIX)) if full.startswith(PREFIX) else None
    if match is None:
        return None
    return Dependent(full, match["name"], match["what"], match["uuid"])


def _objects() -> list[str]:
    """Names of all objects with our prefix that exist at this moment."""
    start = PREFIX.removeprefix("/")
    try:
        return sorted(f"/{path.name}" for path in FOLDER.iterdir() if path.name.startswith(start))
    except FileNotFoundError:
        return []


def segment_names() -> list[str]:
    """Names of all existing segments, ready or not, of all users."""
    named = (full.removeprefix(PREFIX) for full in _objects())
    return [name for name in named if _NAME.fullmatch(name)]


def dependents(name: str | None = None, uuid: str | None = None) -> list[Dependent]:
    """All dependents, those of one segment name, or those of one segment with this UUID."""
    parsed = (parse_dependent(full) for full in _objects())
    return [
        dependent
        for dependent in parsed
        if dependent
        and (name is None or dependent.segment == name)
        and (uuid is None or dependent.uuid == uuid)
    ]
