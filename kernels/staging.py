"""Buffers of the transfer engine: the staging ring, and index buffers that are used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_FIRST_WORDS = 1 << 13  # 64 KiB: 1 GiB in pages of 8 MiB needs half of it


class Ring:
    """Slots of device memory through which pages pass, one after the other, in order."""

    def __init__(self, device: Any, slots: int, slot_bytes: int) -> None:
        """Allocates at once."""
        self.slots, self.slot_bytes = slots, slot_bytes
        self.memory: torch.Tensor = device.empty(slots * slot_bytes)
        self.address = int(self.memory.data_ptr())
        self.ready = [device.event() for _ in range(slots)]
        """Recorded when a slot has been filled."""
        self.free = [device.event() for _ in range(slots)]
        """Recorded when a slot has been emptied. Waiting before the first time waits for nothing:
        that is what an event means that was never recorded."""
        self._next = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next slots, in turn. Whoever fills one waits for `free` first."""
        slots = (self._next + np.arange(count)) % self.slots
        self._next = (self._next + count) % self.slots
        return slots


class IndexBlock:
    """One pair of buffers: jobs and slots of a transfer, in pinned memory and on the device."""

    def __init__(self, device: Any, words: int) -> None:
        """Allocates at once."""
        self.words = words
        self.host, self.device = device.words(words)
        self.view: npt.NDArray[np.int64] = self.host.numpy()
        self.slots = self.view.view(np.int32)
        self.host_address = int(self.host.data_ptr())
        self.device_address = int(self.device.data_ptr())


class IndexBlocks:
    """Blocks that are not in use, by size. Steady state allocates nothing."""

    def __init__(self, device: Any, copier: Any) -> None:
        """Nothing is allocated yet."""
        self._device = device
        self._copier = copier
        self._spare: dict[int, list[IndexBlock]] = {}
        self.made = 0
        """Blocks there are in all."""

    def take(self, words: int) -> IndexBlock:
        """A block of at least so many words."""
        size = max(_FIRST_WORDS, 1 << (words - 1).bit_length())
        spare = self._spare.setdefault(size, [])
        if spare:
            return spare.pop()
        block = IndexBlock(self._device, size)
        self._copier.add(block.host, block.device)
        self.made += 1
        return block

    def give(self, block: IndexBlock) -> None:
        """Give one back that no kernel reads any more."""
        self._spare.setdefault(block.words, []).append(block)

    def clear(self) -> None:
        """Let go of those that are not in use."""
        self._spare.clear()


class Events:
    """Events that are not in use."""

    def __init__(self, device: Any) -> None:
        """Nothing is made yet."""
        self._device = device
        self._spare: list[Any] = []
        self.made = 0
        """Events there are in all."""

    def recorded(self, stream: Any) -> Any:
        """An event, recorded on a stream."""
        if not self._spare:
            self._spare.append(self._device.event())
            self.made += 1
        event = self._spare[-1]
        event.record(stream)  # it stays spare if this fails
        return self._spare.pop()

    def give(self, events: list[Any]) -> None:
        """Give back events that nobody waits for any more."""
        self._spare += events
