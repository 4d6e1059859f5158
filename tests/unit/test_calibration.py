"""Thresholds of transfers: stored whole or not at all, and chosen where the ways cross."""

import json

import pytest
from support.refusals import refused

from lightcache.kernels import calibration
from lightcache.kernels.options import DEFAULTS, Thresholds
from lightcache.shm.errors import ConfigError


def test_stored_and_read_again(tmp_path):
    path = tmp_path / "new" / "transfer.json"
    wanted = Thresholds(1, 2, 3, 4)
    calibration.write(path, wanted)
    assert calibration.read(path) == wanted
    assert [entry.name for entry in path.parent.iterdir()] == ["transfer.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"version": 1}', "\xff"])
def test_what_makes_no_sense_is_measured_anew(tmp_path, text):
    path = tmp_path / "transfer.json"
    path.write_text(text, encoding="latin-1")
    assert calibration.read(path) is None


@pytest.mark.parametrize(
    ("name", "value"), [("programs", 0), ("copy_bytes", "8"), ("version", 0), ("direct_page", None)]
)
def test_a_wrong_number_is_measured_anew(tmp_path, name, value):
    path = tmp_path / "transfer.json"
    calibration.write(path, DEFAULTS)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert calibration.read(path) is None


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({1: (9, 1), 2: (9, 1), 4: (1, 1), 8: (1, 2)}, 4),
        ({1: (1, 2), 2: (9, 1), 4: (1, 1), 8: (1, 2)}, 4),
        ({1: (1, 1), 2: (1, 1)}, 1),
        ({1: (9, 1), 2: (9, 1)}, 4),
    ],
    ids=["crossing", "noise below", "always", "never"],
)
def test_where_the_ways_cross(times, expected):
    named = {size: {"staged": new, "direct": old} for size, (new, old) in times.items()}
    assert calibration._first(named, "staged", "direct", 1.01) == expected


def test_no_such_device(tmp_path):
    refused(ConfigError, "HostEngine serves", calibration.stored, "cpu", tmp_path)
