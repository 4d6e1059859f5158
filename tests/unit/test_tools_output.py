"""What commands print: on terminals of any width, and when nobody reads it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.storing import make_cache

from lightcache.shm import Segment, read_segment, sweep
from lightcache.tools import cli
from lightcache.tools.output import lines, table

LIGHTCACHE = Path(sys.executable).with_name("lightcache")
NAMES = ["llama-3-8b.storage-e2093b81d9ee4067-tasks", "disk-fe00-216928"]
ROWS = [(name, "ring", "164.0 KiB", "0 + 1 dead", "attached", 19.6) for name in NAMES]
COLUMNS = ("name", "holds", "size", "clients", "life", "age")


def printed(width: int, *what: Any) -> list[str]:
    """Lines, as on a terminal of this width."""
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False)
    for each in what:
        console.print(each)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [55, 60, 80, 90, 100, 132, 200])
def test_no_word_of_a_table_is_cut(width: int) -> None:
    shown = printed(width, table("two segments", COLUMNS, ROWS, right="size"))
    assert max(map(len, shown)) <= width
    assert shown[0] == "two segments"
    words = " ".join(shown).split()
    for word in (*COLUMNS, *NAMES, "164.0", "KiB", "dead", "attached", "19.6"):
        assert word in words
    assert "…" not in " ".join(words)


def test_a_narrow_terminal_has_one_row_below_the_other() -> None:
    shown = printed(60, table("two segments", COLUMNS, ROWS, right="size"))
    assert "  name     llama-3-8b.storage-e2093b81d9ee4067-tasks" in shown
    assert shown.count("  size     164.0 KiB") == 2
    assert not any("│" in line for line in shown)
    assert any("│" in line for line in printed(110, table("", COLUMNS, ROWS)))


def test_a_title_is_not_broken() -> None:
    shown = printed(80, lines("storage service of llama-3-8b", [("serving", "nobody")]))
    assert shown == ["storage service of llama-3-8b", "  serving  nobody"]


# ---------------------------------------------------------------- what is swept


def test_sweep_keeps_to_a_prefix(segment_name: str, script: Any) -> None:
    died = (
        "import os, signal, sys\n"
        "from lightcache import PageIndex\n"
        "made = [PageIndex.create(name, pages=8) for name in sys.argv[1:]]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    mine, other = f"{segment_name}-mine", f"{segment_name}-other"
    script(died, mine, other, status=-signal.SIGKILL)
    swept = CliRunner().invoke(cli.group, ["sweep", "--prefix", mine])
    assert swept.output == f"removed /lightcache.{mine}\n1 objects removed\n"
    assert read_segment(other) is not None
    assert CliRunner().invoke(cli.group, ["sweep", "--prefix", ""]).exit_code == 2
    assert sweep(prefix=segment_name) == [f"/lightcache.{other}"]


# ---------------------------------------------------------------- nobody reads it


@pytest.fixture
def cache_name(segment_name: str) -> Any:
    """A persistent cache."""
    with make_cache(segment_name, lifetime="persistent"):
        yield segment_name
    Segment.unlink(segment_name, force=True)


def started(*arguments: str, before: Sequence[str] = (), **how: Any) -> subprocess.Popen[str]:
    """The command, behind another one that starts it."""
    whole = [*before, LIGHTCACHE, *arguments]
    return subprocess.Popen(whole, stderr=subprocess.PIPE, text=True, **how)


@pytest.mark.parametrize("command", ["ls", "dump", "check"])
def test_stdout_is_closed(cache_name: str, command: str) -> None:
    arguments = [] if command == "ls" else [cache_name]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh"]
    process = started(command, *arguments, before=shell)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("command", ["ls", "dump", "check"])
def test_the_reader_has_gone(cache_name: str, command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = [] if command == "ls" else [cache_name]
    process = started(command, *arguments, stdout=write)
    os.close(write)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, "")  # neither broken (1) nor impossible (2)
