"""Both halves of the connector for vLLM over tensors of a device in vLLM's layouts, called in its
order: vLLM itself is not needed. Contents are stamps: each prompt has a byte of its own, and so
have all blocks that hold its KV."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightcache import Cache
from lightcache.connectors.vllm.messages import Orders, Place, Report, one_group
from lightcache.connectors.vllm.model import GROUP, Format, GroupFormat
from lightcache.connectors.vllm.options import Options
from lightcache.connectors.vllm.scheduler import SchedulerHalf, launch_of, team_of
from lightcache.connectors.vllm.worker import WorkerHalf
from lightcache.errors import TransferFailed, WaitTimeout
from lightcache.kernels import KVGroup, PageGeometry, Shard, layouts
from lightcache_bench._gpu_device import Gpu
from lightcache_bench._vllm_stand_in import Output, Request

LAYOUTS = {"LBHNC": "lbhnc", "LBNHC": "lbnhc", "BLHNC": "blhnc"}
"""vLLM's names of the order in memory of layers, blocks, heads, tokens and elements: all blocks of
a layer together, with heads before tokens or after them, or all layers of a block."""
LOGICAL = "lbhnc"
TIMEOUT = 60.0
PATIENCE = 5e-5


@dataclass(frozen=True)
class Model:
    """What decides the bytes of a page."""

    layers: int
    heads: int
    width: int
    """Elements of K and V of a head and token, two bytes each."""
    block: int
    """Tokens of a block."""
    blocks_per_page: int = 1

    @property
    def page_bytes(self) -> int:
        """Of all layers and heads."""
        tokens = self.block * self.blocks_per_page
        return self.layers * self.heads * tokens * self.width * 2


PAGES = {
    "256 KiB": Model(32, 1, 256, 16),
    "2 MiB": Model(32, 8, 256, 16),
    "8 MiB": Model(32, 8, 256, 64),
}
"""Of models with 32 layers and heads of 128: one KV head and eight, blocks of 16 and 64 tokens."""
TINY = Model(2, 2, 16, 4, 2)


class Engine:
    """One engine of one rank: blocks of the device, given and freed as in vLLM's block pool."""

    def __init__(
        self,
        gpu: Gpu,
        model: Model,
        name: str,
        *,
        blocks: int,
        pages: int,
        layout: str = "LBHNC",
        identity: str | None = None,
    ) -> None:
        """Opens the cache `name`, or makes it, of so many pages. Waits until it is open.

        Raises:
            WaitTimeout: it was not opened in time; the log says why.
        """
        self.gpu, self.model, self.name = gpu, model, name
        self.tensor, layers = _tensors(gpu, model, blocks, layout)
        identity = identity or f"engine {os.getpid()}"
        options = Options(size=model.page_bytes * pages, name=name, idle_limit=None)
        form = self.format = _format(gpu, model, name, layout, layers)
        self.scheduler = SchedulerHalf(options, identity)
        self.worker = WorkerHalf(options, launch_of(identity), team_of(identity), 0)
        self.worker.register(form)
        self.scheduler.connect([self.worker.hello()])
        self.requests: dict[str, Request] = {}
        self._free = list(range(blocks))
        self._numbers = itertools.count()
        if not self.worker.hello().segment:
            raise WaitTimeout(f"{name}: expected an open cache, found none")
        if gpu.cuda:  # saves of pages that the driver still registers are dropped
            with Cache.attach(name, shared=True) as cache:
                cache.pin(device=gpu.device).wait(timeout=TIMEOUT)

    def close(self) -> None:
        """As vLLM ends: the worker first."""
        self.worker.close()
        self.scheduler.close()

    # ---- requests

    def prompt(self, stamp: int, pages: int, salt: str = "") -> Request:
        """A new request whose prompt has so many whole pages, and one more token."""
        count = pages * self.model.block * self.model.blocks_per_page + 1
        request = Request(f"{self.name} {os.getpid()} {next(self._numbers)}", [stamp] * count)
        request.cache_salt = salt
        self.requests[request.request_id] = request
        return request

    def take_blocks(self, request: Request) -> None:
        """Of the device, for all tokens of the request."""
        need = -(-request.num_tokens // self.model.block)
        request.blocks = [self._free.pop() for _ in range(need)]

    def free(self, request: Request) -> None:
        """Its blocks may be overwritten."""
        self._free += request.blocks
        request.blocks = []

    def end(self, request: Request) -> None:
        """`request_finished`: its blocks are kept until its saves have ended."""
        if not self.scheduler.finish(request):
            self.free(request)
            del self.requests[request.request_id]

    # ---- the order of a step

    def orders(self, tokens: dict[str, int], preempted: Iterable[str] = ()) -> Orders:
        """`build_connector_meta`."""
        output = Output(tokens, set(preempted))
        orders = self.scheduler.orders(output, lambda identity, _: self.requests[identity].blocks)
        for identity, count in tokens.items():
            self.requests[identity].num_computed_tokens += count
        return orders

    def begin(self, orders: Orders) -> None:
        """The worker's calls until the model has computed: preemptions, loads, saves."""
        if orders.settle:
            self.worker.settle(orders)
        self.worker.load(orders)
        self.worker.save(orders)

    def finish(self) -> tuple[set[str], Report]:
        """The worker's calls after that, and what the scheduler makes of their answers."""
        received = self.worker.received()
        self.worker.failed()
        report = self.worker.report()
        freed = self.scheduler.report(report or None, received)
        for identity in freed:
            self.free(self.requests.pop(identity))
        return received, report

    def until_saved(self) -> None:
        """Empty steps until no save is under way.

        Raises:
            WaitTimeout: they do not end.
        """
        end = time.monotonic() + TIMEOUT
        while self.scheduler.pending:
            self.finish()
            _rest(end, "saves")

    def until_loaded(self, waiting: set[str]) -> None:
        """The same for loads."""
        end, left = time.monotonic() + TIMEOUT, set(waiting)
        while left:
            left -= self.finish()[0]
            if left:
                _rest(end, "loads")

    # ---- whole requests

    def compute(self, stamp: int, pages: int, salt: str = "") -> tuple[Request, Orders]:
        """A request whose KV is computed in one step; the orders of that step. Stamp its blocks
        before `begin`."""
        request = self.prompt(stamp, pages, salt)
        self.scheduler.begin(request)
        self.scheduler.look(request, 0)
        self.take_blocks(request)
        return request, self.orders({request.request_id: request.num_tokens})

    def find(self, stamp: int, pages: int, salt: str = "") -> tuple[Request, int, Orders]:
        """A request with such a prompt: what the cache has of it, in tokens, and the orders that
        load it to its blocks."""
        request = self.prompt(stamp, pages, salt)
        self.scheduler.begin(request)
        found, _ = self.scheduler.look(request, 0)
        self.take_blocks(request)
        if found:
            self.scheduler.allocated(request, [request.blocks], found)
            request.num_computed_tokens = found
        return request, found or 0, self.orders({})

    def stamp(self, request: Request, value: int) -> None:
        """What a model would compute: this byte, in all blocks of the request."""
        self.tensor.index_fill_(1, self.indices(request.blocks), value)

    def check(self, request: Request, tokens: int, value: int) -> None:
        """The blocks of the first tokens have this byte, and no other.

        Raises:
            TransferFailed: they differ.
        """
        held = self.tensor[:, self.indices(request.blocks[: tokens // self.model.block])]
        wrong = int((held != value).any(0).flatten(1).any(1).sum())
        if wrong:
            raise TransferFailed(
                f"{request.request_id}: expected bytes {value} in {tokens // self.model.block} "
                f"blocks, found others in {wrong}"
            )

    def indices(self, blocks: list[int]) -> Any:
        """Of blocks, on the device. May wait for the current stream."""
        return self.gpu.torch.as_tensor(blocks, dtype=self.gpu.torch.int64, device=self.gpu.device)


def _rest(end: float, what: str) -> None:
    if time.monotonic() > end:
        raise WaitTimeout(f"{what} had not ended after {TIMEOUT:.0f} s")
    time.sleep(PATIENCE)


def _tensors(gpu: Gpu, model: Model, blocks: int, layout: str) -> tuple[Any, dict[int, Any]]:
    """All layers as bytes, [layers, blocks, heads, tokens, bytes], in this order in memory; and the
    view of each that vLLM hands to a connector."""
    lengths = (model.layers, blocks, model.heads, model.block, model.width)
    sizes = dict(zip(LOGICAL, lengths, strict=True))
    order = LAYOUTS[layout]
    memory = gpu.torch.zeros(
        [sizes[axis] for axis in order], dtype=gpu.torch.bfloat16, device=gpu.device
    )
    tensor = memory.permute([order.index(axis) for axis in LOGICAL])
    return tensor.view(gpu.torch.uint8), dict(enumerate(tensor.unbind(0)))


def _format(gpu: Gpu, model: Model, name: str, layout: str, layers: dict[int, Any]) -> Format:
    """As `lightcache.connectors.vllm.model.describe` makes it of vLLM's configuration."""
    group = KVGroup.attention(
        GROUP,
        layers=model.layers,
        heads=model.heads,
        head_dim=model.width,
        dtype_bytes=2,
        page_tokens=model.block * model.blocks_per_page,
        content="single",
        head_groups=model.heads,
    )
    geometry = PageGeometry([group])
    shard = Shard(geometry, 0, 1)
    planes = layouts.vllm(shard, GROUP, layers, axes="bhnc")
    fingerprint = f"bench {layout} {geometry.fingerprint()}"
    place = Place(
        name,
        name,
        fingerprint,
        geometry.part_bytes,
        geometry.page_tokens,
        one_group(model.block),
    )
    return Format(place, (GroupFormat(geometry, shard, planes),), 1)
