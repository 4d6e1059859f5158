"""The conformance suite that every backend must pass, for the tests of its author.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_storage(check):
        check(lambda spec: MyStorage(spec, ...))

Each check opens an empty storage with the factory, closes it, and raises AssertionError with a
text. Three things the suite cannot do, so a backend needs tests of its own for them: see whether
buffers are left alone after a call; damage the medium; and fork while another thread holds a lock
of the backend, which the child must not wait for.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError, Detached, LightcacheError, StorageError
from lightcache.storage.protocol import (
    Keys,
    ReadResult,
    ReadStatus,
    Storage,
    StorageSpec,
    WriteResult,
    WriteStatus,
)

PAGE_BYTES = 4096
MOST_PAGES = 256
"""Maximum pages that a check stores at a time; the factory must provide room for them."""
SPEC = StorageSpec(PAGE_BYTES, "conformance", "xxh3_128")
TIMEOUT = 60.0  # of calls that must succeed; generous, as nothing is measured

Factory = Callable[[StorageSpec], Storage]
Pages = npt.NDArray[np.uint8]
OK, ABSENT = ReadStatus.OK, ReadStatus.ABSENT
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT


def make_keys(n: int, seed: int = 0) -> Keys:
    """n keys, different for every seed."""
    return np.random.default_rng(seed).integers(0, 1 << 64, (n, 2), np.uint64)


def pages_of(keys: Keys, page_bytes: int = PAGE_BYTES) -> Pages:
    """The pages of these keys, shape (n, page_bytes); each is made from its key alone."""
    made = np.empty((len(keys), page_bytes), np.uint8)
    for row, key in zip(made, keys.tolist(), strict=True):
        row[:] = np.random.default_rng(key).integers(0, 256, page_bytes, np.uint8)
    return made


def _write(storage: Storage, keys: Keys, pages: Sequence[Any] | Pages) -> WriteResult:
    return storage.write(keys, list(pages), timeout=TIMEOUT)


def _read(storage: Storage, keys: Keys) -> tuple[ReadResult, Pages]:
    into = np.zeros((len(keys), PAGE_BYTES), np.uint8)
    return storage.read(keys, list(into), timeout=TIMEOUT), into


def _same(found: object, expected: object, what: str) -> None:
    assert found == expected, f"{what}: expected {expected!r}, found {found!r}"


def _holds(storage: Storage, keys: Keys, expected: Sequence[ReadStatus]) -> None:
    """Check that a read has these statuses, and the right bytes where the status is OK."""
    result, into = _read(storage, keys)
    _same(result.statuses, tuple(expected), "read: statuses")
    for i, status in enumerate(expected):
        right = status is not OK or bool((into[i] == pages_of(keys[i : i + 1])[0]).all())
        assert right, f"read: key {i} is OK and has other bytes than were written"


def _raises(kind: type[LightcacheError], what: str, call: Callable[[], object]) -> None:
    try:
        found = call()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what}: expected {kind.__name__}, found {error!r}") from error
    raise AssertionError(f"{what}: expected {kind.__name__}, found the result {found!r}")


def check_empty(factory: Factory) -> None:
    """A new storage is empty, which is not a failure."""
    keys = make_keys(3)
    with factory(SPEC) as storage:
        _same(storage.spec, SPEC, "spec")
        _same(storage.contains(keys, timeout=TIMEOUT), 0, "contains")
        _holds(storage, keys, [ABSENT] * 3)
        _same(storage.delete(keys, timeout=TIMEOUT), 0, "delete")
        _same(storage.clear(timeout=TIMEOUT), 0, "clear")
        _same(storage.stats().pages, 0, "stats: pages")


def check_round_trip(factory: Factory) -> None:
    """Written pages are found, and read back byte by byte, in any order."""
    keys = make_keys(64)
    with factory(SPEC) as storage:
        result = _write(storage, keys, pages_of(keys))
        _same(result.statuses, (STORED,) * 64, "write: statuses")
        _same(result.prefix, 64, "write: prefix")
        _same(storage.contains(keys, timeout=TIMEOUT), 64, "contains")
        _holds(storage, keys, [OK] * 64)
        _holds(storage, np.ascontiguousarray(keys[::-3]), [OK] * 22)


def check_empty_batch(factory: Factory) -> None:
    """A batch without keys does nothing, and does not fail."""
    with factory(SPEC) as storage:
        none = make_keys(0)
        _same(storage.contains(none, timeout=TIMEOUT), 0, "contains")
        _same(_read(storage, none)[0].statuses, (), "read")
        _same(_write(storage, none, []).statuses, (), "write")
        _same(storage.delete(none, timeout=TIMEOUT), 0, "delete")


def check_present(factory: Factory) -> None:
    """A stored page is not written again, even within one batch."""
    keys = make_keys(4)
    with factory(SPEC) as storage:
        _write(storage, keys[:2], pages_of(keys[:2]))
        found = _write(storage, keys, pages_of(keys))
        _same(found.statuses, (PRESENT, PRESENT, STORED, STORED), "write again: statuses")
        _same(found.prefix, 4, "write again: prefix")
        twice = np.repeat(make_keys(1, seed=1), 2, axis=0)
        _same(_write(storage, twice, pages_of(twice)).statuses, (STORED, PRESENT), "one key twice")
        _holds(storage, twice, [OK, OK])
        _holds(storage, keys, [OK] * 4)


def check_prefix(factory: Factory) -> None:
    """An absent page ends the prefix, but `read` finds pages after it."""
    keys = make_keys(5)
    there = np.ascontiguousarray(keys[[0, 1, 3]])
    with factory(SPEC) as storage:
        _write(storage, there, pages_of(there))
        _same(storage.contains(keys, timeout=TIMEOUT), 2, "contains")
        _same(storage.contains(keys[3:], timeout=TIMEOUT), 1, "contains, from the hole on")
        _holds(storage, keys, [OK, OK, ABSENT, OK, ABSENT])
        _same(_read(storage, keys)[0].prefix, 2, "read: prefix")


def check_keys_are_whole(factory: Factory) -> None:
    """Both words of a key matter, in order, up to their extremes."""
    most = (1 << 64) - 1
    rows = [(0, 0), (0, 1), (1, 0), (1, 1), (most, 0), (0, most), (most, most), (1 << 63, 7)]
    keys = np.array(rows, np.uint64)
    with factory(SPEC) as storage:
        _write(storage, keys[::2].copy(), pages_of(keys[::2]))
        _holds(storage, keys, [OK, ABSENT] * 4)
        _write(storage, keys, pages_of(keys))
        _holds(storage, keys, [OK] * 8)


def check_buffers(factory: Factory) -> None:
    """Arrays and memoryviews work, read-only ones for writing; the storage keeps none of them."""
    keys = make_keys(2)
    with factory(SPEC) as storage:
        pages = pages_of(keys)
        _write(storage, keys, [pages[0], memoryview(pages[1].tobytes())])
        pages[:] = 0
        _holds(storage, keys, [OK, OK])
        into = bytearray(PAGE_BYTES)
        storage.read(keys[:1], [memoryview(into)], timeout=TIMEOUT)
        assert bytes(into) == pages_of(keys[:1])[0].tobytes(), "read into a memoryview: other bytes"


def check_input(factory: Factory) -> None:
    """Bad arguments are refused before anything is done."""
    keys = make_keys(2)
    pages = pages_of(keys)
    short = pages[:, :-1].copy()
    frozen = [memoryview(page.tobytes()) for page in pages]
    bad: list[tuple[str, Any, Any]] = [
        ("too few buffers", keys, list(pages[:1])),
        ("too many buffers", keys, [*pages, pages[0]]),
        ("buffers of another size", keys, list(short)),
        ("a strided buffer", keys[:1], [np.zeros(2 * PAGE_BYTES, np.uint8)[::2]]),
        ("buffers of words", keys[:1], [np.zeros(PAGE_BYTES // 8, np.uint64)]),
        ("something that is no buffer", keys[:1], ["text"]),
        ("keys of another dtype", keys.astype(np.int64), list(pages)),
        ("keys of another shape", keys.reshape(-1), list(pages)),
        ("keys that are no array", [(1, 2), (3, 4)], list(pages)),
    ]
    with factory(SPEC) as storage:
        for what, those, buffers in bad:
            for verb in (storage.read, storage.write):
                _raises(ConfigError, f"{verb.__name__} with {what}", _call(verb, those, buffers))
        _raises(ConfigError, "read into read-only buffers", _call(storage.read, keys, frozen))
        _holds(storage, keys, [ABSENT, ABSENT])


def _call(verb: Any, keys: Any, buffers: Any) -> Callable[[], object]:
    return lambda: verb(keys, buffers, timeout=TIMEOUT)


def check_parent(factory: Factory) -> None:
    """Pages can be written whether or not their parent is stored."""
    keys = make_keys(6)
    with factory(SPEC) as storage:
        _write(storage, keys[:2], pages_of(keys[:2]))
        for first, parent in ((2, 1), (5, 4)):  # the second parent is not stored
            part, before = keys[first : first + 2], keys[parent : parent + 1]
            wrote = storage.write(part, list(pages_of(part)), timeout=TIMEOUT, parent=before)
            _same(wrote.prefix, len(part), "write with a parent: prefix")
        _holds(storage, keys, [OK, OK, OK, OK, ABSENT, OK])


def check_delete(factory: Factory) -> None:
    """Deleted pages are gone, the others stay, and deleted ones can be stored again."""
    keys = make_keys(6)
    with factory(SPEC) as storage:
        _write(storage, keys[:4], pages_of(keys[:4]))
        _same(storage.delete(keys[2:], timeout=TIMEOUT), 2, "delete: pages that were stored")
        _holds(storage, keys, [OK, OK, ABSENT, ABSENT, ABSENT, ABSENT])
        _same(storage.contains(keys, timeout=TIMEOUT), 2, "contains")
        again = _write(storage, keys[2:3], pages_of(keys[2:3]))
        _same(again.statuses, (STORED,), "write what was deleted")
        _holds(storage, keys[:3], [OK] * 3)


def check_clear(factory: Factory) -> None:
    """Nothing is left after `clear`, and the storage works as before."""
    keys = make_keys(10)
    with factory(SPEC) as storage:
        _write(storage, keys, pages_of(keys))
        _same(storage.clear(timeout=TIMEOUT), 10, "clear: pages that were stored")
        _same(storage.contains(keys, timeout=TIMEOUT), 0, "contains")
        _holds(storage, keys, [ABSENT] * 10)
        _same(_write(storage, keys, pages_of(keys)).prefix, 10, "write what was cleared")


def check_time_is_up(factory: Factory) -> None:
    """A call whose time is up at the start still ends, with results or with StorageError."""
    keys = make_keys(8)
    with factory(SPEC) as storage:
        _write(storage, keys[:4], pages_of(keys[:4]))
        wrote = storage.write(keys, list(pages_of(keys)), timeout=0.0)
        read = storage.read(keys, list(np.zeros((8, PAGE_BYTES), np.uint8)), timeout=-1.0)
        for failed, reason in (
            (WriteStatus.FAILED in wrote.statuses, wrote.reason),
            (ReadStatus.FAILED in read.statuses, read.reason),
        ):
            late = not failed or reason.startswith("timed out")
            assert late, f"expected a reason that begins with 'timed out', found {reason!r}"
        for ask in (storage.contains, storage.delete):
            why = "timed out"  # it may also succeed
            try:
                ask(keys, timeout=0.0)
            except StorageError as error:
                why = str(error)
            assert "timed out" in why, f"{ask.__name__}: {why!r} does not say that time was up"


def check_threads(factory: Factory) -> None:
    """Several threads use the same keys: every page found is the right one."""
    keys = make_keys(56)

    def one(number: int) -> None:
        for turn in range(8):
            first = (number * 8 + turn * 16) % 48
            mine = keys[first : first + 16]
            wrote = _write(storage, mine, pages_of(mine))
            _same(wrote.prefix, 16, "write: prefix")
            result, into = _read(storage, mine)
            _same(result.statuses, (OK,) * 16, "read what was written")
            assert (into == pages_of(mine)).all(), "read: the bytes of another thread's page"

    with factory(SPEC) as storage:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(4)))
        _same(storage.contains(keys, timeout=TIMEOUT), 56, "contains")
        _same(storage.stats().writes_stored, 56, "stats: every page was stored once")


def check_stats(factory: Factory) -> None:
    """The totals match the results that callers got."""
    keys = make_keys(6)
    with factory(SPEC) as storage:
        _write(storage, keys[:4], pages_of(keys[:4]))
        _write(storage, keys[2:5], pages_of(keys[2:5]))
        _read(storage, keys)
        storage.delete(keys[:2], timeout=TIMEOUT)
        found = storage.stats()
        _same((found.pages, found.bytes), (3, 3 * PAGE_BYTES), "stats: pages, bytes")
        _same((found.writes_stored, found.writes_present), (5, 2), "stats: stored, present")
        _same((found.reads_ok, found.reads_absent, found.deletes), (5, 1, 2), "stats: ok, absent")
        bad = (found.reads_failed, found.reads_corrupt, found.writes_failed, found.writes_refused)
        _same((*bad, found.timeouts), (0,) * 5, "stats: what went wrong")


def check_closed(factory: Factory) -> None:
    """Calls of a closed backend raise Detached; closing twice does nothing."""
    keys = make_keys(1)
    storage = factory(SPEC)
    storage.close()
    storage.close()
    for what, call in _calls(storage, keys).items():
        _raises(Detached, f"{what} after close", call)


def _calls(storage: Storage, keys: Keys) -> dict[str, Callable[[], object]]:
    into = list(np.zeros((len(keys), PAGE_BYTES), np.uint8))
    return {
        "contains": lambda: storage.contains(keys, timeout=TIMEOUT),
        "read": lambda: storage.read(keys, into, timeout=TIMEOUT),
        "write": lambda: storage.write(keys, into, timeout=TIMEOUT),
        "delete": lambda: storage.delete(keys, timeout=TIMEOUT),
        "clear": lambda: storage.clear(timeout=TIMEOUT),
    }


def check_forked(factory: Factory) -> None:
    """In a forked child every call raises Detached. Its parent does not notice."""
    keys = make_keys(2)
    with factory(SPEC) as storage:
        _write(storage, keys, pages_of(keys))
        ours, theirs = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside other threads
            child = os.fork()
        if child == 0:
            os.write(theirs, _in_child(storage, keys).encode())
            os._exit(0)
        os.close(theirs)
        os.waitpid(child, 0)
        with open(ours, "rb") as told:
            _same(told.read().decode(), "refused", "in a forked child")
        _holds(storage, keys, [OK] * 2)


def _in_child(storage: Storage, keys: Keys) -> str:
    """What a forked child finds. A call that waits for a thread of its parent is killed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(10)
    try:
        for what, call in {**_calls(storage, keys), "close": storage.close}.items():
            _raises(Detached, what, call)
        with storage:
            return "refused"
    except BaseException as error:
        return str(error)


CHECKS: tuple[Callable[[Factory], None], ...] = (
    check_empty,
    check_round_trip,
    check_empty_batch,
    check_present,
    check_prefix,
    check_keys_are_whole,
    check_buffers,
    check_input,
    check_parent,
    check_delete,
    check_clear,
    check_time_is_up,
    check_threads,
    check_stats,
    check_closed,
    check_forked,
)
"""All checks, to be run one by one."""


def check_storage(factory: Factory) -> None:
    """Run all checks.

    Args:
        factory: opens an empty storage for a spec, with room for MOST_PAGES pages of PAGE_BYTES.

    Raises:
        AssertionError: a check failed; the message has its name and what it found.
    """
    for check in CHECKS:
        try:
            check(factory)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error


__all__ = ["CHECKS", "MOST_PAGES", "PAGE_BYTES", "SPEC", "Factory", "check_storage"]
