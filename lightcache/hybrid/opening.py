"""From an engine's tensors to a host cache for all groups of a model, and what managers need."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from lightcache._arguments import count
from lightcache.cache import Cache
from lightcache.errors import ConfigError
from lightcache.hybrid.checkpoints import Checkpoints
from lightcache.hybrid.manager import HybridManager
from lightcache.hybrid.saving import Grid, HybridConfig
from lightcache.hybrid.window_blocks import WindowBlocks, is_window
from lightcache.kernels import layouts
from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane, waste_of
from lightcache.kernels.groups import Rule
from lightcache.kernels.planes import DevicePlanes, join
from lightcache.kernels.states import StateCopier
from lightcache.manager.blocks import create_index
from lightcache.manager.opening import EngineKV, check_decided, describe, open_decided
from lightcache.page_index import PageIndex
from lightcache.runs import PLAIN, Run
from lightcache.shm.errors import leave

_log = logging.getLogger("lightcache.hybrid")

# ---- The index of a device's slots


def create_slots(
    name: str, slots: int, *, role: str = "scheduler", lock_timeout: float = 1.0
) -> PageIndex:
    """An empty index of so many slots, for `Checkpoints`. One that a dead process has left is
    removed: what its slots held went with it.

    Args:
        name: of the index in shared memory; one for each data-parallel rank.
        slots: of the device: for checkpoints, and for what running requests write.

    Raises:
        ConfigError: not 1 to 40 million.
        InUse: another process lives in an index of that name.
    """

    return create_index(name, pages=slots, independent=True, role=role, lock_timeout=lock_timeout)


# ---- States of an engine

GROUP = "state"
"""Name of the only group of these geometries."""
STATES = 1
"""The number of this group in a cache of KV."""
NAMES = ("kv", "states")
"""What operators see of the groups of such a cache."""
Parts = Mapping[str, Sequence[Any]]
"""By name: one tensor of each layer, of shape (slots, ...)."""


@dataclass(frozen=True)
class StateLayout:
    """The layout of states on the device and in pages."""

    geometry: PageGeometry
    """A page is one state: the parts of one layer after the other."""
    planes: DevicePlanes
    """Keeps the tensors alive."""
    dtypes: str
    """Names and dtypes of the parts, such as "conv:bfloat16,recurrent:float32". A geometry has
    sizes only, so a cache's fingerprint needs both."""
    slots: int
    """Slots of every tensor."""


def state_layout(
    parts: Parts, *, layers: Sequence[int] | None = None, part_bytes: int | None = None
) -> StateLayout:
    """Describe an engine's tensors of states. Copies nothing.

    Args:
        parts: by name, such as "conv" and "recurrent": tensors of shape (slots, ...) and any
            dtype, one of each layer: a sequence, or one tensor with an axis of layers in front. The
            bytes of a slot touch each other; slots may be apart.
        layers: their numbers in the model; None: 0, 1, ...
        part_bytes: of a page of the host, several of which have one state; None: one has.

    Raises:
        ConfigError: no parts, parts of different layers, tensors of one part that differ in shape
            or dtype, that are on several devices, or that are no tensors.
    """
    listed = {name: list(tensors) for name, tensors in parts.items()}
    counts = {name: len(tensors) for name, tensors in listed.items()}
    if not counts or 0 in counts.values() or len(set(counts.values())) != 1:
        raise ConfigError(
            f"states: expected parts by name, each with a tensor of every layer, found {counts}"
        )
    for name, tensors in listed.items():
        _check_alike(name, tensors)
    numbers = range(next(iter(counts.values()))) if layers is None else layers
    planes = [Plane(name, _row_bytes(tensors[0])) for name, tensors in listed.items()]
    group = KVGroup.state(GROUP, layers=list(numbers), parts=planes)
    geometry = PageGeometry([group], part_bytes=part_bytes)
    shard = layouts.Shard(geometry)
    described = [
        layouts.plane(shard, GROUP, name, tensors, axes="t" + "c" * (len(tensors[0].shape) - 1))
        for name, tensors in listed.items()
    ]
    kinds = ((name, tensors[0].dtype) for name, tensors in listed.items())
    return StateLayout(
        geometry,
        join(*described),
        ",".join(f"{name}:{str(dtype).removeprefix('torch.')}" for name, dtype in kinds),
        min(int(tensors[0].shape[0]) for tensors in listed.values()),
    )


def _check_alike(name: str, tensors: list[Any]) -> None:
    kinds = {
        (str(getattr(tensor, "dtype", type(tensor).__name__)), tuple(getattr(tensor, "shape", ())))
        for tensor in tensors
    }
    shapes = [shape for _, shape in kinds]
    if len(kinds) != 1 or len(shapes[0]) < 2 or 0 in shapes[0]:
        raise ConfigError(
            f"states: part {name!r}: expected tensors (slots, ...) of one shape and dtype in all "
            f"layers, found {sorted(kinds)}"
        )


