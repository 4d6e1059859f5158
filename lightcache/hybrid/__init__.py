"""Models whose layers do not all keep every token: recurrent states, windows and chunks beside the
KV of full attention (`HybridManager`). docs/hybrid.md has pictures, and a scheduler's loop."""

from lightcache.hybrid.checkpoints import Checkpoints
from lightcache.hybrid.copiers import StatePart, gated_delta_parts, state_groups
from lightcache.hybrid.manager import HybridManager
from lightcache.hybrid.opening import open_hybrid, open_states
from lightcache.hybrid.saving import Drafts, Features, Grid, HybridConfig, RequestSlots
from lightcache.hybrid.tables import state_block_tables
from lightcache.hybrid.window_blocks import WindowBlocks

__all__ = [
    "Checkpoints",
    "Drafts",
    "Features",
    "Grid",
    "HybridConfig",
    "HybridManager",
    "RequestSlots",
    "StatePart",
    "WindowBlocks",
    "gated_delta_parts",
    "open_hybrid",
    "open_states",
    "state_block_tables",
    "state_groups",
]
