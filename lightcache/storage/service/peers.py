"""The clients of a storage service, as it knows them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

from lightcache.cache import Cache
from lightcache.errors import LightcacheError, LockTimeout
from lightcache.shm import SharedRing
from lightcache.storage.breaker import log
from lightcache.storage.service import rings
from lightcache.storage.service.messages import Halves

_MUTE = 1.0  # seconds without answers for a client that is stopped while it holds its ring's lock


class Peer:
    """One client: the ring of its answers, and what it has begun to say."""

    def __init__(self, ring: SharedRing) -> None:
        """Attached to its ring, with a slot of our own."""
        self.halves = Halves()
        self._ring = ring
        self._lock = threading.Lock()  # who closes the ring waits for who pushes into it
        self._gone = False
        self._mute_until = 0.0

    @property
    def there(self) -> bool:
        """Whether its ring was not let go of."""
        return not self._gone

    @property
    def alive(self) -> bool:
        """Whether anybody but us is attached to its ring. Some 60 us."""
        own = self._ring.segment.client
        assert own is not None
        try:
            clients = self._ring.segment.clients()
        except LightcacheError:  # removed under it
            return False
        return any(client.alive and client.slot != own.slot for client in clients)

    def push(self, answers: list[bytes]) -> int:
        """Answer, without waiting; how many answers are lost."""
        with self._lock:
            if self._gone or time.monotonic() < self._mute_until:
                return len(answers)
            pushed = 0
            try:
                while pushed < len(answers):
                    more = self._ring.push_many(answers[pushed:])
                    if not more:
                        break
                    pushed += more
            except LockTimeout:
                self._mute_until = time.monotonic() + _MUTE
            except LightcacheError as error:
                log.warning("answers of the storage service could not be pushed: %s", error)
            return len(answers) - pushed

    def close(self) -> None:
        """Let go of its ring, which goes with the last who is attached."""
        with self._lock:
            self._gone = True
            try:
                self._ring.close()
            except LightcacheError as error:
                log.warning("the ring of a client could not be left: %s", error)


class Peers:
    """All of them. For the thread that takes messages out; `clients` and `close` for any."""

    def __init__(self, cache: Cache, counted: Counter[str]) -> None:
        """Nobody has asked for anything."""
        self._cache = cache
        self._counted = counted
        self._peers: dict[tuple[int, int], Peer] = {}

    def meet(self, pid: int, client: int) -> Peer | None:
        """Who asks; None: it is gone."""
        peer = self._peers.get((pid, client))
        if peer is None:
            try:
                peer = Peer(rings.find_answers(self._cache, pid, client))
            except LightcacheError:
                return None
            if not peer.alive:
                peer.close()
                return None
            self._peers[pid, client] = peer
        return peer

    def part(self) -> None:
        """Let go of those that are gone."""
        for name, peer in list(self._peers.items()):
            if not peer.alive:
                self._drop(name, peer)

    def _drop(self, name: tuple[int, int], peer: Peer) -> None:
        peer.close()
        del self._peers[name]
        self._counted["halves"] += peer.halves.dropped + peer.halves.waiting

    @property
    def halves(self) -> int:
        """Tasks that those who are there began to ask for, and did not."""
        return sum(peer.halves.dropped for peer in self._every())

    def _every(self) -> Iterable[Peer]:
        return list(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    def close(self) -> None:
        """Let go of all. Once nobody meets anybody any more."""
        for name, peer in list(self._peers.items()):
            self._drop(name, peer)


__all__ = ["Peer", "Peers"]
