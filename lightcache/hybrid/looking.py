"""Looking: how deep KV goes, and which checkpoint is the deepest within that. Pins nothing."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from lightcache._arguments import Keys
from lightcache.hybrid.planned import Edge, HybridPlan
from lightcache.hybrid.spaces import StateSpace, Tier
from lightcache.manager.lookups import peeked
from lightcache.manager.matches import PrefixMatch
from lightcache.manager.requests import NO_KEYS, Space

if TYPE_CHECKING:
    from lightcache.hybrid.manager import HybridManager


class Looker:
    """Looks for one `HybridManager`, whose lock is around every call."""

    def __init__(self, owner: HybridManager) -> None:
        """Nothing is looked for yet."""
        self._owner = owner

    def look(self, plan: HybridPlan) -> bool:
        """Choose a checkpoint. False: it is not known yet how deep KV goes; `look_behind` will say,
        when it is planned.

        The deepest checkpoint of all comes first. If KV's key that ends with it is there, all
        before it is, in a tier that evicts from the ends; and planning looks at that anyway, so
        nobody does before. Only where it is not, and where an engine evicts as it likes, KV is
        looked at from the beginning, and the deepest checkpoint within it is chosen.
        """
        owner, given, plan.ends = self._owner, plan.given, False
        if given is None and owner.owned:
            self.choose(plan, plan.most // owner.step)
            if plan.found is None or self._stands(plan):
                return False
        (plan.kv,) = owner.manager.peek_many(
            [plan.asked.prompt],
            wishes=[plan.asked.wishes],
            limits=[plan.asked.limit],
            device_tokens=None if given is None else [given],
        )
        self._looked(plan, given is None)
        self.choose(plan, plan.kv.usable // owner.step)
        return True

    def look_behind(self, request: Hashable, plan: HybridPlan) -> None:
        """How deep KV goes, of a plan just made: as far as that, and then by looking."""
        found: PrefixMatch | None = plan.planned
        if not self._ends_there(plan):
            found = self._owner.inner.behind(request, plan.asked.limit)
        plan.kv = plan.planned if found is None else found
        self._looked(plan, found is not None)

    def _looked(self, plan: HybridPlan, believed: bool) -> None:
        """Whether it is worth asking if it is still so. `edge` is found when that is asked."""
        plan.looked, plan.edge = believed and plan.space is not None, None

    def choose(self, plan: HybridPlan, most: int) -> None:
        """The deepest checkpoint among the first `most` positions."""
        plan.found = None
        if plan.path is not None and most:
            plan.found = self._owner.checkpoints.deepest(
                plan.path, most, tiers=plan.asked.wishes.tiers
            )

    def _stands(self, plan: HybridPlan) -> bool:
        """Whether the key of KV that ends where the checkpoint does is there; and notes whether the
        device has none behind it."""
        manager, space, asked = self._owner.manager, plan.space, plan.asked
        if space is None or plan.found is None:
            return False
        position, block = plan.found[1] * self._owner.step, manager.device.block_tokens
        for tier, index, where, spec, tokens in (
            ("device", manager.device.index, space.device, space.device_spec, block),
            ("host", manager.host.index, space.host, space.host_spec, manager.page_tokens),
        ):
            at = position // tokens
            if index is None or where is None or tier not in asked.wishes.tiers:
                continue
            if at * tokens != position:
                continue
            window = asked.prompt.keys(spec)[at - 1 : min(at + 1, plan.most // tokens)]
            found = index.peek(window, namespace=where)
            if found:
                plan.ends = found == 1 and tier == "device"
                return True
        return False

    def _ends_there(self, plan: HybridPlan) -> bool:
        """Whether KV ends where it was planned to, so that nothing is behind: the device has no
        more, as was seen, and the host neither."""
        position, space, index = plan.planned.device, plan.space, self._owner.manager.host.index
        if not plan.ends or space is None or position != plan.planned.usable:
            return False
        if plan.found is None or position != plan.found[1] * self._owner.step:
            return False
        tokens = self._owner.manager.page_tokens
        at = position // tokens
        if "host" not in plan.asked.wishes.tiers or at >= plan.most // tokens:
            return True
        return not index.peek(
            plan.asked.prompt.keys(space.host_spec)[at : at + 1], namespace=space.host
        )

    # ---- once more

    def changed(self, plans: list[HybridPlan]) -> list[bool]:
        """Of each whether its KV goes deeper or less deep than it did, its checkpoint has gone, or
        there is a deeper one."""
        changed = [not plan.looked or plan.stored.news for plan in plans]
        if not all(changed):
            self._other_kv(plans, changed)
            self._other_checkpoints(plans, changed)
        return changed

    def _other_kv(self, plans: list[HybridPlan], changed: list[bool]) -> None:
        manager = self._owner.manager
        asked = [i for i, other in enumerate(changed) if not other]
        for space in {plans[i].space for i in asked}:
            assert space is not None
            members = [i for i in asked if plans[i].space is space]
            edges = [self._edge_of(plans[i], space) for i in members]
            for index, where, windows, there in (
                (manager.device.index, space.device, [e.device for e in edges], 0),
                (manager.host.index, space.host, [e.host for e in edges], 1),
            ):
                if index is not None and where is not None:
                    found = peeked(index, windows, where)
                    for i, edge, count in zip(members, edges, found, strict=True):
                        changed[i] |= count != edge.there[there]

    def _other_checkpoints(self, plans: list[HybridPlan], changed: list[bool]) -> None:
        """The one that was found must be there, and none between it and the end of KV."""
        owner = self._owner
        groups: dict[tuple[StateSpace, Tier], list[tuple[int, Keys, int]]] = {}
        tiers = [tier for tier, _ in owner.checkpoints.tiers()]
        for i, plan in enumerate(plans):
            if plan.path is None:
                continue
            first = 0 if plan.found is None else plan.found[1]
            last = max(first, plan.kv.usable // owner.step)
            for tier in tiers:
                its = int(plan.found is not None and plan.found[0] is tier)
                if last > first - its and tier.value in plan.asked.wishes.tiers:
                    keys = plan.path.keys[first - its : last]
                    groups.setdefault((plan.path.space, tier), []).append((i, keys, its))
        for (space, tier), group in groups.items():
            found = owner.checkpoints.deepest_many([keys for _, keys, _ in group], space, tier)
            for (i, _, its), count in zip(group, found, strict=True):
                changed[i] |= count != its

    def _edge_of(self, plan: HybridPlan, space: Space) -> Edge:
        """Made when it is first asked for: a request that is taken at once needs none."""
        if plan.edge is None:
            kv, manager, (prompt, wishes, _) = plan.kv, self._owner.manager, plan.asked
            block, tokens = manager.device.block_tokens, manager.page_tokens
            device = host = NO_KEYS
            blocks, first = kv.device // block, kv.device // tokens
            pages = -(-(kv.device + kv.host) // tokens) - first if kv.host else 0
            if "device" in wishes.tiers and wishes.read:
                every = prompt.keys(space.device_spec)[: plan.most // block]
                device = every[max(0, blocks - 1) : blocks + 1]
            if "host" in wishes.tiers and wishes.read:
                every = prompt.keys(space.host_spec)[first : plan.most // tokens]
                host = every[max(0, pages - 1) : pages + 1]
            plan.edge = Edge(device, host, (min(blocks, 1), min(pages, 1)))
        return plan.edge


__all__ = ["Looker"]
