"""The process of a worker: the pipe to the router, and the stop at which the demo kills it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightcache import LightcacheError, Reservation
from lightcache.kernels import Move
from lightcache.manager import EngineBackend
from lightcache.tools.demo import messages
from lightcache.tools.demo.messages import WorkerConfig
from lightcache.tools.demo.model import one_line
from lightcache.tools.demo.worker import HybridWorker, Worker


class StoppingBackend(EngineBackend):
    """An `EngineBackend` that can stop in the middle of an offload. An engine has no use for it: a
    process that is killed in a copy is what the demo shows, and this makes it happen every time."""

    def __init__(self, engine: Any, page_tokens: int, pipe: Connection) -> None:
        super().__init__(engine)
        self._page_tokens, self._pipe = page_tokens, pipe
        self.stop_at: int | None = None
        """Number of the request that stops in its first offload of several pages; None: none."""

    def offload(self, new: Any, slots: Any) -> Any:
        """See `EngineBackend`."""
        if self.stop_at is not None and len(new.pages) > 1:
            self._stop_halfway(self.stop_at, new, slots)
        return super().offload(new, slots)

    def _stop_halfway(self, number: int, new: Reservation, slots: Any) -> None:
        """Copy half of the new pages, tell the router, and wait to be killed."""
        half = len(new.pages) // 2
        by_page = slots[: len(slots) // self._page_tokens * self._page_tokens]
        by_page = by_page.reshape(-1, self._page_tokens)[new.new[:half]]
        self.engine.offload(Move(new.pages[:half], by_page.reshape(-1))).wait()
        self._pipe.send(messages.Holding(number, half, len(new.pages)))
        self._pipe.poll(None)
        raise EOFError  # the router has closed the pipe instead


def stopping(config: WorkerConfig, pipe: Connection) -> Callable[[Any], StoppingBackend]:
    """For `Worker`: makes a `StoppingBackend` of a transfer engine."""
    return partial(StoppingBackend, page_tokens=config.page_tokens, pipe=pipe)


def run(config: WorkerConfig, name: str, pipe: Connection) -> None:
    """The whole of a worker process: serves until the router closes the pipe."""
    torch.set_num_threads(config.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with ExitStack() as stack:
            kind = HybridWorker if config.model.hybrid else Worker
            worker: Any = kind(config, name, stack, stopping(config, pipe))
            pipe.send(messages.Ready(os.getpid(), worker.device.name))
            while True:
                request = pipe.recv()
                worker.backend.stop_at = request.number if request.hold else None
                pipe.send(worker.serve(request))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the router has closed the pipe, or is dead
    except (LightcacheError, OSError, MemoryError, ImportError, RuntimeError) as error:
        kind_of = "" if isinstance(error, LightcacheError) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):  # another worker failed first, and the pipe is closed
            pipe.send(messages.Failed(kind_of + one_line(error)))
