"""Several storages as one: fast and small in front, slow and large behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightcache import _arguments
from lightcache.errors import ConfigError, StorageError
from lightcache.storage.arguments import (
    Clock,
    Counters,
    Deadline,
    check_batch,
    check_keys,
    check_parent,
    check_tokens,
    timed_out,
)
from lightcache.storage.breaker import Breaker, log
from lightcache.storage.calls import Calls, Owned
from lightcache.storage.levels import Level, LevelStats
from lightcache.storage.promoting import Promoter
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    ReadStatus,
    Storage,
    StorageStats,
    TokenRows,
    WriteResult,
    WriteStatus,
)
from lightcache.storage.stack_moves import Asking, Reading, Writing, share

_CLOSING = 10.0  # seconds that `close` waits for a page that is being promoted


class StackedStorage(Owned):
    """Storages one behind the other, the nearest first. Each is given every page; a page is read
    from the nearest that has it, and written to those in front of that one, in the background.

    One that fails, hangs or refuses costs what only it has, and nothing else: each has a breaker of
    its own, and a share of a call's time. The nearest one is called in the caller's thread with the
    caller's buffers, and costs what it costs alone. The others are called in threads of their own
    and with memory of ours, up to 64 MiB (or one page) for a call: so one of them that does not
    come back keeps neither the caller nor the caller's pages.

    What a storage has missed while it was not asked, it gets when the page is read from one behind
    it, or written again. What one evicts is not moved to the next, which has had it from the start.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        *,
        names: Sequence[str] | None = None,
        promote_bytes: int = 256 << 20,
        promote_seconds: float = 30.0,
        failures: int = 3,
        retry: float = 30.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Owns the storages, and closes them.

        Args:
            storages: two or more, the nearest first, all opened for the same spec.
            names: how messages call them; None: by their classes.
            promote_bytes: of pages that wait to be written to a nearer storage, at most; what is
                more is not. 0: nothing is promoted.
            promote_seconds: that writing the promoted pages of one read may take.
            failures: of one storage in a row, after which it is not asked. Fewer than a tier's: so
                that one storage that fails does not have the whole stack left alone.
            retry: seconds until it is tried again.
            clock: in seconds, for breakers and for what hangs; for tests.

        Raises:
            ConfigError: fewer than two storages, other specs, or an argument out of range.
        """
        _fitting(storages)
        self.spec = storages[0].spec
        self.wants_tokens = any(each.wants_tokens for each in storages)
        for name, seconds in (("retry", retry), ("promote_seconds", promote_seconds)):
            if Deadline(seconds, clock, name).timeout < 0:
                raise ConfigError(f"{name}: expected seconds, 0 or more, found {seconds!r}")
        _arguments.count(failures, "failures", 1, 1 << 30)
        kinds = names or [type(each).__name__ for each in storages]
        if len(kinds) != len(storages):
            raise ConfigError(f"names: expected {len(storages)}, one a storage, found {len(kinds)}")
        self._levels: list[Level] = []
        for number, (storage, kind) in enumerate(zip(storages, kinds, strict=True), 1):
            name = f"storage {number} of {len(storages)}, {kind}"
            breaker = Breaker(failures, retry, clock, name)
            self._levels.append(Level(storage, name, breaker, clock, apart=number > 1))
        most = _arguments.count(promote_bytes, "promote_bytes", 0, 1 << 50)
        self._promoter = Promoter(most, promote_seconds)
        self._counters = Counters()
        self._calls = Calls()

    # ---- the protocol

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`: the prefix may lie in several storages. One that fails, or is not
        asked, counts as one that has nothing."""
        check_keys(keys)
        asking = Asking(self._levels, keys, self._begin("contains", timeout))
        try:
            return asking.run()
        except StorageError:
            self._calls.check()
            raise
        finally:
            self._counters.timed_out(asking.late)

    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """See `Storage.read`. Of a page that nobody has: CORRUPT or FAILED if one that was asked
        says so, else ABSENT."""
        _, views = check_batch(keys, buffers, self.spec.page_bytes, writable=True)
        self._calls.check()
        deadline = Deadline(timeout)
        if deadline.passed:
            late = ReadResult((ReadStatus.FAILED,) * len(keys), deadline.reason)
            return self._counters.read(late, timed_out=True)
        reading = Reading(self._levels, keys, views, deadline)
        try:
            result = reading.run(self._promoter)
        except StorageError:
            self._calls.check()
            self._counters.failed("reads", len(keys), timed_out=reading.late)
            raise
        return self._counters.read(result, timed_out=reading.late)

    def write(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        timeout: float,
        parent: Keys | None = None,
        tokens: TokenRows | None = None,
    ) -> WriteResult:
        """See `Storage.write`. A page is stored when one storage has it; the furthest that has it
        says whether it is STORED or was PRESENT. Of one that nobody has: FAILED if one that was
        asked says so, else REFUSED. Token ids go to those that want them."""
        _, views = check_batch(keys, buffers, self.spec.page_bytes, writable=False)
        check_tokens(tokens, len(keys))
        check_parent(parent)
        self._calls.check()
        deadline = Deadline(timeout)
        if deadline.passed:
            late = WriteResult((WriteStatus.FAILED,) * len(keys), deadline.reason)
            return self._counters.write(late, timed_out=True)
        writing = Writing(self._levels, keys, views, parent, tokens, deadline)
        try:
            result = writing.run()
        except StorageError:
            self._calls.check()
            self._counters.failed("writes", len(keys), timed_out=writing.late)
            raise
        return self._counters.write(result, timed_out=writing.late)

    def delete(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.delete`: from all. Returns the most that one of them had: what each has on
        its own is not known."""
        check_keys(keys)
        return self._remove("delete", timeout, lambda level, left: level.delete(keys, left))

    def clear(self, *, timeout: float) -> int:
        """See `Storage.clear`, and `delete` for what is returned."""
        return self._remove("clear", timeout, lambda level, left: level.clear(left))

    def stats(self) -> StorageStats:
        """See `Storage.stats`, as callers saw them. Pages and bytes are those of the storage that
        has most of them; evicted is what the last one let go of."""
        levels = self.levels()
        most = max((one.stats for one in levels), key=lambda found: found.pages)
        ours = self._counters.snapshot(most.pages, most.bytes)
        return replace(ours, evicted=levels[-1].stats.evicted)

    def close(self) -> None:
        """See `Storage.close`. All are closed, also when one raises; pages that wait to be promoted
        are not.

        Raises:
            StorageError: the first one that could not be closed; call again.
            Detached: in a forked child.
        """
        self._calls.end(self._release)

    def _release(self) -> None:
        self._promoter.stop()
        error: Exception | None = None
        for level in self._levels:
            try:
                level.storage.close()
            except Exception as raised:
                error = error or raised
                log.warning("%s could not be closed: %s", level.name, raised)
        if not self._promoter.join(_CLOSING):
            log.warning("a stack of storages was closed while a page is being promoted")
        if error is not None:
            raise StorageError(f"close: {error}; close it again") from error

    # ---- more than the protocol

    def levels(self) -> tuple[LevelStats, ...]:
        """What each storage does, the nearest first."""
        return tuple(level.stats() for level in self._levels)

    def settle(self, timeout: float) -> bool:
        """Wait until all that was read is promoted; False: not in these seconds."""
        return self._promoter.settle(timeout)

    # ---- within

    def _begin(self, what: str, timeout: float) -> Deadline:
        self._calls.check()
        deadline = Deadline(timeout)
        if deadline.passed:
            self._counters.timed_out()
            raise StorageError(f"{what}: {deadline.reason}; give it more time")
        return deadline

    def _remove(self, what: str, timeout: float, remove: Any) -> int:
        """Remove from all levels, and from what waits to be promoted."""
        deadline = self._begin(what, timeout)
        gone = 0
        errors: list[str] = []
        try:
            with self._promoter.paused(deadline):
                for number, level in enumerate(self._levels):
                    try:
                        left = share(self._levels, number, deadline).left
                        gone = max(gone, remove(level, left))
                    except StorageError as error:
                        errors.append(str(error).removeprefix(f"{what}: "))
        except StorageError as error:  # nobody was asked
            errors.append(str(error))
        self._calls.check()
        self._counters.deleted(gone)
        self._counters.timed_out(any(timed_out(each) for each in errors))
        if errors:
            raise StorageError(f"{what}: {'; '.join(errors)}; what is there is still found")
        return gone


def _fitting(storages: Sequence[Storage]) -> None:
    given: Any = storages
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"storages: expected a list of them, found {storages!r}")
    wrong = [each for each in given if not isinstance(each, Storage)]
    if wrong:
        raise ConfigError(f"storages: expected each a Storage, found {wrong[0]!r}; open them first")
    if len(storages) < 2:
        raise ConfigError(f"storages: expected two or more, found {len(storages)}")
    if len({id(each) for each in storages}) < len(storages):
        raise ConfigError("storages: expected each once, found one twice")
    first = storages[0].spec
    for number, each in enumerate(storages[1:], 2):
        if each.spec != first:
            raise ConfigError(
                f"storages: expected all to be opened for {first}, found storage {number} for "
                f"{each.spec}"
            )


__all__ = ["LevelStats", "StackedStorage"]
