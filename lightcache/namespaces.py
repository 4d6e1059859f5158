"""Namespaces: a weights version and a tenant, in every key; each can be forgotten whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from lightcache.errors import ConfigError

NAME_BYTES = 47
NO_CHANGE = 0xFFFFFFFF


@dataclass(frozen=True)
class Namespace:
    """A handle. After `clear` of it nothing is found or accepted under it any more; open the next
    weights version, or the same again, which then starts empty."""

    weights: str
    tenant: str
    ref: int
    """Entry (low byte) and epoch: tells a cleared one from its successor."""

    @property
    def id(self) -> int:
        """Entry in the segment's table, 0 to 255."""
        return self.ref & 0xFF


class NamespaceState(IntEnum):
    """Of a namespace; every process sees the same."""

    ABSENT = 0
    """There is none of that handle."""
    NORMAL = 1
    CLEARING = 2
    """Nothing of it is found or accepted any more; its pages are being given back."""
    CLEARED = 3


def encoded(text: str, what: str) -> bytes:
    """A name as the table stores it.

    Raises:
        ConfigError: too long, or it contains NUL.
    """
    data = text.encode()
    if len(data) > NAME_BYTES or b"\0" in data:
        raise ConfigError(
            f"{what}: expected at most {NAME_BYTES} bytes of UTF-8 without NUL, found {len(data)}; "
            "use a digest of a longer name"
        )
    return data
