"""Speculative decoding on a HybridEngine: trees of drafted tokens in slots of their own, and drafts
that went into the working slot and were wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.hybrid_engine import HybridEngine, One

from lightcache.hybrid import Drafts
from lightcache.hybrid.saving import decode_saves


class Drafting:
    """Verifies a tree of drafted tokens in each step, of one request that was begun."""

    def __init__(self, engine: HybridEngine, parents: list[int], running: int) -> None:
        """The engine's spare slots are for drafts.

        Args:
            parents: of the nodes; see `Drafts`.
        """
        self.engine, self.parents = engine, parents
        first, drafted = engine.slots.pages, len(parents) - 1
        slots = np.arange(first, first + Drafts.room(running, drafted), dtype=np.int32)
        self.drafts = Drafts(slots, running=running, drafted=drafted)
        self.row = running - 1
        self.depth = [0]
        for parent in parents[1:]:
            self.depth.append(self.depth[parent] + 1)

    def run(self, request: int, expected: list[int], wrong: int) -> int:
        """Until `more` tokens are generated. Returns how many drafted tokens were rejected.

        Args:
            expected: what the model is going to say, from which drafts are made. The last node of
                each depth is the right one, but for every `wrong`-th.
        """
        engine, rejected, drafted = self.engine, 0, 0
        self.one = one = engine.running[request]
        while one.at < len(one.prompt):
            engine.step()
        while len(one.every) < len(one.prompt) + one.more:
            tokens = [one.every[-1]]
            for node in range(1, len(self.parents)):
                right = expected[one.at + self.depth[node]]
                last = node == max(n for n, d in enumerate(self.depth) if d == self.depth[node])
                drafted += last
                tokens.append(right if last and drafted % wrong else (right + node) % 128)
            rejected += max(self.depth) - self.verify(request, one, tokens)
        del one.every[len(one.prompt) + one.more :]
        return rejected

    def verify(self, request: int, one: One, tokens: list[int]) -> int:
        """One step: each node reads its parent's state and KV, and writes its own. Returns how many
        drafted tokens were accepted."""
        engine, drafts, parents = self.engine, self.drafts, self.parents
        store, begin = engine.store, one.at
        table = engine.hybrid.allocate(request, begin + max(self.depth) + 1)["prefix"].copy()
        reads = drafts.reads([self.row], parents, [one.slot])[0]
        writes = drafts.writes([self.row])[0]
        kv, found = [], []
        for node, token in enumerate(tokens):
            for each in self.branch(node)[:-1]:
                store.put_tokens(self.place(table, begin, each), kv[each])
            at = begin + self.depth[node]
            found.append(store.run([token], table, at, int(reads[node]), int(writes[node])))
            kv.append(store.tokens_of(self.place(table, begin, node)))
        accepted = self.accepted(tokens, found)
        for node in self.branch(accepted):
            store.put_tokens(self.place(table, begin, node), kv[node])
            one.scores.append(found[node])
        one.every += [tokens[node] for node in self.branch(accepted)[1:]]
        one.every.append(int(found[accepted][-1].argmax()))
        self.commit(request, one, accepted)
        return self.depth[accepted]

    def commit(self, request: int, one: One, accepted: int) -> None:
        """Copy the accepted node's state to the working slot; save what was crossed."""
        engine, drafts = self.engine, self.drafts
        begin, one.at = one.at, one.at + self.depth[accepted] + 1
        pairs = drafts.accept([self.row], [accepted], [one.slot])
        due = decode_saves(engine.grid, [begin], [one.at])
        for position, behind in zip(due.positions.tolist(), due.behind, strict=True):
            slot = engine.hybrid.saving(request, position)
            node = int(drafts.ancestors(self.parents, [accepted], np.array([behind]))[0])
            if slot is not None:
                source = drafts.writes([self.row])[0][node]
                pairs = np.concatenate([pairs, np.array([[source, slot]], np.int32)])
        engine.stream.copy(pairs[:, 0], pairs[:, 1])
        fresh = np.array(one.every[one.told : one.at], np.int64)
        engine.hybrid.commit(request, one.at, new_tokens=fresh)
        one.told = one.committed = one.at
        for position in due.positions.tolist():
            engine.hybrid.saved(request, position)
        engine.hybrid.poll()

    def accepted(self, tokens: list[int], found: list[torch.Tensor]) -> int:
        """The last node whose branch is what the model says."""
        node = 0
        while True:
            said = int(found[node][-1].argmax())
            right = [
                child
                for child, parent in enumerate(self.parents)
                if parent == node and tokens[child] == said
            ]
            if not right:
                return node
            node = right[0]

    def branch(self, node: int) -> list[int]:
        """Nodes from 0 to this one."""
        found = [node]
        while found[0]:
            found.insert(0, self.parents[found[0]])
        return found

    def place(self, table: Any, begin: int, node: int) -> torch.Tensor:
        """Row of a node's KV."""
        at = begin + self.depth[node]
        return self.engine.store.rows(table, at, at + 1)


def drafted_wrongly(engine: HybridEngine, request: int, accepted: int, *, until: int) -> One:
    """Passes over tokens up to `until`, of which only the first `accepted` count: those behind them
    were drafted, and are wrong. The request goes back to a state that was saved."""
    one = engine.running[request]
    engine.results(request, one, left=0)
    while one.at < until:
        if one.at == accepted:
            one.every[accepted] = (one.every[accepted] + 1) % 128
        # With one slot beside the working one, a draft's state would be written over the last good
        # one.
        engine.launch(request, one, save=engine.ahead or one.at < accepted)
        step = one.flying.popleft()
        engine.stream.finish()
        if step.end <= accepted:  # the others are results of drafts: nothing is committed
            one.flying.append(step)
            engine.results(request, one, left=0)
        elif step.position is not None:
            engine.hybrid.saved(request, step.position)
    found = engine.hybrid.reject(request, accepted)
    assert found is not None
    engine.stream.copy(np.array([found.slot], np.int32), np.array([one.slot], np.int32))
    one.at = found.position
    begin = one.match.usable
    rows = torch.cat(one.scores)[: accepted - begin]
    one.scores = [rows[: one.at - begin]]
    one.every = [*one.every[:accepted], int(rows[-1].argmax())]
    return one


__all__ = ["Drafting", "drafted_wrongly"]
