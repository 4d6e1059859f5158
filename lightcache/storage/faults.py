"""What `FlakyStorage` does wrong, and when: by a script, or by chance with a seed."""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, cast, get_args

from lightcache.errors import ConfigError

Kind = Literal["fail", "corrupt", "truncate", "refuse", "delay", "hang", "die"]
Operation = Literal["contains", "read", "write", "delete", "clear"]
_OF_KEYS: dict[str, tuple[Kind, ...]] = {
    "read": ("fail", "corrupt", "truncate"),
    "write": ("fail", "refuse"),
}
_OF_CALLS: tuple[Kind, ...] = ("hang", "die")


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one call.

    Raises:
        ConfigError: there is no such kind, `at` is no number of a key, `seconds` have no end.
    """

    kind: Kind
    """One key of a batch, or with at=None every one:

    - "fail": FAILED; the whole call raises StorageError when at=None, and where it has no batch
    - "corrupt": a byte of the page is changed, and noticed
    - "truncate": the second half of the page does not come, which is noticed
    - "refuse": REFUSED, of a write

    The whole call:

    - "delay": `seconds` pass first; when they are more than `timeout`, that passes, and all is lost
    - "hang": the keys before `at` are done; then nothing happens, whatever the timeout says, until
      `let_go`; then the rest is done, late
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
    """Probabilities, each of 0 to 1; `delay` is in seconds and for every call.

    Raises:
        ConfigError: one is out of range.
    """

    read_fail: float = 0.0
    """Of each key; so are `write_fail`, `corrupt`, `truncate` and `refuse`."""
    write_fail: float = 0.0
    corrupt: float = 0.0
    truncate: float = 0.0
    refuse: float = 0.0
    contains_fail: float = 0.0
    """Of each call; so are `delete_fail` (of `clear`, too), `hang` and `die`."""
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
    """What goes wrong in one call, decided before it."""

    call: list[Fault] = field(default_factory=list)
    keys: dict[int, Kind] = field(default_factory=dict)


class Planner:
    """Decides, for any thread: first by the script, call after call, and behind its end by chance.
    With one thread the same seed gives the same faults."""

    def __init__(self, rates: Rates, seed: int, script: Script | None) -> None:
        """
        Raises:
            ConfigError: the script names an operation that there is not.
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
        """What goes wrong in a call with so many keys."""
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


__all__ = ["Fault", "Kind", "Operation", "Plan", "Planner", "Rates", "Script"]
