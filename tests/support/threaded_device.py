"""A device whose streams are threads, with rows copied by numpy: copies are under way for as
long as they like, and whatever does not wait for an event does come too early.

Give it to TransferEngine as `device`, with planes that say they are on `name`. Needs
TRITON_INTERPRET=1 before triton is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from support.plain_rows import PlainLauncher

DEADLINE = 60.0
_CURRENT = threading.local()
_HANDLES = itertools.count(1)


def current_device() -> str:
    """Of this thread; "cuda:900" until somebody changes it."""
    return getattr(_CURRENT, "name", "cuda:900")


def set_device(name: str) -> None:
    """Make it the current one of this thread."""
    _CURRENT.name = name


class Stream:
    """Runs what it is given, in order, in a thread of its own."""

    def __init__(self, device: ThreadedDevice, name: str) -> None:
        self.device, self.name = device, name
        self.cuda_stream = next(_HANDLES)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.device.pause()
            try:
                work()
            except Exception as error:
                self.device.errors.append(error)

    def put(self, work: Callable[[], None] | None) -> None:
        """Do this behind what was put before; None: end."""
        self._work.put(work)

    def wait_event(self, event: Any) -> None:
        """Go on when what was recorded last, as of now, is over."""
        self.put(event.waiter())

    def synchronize(self) -> None:
        """Block until all is done."""
        event = Event()
        event.record(self)
        event.synchronize()


class Event:
    """As torch's: one that was never recorded is over."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._over.set()

    def record(self, stream: Stream) -> None:
        """It is over when the stream gets there."""
        self._over = over = threading.Event()
        stream.put(over.set)

    def waiter(self) -> Callable[[], None]:
        """What waits for it as it is now."""
        over = self._over

        def wait() -> None:
            assert over.wait(DEADLINE), "an event was never over"

        return wait

    def query(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()

    def synchronize(self) -> None:
        """Block until it is over."""
        self.waiter()()


class Gate(Event):
    """An event that is over when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()

    def open(self) -> None:
        """It is over now."""
        self._over.set()


class Copier:
    """On the thread of the stream. Refuses address 0 at once, as a driver does."""

    anywhere = True

    def add(self, *tensors: Any) -> None:
        """Not needed."""

    def __call__(
        self, targets: list[int], sources: list[int], sizes: list[int], stream: Stream
    ) -> None:
        """See `lightcache.kernels.rows.Copier`."""
        if 0 in targets:
            raise RuntimeError("the driver refused a copy: cudaErrorInvalidValue")
        stream.device.check_current()
        copies = list(zip(targets, sources, sizes, strict=True))

        def copy() -> None:
            for target, source, size in copies:
                ctypes.memmove(target, source, size)

        stream.put(copy)


class Launcher:
    """Launches in the thread of the stream that a handle names."""

    def __init__(self, device: ThreadedDevice) -> None:
        self._device, self._inner = device, PlainLauncher()

    def bind(self, *what: Any) -> Callable[..., None]:
        """See `lightcache.kernels.launch.Launcher.bind`."""
        launch = self._inner.bind(*what)

        def later(*arguments: Any) -> None:
            self._device.check_current()

            self._device.streams[arguments[-1]].put(partial(launch, *arguments))

        return later


class ThreadedDevice:
    """See above. Registration is asked for, as a GPU does."""

    registered = True
    processors = 2

    def __init__(self, name: str = "cuda:900", seed: int | None = None) -> None:
        """Args:
        seed: of naps that streams take before each step; None: none.
        """
        self.name = "cpu"  # where tables are put
        self.own_name = name
        self.streams: dict[int, Stream] = {}
        self.errors: list[Exception] = []
        """Of what streams did; a test looks at the end."""
        self._naps = None if seed is None else random.Random(seed)
        self._main = self.stream()

    def pause(self) -> None:
        """Let others be faster, sometimes."""
        if self._naps is not None and self._naps.random() < 0.3:
            time.sleep(self._naps.random() * 1e-3)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Make it the current device for a while."""
        before = current_device()
        set_device(self.own_name)
        try:
            yield
        finally:
            set_device(before)

    def check_current(self) -> None:
        """What drivers do wrong silently, or refuse."""
        assert current_device() == self.own_name, f"current device: {current_device()}"

    def stream(self) -> Stream:
        """A new one."""
        made = Stream(self, f"{self.own_name} stream {len(self.streams)}")
        self.streams[made.cuda_stream] = made
        return made

    def current(self) -> Stream:
        """The one stream of callers."""
        return self._main

    def event(self) -> Event:
        """A new one."""
        return Event()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of nonsense."""
        self.check_current()
        return torch.from_numpy(np.full(nbytes, 0xA5, np.uint8))

    def words(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Nonsense as well."""
        self.check_current()
        return tuple(torch.full((count,), -(1 << 40), dtype=torch.int64) for _ in range(2))  # type: ignore[return-value]

    def copier(self, tensors: list[torch.Tensor]) -> Copier:
        """At addresses."""
        return Copier()

    def launcher(self) -> Launcher:
        """For the streams of this device."""
        return Launcher(self)

    def close(self) -> None:
        """End the threads behind what they have to do, and say what went wrong in them."""
        for stream in self.streams.values():
            stream.put(None)
        for stream in self.streams.values():
            stream.thread.join(DEADLINE)
        assert not self.errors, self.errors
