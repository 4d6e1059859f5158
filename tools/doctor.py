"""`lightcache doctor`: checks this machine, and recommends changes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import platform
import pwd
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from lightcache import layout as index_native
from lightcache._arguments import format_size, parse_size
from lightcache.cache import Cache
from lightcache.costs import Costs
from lightcache.errors import ConfigError, LightcacheError
from lightcache.kernels import Move
from lightcache.kernels.calibration import page_geometry, plane_shape, planes_at
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.pinned import HostPages
from lightcache.shm import _native as shm_native
from lightcache.shm import layout, memory
from lightcache.shm.listing import list_segments
from lightcache.shm.names import FOLDER
from lightcache.tools.image import guest
from lightcache.tools.output import (
    BROKEN,
    OK,
    Command,
    bar,
    cell,
    check_writable,
    console,
    emit,
    json_option,
    lines,
    table,
)

if TYPE_CHECKING:
    from lightcache.kernels.pinned import Driver


# ---- Findings


class Level(str, Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check. A finding that is not ok has a remedy."""

    name: str
    level: Level
    found: str
    remedy: str = ""


Probe = Callable[[], list[Finding]]


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Level.OK, found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """It works, less well than it could."""
    return Finding(name, Level.WARNING, found, remedy)


def error(name: str, found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(name, Level.ERROR, found, remedy)


def text(path: str | Path) -> str:
    """The content of a file of /proc or /sys, stripped; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


# ---- The kernel, and this process's namespaces


_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23


def kernel() -> list[Finding]:
    """Machine and kernel."""
    machine, release = platform.machine(), platform.release()
    summary = f"{platform.system()} {release}, {machine}"
    if platform.system() != "Linux":
        return [error("kernel", summary, "lightcache needs Linux: its life locks are the kernel's")]
    if machine not in ("x86_64", "aarch64"):
        return [warning("kernel", summary, "tested on x86_64 and aarch64 only: run the tests here")]
    return [ok("kernel", summary)]


def namespaces() -> list[Finding]:
    """The PID namespace, and whether /proc shows it."""
    try:
        seen = os.readlink("/proc/self")
        inode = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        remedy = "mount -t proc proc /proc: without it a death is noticed later, never missed"
        return [warning("PID namespace", "/proc is not mounted", remedy)]
    if seen != str(os.getpid()):
        remedy = "mount -t proc proc /proc inside the namespace, to notice deaths sooner"
        return [warning("PID namespace", f"{inode}, and /proc shows another one", remedy)]
    hidden = "hidepid" in next(
        (line for line in text("/proc/mounts").splitlines() if line.split()[1:2] == ["/proc"]), ""
    )
    if hidden:
        remedy = "where clients run as several users, mount /proc without hidepid"
        return [warning("PID namespace", f"{inode}; /proc hides other users' processes", remedy)]
    return [ok("PID namespace", f"{inode}, /proc shows it")]


def byte_locks() -> list[Finding]:
    """Open-file-description locks, which show that a client lives."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return [error("OFD locks", "this Python lacks them", "use CPython for Linux")]
    fd = os.memfd_create("lightcache-doctor")
    try:
        # struct flock: type, whence, start, length, pid
        wanted = _Flock(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, bytes(wanted))
    except OSError as problem:
        remedy = "the kernel must offer them (Linux 3.15); a sandbox may forbid them"
        return [error("OFD locks", f"refused ({problem.strerror})", remedy)]
    finally:
        os.close(fd)
    return [ok("OFD locks", "work")]


class _Flock(ctypes.Structure):
    _fields_ = [
        ("l_type", ctypes.c_short),
        ("l_whence", ctypes.c_short),
        ("l_start", ctypes.c_int64),
        ("l_len", ctypes.c_int64),
        ("l_pid", ctypes.c_int),
    ]


def pidfd() -> list[Finding]:
    """pidfd, which shows the end of a dead client's device copies."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        remedy = "with Linux 5.3 quarantine of device pages ends as soon as the process is gone"
        return [warning("pidfd", "not available", remedy)]
    return [ok("pidfd", "works")]


def advice() -> list[Finding]:
    """Kinds of madvise in use."""
    lines = []
    if _advised(_MADV_WIPEONFORK):
        lines.append(ok("WIPEONFORK", "works"))
    else:
        remedy = "needs Linux 4.14: without it a forked child cannot be told from its parent"
        lines.append(error("WIPEONFORK", "refused", remedy))
    if _advised(_MADV_POPULATE_WRITE):
        lines.append(ok("POPULATE_WRITE", "works"))
    else:
        remedy = "with Linux 5.14 a pool gets its memory in fewer system calls"
        lines.append(warning("POPULATE_WRITE", "refused", remedy))
    return lines


def _advised(kind: int) -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError, ValueError):
            memory.madvise(kind)
            return True
    return False


SYSTEM_PROBES: tuple[Probe, ...] = (kernel, namespaces, byte_locks, pidfd, advice)


# ---- Shared memory, its limits, and kinds of pages


_SMALL = 1 << 30  # containers come with 64 MiB of /dev/shm unless told otherwise


def shared_memory() -> list[Finding]:
    """Size of /dev/shm, and its free space."""
    name = str(FOLDER)
    try:
        status = os.statvfs(FOLDER)
    except OSError as problem:
        remedy = "mount a tmpfs there: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        return [error(name, f"missing ({problem.strerror})", remedy)]
    if not os.access(FOLDER, os.W_OK | os.X_OK):
        return [error(name, "not writable for this user", "make its mode 1777")]
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    summary = f"{format_size(size)}, {format_size(free)} free"
    if _kind_of(FOLDER) not in ("tmpfs", ""):
        summary += f", a {_kind_of(FOLDER)}"
        return [warning(name, summary, "mount a tmpfs there: anything else writes to a disk")]
    remedy = "mount -o remount,size=... /dev/shm; in a container: --shm-size, or an emptyDir"
    if size < _SMALL:
        return [warning(name, summary, f"too small for a pool: {remedy}")]
    if free < size // 20:
        return [warning(name, summary, f"nearly full: `lightcache ls`, and `rm`; {remedy}")]
    return [ok(name, summary)]


def _kind_of(folder: Path) -> str:
    kind = ""
    for line in text("/proc/mounts").splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[1] == str(folder):
            kind = fields[2]  # the last mount is the visible one
    return kind


def cgroup() -> list[Finding]:
    """The lowest memory limit of our cgroups: beyond it the kernel kills."""
    rooms = memory.cgroup_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    if not rooms:
        return [ok("cgroup memory", "no visible limit")]
    room = min(rooms, key=lambda room: room.bytes)
    summary = f"{format_size(room.bytes)} {room.limit}"
    status = os.statvfs(FOLDER) if FOLDER.exists() else None
    if status and room.bytes < status.f_bavail * status.f_frsize:
        remedy = "pages of /dev/shm count against it: raise it above the size of your pools"
        return [warning("cgroup memory", f"{summary}, less than is free in {FOLDER}", remedy)]
    return [ok("cgroup memory", summary)]


def leftovers() -> list[Finding]:
    """Segments with a problem: they only take memory."""
    segments = list_segments()
    bad = [info.name for info in segments if info.problem and info.problem != "being created"]
    if bad:
        shown = ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
        return [warning("segments", f"{len(bad)} of {len(segments)} need a look: {shown}", _LEFT)]
    return [ok("segments", f"{len(segments)}, all in order" if segments else "none")]


_LEFT = "`lightcache ls` shows the problem; `lightcache sweep` removes unused segments"


_FIRST_USER = 1000
"""The least number of a user who is no system user, unless the machine's makers changed it."""


def logout(root: Path = Path("/"), user: int | None = None) -> list[Finding]:
    """Whether logind empties /dev/shm of this user's objects when the last session ends.

    Args:
        root, user: of another machine, and its user; this one's by default.
    """
    user = os.getuid() if user is None else user
    if user < _FIRST_USER or not (root / "run/systemd/system").is_dir():
        return [ok("logout", "caches stay")]
    with contextlib.suppress(KeyError):
        if (root / "var/lib/systemd/linger" / pwd.getpwuid(user).pw_name).exists():
            return [ok("logout", "caches stay, as this user lingers")]
    files = [root / "etc/systemd/logind.conf"]
    folders = [root / top / "systemd/logind.conf.d" for top in ("usr/lib", "run", "etc")]
    drop_ins = (each for folder in folders for each in folder.glob("*.conf"))
    files += sorted(drop_ins, key=lambda path: path.name)
    said = [word for file in files for word in re.findall(r"(?m)^RemoveIPC=(\w+)", text(file))]
    if said and said[-1].lower() in ("no", "false", "off", "0"):
        return [ok("logout", "caches stay: RemoveIPC=no")]
    remedy = (
        "run engines as a system user, or set RemoveIPC=no in /etc/systemd/logind.conf, or "
        "loginctl enable-linger"
    )
    return [warning("logout", "logind removes this user's caches at the last logout", remedy)]


def memlock() -> list[Finding]:
    """The limit on locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [ok("locked memory", "unlimited")]
    remedy = "for pools that an RDMA device registers: ulimit -l unlimited, LimitMEMLOCK=infinity"
    return [warning("locked memory", f"at most {format_size(soft)}", remedy)]


def huge_pages() -> list[Finding]:
    """Transparent huge pages of shared memory, and reserved ones."""
    setting = text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = setting.partition("[")[2].partition("]")[0]
    if not chosen:
        first = ok("huge pages", "this kernel has none for shared memory")
    elif chosen in ("never", "deny"):
        path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
        remedy = f"for --huge-pages: echo advise > {path}"
        first = warning("huge pages", f"a pool gets none ({chosen})", remedy)
    else:
        first = ok("huge pages", f"a pool gets transparent ones ({chosen})")
    return [first, ok("hugetlb", _hugetlb())]


def _hugetlb() -> str:
    wanted = ("HugePages_Total", "HugePages_Free", "Hugepagesize")
    lines = (line.partition(":") for line in text("/proc/meminfo").splitlines())
    values = {name: value.strip() for name, _, value in lines if name in wanted}
    if values.get("HugePages_Total", "0") == "0":
        return "none reserved (none are needed)"
    return (
        f"{values['HugePages_Total']} reserved of {values['Hugepagesize']}; --pool-path uses them"
    )


def numa() -> list[Finding]:
    """Memory nodes."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    if nodes == 1:
        return [ok("memory nodes", "1")]
    choice = "--numa interleave, --numa gpu:0, or one cache for each node"
    return [ok("memory nodes", f"{nodes}: consider {choice}")]


MEMORY_PROBES: tuple[Probe, ...] = (
    shared_memory,
    cgroup,
    leftovers,
    logout,
    memlock,
    huge_pages,
    numa,
)


# ---- Versions, the C core, a compiler, and devices. Imports no torch.


_NEEDED = ("numpy", "xxhash", "posix_ipc", "click", "rich")
# package: (extra, use)
_OPTIONAL = {
    "torch": ("kernels", "tensors and device transfers"),
    "triton": ("kernels", "device kernels"),
    "transformers": ("transformers", "models of Hugging Face transformers"),
    "prometheus_client": ("metrics", "metrics for Prometheus"),
    "redis": ("redis", "storages redis: and valkey:"),
    "obstore": ("s3", "storages s3:"),
    "mooncake": ("mooncake", "storages mooncake:"),
}
_PACKAGES = {"mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")}
"""Packages of a name that is not a package itself."""
_PATIENCE = 10.0  # seconds: a driver that hangs must not hang us


