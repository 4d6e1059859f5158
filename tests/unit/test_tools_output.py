"""What commands print: on terminals of any width, and when nobody reads it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
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

from lightcache.shm import Segment, names, sweep
from lightcache.shm.listing import read_segment
from lightcache.tools import cli, maintenance
from lightcache.tools.output import counted, lines, table, without_passwords

LIGHTCACHE = Path(sys.executable).with_name("lightcache")
NAMES = ["llama-3-8b.storage-e2093b81d9ee4067-tasks", "disk-fe00-216928"]
ROWS = [(name, "ring", "164.0 KiB", "0 + 1 dead", "attached", 19.6) for name in NAMES]
COLUMNS = ("name", "holds", "size", "clients", "life", "age")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

AS_NOBODY = """
import importlib, os, sys
from click.testing import CliRunner
from lightcache.tools import cli
for module, _ in cli.COMMANDS.values():  # all that root alone may read
    importlib.import_module(f"lightcache.tools.{module}")
CliRunner().invoke(cli.group, ["ls"])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
cli.main()
"""


def as_nobody(*arguments: str, status: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command line, as another user who may read nothing of ours."""
    command = [sys.executable, "-c", AS_NOBODY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    if status is not None:
        assert done.returncode == status, (done.stdout, done.stderr)
    return done


def printed(width: int, *what: Any) -> list[str]:
    """Lines, as on a terminal of this width."""
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False)
    for each in what:
        console.print(each)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_one_is_not_several() -> None:
    assert [counted(n, "page") for n in (0, 1, 2, 1000)] == [
        *("0 pages", "1 page", "2 pages", "1,000 pages")
    ]


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
    shown = printed(80, lines("storage service of llama-3-8b", [("serving", "no service")]))
    assert shown == ["storage service of llama-3-8b", "  serving  no service"]


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
    swept = CliRunner().invoke(cli.group, ["sweep", "--prefix", mine, "--yes"])
    first, last = swept.output.splitlines()
    assert first.startswith(f"/lightcache.{mine} (")
    assert first.endswith("would use it, warm")
    assert last == "1 object removed"
    assert read_segment(other) is not None
    assert CliRunner().invoke(cli.group, ["sweep", "--prefix", ""]).exit_code == 2
    assert sweep(prefix=segment_name) == [f"/lightcache.{other}"]


