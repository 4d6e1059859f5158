"""Moves, checked and flattened into arrays: what both transfer engines do before anything is
touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import PageGeometry, Share
from lightcache.kernels.planes import DevicePlanes
from lightcache.shm.errors import ConfigError

# ---- The interface of transfer engines: `Move`, `Transfer`, `Engine`

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Move:
    """The pages of one request and the device slots they belong to.

    `slots[i]` is the place of token `first + i`, counted from the first token of `pages[0]`. So a
    request that begins or ends within a page has `first > 0` or fewer slots than its pages have
    tokens: only the rows of its own tokens are touched. For a group with units of several tokens
        the slots are still those of tokens: a unit's slot is the slot of its first token, divided
        by the tokens of a unit. For recurrent states a slot is a state.
    """

    pages: Sequence[int] | npt.NDArray[Any]
    """Numbers of host pages, int. With a geometry in parts, `geometry.parts` of them for each page,
    in order, one page after the other; they may lie anywhere. An offload leaves out the parts of
    negative ones, as where the host has them already."""
    slots: Sequence[int] | npt.NDArray[Any]
    """Device slots in host memory, int32 or int64; a negative one leaves its token out."""
    first: int = 0
    skip: npt.NDArray[np.bool_] | None = None
    """Pages to leave out, bool of shape (pages,), one for all parts of a page: ready already, or
    missing."""


class Transfer(Protocol):
    """The copies of one call. It has finished when all copies have; it cannot be cancelled."""

    nbytes: int
    """Bytes that move; from and to a device, those of tokens with a negative slot included."""

    def done(self) -> bool:
        """Whether it has finished. Does not block.

        Raises:
            TransferFailed: it failed.
        """

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            WaitTimeout: it is still in flight; wait again.
            TransferFailed: it failed: treat its destination as undefined.
        """

    def wait_on(self, stream: Any = None) -> None:
        """Let a device stream (None: the current one) wait for it instead of this thread. Under a
        rate limit, and without a device, this thread waits.

        Raises:
            TransferFailed: it has failed, as far as is known now.
        """

    def wait_layer(self, layer: int, stream: Any = None, *, timeout: float | None = None) -> None:
        """Let a stream wait for the window that holds a layer, as `wait_on` does for all layers.
        Without windows it waits for the whole transfer.

        Args:
            timeout: seconds that this thread waits, where it does; None: as long as it takes.

        Raises:
            ConfigError: a layer that is in none of its windows.
            WaitTimeout: the layer's copies are not there yet, or not enqueued; wait again.
            TransferFailed: it has failed, as far as is known now.
        """


class Engine(Protocol):
    """A transfer engine: moves pages between a host pool and one rank's planes. `TransferEngine`
    does so on a GPU, `HostEngine` in CPU memory."""

    geometry: PageGeometry
    """Of the pages."""
    share: Share
    """What it moves of a page."""
    slots: int
    """Tokens that its planes have room for. `EngineBackend` does without it, if there is none."""

    def offload(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Any = None,
        after: Any = (),
        window: int | None = None,
        planes: Any = None,
        when_done: Callable[[bool], None] | None = None,
    ) -> Transfer:
        """Device to pages.

        Args:
            streams: that produce the source; None: the current one.
            after: events of work that may still touch the destination.
            window: layers that `wait_layer` waits for together.
            planes: other DevicePlanes, for this call.
            when_done: `when_done(ok)` is called once when it has finished: from `done`, `wait`, or
                the engine's `poll` or `close`. The engine registers it before anything is copied,
                so it is called even if an interrupt ends this call; see `will_tell`.

        Raises:
            ConfigError: pages, slots, streams, events, a window or planes that do not fit; nothing
                is copied.
            NotReady: a page that the device cannot access yet; nothing is copied.
            Detached: the engine was closed, or a forked child uses it.
            After any other exception ask `will_tell` whether a copy is in flight.
        """

    def load(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Any = None,
        after: Any = (),
        window: int | None = None,
        planes: Any = None,
        when_done: Callable[[bool], None] | None = None,
    ) -> Transfer:
        """Pages to device. Arguments and errors as `offload`."""

    def will_tell(self, call: Callable[[bool], None]) -> bool:
        """Whether a transfer with this `when_done` has begun and has yet to make the call. Ask this
        after `offload` or `load` has raised. Calls are compared by `==`: two bound methods of one
        object are equal, but not the same object."""

    def poll(self) -> int:
        """Notice finished transfers and make their calls (`when_done=`); returns the number in
        flight."""

    def close(self) -> None:
        """Wait for transfers in flight, give everything back."""


