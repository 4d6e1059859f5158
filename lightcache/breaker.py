"""The circuit breaker: stops calls to a component that fails, and retries later."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

Clock = Callable[[], float]
Text = Callable[[int, str], str]
"""Makes messages from the number of consecutive failures and the last reason."""


class CircuitBreaker:
    """Closed: calls are made. It opens after `failures` consecutive failures, or at the first call
    that timed out while no other call succeeded: then no call is made. `retry` seconds later one
    call, the probe, may be made; until it ends, the breaker is half-open. Its success closes the
    breaker, its failure opens it for as long again.

    Thread-safe. The breaker itself makes no call.
    """

    def __init__(
        self,
        failures: int,
        retry: float = math.inf,
        clock: Clock = time.monotonic,
        *,
        text: Text,
        works: str = "",
        log: logging.Logger | None = None,
    ) -> None:
        """Closed at first.

        Args:
            failures: number of consecutive failures that open it.
            retry: seconds until a probe may be made; infinite: never, until `reset`.
            text: the log message when it opens, and the reason while it is open.
            works: the log message when a probe has closed it.
        """
        self._most, self._retry, self._clock = failures, retry, clock
        self._text, self._works = text, works
        self._log = log or logging.getLogger("lightcache")
        self._lock = threading.Lock()
        self.failures = 0
        """Number of consecutive failures: 0 if the last call succeeded."""
        self.opened: float | None = None
        """Time when it opened; None: closed. Neither attribute takes the lock."""
        self._succeeded = -math.inf  # time of the last success
        self._probing = False
        self._why = ""

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        """The state at this moment. Half-open: a probe is due, or running."""
        with self._lock:
            if self.opened is None:
                return "closed"
            return "half-open" if self._probing or self._wait() <= 0.0 else "open"

    @property
    def shut(self) -> bool:
        """True if calls are refused. Also true while a probe is due, which only one caller may
        make."""
        return self.opened is not None

    @property
    def reason(self) -> str:
        """Why calls are refused; empty: they are not."""
        with self._lock:
            return "" if self.opened is None else self._text(self.failures, self._why)

    @property
    def wait(self) -> float | None:
        """Seconds until a probe is due; None: no probe will be due."""
        with self._lock:
            return None if self.opened is None or self._probing else max(0.0, self._wait())

    def _wait(self) -> float:
        return 0.0 if self.opened is None else self.opened + self._retry - self._clock()

    def probe(self) -> bool:
        """Return True if a probe is due. This caller must then make it, and always report `success`
        or `failure`. Other callers get False until then."""
        with self._lock:
            if self.opened is None or self._probing or self._wait() > 0.0:
                return False
            self._probing = True
            return True

    def leave(self) -> None:
        """The probe was not made: another one is due."""
        with self._lock:
            self._probing = False

    def success(self) -> None:
        """Report that a call succeeded."""
        with self._lock:
            was, self.opened = self.opened, None
            self.failures, self._probing, self._succeeded = 0, False, self._clock()
        if was is not None and self._works:
            self._log.info("%s", self._works)

    def failure(self, why: str, since: float | None = None) -> bool:
        """Report that a call failed, or timed out.

        Args:
            since: start time of a call that timed out. If no call succeeded since then, this
                failure alone opens the breaker.

        Returns:
            True if this call has opened it.
        """
        with self._lock:
            self.failures += 1
            self._why = why
            silent = since is not None and self._succeeded <= since
            opens = self.opened is None and (silent or self.failures >= self._most)
            if opens or self._probing:
                self.opened, self._probing = self._clock(), False
            message = self._text(self.failures, why)
        if opens:  # once, not with every probe that fails
            self._log.warning("%s", message)
        return opens

    def reset(self) -> None:
        """Close it, without a log message."""
        with self._lock:
            self.opened, self.failures, self._probing = None, 0, False


__all__ = ["CircuitBreaker", "Clock"]
