"""A rank of a small model on a device of `gpu.place`: its tensors, what it would have computed, its
engine. And as a program: a rank in a process of its own, which takes orders and answers in JSON."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gpu.place import DEADLINE, place
from support.keys import prompt

from lightcache import Cache, LayerLoads, LightcacheError, Load, Offload, OffloadQueue
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.layouts import Shard, sglang
from lightcache.kernels.moves import Move
from lightcache.reservations import ReservationShard

LAYERS, HEADS, DIM, TOKENS = 3, 4, 16, 16
PAGES, SLOTS = 12, 256
SECRET = bytes(16)
POISON = 0x5E5E
GEOMETRY = PageGeometry(
    [
        KVGroup.attention(
            "kv",
            layers=LAYERS,
            heads=HEADS,
            head_dim=DIM,
            dtype_bytes=2,
            page_tokens=TOKENS,
            head_groups=2,
        )
    ]
)
QUEUED = 8


def create(name: str, geometry: PageGeometry = GEOMETRY, pages: int = PAGES) -> Cache:
    """A cache for pages of a geometry; we have no copies in it that outlive us."""
    return Cache.create(
        name,
        pages=pages,
        page_bytes=geometry.page_bytes,
        page_tokens=geometry.page_tokens,
        fingerprint=f"model {geometry.fingerprint()}",
        secret=SECRET,
        device=True,
    )


def slots_of(pages: int, seed: int) -> list[int]:
    """Scattered ones, for all tokens of so many pages."""
    found: list[int] = np.random.default_rng(seed).permutation(SLOTS)[: pages * TOKENS].tolist()
    return found


def computed(layer: int, plane: int, tokens: int, prompt_name: int) -> npt.NDArray[np.int16]:
    """What the model computes for all heads of a prompt: int16 of shape (tokens, HEADS, DIM)."""
    count = tokens * HEADS * DIM
    seed = (prompt_name * 64 + layer) * 2 + plane
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 20)) * np.uint64(0x9E3779B97F4A7)
    return (mixed >> np.uint64(24)).astype(np.uint16).view(np.int16).reshape(tokens, HEADS, DIM)


class Model:
    """Tensors of one rank, as SGLang has them: [slots, heads, dim] of each layer's K and V."""

    def __init__(
        self,
        where: Any,
        cache: Cache,
        *,
        rank: int = 0,
        ranks: int = 1,
        writing: bool = False,
        geometry: PageGeometry = GEOMETRY,
        memory: Any = None,
        mode: str = "auto",
        **pin: Any,
    ) -> None:
        """Pins the pool, unless memory is given; does not wait for it."""
        self.where, self.cache = where, cache
        each = HEADS // ranks
        self.heads = slice(rank * each, (rank + 1) * each)
        self.tensors = [
            [
                torch.full((SLOTS, each, DIM), POISON, dtype=torch.int16, device=where.memory)
                for _ in range(LAYERS)
            ]
            for _ in "kv"
        ]
        planes = sglang(Shard(geometry, rank, ranks), "kv", *self.tensors)
        self.memory = where.pin(cache, **pin) if memory is None else memory
        share = geometry.share(rank, ranks, writing=writing)
        self.engine = where.engine(cache, geometry, planes, self.memory, share=share, mode=mode)
        where.synchronize()  # the stand-in's streams know nothing of torch's

    def compute(self, name: int, slots: list[int]) -> None:
        """Have computed the KV of a prompt of so many tokens."""
        for plane, layers in enumerate(self.tensors):
            for layer, tensor in enumerate(layers):
                values = computed(layer, plane, len(slots), name)[:, self.heads].copy()
                tensor[torch.tensor(slots, device=tensor.device)] = torch.from_numpy(values).to(
                    tensor.device
                )

    def forget(self) -> None:
        """All of it."""
        for tensor in [*self.tensors[0], *self.tensors[1]]:
            tensor.fill_(POISON)

    def wrong(self, name: int, slots: list[int]) -> int:
        """Values that differ from what was computed, or from POISON where nothing was."""
        count = 0
        for plane, layers in enumerate(self.tensors):
            for layer, tensor in enumerate(layers):
                expected = np.full(tuple(tensor.shape), POISON, np.int16)
                expected[slots] = computed(layer, plane, len(slots), name)[:, self.heads]
                count += int((tensor.cpu().numpy() != expected).sum())
        return count

    def warm(self) -> None:
        """Compile and allocate what a few transfers of each direction at once need, and wait: there
        is nothing to be loaded or allocated then while a gate is shut."""
        self.memory.wait(timeout=DEADLINE)
        empty = self.cache.reserve(prompt(1 << 20, 1))
        moves = Move(empty.pages, slots_of(1, 0))
        for verb in (self.engine.offload, self.engine.load):
            for transfer in [verb(moves) for _ in range(QUEUED)]:
                transfer.wait(DEADLINE)
        empty.release()
        self.forget()
        self.where.synchronize()

    def close(self) -> None:
        """Before the cache."""
        self.engine.close()