def versions() -> list[Finding]:
    """Python and packages, by their metadata."""
    results = [ok("Python", f"{platform.python_version()} ({platform.python_implementation()})")]
    for package in ("lightcache", *_NEEDED):
        version = _version(package)
        if version is None:
            results.append(error(package, "not installed", f"pip install {package}"))
        else:
            results.append(ok(package, version))
    for package, (extra, use) in _OPTIONAL.items():
        known = filter(None, map(_version, _PACKAGES.get(package, (package,))))
        absent = f"not installed (only for {use}); in a clone: pip install '.[{extra}]'"
        results.append(ok(package, next(known, absent)))
    return results


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def core() -> list[Finding]:
    """The two C libraries, and whether they fit this version."""
    results = []
    for name, load in (("C core, shm", shm_native.load), ("C core, index", index_native.load)):
        try:
            library = load()
        except LightcacheError as problem:
            results.append(error(name, "not usable", str(problem)))
        else:
            results.append(ok(name, f"layout {layout.ABI} as declared, {library.path}"))
    return results


def compiler() -> list[Finding]:
    """Needed to install from source, and by Triton."""
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return [ok("compiler", _first_line([path, "--version"]) or path)]
    remedy = "only to install from source and for Triton: apt-get install gcc, or the like"
    return [warning("compiler", "none", remedy)]


