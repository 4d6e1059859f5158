"""Run as a program: an engine with windows beside others, which is to be killed.

windows_side.py NAME STAGE    serves PROMPT until it has reached STAGE, says so, and stops.
windows_side.py NAME SEED     serves prompts at random, says so after each step, and does not end.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from support.storing import Recorder
from support.window_engine import AtOnce, LateBackend, OutOfPages, WindowEngine

from lightcache import Cache
from lightcache.groups import Rule
from lightcache.manager import Prompt, WritePolicy
from lightcache.storage import StorageSpec, StorageTier

RULES = (Rule.window(11), Rule.chunk(24))
SHAPE: dict[str, Any] = {"blocks": 48, "window_blocks": 32, "pages": 120, "every": 40}
PROMPT = [i * 7 % 50 + 1 for i in range(60)]
LONGER = [*PROMPT, *[i * 11 % 50 + 1 for i in range(30)]]
NEXT = [*LONGER, 1]
PROMPTS = [[*PROMPT[: 12 * i], *[i + 1] * 20] for i in range(6)]
STAGES = {
    # How deep another process hits NEXT then: 88 is the last position of LONGER.
    "plan": 56,
    "take": 56,
    "load": 56,
    "prefill": 56,
    "saving": 56,
    "saved KV alone": 56,
    "saved one window": 56,
    "published": 88,
    "writing back": 0,
    "written back one window": 0,
    "written back": 88,
    "reading from storage": 0,
}


def gated(cache: Cache) -> StorageTier:
    """It waits in front of a read."""
    storage = Recorder(StorageSpec.of(cache))
    storage.closed_gate_for = "read"
    storage.gate.clear()
    return StorageTier(cache, storage, write_pages=cache.pages)


class Side:
    """The engine."""

    def __init__(self, name: str, wrap: Any, storage: Any = None, back: bool = False) -> None:
        write = WritePolicy.BACK if back else WritePolicy.THROUGH
        how = {"wrap": wrap, "storage": storage, "write": write, "low_water": 0.0, **SHAPE}
        self.engine = WindowEngine(f"{name}.side", RULES, host=name, **how)

    def write_back(self, finished: int) -> None:
        """So many of KV and the windows have been written back, the others are being written."""
        engine = self.engine
        engine.run(LONGER, 0)
        assert not any(backend.going for backend in engine.backends)
        assert engine.manage.demote(64) > 0
        for back in engine.manage.parts.windows._backs.values():
            assert back.demote(64) > 0
        assert all(backend.going for backend in engine.backends)
        for backend in engine.backends[:finished]:
            backend.finish()
        engine.manage.poll()

    def reach(self, stage: str) -> None:
        """Come as far as that."""
        engine = self.engine
        if "back" in stage:
            self.write_back({"writing back": 0, "written back one window": 2}.get(stage, 3))
            return
        engine.run(PROMPT, 0)
        engine.settle()
        engine.forget_device()
        if stage == "reading from storage":
            assert engine.tier._executor.wait_idle(60.0)
            engine.host.index.evict(1000)
            assert engine.manage.plan("a", Prompt(LONGER)).pending
            assert engine.tier.storage.arrived.acquire(timeout=60.0)
            return
        if stage == "plan":
            assert engine.manage.plan("a", Prompt(LONGER)).usable == 56
            return
        request = engine.begin(LONGER, 0)
        if stage == "take":
            return
        engine.step(request)
        if stage == "load":
            return
        engine.settle()
        if stage == "prefill":
            engine.step(request, 13)
            return
        while engine.step(request):
            pass
        assert all(backend.going for backend in engine.backends)
        finished = {"saving": 0, "saved KV alone": 1, "saved one window": 2}.get(stage, 3)
        for backend in engine.backends[:finished]:
            backend.finish()
        engine.manage.poll()

    def serve(self, draw: random.Random) -> None:
        """One step after the other, for good."""
        engine = self.engine
        while True:
            if len(engine.running) < 2:
                engine.begin(draw.choice(PROMPTS), draw.randint(0, 9))
            request = draw.choice(list(engine.running))
            try:
                if not engine.step(request, draw.choice([3, 20])):
                    engine.end(request)
            except OutOfPages:
                engine.end(request)
            if draw.random() < 0.2:
                engine.forget_device()
            engine.manage.poll()
            print("step", flush=True)


if __name__ == "__main__":
    if sys.argv[2] in STAGES:
        storage = gated if sys.argv[2] == "reading from storage" else None
        Side(sys.argv[1], LateBackend, storage, "back" in sys.argv[2]).reach(sys.argv[2])
        print("here", flush=True)
        sys.stdin.read()
        raise SystemExit("the kill did not come")
    Side(sys.argv[1], AtOnce).serve(random.Random(int(sys.argv[2])))
