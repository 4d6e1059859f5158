"""Where tests of tests/gpu run: on GPUs, or on threads that stand in for them, so that everything
but the driver can be tried without one. See gpu/conftest.py."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

if os.environ.get("LIGHTCACHE_TEST_STAND_IN"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import torch

from lightcache import Cache
from lightcache.kernels.geometry import PageGeometry
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlanes
from lightcache.kernels.states import StateCopier, StateCopy

DEADLINE = 60.0
SLEEP_CYCLES = 6_000_000_000  # three seconds of a GPU, where a stream cannot wait for the host


class HostGate:
    """An event on a GPU that is over when the test says so: a stream waits for a word in host
    memory. While it is shut nobody may wait for work on the device that could be behind it."""

    def __init__(self, name: str) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._stream = torch.cuda.Stream(name)
        self.event = torch.cuda.Event(blocking=True)
        with torch.cuda.device(name):
            if not self._wait_for_word():
                with torch.cuda.stream(self._stream):
                    torch.cuda._sleep(SLEEP_CYCLES)
            self.event.record(self._stream)

    def _wait_for_word(self) -> bool:
        try:
            from cuda.bindings import driver

            equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
            stream = driver.CUstream(self._stream.cuda_stream)
            address = driver.CUdeviceptr(self._word.data_ptr())
            (code,) = driver.cuStreamWaitValue32(stream, address, 1, equal)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            print(f"a stream cannot wait for the host ({error!r}): it sleeps instead")
            return False
        if int(code) != 0:
            print(f"a stream cannot wait for the host ({code}): it sleeps instead")
        return int(code) == 0

    def open(self) -> None:
        """It is over now, or will be within seconds."""
        self._word[0] = 1


class Gpu:
    """One GPU."""

    wide = 64
    """Of a small model's states: 128 KiB a layer."""

    def __init__(self, number: int = 0) -> None:
        self.name = self.memory = f"cuda:{number}"
        """Of the device, and where torch keeps its tensors."""
        self.compute = torch.cuda.Stream(self.name)
        """On which a model computes, see `computing`."""

    def make_current(self) -> None:
        """Of this thread."""
        torch.cuda.set_device(self.name)

    def current(self) -> str:
        """The name of this thread's."""
        return f"cuda:{torch.cuda.current_device()}"

    def pin(self, cache: Cache, **how: Any) -> Any:
        """The cache's pool, for any device."""
        return cache.pin(device=self.name, **how)

    def engine(
        self,
        cache: Cache,
        geometry: PageGeometry,
        planes: DevicePlanes,
        memory: HostPages,
        **how: Any,
    ) -> Any:
        """The cache's engine for planes on this device."""
        return cache.transfer_engine(geometry, planes, memory=memory, **how)

    def gate(self) -> Any:
        """Something that is shut: copies that are after its `event` do not begin."""
        return HostGate(self.name)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """`compute` is the current stream."""
        made: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self.compute)
        return made

    def stream(self) -> Any:
        """Another one."""
        return torch.cuda.Stream(self.name)

    def launch(self, work: Callable[[], None], stream: Any = None) -> None:
        """Kernels of a model on a stream; None: `compute`."""
        with torch.cuda.stream(self.compute if stream is None else stream):
            work()

    def nap(self, stream: Any = None) -> None:
        """A kernel of a millisecond or so."""
        self.launch(lambda: torch.cuda._sleep(2_000_000), stream)

    def mark(self, stream: Any = None) -> Any:
        """An event behind what was launched."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.compute if stream is None else stream)
        return event

    def copier(self, geometry: PageGeometry, planes: DevicePlanes) -> Any:
        """From slot to slot."""
        return StateCopier(geometry, planes)

    def synchronize(self) -> None:
        """Until all work is done."""
        torch.cuda.synchronize(self.name)

    def close(self) -> None:
        """All engines are closed."""
        self.synchronize()


class ThreadedCopier:
    """A StateCopier whose copies happen when the thread of the stream gets to them."""

    def __init__(self, device: Any, inner: StateCopier) -> None:
        self._device, self._inner = device, inner

    def copy(self, sources: Any, targets: Any, stream: Any = None) -> StateCopy:
        """See `StateCopier`."""
        stream, event = stream or self._device.current(), self._device.event()
        stream.put(lambda: self._inner.copy(sources, targets))
        event.record(stream)
        return StateCopy(self._device, event)

    def zero(self, slots: Any, stream: Any = None) -> StateCopy:
        """See `StateCopier`."""
        return self.copy([-1] * len(slots), slots, stream)


class Threads:
    """Threads that stand in for one."""

    memory = "cpu"
    wide = 4

    def __init__(self, number: int = 0) -> None:
        from support.threaded_device import ThreadedDevice

        self.name = f"cuda:{900 + number}"  # a name that planes may have, of no GPU there is
        self.stand_in = ThreadedDevice(self.name)
        self.compute = self.stand_in.current()

    def make_current(self) -> None:
        """As `Gpu`."""
        from support.threaded_device import set_device

        set_device(self.name)

    def current(self) -> str:
        """As `Gpu`."""
        from support.threaded_device import current_device

        return current_device()

    def pin(self, cache: Cache, **how: Any) -> Any:
        """As `Gpu`."""
        from support.fake_driver import FakeDriver

        return cache.pin(**{"driver": FakeDriver(), **how})

    def engine(
        self,
        cache: Cache,
        geometry: PageGeometry,
        planes: DevicePlanes,
        memory: HostPages,
        **how: Any,
    ) -> Any:
        """As `Gpu`."""
        here = DevicePlanes(planes.planes, device=self.name, keep=planes.keep)
        return cache.transfer_engine(geometry, here, memory=memory, device=self.stand_in, **how)

    def gate(self) -> Any:
        """As `Gpu`."""
        from support.threaded_device import Gate

        made: Any = Gate()
        made.event = made
        return made

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """As `Gpu`."""
        with self.stand_in.guard():
            yield

    def stream(self) -> Any:
        """As `Gpu`."""
        return self.stand_in.stream()

    def launch(self, work: Callable[[], None], stream: Any = None) -> None:
        """As `Gpu`."""
        (self.compute if stream is None else stream).put(work)

    def nap(self, stream: Any = None) -> None:
        """As `Gpu`."""
        self.launch(lambda: time.sleep(1e-3), stream)

    def mark(self, stream: Any = None) -> Any:
        """As `Gpu`."""
        event = self.stand_in.event()
        event.record(self.compute if stream is None else stream)
        return event

    def copier(self, geometry: PageGeometry, planes: DevicePlanes) -> Any:
        """As `Gpu`."""
        return ThreadedCopier(self.stand_in, StateCopier(geometry, planes))

    def synchronize(self) -> None:
        """As `Gpu`."""
        for stream in self.stand_in.streams.values():
            stream.synchronize()

    def close(self) -> None:
        """As `Gpu`."""
        self.stand_in.close()


def place(number: int = 0) -> Any:
    """The GPU of a number, or its stand-in."""
    return Gpu(number) if torch.cuda.is_available() else Threads(number)


def places() -> int:
    """How many there are."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 2
