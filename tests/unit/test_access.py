"""Who may do what to a cache: other users, a group, a read-only client; and names leading outside.

The tests of segments and secrets (test_segment_input, test_segment_limits, test_hashing) hold for
their parts; here a whole cache is looked at, index, pool and secret.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.refusals import refused

from lightcache import Cache, ConfigError, LeaseLost, PermissionDenied
from lightcache.shm import names
from lightcache.shm.listing import read_segment
from lightcache.tools import cli

SECRET = b"a secret of the access tests"
SHM = Path("/dev/shm")
NOBODY = 65534
Script = Callable[..., Any]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def objects(name: str) -> list[Path]:
    """The segment and its pool."""
    return sorted(SHM.glob(names.object_name(name).removeprefix("/") + "*"))


def make(name: str, **more: Any) -> Cache:
    """A cache of 8 pages, 4 of them ready."""
    cache = Cache.create(
        name, pages=8, page_bytes=4096, fingerprint="f", page_tokens=16, secret=SECRET, **more
    )
    with cache.reserve(cache.hash_pages(np.arange(64))) as new:
        for page in new.pages.tolist():
            cache.pool[page][:] = page + 1
        new.publish()
    return cache


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with make(segment_name) as made:
        yield made


# ---------------------------------------------------------------- a read-only client


def test_a_reader_changes_no_byte(cache: Cache, segment_name: str) -> None:
    with Cache.attach(segment_name, readonly=True, secret=SECRET) as router:
        keys = router.hash_pages(np.arange(64))
        before = [path.read_bytes() for path in objects(segment_name)]
        assert len(before) == 2
        assert router.peek(keys) == router.wait(keys, timeout=0) == 4
        assert router.peek_many(keys, np.array([0, 4])).tolist() == [4]
        assert router.stats().ready == 4
        assert router.check().clean
        assert len(router.clients()) == 1
        assert (router.pool[0] == 1).all()
        for denied in (
            lambda: router.match(keys),
            lambda: router.match_many(keys, np.array([0, 4])),
            lambda: router.reserve(keys),
            lambda: router.evict(1),
            lambda: router.clear(),
            lambda: router.namespace("w"),
            lambda: router.adopt(bytes(16)),
            lambda: router.done(bytes(16)),
            lambda: router.pool.grow(8),
            lambda: router.index.repair(),
            router.reap,
        ):
            refused((PermissionDenied, LeaseLost), "", denied)
        assert [path.read_bytes() for path in objects(segment_name)] == before


# What it maps is mapped for reading, and the kernel refuses to make it writable, because the
# description it was mapped through cannot write: not even deliberate code in this process can.
LOOK = """
import ctypes, sys
from lightcache import Cache
cache = Cache.attach(sys.argv[1], readonly=True, secret=sys.argv[2].encode())
maps = [line.split() for line in open("/proc/self/maps") if sys.argv[3] in line]
assert len(maps) >= 2, maps  # the index and its pool
libc = ctypes.CDLL(None, use_errno=True)
for span, mode, *_ in maps:
    assert mode == "r--s", mode
    start, end = (int(part, 16) for part in span.split("-"))
    READ_WRITE, EACCES = 3, 13
    result = libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), READ_WRITE)
    assert result == -1 and ctypes.get_errno() == EACCES
    print(start, end)
"""

STORE = """
number, last = int(sys.argv[4]), int(sys.argv[5])
span = maps[number][0]
start, end = (int(part, 16) for part in span.split("-"))
print("about to store", flush=True)
ctypes.memset(end - 1 if last else start, 1, 1)
print("stored", flush=True)
"""


def test_a_readers_memory_cannot_be_made_writable(
    cache: Cache, segment_name: str, script: Script
) -> None:
    script(LOOK, segment_name, SECRET.decode(), names.object_name(segment_name))


@pytest.mark.parametrize("last", [False, True], ids=["first-byte", "last-byte"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_readers_store_is_a_page_fault(
    cache: Cache, segment_name: str, script: Script, which: int, last: bool
) -> None:
    arguments = (SECRET.decode(), names.object_name(segment_name), which, int(last))
    done = script(LOOK + STORE, segment_name, *arguments, status=-signal.SIGSEGV)
    assert done.stdout.splitlines()[-1] == "about to store"
    assert cache.check().clean


# ---------------------------------------------------------------- other users

AS_NOBODY = f"""
import os, sys
from lightcache import Cache, PermissionDenied
from lightcache.shm.listing import list_segments
Cache.create(sys.argv[1] + "-own", pages=1, page_bytes=4096, fingerprint="f", page_tokens=1,
             secret=bytes(16)).close()  # load all that root may read
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""


