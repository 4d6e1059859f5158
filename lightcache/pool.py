"""HostPool: the bytes of the pages, in a shared memory object beside the index.

The object has its full length from the beginning, but no memory. Memory comes in chunks, up to a
mark in the index (`grown`). So the first pages can be used immediately, and a full /dev/shm is an
error instead of a signal. If a growing process dies, any process attached for writing continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache import _arguments
from lightcache._arguments import format_size
from lightcache._together import keep_result
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    Detached,
    InUse,
    LightcacheError,
    LockTimeout,
    NoSpace,
    NotReady,
    PermissionDenied,
)
from lightcache.shm import Segment, _native, memory, names, ofd, owners
from lightcache.shm import _native as shm_native
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import Code, check, system_errno
from lightcache.shm.errors import require
from lightcache.shm.folders import Folder, FolderKind, path_in, path_of
from lightcache.shm.objects import ForkWord, memory_of
from lightcache.shm.sweep import give_way, make_room, most_room, relatives
from lightcache.shm.waiting import Event
from lightcache.shm.wanted import FAMILY_ITEM

if TYPE_CHECKING:
    import torch

    from lightcache.page_index import PageIndex


# ---- The memory node of a pool: `numa=` of a cache.
#
# A GPU's node comes from its PCI address. Asking torch for the address loads the driver, so it is
# asked only when the pool is made or mapped. By then the process is attached, and the handling of
# a dead client's device copies depends on that order (docs/design/index.md, section 12).

Numa = str | int | None
_GPU = re.compile(r"gpu:([0-9]{1,4})", re.ASCII)
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def check_numa(numa: Numa, nodes: Path = _NODES) -> Numa:
    """Return `numa` if it is valid.

    Raises:
        ConfigError: not None, "interleave", "gpu:N", or the number of an existing memory node.
    """
    if numa is None or numa == "interleave" or (isinstance(numa, str) and _GPU.fullmatch(numa)):
        return numa
    if type(numa) is int and numa >= 0 and ((nodes / f"node{numa}").exists() or numa == 0):
        return numa
    present = sorted(path.name for path in nodes.glob("node[0-9]*"))
    raise ConfigError(
        'numa: expected None, "interleave", "gpu:0" (or another number) for the node of that GPU, '
        f"or the number of one of the memory nodes {present or ['node0']}, found {numa!r}"
    )


def parse_numa(text: str | None) -> Numa:
    """Parse the command line's form of `numa`.

    Raises:
        ConfigError: see `check_numa`.
    """
    return check_numa(int(text) if text and text.isdecimal() else text)


def advised_node(numa: Numa) -> int:
    """Return the node argument of the core's `lcs_advise`. "gpu:N" imports torch and loads the
    driver.

    Raises:
        ConfigError: there is no such GPU.
    """
    if numa is None:
        return _native.ANY_NODE
    if numa == "interleave":
        return _native.ALL_NODES
    if isinstance(numa, str):
        node = node_of_pci(pci_address(int(numa.removeprefix("gpu:"))))
        return _native.ANY_NODE if node is None else node
    return numa


def pci_address(gpu: int) -> str:
    """PCI address of a GPU, numbered as in torch, in the form of /sys: "0000:1b:00.0".

    Raises:
        ConfigError: no torch, or no such GPU.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError(
            f'numa="gpu:{gpu}": torch, which knows its address, is not installed; give the number '
            "of its memory node, or pip install 'lightcache[kernels]'"
        ) from None
    count = torch.cuda.device_count()
    if gpu >= count:
        raise ConfigError(f'numa="gpu:{gpu}": torch finds {count} GPUs; give the node instead')
    properties: Any = torch.cuda.get_device_properties(gpu)
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        return f"{bus}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        raise ConfigError(
            f'numa="gpu:{gpu}": torch {torch.__version__} does not say its address; give the node'
        ) from None


def node_of_pci(address: str, devices: Path = _PCI) -> int | None:
    """The memory node next to a device; None: the machine does not say, or has only one."""
    try:
        node = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


