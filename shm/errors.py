"""All errors that lightcache raises on purpose.

Defined in the lowest layer, because a layer may only import from layers below it; applications
import the same classes from `lightcache` or `lightcache.errors`. Each message says what was
expected, what was found and what to do. At the border to an engine every error counts as a miss.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

_log = logging.getLogger("lightcache")


class LightcacheError(Exception):
    """Root of all errors of this package. Catch it where any failure of the cache means a miss."""


class ConfigError(LightcacheError, ValueError):
    """An argument or a configuration is invalid. Nothing was changed; correct it."""


class LayoutMismatch(LightcacheError):
    """A segment or library has another layout, version or configuration than this process expects.

    Attach with the configuration or the release that created the segment. If its content may be
    lost, open it with `replace=True`.
    """


class NotReady(LightcacheError):
    """No segment has this name, or its creator did not finish in time.

    While the creator lives, wait longer; after its death `open` or `create` starts over.
    """


class InUse(LightcacheError):
    """An object is still in use and cannot be closed, removed or replaced.

    The message names the users: views of the pool, attached clients, or held leases. Release them
    first.
    """


class NoSpace(LightcacheError):
    """Shared memory has no room for a segment. The message says how much is wanted and free.

    Ask for fewer pages, enlarge /dev/shm, or remove unused caches (`lightcache ls`, `rm`).
    """


class OutOfPages(LightcacheError):
    """A reservation found too few pages that are free or can be evicted. Nothing was reserved.

    Release leases, ask for less, or continue without caching; a larger pool is the lasting remedy.
    """


class LeaseLost(LightcacheError):
    """A lease, reservation or ticket is no longer valid, so another client may have its pages.

    It was given back, its deadline passed, or this process was taken for dead and reaped. Do not
    touch the pages; match again.
    """


class Abandoned(LightcacheError):
    """The awaited pages will not come: their writer gave up, died, or the namespace was cleared.
    For a log: its writer has left or died, and all its entries were read.

    Compute the pages; a caller that reserves them again becomes their writer. A log continues with
    another writer.
    """


class Detached(LightcacheError):
    """The object was used after `close`, in a forked child, or after its segment was retired.

    Attach again; a child process attaches for itself.
    """


class CacheCorrupted(LightcacheError):
    """Shared memory breaks one of its own invariants; the message names the first that is broken.

    Use no page of it. `lightcache check` reports everything, `lightcache repair` rebuilds derived
    data, and `open` with `replace=True` starts with an empty cache.
    """


class TransferFailed(LightcacheError):
    """Bytes could not be moved between two media.

    The destination is undefined and was not published. Treat the pages as missing. The cause is
    chained, if known.
    """


class StorageError(LightcacheError):
    """A file or storage backend could not be read or written. The cause is chained.

    Treat reads as misses and drop the write; check the disk if it happens again.
    """


class PermissionDenied(LightcacheError, PermissionError):
    """An object has an unsafe owner, mode or type, or access to it is forbidden.

    Nothing was opened. Correct the owner or the mode, or choose another name or path.
    """


class LockTimeout(LightcacheError, TimeoutError):
    """A lock was not obtained in time although its holder lives. Nothing was changed.

    The message names the holder and its operation; try again, or inspect it with `lightcache dump`.
    """


class WaitTimeout(LightcacheError, TimeoutError):
    """The awaited event did not happen in time. It may still happen; wait again."""


class NotInstalled(LightcacheError, ImportError):
    """A package that this call needs is not installed, or does not load.

    The message has the command that installs it. Nothing was changed.
    """


def require(package: str, extra: str, what: str) -> None:
    """Import a package of an extra, for `what`. Repeated calls cost nothing.

    Raises:
        NotInstalled: with the command that installs it.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise NotInstalled(
            f"{what} needs the package {package} ({error}): pip install 'lightcache[{extra}]'",
            name=package,
        ) from error


def leave(close: Callable[[], object], error: BaseException | None) -> None:
    """End a `with` by `close`. If the body raised `error`, the caller gets that error. An exception
    of `close`, such as `InUse` because the traceback keeps a view alive, is added to it as a note
    (Python 3.11 and later), else logged. Objects left open are closed when they are dropped."""
    if error is None:
        close()
        return
    try:
        close()
    except Exception as second:
        text = f"and while this error ended a with statement: {type(second).__name__}: {second}"
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            _log.warning("%s: %s", type(error).__name__, text)
