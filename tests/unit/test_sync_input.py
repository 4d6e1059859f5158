"""Waiting for no number of seconds is refused: a nan would be waited for without an end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.refusals import refused

from lightcache import ConfigError
from lightcache.shm import SharedLog, SharedRing

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("timeout", [math.nan, "1", True, 1j], ids=str)
def test_no_seconds(segment_name: str, timeout: Any) -> None:
    with SharedRing.create(segment_name, capacity=1, message_bytes=8) as ring:
        refused(ConfigError, "timeout: expected seconds, or None, found", ring.pop, timeout)
        ring.push(b"message")
        with pytest.raises(ConfigError, match="timeout: expected seconds, or None, found"):
            ring.push(b"another", timeout)
        assert ring.pop(math.inf) == b"message"
    with SharedLog.create(f"{segment_name}-log", capacity=2, message_bytes=8):
        with (
            SharedLog.attach(f"{segment_name}-log") as reader,
            pytest.raises(ConfigError, match="timeout: expected seconds, or None, found"),
        ):
            reader.read(timeout)
