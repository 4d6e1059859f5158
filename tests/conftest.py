"""What tests share: which part of them runs, names of their own in /dev/shm, children, waiting."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

# Fixtures of storages and their servers. What a test's module defines itself comes before them.
pytest_plugins = [
    *("support.certificates", "support.disks", "support.mooncake_server", "support.plain_engine"),
    *("support.redis_server", "support.s3_server", "support.serving", "support.storing"),
]

DEADLINE = 60.0  # seconds after which waiting is a failure: generous, nothing is measured here

# Other runs may work beside this one; only what carries our token is ours to judge.
_TOKEN = f"test-{secrets.token_hex(4)}"
_COUNTER = itertools.count(1)
_SHM = Path("/dev/shm")

Script = Callable[..., "subprocess.CompletedProcess[str]"]
BuiltOnce = Callable[[str, Callable[[Path], object]], Path]

# The models of the tests are tiny: a second thread only takes the core of the test beside this one.
# Set before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What an operator has set on this machine is not for the tests.
os.environ["LIGHTCACHE_CONFIG"] = os.devnull

# A run that a shell has put into the background begins with Ctrl-C ignored, as would its processes.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests with one of these markers are run by `make test-all`, all others by `make test`.
REST = ("slow", "models", "servers")
_REST_MARK = re.compile(rf"mark\.(?:{'|'.join(REST)})\b")
_WHOLLY_REST = re.compile(rf"^pytestmark = .*{_REST_MARK.pattern}", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part=first` leaves out what takes long, `--part=rest` is what the first part left out."""
    text = "first: what people wait for; rest: the others. Tests named by path, -k or -m all run."
    parser.addoption("--part", choices=["all", "first", "rest"], default="all", help=text)


