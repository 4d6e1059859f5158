"""What an error says, and which of two errors is seen: small things that a user meets first."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.keys import prompt
from support.refusals import refused

from lightcache import Abandoned, Cache, InUse, PageIndex, PermissionDenied
from lightcache.errors import LightcacheError, NotInstalled
from lightcache.reservations import ReservationShard
from lightcache.shm import (
    RobustLock,
    Segment,
    SharedCounters,
    SharedDict,
    SharedList,
    SharedLog,
    SharedRing,
    owners,
)
from lightcache.shm import errors as shm_errors

SECRET = b"sixteen bytes or more of a secret"
Script = Callable[..., Any]


class Mine(Exception):
    """Of the engine."""


# ---- an error inside a with statement


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    made = Cache.create(
        segment_name, pages=8, page_bytes=4096, page_tokens=16, fingerprint="f", secret=SECRET
    )
    yield made
    made.close()


def test_an_error_of_the_body_is_not_replaced(cache: Cache) -> None:
    """The array made InUse of what had gone wrong, and that was all that was seen."""
    kept: list[Any] = []

    def body(error: Exception | None) -> None:
        with cache:
            kept.append(cache.pool.array)
            if error:
                raise error

    with pytest.raises(Mine) as caught:
        body(Mine("the engine's own"))
    if sys.version_info >= (3, 11):
        (note,) = caught.value.__notes__
        assert note.startswith("and while this error ended a with statement: InUse: close the pool")
    assert cache.peek(prompt(1, 2)) == 0  # nothing was changed: it is closed when it is dropped
    refused(InUse, "", body, None)
    kept.clear()


MAKERS: dict[str, Callable[[str], Any]] = {
    "segment": lambda name: Segment.create(name, 64),
    "list": lambda name: SharedList.create(name, nodes=4),
    "dict": lambda name: SharedDict.create(name, capacity=4),
    "ring": lambda name: SharedRing.create(name, capacity=4, message_bytes=8),
    "log": lambda name: SharedLog.create(name, capacity=4, message_bytes=8),
    "counters": lambda name: SharedCounters.create(name, names=["a"]),
    "index": lambda name: PageIndex.create(name, pages=4),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_nor_by_what_any_segment_says(segment_name: str, kind: str) -> None:
    made = MAKERS[kind](segment_name)
    segment = made if isinstance(made, Segment) else made.segment
    views: list[memoryview] = []

    def body() -> None:
        with made:
            views.append(segment.view(segment.payload_offset, 8))
            raise Mine

    refused(Mine, "", body)
    views.clear()
    made.close()


def test_nor_by_a_lock_that_cannot_be_given_back(segment_name: str) -> None:
    def body(segment: Segment) -> None:
        with RobustLock(segment).hold():
            Segment.unlink(segment_name, force=True)
            raise Mine

    with Segment.create(segment_name, 64) as segment:
        segment.join()
        refused(Mine, "", body, segment)


def test_without_notes_it_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old(Exception):
        add_note = property()  # as before Python 3.11: there is none

    def close() -> None:
        raise InUse("views live")

    shm_errors.leave(close, Old("mine"))
    assert "Old: and while this error ended a with statement: InUse: views live" in caplog.text
    refused(InUse, "", shm_errors.leave, close, None)


# ---- publishing


@pytest.mark.parametrize("end", ["revoke", "late", "close"])
def test_a_shard_that_was_published_does_not_raise(segment_name: str, end: str) -> None:
    """Whatever became of the ticket meanwhile: the pages are ready, and that is what it says."""
    with PageIndex.create(segment_name, pages=8) as giver, PageIndex.attach(segment_name) as rank:
        new = giver.reserve(prompt(1, 2))
        ticket = new.ticket([rank.client_id])
        shard = rank.adopt(bytes(ticket), shard=0)
        assert isinstance(shard, ReservationShard)
        if end == "revoke":
            ticket.revoke()
            rank.done(bytes(ticket), ok=False)
        elif end == "late":
            ticket.drop()
            rank.done(bytes(ticket))
            giver.evict(0)
        else:
            rank.done(bytes(ticket), ok=False)
        assert shard.publish() is True
        assert giver.peek(prompt(1, 2)) == 2
        shard.release()
        assert giver.peek(prompt(1, 2)) == 2
        new.release()
        if end == "close":
            ticket.drop()


def test_a_shard_that_was_not_published_does(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8) as giver, PageIndex.attach(segment_name) as rank:
        new = giver.reserve(prompt(1, 2))
        with new.ticket([rank.client_id]) as ticket:
            shard = rank.adopt(bytes(ticket), shard=0)
            assert isinstance(shard, ReservationShard)
            new.release()
            refused(Abandoned, "", shard.publish)
            shard.release()


# ---- the right cause


def test_the_lock_of_a_segment_that_was_not_joined(segment_name: str) -> None:
    with Segment.create(segment_name, 64) as segment:
        with pytest.raises(PermissionDenied, match=r"has no slot.*call join\(\)"):
            RobustLock(segment).hold().__enter__()
        with Segment.attach(segment_name, readonly=True) as reader:
            with pytest.raises(PermissionDenied, match=f"{segment_name}.*attached read-only"):
                RobustLock(reader).hold().__enter__()


EXTRAS = {
    "kernels: torch": ("torch", "cache.pin()"),
    "kernels: the pool": ("torch", "cache.pool.tensor()"),
    "kernels: a device": ("torch", "CudaDevice('cuda:0')"),
    "kernels: triton": ("triton", "CudaDevice.launcher(None)"),
    "kernels: gpu": ("torch", "pci_address(0)"),
    "metrics": ("prometheus_client", "import lightcache.metrics"),
    "transformers": ("transformers", "import lightcache.connectors.transformers"),
    "redis": ("redis", "open_storage('redis://127.0.0.1:1/0', spec=spec)"),
    "s3": ("obstore", "open_storage('s3://bucket/prefix', spec=spec)"),
    "mooncake": ("mooncake", "open_storage('mooncake://127.0.0.1:1', spec=spec)"),
}


@pytest.mark.slow
def test_a_missing_extra_is_named_with_its_command(script: Script, segment_name: str) -> None:
    """Each in a fork of one process, in which nothing of it has been imported."""
    source = f"""
        import os, sys
        import lightcache
        from lightcache import Cache, LightcacheError
        from lightcache.kernels.device import CudaDevice
        from lightcache.pool import pci_address
        from lightcache.storage import StorageSpec, open_storage

        def tell(what, package, call):
            sys.modules[package] = None
            cache = Cache.create(sys.argv[1], pages=4, page_bytes=4096, page_tokens=16,
                                 fingerprint="f", secret={SECRET!r})
            spec = StorageSpec.of(cache)
            try:
                exec(call)
            except LightcacheError as error:
                print(what, error, sep=chr(9), flush=True)
            cache.close()

        for what, (package, call) in {EXTRAS!r}.items():
            if os.fork() == 0:
                tell(what, package, call)
                os._exit(0)
            assert os.wait()[1] == 0, what
    """
    done = script(textwrap.dedent(source), segment_name).stdout
    told = dict(line.split("\t", 1) for line in done.splitlines())
    assert list(told) == list(EXTRAS)
    for what, (package, _) in EXTRAS.items():
        assert f"pip install 'lightcache[{what.partition(':')[0]}]'" in told[what], told[what]
        assert package in told[what].lower(), told[what]


def test_not_installed_is_an_import_error_as_well() -> None:
    with pytest.raises(NotInstalled, match=r"a test needs the package no_such_package") as caught:
        shm_errors.require("no_such_package", "kernels", "a test")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, LightcacheError)
    assert caught.value.name == "no_such_package"
    shm_errors.require("json", "kernels", "a test")


# ---- permission denied: what, and whose


def test_whose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o640)
    said = owners.whose(file)
    assert said.startswith(f"it belongs to user {os.getuid()}")
    assert "mode 0640" in said
    assert f"this process runs as user {os.geteuid()}" in said
    assert owners.whose(tmp_path / "none" / "none").startswith(f"{tmp_path} belongs to user")
    assert owners.user(4_000_000_001) == "4000000001"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    """The command line says in one line what, whose, and who asks."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    source = textwrap.dedent(
        """
        import os, sys
        from lightcache.hashing import load_or_create_secret
        from lightcache import PermissionDenied
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        try:
            load_or_create_secret(sys.argv[1])
        except PermissionDenied as error:
            print(error)
        """
    )
    command = [sys.executable, "-c", source, str(closed / "secret")]
    said = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True).stdout
    assert f"{closed / 'secret'}: Permission denied" in said
    assert "belongs to user 0 (root)" in said
    assert "runs as user 65534" in said
