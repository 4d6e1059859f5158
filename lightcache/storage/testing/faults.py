"""A storage that fails on purpose: it wraps another one, for tests and drills."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, cast, get_args

from lightcache.errors import ConfigError, StorageError
from lightcache.shm.waiting import Condition
from lightcache.storage.common import (
    Clock,
    Counters,
    Deadline,
    Options,
    Owned,
    check_batch,
    check_keys,
    check_parent,
    timed_out,
)
from lightcache.storage.protocol import (
    Buffer,
    Keys,
    ReadResult,
    ReadStatus,
    Storage,
    StorageStats,
    WriteResult,
    WriteStatus,
)

# ---- Faults of a `FlakyStorage`: scripted, or random with a seed

Kind = Literal["fail", "corrupt", "truncate", "refuse", "delay", "hang", "die"]
Operation = Literal["contains", "read", "write", "delete", "clear"]
_OF_KEYS: dict[str, tuple[Kind, ...]] = {
    "read": ("fail", "corrupt", "truncate"),
    "write": ("fail", "refuse"),
}
_OF_CALLS: tuple[Kind, ...] = ("hang", "die")


@dataclass(frozen=True)
class Fault:
    """A fault of one call.

    Raises:
        ConfigError: an unknown kind, `at` is not the number of a key, or `seconds` is not finite.
    """

    kind: Kind
    """For one key of a batch, or with at=None for every key:

    - "fail": FAILED; with at=None, or without a batch, the whole call raises StorageError
    - "corrupt": a byte of the page changes, which is detected
    - "truncate": the second half of the page is missing, which is detected
    - "refuse": a write is REFUSED

    For the whole call:

    - "delay": it begins `seconds` later; if that is beyond `timeout`, it times out instead
    - "hang": the keys before `at` are done; then it hangs until `let_go`, whatever its timeout, and
      does the rest late
    - "die": the keys before `at` are done; this and every later call raises StorageError until
      `revive`
    """
    at: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"fault: expected one of {get_args(Kind)}, found {self.kind!r}")
        if self.at is not None and (type(self.at) is not int or self.at < 0):
            raise ConfigError(f"at: expected the number of a key, or None, found {self.at!r}")
        _finite(self.seconds, "seconds")


Script = Mapping[Operation, Iterable["Fault | None"]]


@dataclass(frozen=True)
class Rates:
    """Probabilities from 0 to 1; `delay` is in seconds, and applies to every call.

    Raises:
        ConfigError: one is out of range.
    """

    read_fail: float = 0.0
    """For each key; so are `write_fail`, `corrupt`, `truncate` and `refuse`."""
    write_fail: float = 0.0
    corrupt: float = 0.0
    truncate: float = 0.0
    refuse: float = 0.0
    contains_fail: float = 0.0
    """For each call; so are `delete_fail` (for `clear` too), `hang` and `die`."""
    delete_fail: float = 0.0
    hang: float = 0.0
    die: float = 0.0
    delay: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "delay":
                _finite(value, each.name)
            elif type(value) not in (int, float) or not 0.0 <= value <= 1.0:
                raise ConfigError(f"{each.name}: expected 0 to 1, found {value!r}")


def _finite(value: object, what: str) -> None:
    if type(value) not in (int, float) or not 0.0 <= cast(float, value) < math.inf:
        raise ConfigError(f"{what}: expected finite seconds, 0 or more, found {value!r}")


@dataclass
class Plan:
    """The faults of one call, decided in advance."""

    call: list[Fault] = field(default_factory=list)
    keys: dict[int, Kind] = field(default_factory=dict)


class Planner:
    """Decides the faults of calls: by the script, call by call, and at random after its end. Any
    thread may use it; with one thread, the same seed gives the same faults."""

    def __init__(self, rates: Rates, seed: int, script: Script | None) -> None:
        """
        Raises:
            ConfigError: the script has an unknown operation.
        """
        self.rates = rates
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        for operation in script or {}:
            if operation not in get_args(Operation):
                raise ConfigError(
                    f"script: expected operations of {get_args(Operation)}, found {operation!r}"
                )
        self._script = {name: deque(faults) for name, faults in (script or {}).items()}

    def plan(self, operation: Operation, keys: int) -> Plan:
        """The faults of the next call, which has `keys` keys."""
        with self._lock:
            left = self._script.get(operation)
            if left:
                return _scripted(operation, left.popleft(), keys)
            return self._drawn(operation, keys)

    def _drawn(self, operation: Operation, keys: int) -> Plan:
        rates, plan = self.rates, Plan()
        if rates.delay:
            plan.call.append(Fault("delay", seconds=rates.delay))
        whole = rates.contains_fail if operation == "contains" else rates.delete_fail
        if operation not in _OF_KEYS and self._happens(whole):
            plan.call.append(Fault("fail"))
        for kind in _OF_CALLS:
            if self._happens(getattr(rates, kind)):
                plan.call.append(Fault(kind, at=self._random.randrange(keys + 1)))
        for kind in _OF_KEYS.get(operation, ()):
            rate = getattr(rates, f"{operation}_fail" if kind == "fail" else kind)
            for key in range(keys) if rate else ():
                if self._happens(rate):
                    plan.keys.setdefault(key, kind)
        return plan

    def _happens(self, rate: float) -> bool:
        return rate > 0.0 and self._random.random() < rate


def _scripted(operation: Operation, fault: Fault | None, keys: int) -> Plan:
    if fault is None:
        return Plan()
    whole = fault.kind == "fail" and (fault.at is None or operation not in _OF_KEYS)
    if fault.kind in ("delay", "hang", "die") or whole:
        return Plan(call=[fault])
    if fault.kind not in _OF_KEYS.get(operation, ()):
        return Plan()
    hit = range(keys) if fault.at is None else range(fault.at, min(fault.at + 1, keys))
    return Plan(keys=dict.fromkeys(hit, fault.kind))


# ---- The storage

S = TypeVar("S", ReadStatus, WriteStatus)


class FlakyStorage(Owned):
    """Passes every call on to another backend, and injects faults: see `Fault`."""

    def __init__(
        self,
        inner: Storage,
        *,
        rates: Rates | None = None,
        seed: int = 0,
        script: Script | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        """Takes over `inner`, and closes it.

        Args:
            rates: probabilities of random faults.
            seed: seed of the random faults.
            script: for an operation, the faults of its first call, its second, and so on; None: no
                fault in that call. After its end faults are random.
            sleep: waits for some seconds; tests may pass one that does not.
            clock: in seconds; must advance while `sleep` waits.

        Raises:
            ConfigError: `inner` is not a Storage; see also `Planner`.
        """
        given: Any = inner
        if not isinstance(given, Storage):
            raise ConfigError(f"inner: expected a Storage, found {inner!r}; see open_storage")
        self.inner = inner
        self.spec = inner.spec
        self._planner = Planner(rates or Rates(), seed, script)
        self._sleep = sleep
        self._clock = clock
        self._counters = Counters()
        self._state = Condition()
        self._let_go = False
        self._hanging = 0
        self._dead = False
        super().__init__()

    @classmethod
    def open(cls, options: Mapping[str, str], inner: Storage) -> FlakyStorage:
        """Open with the options of a URL: `flaky:read_fail=0.1,corrupt=0.01,seed=3:memory:`. The
        names are those of `Rates`, and `seed`.

        Raises:
            ConfigError: an unknown option or a bad value.
        """
        chances = [each.name for each in fields(Rates) if each.name != "delay"]
        given = Options("flaky", options, (*chances, "delay", "seed"))
        rates = {name: given.chance(name) for name in chances}
        delay, seed = given.seconds("delay", 0.0), given.count("seed", 0, low=0, high=1 << 62)
        return cls(inner, rates=Rates(**rates, delay=delay), seed=seed)

    # ---- for tests

    @property
    def hanging(self) -> int:
        """The number of calls that hang now."""
        with self._state:
            return self._hanging

    def wait_hanging(self, calls: int = 1, *, timeout: float = 60.0) -> bool:
        """Wait until `calls` calls hang; False: they did not within `timeout` seconds."""
        with self._state:
            return self._state.wait_for(lambda: self._hanging >= calls, timeout)

    def let_go(self) -> None:
        """Release hanging calls; no later call hangs."""
        with self._state:
            self._let_go = True
            self._state.notify_all()

    def revive(self) -> None:
        """Undo a "die"."""
        self._dead = False

    # ---- the protocol

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`."""
        deadline = self._whole("contains", len(check_keys(keys)), timeout)
        return self._passed_on("contains", lambda: self.inner.contains(keys, timeout=deadline.left))

    def read(self, keys: Keys, buffers: Sequence[Buffer], *, timeout: float) -> ReadResult:
        """See `Storage.read`."""
        _, views = check_batch(keys, buffers, self.spec.page_bytes, writable=True)
        self._calls.check()
        plan, deadline = self._planner.plan("read", len(keys)), Deadline(timeout, self._clock)
        reason, late = "", False

        def part(first: int, end: int) -> list[ReadStatus]:
            nonlocal reason, late
            done = self.inner.read(keys[first:end], views[first:end], timeout=_left(deadline))
            reason, late = reason or done.reason, late or timed_out(done.reason)
            return list(done.statuses)

        try:
            if self._late(plan, deadline):
                failed = ReadResult((ReadStatus.FAILED,) * len(keys), deadline.reason)
                return self._counters.read(failed, timed_out=True)
            statuses = self._in_two(plan, len(keys), part)
        except StorageError as error:
            self._counters.failed("reads", len(keys), timed_out=timed_out(str(error)))
            raise
        for key, kind in plan.keys.items():
            if statuses[key] is ReadStatus.OK or kind == "fail":
                statuses[key] = _spoil(views[key], kind)
                reason = reason or f"{kind} on purpose, of key {key}"
        return self._counters.read(ReadResult(tuple(statuses), reason), timed_out=late)

    def write(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        timeout: float,
        parent: Keys | None = None,
    ) -> WriteResult:
        """See `Storage.write`."""
        _, views = check_batch(keys, buffers, self.spec.page_bytes, writable=False)
        check_parent(parent)
        self._calls.check()
        plan, deadline = self._planner.plan("write", len(keys)), Deadline(timeout, self._clock)
        reason, late = "", False

        def part(first: int, end: int) -> list[WriteStatus]:
            nonlocal reason, late
            good = [key for key in range(first, end) if key not in plan.keys]
            chosen = [views[key] for key in good]
            before = keys[first - 1 : first] if first else parent
            done = self.inner.write(keys[good], chosen, timeout=_left(deadline), parent=before)
            reason, late = reason or done.reason, late or timed_out(done.reason)
            found = dict(zip(good, done.statuses, strict=True))
            return [found.get(key, WriteStatus.FAILED) for key in range(first, end)]

        try:
            if self._late(plan, deadline):
                failed = WriteResult((WriteStatus.FAILED,) * len(keys), deadline.reason)
                return self._counters.write(failed, timed_out=True)
            statuses = self._in_two(plan, len(keys), part)
        except StorageError as error:
            self._counters.failed("writes", len(keys), timed_out=timed_out(str(error)))
            raise
        for key, kind in plan.keys.items():
            if kind == "refuse":
                statuses[key] = WriteStatus.REFUSED
            reason = reason or f"{kind} on purpose, of key {key}"
        return self._counters.write(WriteResult(tuple(statuses), reason), timed_out=late)

    def delete(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.delete`."""
        deadline = self._whole("delete", len(check_keys(keys)), timeout)
        return self._counters.deleted(
            self._passed_on("delete", lambda: self.inner.delete(keys, timeout=deadline.left))
        )

    def clear(self, *, timeout: float) -> int:
        """See `Storage.clear`."""
        deadline = self._whole("clear", 0, timeout)
        return self._counters.deleted(
            self._passed_on("clear", lambda: self.inner.clear(timeout=deadline.left))
        )

    def stats(self) -> StorageStats:
        """See `Storage.stats`. Pages, bytes and `evicted` are those of the other backend."""
        inner = self.inner.stats()
        ours = self._counters.snapshot(inner.pages, inner.bytes)
        return replace(ours, evicted=inner.evicted)

    def _release(self) -> None:
        self.let_go()
        self.inner.close()

    # ---- injecting faults

    def _passed_on(self, what: str, call: Callable[[], int]) -> int:
        try:
            return call()
        except StorageError as error:
            self._counters.timed_out(timed_out(str(error), what))
            raise

    def _whole(self, operation: Operation, keys: int, timeout: float) -> Deadline:
        """Begin a call that succeeds or fails as a whole."""
        self._calls.check()
        plan, deadline = self._planner.plan(operation, keys), Deadline(timeout, self._clock)
        if self._late(plan, deadline) or deadline.passed:
            self._counters.timed_out()
            raise StorageError(f"{operation}: {deadline.reason}; give it more time")
        self._in_two(plan, keys, lambda first, end: [])
        return deadline

    def _late(self, plan: Plan, deadline: Deadline) -> bool:
        """Apply a failure or a delay. Returns whether the time is up."""
        if self._dead:
            raise StorageError("the storage is dead on purpose; revive() it")
        for fault in plan.call:
            if fault.kind == "fail":
                raise StorageError("the storage fails on purpose")
            if fault.kind == "delay":
                self._sleep(min(fault.seconds, deadline.left))
                if deadline.passed:
                    return True
        return False

    def _in_two(self, plan: Plan, keys: int, part: Callable[[int, int], list[S]]) -> list[S]:
        """Do a batch, with a hang or death in its middle if planned."""
        stop = next((fault for fault in plan.call if fault.kind in ("hang", "die")), None)
        if stop is None:
            return part(0, keys)
        middle = keys if stop.at is None else min(stop.at, keys)
        done = part(0, middle)
        if stop.kind == "die":
            self._dead = True
            raise StorageError(f"the storage died on purpose behind {middle} of {keys} keys")
        self._hang()
        return done + part(middle, keys)

    def _hang(self) -> None:
        with self._state:
            self._hanging += 1
            self._state.notify_all()
            self._state.wait_for(lambda: self._let_go)
            self._hanging -= 1


def _left(deadline: Deadline) -> float:
    """The timeout for the inner call. After a "hang" the rest is done late with the full timeout:
    the worst that a backend can do."""
    return deadline.left or deadline.timeout


def _spoil(view: memoryview, kind: str) -> ReadStatus:
    half = len(view) // 2
    if kind == "truncate":
        view[half:] = bytes(len(view) - half)
    else:
        view[half] ^= 0xFF
    return ReadStatus.FAILED if kind == "fail" else ReadStatus.CORRUPT


__all__ = ["Fault", "FlakyStorage", "Kind", "Operation", "Plan", "Planner", "Rates", "Script"]
