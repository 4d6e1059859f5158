"""Registering host memory with a GPU's driver, and what the driver's refusals mean.

All driver calls are made by threads of ours that end: a refusal stays pending in the thread that
met it, and torch would report it to whoever launches the next kernel there.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lightcache.kernels.pieces import Piece
from lightcache.shm.errors import ConfigError, LightcacheError, NoSpace, TransferFailed

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
        """Where the device finds registered memory; -1: it does not say."""


class TorchDriver:
    """The driver that torch has loaded: CUDA, or HIP under the same names."""

    def __init__(self, device: str | int | None = None) -> None:
        """Loads the driver and makes the device's context; attach to a cache before.

        Args:
            device: "cuda:0", or its number; None: the current one.

        Raises:
            ConfigError: torch finds no such device.
        """
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
        """Without it a thread's calls would make a context on the first GPU, in every rank."""
        self._select(self.index)

    def register(self, address: int, nbytes: int) -> int:
        """Through torch, which lets the GIL go meanwhile."""
        return int(self._runtime.cudaHostRegister(address, nbytes, PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> int:
        """Through torch, likewise."""
        return int(self._runtime.cudaHostUnregister(address))

    def device_address(self, address: int) -> int:
        """From the driver's library itself: torch does not wrap this call."""
        found = ctypes.c_uint64()
        code = self._address_of(ctypes.byref(found), ctypes.c_void_p(address), 0)
        return found.value if code == 0 else -1


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
    """The exception for a driver's code other than 0; `what` was asked for, in our words."""
    kind, remedy = _REFUSALS.get(code, _OTHER)
    return kind(f"{what}: the GPU driver refused it with code {code}: {remedy}")


# ---------------------------------------------------------------- registrations


class Registrations:
    """What is registered of some memory, to be given back together. Threads may share it."""

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
        found = self.driver.device_address(piece.address)
        if found != piece.address:
            self.driver.unregister(piece.address)
            raise TransferFailed(
                f"{what}: the device finds it at {found:#x}, and kernels here use the host's own "
                "addresses (unified addressing); use HostPages and the host path"
            )
        with self._lock:
            self._addresses.append(piece.address)

    def clear(self, threads: int = THREADS) -> None:
        """Unregister everything, all of it tried. Blocks. A second call does nothing.

        Raises:
            TransferFailed: refused for some, which stay pinned until the process ends.
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
    """Run `work` in so many threads and wait for them; the first exception of any is raised."""
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


@contextlib.contextmanager
def registered_ranges(
    address: int,
    ranges: Sequence[tuple[int, int]],
    *,
    driver: Driver,
    threads: int = THREADS,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[int]:
    """Register some byte ranges for the body of a with statement: for measuring, and for layouts
    of which a rank needs a part only. Blocks until all are registered; all must have memory.

    Args:
        address: that offsets count from.
        ranges: (offset, length); those that share an OS page are refused by the driver.

    Raises:
        TransferFailed, NoSpace: refused; nothing stays registered.
        ConfigError: chunk_bytes is no multiple of 4096.
    """
    if chunk_bytes <= 0 or chunk_bytes % 4096:
        raise ConfigError(f"chunk_bytes: expected a multiple of 4096, found {chunk_bytes}")
    pieces = [
        Piece(address + at, min(chunk_bytes, offset + length - at))
        for offset, length in ranges
        for at in range(offset, offset + length, chunk_bytes)
    ]
    todo, lock = iter(pieces), threading.Lock()
    held = Registrations(driver)

    def work() -> None:
        driver.enter()
        while True:
            with lock:
                piece = next(todo, None)
            if piece is None:
                return
            held.add(piece)

    try:
        run_all(work, min(threads, len(pieces)), "lightcache-pin")
        yield sum(piece.nbytes for piece in pieces)
    finally:
        held.clear(threads)


__all__ = [
    "CHUNK_BYTES",
    "THREADS",
    "Driver",
    "Registrations",
    "TorchDriver",
    "refusal",
    "registered_ranges",
    "run_all",
]
