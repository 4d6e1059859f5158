"""The benchmark of disks: small, with a fio that is none, and without one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refused

from lightcache import StorageError
from lightcache_bench import _baseline, _fio, storage

MIB = 1 << 20
JOB = {
    "usr_cpu": 30.0,
    "sys_cpu": 70.0,
    "job_runtime": 4000,
    "write": {"bw_bytes": 2_000_000_000},
    "read": {"bw_bytes": 3_000_000_000},
}


@pytest.fixture
def folder(where: Path) -> Iterator[Path]:
    """Of disks; nothing of theirs is left in it."""
    where.mkdir()
    yield where
    assert not list(where.iterdir())


def with_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A program of that name; what it was called with."""
    folder.mkdir()
    program, told = folder / "fio", folder / "told"
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return told


def measure(folder: Path) -> dict[str, Any]:
    """Rows of pages of 64 KiB."""
    return {row.name: row for row in storage._rates(folder, 1 << 16, MIB, True)}


def test_against_fio(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = f"echo a note; echo '{json.dumps({'jobs': [JOB]})}'"
    told = with_fio(tmp_path / "bin", monkeypatch, output)
    rows = measure(folder)
    assert rows["write"].params["fio"] == 2.0
    assert rows["read"].params["fio"] == 3.0
    assert rows["read"].ratio == pytest.approx(rows["read"].value / 3.0)
    assert rows["read"].met is (rows["read"].ratio >= 0.9)
    # four seconds of work, all of it processor time, for a megabyte
    cpu = rows["write: processor time"]
    assert cpu.params["fio"] == pytest.approx(4 / (MIB / 1e9), rel=1e-3)
    first = told.read_text().splitlines()[0].split()
    assert {"--rw=write", "--bs=65536", "--size=131072", "--numjobs=8"} <= set(first)


def test_without_fio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fio, "missing", lambda: True)
    rows = measure(folder)
    assert set(rows) == {"write", "write: processor time", "read", "read: processor time"}
    for row in rows.values():
        assert row.baseline is None
        assert row.params["baseline"] == "fio is not installed"
        assert row.value > 0


def test_fio_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_fio(tmp_path / "bin", monkeypatch, "echo no such engine >&2; exit 1")
    refused(StorageError, "no such engine", _fio.run, folder, "read", 4096, MIB, 2, True)


def test_lookups_and_the_index(folder: Path) -> None:
    row = storage._contains(folder, True)
    assert row.params["keys"] == 2_000
    assert row.value > 0 < row.params["bare_us"]
    row = storage._rebuild(folder, 100)
    assert row.params["slots"] == 100
    assert storage._checksum(True).value > 0


def test_lookups_where_there_is_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise _baseline.Unavailable("no C compiler here")

    monkeypatch.setattr(_baseline, "Probe", missing)
    assert "bare_us" not in storage._contains(folder, True).params
