"""On a kernel that lacks what newer ones have: a library before libc refuses the advice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.packages import need

PRELOAD = """
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

int madvise(void *at, size_t bytes, int advice) {
    if (advice == REFUSED) return errno = EINVAL, -1;
    return (int)syscall(SYS_madvise, at, bytes, advice);
}
"""
WIPEONFORK, POPULATE_WRITE = 18, 23  # Linux 4.14 and 5.14

GROW = """
import sys
from lightcache import Cache, LightcacheError

options = {"page_bytes": 65536, "page_tokens": 16, "fingerprint": "f"}
try:
    with Cache.create(sys.argv[1], size="4MiB", **options) as cache:
        cache.pool.prefault()
        print(cache.pool.grown == cache.pool.pages, int(cache.pool.array.sum()))
except LightcacheError as error:
    print(type(error).__name__, error)
"""


def on_a_kernel_without(advice: int, name: str, folder: Path) -> str:
    """What the program prints there."""
    need("cc")
    (folder / "preload.c").write_text(PRELOAD)
    library = folder / "preload.so"
    flags = ["-shared", "-fPIC", f"-DREFUSED={advice}"]
    subprocess.run(["cc", *flags, "-o", library, folder / "preload.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", GROW, name],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_before_5_14_a_pool_is_allocated_and_then_touched(
    segment_name: str, tmp_path: Path
) -> None:
    assert on_a_kernel_without(POPULATE_WRITE, segment_name, tmp_path) == "True 0"


def test_before_4_14_it_is_said_that_the_kernel_is_too_old(
    segment_name: str, tmp_path: Path
) -> None:
    said = on_a_kernel_without(WIPEONFORK, segment_name, tmp_path)
    assert said.startswith("ConfigError lightcache needs Linux 4.14 or later")
    assert f"found {os.uname().sysname} {os.uname().release}" in said
    assert "newer kernel" in said
    assert not list(Path("/dev/shm").glob(f"*{segment_name}*"))
