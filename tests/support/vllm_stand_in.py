"""A stand-in for vLLM that calls the halves of the connector in vLLM's order, over arrays of numpy.

What it "computes" for a position depends on all tokens up to there, on the head and the channel, so
a block with other bytes than its tokens have is seen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightcache.connectors.vllm.messages import BlockGroup, Orders, Place, Report, one_group
from lightcache.connectors.vllm.model import GROUP, Format, GroupFormat
from lightcache.connectors.vllm.options import Options
from lightcache.connectors.vllm.scheduler import SchedulerHalf, launch_of, team_of
from lightcache.connectors.vllm.worker import WorkerHalf
from lightcache.errors import LightcacheError
from lightcache.kernels import KVGroup, PageGeometry, Plane, Rule, Shard, layouts
from lightcache.runs import Run

BLOCK, HEADS, WIDTH, LAYERS, BLOCKS = 4, 2, 16, 2, 64
_numbers = itertools.count()


@dataclass
class Request:
    """What the connector reads of a request."""

    all_token_ids: list[int]
    cache_salt: str | None = None
    request_id: str = field(default_factory=lambda: f"r{next(_numbers)}")
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    num_computed_tokens: int = 0
    shared_prefix_boundary: int = 0
    kv_transfer_params: Any = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.end = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def computed(tokens: list[int], layer: int) -> Any:
    """The KV of all positions: (heads, tokens, elements)."""
    sums = np.cumsum(np.asarray(tokens) + 1) % 251
    marks = np.add.outer(np.arange(HEADS) * 31, np.arange(WIDTH)) + 7 * layer
    return ((sums[None, :, None] + marks[:, None, :]) % 256).astype(np.uint8)


class Pool:
    """vLLM's pool of blocks, as far as a connector holds some: a block is its number here."""

    num_gpu_blocks = BLOCKS

    def __init__(self) -> None:
        self.blocks, self.free = range(BLOCKS), list(range(1, BLOCKS))
        self.held: Counter[int] = Counter()
        self.parked: set[int] = set()

    def give(self, blocks: list[int]) -> None:
        """Back to the pool, or when they are held no more."""
        self.parked |= {block for block in blocks if self.held[block]}
        self.free += [block for block in blocks if block not in self.parked]

    def touch(self, blocks: list[int]) -> None:
        assert 0 not in blocks
        self.held.update(blocks)

    def free_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.held[block] -= 1
            assert self.held[block] >= 0
            if not self.held[block] and block in self.parked:
                self.parked.discard(block)
                self.free.append(block)


STATE = -1
"""In the place of a window: a recurrent state."""


class Chunk(int):
    """In the place of a window: attention within chunks of so many tokens."""


