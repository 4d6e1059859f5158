"""vLLM's interface, of release 0.32: `LightcacheConnector`. It only carries calls to the halves; an
error of one is said once and counts as a miss, so no method raises on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, overload

from lightcache.connectors.link import guarded
from lightcache.connectors.vllm.messages import Hello, Orders, Report
from lightcache.connectors.vllm.model import block_groups, check_served, describe, rank_of
from lightcache.connectors.vllm.options import Options
from lightcache.connectors.vllm.room import warn_of_shortage
from lightcache.connectors.vllm.scheduler import SchedulerHalf, launch_of, team_of
from lightcache.connectors.vllm.worker import WorkerHalf
from lightcache.errors import ConfigError, NotInstalled
from lightcache.runs import PLAIN

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise NotInstalled(
        f"lightcache.connectors.vllm needs vLLM 0.32 or later ({error}); install lightcache into "
        "the environment of vLLM with: pip install 'lightcache[vllm]'"
    ) from error

FIGURES = (
    "loaded_tokens",
    "loaded_bytes",
    "saved_bytes",
    "offered_pages",
    "absent_pages",
    "not_worth_pages",
    "given_up_saves",
    "lost_saves",
    "failed_loads",
    "without_keys",
    "errors",
)


@dataclass
class HelloMetadata(base.KVConnectorHandshakeMetadata):
    """`Hello`, as vLLM carries it."""

    hello: Hello


@dataclass
class StepMetadata(base.KVConnectorMetadata):
    """`Orders`, as vLLM carries them."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class OutputMetadata(base.KVConnectorWorkerMetadata):
    """`Report`, as vLLM carries it."""

    report: Report

    def aggregate(self, other: OutputMetadata) -> OutputMetadata:
        """Of all ranks."""
        self.report.add(other.report)
        return self


class LightcacheStats(KVConnectorStats):
    """Sums of `FIGURES` since the last interval."""

    def reset(self) -> None:
        """Set all figures to zero."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> LightcacheStats:
        """Those of both."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


