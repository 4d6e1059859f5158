"""What stands behind each page on the disk, so that slots describe themselves.

A slot is the page, then a block with its footer. Both go to the disk in one write. If the machine
stops in the middle of it, the footer and the page may be of two writes; the checksum tells when the
page is read, and covers the key as well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

BLOCK = 4096
"""Unit of direct I/O: offsets, lengths and addresses are its multiples."""

_MAGIC = b"LCSLOT01"
_FIELDS = struct.Struct("<8s8sQQ16s16sQQQ")
_OWN = struct.Struct("<Q")
NO_PARENT = bytes(16)


@dataclass(frozen=True)
class Footer:
    """A slot's description of itself."""

    spec: bytes
    """8 bytes: `StorageSpec.name`. A page of another model or size is none of ours."""
    epoch: int
    """Of the folder: what was written in an earlier one was cleared."""
    slot: int
    key: bytes
    parent: bytes
    """The key of the page before, or NO_PARENT: for the order of eviction."""
    written: int
    """When, in ns: what was written last is evicted last, after a rebuild."""
    length: int
    checksum: int
    """Of key and page, see `lightcache.storage.arguments.checksum`."""

    def pack(self) -> bytes:
        """As it stands on the disk, BLOCK bytes."""
        fields = (_MAGIC, self.spec, self.epoch, self.slot, self.key, self.parent)
        head = _FIELDS.pack(*fields, self.written, self.length, self.checksum)
        return (head + _OWN.pack(xxhash.xxh3_64_intdigest(head))).ljust(BLOCK, b"\0")


def unpack(block: bytes | memoryview) -> Footer | None:
    """What a block says; None: it is no footer, or not a whole one."""
    head = bytes(block[: _FIELDS.size])
    own = bytes(block[_FIELDS.size : _FIELDS.size + _OWN.size])
    if len(own) < _OWN.size or head[: len(_MAGIC)] != _MAGIC:
        return None
    if _OWN.unpack(own)[0] != xxhash.xxh3_64_intdigest(head):
        return None
    _, spec, epoch, slot, key, parent, written, length, checksum = _FIELDS.unpack(head)
    return Footer(spec, epoch, slot, key, parent, written, length, checksum)


__all__ = ["BLOCK", "NO_PARENT", "Footer", "unpack"]
