"""Engines of several ranks whose states are tensors of bytes: each rank has its heads, and a
coordinator orders their copies. Teams of other sizes share the host's caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from support.layout_case import BF16, F32, Place
from support.manager_case import SECRET

from lightcache import Cache
from lightcache.hybrid import Checkpoints, Grid, HybridManager, StatePart, state_groups
from lightcache.hybrid.copiers import Section
from lightcache.hybrid.opening import create_slots
from lightcache.kernels import PageGeometry, Shard, StateCopier, layouts
from lightcache.manager import KVCacheManager, ManagedBlocks, NullBackend, Prompt
from lightcache.manager.ranks.coordinator import RankCoordinator
from lightcache.manager.ranks.messages import Decisions
from lightcache.manager.ranks.worker import RankWorker
from lightcache.runs import PLAIN, Run
from lightcache.shm import SharedLog

LAYERS = (0, 1, 3)
SLOTS = 6
PAGE = 4
DTYPES = {"recurrent": F32, "conv": BF16, "scale": torch.float16}
SECTIONS = (Section("q", 4, 2), Section("k", 4, 2), Section("v", 8, 3))
PARTS = (
    StatePart("recurrent", (8, 3, 5), 4, len(LAYERS)),
    StatePart("conv", (40, 3), 2, len(LAYERS), sections=SECTIONS),
    StatePart("scale", (7,), 2, len(LAYERS), sharded=False),
)
GEOMETRY = PageGeometry(state_groups(PARTS, LAYERS))
Whole = dict[tuple[int, str], Any]


def state(seed: int) -> Whole:
    """The whole model's state: bytes of each element, as (*shape, dtype_bytes) of each layer and
    part."""
    draw = np.random.default_rng(seed)
    return {
        (layer, part.name): draw.integers(0, 256, (*part.shape, part.dtype_bytes), np.uint8)
        for layer in LAYERS
        for part in PARTS
    }


def of_rank(whole: Any, part: StatePart, rank: int, ranks: int) -> Any:
    """What engines give a rank: of each section a run of its heads, one behind the other."""
    if not part.sharded:
        return whole
    found, first = [], 0
    for heads, size in [(each.heads, each.size) for each in part.sections] or [(part.shape[0], 1)]:
        mine, copies = max(1, heads // ranks), max(1, ranks // heads)
        begin = first + rank // copies * mine * size
        found.append(whole[begin : begin + mine * size])
        first += heads * size
    return np.concatenate(found)


class StateRank:
    """One rank: its tensors, its engine, its worker."""

    def __init__(self, states: str, log: str, rank: int, ranks: int, run: Run) -> None:
        self.rank, self.ranks = rank, ranks
        self.tensors = {
            (layer, part.name): torch.zeros(
                SLOTS,
                *of_rank(np.zeros(part.shape), part, rank, ranks).shape,
                dtype=DTYPES[part.name],
            )
            for layer in LAYERS
            for part in PARTS
        }
        self.cache = Cache.attach(states, secret=SECRET, role=f"rank {rank}")
        geometry = GEOMETRY if run == PLAIN else in_parts(self.cache)
        mine = Shard(geometry, rank, ranks)
        recurrent, conv, scale = (
            {layer: self.tensors[layer, part.name] for layer in LAYERS} for part in PARTS
        )
        planes = layouts.join(
            layouts.plane(mine, "state", "recurrent", recurrent, axes="thcc"),
            layouts.convolution(mine, "state", ["conv_q", "conv_k", "conv_v"], conv, axes="tcr"),
            layouts.plane(mine, "state.whole", "scale", scale, axes="tc"),
        )
        self.log = SharedLog.attach(log)
        self.engine = self.cache.transfer_engine(geometry, planes, share=mine.share(), threads=1)
        others = {run.group: self.engine} if run.group else {}
        self.worker = RankWorker(self.log, self.cache, self.engine, rank, groups=others)
        self.copier = StateCopier(geometry, planes, share=mine.share())

    def bytes_of(self, slot: int, layer: int, part: StatePart) -> Any:
        """What a slot has, as a view of (..., dtype_bytes)."""
        one = self.tensors[layer, part.name][slot]
        return one.view(torch.uint8).numpy().reshape(*one.shape, part.dtype_bytes)

    def close(self) -> None:
        """Leave."""
        self.worker.close()
        self.engine.close()
        self.log.close()
        self.cache.close()


class Everywhere:
    """The copier of all ranks."""

    def __init__(self, ranks: Sequence[StateRank]) -> None:
        self.ranks = ranks

    def copy(self, sources: Any, targets: Any, stream: Any = None) -> Any:
        """See `StateCopier`; the last rank's is over when all are: there is no device."""
        return [each.copier.copy(sources, targets, stream) for each in self.ranks][-1]

    def zero(self, slots: Any, stream: Any = None) -> Any:
        """See `StateCopier`."""
        return [each.copier.zero(slots, stream) for each in self.ranks][-1]


