"""Exceptions that are none of ours: what a mover raises, a copy that it has begun, or a storage."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightcache.errors import LightcacheError

if TYPE_CHECKING:
    from lightcache.storage.tasks import StorageTask

_log = logging.getLogger("lightcache.manager")


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


__all__ = ["Foreign"]
