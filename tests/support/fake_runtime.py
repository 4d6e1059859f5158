"""cuda-bindings for tests: its copies happen at once in host memory, its driver refuses as told."""

# ruff: noqa: N802, N815 (names are those of the bindings)

import ctypes
import enum
import sys
import types


class Error(enum.IntEnum):
    """Some of cudaError_t."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorInsufficientDriver = 35
    cudaErrorCallRequiresNewerDriver = 36
    cudaErrorNotSupported = 801


class FakeRuntime(types.ModuleType):
    """Stands for `cuda.bindings.runtime`.

    Args:
        major: of CUDA. The call of 12 also gives the place of failure, that of 13 does not.
    """

    cudaError_t = Error
    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDefault=4)
    cudaMemcpySrcAccessOrder = types.SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)
    cudaMemcpyAttributes = types.SimpleNamespace

    def __init__(self, major=13):
        super().__init__("cuda.bindings.runtime")
        self.major = major
        self.calls = []
        """("batch" or "copy", number of copies, stream)."""
        self.batches = Error.cudaSuccess
        """What batches get; an exception is raised. Then nothing is copied."""
        self.refuse_copy = None
        """(which call of cudaMemcpyAsync, counted from 0, what it gets)."""
        self.last_error = Error.cudaSuccess
        self._copies = 0

    def install(self, monkeypatch):
        """Let imports of cuda-bindings find this."""
        parents = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
        parents[0].bindings, parents[1].runtime = parents[1], self
        for module in (*parents, self):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return self

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        """One copy."""
        assert kind == 4
        number, self._copies = self._copies, self._copies + 1
        self.calls.append(("copy", 1, stream))
        if self.refuse_copy is not None and number == self.refuse_copy[0]:
            self.last_error = self.refuse_copy[1]
            return (self.last_error,)
        ctypes.memmove(target, source, size)
        return (Error.cudaSuccess,)

    def cudaMemcpyBatchAsync(
        self, targets, sources, sizes, count, attributes, starts, number, stream
    ):
        """All or nothing."""
        assert (len(targets), len(sources), len(sizes)) == (count, count, count)
        assert [each.srcAccessOrder for each in attributes] == [1]
        assert (starts, number) == ([0], 1)
        self.calls.append(("batch", count, stream))
        if isinstance(self.batches, Exception):
            raise self.batches
        if self.batches:
            self.last_error = self.batches
            return (self.batches, None)[: 14 - self.major]
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        return (Error.cudaSuccess, 0)[: 14 - self.major]

    def cudaGetErrorName(self, error):
        """Bytes, as the bindings have it."""
        return Error.cudaSuccess, error.name.encode()

    def cudaGetLastError(self):
        """And forgets it."""
        found, self.last_error = self.last_error, Error.cudaSuccess
        return (found,)
