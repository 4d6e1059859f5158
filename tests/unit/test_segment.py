"""A segment's life: create, attach, open, replace, unlink, last to leave, sweep."""

from __future__ import annotations

import errno
import gc
import os
import stat
from collections.abc import Callable
from pathlib import Path

import posix_ipc
import pytest
from support.refusals import refused

from lightcache.errors import Detached, InUse, LayoutMismatch, NoSpace, NotReady, PermissionDenied
from lightcache.shm import Lifetime, Segment, layout, names, ofd, sweep
from lightcache.shm.layout import SegmentKind
from lightcache.shm.listing import list_segments, read_segment
from lightcache.shm.memory import Coming
from lightcache.shm.objects import OpenObject

SHM = Path("/dev/shm")
Script = Callable[..., object]


def path_of(name: str) -> Path:
    return SHM / names.object_name(name).removeprefix("/")


def make_object(full: str, size: int) -> None:
    posix_ipc.SharedMemory(full, posix_ipc.O_CREX, mode=0o600, size=size).close_fd()


def make_leftover(name: str, size: int = 0) -> None:
    """What a creator leaves that died before it had stored anything."""
    make_object(names.object_name(name), size)


def swept(name: str) -> list[str]:
    """Sweep this test's own names only: other tests and users have segments in the same place."""
    return sweep(prefix=name)


# ---------------------------------------------------------------- create and attach


def test_create_then_attach(segment_name: str) -> None:
    config = {"pages": 4, "salt": "sel de mer é", "nested": {"b": [1, 2.5, None]}}
    with Segment.create(segment_name, 5000, kind=SegmentKind.DICT, config=config) as made:
        assert made.payload_bytes >= 5000
        assert made.nbytes == made.payload_offset + made.payload_bytes == made.nbytes // 4096 * 4096
        made.view(made.payload_offset, 5)[:] = b"hello"
        with Segment.attach(segment_name, kind=SegmentKind.DICT, config=config) as other:
            assert bytes(other.view(other.payload_offset, 5)) == b"hello"
            assert other.config == config
            assert (other.uuid, other.kind, other.lifetime) == (
                made.uuid,
                SegmentKind.DICT,
                Lifetime.ATTACHED,
            )
            assert other.header().creator_pid == os.getpid()
            assert "DICT" in repr(other)


def test_payload_is_zero_and_allocated(segment_name: str) -> None:
    with Segment.create(segment_name, 1 << 20) as made:
        assert not any(made.view(made.payload_offset, made.payload_bytes))
        assert path_of(segment_name).stat().st_blocks * 512 >= made.nbytes


def test_mode_is_0600_whatever_the_umask(segment_name: str) -> None:
    for umask in (0o000, 0o777):
        before = os.umask(umask)
        try:
            with Segment.create(segment_name, 1):
                assert stat.S_IMODE(path_of(segment_name).stat().st_mode) == 0o600
        finally:
            os.umask(before)


def test_group_mode(segment_name: str) -> None:
    with Segment.create(segment_name, 1, group=os.getgid()):
        found = path_of(segment_name).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, os.getgid())
        Segment.attach(segment_name, group=os.getgid()).close()
        Segment.attach(segment_name).close()


def test_create_refuses_what_exists(segment_name: str) -> None:
    with Segment.create(segment_name, 1) as made:
        refused(InUse, "it exists", Segment.create, segment_name, 1)
        assert Segment.attach(segment_name).uuid == made.uuid


def test_initialise_runs_before_anybody_attaches(segment_name: str) -> None:
    seen = []

    def lay_out(segment: Segment) -> None:
        segment.view(segment.payload_offset, 1)[0] = 7
        segment.join("creator")
        refused(NotReady, "is creating, replacing", Segment.attach, segment_name, timeout=0)
        refused(NotReady, "is creating, replacing", Segment.create, segment_name, 1, timeout=0)
        refused(NotReady, "is creating, replacing", Segment.open, segment_name, 1, timeout=0)
        assert swept(segment_name) == []
        seen.append(segment)

    with Segment.create(segment_name, 1, initialise=lay_out) as made:
        assert seen == [made]
        assert made.client is not None
        assert Segment.attach(segment_name).view(made.payload_offset, 1)[0] == 7


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_initialise_raises_undoes_the_creation(
    segment_name: str, kind: type[BaseException]
) -> None:
    def fail(segment: Segment) -> None:
        make_object(segment.dependent_name("pool"), 4096)
        raise kind

    for make in (Segment.create, Segment.open):
        refused(kind, "", make, segment_name, 1, initialise=fail)
        assert not path_of(segment_name).exists()


def test_leftovers_of_dead_creators_do_not_count(segment_name: str) -> None:
    for make in (Segment.create, Segment.open):
        for size in (0, 100, 4096, 1 << 20):
            make_leftover(segment_name, size)
            refused(NotReady, "died before finishing", Segment.attach, segment_name, timeout=0.02)
            with make(segment_name, 1) as made:
                assert made.check_usable() is None


