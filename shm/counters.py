"""SharedCounters: named 64-bit counters of many processes, summed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.shm import layout, wanted
from lightcache.shm.errors import CacheCorrupted, ConfigError, PermissionDenied
from lightcache.shm.layout import SegmentKind
from lightcache.shm.segment import Segment, free_dead_slots
from lightcache.shm.sync import AtomicU64

_MOST = (1 << 64) - 1
_WORD = ctypes.sizeof(ctypes.c_uint64)
_LINE = 64 // _WORD  # words of a cache line: no two clients ever store into the same one


class SharedCounters:
    """Each client counts in a row of its own, and the sum of all rows is what was ever counted.

    There is no lock. A row belongs to a slot and is never set back: when its client leaves or is
    killed it stays as it is, and who takes the slot next goes on counting from there. So nothing
    is lost, nothing counts twice, and no process has to clear up behind another. A count is one
    atomic addition to one word: it has happened wholly or not at all, whoever is killed when, and
    threads, signal handlers and garbage collections of one process may all count at once.

    Counters wrap around at 2^64. Row 0 is of the slot that nobody has, and stays zero.
    """

    def __init__(self, segment: Segment) -> None:
        """For `create`, `attach` and `open`."""
        self.segment = segment
        self.names = _names_in(segment)
        self._stride = _stride(self.names)
        self._words: dict[str, AtomicU64] = {}
        if not segment.readonly:
            row = segment.join("counters").slot * self._stride
            segment.free_slot_on_close()  # which is all that a client has, however it leaves
            self._words = {
                name: AtomicU64(segment, _WORD * (row + i)) for i, name in enumerate(self.names)
            }
        # Whoever had the slot before us has left or is dead, and so counts no more.
        self._found = {name: word.load() for name, word in self._words.items()}

    @classmethod
    def create(
        cls,
        name: str,
        *,
        names: Sequence[str],
        lifetime: str = "attached",
        group: str | int | None = None,
    ) -> SharedCounters:
        """Create counters that do not exist yet, all zero; see `Segment.create` for name, lifetime,
        group and errors.

        Args:
            names: of the counters, each an identifier and said once. They stand in the segment's
                header, which has room for some hundred.

        Raises:
            ConfigError: no names, one that is no identifier or said twice, or too many.
        """
        arranged = _arranged(name, names)
        return cls._over(Segment.create(**arranged, lifetime=lifetime, group=group))

    @classmethod
    def open(
        cls,
        name: str,
        *,
        names: Sequence[str],
        lifetime: str = "attached",
        group: str | int | None = None,
    ) -> SharedCounters:
        """Attach to counters of these names in this order, with what was counted so far, or create
        them; see `Segment.open`."""
        arranged = _arranged(name, names)
        return cls._over(Segment.open(**arranged, lifetime=lifetime, group=group))

    @classmethod
    def attach(
        cls, name: str, *, readonly: bool = False, group: str | int | None = None
    ) -> SharedCounters:
        """Attach to counters that exist; see `Segment.attach`. A reader takes no slot and can
        change nothing.

        Raises:
            CacheCorrupted: what the header says is no list of names, or does not fit the segment.
        """
        segment = Segment.attach(
            name, readonly=readonly, group=group, kind=SegmentKind.COUNTERS, reaper=free_dead_slots
        )
        return cls._over(segment)

    @classmethod
    def _over(cls, segment: Segment) -> SharedCounters:
        try:
            return cls(segment)
        except BaseException:
            segment.free_slot_on_close()
            segment.close()
            raise

    # ---- counting

    def add(self, /, **counts: int) -> None:
        """Raise some of our counters. No lock; does not block; 2 to 3 us a name.

        A process that is killed in here has raised some of them and not others.

        Raises:
            ConfigError: an unknown name, or no integer from 0 to 2^64 - 1; nothing was counted.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        for name, count in counts.items():
            self._check_count(name, count)
        if self.segment.readonly:
            self.segment.check_usable()
            raise PermissionDenied(
                f"add to {self.segment.name!r}: attached read-only; attach for writing to count"
            )
        for name, count in counts.items():
            if count:
                self._words[name].add(count)

    def _check_count(self, name: str, count: object) -> None:
        if name not in self.names:
            raise ConfigError(
                f"{self.segment.name!r} has no counter {name!r}; there are {', '.join(self.names)}"
            )
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MOST:
            raise ConfigError(f"{name}: expected an integer from 0 to {_MOST}, found {count!r}")

    # ---- looking

    def own(self) -> dict[str, int]:
        """What this attach has counted, modulo 2^64; zeros for a reader. No lock.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        self.segment.check_usable()
        counted = dict.fromkeys(self.names, 0)
        for name, word in self._words.items():
            counted[name] = (word.load() - self._found[name]) & _MOST
        return counted

    def total(self) -> dict[str, int]:
        """What everybody has counted since the segment was made, the dead included, modulo 2^64.
        No lock; some 15 us.

        Every single counter only rises from call to call, as long as it does not wrap. They are
        read one after another: what is counted meanwhile may be in one and not yet in another.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        with self.segment.busy():
            sums = self._rows().sum(axis=0, dtype=np.uint64)
        return dict(zip(self.names, sums.tolist(), strict=True))

    def _rows(self) -> npt.NDArray[np.uint64]:
        """The rows themselves, not a copy, of shape (64, names); for use while `busy`. Adding up
        reads each word at once, which copying its bytes would not promise."""
        words = ctypes.c_uint64 * (layout.SLOTS * self._stride)
        where = words.from_address(self.segment.address + self.segment.payload_offset)
        table = np.frombuffer(memoryview(where).cast("B"), np.uint64)
        table = table.reshape(layout.SLOTS, self._stride)
        return table[:, : len(self.names)]

    def check(self) -> None:
        """See that names and sizes are still those that we attached with, and that nobody counts
        in the row that nobody has.

        Raises:
            CacheCorrupted: says which of these does not hold.
            Detached: closed, replaced, or a forked child.
        """
        with self.segment.busy():
            names = wanted.config_of(self.segment.header()).get("names")
            stray = int(np.count_nonzero(self._rows()[0]))
        if names != list(self.names):
            raise _damaged(self.segment.name, f"names {list(self.names)} expected, found {names!r}")
        if stray:
            raise _damaged(self.segment.name, f"{stray} counters of slot 0 are not zero")

    # ---- the end

    def close(self) -> None:
        """Leave; see `Segment.close`. What we counted stays in the total."""
        self.segment.free_slot_on_close()
        self.segment.close()

    def __enter__(self) -> SharedCounters:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.segment.free_slot_on_close()
        self.segment.__exit__(None, error, None)