class Engine:
    """One engine: a scheduler's half, and a worker's half for each rank. With `windows`, of so many
    tokens each, it has a group of layers for each beside that of full attention, which may be left
    out. As in vLLM, layers of all groups lie in the same tensors, and blocks that no later token
    sees are given to others: here at once, the last one first. With a group of states new blocks
    are set to zero before the workers hear of the step."""

    def __init__(
        self,
        name: str,
        identity: str = "engine",
        ranks: int = 1,
        device: str = "cpu",
        windows: tuple[int, ...] = (),
        heads: int = HEADS,
        stages: int = 1,
        full: bool = True,
        **options: Any,
    ) -> None:
        given = Options.of({"size": "1MiB", "name": name, "blocks_per_page": 2, **options})
        self.heads, self.stages, self.ranks = heads, stages, ranks
        tokens = BLOCK * (given.blocks_per_page or 1)
        self.name, self.windows = name, (*([None] if full else []), *windows)
        self.states = STATE in windows
        groups = (
            *(one_group(BLOCK) if full else ()),
            *(
                BlockGroup(f"state{number}", Rule.point(), Run(number), BLOCK)
                if window == STATE
                else BlockGroup(f"chunk{window}", Rule.chunk(int(window)), Run(number), BLOCK)
                if isinstance(window, Chunk)
                else BlockGroup(f"window{window}", Rule.window(window - 1), Run(number), BLOCK)
                for number, window in enumerate(windows, 1)
            ),
        )
        kinds = [self.group(group.rule, tokens, heads) for group in groups]
        size = max(PageGeometry([kind]).part_bytes for kind in kinds)
        geometries = [PageGeometry([kind], part_bytes=size) for kind in kinds]
        formats = " ".join(dict.fromkeys(geometry.fingerprint() for geometry in geometries))
        place = Place(name, "stand-in", f"stand-in {formats}", size, tokens, groups)
        self.scheduler = SchedulerHalf(given, identity)
        self.workers, self.tensors = [], []
        for rank in range(stages * ranks):
            shape = (BLOCKS, max(1, heads // ranks), BLOCK, WIDTH)
            stage = rank // ranks
            layers = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
            tensors = {layer: self.zeros(shape, device) for layer in layers}
            parts = []
            for geometry in geometries:
                mine = Shard(geometry, rank % ranks, ranks, layers=layers)
                if geometry.rule == Rule.point():
                    states = {at: each.reshape(BLOCKS, 1, 1, -1) for at, each in tensors.items()}
                    planes = layouts.plane(mine, GROUP, "state", states, axes="bhnc")
                else:
                    planes = layouts.vllm(mine, GROUP, tensors, axes="bhnc")
                parts.append(GroupFormat(geometry, mine, planes))
            worker = WorkerHalf(given, launch_of(identity), team_of(identity), rank)
            worker.register(Format(place, tuple(parts), stages * ranks))
            self.workers.append(worker)
            self.tensors.append(tensors)
        self.scheduler.connect(worker.hello() for worker in self.workers)
        self.pool = Pool()
        self.free = self.pool.free
        if self.states:
            self.scheduler.hold_blocks(self.pool)
        self.weights = 0
        """What it computes depends on them."""
        self.tables: dict[str, list[list[int]]] = {}
        """Blocks of each group; 0: no later token sees it."""
        self.kept: set[str] = set()

    def group(self, rule: Rule, page_tokens: int, heads: int) -> KVGroup:
        if rule == Rule.point():
            size = max(1, heads // self.ranks) * BLOCK * WIDTH
            part = Plane("state", size, self.ranks)
            return KVGroup.state(GROUP, layers=LAYERS, parts=[part], head_groups=self.ranks)
        return KVGroup.attention(
            GROUP,
            layers=LAYERS,
            heads=heads,
            head_dim=WIDTH,
            dtype_bytes=1,
            page_tokens=page_tokens,
            content="single",
            rule=rule,
            head_groups=heads,
        )

    @staticmethod
    def zeros(shape: tuple[int, ...], device: str) -> Any:
        if device == "cpu":
            return np.zeros(shape, np.uint8)
        import torch

        return torch.zeros(shape, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """As vLLM's shutdown."""
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- a request, step by step

    def ask(self, tokens: list[int], device: int = 0, **how: Any) -> int:
        """Serve a prompt to its end; returns the tokens that were loaded and are right."""
        request = Request(tokens, **how)
        found = self.admit(request, device)
        self.compute(request)
        self.end(request)
        self.idle()
        return found

    def admit(self, request: Request, device: int = 0) -> int:
        """As vLLM admits a request: look, allocate, load, and compute what did not come."""
        self.scheduler.begin(request)
        found = self.look(request, device)
        self.allocate(request, device, found)
        self.scheduler.allocated(request, self.tables[request.request_id], found)
        request.num_computed_tokens = device + found
        if found and self.load(request):
            request.num_computed_tokens = device
            return 0
        self.check(request)
        return found

    def look(self, request: Request, device: int = 0) -> int:
        """Asked until there is an answer."""
        while True:
            try:
                found, waits = self.scheduler.look(request, device)
            except LightcacheError as error:  # as the connector's guard
                self.scheduler.trouble("look", error)
                return 0
            if found is not None:
                assert waits == (found > 0)
                return found
            self.step({})

    def allocate(self, request: Request, device: int = 0, found: int = 0) -> None:
        """Blocks for what the device has and what is loaded."""
        unseen = [self.unseen(window, device + found) for window in self.windows]
        self.tables[request.request_id] = [[0] * count for count in unseen]
        self.grow(request, device + found)
        self.write(request, 0, device)

    @staticmethod
    def unseen(window: int | None, computed: int) -> int:
        """Blocks at the head that no later token sees."""
        if window == STATE:
            return max(0, computed - 1) // BLOCK
        if isinstance(window, Chunk):
            return computed // window * window // BLOCK
        return 0 if window is None else max(0, computed - window + 1) // BLOCK

    def grow(self, request: Request, end: int) -> tuple[list[int], ...]:
        """Blocks up to this position, after those that nothing sees were given up."""
        given: list[list[int]] = []
        for window, table in zip(self.windows, self.tables[request.request_id], strict=True):
            for place in range(min(len(table), self.unseen(window, request.num_computed_tokens))):
                self.pool.give([table[place]] if table[place] else [])
                table[place] = 0
        for window, table in zip(self.windows, self.tables[request.request_id], strict=True):
            lacking = -(-end // BLOCK) - len(table)
            empty = max(0, lacking - 1) if window == STATE else 0
            given.append([0] * empty + [self.free.pop() for _ in range(lacking - empty)])
            table += given[-1]
            if self.states:
                for layers in self.tensors:
                    for tensor in layers.values():
                        tensor[[block for block in given[-1] if block]] = 0
        return tuple(given)

    def offers(self, request: Request) -> list[tuple[int, int, int]]:
        """The states that a step leaves: group, block and tokens."""
        end, tables = request.end, self.tables[request.request_id]
        return [
            (group, tables[group][end // BLOCK - 1], end)
            for group, window in enumerate(self.windows)
            if window == STATE and end % BLOCK == 0
        ]

    def load(self, request: Request) -> bool:
        """Make steps until the load has ended. True: it has failed."""
        failed = False
        while True:
            received, bad = self.step({})
            failed |= request.request_id in bad
            if request.request_id in received:
                return failed

    def compute(
        self, request: Request, end: int | None = None, preempted: tuple[Request, ...] = ()
    ) -> None:
        """The step that computes the prompt up to `end`; None: the rest. For states in several:
        they end at a prefix that others share, and at the last block that is whole."""
        if self.states and end is None:
            stops = (request.shared_prefix_boundary, (request.num_tokens - 1) // BLOCK * BLOCK)
            for stop in sorted(stops):
                if stop > request.num_computed_tokens:
                    self.compute(request, stop, preempted)
        request.end = end or request.num_tokens
        self.step({request.request_id: request}, preempted)

    def end(self, request: Request) -> None:
        """The request has ended: its blocks are free when nothing reads them any more."""
        identity = request.request_id
        self.kept.add(identity)
        if not self.scheduler.finish(request):
            self.release(identity)

    def release(self, identity: str) -> None:
        """Others use its blocks."""
        assert identity in self.kept
        self.kept.discard(identity)
        blocks = [block for table in self.tables.pop(identity) for block in table if block]
        for rank, _, layer in self.each():
            for block in blocks:
                if not self.pool.held[block]:
                    self.tensors[rank][layer][block] = 254
        self.pool.give(blocks)

    def idle(self) -> None:
        """Until all saves have ended."""
        while self.scheduler.pending:
            self.step({})

    # ---- a step

    def step(
        self, requests: dict[str, Request], preempted: tuple[Request, ...] = ()
    ) -> tuple[set[str], set[str]]:
        """One step. Returns the requests whose load has ended, and those whose load has failed."""
        scheduled = {name: each.end - each.num_computed_tokens for name, each in requests.items()}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            preempted_req_ids={each.request_id for each in preempted},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                new_block_ids=[self.grow(each, each.end) for each in requests.values()]
            ),
        )
        states = {name: self.offers(each) for name, each in requests.items()}
        output.kv_connector_block_state = SimpleNamespace(boundary_state_offloads=states)
        orders = self.scheduler.orders(output, lambda name, group: self.tables[name][group])
        received, bad, reports = self.work(orders, requests)
        whole = Report()
        for report in reports:
            whole.add(report)
        for name in self.scheduler.report(whole, received):
            self.release(name)
        return received, bad

    def work(
        self, orders: Orders, requests: dict[str, Request]
    ) -> tuple[set[str], set[str], list[Report]]:
        """The workers' part of it."""
        received, bad, reports = [], set(), []
        for worker in self.workers:
            worker.settle(orders)
        for request in requests.values():
            self.write(request, request.num_computed_tokens, request.end)
            request.num_computed_tokens = request.end
        for worker in self.workers:
            worker.load(orders)
            worker.save(orders)
        waiting = {order.request for order in orders.loads}
        for worker in self.workers:
            got = worker.received()
            while waiting - got:  # vLLM waits for all ranks, over several steps
                got |= worker.received()
            received.append(got)
            bad |= worker.failed()
            reports.append(worker.report())
        return set().union(*received), bad, reports

    def each(self) -> Any:
        """Ranks, groups, and the layers of a rank: in a tensor lies a layer of each group."""
        for rank, layers in enumerate(self.tensors):
            for group, layer in itertools.product(range(len(self.windows)), layers):
                yield rank, group, layer

    def write(self, request: Request, begin: int, end: int) -> None:
        """Compute positions of a request."""
        for rank, group, layer in self.each():
            blocks = self.tables[request.request_id][group]
            values = self.of_rank(request, rank, group * LAYERS + layer)
            if self.windows[group] == STATE:
                block = blocks[(end - 1) // BLOCK] if end > begin else 0
                if block:
                    self.tensors[rank][layer][block] = values[:, end - 1 : end]
                continue
            for place in range(max(begin, _unseen(blocks) * BLOCK), end):
                row = self.tensors[rank][layer][blocks[place // BLOCK], :, place % BLOCK]
                value = values[:, place]
                row[:] = value if isinstance(row, np.ndarray) else _like(row, value)

    def of_rank(self, request: Request, rank: int, layer: int) -> Any:
        first = rank % self.ranks * self.heads // self.ranks
        whole = computed(request.all_token_ids, layer) + np.uint8(self.weights)
        return whole[first : first + max(1, self.heads // self.ranks)]

    def check(self, request: Request) -> None:
        """What the device has of a request is what its tokens have; nothing writes to block 0."""
        for rank, group, layer in self.each():
            assert not self.tensors[rank][layer][0].any()
            blocks = self.tables[request.request_id][group]
            values = self.of_rank(request, rank, group * LAYERS + layer)
            end = request.num_computed_tokens
            if self.windows[group] == STATE:
                if end:
                    found = self.tensors[rank][layer][blocks[(end - 1) // BLOCK]]
                    assert (found == values[:, end - 1 : end]).all(), (rank, layer)
                continue
            for place in range(_unseen(blocks) * BLOCK, request.num_computed_tokens):
                found = self.tensors[rank][layer][blocks[place // BLOCK], :, place % BLOCK]
                found = found if isinstance(found, np.ndarray) else found.cpu().numpy()
                assert np.array_equal(found, values[:, place]), (rank, layer, place)


def _unseen(blocks: list[int]) -> int:
    return next((place for place, block in enumerate(blocks) if block), len(blocks))


def _like(row: Any, value: Any) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(value)).to(row.device)
