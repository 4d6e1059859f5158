"""One line of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Level(str, Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """Something looked at. A finding that is not ok has a remedy."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Level.OK, found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """It works, less well than it could."""
    return Finding(name, Level.WARNING, found, remedy)


def error(name: str, found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(name, Level.ERROR, found, remedy)


def text(path: str | Path) -> str:
    """What a file of /proc or /sys says, stripped; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
