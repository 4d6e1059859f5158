"""StorageService: carries out what the processes of a cache ask of a storage."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

from lightcache import _arguments
from lightcache.cache import Cache
from lightcache.errors import Detached, LightcacheError, LockTimeout, WaitTimeout
from lightcache.shm import sweep
from lightcache.shm.errors import leave
from lightcache.shm.waiting import Event
from lightcache.storage.arguments import Deadline
from lightcache.storage.breaker import log
from lightcache.storage.protocol import Storage
from lightcache.storage.service import rings
from lightcache.storage.service.answering import Answers
from lightcache.storage.service.board import COUNTED, Board, Phase
from lightcache.storage.service.carrying import Carrying
from lightcache.storage.service.messages import Malformed
from lightcache.storage.service.peers import Peers
from lightcache.storage.service.status import ServiceStats, stats_of
from lightcache.storage.worker import StorageTier

_IDLE = 0.05  # seconds of waiting for a message between two looks around
_PAUSE = 0.01  # seconds until it is looked again whether more tasks may be taken
_LOOK = 0.25  # seconds between two looks at clients, and at the cache
_SWEEP = 10.0  # seconds between two sweeps of rings of clients that we have not met
_BATCH = 16  # messages that a kill of the service may take along


class StorageService:
    """Serves all `StorageClient`s of a cache, out of a `StorageTier` of its own, in threads.

    It is for a process of its own (`lightcache storage NAME`), and works in any attached one. There
    is one for each cache. Its death loses the tasks that it had, which end FAILED; what still stood
    in its ring, the next service takes.

    Close it before the cache. It owns neither cache nor storage. Not for forked children.
    """

    def __init__(self, cache: Cache, storage: Storage, *, most: int = 4096, **tier: Any) -> None:
        """Serves from now on.

        Args:
            storage: opened for pages of this cache's: `StorageSpec.of(cache)`.
            most: tasks at a time; further ones wait in the ring, and when that is full, clients
                are refused.
            tier: as of `StorageTier`.

        Raises:
            InUse: the cache has a service; names its pid.
            ConfigError, LayoutMismatch, PermissionDenied: as `StorageTier`.
        """
        self.cache = cache
        self._most = _arguments.count(most, "most", 1, 1 << 24)
        self._counted: Counter[str] = Counter()
        self._ending = Event()
        self._over = Event()
        self._why = ""
        self._looked = self._swept = 0.0
        self._publishing = threading.Lock()
        self._last: ServiceStats | None = None
        self._closed, self._pid = False, os.getpid()
        with contextlib.ExitStack() as stack:
            self._tier = StorageTier(cache, storage, **tier)
            stack.callback(self._tier.close, 0.0)
            self._board = Board.open(cache)
            stack.callback(self._board.close)
            self._board.claim()
            stack.callback(self._board.end, Phase.NONE)
            self._base = self._board.read()
            with contextlib.suppress(LockTimeout):  # whoever needs it does the same
                cache.reap()  # what the one before us held, if it was killed
            self._ring = rings.tasks(cache)
            stack.callback(self._ring.close)
            self._peers = Peers(cache, self._counted)
            self._answers = Answers(self._publish, self._lose)
            self._carrying = Carrying(self._tier, self._peers, self._answers, self._counted)
            self._publish()
            self._thread = threading.Thread(
                target=self._serve, name="lightcache-storage-service", daemon=True
            )
            stack.callback(self._answers.close)
            self._answers.start()
            # Before the thread, which may end at once and say that nobody serves.
            self._board.begin(
                self._tier.read_policy,
                self._tier.read_seconds,
                self._tier._grace,
                wants_tokens=self._tier.wants_tokens,
            )
            self._thread.start()
            stack.pop_all()

    # ---- taking messages out

    def _serve(self) -> None:
        try:
            while not self._ending.is_set():
                self._turn(_IDLE)
        except LightcacheError as error:
            self._why = str(error)
            log.warning("the storage service of %r ends: %s", self.cache.name, self._why)
        except Exception as error:  # ours, then
            self._why = repr(error)
            log.exception("the storage service of %r ends", self.cache.name)
        finally:
            with contextlib.suppress(LightcacheError):
                if not self._ending.is_set():  # by itself: clients should not go on asking
                    self._board.end(Phase.CLOSING)
            self._over.set()

    def _turn(self, timeout: float) -> int:
        """Take some messages out, and look around. How many there were."""
        messages: list[bytes] = []
        if len(self._answers) >= self._most:
            self._counted["full"] += 1
            self._ending.wait(min(timeout, _PAUSE))
        else:
            with contextlib.suppress(WaitTimeout, LockTimeout):
                messages = self._ring.pop_many(_BATCH) or [self._ring.pop(timeout=timeout)]
        for message in messages:
            try:
                self._take(message)
            except Malformed as error:
                self._counted["malformed"] += 1
                log.debug("a malformed message was passed over: %s", error)
            except Detached:
                raise
            except Exception:  # ours, then: the next message may be a good one
                log.exception("a message to the storage service could not be used")
        if time.monotonic() - self._looked >= _LOOK:
            self._look_around()
        return len(messages)

    def _look_around(self) -> None:
        self._looked = time.monotonic()
        self.cache.index.segment.check_usable()
        self._board.count_beat()
        self._peers.part()
        for task in self._answers.orphans():
            if task.kind == "read":  # others wait behind it, and it is wanted by nobody
                task.cancel()
        self._carrying.holds.look()
        if self._looked - self._swept >= _SWEEP:
            self._swept = self._looked
            sweep(prefix=rings.prefix(self.cache))
        self._publish()

    def _take(self, message: bytes) -> None:
        self._counted["taken"] += 1
        self._carrying.take(message)

    # ---- figures

    def _lose(self, answers: int) -> None:
        self._counted["lost"] += answers

    def _publish(self) -> None:
        with self._publishing:
            counted = {name: self._counted[name] for name in COUNTED}
            counted["halves"] += self._peers.halves
            with contextlib.suppress(Detached):
                stats = self._tier.stats()
                self._board.publish(stats, self._base, clients=len(self._peers), **counted)

    def stats(self) -> ServiceStats:
        """Figures, as its clients see them; once it is closed, the last ones."""
        try:
            return self._last or self._figures()
        except Detached:
            last = self._last
            if last is None:
                raise
            return last  # closed by another thread meanwhile

    def _figures(self) -> ServiceStats:
        if os.getpid() != self._pid:  # before any lock, which another thread may have had
            raise Detached("this storage service runs in the process that forked us")
        self._publish()
        return stats_of(self._board)

    # ---- the end

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it takes no more messages, since it was closed or ended by itself, as when
        the cache was removed: `why` says so then. False: not in these seconds."""
        return self._over.wait(timeout)

    @property
    def why(self) -> str:
        """Why it has ended by itself; empty: it has not."""
        return self._why

    def close(self, timeout: float = 10.0) -> bool:
        """Take no new tasks, finish what is queued, cancel what is left then, and leave. May be
        called again, also where it was interrupted.

        Messages are taken until the ring is empty once. Then what is held for clients is given
        back, and nothing is taken any more: what they say while the rest is finished, as
        `StorageTask.publish`, is FAILED.

        Args:
            timeout: seconds for finishing; 0: cancel at once.

        Raises:
            ConfigError: the timeout is no number; nothing was begun.

        Returns:
            Whether everything has ended. False: a call of the storage hangs; its pages stay pinned
            until it returns, and until then the cache cannot be closed (InUse).
        """
        if os.getpid() != self._pid:
            return True
        deadline = Deadline(timeout)
        self._board.end(Phase.CLOSING)
        self._ending.set()
        self._thread.join()
        if not self._closed:
            with contextlib.suppress(LightcacheError):
                self._take_the_rest(deadline)
        ended = self._tier.close(min(deadline.left, threading.TIMEOUT_MAX))
        self._answers.close()
        if not self._closed:
            self._leave()
        return ended

    def _take_the_rest(self, deadline: Deadline) -> None:
        """Of what stood in the ring when it closed. Nothing may be taken while there are `most`
        tasks, or somebody holds the lock: that is not the end of it."""
        while not (self._why or deadline.passed):
            if not self._turn(0.0):
                if not len(self._ring):
                    return
                time.sleep(_PAUSE)

    def _leave(self) -> None:
        """Each step may be done again, should we be interrupted: the board knows whether it is
        still ours."""
        self._peers.close()
        self._publish()  # behind the peers, which have counted what they had of tasks
        with contextlib.suppress(LightcacheError):  # removed: nobody sees these figures
            self._last = self._last or stats_of(self._board)
        with self._publishing:  # who asks for figures just now stores none behind this
            self._board.end(Phase.NONE)
        self._ring.close()
        self._board.close()
        self._closed = True

    def __enter__(self) -> StorageService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave(self.close, error)

    def __repr__(self) -> str:
        return f"<StorageService of {self.cache.name!r}>"


__all__ = ["StorageService"]
