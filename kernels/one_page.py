"""A request of one small page, by the shortest way: what most requests of a decoding model are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache.kernels.device_transfer import DeviceTransfer
from lightcache.kernels.lanes import Lane
from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.transfer import Move
from lightcache.kernels.work import store_slots

if TYPE_CHECKING:
    from lightcache.kernels.engine import TransferEngine

_SLOT_TYPES = (np.dtype(np.int32), np.dtype(np.int64))


def submit_page(
    engine: TransferEngine, lane: Lane, move: Move, streams: list[Any], after: list[Any]
) -> DeviceTransfer | None:
    """What a `Submission` does, in a third of the time: the page is read or written directly.
    None: it is more than a page, or something is wrong with it, which the long way tells."""
    page = _page_of(move, engine)
    if page is None:
        return None
    traffic, slots, first, memory = engine._traffic, move.slots, move.first, engine.memory
    assert isinstance(slots, np.ndarray)
    traffic.recycle(lane)
    block = traffic.blocks.take(JOB_WORDS + len(slots))
    view, stream = block.view, lane.next_direct()
    view[0] = memory.address + page * memory.page_bytes
    view[1], view[2], view[3] = -first, first, first + len(slots)
    store_slots(slots, block.slots[2 * JOB_WORDS : 2 * JOB_WORDS + len(slots)])
    nbytes = engine._joined.plan.nbytes * len(slots) // engine.geometry.page_tokens
    transfer = DeviceTransfer(traffic, nbytes)
    transfer.uses(block, None)
    sources: list[Any] = []
    try:
        lane.going.append(transfer)
        transfer.begin()
        for source in streams:
            sources.append(traffic.events.recorded(source))
            stream.wait_event(sources[-1])
        for event in after:
            stream.wait_event(event)
        _launch(engine, lane, block.host_address, stream)
        transfer.mark(traffic.events.recorded(stream))
        transfer.enqueued()
    except BaseException as error:
        traffic.failed(transfer, error, [stream])
        transfer.enqueued()
        if not isinstance(error, Exception):
            raise
    traffic.events.give(sources)
    return transfer


def _page_of(move: Move, engine: TransferEngine) -> int | None:
    pages, slots, first, memory = move.pages, move.slots, move.first, engine.memory
    if type(pages) is not np.ndarray or type(slots) is not np.ndarray or move.skip is not None:
        return None
    if pages.shape != (1,) or slots.ndim != 1 or pages.dtype.kind not in "iu":
        return None
    page, count = int(pages[0]), len(slots)
    if not 0 <= page < getattr(memory, "ready", memory.pages) or type(first) is not int:
        return None
    if not (count and 0 <= first <= engine.geometry.page_tokens - count):
        return None
    if slots.dtype not in _SLOT_TYPES or slots.max() >= engine._joined.plan.slots:
        return None
    return page


def _launch(engine: TransferEngine, lane: Lane, at: int, stream: Any) -> None:
    programs, slots, handle = engine.programs, at + JOB_WORDS * 8, stream.cuda_stream
    for each, launch in engine._joined.launches(False, lane.to_page):
        launch(0, len(each.cells), at, 1, slots, programs, handle)
