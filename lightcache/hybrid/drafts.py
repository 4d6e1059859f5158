"""Slots for the states of drafted tokens: speculative decoding with recurrent layers.

Attention drops a rejected token by forgetting its row. A recurrent state that has taken a token in
cannot give it back, so every drafted token leaves a state of its own, and accepting one is a copy.
Their number follows the running requests: checkpoints may be many or few, drafts never wait.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages, count, pages
from lightcache.errors import ConfigError
from lightcache.hybrid.grids import Tokens

_MOST = 1 << 31


class Drafts:
    """For each running request a row of slots, one for each node of its tree of drafted tokens.

    Node 0 is the last token that was accepted: its state is always valid. The others are drafted,
    each behind its parent: `chain` for top-k 1, any tree otherwise. In a step node k reads the
    state of its parent (node 0 the working slot), and writes its own slot:

        read = drafts.reads(rows, parents, working)     # int32 of shape (n, drafted + 1)
        write = drafts.writes(rows)                     # as well
        pairs = drafts.accept(rows, nodes, working)     # one launch copies them all
    """

    def __init__(self, slots: npt.ArrayLike, *, running: int, drafted: int) -> None:
        """Slots that the caller has allocated.

        Args:
            slots: int32 of shape (n,), each once; at least `room(running, drafted)`.
            running: most requests at a time. Which of the rows 0 to running - 1 a request has is
                the caller's choice, and may be another in each step.
            drafted: most drafted tokens of a request in one step, all branches together.

        Raises:
            ConfigError: numbers that are none, or slots that are too few or not distinct.
        """
        self.running = count(running, "running", 1, _MOST)
        self.drafted = count(drafted, "drafted", 1, _MOST)
        found, wanted = pages(slots), self.room(running, drafted)
        if len(found) < wanted:
            raise ConfigError(
                f"drafts: expected slots for {running} requests of {drafted} drafted tokens and "
                f"one more, {wanted}, found {len(found)}"
            )
        if len(np.unique(found)) != len(found):
            raise ConfigError("drafts: expected each slot once")
        self._slots = found[:wanted].reshape(running, drafted + 1).copy()

    @staticmethod
    def room(running: int, drafted: int) -> int:
        """Slots for so many requests: one for each drafted token, and one for the token before."""
        return running * (drafted + 1)

    @property
    def chain(self) -> Tokens:
        """Parents for top-k 1: each node behind the one before."""
        return np.arange(-1, self.drafted, dtype=np.int64)

    def writes(self, rows: npt.ArrayLike) -> Pages:
        """The slot that each node of these rows writes, int32 of shape (n, drafted + 1).

        Raises:
            ConfigError: no such row, or one twice.
        """
        written: Pages = self._slots[self._rows(rows)]
        return written

    def reads(self, rows: npt.ArrayLike, parents: npt.ArrayLike, working: npt.ArrayLike) -> Pages:
        """The slot that each node reads, int32 of shape (n, drafted + 1).

        Args:
            parents: of each node, of shape (drafted + 1,) for all or (n, drafted + 1). A parent
                comes before its children; node 0 has -1.
            working: the working slot of each row, shape (n,).

        Raises:
            ConfigError: rows, or parents that are no tree, or not one working slot for each row.
        """
        written = self.writes(rows)
        tree = self._tree(parents, len(written))
        read: Pages = np.take_along_axis(written, np.maximum(tree, 0), axis=1)
        read[:, 0] = self._working(working, len(written))
        return read

    def accept(self, rows: npt.ArrayLike, nodes: npt.ArrayLike, working: npt.ArrayLike) -> Pages:
        """Pairs (source, destination), int32 of shape (n, 2), that bring the state of the last
        accepted node to the working slot. Node 0: all that was drafted is rejected.

        Raises:
            ConfigError: rows, no such node, or not one node and working slot for each row.
        """
        written = self.writes(rows)
        chosen = self._nodes(nodes, len(written))
        source = written[np.arange(len(written)), chosen]
        return np.stack([source, self._working(working, len(written))], axis=1)

    def ancestors(
        self, parents: npt.ArrayLike, nodes: npt.ArrayLike, behind: npt.ArrayLike
    ) -> Tokens:
        """The node that lies so many tokens before an accepted one on its branch, shape (n,): what
        to copy to an alternating slot where a step has crossed a position that is to be saved
        (`DecodeSaves.behind`).

        Raises:
            ConfigError: parents that are no tree, no such node, or tokens before this step's.
        """
        steps = _integers(behind, "behind")
        found = self._nodes(nodes, steps.size)
        tree = self._tree(parents, len(found))
        each = np.arange(len(found))
        for step in range(int(steps.max(initial=0))):
            found[steps > step] = tree[each, found][steps > step]
            if (found < 0).any():
                row = int(np.argmin(found))
                raise ConfigError(
                    f"ancestors: row {row} asks for {steps[row]} tokens before its node, of which "
                    f"this step computed {step}"
                )
        return found

    # ---- arguments

    def _rows(self, rows: npt.ArrayLike) -> Tokens:
        found = _integers(rows, "rows")
        if found.size and not 0 <= found.min() <= found.max() < self.running:
            raise ConfigError(f"rows: expected 0 to {self.running - 1}, found {found.tolist()}")
        if len(np.unique(found)) != len(found):
            raise ConfigError(f"rows: expected each once, found {found.tolist()}")
        return found

    def _nodes(self, nodes: npt.ArrayLike, wanted: int) -> Tokens:
        found = _integers(nodes, "nodes", wanted)
        if found.size and not 0 <= found.min() <= found.max() <= self.drafted:
            raise ConfigError(f"nodes: expected 0 to {self.drafted}, found {found.tolist()}")
        return found

    def _working(self, working: npt.ArrayLike, wanted: int) -> Pages:
        found = pages(working)
        if len(found) != wanted:
            raise ConfigError(f"working: expected {wanted} slots, found {len(found)}")
        return found

    def _tree(self, parents: npt.ArrayLike, wanted: int) -> Tokens:
        tree, nodes = np.asarray(parents), self.drafted + 1
        if tree.shape not in ((nodes,), (wanted, nodes)) or tree.dtype.kind not in "iu":
            raise ConfigError(
                f"parents: expected integers of shape ({nodes},) or ({wanted}, {nodes}), found "
                f"{tree.dtype} {tree.shape}"
            )
        inner = tree[..., 1:]
        if (tree[..., 0] != -1).any() or (inner < 0).any() or (inner >= np.arange(1, nodes)).any():
            raise ConfigError("parents: expected -1 for node 0, and an earlier node for the others")
        return np.broadcast_to(tree.astype(np.int64), (wanted, nodes))


def _integers(values: npt.ArrayLike, what: str, wanted: int | None = None) -> Tokens:
    found = np.asarray(values)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"{what}: expected one row of integers, found {found.dtype} {found.shape}"
        )
    if wanted is not None and len(found) != wanted:
        raise ConfigError(f"{what}: expected {wanted}, found {len(found)}")
    return found.astype(np.int64)


__all__ = ["Drafts"]
