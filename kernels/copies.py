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


class BatchCopier:
    """Through cuda-bindings: one call for all copies (CUDA 12.8 and newer)."""

    anywhere = True
    """Whether addresses may lie in memory that was never shown to it."""

    def add(self, *tensors: Any) -> None:
        """Tensors that addresses will lie in: not needed here."""

    def __init__(self) -> None:
        """Raises ImportError or AttributeError where there is no such call."""
        from cuda.bindings import runtime

        self._runtime: Any = runtime
        self._copy, self._batch = runtime.cudaMemcpyAsync, runtime.cudaMemcpyBatchAsync
        self._kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._success = runtime.cudaError_t.cudaSuccess
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]

    def __call__(
        self, targets: CopyLists, sources: CopyLists, sizes: CopyLists, stream: Any
    ) -> None:
        """See `Copier`."""
        if not sizes:
            return
        handle = stream.cuda_stream
        count = len(sizes)
        if count == 1:
            result = self._copy(targets[0], sources[0], sizes[0], self._kind, handle)
        else:
            result = self._batch(targets, sources, sizes, count, self._attributes, [0], 1, handle)
        if result[0] != self._success:
            name = self._runtime.cudaGetErrorName(result[0])[1]
            raise TransferFailed(
                f"the driver refused {len(sizes)} copies of {sum(sizes)} bytes: {name}; is "
                "all host memory registered, and in one registration for each page?"
            )


class TorchCopier:
    """Through torch alone, one call a copy: any device that torch knows."""

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
