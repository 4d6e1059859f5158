"""Transfer engines against the conformance suite: the host's, and the device's with streams that
are threads and kernels that are interpreted. On a GPU: tests/gpu/test_transfer_gpu.py."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.threaded_device import Gate, ThreadedDevice

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
