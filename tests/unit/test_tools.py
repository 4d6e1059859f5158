"""The commands, on real caches: create, ls, rm, reap, repair, disable, doctor, bench."""

from __future__ import annotations

import ctypes
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.keys import keys
from support.refusals import refused

import lightcache_bench as frame
from lightcache import Cache, InUse, NotReady, PageIndex, cache_name
from lightcache.shm import Segment, names
from lightcache.shm.layout import SegmentHeader, SegmentKind
from lightcache.shm.listing import list_segments, read_segment
from lightcache.tools import cli, create, doctor, maintenance

Run = Callable[..., Result]
Script = Callable[..., Any]
Wait = Callable[[Callable[[], bool], str], None]

SECRET = b"sixteen bytes or more of a secret"
BIN = Path(sys.executable).parent


@pytest.fixture
def made(segment_name: str) -> Iterator[str]:
    """A persistent cache with six ready pages, in which nobody lives."""
    with (
        Cache.create(
            segment_name,
            pages=64,
            page_bytes=4096,
            page_tokens=16,
            fingerprint="tools",
            secret=SECRET,
            lifetime="persistent",
        ) as cache,
        cache.reserve(cache.hash_pages(np.arange(100))) as new,
    ):
        new.publish()
    yield segment_name
    Segment.unlink(segment_name, force=True)