def _row_bytes(tensor: Any) -> int:
    return math.prod(int(size) for size in tensor.shape[1:]) * int(tensor.element_size())


class States:
    """An engine's states on the device and the host, with the engine that moves them. As a context
    manager: leaving closes it, after the `Checkpoints` made from it."""

    def __init__(
        self,
        layout: StateLayout,
        copier: StateCopier,
        slots: PageIndex | None,
        host: Cache | None,
        kv: EngineKV | None = None,
    ) -> None:
        """For `open_states` and `open_hybrid`. Pins the host's pool if the tensors are on a GPU.

        Args:
            kv: has the host cache, which is closed with it; None: the host has states alone.
        """
        self.layout, self.copier, self.kv = layout, copier, kv
        self.slots = slots
        """The index of the device's slots; None: checkpoints have no device slots."""
        self.host = host
        self.copies: EngineKV | None = None
        """Copies between tensors and host: the pool as a GPU sees it (`pinned`, registered in the
        background), the `engine`, and the transfer `backend`. None: there is no host."""
        if host is not None:
            self.copies = EngineKV(host, layout.geometry, layout.planes, beside=kv)

    def checkpoints(self, **how: Any) -> Checkpoints:
        """`Checkpoints` of these states; `how` as there: write, most, low_water, storage,
        time_limit. Close it before this."""
        backend = None if self.copies is None else self.copies.backend
        run = PLAIN if self.kv is None else Run(STATES, self.layout.geometry.parts)
        return Checkpoints(self.slots, self.host, backend, self.copier, run=run, **how)

    def close(self) -> None:
        """Wait for copies, release the host's cache, that of KV as well, and the slots. The tensors
        stay."""
        with contextlib.ExitStack() as stack:
            for part in (self.slots, self.kv, self.copies):
                if part is not None:
                    stack.callback(part.close)

    def __enter__(self) -> States:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)


