"""Sources of scripts that tests run in a process of their own."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent.parent

PREAMBLE = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"


def with_support(source: str) -> str:
    """The source, able to import `support`."""
    return PREAMBLE + source