CLIENT = f"""
import os, signal, sys
import numpy as np
from lightcache import Cache
cache = Cache.attach(sys.argv[1], role=sys.argv[2], secret={SECRET!r})
lease = cache.match(cache.hash_pages(np.arange(100)))
writing = cache.reserve(cache.hash_pages(np.arange(1000, 1100)))
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)\n"


# ---- the group


def test_help_loads_no_command(script: Script) -> None:
    source = (
        "import sys\n"
        "from lightcache.tools.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "loaded = [m for m in sys.modules if m.startswith('lightcache.tools.')]\n"
        "assert loaded == ['lightcache.tools.cli'], loaded\n"
        "assert not {'rich', 'torch'} & set(sys.modules)\n"
    )
    done = script(source, "--help")
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_every_command_has_help(run: Run) -> None:
    for name in cli.COMMANDS:
        assert "Usage:" in run(name, "--help").output
    assert "No such command" in run("nonsense", status=2).output


@pytest.mark.parametrize("command", ["dump", "check", "rm", "reap", "repair", "disable", "enable"])
def test_unknown_names(run: Run, segment_name: str, command: str) -> None:
    result = run(command, segment_name, status=2)
    assert "`lightcache ls`" in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""
    assert "not allowed" in run(command, "a/b", status=2).stderr


# ---- create, ls, rm


def test_create_ls_rm(run: Run, segment_name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    options = ("--page-bytes", "4KiB", "--fingerprint", "f", "--secret-file", secret)
    created = run("create", segment_name, "--size", "1MiB", *options, "--page-tokens", 16, "--json")
    found = json.loads(created.stdout)
    assert (found["pages"], found["grown"], found["lifetime"]) == (256, 256, "persistent")
    said = run("create", segment_name, "--pages", 4, *options, status=2).stderr
    assert "it exists" in said
    assert f"or remove it first: `lightcache rm {segment_name}`" in said
    with Cache.attach(segment_name, secret=secret.read_bytes()) as cache:
        assert cache.page_bytes == 4096
        assert len(cache.hash_pages(np.arange(100))) == 6
        assert "a client is attached" in run("rm", segment_name, status=2).stderr

    listed = {entry["name"]: entry for entry in json.loads(run("ls", "--json").stdout)}
    entry = listed[segment_name]
    assert (entry["state"], entry["kind"], entry["pages"]) == ("ready", "index", 256)
    assert (entry["clients"], entry["pool_bytes"], entry["problem"]) == (0, 1 << 20, None)
    assert segment_name in run("ls").stdout

    assert run("rm", segment_name).stdout == f"removed {segment_name}\n"
    assert not names.dependents(segment_name)


def test_ls_shows_namespaces(run: Run, segment_name: str) -> None:
    """Of a cache that has more than the default one: pages, and limits where they are set. As
    `dump` has them."""

    def listed() -> list[Any]:
        (entry,) = [e for e in json.loads(run("ls", "--json").stdout) if e["name"] == segment_name]
        assert isinstance(entry["namespaces"], list)
        return entry["namespaces"]

    def rows() -> list[str]:
        _, _, text = run("ls").stdout.partition("namespace")
        return [line for line in text.splitlines() if segment_name in line]

    how = {"page_bytes": 4096, "fingerprint": "f", "secret": b"s" * 16}
    with Cache.create(segment_name, pages=16, **how) as cache:
        assert [(entry["weights"], entry["pages"]) for entry in listed()] == [("", 0)]
        assert not rows()
        cache.clear(cache.namespace("v1", "acme"))
        tenant = cache.namespace("v2", "acme", quota="32KiB", minimum="4KiB")
        with cache.reserve(keys(1, 2, 3), namespace=tenant) as new:
            new.publish()
        (entry,) = [entry for entry in listed() if entry["tenant"] == "acme"]
        assert (entry["weights"], entry["pages"], entry["bytes"]) == ("v2", 3, 12288)
        assert (entry["quota_bytes"], entry["minimum_bytes"]) == (32768, 4096)
        assert (
            listed()
            == json.loads(run("dump", segment_name, "--namespaces", "--json").stdout)["namespaces"][
                :2
            ]
        )
        (row,) = [row for row in rows() if "acme" in row]
        assert all(word in row for word in ("v2", "12.0 KiB", "32.0 KiB", "4.0 KiB"))
        record = cache.index.segment.address + cache.index.core.places.namespaces + 128 * tenant.id
        ctypes.c_uint32.from_address(record + 4).value = 9
        assert "unknown (9)" in {entry["state"] for entry in listed()}
        ctypes.c_uint32.from_address(record + 4).value = 1
        cache.clear(cache.namespace("v3"))  # `dump` shows it until another takes its record
        dumped = json.loads(run("dump", segment_name, "--namespaces", "--json").stdout)
        assert ("v3", "cleared") in {(e["weights"], e["state"]) for e in dumped["namespaces"]}
        assert "v3" not in {entry["weights"] for entry in listed()}


def test_a_model_on_this_machine_says_what_a_page_is(
    run: Run, segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / segment_name
    folder.mkdir()
    said = run("create", "--model", "no/such", "--size", "1MiB", status=2).stderr
    assert "no/such is not on this machine" in said
    assert "give --page-bytes and --fingerprint" in said
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    options = ("--size", "1MiB", "--secret-file", tmp_path / "secret", "--json", "--model")
    made = []
    for given in (folder, folder / "config.json", folder):
        if len(made) == 2:
            config["num_hidden_layers"] = 4
        (folder / "config.json").write_text(json.dumps(config))
        tokens = ("--page-tokens", 64) if not made else ()
        made.append(json.loads(run("create", *tokens, *options, given).stdout))
    assert made[0]["page_bytes"] == 64 * 2 * 2 * 64 * 2
    assert len({each["name"] for each in made}) == len({each["fingerprint"] for each in made}) == 3
    for each in made:
        assert each["name"] == cache_name(segment_name, each["fingerprint"])
        assert "prefix/" in each["fingerprint"]
        run("rm", each["name"])
    said = run("create", "--model", folder, status=2).stderr
    assert "missing: --size (or --pages); for example `--size 64GiB`\n" in said
    (folder / "config.json").write_text("{}")
    said = run("create", *options, folder, status=2).stderr
    assert "no page is computed" in said
    assert "give --page-bytes and --fingerprint" in said
    for absent in (tmp_path / "none", folder / "none" / "config.json", "./none"):
        said = run("create", *options, absent, status=2).stderr
        assert f"{absent}: expected a model's folder or its config.json, found nothing" in said


def test_a_model_names_its_cache(run: Run, segment_name: str, tmp_path: Path) -> None:
    model = f"org/{segment_name}"
    options = ("--pages", 4, "--page-bytes", 64, "--secret-file", tmp_path / "secret", "--model")
    made = [
        json.loads(run("create", *options, model, "--fingerprint", each, "--json").stdout)["name"]
        for each in "fg"
    ]
    assert made == [cache_name(model, each) for each in "fg"]
    listed = {entry["name"]: entry["family"] for entry in json.loads(run("ls", "--json").stdout)}
    assert [listed[name] for name in made] == [model, model]
    for given in (model, f"org-{segment_name}"):
        for command in ("dump", "rm", "reap"):
            said = run(command, given, status=2).stderr
            assert f"has several caches: {', '.join(sorted(made))};" in said
    assert run("rm", made[0]).stdout == f"removed {made[0]}\n"
    assert json.loads(run("dump", model, "--json").stdout)["segment"]["name"] == made[1]
    assert run("check", f"org-{segment_name}").stdout
    with open(names.FOLDER / f"lightcache.{made[1]}", "r+b") as file:
        file.seek(SegmentHeader.abi.offset)
        file.write(b"\7")
    assert run("rm", model).stdout == f"removed {made[1]}\n", "also that of another release"
    for wrong, says in (((segment_name, *options, model), "not both"), (options[:-1], "NAME (or")):
        assert says in run("create", *wrong, "--fingerprint", "f", status=2).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pages", 0), "expected 1 to"),
        (("--pages", -1), "expected 1 to"),
        (("--size", "-1"), "expected bytes or a size"),
        (("--size", "0"), "more than zero"),
        (("--size", "1 parsec"), "expected bytes or a size"),
        (("--size", "1000 TiB"), "found"),
        (("--size", "1MiB", "--pages", 4), "give --size or --pages, not both"),
        ((), "missing: --size (or --pages)"),
        (("--pages", 4, "--algorithm", "md5"), "md5"),
        (("--pages", 4, "--group", "no such group"), "no such group"),
        (("--pages", 4, "--numa", "moon"), "moon"),
    ],
)
def test_create_refuses(
    run: Run, segment_name: str, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    secret = tmp_path / "new" / "newer" / "s"
    common = ("--page-bytes", 4096, "--fingerprint", "f", "--secret-file", secret)
    result = run("create", segment_name, *common, *options, status=2)
    assert message in result.stderr
    assert read_segment(segment_name) is None
    assert not names.dependents(segment_name)
    assert not list(tmp_path.iterdir())


def test_create_names_all_that_is_missing(
    run: Run, segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and with an example; and nothing is made, not even a secret."""
    monkeypatch.setenv("HOME", str(tmp_path))
    said = run("create", status=2).stderr
    assert "missing: NAME (or --model), --size (or --pages), --page-bytes, --fingerprint;" in said
    assert "for example `--model llama-3-8b --size 64GiB --page-bytes 8MiB" in said
    said = run("create", segment_name, "--pages", 4, status=2).stderr
    assert "missing: --page-bytes, --fingerprint;" in said
    assert not list(tmp_path.iterdir())


