"""Owners of objects, for messages and tables."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def user(uid: int) -> str:
    """A user as text: "1000 (alice)"; only the number if it has no name here."""
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except (KeyError, OverflowError):
        return str(uid)


def _group(gid: int) -> str:
    try:
        return f"{gid} ({grp.getgrgid(gid).gr_name})"
    except (KeyError, OverflowError):
        return str(gid)


def whose(path: str | os.PathLike[str]) -> str:
    """Owner, group and mode of a path, and this process's user: the facts missing from "Permission
    denied". If the path does not exist, or is not visible, uses the nearest folder above it that
    is."""
    place = Path(path)
    while True:
        try:
            status = os.stat(place, follow_symlinks=False)
            break
        except OSError:
            if place == place.parent:
                return f"this process runs as user {user(os.geteuid())}"
            place = place.parent
    what = "it" if place == Path(path) else str(place)
    return (
        f"{what} belongs to user {user(status.st_uid)} and group {_group(status.st_gid)}, mode "
        f"{stat.S_IMODE(status.st_mode):04o}, and this process runs as user {user(os.geteuid())}"
    )
