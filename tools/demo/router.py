"""The router: owns the turns, and hands each to a worker, which finds in the cache what it can.

It needs nothing but the core: neither torch nor a model.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

import lightcache
from lightcache.tools.demo import life
from lightcache.tools.demo.messages import (
    Answer,
    Finished,
    Hello,
    Lost,
    Mailbox,
    Recovered,
    Request,
    Served,
)
from lightcache.tools.demo.prefixes import Prefixes
from lightcache.tools.demo.settings import SECRET, Settings
from lightcache.tools.demo.workload import Turn


@dataclass
class Going:
    """A turn that a worker is at."""

    turn: Turn
    waited_s: float
    hold: bool
    """Whether its worker is to be killed in the middle of it."""


@dataclass
class Peer:
    """A worker as the router sees it."""

    number: int
    life: int = -1
    inbox: Mailbox | None = None
    cache: lightcache.Cache | None = None
    device: str | None = None
    going: Going | None = None
    waiting: deque[Turn] = field(default_factory=deque)

    @property
    def turns(self) -> list[Turn]:
        """What it has to do, and is at."""
        return [*self.waiting, *([self.going.turn] if self.going is not None else [])]


class Router:
    """Gives each worker one turn at a time."""

    def __init__(
        self, settings: Settings, inbox: Mailbox, report: Mailbox, stack: ExitStack
    ) -> None:
        """Nothing is asked yet.

        Args:
            stack: closes the caches.
        """
        self.settings, self.inbox, self.report, self.stack = settings, inbox, report, stack
        self.workload = settings.make_workload()
        self.peers = [Peer(number) for number in range(settings.workers)]
        self.caches: dict[str, lightcache.Cache] = {}
        self.attempts: dict[int, int] = {}
        self.asked: dict[int, float] = {}
        self.answered = 0
        self.held = settings.hold_at is None
        self.lookups: list[float] = []
        self.random = random.Random(settings.seed)
        self.prefixes = stack.enter_context(Prefixes(settings))
        self.handlers: dict[type, Callable[[Any], None]] = {
            Hello: self.on_hello,
            Answer: self.on_answer,
            Lost: self.on_lost,
        }

    def run(self) -> None:
        """Until every turn is answered. Blocks."""
        while any(peer.inbox is None for peer in self.peers):
            self.handle()
        began = time.monotonic()
        self.route(self.workload.begin())
        while self.answered < self.workload.total:
            for number in range(len(self.peers)):
                self.dispatch(number)
            self.handle()
        found = statistics.median(self.lookups) * 1e6 if self.lookups else 0.0
        self.report.send(Finished(self.answered, time.monotonic() - began, found))

    def handle(self) -> None:
        """The next message."""
        message = life.receive(self.inbox, self.settings)
        self.handlers[type(message)](message)

    # ---- who does what

    def route(self, turns: list[Turn]) -> None:
        """Choose a worker for each: never the one of the turn before, though a dead one's successor
        is waited for; or any that lives; or the one of these at which it costs least."""
        for turn in turns:
            living = self.living()
            if self.settings.routing == "random":
                chosen = self.random.choice(living or self.peers)
            elif self.settings.routing == "prefix" and living:
                chosen = self.cheapest(turn, living)
            else:
                chosen = self.peers[(turn.conversation + turn.turn) % len(self.peers)]
            self.asked[turn.number] = time.monotonic()
            chosen.waiting.append(turn)

    def living(self) -> list[Peer]:
        """Workers that are ready, or at work."""
        return [peer for peer in self.peers if peer.inbox is not None]

    def cheapest(self, turn: Turn, living: list[Peer]) -> Peer:
        """By what each device and the host have of the prompt, and by what waits there."""
        cache = living[0].cache
        if cache is None:
            return min(living, key=lambda peer: len(peer.turns))
        waiting = {peer.number: [each.number for each in peer.turns] for peer in living}
        keys = cache.hash_pages(turn.tokens)
        return self.peers[self.prefixes.choose(turn.number, keys, waiting)]

    def cached(self, turn: Turn) -> bool:
        """Whether a turn goes through the cache. With one prompt at a time for each worker, every
        worker has as many of either kind."""
        return not (self.settings.alternate and turn.number // len(self.peers) % 2)

    def dispatch(self, number: int) -> None:
        """Give a worker its next turn, if it is free and lives."""
        peer = self.peers[number]
        if peer.inbox is None or peer.going is not None or not peer.waiting:
            return
        turn = peer.waiting.popleft()
        attempt = self.attempts[turn.number] = self.attempts.get(turn.number, 0) + 1
        # Not a turn that is asked again: its first death would be taken for the one arranged.
        due = not self.held and self.answered >= (self.settings.hold_at or 0)
        hold = due and self.cached(turn) and attempt == 1
        self.held |= hold
        sent = time.monotonic()
        peer.going = Going(turn, sent - self.asked[turn.number], hold)
        peer.inbox.send(
            Request(
                number=turn.number,
                tokens=turn.tokens,
                answer_tokens=turn.answer_tokens,
                sent=sent,
                cached=self.cached(turn),
                baseline=self.settings.baseline,
                hold=hold,
            )
        )

    # ---- what they say

    def on_hello(self, hello: Hello) -> None:
        """A worker is ready, the first of its number or the successor of a dead one."""
        peer = self.peers[hello.worker]
        peer.life, peer.device = hello.life, hello.device
        peer.inbox = self.stack.enter_context(
            Mailbox(self.settings.worker_ring(hello.worker, hello.life))
        )
        if hello.cache is not None:
            if hello.cache not in self.caches:
                self.caches[hello.cache] = self.stack.enter_context(
                    lightcache.Cache.attach(hello.cache, secret=SECRET, role="router", grow=False)
                )
            peer.cache = self.caches[hello.cache]
        self.look_at_devices()

    def look_at_devices(self) -> None:
        """Of those that live, from now on: a successor has an index of its own."""
        if self.settings.routing == "prefix":
            devices = {peer.number: peer.device for peer in self.living()}
            host = self.living()[0].cache if self.settings.pool == "shared" else None
            self.prefixes.look_at(host, devices)

    def on_answer(self, answer: Answer) -> None:
        """A turn is over; what it makes possible is routed."""
        peer = self.peers[answer.worker]
        going, peer.going = peer.going, None
        assert going is not None
        assert going.turn.number == answer.number
        if going.hold:  # it had nothing to write: another one, then
            self.held = False
        if answer.lookup_s is not None:
            self.lookups.append(answer.lookup_s)
        self.answered += 1
        self.report.send(self.served(going, answer))
        self.route(self.workload.answered(answer.number, answer.tokens.tolist()))

    def served(self, going: Going, answer: Answer) -> Served:
        """What the report is told."""
        turn = going.turn
        known = {each.name: getattr(answer, each.name) for each in fields(answer)}
        known["tokens"] = np.concatenate([turn.tokens, answer.tokens])
        return Served(
            **known,
            conversation=turn.conversation,
            turn=turn.turn,
            prompt=len(turn.tokens),
            attempts=self.attempts[turn.number],
            waited_s=going.waited_s,
            cached=self.cached(turn),
        )

    def on_lost(self, lost: Lost) -> None:
        """A worker has died: take its pins back, and ask again what it did not answer."""
        peer = self.peers[lost.worker]
        if lost.life != peer.life:
            return
        number = peer.going.turn.number if peer.going is not None else None
        clients = doomed = 0
        if peer.cache is not None:
            clients = peer.cache.reap()
            # What it was writing is nobody's, and no key leads to it. Only who finds no other room
            # in a pool that has all of its memory takes such pages, so they are there still.
            doomed = peer.cache.check().doomed
        self.forget(peer)
        self.spread(peer)
        if self.settings.pool == "private" and peer.cache is not None:
            # Nobody comes back to it, and it ends when we leave: its successor needs the memory.
            self.caches.pop(peer.cache.name).close()
            peer.cache = None
        seconds = time.monotonic() - lost.at
        self.report.send(Recovered(lost.worker, number, doomed, clients, seconds))

    def forget(self, peer: Peer) -> None:
        """A worker is gone: its turn is asked again."""
        going, peer.going, peer.inbox = peer.going, None, None
        if going is not None:
            peer.waiting.appendleft(going.turn)

    def spread(self, dead: Peer) -> None:
        """Give what a dead worker was to do to the living; without any, its successor does it."""
        living = self.living()
        while living and dead.waiting:
            turn = dead.waiting.popleft()
            first = self.attempts.get(turn.number, 0) > 0
            chosen = min(living, key=lambda peer: len(peer.waiting))
            (chosen.waiting.appendleft if first else chosen.waiting.append)(turn)


def body(settings: Settings, numbers: list[int]) -> None:
    """Serve all turns, then wait for the end: segments end with their last process."""
    with ExitStack() as stack:
        report = stack.enter_context(Mailbox(settings.report_ring))
        inbox = stack.enter_context(Mailbox(settings.router_ring))
        router = Router(settings, inbox, report, stack)
        router.run()
        while True:
            life.receive(inbox, settings)


if __name__ == "__main__":
    life.run("router", body)
