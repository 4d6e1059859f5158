"""A connector's way to the cache: opened, closed and opened again in a thread of its own, so that
the engine's thread never waits for it; troubles, each said once; methods that never raise."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, cast

from lightcache.errors import CacheCorrupted, Detached

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger("lightcache.connectors")
FIRST, MOST = 1.0, 60.0
"""Seconds between two tries to open the cache: the first pause, and the longest."""
LATE = 15.0
"""Seconds after which a try that neither opens nor fails is warned of. It is not given up."""
LEAVE = 1.0
"""Seconds that closing waits for a try under way: what it opens is closed when it has ended."""


class Voice:
    """Says each kind of trouble once, until all is well again."""

    def __init__(
        self,
        who: str,
        keeps: bool = False,
        what: str = "the cache",
        then: str = "the engine computes instead",
    ) -> None:
        """
        Args:
            keeps: what there is to say is kept until it is taken, as another says it.
            then: what becomes of it.
        """
        self._who, self.what, self._then = who, what, then
        self._said: set[str] = set()
        self._kept: dict[str, str] | None = {} if keeps else None
        self._helped = False
        self.count = 0
        """Of errors, said or not."""

    def trouble(self, what: str, error: object) -> None:
        """Warn, unless such an error was warned of."""
        self.count += 1
        kind = type(error).__name__ if isinstance(error, BaseException) else str(error)
        self._say(kind, f"{what}: {error}")

    def _say(self, kind: str, text: str) -> None:
        if kind in self._said:
            return
        self._said.add(kind)
        if (kept := self._kept) is not None:
            kept[kind] = text
        else:
            _log.warning("%s: %s; %s", self._who, text, self._then)

    def take(self) -> tuple[tuple[str, str], ...]:
        """Kinds and texts that were kept. From now on it speaks for itself."""
        kept, self._kept = self._kept, None
        return tuple((kept or {}).items())

    def pass_on(self, troubles: Iterable[tuple[str, str]]) -> None:
        """Say what others have kept: each kind once, though it was met by several."""
        for kind, text in troubles:
            self._say(kind, text)

    def well(self) -> None:
        """It helps, for the first time or again."""
        if self._said:
            self._said.clear()
            when = "again" if self._helped else "now"
            _log.warning("%s: %s is used %s", self._who, self.what, when)
        self._helped = True


class Link(Generic[T]):
    """Holds what `opens` returns, and replaces it when it was lost."""

    def __init__(self, voice: Voice, opens: Callable[[], T], closes: Callable[[T], object]) -> None:
        """Opens nothing yet.

        Args:
            opens: called in the thread, again after each failure, ever less often.
            closes: called in the thread with what was lost.
        """
        self._voice, self._opens, self._closes = voice, opens, closes
        self._current: T | None = None
        self._lost: deque[T] = deque()
        self._wake, self._tried = threading.Event(), threading.Event()
        self._ended = False
        self._closing = threading.Lock()
        self._losing = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def current(self) -> T | None:
        """What is open now. One load: the engine's thread asks in each call."""
        return self._current

    def start(self, timeout: float) -> None:
        """Begin, and wait so many seconds at most for the end of the first try."""
        self._thread = threading.Thread(target=self._run, name="lightcache-link", daemon=True)
        self._thread.start()
        self._tried.wait(timeout)

    def lose(self, side: T) -> None:
        """This one is of no use any more: close it, once, and open another. Any thread."""
        with self._losing:
            if side is not self._current:
                return
            self._current = None
            self._lost.append(side)
        self._wake.set()

    def judge(self, side: T, error: BaseException) -> None:
        """Lose it if an error of a call on it says so."""
        if isinstance(error, (Detached, CacheCorrupted)):
            self.lose(side)

    def close(self, timeout: float) -> None:
        """End the thread, and close what is open."""
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout if self._current is not None else min(timeout, LEAVE))
        self._leave()

    def _leave(self) -> None:
        """Close what is open. By who closes, and by the thread, which may have opened it later."""
        with self._closing:
            if (side := self._current) is not None:
                self.lose(side)
            self._close_lost()

    def _run(self) -> None:
        pause = 0.0
        while not self._ended:
            self._close_lost()
            if self._current is None:
                try:
                    with self._late():
                        self._current = self._opens()
                    pause = 0.0
                    self._voice.well()
                except Exception as error:
                    pause = min(MOST, max(FIRST, 2 * pause))
                    self._voice.trouble(f"open {self._voice.what}", error)
                self._tried.set()
            if not self._ended:
                self._wake.wait(pause or None)
                self._wake.clear()
        self._leave()

    @contextlib.contextmanager
    def _late(self) -> Iterator[None]:
        """Warn of what takes long: this thread cannot, as it is held up."""
        what = f"open {self._voice.what}"
        text = f"it has not answered for {LATE:g} s, and joins when it does"
        timer = threading.Timer(LATE, self._voice.trouble, (what, text))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _close_lost(self) -> None:
        while True:
            try:
                side = self._lost.popleft()
            except IndexError:  # there is none, or another thread was faster
                return
            try:
                self._closes(side)
            except Exception as error:
                _log.info("lightcache: what was lost could not be closed: %s", error)


class Guarded(Protocol):
    """A connector: an engine calls its methods."""

    def trouble(self, what: str, error: BaseException) -> None:
        """An error of a call: say it once, and learn from it."""


def guarded(default: Callable[[], object]) -> Callable[[F], F]:
    """An error of the method is said once, and `default()` is its answer."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def call(self: Guarded, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except Exception as error:
                self.trouble(method.__name__, error)
                return default()

        return cast(F, call)

    return wrap


__all__ = ["Guarded", "Link", "Voice", "guarded"]
