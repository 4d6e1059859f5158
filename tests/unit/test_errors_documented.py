"""docs/errors.md names every error class, and no other."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

from refusals.elsewhere import ELSEWHERE
from support.refusals import refusals

import lightcache
from lightcache import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
MODULES = [path.stem for path in sorted((Path(__file__).parents[1] / "refusals").glob("test_*.py"))]
TRIED_ROWS = [
    row
    for name in MODULES
    for row in refusals(importlib.import_module(f"refusals.{name}").TABLE)
    if row.documented
]
TESTS = Path(__file__).parents[1]
CLASSES = {
    name
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, errors.LightcacheError)
}


@cache
def tables() -> list[list[str]]:
    """The cells of all rows but the heads."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]
    return [row for row in cells if row[0] not in ("class", "what you did")]


@cache
def bad_inputs() -> list[list[str]]:
    return [row for row in tables() if len(row) == 4]


@cache
def proofs() -> list[tuple[str, set[str]]]:
    """How rows begin that a table or a test tries, and the errors that are raised there."""
    found = [(row.documented, {row.error.__name__}) for row in TRIED_ROWS]
    for file, tests in ELSEWHERE.items():
        source = "\n".join(path.read_text() for path in TESTS.glob(file))
        functions = {
            node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
        }
        for name, rows in tests.items():
            assert f"test_{name}" in functions, (file, name)
            raised = {error for error in CLASSES if re.search(rf"\b{error}\b", source)}
            found += [(row, raised) for row in rows]
    return found


def test_every_row_is_tried() -> None:
    tried = proofs()
    for what, raised, *_ in bad_inputs():
        if not raised.startswith("no error: "):
            errors_of = [error for begin, error in tried if what.startswith(begin)]
            assert errors_of, f"nothing in tests/refusals is: {what}"
            assert any(error & set(re.findall(r"`(\w+)`", raised)) for error in errors_of), what


def test_every_refusal_is_one_row() -> None:
    for refusal in TRIED_ROWS:
        rows = [row for row in bad_inputs() if row[0].startswith(refusal.documented)]
        assert len(rows) == 1, refusal.documented
        assert refusal.error.__name__ in rows[0][1], refusal.documented
    for begin, _ in proofs():
        assert any(row[0].startswith(begin) for row in bad_inputs()), begin


def test_no_row_stands_outside_a_table() -> None:
    lines = PAGE.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1]]
    assert [lines[i] for i in starts if not lines[i + 1].startswith("|---")] == []


def test_every_class_is_described() -> None:
    described = {row[0].strip("`") for row in tables() if len(row) == 3}
    assert described == CLASSES
    for row in tables():
        if len(row) == 3 and row[1]:
            kind = getattr(errors, row[0].strip("`"))
            assert row[1].strip("`") in [base.__name__ for base in kind.__mro__]


def test_every_class_has_a_row() -> None:
    raised = {name for row in bad_inputs() for name in re.findall(r"`(\w+)`", row[1])}
    assert raised - {"Reservation"} >= CLASSES - {"LightcacheError"}


def test_rows_name_what_exists() -> None:
    for what, raised, *_ in bad_inputs():
        assert what
        if raised.startswith("no error: "):
            continue
        names = re.findall(r"`([\w.]+)`", raised)
        assert CLASSES & set(names), raised
        for name in names:
            if name in CLASSES:
                assert getattr(lightcache, name) is getattr(errors, name)
            else:
                assert re.fullmatch(r"Reservation\.\w+|why", name), name


def test_every_class_is_exported_and_says_what_to_do() -> None:
    assert set(errors.__all__) == CLASSES
    for name in CLASSES:
        assert name in lightcache.__all__
        assert len((getattr(errors, name).__doc__ or "").splitlines()) >= 1