def _stride(names: Sequence[str]) -> int:
    """Words of a row: whole cache lines."""
    return -(-len(names) // _LINE) * _LINE


def _bytes(names: Sequence[str]) -> int:
    return layout.SLOTS * _stride(names) * _WORD


def _problem(names: Sequence[Any]) -> str | None:
    """What is wrong with these names."""
    if not names:
        return "at least one name was expected, found none"
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            return f"identifiers were expected, found {name!r}"
    if len(set(names)) < len(names):
        return f"each name was expected once, found {list(names)}"
    return None


def _names_in(segment: Segment) -> tuple[str, ...]:
    names = segment.config.get("names")
    if not isinstance(names, list):
        raise _damaged(segment.name, f"a list of names was expected, found {names!r}")
    problem = _problem(names)
    if problem:
        raise _damaged(segment.name, problem)
    if segment.payload_bytes < _bytes(names):
        raise _damaged(
            segment.name,
            f"{len(names)} counters take {_bytes(names)} bytes, found {segment.payload_bytes}",
        )
    return tuple(names)


def _damaged(name: str, what: str) -> CacheCorrupted:
    return CacheCorrupted(
        f"the counters {name!r}: {what}; remove them with `lightcache rm` and make them anew"
    )


def _arranged(name: str, names: Sequence[str]) -> Mapping[str, Any]:
    problem = "a sequence of names was expected, found a str" if isinstance(names, str) else None
    problem = problem or _problem(names)
    if problem:
        raise ConfigError(f"names: {problem}")
    return {
        "name": name,
        "payload_bytes": _bytes(names),
        "kind": SegmentKind.COUNTERS,
        "config": {"names": list(names)},
        "reaper": free_dead_slots,
    }
