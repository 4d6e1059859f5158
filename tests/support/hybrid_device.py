"""A real hybrid model over slots of states and blocks of KV, as an engine runs it: tensors of the
CPU stand for those of a device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from lightcache.connectors.cache_layers import attention_layers, parts_of, set_parts, state_layers
from lightcache.connectors.trial import computed, forward
from lightcache.hybrid import StatePart, state_groups
from lightcache.hybrid.copiers import Section
from lightcache.kernels import KVGroup, PageGeometry, Shard, layouts


class ModelDevice:
    """What a model of gated delta nets reads and writes. One sequence a pass."""

    def __init__(self, model: Any, *, blocks: int, block: int, slots: int, page: int) -> None:
        """Nothing in it is anybody's.

        Args:
            block, page: tokens of a block, and of a page of the host.
            slots: of states.
        """
        self.model, self.block = model, block
        trial = computed(model, "cpu", (1, 2))
        self.attention, self.linear = attention_layers(trial), state_layers(trial)
        key = trial.layers[self.attention[0]].keys
        _, self.heads, _, self.dim = key.shape
        shape = blocks * block, self.heads, self.dim
        self.kv = {
            at: [torch.full(shape, 7.0, dtype=key.dtype) for _ in "kv"] for at in self.attention
        }
        self.states = {
            at: {
                name: torch.full((slots, *one.shape[1:]), 7.0, dtype=one.dtype)
                for name, one in parts_of(trial.layers[at]).items()
            }
            for at in self.linear
        }
        self._describe(page, key.element_size())

    def _describe(self, page: int, width: int) -> None:
        """Geometries and planes of both."""
        group = KVGroup.attention(
            "kv",
            layers=self.attention,
            heads=self.heads,
            head_dim=self.dim,
            dtype_bytes=width,
            page_tokens=page,
        )
        self.kv_geometry = PageGeometry([group])
        self.kv_planes = layouts.sglang(
            Shard(self.kv_geometry),
            "kv",
            {at: pair[0] for at, pair in self.kv.items()},
            {at: pair[1] for at, pair in self.kv.items()},
        )
        config, layers = self.model.config, len(self.linear)
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        sections = (
            Section("q", keys, config.linear_key_head_dim),
            Section("k", keys, config.linear_key_head_dim),
            Section("v", values, config.linear_value_head_dim),
        )
        parts = []
        for name, one in self.states[self.linear[0]].items():
            shape, bytes_ = tuple(one.shape[1:]), one.element_size()
            of = sections if name == "conv" else ()
            parts.append(StatePart(name, shape, bytes_, layers, sections=of))
        self.state_geometry = PageGeometry(state_groups(parts, self.linear))
        mine = Shard(self.state_geometry)
        conv, recurrent = (
            {at: self.states[at][name] for at in self.linear} for name in ("conv", "recurrent")
        )
        names = [f"conv_{each.name}" for each in sections]
        self.state_planes = layouts.join(
            layouts.convolution(mine, "state", names, conv, axes="tcr"),
            layouts.plane(mine, "state", "recurrent", recurrent, axes="thcc"),
        )

    def rows(self, table: Any, begin: int, end: int) -> torch.Tensor:
        """Where the KV of tokens [begin, end) is."""
        at = torch.arange(begin, end)
        first = torch.as_tensor(table, dtype=torch.long)[at // self.block] * self.block
        return first + at % self.block

    def run(
        self, ids: list[int], table: Any, begin: int, reads: int, writes: int, kept: int = 0
    ) -> torch.Tensor:
        """One forward pass over tokens [begin, begin + len(ids)) of a sequence: KV and state before
        them are read, those behind them written. Returns log-probabilities, (len(ids),
        vocabulary).

        Args:
            table: blocks of the sequence.
            reads, writes: slots.
            kept: tokens whose KV is there, and perhaps others': it is not written again.
        """
        past = DynamicCache(config=self.model.config)
        first = min(max(begin, kept), begin + len(ids))
        before, own = self.rows(table, 0, begin), self.rows(table, first, begin + len(ids))
        for at, pair in self.kv.items():
            if begin:
                past.layers[at].update(*(one[before].transpose(0, 1)[None] for one in pair))
        for at, parts in self.states.items():
            state = {name: one[reads][None].clone() for name, one in parts.items()}
            set_parts(past.layers[at], state)
        with torch.no_grad():
            found = forward(self.model, past, torch.tensor([ids]), begin).logits[0]
        for at, pair in self.kv.items():
            layer = past.layers[at]
            for one, all_ in zip(pair, (layer.keys, layer.values), strict=True):
                one[own] = all_[0, :, first:].transpose(0, 1)
        for at, parts in self.states.items():
            for name, one in parts_of(past.layers[at]).items():
                parts[name][writes] = one[0]
        return found.float().log_softmax(-1)

    def tokens_of(self, rows: torch.Tensor) -> dict[int, list[torch.Tensor]]:
        """KV of some rows, a copy."""
        return {at: [one[rows].clone() for one in pair] for at, pair in self.kv.items()}

    def put_tokens(self, rows: torch.Tensor, kv: dict[int, list[torch.Tensor]]) -> None:
        """Overwrite KV."""
        for at, pair in kv.items():
            for mine, one in zip(self.kv[at], pair, strict=True):
                mine[rows] = one

    def copy_of(self, slot: int) -> dict[tuple[int, str], torch.Tensor]:
        """A state, to be compared or put elsewhere."""
        return {
            (at, name): one[slot].clone()
            for at, parts in self.states.items()
            for name, one in parts.items()
        }

    def put(self, slot: int, state: dict[tuple[int, str], torch.Tensor]) -> None:
        """Overwrite a state."""
        for (at, name), one in state.items():
            self.states[at][name][slot] = one


__all__ = ["ModelDevice"]