_MAKERS = (0x10DE, 0x1002, 0x8086)
"""NVIDIA, AMD, Intel: a board's own screen is of others."""
_DISPLAY, _ACCELERATOR = 0x03, 0x12


def nodes_of_gpus(devices: Path = _PCI) -> set[int]:
    """The memory nodes next to GPUs, and other accelerators, of this machine: also of those that a
    container does not have. Imports no torch and loads no driver."""
    found = {node_of_pci(path.name, devices) for path in devices.glob("*") if _is_gpu(path)}
    return {node for node in found if node is not None}


def _is_gpu(device: Path) -> bool:
    try:
        kind = int((device / "class").read_text(), 16) >> 16
        maker = int((device / "vendor").read_text(), 16)
    except (OSError, ValueError):
        return False
    return kind == _ACCELERATOR or (kind == _DISPLAY and maker in _MAKERS)


# ---- The object of a pool, in /dev/shm or in the folder that the cache's configuration names.
#
# It is made after the header that names it and before the segment is ready, and removed before
# the segment's name: `shm/folders.py` says why it can never be left behind.


def pool_name(segment: Segment) -> str:
    """Name of the object, with a leading slash."""
    return segment.dependent_name("pool")


def make_object(segment: Segment, total: int, first: int, numa: Numa = None) -> None:
    """Make the pool object of an index that is being created: `total` bytes long, the first `first`
    of them with memory. Called before another process can attach. If it fails, the segment's
    creator removes the object together with the segment.

    A pool may be longer than the memory that is available, by what pools of its family have that
    processes use: it grows when they have gone.

    Raises:
        NoSpace: fewer bytes are available than the pool will have.
        PermissionDenied: the object may not be made in this folder.
    """
    with segment.folder() as folder:
        length, family = folder.length(total), segment.config.get(FAMILY_ITEM)
        held, users = 0, ""
        if length > folder.room().bytes:
            held, users = _held_by_family(segment.name, family, folder)
            sizes = {"needed": length, "coming": held}
            make_room(room=lambda: folder.room().bytes, spare=segment.name, family=family, **sizes)
        room = folder.room()
        if length > room.bytes + held or first > room.bytes:
            raise _no_space(length, room, users)
        mode = 0o660 if segment.stat().st_mode & 0o060 else 0o600
        name = pool_name(segment)
        try:
            fd = folder.make(name, mode)
        except OSError as error:
            kind = PermissionDenied if isinstance(error, PermissionError) else LightcacheError
            why = f"{error.strerror}: {owners.whose(f'{folder.path}{name}')}"
            raise kind(f"make the pool {folder.path}{name}: {why}") from error
        try:
            _furnish(fd, segment, folder, mode, (length, first), numa)
        finally:
            os.close(fd)


def _no_space(length: int, room: memory.FreeMemory, users: str) -> NoSpace:
    return NoSpace(
        f"the pool needs {format_size(length)} ({length} bytes), found "
        f"{format_size(room.bytes)} {room.limit}{users}; choose a smaller size, remove "
        "old caches (`lightcache ls`, `lightcache rm`), or enlarge it"
    )


def check_object(
    name: str,
    config: Mapping[str, Any],
    sizes: tuple[int, int, int],
    numa: Numa,
    freed: memory.Coming,
) -> None:
    """Refuse a pool object that cannot be made, whatever else is removed. What can be removed is
    counted at most, so one that passes may still fail.

    Args:
        name, config: of the segment.
        sizes: `total` and `first` as in `make_object`, and the bytes of the segment, which is made
            before it.
        numa: see `make_object`.
        freed: what comes free before either is made.

    Raises:
        ConfigError: there is no such GPU.
        Otherwise as `make_object`.
    """
    advised_node(numa)
    with Folder.open(path_in(dict(config)) or names.FOLDER) as folder:
        total, first, index_bytes = sizes
        length, family = folder.length(total), config.get(FAMILY_ITEM)
        if folder.kind is FolderKind.HUGETLBFS:
            index_bytes = 0  # no limit counts both

        def coming(where: Path | None) -> int:
            index = index_bytes if where in (None, names.FOLDER) else 0
            return freed(where) + most_room(name, family, where) - index

        if not folder.may_write():
            raise PermissionDenied(f"make a pool in {folder.path}: {owners.whose(folder.path)}")
        held, users = _held_by_family(name, family, folder)
        room = folder.room_after(coming)
        if length > room.bytes + held or first > room.bytes:
            room = replace(room, bytes=max(0, room.bytes))
            raise _no_space(length, room, f" beside the index, with all that may go{users}")