def open_states(
    parts: Parts,
    *,
    model: str,
    name: str | None = None,
    index: str | None = None,
    slots: int | None = None,
    size: int | str | None = None,
    pages: int | None = None,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> States:
    """`Checkpoints` of a model that has states and no KV, from an engine's tensors: of one process
    that has whole states, in CPU memory or on one GPU.

        with open_states({"conv": conv, "ssm": ssm}, model="mamba-2.8b@1a8d5fa",
                         index="mamba-gpu0-states", size="64GiB") as states:
            checkpoints = states.checkpoints()
            ...  # serve
            checkpoints.close()

    For a hybrid model use `open_hybrid`: its host cache holds KV and states, with one size for
    both. With `index` and no size, this opens the device slots of a hybrid model without a host.

    Ranks that share each state describe their part with `KVGroup.state`, its heads and sections,
    and have a `RankCoordinator` for a transfer backend.

    Args:
        parts, layers: see `state_layout`.
        model: whatever makes states of one model useless to another: its name, and after an "@" its
            revision.
        name: of the host's cache of states, which all engines of the node share; created if
            missing. None: the model's default, see `Cache.create`.
        index: name of the index of this device's slots, one for each data-parallel rank; None:
            slots are for running requests alone, the engine numbers them, and checkpoints are on
            the host.
        slots: of the tensors, that checkpoints and running requests have, from 0 on; None: all.
            Give fewer to keep the last ones for padding, or for drafts.
        size, pages: of the host's cache, as `Cache.open`; neither: there is no host.
        options: for `Cache.open`, such as numa= and secret=.

    Raises:
        ConfigError: as `state_layout`; neither an index nor a host; slots that the tensors do not
            have; options that the tensors decide.
        LayoutMismatch: there is a cache of the given name for other states.
        InUse: another process lives in an index of that name.
        Otherwise as `Cache.open` and `Cache.pin`.
    """
    layout = state_layout(parts, layers=layers)
    if index is None and size is None and pages is None:
        raise ConfigError(
            "states: expected an index for slots of the device (index=), a cache on the host "
            "(size= or pages=), or both, found neither"
        )
    limit = layout.slots if slots is None else count(slots, "slots", 1, layout.slots)
    geometry = layout.geometry
    decided: dict[str, Any] = {
        "page_bytes": geometry.page_bytes,
        "page_tokens": 1,
        "model": model,
        "fingerprint": f"{model} {layout.dtypes} {geometry.fingerprint()}",
        "device": layout.planes.device != "cpu",
        "independent": True,
    }
    check_decided("states", decided, options)
    copier = StateCopier(geometry, layout.planes)
    with contextlib.ExitStack() as stack:
        device = host = None
        if index is not None:
            device = create_slots(index, limit)
            stack.callback(device.close)
        if size is not None or pages is not None:
            host = Cache.open(name, size=size, pages=pages, **decided, **options)
            stack.callback(host.close)
        states = States(layout, copier, device, host)
        stack.pop_all()
    return states


# ---- KV and other groups in one pool


class Windows:
    """An engine's KV of full attention, and of layers that see a window or a chunk, in one host
    cache; perhaps states as well. As a context manager: leaving closes all of it, managers
    first."""

    def __init__(
        self, kv: EngineKV, windows: Mapping[Rule, EngineKV], states: States | None = None
    ) -> None:
        """For `open_hybrid`."""
        self.kv, self.windows, self.states = kv, dict(windows), states
        self._closing = contextlib.ExitStack()
        for each in (kv if states is None else states, *windows.values()):
            self._closing.callback(each.close)

    def manager(
        self,
        index: str,
        *,
        every: int | None = None,
        grid: Grid | None = None,
        hybrid: HybridConfig | None = None,
        checkpoints: Checkpoints | None = None,
        **how: Any,
    ) -> HybridManager:
        """A manager of all groups of these tensors. `close` closes it, if it is still open.

        Args:
            index: name of the index of this device's blocks of full attention; those of others are
                "INDEX-RULE". One for each engine or data-parallel rank of the node.
            every, grid: see `HybridManager`; the grid for states.
            hybrid: its `config`, of states.
            checkpoints: made from `states`, closed here; None: with their defaults.
            how: as for `EngineKV.manager`.

        Raises:
            ConfigError: as `EngineKV.manager` and `HybridManager`.
            InUse: another live process has an index of one of these names.
        """
        with contextlib.ExitStack() as stack:
            manager = self.kv.manager(index, **how)
            stack.callback(manager.device.close)
            stack.callback(manager.close)
            tokens, blocks = manager.device.block_tokens, []
            for number, (rule, each) in enumerate(self.windows.items(), self._first):
                blocks.append(
                    WindowBlocks(
                        f"{index}-{rule.name}",
                        rule=rule,
                        block_tokens=tokens,
                        blocks=each.slots // tokens,
                        backend=each.backend,
                        run=Run(number, each.geometry.parts),
                    )
                )
                stack.callback(blocks[-1].close)
            if self.states is not None and checkpoints is None:
                checkpoints = self.states.checkpoints(storage=manager.state.storage)
            if checkpoints is not None:
                stack.callback(checkpoints.close)
            joined = HybridManager(
                manager, checkpoints, grid, windows=blocks, every=every, config=hybrid
            )
            stack.callback(joined.close)
            self._closing.push(stack.pop_all())
        return joined

    @property
    def _first(self) -> int:
        """The number of the first window among the groups of the cache."""
        return 1 if self.states is None else STATES + 1

    def close(self) -> None:
        """Close managers, wait for copies, leave the cache. The tensors stay.

        Raises:
            As `EngineKV.close`.
        """
        self._closing.close()

    def __enter__(self) -> Windows:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)


@overload
def open_hybrid(
    tensors: layouts.Tensors, parts: Parts, *, model: str, axes: str, **how: Any
) -> States: ...


@overload
def open_hybrid(
    tensors: layouts.Tensors,
    parts: Parts | None = None,
    *,
    windows: Mapping[Rule, layouts.Tensors],
    model: str,
    axes: str,
    **how: Any,
) -> Windows: ...


