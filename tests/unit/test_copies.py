"""Copies between addresses: what is taken together, and the way through torch alone."""

import numpy as np
import pytest
import torch

from lightcache.kernels.rows import HostCopier, TorchCopier, cut_at_borders, merged
from lightcache.shm.errors import TransferFailed


def lists(*copies, groups=()):
    targets, sources, sizes = (np.array(column, np.int64) for column in zip(*copies, strict=True))
    found = merged(targets, sources, sizes, *(np.array(group) for group in groups))
    return [column.tolist() for column in found]


def test_what_touches_on_both_sides_is_one():
    found = lists((100, 500, 10), (110, 510, 5), (115, 515, 1), (200, 516, 4))
    assert found == [[100, 200], [500, 516], [16, 4], [0, 3]]


@pytest.mark.parametrize(
    "second", [(110, 511, 5), (111, 510, 5), (100, 500, 10)], ids=["source", "target", "again"]
)
def test_what_touches_on_one_side_stays_apart(second):
    assert lists((100, 500, 10), second)[2] == [10, second[2]]


@pytest.mark.parametrize("groups", [[[3, 3, 4]], [[3, 3, 4], [1, 1, 1]], [[0, 0, 0], [7, 7, 1]]])
def test_groups_are_not_joined(groups):
    found = lists((100, 500, 10), (110, 510, 10), (120, 520, 10), groups=groups)
    assert found == [[100, 120], [500, 520], [20, 10], [0, 2]]


@pytest.mark.parametrize("copies", [[], [(1, 2, 3)]], ids=["none", "one"])
def test_few(copies):
    empty = np.zeros(0, np.int64)
    if copies:
        assert lists(*copies) == [[1], [2], [3], [0]]
    else:
        assert all(not len(column) for column in merged(empty, empty, empty))


@pytest.mark.parametrize("unit", [1, 7, 16, 1000])
def test_borders(unit):
    """Every byte goes where it went, and no copy crosses a border or can be longer."""
    rng = np.random.default_rng(unit)
    sizes = rng.integers(1, 60, 20)
    targets = np.cumsum(sizes) - sizes + np.repeat([3, 50], 10)
    sources = rng.permutation(20) * 100
    found, came, lengths, owner = cut_at_borders(targets, sources, sizes, unit)
    pairs = [
        [(to + i, at + i) for to, at, size in zip(*copies, strict=True) for i in range(size)]
        for copies in ((targets, sources, sizes), (found, came, lengths))
    ]
    assert pairs[0] == pairs[1]
    assert (found // unit == (found + lengths - 1) // unit).all()
    begins = np.isin(found, targets)
    assert (begins | (found % unit == 0)).all()
    assert owner.tolist() == (np.cumsum(begins) - 1).tolist()


@pytest.mark.parametrize("way", ["torch", "host"])
def test_bytes_arrive_and_nothing_else_changes(way):
    source = torch.arange(256, dtype=torch.uint8)
    target = torch.zeros(4, 16, dtype=torch.int32)
    copier = TorchCopier([source]) if way == "torch" else HostCopier()
    copier.add(target)
    at, to = source.data_ptr(), target.data_ptr()
    copier([to + 3, to + 100], [at + 7, at + 200], [5, 56], None)
    expected = np.zeros(256, np.uint8)
    expected[3:8], expected[100:156] = np.arange(7, 12), np.arange(200, 256)
    np.testing.assert_array_equal(target.view(torch.uint8).view(-1).numpy(), expected)


def test_memory_that_was_never_shown_is_refused():
    source, target = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    copier = TorchCopier([source])
    with pytest.raises(TransferFailed, match="no tensor holds the 4 bytes"):
        copier([target.data_ptr()], [source.data_ptr()], [4], None)
    copier.add(target)
    with pytest.raises(TransferFailed, match="no tensor holds the 4 bytes"):
        copier([target.data_ptr() + 61], [source.data_ptr()], [4], None)
