"""What a storage service does with a message: the step from a client's words to a tier's task."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightcache.errors import ConfigError, LightcacheError
from lightcache.storage.service.answering import Answers, Served
from lightcache.storage.service.bodies import Ask, Publish
from lightcache.storage.service.holding import Holds
from lightcache.storage.service.messages import Kind, Malformed, Part
from lightcache.storage.service.peers import Peer, Peers
from lightcache.storage.tiers import StorageTask
from lightcache.storage.worker import StorageTier

_LONGEST = 1e6  # seconds of a task, whatever its client said: timers end somewhere


class Carrying:
    """For the thread that takes messages out."""

    def __init__(
        self, tier: StorageTier, peers: Peers, answers: Answers, counted: Counter[str]
    ) -> None:
        """Nothing was asked."""
        self.holds = Holds(tier.timeout, tier.clock)
        self._tier = tier
        self._peers = peers
        self._answers = answers
        self._counted = counted

    def take(self, message: bytes) -> None:
        """Begin, stop, cancel or publish something, or keep a part until the others come.

        Raises:
            Malformed: no message, or none that can be meant just now; it is passed over.
        """
        part = Part.unpack(message)
        peer = self._peers.meet(part.pid, part.client)
        if peer is None:
            self._counted["orphans"] += 1
            return
        if part.kind in (Kind.STOP, Kind.CANCEL):
            self._end(part)
            return
        body = peer.halves.add(part)
        if body is None:
            return
        if self._answers.find(part.client, part.task) is not None:
            raise Malformed(f"a second task of number {part.task}")
        if part.kind is Kind.PUBLISH:
            self._publish(peer, part, Publish.unpack(body))
        else:
            self._carry_out(peer, part, Ask.unpack(body))

    def _end(self, part: Part) -> None:
        task = self._answers.find(part.client, part.task)
        if part.kind is Kind.STOP:
            if task is not None:
                task.stop()
            return
        held = self.holds.find(part.client, part.task)
        for each in (task, held):
            if each is not None:
                each.cancel()
        self.holds.drop(part.client, part.task)

    def _carry_out(self, peer: Peer, part: Part, ask: Ask) -> None:
        kind = "write" if part.kind is Kind.WRITE else "read"
        pages = max(0, len(ask.keys) - ask.start)
        left = self._left(ask)
        if left <= 0:
            task = self._late(kind, pages, ask)
        else:
            try:
                task = self._begin(part, ask, left)
            except LightcacheError as error:
                task = self._failed(kind, pages, str(error))
        served = Served(peer, part.client, part.task, task)
        if ask.hold:
            self.holds.add(served)
        self._answers.serve(served)

    def _left(self, ask: Ask | Publish) -> float:
        return min(ask.end - self._tier.clock(), ask.timeout, _LONGEST)

    def _begin(self, part: Part, ask: Ask, left: float) -> StorageTask:
        how: Any = {"namespace": ask.namespace, "timeout": left}
        if part.kind is Kind.WRITE:
            # Two clients' requests of one number are not the same.
            request = None if ask.request is None else (part.client, ask.request)
            how |= {"tokens": ask.tokens, "token_ids": ask.token_ids}
            return self._tier.write(ask.keys, request, **how)
        if part.kind is Kind.PREFETCH:
            return self._tier.prefetch(ask.keys, ask.start, hold=ask.hold, **how)
        return self._tier.prefetch_deepest(ask.keys, most=ask.most, **how)

    def _publish(self, peer: Peer, part: Part, ask: Publish) -> None:
        """What cannot be published is given back, unless the client asked for what there is not."""
        held = self.holds.find(part.client, ask.held)
        ahead = 0
        if held is None:
            why = "nobody published in time what was held, so it was given back; prefetch it again"
            task = self._failed("read", ask.pages, why)
        elif self._left(ask) <= 0:
            held.cancel()
            self.holds.drop(part.client, ask.held)
            task = self._late("read", ask.pages, ask)
        else:
            try:
                task = held.publish(ask.pages)
                ahead = ask.pages - task.result.pages  # of a group that is read again
                self.holds.drop(part.client, ask.held)
            except LightcacheError as error:
                if not isinstance(error, ConfigError):  # it has given back what it had
                    self.holds.drop(part.client, ask.held)
                task = self._failed("read", ask.pages, str(error))
        self._answers.serve(Served(peer, part.client, part.task, task, ahead))

    def _late(self, kind: Any, pages: int, ask: Ask | Publish) -> StorageTask:
        self._counted["late"] += 1
        reason = f"timed out: not done within {ask.timeout:g} s, all of it in the queue"
        return self._failed(kind, pages, reason)

    def _failed(self, kind: Any, pages: int, reason: str) -> StorageTask:
        return self._tier._nothing(kind, pages, reason, failed=pages)


__all__ = ["Carrying"]