def wrong_bytes(cache: Cache, name: int, pages: list[int]) -> int:
    """Bytes of the prompt's pages in the pool that differ, by the documented order of a page."""
    found = cache.pool.array[np.array(pages)][:, : GEOMETRY.used_bytes].copy().view(np.int16)
    shape = (len(pages), 2, LAYERS, 2, TOKENS, HEADS // 2, DIM)
    pages_found = found.reshape(shape)
    count = 0
    for layer in range(LAYERS):
        for plane in range(2):
            right = computed(layer, plane, len(pages) * TOKENS, name)
            right = right.reshape(len(pages), TOKENS, 2, HEADS // 2, DIM).transpose(0, 2, 1, 3, 4)
            count += int((pages_found[:, :, layer, plane] != right).sum())
    return count


# ---------------------------------------------------------------- a process of its own


class Rank:
    """What the program keeps between orders."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.where = place(order.get("number", 0))
        self.where.make_current()
        self.cache = Cache.attach(
            order["name"], secret=SECRET, role="rank", device=True, grow=False
        )
        keys = ("rank", "ranks", "writing", "mode")
        self.model = Model(self.where, self.cache, **{key: order[key] for key in keys})
        self.model.memory.wait(timeout=DEADLINE)
        self.shard: Any = None
        self.kept: list[Any] = []

    def adopt(self, order: dict[str, Any]) -> Any:
        """Have computed a prompt, and adopt a shard of its pages."""
        self.model.compute(order["prompt"], order["slots"])
        self.shard = self.cache.adopt(bytes.fromhex(order["ticket"]), shard=order["shard"])
        assert isinstance(self.shard, ReservationShard)
        return self.shard.pages.tolist()

    def offload(self, order: dict[str, Any]) -> Any:
        """Write our shard and publish it; whether that made the pages ready."""
        offload = Offload(self.model.engine, self.shard, order["slots"], positions=order["where"])
        offload.wait(DEADLINE)
        return offload.ready

    def queue(self, order: dict[str, Any]) -> Any:
        """The same, and more copies into its pages, all behind a gate that nobody opens."""
        engine, move = self.model.engine, Move(self.shard.pages, order["slots"])
        for transfer in [engine.offload(move) for _ in range(QUEUED)]:
            transfer.wait(DEADLINE)
        gate = self.where.gate()
        offload = Offload(
            engine, self.shard, order["slots"], positions=order["where"], after=[gate.event]
        )
        more = [engine.offload(move, after=[gate.event]) for _ in range(QUEUED - 1)]
        self.kept = [gate, offload, more]
        return [offload.done(), *(each.done() for each in more)]

    def load(self, order: dict[str, Any]) -> Any:
        """Load a prompt's pages; how many there were, and how many values are wrong then."""
        self.model.forget()
        self.where.synchronize()
        with self.cache.match(prompt(order["prompt"], order["pages"])) as lease:
            found = len(lease)
            Load(self.model.engine, lease, order["slots"]).wait(DEADLINE)
        return [found, self.model.wrong(order["prompt"], order["slots"])]

    def layers(self, order: dict[str, Any]) -> Any:
        """Begin to load a prompt by layer, and to offload another through a queue, all behind a
        gate that nobody opens. Whether the loads are done, and how many offloads are complete."""
        engine, pages = self.model.engine, order["pages"]
        new = self.cache.reserve(prompt(order["prompt"] + 100, pages))

        def begin(**how: Any) -> LayerLoads:
            loads = LayerLoads(engine, window=1)
            loads.add(1, self.cache.match(prompt(order["prompt"], pages)), order["slots"])
            loads.start(**how)
            return loads

        self.model.warm()
        assert begin().finish() == {}  # loads kernels, which waits for an idle device
        engine.offload(Move(new.pages, order["slots"])).wait(DEADLINE)
        gate = self.where.gate()
        loads, queue = begin(after=[gate.event]), OffloadQueue()
        queue.submit(lambda: Offload(engine, new, order["slots"], after=[gate.event]))
        self.kept = [gate, loads, queue]
        return [loads.done(), queue.completed()]

    def leave(self, order: dict[str, Any]) -> Any:
        """Give everything back."""
        self.model.close()
        self.cache.close()
        self.where.close()


def main() -> None:
    """Follow orders until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test ends us
    rank: Rank | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        try:
            if order["do"] == "join":
                rank = Rank(order)
                answer = list(rank.cache.client_id)
            elif order["do"] != "hello":
                call: Callable[[dict[str, Any]], Any] = getattr(rank, order["do"])
                answer = call(order)
        except LightcacheError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


class Worker:
    """A process of this program, as the test sees it. Every answer has a deadline."""

    def __init__(self, folder: Path, number: int) -> None:
        self.log = folder / f"worker{number}.log"
        tests = str(Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
        with self.log.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )

    def begin(self, do: str, **order: Any) -> None:
        """Give an order."""
        assert self.process.stdin
        print(json.dumps({"do": do, **order}), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """To the order that was given; its stderr if there is none."""
        assert self.process.stdout
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if ready.select(DEADLINE) else ""
        said = self.log.read_text()[-3000:]
        assert line, f"no answer, exit status {self.process.poll()}; it said: {said}"
        return json.loads(line)

    def __call__(self, do: str, **order: Any) -> Any:
        """An order and its answer."""
        self.begin(do, **order)
        return self.answer()

    def kill(self) -> None:
        """And wait until it is gone."""
        self.process.kill()
        self.process.communicate(timeout=DEADLINE)


def together(workers: list[Worker], do: str, orders: list[dict[str, Any]]) -> list[Any]:
    """All of them at once."""
    for worker, order in zip(workers, orders, strict=True):
        worker.begin(do, **order)
    return [worker.answer() for worker in workers]


if __name__ == "__main__":
    main()
