"""The layout of a backend's KV as measured: what its own operation writes, read through our planes.

    digest = layout_digest(mine, planes, write, slots)
    fingerprint = f"{model} {geometry.fingerprint()} layout={digest}"

A description of tensors is a claim about an engine's release. If the next release packs its KV in
another way, the claim may be wrong without an error; then its pages must not be those of others.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import PageGeometry, Rule
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.layouts import Shard
from lightcache.kernels.moves import Engine, Move, integers
from lightcache.kernels.pinned import HostPages, PinnedPages
from lightcache.kernels.planes import DevicePlanes
from lightcache.shm.errors import ConfigError

PERIOD = 8
"""Rows after which the pattern repeats; so many slots are needed."""
Values = npt.NDArray[np.float32]
Pattern = Callable[[str, int, int], Values]
"""Called with the name of a plane, such as "k", the rank's number of heads of it, and the elements
of a row; returns the values to write, of shape (slots, heads, elements)."""
Write = Callable[[npt.NDArray[np.int64], Pattern], object]


def layout_digest(shard: Shard, planes: DevicePlanes, write: Write, slots: Any) -> str:
    """Return a digest of where a backend puts KV, 16 hex digits: equal for all layouts that are
    described truly, whatever the rank, its heads, layers and block size, and for each wrong
    description another one. Put it into the fingerprint of the cache.

    The pattern is such that row `h` of slot `s` equals row 0 of slot `s + h`. So only a true
    description finds the same 8 rows in every head and layer. Its values are whole numbers of -8 to
    7, which every dtype of KV holds. Blocks until the copies have finished.

    Args:
        shard: the part of the model that the planes hold.
        planes: where the engine's KV lies, as for its transfer engine.
        write: called as `write(slots, pattern)`, twice: writes `pattern(plane, heads, elements)`
            into these slots of every layer, by the operation that the backend itself updates its
            cache with, and with scales that do not depend on other rows. Must have finished, or be
            queued on the current stream, when it returns.
        slots: of the device, at least 8, unused; they are overwritten. Those of whole blocks, in
            order, are best.

    Raises:
        ConfigError: fewer slots, pages of states, or a layer in which the planes see nothing of
            what was written.
        Otherwise as the transfer engine.
    """
    numbers = np.ascontiguousarray(integers(slots, "slots"), np.int64)
    if shard.geometry.rule == Rule.point():
        raise ConfigError("layout_digest: expected planes of tokens, found those of states")
    if len(numbers) < PERIOD:
        raise ConfigError(f"slots: expected at least {PERIOD} to write, found {len(numbers)}")
    # The layout of a page without parts: here it lies in one piece.
    mine = Shard(PageGeometry(shard.geometry.groups), shard.rank, shard.ranks, shard.layers)
    with _Reader(mine, planes, numbers) as reader:
        write(numbers, _pattern(len(numbers), "before"))
        before = reader.rows()
        write(numbers, _pattern(len(numbers), ""))
        rows = reader.rows()
    unseen = sorted(layer for layer, found in rows.items() if found == before[layer])
    if unseen:
        raise ConfigError(
            f"layout_digest: nothing that was written to layers {unseen} is where the planes say; "
            "write all layers of the shard into these slots, or describe the tensors otherwise"
        )
    digest = hashlib.blake2b(digest_size=8, person=b"lightcache lay")
    for group, plane, row, index, data in sorted(set().union(*rows.values())):
        digest.update(f"{group} {plane} {row} {index} {len(data)} ".encode() + data)
    return digest.hexdigest()


def _pattern(slots: int, seed: str) -> Pattern:
    def pattern(plane: str, heads: int, elements: int) -> Values:
        rows = [
            hashlib.shake_128(f"{seed} {plane} {index}".encode()).digest(elements)
            for index in range(PERIOD)
        ]
        values = (np.frombuffer(b"".join(rows), np.uint8) & 15).astype(np.float32) - 8
        indices = np.add.outer(np.arange(slots), np.arange(heads)) % PERIOD
        found: Values = values.reshape(PERIOD, elements)[indices]
        return found

    return pattern


_Row = tuple[str, str, int, int, bytes]  # group, plane, row of a unit, index in the period


class _Reader:
    """Reads slots as a transfer engine does, into pages of its own."""

    def __init__(self, shard: Shard, planes: DevicePlanes, slots: npt.NDArray[np.int64]) -> None:
        self._geometry, self._share, self._slots = shard.geometry, shard.share(), slots
        count = -(-len(slots) // self._geometry.page_tokens)
        length = -(-count * self._geometry.page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = np.frombuffer(mmap.mmap(-1, length), np.uint8)
        self._pages = memory[: count * self._geometry.page_bytes].reshape(count, -1)
        self._pinned: PinnedPages | None = None
        self._engine: Engine
        if planes.device == "cpu":
            host = HostPages(self._pages)
            self._engine = HostEngine(self._geometry, planes, host, share=self._share, threads=1)
            return
        self._pinned = PinnedPages(self._pages, device=planes.device)
        try:
            self._pinned.wait()
            self._engine = import_module("lightcache.kernels.engine").TransferEngine(
                self._geometry, planes, self._pinned, share=self._share
            )
        except BaseException:
            self._pinned.close()
            raise

    def rows(self) -> dict[int, set[_Row]]:
        """What the slots hold now, by layer."""
        self._engine.offload(Move(np.arange(len(self._pages)), self._slots)).wait()
        found: dict[int, set[_Row]] = {layer: set() for layer in self._share.layers}
        for cell in self._share.cells:
            plane, tokens = cell.plane, cell.plane.unit_tokens
            group = self._geometry.groups[cell.group].name
            for unit in range(len(self._slots) // tokens):
                page, within = divmod(unit, cell.units)
                start = cell.offset + within * cell.unit_stride
                for head in range(cell.heads):
                    at = start + head * plane.row_bytes
                    index = (unit * tokens + cell.own_head + head) % PERIOD
                    data = self._pages[page, at : at + plane.row_bytes].tobytes()
                    found[cell.layer].add((group, plane.name, cell.row, index, data))
        return found

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()
        if self._pinned is not None:
            self._pinned.close()


__all__ = ["PERIOD", "layout_digest"]
