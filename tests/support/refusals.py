"""Refusals: calls that end with a typed error, as rows of tables.

tests/unit/test_refusals.py tries them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Refusal:
    """A row of a table.

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
