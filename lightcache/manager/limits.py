"""Limits: wait times, errors that disable a manager, and foreign exceptions."""

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


# ---- Time limits

UNKNOWN = 1.0
"""Seconds to wait for a read while the pace of computing is unknown."""
_LEAST = 256
"""Fewest tokens of a prefill that measures the pace: fewer take as long as one forward pass."""
_KEPT = 0.9
"""Weight of older prefills is multiplied by this with each new one: the last ten make two
thirds."""


def seconds_of(timeout: Any) -> float | None:
    """A timeout in seconds, limited to values that every kind of wait takes: at least 0, and at
    most `threading.TIMEOUT_MAX`, which is 292 years. None: no limit.

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
    """The pace at which prompts are computed: tokens a second of one request, from its `take` to
    the commit that completes its prompt. Concurrent requests slow it down and are included, as part
    of the cost of computing now. The manager's lock is around every call."""

    def __init__(self) -> None:
        """No prompt was computed yet."""
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decaying average; 0: unknown."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Note that one prompt's tokens were computed in this time."""
        if tokens >= _LEAST and seconds > 0:
            self._tokens = self._tokens * _KEPT + tokens
            self._seconds = self._seconds * _KEPT + seconds

    def seconds(self, tokens: int) -> float:
        """Seconds that a read of so many tokens is worth waiting for: as long as computing them."""
        return tokens / self.tokens_per_s if self._seconds else UNKNOWN


# ---- Fail open

T = TypeVar("T")
_log = logging.getLogger("lightcache.manager")
_CALLERS = (ConfigError, LeaseLost, OutOfPages, WaitTimeout)
"""Errors of the caller, or errors that it must know: never failures of the cache."""


class FailOpen:
    """Turns our errors into misses, and disables the manager after `failures` errors in a row. A
    lock that does not come in time is a miss and does not count towards that: the process that
    holds it may be stopped, and a later call does the work."""

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
            let_go: drops pins that are not needed without the cache; called when it is disabled.
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
        """Whether calls of the cache are skipped until `enable`."""
        return self._breaker.shut

    def run(self, call: Callable[[], T], miss: Callable[[], T], *, proves: bool = True) -> T:
        """The result of `call`, or of `miss` if it failed or the cache is disabled.

        Args:
            proves: whether success proves that the cache works; it then resets the error count.
        """
        if self._breaker.opened is not None:
            return miss()
        try:
            with Hurried(self._time_limit):
                result = call()
        except _CALLERS:
            raise
        except LightcacheError as error:
            self._failed(error)
            return miss()
        if proves and self._breaker.failures:
            self._breaker.success()
        return result

    def enable(self) -> None:
        """Make calls of the cache again."""
        self._breaker.reset()

    def _failed(self, error: LightcacheError) -> None:
        self._counts.add(errors=1)
        if isinstance(error, LockTimeout):
            return
        if self._breaker.failure(str(error)):
            self._let_go()


def nothing() -> None:
    """The miss of a call without a result."""


# ---- Foreign exceptions


class Foreign:
    """Exceptions of a transfer backend, its copies or a storage that are none of our errors. They
    are kept for the next `poll`."""

    def __init__(self) -> None:
        """Nothing was raised."""
        self._first: Exception | None = None

    def note(self, error: Exception | None) -> None:
        """Keep an exception that failed some work. Our own errors are ignored: the failed object
        raises them."""
        if error is None or isinstance(error, LightcacheError):
            return
        if self._first is None:
            self._first = error
        else:
            _log.warning("beside the exception that poll raises there was another: %r", error)

    def cancel(self, task: StorageTask) -> None:
        """Cancel a task; keep what its storage raises."""
        try:
            task.cancel()
        except Exception as error:
            self.note(error)

    def raise_first(self) -> None:
        """Raise the first exception, once; later ones were logged."""
        error, self._first = self._first, None
        if error is not None:
            raise error


__all__ = ["UNKNOWN", "FailOpen", "Foreign", "Pace", "nothing", "seconds_of"]
