"""The demo says before it begins that /dev/shm is missing, too small, or not for this user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightcache.errors import ConfigError
from lightcache.shm import memory
from lightcache.shm.names import FOLDER
from lightcache.tools import doctor
from lightcache.tools.demo.machine import BESIDE_POOL, preflight

MIB = 1 << 20


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 MiB, as Docker gives them."""
    found = memory.FreeMemory(64 * MIB, f"free in {FOLDER}")
    monkeypatch.setattr(memory, "available", lambda: found)


@pytest.mark.usefixtures("room")
def test_the_pool_and_what_is_beside_it_must_fit() -> None:
    assert BESIDE_POOL == 16 * MIB
    preflight(48 * MIB)
    with pytest.raises(ConfigError) as caught:
        preflight(48 * MIB + 1)
    said = str(caught.value)
    assert f"({64 * MIB + 1} bytes)" in said
    assert f"({64 * MIB} bytes)" in said
    assert "docker run --shm-size=65m" in said
    assert "\n" not in said


def test_a_memory_limit_has_another_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = memory.FreeMemory(5 * MIB, "left in the memory limit of /sys/fs/cgroup/a")
    monkeypatch.setattr(memory, "available", lambda: found)
    with pytest.raises(
        ConfigError, match=r"5\.0 MiB .*limit of /sys/fs/cgroup/a; .*--memory"
    ) as it:
        preflight(MIB)
    assert "--shm-size" not in str(it.value)


def test_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "FOLDER", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"none: missing .*mount a tmpfs"):
        preflight(MIB)


def test_a_folder_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"/dev/shm: not writable .*1777"):
        preflight(MIB)


@pytest.mark.parametrize("size", [0, -1, True, None, 1.5])
def test_a_size_that_is_none(size: int) -> None:
    with pytest.raises(ConfigError, match="pool"):
        preflight(size)
