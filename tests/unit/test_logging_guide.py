"""docs/guides/logging.md has every logger and every warning of the code, and no other."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "logging.md").read_text()
WARN = ("warning", "error", "first", "say_once")
GAP = "\0"
"""In place of what a message is given."""
FORMAT = re.compile(r"%[-.\d]*[sdrgf]")


@cache
def trees() -> list[ast.Module]:
    """All modules that log."""
    sources = [
        path.read_text() for top in ("lightcache", "shm") for path in (ROOT / top).rglob("*.py")
    ]
    logging = re.compile(r"\b_?log\b|\bnotices\b|\.say_once\(|\.trouble\(")
    return [ast.parse(source) for source in sources if logging.search(source)]


def text_of(node: ast.AST) -> str:
    """A literal, with gaps; empty: it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return FORMAT.sub(GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [text_of(part) if isinstance(part, ast.Constant) else GAP for part in node.values]
        return "".join(parts)
    return ""


@cache
def calls() -> list[tuple[str, str]]:
    """(method, text) of all calls that may log, with a literal."""
    return [
        (node.func.attr, text)
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        for argument in node.args[:2]
        if (text := text_of(argument))
    ]


@cache
def texts() -> frozenset[str]:
    """All literals, and what connectors make of the name of a call."""
    found = {text_of(node) for tree in trees() for node in ast.walk(tree)}
    found |= {f"{GAP}: {text}: {GAP}; {GAP}" for method, text in calls() if method == "trouble"}
    return frozenset(found)


def messages() -> list[str]:
    """The messages in the tables of the guide."""
    rows = re.findall(r"^\| (`.*?) \|", GUIDE.partition("## Messages")[2], re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def said(message: str) -> re.Pattern[str]:
    """What a message of the guide stands for."""
    return re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)


def test_every_logger_is_listed() -> None:
    found = {text for method, text in calls() if method == "getLogger"}
    assert found == set(re.findall(r"^\| `(lightcache[\w.]*)` \|", GUIDE, re.MULTILINE))


def test_the_messages_of_the_guide_are_in_the_code() -> None:
    everything = [text for text in texts() if " " in text]
    assert len(messages()) > 40
    unknown = [each for each in messages() if not any(map(said(each).fullmatch, everything))]
    assert unknown == []


def test_every_warning_of_the_code_is_in_the_guide() -> None:
    known = [said(message) for message in messages()]
    missing = {
        text
        for method, text in calls()
        if method in WARN and len(re.findall(r"\w{2,}", text)) > 2
        if not any(each.fullmatch(text) for each in known)
    }
    assert missing == set()


def test_the_configuration_is_one() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    program = (
        "import json, logging.config, sys; logging.config.dictConfig(json.load(sys.stdin));"
        "logging.getLogger('lightcache.storage').debug('it is said')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(json.loads(block)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.fullmatch(r"DEBUG .* lightcache\.storage: it is said\n", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "lines"), [("info", ["INFO lightcache.storage: well"]), (None, [])]
)
def test_a_service_logs_from_the_level_that_is_set(level: str | None, lines: list[str]) -> None:
    program = (
        "import click, logging\n"
        "from lightcache.tools.settings import Service\n"
        "@click.command('x', cls=Service)\n"
        "def x():\n"
        "    logging.getLogger('lightcache.storage').debug('detail')\n"
        "    logging.getLogger('lightcache.storage').info('well')\n"
        "    logging.getLogger('other').info('not ours')\n"
        "x()\n"
    )
    arguments = ["--log-level", level] if level else []
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [line.split(" ", 2)[2] for line in done.stderr.splitlines()] == lines