@needs_root
def test_a_cache_of_another_user(cache: Cache, segment_name: str, script: Script) -> None:
    for path in objects(segment_name):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    script(
        AS_NOBODY
        + """
GOOD = dict(pages=8, page_bytes=4096, fingerprint="f", page_tokens=16, secret=sys.argv[2].encode())
for call in (
    lambda: Cache.attach(sys.argv[1], secret=GOOD["secret"]),
    lambda: Cache.attach(sys.argv[1], secret=GOOD["secret"], readonly=True),
    lambda: Cache.open(sys.argv[1], **GOOD),
    lambda: Cache.open(sys.argv[1], **GOOD, replace=True),
    lambda: Cache.create(sys.argv[1], **GOOD),
):
    try:
        call()
    except PermissionDenied as error:  # says what and whose, and who asks
        said = str(error)
        assert f"/dev/shm/lightcache.{sys.argv[1]}" in said, said
        assert "user 0 (root)" in said and "mode 0600" in said and "as user 65534" in said, said
        assert "errno" not in said, said
        continue
    sys.exit(3)
""",
        segment_name,
        SECRET.decode(),
    )
    assert cache.peek(cache.hash_pages(np.arange(64))) == 4


@needs_root
def test_a_cache_planted_by_another_user(segment_name: str) -> None:
    """Somebody else made an object of the name that we are about to attach to."""
    make(segment_name, lifetime="persistent").close()
    planted = objects(segment_name)
    for path in planted:
        os.chown(path, NOBODY, NOBODY)
    try:
        for readonly in (False, True):
            with pytest.raises(PermissionDenied, match=f"found user {NOBODY}"):
                Cache.attach(segment_name, readonly=readonly, secret=SECRET)
    finally:
        for path in planted:
            path.unlink()


@needs_root
def test_a_pool_planted_by_another_user(segment_name: str) -> None:
    """The index is ours and the pool is not."""
    with make(segment_name, lifetime="persistent"):
        pool = next(path for path in objects(segment_name) if "~pool" in path.name)
    os.chown(pool, NOBODY, NOBODY)
    try:
        refused(PermissionDenied, f"user {NOBODY}", Cache.attach, segment_name, secret=SECRET)
    finally:
        for path in objects(segment_name):
            path.unlink()


@needs_root
def test_a_cache_of_a_group(segment_name: str, script: Script) -> None:
    with make(segment_name, group=NOBODY) as cache:
        for path in objects(segment_name):
            found = path.stat()
            assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, NOBODY)
        script(
            AS_NOBODY
            + f"""
cache = Cache.attach(sys.argv[1], secret=sys.argv[2].encode(), group={NOBODY})
keys = cache.hash_pages(range(64))
with cache.match(keys) as hit:
    assert len(hit) == 4 and (cache.pool[int(hit.pages[3])] == hit.pages[3] + 1).all()
with cache.reserve(cache.hash_pages(range(100, 132))) as new:
    new.publish()
cache.close()
""",
            segment_name,
            SECRET.decode(),
        )
        assert cache.peek(cache.hash_pages(range(100, 132))) == 2


# ---------------------------------------------------------------- names

OUTSIDE = ["../{}", "{}/b", "/etc/passwd", "..", "{}~pool-1", "{}\n", "{}\0", ".", "~"]
"""With a name of the test's own in them: others use /dev/shm at the same time."""


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_of_caches_stay_in_their_namespace(name: str, segment_name: str) -> None:
    given = name.format(segment_name)
    for call in (
        lambda: Cache.create(given, pages=1, page_bytes=4096, fingerprint="f", page_tokens=1),
        lambda: Cache.open(given, pages=1, page_bytes=4096, fingerprint="f", page_tokens=1),
        lambda: Cache.attach(given),
    ):
        refused(ConfigError, "name", call)
    # No allowed name continues like this after the prefix.
    mine = (segment_name, f"lightcache.{given}")
    assert not [path for path in SHM.iterdir() if any(one in path.name for one in mine)]


@pytest.mark.parametrize("command", ["dump", "check", "repair", "reap", "rm", "enable", "disable"])
@pytest.mark.parametrize("name", [name for name in OUTSIDE if "\0" not in name])
def test_commands_stay_in_their_namespace(command: str, name: str, segment_name: str) -> None:
    done = CliRunner().invoke(cli.group, [command, name.format(segment_name)])
    assert done.exit_code == 2
    assert "name" in done.stderr


def test_what_a_foreign_object_is_called_cannot_be_opened(segment_name: str) -> None:
    """An object outside our names is none of ours, whatever stands in it."""
    foreign = SHM / f"foreign-{segment_name}"
    with make(segment_name, lifetime="persistent"):
        content = objects(segment_name)[0].read_bytes()
    for path in objects(segment_name):
        path.unlink()
    foreign.write_bytes(content)
    foreign.chmod(0o600)
    try:
        refused(ConfigError, "name", read_segment, f"../foreign-{segment_name}")
        listed = CliRunner().invoke(cli.group, ["ls", "--json"])
        assert foreign.name not in listed.stdout
    finally:
        foreign.unlink()