def _held_by_family(name: str, family: str | None, folder: Folder) -> tuple[int, str]:
    """The memory of the caches of the same family that processes use, and those for a message. None
    of it can be counted on for huge pages, which are reserved when a pool is mapped."""
    if family is None or folder.kind is FolderKind.HUGETLBFS:
        return 0, ""
    held, parts = 0, []
    for relative in relatives(family, name):
        paths = [path_of(full) for full in relative.objects]
        own = sum(memory_of(str(path)) for path in paths if path.parent == folder.path)
        held += own
        parts.append(f"{relative.name!r} has {format_size(own)} and is in use: {relative.clients}")
    return held, f" (of the same family {'; '.join(parts)})" if parts else ""


def _furnish(
    fd: int, segment: Segment, folder: Folder, mode: int, sizes: tuple[int, int], numa: Numa
) -> None:
    owner, (length, first) = segment.stat(), sizes
    if os.fstat(fd).st_gid != owner.st_gid:
        os.fchown(fd, -1, owner.st_gid)
    os.fchmod(fd, mode)  # the umask may have narrowed it
    os.ftruncate(fd, length)
    if numa is not None:
        _place(fd, length, numa)
    _allocate(fd, 0, first, folder)


def _place(fd: int, length: int, numa: Numa) -> None:
    """Set the memory policy of the object. It also applies to memory that other processes give the
    object later, and to the first chunk. The policy is advice: if the kernel refuses it, memory is
    placed as usual."""
    node = advised_node(numa)
    base, quick = ctypes.c_void_p(), shm_native.quick()
    check(quick.lcs_map(fd, length, True, ctypes.byref(base)), "map the pool to place its memory")
    quick.lcs_advise(base, length, False, node)
    quick.lcs_unmap(base, length)


def _allocate(fd: int, offset: int, length: int, folder: Folder) -> None:
    code = Code.INTR
    while code == Code.INTR:
        code = shm_native.blocking().lcs_fallocate(fd, offset, length)
    if code < 0:
        room = folder.room()
        check(
            code,
            f"allocate {length} bytes of the pool ({format_size(room.bytes)} {room.limit})",
        )


def room_of(segment: Segment) -> memory.FreeMemory:
    """The memory that can still be allocated in the folder of a segment's pool."""
    with segment.folder() as folder:
        return folder.room()


def lacking_room(segment: Segment) -> str | None:
    """Return a warning if the pools of this folder together need more memory than is available, so
    that some will not get all of theirs; None: they fit."""
    owed, pools = 0, 0
    with segment.folder() as folder:
        if folder.kind is FolderKind.HUGETLBFS:
            return None  # mapping a pool has reserved its pages
        for entry in os.listdir(folder.fd):
            parsed = names.parse_dependent(f"/{entry}")
            if parsed is None or parsed.what != "pool":
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = os.stat(entry, dir_fd=folder.fd, follow_symlinks=False)
                lacking = status.st_size - status.st_blocks * 512
                if stat.S_ISREG(status.st_mode) and lacking > 0:
                    owed, pools = owed + lacking, pools + 1
        room = folder.room()
    if owed <= room.bytes:
        return None
    subject = "this cache's pool" if pools == 1 else f"{pools} caches' pools in {folder.path}"
    with segment.folder() as folder:
        users = _held_by_family(segment.name, segment.config.get(FAMILY_ITEM), folder)[1]
    until = ", until those have ended" if users else ""
    return (
        f"{subject} are to have {format_size(owed)} of memory that they do not have yet, found "
        f"{format_size(room.bytes)} {room.limit}{users}: some will have fewer pages than was asked "
        f"for, and evict earlier{until}; make them smaller, remove some (`lightcache ls`, "
        "`lightcache rm`), or enlarge it"
    )


