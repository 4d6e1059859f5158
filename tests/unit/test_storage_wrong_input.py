"""What is typed wrong is refused before anything is made, by an error that says what to give."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disks import disk, home
from support.refusals import refused
from support.storing import KEYS, fill, make_cache, stored

from lightcache import Cache
from lightcache.errors import ConfigError, Detached, StorageError
from lightcache.storage import (
    MemoryStorage,
    Storage,
    StorageSpec,
    StorageTier,
    open_storage,
    register,
    urls,
)
from lightcache.storage.disk import DiskStorage
from lightcache.storage.service import StorageClient, StorageService
from lightcache.storage.testing import Fault, FlakyStorage, Rates
from lightcache.storage.testing.conformance import PAGE_BYTES, SPEC, pages_of
from lightcache.storage.urls import check_url

ANY: Any = None  # what a type would refuse is given all the same


@pytest.fixture(params=["memory", "disk", "flaky"])
def storage(request: pytest.FixtureRequest, where: Path) -> Any:
    """An empty one of each kind."""
    made: dict[str, Callable[[], Storage]] = {
        "memory": lambda: MemoryStorage(SPEC),
        "disk": lambda: disk(where),
        "flaky": lambda: FlakyStorage(MemoryStorage(SPEC)),
    }
    with made[request.param]() as storage:
        yield storage


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("buffers", "found"),
    [(None, "NoneType"), (5, "int"), ((page for page in ()), "generator")],
    ids=["None", "number", "generator"],
)
def test_buffers_that_are_no_list(storage: Storage, buffers: Any, found: str) -> None:
    for call in (storage.read, storage.write):
        with pytest.raises(ConfigError, match=f"buffers: expected a list of one .*found {found}"):
            call(KEYS[:2], buffers, timeout=1.0)


def test_strided_buffers(storage: Storage) -> None:
    strided = np.zeros(2 * PAGE_BYTES, np.uint8)[::2]
    refused(ConfigError, r"found .* not contiguous", storage.read, KEYS[:1], [strided], timeout=1.0)


@pytest.mark.parametrize(
    "parent",
    ["a", KEYS[0], KEYS[:2], KEYS[:0], KEYS[:1].astype(np.int64), KEYS[:1].tolist()],
    ids=["text", "row", "two", "none", "signed", "list"],
)
def test_parents_that_are_no_key(storage: Storage, parent: Any) -> None:
    with pytest.raises(ConfigError, match=r"parent: expected one key, .*\(1, 2\)"):
        storage.write(KEYS[:2], pages_of(KEYS[:2]), timeout=1.0, parent=parent)
    assert storage.stats().pages == 0


# ---------------------------------------------------------------- waiting for a task


@pytest.mark.timeout(60)
@pytest.mark.parametrize("timeout", [math.nan, "1", True, 10**400], ids=str)
def test_no_time_to_wait(cache: Cache, timeout: Any) -> None:
    hung = FlakyStorage(stored(cache, KEYS), script={"read": [Fault("hang")]})
    with hung, StorageTier(cache, hung) as tier:
        task = tier.prefetch(KEYS)
        assert hung.wait_hanging()
        refused(ConfigError, "timeout: expected seconds", task.wait, timeout)
        hung.let_go()
        assert task.wait(math.inf).loaded == len(KEYS)


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize("spec", [StorageSpec, "4096", {"page_bytes": 4096}], ids=str)
def test_a_spec_that_is_none(spec: Any) -> None:
    for url in ("memory:", "disk:/nowhere?capacity=1MiB"):
        with pytest.raises(ConfigError, match=r"spec: expected a StorageSpec.*StorageSpec\.of"):
            open_storage(url, spec=spec)


def test_a_cache_instead_of_its_spec(cache: Cache, where: Path) -> None:
    given: Any = cache
    refused(ConfigError, r"spec: expected a StorageSpec", open_storage, "memory:", spec=given)
    with pytest.raises(ConfigError, match=r"spec: expected a StorageSpec"):
        DiskStorage(where, given, capacity="1MiB")


@pytest.mark.parametrize("more", [{"fingerprint": None}, {"algorithm": b"xxh3"}], ids=str)
def test_a_spec_of_no_texts(more: Any) -> None:
    refused(ConfigError, f"{next(iter(more))}: expected a text", StorageSpec, 4096, **more)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten."""
    monkeypatch.setattr(urls, "_openers", dict(urls._openers))


@pytest.mark.usefixtures("registered")
def test_openers_that_are_none() -> None:
    refused(ConfigError, r"opener: expected a function of .* found 5", register, "mine", ANY or 5)
    with pytest.raises(ConfigError, match="scheme: expected a small letter"):
        register(ANY, lambda rest, spec: MemoryStorage(spec))
    assert "mine" not in urls.schemes()


@pytest.mark.usefixtures("registered")
def test_openers_that_fail(cache: Cache) -> None:
    def fails(rest: str, spec: StorageSpec) -> Storage:
        raise ZeroDivisionError("of another")

    register("nothing", lambda rest, spec: ANY)
    register("fails", fails)
    with pytest.raises(StorageError, match="'nothing' returned None, expected a Storage"):
        StorageTier.open(cache, "nothing:")
    with pytest.raises(StorageError, match=r"'fails' failed: Zero.*of another") as caught:
        open_storage("fails:", spec=SPEC)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.usefixtures("registered")