def chosen(config: pytest.Config) -> bool:
    """True if the command line names tests: these run, whatever part they belong to."""
    option = config.option
    return bool(option.file_or_dir or option.keyword or option.markexpr)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for each core this process may use, eight at most, since each imports torch and
    transformers (0.6 GiB); tests named on the command line need none."""
    return 0 if chosen(config) else min(8, len(os.sched_getaffinity(0)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file that has no test of the asked part: most of those that are left out
    import transformers. Tests of a GPU are run by `make gpu-test`: beside others, whose kernels are
    interpreted, all of them would be skipped; tests of engines by `.ci/engines`."""
    part = config.getoption("--part")
    if part == "all" or chosen(config):
        return None
    if collection_path.is_dir():
        return collection_path.name in ("gpu", "engines") or None
    if not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    whole = bool(_WHOLLY_REST.search(text))
    return (whole if part == "first" else not whole and not _REST_MARK.search(text)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the asked part; of the rest run tests with the longest time limit first: else one
    process would build and run the last of these while the others have nothing left."""
    part = config.getoption("--part")
    if part == "all" or chosen(config):
        return
    kept, left_out = [], []
    for item in items:
        is_rest = any(item.get_closest_marker(name) for name in REST)
        (kept if is_rest == (part == "rest") else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=may_take, reverse=True) if part == "rest" else kept


def may_take(item: pytest.Item) -> float:
    """Seconds, where a test has a limit of its own."""
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Workers send three reports of each test; if it passes, without what is not read."""
    report: Any = yield
    if report.passed and "PYTEST_XDIST_WORKER" in os.environ:
        report.keywords, report.sections = {}, []
    return report  # type: ignore[return-value]  # what a wrapper returns


class Watchdog(threading.Thread):
    """Ends a run whose test takes too long: one thread for all tests. pytest-timeout starts one for
    each, and waits for its end, which takes longer than most of them."""

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.watched: tuple[float, Callable[[], None]] | None = None
        """When a test must be over, and what is called then."""

    def run(self, now: Callable[[], float] = time.monotonic) -> None:
        never = threading.Event()
        while not never.wait(1.0):
            watched = self.watched
            if watched and now() > watched[0]:
                watched[1]()

    def watch(self, end: float, late: Callable[[], None]) -> None:
        self.watched = end, late
        if not self.is_alive():
            self.start()


_WATCHDOG = Watchdog()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """In place of a thread for each test."""
    if settings.method != "thread":
        return None
    _WATCHDOG.watch(time.monotonic() + settings.timeout, lambda: end_run(item, settings.timeout))
    return True


def end_run(item: pytest.Item, seconds: float) -> None:
    """Say where all threads are, and exit. A worker of xdist has no terminal: what pytest-timeout
    writes there is lost, so this goes to where faults are reported."""
    where = item.config.stash[fault_handler_stderr_fd_key]
    os.write(where, f"\n{item.nodeid} took more than {seconds:g} s; its threads:\n".encode())
    faulthandler.dump_traceback(where, all_threads=True)
    os._exit(1)


def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    _WATCHDOG.watched = None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped for each reason. (-rs has a line for each place of a skip.)"""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason}")


@pytest.fixture
def segment_name() -> str:
    """A segment name that nobody else uses; longer names may be made from it."""
    return f"{_TOKEN}-{next(_COUNTER)}"


@pytest.fixture(autouse=True)
def clean_shm() -> Iterator[None]:
    """Every test leaves /dev/shm as it found it; what one left is named, and then removed."""
    yield
    left = sorted(path for path in _SHM.iterdir() if _TOKEN in path.name)
    for path in left:
        path.unlink()
    assert not left, f"left in {_SHM}: {[path.name for path in left]}"


@pytest.fixture(autouse=True)
def others_stay() -> Iterator[None]:
    """What needs room sweeps all of this user's, idle caches by clocks of tests included: here only
    what this run has made, not what other tests and the person who runs them have there."""
    import lightcache.shm
    from lightcache.shm import names

    def mine(name: str) -> bool:
        # Demos and benchmarks name their own, and sweep these alone.
        return _TOKEN in name or name.startswith(("demo-", "bench-"))

    class OwnNames:
        """The module `names`, as `sweep` sees it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(names, name)

        def segment_names(self) -> list[str]:
            return [name for name in names.segment_names() if mine(name)]

        def dependents(self) -> list[Any]:
            return [one for one in names.dependents() if mine(one.segment)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[f"{lightcache.shm.__name__}.sweep"], "names", OwnNames())
        yield


@pytest.fixture(autouse=True)
def young_heap() -> Iterator[None]:
    """`gc.collect()` looks at what a test made, not at all of torch and transformers: that takes
    a fifth of a second, and some tests collect at every place of an operation."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> BuiltOnce:
    """`built_once(name, build)`: a folder that `build` has filled, once for all processes of this
    run of pytest; the others wait for the one that builds."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def make(name: str, build: Callable[[Path], object]) -> Path:
        folder, done = root / f"built-{name}", root / f"built-{name}.done"
        with (root / f"built-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a build that failed
                folder.mkdir()
                build(folder)
                done.touch()
        return folder

    return make


# Imported where they are used: not every test needs them.


@pytest.fixture
def index(request: pytest.FixtureRequest, segment_name: str) -> Iterator[Any]:
    """Of PAGES pages, as the test's module says, or 16, in its order EVICTION, or the default; it
    is sound in the end."""
    from lightcache import PageIndex

    pages, order = (getattr(request.module, name, None) for name in ("PAGES", "EVICTION"))
    with PageIndex.create(segment_name, pages=pages or 16, eviction=order) as made:
        yield made
        report = made.check()
        assert report.clean, report.message


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Callable[..., Any]]:
    """Managers, as support.manager_case makes them."""
    from support.manager_case import made_worlds

    yield from made_worlds(segment_name)


@pytest.fixture
def world(worlds: Callable[..., Any]) -> Any:
    """One of them, of the usual sizes."""
    return worlds()


@pytest.fixture
def hybrids(segment_name: str) -> Iterator[Callable[..., Any]]:
    """Managers of hybrid models, as support.hybrid_case makes them."""
    from support.hybrid_case import HybridWorld
    from support.manager_case import made_worlds

    yield from made_worlds(segment_name, HybridWorld)


@pytest.fixture
def run() -> Callable[..., Any]:
    """The command line: `run("dump", name, status=0)`."""
    from click.testing import CliRunner

    from lightcache.tools import cli

    def command(*arguments: object, status: int = 0) -> Any:
        done = CliRunner().invoke(cli.group, [str(one) for one in arguments])
        assert done.exit_code == status, (done.output, done.exception)
        return done

    return command


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool], str], None]:
    """`wait_until(condition, what)` asks again and again; a failure names `what`."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"waited {DEADLINE} s for: {what}"
            time.sleep(0.001)

    return wait


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """`script(source, *arguments)` runs Python in a process of its own, which may fork, crash or
    exit as it likes, and asserts its exit status (`status=`; None: any)."""

    def run(
        source: str, *arguments: object, status: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / f"script{next(_COUNTER)}.py"
        path.write_text(source)
        done = subprocess.run(
            [sys.executable, "-W", "error", str(path), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONFAULTHANDLER": ""},
            check=False,
        )
        if status is not None:
            assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
