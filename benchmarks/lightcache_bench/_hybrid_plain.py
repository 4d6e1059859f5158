"""What other engines keep of a hybrid model's prefixes, in process: two simulators, and a bound.

Requests are paths of pages: one number for each page, equal numbers for equal prefixes.

Both simulators are given every benefit of the doubt. Requests run one at a time, hold nothing that
others miss, and compute nothing twice; states are those of a whole page of KV, though none exists
there unless an engine ends a pass for it; nothing is lost to copies, chunks of a kernel or slots
for running requests. How their bytes are divided is tried with the requests themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightcache_bench._hybrid_traffic import Tokens, Visit


@dataclass(frozen=True)
class Pages:
    """A request, in pages."""

    path: list[int]
    """Of the prompt and its answer."""
    prompt: int
    """Whole pages of the prompt."""
    most: int
    """Of these, that may be found: one token at least is computed."""


def pages_of(visits: Sequence[Visit], page_tokens: int) -> list[Pages]:
    """The paths of requests, numbered in the order of their arrival."""
    known: dict[tuple[int, bytes], int] = {}
    found = []
    for visit in visits:
        path: list[int] = []
        for page in _whole_pages(visit, page_tokens):
            parent = path[-1] if path else -1
            path.append(known.setdefault((parent, page), len(known)))
        prompt = len(visit.prompt)
        found.append(Pages(path, prompt // page_tokens, (prompt - 1) // page_tokens))
    return found


def _whole_pages(visit: Visit, page_tokens: int) -> list[bytes]:
    every: list[Tokens] = [visit.prompt, visit.answer]
    content = b"".join(part.tobytes() for part in every)
    step = page_tokens * visit.prompt.itemsize
    return [content[at : at + step] for at in range(0, len(content) - step + 1, step)]


def bound(requests: Sequence[Pages], grid: int) -> int:
    """Pages that could be hit with room for everything, and a state at every position of a grid
    of so many pages."""
    seen: set[int] = set()
    total = 0
    for request in requests:
        path = request.path[: request.most]
        total += next((i for i, page in enumerate(path) if page not in seen), len(path)) // grid
        seen.update(request.path)
    return total * grid


@dataclass(eq=False)
class Node:
    """A run of pages."""

    pages: list[int]
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    """By their first page."""


class Tree:
    """KV: a radix tree with room for so many pages. A simulator says what is evicted, and how."""

    def __init__(self, room: int) -> None:
        self.room, self.pages = room, 0
        self._root = Node([], None)
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        """The one used longest ago first."""

    def way(self, path: list[int]) -> list[Node]:
        """The nodes along a path as far as they go; the last is split where they part."""
        way, node, at = [], self._root, 0
        while at < len(path) and path[at] in node.children:
            node = node.children[path[at]]
            same = _same(node.pages, path, at)
            if same < len(node.pages):
                node = self._split(node, same)
            way.append(node)
            at += same
        return way

    def _split(self, node: Node, at: int) -> Node:
        """The front of a node becomes one of its own."""
        assert node.parent is not None
        front = Node(node.pages[:at], node.parent, {node.pages[at]: node})
        node.parent.children[node.pages[0]] = front
        node.pages, node.parent = node.pages[at:], front
        self._nodes[front] = None  # used now, as the rest is not
        return front

    def use(self, way: Sequence[Node]) -> None:
        """Nodes of a path, from its root: the first is the one used last."""
        for node in reversed(way):
            self._nodes.move_to_end(node)

    def add(self, path: list[int], evict: Callable[[Node, int, set[Node]], None]) -> list[Node]:
        """Pages of a path that are not there yet become a leaf; all of it is used. For a path that
        there is room for.

        Args:
            evict: takes the leaf used longest ago, how many pages are wanted, and the nodes that
                must stay.
        """
        way = self.way(path)
        rest, busy = path[depth(way) :], set(way)
        while (excess := self.pages + len(rest) - self.room) > 0:
            leaves = (node for node in self._nodes if not node.children and node not in busy)
            evict(next(leaves), excess, busy)
        if rest:
            parent = way[-1] if way else self._root
            leaf = parent.children[rest[0]] = Node(rest, parent)
            self._nodes[leaf] = None
            self.pages += len(rest)
            way.append(leaf)
        self.use(way)
        return way

    def cut(self, leaf: Node, count: int) -> None:
        """A leaf loses so many pages from its end, and goes with the last one."""
        self.pages -= count
        if count < len(leaf.pages):
            del leaf.pages[-count:]
            return
        assert leaf.parent is not None
        del leaf.parent.children[leaf.pages[0]]
        del self._nodes[leaf]


def depth(way: Sequence[Node]) -> int:
    """Pages along some nodes."""
    return sum(len(node.pages) for node in way)


def _same(pages: list[int], path: list[int], at: int) -> int:
    """How many pages of a node a path has from there on."""
    if path[at : at + len(pages)] == pages:
        return len(pages)
    pairs = zip(pages, path[at:], strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(path) - at)


class EndsOnly:
    """Checkpoints at the ends of requests, of the prompt and of the answer, and nowhere else: no
    branching points, none on the way. States and KV are evicted apart from each other, what was
    used longest ago first, KV page by page from the end of a prefix: as ours.
    """

    def __init__(self, states: int, pages: int) -> None:
        """Args:
        states, pages: that there is room for.
        """
        self._tree, self._room = Tree(pages), states
        self._states: OrderedDict[int, None] = OrderedDict()
        """By the page that they stand behind, the one used longest ago first."""

    def visit(self, request: Pages) -> int:
        """Pages that it need not compute."""
        path = request.path
        found = depth(self._tree.way(path[: request.most]))
        hit = next((at for at in range(found, 0, -1) if path[at - 1] in self._states), 0)
        kept = path[: self._tree.room]
        self._tree.add(kept, self._trim)
        for at in (hit, request.prompt, len(path)):
            if max(hit, 1) <= at <= len(kept):
                self._save(path[at - 1])
        return hit

    def _save(self, state: int) -> None:
        self._states[state] = None
        self._states.move_to_end(state)
        if len(self._states) > self._room:
            self._states.popitem(last=False)

    def _trim(self, leaf: Node, excess: int, busy: set[Node]) -> None:
        self._tree.cut(leaf, min(excess, len(leaf.pages)))


class TiedToNodes:
    """Checkpoints on the nodes of a radix tree of KV, as in the first version of SGLang's
    MambaRadixCache.

    A state hangs on a node and exists only where one ends: at the end of a pass of prefill, of the
    prompt and of the answer. A node that is split leaves its front without one. A match goes as far
    as the deepest node with a state, and refreshes what is on the way there. KV is evicted by whole
    leaves, the one used longest ago first; a leaf takes its state along, and the nodes before it
    that have neither state nor children then. States go by their last use too, of one path those
    nearer to the root first; one of a leaf takes the leaf along.
    """

    def __init__(self, states: int, pages: int, chunk: int | None = None) -> None:
        """Args:
        states, pages: that there is room for.
        chunk: pages of a pass of prefill; None: a prompt is computed in one.
        """
        self._tree, self._room, self._chunk = Tree(pages), states, chunk
        self._states: OrderedDict[Node, None] = OrderedDict()
        """Nodes with a state, the one used longest ago first."""

    def visit(self, request: Pages) -> int:
        """Pages that it need not compute."""
        way = self._tree.way(request.path[: request.most])
        while way and way[-1] not in self._states:
            way.pop()
        self._use(way)
        hit = depth(way)
        ends = {request.prompt, len(request.path)}
        if self._chunk is not None:
            ends.update(range(hit + self._chunk, request.prompt, self._chunk))
        for end in sorted(end for end in ends if end > hit):
            self._insert(request.path[:end])
        return hit

    def _use(self, way: list[Node]) -> None:
        self._tree.use(way)
        for node in way:
            if node in self._states:
                self._states.move_to_end(node)

    def _insert(self, path: list[int]) -> None:
        """A pass, or the answer, ends here with its state."""
        if not self._room or len(path) > self._tree.room:
            return
        way = self._tree.add(path, self._drop)
        self._states[way[-1]] = None
        self._use(way)
        while len(self._states) > self._room:
            oldest = next(iter(self._states))
            if oldest.children:
                del self._states[oldest]
            else:
                self._drop(oldest, 0, set(way))

    def _drop(self, leaf: Node, excess: int, busy: set[Node]) -> None:
        """A leaf goes, and what has neither state nor children then and is not in use."""
        node: Node | None = leaf
        while node is not None and node.parent is not None:
            self._states.pop(node, None)
            self._tree.cut(node, len(node.pages))
            node = node.parent
            if node.children or node in self._states or node in busy:
                break


__all__ = ["EndsOnly", "Node", "Pages", "TiedToNodes", "Tree", "bound", "depth", "pages_of"]
