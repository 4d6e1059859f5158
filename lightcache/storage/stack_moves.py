"""One call of a stack that moves pages: who is asked for which, for how long, and what that makes.

Time is shared: a storage gets half of what is left as long as another one behind it can be asked,
and the last one all of it. So one that uses up its time leaves as much to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightcache.errors import StorageError
from lightcache.storage.arguments import Deadline, timed_out
from lightcache.storage.levels import Level, NotAsked, Pages, own_memory
from lightcache.storage.promoting import Promoter, Promotion
from lightcache.storage.protocol import (
    Keys,
    ReadResult,
    ReadStatus,
    TokenRows,
    WriteResult,
    WriteStatus,
)

PIECE = 64 << 20
"""Bytes of our own memory that one call has at a time; a page more than that is a piece itself."""


def share(levels: Sequence[Level], number: int, deadline: Deadline) -> Deadline:
    """The time that a level may take now."""
    more = any(not each.shut for each in levels[number + 1 :])
    return Deadline(deadline.left / 2 if more else deadline.left)


class Asking:
    """A `contains`: how many keys from the first on any level has."""

    def __init__(self, levels: Sequence[Level], keys: Keys, deadline: Deadline) -> None:
        """Nobody is asked yet."""
        self._levels = levels
        self._keys = keys
        self._deadline = deadline
        self._late = False
        self.late = False
        """The time of one that was asked was up, and the answer may be too small by that."""

    def run(self) -> int:
        """A level is asked from the first key on that those nearer by do not have; one that says
        nothing counts as one that has nothing.

        Raises:
            StorageError: none of them said anything.
        """
        at = answers = 0
        keys, deadline = self._keys, self._deadline
        without = [-1] * len(self._levels)  # at which key each has nothing, as far as it has said
        why = ""
        while at < len(keys):
            before = at
            for number, level in enumerate(self._levels):
                if without[number] >= at or at == len(keys):
                    continue
                try:
                    at += level.contains(keys[at:], share(self._levels, number, deadline).left)
                    answers += 1
                    without[number] = at
                except StorageError as error:
                    why = why or str(error)
                    self._late |= timed_out(str(error), "contains")
                    without[number] = len(keys)
            if at == before:
                break
        self.late = self._late and at < len(keys)
        if len(keys) and not answers:
            raise StorageError(why)
        return at


class Reading:
    """A `read`: each page from the nearest level that has it."""

    def __init__(
        self, levels: Sequence[Level], keys: Keys, views: list[memoryview], deadline: Deadline
    ) -> None:
        """Nothing is read yet."""
        self._levels = levels
        self._keys = keys
        self._views = views
        self._deadline = deadline
        self._statuses = [ReadStatus.ABSENT] * len(keys)
        self._lacking: list[list[bool]] = []
        """Of each level that was asked, which keys it does not have, or not as they should be."""
        self._reason = ""
        self._answered = False
        self._heard: set[int] = set()
        """Keys of which the level that is asked just now has said what it has."""
        self._late = False
        self.late = False
        """The time of one that was asked was up, and pages are missing by that."""

    def run(self, promoter: Promoter) -> ReadResult:
        """Ask one level after another for what is missing.

        Raises:
            StorageError: none of them could do anything.
        """
        generation = promoter.generation
        for number, level in enumerate(self._levels):
            missing = [i for i, one in enumerate(self._statuses) if one is not ReadStatus.OK]
            if not missing:
                break
            if self._deadline.passed:
                self._too_late(missing)
                break
            self._lacking.append([False] * len(self._keys))
            self._heard.clear()
            limit = share(self._levels, number, self._deadline)
            try:
                if not level.apart:
                    self._near(level, missing, limit)
                else:
                    for promotion in self._far(number, missing, limit):
                        promoter.put(promotion, generation)
            except StorageError as error:
                self._say(str(error))
                if not isinstance(error, NotAsked):
                    left = [i for i in missing if i not in self._heard]
                    self._note(left, [ReadStatus.FAILED] * len(left))
        self.late = self.late or (self._late and ReadStatus.FAILED in self._statuses)
        if not self._answered and len(self._keys):
            raise StorageError(self._reason)
        bad = {ReadStatus.FAILED, ReadStatus.CORRUPT} & set(self._statuses)
        return ReadResult(tuple(self._statuses), self._reason if bad else "")

    def _too_late(self, missing: list[int]) -> None:
        """The time is up, and nobody has said of these that they are nowhere."""
        self.late = True
        self._answered = True
        for i in missing:
            if self._statuses[i] is ReadStatus.ABSENT:
                self._statuses[i] = ReadStatus.FAILED
        self._reason = self._reason or self._deadline.reason

    def _near(self, level: Level, missing: list[int], limit: Deadline) -> None:
        """Read into the caller's buffers."""
        keys = self._keys if len(missing) == len(self._keys) else self._keys[missing]
        result = level.read(keys, [self._views[i] for i in missing], limit.left)
        self._take(level, missing, result)

    def _far(self, number: int, missing: list[int], limit: Deadline) -> Iterator[Promotion]:
        """Read into memory of our own, copy what is good, and say what those before may have."""
        level = self._levels[number]
        for piece in pieces(missing, len(self._views[0])):
            pages = own_memory(len(piece), len(self._views[0]))
            result = level.read(self._keys[piece], list(pages), limit.left)
            for row, i, status in zip(pages, piece, result.statuses, strict=True):
                if status is ReadStatus.OK:
                    self._views[i][:] = row.data
            self._take(level, piece, result)
            good = [status is ReadStatus.OK for status in result.statuses]
            for upper, lacking in zip(self._levels, self._lacking[:number], strict=False):
                rows = [at for at, i in enumerate(piece) if good[at] and lacking[i]]
                yield from self._promotions(upper, piece, pages, rows)

    def _promotions(
        self, upper: Level, piece: list[int], pages: Pages, rows: list[int]
    ) -> Iterator[Promotion]:
        """One for each row of keys without a gap: only then does each hang on the one before."""
        first = 0
        for end in range(1, len(rows) + 1):
            if end < len(rows) and piece[rows[end]] == piece[rows[end - 1]] + 1:
                continue
            begin, behind = rows[first], rows[end - 1] + 1
            key = piece[begin]
            keys = self._keys[key : key + behind - begin].copy()
            parent = self._keys[key - 1 : key].copy() if key else None
            yield Promotion(upper, keys, pages[begin:behind], parent, pages.nbytes)
            first = end

    def _take(self, level: Level, which: list[int], result: ReadResult) -> None:
        self._answered = True
        self._note(which, result.statuses)
        self._say(level.named(result.reason))

    def _say(self, reason: str) -> None:
        self._late |= timed_out(reason)
        self._reason = self._reason or reason

    def _note(self, which: list[int], statuses: Sequence[ReadStatus]) -> None:
        """What a level has said. Worse than absent stays, unless somebody has the page."""
        lacking = self._lacking[-1]
        self._heard.update(which)
        for i, status in zip(which, statuses, strict=True):
            lacking[i] = status in (ReadStatus.ABSENT, ReadStatus.CORRUPT)
            if status is not ReadStatus.ABSENT:
                self._statuses[i] = status


