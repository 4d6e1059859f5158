"""A worker's half: it copies what the scheduler's half says, and reports. docs/design/vllm.md.

The engine's thread pins and begins loads, which takes no lock. Saves are reserved, begun and
published by a thread of ours; the engine's own waits for it in one place, `settle`: before blocks
that a save reads are overwritten.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from lightcache import Cache, Load, Offload
from lightcache.connectors.engine_cache import START, CachePart, close_all, host_name
from lightcache.connectors.link import Link, Voice
from lightcache.connectors.node_tally import NodeTally
from lightcache.connectors.vllm.messages import (
    Hello,
    LoadOrder,
    LoadPart,
    Orders,
    Report,
    SaveOrder,
)
from lightcache.connectors.vllm.model import Format
from lightcache.connectors.vllm.options import Options
from lightcache.connectors.vllm.scheduler import open_cache, part_of, role_of
from lightcache.errors import Abandoned, LeaseLost, LightcacheError, LockTimeout, NotReady
from lightcache.kernels.moves import Engine
from lightcache.namespaces import Namespace
from lightcache.page_transfers import begun_with

SETTLE = 2.0
"""Seconds that a step waits for copies of blocks that were freed; then they are given up."""
LOCK = 5.0
"""Seconds that the thread of saves waits for the index's lock."""
JOIN = 15.0
"""Seconds that a save waits for a rank that does not begin it."""
_NAP = 1e-3


@dataclass
class Opened:
    """What a rank has open."""

    cache: Cache
    readers: list[Engine]
    """Of each group."""
    writers: list[Engine]
    """Others than `readers` only where ranks hold the same heads: each writes a part."""
    segment: str
    tally: NodeTally
    spaces: dict[str, Namespace] = field(default_factory=dict)

    def space(self, weights: str) -> Namespace:
        """The namespace of a version of the weights. May take the lock the first time."""
        if weights not in self.spaces:
            self.spaces[weights] = self.cache.namespace(weights)
        return self.spaces[weights]

    def close(self) -> None:
        """Wait for copies, and leave."""
        close_all(self.readers + self.writers)
        self.tally.close()
        self.cache.close()


class _Save:
    """A job: waiting, copying, or over."""

    def __init__(self, order: SaveOrder, after: list[Any]) -> None:
        self.order, self.after = order, after
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.given_up = False
        self.offload: Offload | None = None

    def give_up(self) -> None:
        """Nothing of it is published after this returns; its copy may still read."""
        with self.lock:
            self.given_up = True
            if self.offload is not None:
                with contextlib.suppress(LockTimeout):  # it is given up, and abandoned later
                    self.offload.abort()


