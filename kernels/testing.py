"""The conformance suite that every transfer engine must pass, for the tests of its author.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check):
        check(my_rig)

Each check has the factory, here `my_rig`, make an engine and both of its memories for a `Setup`. It
closes the engine, and raises AssertionError with a text. `Rig` says what the factory returns;
`tests/unit/test_transfer_engine_conformance.py` has one for `HostEngine`, of a dozen lines.

Four things the suite cannot do, so an engine needs tests of its own for them: copies that fail,
interrupts, the streams of a device (`streams`, `wait_on`), and a rank's share of a page.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane, Share
from lightcache.kernels.moves import Engine, Move
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.shm.errors import ConfigError, Detached, LightcacheError, WaitTimeout

Bytes = npt.NDArray[np.uint8]
PAGES, SLOTS = 6, 64
"""Pages of the geometry, and slots (tokens) of the device, in each check."""
TIMEOUT = 60.0  # of transfers that must finish; generous, as nothing is measured


# ---- Memory of both sides, and what a transfer leaves in it


class PlacedPlanes:
    """The planes of a share in one buffer, with gaps between them: each in an arrangement that the
    seed chooses."""

    def __init__(self, share: Share, slots: int, seed: int = 0) -> None:
        """Chooses the arrangements."""
        self._rng = random.Random(seed)
        self._planes: dict[tuple[str, int, str], DevicePlane] = {}
        heads: dict[tuple[str, int, str], set[int]] = {}
        geometry = share.geometry
        end = 64  # no address is 0
        for cell in share.cells:
            name = geometry.groups[cell.group].name, cell.layer, cell.plane.name
            heads.setdefault(name, set()).update(range(cell.head, cell.head + cell.heads))
        for cell in share.cells:
            name = geometry.groups[cell.group].name, cell.layer, cell.plane.name
            if name not in self._planes:
                row, rows = cell.plane.row_bytes, cell.plane.rows
                units = -(-slots // cell.plane.unit_tokens)
                self._planes[name], end = self._plane(end, row, rows, len(heads[name]), units)
        self.first = {name: min(held) for name, held in heads.items()}
        """The first head of each plane, counted from the model's first."""
        self.nbytes = end + 64
        """Of the buffer."""

    def _plane(
        self, address: int, row: int, rows: int, heads: int, units: int
    ) -> tuple[DevicePlane, int]:
        address += self._rng.randrange(8)
        gap = self._rng.choice([0, 0, 4, row])
        unit = heads * rows * row
        kind = self._rng.choice(["tokens", "blocks", "heads apart"])
        block = self._rng.choice([2, 4, 8])
        blocks = -(-units // block)
        if kind == "tokens":  # [unit][row][head], perhaps with something else in between
            stride = unit + gap
            plane = DevicePlane(address, stride, units, head_stride=row, row_stride=heads * row)
            return plane, address + units * stride
        stride = block * unit + gap
        if kind == "blocks":  # [block][unit][head][row], blocks apart
            plane = DevicePlane(address, unit, units, block, stride, rows * row, row)
        else:  # [block][head][unit][row]
            plane = DevicePlane(address, rows * row, units, block, stride, block * rows * row, row)
        return plane, address + blocks * stride

    def at(self, address: int, *, device: str = "cpu", keep: object = None) -> DevicePlanes:
        """The planes, if the buffer begins at this address of a device."""
        return DevicePlanes(
            {
                name: replace(plane, address=address + plane.address)
                for name, plane in self._planes.items()
            },
            device=device,
            keep=keep,
        )

    def row(self, name: tuple[str, int, str], unit: int, head: int, row: int, size: int) -> slice:
        """The place in the buffer of one row of a unit; `head` counts the plane's own."""
        plane = self._planes[name]
        start = plane.address + head * plane.head_stride + row * plane.row_stride
        if plane.block_stride:
            block, inside = divmod(unit, plane.block_units)
            start += block * plane.block_stride + inside * plane.unit_stride
        else:
            start += unit * plane.unit_stride
        return slice(start, start + size)


class PlacedPages:
    """Pages of a geometry, or their parts, anywhere among the pages of a host, with other pages in
    between."""

    others = 4
    """Host pages that no page of the geometry has a part in."""

    def __init__(self, geometry: PageGeometry, pages: int, seed: int = 0, more: int = 0) -> None:
        """
        Args:
            more: bytes of a host page that the geometry does not use; 0 for pages in parts.
        """
        assert not more or geometry.parts == 1
        self.page_bytes = geometry.page_bytes + more
        """Of a whole page."""
        self._rng, count = np.random.default_rng(seed), pages * geometry.parts
        self.shape = (count + self.others, geometry.part_bytes + more)
        """Of the host's memory: pages, and bytes of each."""
        self._parts = self._rng.permutation(self.shape[0])[:count].reshape(pages, geometry.parts)

    def pages(self) -> Bytes:
        """Whole pages of random bytes, of shape (pages, page_bytes)."""
        return self._rng.integers(0, 256, (len(self._parts), self.page_bytes), np.uint8)

    def memory(self, pages: Bytes) -> Bytes:
        """The host's memory with these pages in it, and one byte everywhere else."""
        memory = np.full(self.shape, 0xCD, np.uint8)
        memory[self._parts.ravel()] = pages.reshape(-1, self.shape[1])
        return memory

    def moves(self, moves: Sequence[Move], dtype: Any = np.int64) -> list[Move]:
        """The same moves, by the numbers of host pages."""
        return [
            replace(move, pages=self._parts[np.asarray(move.pages, int)].ravel().astype(dtype))
            for move in moves
        ]


def moved_rows(
    share: Share, planes: PlacedPlanes, page_bytes: int, moves: Sequence[Move]
) -> Iterator[tuple[slice, slice]]:
    """(place in the flat bytes of all pages, place in the buffer of the planes) of each row that
    moves, from the definitions of `Cell`, `DevicePlane` and `Move` alone."""
    geometry = share.geometry
    for move in moves:
        for number, slot in enumerate(move.slots):
            page, token = divmod(move.first + number, geometry.page_tokens)
            if slot < 0 or (move.skip is not None and move.skip[page]):
                continue
            start = int(move.pages[page]) * page_bytes
            for cell in share.cells:
                unit, inside = divmod(token, cell.plane.unit_tokens)
                if inside:
                    continue
                name = geometry.groups[cell.group].name, cell.layer, cell.plane.name
                size, device_unit = cell.plane.row_bytes, int(slot) // cell.plane.unit_tokens
                for head in range(cell.heads):
                    place = start + cell.offset + unit * cell.unit_stride + head * size
                    own = cell.head + head - planes.first[name]
                    row = planes.row(name, device_unit, own, cell.row, size)
                    yield slice(place, place + size), row


def random_moves(rng: random.Random, geometry: PageGeometry, pages: int, slots: int) -> list[Move]:
    """Moves of pages and slots that are all different, aligned to the largest unit: pages begun and
    ended in the middle, skipped, with holes; slots in runs or scattered, int32 or int64."""
    tokens = geometry.page_tokens
    unit = max(plane.unit_tokens for group in geometry.groups for plane in group.planes)
    free, blocks = rng.sample(range(pages), pages), rng.sample(range(slots // unit), slots // unit)
    if rng.random() < 0.5:
        blocks.sort(reverse=True)  # taken from the end: runs
    whole, holes = rng.random() < 0.4, rng.random() < 0.3
    moves = []
    for _ in range(rng.randrange(1, 4)):
        own = [free.pop() for _ in range(min(len(free), rng.randrange(3)))]
        first = 0 if whole else rng.randrange(0, len(own) * tokens + 1, unit)
        count = len(own) * tokens - first
        count = count if whole else rng.randrange(count + 1)
        units = [
            -1 if holes and rng.random() < 0.2 else blocks.pop() for _ in range(-(-count // unit))
        ]
        own_slots = [b * unit + t if b >= 0 else -1 for b in units for t in range(unit)][:count]
        skip = np.array([rng.random() < 0.3 for _ in own], np.bool_)
        typed = np.array(own_slots, rng.choice([np.int32, np.int64]))
        moves.append(Move(own, typed, first, rng.choice([None, skip])))
    return moves


# ---- What the author's factory makes


class Gate(Protocol):
    """Work of a device that has not ended until `open` is called."""

    event: Any
    """For an engine's `after`."""

    def open(self) -> None:
        """The work ends, now or soon."""


class Setup:
    """What a check needs: a geometry, and the sizes of both memories."""

    def __init__(self, geometry: PageGeometry, seed: int) -> None:
        """Chooses the places of planes and pages."""
        self.geometry = geometry
        self.placed_planes = PlacedPlanes(geometry.share(), SLOTS, seed)
        self.placed_pages = PlacedPages(geometry, PAGES, seed)
        self.device_bytes = 2 * self.placed_planes.nbytes
        """Bytes of device memory, which has the planes twice."""
        self.pages_shape = self.placed_pages.shape
        """Of the host's memory: pages, and bytes of each."""

    def planes(self, address: int, *, device: str = "cpu", keep: object = None) -> DevicePlanes:
        """The engine's planes, if its device memory begins at this address of a device, whose name
        may be of a kind that our engines do not serve: see `device_name`."""
        return self.placed_planes.at(address, device=device, keep=keep)

    def moved_planes(
        self, address: int, *, device: str = "cpu", keep: object = None
    ) -> DevicePlanes:
        """Other planes in the same device memory, for single calls."""
        moved = address + self.placed_planes.nbytes
        return self.placed_planes.at(moved, device=device, keep=keep)


@dataclass
class Rig:
    """An engine of `setup.geometry`, for all of a page, and both of its memories."""

    engine: Engine
    pages: Bytes
    """The host's memory, writable, of shape `setup.pages_shape`."""
    moved_planes: DevicePlanes
    """`setup.moved_planes` of the engine's device memory."""
    read_device: Callable[[], Bytes]
    """Returns a copy of the device memory, uint8 of shape (setup.device_bytes,)."""
    write_device: Callable[[Bytes], None]
    """Sets the device memory. When it returns, loads and offloads see it."""
    gate: Callable[[], Gate]
    """Makes a new gate, which is shut."""


Factory = Callable[[Setup], Rig]


# ---- Checks

GEOMETRIES = {
    "keys and values": PageGeometry(
        [
            KVGroup.attention(
                "kv", layers=3, heads=4, head_dim=4, dtype_bytes=2, page_tokens=8, scale_bytes=2
            )
        ]
    ),
    "units of several tokens": PageGeometry(
        [
            KVGroup.attention("kv", layers=2, heads=2, head_dim=4, dtype_bytes=2, page_tokens=8),
            KVGroup.opaque("index", layers=[1, 5], row_bytes=33, page_tokens=8, unit_tokens=4),
        ]
    ),
    "states": PageGeometry(
        [KVGroup.state("ssm", layers=2, parts=[Plane("conv", 6, 4, rows=3), Plane("rec", 40, 4)])]
    ),
}
GEOMETRIES["pages in parts"] = PageGeometry(GEOMETRIES["keys and values"].groups, part_bytes=208)
_LATENT = PageGeometry(
    [
        KVGroup.attention(
            "kv", layers=3, heads=1, head_dim=8, dtype_bytes=2, page_tokens=8, content="single"
        )
    ]
)
"""Of all checks but those of bytes and input: one plane for each layer, so that an engine whose
kernels are interpreted launches few of them."""


class _World:
    """A rig with random bytes in both memories, and the bytes that should be there."""

    def __init__(self, factory: Factory, geometry: PageGeometry = _LATENT, seed: int = 0) -> None:
        self.geometry, self.setup = geometry, Setup(geometry, seed)
        self.rig = factory(self.setup)
        self.engine = self.rig.engine
        self._rng = np.random.default_rng(seed)
        self.pages = self.setup.placed_pages.pages()
        self.rig.pages[...] = self.setup.placed_pages.memory(self.pages)
        self.device = self._rng.integers(0, 256, self.setup.device_bytes, np.uint8)
        self.rig.write_device(self.device)

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def host_moves(self, moves: Sequence[Move]) -> list[Move]:
        """The moves, by the numbers of host pages."""
        return self.setup.placed_pages.moves(moves)

    def expect(self, verb: str, moves: Sequence[Move], *, moved: bool = False) -> int:
        """Make these moves in the expected bytes. Returns how many bytes move."""
        share, flat, nbytes = self.geometry.share(), self.pages.reshape(-1), 0
        base = self.setup.placed_planes.nbytes if moved else 0
        buffer = self.device[base : base + self.setup.placed_planes.nbytes]
        page_bytes = self.geometry.page_bytes
        for page, row in moved_rows(share, self.setup.placed_planes, page_bytes, moves):
            if verb == "offload":
                flat[page] = buffer[row]
            else:
                buffer[row] = flat[page]
            nbytes += page.stop - page.start
        return nbytes

    def check(self, what: str) -> None:
        """Both memories have the expected bytes, everywhere."""
        pages = self.setup.placed_pages.memory(self.pages)
        assert (self.rig.pages == pages).all(), f"{what}: host pages with other bytes"
        device = self.rig.read_device()
        assert (device == self.device).all(), f"{what}: device memory with other bytes"

    def begin(self, verb: str, moves: Sequence[Move], **how: Any) -> Any:
        """Begin these moves."""
        return getattr(self.engine, verb)(self.host_moves(moves), **how)

    def gate(self, verb: str = "offload", **how: Any) -> Gate:
        """A gate, shut. Such a call is made before, and undone: an engine may load a kernel at its
        first one, for which a GPU waits until all streams are idle."""
        self.begin(verb, _one_page(), **how).wait(TIMEOUT)
        self.rig.pages[...] = self.setup.placed_pages.memory(self.pages)
        self.rig.write_device(self.device)
        return self.rig.gate()


class _Told:
    """The calls that an engine made. Its methods are equal, but not the same, in each access."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.threads: set[int] = set()

    def note(self, ok: bool) -> None:
        self.calls.append(ok)
        self.threads.add(threading.get_ident())


def _one_page(page: int = 2, first_slot: int = 0) -> list[Move]:
    return [Move([page], np.arange(first_slot, first_slot + _LATENT.page_tokens))]


def _same(found: object, expected: object, what: str) -> None:
    assert found == expected, f"{what}: expected {expected!r}, found {found!r}"


def _raises(kind: type[LightcacheError], what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what}: expected {kind.__name__}, found {error!r}") from error
    raise AssertionError(f"{what}: expected {kind.__name__}, found no error")


def _poll_until_idle(engine: Engine) -> None:
    end = time.monotonic() + TIMEOUT
    while engine.poll():
        assert time.monotonic() < end, f"poll: still in flight after {TIMEOUT} s"
        time.sleep(1e-3)


def check_description(factory: Factory) -> None:
    """An engine says what it moves."""
    with _World(factory) as world:
        fingerprint = world.engine.geometry.fingerprint()
        _same(fingerprint, world.geometry.fingerprint(), "geometry")
        _same(world.engine.share.nbytes, world.geometry.share().nbytes, "bytes of share")
        slots = getattr(world.engine, "slots", SLOTS)
        assert SLOTS <= slots < SLOTS + 8, f"slots: expected {SLOTS}, found {slots}"


def check_bytes(factory: Factory) -> None:
    """Every byte that should move does, both ways, and no other byte changes."""
    for kind, geometry in GEOMETRIES.items():
        for seed in range(4):
            rng = random.Random(f"{kind} {seed}")
            with _World(factory, geometry, seed) as world:
                for verb in ("offload", "load"):
                    moves = random_moves(rng, geometry, PAGES, SLOTS)
                    least = world.expect(verb, moves)
                    transfer = world.begin(verb, moves)
                    if kind != "units of several tokens":  # of which an engine counts parts
                        found = transfer.nbytes
                        assert found >= least, f"{verb}: nbytes: {found} of at least {least}"
                    transfer.wait(TIMEOUT)
                    world.check(f"{verb}, {kind}, seed {seed}")


def check_windows(factory: Factory) -> None:
    """`wait_layer` waits for the window of each layer, and refuses other layers."""
    for window in (1, 2):
        for verb in ("offload", "load"):
            with _World(factory) as world:
                gate, moves = world.gate(verb, window=window), _one_page()
                world.expect(verb, moves)
                transfer = world.begin(verb, moves, window=window, after=[gate.event])
                try:
                    _raises(ConfigError, "wait_layer(3)", lambda: transfer.wait_layer(3))  # noqa: B023
                    with contextlib.suppress(WaitTimeout):  # of an engine whose streams wait
                        transfer.wait_layer(0, timeout=0)
                finally:
                    gate.open()
                for layer in range(3):
                    transfer.wait_layer(layer)
                transfer.wait_on()
                transfer.wait(TIMEOUT)
                world.check(f"{verb}, window={window}")


def check_nothing_to_move(factory: Factory) -> None:
    """A transfer without bytes succeeds."""
    tokens = _LATENT.page_tokens
    nothing: list[Any] = [
        [],
        [Move([], [])],
        [Move([1], [-1] * tokens)],
        [Move([1], np.zeros(0, np.int64))],
        [Move([1], [0], skip=np.array([True]))],
    ]
    with _World(factory) as world:
        for moves in nothing:
            for verb in ("offload", "load"):
                told = _Told()
                transfer = world.begin(verb, moves, when_done=told.note)
                transfer.wait(TIMEOUT)
                _same(told.calls, [True], f"{verb} {moves}: calls of when_done")
        world.check("nothing to move")


def check_input(factory: Factory) -> None:
    """Bad arguments are refused before anything is copied."""
    tokens = _LATENT.page_tokens
    slots, pages = np.arange(tokens), PAGES + PlacedPages.others
    with _World(factory) as world:
        some: Any = world.host_moves(_one_page())[0]
        bad_moves: list[tuple[str, Any]] = [
            ("a slot beyond the device", Move([0], slots + SLOTS + 8 - tokens)),
            ("a slot beyond the device, of one", Move(np.array([0]), [SLOTS + 8])),
            ("a page beyond the memory", Move([pages], slots)),
            ("a negative page", Move([-1], slots)),
            ("more slots than the page has", Move([0], np.arange(tokens + 1))),
            ("slots that end beyond the page", Move([0], slots, first=1)),
            ("a negative first token", Move([0], slots, first=-1)),
            ("slots that are no whole numbers", Move([0], slots.astype(float))),
            ("pages that are no whole numbers", Move(np.array([0.5]), slots)),
            ("skip of another shape", Move([0], slots, skip=np.zeros(2, np.bool_))),
            ("what is no Move", 17),
        ]
        bad_options: list[dict[str, Any]] = [
            *({"window": value} for value in (0, -1, "2", 1.0)),
            *({"after": value} for value in (17, [17])),
            {"streams": [17]},
            {"planes": 17},
        ]
        for verb in (world.engine.offload, world.engine.load):
            name = verb.__name__
            for what, move in bad_moves:
                for moves in (move, [some, move]):
                    _raises(ConfigError, f"{name} of {what}", lambda: verb(moves))  # noqa: B023
            for how in bad_options:
                _raises(ConfigError, f"{name} with {how}", lambda: verb(some, **how))  # noqa: B023
        _same(world.engine.poll(), 0, "poll after refused calls")
        world.check("refused calls")
    with _World(factory, GEOMETRIES["pages in parts"]) as world:
        (move,) = world.host_moves(_one_page())
        hole = replace(move, pages=np.where(np.arange(len(move.pages)) == 1, -1, move.pages))
        _raises(ConfigError, "load without a part", lambda: world.engine.load(hole))
        world.check("a load without a part")


def check_after(factory: Factory) -> None:
    """Nothing moves before the work that `after` names, and then what the call said: its arrays may
    have been changed meanwhile."""
    for verb in ("offload", "load"):
        with _World(factory) as world:
            gate, slots = world.gate(verb), np.arange(_LATENT.page_tokens)
            move = world.host_moves([Move([2], slots)])[0]
            pages = np.array(move.pages)
            transfer = getattr(world.engine, verb)(Move(pages, slots), after=[gate.event])
            try:
                world.check(f"{verb} before the gate opens")
                _same(transfer.done(), False, f"{verb}: done before the gate opens")
                pages[:], slots[:] = (pages + 1) % len(world.rig.pages), slots[::-1] + 20
            finally:
                gate.open()
            world.expect(verb, [Move([2], np.arange(_LATENT.page_tokens))])
            transfer.wait(TIMEOUT)
            world.check(f"{verb} with arrays that the caller changed")


def check_planes_of_one_call(factory: Factory) -> None:
    """`planes` takes the place of the engine's own, for one call."""
    with _World(factory) as world:
        for verb in ("offload", "load"):
            moves = _one_page(first_slot=8)
            world.expect(verb, moves, moved=True)
            world.begin(verb, moves, planes=world.rig.moved_planes).wait(TIMEOUT)
            world.check(f"{verb} with planes=")
            world.expect(verb, moves)
            world.begin(verb, moves).wait(TIMEOUT)
            world.check(f"{verb} after one with planes=")


def check_calls(factory: Factory) -> None:
    """A `when_done` call is pending while the copy is in flight, and made once, in a thread that
    asks."""
    with _World(factory) as world:
        gate, told, other = world.gate(), _Told(), _Told()
        transfer = world.begin("offload", _one_page(), after=[gate.event], when_done=told.note)
        try:
            _same(transfer.done(), False, "done of a copy in flight")
            _raises(WaitTimeout, "wait(0) of a copy in flight", lambda: transfer.wait(0))
            _same(world.engine.poll(), 1, "poll with one copy in flight")
            _same(world.engine.will_tell(told.note), True, "will_tell of a pending call")
            _same(world.engine.will_tell(other.note), False, "will_tell of another call")
            _same(told.calls, [], "calls for a copy in flight")
        finally:
            gate.open()
        transfer.wait(TIMEOUT)
        _same(told.calls, [True], "calls after wait")
        _same(told.threads, {threading.get_ident()}, "threads that made the calls")
        _same(world.engine.will_tell(told.note), False, "will_tell of a call that was made")
        _same(transfer.done(), True, "done after wait")
        _same(world.engine.poll(), 0, "poll after wait")
        _same(told.calls, [True], "calls after done and poll")


def check_dropped_transfer(factory: Factory) -> None:
    """The call is made by `poll` too, if the caller has kept no Transfer."""
    with _World(factory) as world:
        gate, told, moves = world.gate(), _Told(), _one_page()
        world.expect("offload", moves)
        world.begin("offload", moves, after=[gate.event], when_done=told.note)
        _same(world.engine.will_tell(told.note), True, "will_tell without a Transfer")
        gate.open()
        _poll_until_idle(world.engine)
        _same(told.calls, [True], "calls after poll")
        world.check("a dropped Transfer")


def check_calls_that_raise(factory: Factory) -> None:
    """An error of a call comes out once; the other calls are made all the same."""

    class Wrong(Exception):
        pass

    def wrong(ok: bool) -> None:
        raise Wrong

    with _World(factory) as world:
        gate, told, raised = world.gate(), _Told(), 0
        first = world.begin("offload", _one_page(1), after=[gate.event], when_done=wrong)
        second = world.begin("offload", _one_page(2), after=[gate.event], when_done=told.note)
        gate.open()
        for ask in (first.wait, second.wait, first.wait, world.engine.poll):
            try:
                ask()
            except Wrong:
                raised += 1
        _same((raised, told.calls), (1, [True]), "errors, and the other call")


def check_close(factory: Factory) -> None:
    """`close` waits for copies in flight and makes their calls; later calls raise Detached."""
    world = _World(factory)
    gate, told, moves = world.gate(), _Told(), _one_page()
    world.expect("offload", moves)
    world.begin("offload", moves, after=[gate.event], when_done=told.note)
    closing = threading.Thread(target=world.engine.close)
    closing.start()
    alive = closing.is_alive()
    gate.open()
    closing.join(TIMEOUT)
    assert alive, "close: returned while a copy was in flight"
    assert not closing.is_alive(), f"close: has not returned after {TIMEOUT} s"
    _same(told.calls, [True], "calls after close")
    world.check("close")
    world.engine.close()
    for verb in (world.engine.offload, world.engine.load):
        _raises(Detached, f"{verb.__name__} after close", lambda: verb(moves))  # noqa: B023


def check_forked(factory: Factory) -> None:
    """In a forked child `offload` and `load` raise Detached. Its parent does not notice."""
    with _World(factory) as world:
        moves = _one_page()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside other threads
            child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)  # of a call that waits for a thread of its parent
                for verb in ("offload", "load"):
                    _raises(Detached, verb, lambda: world.begin(verb, moves))  # noqa: B023
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        _same(status, 0, "Detached in a forked child: its status")
        world.expect("offload", moves)
        world.begin("offload", moves).wait(TIMEOUT)
        world.check("the parent of a forked child")


CHECKS: tuple[Callable[[Factory], None], ...] = (
    check_description,
    check_bytes,
    check_windows,
    check_nothing_to_move,
    check_input,
    check_after,
    check_planes_of_one_call,
    check_calls,
    check_dropped_transfer,
    check_calls_that_raise,
    check_close,
    check_forked,
)
"""All checks, to be run one by one."""

__all__ = [
    "CHECKS",
    "PAGES",
    "SLOTS",
    "Factory",
    "Gate",
    "PlacedPages",
    "PlacedPlanes",
    "Rig",
    "Setup",
    "moved_rows",
    "random_moves",
]
