"""Run as a program: an engine of a hybrid model beside others, which is to be killed.

hybrid_side.py NAME STAGE    serves PROMPT, goes on until it has reached STAGE, says so, and stops.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from support.hybrid_case import HybridWorld, tokens

from lightcache.manager import Prompt, WritePolicy

PROMPT = Prompt(tokens(42))
LONGER = Prompt([*PROMPT.tokens, *tokens(30, 1)])
NEXT = Prompt([*LONGER.tokens, 1])
SHAPE: dict[str, Any] = {"slots": 8, "state_pages": 12, "blocks": 40, "pages": 60}
STAGES = {
    # How deep another process hits NEXT then: 72 is where LONGER ends.
    "plan": 40,
    "take": 40,
    "restore: a copy": 40,
    "restore: a load": 40,
    "commit": 40,
    "donate: before its name": 40,
    "donate: named": 40,
    "donate: read by the host": 40,
    "offload": 40,
    "demote": 40,
    "published": 72,
}


def stop(*_: Any, **__: Any) -> None:
    """Here it is killed."""
    print("here", flush=True)
    sys.stdin.read()
    raise SystemExit("nobody killed us")


class Side:
    """The engine."""

    def __init__(self, name: str) -> None:
        self.world = HybridWorld(f"{name}.side", shared=name, **SHAPE)
        self.world.run("first", PROMPT)

    def plan(self, _: str) -> None:
        """Pins in every index are tentative."""
        self.world.slots.evict(8)  # type: ignore[union-attr]
        assert self.world.plan(LONGER).usable == 40
        stop()

    def take(self, _: str) -> None:
        """They are a request's."""
        self.world.plan(LONGER)
        self.world.hybrid.take("plan")
        stop()

    def restore(self, what: str) -> None:
        """The working slot is written."""
        world = self.world
        if what == "a load":
            world.slots.evict(8)  # type: ignore[union-attr]
            world.backend._load = stop  # type: ignore[union-attr, method-assign]
        else:
            world.copier.at_once = False
        world.plan(LONGER, "a")
        world.hybrid.take("a")
        world.hybrid.restore(["a"])
        stop()

    def computed(self) -> None:
        """LONGER, and its KV is committed."""
        world = self.world
        world.begin("a", LONGER)
        world.step("a", len(LONGER), save=False)

    def commit(self, _: str) -> None:
        """KV is there, and no state."""
        self.computed()
        stop()

    def donate(self, what: str) -> None:
        """A state becomes a checkpoint."""
        world, slots = self.world, self.world.slots
        assert slots is not None
        world.begin("a", LONGER)
        world.step("a", 72, save=False)
        name = slots.name_pages

        def named(*args: Any, **how: Any) -> None:
            if what == "named":
                name(*args, **how)
            stop()

        if what == "read by the host":
            world.backend.at_once = False  # type: ignore[union-attr]
        else:
            slots.name_pages = named  # type: ignore[method-assign, assignment]
        world.end("a")
        stop()

    def half(self, moving: Any) -> None:
        """A state is written to the host in part."""
        assert self.world.states is not None
        page = int(moving.held.pages[0])
        np.frombuffer(memoryview(self.world.states.pool[page]).cast("B"), np.uint8)[:4] = 7
        stop()

    def offload(self, _: str) -> None:
        """See `half`."""
        world = self.world
        world.begin("a", LONGER)
        world.step("a", 72, save=False)
        world.backend._offload = self.half  # type: ignore[union-attr, method-assign]
        world.end("a")

    def demote(self, _: str) -> None:
        """The same of what the device has no room for."""
        world = self.world
        world.checkpoints.write = WritePolicy.BACK
        world.begin("a", LONGER)
        world.step("a", 72, save=False)
        world.end("a")
        world.backend._offload = self.half  # type: ignore[union-attr, method-assign]
        world.checkpoints.demote(8)

    def published(self, _: str) -> None:
        """Everything is there, and it dies a moment later."""
        world = self.world
        world.begin("a", LONGER)
        world.step("a", 72, save=False)
        world.end("a")
        world.settle()
        stop()


def main() -> None:
    """See above."""
    name, stage = sys.argv[1:]
    verb, _, what = stage.partition(": ")
    getattr(Side(name), verb)(what)
    raise SystemExit(f"{stage}: it was not reached")


if __name__ == "__main__":
    main()
