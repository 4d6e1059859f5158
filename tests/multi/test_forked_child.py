"""A forked child of an attached process: whatever it does, and however it ends, the index notices
nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightcache import PageIndex

PARENT = """
import gc, os, signal, sys
import numpy as np
from lightcache import Detached, PageIndex

keys = np.arange(12, dtype=np.uint64).reshape(6, 2)
other = keys + np.uint64(1000)
how = sys.argv[2]
index = PageIndex.attach(sys.argv[1], role="parent")
with index.reserve(keys) as got:
    got.publish()
lease = index.match(keys)
writing = index.reserve(other)
pid = os.fork()
if pid == 0:
    if how == "use":
        for call in (lambda: index.match(keys), lambda: index.reserve(other), index.reap,
                     lambda: index.evict(3), lambda: writing.publish(), index.close,
                     lease.release, index.clear):
            try:
                call()
            except Detached:
                continue
            os._exit(3)
    if how == "collect":
        del lease, writing, index
        gc.collect()
    if how == "with":
        with index, lease, writing:
            pass
    if how == "exit":
        sys.exit(0)  # finalizers and all
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)
_, status = os.waitpid(pid, 0)
expected = signal.SIGKILL if how == "killed" else 0
print("child", status == expected, flush=True)
print("pins", index.check().pins, len(writing.pages), flush=True)
sys.stdin.readline()
print("published", writing.publish(), index.peek(other), index.peek(keys), flush=True)
writing.release()
lease.release()
print("pins", index.check().pins, flush=True)
index.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nothing", "use", "collect", "with", "exit", "killed"])
def test_a_forked_child_changes_nothing(how: str, segment_name: str, tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    keys = np.arange(12, dtype=np.uint64).reshape(6, 2)
    with PageIndex.create(segment_name, pages=16) as index:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", str(program), segment_name, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout
            assert process.stdout.readline() == "child True\n"
            assert process.stdout.readline() == "pins 12 6\n"
            assert index.reap() == 0
            assert index.evict(16) == 0, "a page that the parent pins was evicted"
            assert index.peek(keys) == 6
            out, _ = process.communicate("\n", timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert out == "published True 6 6\npins 0\n"
        assert process.returncode == 0
        assert index.evict(16) == 12
        index.check().raise_if_broken()
