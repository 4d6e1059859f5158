"""Everything that lightcache raises on purpose.

Defined in the lowest layer, because a layer may only import what lies below it; applications import
the same classes from `lightcache` or `lightcache.errors`. Each message says what was expected, what
was found and what to do next. At the border to an engine every one of them counts as a miss.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

_log = logging.getLogger("lightcache")


class LightcacheError(Exception):
    """Root of all errors of this package. Catch it where any failure of the cache means a miss."""


class ConfigError(LightcacheError, ValueError):
    """An argument or a configuration is unusable as given. Nothing was changed; correct it."""


class LayoutMismatch(LightcacheError):
    """A segment or library has another layout, version or configuration than this process expects.

    Attach with the configuration the segment was created with, or the release that created it;
    where its content may be lost, open it with `replace=True`.
    """


class NotReady(LightcacheError):
    """There is no segment of that name, or its creator did not finish it in the time allowed.

    While the creator lives, wait longer; after its death `open` or `create` starts over.
    """


class InUse(LightcacheError):
    """Something cannot be closed, removed or replaced while somebody uses it.

    The message names the users: live views of the pool, attached clients, or held leases. Release
    them first.
    """


class NoSpace(LightcacheError):
    """Shared memory has no room for a segment. The message says how much is wanted and free.

    Ask for fewer pages, enlarge /dev/shm, or remove caches that nobody uses (`lightcache ls`,
    `rm`).
    """


class OutOfPages(LightcacheError):
    """A reservation found too few pages that are free or may be evicted. Nothing was reserved.

    Release leases, ask for less, or go on without caching; a larger pool is the lasting remedy.
    """


class LeaseLost(LightcacheError):
    """A lease, reservation or ticket is no longer valid, so its pages may belong to somebody else.

    It was given back, its deadline passed, or this process was taken for dead and reaped. Do not
    touch the pages; match again.
    """


class Abandoned(LightcacheError):
    """The pages waited for will not come: their writer gave up, died, or the namespace was cleared.
    Or the entries of a log: its writer has left or died, and all that it appended was read.

    Compute them; reserving again makes the caller their writer. A log goes on with another writer.
    """


class Detached(LightcacheError):
    """The object was used after `close`, in a forked child, or after its segment had been retired.

    Attach again; a child process attaches for itself.
    """


class CacheCorrupted(LightcacheError):
    """Shared memory breaks one of its own invariants; the message names the first that is broken.

    Take no page from it. `lightcache check` reports everything, `lightcache repair` rebuilds the
    derived parts, and `open` with `replace=True` starts with an empty cache.
    """


class TransferFailed(LightcacheError):
    """Bytes could not be moved between two media.

    The destination is undefined and was not published. Treat the pages as missing. The cause is
    chained where there is one.
    """


class StorageError(LightcacheError):
    """A file or storage backend could not be read or written. The cause is chained.

    Treat reads as misses and drop the write; look at the disk when it happens again.
    """


class PermissionDenied(LightcacheError, PermissionError):
    """An object has another owner, a wider mode or another type than is safe, or is forbidden.

    Nothing was opened. Correct the owner or the mode, or choose a name or path of your own.
    """


class LockTimeout(LightcacheError, TimeoutError):
    """A lock was not obtained in the time allowed although its holder lives. Nothing was changed.

    The message names the holder and what it does; try again, or look at it with `lightcache dump`.
    """


class WaitTimeout(LightcacheError, TimeoutError):
    """What was waited for had not happened in the time allowed. It may still happen; wait again."""


class NotInstalled(LightcacheError, ImportError):
    """A package that this call needs is not installed, or does not load.

    The message has the command that installs it. Nothing was changed.
    """


def require(package: str, extra: str, what: str) -> None:
    """Import a package of an extra, for `what`: importing it again costs nothing.

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
    """End a `with` by `close`. If its body raised `error`, that is what the caller sees: what
    `close` raises as well, such as `InUse` because the traceback keeps a view alive, is added to it
    as a note (Python 3.11 and later), else logged. What is open then is closed when it is dropped.
    """
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
