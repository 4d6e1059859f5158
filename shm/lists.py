"""SharedList: doubly linked lists over numbered nodes, for many processes."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

from lightcache.shm import structures
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import ConfigError, InUse
from lightcache.shm.layout import SegmentKind
from lightcache.shm.locking import LockedCalls
from lightcache.shm.segment import Segment, free_dead_slots

_MAX_NODES = 1 << 28
_MAX_LISTS = 1 << 16


class SharedList:
    """Nodes 0 to `nodes - 1`, each on one of `lists` lists or on none.

    It holds no values: keep those in arrays indexed by node. Every change takes the segment's lock
    and is atomic, even if processes are killed; `where` and `len` take no lock. The page index uses
    this list (`shm/native/list.h`).
    """

    def __init__(self, segment: Segment, *, lock_timeout: float = 10.0) -> None:
        """For `create`, `attach` and `open`."""
        self.segment = segment
        self.nodes = structures.item_of(segment, "nodes")
        self.lists = structures.item_of(segment, "lists")
        if segment.payload_bytes < structures.library().quick.lcx_list_bytes(
            self.nodes, self.lists
        ):
            raise ConfigError(
                f"the segment {segment.name!r} is too short for its {self.nodes} nodes"
            )
        if not segment.readonly:
            segment.join("list")
            segment.free_slot_on_close()  # a client holds nothing else
        self._calls = LockedCalls(structures.library(), segment, lock_timeout)
        self._calls.handle = structures.library().quick.lcx_list_open(
            segment.attachment, self.nodes, self.lists
        )
        weakref.finalize(self, structures.library().quick.lcx_list_close, self._calls.handle)

    @classmethod
    def create(
        cls, name: str, *, nodes: int, lists: int = 1, lifetime: str = "attached"
    ) -> SharedList:
        """Create lists that do not exist; see `Segment.create` for name, lifetime and errors.

        Raises:
            ConfigError: nodes not 1 to 2^28, lists not 1 to 65,536.
        """
        return cls(Segment.create(**_arranged(name, nodes, lists), lifetime=lifetime))

    @classmethod
    def open(
        cls, name: str, *, nodes: int, lists: int = 1, lifetime: str = "attached"
    ) -> SharedList:
        """Attach to equal lists, or create them; see `Segment.open`."""
        return cls(Segment.open(**_arranged(name, nodes, lists), lifetime=lifetime))

    @classmethod
    def attach(cls, name: str, *, readonly: bool = False) -> SharedList:
        """Attach to existing lists; see `Segment.attach`."""
        return cls(
            Segment.attach(name, readonly=readonly, kind=SegmentKind.LIST, reaper=free_dead_slots)
        )

    # ---- changes

    def push_back(self, node: int, which: int = 0) -> None:
        """Append a node that is on no list to a list. Takes the lock.

        Raises:
            InUse: it is on a list; `move_back` moves it.
            ConfigError: no such node or list.
        """
        self._put(node, which, front=False, must_be_free=True)

    def push_front(self, node: int, which: int = 0) -> None:
        """`push_back` at the beginning."""
        self._put(node, which, front=True, must_be_free=True)

    def move_back(self, node: int, which: int = 0) -> None:
        """Move a node from any list, or none, to the end of a list, as an LRU does on use."""
        self._put(node, which, front=False, must_be_free=False)

    def move_front(self, node: int, which: int = 0) -> None:
        """`move_back` to the beginning."""
        self._put(node, which, front=True, must_be_free=False)

    def _put(self, node: int, which: int, *, front: bool, must_be_free: bool) -> None:
        code = self._locked("lcx_list_put", which, node, front, must_be_free, what="put")
        if code == Code.TWICE:
            raise InUse(f"node {node} is on list {self.where(node)} already; use move_back")
        self._checked(code, "put", node, which)

    def remove(self, node: int) -> bool:
        """Take a node off its list. False: it was on none."""
        code = self._locked("lcx_list_remove", node, what="remove")
        if code == Code.MISSING:
            return False
        self._checked(code, "remove", node, 0)
        return True

    def pop_front(self, which: int = 0) -> int | None:
        """Take the first node off a list; None if it is empty."""
        return self._pop(which, front=True)

    def pop_back(self, which: int = 0) -> int | None:
        """Take the last node off a list; None if it is empty."""
        return self._pop(which, front=False)

    def _pop(self, which: int, *, front: bool) -> int | None:
        node = ctypes.c_uint32()
        code = self._locked("lcx_list_pop", which, front, ctypes.byref(node), what="pop")
        if code == Code.MISSING:
            return None
        self._checked(code, "pop", 0, which)
        return node.value

    # ---- inspection

    def where(self, node: int) -> int | None:
        """The list of a node, or None. Takes no lock."""
        self._in_range(node, 0)
        code = self._calls.quick.lcx_list_where(self._calls.handle, node)
        return None if code == Code.MISSING else check(code, "where")

    def length(self, which: int = 0) -> int:
        """Number of nodes on a list. Takes no lock."""
        self._in_range(0, which)
        return check(self._calls.quick.lcx_list_length(self._calls.handle, which), "length")

    def __len__(self) -> int:
        """Number of nodes on list 0."""
        return self.length()

    def snapshot(self, which: int = 0) -> tuple[int, ...]:
        """The nodes of a list in order, at one instant. Takes the lock."""
        self._in_range(0, which)
        out = (ctypes.c_int32 * self.nodes)()
        code = self._locked("lcx_list_copy", which, out, self.nodes, what="snapshot")
        return tuple(out[: check(code, "snapshot")])

    def __iter__(self) -> Iterator[int]:
        return iter(self.snapshot())

    def check(self) -> None:
        """Derive every invariant again.

        Raises:
            CacheCorrupted: names the first that is broken.
        """
        structures.run_check(self._calls, "lcx_list_check", f"the list {self.segment.name!r}")

    # ---- internals, close

    def _locked(self, name: str, *arguments: Any, what: str) -> int:
        numbers = [a for a in arguments if isinstance(a, int)]
        if any(n < 0 or n >= 1 << 32 for n in numbers):
            return Code.RANGE
        return self._calls.locked(name, *arguments, what=f"{what} in {self.segment.name!r}")

    def _checked(self, code: int, what: str, node: int, which: int) -> None:
        if code == Code.RANGE:
            self._in_range(node, which)
        check(code, what)

    def _in_range(self, node: int, which: int) -> None:
        if not 0 <= node < self.nodes or not 0 <= which < self.lists:
            raise ConfigError(
                f"expected a node below {self.nodes} and a list below {self.lists}, found node "
                f"{node}, list {which}"
            )

    def close(self) -> None:
        """Leave; see `Segment.close`."""
        self.segment.close()

    def __enter__(self) -> SharedList:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.segment.__exit__(None, error, None)


def _arranged(name: str, nodes: int, lists: int) -> dict[str, Any]:
    structures.size_of(nodes, "nodes", _MAX_NODES)
    structures.size_of(lists, "lists", _MAX_LISTS)
    quick = structures.library().quick
    return {
        "name": name,
        "payload_bytes": quick.lcx_list_bytes(nodes, lists),
        "kind": SegmentKind.LIST,
        "config": {"nodes": nodes, "lists": lists},
        "initialise": lambda made: quick.lcx_list_format(made.address, nodes, lists),
        "reaper": free_dead_slots,
    }
