"""What the transfer engine asks of a device: streams, events, memory, launching, copying.

`CudaDevice` is torch's view of an NVIDIA or AMD GPU. Tests put one in its place that does all of it
immediately in host memory, with the kernels interpreted.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lightcache.kernels.rows import BatchCopier, TorchCopier
from lightcache.shm.errors import ConfigError, require

if TYPE_CHECKING:
    import torch

PRIORITY = -1  # above the model's: a gather that waits behind a product starves the copy engine


class CudaDevice:
    """One GPU, through torch."""

    registered = True
    """Whether page memory must be registered with the driver."""

    def __init__(self, name: str) -> None:
        """Args:
            name: as torch writes it, "cuda" or "cuda:1".

        Raises:
            ConfigError: no GPU of that name.
            NotInstalled: there is no torch.
        """
        require("torch", "kernels", "a GPU")
        import torch

        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device: expected a GPU such as 'cuda:0', found {name!r}") from error
        if device.type != "cuda":
            raise ConfigError(
                f"the planes are on {name!r}, expected a GPU such as 'cuda:0'; HostEngine serves "
                "tensors in host memory"
            )
        wanted: int | None = device.index
        if (wanted or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {name!r}: torch sees {torch.cuda.device_count()} GPUs; check the driver "
                "and CUDA_VISIBLE_DEVICES"
            )
        self.index = torch.cuda.current_device() if wanted is None else wanted
        self.name = f"cuda:{self.index}"
        self._cuda: Any = torch.cuda
        facts = torch.cuda.get_device_properties(self.index)
        self.model = str(facts.name)
        self.processors = int(facts.multi_processor_count)
        self._allocating = self._cuda.Stream(self.index)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Make it the current device for a while."""
        if self._cuda.current_device() == self.index:
            return contextlib.nullcontext()
        other: contextlib.AbstractContextManager[Any] = self._cuda.device(self.index)
        return other

    def stream(self) -> Any:
        """A new stream of high priority."""
        return self._cuda.Stream(self.index, priority=PRIORITY)

    def current(self) -> Any:
        """The stream that the caller's work is on.

        Raises:
            ConfigError: it is being captured into a graph.
        """
        if self._cuda.is_current_stream_capturing():
            raise ConfigError(
                "a transfer cannot be captured into a CUDA graph: start it before or after the "
                "capture, or name the producing streams with streams="
            )
        return self._cuda.current_stream(self.index)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make a stream the current one for a while."""
        chosen: contextlib.AbstractContextManager[Any] = self._cuda.stream(stream)
        return chosen

    def event(self) -> Any:
        """A new event; waiting for it sleeps instead of spinning."""
        return self._cuda.Event(blocking=True)

    def lost(self, error: BaseException) -> bool:
        """Whether an error of asking an event means that the device works no more. While a stream
        is captured, in any thread, asking is not allowed, and copies continue."""
        return "captur" not in str(error).lower()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory: uint8 of shape (nbytes,), which nothing enqueued uses.

        Torch may give memory that was let go while work of the current stream still uses it, good
        only for that stream; ours do not wait for it. So it comes from a stream without work.
        """
        return self._unused(nbytes, "uint8")

    def _unused(self, count: int, dtype: str) -> torch.Tensor:
        import torch

        with torch.cuda.stream(self._allocating):
            memory = torch.empty(count, dtype=getattr(torch, dtype), device=self.name)
        self._allocating.synchronize()
        return memory

    def words(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two buffers of int64: in pinned host memory that kernels can read, and on the device."""
        import torch

        host = torch.empty(count, dtype=torch.int64, pin_memory=True)
        return host, self._unused(count, "int64")

    def copier(self, tensors: list[torch.Tensor]) -> BatchCopier | TorchCopier:
        """The best there is: cuda-bindings, else torch, which needs to know all memory as tensors
        and cannot copy to planes."""
        try:
            return BatchCopier()
        except (ImportError, AttributeError):
            return TorchCopier(tensors)

    def launcher(self) -> Any:
        """What launches kernels. Imports triton."""
        require("triton", "kernels", "an engine for a GPU")
        from lightcache.kernels.launch import Launcher

        return Launcher()
