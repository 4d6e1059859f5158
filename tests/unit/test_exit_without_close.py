"""Processes that end in order, and objects that are dropped, without `close`: not dead clients."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from support.filling import dumped
from support.keys import prompt

from lightcache import PageIndex
from lightcache.shm import Segment, SharedCounters, SharedDict, SharedList, SharedLog, SharedRing

Script = Callable[..., Any]


ENDS = {
    "the end of the script": "",
    "sys.exit": "sys.exit(0)",
    "an exception": "raise SystemExit('wrong')",
    "after use": "index.reserve(prompt(2, 3)).release()",
    "in a function": "def use():\n    local = PageIndex.attach(sys.argv[1])\nuse()",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_client_that_ends_without_close_is_not_dead(
    segment_name: str, script: Script, how: str
) -> None:
    source = textwrap.dedent(
        """
        import os, sys
        sys.path.insert(0, sys.argv[2])
        from support.keys import prompt
        from lightcache import PageIndex
        index = PageIndex.attach(sys.argv[1], role="forgetful")
        with index.match(prompt(1, 2)) as lease:
            assert len(lease) == 2
        """
    )
    with PageIndex.create(segment_name, pages=8) as ours:
        ours.reserve(prompt(1, 2)).publish()
        tests = os.path.dirname(os.path.dirname(__file__))
        script(source + ENDS[how] + "\n", segment_name, tests, status=None)
        assert len(ours.clients()) == 1
        found = dumped(segment_name)
        assert (found["segment"]["clients"], found["segment"]["dead_clients"]) == (1, 0)
        assert not [hint for hint in found["hints"] if "dead" in hint]
        assert ours.check().clean


def test_a_client_that_ends_while_it_holds_pages_is(segment_name: str, script: Script) -> None:
    """A copy of it might be under way: the pages stay pinned until a reaper finds it gone."""
    source = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        from support.keys import prompt
        from lightcache import PageIndex
        index = PageIndex.attach(sys.argv[1])
        held = index.reserve(prompt(2, 3))
        """
    )
    with PageIndex.create(segment_name, pages=8) as ours:
        script(source, segment_name, os.path.dirname(os.path.dirname(__file__)))
        assert [client.alive for client in ours.clients()] == [True, False]
        assert ours.reap() == 1
        assert ours.stats().writing == 0
        assert ours.check().clean


def test_an_index_that_is_dropped_has_left(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8) as ours:
        other = PageIndex.attach(segment_name)
        assert len(ours.clients()) == 2
        del other
        gc.collect()
        assert len(ours.clients()) == 1


def test_a_stopped_holder_of_the_lock_does_not_hold_up_the_end(
    segment_name: str, script: Script
) -> None:
    """The end waits a second for the lock, and then leaves it to a reaper."""
    source = textwrap.dedent(
        """
        import sys
        from lightcache import PageIndex
        from lightcache import page_index
        page_index._LEAVING_SECONDS = 0.0
        index = PageIndex.attach(sys.argv[1])
        """
    )
    holds = (
        "import sys\n"
        "from lightcache import PageIndex\n"
        "index = PageIndex.attach(sys.argv[1])\n"
        "index.core.locked('lci_hold', what='test')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command, pipe = [sys.executable, "-c", holds, segment_name], subprocess.PIPE
    with (
        PageIndex.create(segment_name, pages=8) as ours,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/") as holder,
    ):
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            script(source, segment_name)
            assert [client.alive for client in ours.clients()] == [True, True, False]
        finally:
            holder.kill()
            holder.wait()
        assert ours.reap() == 2
        assert len(ours.clients()) == 1


MAKERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "list": (lambda name: SharedList.create(name, nodes=4), "SharedList.attach(sys.argv[1])"),
    "dict": (lambda name: SharedDict.create(name, capacity=4), "SharedDict.attach(sys.argv[1])"),
    "ring": (
        lambda name: SharedRing.create(name, capacity=4, message_bytes=8),
        "SharedRing.attach(sys.argv[1])",
    ),
    "log": (
        lambda name: SharedLog.create(name, capacity=4, message_bytes=8),
        "SharedLog.attach(sys.argv[1])",
    ),
    "counters": (
        lambda name: SharedCounters.create(name, names=["a"]),
        "SharedCounters.attach(sys.argv[1])",
    ),
    "plain": (lambda name: Segment.create(name, 64), "Segment.attach(sys.argv[1]); kept.join('x')"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_structures_too(segment_name: str, script: Script, kind: str) -> None:
    make, attach = MAKERS[kind]
    with make(segment_name) as made:
        segment = made if isinstance(made, Segment) else made.segment
        before = len(segment.clients())
        script(f"import sys\nfrom lightcache.shm import *\nkept = {attach}\n", segment_name)
        assert len(segment.clients()) == before
        if kind == "log":
            assert made.behind() == ()
            for _ in range(9):  # more than there is room for: no reader is waited for
                made.append(b"", timeout=0)
