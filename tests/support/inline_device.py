"""A device that does everything at once in host memory.

Streams and events keep a log, so that tests see what waits for what.
"""

import contextlib

import numpy as np
import torch
from support.plain_rows import PlainLauncher

from lightcache.kernels.launch import InterpretedLauncher
from lightcache.kernels.rows import HostCopier


class Event:
    """Over when it was recorded; waiting for one that was not is waiting for nothing."""

    def __init__(self, device):
        self.device = device
        self.recorded = None

    def record(self, stream):
        self.device.hook("record")
        self.recorded = stream.name
        self.device.log.append(("record", stream.name, self))

    def query(self):
        self.device.hook("query")
        return self.device.running

    def synchronize(self):
        self.device.hook("synchronize")
        self.device.running = True


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name
        self.cuda_stream = device.streams

    def wait_event(self, event):
        self.device.hook("wait")
        self.device.log.append(("wait", self.name, event))

    def synchronize(self):
        self.device.log.append(("synchronize", self.name, None))


class Copier(HostCopier):
    def __init__(self, device):
        self.device = device

    def __call__(self, targets, sources, sizes, stream):
        if self.device.fail_copies:
            raise RuntimeError("the copy failed")
        self.device.hook("copy")
        self.device.log.append(("copy", stream.name, len(sizes)))
        super().__call__(targets, sources, sizes, stream)


class Launcher:
    """Launches that are logged."""

    def __init__(self, device, inner):
        self.device, self.inner = device, inner

    def bind(self, each, table, packed, to_page):
        launch = self.inner.bind(each, table, packed, to_page)

        def logged(*numbers):
            self.device.hook("launch")
            self.device.log.append(("launch", f"stream{numbers[-1]}", None))
            launch(*numbers)

        return logged


def ordered(log):
    """(kind, stream, numbers of the work that is over before) of each launch and copy in a log, and
    by the id of an event what it tells of. Starts anew; events recorded before tell of nothing."""
    streams, events, work = {}, {}, []
    for kind, stream, what in log:
        before = streams.setdefault(stream, set())
        if kind in ("launch", "copy"):
            work.append((kind, stream, set(before)))
            before.add(len(work) - 1)
        elif kind == "record":
            events[id(what)] = set(before)
        elif kind == "wait":
            before |= events.get(id(what), set())
    return work, events


def covered(log, marks):
    """Whether these events tell of all work in a log: who waits for them waits for all of it."""
    work, events = ordered(log)
    told = set().union(*(events.get(id(mark), set()) for mark in marks))
    return told == set(range(len(work)))


class InlineDevice:
    """Give it to TransferEngine as `device`. Needs TRITON_INTERPRET=1 before triton is imported.

    Args:
        interpreted: run the kernel itself, interpreted, instead of the same in numpy.
    """

    registered = False
    name = "cpu"
    processors = 2

    def __init__(self, interpreted=False):
        self.rows = InterpretedLauncher() if interpreted else PlainLauncher()
        self.log = []
        self.running = True
        """False: events are never over."""
        self.fail_copies = False
        self.streams = 0
        self.allocated = 0
        self.chosen = None
        self.hook = lambda kind: None
        """Called before whatever is done; may raise."""

    def guard(self):
        self.hook("guard")
        return contextlib.nullcontext()

    def stream(self):
        self.streams += 1
        return Stream(self, f"stream{self.streams}")

    def current(self):
        self.hook("current")
        return self.chosen or Stream(self, "current")

    @contextlib.contextmanager
    def on(self, stream):
        self.chosen = stream
        try:
            yield
        finally:
            self.chosen = None

    def event(self):
        self.hook("event")
        return Event(self)

    def lost(self, error):
        return "captur" not in str(error)

    def empty(self, nbytes):
        self.hook("empty")
        self.allocated += 1
        return torch.from_numpy(np.full(nbytes, 0xA5, np.uint8))

    def words(self, count):
        self.hook("words")
        self.allocated += 1
        return torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)

    def copier(self, tensors):
        return Copier(self)

    def launcher(self):
        return Launcher(self, self.rows)