def devices() -> list[Finding]:
    """GPUs, as the driver's own tool lists them."""
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if nodes:
            remedy = "make the driver's tools visible here (nvidia-smi), to check that it works"
            return [warning("GPU", f"{len(nodes)} device nodes, no nvidia-smi", remedy)]
        return [ok("GPU", "none (host caches need none)")]
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = [line for line in _output(query).splitlines() if line.strip()]
    if not listed:
        remedy = "nvidia-smi lists none: check its own message, the driver and the container"
        return [warning("GPU", f"{len(nodes)} device nodes, none answers", remedy)]
    return [ok("GPU", line.strip()) for line in listed]


def _first_line(command: list[str]) -> str:
    return _output(command).partition("\n")[0]


def _output(command: list[str]) -> str:
    """Standard output; empty when it fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


SOFTWARE_PROBES: tuple[Probe, ...] = (versions, core, compiler, devices)


# ---- `lightcache doctor --pin NAME`: time to register a cache with the GPU driver


def pinning(name: str, *, quiet: bool = False, driver: Driver | None = None) -> list[Finding]:
    """Register all of an existing cache, as an engine's process does when it starts, and undo it.

    Raises:
        LightcacheError: there is no such cache, or this user may not attach.
    """
    with guest(name), Cache.attach(name, role="doctor", grow=False) as cache:
        pool = cache.pool
        if pool.grown < pool.pages:
            memory = f"{pool.grown} of {pool.pages} pages of {name} have memory"
            return [warning("pinning", memory, "wait until it has grown, and measure again")]
        try:
            with bar(f"pinning {name}", pool.pages, quiet=quiet) as progress:
                pinned = cache.pin(driver=driver, progress=progress)
                pinned.wait()
        except LightcacheError as problem:
            return [error("pinning", f"{name} could not be pinned", str(problem))]
        took = pinned.statistics
        summary = (
            f"{format_size(took.nbytes)} of {name} in {took.seconds:.3f} s "
            f"({took.nbytes / max(took.seconds, 1e-9) / 1e9:.1f} GB/s, {took.pieces} pieces), "
            f"first pages after {took.first_seconds * 1e3:.1f} ms"
        )
        return [ok("pinning", summary)]


# ---- `lightcache doctor --calibrate`: rate of loads, and overhead of each


BATCHES = (1, 2, 4, 8, 16, 32)
"""Pages of a transfer."""
_MOST = 256 << 20  # bytes of a transfer
_REPEATS = 7  # the fastest counts: other work of the machine only adds time

Measured = dict[str, Any]


def calibrated(
    page_bytes: str, device: str | None, page_tokens: int | None, prefill: float | None
) -> Measured:
    """Measure. Blocks for seconds; the device should be idle.

    Raises:
        ConfigError: an invalid size, or no multiple of 512 bytes; no such device.
    """
    size = parse_size(page_bytes, "page_bytes")
    plane_shape(size, 1)
    wanted = _first_device() if device is None else device
    batches = [pages for pages in BATCHES if pages <= 2 or pages * size <= _MOST]
    name, took = (_on_host if wanted == "cpu" else _on_gpu)(wanted, size, batches)
    load, overhead = fitted([(pages * size, seconds[1]) for pages, seconds in took.items()])
    offload, _ = fitted([(pages * size, seconds[0]) for pages, seconds in took.items()])
    known = {"page_tokens": page_tokens, "prefill_tokens_per_s": prefill}
    return {
        "load_bytes_per_s": load,
        "offload_bytes_per_s": offload,
        "per_load_overhead_s": overhead,
        "page_bytes": size,
        "device": name,
        "batches": [
            {"pages": pages, "load_s": seconds[1], "offload_s": seconds[0]}
            for pages, seconds in took.items()
        ],
        **{key: value for key, value in known.items() if value is not None},
    }


def fitted(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(bytes a second, overhead of each transfer in seconds) of points (bytes, seconds): a straight
    line, on which a point of twice the time has half the weight. If noise makes the slope or the
    overhead negative, the overhead is 0, and the rate is that of the largest transfer."""
    sizes, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    slope, overhead = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    if slope <= 0 or overhead < 0:
        return float(sizes[-1] / seconds[-1]), 0.0
    return float(1 / slope), float(overhead)


