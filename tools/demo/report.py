"""The report: watches a run, kills a worker in it, has the results checked, and tells."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightcache
from lightcache.shm.listing import list_segments
from lightcache.tools.demo.again import write_again
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
from lightcache.tools.demo.models import preflight
from lightcache.tools.demo.scratch import Scratch
from lightcache.tools.demo.settings import SECRET, STATES, Settings
from lightcache.tools.demo.show import Show
from lightcache.tools.demo.stage import Stage
from lightcache.tools.demo.summary import Outcome, sample

_SAMPLE = 8  # turns that are computed again
_AGAIN = 4  # conversations that go on behind a restart; all of their turns are computed again


class Report:
    """One run, from its beginning to its verdict."""

    def __init__(self, settings: Settings, show: Show, scratch: Scratch | None = None) -> None:
        """Nothing is started yet.

        Args:
            scratch: where to keep what is asked behind a restart; None: there is none.
        """
        self.settings, self.show, self.scratch = settings, show, scratch
        self.outcome = Outcome(
            wanted_turns=settings.make_workload().total,
            wanted_kill=settings.hold_at is not None,
            wanted_restart=scratch is not None,
            storage=settings.storage,
        )
        self.stage = Stage(settings)
        self.caches: dict[str, lightcache.Cache] = {}
        self._stack = contextlib.ExitStack()
        self._turns = self.outcome.turns

    def run(self) -> Outcome:
        """All of it. Blocks.

        Raises:
            RunFailed: some process could not go on.
        """
        began = time.monotonic()
        with self.show:
            with self.stage, self._stack:
                self.show.status("starting: a router and workers, each with a model of its own")
                self._watch()
                self._check()
                if self.scratch is None:
                    self._compare(sample(self.outcome.turns, _SAMPLE))
            self._look_for_what_is_left()
            if self.scratch is not None:
                self._restart(self.scratch.path / "turns.json")
            self.show.finish()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _restart(self, path: Path) -> None:
        """Everything anew, with what is stored, and some conversations go on. What the reference
        computes again is of both lives: it loads its model once."""
        outcome, before = self.outcome, self.settings
        outcome.wanted_again = write_again(
            path,
            outcome.turns,
            _AGAIN,
            vocabulary=before.workload["vocabulary"],
            positions=preflight(before.model).positions,
            seed=before.seed,
        )
        self.show.say("everything has ended: what is left is in storage", "yellow")
        self.settings = before.again(str(path))
        self.stage, self.caches = Stage(self.settings), {}
        self._stack, self._turns = contextlib.ExitStack(), outcome.again
        with self.stage, self._stack:
            self.show.status("starting anew: router, workers, and an empty cache")
            self._watch()
            self._check()
            again = sample(outcome.again, _AGAIN)
            self._compare([*sample(outcome.turns, _SAMPLE), *again])
        self._look_for_what_is_left()

    def _look_for_what_is_left(self) -> None:
        """In shared memory, of processes that have all ended."""
        prefix = f"{self.settings.run}-"
        names = [info.name for info in list_segments() if info.name.startswith(prefix)]
        if self.scratch is not None:
            names += self.scratch.indexes()
        self.outcome.left += [name for name in names if name not in self.outcome.left]

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
                finished = True
                self.outcome.lookup_us = self.outcome.lookup_us or event.lookup_us
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
        self._turns.append(turn)
        self.show.add(turn)

    def _on_recovered(self, found: Recovered) -> None:
        self.outcome.recovered.append(found)
        self.show.say(
            f"worker {found.worker} is dead: {found.doomed} pages were doomed, and can be used "
            f"again after {found.seconds * 1e3:.0f} ms",
            "yellow",
        )

    def _check(self) -> None:
        """Look at every invariant of the caches."""
        if self.outcome.check is not None and not self.outcome.check.clean:
            return
        self.show.status("checking the cache: every invariant, derived again")
        for cache in self.caches.values():
            self.outcome.check = cache.check()
            self.outcome.checked += 1
            if not self.outcome.check.clean:
                break

    def _compare(self, chosen: Sequence[Served]) -> None:
        """Compute turns again."""
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
