"""The recurrent states of a hybrid model: each takes several pages of the cache."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache import Lease, Reservation
from lightcache.connectors._requirements import DynamicCache, torch
from lightcache.connectors.cache_layers import parts_of, set_parts, state_layers
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.trial import computed
from lightcache.errors import ConfigError
from lightcache.kernels import layouts
from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane
from lightcache.kernels.planes import DevicePlanes, join
from lightcache.leases import Allocation
from lightcache.manager.backend import EngineBackend, Slots, TransferHandle
from lightcache.runs import PLAIN, Run

GROUP = "state"
"""Name of the only group of these geometries."""
_TOKENS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Part:
    """One tensor of the state of each layer."""

    name: str
    """"conv" or "recurrent"; "conv1" and so on if a layer has several."""
    shape: tuple[int, ...]
    """Including the batch: [1, channels, width], [1, heads, key_dim, value_dim]."""
    dtype: torch.dtype


@dataclass(frozen=True)
class StatePages:
    """Pages of one model's states."""

    geometry: PageGeometry
    """One group, "state": a plane for each part, of every layer that has a state."""
    parts: tuple[Part, ...]
    device: str
    """The model's device: "cpu", or such as "cuda:0"."""
    continues: bool
    """Whether this release of transformers continues from a state with several tokens in one pass.
    If not, the connector computes tokens after a state one by one (Jamba, in 5.23)."""
    run: Run = PLAIN
    """How states lie in the cache; as they are, if the model keeps nothing else."""

    @property
    def dtypes(self) -> str:
        """Names and dtypes of the parts."""
        return ",".join(
            f"{part.name}:{str(part.dtype).removeprefix('torch.')}" for part in self.parts
        )


def describe_states(
    model: Any, past: DynamicCache, device: str, *, number: int, part_bytes: int | None
) -> StatePages:
    """Pages of a model's states.

    Args:
        past: the model's cache of one token.
        number: of this group in the cache.
        part_bytes: of a page of the cache; None: a page is one state.

    Raises:
        ConfigError: no states, states of several shapes, or a release of transformers that cannot
            continue from them.
    """
    layers = state_layers(past)
    tensors = [
        tuple(
            Part(name, tuple(tensor.shape), tensor.dtype)
            for name, tensor in parts_of(past.layers[number]).items()
        )
        for number in layers
    ]
    if not all(tensors):
        raise ConfigError(
            f"model: expected states in the cache, found layers of {type(model).__name__} without; "
            "a model that keeps its states elsewhere (RecurrentGemma: in its modules, one sequence "
            "at a time) is not supported"
        )
    if len(set(tensors)) != 1:
        raise ConfigError(
            f"model: expected states of one shape in every layer that keeps one, found "
            f"{sorted(set(map(str, tensors)))} in {type(model).__name__}; these are not supported"
        )
    parts = tensors[0]
    planes = [
        Plane(part.name, torch.Size(part.shape).numel() * part.dtype.itemsize) for part in parts
    ]
    group = KVGroup.state(GROUP, layers=layers, parts=planes)
    geometry = PageGeometry([group], part_bytes=part_bytes)
    run = PLAIN if part_bytes is None else Run(number, geometry.parts)
    return StatePages(geometry, parts, device, _continues(model, device), run)


def _continues(model: Any, device: str) -> bool:
    """Whether the model continues from a state with several tokens in one pass.

    Raises:
        ConfigError: it cannot continue with single tokens either.
    """
    whole = _first_states(computed(model, device, _TOKENS))
    fresh = _first_states(computed(model, device, _TOKENS[2:]))
    for continues, pieces in (
        (True, (_TOKENS[:2], _TOKENS[2:])),
        (False, (_TOKENS[:2], _TOKENS[2:3], _TOKENS[3:])),
    ):
        if _near(_first_states(computed(model, device, *pieces)), whole, fresh):
            return continues
    raise ConfigError(
        f"model: expected a state from which the next token can be computed, found that "
        f"{type(model).__name__} computes other values than without a cache; it is not supported"
    )


def _first_states(past: DynamicCache) -> list[torch.Tensor]:
    """States of the first two layers that have any, where rounding errors are small."""
    return [
        tensor
        for number in state_layers(past)[:2]
        for tensor in parts_of(past.layers[number]).values()
    ]