def test_checking_a_url_of_somebody_else_opens_nothing() -> None:
    opened: list[str] = []
    register("mine", lambda rest, spec: opened.append(rest) or MemoryStorage(spec))  # type: ignore[func-returns-value]
    check_url("mine://host")
    assert not opened
    for wrong in ("mime://host", "mine", "memory"):
        refused(ConfigError, "storage: expected a", check_url, wrong)


def test_a_path_instead_of_a_url() -> None:
    with pytest.raises(ConfigError, match=r"'disk:/mnt/nvme/cache\?capacity=1TiB'"):
        open_storage("/mnt/nvme/cache", spec=SPEC)


def test_memory_without_room_for_a_page() -> None:
    with pytest.raises(ConfigError, match=r"capacity: expected 4096 bytes or more.*found 4095"):
        open_storage("memory:?capacity=4095", page_bytes=4096)
    check_url("memory:?capacity=4095")  # of pages of a size that nobody has said
    with open_storage("memory:?capacity=4096", page_bytes=4096) as storage:
        assert storage.write(KEYS[:1], [bytes(4096)], timeout=1.0).prefix == 1


# ---------------------------------------------------------------- a disk


@pytest.mark.parametrize("path", [None, 5, b"/tmp/pages", "", "/tmp/a\0b"], ids=repr)
def test_no_folder(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: DiskStorage(path, SPEC, capacity="1MiB"), lambda: remove(path)):
        refused(ConfigError, "path: expected a folder", call)
    assert not list(tmp_path.iterdir())


def remove(path: Any) -> None:
    """The folder of our spec."""
    DiskStorage.remove(path, SPEC)


def test_a_home_that_nobody_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: open_storage("disk:~/x?capacity=1MiB", spec=SPEC), check_home):
        refused(ConfigError, r"'~/x': no shell .* write the folder out", call)
    assert not list(tmp_path.iterdir())
    disk(tmp_path / "~").close()  # who means it says so


def check_home() -> None:
    """As a command does before it attaches."""
    check_url("disk:~/x?capacity=1MiB")


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    refused(StorageError, r"File name too long.*give a folder", disk, tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    "how",
    [
        *({"retry": "1"}, {"retry": None}, {"retry": math.inf}),
        *({"timeout": "1"}, {"timeout": math.nan}, {"timeout": -1}, {"timeout": None}),
    ],
    ids=str,
)
def test_a_disk_with_no_seconds(where: Path, how: Any) -> None:
    refused(ConfigError, f"{next(iter(how))}: expected seconds", disk, where, **how)
    assert not where.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"files": 0}, {"files": 1001}, {"files": -1}, {"slots": 0}, {"slots": 10**12}),
        *({"page_bytes": 0}, {"epoch": -1}, {"index": -1}, {"rebuilt": 7}),
    ],
    ids=str,
)
def test_a_header_that_cannot_be_true(where: Path, wrong: dict[str, int]) -> None:
    disk(where).close()
    header = home(where) / "header.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), **wrong}))
    files = sorted(os.listdir(home(where)))
    refused(StorageError, r"header\.json is damaged; remove the folder", disk, where)
    assert sorted(os.listdir(home(where))) == files


# ---------------------------------------------------------------- a tier


def test_a_tier_of_no_cache() -> None:
    with pytest.raises(ConfigError, match="cache: expected a Cache, found None"):
        StorageTier(ANY, MemoryStorage(SPEC))
    refused(ConfigError, "cache: expected a Cache, found None", StorageTier.open, ANY, "memory:")
    refused(ConfigError, "cache: expected a Cache, found None", StorageSpec.of, ANY)
    for kind in (StorageClient, StorageService):
        with pytest.raises(ConfigError, match="cache: expected a Cache, found None"):
            kind(ANY, *[MemoryStorage(SPEC)] * (kind is StorageService))


def test_a_tier_of_a_closed_cache(segment_name: str) -> None:
    closed = make_cache(segment_name)
    storage = MemoryStorage(StorageSpec.of(closed))
    closed.close()
    refused(Detached, "", StorageTier, closed, storage)
    refused(Detached, "", StorageTier.open, closed, "memory:")


def test_a_lease_that_is_none(cache: Cache) -> None:
    fill(cache, KEYS)
    with StorageTier(cache, MemoryStorage(StorageSpec.of(cache))) as tier:
        refused(ConfigError, "lease: expected a Lease, found 5", tier.write, KEYS, lease=ANY or 5)
        assert tier.write(KEYS, tokens=320).wait(60.0).stored == len(KEYS)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, "1", None], ids=str)
def test_delays_without_an_end(seconds: Any) -> None:
    for call in (lambda: Fault("delay", seconds=seconds), lambda: Rates(delay=seconds)):
        refused(ConfigError, "expected finite seconds, 0 or more, found", call)


def test_faults_that_there_are_not() -> None:
    refused(ConfigError, "read_fail: expected 0 to 1, found True", Rates, read_fail=True)
    refused(ConfigError, "inner: expected a Storage, found None", FlakyStorage, ANY)
