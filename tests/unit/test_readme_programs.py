"""README's programs as they stand, each run twice: the second run finds the pages of the first."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightcache import cache_name
from lightcache.shm import Segment

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(heading: str) -> list[str]:
    """The Python blocks of a section."""
    section = README[README.index(f"\n## {heading}\n") + 1 :]
    section = section[: section.find("\n## ")]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def program(heading: str, name: str, instead_of: str) -> str:
    """The code of a section, for a cache of another name."""
    source = "".join(blocks(heading))
    assert f'"{instead_of}' in source
    return source.replace(f'"{instead_of}', f'"{name}')


def names(source: str) -> set[str]:
    """The names of ours in a program: what it imports from lightcache, and attributes of what that
    gives."""
    ours, theirs = set(), {"model"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            mine = str(node.module).startswith("lightcache")
            (ours if mine else theirs).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            theirs.update(alias.asname or alias.name for alias in node.names)
    for node in ast.walk(ast.parse(source)):
        root: Any = node
        while not isinstance(root, ast.Name) and hasattr(root, "value") | hasattr(root, "func"):
            root = root.value if hasattr(root, "value") else root.func
        if isinstance(node, ast.Attribute) and root.id not in theirs:
            ours.add(node.attr)
    return ours


@pytest.mark.parametrize(
    ("heading", "block", "expected"),
    [
        ("In ten lines", 0, "Cache open get put"),
        ("Transfers", 0, "open_kv cache hash_pages offload wait load"),
        ("A scheduler", 0, "open_kv Prompt manager plan take allocate commit release"),
        ("With transformers, in five lines", 1, "transformers open_cache prefix reused"),
    ],
)
def test_the_first_program_of_each_part_needs_few_names(
    heading: str, block: int, expected: str
) -> None:
    assert names(blocks(heading)[block]) == set(expected.split())


def test_ten_lines(
    segment_name: str, script: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    source = program("In ten lines", segment_name, "llama")
    output = [script(source).stdout for _ in range(2)]
    assert output == [f"{reused} of 300 tokens need not be computed\n" for reused in (0, 256)]
    assert Segment.unlink(cache_name(f"{segment_name}-3-8b", f"{segment_name}-3-8b/bf16/64"))


@pytest.mark.parametrize(
    ("heading", "says"),
    [
        ("Transfers", "256 tokens were loaded\n"),
        ("A scheduler", "PrefixMatch(tokens=300, device=288, "),
    ],
)
def test_programs_of_an_engine(
    heading: str,
    says: str,
    segment_name: str,
    script: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """They leave nothing: their caches end with their last process."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = program(heading, segment_name, "llama")
    for _ in range(2):
        assert script(source).stdout.startswith(says)


@pytest.mark.models
def test_five_lines_for_transformers(
    segment_name: str, script: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    source = "".join(blocks("With transformers, in five lines"))
    source = source.replace("LlamaConfig(", f'LlamaConfig(name_or_path="{segment_name}", ')
    runs = [script(source) for _ in range(2)]
    assert [run.stdout for run in runs] == [
        f"{reused} tokens were not computed\n" for reused in (0, 96)
    ]
    for run in runs:
        (line,) = [line for line in run.stderr.splitlines() if "stays in shared memory" in line]
        assert line.startswith(segment_name)
        assert "MiB" in line
        assert "after 24 h without use" in line
        assert f"`lightcache rm {line.split()[0]}`" in line
    assert Segment.unlink(line.split()[0])
