"""numa=: what can be meant, and which node a GPU is next to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.refusals import refused

from lightcache import Cache, ConfigError, pool
from lightcache.shm import _native
from lightcache.shm.listing import read_segment

ARGUMENTS: dict[str, Any] = {
    "pages": 4,
    "page_bytes": 4096,
    "fingerprint": "f",
    "secret": b"a secret of tests",
}


@pytest.mark.parametrize("numa", [None, "interleave", 0, "gpu:0", "gpu:15"])
def test_what_can_be_meant(numa: pool.Numa) -> None:
    assert pool.check_numa(numa) == numa


def test_a_node_that_exists(tmp_path: Path) -> None:
    (tmp_path / "node3").mkdir()
    assert pool.check_numa(3, tmp_path) == 3
    refused(ConfigError, r"\['node3'\], found 2", pool.check_numa, 2, tmp_path)


def test_as_the_command_line_has_it() -> None:
    assert pool.parse_numa(None) is None
    assert pool.parse_numa("0") == 0
    assert pool.parse_numa("gpu:1") == "gpu:1"
    refused(ConfigError, "numa", pool.parse_numa, "-1")


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0", 0), ("-1\n", None), ("", None)])
def test_the_node_of_a_pci_device(tmp_path: Path, text: str, node: int | None) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
    assert pool.node_of_pci("0000:1b:00.0", tmp_path) == node
    assert pool.node_of_pci("0000:1c:00.0", tmp_path) is None


def test_the_nodes_of_gpus(tmp_path: Path) -> None:
    """Made-up devices: class, vendor, node. A board's own screen and a network card are none."""
    devices = {
        "0000:03:00.0": ("0x030000", "0x1a03", 2),
        "0000:17:00.0": ("0x020000", "0x15b3", 3),
        "0000:1b:00.0": ("0x030200", "0x10de", 0),
        "0000:5d:00.0": ("0x030200", "0x10de", 0),
        "0000:9b:00.0": ("0x038000", "0x1002", 1),
        "0000:c1:00.0": ("0x120000", "0x1da3", 4),
        "0000:c2:00.0": ("0x030200", "0x10de", -1),
    }
    for name, (kind, vendor, node) in devices.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in (("class", kind), ("vendor", vendor), ("numa_node", node)):
            (folder / file).write_text(f"{text}\n")
    (tmp_path / "0000:ff:00.0").mkdir()  # it says nothing
    assert pool.nodes_of_gpus(tmp_path) == {0, 1, 4}
    assert pool.nodes_of_gpus(tmp_path / "none") == set()


def test_the_address_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    found = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC4, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: found)
    assert pool.pci_address(1) == "0001:c4:03.0"
    refused(ConfigError, "finds 2 GPUs", pool.pci_address, 2)


def test_what_the_core_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.advised_node(None) == _native.ANY_NODE
    assert pool.advised_node("interleave") == _native.ALL_NODES
    assert pool.advised_node(5) == 5
    for node, told in ((None, _native.ANY_NODE), (2, 2)):
        monkeypatch.setattr(pool, "pci_address", lambda gpu: f"address of {gpu}")
        monkeypatch.setattr(pool, "node_of_pci", lambda address, node=node: node)
        assert pool.advised_node("gpu:3") == told


def test_a_gpu_that_is_not_there(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out while the pool is made: then nothing is left of it."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refused(ConfigError, "finds 0 GPUs", Cache.create, segment_name, **ARGUMENTS, numa="gpu:0")
    assert read_segment(segment_name) is None


def test_a_pool_on_a_node(segment_name: str) -> None:
    with Cache.create(segment_name, **ARGUMENTS, numa=0) as cache:
        cache.pool[3][:] = 1
        policy = (
            [
                line
                for line in Path("/proc/self/numa_maps").read_text().splitlines()
                if line.startswith(f"{cache.pool.array.ctypes.data:x} ")
            ]
            if Path("/proc/self/numa_maps").exists()
            else []
        )
        assert not policy or "prefer" in policy[0], policy