# ---- Block tables as slots


def slots_of_blocks(
    blocks: Sequence[int] | npt.NDArray[Any],
    block_tokens: int,
    *,
    first: int = 0,
    tokens: int | None = None,
) -> npt.NDArray[np.int64]:
    """The slots of a request's tokens from its block table, for `Move` and `Offload`.

        Move(pages, slots_of_blocks(block_table, 16, first=n), first=n)

    Block `blocks[i]` holds the tokens from `i * block_tokens` on, in the slots from `blocks[i] *
    block_tokens` on.

    Args:
        blocks: numbers of device blocks, of shape (blocks,); all tokens of a negative one get slot
            -1, so they are skipped.
        block_tokens: tokens of a device block; pages may have more or fewer.
        first, tokens: only `tokens` tokens, from token `first` on; None: to the end of the blocks.

    Returns:
        int64 of shape (tokens,).

    Raises:
        ConfigError: not whole numbers, or tokens outside of the blocks.
    """
    table = np.asarray(blocks)
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise ConfigError(
            f"blocks: expected whole numbers in one dimension, found {table.dtype} {table.shape}"
        )
    if type(block_tokens) is not int or block_tokens < 1:
        raise ConfigError(f"block_tokens: expected a whole number >= 1, found {block_tokens!r}")
    total = len(table) * block_tokens
    count = total - first if tokens is None else tokens
    if not (0 <= first <= total and 0 <= count <= total - first):
        raise ConfigError(
            f"blocks: {len(table)} of {block_tokens} tokens hold tokens 0 to {total - 1}, expected "
            f"{count} from token {first} on"
        )
    starts = table.astype(np.int64)[:, None]
    slots = np.where(starts < 0, -1, starts * block_tokens + np.arange(block_tokens))
    chosen: npt.NDArray[np.int64] = slots.ravel()[first : first + count]
    return chosen


# ---- Checking and flattening

Ints = npt.NDArray[np.int64]
Slots = npt.NDArray[Any]  # int32 or int64
_SLOT_TYPES = (np.dtype(np.int64), np.dtype(np.int32))
_NOTHING = np.zeros(0, np.int64)


