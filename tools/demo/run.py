"""What happens in a run: conversations, one kill, the end of everything, a restart, the checks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from lightcache.shm import sweep
from lightcache.shm.listing import list_segments
from lightcache.tools.demo.conversations import Conversations
from lightcache.tools.demo.messages import Answer, Turn, WorkerConfig
from lightcache.tools.demo.processes import LEAVE, SILENCE, RunFailed, Workers, spawn, terminable
from lightcache.tools.demo.report import Outcome, Show
from lightcache.tools.demo.router import Router

_WORKER = "lightcache.tools.demo.worker:run"
_REFERENCE = "lightcache.tools.demo.model:reference"
_RESUMED = 4  # conversations that continue after the restart


@dataclass
class Run:
    """A run of the demo."""

    config: WorkerConfig
    workers: int
    talk: Conversations
    outcome: Outcome
    show: Show

    def run(self) -> None:
        """All of it. Blocks.

        Raises:
            RunFailed: a process could not continue.
        """
        sweep(prefix="demo-")  # of demos whose processes were all killed
        with terminable():
            self._serve(self.config, [self.talk.begin()], self.outcome.turns)
            if self.outcome.wanted_restart:
                self._restart()
            self._recompute()

    def _serve(self, config: WorkerConfig, groups: list[list[Turn]], answers: list[Answer]) -> None:
        """Start workers and a router, collect answers to turns and those that follow from them,
        check the cache, and end everything. Each group of turns is asked when those before it are
        answered."""
        talk, outcome = self.talk, self.outcome
        with ExitStack() as stack:
            workers = Workers(config, self.workers, _WORKER, stack)
            router = Router(workers, config, self.show, stack)
            for turns in groups:
                router.ask(turns)
                while router.busy:
                    kill = outcome.kill is None and len(outcome.turns) >= talk.total // 2
                    for answer in router.step(kill=kill and outcome.wanted_kill):
                        answers.append(answer)
                        self.show.add(answer)
                        router.ask(talk.answered(answer.turn, answer.tokens))
                    outcome.kill = outcome.kill or router.kill
            self.show.say("checking the index: every invariant, derived again")
            outcome.checks.append(router.cache.check())
        left = [info.name for info in list_segments()]
        outcome.left += [name for name in left if name.startswith(f"{config.run}-")]

    def _restart(self) -> None:
        """Continue some conversations with what storage has. The first turn is asked alone: the
        cache is empty, so whatever it reuses comes from storage."""
        self.show.say("everything has ended, what is left is in storage; starting again", "yellow")
        config = replace(self.config, run=f"{self.config.run}-again")
        first, *others = self.talk.resume(_RESUMED)
        self.outcome.wanted += 1 + len(others)
        self._serve(config, [[first], others], self.outcome.again)

    def _recompute(self) -> None:
        """Compare the answers that reused tokens with those of a fresh process without a cache."""
        chosen = self.outcome.reusing
        self.show.say(f"computing {len(chosen)} turns again, in a fresh process without a cache")
        process, pipe = spawn(_REFERENCE, self.config.model)
        try:
            for answer in chosen:
                pipe.send(answer)
                if not pipe.poll(SILENCE):
                    raise RunFailed(f"the reference said nothing for {SILENCE:.0f} s")
                self.outcome.compared[answer.turn.number] = pipe.recv()
        except (EOFError, OSError):
            process.join(LEAVE)
            code = process.exitcode
            raise RunFailed(f"the reference has ended with exit status {code}") from None
        finally:
            process.kill()
            process.join()
