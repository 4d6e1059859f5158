"""`lightcache storage`: starting, looking at it, ending, and what is typed wrong."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.filling import dumped
from support.storing import KEYS, fill, make_cache, sound

from lightcache import Cache
from lightcache.shm import Segment, SharedRing
from lightcache.shm.listing import list_segments
from lightcache.storage import MemoryStorage, StorageSpec
from lightcache.storage.service import StorageClient, StorageService
from lightcache.storage.service.board import ServiceStats
from lightcache.tools import cli

LIMIT = 60.0


def run(*arguments: object) -> Any:
    """The command, in this process."""
    return CliRunner().invoke(cli.group, ["storage", *map(str, arguments)])


def test_dump_says_that_storage_is_not_used(served: Any, cache: Cache, wait_until: Any) -> None:
    """That clients wait and no service runs, that the service was killed, that the storage failed;
    and how many pages were not stored, by cause."""
    assert dumped(cache.name)["not_working"] == []
    with StorageClient(cache, silence=LIMIT) as client:
        (line,) = dumped(cache.name)["not_working"]
        assert line.startswith("storage is not used: clients wait for a service, and none runs")
        assert f"`lightcache storage {cache.name} --url ...`" in line
        service = served(cache.name, "--url", "flaky:write_fail=1,seed=1:memory:")
        assert dumped(cache.name)["not_working"] == []
        fill(cache, KEYS)
        client.write(KEYS).wait(LIMIT)
        wait_until(lambda: "failed" in " ".join(dumped(cache.name)["hints"]), "the figures")
        (note,) = [each for each in dumped(cache.name)["hints"] if "not stored" in each]
        assert note.startswith("so far the storage service has not stored pages: ")
        service.process.kill()
        service.process.wait()
        (line,) = dumped(cache.name)["not_working"]
        assert line.startswith(f"storage is not used: its service (pid {service.process.pid}) is")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_start_use_end(served: Any, cache: Cache, where: Path, number: signal.Signals) -> None:
    url = f"disk:{where}?capacity=1MiB"
    service = served(cache.name, "--url", url, "--batch", 4)
    assert service.begun == (
        f"serving {cache.name} with {url} (pid {service.process.pid}); Ctrl-C ends it\n"
    )
    fill(cache, KEYS)
    with StorageClient(cache, silence=LIMIT) as client:
        assert client.write(KEYS).wait(LIMIT).stored == 20
        cache.evict(96)
        assert client.prefetch(KEYS).wait(LIMIT).loaded == 20
        assert sound(cache, KEYS) == 20
        shown = json.loads(run(cache.name, "--status", "--json").output)
        assert (shown["serving"], shown["pid"]) == (True, service.process.pid)
        assert shown["tier"]["stored"] == 20
        text = run(cache.name, "--status")
        assert text.exit_code == 0
        assert f"pid {service.process.pid}" in text.output
        assert "tier" in text.output.splitlines()  # of pages, bytes, seconds, tasks and calls
        status, out, errors = service.end(number)
        assert (status, errors) == (0, "")
        assert out == (
            f"served {cache.name}: 2 tasks finished, 0 failed; 80.0 KiB written, 80.0 KiB read\n"
        )
        gone = run(cache.name, "--status")
        assert gone.exit_code == 1
        assert "no service" in gone.output
        again = served(cache.name, "--url", url)
        assert client.prefetch(KEYS).wait(LIMIT).prefix == 20
        said = again.end()[1]
        assert said.startswith(f"served {cache.name}: 1 tasks finished, 0 failed; 0 B written")


@pytest.mark.slow
def test_several_storages_one_behind_the_other(served: Any, cache: Cache, where: Path) -> None:
    far = f"disk:{where}?capacity=1MiB"
    fill(cache, KEYS)
    for near in ("memory:", "memory:?pages=30"):  # a new one, which has nothing
        service = served(cache.name, "--url", near, "--url", far)
        assert f"with {near}, then {far} (pid" in service.begun
        with StorageClient(cache, silence=LIMIT) as client:
            client.write(KEYS).wait(LIMIT)
            cache.evict(96)
            assert client.prefetch(KEYS).wait(LIMIT).loaded == 20
            assert sound(cache, KEYS) == 20
        cache.evict(96)
        service.end()


def test_json(served: Any, cache: Cache) -> None:
    service = served(cache.name, "--url", "memory:", "--json")
    status, out, _ = service.end()
    expected = {"name": cache.name, "url": "memory:", "pid": service.process.pid}
    assert json.loads(service.begun) == expected
    assert json.loads(out)["tier"]["tasks_failed"] == 0
    assert status == 0


def test_it_has_ended_before_it_says_what_it_did(cache: Cache, monkeypatch: Any) -> None:
    order: list[str] = []

    class Told(StorageService):
        def wait(self, timeout: float | None = None) -> bool:
            return True

        def close(self, timeout: float = 10.0) -> bool:
            order.append("close")
            return super().close(timeout)

        def stats(self) -> ServiceStats:
            order.append("stats")
            return super().stats()

    monkeypatch.setattr("lightcache.tools.storage_service.StorageService", Told)
    done = run(cache.name, "--url", "memory:")
    assert "0 tasks finished" in done.output
    assert order == ["stats", "close", "stats"]


def test_a_storage_of_which_a_call_hangs_is_not_waited_for(cache: Cache, monkeypatch: Any) -> None:
    closed: list[str] = []

    class Hanging(StorageService):
        def wait(self, timeout: float | None = None) -> bool:
            return True

        def close(self, timeout: float = 10.0) -> bool:
            assert super().close(timeout)
            return False

    class Waiting(MemoryStorage):
        def close(self) -> None:
            closed.append("closed")

    def opened(url: str, spec: StorageSpec) -> MemoryStorage:
        return Waiting(spec)

    monkeypatch.setattr("lightcache.tools.storage_service.StorageService", Hanging)
    monkeypatch.setattr("lightcache.tools.storage_service.open_storage", opened)
    done = run(cache.name, "--url", "memory:")
    assert done.exit_code == 1
    assert "calls of the storage hang" in done.output
    assert closed == []


def test_a_second_service(served: Any, cache: Cache) -> None:
    service = served(cache.name, "--url", "memory:")
    done = run(cache.name, "--url", "memory:")
    assert done.exit_code == 2
    assert f"pid {service.process.pid}" in done.output
    assert service.end()[0] == 0


@pytest.mark.parametrize("killed", [False, True])
def test_the_last_to_leave_takes_the_cache_along(
    served: Any, segment_name: str, wait_until: Any, killed: bool
) -> None:
    """Unless its other clients were killed: then the next to open finds it warm."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(make_cache(segment_name))
        if killed:
            program = (
                "import sys\nfrom lightcache import Cache\n"
                "cache = Cache.attach(sys.argv[1], secret=b'a secret of tests')\n"
                "print(flush=True)\nsys.stdin.read()\n"
            )
            other = subprocess.Popen(
                [sys.executable, "-c", program, segment_name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(other.communicate)
            stack.callback(other.kill)
            assert other.stdout
            other.stdout.readline()
        service = served(segment_name, "--url", "memory:")
        first.close()
    status, _, errors = service.end()
    assert (status, errors) == (0, "")
    left = [info.name for info in list_segments() if info.name == segment_name]
    assert left == ([segment_name] if killed else [])
    Segment.unlink(segment_name, force=True)


def test_a_cache_that_is_removed(served: Any, segment_name: str) -> None:
    with make_cache(segment_name):
        service = served(segment_name, "--url", "memory:")
        Segment.unlink(segment_name, force=True)
        _, errors = service.process.communicate(timeout=LIMIT)
        assert service.process.returncode == 1
        (line,) = errors.splitlines()
        assert repr(segment_name) in line
        assert "the cache was removed; start it again when there is one" in line


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        ((), 2, "give --url"),
        (("--url", "memory:", "--url", "tape:"), 2, "expected a scheme of"),
        (("--url", "memory:", "--prefill-tokens-per-s", 0), 2, "prefill_tokens_per_s"),
        (("--url", "memory"), 2, "expected a URL"),
        (("--url", "ftp://x"), 2, "expected a scheme of"),
        (("--url", "memory:?speed=1"), 2, "speed"),
        (("--url", "disk:?capacity=1MiB"), 2, "disk"),
        (("--url", "memory:", "--threads", 0), 2, "threads"),
        (("--url", "memory:", "--threads", "two"), 2, "--threads"),
        (("--url", "memory:", "--threads", "many"), 2, "--threads"),
        (("--url", "memory:", "--batch", 0), 2, "--batch"),
        (("--url", "memory:", "--finish", -1), 2, "--finish"),
        (("--url", "memory:", "--finish", "nan"), 2, "finish: expected seconds"),
        (("--url", "memory:", "--group", "no-such-group"), 2, "no-such-group"),
        (("--url", "memory:", "--status"), 2, "give --status or --url, not both"),
        (("--status",), 2, "no storage service"),
    ],
)
def test_what_is_typed_wrong(cache: Cache, arguments: Any, status: int, what: str) -> None:
    done = run(cache.name, *arguments)
    assert done.exit_code == status, done.output
    assert what in done.output
    assert "Traceback" not in done.output


def test_a_name_that_is_none(segment_name: str) -> None:
    for name in (segment_name, "no/name"):
        for more in (("--url", "memory:"), ("--status",)):
            done = run(name, *more)
            assert done.exit_code == 2
            assert name in done.output
            assert len(done.output.splitlines()) == 1
    with SharedRing.create(segment_name, capacity=1, message_bytes=8):
        for more in (("--url", "memory:"), ("--status",)):
            done = run(segment_name, *more)
            assert done.exit_code == 2
            assert "holds a ring" in done.output
