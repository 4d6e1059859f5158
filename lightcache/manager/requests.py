"""What a manager knows of a request that was planned or runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, Pages
from lightcache.errors import ConfigError
from lightcache.hashing import KeySpec, PageHasher
from lightcache.leases import Lease
from lightcache.manager.device import NONE
from lightcache.manager.matches import PrefixMatch, Wishes
from lightcache.manager.prompts import Prompt
from lightcache.manager.statistics import Figures
from lightcache.namespaces import Namespace

if TYPE_CHECKING:
    from lightcache.manager.traffic import Movement

NO_KEYS: Keys = np.zeros((0, 2), np.uint64)

_MANY = 64  # keys one by one, of which it is worth making an array

# What a block of a request's table is to us (owned devices).
HELD, PINNED, LEASED = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Space:
    """A weights version and a tenant, in every tier."""

    weights: str
    tenant: str
    host: Namespace
    device: Namespace | None
    host_spec: KeySpec
    device_spec: KeySpec
    """The same object where both tiers have pages of one size."""


class Chain:
    """The keys of a sequence that grows, for one page size."""

    def __init__(self, prompt: Prompt, spec: KeySpec) -> None:
        """Nothing is hashed before a key is asked for."""
        self._prompt, self._spec = prompt, spec
        self._known: Keys | None = None
        self._room: Keys = NO_KEYS
        self._more: list[bytes] = []
        """What comes behind `_known`: an array is made of it when one is asked for."""
        self._hasher: PageHasher | None = None
        self._late = b""
        """Tokens that were appended and are not hashed yet."""

    @property
    def keys(self) -> Keys:
        """Of all complete pages, shape (n, 2)."""
        if self._late:
            self._hash_late()
        before = self._known if self._known is not None else self._begin()
        if self._more:
            known = len(before)
            count = known + len(self._more)
            if count > len(self._room):  # the prompt's own keys have no room
                self._room = np.empty((2 * count, 2), np.uint64)
                self._room[:known] = before
            self._room[known:count] = np.frombuffer(b"".join(self._more), np.uint64).reshape(-1, 2)
            self._known = before = self._room[:count]
            self._more = []
        return before

    def packed(self, begin: int, end: int) -> list[bytes]:
        """The bytes of keys [begin, end), in pieces: at little cost where they were made lately."""
        if self._late:
            self._hash_late()
        before = self._known if self._known is not None else self._begin()
        if len(self._more) > _MANY:
            before = self.keys
        known = len(before)
        if begin >= known:
            return self._more[begin - known : end - known]
        pieces = self._more[: end - known] if end > known else []
        return [before[begin:end].tobytes(), *pieces]

    def extend(self, tokens: bytes) -> None:
        """Append what was generated, as `pack_tokens` has it. Hashed when a key is asked for."""
        self._late += tokens

    def _hash_late(self) -> None:
        if self._hasher is None:
            self._hasher = self._prompt.hasher(self._spec)
        self._more += self._hasher.append_packed(self._late)
        self._late = b""

    def _begin(self) -> Keys:
        """The prompt's keys, hashed if nobody has before."""
        self._known = self._room = self._prompt.keys(self._spec)
        return self._known


class NoChain(Chain):
    """No keys at all: of a request that the cache failed."""

    def __init__(self) -> None:
        """Empty, and stays so."""
        self._known = NO_KEYS
        self._more = []
        self._late = b""

    def extend(self, tokens: bytes) -> None:
        """Nothing."""


