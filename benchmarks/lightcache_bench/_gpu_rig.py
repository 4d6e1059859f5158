"""What is set up once and shared by all parts, and one shape's engine with its calls."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightcache.kernels.moves import Transfer
from lightcache_bench import _gpu_shapes
from lightcache_bench._gpu_device import DIRECTIONS, Bytes, Gpu
from lightcache_bench._gpu_interface import (
    TIMEOUT,
    give_back,
    make_engine,
    usable_pages,
)
from lightcache_bench._gpu_shapes import Calls, Place, Shape

_OUTSTANDING = 8  # calls under way at once: an engine's requests
_POISON = {"offload": 0xA5, "load": 0x5A}


class TransferBackend(Protocol):
    """A way of moving bytes, prepared so that a repetition can begin at once."""

    nbytes: int
    """Bytes of a repetition in one direction."""
    piece: int
    """Bytes of one `submit`."""

    def run(self, direction: str) -> None:
        """One repetition, from an idle device until the last byte is there."""

    def submit(self, direction: str, i: int) -> Transfer:
        """The i-th piece of an endless run."""


@dataclass(frozen=True)
class Sizes:
    """How much memory and how many repetitions."""

    total: int
    """Bytes of a repetition."""
    device: int
    """Bytes of the device pool, over which the tokens of a repetition lie scattered."""
    host: int
    """Bytes of the host pool: what an offload writes, and what a load reads; at least one of the
    largest pages for each."""
    rounds: int


FULL = Sizes(1 << 30, 4 << 30, 2 << 30, rounds=16)
QUICK = Sizes(256 << 20, 1 << 30, 512 << 20, rounds=3)
WITHOUT_DEVICE = Sizes(256 << 20, 1 << 30, 512 << 20, rounds=7)
WITHOUT_DEVICE_QUICK = Sizes(64 << 20, 512 << 20, 512 << 20, rounds=3)


class Bench:
    """The memory of both sides, allocated once."""

    def __init__(
        self, gpu: Gpu, quick: bool, sizes: Sizes | None = None, host: Bytes | None = None
    ) -> None:
        """Allocate it and fill it with random bytes.

        Args:
            host: a host pool that is there already, uint8 of shape (bytes,).
        """
        self.gpu, self.quick = gpu, quick
        if sizes is None:
            small, large = (QUICK, FULL) if gpu.cuda else (WITHOUT_DEVICE_QUICK, WITHOUT_DEVICE)
            sizes = small if quick else large
        self.sizes = sizes
        self.device_memory: Any = gpu.random(sizes.device)
        self._host: Any = gpu.shared_memory(sizes.host) if host is None else host
        gpu.synchronize()
        self._pages: Any = None
        self._kept: dict[str, Any] = {}

    @property
    def rounds(self) -> int:
        """Repetitions of a case."""
        return self.sizes.rounds

    def pages(self, page_bytes: int) -> Any:
        """The host pool as pages of one size, registered. Registering it for another size ends
        this: close the engines first."""
        if self._pages is None or self._pages.page_bytes != page_bytes:
            self._close_pages()
            count = len(self._host) // page_bytes
            array = self._host[: count * page_bytes].reshape(count, page_bytes)
            self._pages = usable_pages(self.gpu, array)
        return self._pages

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What several parts need, made when the first one asks."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def _close_pages(self) -> None:
        pages, self._pages = self._pages, None
        give_back(pages)

    def close(self) -> None:
        """Give everything back."""
        self._kept.clear()
        self._close_pages()
        self.device_memory = self._host = None


class Rig:
    """One shape on that memory: an engine, and calls with scattered tokens and pages."""

    def __init__(
        self, bench: Bench, shape: Shape, *, pages: range | None = None, **options: Any
    ) -> None:
        """`pages`: those of the host pool to use; None: all. `options` go to the engine: mode,
        programs, rate."""
        self.shape, self.gpu = shape, bench.gpu
        self.memory = bench.pages(shape.geometry.part_bytes)
        self._device = bench.device_memory
        self.places = _gpu_shapes.places(shape, self._device.numel())
        planes = _gpu_shapes.device_planes(
            self.places, int(self._device.data_ptr()), self.gpu.device, self._device
        )
        both = _gpu_shapes.scattered(
            shape, pages or range(self.memory.pages), self.places[0].slots, bench.sizes.total
        )
        self.calls: dict[str, Calls] = dict(zip(DIRECTIONS, both, strict=True))
        self.nbytes = self.calls["offload"].nbytes
        self.piece = shape.share.nbytes * shape.batch
        self.engine = make_engine(self.gpu, shape, planes, self.memory, **options)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.engine.close()

    def submit(self, direction: str, i: int) -> Transfer:
        """See `TransferBackend.submit`."""
        moves = self.calls[direction].moves
        call: Callable[..., Transfer] = getattr(self.engine, direction)
        return call(moves[i % len(moves)])

    def run(self, direction: str) -> None:
        """See `TransferBackend.run`."""
        run_calls(self, [direction], len(self.calls[direction].moves))

    def run_both(self) -> None:
        """A repetition of each direction, at once."""
        run_calls(self, DIRECTIONS, len(self.calls["load"].moves))

    # ---- proof

    def verify(self) -> None:
        """Poison the destination, move, and compare every byte; each direction once.

        Raises:
            TransferFailed: a byte is wrong.
        """
        for direction in DIRECTIONS:
            moved = self.calls[direction]
            indices = self.gpu.torch.from_numpy(moved.slots).to(self.gpu.device)
            if direction == "offload":
                self.memory.array[moved.pages] = _POISON[direction]
            else:
                for place in self.places:
                    self._view(place).index_fill_(0, indices, _POISON[direction])
            self.gpu.synchronize()
            self.run(direction)
            self.gpu.synchronize()
            pages = self.memory.array[moved.pages].reshape(len(moved.pages), -1)
            _gpu_shapes.check(
                self.shape, self.places, self._rows_of(indices), pages, f"check of {direction}"
            )

    def _rows_of(self, indices: Any) -> Callable[[Place], Bytes]:
        def rows(place: Place) -> Bytes:
            found: Bytes = self._view(place).index_select(0, indices).cpu().numpy()
            return found

        return rows

    def _view(self, place: Place) -> Any:
        end = place.offset + place.slots * place.width
        return self._device[place.offset : end].view(place.slots, place.width)


def run_calls(backend: TransferBackend, directions: Sequence[str], count: int) -> None:
    """Submit `count` pieces in each direction, a few at a time, and wait for them all."""
    pending: deque[Transfer] = deque()
    for i in range(count):
        for direction in directions:
            if len(pending) >= _OUTSTANDING:
                pending.popleft().wait(TIMEOUT)
            pending.append(backend.submit(direction, i))
    while pending:
        pending.popleft().wait(TIMEOUT)


@contextlib.contextmanager
def verified(bench: Bench, shape: Shape, **options: Any) -> Iterator[Rig]:
    """A rig whose engine moved every byte rightly, in both directions."""
    with Rig(bench, shape, **options) as rig:
        rig.verify()
        yield rig
