"""Sections of docstrings as lists of Markdown, for the documentation site.

Several arguments may stand in front of one colon, and errors in a row without one ("As `peek`.",
"LockTimeout, Detached."): parsers of docstrings drop those. Types are in the signature.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:(?: {4}.*)?(?:\n|\Z))+)", re.MULTILINE)
ITEM = re.compile(r"^ {4}(?=\S)", re.MULTILINE)
NAMES = re.compile(r"[\w*]+(?:, [\w*]+)*(?=:\s)")


class Sections(griffe.Extension):
    """Rewrites each docstring when it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(as_list, obj.docstring.value)


def as_list(section: re.Match[str]) -> str:
    """A section as a heading and a list, in which names stand as code."""
    items = ITEM.split(section[2].rstrip())[1:]
    lines = [f"- {NAMES.sub(as_code, item, count=1).rstrip()}" for item in items]
    return f"**{section[1]}:**\n\n" + "\n".join(lines) + "\n\n"


def as_code(names: re.Match[str]) -> str:
    """Each of some names as code."""
    return ", ".join(f"`{name}`" for name in names[0].split(", "))
