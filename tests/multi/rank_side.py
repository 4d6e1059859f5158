"""One rank of an engine, in a process of its own: takes orders and answers as lines of JSON.

What a model would have computed is a function of layer, plane, row, head and token, so whoever
reads a page can tell whether each of its bytes is what the rank that wrote it had.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from support.device_sides import Device
from support.keys import prompt

from lightcache import Cache, Lease, LightcacheError, Load, Offload
from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane, Share
from lightcache.reservations import ReservationShard

TOKENS = 4
PAGES = 16
SLOTS = 128
SECRET = bytes(16)
attention = KVGroup.attention
GEOMETRIES = {
    "heads": PageGeometry(
        [
            attention(
                "kv", layers=2, heads=8, head_dim=4, dtype_bytes=2, page_tokens=TOKENS,
                head_groups=8,
            )
        ]
    ),
    "fewer heads": PageGeometry(
        [
            attention(
                "kv", layers=5, heads=2, head_dim=4, dtype_bytes=1, page_tokens=TOKENS,
                scale_bytes=2, head_groups=2,
            )
        ]
    ),
    "latent": PageGeometry(
        [
            attention(
                "mla", layers=6, heads=1, head_dim=18, dtype_bytes=2, page_tokens=TOKENS,
                content="single",
            ),
            KVGroup.opaque("index", layers=6, row_bytes=33, page_tokens=TOKENS, unit_tokens=2),
        ]
    ),
    "stages": PageGeometry(
        [
            attention(
                "kv", layers=5, heads=4, head_dim=4, dtype_bytes=2, page_tokens=TOKENS,
                head_groups=2,
            ),
            KVGroup.opaque("index", layers=[1, 4], row_bytes=7, page_tokens=TOKENS),
        ]
    ),
    "state": PageGeometry(
        [
            KVGroup.state(
                "ssm", layers=2, parts=[Plane("conv", 6, 8, rows=3), Plane("rec", 32, 8)],
                head_groups=8,
            )
        ]
    ),
}  # fmt: skip


def computed(layer: int, plane: str, row: int, head: int, token: int, size: int) -> Any:
    """The bytes that a model has computed for one row of one head."""
    what = sum(plane.encode()) + 7 * len(plane)
    seed = ((((token * 61 + layer) * 61 + what) * 61 + row) * 61 + head) & 0xFFFFFFFF
    mixed = (seed + np.arange(size, dtype=np.uint64) * 0x9E3779B1) * 0x85EBCA6B
    return (mixed >> np.uint64(24)).astype(np.uint8)


def cells(
    share: Share, device: Device, slots: list[int], start: int = 0
) -> Iterator[tuple[slice, npt.NDArray[np.uint8]]]:
    """(place on the device, what belongs there) of each row of a prompt's tokens."""
    for cell in share.cells:
        name = share.geometry.groups[cell.group].name, cell.layer, cell.plane.name
        size, unit = cell.plane.row_bytes, cell.plane.unit_tokens
        for token in range(start, len(slots), unit):
            for head in range(cell.head, cell.head + cell.heads):
                place = device.row(
                    name, slots[token] // unit, head - device.first[name], cell.row, size
                )
                yield place, computed(cell.layer, cell.plane.name, cell.row, head, token, size)


class Rank:
    """What one rank has: a cache, planes, an engine."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Attach, and describe what this rank holds. `writing` divides what several hold alike."""
        geometry = GEOMETRIES[order["geometry"]]
        which = order["rank"], order["ranks"]
        share = geometry.share(*which, layers=order.get("layers"))
        self.held = share
        self.device = Device(share, SLOTS, order.get("seed", 0))
        self.cache = Cache.attach(
            order["name"], secret=SECRET, role="rank", device=order.get("device", False)
        )
        writing = geometry.share(*which, layers=order.get("layers"), writing=True)
        self.engine = self.cache.transfer_engine(
            geometry,
            self.device.planes,
            share=writing if order.get("writing") else share,
            threads=2,
        )
        self.shard: ReservationShard | None = None

    def client(self, order: dict[str, Any]) -> Any:
        """Our id, for the scheduler."""
        return list(self.cache.client_id)

    def compute(self, order: dict[str, Any]) -> Any:
        """Have computed the KV of a prompt."""
        for place, row in cells(self.held, self.device, order["slots"]):
            self.device.memory[place] = row

    def adopt(self, order: dict[str, Any]) -> Any:
        """Adopt a shard."""
        found = self.cache.adopt(bytes.fromhex(order["ticket"]), shard=order["shard"])
        assert isinstance(found, ReservationShard)
        self.shard = found
        return found.pages.tolist()

    def offload(self, order: dict[str, Any]) -> Any:
        """Write our shard and publish it."""
        assert self.shard is not None
        shard, self.shard = self.shard, None
        offload = Offload(self.engine, shard, order["slots"], positions=order["positions"])
        offload.wait(60)
        return [offload.ready, offload.transfer.nbytes]

    def load(self, order: dict[str, Any]) -> Any:
        """Load a prompt of so many pages into a clean device and compare; (bytes, wrong bytes)."""
        slots = order["slots"]
        self.device.memory[:] = 0xEE
        lease = self.cache.match(prompt(order["prompt"], order["pages"]))
        assert isinstance(lease, Lease)
        assert len(lease) == order["pages"]
        load = Load(self.engine, lease, slots, window=order.get("window"))
        load.wait(60)
        total = wrong = 0
        for place, row in cells(self.held, self.device, slots):
            total += len(row)
            wrong += int((self.device.memory[place] != row).sum())
            self.device.memory[place] = 0xEE
        wrong += int((self.device.memory != 0xEE).sum())  # what was written beside
        return [total, load.transfer.nbytes, wrong]

    def leave(self, order: dict[str, Any]) -> Any:
        """Give everything back."""
        self.shard = None
        self.engine.close()
        self.cache.close()


def main() -> None:
    """Follow orders until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test ends us
    rank: Rank | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "join":
                rank = Rank(order)
                answer = rank.client(order)
            else:
                call: Callable[[dict[str, Any]], Any] = getattr(rank, order["do"])
                answer = call(order)
                if order["do"] == "leave":
                    rank = None
        except LightcacheError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
