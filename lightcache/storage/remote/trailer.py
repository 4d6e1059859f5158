"""What stands beside a page in a store that is not ours: enough to see that it is the page."""

from __future__ import annotations

import struct

from lightcache.storage.arguments import checksum
from lightcache.storage.protocol import ReadStatus

MAGIC = b"lcp1"
_TRAILER = struct.Struct("<4sIQQ")  # magic, zero, bytes of the page, xxh3-64 of key and page
BYTES = _TRAILER.size


def make(key: bytes, page: memoryview | bytes) -> bytes:
    """The trailer of a page, 24 bytes."""
    return _TRAILER.pack(MAGIC, 0, len(page), checksum(key, page))


def judge(key: bytes, page: memoryview | bytes, trailer: bytes) -> tuple[ReadStatus, str]:
    """Whether a page that was fetched is the one of this key: OK or CORRUPT, and why."""
    what = f"corrupt: page {key.hex()}"
    if len(trailer) != BYTES:
        return ReadStatus.CORRUPT, f"{what} has a trailer of {len(trailer)} bytes, not {BYTES}"
    magic, zero, length, expected = _TRAILER.unpack(trailer)
    if magic != MAGIC or zero:
        return ReadStatus.CORRUPT, f"{what} was stored by something else: {trailer[:8]!r}"
    if length != len(page):
        return ReadStatus.CORRUPT, f"{what} was stored with {length} bytes"
    if checksum(key, page) != expected:
        return ReadStatus.CORRUPT, f"{what} has another checksum than was stored with it"
    return ReadStatus.OK, ""


__all__ = ["BYTES", "MAGIC", "judge", "make"]
