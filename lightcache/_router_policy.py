"""What a request costs a worker, and who gets it when several cost the same."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lightcache import _arguments
from lightcache.errors import ConfigError

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RouterPolicy:
    """What a request costs, in tokens of prefill. For a worker with `device` pages of the prompt, a
    node with `host` pages of it, and n pages in all:

        compute = (n - max(device, host)) * page_tokens
        load    = max(host - device, 0) * page_tokens
        cost    = compute + host_weight * load + load_weight * load_of(worker)
    """

    page_tokens: int | None = None
    """Tokens of a page; None: what the host index says."""
    load_weight: float = 1.0
    """Tokens of prefill that one unit of `loads` is worth: 1 if loads are tokens that wait."""
    host_weight: float = 0.1
    """Loading a token from the host, compared with computing it, 0 to 1; see `costs.Costs`."""
    refresh: float = 1.0
    """Seconds between two looks at whether the indexes are there and their owners live."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a figure out of range.
        """
        if self.page_tokens is not None:
            _arguments.count(self.page_tokens, "page_tokens", 1, 1 << 30)
        check_figure(self.load_weight, "load_weight", math.inf)
        check_figure(self.host_weight, "host_weight", 1.0)
        check_figure(self.refresh, "refresh", math.inf)


def check_figure(value: Any, what: str, most: float) -> None:
    """A finite number from 0 to `most`.

    Raises:
        ConfigError: it is not.
    """
    if type(value) in (int, float) and 0 <= value <= most and value != math.inf:
        return  # the rest costs as much as a peek
    number = -1.0 if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not 0 <= number <= most or number == math.inf:
        limit = "a finite number of at least 0" if most == math.inf else f"0 to {most:g}"
        raise ConfigError(f"{what}: expected {limit}, found {value!r}")


def seed_of(name: str) -> int:
    """64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def mixed(word: int) -> int:
    """A word in which each bit depends on all bits. The worker with the largest one for a key has
    it (rendezvous hashing, Thaler and Ravishankar 1996): when one leaves, only its keys move."""
    word = (word ^ word >> 32) * 0xD6E8FEB86659FD93 & _MASK
    word = (word ^ word >> 32) * 0xD6E8FEB86659FD93 & _MASK
    return word ^ word >> 32


__all__ = ["RouterPolicy", "check_figure", "mixed", "seed_of"]
