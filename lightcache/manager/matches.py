"""What a match found, and what a request wishes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from lightcache._arguments import count
from lightcache.errors import ConfigError
from lightcache.manager.prompts import Item

TIERS = frozenset({"device", "host", "storage"})
_LOW_WATER = 0.02  # of a device's blocks; a step of decoding takes less, and a prefill waits once


class Why(Enum):
    """Why less than what was found is usable."""

    NOTHING = "all that was found is usable"
    ITEM = "a multimodal item would have been cut"
    BREAK_EVEN = "computing is faster than loading so few pages"
    WISHES = "the request does not read, or not from this tier"
    WEIGHTS = (
        "the weights are being changed, another process has cleared their version, or no namespace "
        "is left for the tenant"
    )
    DISABLED = "the manager has disabled itself"
    FORGONE = "there was no room to load it: `KVCacheManager.forgo`"


@dataclass(frozen=True)
class PrefixMatch:
    """How much of a prompt is where, in tokens. The three tiers do not overlap: each counts what
    those before it do not have."""

    tokens: int
    """Of the prompt."""
    device: int = 0
    """In the device's blocks, whole blocks."""
    host: int = 0
    """Behind these, in host pages."""
    storage: int = 0
    """Behind these, in storage; of what was brought to the host for this request already, too."""
    usable: int = 0
    """That the request need not compute if it takes and fetches: never more than the sum, never
    all of the prompt."""
    why: Why = Why.NOTHING
    """Why it is less than the sum."""
    cut: Item | None = None
    """The item that would have been cut."""
    pending: bool = False
    """Storage is still being asked or read: planning again may find more."""

    waits_for: Hashable | None = None
    """A running request that computes what comes next of this prefix: with `same_prefix="wait"`,
    plan again later rather than compute it as well. None when the limit of waiting is over."""

    @property
    def found(self) -> int:
        """In all tiers together."""
        return self.device + self.host + self.storage

    @property
    def load(self) -> int:
        """Tokens to bring to the device."""
        return max(0, self.usable - self.device)


@dataclass(frozen=True)
class Wishes:
    """What a request asks of the cache."""

    read: bool = True
    """False: match nothing, as for prompt log-probabilities."""
    write: bool = True
    """False: publish nothing of it, on the device neither."""
    tiers: frozenset[str] = TIERS
    """Where it may read from and be written to."""
    priority: int = 0
    """When its pages are written, and no more. 0: as everybody's. 1: they go to the host as each
    fills, under SELECTIVE at first sight, too; under BACK as everybody's. -1: what it computed does
    not go to the host.

    It does not change what is evicted first: on the device and on the host that is what was unused
    for longest, whoever had it. `KVCacheManager.keep` spares a prompt, `drop` gives one up at once,
    and a tenant's quota and minimum say how much it may have and has for sure."""
    ttl: float | None = None
    """Seconds until what is planned for it is let go; None: the manager's."""
    output: bool = True
    """False: only the prompt is published, not what was generated."""

    def __post_init__(self) -> None:
        wrong = set(self.tiers) - TIERS
        if wrong:
            raise ConfigError(f"tiers: expected some of {sorted(TIERS)}, found {sorted(wrong)}")
        object.__setattr__(self, "tiers", frozenset(self.tiers))
        count(self.priority, "priority", -1, 1)
        if self.ttl is not None and not self.ttl > 0:
            raise ConfigError(f"ttl: expected seconds > 0, found {self.ttl!r}")


ANY = Wishes()


class WritePolicy(Enum):
    """When blocks go to the host."""

    THROUGH = "through"
    """As they fill."""
    BACK = "back"
    """When the device needs their room."""
    SELECTIVE = "selective"
    """As they fill, if their prefix was asked for before."""


@dataclass(frozen=True)
class ManagerConfig:
    """How a manager decides."""

    write: WritePolicy = WritePolicy.THROUGH
    write_group: int = 8
    """Pages of a request that are written together; the rest follows when it ends."""
    seen: int = 2
    """SELECTIVE: the time at which a page is asked for and then written."""
    plan_ttl: float = 10.0
    """Seconds that a plan holds what it found; at least half of them after each call of `plan`."""
    reserve_blocks: int = 0
    """Decode reserve: blocks that a running request has beyond its tokens."""
    min_load_tokens: int | None = None
    """Fewer are computed rather than loaded; None: as the costs say, 0: always load."""
    low_water: float | None = None
    """BACK: share of the device's blocks that is kept free by writing back ahead of need; None: a
    fiftieth. Where they are all in use, `allocate` has what is in its way written first."""
    time_limit: float = 0.25
    """Seconds that a call may wait for a lock before it counts as failed."""
    failures: int = 3
    """One behind the other, and the manager disables itself."""
    same_prefix: str = "compute"
    """What a request does whose prefix another is computing: "compute" it too, or "wait"."""
    wait_limit: float = 5.0
    """Seconds that a request waits so; then it computes."""
    window: int = 1000
    """Requests that `KVCacheManager.recent_stats` looks back on."""

    def __post_init__(self) -> None:
        if type(self.write) is not WritePolicy:
            raise ConfigError(f"write: expected a WritePolicy, found {self.write!r}")
        count(self.write_group, "write_group", 1, 1 << 20)
        count(self.seen, "seen", 1, 1 << 10)
        count(self.reserve_blocks, "reserve_blocks", 0, 1 << 20)
        count(self.failures, "failures", 1, 1 << 20)
        count(self.window, "window", 1, 1 << 20)
        for name in ("plan_ttl", "time_limit", "wait_limit"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected seconds > 0, found {getattr(self, name)!r}")
        if self.low_water is not None and not 0 <= self.low_water < 1:
            raise ConfigError(
                f"low_water: expected a share from 0 to less than 1, found {self.low_water!r}"
            )
        if self.same_prefix not in ("compute", "wait"):
            raise ConfigError(
                f"same_prefix: expected 'compute' or 'wait', found {self.same_prefix!r}"
            )

    @property
    def kept_free(self) -> float:
        """`low_water`, whatever was said."""
        if self.low_water is None:
            return _LOW_WATER if self.write is WritePolicy.BACK else 0.0
        return self.low_water


__all__ = ["ANY", "TIERS", "ManagerConfig", "PrefixMatch", "Why", "Wishes", "WritePolicy"]
