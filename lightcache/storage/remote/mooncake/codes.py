"""What the client's numbers mean. Those of 0.3.13, of which only these come up here."""

from __future__ import annotations

SMALLER = -600  # the value is longer than the buffer
NO_ROOM = -200
NOT_READY = -703
ABSENT = -704
LEASE_OVER = -707
FAILED = -800
_GONE = (-710, -712)  # of a copy that the master knew of

_MEANINGS = {
    -1: "the client failed inside",
    -101: "nobody lends memory; start mooncake_client somewhere, or open with segment=",
    NO_ROOM: "no room; lend more memory (mooncake_client, or segment=)",
    SMALLER: "parameters that do not fit",
    NOT_READY: "it is being written",
    ABSENT: "not there",
    -706: "it is being read",
    LEASE_OVER: "the read took longer than the master's lease (default_kv_lease_ttl)",
    FAILED: "the process that holds it did not answer, or the way to it is closed",
    -900: "the master does not answer; see whether it runs",
    -901: "the master did not answer in time; see whether it is overloaded or stopped",
}


def absent(code: int) -> bool:
    """Whether it says that there is no such value (yet, or any more)."""
    return code in (ABSENT, NOT_READY, *_GONE)


def no_room(code: int) -> bool:
    """Whether it says that the cluster has no memory for a value."""
    return code in (NO_ROOM, -101)


def meaning(code: int) -> str:
    """For people."""
    return f"{_MEANINGS.get(code, 'see the error codes of Mooncake Store')} ({code})"


__all__ = ["ABSENT", "FAILED", "LEASE_OVER", "NOT_READY", "SMALLER", "absent", "meaning", "no_room"]