# ---------------------------------------------------------------- open and replace


def test_open_attaches_to_an_equal_one(segment_name: str) -> None:
    with Segment.open(segment_name, 10, config={"a": 1, "b": 2}) as first:
        with Segment.open(segment_name, 10, config={"b": 2, "a": 1}, replace=True) as second:
            assert first.uuid == second.uuid


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": {"a": 2, "c": 0}}, r"a: expected 2, found 1; b: .* nothing, found 2; c: "),
        ({"payload_bytes": 9000}, r"bytes: expected \d+, found \d+"),
        ({"lifetime": "persistent"}, "lifetime: expected PERSISTENT, found ATTACHED"),
        ({"kind": SegmentKind.LIST}, "kind: expected LIST, found PLAIN"),
        ({"layout_facts": "other records"}, "layout of the structure: expected"),
    ],
)
def test_open_refuses_or_replaces_what_differs(
    segment_name: str, changed: dict[str, object], message: str
) -> None:
    usual: dict[str, object] = {"payload_bytes": 10, "config": {"a": 1, "b": 2}}
    old = Segment.open(segment_name, **usual)  # type: ignore[arg-type]
    arguments = usual | changed
    refused(LayoutMismatch, message, Segment.open, segment_name, **arguments)
    old.join("the living")
    refused(InUse, "the living", Segment.open, segment_name, replace=True, **arguments)
    reader = Segment.attach(segment_name, readonly=True)
    uuid = old.uuid
    old.close()
    refused(InUse, "readers only", Segment.open, segment_name, replace=True, **arguments)
    assert reader.uuid == uuid
    assert not reader.retired
    reader.close()
    assert not path_of(segment_name).exists()


def test_open_replaces_what_nobody_lives_in(segment_name: str) -> None:
    Segment.create(segment_name, 10, lifetime="persistent").close()
    with Segment.open(segment_name, 20_000, replace=True) as new:
        assert new.payload_bytes >= 20_000


