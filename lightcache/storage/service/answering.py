"""What a storage service tells its clients: how far their tasks have come."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightcache.shm.waiting import Condition
from lightcache.storage.breaker import log
from lightcache.storage.service.messages import Answer
from lightcache.storage.service.peers import Peer
from lightcache.storage.tiers import COUNTS, StorageTask, TaskState

AGAIN = 0.25  # seconds until what a client did not let in is told once more
_UNTOLD = 1 << 14  # answers that wait for that, of all clients


class Served:
    """A task of a client's, and the tier's task for it."""

    def __init__(
        self, peer: Peer, client: int, number: int, task: StorageTask, ahead: int = 0
    ) -> None:
        """As it was taken.

        Args:
            ahead: pages in front of those of the tier's task, which are done.
        """
        self.peer = peer
        self.task = task
        self.name = (client, number)
        self._ahead = max(0, ahead)  # nothing is done of a task that is refused as a whole

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
        prefix = self._ahead + found.prefix
        return Answer(self.name[1], state, prefix, counts, found.reasons).pack()


class Answers:
    """Tasks that live, and a thread that tells of them. What changes while it is about something
    else is told once: clients hear of the last state, not of each. What a client has no room for,
    or does not let in, is told again, as long as the client is there: nothing follows the end of
    a task, and its client would wait for it until the task's time is up."""

    def __init__(self, publish: Callable[[], None], lost: Callable[[int], None]) -> None:
        """No thread yet.

        Args:
            publish: called before answers go out, so that figures have what they tell.
            lost: told how many answers were not let in, and are told again.
        """
        self._publish, self._lost = publish, lost
        self._changed = Condition()
        self._tasks: dict[tuple[int, int], Served] = {}
        self._news: dict[Served, None] = {}
        self._untold: dict[Served, None] = {}  # of the thread alone
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

    def orphans(self) -> list[StorageTask]:
        """Tasks of clients that are gone."""
        with self._changed:
            every = list(self._tasks.values())
        return [served.task for served in every if not served.peer.there]

    def __len__(self) -> int:
        return len(self._tasks)

    def _note(self, served: Served) -> None:
        with self._changed:
            self._news[served] = None
            self._changed.notify_all()

    def _tell(self) -> None:
        while True:
            with self._changed:
                pause = AGAIN if self._untold else None
                self._changed.wait_for(lambda: self._news or self._ending, pause)
                last = self._ending and not self._news  # what is untold is told once more
                news, self._news = self._news, {}
            told = [*(each for each in self._untold if each not in news), *news]
            try:
                if told:
                    self._tell_of(told)
            except Exception:  # ours, then: other tasks are to be told of
                log.exception("answers of the storage service could not be told")
            if last:
                return

    def _tell_of(self, news: list[Served]) -> None:
        by_peer: dict[Peer, list[tuple[Served, bytes]]] = {}
        for served in news:
            over = served.task._settled  # before the answer: it is told of once more if not
            try:
                answer = served.answer()
            except Exception:  # ours, then: it is dropped, and the others are not
                log.exception("an answer of the storage service could not be made")
                self._lost(1)
                over = True
            else:
                by_peer.setdefault(served.peer, []).append((served, answer))
            if over:
                with self._changed:
                    self._tasks.pop(served.name, None)
        try:
            self._publish()
        except Exception:  # figures are late, then: the answers are waited for
            log.exception("figures of the storage service could not be published")
        before, self._untold = self._untold, {}
        for peer, answers in by_peer.items():
            lost = peer.push([answer for _, answer in answers])
            untold = [served for served, _ in answers[len(answers) - lost :]]
            self._lost(sum(served not in before for served in untold))
            if peer.there and len(self._untold) + lost <= _UNTOLD:
                self._untold.update(dict.fromkeys(untold))

    def close(self) -> None:
        """Tell what there is to tell, once, and end."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()


__all__ = ["Answers", "Served"]
