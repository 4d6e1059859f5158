"""Limits: how long a call may wait, how many errors disable a manager, and how far exceptions of
transfer backends and storages get."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from lightcache.breaker import CircuitBreaker
from lightcache.errors import (
    ConfigError,
    LeaseLost,
    LightcacheError,
    LockTimeout,
    OutOfPages,
    WaitTimeout,
)
from lightcache.manager.stats import Counters
from lightcache.shm.locking import Hurried

if TYPE_CHECKING:
    from lightcache.storage.tasks import StorageTask


# ---- Time limits: of calls that wait for a copy, and of reads that a request waits for.

UNKNOWN = 1.0
"""Seconds that a read is waited for while it is not known what computing takes."""
_LEAST = 256
"""Tokens of a prefill whose time says how fast computing is: fewer take as long as a pass."""
_KEPT = 0.9
"""Factor of the weight of older prefills, with each newer one: the last ten make two thirds."""


def seconds_of(timeout: Any) -> float | None:
    """Seconds that a call may wait, limited to values that every kind of wait takes: at least 0,
    and at most `threading.TIMEOUT_MAX`, which is 292 years. None: no limit.

    Raises:
        ConfigError: no number of seconds.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or timeout != timeout:
        raise ConfigError(f"timeout: expected seconds, or None for no limit, found {timeout!r}")
    seconds: Any = timeout
    return float(min(max(seconds, 0), threading.TIMEOUT_MAX))


class Pace:
    """How fast prompts are computed, in tokens a second of a request, from its `take` to the commit
    that completes its prompt. Requests that run beside it slow it down: that is the cost of
    computing now. The manager's lock is around every call."""

    def __init__(self) -> None:
        """No prompt was computed yet."""
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
        """How long a read of so many tokens is worth waiting for: as long as computing them."""
        return tokens / self.tokens_per_s if self._seconds else UNKNOWN


# ---- Fail open: an error of the cache is a miss to the engine, and after a few of them the cache
# is not asked any more.

T = TypeVar("T")
_log = logging.getLogger("lightcache.manager")
_CALLERS = (ConfigError, LeaseLost, OutOfPages, WaitTimeout)
"""Errors of the caller, or that it has to know: never a failure of the cache."""


class FailOpen:
    """Turns our errors into misses, and disables the manager after so many in a row. A lock that
    does not come soon is only a miss: the process that holds it may be stopped, and a later call
    does the work."""

    def __init__(
        self,
        failures: int,
        time_limit: float,
        counts: Counters,
        let_go: Callable[[], None],
        of: str = "KVCacheManager",
    ) -> None:
        """Enabled.

        Args:
            time_limit: seconds that a call waits for a lock: see `Hurried`.
            let_go: gives back what is not needed without the cache; called when it is disabled.
            of: the class whose `enable` makes calls again.
        """
        self._counts, self._let_go = counts, let_go
        self._time_limit = time_limit

        def text(errors: int, last: str) -> str:
            return (
                f"the KV cache is disabled after {errors} errors, everything is computed; the last:"
                f" {last}; `lightcache doctor` and `lightcache check` say more, {of}.enable() tries"
                " again"
            )

        self._breaker = CircuitBreaker(failures, text=text, log=_log)

    @property
    def disabled(self) -> bool:
        """Whether the cache is not asked any more, until `enable`."""
        return self._breaker.shut

    def run(self, call: Callable[[], T], miss: Callable[[], T], *, proves: bool = True) -> T:
        """The result of a call, or of `miss` when it failed or is not made any more.

        Args:
            proves: whether success of this call proves that the cache works: then earlier errors do
                not count any more.
        """
        if self._breaker.shut:
            return miss()
        try:
            with Hurried(self._time_limit):
                result = call()
        except _CALLERS:
            raise
        except LightcacheError as error:
            self._failed(error)
            return miss()
        if proves and self._breaker.failing:
            self._breaker.success()
        return result

    def enable(self) -> None:
        """Ask the cache again."""
        self._breaker.reset()

    def _failed(self, error: LightcacheError) -> None:
        self._counts.add(errors=1)
        if isinstance(error, LockTimeout):
            return
        if self._breaker.failure(str(error)):
            self._let_go()


def nothing() -> None:
    """The miss of a call without a result."""


# ---- Exceptions that are none of our errors: of a transfer backend, a copy that it has begun, or
# a storage.


class Foreign:
    """Exceptions that came in the middle of our own work. They are kept for the next `poll`."""

    def __init__(self) -> None:
        """Nothing was raised."""
        self._first: Exception | None = None

    def note(self, error: Exception | None) -> None:
        """Work has failed for this reason. Our own errors are raised by the failed object, not
        here."""
        if error is None or isinstance(error, LightcacheError):
            return
        if self._first is None:
            self._first = error
        else:
            _log.warning("beside the exception that poll raises there was another: %r", error)

    def cancel(self, task: StorageTask) -> None:
        """Cancel a task, whatever its storage raises."""
        try:
            task.cancel()
        except Exception as error:
            self.note(error)

    def tell(self) -> None:
        """Raise the first of them, once; later ones were logged."""
        error, self._first = self._first, None
        if error is not None:
            raise error


__all__ = ["UNKNOWN", "FailOpen", "Foreign", "Pace", "nothing", "seconds_of"]
