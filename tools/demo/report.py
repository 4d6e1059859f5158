"""The report: watches a run, kills a worker in it, has the results checked, and tells."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import lightcache
from lightcache.shm.listing import list_segments
from lightcache.tools.demo.messages import (
    Finished,
    Hello,
    Holding,
    Lost,
    Mailbox,
    Recovered,
    Served,
    Verified,
    Verify,
)
from lightcache.tools.demo.settings import SECRET, STATES, Settings
from lightcache.tools.demo.show import Show
from lightcache.tools.demo.stage import Stage
from lightcache.tools.demo.summary import Outcome, sample

_SAMPLE = 8  # turns that are computed again


class Report:
    """One run, from its beginning to its verdict."""

    def __init__(self, settings: Settings, show: Show) -> None:
        """Nothing is started yet."""
        self.settings, self.show = settings, show
        self.outcome = Outcome(
            wanted_turns=settings.make_workload().total,
            wanted_kill=settings.hold_at is not None,
            storage=settings.storage,
        )
        self.stage = Stage(settings)
        self.caches: dict[str, lightcache.Cache] = {}
        self._stack = contextlib.ExitStack()

    def run(self) -> Outcome:
        """All of it. Blocks.

        Raises:
            RunFailed: some process could not go on.
        """
        began = time.monotonic()
        with self.show, self.stage, self._stack:
            self.show.status("starting: a router and workers, each with a model of its own")
            self._watch()
            self._judge()
            self.show.finish()
        prefix = f"{self.settings.run}-"
        self.outcome.left = [info.name for info in list_segments() if info.name.startswith(prefix)]
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _watch(self) -> None:
        """Until every turn is answered, and a worker that was killed has its successor."""
        handlers: dict[type, Any] = {
            Hello: self._on_hello,
            Served: self._on_served,
            Recovered: self._on_recovered,
        }
        finished = False
        missing: set[int] = set()  # workers; each may die again before it has said anything
        for event in self.stage.events():
            if isinstance(event, Holding):
                self.outcome.holding = event
                self.show.say(
                    f"worker {event.worker} has copied {event.copied} of {event.pages} pages of "
                    f"turn {event.number}: killing it (SIGKILL)",
                    "yellow",
                )
                self.stage.kill(event.worker, event.life)
            elif isinstance(event, Lost):
                missing.add(event.worker)
            elif isinstance(event, Finished):
                finished, self.outcome.lookup_us = True, event.lookup_us
            else:
                if isinstance(event, Hello):
                    missing.discard(event.worker)
                handlers[type(event)](event)
            if finished and not missing:
                return

    def _on_hello(self, hello: Hello) -> None:
        again = "again " if hello.life else ""
        seconds = self.stage.age(hello.worker, hello.life)
        self.show.status(
            f"worker {hello.worker} is there {again}(pid {hello.pid}, after {seconds:.1f} s)"
        )
        if hello.life:
            self.outcome.successor_s = self.outcome.successor_s or seconds
            self.outcome.successors.append(hello)
        if hello.cache is not None and hello.cache not in self.caches:
            if self.settings.model.hybrid:
                self._attach(f"{hello.cache}{STATES}")
            self._attach(hello.cache)

    def _attach(self, name: str) -> None:
        self.caches[name] = self._stack.enter_context(
            lightcache.Cache.attach(name, secret=SECRET, role="report", grow=False)
        )

    def _on_served(self, turn: Served) -> None:
        self.outcome.turns.append(turn)
        self.show.add(turn)

    def _on_recovered(self, found: Recovered) -> None:
        self.outcome.recovered.append(found)
        self.show.say(
            f"worker {found.worker} is dead: {found.doomed} pages were doomed, and can be used "
            f"again after {found.seconds * 1e3:.0f} ms",
            "yellow",
        )

    def _judge(self) -> None:
        """Check the cache, and compute a sample of the turns again."""
        self.show.status("checking the cache: every invariant, derived again")
        for cache in self.caches.values():
            self.outcome.check = cache.check()
            self.outcome.checked += 1
            if not self.outcome.check.clean:
                break
        chosen = sample(self.outcome.turns, _SAMPLE)
        self.outcome.wanted_verified = len(chosen)
        if not chosen:
            return
        self.show.status(f"computing {len(chosen)} turns again, in a fresh process without a cache")
        self.stage.start("reference")
        with Mailbox(self.settings.reference_ring) as reference:
            # One by one: all at once may not fit into the ring while the reference loads its model.
            waiting = [
                Verify(turn.number, turn.prompt, turn.logprobs, tokens=turn.tokens)
                for turn in reversed(chosen)
            ]
            reference.send(waiting.pop())
            for event in self.stage.events():
                if not isinstance(event, Verified):
                    continue
                self.outcome.verified.append(event)
                if not waiting:
                    return
                reference.send(waiting.pop())
