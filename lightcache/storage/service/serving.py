"""StorageService: runs the storage tasks of a cache's processes, in a tier of its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lightcache.cache import Cache
from lightcache.errors import Detached, LightcacheError, LockTimeout, WaitTimeout
from lightcache.shm import SharedRing, sweep
from lightcache.shm.errors import leave
from lightcache.shm.waiting import Event
from lightcache.storage.common import Deadline, log
from lightcache.storage.protocol import Storage
from lightcache.storage.service import board
from lightcache.storage.service.board import Board, ServiceStats
from lightcache.storage.service.messages import Answer, Ask, Malformed, Part, PartBuffer
from lightcache.storage.tasks import COUNTS, StorageTask, TaskState
from lightcache.storage.tier import StorageTier

MOST_TASKS = 4096
"""At a time. Further ones wait in the ring; when it is full, clients are refused."""
MOST_UNTOLD = MOST_TASKS
"""Ends of tasks that a client has not let in. Beyond it, the oldest is forgotten: the client gives
that task up when its time is over."""
_IDLE = 0.05  # seconds of waiting for a message
_PAUSE = 0.01  # seconds between checks whether more tasks may be taken
_LOOK = 0.25  # seconds between checks of clients, unsent answers and the cache
_SWEEP = 10.0  # seconds between sweeps of rings of unknown clients
_BATCH = 16  # messages taken at a time, which are lost if the service is killed
_MUTE = 1.0  # seconds without answers for a stopped client that holds its ring's lock


class Peer:
    """A client: its tasks, and the ring of its answers. The thread that ends a task tells its end
    at once. Progress, and ends that found no room in the ring, are told by `repeat`."""

    def __init__(self, ring: SharedRing, counted: Counter[str]) -> None:
        """`ring` is attached, with a slot of our own."""
        self.parts = PartBuffer(counted)
        self.tasks: dict[int, StorageTask] = {}
        """Tasks whose end has not been counted, by the client's number. Only the service's thread
        adds to it, and tells how far they are."""
        self._told: dict[int, int] = {}  # the prefix of each as last told
        self._untold: deque[bytes] = deque(maxlen=MOST_UNTOLD)  # no other answer follows an end
        self._ring = ring
        self._lock = threading.RLock()  # answers are made and pushed in one order
        self._mute_until = 0.0

    def end(self, number: int) -> bool:
        """Tell the end of a task, once. False: it found no room, and is repeated until it does, as
        the client would wait for it until the task's time is up."""
        with self._lock:
            task = self.tasks.pop(number, None)
            if task is None:
                return True
            self._told.pop(number, None)
            self._untold.append(_answer(number, task, task.state))
            return self._tell_ends()

    def repeat(self) -> None:
        """Tell what has not been told, until the client lets nothing in."""
        with self._lock:
            if not self._tell_ends():
                return
            for number, task in self.tasks.items():
                prefix = task.pages_done
                if task.state is TaskState.RUNNING and self._told.get(number) != prefix:
                    if not self._push(_answer(number, task, TaskState.RUNNING)):
                        return
                    self._told[number] = prefix

    def _tell_ends(self) -> bool:
        while self._untold and self._push(self._untold[0]):
            self._untold.popleft()
        return not self._untold

    def _push(self, answer: bytes) -> bool:
        """Push an answer, without waiting for room; False: it was not pushed."""
        if time.monotonic() < self._mute_until:
            return False
        try:
            return bool(self._ring.push_many([answer]))
        except LockTimeout:
            self._mute_until = time.monotonic() + _MUTE
        except LightcacheError as error:
            log.warning("answers of the storage service could not be pushed: %s", error)
        return False

    def close(self) -> None:
        """Forget its tasks, and close its ring, which is removed with the last attached process."""
        with self._lock:
            self.tasks.clear()
            self._untold.clear()
            self.parts.drop()
            try:
                self._ring.close()
            except LightcacheError as error:
                log.warning("the ring of a client could not be left: %s", error)


def _answer(number: int, task: StorageTask, state: TaskState) -> bytes:
    """The state of a task, with its result so far."""
    result = task.result
    counts = {name: getattr(result, name) for name in COUNTS}
    return Answer(number, state, result.prefix, counts, result.reasons).pack()