class LightcacheMetrics(KVConnectorPromMetrics):
    """A counter `vllm:lightcache_NAME` for each of `FIGURES`."""

    def __init__(self, *arguments: Any) -> None:
        """As vLLM makes it."""
        super().__init__(*arguments)
        self._counters = {name: self._counter(name) for name in FIGURES}

    def _counter(self, name: str) -> dict[int, Any]:
        text = f"lightcache: {name.replace('_', ' ')}."
        counter = self._counter_cls(
            name=f"vllm:lightcache_{name}", documentation=text, labelnames=self._labelnames
        )
        labels = self.per_engine_labelvalues
        return {engine: counter.labels(*values) for engine, values in labels.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval."""
        for name, value in transfer_stats_data.items():
            if name in self._counters and value:
                self._counters[name][engine_idx].inc(value)


class Table(Sequence[int]):
    """Numbers of a request's blocks: only those that are asked for are read, as a prompt may have
    thousands and a step completes few."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [block.block_id for block in self._blocks[place]]
        number: int = self._blocks[place].block_id
        return number

    def __iter__(self) -> Iterator[int]:
        return (block.block_id for block in self._blocks)


def _nothing() -> None:
    return None


class LightcacheConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """See the package. Made by vLLM, in the scheduler and in each worker."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Opens nothing yet.

        Raises:
            ConfigError: an option of `kv_connector_extra_config` that there is not, or a value that
                it cannot have.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._kv_transfer_config
        options = self._options = Options.of(config.kv_connector_extra_config)
        config.kv_load_failure_policy = options.load_failure
        identity = str(config.engine_id)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._events: Any = None
        self.half: SchedulerHalf | WorkerHalf
        if role is base.KVConnectorRole.SCHEDULER:
            self.half = self._scheduler = SchedulerHalf(options, identity)
            self._switch_events(vllm_config, kv_cache_config)
        else:
            rank, team = rank_of(vllm_config.parallel_config), team_of(identity)
            self.half = self._worker = WorkerHalf(options, launch_of(identity), team, rank)

    def trouble(self, what: str, error: BaseException) -> None:
        """See `Guarded`."""
        self.half.trouble(what, error)

    @guarded(_nothing)
    def _switch_events(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """As vLLM has them: off by default, and then nothing is kept for them."""
        config = vllm_config.kv_events_config
        if config is None or not config.enable_kv_cache_events:
            return
        try:
            check_served(vllm_config, kv_cache_config)
        except ConfigError:  # the ranks say so
            return
        runs = [group.run for group in block_groups(kv_cache_config)]
        if PLAIN in runs:
            module = import_module("lightcache.connectors.vllm.events")
            number = runs.index(PLAIN)
            spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
            self._events, self.of_scheduler.tells = module.Events(spec, number), True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See vLLM. No. It asks before it loads the model, unless it uses no CUDA graphs: so here
        is said what does not fit.

        Raises:
            ConfigError: as `__init__`.
        """
        warn_of_shortage(Options.of(extra_config))
        return False

    @property
    def of_scheduler(self) -> SchedulerHalf:
        """The half of the scheduler's connector."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def of_worker(self) -> WorkerHalf:
        """The half of a worker's connector."""
        assert self._worker is not None
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later."""
        return False

    # ---- the worker

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See vLLM."""
        worker = self.of_worker
        try:
            check_served(self._vllm_config, self._kv_cache_config)
            found = describe(
                self._vllm_config, self._kv_cache_config, kv_caches, worker.rank, self._options
            )
        except Exception as error:
            worker.refuse(str(error))  # the scheduler's half says it, once for all ranks
            return
        worker.register(found)

    @guarded(_nothing)
    def get_handshake_metadata(self) -> HelloMetadata:
        """See vLLM."""
        return HelloMetadata(self.of_worker.hello())

    def _orders(self) -> Orders:
        orders: Orders = self._get_connector_metadata().orders
        return orders

    @guarded(_nothing)
    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """See vLLM."""
        if kv_connector_metadata.orders.settle:
            self.of_worker.settle(kv_connector_metadata.orders)

    @guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM."""
        self.of_worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pages have all layers; see `wait_for_save`."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        """See vLLM. Begins them, and waits for none."""
        self.of_worker.save(self._orders())

    @guarded(base.KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See vLLM. Saves are told of by `build_connector_worker_meta`."""
        worker = self.of_worker
        received = worker.received()
        return base.KVConnectorTransferResults(
            finished_recving=received, failed_recving=worker.failed()
        )

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> OutputMetadata | None:
        """See vLLM."""
        report = self.of_worker.report()
        return OutputMetadata(report) if report else None

    # ---- the scheduler

    @guarded(_nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], HelloMetadata]
    ) -> None:
        """See vLLM."""
        self.of_scheduler.connect(each.hello for each in metadata.values())

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        self.of_scheduler.begin(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See vLLM."""
        return self.of_scheduler.look(request, num_computed_tokens)

    @guarded(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM."""
        if num_external_tokens:
            self.of_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """See vLLM: host or storage."""
        host, disk = self.of_scheduler.sources(request, num_external_tokens)
        both = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in both.items() if tokens}

    @guarded(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See vLLM."""
        return StepMetadata(self.of_scheduler.orders(scheduler_output, self._blocks_of))

    def _blocks_of(self, request: str, group: int) -> Table:
        return Table(self._kv_cache_manager.get_blocks(request).blocks[group])

    @guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        told = connector_output.kv_connector_worker_meta
        report = None if told is None else told.report
        free = self.of_scheduler.report(report, connector_output.finished_recving or ())
        if free:
            connector_output.finished_sending = (connector_output.finished_sending or set()) | free

    @guarded(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self.of_scheduler.finish(request), None

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self.of_scheduler.finish(request), None

    @guarded(bool)
    def has_pending_push_work(self) -> bool:
        """See vLLM: an idle engine makes steps while saves run."""
        return self.of_scheduler.pending

    @guarded(lambda: True)
    def reset_cache(self) -> bool:
        """See vLLM. Never clears what other engines use; see `Options.on_reset`."""
        return self.of_scheduler.reset()

    @guarded(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See vLLM."""
        if getattr(self._kv_cache_config, "needs_kv_cache_zeroing", False):
            self.of_scheduler.hold_blocks(gpu_block_pool)
        if self._events is not None:
            self._events.begin(gpu_block_pool)

    @guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        """See vLLM. Of what this engine has saved; none of what goes from the cache."""
        events = self._events
        if events is None:
            return ()
        made = [events.of(stored) for stored in self.of_scheduler.take_stored()]
        return [event for event in made if event is not None]

    # ---- both

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> LightcacheStats | None:
        """See vLLM."""
        figures = dict(self.half.take_figures())
        return LightcacheStats(data=figures) if figures else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LightcacheStats:
        """See vLLM."""
        return LightcacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> LightcacheMetrics:
        """See vLLM."""
        return LightcacheMetrics(*arguments)

    @guarded(_nothing)
    def shutdown(self) -> None:
        """See vLLM."""
        self.half.close()


__all__ = ["FIGURES", "LightcacheConnector", "LightcacheMetrics", "LightcacheStats"]
