"""SharedCounters: named 64-bit counters, summed over many processes."""

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
_LINE = 64 // _WORD  # words of a cache line: no two clients store into the same line


class SharedCounters:
    """Each client counts in its own row; the sum of all rows is the total.

    There is no lock. A row belongs to a slot and is never reset: it stays when its client leaves or
    is killed, and the slot's next client continues from there. So no count is lost or counted
    twice, and no process cleans up after another. A count is one atomic addition to one word, even
    if the process is killed; threads, signal handlers and garbage collections of one process may
    all count at once.

    Counters wrap around at 2^64. Row 0 belongs to slot 0, which is never assigned, and stays zero.
    """

    def __init__(self, segment: Segment) -> None:
        """For `create`, `attach` and `open`."""
        self.segment = segment
        self.names = _names_in(segment)
        self._stride = _stride(self.names)
        self._words: dict[str, AtomicU64] = {}
        if not segment.readonly:
            row = segment.join("counters").slot * self._stride
            segment.free_slot_on_close()  # a client holds nothing else
            self._words = {
                name: AtomicU64(segment, _WORD * (row + i)) for i, name in enumerate(self.names)
            }
        # The slot's previous client has left or is dead, so it no longer counts.
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
            names: of the counters, each a unique identifier. They are stored in the segment's
                header, which has room for some hundred.

        Raises:
            ConfigError: no names, one that is not an identifier or is repeated, or too many.
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
        """Attach to counters of these names in this order, with their counts, or create them; see
        `Segment.open`."""
        arranged = _arranged(name, names)
        return cls._over(Segment.open(**arranged, lifetime=lifetime, group=group))

    @classmethod
    def attach(
        cls, name: str, *, readonly: bool = False, group: str | int | None = None
    ) -> SharedCounters:
        """Attach to existing counters; see `Segment.attach`. A reader takes no slot and cannot
        change anything.

        Raises:
            CacheCorrupted: the header has no list of names, or they do not fit the segment.
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

    # ---- count

    def add(self, /, **counts: int) -> None:
        """Raise some of this client's counters. Takes no lock; does not block; 2 to 3 us a name.

        A process that is killed in here has raised some of them and not others.

        Raises:
            ConfigError: an unknown name, or not an integer from 0 to 2^64 - 1; nothing was counted.
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

    # ---- inspection

    def own(self) -> dict[str, int]:
        """The counts of this handle, modulo 2^64; zeros for a reader. Takes no lock.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        self.segment.check_usable()
        counted = dict.fromkeys(self.names, 0)
        for name, word in self._words.items():
            counted[name] = (word.load() - self._found[name]) & _MOST
        return counted

    def total(self) -> dict[str, int]:
        """The counts of all clients since the segment was made, including dead ones, modulo 2^64.
        Takes no lock; about 15 us.

        Every counter only rises from call to call, until it wraps. Counters are read one after
        another: a concurrent count may be in one and not yet in another.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        with self.segment.busy():
            sums = self._rows().sum(axis=0, dtype=np.uint64)
        return dict(zip(self.names, sums.tolist(), strict=True))

    def _rows(self) -> npt.NDArray[np.uint64]:
        """The rows themselves, not a copy, of shape (64, names); for use while `busy`. Summing
        reads each word in one access, which copying its bytes does not guarantee."""
        words = ctypes.c_uint64 * (layout.SLOTS * self._stride)
        where = words.from_address(self.segment.address + self.segment.payload_offset)
        table = np.frombuffer(memoryview(where).cast("B"), np.uint64)
        table = table.reshape(layout.SLOTS, self._stride)
        return table[:, : len(self.names)]

    def check(self) -> None:
        """Check that names and sizes are still those at attach time, and that row 0 is zero.

        Raises:
            CacheCorrupted: says which check failed.
            Detached: closed, replaced, or a forked child.
        """
        with self.segment.busy():
            names = wanted.config_of(self.segment.header()).get("names")
            stray = int(np.count_nonzero(self._rows()[0]))
        if names != list(self.names):
            raise _damaged(self.segment.name, f"names {list(self.names)} expected, found {names!r}")
        if stray:
            raise _damaged(self.segment.name, f"{stray} counters of slot 0 are not zero")

    # ---- close

    def close(self) -> None:
        """Leave; see `Segment.close`. This client's counts stay in the total."""
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
    """Why these names are invalid; None: they are valid."""
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
