"""A device that does everything at once in host memory, with the kernels interpreted.

Streams and events keep a log, so that tests see what waits for what.
"""

import contextlib

import numpy as np
import torch

from lightcache.kernels.copies import HostCopier


class Event:
    """Over when it was recorded; waiting for one that was not is waiting for nothing."""

    def __init__(self, device):
        self.device = device
        self.recorded = None

    def record(self, stream):
        self.recorded = stream.name

    def query(self):
        return self.device.running

    def synchronize(self):
        self.device.running = True


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name
        self.cuda_stream = 0

    def wait_event(self, event):
        self.device.log.append(("wait", self.name, event))

    def synchronize(self):
        pass


class Copier(HostCopier):
    def __init__(self, device):
        self.device = device

    def __call__(self, targets, sources, sizes, stream):
        if self.device.fail_copies:
            raise RuntimeError("the copy failed")
        self.device.log.append(("copy", stream.name, len(sizes)))
        super().__call__(targets, sources, sizes, stream)


class InlineDevice:
    """Give it to TransferEngine as `device`. Needs TRITON_INTERPRET=1 before triton is imported."""

    registered = False
    name = "cpu"
    processors = 2

    def __init__(self):
        self.log = []
        self.running = True
        """False: events are never over."""
        self.fail_copies = False
        self.streams = 0
        self.allocated = 0

    def guard(self):
        return contextlib.nullcontext()

    def stream(self):
        self.streams += 1
        return Stream(self, f"stream{self.streams}")

    def current(self):
        return Stream(self, "current")

    def event(self):
        return Event(self)

    def lost(self, error):
        return "captur" not in str(error)

    def empty(self, nbytes):
        self.allocated += 1
        return torch.from_numpy(np.full(nbytes, 0xA5, np.uint8))

    def words(self, count):
        self.allocated += 1
        return torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)

    def copier(self, tensors):
        return Copier(self)

    def launcher(self):
        from lightcache.kernels.launch import InterpretedLauncher

        return InterpretedLauncher()
