"""Run as a program: a rank of an engine with windows, which is to be killed.

window_rank_side.py CACHE LOG STAGE    follows orders; at the first copy of a window, of the kind of
                                       STAGE, says so and stops.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from support.window_engine import SECRET, AtOnce, WindowRank

from lightcache import Cache
from lightcache.errors import Abandoned
from lightcache.groups import Rule

RULES = (Rule.window(11), Rule.chunk(24))
SHAPE: dict[str, Any] = {
    "rules": RULES,
    "page": 8,
    "block": 4,
    "blocks": 64,
    "window_blocks": 64,
}


class Doomed(AtOnce):
    """Stops at a copy."""

    stops = ""

    def load(self, lease: Any, slots: Any, first: int) -> Any:
        """See `RankBackend`."""
        self._stop("load")
        return super().load(lease, slots, first)

    def offload(self, new: Any, slots: Any, **how: Any) -> Any:
        """See `RankBackend`."""
        self._stop("offload")
        return super().offload(new, slots, **how)

    def _stop(self, kind: str) -> None:
        if self.stops == kind:
            print("here", flush=True)
            signal.pause()


if __name__ == "__main__":
    with Cache.attach(sys.argv[1], secret=SECRET, role="rank 1") as cache:
        rank = WindowRank(cache, 1, 2, SHAPE, Doomed)
        rank.backends[1].stops = sys.argv[3]
        worker = rank.join(sys.argv[2])
        print(*cache.client_id, flush=True)
        try:
            while True:
                worker.step(60)
                worker.drain(60)
        except Abandoned:
            raise SystemExit("the kill did not come") from None