@contextlib.contextmanager
def opened(segment: Segment, nbytes: int) -> Iterator[tuple[Folder, int, int]]:
    """Return the folder, a descriptor to map, and the object's length.

    Raises:
        NotReady: the object or its folder is gone, or not mounted here.
        CacheCorrupted: its length is not that of a pool of `nbytes`.
        PermissionDenied: its owner, mode or links are wrong.
    """
    with segment.folder() as folder:
        name = pool_name(segment)
        fd = folder.open_object(name, writable=not segment.readonly)
        if fd is None:
            raise NotReady(_gone(f"{folder.path}{name}", segment.name))
        try:
            length = folder.length(nbytes)
            _check(fd, segment, f"{folder.path}{name}", length)
            yield folder, fd, length
        finally:
            os.close(fd)


def _gone(path: str, cache: str) -> str:
    return (
        f"the pool {path} of {cache!r} is gone; remove the cache with `lightcache rm {cache}` and "
        "create it anew (another container: mount the same folder)"
    )


def _check(fd: int, segment: Segment, path: str, length: int) -> None:
    status, owner = os.fstat(fd), segment.stat().st_uid
    problem = _strange(status, owner, path)
    if problem:
        raise PermissionDenied(problem)
    problem = _too_short(status, length, path, segment.name)
    if problem:
        raise CacheCorrupted(problem)


def _strange(status: os.stat_result, owner: int, path: str) -> str | None:
    """Return why this owner cannot have made the object; None: it is valid."""
    if stat.S_ISLNK(status.st_mode):
        kind = "a symbolic link"
    elif not stat.S_ISREG(status.st_mode):
        kind = "no regular file"
    elif status.st_nlink != 1 or status.st_uid != owner or status.st_mode & 0o007:
        kind = ""
    else:
        return None
    parts = [kind, f"user {owners.user(status.st_uid)}", f"{status.st_nlink} links"]
    parts += [f"mode {stat.S_IMODE(status.st_mode):04o}"]
    return (
        f"the pool {path}: expected one regular file of user {owners.user(owner)}, mode 0600 or "
        f"0660, found {', '.join(filter(None, parts))}; find out who made it, remove it and create "
        "the cache anew"
    )


def _too_short(status: os.stat_result, length: int, path: str, cache: str) -> str | None:
    if status.st_size == length:
        return None
    return (
        f"the pool {path}: expected {length} bytes, found {status.st_size}; it was truncated or "
        f"extended: remove the cache with `lightcache rm {cache}` and create it anew"
    )


@dataclass(frozen=True)
class PoolObject:
    """The state of a pool's object, read without opening it."""

    path: str
    length: int
    allocated: int
    """Bytes of memory in use."""
    problem: str | None
    """Why the cache cannot be used, or has lost bytes that were written, and what to do."""
    seen: bool = True
    """False: the folder is not visible from this process, so nothing is known."""


def look(
    cache: str, uuid: str, owner: int, config: Mapping[str, Any], pages: int, grown: int
) -> PoolObject | None:
    """Look at the pool of a cache without attaching, for tools. None: the index has no pool.

    Args:
        cache, uuid, owner: name, UUID and user of its segment.
        config: in its header; not trusted.
        pages, grown: pages of the index, and those that have memory according to it.
    """
    page_bytes = config.get("page_bytes")
    if type(page_bytes) is not int or page_bytes < 1:
        return None
    name = names.dependent_name(cache, "pool", uuid)
    path = f"{path_in(dict(config)) or names.FOLDER}{name}"
    try:
        with Folder.open(path_in(dict(config)) or names.FOLDER) as folder:
            status = os.stat(name.removeprefix("/"), dir_fd=folder.fd, follow_symlinks=False)
            length = folder.length(pages * page_bytes)
    except FileNotFoundError:
        return PoolObject(path, 0, 0, _gone(path, cache))
    except (LightcacheError, OSError) as error:
        return PoolObject(path, 0, 0, f"the pool {path}: {error}", seen=False)
    allocated = status.st_blocks * 512
    problem = _strange(status, owner, path) or _too_short(status, length, path, cache)
    if problem is None and allocated < grown * page_bytes:
        problem = (
            f"the pool {path}: {format_size(grown * page_bytes)} were given memory, found "
            f"{format_size(allocated)}; something has taken it away, and ready pages read as "
            f"zeros: remove the cache with `lightcache rm {cache}` and create it anew"
        )
    return PoolObject(path, status.st_size, allocated, problem)


