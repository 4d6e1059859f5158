"""Where an engine keeps its KV: base address and strides of each plane of each layer.

The engine's tensors stay as they are. `lightcache.kernels.layouts` describes the tensors of known
engines and, by the letters of its axes, any other tensor. Memory that is not in a tensor is
described plane by plane.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from lightcache.kernels.geometry import Cell, PageGeometry
from lightcache.kernels.groups import Plane, whole
from lightcache.shm.errors import ConfigError

# ---- Device names

_NAME = re.compile(r"([a-z][a-z0-9_]{0,30})(?::(0|[1-9][0-9]{0,3}))?", re.ASCII)
_OWN = ("cpu", "cuda")  # devices that our transfer engines serve


def device_name(device: object) -> str:
    """The canonical name of a device: "cpu", "cuda:0" with its number, or "npu:0" of another kind,
    which a transfer engine of yours serves. Does not block, and loads neither torch nor a driver.

    Args:
        device: "cpu", "cuda" or "cuda:0", a torch.device, or the number of a GPU. A device of
            another kind needs its number. A GPU without a number is this thread's current GPU, or
            GPU 0 if torch has not used any yet: asking torch then would make a context, which a
            process must not have before it is attached to a cache (docs/design/index.md, section
            12).

    Raises:
        ConfigError: not a device.
    """
    text = f"cuda:{device}" if type(device) is int else str(device)
    matched = _NAME.fullmatch(text)
    kind, number = (None, None) if matched is None else matched.groups()
    unnumbered = number is None and kind not in _OWN
    if kind in (None, "meta") or unnumbered or (kind == "cpu" and number not in (None, "0")):
        raise ConfigError(
            "device: expected 'cpu' or a GPU such as 'cuda:0', or a device of another kind with "
            f"its number, such as 'npu:0', found {device!r}"
        )
    if kind == "cpu":
        return "cpu"
    return f"{kind}:{_current() if number is None else number}"


def _current() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_device())


# ---- Planes of one rank.

_POSITIVE = ("address", "slots", "block_units")
"""Fields of a `DevicePlane` that cannot be 0."""


@dataclass(frozen=True)
class DevicePlane:
    """One plane of one layer, as one rank holds it.

    Byte `b` of row `r` of head `h` (the rank's own, from 0) of slot `s` is at
    `address + s // block_units * block_stride + s % block_units * unit_stride + h * head_stride
    + r * row_stride + b`. The engine numbers slots: a slot is a token, a unit of several tokens for
    opaque planes, or the state of a request.
    """

    address: int
    unit_stride: int
    """Bytes between neighbouring slots of a block."""
    slots: int
    """Slots there are: 0 to slots - 1."""
    block_units: int = 1
    """Slots of a block; 1 where all slots are evenly spaced."""
    block_stride: int = 0
    """Bytes between blocks; unused when evenly spaced."""
    head_stride: int = 0
    row_stride: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 1 if name in _POSITIVE else 0
            if type(value) is not int or value < least:  # one is made for each plane of a transfer
                whole(value, f"device plane: {name}", least)  # raises

    @property
    def spacing(self) -> tuple[int, int, int]:
        """(block_units, block_stride, unit_stride). Contiguous blocks are merged: then block_units
        is 1 and both strides are the distance between neighbouring slots."""
        if self.block_units == 1:  # a stride within blocks of one slot has no meaning
            step = self.block_stride or self.unit_stride
            return 1, step, step
        if self.block_stride == self.block_units * self.unit_stride:
            return 1, self.unit_stride, self.unit_stride
        return self.block_units, self.block_stride, self.unit_stride


class DevicePlanes:
    """All planes of one rank: made once for an engine, or for each transfer if tensors move."""

    def __init__(
        self,
        planes: Mapping[tuple[str, int, str], DevicePlane],
        *,
        device: str | int = "cpu",
        keep: Any = None,
    ) -> None:
        """Describe planes by (group name, layer number, plane name).

        Args:
            device: "cpu", "cuda:0" or "npu:0", as torch writes it, or the number of a GPU. "cuda"
                is the current GPU, or GPU 0 if torch has not used any yet.
            keep: owner of the memory; kept alive as long as this object.

        Raises:
            ConfigError: not a device name.
        """
        self.planes = dict(planes)
        self.device = device_name(device)
        """As `device_name` has it: "cpu", or "cuda:0" or "npu:0" with its number."""
        self.keep = keep

    def find(self, geometry: PageGeometry, cell: Cell) -> DevicePlane:
        """The plane that a cell of a page belongs to.

        Raises:
            ConfigError: the plane was not described.
        """
        name = geometry.groups[cell.group].name
        plane = self.planes.get((name, cell.layer, cell.plane.name))
        if plane is None:
            raise ConfigError(
                f"plane {cell.plane.name!r} of layer {cell.layer} of group {name!r} is not among "
                f"the {len(self.planes)} described planes; describe it, or leave its layer out"
            )
        return plane


def join(*parts: DevicePlanes) -> DevicePlanes:
    """All planes of one rank, from parts: groups, and planes of a group.

    Raises:
        ConfigError: no parts, parts on several devices, or a plane described twice.
    """
    devices = sorted({part.device for part in parts})
    if len(devices) != 1:
        raise ConfigError(f"planes to join: expected parts on one device, found {devices}")
    planes: dict[tuple[str, int, str], DevicePlane] = {}
    for part in parts:
        twice = sorted(planes.keys() & part.planes.keys())
        if twice:
            raise ConfigError(
                f"planes to join: expected each (group, layer, plane) once, found {twice[0]} twice"
            )
        planes.update(part.planes)
    return DevicePlanes(planes, device=devices[0], keep=[part.keep for part in parts])


# ---- Tensors whose axes have letters: from an engine's tensor to a `DevicePlane`.
#
#     view(tensor, "kbnhc", "layer 3").take("k", 0).plane(plane, heads=2, page_units=64)
#
# The letters: `l` layer, `k` K and V, `t` slot, or `b` block and `n` slot of a block, `h` head of
# the rank, `r` row of a unit, `c` contents (several of them together make one row). They follow the
# order of the tensor's axes. Strides are honoured, so views and permutations work. Nothing is
# copied and torch is not imported: a tensor is an object with torch's `data_ptr()`, `shape`,
# `stride()`, `element_size()`, `dtype` and `device`, or a numpy array.

_LETTERS = {
    "l": "layers",
    "k": "K and V",
    "t": "slots",
    "b": "blocks",
    "n": "slots of a block",
    "h": "heads of this rank",
    "r": "rows of a unit",
    "c": "contents",
}
_ANSWERS = ("data_ptr", "stride", "element_size", "shape", "dtype", "device")


@dataclass(frozen=True)
class Axis:
    """One axis of a view."""

    letter: str
    size: int
    stride: int
    """Bytes."""


@dataclass(frozen=True)
class View:
    """Addresses of the elements of a tensor, or of a part of it."""

    what: str
    """What it is and how it looks, for errors."""
    address: int
    element_bytes: int
    axes: tuple[Axis, ...]
    device: str

    def axis(self, letter: str) -> Axis:
        """The axis of a letter; an axis of size 1 if there is none."""
        for axis in self.axes:
            if axis.letter == letter:
                return axis
        return Axis(letter, 1, 0)

    def has(self, letter: str) -> bool:
        """Whether an axis has this letter."""
        return letter in [axis.letter for axis in self.axes]

    def expect(self, letter: str, size: int, why: str) -> View:
        """Itself.

        Raises:
            ConfigError: the axis has another size.
        """
        actual = self.axis(letter).size
        if actual != size:
            _refuse(self.what, f"{size} {_LETTERS[letter]} ({why})", actual)
        return self

    def take(self, letter: str, index: int) -> View:
        """One place of an axis; removes the axis."""
        axis = self.axis(letter)
        rest = tuple(other for other in self.axes if other is not axis)
        return replace(self, address=self.address + index * axis.stride, axes=rest)

    def cut(self, letter: str, first: int, size: int) -> View:
        """A range of an axis."""
        start = self.address + first * self.axis(letter).stride
        return self._swap(letter, lambda axis: (replace(axis, size=size),), start)

    def unfold(self, letter: str, outer: str, count: int) -> View:
        """Split an axis in two: `count` places of the outer axis, each with its part of the inner
        axis.

        Raises:
            ConfigError: its size is not a multiple of the count.
        """
        size = self.axis(letter).size
        if size % count:
            expected = f"{_LETTERS[letter]} that {count} {_LETTERS[outer]} divide"
            _refuse(self.what, expected, size)
        inner = size // count
        return self._swap(
            letter,
            lambda axis: (Axis(outer, count, inner * axis.stride), replace(axis, size=inner)),
        )

    def rename(self, letter: str, to: str) -> View:
        """The same axis under another letter."""
        return self._swap(letter, lambda axis: (replace(axis, letter=to),))

    def last(self, letter: str) -> View:
        """The same axes with this one last: the order of contents."""
        rest = tuple(axis for axis in self.axes if axis.letter != letter)
        return replace(
            self,
            axes=(*rest, *(last_axis for last_axis in self.axes if last_axis.letter == letter)),
        )

    def _swap(
        self, letter: str, change: Callable[[Axis], tuple[Axis, ...]], address: int | None = None
    ) -> View:
        axes: tuple[Axis, ...] = ()
        for axis in self.axes:
            axes += change(axis) if axis.letter == letter else (axis,)
        return replace(self, address=self.address if address is None else address, axes=axes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: all of its contents, or one element if no axis is contents.

        Raises:
            ConfigError: the contents are not contiguous.
        """
        size = self.element_bytes
        for axis in reversed(self.axes):
            if axis.letter != "c":
                continue
            if axis.size > 1 and axis.stride != size:
                _refuse(
                    self.what,
                    "contents that touch each other",
                    f"{axis.stride} bytes from one to the next where they have {size}",
                    "rows move as one piece; describe them with another letter, or as more planes",
                )
            size *= axis.size
        return size

    def plane(self, plane: Plane, heads: int, page_units: int) -> DevicePlane:
        """The view as the rows of a plane.

        Args:
            heads: that this rank holds.
            page_units: units of the plane in a page.

        Raises:
            ConfigError: other heads, rows or row bytes, contents that are not contiguous, no slots,
                or blocks that neither divide a page nor are multiples of it.
        """
        self._check_rows(plane, heads)
        in_blocks = self.has("b")
        block, unit = self.axis("b"), self.axis("n" if in_blocks else "t")
        if not block.size * unit.size:
            _refuse(self.what, "at least one slot", "none")
        if in_blocks and page_units % unit.size and unit.size % page_units:
            _refuse(
                self.what,
                f"blocks that divide the {page_units} units of a page, or are divided by them",
                f"blocks of {unit.size}",
                "choose page_tokens accordingly",
            )
        return DevicePlane(
            address=self.address,
            unit_stride=unit.stride,
            slots=block.size * unit.size,
            block_units=unit.size if in_blocks else 1,
            block_stride=block.stride,
            head_stride=self.axis("h").stride,
            row_stride=self.axis("r").stride,
        )

    def _check_rows(self, plane: Plane, heads: int) -> None:
        row_bytes, sizes = self.row_bytes, {axis.letter: axis.size for axis in self.axes}
        if row_bytes != plane.row_bytes:
            expected = f"rows of {plane.row_bytes} bytes for plane {plane.name!r}"
            _refuse(self.what, expected, f"{row_bytes} bytes", "is the dtype another one?")
        for letter, size, why in (
            ("k", 1, f"plane {plane.name!r} is one row of each head"),
            ("l", 1, "one tensor of each layer"),
            ("h", heads, f"of {plane.heads} of the model"),
            ("r", plane.rows, f"plane {plane.name!r}"),
        ):
            if sizes.get(letter, 1) != size:
                self.expect(letter, size, why)  # raises


def view(tensor: Any, axes: str, what: str) -> View:
    """A tensor with letters for its axes.

    Args:
        axes: one letter for each axis: see above.
        what: names it in errors.

    Raises:
        ConfigError: not a tensor in a device's memory, a read-only array, numbers of axes and
            letters that differ, letters that are unknown, duplicate, or do not name slots, or
            elements that share memory.
    """
    if isinstance(tensor, np.ndarray):
        return _of_array(tensor, axes, what)
    for name in _ANSWERS:
        if not hasattr(tensor, name):
            _refuse(what, "a torch tensor or a numpy array", type(tensor).__name__)
    shape, device = tuple(map(int, tensor.shape)), str(tensor.device)
    what = f"{what}, {tensor.dtype} {shape} on {device} as {axes!r}"
    dense = str(getattr(tensor, "layout", "torch.strided")) == "torch.strided"
    if not dense or device.partition(":")[0] == "meta":
        _refuse(what, "a dense tensor in a device's memory", device if dense else tensor.layout)
    element_bytes = int(tensor.element_size())
    strides = [int(stride) * element_bytes for stride in tensor.stride()]
    listed = _axes_of(axes, shape, strides, what)
    return View(what, int(tensor.data_ptr()), element_bytes, listed, device_name(device))


def _of_array(array: np.ndarray[Any, Any], axes: str, what: str) -> View:
    what = f"{what}, {array.dtype} {array.shape} of numpy as {axes!r}"
    if not array.flags.writeable:
        _refuse(what, "an array that loads can write", "one that is read only")
    listed = _axes_of(axes, array.shape, array.strides, what)
    return View(what, array.ctypes.data, array.itemsize, listed, "cpu")


def _axes_of(
    axes: str, shape: Sequence[int], strides: Sequence[int], what: str
) -> tuple[Axis, ...]:
    check_axes(axes, what)
    if len(axes) != len(shape):
        _refuse(what, f"{len(axes)} axes", len(shape))
    listed = tuple(map(Axis, axes, shape, strides))
    for axis in listed:
        if axis.stride == 0 and axis.size > 1:
            _refuse(what, "elements of their own", "an expanded tensor", "pass one with storage")
    return listed


def check_axes(axes: object, what: str) -> None:
    """Raises ConfigError: letters that are unknown, duplicate, or do not name slots."""
    if not isinstance(axes, str) or set(axes) - set(_LETTERS):
        _refuse(what, f"axes of the letters {''.join(_LETTERS)}", repr(axes))
    single = axes.replace("c", "")
    if len(set(single)) != len(single):
        _refuse(what, "each letter but c once", repr(axes))
    if ("t" in axes, "b" in axes, "n" in axes) not in ((True, False, False), (False, True, True)):
        _refuse(what, "either slots (t), or blocks (b) and their slots (n)", repr(axes))


def _refuse(what: str, expected: str, found: object, advice: str = "") -> NoReturn:
    raise ConfigError(
        f"{what}: expected {expected}, found {found}" + (f"; {advice}" if advice else "")
    )


__all__ = [
    "Axis",
    "DevicePlane",
    "DevicePlanes",
    "View",
    "check_axes",
    "device_name",
    "join",
    "view",
]
