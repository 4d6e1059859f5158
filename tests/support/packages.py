"""The system packages that some tests need, and a test that says which are missing.

A fresh machine has Python and a C compiler: there these tests are skipped, with the command that
installs what they need. In CI they fail. `.ci/run` installs what this file prints as a program.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable

# program or library -> Debian's packages
PROGRAMS = {
    "make": "make",
    "gcc": "gcc libc6-dev",
    "cc": "gcc libc6-dev",
    "clang": "clang",
    "spin": "spin",
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "aarch64-linux-gnu-objdump": "binutils-aarch64-linux-gnu",
    "redis-server": "redis-server",
    "openssl": "openssl",
    "promtool": "prometheus",
    "systemd-analyze": "systemd",
}
# What Mooncake's programs and its client load.
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libcurl.so.4": "libcurl4",
    "libnuma.so.1": "libnuma1",
}


def missing(names: Iterable[str]) -> list[str]:
    """Those of these programs and libraries that this machine lacks."""
    return [name for name in names if not (_loads if name in LIBRARIES else shutil.which)(name)]


def install_command(names: Iterable[str]) -> str:
    """The command that installs the packages of these programs and libraries."""
    return f"apt-get install {' '.join(_packages(names))}"


def need(*names: str) -> None:
    """Skip the running test if a program or library is missing; in CI fail it."""
    lacking = missing(names)
    if lacking:
        skip_or_fail(f"missing: {', '.join(lacking)}; install: {install_command(lacking)}")


def skip_or_fail(reason: str) -> None:
    """Skip the running test; fail it in CI, where everything is installed."""
    import pytest

    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _packages(names: Iterable[str]) -> list[str]:
    packages = [name for each in names for name in (PROGRAMS | LIBRARIES)[each].split()]
    return list(dict.fromkeys(packages))


if __name__ == "__main__":
    print(*_packages(missing(PROGRAMS | LIBRARIES)))
