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
from lightcache.kernels.planes import DevicePlanes
from lightcache.kernels.testing import CHECKS, Factory, Rig, Setup


class HostGate(threading.Event):
    """An event that HostEngine waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.event, self.open = self, self.set


def rig(
    make: Callable[..., Any], gate: Callable[[], Any], setup: Setup, *, name: str = "cpu"
) -> Rig:
    """An engine between two arrays, of which one is the memory of a device of this name."""
    device, pages = np.zeros(setup.device_bytes, np.uint8), np.zeros(setup.pages_shape, np.uint8)
    address, memory = int(device.ctypes.data), HostPages(pages)
    memory.ready = len(pages)  # type: ignore[attr-defined]
    return Rig(
        make(setup.geometry, setup.planes(address, device=name, keep=device), memory),
        pages,
        moved_planes=setup.moved_planes(address, device=name, keep=device),
        read_device=device.copy,
        write_device=partial(np.copyto, device),
        gate=gate,
    )


def thread_gate() -> Any:
    gate: Any = Gate()
    gate.event = gate
    return gate


ENGINES = ("host", "staged", "direct, paced")


@pytest.fixture
def factory(request: pytest.FixtureRequest) -> Iterator[Factory]:
    """Makes engines of the kind that the parameter says."""
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


def cases() -> Iterator[Any]:
    """Each engine and check. An interpreted kernel takes some 20 ms of a processor for each class
    of rows, so all bytes of all geometries take it seconds."""
    for engine in ENGINES:
        for check in CHECKS:
            slow = engine != "host" and check is testing.check_bytes
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(engine, check, marks=marks, id=f"{engine}-{check.__name__}")


@pytest.mark.parametrize(("factory", "check"), list(cases()), indirect=["factory"])
def test_conformance(factory: Factory, check: Callable[[Factory], None]) -> None:
    check(factory)


class Foreign(HostEngine):
    """An engine of somebody else's device."""

    def __init__(self, geometry: Any, planes: Any, memory: Any) -> None:
        assert planes.device == "npu:0"
        super().__init__(geometry, DevicePlanes(planes.planes, keep=planes), memory)

    def _ours(self, verb: Any, moves: Any, planes: Any = None, **how: Any) -> Any:
        if planes is not None:
            planes = DevicePlanes(planes.planes, keep=planes)
        return verb(moves, planes=planes, **how)

    def offload(self, moves: Any, **how: Any) -> Any:
        return self._ours(super().offload, moves, **how)

    def load(self, moves: Any, **how: Any) -> Any:
        return self._ours(super().load, moves, **how)


@pytest.mark.parametrize("check", ["description", "planes_of_one_call", "close"])
def test_an_engine_of_a_device_that_is_not_ours(check: str) -> None:
    getattr(testing, f"check_{check}")(partial(rig, Foreign, HostGate, name="npu:0"))


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


class Vague(HostEngine):
    """Says nothing true of its device."""

    def __init__(self, *sides: Any) -> None:
        super().__init__(*sides)
        self.slots = 17


class Layerless(HostEngine):
    """Waits for any layer, there or not."""

    def offload(self, moves: Any, **how: Any) -> Any:
        transfer = super().offload(moves, **how)
        transfer.wait_layer = lambda *_: None  # type: ignore[method-assign]
        return transfer


class Quiet(HostEngine):
    """Makes no call where nothing moves."""

    def load(self, moves: Any, *, when_done: Any = None, **how: Any) -> Any:
        def call(ok: bool) -> None:
            if when_done is not None and transfer.nbytes:
                when_done(ok)

        transfer = super().load(moves, when_done=call, **how)
        return transfer


class Fixed(HostEngine):
    """Always uses its own planes."""

    def load(self, moves: Any, *, planes: Any = None, **how: Any) -> Any:
        return super().load(moves, **how)


class Deaf(HostEngine):
    """Loses what a call raises."""

    def offload(self, moves: Any, *, when_done: Any = None, **how: Any) -> Any:
        def call(ok: bool) -> None:
            with contextlib.suppress(Exception):
                when_done(ok)

        return super().offload(moves, when_done=None if when_done is None else call, **how)


class Forked(HostEngine):
    """Takes transfers in a forked child."""

    def load(self, moves: Any, **how: Any) -> Any:
        with contextlib.suppress(Detached):
            return super().load(moves, **how)


BROKEN: list[tuple[Any, str, str]] = [
    (Vague, "description", "slots: expected 64, found 17"),
    (Layerless, "windows", r"wait_layer\(3\): expected ConfigError, found no error"),
    (Quiet, "nothing_to_move", r"calls of when_done: expected \[True\], found \[\]"),
    (Fixed, "planes_of_one_call", "load with planes=: device memory with other bytes"),
    (Deaf, "calls_that_raise", r"expected \(1, \[True\]\), found \(0"),
    (Forked, "forked", "in a forked child: its status: expected 0"),
    (Early, "after", "before the gate opens"),
    (Lossy, "bytes", "load: nbytes: "),
    (Identity, "calls", "will_tell of a pending call"),
    (Silent, "dropped_transfer", "calls after poll"),
    (Lenient, "input", "found no error"),
    (Undying, "close", "load after close: expected Detached"),
    (Hasty, "close", "calls after close|returned while"),
]


def test_each_check_has_a_broken_engine() -> None:
    assert {f"check_{check}" for _, check, _ in BROKEN} == {each.__name__ for each in CHECKS}


@pytest.mark.parametrize(("engine", "check", "found"), BROKEN)
def test_conformance_sees(engine: Any, check: str, found: str) -> None:
    checked = getattr(testing, f"check_{check}")
    refused(AssertionError, found, checked, partial(rig, engine, HostGate))