class StateTeam:
    """A scheduler and so many ranks. KV is nobody's business here, so none is moved."""

    def __init__(self, name: str, host: Cache, states: Cache, ranks: int) -> None:
        """Caches are the caller's to close; states may share that of KV."""
        run = PLAIN if states is not host else Run(1, in_parts(host).parts)
        self.log = SharedLog.create(f"{name}.log", capacity=64, message_bytes=256)
        self.ranks = [
            StateRank(states.name, f"{name}.log", rank, ranks, run) for rank in range(ranks)
        ]
        self.coordinator = RankCoordinator(self.log, [each.cache.client_id for each in self.ranks])
        self.device = ManagedBlocks(f"{name}.device", block_tokens=PAGE, blocks=32, eviction="lru")
        self.manager = KVCacheManager(host, self.device, NullBackend())
        self.slots = create_slots(f"{name}.slots", SLOTS)
        copies: Any = self.coordinator
        if run.group:
            copies = self.coordinator.group(run, page_tokens=1)
        everywhere = Everywhere(self.ranks)
        self.checkpoints = Checkpoints(self.slots, states, copies, everywhere, run=run)
        self.hybrid = HybridManager(self.manager, self.checkpoints, Grid(PAGE, PAGE, PAGE))
        self.steps = 0

    def begin(self, request: Any, tokens: Any) -> tuple[Any, int]:
        """Plan, take, allocate, restore, fetch. Returns the match and the working slot."""
        prompt = Prompt(tokens)
        self.hybrid.plan(request, prompt)
        match = self.hybrid.take(request)
        self.hybrid.allocate(request, len(prompt))
        restored = self.hybrid.restore([request])
        load = self.hybrid.load(request)
        self.settle()
        assert load.done()
        return match, int(restored.working[0])

    def end(self, request: Any, tokens: int) -> int:
        """All of its tokens are computed, and its state is where they end."""
        self.hybrid.commit(request, tokens)
        donated = self.hybrid.release(request, at=tokens)
        self.settle()
        return donated

    def settle(self) -> None:
        """Every rank does what was ordered."""
        self.coordinator.step(Decisions(self.steps))
        self.steps += 1
        for each in self.ranks:
            each.worker.step(60)
            each.worker.drain(60)
        self.hybrid.poll()

    def write(self, slot: int, whole: Whole) -> None:
        """A step leaves this state there; each rank computes its heads."""
        for each in self.ranks:
            for layer in LAYERS:
                for part in PARTS:
                    mine = of_rank(whole[layer, part.name], part, each.rank, each.ranks)
                    each.bytes_of(slot, layer, part)[:] = mine

    def wrong(self, slot: int, whole: Whole) -> list[Place]:
        """(part, layer, rank) of what is not this state there."""
        return [
            (part.name, layer, f"rank {each.rank} of {each.ranks}")
            for each in self.ranks
            for layer in LAYERS
            for part in PARTS
            if (
                each.bytes_of(slot, layer, part)
                != of_rank(whole[layer, part.name], part, each.rank, each.ranks)
            ).any()
        ]

    def close(self) -> None:
        """Leave."""
        self.hybrid.close()
        self.checkpoints.close()
        self.manager.close()
        self.device.close()
        self.slots.close()
        for each in self.ranks:
            each.close()
        self.log.close()


def in_parts(host: Cache) -> PageGeometry:
    """The geometry of states in a cache of KV."""
    return PageGeometry(state_groups(PARTS, LAYERS), part_bytes=host.page_bytes)


def open_host_of_both(name: str, pages: int = 200) -> Cache:
    """A host cache of KV, in which these states lie as well."""
    geometry = PageGeometry(state_groups(PARTS, LAYERS), part_bytes=256)
    return Cache.open(
        name,
        pages=pages,
        page_bytes=256,
        page_tokens=PAGE,
        fingerprint=f"kv {geometry.fingerprint()}",
        kv_groups=("kv", "states"),
        secret=SECRET,
    )


def open_host_states(name: str, pages: int = 8) -> Cache:
    """A host cache of these states."""
    return Cache.open(
        name,
        pages=pages,
        page_bytes=GEOMETRY.page_bytes,
        page_tokens=1,
        fingerprint=f"parts {GEOMETRY.fingerprint()}",
        independent=True,
        secret=SECRET,
    )


__all__ = ["GEOMETRY", "PARTS", "StateTeam", "open_host_of_both", "open_host_states", "state"]
