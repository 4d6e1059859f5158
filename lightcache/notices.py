"""Notices: warnings that are logged the first time their cause occurs, and counted afterwards."""

from __future__ import annotations

import logging


class Notices:
    """Logs a warning once for each cause. Thread-safe: of two threads at most both log."""

    def __init__(self, log: logging.Logger) -> None:
        """No cause has occurred."""
        self._log = log
        self._causes: set[str] = set()

    def first(self, cause: str, message: str, *arguments: object) -> None:
        """Log this warning, unless one of the same cause was logged."""
        if cause not in self._causes:
            self._causes.add(cause)
            self._log.warning(message, *arguments)


__all__ = ["Notices"]
