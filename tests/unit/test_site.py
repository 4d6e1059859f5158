"""The documentation site: what the navigation has, and how docstrings become pages. `make docs`
builds it, and fails on a link that leads nowhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from support.frozen import PACKAGES

ROOT = Path(__file__).parents[2]
NAVIGATION = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def hooks(name: str) -> Any:
    """A module of .ci that the site is built with."""
    pytest.importorskip("griffe", reason="`make docs` installs it")
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_package_with_frozen_names_is_in_the_reference() -> None:
    assert [page for page in NAVIGATION if page.startswith("reference/")] == [
        f"reference/{package}.md" for package in PACKAGES
    ]


def test_every_document_is_in_the_navigation_once() -> None:
    documents = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert documents <= set(NAVIGATION)
    assert len(NAVIGATION) == len(set(NAVIGATION))


def test_sections_of_docstrings_keep_every_line() -> None:
    text = (
        "Does it.\n\nArgs:\n    start, stop: of the keys;\n        in pages.\n\n"
        "Raises:\n    ConfigError: a strided view.\n    As `peek`; NotReady too."
    )
    sections = hooks("docstrings")
    assert sections.SECTION.sub(sections.as_list, text) == (
        "Does it.\n\n**Args:**\n\n- `start`, `stop`: of the keys;\n        in pages.\n\n"
        "**Raises:**\n\n- `ConfigError`: a strided view.\n- As `peek`; NotReady too.\n\n"
    )


def test_links_lead_to_pages_of_the_site() -> None:
    site = hooks("site")
    for document, link, page in (
        ("README.md", "docs/guides/vllm.md", "guides/vllm.md"),
        ("docs/guides/vllm.md", "../../CONTRIBUTING.md", "contributing.md"),
        ("docs/guides/metrics.md", "../../deploy/monitoring/", "source/deploy/monitoring.md"),
        ("docs/guides/tools.md", "../top.svg", "top.svg"),
    ):
        assert site.site_path(site.target(document, link)) == page