def test_a_group_that_the_kernel_refuses_replaces_nothing(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that a user namespace does not know: EINVAL."""
    Segment.create(segment_name, 10, lifetime="persistent").close()

    def fchown(fd: int, user: int, group: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fchown", fchown)
    group = {"group": os.getgid()}
    refused(PermissionDenied, "for group", Segment.create, f"{segment_name}-2", 10, **group)
    refused(PermissionDenied, "for group",
            Segment.open, segment_name, 99_999, replace=True, **group)  # fmt: skip
    Segment.attach(segment_name).close()
    Segment.unlink(segment_name)


def test_what_cannot_be_made_replaces_nothing(segment_name: str) -> None:
    with Segment.create(segment_name, 10, lifetime="persistent") as old:
        uuid = old.uuid
    refused(NoSpace, "ask for less", Segment.open, segment_name, 1 << 45, replace=True)
    heard: list[tuple[int, int]] = []

    def no(freed: Coming, new: int) -> None:
        heard.append((freed(None), new))
        raise NotReady("not now")

    refused(NotReady, "not now",
            Segment.open, segment_name, 99_999, replace=True, check_new=no)  # fmt: skip
    ((freed, new),) = heard
    assert freed == path_of(segment_name).stat().st_size
    assert new > 99_999
    with Segment.attach(segment_name) as old:
        assert old.uuid == uuid
    Segment.unlink(segment_name)


def test_open_continues_what_outlived_its_processes(segment_name: str, script: Script) -> None:
    script(
        "import os, signal, sys\n"
        "from lightcache.shm import Segment\n"
        "s = Segment.create(sys.argv[1], 10)\n"
        "s.view(s.payload_offset, 1)[0] = 42\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        segment_name,
        status=-9,
    )
    with Segment.open(segment_name, 10) as warm:
        assert warm.view(warm.payload_offset, 1)[0] == 42


# ---------------------------------------------------------------- leaving and unlinking


@pytest.mark.parametrize("readonly", [False, True])
def test_the_last_to_leave_unlinks(segment_name: str, readonly: bool) -> None:
    first = Segment.create(segment_name, 1)
    first.join()
    last = Segment.attach(segment_name, readonly=readonly)
    first.close()
    assert path_of(segment_name).exists()
    last.close()
    assert not path_of(segment_name).exists()


def test_persistent_stays_until_unlinked(segment_name: str) -> None:
    Segment.create(segment_name, 1, lifetime="persistent").close()
    assert swept(segment_name) == []
    Segment.attach(segment_name).close()
    assert Segment.unlink(segment_name)
    assert not Segment.unlink(segment_name)


def test_unlink_retires(segment_name: str) -> None:
    user = Segment.create(segment_name, 1)
    user.join("user")
    refused(InUse, r"user.*rm --force", Segment.unlink, segment_name)
    assert not user.retired
    assert Segment.unlink(segment_name, force=True)
    assert user.retired
    refused(Detached, "replaced or unlinked", user.view, 0, 1)
    with Segment.create(segment_name, 1) as new:  # the old one's close leaves the new one alone
        user.close()
        assert not user.retired
        assert not new.retired
        assert path_of(segment_name).exists()


def test_retired_but_still_named_counts_as_a_leftover(segment_name: str) -> None:
    for make in (Segment.create, Segment.open):
        Segment.create(segment_name, 1, lifetime="persistent").close()
        with path_of(segment_name).open("r+b") as raw:  # as by an unlinker killed half way
            raw.seek(layout.SegmentHeader.retired.offset)
            raw.write(b"\1")
        refused(NotReady, "retired", Segment.attach, segment_name, timeout=0)
        make(segment_name, 1).close()


def test_dependents_end_with_their_segment(segment_name: str) -> None:
    other = names.dependent_name(segment_name, "pool", "0" * 31 + "1")
    with Segment.create(segment_name, 1) as made:
        make_object(made.dependent_name("pool"), 4096)
        make_object(made.dependent_name("rows2"), 4096)
        make_object(other, 4096)
        info = read_segment(segment_name)
        assert info is not None
        assert set(info.dependents) == {made.dependent_name("pool"), made.dependent_name("rows2")}
    assert [found.object_name for found in names.dependents(segment_name)] == [other]
    assert swept(segment_name) == [other]
    assert names.dependents(segment_name) == []


def test_sweep_of_some_names_alone(segment_name: str) -> None:
    ours, other = f"{segment_name}.ours", f"{segment_name}.other"
    dependents = [names.dependent_name(each, "pool", "1" * 32) for each in (ours, other)]
    for name in (ours, other):
        make_leftover(name)
    for full in dependents:
        make_object(full, 0)
    both = [names.object_name(ours), dependents[0]]
    assert sorted(sweep(prefix=ours)) == sorted(both)
    assert sorted(swept(segment_name)) == sorted([names.object_name(other), dependents[1]])


def test_sweep_removes_what_the_dead_left(segment_name: str, script: Script) -> None:
    left, unfinished, kept = (f"{segment_name}-{i}" for i in range(3))
    for name, lifetime in ((left, "attached"), (kept, "persistent")):
        script(
            "import os, signal, sys\n"
            "from lightcache.shm import Segment\n"
            "s = Segment.create(sys.argv[1], 10, lifetime=sys.argv[2])\n"
            "s.join()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n",
            name,
            lifetime,
            status=-9,
        )
    make_leftover(unfinished)
    with Segment.create(segment_name, 1):
        assert swept(segment_name) == [names.object_name(left), names.object_name(unfinished)]
    assert Segment.unlink(kept)


def test_collected_without_close(segment_name: str) -> None:
    segment = Segment.create(segment_name, 1)
    segment.join()
    view = segment.view(0, 1)
    del segment
    gc.collect()
    assert path_of(segment_name).exists()  # the view keeps all of it
    del view
    gc.collect()
    assert not path_of(segment_name).exists()


def test_exit_without_close(segment_name: str, script: Script) -> None:
    script(
        "import sys\n"
        "from lightcache.shm import Segment\n"
        "s = Segment.create(sys.argv[1], 1)\n"
        "s.join()\n"
        "v = s.view(0, 1)\n",
        segment_name,
    )
    assert not path_of(segment_name).exists()


# ---------------------------------------------------------------- looking


def test_list_reads_without_attaching(segment_name: str) -> None:
    ready, dead, creating = (f"{segment_name}-{i}" for i in range(3))
    make_leftover(dead)
    make_leftover(creating)
    creator = OpenObject.open(creating, writable=True)
    assert creator is not None
    assert ofd.try_lock(creator.fd, layout.BYTE_LIFE)
    with Segment.create(ready, 1, lifetime="persistent") as made:
        made.join()
        infos = {info.name: info for info in list_segments() if segment_name in info.name}
    assert list(infos) == [ready, dead, creating]
    info = infos[ready]
    assert (info.problem, info.kind, info.ready, info.retired) == (None, "plain", True, False)
    assert (info.bytes, info.lifetime, info.uuid) == (made.nbytes, "persistent", made.uuid)
    assert (info.clients, info.dead_clients, info.occupied) == (1, 0, True)
    assert (info.uid, info.creator_pid) == (os.geteuid(), os.getpid())
    assert infos[dead].problem == "its creator died before finishing"
    assert infos[creating].problem == "being created"
    creator.close()
    assert Segment.unlink(ready)
    assert read_segment(ready) is None
    assert len(swept(segment_name)) == 2


def test_nothing_writes_where_it_only_reads(segment_name: str) -> None:
    Segment.create(segment_name, 1, lifetime="persistent").close()
    before = path_of(segment_name).read_bytes()
    list_segments()
    Segment.attach(segment_name, readonly=True).close()
    Segment.attach(segment_name).close()
    assert path_of(segment_name).read_bytes() == before
    Segment.unlink(segment_name)