class PageMemory(Protocol):
    """The interface of the host side: `HostPages` and `PinnedPages`."""

    page_bytes: int

    def check(self, pages: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Page numbers as int64, all of them usable now."""


class Rows(NamedTuple):
    """Units to move, one entry each, all int64 of shape (k,)."""

    page: Ints
    """The host page."""
    unit: Ints
    """Within its page."""
    slot: Ints
    """On the device, counted in units."""


@dataclass(frozen=True)
class Batch:
    """The pages that one call moves, without skipped ones and those without any slot. Token `t` of
    `pages[i]`, `first[i] <= t < end[i]`, belongs to `slots[start[i] + t]`."""

    pages: Ints
    """Numbers of host pages, int64 of shape (n, geometry.parts); -1: this part is left out."""
    start: Ints
    """int64 of shape (n,); may be negative, `start + first` is not."""
    first: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]
    slots: Slots
    """Of all Moves, int32 or int64, contiguous; a negative one is left out. May be the caller's
    own array: copy what is read after the call."""
    counts: tuple[int, ...]
    """How many of `pages` each Move gave."""
    page_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of these pages, those with a negative slot included."""
        return int(self.end.sum()) - int(self.first.sum())

    def rows(self, unit_tokens: int = 1, part: int = 0) -> Rows:
        """Every unit that moves, in order, without negative slots. Copies; O(tokens).

        Args:
            part: the part of each page that `Rows.page` names; -1 where it is left out.
        """
        low = self.first.astype(np.int64) // unit_tokens
        counts = -(-self.end.astype(np.int64) // unit_tokens) - low
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        unit = np.arange(total) - np.repeat(ends - counts - low, counts)
        page = np.repeat(self.pages[:, part], counts)
        slot = self.slots[np.repeat(self.start, counts) + unit * unit_tokens].astype(np.int64)
        if total and int(slot.min()) < 0:
            kept = slot >= 0
            page, unit, slot = page[kept], unit[kept], slot[kept]
        return Rows(page, unit, slot if unit_tokens == 1 else slot // unit_tokens)


def flatten(moves: Move | Sequence[Move], geometry: PageGeometry, memory: PageMemory) -> Batch:
    """All pages of some Moves, checked, except for the upper end of slots, which depends on the
    planes (`check_slots`). About 10 us for one page of 16 tokens, 20 ns a page for many.

    Raises:
        ConfigError: pages or slots that are not whole numbers or not in host memory, pages outside
            of the memory, a number of pages that is no multiple of the parts, more slots than the
            pages have room for, `skip` of another shape, or slots that do not begin at a unit of a
            plane with units of several tokens.
    """
    if isinstance(moves, Move):
        moves = (moves,)
    elif not isinstance(moves, Sequence):
        raise ConfigError(f"moves: expected a Move or a sequence of them, found {moves!r}")
    units = _unit_sizes(geometry)
    checked = [_checked(move, geometry, units) for move in moves]
    if len(checked) == 1:
        pages, slots, move = checked[0]
        if move.skip is None and len(pages) == 1:
            return _single(pages, slots, move.first, geometry.page_tokens, memory)
        if move.skip is None and len(slots) == len(pages) * geometry.page_tokens > 0:
            return _whole(pages, slots, geometry.page_tokens, memory)
    return _many(checked, geometry, memory)


def _usable(pages: npt.NDArray[Any], memory: PageMemory) -> Ints:
    """Numbers of host pages, of shape (n, parts), as int64, checked. Of a page in parts some may be
    negative."""
    if pages.shape[1] == 1 or not (holes := pages < 0).any():
        return memory.check(pages.ravel()).reshape(pages.shape)
    checked = np.full(pages.shape, -1, np.int64)
    checked[~holes] = memory.check(pages[~holes])
    return checked


def _single(
    pages: npt.NDArray[Any], slots: Slots, first: int, tokens: int, memory: PageMemory
) -> Batch:
    """One page: the most common call, without the arithmetic for many."""
    end = first + len(slots)
    if not len(slots):
        none = pages[:0].astype(np.int64)
        return Batch(none, _NOTHING, _i32([]), _i32([]), slots, (0,), tokens)
    start = np.array([-first], np.int64)
    return Batch(_usable(pages, memory), start, _i32([first]), _i32([end]), slots, (1,), tokens)


def _whole(pages: npt.NDArray[Any], slots: Slots, tokens: int, memory: PageMemory) -> Batch:
    """The second most common call: one request, all tokens of all its pages."""
    count = len(pages)
    start = np.arange(0, count * tokens, tokens)
    first, end = np.zeros(count, np.int32), np.full(count, tokens, np.int32)
    return Batch(_usable(pages, memory), start, first, end, slots, (count,), tokens)


def _many(
    checked: list[tuple[npt.NDArray[Any], Slots, Move]], geometry: PageGeometry, memory: PageMemory
) -> Batch:
    tokens = geometry.page_tokens
    sizes = np.array([len(pages) for pages, _, _ in checked], np.int64)
    lengths = np.array([len(slots) for _, slots, _ in checked], np.int64)
    firsts = np.array([move.first for _, _, move in checked], np.int64)
    owner = np.repeat(np.arange(len(checked)), sizes)
    token = (np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)) * tokens
    start = (np.cumsum(lengths) - lengths - firsts)[owner] + token
    first = np.clip(firsts[owner] - token, 0, tokens)
    end = np.clip((firsts + lengths)[owner] - token, 0, tokens)
    kept = first < end
    if any(move.skip is not None for _, _, move in checked):
        kept &= ~np.concatenate([_skipped(move, len(pages)) for pages, _, move in checked])
    pages = _joined([pages for pages, _, _ in checked]).reshape(-1, geometry.parts)
    if not kept.all():
        pages, owner, start = pages[kept], owner[kept], start[kept]
        first, end = first[kept], end[kept]
    return Batch(
        _usable(pages, memory),
        start,
        first.astype(np.int32),
        end.astype(np.int32),
        _joined([slots for _, slots, _ in checked]),
        tuple(np.bincount(owner, minlength=len(checked)).tolist()),
        tokens,
    )


def _i32(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else _NOTHING


def _skipped(move: Move, pages: int) -> npt.NDArray[np.bool_]:
    return np.zeros(pages, np.bool_) if move.skip is None else move.skip


def _unit_sizes(geometry: PageGeometry) -> list[int]:
    """Sizes of units of several tokens among the planes; usually none."""
    sizes = {plane.unit_tokens for group in geometry.groups for plane in group.planes}
    return sorted(sizes - {1})


def _checked(
    move: Move, geometry: PageGeometry, units: list[int]
) -> tuple[npt.NDArray[Any], Slots, Move]:
    """Pages of shape (n, parts), and slots."""
    if not isinstance(move, Move):
        raise ConfigError(f"moves: expected a Move or a sequence of them, found {move!r}")
    pages, slots = integers(move.pages, "pages"), integers(move.slots, "slots")
    if pages.dtype.kind == "u":  # together with signed ones they would become floats
        pages = pages.astype(np.int64)
    if len(pages) % geometry.parts:
        raise ConfigError(
            f"pages: expected {geometry.parts} pages of the host for each page of the geometry "
            f"({geometry.parts} parts of {geometry.part_bytes} bytes), found {len(pages)} in all; "
            "name every part of each page, in order"
        )
    pages = pages.reshape(-1, geometry.parts)
    if slots.dtype not in _SLOT_TYPES:
        raise ConfigError(
            f"slots: expected int32 or int64, found {slots.dtype}; convert them, and mark what is "
            "to be left out with -1"
        )
    first, tokens = move.first, geometry.page_tokens
    if type(first) is not int or first < 0:
        raise ConfigError(f"first: expected the number of a token, found {first!r}")
    if first + len(slots) > len(pages) * tokens:
        raise ConfigError(
            f"slots: {len(slots)} of them from token {first} on, but {len(pages)} pages have "
            f"{len(pages) * tokens} tokens; name every page that the tokens belong to"
        )
    _check_skip(move, len(pages))
    for unit in units:
        _check_unit(unit, first, slots)
    return pages, slots if slots.flags.c_contiguous else np.ascontiguousarray(slots), move


def integers(numbers: Any, what: str) -> npt.NDArray[Any]:
    """A one-dimensional array of whole numbers in host memory; an array is not copied.

    Raises:
        ConfigError: anything else; `what` names it.
    """
    if type(numbers) is not np.ndarray:
        try:
            numbers = np.asarray(numbers)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"{what}: expected whole numbers in host memory, found {type(numbers).__name__} "
                f"({error}); a tensor of a device is brought over with .cpu()"
            ) from None
        if numbers.size == 0:
            numbers = numbers.astype(np.int64)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise ConfigError(
            f"{what}: expected whole numbers in one dimension, found {numbers.dtype} "
            f"{numbers.shape}"
        )
    array: npt.NDArray[Any] = numbers
    return array


def _check_skip(move: Move, pages: int) -> None:
    skip: Any = move.skip
    if skip is None:
        return
    if not isinstance(skip, np.ndarray) or skip.dtype != np.bool_ or skip.shape != (pages,):
        found = f"{skip.dtype} {skip.shape}" if isinstance(skip, np.ndarray) else repr(skip)
        raise ConfigError(f"skip: expected a bool array of shape ({pages},), found {found}")


def _check_unit(unit: int, first: int, slots: Slots) -> None:
    if first % unit:
        raise ConfigError(
            f"first: token {first} is inside of a unit of {unit} tokens, which moves whole; begin "
            f"at a multiple of {unit}"
        )
    leading = slots[::unit]
    wrong = leading[(leading >= 0) & (leading % unit != 0)]
    if len(wrong):
        raise ConfigError(
            f"slots: {int(wrong[0])} holds the first token of a unit of {unit} tokens and is no "
            f"multiple of {unit}; pages and device blocks must begin at the same token"
        )


def check_slots(batch: Batch, limit: int) -> None:
    """Check that all slots in use exist. 1 us and 0.2 ns a slot.

    Args:
        limit: tokens on the device, see `token_limit`.

    Raises:
        ConfigError: a slot of limit or more.
    """
    slots = batch.slots
    if not len(slots) or int(slots.max()) < limit:
        return
    used = batch.rows().slot  # slots of skipped pages may be anything
    if len(used) and int(used.max()) >= limit:
        raise ConfigError(
            f"slots: expected 0 to {limit - 1} (or negative: left out), found {int(used.max())}; "
            "are they slots of another device, or block numbers of another block size?"
        )


def check_whole(batch: Batch) -> None:
    """Check that no part of a page is left out: a load needs all of them.

    Raises:
        ConfigError: a negative host page.
    """
    if batch.pages.shape[1] > 1 and bool((batch.pages < 0).any()):
        page, part = (int(where[0]) for where in np.nonzero(batch.pages < 0))
        raise ConfigError(
            f"load: part {part} of page {page} has no host page ({int(batch.pages[page, part])}); "
            "name all parts, or skip the page"
        )


def token_limit(geometry: PageGeometry, planes: DevicePlanes, share: Share) -> int:
    """Tokens that every plane of a share has room for; an empty share has no limit.

    Raises:
        ConfigError: a plane of the share was not described.
    """
    limits = [planes.find(geometry, cell).slots * cell.plane.unit_tokens for cell in share.cells]
    return min(limits, default=1 << 62)


def check_sides(geometry: PageGeometry, memory: PageMemory, share: Share) -> None:
    """Check that pages, their memory and a share have one geometry.

    Raises:
        ConfigError: pages of the memory are too small, or not the parts of the geometry, or the
            share is of other pages.
    """
    if not isinstance(share, Share):
        raise ConfigError(
            f"share: expected a Share, found {share!r}; make it with geometry.share(...)"
        )
    if geometry.parts > 1 and geometry.part_bytes != memory.page_bytes:
        raise ConfigError(
            f"geometry: its pages are cut into parts of {geometry.part_bytes} bytes, expected the "
            f"{memory.page_bytes} of a page of the memory; make it with "
            f"part_bytes={memory.page_bytes}"
        )
    if geometry.part_bytes > memory.page_bytes:
        raise ConfigError(
            f"geometry: its pages have {geometry.page_bytes} bytes, those of the memory "
            f"{memory.page_bytes}; create the cache with page_bytes=geometry.page_bytes, or give "
            "the geometry part_bytes"
        )
    if share.geometry is not geometry and share.geometry.fingerprint() != geometry.fingerprint():
        raise ConfigError(
            f"share: expected one of {geometry.fingerprint()}, found one of "
            f"{share.geometry.fingerprint()}; make it with geometry.share(...)"
        )


__all__ = [
    "Batch",
    "Engine",
    "Move",
    "PageMemory",
    "Rows",
    "Transfer",
    "check_sides",
    "check_slots",
    "check_whole",
    "flatten",
    "integers",
    "slots_of_blocks",
    "token_limit",
]
