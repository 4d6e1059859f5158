"""Refusals: calls that end with a typed error. Those of tests/refusals are rows of tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Table = dict[tuple[str, type[Exception]], list[tuple[Any, ...]]]
"""Of a module: {(documented, error): [(words, call, ...), ...]}, as the fields of `Refusal`."""


@dataclass(frozen=True)
class Refusal:
    """A call of a table.

    Attributes:
        documented: the first cell of the row of docs/errors.md, or how that cell begins.
        error: what is raised, exactly.
        words: a regular expression that the message holds.
        call: prepares, and makes the call. Its parameters without a default name fixtures.
    """

    documented: str
    error: type[Exception]
    words: str
    call: Callable[..., Any]

    def fixtures(self) -> list[str]:
        parameters = inspect.signature(self.call).parameters.values()
        return [one.name for one in parameters if one.default is one.empty]


def refusals(table: Table) -> list[Refusal]:
    return [
        Refusal(documented, error, words, call)
        for (documented, error), rows in table.items()
        for words, *calls in rows
        for call in calls
    ]


def tried(table: Table) -> Callable[..., None]:
    """A test of each call: this error is raised, of this very class, and says these words."""

    @pytest.mark.parametrize("row", refusals(table), ids=lambda row: row.documented)
    def test(request: pytest.FixtureRequest, row: Refusal) -> None:
        fixtures = {name: request.getfixturevalue(name) for name in row.fixtures()}
        with pytest.raises(row.error, match=row.words or None) as caught:
            row.call(**fixtures)
        assert type(caught.value) is row.error

    return test


def twice(call: Callable[[], object]) -> None:
    call()
    call()


def ended(held: Any) -> Any:
    """A lease, batch or reservation after its release."""
    held.release()
    return held


def refused(
    error: type[Exception] | tuple[type[Exception], ...],
    words: str,
    call: Callable[..., object],
    /,
    *arguments: Any,
    **named: Any,
) -> None:
    """Assert that a call raises such an error, whose message holds this regular expression."""
    with pytest.raises(error, match=words or None):
        call(*arguments, **named)
