"""What must not change by accident, as text: names and signatures, the command line, bytes.

`python tests/support/frozen.py` writes the text anew, for a change that is meant.
"""

from __future__ import annotations

import importlib
import inspect
import re
import struct
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

FOLDER = Path(__file__).parents[1] / "frozen"
PACKAGES = (
    "lightcache",
    "lightcache.shm",
    "lightcache.kernels",
    "lightcache.storage",
    "lightcache.manager",
    "lightcache.manager.backend",
    "lightcache.manager.handoff",
    "lightcache.manager.ranks.coordinator",
    "lightcache.manager.ranks.messages",
    "lightcache.manager.ranks.startup",
    "lightcache.manager.ranks.worker",
    "lightcache.manager.stats",
    "lightcache.hybrid",
    "lightcache.metrics",
    "lightcache.connectors.lightllm",
    "lightcache.connectors.transformers",
)


# ---- public names


def _signature(function: Any) -> str:
    """Sets in the order of their elements."""
    return re.sub(
        r"frozenset\(\{(.*?)\}\)",
        lambda found: f"frozenset({{{', '.join(sorted(found[1].split(', ')))}}})",
        str(inspect.signature(function)),
    )


def _members(owner: type) -> Iterator[str]:
    for name, value in sorted(vars(owner).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, property):
            yield f"    {name}: property"
        elif isinstance(value, (staticmethod, classmethod)):
            yield f"    {type(value).__name__} {name}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"    {name}{_signature(value)}"


def _inherited(owner: type) -> Iterator[str]:
    """Members of a class, those of its bases of ours included: they may move among them."""
    lines: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("lightcache"):
            for line in _members(base):
                lines[line.split("(")[0].split(":")[0].split()[-1]] = line
    yield from (lines[name] for name in sorted(lines))


def api() -> str:
    """Public names of every package, with their signatures."""
    lines: list[str] = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines.append(f"# {package}")
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.isclass(value):
                lines.append(f"class {name}")
                if issubclass(value, Enum):
                    lines += [f"    {one.name} = {one.value!r}" for one in value]
                lines += _inherited(value)
            elif inspect.isroutine(value):
                lines.append(f"def {name}{_signature(value)}")
            else:
                lines.append(f"{name}: {type(value).__name__}")
        lines.append("")
    return "\n".join(lines)


# ---- the command line


def _command(path: str, command: click.Command) -> Iterator[str]:
    yield path
    for one in command.params:
        names = " ".join((*one.opts, *one.secondary_opts))
        kind = "" if getattr(one, "is_flag", False) else f" {one.type.name}"
        yield f"    {names}{kind}{' required' if one.required else ''}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in sorted(command.list_commands(context)):
            found = command.get_command(context, name)
            assert found is not None
            yield from _command(f"{path} {name}", found)


def cli() -> str:
    """Commands, options and their types."""
    from lightcache.tools.cli import group

    return "\n".join(_command("lightcache", group)) + "\n"


# ---- bytes


def _keys() -> Any:
    return np.arange(4, dtype=np.uint64).reshape(2, 2)


def _hashes() -> Iterator[tuple[str, bytes]]:
    from lightcache.hashing import Algorithm, KeySpec, hash_pages

    for algorithm in get_args(Algorithm):
        spec = KeySpec("model", 4, secret=bytes(range(32)), algorithm=algorithm)
        yield f"keys {algorithm}", hash_pages(spec, range(8)).tobytes()


def _messages() -> Iterator[tuple[str, bytes]]:
    from lightcache.leases import TICKET_BYTES
    from lightcache.manager.handoff import KVHandoff
    from lightcache.manager.ranks.messages import Decisions, Kind, Order, encode
    from lightcache.namespaces import Namespace
    from lightcache.storage import TaskState
    from lightcache.storage.service.messages import Answer, Ask, Part

    ticket = bytes(range(TICKET_BYTES))
    yield "handoff", bytes(KVHandoff(64, 3, ticket, bytes(16)))
    yield "rank load", encode(Order(Kind.LOAD, 7, ticket, np.array([4, 5, -1, -1, 9])))
    yield "rank step", encode(Decisions(3, {"a": (1, 2)}, b"x", (1,), (2,), ("b",)))
    yield "rank startup", encode(None)
    space = Namespace("weights", "tenant", 5)
    how = {"request": 9, "tokens": 8}
    yield "storage ask", Ask("write", 1.0, _keys(), space, how).pack()
    yield "storage part", Part(2, 3, 0, 1, b"body").pack()
    yield "storage answer", Answer(1, TaskState.FINISHED, 2, {}, ("why",)).pack()


def _stored() -> Iterator[tuple[str, bytes]]:
    from lightcache.storage.disk.slots import Footer
    from lightcache.storage.remote.base import make_trailer

    key = bytes(range(16))
    footer = Footer(bytes(8), 1, 2, key, bytes(16), 3, 4, 5)
    yield "disk footer", footer.pack().rstrip(b"\0")
    yield "remote trailer", make_trailer(key, b"page")


def _segments() -> Iterator[tuple[str, bytes]]:
    from lightcache.page_index import _facts
    from lightcache.shm.wanted import want

    facts: dict[str, Any] = {"kind": None, "payload_bytes": None, "config": None}
    facts |= {"lifetime": None, "group": None}
    yield "index layout", struct.pack("<Q", want("x", layout_facts=_facts(), **facts).layout_hash)


def stored_bytes() -> str:
    """Keys, messages and what is kept, as hexadecimal digits."""
    parts = (_segments, _hashes, _messages, _stored)
    return "".join(f"{name}: {data.hex()}\n" for part in parts for name, data in part())


TEXTS: dict[str, Callable[[], str]] = {"api": api, "cli": cli, "bytes": stored_bytes}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or TEXTS:
        (FOLDER / f"{name}.txt").write_text(TEXTS[name]())