def test_a_secret_goes_with_the_cache_that_was_not_created(
    run: Run, segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    default = tmp_path / ".local/share/lightcache/secret"
    ours = tmp_path / "mine"
    options = ("--page-bytes", 4096, "--fingerprint", "f")
    for file, more in ((default, ()), (ours, ("--secret-file", ours))):
        run("create", segment_name, "--size", "1000TiB", *options, *more, status=2)
        assert not file.exists()
        run("create", segment_name, "--size", "1MiB", *options, *more)
        kept = file.read_bytes()
        run("create", segment_name, "--size", "1MiB", *options, *more, status=2)  # it exists
        run("create", f"{segment_name}-2", "--size", "1000TiB", *options, *more, status=2)
        assert file.read_bytes() == kept  # it was there before
        run("rm", segment_name)


def test_a_secret_that_another_cache_uses_by_then_stays(
    run: Run, segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"

    others: list[Cache] = []

    def another_first(*arguments: object, **how: object) -> None:
        name, secret = f"{segment_name}-2", file.read_bytes()
        like: dict[str, Any] = {"page_bytes": 4096, "fingerprint": "f", "secret": secret}
        others.append(Cache.create(name, pages=4, **like))
        raise InUse("create: it exists")

    monkeypatch.setattr(create, "_prefault", another_first)
    options = ("--page-bytes", 4096, "--fingerprint", "f", "--secret-file", file)
    run("create", segment_name, "--pages", 4, *options, status=2)
    assert file.exists()
    others.pop().close()


def test_create_without_memory(run: Run, segment_name: str, tmp_path: Path) -> None:
    options = ("--page-bytes", "64MiB", "--fingerprint", "f", "--secret-file", tmp_path / "s")
    shown = run("create", segment_name, "--pages", 3, *options, "--no-prefault").stdout
    assert "1 of them with memory so far" in shown
    assert "2 pages have no memory yet" in run("dump", segment_name).stdout
    run("rm", segment_name)


def test_a_flat_cache(run: Run, segment_name: str, tmp_path: Path) -> None:
    """For states: who opens it says the same, and is told if it is not."""
    options = ("--page-bytes", 4096, "--fingerprint", "f", "--secret-file", tmp_path / "s")
    run("create", segment_name, "--pages", 3, *options, "--page-tokens", 1, "--independent")
    shown = run("dump", segment_name).stdout
    assert "4.0 KiB, 1 token\n" in re.sub(" +\n", "\n", shown)
    assert "independent: any page may go before others" in shown
    assert "independent index" in run("ls").stdout
    with Cache.attach(segment_name, independent=True) as cache:
        assert cache.index.independent
    run("rm", segment_name)


def _create(name: str, folder: Path, *more: str) -> list[str]:
    options = ["--pages", "8", "--page-bytes", "4096", "--fingerprint", "f"]
    secret = ["--secret-file", str(folder / "secret")]
    return [str(BIN / "lightcache"), "create", name, *options, *secret, *more]


def test_create_attached_stays(segment_name: str, tmp_path: Path) -> None:
    command = _create(segment_name, tmp_path, "--lifetime", "attached")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as child:
        assert child.stderr is not None
        assert "Ctrl-C" in child.stderr.readline()
        assert read_segment(segment_name) is not None
        child.send_signal(signal.SIGTERM)
        assert child.wait() == 0
    assert read_segment(segment_name) is None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_undoes_what_was_begun(
    run: Run,
    segment_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    status: int,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert read_segment(segment_name) is not None
        os.kill(os.getpid(), number)

    monkeypatch.setattr(create, "_prefault", interrupted)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or we go, if it is not handled
    try:
        run(*_create(segment_name, tmp_path)[1:], status=status)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert read_segment(segment_name) is None
    assert not names.dependents(segment_name)
    assert not list(tmp_path.iterdir())


def test_create_shows_progress_on_a_terminal(run: Run, segment_name: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    subprocess.run(
        _create(segment_name, tmp_path), stderr=theirs, cwd=tmp_path, env=environment, check=True
    )
    os.close(theirs)
    assert f"memory of {segment_name}".encode() in os.read(ours, 1 << 16)
    os.close(ours)
    run("rm", segment_name)


def test_ls_says_what_is_wrong(run: Run, made: str) -> None:
    def state() -> str:
        found = {entry["name"]: entry for entry in json.loads(run("ls", "--json").stdout)}
        return str(found[made]["state"])

    run("disable", made)
    assert state() == "disabled"
    os.truncate(names.FOLDER / f"lightcache.{made}", 8192)
    assert state() == "damaged"
    os.truncate(names.FOLDER / f"lightcache.{made}", 0)
    assert state() == "dead creator"
    assert "dead creator" in run("ls").stdout
    run("rm", made, "--force")


def test_rm_by_force(run: Run, made: str) -> None:
    with Cache.attach(made, secret=SECRET) as cache:
        run("rm", made, status=2)
        run("rm", made, "--force")
        assert cache.index.segment.retired


# ---- keeping order


def test_reap(run: Run, made: str, script: Script) -> None:
    script(CLIENT + DIES, made, "victim", status=-signal.SIGKILL)
    before = json.loads(run("dump", made, "--clients", "--json").stdout)
    assert [client["alive"] for client in before["clients"]] == [False]
    assert before["clients"][0]["pins"] == 12
    assert "dead clients have not been reaped" in before["hints"][0]
    assert run("reap", made).stdout == f"{made}: 1 dead clients reaped\n"
    after = json.loads(run("dump", made, "--json").stdout)
    assert (after["clients"], after["reservations"]) == ([], [])
    assert after["totals"]["ready"] == 6
    run("check", made)


FORKS_PAST_THE_HANDLERS = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None)
clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
child = libc.syscall(clone, int(signal.SIGCHLD), 0, 0, 0, 0)
if child == 0:
    os.close(1), os.close(2)  # of these our death must be seen
    while True:
        time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_dump_names_a_life_that_a_child_keeps(run: Run, made: str, script: Script) -> None:
    done = script(CLIENT + FORKS_PAST_THE_HANDLERS, made, "victim", status=-signal.SIGKILL)
    child = int(done.stdout.split()[-1])
    try:
        found = json.loads(run("dump", made, "--json").stdout)
        assert [client["alive"] for client in found["clients"]] == [True]
        assert "has ended, but a process that was forked from it" in found["not_working"][0]
    finally:
        os.kill(child, signal.SIGKILL)
    while not run("reap", made).stdout.startswith(f"{made}: 1 dead"):
        pass
    assert json.loads(run("dump", made, "--json").stdout)["not_working"] == []


def test_reap_all(run: Run, made: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only ours: other runs may have segments of their own here.
    def only_ours() -> list[Any]:
        return [info for info in list_segments() if info.name.startswith(made)]

    monkeypatch.setattr(maintenance, "list_segments", only_ours)
    script(CLIENT + DIES, made, "victim", status=-signal.SIGKILL)
    with (
        Segment.create(f"{made}-plain", 1),
        Segment.create(f"{made}-list", 1, kind=SegmentKind.LIST),
    ):
        result = run("reap", "--all", "--json")
        dead = {entry["name"]: entry["dead"] for entry in json.loads(result.stdout)}
        assert dead == {made: 1, f"{made}-plain": 0, f"{made}-list": 0}
    assert f"{made}: 0 dead" in run("reap", "--all").stdout
    assert "give a NAME" in run("reap", status=2).stderr
    assert "give a NAME" in run("reap", made, "--all", status=2).stderr


def test_tools_do_not_end_a_cache_of_the_dead(
    run: Run, segment_name: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last to leave removes a cache of lifetime "attached"; a tool must not be that one."""
    source = (
        "import os, signal, sys\n"
        "from lightcache import PageIndex\n"
        "index = PageIndex.create(sys.argv[1], pages=8)\n"
    )
    script(source + DIES, segment_name, status=-signal.SIGKILL)
    run("reap", segment_name)
    run("repair", segment_name)
    run("check", segment_name, "--lock")
    run("disable", segment_name)
    run("enable", segment_name)
    assert read_segment(segment_name) is not None
    monkeypatch.setattr(names, "segment_names", lambda: [segment_name])
    monkeypatch.setattr(names, "dependents", lambda *_: [])
    (listed,) = json.loads(run("sweep", "--json").stdout)
    assert (listed["name"], listed["removed"]) == (segment_name, False)
    assert read_segment(segment_name) is not None
    (listed,) = json.loads(run("sweep", "--json", "--yes").stdout)
    assert (listed["object_name"], listed["removed"]) == (f"/lightcache.{segment_name}", True)
    assert "0 objects removed" in run("sweep").stdout
    assert read_segment(segment_name) is None


def test_disable_and_enable(run: Run, made: str) -> None:
    with Cache.attach(made, secret=SECRET) as cache:
        keys = cache.hash_pages(np.arange(100))
        held = cache.match(keys)
        said = run("disable", made).stdout
        assert f"disabled; `lightcache enable {made}` undoes it" in said
        for call in (cache.peek, cache.match, cache.reserve):
            refused(NotReady, "enable", call, keys)
        held.release()
        assert "disabled already" in run("disable", made).stdout
        assert "lightcache enable" in run("dump", made).stdout
        assert run("enable", made).stdout == f"{made}: enabled\n"
        assert cache.peek(keys) == 6


# ---- doctor, bench


def test_doctor(run: Run, script: Script) -> None:
    found = json.loads(CliRunner().invoke(cli.group, ["doctor", "--json"]).stdout)
    assert {entry["level"] for entry in found} <= {"ok", "warning", "error"}
    assert all(entry["remedy"] or entry["level"] == "ok" for entry in found)
    seen = {entry["name"] for entry in found}
    assert {"/dev/shm", "cgroup memory", "locked memory", "kernel", "numpy", "compiler"} <= seen
    assert {"PID namespace", "OFD locks", "C core, index", "GPU", "torch"} <= seen
    source = (
        "import sys\n"
        "from lightcache.tools.doctor import examine\n"
        "examine()\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
    )
    script(source)


def test_doctor_fails_on_errors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [doctor.ok("a", "fine"), doctor.warning("b", "so so", "try")]
    monkeypatch.setattr(doctor, "examine", lambda: lines)
    assert "-> try" in run("doctor").stdout
    lines.append(doctor.error("c", "[bad]", "mend it"))
    assert "[bad]" in run("doctor", status=1).stdout


FAKE = '''"""A benchmark of nothing."""
from lightcache_bench import Row, meets
def rows(quick):
    yield Row("nothing", {"quick": quick}, 2.0, "us", "more of it", 0.5, "<= 1", meets(0.5, "<= 1"))
    yield Row("something")
'''


def test_bench_that_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to type; whatever was typed after it."""
    monkeypatch.setitem(sys.modules, "lightcache_bench", None)
    for loaded in ("lightcache.tools.bench", "lightcache_bench._command"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    try:
        for arguments in ([], ["index", "--quick"], ["--json"]):
            assert "pip install ./benchmarks" in run("bench", *arguments, status=2).stderr
    finally:
        sys.modules.pop("lightcache.tools.bench", None)


def test_bench(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "_helper.py").write_text("")
    monkeypatch.setattr(frame, "__path__", [*frame.__path__, str(tmp_path)])
    try:
        assert "A benchmark of nothing." in run("bench").stdout
        assert "_helper" not in json.loads(run("bench", "--json").stdout)
        document = json.loads(run("bench", "fake", "--quick", "--json").stdout)
        shown = run("bench", "fake").stdout
    finally:
        sys.modules.pop("lightcache_bench.fake", None)
    assert set(document) == {"machine", "versions", "rows"}
    assert document["machine"]["cores"] > 0
    assert document["rows"][0] == {
        "name": "nothing",
        "params": {"quick": True},
        "value": 2.0,
        "unit": "us",
        "baseline": "more of it",
        "ratio": 0.5,
        "target": "<= 1",
        "met": True,
    }
    assert document["rows"][1]["target"] is None
    assert "more of it" in shown
    assert "there is no benchmark 'none'" in run("bench", "none", status=2).stderr


def test_meets() -> None:
    assert frame.meets(2.5, "<= 2.5")
    assert frame.meets(10, ">= 10 times")
    assert not frame.meets(2.6, "<= 2.5")
    assert not frame.meets(float("nan"), ">= 1")
    refused(ValueError, "begins with", frame.meets, 1, "about 1")


def test_an_index_without_a_pool(run: Run, segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=4):
        found = json.loads(run("dump", segment_name, "--json").stdout)
        assert found["segment"]["pool"] is None
        assert (found["not_working"], found["hints"]) == ([], [])
        assert "4, 4 with memory" in run("dump", segment_name).stdout
