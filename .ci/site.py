"""Hooks of the documentation site: pages that are not files of docs/.

The site is docs/, with README.md as its first page, the changelog, a page for each package whose
public names the reference has, and one for each source that a document links to. So the documents'
links lead somewhere in a clone and on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Documents beside docs/, and where they are on the site."""
REFERENCE = re.findall(r"reference/([\w.]+)\.md", (ROOT / "mkdocs.yml").read_text())
"""The packages of the reference: those that the navigation has."""
LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for document, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text()))
    for package in REFERENCE:
        text = f"# {package}\n\n::: {package}\n"
        files.append(File.generated(config, f"reference/{package}.md", content=text))
    for source in sorted(sources(files)):
        files.append(File.generated(config, site_path(source), content=listing(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site, in place of files of the clone."""
    here = path_of(page.file.src_uri)
    if here is None:
        return markdown
    folder = posixpath.dirname(page.file.src_uri)

    def changed(link: re.Match[str]) -> str:
        page_of = posixpath.relpath(site_path(target(here, link[2])), folder or ".")
        return f"{link[1]}{page_of}{link[3]}"

    kept = FENCE.findall(markdown)
    texts = [LINK.sub(changed, text) for text in FENCE.split(markdown)]
    return "".join(a + b for a, b in zip(texts, [*kept, ""], strict=True))


def path_of(uri: str) -> str | None:
    """The file in the clone that a page is made from; None: it is made here."""
    for document, page in PAGES.items():
        if page == uri:
            return document
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else None


def target(document: str, link: str) -> str:
    """What a document links to, as a path in the clone."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def site_path(path: str) -> str:
    """Where a path of the clone is on the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def sources(files: Files) -> set[str]:
    """What the documents link to outside of themselves."""
    documents = [path for file in files if (path := path_of(file.src_uri)) and path.endswith(".md")]
    found = set()
    for document in documents:
        text = FENCE.sub("", (ROOT / document).read_text())
        found |= {target(document, link[2]) for link in LINK.finditer(text)}
    return {path for path in found if path not in PAGES and not path.startswith("docs/")}


def listing(path: Path) -> str:
    """A source, or all sources of a folder, as a page."""
    name = path.relative_to(ROOT)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    shown = [each for each in files if "__pycache__" not in each.parts]
    parts = [f"# {name}\n"]
    for each in shown:
        if each != path:
            parts.append(f"## {each.relative_to(path)}\n")
        parts.append(f"````{LANGUAGES.get(each.suffix, '')}\n{each.read_text()}````\n")
    return "\n".join(parts)
