"""Models whose layers do not all keep every token: recurrent states, windows and chunks beside the
KV of full attention (`HybridManager`). docs/hybrid.md has pictures, and a scheduler's loop."""

from lightcache.hybrid.checkpoints import Checkpoints, CheckpointStats
from lightcache.hybrid.copiers import StatePart, gated_delta_parts, state_groups
from lightcache.hybrid.manager import HybridGauges, HybridManager
from lightcache.hybrid.opening import open_hybrid, open_states
from lightcache.hybrid.requests import HybridLoadHandle, HybridMatch
from lightcache.hybrid.saving import Drafts, Features, Grid, HybridConfig, RequestSlots, SavePolicy
from lightcache.hybrid.tables import state_block_tables
from lightcache.hybrid.window_blocks import WindowBlocks
from lightcache.hybrid.windows import WindowStats

__all__ = [
    "CheckpointStats",
    "Checkpoints",
    "Drafts",
    "Features",
    "Grid",
    "HybridConfig",
    "HybridGauges",
    "HybridLoadHandle",
    "HybridManager",
    "HybridMatch",
    "RequestSlots",
    "SavePolicy",
    "StatePart",
    "WindowBlocks",
    "WindowStats",
    "gated_delta_parts",
    "open_hybrid",
    "open_states",
    "state_block_tables",
    "state_groups",
]
