"""Namespaces: apart from each other, forgotten whole, bounded in number."""

from __future__ import annotations

from support.keys import prompt
from support.refusals import refused

from lightcache import Abandoned, LeaseLost, OutOfPages, PageIndex
from lightcache.namespaces import Namespace

PAGES = 8


def put(index: PageIndex, name: int, pages: int, namespace: Namespace | None = None) -> None:
    with index.reserve(prompt(name, pages), namespace=namespace) as new:
        new.publish()


def test_the_same_name_is_the_same_namespace(index: PageIndex, segment_name: str) -> None:
    mine = index.namespace("w1", "t")
    assert index.namespace("w1", "t") == mine
    assert index.namespace("w1") != mine
    assert index.namespace().id == 0
    with PageIndex.attach(segment_name) as other:
        assert other.namespace("w1", "t") == mine


def test_clearing_the_default_one_reopens_it(index: PageIndex, segment_name: str) -> None:
    put(index, 1, 2)
    with PageIndex.attach(segment_name) as other:
        index.clear()
        assert index.peek(prompt(1, 2)) == 0
        put(index, 2, 2)
        assert index.peek(prompt(2, 2)) == 2
        assert other.peek(prompt(2, 2)) == 0, "it has not heard of the new one"
        refused(Abandoned, "cleared", other.reserve, prompt(2, 2))
        assert other.peek(prompt(2, 2), namespace=other.namespace()) == 2
        other.clear()
        assert other.peek(prompt(2, 2)) == 2, "clearing a cleared one forgets nothing new"


def test_an_old_handle_does_not_clear_its_successor(index: PageIndex) -> None:
    old = index.namespace("w1")
    index.clear(old)
    new = index.namespace("w1")
    put(index, 1, 2, new)
    index.clear(old)
    assert index.peek(prompt(1, 2), namespace=new) == 2


def test_the_table_is_full(index: PageIndex) -> None:
    made = [index.namespace("w", str(i)) for i in range(255)]
    refused(OutOfPages, "256", index.namespace, "one more")
    assert index.namespace("w", "7") == made[7], "existing ones are found"
    index.clear(made[9])
    assert index.namespace("one more").id == made[9].id


def test_the_longest_names(index: PageIndex) -> None:
    index.namespace("x" * 47, "é" * 23)


def test_a_reader_finds_but_makes_none(index: PageIndex, segment_name: str) -> None:
    mine = index.namespace("w1")
    put(index, 1, 2, mine)
    with PageIndex.attach(segment_name, readonly=True) as reader:
        assert reader.namespace("w1") == mine
        assert reader.peek(prompt(1, 2), namespace=mine) == 2
        refused(LeaseLost, "none", reader.namespace, "w2")


def test_a_handle_goes_on_after_somebody_else_cleared_the_default(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8) as one, PageIndex.attach(segment_name) as two:
        found = prompt(1, 3)
        with two.reserve(found) as new:
            new.publish()
        one.clear()
        assert two.peek(found) == 0
        refused(Abandoned, "use", two.reserve, found)
        two.use(two.namespace())
        with two.reserve(found) as new:
            new.publish()
        assert one.peek(found) == 3


def test_use_changes_what_calls_without_a_namespace_mean(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8) as index:
        second = index.namespace("v2")
        index.use(second)
        with index.reserve(prompt(1, 2)) as new:
            new.publish()
        assert index.default_namespace == second
        assert index.peek(prompt(1, 2), namespace=second) == 2
        index.clear()
        assert index.default_namespace.weights == "v2"
        assert index.peek(prompt(1, 2)) == 0
