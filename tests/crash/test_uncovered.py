"""uncovered.txt can be read, names lines that exist, and cannot hide a change of the segment."""

from __future__ import annotations

import pytest
from crash import uncovered


def test_listed_lines_exist() -> None:
    for entry in uncovered.read():
        if entry.file == "*":
            continue
        lines = (uncovered.ROOT / entry.file).read_text().splitlines()
        texts = [uncovered.squeeze(line) for line in lines]
        assert any(entry.function in ("*", text) or entry.function in text for text in texts), entry
        if entry.text != "*":
            assert any(entry.excepts(entry.file, entry.function, text) for text in texts), entry


@pytest.mark.parametrize("text", ["*", "~.*", "~lc_store.*"])
def test_no_pattern_excepts_a_store(text: str) -> None:
    entry = uncovered.parse(f"a.c f | {text} | damage: nobody gets there")
    assert not entry.excepts("a.c", "f", "lc_store(&p->word,1);")
    assert not entry.excepts("a.c", "f", "if(done)lc_txn_add(t,&list->count,done);")


def test_a_store_is_excepted_by_its_own_text() -> None:
    entry = uncovered.parse("a.c f | lc_store(&p->word,1); | damage: nobody gets there")
    assert entry.excepts("a.c", "f", "lc_store(&p->word,1);")
    assert not entry.excepts("a.c", "g", "lc_store(&p->word,1);")


@pytest.mark.parametrize(
    "line",
    [
        "a.c f | return0;",
        "a.c f | return0; | because: of that",
        "a.c f | return0; | race: no test is named",
        "a.c f | return0; | race: tests/multi/test_nothing.py plays it",
        "a.c * | * | damage: too much",
    ],
)
def test_entries_that_say_too_little_or_except_too_much(line: str) -> None:
    with pytest.raises(uncovered.BadEntry):
        uncovered.parse(line)
