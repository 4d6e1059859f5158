"""How a process of a demo begins and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from lightcache.errors import LightcacheError
from lightcache.tools.demo.messages import Failed, Mailbox
from lightcache.tools.demo.settings import Settings

_LOOK = 0.5  # seconds between looks at the parent


class Leave(Exception):
    """Nobody looks after this run any more."""


def orphaned(settings: Settings) -> bool:
    """Whether the process that looks after the run is gone."""
    return os.getppid() != settings.parent


def receive(mail: Mailbox, settings: Settings) -> Any:
    """The next message. Blocks.

    Raises:
        Leave: nobody looks after this run any more.
    """
    while True:
        message = mail.receive(_LOOK)
        if orphaned(settings):
            raise Leave
        if message is not None:
            return message


def run(role: str, body: Callable[[Settings, list[int]], None]) -> None:
    """The whole of a process: settings and numbers are its arguments. What stops it is reported."""
    # The report sends SIGTERM to end it: as an exception, so that it gives back what it holds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    settings = Settings.from_json(sys.argv[1])
    try:
        body(settings, [int(each) for each in sys.argv[2:]])
    except Leave:
        return
    except (LightcacheError, OSError, MemoryError, ImportError, RuntimeError) as error:
        kind = "" if isinstance(error, LightcacheError) else f"{type(error).__name__}: "
        reason = kind + " ".join(str(error).split())
        with contextlib.suppress(LightcacheError), Mailbox(settings.report_ring) as report:
            report.send(Failed(role, reason), timeout=1.0)
        sys.exit(1)
