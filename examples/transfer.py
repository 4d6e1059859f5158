"""Two ranks of a model write the pages of one prompt, each the heads that it has; a third process
reads them whole. On the GPU if there is one, else in the processor's memory, by the same calls."""

import contextlib
import multiprocessing as mp
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

import lightcache
from lightcache.kernels import KVGroup, PageGeometry, Shard, layouts

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
LAYERS, HEADS, DIM, RANKS = 4, 8, 64, 2
SLOTS = 1024  # tokens that each process has room for on its device
PROMPT = list(range(100))  # token ids: six full pages of 16, and 4 tokens

# The model, described once. Two head groups: each rank's share of a page is one range of bytes.
GEOMETRY = PageGeometry(
    [
        KVGroup.attention(
            "kv", layers=LAYERS, heads=HEADS, head_dim=DIM, dtype_bytes=2, page_tokens=16,
            head_groups=RANKS,
        )
    ]
)  # fmt: skip
CACHE: Any = {
    "pages": 64,
    "page_bytes": GEOMETRY.page_bytes,
    "page_tokens": GEOMETRY.page_tokens,
    "fingerprint": f"demo/bf16 {GEOMETRY.fingerprint()}",
}


def computed() -> torch.Tensor:
    """What a model would have computed: [layer, K or V, token, head, dim]."""
    seeded = torch.Generator().manual_seed(7)
    shape = (LAYERS, 2, len(PROMPT), HEADS, DIM)
    return torch.randn(shape, generator=seeded).to(torch.bfloat16)


@contextlib.contextmanager
def worker(name: str, rank: int, ranks: int) -> Iterator[tuple[lightcache.Cache, Any, Any]]:
    """Join the cache, make the tensors of a serving engine, and the engine that moves them."""
    mine = Shard(GEOMETRY, rank, ranks)
    with lightcache.Cache.open(name, **CACHE, device=DEVICE != "cpu") as cache:
        shape = (2, LAYERS, SLOTS, HEADS // ranks, DIM)
        k, v = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        planes = layouts.sglang(mine, "kv", list(k), list(v))
        memory = None
        if DEVICE != "cpu":
            memory = cache.pin(device=DEVICE)
            memory.wait()  # it is small; a large pool can be used as far as it is pinned
        share = mine.share(writing=True)
        with cache.transfer_engine(GEOMETRY, planes, memory=memory, share=share) as engine:
            yield cache, engine, (k, v)


def slots_of(seed: int) -> torch.Tensor:
    """Where a process has the prompt's tokens: anywhere, as after a day of serving."""
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[: len(PROMPT)]


def write(name: str, rank: int, pipe: Connection) -> None:
    """One rank: copies its heads of the new pages to the host and publishes its shard."""
    with worker(name, rank, RANKS) as (cache, engine, tensors):
        pipe.send(cache.client_id)
        ticket, positions = pipe.recv()
        slots, each = slots_of(rank), HEADS // RANKS
        own = computed()[:, :, :, rank * each : (rank + 1) * each].to(DEVICE)
        for which, tensor in enumerate(tensors):
            tensor[:, slots.to(DEVICE)] = own[:, which]

        shard = cache.adopt(ticket, shard=rank)
        offload = lightcache.Offload(engine, shard, slots.numpy(), positions=positions)
        offload.wait()  # an engine goes on instead, and calls engine.poll() in each step
        print(f"rank {rank}: {offload.transfer.nbytes} bytes of {len(positions)} pages written")


def read(cache: lightcache.Cache, engine: Any, tensors: Any) -> None:
    """All heads, in one process: what two ranks have written."""
    slots = slots_of(RANKS)
    lease = cache.match(cache.hash_pages(PROMPT, leave_one=True))
    tokens = lease.tokens
    load = lightcache.Load(engine, lease, slots[:tokens].numpy())
    load.transfer.wait_on()  # the current stream waits, this thread does not (on a GPU)
    for which, tensor in enumerate(tensors):
        found = tensor[:, slots[:tokens].to(DEVICE)]
        assert torch.equal(found, computed()[:, which, :tokens].to(DEVICE))
    load.wait()  # gives the lease back
    print(f"reader: {tokens} of {len(PROMPT)} tokens are on {DEVICE}, bit for bit")


def main(name: str) -> None:
    """The scheduler: reserves the pages, hands them to the ranks, and reads what became of them."""
    spawn = mp.get_context("spawn")  # a forked child would not be attached
    with worker(name, 0, 1) as (cache, engine, tensors):
        pipes = [spawn.Pipe() for _ in range(RANKS)]
        ranks = [
            spawn.Process(target=write, args=(name, rank, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(ranks, pipes, strict=True):
            process.start()
            theirs.close()
        clients = [ours.recv() for ours, _ in pipes]

        keys = cache.hash_pages(PROMPT)
        with cache.reserve(keys, shards=RANKS) as new, new.ticket(clients) as ticket:
            for ours, _ in pipes:  # 16 bytes, in whatever message the scheduler sends anyway
                ours.send((bytes(ticket), new.new.tolist()))
            cache.wait(keys, timeout=60)  # the last shard makes the pages ready
        read(cache, engine, tensors)
        for process in ranks:
            process.join()
            assert process.exitcode == 0


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "example-transfer")
