"""SharedCounters: named 64-bit counters, summed over many processes."""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.shm import layout, structures, wanted
from lightcache.shm.codes import check
from lightcache.shm.errors import CacheCorrupted, ConfigError, PermissionDenied
from lightcache.shm.layout import SegmentKind
from lightcache.shm.segment import Segment, free_dead_slots

_MOST = (1 << 64) - 1
_MANY = 1024  # counters of one name
_SEVERAL = re.compile(r"(?P<name>[^\W\d]\w*)\[(?P<many>[1-9]\d{0,3})\]")
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
        self._given = _names_in(segment)
        self.names = each_name(self._given)
        self._places = {name: place for place, name in enumerate(self.names)}
        self._stride = _stride(self.names)
        self._slot = 0
        if not segment.readonly:
            self._slot = segment.join("counters").slot
            segment.free_slot_on_close()  # a client holds nothing else
        self._row = layout.PAYLOAD_OFFSET + _WORD * self._stride * self._slot
        # The slot's previous client has left or is dead, so it no longer counts.
        with segment.busy():
            self._found = self._rows()[self._slot].copy()

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
            names: of the counters, each a unique identifier. "NAME[N]" stands for N counters, at
                most 1,024, from NAME_0 on. They are stored in the segment's header, which has
                room for some hundred names.

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
        """Raise some of this client's counters. Takes no lock; does not block; 2 us, and 0.5 us a
        name.

        A process that is killed in here has raised some of them and not others.

        Raises:
            ConfigError: an unknown name, or not an integer from 0 to 2^64 - 1; nothing was counted.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        pairs = array("Q")
        for name, count in counts.items():
            place = self._places.get(name)
            if place is None or type(count) is not int or not 0 <= count <= _MOST:
                place = self._checked(name, count)
            pairs.append(place)
            pairs.append(count)
        if self.segment.readonly:
            self.segment.check_usable()
            raise PermissionDenied(
                f"add to {self.segment.name!r}: attached read-only; attach for writing to count"
            )
        code = structures.library().quick.lcs_add_many(
            self.segment.attachment, self._row, pairs.tobytes(), len(counts)
        )
        check(code, f"add to {self.segment.name!r}")

    def _checked(self, name: str, count: object) -> int:
        """The place of a counter to which this may be added."""
        if name not in self._places:
            raise ConfigError(
                f"{self.segment.name!r} has no counter {name!r}; there are {', '.join(self.names)}"
            )
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MOST:
            raise ConfigError(f"{name}: expected an integer from 0 to {_MOST}, found {count!r}")
        return self._places[name]

    # ---- inspection

    def own(self) -> dict[str, int]:
        """The counts of this handle, modulo 2^64; zeros for a reader. Takes no lock.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        with self.segment.busy():
            counted = self._rows()[self._slot] - self._found  # modulo 2^64, as numpy subtracts
        return dict(zip(self.names, counted.tolist(), strict=True))

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
        if names != list(self._given):
            raise _damaged(
                self.segment.name, f"names {list(self._given)} expected, found {names!r}"
            )
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


def each_name(given: Sequence[str]) -> tuple[str, ...]:
    """The name of each counter, of valid names as a header has them: "NAME[N]" is N counters."""
    return tuple(name for one in given for name in _named(one))


def _named(given: str) -> Iterator[str]:
    several = _SEVERAL.fullmatch(given)
    if several is None:
        yield given
    else:
        yield from (f"{several['name']}_{i}" for i in range(int(several["many"])))


# ---- The payload, for readers of a copy as well


def rows_in(data: Any, given: Sequence[Any]) -> tuple[tuple[str, ...], npt.NDArray[np.uint64]]:
    """Names and rows of a copy of a payload, of shape (slots, names): those that are there whole.
    Names that are not valid name no counter.

    Args:
        data: bytes, or anything with a buffer of them.
        given: as the header has them.
    """
    if _problem(given):
        return (), np.empty((0, 0), np.uint64)
    names = each_name(given)
    stride = _stride(names)
    rows = min(layout.SLOTS, memoryview(data).nbytes // _WORD // stride)
    table = np.frombuffer(data, np.uint64, rows * stride).reshape(rows, stride)
    return names, table[:, : len(names)]


def bytes_of(given: Sequence[Any]) -> int:
    """Bytes of the payload for these names, as the header has them; 0 for names that are not
    valid."""
    return 0 if _problem(given) else _bytes(each_name(given))


def _stride(names: Sequence[str]) -> int:
    """Words of a row: whole cache lines."""
    return -(-len(names) // _LINE) * _LINE


def _bytes(names: Sequence[str]) -> int:
    return layout.SLOTS * _stride(names) * _WORD


def _problem(given: Sequence[Any]) -> str | None:
    """Why these names are invalid; None: they are valid."""
    if not given:
        return "at least one name was expected, found none"
    for name in given:
        if not isinstance(name, str) or not _is_valid(name):
            return f'identifiers, or "NAME[N]" of at most {_MANY}, were expected, found {name!r}'
    names = each_name(given)
    if len(set(names)) < len(names):
        return f"each name was expected once, found {list(given)}"
    return None


def _is_valid(name: str) -> bool:
    several = _SEVERAL.fullmatch(name)
    return name.isidentifier() if several is None else int(several["many"]) <= _MANY


def _names_in(segment: Segment) -> tuple[str, ...]:
    names = segment.config.get("names")
    if not isinstance(names, list):
        raise _damaged(segment.name, f"a list of names was expected, found {names!r}")
    problem = _problem(names)
    if problem:
        raise _damaged(segment.name, problem)
    needed = _bytes(each_name(names))
    if segment.payload_bytes < needed:
        raise _damaged(
            segment.name,
            f"{len(names)} counters take {needed} bytes, found {segment.payload_bytes}",
        )
    return tuple(names)


def _damaged(name: str, what: str) -> CacheCorrupted:
    return CacheCorrupted(
        f"the counters {name!r}: {what}; remove them with `lightcache rm {name}` and make them anew"
    )


def _arranged(name: str, names: Sequence[str]) -> Mapping[str, Any]:
    problem = "a sequence of names was expected, found a str" if isinstance(names, str) else None
    problem = problem or _problem(names)
    if problem:
        raise ConfigError(f"names: {problem}")
    return {
        "name": name,
        "payload_bytes": _bytes(each_name(names)),
        "kind": SegmentKind.COUNTERS,
        "config": {"names": list(names)},
        "reaper": free_dead_slots,
    }
