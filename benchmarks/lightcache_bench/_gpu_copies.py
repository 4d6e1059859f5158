"""Plain copies: the copy engine moving whole pages, pieces of them, and one call for many."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from lightcache.errors import ConfigError, TransferFailed
from lightcache.kernels.moves import Transfer
from lightcache_bench._gpu_device import DIRECTIONS, Gpu
from lightcache_bench._gpu_rig import Bench

PAGE = 8 << 20
CHUNK = 128 << 10
"""One layer's K or V of 64 tokens, which lie together on the device."""
_GROUP = 16  # pages of a submit: as many as the engine is asked for at a time


class Copies:
    """Contiguous pieces between memory of the driver and the device, one copy call a piece. The
    pieces lie scattered on the device and in order on the host."""

    def __init__(self, bench: Bench, piece: int = PAGE) -> None:
        """Prepare the copies of a repetition in each direction; no piece is in both."""
        self.gpu, self._bytes = bench.gpu, piece
        count = bench.sizes.total // piece
        self.nbytes = count * piece
        order = np.random.default_rng(4).permutation(bench.sizes.device // piece)
        self.streams = {direction: self.gpu.stream() for direction in DIRECTIONS}
        self.pairs: dict[str, list[tuple[Any, Any]]] = {}
        for direction, chosen in zip(DIRECTIONS, (order[:count], order[-count:]), strict=True):
            host = bench.once(
                f"driver memory, {direction}", lambda: self.gpu.driver_memory(bench.sizes.total)
            )
            pairs = [
                (host[i * piece : (i + 1) * piece], _piece(bench.device_memory, int(at), piece))
                for i, at in enumerate(chosen)
            ]
            self.pairs[direction] = pairs if direction == "offload" else [(d, h) for h, d in pairs]
        self._group = max(1, min(count, _GROUP * PAGE // piece))
        self.piece = self._group * piece

    def run(self, direction: str) -> None:
        """See `TransferBackend.run`."""
        self._copy(direction, 0, len(self.pairs[direction]))
        self._finish(direction)

    def run_both(self) -> None:
        """A repetition of each direction, at once: in turns of a few pages."""
        for at in range(0, len(self.pairs["load"]), self._group):
            for direction in DIRECTIONS:
                self._copy(direction, at, at + self._group)
        for direction in DIRECTIONS:
            self._finish(direction)

    def submit(self, direction: str, i: int) -> Transfer:
        """See `TransferBackend.submit`."""
        groups = len(self.pairs[direction]) // self._group
        at = i % groups * self._group
        self._copy(direction, at, at + self._group)
        return Copied(self.gpu, self.streams[direction], self.piece)

    def one(self, direction: str, i: int) -> Transfer:
        """The i-th piece of an endless run, alone."""
        at = i % len(self.pairs[direction])
        self._copy(direction, at, at + 1)
        return Copied(self.gpu, self.streams[direction], self._bytes)

    def _copy(self, direction: str, begin: int, end: int) -> None:
        pairs = self.pairs[direction][begin:end]
        if not self.gpu.cuda:
            for to, source in pairs:
                np.copyto(to.numpy(), source.numpy())
            return
        with self.gpu.on(self.streams[direction]):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def _finish(self, direction: str) -> None:
        if self.gpu.cuda:
            self.streams[direction].synchronize()

    def verify(self) -> None:
        """Poison the destinations, copy, and compare every byte; each direction once.

        Raises:
            TransferFailed: a byte is wrong.
        """
        for direction in DIRECTIONS:
            for to, _ in self.pairs[direction]:
                to.fill_(0xA5)
            self.gpu.synchronize()
            self.run(direction)
            self.gpu.synchronize()
            wrong = sum(
                not self.gpu.torch.equal(to.cpu(), source.cpu())
                for to, source in self.pairs[direction]
            )
            if wrong:
                raise TransferFailed(
                    f"{type(self).__name__}, {direction}: {wrong} of "
                    f"{len(self.pairs[direction])} pieces of {self._bytes} bytes are wrong"
                )


class Copied:
    """A `Transfer` of plain copies: over when its stream has come to where it was made."""

    def __init__(self, gpu: Gpu, stream: Any, nbytes: int) -> None:
        """Mark the stream."""
        self.nbytes = nbytes
        self._event = gpu.torch.cuda.Event() if gpu.cuda else None
        if self._event is not None:
            self._event.record(stream)

    def done(self) -> bool:
        """See `Transfer.done`."""
        return self._event is None or bool(self._event.query())

    def wait(self, timeout: float | None = None) -> None:
        """See `Transfer.wait`; takes no notice of the timeout."""
        if self._event is not None:
            self._event.synchronize()

    def wait_on(self, stream: Any = None) -> None:
        """See `Transfer.wait_on`."""
        if self._event is not None:
            self._event.wait(stream)

    def wait_layer(self, layer: int, stream: Any = None, *, timeout: float | None = None) -> None:
        """See `Transfer.wait_layer`."""
        self.wait_on(stream)

    def when_done(self, call: Any) -> None:
        """See `Transfer.when_done`; waits."""
        self.wait()
        call(True)


class BatchedCopies(Copies):
    """The same pieces, all of a submit or a repetition in one driver call."""

    def __init__(self, bench: Bench, piece: int) -> None:
        """Look up the driver's call.

        Raises:
            ConfigError: cuda-bindings is not installed.
        """
        super().__init__(bench, piece)
        try:
            self._runtime: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise ConfigError(
                "transfer: batched copies need cuda-bindings 12.8 or later; install it"
            ) from error
        order = self._runtime.cudaMemcpySrcAccessOrder
        self._how = self._runtime.cudaMemcpyAttributes()
        self._how.srcAccessOrder = order.cudaMemcpySrcAccessOrderStream
        self._addresses = {
            direction: [[end.data_ptr() for end in ends] for ends in zip(*pairs, strict=True)]
            for direction, pairs in self.pairs.items()
        }

    def _copy(self, direction: str, begin: int, end: int) -> None:
        to, source = (addresses[begin:end] for addresses in self._addresses[direction])
        count = len(to)
        # The C function lost its place of failure between CUDA 12 and 13; from Python it was the
        # second of the results, so that the first one is the error in both.
        error = self._runtime.cudaMemcpyBatchAsync(
            to,
            source,
            [self._bytes] * count,
            count,
            [self._how],
            [0],
            1,
            self.streams[direction].cuda_stream,
        )[0]
        if int(error):
            raise TransferFailed(f"cudaMemcpyBatchAsync of {count} pieces: {error!r}")


def _piece(memory: Any, number: int, nbytes: int) -> Any:
    return memory[number * nbytes : (number + 1) * nbytes]
