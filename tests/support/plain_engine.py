"""An engine that is nothing but the definitions of cells and planes, in the host engine's place."""

from __future__ import annotations

import ctypes
import importlib.machinery
import itertools
import sys
import types
from typing import Any

import numpy as np
import pytest


class Over:
    """A transfer that is over."""

    nbytes = 0

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        pass


class PlainEngine:
    """Moves one row at a time, straight from the definitions of cells and planes."""

    broken: str | None = None
    """The direction in which a row is left out."""

    def __init__(
        self, geometry: Any, planes: Any, memory: Any, *, share: Any, **options: Any
    ) -> None:
        self.geometry, self.planes, self.memory, self.share = geometry, planes, memory, share

    def offload(self, move: Any) -> Over:
        return self._move("offload", move)

    def load(self, move: Any) -> Over:
        return self._move("load", move)

    def _move(self, direction: str, move: Any) -> Over:
        tokens = self.geometry.page_tokens
        pages = np.asarray(move.pages).reshape(-1, self.geometry.parts)
        for number, cell in enumerate(self.share.cells):
            plane = self.planes.find(self.geometry, cell)
            if number == 1 and self.broken == direction:
                continue
            size = cell.heads * cell.plane.row_bytes
            # A rank of a shape that is divided holds one head, so that its own begins at 0.
            for (i, page), unit in itertools.product(enumerate(pages), range(cell.units)):
                slot = int(move.slots[i * tokens + unit])
                there = plane.address + slot * plane.unit_stride
                device, at = as_array(there, size), cell.offset + unit * cell.unit_stride
                while len(device):
                    part, inside = divmod(at, self.geometry.part_bytes)
                    host = self.memory.array[page[part], inside : inside + len(device)]
                    count = len(host)
                    ends = host, device[:count]
                    to, source = ends if direction == "offload" else ends[::-1]
                    to[:] = source
                    device, at = device[count:], at + count
        return Over()

    def poll(self) -> int:
        return 0

    def close(self) -> None:
        pass


def as_array(address: int, size: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def install(monkeypatch: pytest.MonkeyPatch) -> type[PlainEngine]:
    """Let `lightcache.kernels.host_engine` offer it; returns the class that is offered."""

    class Engine(PlainEngine):
        pass

    module = types.ModuleType("lightcache.kernels.host_engine")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    module.HostEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Engine


@pytest.fixture
def plain_engine(monkeypatch: pytest.MonkeyPatch) -> type[PlainEngine]:
    return install(monkeypatch)