class Writing:
    """A `write`: every level is given every page."""

    def __init__(
        self,
        levels: Sequence[Level],
        keys: Keys,
        views: list[memoryview],
        parent: Keys | None,
        tokens: TokenRows | None,
        deadline: Deadline,
    ) -> None:
        """Nothing is written yet."""
        self._levels = levels
        self._keys = keys
        self._views = views
        self._parent = parent
        self._tokens = tokens
        self._deadline = deadline
        self._statuses: list[WriteStatus | None] = [None] * len(keys)
        self._reason = ""
        self._late = False
        self.late = False
        """The time of one that was asked was up, and pages are not stored by that."""

    def run(self) -> WriteResult:
        """Give the pages to one level after another.

        Raises:
            StorageError: none of them could do anything.
        """
        answered = False
        for number, level in enumerate(self._levels):
            if self._deadline.passed:
                self._too_late()
                answered = True
                break
            limit = share(self._levels, number, self._deadline)
            done = 0  # of these keys this level has said what became of them
            try:
                for piece in self._pieces(level):
                    self._write(level, piece, limit)
                    answered, done = True, piece.stop
            except StorageError as error:
                self._say(str(error))
                if not isinstance(error, NotAsked):
                    left = range(done, len(self._keys))
                    self._note(left, [WriteStatus.FAILED] * len(left))
        told = tuple(WriteStatus.FAILED if one is None else one for one in self._statuses)
        self.late = self.late or (self._late and WriteStatus.FAILED in told)
        if not answered and len(self._keys):
            raise StorageError(self._reason)
        bad = {WriteStatus.FAILED, WriteStatus.REFUSED} & set(told)
        return WriteResult(told, self._reason if bad else "")

    def _pieces(self, level: Level) -> Iterator[range]:
        if level.apart:
            for piece in pieces(range(len(self._keys)), len(self._views[0]) if self._views else 1):
                yield range(piece[0], piece[-1] + 1)
        else:
            yield range(len(self._keys))

    def _write(self, level: Level, piece: range, limit: Deadline) -> None:
        chosen = slice(piece.start, piece.stop)
        parent = self._keys[piece.start - 1 : piece.start] if piece.start else self._parent
        views, keys = self._views[chosen], self._keys[chosen]
        tokens = None if self._tokens is None else self._tokens[chosen]
        if not level.apart:
            result = level.write(keys, views, parent, limit.left, tokens)
        else:
            pages = own_memory(len(views), len(views[0]))
            for row, view in zip(pages, views, strict=True):
                row[:] = view
            parent = None if parent is None else parent.copy()
            tokens = None if tokens is None else tokens.copy()
            result = level.write(keys.copy(), list(pages), parent, limit.left, tokens)
        self._note(piece, result.statuses)
        self._say(level.named(result.reason))

    def _say(self, reason: str) -> None:
        self._late |= timed_out(reason)
        self._reason = self._reason or reason

    def _note(self, which: range, statuses: Sequence[WriteStatus]) -> None:
        """The last level that has a page says whether it was there; if none has it, one that failed
        says so, and then one that refused it."""
        has = (WriteStatus.STORED, WriteStatus.PRESENT)
        for i, status in zip(which, statuses, strict=True):
            before = self._statuses[i]
            worse = before is None or (before not in has and status is WriteStatus.FAILED)
            if status in has or worse:
                self._statuses[i] = status

    def _too_late(self) -> None:
        self.late = None in self._statuses or WriteStatus.REFUSED in self._statuses
        self._note(range(len(self._keys)), [WriteStatus.FAILED] * len(self._keys))
        self._reason = self._reason or self._deadline.reason


def pieces(numbers: Sequence[int], page_bytes: int) -> Iterator[list[int]]:
    """Of the numbers of pages as many at a time as our own memory is for."""
    most = max(1, PIECE // page_bytes)
    for first in range(0, len(numbers), most):
        yield list(numbers[first : first + most])


__all__ = ["PIECE", "Asking", "Reading", "Writing", "pieces", "share"]
