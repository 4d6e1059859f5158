"""Pages that a GPU's driver knows: registered piece by piece, in the background, by threads.

    pinned = cache.pin(device="cuda:0")          # PinnedPages over the cache's pool
    pinned.wait([0])                             # the first pages can be copied
    pinned.wait()                                # all of them

A piece never cuts a page (a copy across two registrations is an invalid argument) and never shares
an OS page with the next (the driver would refuse it). It does not know caches: its maker says how
many pages have memory, and pages without memory are not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.shm.errors import (
    ConfigError,
    Detached,
    InUse,
    LightcacheError,
    NoSpace,
    NotReady,
    TransferFailed,
    WaitTimeout,
    leave,
    require,
)
from lightcache.shm.waiting import Condition

# ---- Pieces for registration

OS_PAGE = max(4096, mmap.PAGESIZE)


@dataclass(frozen=True)
class Piece:
    """Memory that one call registers: the pages `first` to `last` - 1, if it holds pages."""

    address: int
    nbytes: int
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class PinStatistics:
    """Progress of the registration."""

    nbytes: int
    pieces: int
    first_seconds: float
    """From the beginning until the first pages could be used; 0.0 while none can."""
    seconds: float
    """Until the last piece was registered."""


class Pieces:
    """The pieces of some page memory, not locked: callers that share it lock. A piece begins and
    ends where a page and an OS page both do; only the last ends with the memory. Pieces are cut
    from the first page on and may finish in any order."""

    def __init__(self, address: int, pages: int, page_bytes: int, steps: tuple[int, int]) -> None:
        """Nothing is cut yet.

        Args:
            address: a multiple of `OS_PAGE`.
            steps: approximate bytes of the first piece, and of each later one: whole units of
                lcm(page_bytes, OS_PAGE) bytes, at least one.
        """
        unit = math.lcm(page_bytes, OS_PAGE)
        self.unit = unit // page_bytes
        """Pages that a piece holds a multiple of."""
        self.ready = 0
        """Pages whose pieces are done, from the first on."""
        self._address, self._pages, self._page_bytes = address, pages, page_bytes
        self._steps = [max(1, size // unit) * self.unit for size in steps]
        self.numbers = np.zeros(pages, np.int32)
        """The number of the piece that each page is in, once it is cut."""
        self._cut = self._number = 0
        self._apart: dict[int, int] = {}  # done before a piece in front of them
        self._began = self._first = self._last = time.monotonic()
        self._count = self._nbytes = 0

    @property
    def all_cut(self) -> bool:
        """Whether no piece is left to cut."""
        return self._cut == self._pages

    def cut(self, have: int) -> Piece | None:
        """The next piece, when `have` pages have memory; None: too few have memory. While the first
        is being registered no second is cut: they would delay each other, and a caller waits for
        the first."""
        if self._cut and not self.ready:
            return None
        have = min(have, self._pages)
        if have < self._pages:
            have -= have % self.unit
        first, last = self._cut, min(self._cut + self._steps[self._cut > 0], have)
        if last <= first:
            return None
        self.numbers[first:last] = self._number
        self._cut, self._number = last, self._number + 1
        offset = first * self._page_bytes
        return Piece(self._address + offset, last * self._page_bytes - offset, first, last)

    def done(self, piece: Piece) -> int:
        """Note that a piece is registered; returns the pages registered in all."""
        self._apart[piece.first] = piece.last
        while self.ready in self._apart:
            self.ready = self._apart.pop(self.ready)
        self._last = time.monotonic()
        if piece.first == 0:
            self._first = self._last
        self._count += 1
        self._nbytes += piece.nbytes
        return self.ready + sum(last - first for first, last in self._apart.items())

    @property
    def statistics(self) -> PinStatistics:
        """How much was registered, and how long it took."""
        return PinStatistics(
            self._nbytes, self._count, self._first - self._began, self._last - self._began
        )


# ---- Host pages


class HostPages:
    """Pages in ordinary host memory, for an engine without a device. For a device use
    `PinnedPages`, which registers the memory with its driver."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        """Use an array, such as `cache.pool.array`, which is kept alive.

        Args:
            array: uint8 of shape (pages, page_bytes), contiguous rows.

        Raises:
            ConfigError: another dtype or shape, or rows that are not contiguous.
        """
        if array.dtype != np.uint8 or array.ndim != 2 or not array.flags.c_contiguous:
            raise ConfigError(
                "page memory: expected a contiguous uint8 array of shape (pages, page_bytes), "
                f"found {array.dtype} {array.shape}"
            )
        self.array = array
        self.address = int(array.ctypes.data)
        self.pages, self.page_bytes = (int(number) for number in array.shape)
        self.nbytes = self.pages * self.page_bytes

    def check(self, pages: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Page numbers as int64, all of them usable now.

        Raises:
            ConfigError: not whole numbers, or outside of 0 to pages - 1.
        """
        array = np.asarray(pages)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(
                f"pages: expected whole numbers in one dimension, found {array.dtype} {array.shape}"
            )
        numbers = array.astype(np.int64)
        if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < self.pages):
            raise ConfigError(
                f"pages: expected 0 to {self.pages - 1}, found {int(numbers.min())} to "
                f"{int(numbers.max())}; are they pages of another cache?"
            )
        return numbers

    def registration(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.integer[Any]]:
        """The number of the registration that each of these pages is in, which no copy may leave;
        of any shape. For pages that were checked."""
        return np.zeros(pages.shape, np.int32)


