"""Exceptions that are none of ours: what a mover raises, a copy that it has begun, or a storage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from lightcache.breaker import Breaker
from lightcache.errors import (
    ConfigError,
    LeaseLost,
    LightcacheError,
    LockTimeout,
    OutOfPages,
    WaitTimeout,
)
from lightcache.manager.statistics import Figures
from lightcache.shm.locking import Hurried

if TYPE_CHECKING:
    from lightcache.storage.tasks import StorageTask


# ---- Time limits: of calls that wait for a copy, and of reads that a request waits for.

UNKNOWN = 1.0
"""Seconds that a read is waited for while nobody knows what computing takes."""
_LEAST = 256
"""Tokens of a prefill that says how fast computing is: fewer take as long as a pass takes."""
_KEPT = 0.9
"""Of what an older prefill counts, with each newer one: the last ten make two thirds."""


def seconds_of(timeout: Any) -> float | None:
    """Seconds that a call may wait, as anything can wait that a mover is made of: at least 0, and
    at most `threading.TIMEOUT_MAX`, which is 292 years. None: no limit.

    Raises:
        ConfigError: no number of seconds.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or timeout != timeout:
        raise ConfigError(f"timeout: expected seconds, or None for no limit, found {timeout!r}")
    found: Any = timeout
    return float(min(max(found, 0), threading.TIMEOUT_MAX))


class Pace:
    """How fast prompts are computed, by what commits have told: tokens a second of requests that
    ran, from `take` to the commit that completes the prompt, others beside them included. That is
    what computing costs a request now. The manager's lock is around every call."""

    def __init__(self) -> None:
        """Nothing was computed yet."""
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decaying average; 0: not known yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """So many tokens of one prompt were computed in so many seconds."""
        if tokens >= _LEAST and seconds > 0:
            self._tokens = self._tokens * _KEPT + tokens
            self._seconds = self._seconds * _KEPT + seconds

    def seconds(self, tokens: int) -> float:
        """That a read of so many tokens is worth waiting for: what computing them takes."""
        return tokens / self.tokens_per_s if self._seconds else UNKNOWN


# ---- Fail open: what goes wrong in the cache is a miss to the engine, and after a few misses
# silence.

T = TypeVar("T")
_log = logging.getLogger("lightcache.manager")
_CALLERS = (ConfigError, LeaseLost, OutOfPages, WaitTimeout)
"""What the caller did, or has to know: never a failure of ours."""


class Guard:
    """Turns our errors into misses; disables the manager after so many, one behind the other. A
    lock that does not come soon is a miss and no more: who holds it may be stopped, and what was to
    be done is done later."""

    def __init__(
        self,
        failures: int,
        time_limit: float,
        figures: Figures,
        let_go: Callable[[], None],
        of: str = "KVCacheManager",
    ) -> None:
        """Enabled.

        Args:
            time_limit: seconds that a call waits for a lock: see `Hurried`.
            let_go: gives back what is not needed without the cache; called when it is disabled.
            of: whose `enable` ends that.
        """
        self._figures, self._let_go = figures, let_go
        self._time_limit = time_limit

        def text(errors: int, last: str) -> str:
            return (
                f"the KV cache is disabled after {errors} errors, everything is computed; the last:"
                f" {last}; `lightcache doctor` and `lightcache check` say more, {of}.enable() tries"
                " again"
            )

        self._breaker = Breaker(failures, text=text, log=_log)

    @property
    def disabled(self) -> bool:
        """Nothing is asked of the cache any more. `enable` ends it."""
        return self._breaker.shut

    def run(self, call: Callable[[], T], miss: Callable[[], T], *, proves: bool = True) -> T:
        """The result of a call, or of `miss` when it failed or is not made any more.

        Args:
            proves: whether the cache is well if this call went well: errors before do not count
                any more then.
        """
        if self.disabled:
            return miss()
        try:
            with Hurried(self._time_limit):
                found = call()
        except _CALLERS:
            raise
        except LightcacheError as error:
            self._failed(error)
            return miss()
        if proves and self._breaker.failing:
            self._breaker.success()
        return found

    def enable(self) -> None:
        """Ask the cache again."""
        self._breaker.reset()

    def _failed(self, error: LightcacheError) -> None:
        self._figures.add(errors=1)
        if isinstance(error, LockTimeout):
            return
        if self._breaker.failure(str(error)):
            self._let_go()


def nothing() -> None:
    """The miss of a call whose result nobody needs."""


# ---- Exceptions that are none of ours: what a mover raises, a copy that it has begun, or a
# storage.


class Foreign:
    """What was raised in the middle of our own work, until somebody can be told: whoever polls."""

    def __init__(self) -> None:
        """Nothing was raised."""
        self._first: Exception | None = None

    def note(self, error: Exception | None) -> None:
        """Something has failed for this reason. Ours are told by what has failed, and not here."""
        if error is None or isinstance(error, LightcacheError):
            return
        if self._first is None:
            self._first = error
        else:
            _log.warning("beside the exception that poll raises there was another: %r", error)

    def cancel(self, task: StorageTask) -> None:
        """Nothing is wanted of a task any more, whatever its storage raises."""
        try:
            task.cancel()
        except Exception as error:
            self.note(error)

    def tell(self) -> None:
        """Raise the first of them, once; those behind it were logged."""
        error, self._first = self._first, None
        if error is not None:
            raise error


__all__ = ["UNKNOWN", "Foreign", "Guard", "Pace", "nothing", "seconds_of"]