class StorageService:
    """Serves all `StorageClient`s of a cache, with a `StorageTier` of its own, in threads.

    It is meant for a process of its own (`lightcache storage NAME`), and works in any attached one.
    A cache has at most one. If it dies, its tasks end FAILED; the next service takes the messages
    still in its ring.

    Close it before the cache. It owns neither the cache nor the storage, and cannot be used in a
    forked child.
    """

    def __init__(self, cache: Cache, storage: Storage, **tier: Any) -> None:
        """Begins to serve.

        Args:
            storage: a storage opened with this cache's spec, `StorageSpec.of(cache)`.
            tier: arguments of `StorageTier`.

        Raises:
            InUse: the cache has a service; the message has its pid.
            ConfigError, LayoutMismatch, PermissionDenied: as `StorageTier`.
        """
        self.cache = cache
        self._counted: Counter[str] = Counter()
        self._ending = Event()
        self._finish_by = Deadline(0.0)  # of messages, when it is ending
        self.why = ""
        """Why it ended by itself; empty: it did not."""
        self._looked = self._swept = 0.0
        self._publishing = threading.Lock()
        self._last: ServiceStats | None = None
        self._pid = os.getpid()
        self._peers: dict[int, Peer] = {}
        with contextlib.ExitStack() as stack:
            self._tier = StorageTier(cache, storage, **tier)
            stack.callback(self._tier.close, 0.0)
            self._board = Board.open(cache)
            stack.callback(self._board.close)
            self._ring = board.tasks_ring(cache)
            stack.callback(self._ring.close)
            self._board.claim(self._tier.options.grace)
            stack.callback(self._board.leave)
            with contextlib.suppress(LockTimeout):  # any process that needs pages reaps too
                cache.reap()  # the earlier service may have been killed
            self._publish()
            self._thread = threading.Thread(
                target=self._serve, name="lightcache-storage-service", daemon=True
            )
            self._thread.start()
            stack.pop_all()

    # ---- messages

    def _serve(self) -> None:
        try:
            while not self._ending.is_set() or (len(self._ring) and not self._finish_by.passed):
                self._turn()
        except Exception as error:
            ours = not isinstance(error, LightcacheError)  # then it is our own bug
            self.why = repr(error) if ours else str(error)
            if not ours and self.cache.index.segment.retired:
                self.why = "the cache was removed; start it again when there is one of this name"
            log.error(
                "the storage service of %r ends: %s", self.cache.name, self.why, exc_info=ours
            )
            with contextlib.suppress(LightcacheError):  # clients must stop asking
                self._board.end()

    def _turn(self) -> None:
        """Take messages out of the ring, or wait for one, and do what is due."""
        messages: list[bytes] = []
        if sum(len(peer.tasks) for peer in self._peers.values()) >= MOST_TASKS:
            self._counted["full"] += 1
            time.sleep(_PAUSE)
        else:
            with contextlib.suppress(WaitTimeout, LockTimeout):
                messages = self._ring.pop_many(_BATCH) or [self._ring.pop(timeout=_IDLE)]
        for message in messages:
            self._board.look()  # one of a client that was stopped while it left takes 0.2 s
            try:
                self._take(message)
            except Malformed as error:
                self._counted["malformed"] += 1
                log.debug("a malformed message was ignored: %s", error)
            except Detached:
                raise
            except Exception:  # our own bug: the next message may be good
                log.exception("a message to the storage service could not be used")
        if time.monotonic() - self._looked >= _LOOK:
            self._look_around()
        elif not messages:
            self._repeat()

    def _look_around(self) -> None:
        self._looked = time.monotonic()
        self.cache.index.segment.check_usable()
        self._board.look()
        self._drop_peers(alive=False)
        self._repeat()
        if self._looked - self._swept >= _SWEEP:
            self._swept = self._looked
            sweep(prefix=board.ring_prefix(self.cache))
        self._publish()

    def _take(self, message: bytes) -> None:
        """Begin, stop or cancel a task, or keep a part until the others arrive.

        Raises:
            Malformed: not a message, or not valid at this point; it is ignored.
        """
        self._counted["taken"] += 1
        part = Part.unpack(message)
        peer = self._peer(part.client)
        if peer is None:
            self._counted["orphans"] += 1
            return
        body = peer.parts.add(part)
        if body is None:
            return
        ask, known = Ask.unpack(body), peer.tasks.get(part.task)
        if ask.call in ("stop", "cancel"):
            if known is not None:
                getattr(known, ask.call)()
        elif known is not None:
            raise Malformed(f"a second task of number {part.task}")
        else:
            task = self._begin(ask)
            peer.tasks[part.task] = task
            task.progress.watch(lambda: self._tell_end(peer, part.task))

    def _begin(self, ask: Ask) -> StorageTask:
        left = ask.end - self._tier.options.clock()
        try:
            if left <= 0:
                self._counted["late"] += 1
                raise WaitTimeout("timed out: its time was up before it was taken out of the queue")
            begin: Callable[..., StorageTask] = getattr(self._tier, ask.call)
            return begin(ask.keys, namespace=ask.namespace, timeout=left, **ask.arguments)
        except LightcacheError as error:
            return self._tier.failed_task(ask.kind, ask.pages, error)

    def _peer(self, client: int) -> Peer | None:
        """The sender of a message; None: it is gone."""
        ring = self._ring
        with contextlib.suppress(LightcacheError):
            if client not in self._peers and board.lives(ring.segment, client):
                answers = board.answers_ring(self.cache, ring, client)
                self._peers[client] = Peer(answers, self._counted)
        return self._peers.get(client)

    def _drop_peers(self, *, alive: bool) -> None:
        """Close the rings of clients that are gone; with `alive`, of all clients."""
        for client, peer in list(self._peers.items()):
            if alive or not board.lives(self._ring.segment, client):
                for task in list(peer.tasks.values()):
                    if task.kind == "read":  # not needed any more, and others may wait for its keys
                        task.cancel()
                with self._publishing:  # figures say all of it, or nothing
                    del self._peers[client]
                    peer.close()

    # ---- answers, statistics

    def _tell_end(self, peer: Peer, number: int) -> None:
        """Tell the end of a task, in the thread that ended it, when the figures on the board have
        it: a client that hears of the end finds it there."""
        try:
            try:
                self._publish()
            finally:  # figures may be late; the client waits for the answer
                told = peer.end(number)
            with self._publishing:
                self._counted["lost"] += not told
        except Exception:  # our own bug: the thread has other tasks
            log.exception("the end of a task of the storage service could not be told or counted")

    def _repeat(self) -> None:
        for peer in self._peers.values():
            peer.repeat()

    def _publish(self) -> None:
        with self._publishing, contextlib.suppress(Detached):
            self._board.publish(self._tier.stats(), self._counted, len(self._peers))

    def stats(self) -> ServiceStats:
        """Statistics as its clients see them; after `close`, the last ones."""
        if os.getpid() != self._pid:  # before any lock, which may have been held at the fork
            raise Detached("this storage service runs in the process that forked us")
        try:
            self._publish()
            return self._board.stats()
        except Detached:  # perhaps closed by another thread meanwhile
            if self._last is None:
                raise
            return self._last

    # ---- closing

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it takes no more messages, because it was closed or ended by itself, such as
        when the cache was removed (see `why`). False: `timeout` seconds have passed."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, timeout: float = 10.0) -> bool:
        """Take no new tasks, finish queued ones, cancel those that remain, and close. May be called
        again, even after an interrupt.

        Messages are taken until the ring is empty once; later tasks are FAILED.

        Args:
            timeout: seconds for finishing; 0: cancel at once.

        Raises:
            ConfigError: the timeout is not a number; nothing was done.

        Returns:
            True if everything has ended. False: a call of the storage hangs; its pages stay pinned
            until it returns, and until then the cache cannot be closed (InUse).
        """
        if os.getpid() != self._pid:
            return True
        deadline = self._finish_by = Deadline(timeout)
        self._board.end()
        self._ending.set()
        self._thread.join()
        ended = self._tier.close(min(deadline.left, threading.TIMEOUT_MAX))
        self._leave()
        return ended

    def _leave(self) -> None:
        """Tell the rest, and close everything. Each step may be repeated, as after an interrupt:
        the board knows whether it is still ours."""
        self._repeat()
        self._drop_peers(alive=True)
        self._publish()  # after the peers, which count their incomplete tasks
        with contextlib.suppress(LightcacheError):  # the board was removed
            self._last = self._last or self._board.stats()
        with self._publishing:  # no thread publishes statistics after this
            self._board.leave()
        self._ring.close()
        self._board.close()

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
