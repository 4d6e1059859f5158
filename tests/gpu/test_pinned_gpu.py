"""Registering pools with a real driver: copies both ways, two processes, again and again."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import refused

from lightcache import Cache, NotReady, TransferFailed
from lightcache.kernels.pinned import PinnedPages
from lightcache.pool import CHUNK_BYTES

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DEADLINE = 60.0
SECRET = b"a secret of tests"
ARGUMENTS: dict[str, Any] = {"pages": 16, "page_bytes": MIB, "fingerprint": "f", "secret": SECRET}


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    return torch


def random_bytes(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def copied_both_ways(torch: Any, pinned: PinnedPages, seed: int) -> None:
    """Random bytes go to the device and back through all pages that are ready, without blocking.
    Page by page: a copy across two registrations is refused, and pages lie in one."""
    pages = range(pinned.ready)
    host = torch.from_numpy(pinned.array)
    data = random_bytes((len(pages), pinned.page_bytes), seed)
    source = torch.from_numpy(data).to("cuda")
    for page in pages:
        host[page].copy_(source[page], non_blocking=True)  # offload
    torch.cuda.synchronize()
    wrong = np.flatnonzero((pinned.array[: len(pages)] != data).any(axis=1))
    assert not wrong.size, f"pages {wrong[:10]} came from the device with other bytes"
    target = torch.full_like(source, 0xAA)
    for page in pages:
        target[page].copy_(host[page], non_blocking=True)  # load
    torch.cuda.synchronize()
    wrong = np.flatnonzero((target != source).any(dim=1).cpu().numpy())
    assert not wrong.size, f"pages {wrong[:10]} went to the device with other bytes"


def driver_is_well(torch: Any) -> None:
    """No refusal of an earlier call is pending in this thread."""
    assert (torch.ones(4, device="cuda") + 1).sum().item() == 8


def test_pages_can_be_copied(torch: Any, segment_name: str) -> None:
    with Cache.create(segment_name, **ARGUMENTS, device=True) as cache:
        assert not cache.pool.tensor().is_pinned()
        pinned = cache.pin(device="cuda:0", chunk_bytes=4 * MIB)
        pinned.wait(timeout=DEADLINE)
        assert pinned.check(range(16)).tolist() == list(range(16))  # type: ignore[arg-type]
        assert torch.from_numpy(pinned.array).is_pinned()
        copied_both_ways(torch, pinned, 1)
        took = pinned.statistics
        assert took.nbytes == 16 * MIB, took
        assert 0 < took.first_seconds <= took.seconds, took
        print(took)


@pytest.mark.parametrize("page_bytes", [4096, 5000, 73728, 3 * MIB + 4096])
def test_pages_of_any_size(torch: Any, segment_name: str, page_bytes: int) -> None:
    pages = 40 * MIB // page_bytes
    with Cache.create(segment_name, **{**ARGUMENTS, "pages": pages, "page_bytes": page_bytes}) as c:
        pinned = c.pin(chunk_bytes=MIB, threads=3)
        pinned.wait(timeout=DEADLINE)
        copied_both_ways(torch, pinned, page_bytes)


def test_closed_and_pinned_again(torch: Any, segment_name: str) -> None:
    with Cache.create(segment_name, **ARGUMENTS) as cache:
        for seed in range(3):
            pinned = cache.pin(chunk_bytes=4 * MIB)
            pinned.wait(timeout=DEADLINE)
            copied_both_ways(torch, pinned, seed)
            pinned.close()
            assert not cache.pool.tensor().is_pinned()
    with Cache.create(segment_name, **ARGUMENTS) as cache:
        pinned = cache.pin()
        pinned.wait(timeout=DEADLINE)
        copied_both_ways(torch, pinned, 9)
    assert pinned.closed, "the cache closed it"
    driver_is_well(torch)


def test_the_first_pages_before_the_rest(torch: Any, segment_name: str) -> None:
    """One thread, held up behind its first piece: its pages can be used, the others are refused."""
    go_on = threading.Event()

    def hold_up(done: int, pages: int) -> None:
        assert go_on.wait(DEADLINE), f"forgotten at {done} of {pages} pages"

    with Cache.create(segment_name, **{**ARGUMENTS, "pages": 256}) as cache:
        cache.pool.prefault()
        pinned = cache.pin(threads=1, progress=hold_up)
        try:
            pinned.wait([0], DEADLINE)
            ready = pinned.ready
            assert 0 < ready < 256
            copied_both_ways(torch, pinned, 3)
            refused(NotReady, f"{ready} of 256 pages", pinned.check, [0, ready])
        finally:
            go_on.set()
        pinned.wait(timeout=DEADLINE)
        copied_both_ways(torch, pinned, 4)


def test_it_follows_the_growth(torch: Any, segment_name: str) -> None:
    big = {**ARGUMENTS, "page_bytes": CHUNK_BYTES // 4, "pages": 10, "grow": False}
    with Cache.create(segment_name, **big) as cache:
        pinned = cache.pin()
        pinned.wait([3], DEADLINE)
        assert pinned.ready == 4
        copied_both_ways(torch, pinned, 5)
        assert cache.pool.grow(3) == 7
        pinned.wait([6], DEADLINE)
        assert pinned.ready == 7
        copied_both_ways(torch, pinned, 6)
        pinned.close()
        pinned = cache.pin(grow_threads=2)
        pinned.wait(timeout=DEADLINE)
        copied_both_ways(torch, pinned, 7)


def test_registered_already(torch: Any, segment_name: str) -> None:
    """The driver refuses it, says so, and neither this thread nor the first one suffers."""
    with Cache.create(segment_name, **ARGUMENTS) as cache:
        pinned = cache.pin()
        pinned.wait(timeout=DEADLINE)
        second = PinnedPages(cache.pool.lend(object()))
        refused(TransferFailed, r"code 712.*registered already", second.wait, timeout=DEADLINE)
        second.close()
        driver_is_well(torch)
        copied_both_ways(torch, pinned, 8)


def test_a_pool_in_a_folder_near_the_gpu(torch: Any, segment_name: str) -> None:
    folder = Path("/dev/shm") / f"folder-of-{segment_name}"
    folder.mkdir()
    try:
        with Cache.create(segment_name, **ARGUMENTS, pool_path=folder, numa="gpu:0") as cache:
            pinned = cache.pin()
            pinned.wait(timeout=DEADLINE)
            copied_both_ways(torch, pinned, 10)
    finally:
        folder.rmdir()


def test_doctor_measures_it(torch: Any, segment_name: str) -> None:
    from lightcache.tools.doctor import pinning

    with Cache.create(segment_name, **ARGUMENTS) as cache:
        (found,) = pinning(segment_name, quiet=True)
        assert found.level.value == "ok", found
        print(found.found)
        assert len(cache.clients()) == 1


# ---------------------------------------------------------------- two processes

RANK = """
import sys
import numpy as np
from lightcache import Cache

