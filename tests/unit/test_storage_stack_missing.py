"""Stacks of which one storage cannot be opened: by network, by what is installed, by its URL."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused
from support.servers import free_port

from lightcache import ConfigError, StorageError
from lightcache.storage import StorageSpec, open_storage, register, urls
from lightcache.storage.stacked import LevelStats, StackedStorage
from lightcache.storage.testing.conformance import SPEC
from lightcache.storage.urls import check_url

SKIP = "stack:?missing=skip|memory:|"
RAISE = "stack:memory:|"
PACKAGES = {
    "redis://127.0.0.1:1": "redis",
    "valkey://127.0.0.1:1": "redis",
    "rediss://127.0.0.1:1": "redis",
    "s3://bucket?endpoint=http://127.0.0.1:1": "obstore",
    "mooncake://127.0.0.1:1": "mooncake.store",
    "flaky:seed=1:redis://127.0.0.1:1": "redis",
}
ABSENT = [
    "redis://127.0.0.1:{port}",
    "s3://bucket?endpoint=http://127.0.0.1:{port}&retries=0",
    "mooncake://127.0.0.1:{port}",
    "flaky:seed=1:redis://127.0.0.1:{port}",
    "disk:/dev/null/pages?capacity=1MiB",
]
WRONG = [
    "redis://127.0.0.1:1?speed=9",
    "redis://127.0.0.1:1/none",
    "s3://bucket?region=eu west",
    "mooncake://127.0.0.1:1?threads=none",
    "disk:",
    "disk:/nowhere?capacity=much",
    "memory:?pages=none",
    "flaky:luck=1:memory:",
    "tape:",
]


def skipped(url: str, caplog: Any) -> str:
    """Opens a stack of this one and another; what was warned of it."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lightcache.storage"):
        check_url(SKIP + url)
        with open_storage(SKIP + url, spec=SPEC) as alone:
            assert isinstance(alone, StackedStorage)
            (level,) = alone.levels()
            assert isinstance(level, LevelStats)
            assert level.name == "storage 1 of 1, memory:"
    (warning,) = [record.getMessage() for record in caplog.records]
    scheme = url.partition(":")[0]
    assert warning.startswith(f"storage 2 of 2, {scheme}: cannot be opened and is left out: ")
    return str(warning)


@pytest.mark.parametrize("url", PACKAGES)
def test_whose_package_is_not_installed(
    url: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[url], None)
    monkeypatch.setattr("lightcache.storage.remote.mooncake.client._started_by", [])
    assert "not installed; pip install" in skipped(url, caplog)
    with pytest.raises(StorageError, match=r"storage 2 of 2, \w+: cannot be opened.*missing=skip"):
        open_storage(RAISE + url, spec=SPEC)


@pytest.mark.parametrize("url", ABSENT)
def test_whose_server_is_not_there(url: str, caplog: Any) -> None:
    url = url.format(port=free_port())
    skipped(url, caplog)
    with pytest.raises(StorageError, match=r"storage 2 of 2, \w+: cannot be opened.*missing=skip"):
        open_storage(RAISE + url, spec=SPEC)


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_is_never_skipped(url: str) -> None:
    for opening in (check_url, lambda url: open_storage(url, spec=SPEC)):
        for stack in (SKIP, RAISE):
            refused(ConfigError, "", opening, stack + url)


@pytest.fixture
def strange() -> Iterator[None]:
    """A scheme of somebody else's, whose opener raises what it likes."""

    def opener(rest: str, spec: StorageSpec) -> Any:
        raise {"import": ImportError("no module"), "config": ConfigError("no such tape")}[rest]

    register("strange", opener)
    yield
    del urls._openers["strange"]


@pytest.mark.usefixtures("strange")
def test_of_somebody_elses(caplog: Any) -> None:
    assert "ImportError('no module')" in skipped("strange:import", caplog)
    with pytest.raises(
        StorageError, match=r"strange: cannot be opened: .*ImportError\('no module'\)"
    ):
        open_storage(f"{RAISE}strange:import", spec=SPEC)
    refused(ConfigError, "no such tape", open_storage, f"{SKIP}strange:config", spec=SPEC)
    with pytest.raises(StorageError, match=r"none of 2 can be opened: .*ImportError"):
        open_storage("stack:?missing=skip|strange:import|strange:import", spec=SPEC)


def test_a_file_that_the_url_names_is_a_part_of_the_url(tmp_path: Path) -> None:
    for option in ("ca", "password_file"):
        url = f"rediss://127.0.0.1:1?{option}={tmp_path / 'none'}"
        refused(ConfigError, f"{option}: expected a file", open_storage, SKIP + url, spec=SPEC)
