"""The process of a worker: the pipe to the router, and the stop at which the demo kills it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightcache import LightcacheError
from lightcache.kernels import Move
from lightcache.manager import EngineBackend
from lightcache.tools.demo import messages
from lightcache.tools.demo.messages import WorkerConfig
from lightcache.tools.demo.model import one_line
from lightcache.tools.demo.worker import HybridWorker, Worker


@contextlib.contextmanager
def stopping(backend: EngineBackend, number: int, pipe: Connection) -> Iterator[None]:
    """Within it an offload of several pages copies half of them, tells the router, and waits to be
    killed. An engine has no use for this: the demo kills a worker in a copy every time."""

    def offload(new: Any, slots: Any) -> Any:
        half, tokens = len(new.pages) // 2, backend.engine.geometry.page_tokens
        if not half:
            return EngineBackend.offload(backend, new, slots)
        by_page = slots[: len(slots) // tokens * tokens].reshape(-1, tokens)[new.new[:half]]
        backend.engine.offload(Move(new.pages[:half], by_page.reshape(-1))).wait()
        pipe.send(messages.Holding(number, half, len(new.pages)))
        pipe.poll(None)
        raise EOFError  # the router has closed the pipe instead

    vars(backend)["offload"] = offload
    try:
        yield
    finally:
        del vars(backend)["offload"]


def run(config: WorkerConfig, name: str, pipe: Connection) -> None:
    """The whole of a worker process: serves until the router closes the pipe."""
    # Not more than OMP_NUM_THREADS, which torch knows.
    torch.set_num_threads(min(config.threads, torch.get_num_threads()))
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with ExitStack() as stack:
            worker = (HybridWorker if config.model.hybrid else Worker)(config, name, stack)
            pipe.send(messages.Ready(os.getpid(), worker.kv_manager.device.name))
            while True:
                request = pipe.recv()
                number, backend = request.number, worker.kv.backend
                with stopping(backend, number, pipe) if request.hold else nullcontext():
                    pipe.send(worker.serve(request))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the router has closed the pipe, or is dead
    except (LightcacheError, OSError, MemoryError, ImportError, RuntimeError) as error:
        kind_of = "" if isinstance(error, LightcacheError) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):  # another worker failed first, and the pipe is closed
            pipe.send(messages.Failed(kind_of + one_line(error)))
