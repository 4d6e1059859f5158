"""Run as a program: one data-parallel rank with a manager, an own device and the shared host cache.

manager_side.py NAME RANK SEED STAGE    lives at random until it is told what to do, by lines:

live        random steps until the next line; "." for each ten of them
stage       goes on until it has reached STAGE, says what it was about to do, and stops for good
update V    serves other weights
tell        the prompts it knows, as JSON
leave       ends everything, looks whether anything is left, leaves
"""

from __future__ import annotations

import itertools
import json
import select
import sys
from io import FileIO
from typing import Any

from support.manager_case import open_cache
from support.manager_life import Life
from support.manager_world import Engine
from support.stamped import StampedMoving

from lightcache.leases import Allocation
from lightcache.manager import Prompt, WeightsState, WritePolicy

BLOCK, PAGE, BLOCKS, PAGES = 2, 4, 40, 48
STAGES = [
    "plan",
    "take",
    "load",
    "offload",
    "demote",
    "release",
    "update: a tenant cleared",
    "update: the host cleared",
]


def say(what: str) -> None:
    """One line."""
    print(what, flush=True)


def stop(*_: Any, **__: Any) -> None:
    """Here it is killed."""
    say("here")
    sys.stdin.read()
    raise SystemExit("nobody killed us")


class Side:
    """The rank."""

    def __init__(self, name: str, rank: str, seed: str) -> None:
        # Unbuffered: `select` does not see a line that has been read ahead.
        self.orders = FileIO(0, closefd=False)
        self.cache = open_cache(name, PAGES, PAGE)
        policy = WritePolicy.BACK if int(rank) % 2 else WritePolicy.THROUGH
        self.engine = Engine(
            f"{name}.{rank}",
            owned=True,
            blocks=BLOCKS,
            block=BLOCK,
            page=PAGE,
            pages=PAGES,
            cache=self.cache,
            write=policy,
            write_group=1,
        )
        self.life = Life(self.engine, int(seed), without=("update", "protect"))

    def look(self) -> None:
        """What an engine does that another one's update has reached."""
        if self.engine.manager.weights_state not in (WeightsState.NORMAL, WeightsState.UPDATING):
            self.engine.update(self.engine.weights + 1)

    def live(self) -> None:
        """See above."""
        steps = 0
        while not select.select([self.orders], [], [], 0)[0]:
            self.look()
            self.life.step()
            steps += 1
            if steps % 10 == 0:
                self.life.check()
                say(".")

    def stage(self, stage: str) -> None:
        """See above."""
        life, engine = self.life, self.engine
        for _ in range(100):
            life.step()
        life.over()
        while engine.running:
            life.end()
        engine.backend.finish()
        engine.backend.at_once, engine.backend.fail_next = True, 0
        engine.skip_load_next = False
        engine.manager.poll()
        getattr(self, "stage_" + stage.partition(":")[0])(stage)
        raise SystemExit(f"{stage}: it was not reached")

    def _found(self) -> Prompt:
        """A prompt of which the device has a part, and the host more. The other ranks may evict all
        of it from the host before it is planned; then another prompt is tried."""
        for begin in itertools.count(100, 1000):
            prompt = list(range(begin, begin + 30))
            self.engine.begin(-1, Prompt(prompt))
            self.engine.compute(-1, 30, [])
            self.engine.end(-1, publish=True)
            self.engine.manager.demote(BLOCKS)
            longer = Prompt([*prompt, 1, 2, 3])
            if self.engine.manager.plan(-2, longer).host:
                return longer
            self.engine.manager.cancel(-2)
        raise AssertionError

    def stage_plan(self, _: str) -> None:
        """Pins of both kinds are tentative."""
        self._found()
        stop()

    def stage_take(self, _: str) -> None:
        """They are a request's."""
        self._found()
        self.engine.manager.take(-2)
        stop()

    def stage_load(self, _: str) -> None:
        """Half of what the host has is on the device."""
        prompt = self._found()

        def half(moving: StampedMoving) -> None:
            wanted = moving.slots[moving.slots >= 0]
            self.engine.store.slots[wanted[::2]] = 7
            stop()

        self.engine.backend._load = half  # type: ignore[method-assign]
        self.engine.begin(-2, prompt)

    def _half_written(self, moving: StampedMoving) -> None:
        self.cache.pool[int(moving.held.pages[0])].reshape(-1)[:8] = 7
        stop()

    def stage_offload(self, _: str) -> None:
        """Half of a page is on the host."""
        self.engine.manager.config.__dict__["write"] = WritePolicy.THROUGH
        self.engine.backend._offload = self._half_written  # type: ignore[method-assign]
        self.engine.begin(-1, Prompt(list(range(200, 230))))
        self.engine.compute(-1, 30, [])

    def stage_demote(self, _: str) -> None:
        """The same of what the device has no room for."""
        self.engine.manager.config.__dict__["write"] = WritePolicy.BACK
        self.engine.begin(-1, Prompt(list(range(200, 230))))
        self.engine.compute(-1, 30, [])
        self.engine.end(-1, publish=True)
        self.engine.backend._offload = self._half_written  # type: ignore[method-assign]
        self.engine.manager.demote(BLOCKS)

    def stage_release(self, _: str) -> None:
        """Named blocks are given back, those without a name are not."""
        self._found()
        self.engine.manager.cancel(-2)
        self.engine.begin(-3, Prompt(list(range(300, 331))))
        self.engine.compute(-3, 31, [])
        Allocation._end = lambda _: stop()  # type: ignore[method-assign]
        self.engine.manager.release(-3)

    def stage_update(self, stage: str) -> None:
        """One tier has forgotten, the other has not; or one namespace of several."""
        self._found()
        self.engine.begin(-4, Prompt(list(range(20)), tenant="t"))
        if stage == STAGES[-1]:
            self.engine.device.clear_weights = stop  # type: ignore[method-assign]
        else:
            clear = self.cache.clear

            def first(space: Any) -> None:
                clear(space)
                stop()

            self.cache.clear = first  # type: ignore[method-assign]
        self.engine.manager.begin_update()

    def tell(self) -> None:
        """See above."""
        say(
            json.dumps(
                [
                    [
                        each.tokens.tolist(),
                        [[item.start, item.end, item.digest[0]] for item in each.items],
                        each.tenant,
                    ]
                    for each in self.life.known
                ]
            )
        )

    def leave(self) -> None:
        """See above."""
        life, engine = self.life, self.engine
        self.look()
        life.over()
        while engine.running:
            life.end()
        engine.backend.finish()
        engine.manager.poll()
        life.check()
        engine.backend.finish()
        engine.manager.lookup.close()
        index = engine.device.index
        assert index is not None
        found = index.stats()
        assert (found.held, index.check().pins) == (0, 0), (found, index.check())
        assert index.check().clean, index.check().message
        engine.close()
        self.cache.close()


def main(arguments: list[str]) -> None:
    """See above."""
    name, rank, seed, stage = arguments
    side = Side(name, rank, seed)
    say("ready")
    for line in side.orders:
        order, _, argument = line.decode().strip().partition(" ")
        if order == "stage":
            side.stage(stage)
        elif order == "update":
            side.engine.update(int(argument))
            say("updated")
        elif order == "stop":
            say("stopped")
        else:
            getattr(side, order)()
        if order == "leave":
            say("left")
            return


if __name__ == "__main__":
    main(sys.argv[1:])
