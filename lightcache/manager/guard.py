"""Fail open: what goes wrong in the cache is a miss to the engine, and after a few misses
silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from lightcache.errors import ConfigError, LeaseLost, LightcacheError, OutOfPages, WaitTimeout
from lightcache.manager.statistics import Figures

T = TypeVar("T")
_log = logging.getLogger("lightcache.manager")
_CALLERS = (ConfigError, LeaseLost, OutOfPages, WaitTimeout)
"""What the caller did, or has to know: never a failure of ours."""


class Guard:
    """Turns our errors into misses; disables the manager after so many, one behind the other."""

    def __init__(
        self,
        failures: int,
        figures: Figures,
        let_go: Callable[[], None],
        of: str = "KVCacheManager",
    ) -> None:
        """Enabled.

        Args:
            let_go: gives back what is not needed without the cache; called when it is disabled.
            of: whose `enable` ends that.
        """
        self._most, self._figures, self._let_go, self._of = failures, figures, let_go, of
        self._behind = 0
        self.disabled = False
        """Nothing is asked of the cache any more. `enable` ends it."""

    def run(self, call: Callable[[], T], miss: Callable[[], T], *, proves: bool = True) -> T:
        """The result of a call, or of `miss` when it failed or is not made any more.

        Args:
            proves: whether the cache is well if this call went well: errors before do not count
                any more then.
        """
        if self.disabled:
            return miss()
        try:
            found = call()
        except _CALLERS:
            raise
        except LightcacheError as error:
            self._failed(error)
            return miss()
        if proves:
            self._behind = 0
        return found

    def enable(self) -> None:
        """Ask the cache again."""
        self.disabled, self._behind = False, 0

    def _failed(self, error: LightcacheError) -> None:
        self._figures.add(errors=1)
        self._behind += 1
        if self._behind >= self._most:
            self.disabled = True
            _log.warning(
                "the KV cache is disabled after %d errors, everything is computed; the last: %s; "
                "`lightcache doctor` and `lightcache check` say more, %s.enable() tries again",
                self._behind,
                error,
                self._of,
            )
            self._let_go()


def nothing() -> None:
    """The miss of a call whose result nobody needs."""


__all__ = ["Guard", "nothing"]
