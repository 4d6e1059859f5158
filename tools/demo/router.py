"""The router: gives each turn to a worker, by what the cache has of it and by what waits where.

It looks into the cache itself: finding a prefix is a read of shared memory, not a message. It
needs neither torch nor a model.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import lightcache
from lightcache.tools.demo.conversations import Turn
from lightcache.tools.demo.messages import Holding, Request


@dataclass(eq=False)
class Member:
    """A worker process, and the turns that it has to answer."""

    number: int
    life: int  # dead workers of the same number before it
    process: Any
    pipe: Connection
    started: float = field(default_factory=time.monotonic)
    killed_at: float | None = None
    holding: Holding | None = None  # it waits to be killed, in the middle of an offload
    device_index: str = ""
    running: Turn | None = None
    waiting: deque[Turn] = field(default_factory=deque)
    costs: dict[int, float] = field(default_factory=dict)
    """Of each turn that it has to answer, in tokens of prefill."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"worker-{self.number}-{self.life}"

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.number}{chr(39) * self.life}"


class Router:
    """Gives each worker one turn at a time."""

    def __init__(self, cache: lightcache.Cache) -> None:
        """Without workers, turns wait.

        Args:
            cache: that the workers share.
        """
        self._cache = cache
        self._router: Any = None
        self._members: dict[str, Member] = {}  # those that are ready
        self._last: dict[int, str] = {}  # the worker that had the last turn of each conversation
        self._unrouted: list[Turn] = []
        self.attempts: dict[int, int] = {}  # how often each turn was given to a worker

    # ---- which workers there are

    def join(self, member: Member) -> None:
        """A worker is ready. The successor of a dead one has another name."""
        self._members[member.name] = member
        self._look_at_devices()
        self.ask([])

    def lose(self, member: Member) -> int:
        """A worker is dead: take back what it held, and give its turns to the others.

        Returns:
            Pages that it was writing: they are doomed, no key leads to them. Only a process that
            finds no other room takes such pages, so the number is that of this death.
        """
        self._cache.reap()
        doomed = self._cache.check().doomed
        if self._members.pop(member.name, None) is not None:
            self._look_at_devices()
            self.ask([*filter(None, [member.running]), *member.waiting])
        return doomed

    def _look_at_devices(self) -> None:
        """Attach to the indexes of the blocks that workers have on their devices."""
        self.close()
        if not self._members:  # turns wait for a successor
            return
        devices = {name: member.device_index for name, member in self._members.items()}
        policy = lightcache.RouterPolicy(page_tokens=self._cache.index.page_tokens)
        self._router = lightcache.Router(self._cache, devices, policy=policy)

    # ---- which worker gets which turn

    def ask(self, turns: Iterable[Turn]) -> None:
        """Choose a worker for each turn; while there is none, turns wait."""
        self._unrouted += turns
        while self._unrouted and self._members:
            turn = self._unrouted.pop(0)
            member = self._choose(turn)
            member.waiting.append(turn)
            self._last[turn.conversation] = member.name

    def _choose(self, turn: Turn) -> Member:
        """The worker at which the turn costs least. Not the one that had the turn before, if there
        is another: the demo shows that elsewhere it is a hit as well. An engine wants the opposite,
        and leaves `among=` out."""
        last = self._last.get(turn.conversation)
        others = [name for name in self._members if name != last] or list(self._members)
        loads = {name: sum(member.costs.values()) for name, member in self._members.items()}
        choice = self._router.route(self._cache.hash_pages(turn.prompt), loads, among=others)
        member = self._members[choice.worker]
        member.costs[turn.number] = choice.costs[member.name] - loads[member.name]
        return member

    def send(self, *, hold: bool = False) -> int | None:
        """Give a waiting turn to its worker, if that is idle. Returns the turn's number.

        Args:
            hold: the worker shall stop in the middle of the turn's offload.
        """
        for member in self._members.values():
            if member.running is None and member.waiting:
                turn = member.running = member.waiting.popleft()
                self.attempts[turn.number] = self.attempts.get(turn.number, 0) + 1
                sent = time.monotonic()
                request = Request(turn.number, turn.prompt, turn.answer_tokens, sent, hold)
                with contextlib.suppress(OSError):  # it has just died: `lose` asks again
                    member.pipe.send(request)
                return turn.number
        return None

    def answered(self, member: Member) -> Turn:
        """A worker has answered its turn, and is idle."""
        turn, member.running = member.running, None
        assert turn is not None
        member.costs.pop(turn.number)
        return turn

    def close(self) -> None:
        """Let go of the device indexes. The caches stay the caller's."""
        if self._router is not None:
            self._router.close()
            self._router = None
