"""Attaching for a moment, to do something and leave things as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightcache.shm import SegmentInfo, layout, ofd
from lightcache.shm.objects import OpenObject
from lightcache.tools.image import require, unknown

group_option_help = "The segment's group, when somebody else of that group owns it."


@contextlib.contextmanager
def guest(name: str) -> Iterator[SegmentInfo]:
    """Keep a segment in being while a tool attaches to it and leaves.

    The last client to leave takes a cache of lifetime "attached" with it. That must not be a tool
    that came to a cache whose clients were all killed: the next `open` would go on warm. So the
    tool also lives in it as a reader does, and that life ends like a killed process's, unnoticed.

    Raises:
        NotReady: there is none of that name.
    """
    info = require(name)
    opened = OpenObject.open(name, writable=False)
    if opened is None:
        raise unknown(name)
    with contextlib.closing(opened):
        ofd.try_lock(opened.fd, layout.BYTE_READERS, exclusive=False)
        yield info
