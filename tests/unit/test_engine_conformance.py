"""Transfer engines against the conformance suite: the host's, and the device's with streams that
are threads and kernels that are interpreted. On a GPU: tests/gpu/test_transfer_gpu.py."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.refusals import refused
from support.threaded_device import Gate, ThreadedDevice

from lightcache import ConfigError, Detached
from lightcache.kernels import testing
from lightcache.kernels.engine import TransferEngine
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.testing import CHECKS, Factory, Rig, Setup


class HostGate(threading.Event):
    """An event that HostEngine waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.event, self.open = self, self.set


def rig(make: Callable[..., Any], gate: Callable[[], Any], setup: Setup) -> Rig:
    """An engine between two arrays."""
    device, pages = np.zeros(setup.device_bytes, np.uint8), np.zeros(setup.pages_shape, np.uint8)
    address, memory = int(device.ctypes.data), HostPages(pages)
    memory.ready = len(pages)  # type: ignore[attr-defined]
    return Rig(
        make(setup.geometry, setup.planes(address, keep=device), memory),
        pages,
        moved_planes=setup.moved_planes(address, keep=device),
        read_device=device.copy,
        write_device=partial(np.copyto, device),
        gate=gate,
    )


def thread_gate() -> Any:
    gate: Any = Gate()
    gate.event = gate
    return gate


@pytest.fixture(params=["host", "staged", "direct, paced"])
def factory(request: pytest.FixtureRequest) -> Iterator[Factory]:
    if request.param == "host":
        yield partial(rig, HostEngine, HostGate)
        return
    pytest.importorskip("triton")
    device = ThreadedDevice()
    mode, _, paced = request.param.partition(", ")
    rate = 1e9 if paced else None
    make = partial(TransferEngine, mode=mode, staging_bytes=1 << 14, rate=rate, device=device)
    yield partial(rig, make, thread_gate)
    device.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(factory: Factory, check: Callable[[Factory], None]) -> None:
    check(factory)


# ---- The suite finds what is wrong


class Early(HostEngine):
    """Does not wait for the work that `after` names."""

    def offload(self, moves: Any, *, after: Any = (), **how: Any) -> Any:
        transfer = super().offload(moves, **how)
        transfer.synchronize()
        return transfer


class Lossy(HostEngine):
    """Leaves the last slot out."""

    def load(self, moves: Any, **how: Any) -> Any:
        if isinstance(moves, list):
            moves = [replace(move, slots=np.array(move.slots[:-1])) for move in moves]
        return super().load(moves, **how)


class Identity(HostEngine):
    """Compares calls by `is`."""

    def will_tell(self, call: Any) -> bool:
        return any(call is one for copy in self._queue.open for one in copy._calls)


class Silent(HostEngine):
    """Makes no call from `poll`."""

    def poll(self) -> int:
        return sum(not copy.finished for copy in self._queue.open)


class Lenient(HostEngine):
    """Takes slots that the device does not have."""

    def offload(self, moves: Any, **how: Any) -> Any:
        with contextlib.suppress(ConfigError):
            return super().offload(moves, **how)


class Hasty(HostEngine):
    """Does not wait for its copies when it is closed."""

    def close(self) -> None:
        self._planned = None


class Undying(HostEngine):
    """Takes transfers after it was closed."""

    def load(self, moves: Any, **how: Any) -> Any:
        with contextlib.suppress(Detached):
            return super().load(moves, **how)


@pytest.mark.parametrize(
    ("engine", "check", "found"),
    [
        (Early, "after", "before the gate opens"),
        (Lossy, "bytes", "load: nbytes: "),
        (Identity, "calls", "will_tell of a pending call"),
        (Silent, "dropped_transfer", "calls after poll"),
        (Lenient, "input", "found no error"),
        (Undying, "close", "load after close: expected Detached"),
        (Hasty, "close", "calls after close|returned while"),
    ],
)
def test_conformance_sees(engine: Any, check: str, found: str) -> None:
    checked = getattr(testing, f"check_{check}")
    refused(AssertionError, found, checked, partial(rig, engine, HostGate))