@dataclass(eq=False)
class Request:
    """One request, from `take` until `release`."""

    id: Hashable
    prompt: Prompt
    wishes: Wishes
    space: Space | None
    """None: the cache failed when it began; nothing of it is found or published."""
    match: PrefixMatch
    device_chain: Chain
    host_chain: Chain
    hit: Lease | None = None
    """Device blocks that were found; owned devices."""
    host: Lease | None = None
    """Host pages that were found, until they are fetched."""
    host_first: int = 0
    """Number of the first of them in the host's keys."""
    table: Pages = field(default_factory=lambda: NONE)
    """Device blocks, in order of their tokens."""
    kind: bytearray = field(default_factory=bytearray)
    """HELD, PINNED or LEASED, for each block of the table."""
    named: int = 0
    """Leading blocks that were given names, or tried to."""
    written: int = 0
    """Leading host pages that are there, on their way, or were tried."""
    left_to_others: int = 0
    """Up to here others were writing some of its host pages; 0: none."""
    failed_then: int = 0
    """Copies that had failed when that was seen."""
    known: int = 0
    """Tokens whose ids are known: the prompt's and those reported."""
    total: int = 0
    """Tokens that are computed and accepted."""
    movements: list[Movement] = field(default_factory=list)
    """Copies that touch its blocks, those of writing included."""
    loading: Movement | None = None
    """Of these, the one that brings what the host had."""
    fetched: bool = False
    """`fetch` was called."""
    counted: Figures = field(default_factory=Figures)
    """What it adds to the manager's figures."""
    said: bytearray | None = None
    """Ids of the tokens that were generated, as `pack_tokens` has them; None: storage does not want
    to know them."""
    stored: bool = True
    """Whether it goes to storage when it ends: not if it was aborted."""
    sound: Callable[[], bool] | None = None
    """Whether what was computed may be believed. None: it may; who computes nothing of what did not
    come needs not ask."""
    on_device: bool = field(init=False)
    """Whether its blocks get names."""

    def __post_init__(self) -> None:
        wanted = self.wishes.write and "device" in self.wishes.tiers
        self.on_device = wanted and self.space is not None and self.space.device is not None

    def check(self, total: Any, count: int) -> None:
        """Whether so many tokens may be computed, `count` of them newly known.

        Raises:
            ConfigError: fewer than before, or more than are known.
        """
        if type(total) is not int and not isinstance(total, np.integer):
            raise ConfigError(f"commit {self.id!r}: expected a number of tokens, found {total!r}")
        if not self.total <= total <= self.known + count:
            raise ConfigError(
                f"commit {self.id!r}: expected {self.total} to {self.known + count} computed "
                f"tokens, found {total}; give the ids of what was generated as new_tokens="
            )

    def note(self, total: int, new_tokens: bytes) -> None:
        """More tokens are computed: what `check` has let pass.

        Args:
            new_tokens: as `pack_tokens` has them.
        """
        if new_tokens:
            self.known += len(new_tokens) // 4
            if self.said is not None:
                self.said += new_tokens
            self.device_chain.extend(new_tokens)
            if self.host_chain is not self.device_chain:
                self.host_chain.extend(new_tokens)
        self.total = total

    def token_ids(self, count: int) -> npt.NDArray[np.uint32] | None:
        """Of its first tokens; None where they are not kept."""
        if self.said is None:
            return None
        said = np.frombuffer(bytes(self.said), "<u4").astype(np.uint32, copy=False)
        return np.concatenate((self.prompt.tokens, said))[:count]

    def let_go_of_host(self) -> None:
        """What was found on the host and is not on its way is not wanted. Harmless twice, and if
        the cache was closed."""
        lease, self.host = self.host, None
        if lease is not None:
            lease._let_go()

    @property
    def is_loading(self) -> bool:
        """Whether a part of its blocks may not be filled yet, as far as was looked."""
        return self.loading is not None and not self.loading.over

    def publishable(self) -> int:
        """Tokens that may be shared: computed, and not on their way to the device still."""
        if self.space is None:
            return 0
        total = self.total if self.wishes.output else min(self.total, len(self.prompt))
        if self.is_loading or (self.sound is not None and not self.sound()):
            return min(total, self.match.device)
        return total


def slots_of(table: Pages, block_tokens: int, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Device slots of tokens [begin, end) by a block table."""
    first = begin // block_tokens
    slots = slots_of_blocks(table[first : -(-end // block_tokens)], block_tokens)
    return slots[begin - first * block_tokens : end - first * block_tokens]


def slots_of_blocks(blocks: Pages, block_tokens: int) -> npt.NDArray[np.int64]:
    """Device slots of all tokens of these blocks."""
    starts = blocks.astype(np.int64) * block_tokens
    slots: npt.NDArray[np.int64] = np.add.outer(starts, np.arange(block_tokens)).reshape(-1)
    return slots


__all__ = [
    "HELD",
    "LEASED",
    "NO_KEYS",
    "PINNED",
    "Chain",
    "NoChain",
    "Request",
    "Space",
    "slots_of",
    "slots_of_blocks",
]
