"""When to stop calling something that fails, and when to try it again: the one circuit breaker."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

Clock = Callable[[], float]
Text = Callable[[int, str], str]
"""What messages say: from the number of failures in a row, and the last of them."""


class CircuitBreaker:
    """Closed: calls are made. It opens after `failures` failures in a row, or at the first call
    that used up its time while no other call succeeded: then no call is made. `retry` seconds later
    one call may be made to see whether it works again, the probe; until it has ended, the breaker
    is half-open. Its success closes the breaker, its failure opens it for as long again.

    Any thread may call it. It makes no call itself.
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
        """Closed.

        Args:
            failures: in a row that open it.
            retry: seconds until a probe may be made; infinite: never, until `reset`.
            text: what is logged when it opens, and given as the reason while it is open.
            works: what is logged when a probe has closed it.
        """
        self._most, self._retry, self._clock = failures, retry, clock
        self._text, self._works = text, works
        self._log = log or logging.getLogger("lightcache")
        self._lock = threading.Lock()
        self._failures = 0
        self._opened: float | None = None
        self._succeeded = -math.inf  # when a call did last
        self._probing = False
        self._why = ""

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        """As it is now. Half-open: a probe is due, or under way."""
        with self._lock:
            if self._opened is None:
                return "closed"
            return "half-open" if self._probing or self._wait() <= 0.0 else "open"

    @property
    def failing(self) -> bool:
        """Whether the last call failed. No lock."""
        return self._failures > 0

    @property
    def shut(self) -> bool:
        """Whether calls are refused. Also while a probe is due, which is not any caller's."""
        return self._opened is not None

    @property
    def reason(self) -> str:
        """Why calls are refused; empty: they are not."""
        with self._lock:
            return "" if self._opened is None else self._text(self._failures, self._why)

    @property
    def wait(self) -> float | None:
        """Seconds until a probe is due; None: none will be."""
        with self._lock:
            return None if self._opened is None or self._probing else max(0.0, self._wait())

    def _wait(self) -> float:
        return 0.0 if self._opened is None else self._opened + self._retry - self._clock()

    def probe(self) -> bool:
        """Whether a probe is due: then it is this caller's, who tells `success` or `failure` of it,
        always. False for all others until then."""
        with self._lock:
            if self._opened is None or self._probing or self._wait() > 0.0:
                return False
            self._probing = True
            return True

    def leave(self) -> None:
        """The probe was not made: another one is due."""
        with self._lock:
            self._probing = False

    def success(self) -> None:
        """A call did what it should."""
        with self._lock:
            was, self._opened = self._opened, None
            self._failures, self._probing, self._succeeded = 0, False, self._clock()
        if was is not None and self._works:
            self._log.info("%s", self._works)

    def failure(self, why: str, since: float | None = None) -> bool:
        """A call failed, or has not come back.

        Args:
            since: when it began, of one that used up all of the time that calls are given. If no
                call succeeded since then, it is enough to open.

        Returns:
            Whether this has opened it.
        """
        with self._lock:
            self._failures += 1
            self._why = why
            silent = since is not None and self._succeeded <= since
            opens = self._opened is None and (silent or self._failures >= self._most)
            if opens or self._probing:
                self._opened, self._probing = self._clock(), False
            said = self._text(self._failures, why)
        if opens:  # once, not with every probe that fails
            self._log.warning("%s", said)
        return opens

    def reset(self) -> None:
        """Closed, without a word."""
        with self._lock:
            self._opened, self._failures, self._probing = None, 0, False


__all__ = ["CircuitBreaker", "Clock"]