def _first_device() -> str:
    try:
        torch: Any = import_module("torch")
    except ImportError:
        return "cpu"
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _on_host(device: str, page_bytes: int, batches: list[int]) -> tuple[str, dict[int, Any]]:
    shape = plane_shape(page_bytes, batches[-1])
    pool = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    planes = planes_at([int(plane.ctypes.data) for plane in pool], shape, "cpu", pool)
    memory = HostPages(np.zeros((batches[-1], page_bytes), np.uint8))
    with HostEngine(page_geometry(page_bytes), planes, memory) as engine:
        return "cpu", _times(engine, batches, shape[1])


def _on_gpu(device: str, page_bytes: int, batches: list[int]) -> tuple[str, dict[int, Any]]:
    from lightcache.kernels.calibration import TransferRig
    from lightcache.kernels.device import CudaDevice

    gpu = CudaDevice(device)
    rig = TransferRig(gpu.name, page_bytes, batches[-1], contiguous=False)
    engines: Any = import_module("lightcache.kernels.engine")
    with engines.TransferEngine(rig.geometry, rig.planes, rig.memory) as engine:
        engine.warm()
        slots = plane_shape(page_bytes, batches[-1])[1]
        return gpu.model, _times(engine, batches, slots)


def _times(engine: Any, batches: list[int], slots: int) -> dict[int, tuple[float, float]]:
    """Seconds of (offloading, loading) so many pages in one transfer, to scattered slots."""
    order = np.random.default_rng(0).permutation(slots)
    times = {}
    for pages in batches:
        move = Move(np.arange(pages), order[: pages * slots // batches[-1]])
        times[pages] = (
            _fastest(lambda move=move: engine.offload(move).wait()),  # type: ignore[misc]
            _fastest(lambda move=move: engine.load(move).wait()),  # type: ignore[misc]
        )
    return times


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def show(measured: Measured, out: str | None, as_json: bool) -> None:
    """Print it, and write it to a file: whole, or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    if out is not None:
        path = Path(out)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(measured, indent=1) + "\n")
        draft.replace(path)
    if as_json:
        emit(measured)
        return
    screen = console()
    facts: list[tuple[str, object]] = [
        ("device", measured["device"]),
        ("page", f"{measured['page_bytes']} bytes"),
        ("load", f"{measured['load_bytes_per_s'] / 1e9:.2f} GB/s"),
        ("offload", f"{measured['offload_bytes_per_s'] / 1e9:.2f} GB/s"),
        ("each load", f"{measured['per_load_overhead_s'] * 1e6:.0f} us overhead"),
    ]
    if {"page_tokens", "prefill_tokens_per_s"} <= measured.keys():
        costs = Costs(**{name: measured[name] for name in Costs.__dataclass_fields__})
        least = costs.break_even_pages()
        facts.append(
            ("worth loading", "never" if least is None else f"from {max(least, 1)} page(s) on")
        )
    screen.print(lines("calibration", facts))
    rows = [
        (batch["pages"], batch["load_s"] * 1e3, batch["offload_s"] * 1e3)
        for batch in measured["batches"]
    ]
    screen.print(table("transfers", ("pages", "load ms", "offload ms"), rows))
    if out is not None:
        screen.print(cell(f"written to {out}"))


# ---- The command


_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


def examine() -> list[Finding]:
    """All findings, in the order of output."""
    probes = (*MEMORY_PROBES, *SYSTEM_PROBES, *SOFTWARE_PROBES)
    return [finding for probe in probes for finding in probe()]


@click.command(cls=Command)
@click.option("--pin", metavar="NAME", help="Only measure registering this cache with the GPU.")
@click.option("--calibrate", is_flag=True, help="Only measure how fast pages are loaded.")
@click.option("--page-bytes", metavar="SIZE", default="2MiB", help="For --calibrate (2MiB).")
@click.option("--device", help="For --calibrate: cuda:0, or cpu; the first GPU if there is one.")
@click.option("--page-tokens", type=int, metavar="N", help="For --calibrate: noted in the file.")
@click.option(
    "--prefill", type=float, metavar="N", help="For --calibrate: tokens computed a second."
)
@click.option("--out", metavar="FILE", help="For --calibrate: write it for lightcache.costs.")
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    as_json: bool,
    pin: str | None,
    calibrate: bool,
    page_bytes: str,
    device: str | None,
    page_tokens: int | None,
    prefill: float | None,
    out: str | None,
) -> None:
    """Examine this machine: memory, limits, kernel, versions, devices.

    Each line is ok, a warning, or an error with the remedy. Exit status 1 if there is an error.
    """
    if calibrate:
        if pin is not None:
            raise ConfigError("doctor: --pin and --calibrate measure different things; give one")
        if out is not None:
            check_writable("--out", out)
        measured = calibrated(page_bytes, device, page_tokens, prefill)
        show(measured, out, as_json)
        return
    for option, value in (
        ("--out", out),
        ("--device", device),
        ("--page-tokens", page_tokens),
        ("--prefill", prefill),
    ):
        if value is not None:
            raise ConfigError(f"doctor: {option} needs --calibrate; give both")
    results = examine() if pin is None else pinning(pin, quiet=as_json)
    if as_json:
        emit([asdict(finding) for finding in results])
    else:
        screen = console()
        for finding in results:
            line = cell(f"{finding.level.value:<8}", _STYLES[finding.level])
            line += cell(f"{finding.name:<18} {finding.found}")
            screen.print(line, soft_wrap=True)
            if finding.remedy:
                screen.print(cell(f"{'':8}{'':18} -> {finding.remedy}"), soft_wrap=True)
    ctx.exit(BROKEN if any(finding.level is Level.ERROR for finding in results) else OK)


__all__ = ["BATCHES", "calibrated", "fitted", "show"]