name, rank = sys.argv[1], int(sys.argv[2])
cache = Cache.attach(name, secret=b"a secret of tests", device=True, grow=False)
import torch
pinned = cache.pin(chunk_bytes=2 << 20, threads=2)
pinned.wait(timeout=60)
host = torch.from_numpy(pinned.array)
assert host.is_pinned()

def pattern(page):
    return torch.arange(host.shape[1], device="cuda").add_(page * 7).remainder_(251).to(torch.uint8)

for page in range(rank, len(host), 2):
    host[page].copy_(pattern(page), non_blocking=True)
torch.cuda.synchronize()
print("written", flush=True)
assert sys.stdin.readline() == "read\\n"
target = torch.full(host.shape, 0xAA, dtype=torch.uint8, device="cuda")
for page in range(len(host)):
    target[page].copy_(host[page], non_blocking=True)
torch.cuda.synchronize()
wrong = [page for page in range(len(host)) if not torch.equal(target[page], pattern(page))]
assert not wrong, f"rank {rank} read other bytes in pages {wrong}"
del host
cache.close()
assert pinned.closed
print("done", flush=True)
"""


def line(process: subprocess.Popen[str], said: Any) -> str:
    """The next line that it says, within the deadline; else what it complained of."""
    assert process.stdout
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        assert ready.select(DEADLINE), f"process {process.pid} said nothing for {DEADLINE} s"
    found = process.stdout.readline()
    if not found:
        process.wait(DEADLINE)
        said.seek(0)
        return f"ended with {process.returncode}: {said.read()}"
    return found


def test_two_processes_register_one_pool(torch: Any, segment_name: str, tmp_path: Path) -> None:
    """At once; each writes its pages from its device, and reads the other's into it."""
    with Cache.create(segment_name, **ARGUMENTS) as cache, contextlib.ExitStack() as stack:
        pinned = cache.pin(chunk_bytes=3 * MIB)
        ranks = []
        for rank in range(2):
            said = stack.enter_context((tmp_path / f"rank{rank}").open("w+"))
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, segment_name, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
            stack.callback(end, process)
            ranks.append((process, said))
        assert [line(*rank) for rank in ranks] == ["written\n"] * 2
        pinned.wait(timeout=DEADLINE)
        check_pattern(torch, pinned)
        for process, _ in ranks:
            assert process.stdin
            process.stdin.write("read\n")
            process.stdin.flush()
        assert [line(*rank) for rank in ranks] == ["done\n"] * 2
        assert [process.wait(DEADLINE) for process, _ in ranks] == [0, 0]


def check_pattern(torch: Any, pinned: PinnedPages) -> None:
    """What both ranks have written, as a third process's device sees it."""
    expected = (np.arange(MIB)[None] + 7 * np.arange(16)[:, None]) % 251
    for page in range(16):
        found = torch.from_numpy(pinned.array[page]).to("cuda", non_blocking=True)
        wrong = np.flatnonzero(found.cpu().numpy() != expected[page])
        assert not wrong.size, f"page {page} differs from byte {wrong[0]} on"


def end(process: subprocess.Popen[str]) -> None:
    """However far it is."""
    process.kill()
    process.communicate()