def open_hybrid(
    tensors: layouts.Tensors,
    parts: Parts | None = None,
    *,
    windows: Mapping[Rule, layouts.Tensors] | None = None,
    model: str,
    axes: str,
    name: str | None = None,
    page_tokens: int = 64,
    value_dim: int | None = None,
    index: str | None = None,
    slots: int | None = None,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> States | Windows:
    """All groups of a model in one host cache, from an engine's tensors: of one process that has
    all heads and whole states, in CPU memory or on one GPU. KV and recurrent states:

        with open_hybrid(kv_caches, {"conv": conv, "recurrent": recurrent},
                         model="Qwen3-Next@0e9e39f", axes="kbnhc", size="64GiB",
                         index="qwen3-next-gpu0-states") as states:
            manager = states.kv.manager("qwen3-next-gpu0")
            hybrid = HybridManager(manager, states.checkpoints(), grid)

    or layers that see windows or chunks:

        with open_hybrid(global_caches, windows={Rule.window(1023): local_caches},
                         model="gemma-3-27b@005ad34", axes="kbnhc", size="64GiB") as opened:
            manager = opened.manager("gemma-3-gpu0")

    or both: then the manager takes a `grid` as well.

    Nothing divides the memory: a state, or a page of a window, lies in as many pages as it needs,
    and what was unused for longest makes room. `minimums=` of `Cache.open` leaves a group some of
    it, whatever the others need.

    Args:
        tensors, axes, page_tokens, value_dim: of KV: see `open_kv`.
        parts, layers: of states: see `state_layout`.
        windows: the tensors of the other layers of attention by their rule, with the axes of
            `tensors` and as many blocks as these layers have: fewer, usually.
        index, slots: of the device's slots of states: see `open_states`.
        model, name, options: see `open_kv`. Groups are named "kv", "states", and as the windows'
            rules, such as minimums={"states": "16GiB"}.

    Raises:
        ConfigError: as `open_kv` and `state_layout`; neither states nor windows.
        LayoutMismatch: a cache of the given name exists for another model, or other groups.
        InUse: another process lives in an index of that name.
        Otherwise as `Cache.open` and `Cache.pin`.
    """
    _check_kinds(parts, windows, index, slots, layers)
    kv = describe(tensors, axes, page_tokens, value_dim)
    part_bytes = kv[0].page_bytes
    with contextlib.ExitStack() as stack:
        named: list[tuple[str, PageGeometry]] = []
        layout, dtypes, device = None, "", None
        if parts is not None:
            layout = state_layout(parts, layers=layers, part_bytes=part_bytes)
            dtypes, limit = f"{layout.dtypes} ", layout.slots
            limit = limit if slots is None else count(slots, "slots", 1, limit)
            if index is not None:
                device = create_slots(index, limit)
                stack.callback(device.close)
            named.append((NAMES[STATES], layout.geometry))
        others = {
            rule: describe(own, axes, page_tokens, value_dim, rule=rule, part_bytes=part_bytes)
            for rule, own in (windows or {}).items()
        }
        named += [(rule.name, geometry) for rule, (geometry, _) in others.items()]
        opened = _open_kv(stack, name, dtypes, model, kv, named, options)
        states, engines = None, {}
        if layout is not None:
            copier = StateCopier(layout.geometry, layout.planes)
            states = States(layout, copier, device, opened.cache, opened)
            stack.callback(states.close)
        for rule, each in others.items():
            engines[rule] = EngineKV(opened.cache, *each, beside=opened)
            stack.callback(engines[rule].close)
        made = Windows(opened, engines, states) if states is None or engines else states
        stack.pop_all()
    return made


def _open_kv(
    stack: contextlib.ExitStack,
    name: str | None,
    dtypes: str,
    model: str,
    kv: tuple[PageGeometry, DevicePlanes],
    others: Sequence[tuple[str, PageGeometry]],
    options: Mapping[str, Any],
) -> EngineKV:
    """The cache of these groups, and KV in it. The stack closes both.

    Args:
        dtypes: of states, for the fingerprint.
        others: the other groups by their names, from 1 on.
    """
    geometry, planes = kv
    words = " ".join(other.fingerprint() for _, other in others)
    decided: dict[str, Any] = {
        "page_bytes": geometry.page_bytes,
        "page_tokens": geometry.page_tokens,
        "model": model,
        "fingerprint": f"{model} {geometry.fingerprint()} {dtypes}{words}",
        "device": planes.device != "cpu",
        "kv_groups": (NAMES[0], *(what for what, _ in others)),
    }
    cache = open_decided("open_hybrid", name, decided, options)
    stack.callback(cache.close)
    for what, other in others:
        if waste := waste_of(what, geometry, other):
            _log.warning("cache %r: %s", cache.name, waste)
    opened = EngineKV(cache, geometry, planes)
    stack.callback(opened.close)
    return opened


def _check_kinds(
    parts: Parts | None, windows: Mapping[Rule, layouts.Tensors] | None, *of_states: object
) -> None:
    """Raises ConfigError: not one kind of groups beside KV, or none of a manager's."""
    if parts is None and not windows:
        raise ConfigError(
            "open_hybrid: expected tensors of states, or windows={rule: tensors}, found neither; a "
            "model of full attention alone has open_kv"
        )
    wrong = [rule for rule in windows or () if not is_window(rule)]
    if wrong:
        raise ConfigError(
            "open_hybrid: windows: expected Rule.window(tokens) or Rule.chunk(tokens), found "
            f"{wrong}"
        )
    if parts is None and any(each is not None for each in of_states):
        raise ConfigError("open_hybrid: index, slots and layers are of states; leave them out")


__all__ = [
    "Parts",
    "StateLayout",
    "States",
    "Windows",
    "create_slots",
    "open_hybrid",
    "open_states",
    "state_layout",
]
