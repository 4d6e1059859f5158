"""The pool of a cache, pinned over a driver that writes down its calls: no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_driver import FakeDriver
from support.raising import raised
from support.refusals import refused

from lightcache import Cache, ConfigError, Detached, InUse, NotReady, PermissionDenied
from lightcache.pool import CHUNK_BYTES

DEADLINE = 60.0
ARGUMENTS: dict[str, Any] = {
    "pages": 8,
    "page_bytes": 8192,
    "fingerprint": "f",
    "secret": b"a secret of tests",
}
Wait = Callable[[Callable[[], bool], str], None]


def test_the_pool_of_a_cache(segment_name: str) -> None:
    driver = FakeDriver()
    cache = Cache.create(segment_name, **ARGUMENTS)
    pinned = cache.pin(driver=driver)
    pinned.wait(timeout=DEADLINE)
    assert driver.registered() == [(cache.pool.array.ctypes.data, cache.pool.nbytes)]
    pinned.array[3] = 9
    assert (cache.pool[3] == 9).all()
    refused(InUse, "pinned already", cache.pin, driver=driver)
    pinned.close()
    again = cache.pin(driver=driver)
    again.wait(timeout=DEADLINE)
    cache.close()
    assert again.closed
    assert driver.registered() == []


def test_handles_of_one_client_pin_once(segment_name: str) -> None:
    driver = FakeDriver()
    first = Cache.open(segment_name, **ARGUMENTS, shared=True)
    pinned = first.pin(driver=driver)
    second = Cache.attach(segment_name, shared=True)
    assert second.pin(driver=driver) is pinned
    first.close()
    pinned.wait(timeout=DEADLINE)
    second.close()
    assert pinned.closed


def test_closing_order(segment_name: str) -> None:
    driver = FakeDriver()
    cache = Cache.create(segment_name, **ARGUMENTS)
    pinned = cache.pin(driver=driver)
    pinned.wait(timeout=DEADLINE)
    view = cache.pool[0]
    refused(InUse, "views", cache.close)
    assert driver.registered(), "somebody else's view: nothing was changed"
    del view
    pinned.acquire()
    refused(InUse, "engines", cache.close)
    assert pinned.check([0]).tolist() == [0]
    pinned.release()
    view = pinned.array
    refused(InUse, "views", cache.close)
    assert driver.registered() == []
    assert cache.stats().grown == 8, "the cache is still there"
    del view
    cache.close()


def test_it_follows_the_growth(segment_name: str, wait_until: Wait) -> None:
    driver = FakeDriver()
    big = {**ARGUMENTS, "page_bytes": CHUNK_BYTES // 4, "grow": False}
    with Cache.create(segment_name, **big) as cache:
        pinned = cache.pin(driver=driver)
        pinned.wait([3], DEADLINE)
        assert isinstance(raised(lambda: pinned.check([4])), NotReady)
        with Cache.attach(segment_name, secret=b"a secret of tests", grow=False) as other:
            other.pool.grow(2)
        pinned.wait([5], DEADLINE)
        pinned.close()
        cache.pin(driver=driver, grow_threads=2).wait(timeout=DEADLINE)
        assert cache.pool.grown == 8


def test_who_may_not_pin(segment_name: str) -> None:
    with Cache.create(segment_name, **ARGUMENTS) as cache:
        refused(ConfigError, "grow_threads", cache.pin, driver=FakeDriver(), grow_threads=-1)
        with Cache.attach(segment_name, readonly=True) as reader:
            refused(PermissionDenied, "pin the pool", reader.pin, driver=FakeDriver())
    for closed in (cache, reader):
        refused(Detached, "", closed.pin, driver=FakeDriver())


def test_a_cache_that_is_replaced_under_it(segment_name: str) -> None:
    from lightcache.shm import Segment

    driver = FakeDriver()
    cache = Cache.create(
        segment_name, **{**ARGUMENTS, "page_bytes": CHUNK_BYTES // 4, "grow": False}
    )
    pinned = cache.pin(driver=driver)
    pinned.wait([0], DEADLINE)
    Segment.unlink(segment_name, force=True)
    assert isinstance(raised(lambda: pinned.wait(timeout=DEADLINE)), Detached)
    cache.close()
    assert driver.registered() == []


def test_a_cache_without_a_gpu_never_loads_a_driver(script: Any, segment_name: str) -> None:
    done = script(
        "import sys\n"
        "from lightcache import Cache\n"
        "import lightcache.kernels.pinned\n"
        "cache = Cache.create(sys.argv[1], pages=4, page_bytes=4096, fingerprint='f',\n"
        "                     secret=b'a secret of tests', numa='interleave')\n"
        "cache.pool[0][:] = 1\n"
        "keys = cache.hash_pages(list(range(64)), page_tokens=16)\n"
        "with cache.reserve(keys) as new:\n"
        "    new.publish()\n"
        "cache.close()\n"
        "loaded = [name for name in ('torch', 'triton', 'cuda') if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        "maps = open('/proc/self/maps').read()\n"
        "found = [lib for lib in ('libcuda', 'libnvidia', 'libhip', 'libtorch') if lib in maps]\n"
        "assert not found, found\n"
        "print('none')\n",
        segment_name,
    )
    assert done.stdout == "none\n"


# ---------------------------------------------------------------- tools


def test_doctor_measures_pinning(segment_name: str) -> None:
    from lightcache.tools.doctor import Level, pinning

    driver = FakeDriver()
    with Cache.create(segment_name, **ARGUMENTS) as cache:
        (found,) = pinning(segment_name, driver=driver)
        assert found.level is Level.OK
        assert "64.0 KiB" in found.found
        assert driver.registered() == []
        (found,) = pinning(segment_name, driver=FakeDriver(refuse_at=0))
        assert found.level is Level.ERROR
        assert "chunk_bytes" in found.remedy
        assert len(cache.clients()) == 1


def test_doctor_does_not_wait_for_memory(segment_name: str) -> None:
    from lightcache.tools.doctor import pinning

    big = {**ARGUMENTS, "page_bytes": CHUNK_BYTES // 4, "grow": False}
    with Cache.create(segment_name, **big):
        (found,) = pinning(segment_name, driver=FakeDriver())
        assert "4 of 8 pages" in found.found


@pytest.mark.parametrize("device", ["cpu", "nonsense", 99, "cuda:99"])
def test_devices_that_are_none(segment_name: str, device: Any) -> None:
    pytest.importorskip("torch")
    with Cache.create(segment_name, **ARGUMENTS) as cache:
        refused(ConfigError, "", cache.pin, device=device)


@pytest.mark.slow
def test_doctor_pin_as_a_command(segment_name: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU; tests/gpu measures it")
    with Cache.create(segment_name, **ARGUMENTS):
        done = subprocess.run(
            [Path(sys.executable).parent / "lightcache", "doctor", "--pin", segment_name],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    assert done.returncode == 1, done
    assert "could not be pinned" in done.stdout
    assert "needs a GPU" in done.stdout