class WorkerHalf(CachePart[Opened]):
    """See the module."""

    def __init__(self, options: Options, launch: str, team: int, rank: int) -> None:
        """Opens nothing; see `register`."""
        super().__init__(Voice(f"lightcache, rank {rank}", keeps=True))
        self.options, self.launch, self.team, self.rank = options, launch, team, rank
        self._format: Format | None = None
        self._why = "no tensors were registered"
        self._told = ""
        self._loading: dict[str, list[Load]] = {}
        """Of each request, what is under way."""
        self._early: list[LoadOrder] = []
        """What could not begin yet."""
        self._lost: set[str] = set()
        """Requests of which a part has failed; the others end before it is told."""
        self._failed: set[str] = set()
        self._report = Report()
        self._saves: dict[int, _Save] = {}
        self._queue: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._over: deque[_Save] = deque()
        self._thread: threading.Thread | None = None
        self._events = _no_events

    # ---- the cache

    def register(self, found: Format) -> None:
        """The engine's tensors: open the cache for them."""
        self._format, self._why = found, ""
        if found.device != "cpu":
            self._events = _event_now
        self._link = Link(self.voice, self._open, Opened.close)
        self._link.start(START)
        self._thread = threading.Thread(target=self._run, name="lightcache-saves", daemon=True)
        self._thread.start()

    def refuse(self, why: str) -> None:
        """The cache is of no use for this engine."""
        self._why = why

    def _open(self) -> Opened:
        of = self._format
        assert of is not None
        device = of.device != "cpu"
        role = role_of(self.launch, part_of(self.rank))
        cache = open_cache(of.place, self.options, role=role, device=device)
        readers: list[Engine] = []
        writers: list[Engine] = []
        try:
            memory = cache.pin(device=of.device) if device else None
            how: dict[str, Any] = {} if device else {"threads": 1}
            for group in of.groups:
                made = partial(
                    cache.transfer_engine, group.geometry, group.planes, memory=memory, **how
                )
                whole, part = group.shard.share(), group.shard.share(writing=True)
                readers.append(made(share=whole))
                same = part.cells == whole.cells
                writers.append(readers[-1] if same else made(share=part))
        except BaseException:
            close_all(readers + writers)
            cache.close()
            raise
        return Opened(cache, readers, writers, cache.index.segment.uuid, NodeTally(cache))

    def hello(self) -> Hello:
        """For the scheduler's half, once."""
        self._told = self._segment()
        place = None if self._format is None else self._format.place
        device = self._format is not None and self._format.device != "cpu"
        troubles = self.voice.take()
        return Hello(
            self.rank, place, self._why, self._told, os.getpid(), host_name(), device, troubles
        )

    def _segment(self) -> str:
        link = self._link
        opened = None if link is None else link.current
        if link is None or opened is None:
            return ""
        if opened.cache.index.segment.retired:
            link.lose(opened)
            return ""
        return opened.segment

    def _right(self, segment: str) -> Opened:
        opened = None if self._link is None else self._link.current
        if opened is None or opened.segment != segment:
            raise LeaseLost("the cache was removed or replaced since the scheduler has looked")
        return opened

    def close(self) -> None:
        """Finish the saves under way, and leave the cache."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(START)
        for load in itertools.chain.from_iterable(self._loading.values()):
            with contextlib.suppress(LightcacheError):
                load.wait(START)
        if self._link is not None:
            self._link.close(START)

    # ---- a step

    def settle(self, orders: Orders) -> None:
        """Blocks of these jobs are overwritten in this step: wait for them, or give them up."""
        saves = [save for job in orders.settle if (save := self._saves.get(job)) is not None]
        end = time.monotonic() + SETTLE
        for save in saves:
            if not save.over.wait(max(0.0, end - time.monotonic())):
                save.give_up()
                self.figures["given_up_saves"] += 1

    def load(self, orders: Orders) -> None:
        """Begin the step's loads."""
        for identity in orders.lost:
            self._loading[identity] = []
            self._lost.add(identity)
        for order in orders.loads:
            self._try_load(order)

    def _try_load(self, order: LoadOrder) -> None:
        """Begin its parts, in order, until one cannot begin."""
        loads = self._loading.setdefault(order.request, [])
        for place, part in enumerate(order.parts):
            try:
                loads.append(self._begin_load(order, part))
            except NotReady:  # the driver still registers its pages: the next step asks again
                self._early.append(replace(order, parts=order.parts[place:]))
                return
            except Exception as error:
                self._lost.add(order.request)
                self.trouble("load", error)
                return

    def _begin_load(self, order: LoadOrder, part: LoadPart) -> Load:
        opened = self._right(order.segment)
        pages = np.frombuffer(part.pages, np.int32)
        lease = opened.cache.index.pin(pages, np.frombuffer(part.generations, np.uint32))
        try:
            return Load(
                opened.readers[part.group],
                lease,
                self._slots(part.group, part.blocks),
                first=part.first,
                after=self._events(),
            )
        except BaseException:
            if begun_with(lease) is None:
                lease.release()
            raise

    def _slots(self, group: int, blocks: tuple[int, ...]) -> Any:
        assert self._format is not None
        slots = self._format.place.groups[group].slots
        return (np.asarray(blocks, np.int64)[:, None] * slots + np.arange(slots)).ravel()

    def save(self, orders: Orders) -> None:
        """Begin the step's saves: what they read was computed by work that is queued by now."""
        after = self._events() if orders.saves else []
        for order in orders.saves:
            save = self._saves[order.job] = _Save(order, after)
            if self._thread is None:
                self._end(save)
            else:
                self._queue.put(save)

    def received(self) -> set[str]:
        """Requests whose load has ended, well or not."""
        early, self._early = self._early, []
        for order in early:
            self._try_load(order)
        waiting = {order.request for order in self._early}
        ended = set()
        for identity, loads in list(self._loading.items()):
            left = self._loading[identity] = [
                one for one in loads if not self._has_ended(identity, one)
            ]
            if not left and identity not in waiting:
                ended.add(identity)
                del self._loading[identity]
        lost = ended & self._lost
        self._lost -= lost
        self._failed |= lost
        self._report.failed |= lost
        return ended

    def _has_ended(self, identity: str, load: Load) -> bool:
        """Whether a part of a request's load has."""
        try:
            if not load.done():
                return False
            self.figures["loaded_bytes"] += load.nbytes
            if (tally := self._tally()) is not None:
                tally.moved("load", load.page_count, load.nbytes, load.begun_ns)
        except Exception as error:
            self._lost.add(identity)
            self.trouble("load", error)
            if (tally := self._tally()) is not None:
                tally.add(failed_loads=1)
        return True

    def _tally(self) -> NodeTally | None:
        opened = None if self._link is None else self._link.current
        return None if opened is None else opened.tally

    def failed(self) -> set[str]:
        """Of those received since the last call, requests whose load has failed."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> Report:
        """What there is to say of this step."""
        while self._over:
            save = self._over.popleft()
            self._saves.pop(save.order.job, None)
            self._report.saved[save.order.job] = 1
        if (segment := self._segment()) != self._told:
            self._told = segment
            self._report.segments[self.rank] = segment
        report, self._report = self._report, Report()
        return report

    def take_figures(self) -> Mapping[str, int]:
        """The figures since the last call."""
        taken, self.figures = self.figures, Counter()
        return taken

    # ---- the thread of saves

    def _run(self) -> None:
        copying: list[_Save] = []
        ending = False
        while not ending or copying:
            try:
                save = self._queue.get(timeout=_NAP if copying else None)
            except queue.Empty:
                pass
            else:
                if save is None:
                    ending = True
                elif self._begin_save(save):
                    copying.append(save)
            copying = [save for save in copying if not self._ended(save)]

    def _begin_save(self, save: _Save) -> bool:
        """True: its copy has begun."""
        try:
            return self._reserve(save, save.order)
        except NotReady:  # the driver still registers these pages: the next prompt may save them
            self.figures["given_up_saves"] += 1
            self._end(save)
            return False
        except Exception as error:
            self.trouble("save", error)
            self._end(save)
            return False

    def _reserve(self, save: _Save, order: SaveOrder) -> bool:
        of = self._format
        assert of is not None
        opened = self._right(order.segment)
        group = of.place.groups[order.group]
        keys = np.frombuffer(order.keys, np.uint64).reshape(-1, 2)
        how: dict[str, Any] = {"namespace": opened.space(order.weights), "timeout": LOCK}
        how |= {"run": group.run, "independent": not group.whole, "hint": order.hint}
        if order.tokens:
            how["tokens"] = np.frombuffer(order.tokens, np.uint32)
        if not order.root:
            keys, how["after"] = keys[1:], keys[:1]
        if of.ranks > 1:
            how |= {"shards": of.ranks, "shard": self.rank, "team": self.team, "join_timeout": JOIN}
        held = opened.cache.reserve(keys, **how)
        self.figures["absent_pages"] += len(held.missing)
        if len(held.missing):
            opened.tally.add(no_room_pages=len(held.missing))
        if not len(held.new):
            held.release()
            self._end(save)
            return False
        with save.lock:
            if save.given_up:
                held.abandon()
                self._end(save)
                return False
            try:
                save.offload = Offload(
                    opened.writers[order.group],
                    held,
                    self._slots(order.group, order.blocks),
                    positions=held.new,
                    after=save.after,
                )
            except BaseException:
                if begun_with(held) is None:
                    held.abandon()
                raise
        return True

    def _ended(self, save: _Save) -> bool:
        assert save.offload is not None
        try:
            if not save.offload.done():
                return False
            self.figures["saved_bytes"] += save.offload.nbytes
        except LockTimeout:
            return False  # it is asked again
        except Abandoned:
            self.figures["lost_saves"] += 1  # by another rank, or cleared
            failed = True
        except Exception as error:
            failed = True
            if not save.given_up:
                self.trouble("save", error)
        else:
            failed = False
        if (tally := self._tally()) is not None:
            if failed:
                tally.add(failed_offloads=1)
            else:
                copy = save.offload
                tally.moved("offload", copy.page_count, copy.nbytes, copy.begun_ns)
        self._end(save)
        return True

    def _end(self, save: _Save) -> None:
        save.over.set()
        self._over.append(save)


def _no_events() -> list[Any]:
    return []


def _event_now() -> list[Any]:
    """An event after all work that is queued on the current stream."""
    event = import_module("torch").cuda.Event()
    event.record()
    return [event]


__all__ = ["Opened", "WorkerHalf"]