@pytest.fixture
def left(segment_name: str, script: Any) -> str:
    """A cache whose processes were all killed, a pool without its cache, and a prefix of both."""
    died = (
        "import os, signal, sys\n"
        "from lightcache import Cache\n"
        "options = dict(pages=8, page_bytes=4096, fingerprint='f', secret=bytes(16))\n"
        "made = Cache.create(sys.argv[1], **options)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script(died, f"{segment_name}-a", status=-signal.SIGKILL)
    orphan = names.FOLDER / f"lightcache.{segment_name}-b~pool-{'0' * 32}"
    orphan.write_bytes(bytes(8192))
    return segment_name


def test_sweep_asks(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists what would go, why and how large; and removes it when it is told to."""
    monkeypatch.setattr(maintenance, "_agreed", lambda count: asked.append(count) or answer)
    asked: list[int] = []
    answer = False
    command = ["sweep", "--prefix", left]
    refused = CliRunner().invoke(cli.group, command)
    assert (refused.exit_code, asked) == (2, [2])
    assert "all its clients were killed" in refused.stdout
    assert f"~pool-{'0' * 32} (8.0 KiB): its segment '{left}-b' is gone" in refused.stdout
    assert "nothing was removed; `lightcache sweep --yes`" in refused.stderr
    assert read_segment(f"{left}-a") is not None
    answer = True
    swept = CliRunner().invoke(cli.group, command)
    assert swept.exit_code == 0
    assert swept.stdout.endswith("2 objects removed\n")
    assert not [name for name in names.segment_names() if name.startswith(left)]
    assert not [one for one in names.dependents() if one.segment.startswith(left)]


@pytest.mark.slow
def test_sweep_asks_on_a_terminal_and_nowhere_else(left: str, tmp_path: Path) -> None:
    command = [LIGHTCACHE, "sweep", "--prefix", left]
    silent = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert silent.returncode == 2
    assert read_segment(f"{left}-a") is not None
    for answer, status in ((b"n\n", 2), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True) as child:
            os.write(ours, answer)
            said, _ = child.communicate()
        os.close(ours)
        os.close(theirs)
        assert "remove these 2 objects? [y/N]" in said
        assert child.returncode == status
    assert read_segment(f"{left}-a") is None


def test_sweep_removes_what_it_listed_alone(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came to be garbage while it asked was not agreed to; what came to be used stays."""
    late = names.FOLDER / f"lightcache.{left}-c~pool-{'0' * 32}"
    opened: list[Any] = []

    def agreed(count: int) -> bool:
        late.write_bytes(b"")
        opened.append(Segment.attach(f"{left}-a"))
        return True

    monkeypatch.setattr(maintenance, "_agreed", agreed)
    swept = CliRunner().invoke(cli.group, ["sweep", "--prefix", left])
    opened.pop().close()
    assert f"left /lightcache.{left}-a: it is used now" in swept.stdout
    assert "1 object removed" in swept.stdout
    assert late.exists()
    late.unlink()


# ---------------------------------------------------------------- whose they are


@needs_root
def test_ls_says_whose_and_shows_no_zeros(segment_name: str, tmp_path: Path) -> None:
    """Of a cache of another user only its name, owner and size are seen; that is no 0 clients."""
    cache = make_cache(segment_name, lifetime="persistent")
    ls = as_nobody("ls", "--json")
    (entry,) = [each for each in json.loads(ls.stdout) if each["name"] == segment_name]
    assert (entry["owner"], entry["uid"], entry["state"]) == ("0 (root)", 0, "another user's")
    assert entry["bytes"] > 0
    assert entry["pool_bytes"] == cache.pool.nbytes
    for unknown in ("clients", "dead_clients", "pages", "age_s", "kind", "lifetime", "uuid"):
        assert entry[unknown] is None, unknown
    assert "belongs to user 0 (root)" in entry["problem"]
    (row,) = [line for line in as_nobody("ls").stdout.splitlines() if segment_name in line]
    assert "0 (root)" in row
    assert not re.search(r"│ +0(\.0 B)? +│", row)
    cache.close()
    Segment.unlink(segment_name)


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(
    "command", [["dump"], ["check"], ["check", "--lock"], ["rm"], ["reap"], ["repair"], ["disable"]]
)
def test_of_another_user_every_command_says_whose(cache_name: str, command: list[str]) -> None:
    done = as_nobody(*command, cache_name, status=2)
    assert f"/dev/shm/lightcache.{cache_name}" in done.stderr
    assert "belongs to user 0 (root)" in done.stderr
    assert "runs as user 65534" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@needs_root
def test_sweep_says_whose_it_did_not_look_at(cache_name: str) -> None:
    said = as_nobody("sweep", "--prefix", cache_name).stdout
    assert "not listed: 1 of user 0 (root)" in said


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


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "dump", "check"])
def test_the_reader_has_gone(cache_name: str, command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = [] if command == "ls" else [cache_name]
    process = started(command, *arguments, stdout=write)
    os.close(write)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, "")  # neither broken (1) nor impossible (2)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:1/0", "redis://...@host:1/0"),
        ("redis://:se/cr@et@host:1/0?ttl=1", "redis://...@host:1/0?ttl=1"),
        ("s3://bucket/a@b/c", "s3://...@b/c"),  # too much is better than too little
        ('["redis://u:p@one", "redis://u:p@two"]', '["redis://...@two"]'),
        ("disk:/mnt/x@y?capacity=1TiB", "disk:/mnt/x@y?capacity=1TiB"),
        ("tcp://*:5557", "tcp://*:5557"),
    ],
)
def test_without_passwords(url: str, shown: str) -> None:
    assert without_passwords(url) == shown
