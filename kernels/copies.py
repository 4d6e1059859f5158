"""Many copies between addresses, in one driver call where the driver can."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.shm.errors import TransferFailed

Addresses = npt.NDArray[np.int64]
CopyLists = list[int]


def merged(
    targets: Addresses, sources: Addresses, sizes: Addresses, group: Addresses | None = None
) -> tuple[Addresses, Addresses, Addresses, Addresses]:
    """The same copies, those of one group that touch on both sides taken as one. Keeps their order.

    Args:
        group: a number for each copy; None: all are of one.
    """
    if group is None:
        group = np.zeros(len(sizes), np.int64)
    if len(sizes) < 2:
        return targets, sources, sizes, group
    breaks = (targets[1:] != targets[:-1] + sizes[:-1]) | (sources[1:] != sources[:-1] + sizes[:-1])
    breaks |= group[1:] != group[:-1]
    if breaks.all():
        return targets, sources, sizes, group
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return targets[starts], sources[starts], np.add.reduceat(sizes, starts), group[starts]


class Copier(Protocol):
    """Enqueues copies on a stream."""

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]`, in any order.

        Raises:
            TransferFailed: the driver refused.
        """


_TOO_OLD = (
    "cudaErrorCallRequiresNewerDriver",
    "cudaErrorInsufficientDriver",
    "cudaErrorNotSupported",
)
"""What CUDA's runtime answers when the driver under it does not have the call."""


class BatchCopier:
    """Through cuda-bindings: one call for all copies (CUDA 12.8 and newer).

    Where the driver is older than the bindings it refuses the first such call. From then on this
    copier makes one call a copy, and says nothing of it: only the time that enqueuing takes tells.
    Not thread-safe: an engine calls it under its lock.
    """

    anywhere = True
    """Whether addresses may lie in memory that was never shown to it."""

    def add(self, *tensors: Any) -> None:
        """Tensors that addresses will lie in: not needed here."""

    def __init__(self) -> None:
        """Raises ImportError or AttributeError where there is no such call."""
        from cuda.bindings import runtime

        self._runtime: Any = runtime
        self._copy: Any = runtime.cudaMemcpyAsync
        self._batch: Any = runtime.cudaMemcpyBatchAsync
        self._kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        codes = runtime.cudaError_t
        self._success = codes.cudaSuccess
        self._too_old = {getattr(codes, name) for name in _TOO_OLD if hasattr(codes, name)}
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """See `Copier`."""
        handle = stream.cuda_stream
        if len(sizes) > 1 and self._batch is not None:
            if self._in_one_call(targets, sources, sizes, handle):
                return
            # The driver lacks the call, so none of them is enqueued; and one that were would only
            # be made twice, with the same bytes.
            self._batch = None
        for target, source, size in zip(targets, sources, sizes, strict=True):
            error = self._copy(target, source, size, self._kind, handle)[0]
            if error != self._success:
                raise self._refused(f"a copy of {size} bytes", error)

    def _in_one_call(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, handle: int
    ) -> bool:
        """Whether they are enqueued; False: the driver does not have such a call."""
        count = len(sizes)
        try:
            # In C, CUDA 12 has an argument for the place of failure and 13 has none. Bindings of 12
            # return it as a second result: arguments and first result are the same in both.
            error = self._batch(targets, sources, sizes, count, self._attributes, [0], 1, handle)[0]
        except RuntimeError as failure:
            # Bindings of 12.8 look the driver's function up by themselves, and say so by this.
            if "cuMemcpyBatchAsync" in str(failure) and "not found" in str(failure):
                return False
            raise
        if error in self._too_old:
            self._runtime.cudaGetLastError()  # else it stays pending, for whoever asks next
            return False
        if error != self._success:
            raise self._refused(f"{count} copies of {sum(sizes)} bytes", error)
        return True

    def _refused(self, what: str, error: Any) -> TransferFailed:
        name = self._runtime.cudaGetErrorName(error)[1]
        advice = "is all host memory registered, and in one registration for each page?"
        if error in self._too_old:
            advice = "it is older than cuda-bindings: update it, or install bindings of its version"
        return TransferFailed(f"the driver refused {what}: {name.decode()}; {advice}")


class TorchCopier:
    """Through torch alone, one call a copy: any device that torch calls "cuda"."""

    anywhere = False

    def __init__(self, tensors: list[Any]) -> None:
        """Args:
        tensors: contiguous tensors that addresses lie in; `add` names more.
        """
        self._tensors: list[tuple[int, int, Any]] = []
        self.add(*tensors)

    def add(self, *tensors: Any) -> None:
        """Tensors that addresses will lie in."""
        import torch

        for tensor in tensors:
            flat = tensor.view(-1).view(torch.uint8)
            self._tensors.append((flat.data_ptr(), flat.data_ptr() + flat.numel(), flat))

    def _find(self, address: int, size: int) -> Any:
        for start, end, tensor in self._tensors:
            if start <= address and address + size <= end:
                return tensor[address - start : address - start + size]
        raise TransferFailed(f"no tensor holds the {size} bytes at address {address:#x}")

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """See `Copier`."""
        import torch

        with torch.cuda.stream(stream):
            for target, source, size in zip(targets, sources, sizes, strict=True):
                self._find(target, size).copy_(self._find(source, size), non_blocking=True)


class HostCopier:
    """In host memory, at once: for tests."""

    anywhere = True

    def add(self, *tensors: Any) -> None:
        """Not needed."""

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """See `Copier`."""
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
