"""How much of what was found a request can use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightcache.manager.matches import PrefixMatch, Why
from lightcache.manager.planned import Planned
from lightcache.manager.prompts import Prompt

if TYPE_CHECKING:
    from lightcache.costs import Costs
    from lightcache.manager.manager import KVCacheManager


class Usable:
    """What the costs say is worth loading, and no item cut in two."""

    def __init__(self, manager: KVCacheManager, costs: Costs | None) -> None:
        """`costs`: None: everything is worth it."""
        self._manager, self._costs = manager, costs

    def of(self, plan: Planned, device: int, found: int) -> tuple[int, Why, Any]:
        """Usable tokens of so many that were found, so many of them on the device; why they are
        fewer, and the item that would have been cut."""
        prompt, wishes, _ = plan.asked
        if not wishes.read:
            return 0, Why.WISHES, None
        if plan.space is None:
            return 0, Why.WEIGHTS, None
        usable, why = found, Why.NOTHING
        if usable > device and not self._worth_loading(usable - device):
            usable, why = device, Why.BREAK_EVEN
        cut = prompt.cut_item(usable) if prompt.items else None
        if cut is None:
            return usable, why, None
        usable = self._uncut(prompt, usable, device)
        if device < usable and not self._worth_loading(usable - device):
            usable = self._uncut(prompt, device, device)
        return usable, Why.ITEM, cut

    def without_host(self, prompt: Prompt, match: PrefixMatch) -> int:
        """Tokens that are usable of a match if nothing is loaded."""
        return self._uncut(prompt, min(match.usable, match.device), match.device)

    def _uncut(self, prompt: Prompt, usable: int, device: int) -> int:
        """The last boundary that cuts no item. The one before an item may lie in another."""
        while (cut := prompt.cut_item(usable)) is not None:
            usable = self._before(cut.start, device)
        return usable

    def _before(self, position: int, device: int) -> int:
        """The last boundary not beyond a position: of a block on the device, of a page on the
        host."""
        block, tokens = self._manager.device.block_tokens, self._manager.page_tokens
        on_device = min(position, device) // block * block
        if position <= device:
            return on_device
        return max(on_device, position // tokens * tokens)

    def _worth_loading(self, tokens: int) -> bool:
        least = self._manager.config.min_load_tokens
        if least is not None:
            return tokens >= least
        pages = -(-tokens // self._manager.page_tokens)
        return self._costs is None or bool(self._costs.worth_loading(pages))


__all__ = ["Usable"]
