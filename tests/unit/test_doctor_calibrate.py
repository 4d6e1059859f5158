"""`lightcache doctor --calibrate`, on the processor: what it prints, and the file it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lightcache.costs import Costs
from lightcache.kernels import calibration
from lightcache.tools import cli, doctor
from lightcache.tools.doctor import fitted


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BATCHES", (1, 2, 4))


def run(*arguments: object, status: int = 0) -> Any:
    done = CliRunner().invoke(cli.group, ["doctor", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done


def test_it_writes_what_costs_reads(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    options = ("--calibrate", "--device", "cpu", "--page-bytes", "16KiB", "--out", path)
    found = json.loads(run(*options, "--json").stdout)
    assert found == json.loads(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == ["costs.json"]
    assert (found["device"], found["page_bytes"]) == ("cpu", 16384)
    assert [batch["pages"] for batch in found["batches"]] == [1, 2, 4]
    assert all(batch["load_s"] > 0 and batch["offload_s"] > 0 for batch in found["batches"])
    assert found["load_bytes_per_s"] > 0
    assert found["offload_bytes_per_s"] > 0
    assert found["per_load_overhead_s"] >= 0
    made = Costs.load(path, prefill_tokens_per_s=10, page_tokens=64)
    assert made.page_bytes == 16384
    assert made.load_bytes_per_s == found["load_bytes_per_s"]


def test_each_direction_has_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {pages: (2.0 * pages, 0.5 + pages) for pages in (1, 2, 4)}
    monkeypatch.setattr(doctor, "_on_host", lambda *_: ("cpu", took))
    found = doctor.calibrated("1KiB", "cpu", None, None)
    assert found["load_bytes_per_s"] == pytest.approx(1024)
    assert found["offload_bytes_per_s"] == pytest.approx(512)
    assert found["per_load_overhead_s"] == pytest.approx(0.5)
    assert found["batches"][1] == {"pages": 2, "load_s": 2.5, "offload_s": 4.0}


def test_people_read_where_it_pays() -> None:
    options = ("--calibrate", "--device", "cpu", "--page-bytes", "16KiB", "--page-tokens", 64)
    assert "worth loading" not in run(*options).stdout
    slow = run(*options, "--prefill", "0.001").stdout
    assert "worth loading" in slow
    assert "page(s) on" in slow
    assert "never" in run(*options, "--prefill", "1e18").stdout


def test_what_the_file_was_told(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    options = ("--calibrate", "--device", "cpu", "--page-bytes", 512)
    run(*options, "--page-tokens", 64, "--prefill", 50, "--out", path)
    assert Costs.load(path).prefill_tokens_per_s == 50


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--calibrate", "--page-bytes", "100"), "multiple of 512"),
        (("--calibrate", "--page-bytes", "1000"), "multiple of 512"),
        (("--calibrate", "--page-bytes", "many"), "page_bytes"),
        (("--calibrate", "--device", "abacus"), "abacus"),
        (("--calibrate", "--pin", "x"), "give one"),
        (("--out", "x"), "--out needs --calibrate"),
        (("--device", "cpu"), "--device needs --calibrate"),
        (("--page-tokens", "16"), "--page-tokens needs --calibrate"),
        (("--prefill", "50"), "--prefill needs --calibrate"),
    ],
)
def test_what_makes_no_sense(options: tuple[str, ...], says: str) -> None:
    done = run(*options, status=2)
    assert says in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize("name", ["none/x", "."])
def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Which is said before anything is measured."""
    monkeypatch.setattr(doctor, "calibrated", lambda *options: pytest.fail("measured"))
    path = tmp_path / name
    done = run("--calibrate", "--device", "cpu", "--out", path, status=2)
    assert f"--out: expected a file that can be written, found '{path}'" in done.stderr


@pytest.mark.parametrize(
    ("points", "rate", "overhead"),
    [
        ([(100, 1.5), (200, 2.5), (400, 4.5)], 100, 0.5),
        ([(100, 1.0), (200, 2.0)], 100, 0),
        ([(100, 5.0), (200, 4.0)], 50, 0),  # falls: noise
        ([(100, 0.5), (200, 2.0)], 100, 0),  # cuts the axis below 0
    ],
)
def test_a_line_through_the_points(
    points: list[tuple[int, float]], rate: float, overhead: float
) -> None:
    assert fitted(points) == (pytest.approx(rate), pytest.approx(overhead, abs=1e-9))


def test_a_long_transfer_says_little_of_the_overhead() -> None:
    rate, overhead = fitted([(100, 1.5), (200, 2.5), (400, 4.5), (10_000, 150.5)])
    assert overhead > 0
    assert rate > 66


def test_the_sides_of_the_measurement_move_every_byte() -> None:
    shape = calibration.plane_shape(1024, 4)
    pool = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    before = pool.copy()
    memory = np.zeros((4, 1024), np.uint8)
    planes = calibration.planes_at([one.ctypes.data for one in pool], shape, "cpu", pool)
    geometry = calibration.page_geometry(1024)
    engine = doctor.HostEngine(geometry, planes, doctor.HostPages(memory))
    with engine:
        move = doctor.Move(np.arange(4), np.arange(shape[1])[::-1])
        engine.offload(move).wait()
        assert sorted(memory.ravel()) == sorted(before.ravel())
        pool[:] = 0
        engine.load(move).wait()
        assert (pool == before).all()
