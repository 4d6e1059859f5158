"""`bench hybrid`: the simulators on cases that a hand can check, and the rows."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightcache.hybrid import Grid
from lightcache_bench import Row, _hybrid_plans, hybrid
from lightcache_bench._hybrid_ours import Room, hit_tokens
from lightcache_bench._hybrid_plain import EndsOnly, Pages, TiedToNodes, bound, pages_of
from lightcache_bench._hybrid_traffic import Traffic, Visit

PAGE = 4  # tokens


def visit(prompt: str, answer: str = "") -> Visit:
    """A letter is a page of tokens; the prompt has one token more, which is computed."""
    tokens = [ord(letter) for letter in prompt for _ in range(PAGE)]
    more = [ord(letter) for letter in answer for _ in range(PAGE)]
    if answer:  # which then begins where the prompt's last page does
        tokens, more = tokens + more[:1], more[1:]
    else:
        tokens.append(0)
    return Visit(np.array(tokens, np.int64), np.array(more, np.int64))


def hits(cache: Any, *asked: tuple[str, str] | str) -> list[int]:
    """Pages that each request hits."""
    visits = [visit(*([one] if isinstance(one, str) else one)) for one in asked]
    return [cache.visit(request) for request in pages_of(visits, PAGE)]


# ---- paths


def test_a_page_is_known_by_all_before_it() -> None:
    one, other, third = pages_of([visit("abc", "de"), visit("abxd"), visit("xabc")], PAGE)
    assert (one.path, one.prompt, one.most) == ([0, 1, 2, 3, 4], 3, 3)
    assert other.path[:2] == [0, 1]
    assert not set(other.path[2:]) & set(one.path)
    assert not set(third.path) & set(one.path)
    whole = Visit(np.arange(8), np.arange(3))  # the last token is computed, so its page is, too
    assert pages_of([whole], PAGE) == [Pages([0, 1], 2, 1)]


def test_what_is_possible() -> None:
    requests = pages_of([visit("abcde"), visit("abcx"), visit("abcdey"), visit("z")], PAGE)
    assert bound(requests, 1) == 3 + 5
    assert bound(requests, 2) == 2 + 4


# ---- ends of requests


def test_only_the_ends_of_requests_are_hit() -> None:
    cache = EndsOnly(10, 100)
    asked = [("abcd", "ef"), "abcdefg", "abcdx", "abz", "abz", "abcdefgh"]
    # The answer's end; the prompt's end; none where the others parted; and the prompts' ends.
    assert hits(cache, *asked) == [0, 6, 4, 0, 3, 7]


def test_states_and_kv_go_apart() -> None:
    assert hits(EndsOnly(1, 100), "abc", "xyz", "abc") == [0, 0, 0]
    assert hits(EndsOnly(2, 100), "abc", "xyz", "abc", "xyz") == [0, 0, 3, 3]
    assert hits(EndsOnly(2, 5), "abc", "xyz", "abc") == [0, 0, 0]  # its last page has gone
    assert hits(EndsOnly(9, 5), "ab", "abc", "xyz", "ab") == [0, 2, 0, 2]  # of abc only the end
    assert hits(EndsOnly(2, 100), "a", "b", "a", "c", "a", "b") == [0, 0, 1, 0, 1, 0]


def test_a_prompt_longer_than_the_room_keeps_its_beginning() -> None:
    assert hits(EndsOnly(9, 3), "ab", "abcde", "abcde") == [0, 2, 2]


def test_kv_is_exactly_least_recently_used() -> None:
    """Page by page, the first page of a path the one used last; states wherever requests end."""
    chance = random.Random(3)
    asked = ["".join(chance.choices("ab", k=chance.randint(1, 12))) for _ in range(400)]
    requests = pages_of([visit(path) for path in asked], PAGE)
    for room in (1, 5, 12, 30, 200):
        cache, kv, ends = EndsOnly(1 << 20, room), OrderedDict[int, None](), set()
        for request in requests:
            found = 0
            for at, page in enumerate(request.path[: request.most], 1):
                if page not in kv:
                    break
                found = at if page in ends else found
            assert cache.visit(request) == found
            for page in reversed(request.path[:room]):
                kv[page] = None
                kv.move_to_end(page)
            while len(kv) > room:
                kv.popitem(last=False)
            if len(request.path) <= room:
                ends.add(request.path[-1])


# ---- on nodes of KV


def test_a_split_node_has_no_state() -> None:
    asked = ["abcd", "abxy", "abz", "abcd", "abxyw"]
    assert hits(TiedToNodes(10, 100), *asked) == [0, 0, 0, 4, 4]
    # A request that ends where a node was split gives it one.
    assert hits(TiedToNodes(10, 100), "abcd", "abxy", "ab", "abz") == [0, 0, 0, 2]


def test_passes_leave_states_where_they_end() -> None:
    assert hits(TiedToNodes(10, 100, 2), "abcde", "abxyz", "abcdz") == [0, 2, 4]
    # Counted from where the hit ends.
    assert hits(TiedToNodes(10, 100, 2), "a", "abcde", "abcx") == [0, 1, 3]


def test_kv_that_goes_takes_its_state_along() -> None:
    assert hits(TiedToNodes(10, 6), "abc", "xyz", "abc", "q", "xyz") == [0, 0, 3, 0, 0]
    # The front of the node that was split goes with the last of what hung on it.
    assert hits(TiedToNodes(10, 6), "abcd", "abxy", "pqrst", "ab") == [0, 0, 0, 0]


def test_a_leaf_goes_with_its_state_and_others_stay_without() -> None:
    assert hits(TiedToNodes(2, 100), "ab", "abcd", "x", "ab") == [0, 2, 0, 0]
    assert hits(TiedToNodes(1, 100), "ab", "abcd", "abcd") == [0, 2, 4]
    assert hits(TiedToNodes(1, 100), "ab", "x", "ab") == [0, 0, 0]


@pytest.mark.parametrize("states", [1, 2, 5, 30])
@pytest.mark.parametrize("pages", [1, 4, 11, 40, 400])
def test_a_tree_keeps_its_bounds(states: int, pages: int) -> None:
    chance = random.Random(states * pages)
    cache = TiedToNodes(states, pages, 3)
    asked = ["".join(chance.choices("abc", k=chance.randint(1, 9))) for _ in range(300)]
    for path in pages_of([visit(each) for each in asked], PAGE):
        hit = cache.visit(path)
        assert hit <= path.most
        tree = cache._tree
        assert tree.pages == sum(len(node.pages) for node in tree._nodes) <= pages
        assert len(cache._states) <= states
        assert set(cache._states) <= set(tree._nodes)
        for node in tree._nodes:
            assert node.pages
            assert node.children or node in cache._states
            assert node.parent is not None
            assert node.parent.children[node.pages[0]] is node


# ---- ours


def test_requests_run_through_a_real_manager() -> None:
    grid = Grid(PAGE, PAGE, chunk=PAGE, every=PAGE)
    asked = [visit("abcd", "efg")]
    asked += map(visit, ("abcdefgh", "abxy", "abzz", "abcd", "pqrstuvw", "abcdefgh"))
    wide = Room(20, 100)
    # The answer's end; nothing where prompts part; there, where the one before has saved. The first
    # path's state in the middle is one too many for the bound, and stays while there is room.
    wanted = PAGE * (0 + 7 + 0 + 2 + 4 + 0 + 8)
    assert hit_tokens(asked, grid, wide, chunk=100) == wanted
    assert hit_tokens(asked, grid, Room(1, 100), chunk=100) < wanted
    narrow = Room(20, 8)
    assert hit_tokens(asked, grid, narrow, chunk=100) < wanted
    assert hit_tokens(asked, grid, narrow, wide, chunk=100) == wanted


# ---- what is asked


def test_traffic_is_what_it_says() -> None:
    traffic = Traffic(groups=4, live=5, system=37, document=(50, 90), turns=(1, 5))
    visits = traffic.visits()
    again = traffic.visits()
    assert len(visits) == len(again) > 20
    for one, other in zip(visits, again, strict=True):
        assert (one.prompt == other.prompt).all()
        assert (one.answer == other.answer).all()
    assert len({one.prompt[:37].tobytes() for one in visits}) == 1
    assert len({one.prompt[:87].tobytes() for one in visits}) >= 4  # documents
    asked = [one.prompt.tobytes() for one in visits]
    assert len(set(asked)) < len(asked)  # answers generated again
    history = {np.concatenate([one.prompt, one.answer]).tobytes() for one in visits}
    assert sum(any(ask.startswith(one) for one in history) for ask in asked) > len(asked) / 4
    other = Traffic(groups=4, live=5, system=37, document=(50, 90), seed=1).visits()
    assert other[0].prompt.tobytes() != visits[0].prompt.tobytes()


def test_figures_of_the_model() -> None:
    assert pytest.approx(73.7, abs=0.05) == hybrid.STATE / (1 << 20)
    assert hybrid.KV == 24_576


@pytest.mark.slow
def test_quick_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Row("first plan")
    monkeypatch.setattr(_hybrid_plans, "rows", lambda quick: [plan])  # it has a test of its own
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [0, 1, 2]}\n{"hash_ids": [0, 1, 3]}\n' * 3)
    first, *rows = hybrid.rows(True, trace)
    assert first is plan
    names = [row.name for row in rows]
    assert names[0] == "conversations: hit tokens, possible"
    assert "conversations: hit tokens, device of 1 GiB, host of 2" in names
    possible = {row.name.partition(":")[0]: row.value for row in rows if row.target is None}
    assert set(possible) == {"conversations", "trace"}
    for row in rows:
        assert row.unit == "%"
        if row.target is not None:
            assert 0 < row.value <= possible[row.name.partition(":")[0]]
            assert row.ratio == pytest.approx(row.value / row.params["theirs"], rel=1e-3)
            assert row.met == (row.ratio >= float(row.target.split()[1]))
            if "one pool" in row.name:
                assert row.baseline in {"the best division", "an eighth for states"}
            else:
                assert row.baseline in hybrid.BASELINES
                assert row.params["states"] * hybrid.STATE < row.params["gib"] << 30
    assert not any(row.name.startswith("trace") for row in hybrid.rows(True))
