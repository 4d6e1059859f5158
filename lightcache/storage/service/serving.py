"""StorageService: runs the storage tasks of a cache's processes, in a tier of its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from lightcache.cache import Cache
from lightcache.errors import Detached, LightcacheError, LockTimeout, WaitTimeout
from lightcache.shm import SharedRing, sweep
from lightcache.shm.errors import leave
from lightcache.shm.waiting import Event
from lightcache.storage.common import Deadline, log
from lightcache.storage.protocol import Storage
from lightcache.storage.service import board
from lightcache.storage.service.board import Board, ServiceStats
from lightcache.storage.service.messages import Answer, Ask, Kind, Malformed, Part, PartBuffer
from lightcache.storage.tasks import COUNTS, StorageTask, TaskState
from lightcache.storage.tier import StorageTier

MOST_TASKS = 4096
"""At a time. Further ones wait in the ring; when it is full, clients are refused."""
MOST_UNTOLD = MOST_TASKS
"""Refused answers to repeat, of a client. Beyond it, the one refused longest ago is forgotten: the
client gives that task up when its time is over."""
_IDLE = 0.05  # seconds of waiting for a message
_PAUSE = 0.01  # seconds between checks whether more tasks may be taken
_LOOK = 0.25  # seconds between checks of clients, unsent answers and the cache
_SWEEP = 10.0  # seconds between sweeps of rings of unknown clients
_BATCH = 16  # messages taken at a time, which are lost if the service is killed
_MUTE = 1.0  # seconds without answers for a stopped client that holds its ring's lock
_LONGEST = 1e6  # maximum seconds of a task, as timers have a limit


class Peer:
    """A client of the service: the ring of its answers, and the parts of its next task."""

    def __init__(self, ring: SharedRing, counted: Counter[str]) -> None:
        """`ring` is attached, with a slot of our own."""
        self.parts = PartBuffer(counted)
        self.there = True
        """We have not closed its ring yet."""
        self.untold: OrderedDict[Served, None] = OrderedDict()
        """Tasks whose state is to be told. Under the service's lock."""
        self._ring = ring
        self._lock = threading.RLock()
        self._mute_until = 0.0

    @property
    def alive(self) -> bool:
        """True if another process is attached to its ring. Takes about 60 us."""
        own = self._ring.segment.client
        assert own is not None
        try:
            clients = self._ring.segment.clients()
        except LightcacheError:  # removed
            return False
        return any(client.alive and client.slot != own.slot for client in clients)

    def tell(self, served: Served) -> bool:
        """Push the state of a task, without waiting for room; False: it was not pushed. Answers are
        made and pushed one at a time, so the last one pushed is the latest."""
        with self._lock:
            if not self.there or time.monotonic() < self._mute_until:
                return False
            try:
                return bool(self._ring.push_many([served.answer()]))
            except LockTimeout:
                self._mute_until = time.monotonic() + _MUTE
            except LightcacheError as error:
                log.warning("answers of the storage service could not be pushed: %s", error)
            return False

    def close(self) -> None:
        """Close its ring, which is removed with the last attached process."""
        with self._lock:
            self.there = False
            self.parts.drop()
            try:
                self._ring.close()
            except LightcacheError as error:
                log.warning("the ring of a client could not be left: %s", error)


