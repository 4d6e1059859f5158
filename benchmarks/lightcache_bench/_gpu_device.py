"""The device that transfers are measured on, as torch shows it; torch is imported only here."""

from __future__ import annotations

import contextlib
import importlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
DIRECTIONS = ("offload", "load")


class Gpu:
    """One device, or the processor where there is none: then `cuda` is false, streams are nothing
    and device memory is ordinary memory."""

    def __init__(self, device: str) -> None:
        """Use "cuda:0", "cuda:1", ..., or "cpu".

        Raises:
            ConfigError: torch is not installed.
        """
        try:
            self.torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ConfigError(
                "transfer: torch is not installed; pip install 'lightcache[kernels]'"
            ) from error
        self.device = device
        self.cuda = device != "cpu"
        if self.cuda:
            self.torch.cuda.set_device(device)

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def stream(self) -> Any:
        """A new stream; None on the processor."""
        return self.torch.cuda.Stream() if self.cuda else None

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make a stream the current one."""
        if stream is None:
            yield
        else:
            with self.torch.cuda.stream(stream):
                yield

    def event(self) -> Any:
        """A new event that notes the time."""
        return self.torch.cuda.Event(enable_timing=True)

    def random(self, nbytes: int) -> Any:
        """Device memory full of random bytes: zeros and patterns move faster on some devices.

        Args:
            nbytes: a multiple of 4.
        """
        words = self.torch.empty(nbytes // 4, dtype=self.torch.int32, device=self.device)
        words.random_()  # 31 random bits of 32
        return words.view(self.torch.uint8)

    def fill(self, array: Bytes) -> None:
        """Fill host memory with random bytes, a piece at a time.

        Args:
            array: uint8 of shape (n,), contiguous, n a multiple of 4.
        """
        piece = 256 << 20
        for at in range(0, len(array), piece):
            part = self.torch.from_numpy(array[at : at + piece])
            part.copy_(self.random(part.numel()))

    def driver_memory(self, nbytes: int) -> Any:
        """Pinned host memory that the driver gave out, full of random bytes: what the plain copy
        engine is measured with. Ordinary memory on the processor."""
        made = self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=self.cuda)
        self.fill(made.numpy())
        return made

    def shared_memory(self, nbytes: int) -> Bytes:
        """Memory of the kind that a pool has (shared, of the kernel's tmpfs), without a name, full
        of random bytes."""
        made = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.fill(made)
        return made

    def facts(self) -> dict[str, Any]:
        """What figures depend on besides the machine."""
        if not self.cuda:
            return {"device": "none: tensors in ordinary memory"}
        properties = self.torch.cuda.get_device_properties(self.device)
        return {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30),
            "multiprocessors": properties.multi_processor_count,
            "cuda": self.torch.version.cuda,
            "torch": str(self.torch.__version__),
        }


def find() -> Gpu:
    """The first device, or the processor."""
    return Gpu("cuda:0" if devices() else "cpu")


def devices() -> int:
    """How many devices torch sees."""
    gpu = Gpu("cpu")
    return int(gpu.torch.cuda.device_count()) if gpu.torch.cuda.is_available() else 0
