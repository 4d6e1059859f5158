"""A GPU driver for tests: writes down its calls, refuses what drivers refuse, can be held up."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

ENTERED = threading.local()


@dataclass
class FakeDriver:
    """Registrations as a dict from address to length."""

    refuse_at: int = -1
    """Which call of `register` is refused, counted from 0; -1: none."""
    refuse_with: int = 2
    unregister_code: int = 0
    elsewhere: bool = False
    """The device finds memory at another address than the host."""
    held: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    gates: dict[int, threading.Event] = field(default_factory=dict)
    """What is so many bytes behind the first memory registered waits for the event (a minute)."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0
    base: int = 0

    def enter(self) -> None:
        """Every thread must begin with it."""
        ENTERED.driver = self

    def register(self, address: int, nbytes: int) -> int:
        """OS pages that overlap with registered ones: 712; none at all: 1."""
        assert getattr(ENTERED, "driver", None) is self, "a thread that has not entered"
        with self.lock:
            number, self.count = self.count, self.count + 1
            self.base = self.base or address
            gate = self.gates.get(address - self.base)
        if gate is not None:
            assert gate.wait(60), "a held-up registration was forgotten"
        with self.lock:
            self.calls.append(("register", address, nbytes))
            if number == self.refuse_at:
                return self.refuse_with
            if nbytes == 0:
                return 1
            low, high = address // 4096, -(-(address + nbytes) // 4096)
            for start, length in self.held.items():
                if low < -(-(start + length) // 4096) and start // 4096 < high:
                    return 712
            self.held[address] = nbytes
            return 0

    def unregister(self, address: int) -> int:
        """Of the very address that was registered; else 713."""
        assert getattr(ENTERED, "driver", None) is self, "a thread that has not entered"
        with self.lock:
            self.calls.append(("unregister", address, 0))
            if self.unregister_code:
                return self.unregister_code
            return 0 if self.held.pop(address, 0) else 713

    def device_address(self, address: int) -> int:
        """Of what is registered."""
        return address + 4096 if self.elsewhere else address

    def registered(self) -> list[tuple[int, int]]:
        """(address, bytes), ascending."""
        with self.lock:
            return sorted(self.held.items())
