"""What the scheduler's half and the workers' halves of the connector tell each other. It travels in
vLLM's own messages: with the handshake at the start, with each step, and with each step's output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from lightcache.connectors.page_groups import PageGroup
from lightcache.kernels.groups import Rule
from lightcache.layout import Hint
from lightcache.runs import PLAIN


@dataclass(frozen=True)
class BlockGroup(PageGroup):
    """Layers for which vLLM has one table of blocks a request; their pages are found together."""

    block_tokens: int

    @cached_property
    def state(self) -> bool:
        """Whether a page is a recurrent state: one block, as it is after the page's last token."""
        return self.rule == Rule.point()

    @property
    def slots(self) -> int:
        """Slots of a block, as copies count them."""
        return 1 if self.state else self.block_tokens


def one_group(block_tokens: int) -> tuple[BlockGroup, ...]:
    """Of a model whose layers all have full attention."""
    return (BlockGroup("full", Rule.prefix(), PLAIN, block_tokens),)


@dataclass(frozen=True)
class Place:
    """The cache that all halves of an engine open, as a worker has found it out from its tensors.
    Two engines share pages exactly if theirs are equal."""

    name: str | None
    """None: the model's default name."""
    model: str
    fingerprint: str
    page_bytes: int
    page_tokens: int
    groups: tuple[BlockGroup, ...]
    """In vLLM's order, by which messages number them."""


@dataclass(frozen=True)
class Hello:
    """Of a rank, at the start."""

    rank: int
    place: Place | None
    """None: this engine has no use of the cache, for the reason in `why`."""
    why: str
    segment: str
    """UUID of the segment that the rank has open; empty: none."""
    process: int
    host: str
    device: bool = False
    """Whether its tensors are on a device."""
    troubles: tuple[tuple[str, str], ...] = ()
    """Kinds and texts of what went wrong up to now: the scheduler's half says each kind once."""


@dataclass(frozen=True)
class LoadPart:
    """Pages of one group, to be copied to its blocks."""

    group: int
    pages: bytes
    """int32 each."""
    generations: bytes
    """uint32 each."""
    first: int
    """Tokens of the first page that the device has already, or needs no more."""
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class LoadOrder:
    """Pages that the scheduler pins, to be copied to blocks. The worker pins them for itself."""

    request: str
    segment: str
    parts: tuple[LoadPart, ...]


class SaveOrder(NamedTuple):
    """Whole pages of one group and one prompt that lie in blocks, to be copied to the host. Each
    rank reserves the keys and joins the others."""

    job: int
    group: int
    segment: str
    weights: str
    keys: bytes
    """16 bytes each, as the group's run makes them; the first is that of the page before, unless
    `root`."""
    root: bool
    blocks: tuple[int, ...]
    hint: Hint = Hint.NONE
    """Of new pages."""
    tokens: bytes = b""
    """Ids of the tokens of these pages, packed, if the cache notes them."""


@dataclass
class Orders:
    """Of a step, from the scheduler to each worker."""

    loads: list[LoadOrder] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Requests that wait for a load that cannot be: they are reported as failed."""
    saves: list[SaveOrder] = field(default_factory=list)
    settle: list[int] = field(default_factory=list)
    """Jobs whose blocks were freed: they must have read them, or be given up, before the step."""


@dataclass
class Report:
    """Of a step's output, from the workers to the scheduler; of several ranks together."""

    saved: dict[int, int] = field(default_factory=dict)
    """For each job that has ended, well or not, in how many ranks."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load failed in a rank."""
    segments: dict[int, str] = field(default_factory=dict)
    """UUID of the segment that a rank has open now, if it is another one than before."""

    def add(self, other: Report) -> Report:
        """Those of both."""
        for job, ranks in other.saved.items():
            self.saved[job] = self.saved.get(job, 0) + ranks
        self.failed |= other.failed
        self.segments |= other.segments
        return self

    def __bool__(self) -> bool:
        return bool(self.saved or self.failed or self.segments)


__all__ = [
    "BlockGroup",
    "Hello",
    "LoadOrder",
    "LoadPart",
    "Orders",
    "Place",
    "Report",
    "SaveOrder",
    "one_group",
]
