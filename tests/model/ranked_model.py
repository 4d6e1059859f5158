"""A page index whose order of eviction is what it has learned: which page goes is not predicted."""

from __future__ import annotations

from model.index_model import Model, Page, Violation


class RankedModel(Model):
    """As many go as are needed, each one that may: a leaf, ready, not kept, pinned, used by this
    call, or promised."""

    by_age = False

    def evict_oldest(self, gone: set[Page], count: int, since: int, now: int) -> int:
        """Forget `count` of the pages in `gone`, which may be more: of several batches."""
        for _ in range(count):
            may = [p for p in gone if self.queued(p) and self.removable(p, since)]
            if not may:
                raise Violation(f"{count} pages had to go, of {gone} none may")
            page = min(may, key=lambda page: page.number)
            self.forget(page)
            gone.discard(page)
        return now
