"""On which memory node a pool's memory should be: `numa=` of a cache.

A GPU's node comes from its PCI address. Asking torch for that loads the driver, so it is asked when
the pool is made or mapped and not before: by then the process is attached, and what a client's
death means for its device's copies depends on that order (docs/design.md, section 12).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightcache.errors import ConfigError
from lightcache.shm import _native

Numa = str | int | None
_GPU = re.compile(r"gpu:([0-9]{1,4})", re.ASCII)
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def check_numa(numa: Numa, nodes: Path = _NODES) -> Numa:
    """`numa` itself, if it can be meant.

    Raises:
        ConfigError: not None, "interleave", "gpu:N", or the number of a memory node there is.
    """
    if numa is None or numa == "interleave" or (isinstance(numa, str) and _GPU.fullmatch(numa)):
        return numa
    if type(numa) is int and numa >= 0 and ((nodes / f"node{numa}").exists() or numa == 0):
        return numa
    there = sorted(path.name for path in nodes.glob("node[0-9]*"))
    raise ConfigError(
        'numa: expected None, "interleave", "gpu:0" (or another number) for the node of that GPU, '
        f"or the number of one of the memory nodes {there or ['node0']}, found {numa!r}"
    )


def parse_numa(text: str | None) -> Numa:
    """As the command line has it.

    Raises:
        ConfigError: see `check_numa`.
    """
    return check_numa(int(text) if text and text.isdecimal() else text)


def advised_node(numa: Numa) -> int:
    """What the core's `lcs_advise` takes. With "gpu:N" this imports torch and loads the driver.

    Raises:
        ConfigError: there is no such GPU.
    """
    if numa is None:
        return _native.ANY_NODE
    if numa == "interleave":
        return _native.ALL_NODES
    if isinstance(numa, str):
        found = node_of_pci(pci_address(int(numa.removeprefix("gpu:"))))
        return _native.ANY_NODE if found is None else found
    return numa


def pci_address(gpu: int) -> str:
    """Of a GPU as torch numbers it, in the form of /sys: "0000:1b:00.0".

    Raises:
        ConfigError: no torch, or no such GPU.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError(f'numa="gpu:{gpu}": torch is not installed; give the node') from None
    count = torch.cuda.device_count()
    if gpu >= count:
        raise ConfigError(f'numa="gpu:{gpu}": torch finds {count} GPUs; give the node instead')
    found: Any = torch.cuda.get_device_properties(gpu)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        raise ConfigError(
            f'numa="gpu:{gpu}": torch {torch.__version__} does not say its address; give the node'
        ) from None


def node_of_pci(address: str, devices: Path = _PCI) -> int | None:
    """The memory node next to a device; None where the machine does not say, or has only one."""
    try:
        node = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


__all__ = ["Numa", "advised_node", "check_numa", "node_of_pci", "parse_numa", "pci_address"]