# ---- The driver's calls
#
# Short-lived threads make all driver calls: a refusal stays pending in the thread that met it, and
# torch would report it at the next kernel launch in that thread.

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped; the same in HIP
CHUNK_BYTES = 256 << 20
"""Of one registration. Pinning holds locks that are global to the driver: other processes' calls
wait for the piece at hand, at some 10 GB/s about 25 ms. One call is refused from 512 GiB on by
drivers since 580, and above 2 GB by Linux 6.11 to 6.13, whatever is free."""
THREADS = 4
_SHUTTING_DOWN = 4  # cudaErrorCudartUnloading: the driver has given everything back by itself


class Driver(Protocol):
    """The calls of a driver that pinning needs. Codes are the driver's own; 0 is success."""

    def enter(self) -> None:
        """First call of every thread that makes the others: choose the device there."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin memory for all contexts of this process, and map it for the device. Blocks."""

    def unregister(self, address: int) -> int:
        """Undo `register`, of the same address. Blocks."""

    def device_address(self, address: int) -> int:
        """Address of registered memory on the device; -1: unknown."""


class TorchDriver:
    """The driver that torch has loaded: CUDA, or HIP under the same names."""

    def __init__(self, device: str | int | None = None) -> None:
        """Loads the driver and makes the device's context; attach to a cache first.

        Args:
            device: "cuda:0", or its number; None: the current one.

        Raises:
            ConfigError: torch does not find the device.
            NotInstalled: there is no torch.
        """
        require("torch", "kernels", "registering memory with a GPU's driver")
        import torch

        cuda: Any = torch.cuda
        try:
            chosen: Any = torch.device(
                f"cuda:{device}" if type(device) is int else device or "cuda"
            )
        except RuntimeError as error:
            raise ConfigError(
                f"device {device!r}: expected one such as 'cuda:0': {error}"
            ) from None
        if chosen.type != "cuda" or not cuda.is_available():
            raise ConfigError(
                f"pinning needs a GPU that torch can use: {device!r} was asked for, and torch has "
                f"{cuda.device_count()}; without one use HostPages (see `lightcache doctor`)"
            )
        self.index = cuda.current_device() if chosen.index is None else chosen.index
        if self.index >= cuda.device_count():
            raise ConfigError(f"device {device!r}: torch finds {cuda.device_count()} GPUs")
        self._select: Callable[[int], None] = cuda.set_device
        self._runtime = cuda.cudart()
        self._address_of = _address_call(torch.version.hip is not None)

    def enter(self) -> None:
        """Choose the device: otherwise a thread's calls make a context on the first GPU, in every
        rank."""
        self._select(self.index)

    def register(self, address: int, nbytes: int) -> int:
        """Through torch, which releases the GIL meanwhile."""
        return int(self._runtime.cudaHostRegister(address, nbytes, PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> int:
        """Through torch, likewise."""
        return int(self._runtime.cudaHostUnregister(address))

    def device_address(self, address: int) -> int:
        """From the driver's own library: torch does not wrap this call."""
        device_pointer = ctypes.c_uint64()
        code = self._address_of(ctypes.byref(device_pointer), ctypes.c_void_p(address), 0)
        return device_pointer.value if code == 0 else -1


def _address_call(hip: bool) -> Any:
    if not hip:
        return ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libamdhip64" in line}
    return ctypes.CDLL(min(paths, default="libamdhip64.so")).hipHostGetDevicePointer


# ---------------------------------------------------------------- refusals

_Refusal = tuple[type[LightcacheError], str]

# RLIMIT_MEMLOCK is not among the reasons: GPU drivers pin pages in the kernel without asking it.
_REFUSALS: Mapping[int, _Refusal] = {
    1: (
        TransferFailed,
        "it cannot be pinned: there is no memory behind it yet (grow the pool first), the file "
        "system has none left, it is mapped read-only, or chunk_bytes is above 2 GB on Linux 6.11 "
        "to 6.13; dmesg may say more",
    ),
    2: (
        NoSpace,
        "the driver has no memory for its tables (16 bytes for each 4 KiB, and they count against "
        "a container's limit), the IOMMU no addresses left, or one call was for 512 GiB or more: "
        "raise the memory limit, pin less, or give smaller chunk_bytes (`ulimit -l` is not the "
        "reason)",
    ),
    304: (
        TransferFailed,
        "the kernel refused; dmesg says why, and `lightcache doctor` whether the device works",
    ),
    712: (
        TransferFailed,
        "it is registered already: use the PinnedPages that this process has, close it first, or "
        "find the library that pinned the pool by itself",
    ),
    800: (
        TransferFailed,
        "it is not permitted here; give the container the device (--gpus), and do not call it "
        "from a function that the driver itself calls",
    ),
    801: (
        TransferFailed,
        "the device or its driver cannot register host memory; use HostPages and the host path",
    ),
}
_OTHER: _Refusal = (TransferFailed, "see the driver's list of errors, and `lightcache doctor`")


def refusal(code: int, what: str) -> LightcacheError:
    """The exception for a driver's code other than 0; `what` names the request."""
    kind, remedy = _REFUSALS.get(code, _OTHER)
    return kind(f"{what}: the GPU driver refused it with code {code}: {remedy}")


# ---------------------------------------------------------------- registrations


class Registrations:
    """Registrations of some memory, which are undone together. Threads may share it."""

    def __init__(self, driver: Driver) -> None:
        """Nothing is registered yet."""
        self.driver = driver
        self._lock = threading.Lock()
        self._addresses: list[int] = []

    def add(self, piece: Piece) -> None:
        """Register a piece. Blocks; call it from a thread that has called `driver.enter`.

        Raises:
            TransferFailed, NoSpace: refused; nothing is registered.
        """
        what = f"register {piece.nbytes} bytes at {piece.address:#x}"
        code = self.driver.register(piece.address, piece.nbytes)
        if code:
            raise refusal(code, what)
        device_address = self.driver.device_address(piece.address)
        if device_address != piece.address:
            self.driver.unregister(piece.address)
            raise TransferFailed(
                f"{what}: the device finds it at {device_address:#x}, and kernels here use the "
                "host's own addresses (unified addressing); use HostPages and the host path"
            )
        with self._lock:
            self._addresses.append(piece.address)

    def clear(self, threads: int = THREADS) -> None:
        """Unregister everything; one failure does not stop the others. Blocks. A second call does
        nothing.

        Raises:
            TransferFailed: the driver refused some, which stay pinned until the process ends.
        """
        refused: list[int] = []

        def work() -> None:
            self.driver.enter()
            while True:
                with self._lock:
                    if not self._addresses:
                        return
                    address = self._addresses.pop()
                code = self.driver.unregister(address)
                if code not in (0, _SHUTTING_DOWN):
                    refused.append(code)

        if self._addresses:
            run_all(work, min(threads, len(self._addresses)), "lightcache-unpin")
        if refused:
            raise refusal(refused[0], f"unregister ({len(refused)} registrations)")


def run_all(work: Callable[[], None], threads: int, name: str) -> None:
    """Run `work` in several threads and wait for them; raises the first exception."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    workers = [
        threading.Thread(target=guarded, name=f"{name}-{number}", daemon=True)
        for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]


# ---- Pinned pages

FIRST_BYTES = 32 << 20
"""Of the first registration: a few milliseconds, then pages can be used."""
_LOOK = 0.02  # seconds between two checks of how far the memory has grown


class PinnedPages(HostPages):
    """Host pages that a device may copy from and to, and that kernels may access at their host
    addresses. Page i can be used once `ready` > i. Threads may share it; a forked child cannot use
    it."""

    def __init__(
        self,
        array: npt.NDArray[np.uint8],
        *,
        grown: Callable[[], int] | None = None,
        grow: Callable[[], object] | None = None,
        device: str | int | None = None,
        driver: Driver | None = None,
        threads: int = THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        first_bytes: int = FIRST_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Begin to register. Returns at once; loads the GPU driver.

        Args:
            array: see `HostPages`; begins at an OS page and is writable.
            grown: returns how many pages have memory, from the first on; None: all of them.
            grow: gives memory to more pages, blocking for a moment; one thread calls it until all
                have memory. None: another owner grows the pool.
            device: "cuda:0", or its number; None: the current one.
            driver: instead of the device's; for tests.
            threads: that register in parallel.
            chunk_bytes, first_bytes: approximate size of a registration, and of the first: rounded
                to whole pages that end with an OS page.
            progress: any thread calls it with (pages registered, pages) after each piece.

        Raises:
            ConfigError: memory that cannot be pinned, counts below one, or an unknown device.
        """
        super().__init__(array)
        for name, number in (("threads", threads), ("chunk_bytes", chunk_bytes)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"{name}: expected a whole number >= 1, found {number!r}")
        if self.address % OS_PAGE or not array.flags.writeable or not self.nbytes:
            raise ConfigError(
                f"page memory: expected some, writable, from the beginning of an OS page, found "
                f"{self.nbytes} bytes at {self.address:#x}, writable {array.flags.writeable}; "
                "use the pool of a cache that is attached for writing"
            )
        steps = (first_bytes, chunk_bytes)
        self._pieces = Pieces(self.address, self.pages, self.page_bytes, steps)
        self._grown = grown or (lambda: self.pages)
        self._grow = grow
        self._progress = progress
        self._registrations = Registrations(driver or TorchDriver(device))
        self._changed = Condition()
        self._users = 0
        self._closing = self._closed = False
        self._error: Exception | None = None
        self._no_memory: Exception | None = None
        self._pid = os.getpid()
        works = [self._register] * threads + ([self._give_memory] if grow else [])
        self._threads = [
            threading.Thread(target=work, name=f"lightcache-pin-{i}", daemon=True)
            for i, work in enumerate(works)
        ]
        for thread in self._threads:
            thread.start()

    # ---- threads

    def _register(self) -> None:
        try:
            self._registrations.driver.enter()
            while (piece := self._next()) is not None:
                self._registrations.add(piece)
                self._done(piece)
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self) -> Piece | None:
        """The next piece that has memory; waits for one. None: nothing is left to do."""
        with self._changed:
            while not (self._closing or self._error or self._pieces.all_cut):
                piece = self._pieces.cut(self._grown())
                if piece is not None:
                    return piece
                self._changed.wait(_LOOK)
        return None

    def _done(self, piece: Piece) -> None:
        with self._changed:
            registered = self._pieces.done(piece)
            self._changed.notify_all()
        if self._progress:
            self._progress(registered, self.pages)

    def _give_memory(self) -> None:
        assert self._grow
        try:
            while not (self._closing or self._error) and self._grown() < self.pages:
                self._grow()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._no_memory = error
                self._changed.notify_all()

    # ---- progress

    @property
    def ready(self) -> int:
        """Number of pages that can be used, from the first on."""
        return 0 if self._closed else self._pieces.ready

    @property
    def statistics(self) -> PinStatistics:
        """How much was registered, and how long it took."""
        with self._changed:
            return self._pieces.statistics

    def check(self, pages: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Page numbers as int64, all of them registered.

        Raises:
            ConfigError: not whole numbers, or outside of 0 to pages - 1.
            NotReady: some are not registered yet.
            TransferFailed, NoSpace: some will not be: registering them has failed.
            Detached: closed.
        """
        numbers = super().check(pages)
        if numbers.size and int(numbers.max()) >= self.ready:
            self._raise_if_over(int(numbers.max()) + 1)
            raise NotReady(
                f"page {int(numbers.max())} is not registered with the GPU driver yet: "
                f"{self.ready} of {self.pages} pages are; `wait` for it, or continue without it"
            )
        if self._closing:
            raise Detached("the pinned pages were closed; pin the pool again")
        return numbers

    def registration(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.integer[Any]]:
        """See `HostPages.registration`."""
        return self._pieces.numbers[pages]

    def wait(
        self,
        pages: Sequence[int] | npt.NDArray[Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Block until pages can be used.

        Args:
            pages: numbers; None: all pages.
            timeout: seconds; None: no limit, also while the pool grows.

        Raises:
            WaitTimeout: not in the time allowed.
            Otherwise as `check`.
        """
        numbers = None if pages is None else super().check(pages)
        needed = self.pages if numbers is None else int(numbers.max(initial=-1)) + 1
        end = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self.ready < needed or self._closing:
                self._raise_if_over(needed)
                left = end - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(
                        f"wait for pages to be pinned: {self.ready} of {needed} after {timeout} s "
                        f"({min(self._grown(), self.pages)} have memory); wait longer"
                    )
                self._changed.wait(min(left, 1.0))

    def _raise_if_over(self, needed: int) -> None:
        if self._closing:
            raise Detached("the pinned pages were closed; pin the pool again")
        error = self._error
        if error is None and self._no_memory and self._grown() < needed:
            error = self._no_memory
        if error is not None:
            kind = type(error) if isinstance(error, LightcacheError) else TransferFailed
            raise kind(
                f"{error} ({self.ready} of {self.pages} pages are pinned and can be used)"
            ) from error

    # ---- the end

    def acquire(self) -> None:
        """Register an engine as a user: `close` refuses until `release`.

        Raises:
            Detached: closed.
        """
        with self._changed:
            if self._closing:
                raise Detached("the pinned pages were closed; pin the pool again")
            self._users += 1

    def release(self) -> None:
        """Undo one `acquire`."""
        with self._changed:
            assert self._users > 0, "released more often than acquired"
            self._users -= 1

    @property
    def closed(self) -> bool:
        """Whether everything has been given back."""
        return self._closed

    def check_closable(self) -> None:
        """Raise InUse while engines use it."""
        if self._users:
            raise InUse(
                f"close the pinned pages: {self._users} engines still use them; close those first"
            )

    def close(self) -> None:
        """Stop registering, unregister everything, and release the memory. Blocks: waits for
        registrations in progress. A second call does nothing, nor does one in a forked child.

        Raises:
            InUse: engines use it; nothing was changed.
            TransferFailed: the driver refused, and some memory stays pinned until this process
                ends. The pages are closed all the same.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._changed:
            self.check_closable()
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        try:
            self._registrations.clear()
        finally:
            self._closed = True
            self.array = np.empty((0, self.page_bytes), np.uint8)

    def __del__(self) -> None:
        if not sys.is_finalizing() and not getattr(self, "_closed", True):
            with contextlib.suppress(LightcacheError):
                self.close()

    def __enter__(self) -> PinnedPages:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)

    def __repr__(self) -> str:
        return f"<PinnedPages {self.ready} of {self.pages} pages of {self.page_bytes} bytes>"


__all__ = [
    "CHUNK_BYTES",
    "FIRST_BYTES",
    "OS_PAGE",
    "THREADS",
    "Driver",
    "HostPages",
    "Piece",
    "Pieces",
    "PinStatistics",
    "PinnedPages",
    "Registrations",
    "TorchDriver",
    "refusal",
    "run_all",
]