# ---- The pool.

CHUNK_BYTES = 64 << 20  # about 30 ms of zeroing: short enough to take turns with others
MAX_GROWTH = 1 << 62  # a growth beyond the pool's size means the rest of the pool
MAX_THREADS = 256
TURN = 0.05  # seconds that a call waits for another's growth; then it evicts
RETRY = 1.0  # seconds until memory is asked for again after a failure; doubles each time
MAX_RETRY = 30.0
_NO_MEMORY = (errno.EFAULT, errno.ENOMEM, errno.ENOSPC)  # EFAULT: touching found no memory
Bytes = npt.NDArray[np.uint8]
_log = logging.getLogger("lightcache.pool")


class HostPool:
    """This process's handle of the pages of a cache: `pool[page]` is one page's bytes.

    Hold a page (`match`, `reserve`, `adopt`) while you touch it. Views keep the pool mapped: drop
    them before `close`.
    """

    def __init__(
        self,
        index: PageIndex,
        page_bytes: int,
        *,
        huge_pages: bool = False,
        numa: Numa = None,
    ) -> None:
        """Map the pool of an attached index.

        Args:
            index: the index of these pages; the pool is read-only if the index is.
            page_bytes: size of a page, any number.
            huge_pages: ask for transparent huge pages.
            numa: placement of memory allocated from now on: "interleave" over all memory nodes; one
                node while it has room, by its number or as that of a GPU ("gpu:0"); None: as the
                pool's creator chose. The setting is advice.

        Raises:
            NotReady: the pool object is gone, or its folder is not mounted here.
            CacheCorrupted: it has another length.
            PermissionDenied: its owner, mode or links are wrong.
            ConfigError: `numa` is invalid.
        """
        check_numa(numa)
        self.pages = index.pages
        self.page_bytes = page_bytes
        self.nbytes = self.pages * page_bytes
        self._index = index
        self._base = ctypes.c_void_p()
        self._fd = ctypes.c_int(-1)
        self._fork_word = ForkWord()
        self._growing = threading.Lock()
        self._window: weakref.ref[Any] | None = None
        self._users: dict[object, weakref.ref[Any]] = {}
        """Views by token. Dead entries are removed when a new one is added."""
        self._mapped = 0
        self._reserved = False
        self._map(index.segment, huge_pages, numa)

    def _map(self, segment: Segment, huge: bool, numa: Numa) -> None:
        quick = shm_native.quick()
        with opened(segment, self.nbytes) as (folder, fd, length):
            check(
                quick.lcs_map(fd, length, not segment.readonly, ctypes.byref(self._base)),
                f"map the pool ({format_size(length)})",
            )
            self._mapped = length
            # Mapping a file of huge pages reserves all of them: no other process can take them.
            self._reserved = folder.kind is FolderKind.HUGETLBFS
            try:
                if huge or numa is not None:
                    quick.lcs_advise(self._base, length, huge, advised_node(numa))
                if not segment.readonly:
                    folder.life_open(segment.dependent_name("pool"), self._fd)
            except BaseException:
                self._unmap()
                raise

    def _unmap(self) -> None:
        address, self._base.value = self._base.value, None
        if address:
            shm_native.quick().lcs_unmap(address, self._mapped)

    # ---- memory

    def _live_window(self) -> Any:
        """A ctypes array over the pool. Every view of the pool keeps it alive."""
        window = self._window() if self._window else None
        if window is None:
            window = self._new_window(object())
            self._window = weakref.ref(window)
        return window

    def _new_window(self, token: object) -> Any:
        self._index.segment.check_usable()
        if not self._base.value:
            check(Code.CLOSED, "use the pool")
        window = (ctypes.c_uint8 * self.nbytes).from_address(self._base.value or 0)
        for dead in [number for number, user in list(self._users.items()) if user() is None]:
            self._users.pop(dead, None)
        self._users[token] = weakref.ref(window)
        window.owner = self  # type: ignore[attr-defined]
        return window

    def lend(self, token: object) -> Bytes:
        """All pages, as `array`, but counted under `token`: for an object that can be told to drop
        them, as `Cache.close` tells the pinned memory of `Cache.pin`. Use a token once."""
        independent = np.frombuffer(memoryview(self._new_window(token)).cast("B"), np.uint8)
        return independent.reshape(self.pages, self.page_bytes)

    def _view(self) -> memoryview:
        view = memoryview(self._live_window()).cast("B")
        return view.toreadonly() if self._index.readonly else view

    def __getitem__(self, page: int) -> Bytes:
        """The bytes of one page: uint8 of shape (page_bytes,), no copy.

        Raises:
            ConfigError: no such page.
            Detached: closed, replaced, or a forked child.
        """
        number = _arguments.count(page, "page", 0, self.pages - 1)
        self._index.segment.check_usable()
        return np.frombuffer(self._view(), np.uint8, self.page_bytes, number * self.page_bytes)

    @property
    def readonly(self) -> bool:
        """True if it is mapped read-only."""
        return self._index.readonly

    def __len__(self) -> int:
        """Number of pages."""
        return self.pages

    @property
    def array(self) -> Bytes:
        """All pages: uint8 of shape (pages, page_bytes), no copy. Touch only pages that you hold:
        pages from `grown` on have no memory, and touching one kills the process if /dev/shm is
        full."""
        return np.frombuffer(self._view(), np.uint8).reshape(self.pages, self.page_bytes)

    def tensor(self) -> torch.Tensor:
        """`array` as a torch tensor on the CPU. Imports torch.

        Raises:
            NotInstalled: torch is not installed.
        """
        require("torch", "kernels", "HostPool.tensor")
        import torch

        independent = torch.frombuffer(self._view(), dtype=torch.uint8)
        return independent.reshape(self.pages, self.page_bytes)

    # ---- growth

    @property
    def grown(self) -> int:
        """Number of pages that have memory. The others are not handed out yet."""
        return self._index.stats().grown

    def grow(self, pages: int, *, threads: int = 1) -> int:
        """Give memory to `pages` more pages. Other processes may grow the pool meanwhile. Blocks.

        Args:
            threads: number of threads that zero the memory; about 2 GB/s each.

        Returns:
            Pages that have memory now.

        Raises:
            NoSpace: /dev/shm or the memory limit is full; the memory added so far stays. `reserve`
                and `allocate` then evict.
            ConfigError: pages or threads out of range.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        _arguments.count(pages, "pages", 0, MAX_GROWTH)
        _arguments.count(threads, "threads", 1, MAX_THREADS)
        self._index.segment.check_usable()
        if self._index.readonly:
            check(Code.READONLY, "grow the pool")
        return self._grow(pages, threads, None)

    def _grow(self, pages: int, threads: int, patience: float | None) -> int:
        """See `grow`. Raises LockTimeout if another is growing the pool for `patience` seconds."""
        with self._turn(patience):
            have = self.grown
            target = min(self.pages, have + pages)
            if target <= have:
                return have
            start, end = have * self.page_bytes, target * self.page_bytes
            if not self._reserved and not self._has_room(end - start):
                raise self._no_memory(end - start, have)
            error = self._populate(start, end, threads)
            if error:
                have = self._keep_filled(have)
                raise self._no_memory(end - start, have, error)
            self._index.grow(target)
            return target

    def make_room(self) -> None:
        """Have unused caches of the same family give way to the memory that this pool still lacks.
        Does nothing if it is available, or without a family."""
        if not self._reserved:
            self._has_room((self.pages - self.grown) * self.page_bytes)

    def _has_room(self, wanted: int) -> bool:
        """Whether there is so much memory, or will be once unused caches of the same family have
        given way."""
        segment = self._index.segment
        family = segment.config.get(FAMILY_ITEM)
        give_way(wanted, lambda: room_of(segment).bytes, segment.name, family)
        return wanted <= room_of(segment).bytes

    @contextlib.contextmanager
    def _turn(self, patience: float | None) -> Iterator[None]:
        """One thread of one process grows the pool at a time."""
        got: list[bool] = []  # set at the instant at which the lock is taken
        try:
            wait = -1 if patience is None else patience
            keep_result(got, self._growing.acquire, (True,), (wait,))
            if not got[0]:
                raise LockTimeout(f"grow the pool: another thread has been at it for {patience} s")
            with ofd.locked(self._fd.value, shm_layout.BYTE_GROW, timeout=patience):
                yield
        finally:
            if got and got[0]:
                self._growing.release()

    def _no_memory(self, wanted: int, have: int, error: int = 0) -> NoSpace:
        room = room_of(self._index.segment)
        why = "" if error in (0, *_NO_MEMORY) else f" ({os.strerror(error)})"
        return NoSpace(
            f"the pool was to grow by {format_size(wanted)}, found {format_size(room.bytes)} "
            f"{room.limit}{why}; {have} of {self.pages} pages can be used"
        )

    def _populate(self, start: int, end: int, threads: int) -> int:
        """Give memory to these bytes. Returns 0, or the error number of the failure."""
        from concurrent.futures import ThreadPoolExecutor  # imported late: takes 20 ms

        share = max(1 << 21, -(-(end - start) // max(1, threads)) + 4095 & ~4095)
        parts = [(begin, min(end, begin + share)) for begin in range(start, end, share)]
        with self._index.segment.busy(), ThreadPoolExecutor(len(parts)) as workers:
            codes = list(workers.map(lambda part: self._populate_part(*part), parts))
        errors = [system_errno(code) for code in codes if code < 0]
        if any(errors):
            return next(error for error in errors if error)
        for code in codes:
            check(code, "grow the pool")
        return 0

    def _keep_filled(self, have: int) -> int:
        """After a growth that ran out of memory halfway, use the pages that got memory."""
        with contextlib.suppress(OSError):
            if self._reserved:  # hugetlbfs cannot tell
                return have
            end = os.lseek(self._fd.value, have * self.page_bytes, os.SEEK_HOLE)
            filled = min(self.pages, end // self.page_bytes)
            if filled > have:
                self._index.grow(filled)
                return filled
        return have

    def _populate_part(self, start: int, end: int) -> int:
        assert self._base.value
        code: int = Code.INTR
        while code == Code.INTR:
            code = shm_native.blocking().lcs_populate(
                self._fd.value, self._base.value, start, end - start
            )
        return code

    # ---- memory for calls that need pages, see `PageIndex.grows_by`

    def need(self, pages: int) -> bool:
        """Give memory to this many more pages, or to a chunk if it fits. False: there is no memory,
        or another process is growing the pool too slowly; then for one second the calls of all
        processes use only the pages that have memory."""
        had, chunk = self.grown, max(1, CHUNK_BYTES // self.page_bytes)
        for more in (max(pages, chunk), pages):
            with contextlib.suppress(NoSpace, LockTimeout):
                self._grow(more, 1, TURN)
                return True
            if self.grown > had:  # by another process, or halfway
                return True
        self._index.no_memory(RETRY)
        return False

    def could(self, pages: int) -> bool:
        """True if the file system and the memory limit have room for this many more pages."""
        room = room_of(self._index.segment)
        return self._reserved or pages * self.page_bytes <= room.bytes

    @property
    def name(self) -> str:
        """Name of the cache."""
        return self._index.name

    @property
    def no_memory_s(self) -> float:
        """See `IndexStats.no_memory_s`."""
        return self._index.stats().no_memory_s

    def say_no_memory(self, seconds: float) -> None:
        """See `PageIndex.no_memory`."""
        self._index.no_memory(seconds)

    def grow_some(self) -> bool:
        """Grow by a chunk. Returns True if the pool has its full size.

        Raises:
            NoSpace: as `grow`.
            LockTimeout: another was growing it for a second.
        """
        return self._grow(max(1, CHUNK_BYTES // self.page_bytes), 1, 1.0) >= self.pages

    def prefault(
        self,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Grow to the full size, chunk by chunk, while other processes use the pages that have
        memory.

        Args:
            threads: None: one for each processor, at most 8.
            progress: called with (pages that have memory, pages) after each chunk.

        Raises:
            NoSpace: see `grow`.
        """
        workers = threads or min(8, os.cpu_count() or 1)
        step = max(1, workers * CHUNK_BYTES // self.page_bytes)
        have = self.grown
        while have < self.pages:
            have = self.grow(step, threads=workers)
            if progress:
                progress(have, self.pages)

    # ---- close

    def check_closable(self, besides: object = None) -> None:
        """Raise InUse if views exist, other than those lent under `besides`."""
        users = list(self._users.items())
        if any(user() is not None for token, user in users if token is not besides):
            raise InUse(
                f"close the pool of {self._index.name!r}: views of it are still in use; drop the "
                "arrays and tensors made of it first"
            )

    def close(self) -> None:
        """Unmap. A second call does nothing.

        Raises:
            InUse: views exist.
        """
        if self._fork_word.inherited:  # forked: nothing is mapped, and the fd is the parent's
            return
        self.check_closable()
        shm_native.quick().lcs_life_close(ctypes.byref(self._fd))
        self._unmap()


class Grower:
    """A background thread that grows a pool to its full size, then ends.

    If there is no memory it reports that once in the log and to all processes (`no_memory`), so
    that calls evict. It retries until the pool has its full size or is closed.
    """

    def __init__(self, pool: HostPool) -> None:
        """Starts the thread."""
        self._stop = Event()
        self._pool = pool
        self._told = False
        self.error: LightcacheError | None = None
        """Why the pool does not grow at present; pages that have memory can be used. None: no
        problem."""
        self._thread = threading.Thread(target=self._run, name="lightcache-grow", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        delay = 0.0
        try:
            while not self._stop.wait(delay) and (wait := self._step(delay)) is not None:
                delay = wait
        except Detached:
            pass  # closed, or removed
        except LightcacheError as error:
            self.error = error
            _log.warning("%s: the pool grows no more: %s", self._pool.name, error)

    def _step(self, waited: float) -> float | None:
        """Grow by a chunk. Returns the seconds to wait before the next; None: full size."""
        pool = self._pool
        marked = pool.no_memory_s
        if marked > 0 and not waited:
            return marked  # another process has just tried
        try:
            done = pool.grow_some()
        except LockTimeout:
            return 0.0  # another thread is growing it, or a thread was stopped
        except NoSpace as error:
            return self._failed(error, waited)
        if self.error is not None:
            _log.info("%s: the pool grows again", pool.name)
            self.error, self._told = None, False
        return None if done else 0.0

    def _failed(self, error: NoSpace, waited: float) -> float:
        delay = min(MAX_RETRY, max(RETRY, 2 * waited))
        self._pool.say_no_memory(delay)
        self.error = error
        if not self._told:
            self._told = True
            _log.warning(
                "%s: %s; calls evict instead, and it is tried again every %g s at most",
                self._pool.name,
                error,
                MAX_RETRY,
            )
        return delay

    def stop(self) -> None:
        """End after the current chunk, and wait for the thread."""
        self._stop.set()
        self._thread.join()


__all__ = [
    "Grower",
    "HostPool",
    "Numa",
    "PoolObject",
    "advised_node",
    "check_numa",
    "check_object",
    "look",
    "make_object",
    "node_of_pci",
    "nodes_of_gpus",
    "opened",
    "parse_numa",
    "pci_address",
    "pool_name",
    "room_of",
]