def _near(split: list[torch.Tensor], whole: list[torch.Tensor], fresh: list[torch.Tensor]) -> bool:
    """Whether states are those of all tokens, relative to the distance of states of only the last
    tokens."""
    # One and several tokens are rounded differently: by 1e-7 of a state in float32, 3e-3 in
    # bfloat16. Models of random weights that ignore their state were wrong by 7e-2.
    exact = all(tensor.dtype == torch.float32 for tensor in whole)
    noise, part = (1e-5, 1e-3) if exact else (5e-3, 3e-2)
    return all(
        _distance(tensor, all_) <= noise * float(all_.float().norm()) + part * _distance(end, all_)
        for tensor, all_, end in zip(split, whole, fresh, strict=True)
    )


def _distance(tensor: torch.Tensor, other: torch.Tensor) -> float:
    return float((tensor.float() - other.float()).norm())


def prepare(pages: StatePages, past: DynamicCache) -> None:
    """Give every layer that keeps a state uninitialised tensors for one."""
    for number in pages.geometry.layers:
        set_parts(
            past.layers[number],
            {
                part.name: torch.empty(part.shape, dtype=part.dtype, device=pages.device)
                for part in pages.parts
            },
        )


def planes_of_states(pages: StatePages, states: dict[int, dict[str, torch.Tensor]]) -> DevicePlanes:
    """The planes of one state, by layer and part; the only slot is 0. Keeps the tensors alive.

    Raises:
        ConfigError: tensors of other shapes or dtypes than the model's.
    """
    shard = layouts.Shard(pages.geometry)
    for part in pages.parts:
        for number in pages.geometry.layers:
            tensor = states.get(number, {}).get(part.name)
            if tensor is None or (tuple(tensor.shape), tensor.dtype) != (part.shape, part.dtype):
                found = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ConfigError(
                    f"past: expected a {part.name} state of {part.dtype} {part.shape} in layer "
                    f"{number}, as the model keeps it, found {found}"
                )
    return join(
        *(
            layouts.plane(
                shard,
                GROUP,
                part.name,
                {number: states[number][part.name].view(1, -1) for number in pages.geometry.layers},
                axes="tc",
            )
            for part in pages.parts
        )
    )


# ---- Copies of states between pages and the tensors of one sequence

States = dict[int, dict[str, Any]]
"""Tensors of one state, by layer and part."""


class StateBackend:
    """A `TransferBackend` between host pages and tensors. A slot number stands for the tensors of
    one state while a copy begins."""

    shards = 1

    def __init__(self, pages: StatePages, pool: Pooled) -> None:
        """No slot has tensors yet."""
        self._pages, self._pool = pages, pool
        self._lent: dict[int, States] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lent(self, states: States) -> Iterator[int]:
        """A slot that stands for these tensors within the `with`. A copy still in flight after it
        keeps them alive."""
        with self._lock:
            slot = next(number for number in itertools.count() if number not in self._lent)
            self._lent[slot] = states
        try:
            yield slot
        finally:
            del self._lent[slot]

    def load(self, lease: Lease, slots: Slots, first: int) -> TransferHandle:
        """See `TransferBackend`. Blocks for pages that are not pinned yet, as the others do."""
        self._pool.wait_for(lease.pages)
        return self._engine(slots).load(lease, _places(slots), first)

    def offload(self, new: Reservation, slots: Slots) -> TransferHandle:
        """See `TransferBackend`."""
        try:
            self._pool.wait_for(new.pages)
            return self._engine(slots).offload(new, _places(slots))
        except BaseException:
            new.release()  # also after exceptions that no other code handles
            raise

    def save(self, held: Allocation, slots: Slots) -> TransferHandle:
        """See `TransferBackend`."""
        self._pool.wait_for(held.pages)
        return self._engine(slots).save(held, _places(slots))

    def _engine(self, slots: Slots) -> EngineBackend:
        """The engine for the only slot among these."""
        planes = planes_of_states(self._pages, self._lent[int(slots.max())])
        return EngineBackend(self._pool.engine, planes=planes)


def _places(slots: Slots) -> Slots:
    """Slots with 0 instead of the slot number: tensors of one state have only that slot."""
    return np.where(slots < 0, -1, 0).astype(np.int64)


__all__ = [
    "GROUP",
    "Part",
    "StateBackend",
    "StatePages",
    "States",
    "describe_states",
    "planes_of_states",
    "prepare",
]
