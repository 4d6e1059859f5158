"""Tensors whose axes have letters: the one way from an engine's tensor to a `DevicePlane`.

    view(tensor, "kbnhc", "layer 3").take("k", 0).plane(plane, heads=2, page_units=64)

The letters: `l` layer, `k` K and V, `t` slot, or `b` block and `n` slot of a block, `h` head of the
rank, `r` row of a unit, `c` contents (several of them together make one row). They stand in the
order of the tensor's axes; strides are honoured, so views and permutations are as good as what the
allocator made. Nothing is copied and torch is not imported: a tensor is whatever answers
`data_ptr()`, `shape`, `stride()`, `element_size()`, `dtype` and `device` as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from lightcache.kernels.device_names import device_name
from lightcache.kernels.groups import Plane
from lightcache.kernels.planes import DevicePlane
from lightcache.shm.errors import ConfigError

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
    """Where the elements of a tensor, or of a part of it, lie."""

    what: str
    """What it is and how it looks, for errors."""
    address: int
    element_bytes: int
    axes: tuple[Axis, ...]
    device: str

    def axis(self, letter: str) -> Axis:
        """The axis of a letter; where there is none, one of size 1."""
        for axis in self.axes:
            if axis.letter == letter:
                return axis
        return Axis(letter, 1, 0)

    def has(self, letter: str) -> bool:
        """Whether an axis has this letter."""
        return any(axis.letter == letter for axis in self.axes)

    def expect(self, letter: str, size: int, why: str) -> View:
        """Itself.

        Raises:
            ConfigError: the axis has another size.
        """
        found = self.axis(letter).size
        if found != size:
            _refuse(self.what, f"{size} {_LETTERS[letter]} ({why})", found)
        return self

    def take(self, letter: str, index: int) -> View:
        """One place of an axis; the axis is gone."""
        axis = self.axis(letter)
        rest = tuple(other for other in self.axes if other is not axis)
        return replace(self, address=self.address + index * axis.stride, axes=rest)

    def cut(self, letter: str, first: int, size: int) -> View:
        """A run of an axis."""
        start = self.address + first * self.axis(letter).stride
        return self._swap(letter, lambda axis: (replace(axis, size=size),), start)

    def unfold(self, letter: str, outer: str, count: int) -> View:
        """An axis as two: `count` of the outer one, each with its part of the inner one.

        Raises:
            ConfigError: its size is no multiple of the count.
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
        """The same axes, this one behind all others: the order of contents."""
        rest = tuple(axis for axis in self.axes if axis.letter != letter)
        return replace(self, axes=(*rest, *(one for one in self.axes if one.letter == letter)))

    def _swap(
        self, letter: str, change: Callable[[Axis], tuple[Axis, ...]], address: int | None = None
    ) -> View:
        axes: tuple[Axis, ...] = ()
        for axis in self.axes:
            axes += change(axis) if axis.letter == letter else (axis,)
        return replace(self, address=self.address if address is None else address, axes=axes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: all of its contents, or one element where no axis has them.

        Raises:
            ConfigError: they do not touch each other.
        """
        size = self.element_bytes
        for axis in reversed([axis for axis in self.axes if axis.letter == "c"]):
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
        """Its rows as those of a plane.

        Args:
            heads: that this rank holds.
            page_units: units of the plane in a page.

        Raises:
            ConfigError: other heads, rows or row bytes, contents apart, no slots, or blocks that
                neither divide a page nor are divided by it.
        """
        self._check_rows(plane, heads)
        block, unit = self.axis("b"), self.axis("n" if self.has("b") else "t")
        if not block.size * unit.size:
            _refuse(self.what, "at least one slot", "none")
        if self.has("b") and page_units % unit.size and unit.size % page_units:
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
            block_units=unit.size if self.has("b") else 1,
            block_stride=block.stride,
            head_stride=self.axis("h").stride,
            row_stride=self.axis("r").stride,
        )

    def _check_rows(self, plane: Plane, heads: int) -> None:
        if self.row_bytes != plane.row_bytes:
            expected = f"rows of {plane.row_bytes} bytes for plane {plane.name!r}"
            _refuse(self.what, expected, f"{self.row_bytes} bytes", "is the dtype another one?")
        for letter, size, why in (
            ("k", 1, f"plane {plane.name!r} is one row of each head"),
            ("l", 1, "one tensor of each layer"),
            ("h", heads, f"of {plane.heads} of the model"),
            ("r", plane.rows, f"plane {plane.name!r}"),
        ):
            self.expect(letter, size, why)


def view(tensor: Any, axes: str, what: str) -> View:
    """A tensor with letters for its axes.

    Args:
        axes: one letter for each axis: see above.
        what: names it in errors.

    Raises:
        ConfigError: no tensor of CPU or GPU memory, other axes than letters, letters that are
            unknown, twice, or do not say where slots are, or elements that share memory.
    """
    if not all(hasattr(tensor, name) for name in _ANSWERS):
        _refuse(what, "a torch tensor", type(tensor).__name__)
    shape, device = tuple(int(size) for size in tensor.shape), str(tensor.device)
    what = f"{what}, {tensor.dtype} {shape} on {device} as {axes!r}"
    dense = str(getattr(tensor, "layout", "torch.strided")) == "torch.strided"
    if not dense or not device.startswith(("cpu", "cuda")):
        _refuse(what, "a dense tensor in CPU or GPU memory", device if dense else tensor.layout)
    check_axes(axes, what)
    if len(axes) != len(shape):
        _refuse(what, f"{len(axes)} axes", len(shape))
    each = int(tensor.element_size())
    strides = [int(stride) * each for stride in tensor.stride()]
    found = tuple(Axis(*axis) for axis in zip(axes, shape, strides, strict=True))
    for axis in found:
        if axis.stride == 0 and axis.size > 1:
            _refuse(what, "elements of their own", "an expanded tensor", "pass one with storage")
    return View(what, int(tensor.data_ptr()), each, found, device_name(device))


def check_axes(axes: object, what: str) -> None:
    """Raises ConfigError: letters that are unknown, twice, or do not say where slots are."""
    if not isinstance(axes, str) or set(axes) - set(_LETTERS):
        _refuse(what, f"axes of the letters {''.join(_LETTERS)}", repr(axes))
    if any(axes.count(letter) > 1 for letter in axes if letter != "c"):
        _refuse(what, "each letter but c once", repr(axes))
    if ("t" in axes, "b" in axes, "n" in axes) not in ((True, False, False), (False, True, True)):
        _refuse(what, "either slots (t), or blocks (b) and their slots (n)", repr(axes))


def _refuse(what: str, expected: str, found: object, advice: str = "") -> NoReturn:
    raise ConfigError(
        f"{what}: expected {expected}, found {found}" + (f"; {advice}" if advice else "")
    )


__all__ = ["Axis", "View", "check_axes", "view"]
