"""What `doctor` says of versions, the C core, a compiler, and devices. Imports no torch."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from lightcache import layout as index_native
from lightcache.errors import LightcacheError
from lightcache.shm import _native as shm_native
from lightcache.shm import layout
from lightcache.tools.findings import Finding, error, ok, warning

_NEEDED = ("numpy", "xxhash", "posix_ipc", "click", "rich")
# package: (extra, what it is for)
_WELCOME = {
    "torch": ("kernels", "tensors and device transfers"),
    "triton": ("kernels", "device kernels"),
    "transformers": ("transformers", "models of Hugging Face transformers"),
    "prometheus_client": ("metrics", "figures for Prometheus"),
    "redis": ("redis", "storages redis: and valkey:"),
    "obstore": ("s3", "storages s3:"),
    "mooncake": ("mooncake", "storages mooncake:"),
}
_PACKAGES = {"mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")}
"""Those that a name stands for, where it is none."""
_PATIENCE = 10.0  # seconds: a driver that hangs must not hang us


def versions() -> list[Finding]:
    """Python and packages, by their metadata."""
    found = [ok("Python", f"{platform.python_version()} ({platform.python_implementation()})")]
    for package in ("lightcache", *_NEEDED):
        version = _version(package)
        if version is None:
            found.append(error(package, "not installed", f"pip install {package}"))
        else:
            found.append(ok(package, version))
    for package, (extra, use) in _WELCOME.items():
        known = filter(None, map(_version, _PACKAGES.get(package, (package,))))
        absent = f"not installed (only for {use}); pip install 'lightcache[{extra}]'"
        found.append(ok(package, next(known, absent)))
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def core() -> list[Finding]:
    """The two C libraries, and whether they are of this version."""
    found = []
    for name, load in (("C core, shm", shm_native.load), ("C core, index", index_native.load)):
        try:
            library = load()
        except LightcacheError as problem:
            found.append(error(name, "not usable", str(problem)))
        else:
            found.append(ok(name, f"layout {layout.ABI} as declared, {library.path}"))
    return found


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
            remedy = "make the driver's tools visible here (nvidia-smi), to see that it works"
            return [warning("GPU", f"{len(nodes)} device nodes, no nvidia-smi", remedy)]
        return [ok("GPU", "none (host caches need none)")]
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = [line for line in _output(query).splitlines() if line.strip()]
    if not listed:
        remedy = "nvidia-smi lists none: look at its own message, at the driver and the container"
        return [warning("GPU", f"{len(nodes)} device nodes, none that answers", remedy)]
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


PROBES: tuple[Callable[[], list[Finding]], ...] = (versions, core, compiler, devices)
