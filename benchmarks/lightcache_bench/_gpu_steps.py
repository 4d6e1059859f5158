"""What transfers run beside: a matrix product, and a decode step replayed as a CUDA graph."""

from __future__ import annotations

from typing import Any, Protocol

from lightcache_bench._gpu_device import Gpu


class Step(Protocol):
    """Work that is repeated on a stream of its own."""

    stream: Any

    def launch(self) -> None:
        """Enqueue it once."""


class Product:
    """Products of two bf16 matrices, a few a step."""

    EACH = 4

    def __init__(self, gpu: Gpu, size: int = 8192) -> None:
        """Random matrices, and the product once, so that its kernel is chosen."""
        torch = gpu.torch
        self._gpu, self.stream = gpu, gpu.stream()
        self._a, self._b, self._c = (
            torch.randn(size, size, device=gpu.device, dtype=torch.bfloat16) for _ in range(3)
        )
        gpu.synchronize()
        self.launch()
        gpu.synchronize()

    def launch(self) -> None:
        """See `Step`."""
        with self._gpu.on(self.stream):
            for _ in range(self.EACH):
                self._gpu.torch.mm(self._a, self._b, out=self._c)


class Decode:
    """One token for each of a batch: weights and KV of the size of an 8B model, each read once
    from device memory, captured as a graph. Norms, rotary embedding and sampling, which move next
    to nothing, are left out; values mean nothing, so they are scaled to stay finite."""

    LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, DIM = 32, 4096, 14336, 32, 8, 128
    BATCH, CONTEXT = 64, 2048

    def __init__(self, gpu: Gpu) -> None:
        """Allocate about 30 GiB, run a step three times, and capture it."""
        torch = gpu.torch
        self._gpu, self.stream = gpu, gpu.stream()
        kv_width = self.KV_HEADS * self.DIM
        self._layers = [
            {
                "qkv": self._random(self.HIDDEN, self.HIDDEN + 2 * kv_width),
                "out": self._random(self.HIDDEN, self.HIDDEN),
                "up": self._random(self.HIDDEN, 2 * self.MLP),
                "down": self._random(self.MLP, self.HIDDEN),
                "k": self._random(self.BATCH, self.KV_HEADS, self.CONTEXT, self.DIM),
                "v": self._random(self.BATCH, self.KV_HEADS, self.CONTEXT, self.DIM),
            }
            for _ in range(self.LAYERS)
        ]
        self._input = self._random(self.BATCH, self.HIDDEN)
        gpu.synchronize()
        with gpu.on(self.stream):
            for _ in range(3):
                self._step()
        gpu.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self.stream, capture_error_mode="thread_local"):
            self._output = self._step()
        gpu.synchronize()

    def _random(self, *shape: int) -> Any:
        torch = self._gpu.torch
        made = torch.empty(shape, device=self._gpu.device, dtype=torch.bfloat16)
        return made.normal_(0.0, shape[-1] ** -0.5)

    def _step(self) -> Any:
        hidden = self._input
        for layer in self._layers:
            hidden = hidden + self._attention(layer, hidden)
            hidden = hidden + self._mlp(layer, hidden)
            hidden = hidden * 0.5
        return hidden

    def _attention(self, layer: dict[str, Any], hidden: Any) -> Any:
        torch = self._gpu.torch
        # The queries that share a KV head stand in for positions, so that its KV is read once.
        query = torch.mm(hidden, layer["qkv"])[:, : self.HIDDEN]
        query = query.reshape(self.BATCH, self.KV_HEADS, self.HEADS // self.KV_HEADS, self.DIM)
        found = torch.nn.functional.scaled_dot_product_attention(query, layer["k"], layer["v"])
        return torch.mm(found.reshape(self.BATCH, self.HIDDEN), layer["out"])

    def _mlp(self, layer: dict[str, Any], hidden: Any) -> Any:
        torch = self._gpu.torch
        gate, up = torch.mm(hidden, layer["up"]).chunk(2, dim=1)
        return torch.mm(torch.nn.functional.silu(gate) * up, layer["down"])

    def launch(self) -> None:
        """See `Step`."""
        with self._gpu.on(self.stream):
            self._graph.replay()
