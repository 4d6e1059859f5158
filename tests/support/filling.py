"""An index's pages for tests: published, counted, read back as JSON, damaged."""

from __future__ import annotations

import ctypes
import json
from typing import Any

from click.testing import CliRunner
from support.keys import Keys, prompt

from lightcache import PageIndex
from lightcache.tools import cli


def fill(index: PageIndex, name: int, pages: int, **more: Any) -> Keys:
    """Publish a prompt; returns its keys."""
    made = prompt(name, pages)
    with index.reserve(made, **more) as new:
        new.publish()
    return made


def pins(index: PageIndex) -> int:
    """The pins of an index that is in order."""
    report = index.check()
    assert report.clean, report.message
    return report.pins


def dumped(name: str) -> dict[str, Any]:
    """What `lightcache dump` says of a cache."""
    done = CliRunner().invoke(cli.group, ["dump", name, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def corrupt(segment: Any, offset: int, value: int) -> None:
    """Write 32 bits into a structure's payload."""
    ctypes.c_uint32.from_address(segment.address + segment.payload_offset + offset).value = value
