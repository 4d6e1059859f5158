"""Hybrid models: checkpoints of recurrent state beside the KV of attention layers. See
`HybridManager`; docs/hybrid.md has pictures, and a scheduler's loop."""

from lightcache.hybrid.checkpoints import Checkpoints
from lightcache.hybrid.config import HybridConfig
from lightcache.hybrid.copiers import ArrayCopier, Copying, StateCopier
from lightcache.hybrid.device import create_slots
from lightcache.hybrid.drafts import Drafts
from lightcache.hybrid.features import Features
from lightcache.hybrid.grids import Grid
from lightcache.hybrid.manager import HybridManager
from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.opening import StateLayout, States, open_states, state_layout
from lightcache.hybrid.parts import (
    Section,
    StatePart,
    gated_delta_parts,
    state_bytes,
    state_groups,
)
from lightcache.hybrid.restoring import HybridFetch, Restored
from lightcache.hybrid.saving import (
    DecodeSaves,
    SavePlan,
    SavePolicy,
    Saves,
    Stretch,
    decode_saves,
)
from lightcache.hybrid.sizing import Load, Split, best_split, check_split
from lightcache.hybrid.slots import RequestSlots, Rest, Saved
from lightcache.hybrid.spaces import Tier
from lightcache.hybrid.statistics import CheckpointStats
from lightcache.hybrid.tables import (
    Capacity,
    StateBlocks,
    StateTables,
    capacity,
    state_block_tables,
)
from lightcache.hybrid.workloads import Reuse, Workload, paths_of, reuse_of

__all__ = [
    "ArrayCopier",
    "Capacity",
    "CheckpointStats",
    "Checkpoints",
    "Copying",
    "DecodeSaves",
    "Drafts",
    "Features",
    "Grid",
    "HybridConfig",
    "HybridFetch",
    "HybridManager",
    "HybridMatch",
    "Load",
    "RequestSlots",
    "Rest",
    "Restored",
    "Reuse",
    "SavePlan",
    "SavePolicy",
    "Saved",
    "Saves",
    "Section",
    "Split",
    "StateBlocks",
    "StateCopier",
    "StateLayout",
    "StatePart",
    "StateTables",
    "States",
    "Stretch",
    "Tier",
    "Workload",
    "best_split",
    "capacity",
    "check_split",
    "create_slots",
    "decode_saves",
    "gated_delta_parts",
    "open_states",
    "paths_of",
    "reuse_of",
    "state_block_tables",
    "state_bytes",
    "state_groups",
    "state_layout",
]
