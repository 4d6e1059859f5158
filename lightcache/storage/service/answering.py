"""What a storage service tells its clients: how far their tasks have come."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightcache.storage.breaker import log
from lightcache.storage.service.messages import Answer
from lightcache.storage.service.peers import Peer
from lightcache.storage.tasks import COUNTS, StorageTask, TaskState


class Served:
    """A task of a client's, and the tier's task for it."""

    def __init__(self, peer: Peer, client: int, number: int, task: StorageTask) -> None:
        """As it was taken."""
        self.peer = peer
        self.task = task
        self.name = (client, number)

    def answer(self) -> bytes:
        """How far it has come."""
        task = self.task
        # Before the result: what is said to be over is all there. And what was not counted yet is
        # not over: who hears of the end finds it in the figures.
        state = task.state
        if task.over and not task._settled:
            state = TaskState.RUNNING
        found = task.result
        counts = {name: getattr(found, name) for name in COUNTS}
        return Answer(self.name[1], state, found.prefix, counts, found.reasons).pack()


class Answers:
    """Tasks that live, and a thread that tells of them. What changes while it is about something
    else is told once: clients hear of the last state, not of each."""

    def __init__(self, publish: Callable[[], None], lost: Callable[[int], None]) -> None:
        """No thread yet.

        Args:
            publish: called before answers go out, so that figures have what they tell.
            lost: told how many answers found no room.
        """
        self._publish, self._lost = publish, lost
        self._changed = threading.Condition()
        self._tasks: dict[tuple[int, int], Served] = {}
        self._news: dict[Served, None] = {}
        self._ending = False
        self._thread = threading.Thread(
            target=self._tell, name="lightcache-storage-answers", daemon=True
        )

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def serve(self, served: Served) -> None:
        """From now on, tell of it."""
        with self._changed:
            self._tasks[served.name] = served
        served.task._watch(lambda: self._note(served))

    def find(self, client: int, number: int) -> StorageTask | None:
        """A task that is not over, as far as its client was told."""
        with self._changed:
            served = self._tasks.get((client, number))
        return None if served is None else served.task

    def __len__(self) -> int:
        return len(self._tasks)

    def _note(self, served: Served) -> None:
        with self._changed:
            self._news[served] = None
            self._changed.notify_all()

    def _tell(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._news or self._ending)
                if not self._news:
                    return
                news, self._news = self._news, {}
            try:
                self._tell_of(list(news))
            except Exception:  # ours, then: other tasks are to be told of
                log.exception("answers of the storage service could not be told")

    def _tell_of(self, news: list[Served]) -> None:
        by_peer: dict[Peer, list[bytes]] = {}
        for served in news:
            over = served.task._settled  # before the answer: it is told of once more if not
            by_peer.setdefault(served.peer, []).append(served.answer())
            if over:
                with self._changed:
                    self._tasks.pop(served.name, None)
        try:
            self._publish()
        except Exception:  # figures are late, then: the answers are waited for
            log.exception("figures of the storage service could not be published")
        for peer, answers in by_peer.items():
            if lost := peer.push(answers):
                self._lost(lost)

    def close(self) -> None:
        """Tell what there is to tell, and end."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()


__all__ = ["Answers", "Served"]
