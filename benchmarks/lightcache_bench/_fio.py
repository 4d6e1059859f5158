"""What fio does on a disk: the baseline of `storage`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from lightcache.errors import StorageError
from lightcache_bench._rates import Rate


def missing() -> bool:
    """Whether there is no fio here."""
    return shutil.which("fio") is None


def run(folder: Path, verb: str, block: int, nbytes: int, threads: int, direct: bool) -> Rate:
    """Read or write a file of so many bytes once, front to back, by threads that have a part each:
    one system call a block, as a disk of ours does. The file stays, for the next run.

    Args:
        verb: "read" or "write".
        block: bytes of a system call.

    Raises:
        StorageError: fio failed; it says why.
    """
    part = nbytes // threads // block * block
    command = [
        *("fio", "--name=lightcache", f"--filename={folder / 'fio'}", "--output-format=json"),
        *(f"--rw={verb}", f"--bs={block}", f"--size={part}", f"--offset_increment={part}"),
        *(f"--numjobs={threads}", "--thread", "--group_reporting", "--ioengine=psync"),
        *(f"--direct={int(direct)}", "--invalidate=0", "--fallocate=native"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StorageError(f"fio: {done.stderr.strip() or done.stdout.strip()}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    moved = part * threads / 1e9
    return Rate(job[verb]["bw_bytes"] / 1e9, busy / moved)


__all__ = ["missing", "run"]
