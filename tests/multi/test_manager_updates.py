"""Row B14: matches, reserves and publishes of several threads and processes against an update.

After `begin_update` nothing of the old version is found, by anybody, in any tier; a neighbour with
another version keeps what it has."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from multi.update_side import PAGE, PAGES, TENANTS, Lived, prompt_of
from support.manager_case import open_cache
from support.stamped import stamps_of

from lightcache import Cache

TESTS = Path(__file__).parent.parent
ROUNDS = int(os.environ.get("LIGHTCACHE_MANAGER_UPDATES", "4"))
SEED = int(os.environ.get("LIGHTCACHE_TEST_SEED", "0"))


@contextmanager
def side(name: str, rank: int, version: str) -> Iterator[Any]:
    """A process that lives at random."""
    process = subprocess.Popen(
        [sys.executable, "-m", "multi.update_side", name, str(rank), version, str(SEED + rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hear_requests(process: Any, more: int) -> None:
    """Until it has had so many more."""
    begin = None
    for line in process.stdout:
        begin = int(line) if begin is None else begin
        if int(line) >= begin + more:
            return
    pytest.fail("a side ended; its output says why")


def tell(process: Any) -> list[str]:
    """The end of its life: what it says of it."""
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("lived"):
            found: list[str] = line.split()
            return found
    pytest.fail("a side ended; its output says why")


def found_of(cache: Cache, version: str, wanted: int) -> int:
    """Pages that anybody can match under a version; all of them must have its stamps."""
    looked = 0
    for space in cache.index.namespaces():
        if space.weights != version:
            continue
        spec = cache.key_spec(namespace=space)
        for number in range(8):
            prompt = prompt_of(number, space.tenant)
            stamps = stamps_of(prompt.tokens, wanted)
            with cache.match(prompt.keys(spec), namespace=space) as lease:
                for i, page in enumerate(lease.pages.tolist()):
                    found = np.frombuffer(bytes(memoryview(cache.pool[page])), np.uint64)
                    assert (found == stamps[i * PAGE : (i + 1) * PAGE]).all()
                looked += len(lease)
    return looked


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("own", [0, 2], ids=["others", "own threads too"])
def test_b14_nothing_old_is_found_behind_begin_update(
    segment_name: str, own: int, wait_until: Any
) -> None:
    for number in range(ROUNDS):
        name = f"{segment_name}.{number}"
        with ExitStack() as stack:
            cache = stack.enter_context(open_cache(name, PAGES, PAGE))
            ours = Lived(name, 9, "1", SEED)
            sides = [stack.enter_context(side(name, rank, "1")) for rank in range(2)]
            neighbour = stack.enter_context(side(name, 5, "5"))
            for process in (*sides, neighbour):
                hear_requests(process, 20 * (number + 1))
            wait_until(lambda cache=cache: found_of(cache, "1", 1) > 0, "pages of the old version")
            threads = [Thread(target=ours.live, args=(i,)) for i in range(own)]
            for thread in threads:
                thread.start()
            ours.request("x", random.Random(number))
            ours.manager.begin_update()
            # At once, and as long as the others go on, whatever they were about to publish.
            for _ in range(5):
                assert found_of(cache, "1", 1) == 0
                for process in sides:
                    hear_requests(process, 10)
            wait_until(lambda cache=cache: found_of(cache, "5", 5) > 0, "pages of the neighbour's")
            ours.over.set()
            for thread in threads:
                thread.join()
            assert not ours.wrong
            for process in sides:
                tell(process)
            hear_requests(neighbour, 200)  # of 248 prompts: some come again
            assert int(tell(neighbour)[2]) > 0
            assert found_of(cache, "1", 1) == 0
            assert not [each for each in cache.index.namespaces() if each.weights == "1"]
            # Served again under the same name: what is found now is of the new weights alone.
            ours.manager.finish_update("1")
            ours.version = "11"
            new = [prompt_of(seed, tenant) for seed in range(8) for tenant in TENANTS]
            for i, prompt in enumerate(new):
                assert ours.manager.plan(i, prompt).found == 0
                ours.manager.cancel(i)
            for process in (*sides, neighbour):
                process.stdin.write("\n")
                process.stdin.flush()
                process.stdin.close()
                assert process.wait() == 0
                process.stdin = None
            ours.close()
            cache.reap()
            report = cache.check()
            assert report.clean, report.message
            assert report.pins == 0