@dataclass(eq=False)
class Served:
    """A client's task, and the tier's task that runs it."""

    peer: Peer
    name: tuple[int, int]
    """The numbers of the client and of its task."""
    task: StorageTask
    counted: bool = False
    """The published statistics count its end. Until then the end is not reported, so that a client
    that hears of it finds it in the statistics."""
    refused: bool = False
    """Its last answer was not pushed."""

    def answer(self) -> bytes:
        """The state of the task."""
        state = self.task.state  # before the result, which is final then
        if self.task.ended and not self.counted:
            state = TaskState.RUNNING
        result = self.task.result
        counts = {name: getattr(result, name) for name in COUNTS}
        return Answer(self.name[1], state, result.prefix, counts, result.reasons).pack()


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
        self._ending, self._over = Event(), Event()
        self.why = ""
        """Why it ended by itself; empty: it did not."""
        self._looked = self._swept = 0.0
        self._publishing = threading.Lock()
        self._last: ServiceStats | None = None
        self._closed, self._pid = False, os.getpid()
        self._peers: dict[tuple[int, int], Peer] = {}
        self._lock = threading.RLock()  # for the next one, and for what its clients are to be told
        self._tasks: dict[tuple[int, int], Served] = {}
        with contextlib.ExitStack() as stack:
            self._tier = StorageTier(cache, storage, **tier)
            stack.callback(self._tier.close, 0.0)
            self._board = Board.open(cache)
            stack.callback(self._board.close)
            self._board.claim()
            stack.callback(self._board.leave)
            with contextlib.suppress(LockTimeout):  # any process that needs pages reaps too
                cache.reap()  # the earlier service may have been killed
            self._ring = board.tasks_ring(cache)
            stack.callback(self._ring.close)
            self._publish()
            self._thread = threading.Thread(
                target=self._serve, name="lightcache-storage-service", daemon=True
            )
            # Before the thread starts, which may end at once and close the board for tasks.
            self._board.begin(self._tier.options.grace)
            self._thread.start()
            stack.pop_all()

    # ---- messages

    def _serve(self) -> None:
        try:
            while not self._ending.is_set():
                self._turn(_IDLE)
        except LightcacheError as error:
            self.why = str(error)
            log.warning("the storage service of %r ends: %s", self.cache.name, self.why)
        except Exception as error:  # our own bug
            self.why = repr(error)
            log.exception("the storage service of %r ends", self.cache.name)
        finally:
            with contextlib.suppress(LightcacheError):
                if not self._ending.is_set():  # it ended by itself: clients must stop asking
                    self._board.end()
            self._over.set()

    def _turn(self, timeout: float) -> int:
        """Take messages out of the ring, and do what is due. Returns the number of messages."""
        messages: list[bytes] = []
        if len(self._tasks) >= MOST_TASKS:
            self._counted["full"] += 1
            self._ending.wait(min(timeout, _PAUSE))
        else:
            with contextlib.suppress(WaitTimeout, LockTimeout):
                messages = self._ring.pop_many(_BATCH) or [self._ring.pop(timeout=timeout)]
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
        return len(messages)

    def _look_around(self) -> None:
        self._looked = time.monotonic()
        self.cache.index.segment.check_usable()
        self._board.look()
        self._drop_peers(alive=False)
        with self._lock:
            orphans = [served for served in self._tasks.values() if not served.peer.there]
        for served in orphans:
            if served.task.kind == "read":  # not needed any more, and others may wait for its keys
                served.task.cancel()
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
        peer = self._peer(part.pid, part.client)
        if peer is None:
            self._counted["orphans"] += 1
            return
        with self._lock:
            known = self._tasks.get((part.client, part.task))
        if part.kind in (Kind.STOP, Kind.CANCEL):
            if known is not None:
                (known.task.stop if part.kind is Kind.STOP else known.task.cancel)()
            return
        body = peer.parts.add(part)
        if body is None:
            return
        if known is not None:
            raise Malformed(f"a second task of number {part.task}")
        task = self._begin(Ask.unpack(part.kind, body), part.client)
        served = Served(peer, (part.client, part.task), task)
        with self._lock:
            self._tasks[served.name] = served
        task.progress.watch(lambda: self._tell(served))

    def _begin(self, ask: Ask, client: int) -> StorageTask:
        how = dict(ask.arguments)
        left = min(ask.end - self._tier.options.clock(), ask.timeout, _LONGEST)
        try:
            if left <= 0:
                self._counted["late"] += 1
                raise WaitTimeout(
                    f"timed out: not done within {ask.timeout:g} s, all of it in the queue"
                )
            if how.get("request") is not None:  # that of another client is another request
                how["request"] = (client, how["request"])
            begin: Callable[..., StorageTask] = getattr(self._tier, ask.kind.name.lower())
            return begin(ask.keys, namespace=ask.namespace, timeout=left, **how)
        except LightcacheError as error:
            kind: Literal["write", "read"] = "write" if ask.kind is Kind.WRITE else "read"
            return self._tier.failed_task(kind, max(0, len(ask.keys) - ask.start), error)

    def _peer(self, pid: int, client: int) -> Peer | None:
        """The sender of a message; None: it is gone."""
        peer = self._peers.get((pid, client))
        if peer is None:
            try:
                peer = Peer(board.find_answers(self.cache, pid, client), self._counted)
            except LightcacheError:
                return None
            if not peer.alive:
                peer.close()
                return None
            self._peers[pid, client] = peer
        return peer

    def _drop_peers(self, *, alive: bool) -> None:
        """Close the rings of clients that are gone; with `alive`, of all clients."""
        for name, peer in list(self._peers.items()):
            if alive or not peer.alive:
                with self._publishing:  # figures say all of it, or nothing
                    del self._peers[name]
                    peer.close()

    # ---- answers

    def _tell(self, served: Served) -> None:
        """Push the end of a task to its client, in the thread that ended it. What was before is
        told a moment later (`_repeat`), as the end usually follows."""
        if not served.task.progress.settled:
            with self._lock:
                served.peer.untold[served] = None
            return
        try:
            self._publish()
        except Exception:  # statistics may be late; the client waits for the answer
            log.exception("statistics of the storage service could not be published")
        served.counted = True
        self._push(served)

    def _push(self, served: Served) -> bool:
        """Push the state of a task; False: its client takes nothing now. Then it is repeated while
        the client is there: no other answer follows the end of a task, and the client would wait
        until the task's time is up."""
        peer, ours = served.peer, False
        with self._lock:
            peer.untold.pop(served, None)  # before: another thread may add it meanwhile
        try:
            told = peer.tell(served)
        except Exception:  # our own bug: the thread has other tasks, and this one would fail again
            log.exception("an answer of the storage service could not be made")
            told, ours = False, True
        with self._lock:
            if served.counted:
                self._tasks.pop(served.name, None)
            self._counted["lost"] += not (told or served.refused)
            served.refused = not told
            if peer.there and not (told or ours):
                peer.untold[served] = None
                while len(peer.untold) > MOST_UNTOLD:
                    peer.untold.popitem(last=False)
        return told or ours

    def _repeat(self) -> None:
        """Tell each client what it has not been told, until it refuses."""
        for peer in self._peers.values():
            with self._lock:
                untold = list(peer.untold)
            for served in untold:
                if not self._push(served):
                    break

    # ---- statistics

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
        return self._over.wait(timeout)

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
        deadline = Deadline(timeout)
        self._board.end()
        self._ending.set()
        self._thread.join()
        if not self._closed:
            with contextlib.suppress(LightcacheError):
                self._take_the_rest(deadline)
        ended = self._tier.close(min(deadline.left, threading.TIMEOUT_MAX))
        if not self._closed:
            self._repeat()
            self._leave()
        return ended

    def _take_the_rest(self, deadline: Deadline) -> None:
        """Take the messages that were in the ring when it closed. A turn may take none although
        some are left: with `MOST_TASKS`, or while another process holds the lock."""
        while not (self.why or deadline.passed):
            if not self._turn(0.0):
                if not len(self._ring):
                    return
                time.sleep(_PAUSE)

    def _leave(self) -> None:
        """Close everything. Each step may be repeated after an interrupt: the board knows whether
        it is still ours."""
        self._drop_peers(alive=True)
        self._publish()  # after the peers, which count their incomplete tasks
        with contextlib.suppress(LightcacheError):  # the board was removed
            self._last = self._last or self._board.stats()
        with self._publishing:  # no thread publishes statistics after this
            self._board.leave()
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
