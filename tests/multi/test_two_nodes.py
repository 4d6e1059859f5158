"""Two machines with one storage: what one has written the other finds, and nobody else does.

Two caches of different names stand for the machines, each in a process of its own with a manager.
They have nothing in common but the storage and what decides their keys.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from multi import pausing
from support.disks import indexes
from support.mooncake_server import own_cluster
from support.redis_server import redis_server, redis_url
from support.s3_server import s3_credentials, s3_server

from lightcache.shm import sweep

__all__ = ["own_cluster", "redis_server", "redis_url", "s3_credentials", "s3_server"]

pytestmark = pytest.mark.timeout(180)  # several processes

TESTS = Path(__file__).parent.parent
STORAGES = ("disk", "redis", "s3", "mooncake")
"""Those that two machines can reach."""
NOTHING = {"device": 0, "host": 0, "storage": 0}


@pytest.fixture(
    params=[
        pytest.param(kind, marks=[] if kind == "disk" else pytest.mark.servers) for kind in STORAGES
    ]
)
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A storage that both machines reach, with nothing in it."""
    if request.param == "redis":
        yield request.getfixturevalue("redis_url")
    elif request.param == "s3":
        yield request.getfixturevalue("s3_server").url()
    elif request.param == "mooncake":
        yield request.getfixturevalue("own_cluster").url
    else:
        folder = tmp_path / "shared"
        yield f"disk:{folder}?capacity=4MiB"
        left = indexes(folder)
        for index in left:
            index.unlink()
        assert not left


class Machine:
    """A process of `node_side`."""

    def __init__(self, name: str, url: str, **options: Any) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-W", "error", str(TESTS / "multi" / "node_side.py")),
                *(name, json.dumps({"url": url, **options})),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": pausing.python_path(TESTS)},
        )

    def said(self) -> Any:
        """Its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} ended by itself: {self.process.wait(60.0)}"
        return json.loads(line)

    def order(self, do: str, **what: Any) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()

    def run(self, **what: Any) -> Any:
        """A request: tokens that were found, by tier."""
        self.order("run", **what)
        return self.said()

    def kill(self) -> None:
        """SIGKILL. What it leaves in shared memory no other machine would see."""
        self.process.kill()
        self.process.wait()
        sweep(prefix=self.name)

    def close(self) -> None:
        """It leaves, if it lives."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        if self.process.returncode is None:
            try:
                assert self.process.wait(60.0) == 0
            finally:
                self.kill()
        self.process.stdout.close()


@pytest.fixture
def machine(segment_name: str, shared_url: str) -> Iterator[Callable[..., Machine]]:
    """`machine(**options)`: one more machine, which is there when this returns."""
    made: list[Machine] = []

    def make(**options: Any) -> Machine:
        made.append(Machine(f"{segment_name}.{len(made)}", shared_url, **options))
        assert made[-1].said() == "there"
        return made[-1]

    yield make
    errors = []
    for each in made:
        try:
            each.close()
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            errors.append(error)
    assert not errors


# ---- one storage


def test_each_finds_what_the_other_has_written(machine: Callable[..., Machine]) -> None:
    one, other = machine(), machine()
    assert one.run() == NOTHING
    assert other.run() == {**NOTHING, "storage": 40}
    assert other.run() == {**NOTHING, "device": 40}
    assert other.run(seed=1) == NOTHING
    assert one.run(seed=1) == {**NOTHING, "storage": 40}


@pytest.mark.slow
def test_what_the_other_has_added(machine: Callable[..., Machine]) -> None:
    """A conversation that goes on elsewhere, and comes back."""
    one, other = machine(), machine()
    one.run(tokens=42)
    assert other.run(tokens=82) == {**NOTHING, "storage": 40}  # `tokens` begins with these
    assert one.run(tokens=102) == {"device": 40, "host": 0, "storage": 40}
    assert other.run(tokens=122) == {"device": 80, "host": 0, "storage": 20}


@pytest.mark.slow
def test_a_machine_that_comes_when_the_other_is_gone(machine: Callable[..., Machine]) -> None:
    one = machine()
    one.run()
    one.close()
    assert machine().run() == {**NOTHING, "storage": 40}


# ---- whose is whose


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"secret": "the secret of another machine"}, id="secret"),
        pytest.param({"fingerprint": "another model"}, id="fingerprint"),
        pytest.param({"weights": "another version"}, id="weights"),
        pytest.param({"page": 8}, id="page"),
    ],
)
def test_a_machine_of_another_kind_finds_nothing(
    machine: Callable[..., Machine], options: dict[str, Any]
) -> None:
    """Neither way; and each goes on to find its own."""
    ours, theirs = machine(), machine(**options)
    ours.run(seed=0)
    assert theirs.run(seed=0) == NOTHING
    theirs.run(seed=1)
    assert ours.run(seed=1) == NOTHING
    assert machine(**options).run(seed=0) == {**NOTHING, "storage": 40}
    assert machine().run(seed=0) == {**NOTHING, "storage": 40}


@pytest.mark.slow
@pytest.mark.parametrize("whose", [{"tenant": "another"}, {"salt": "another"}], ids=str)
def test_another_tenant_finds_nothing(
    machine: Callable[..., Machine], whose: dict[str, str]
) -> None:
    one, other = machine(), machine()
    one.run()
    assert other.run(**whose) == NOTHING
    assert other.run() == {**NOTHING, "storage": 40}
    assert one.run(**whose) == {**NOTHING, "storage": 40}


# ---- one is killed


@pytest.mark.slow
@pytest.mark.crash
def test_killed_with_half_of_a_prompt_written(machine: Callable[..., Machine]) -> None:
    """What it had stored is good, the rest is computed, and stored by who computed it."""
    one, other = machine(), machine()
    one.order("halt")
    assert one.said() == "half"
    one.kill()
    assert other.run() == {**NOTHING, "storage": 20}
    assert machine().run() == {**NOTHING, "storage": 40}


@pytest.mark.crash
@pytest.mark.parametrize(
    "requests", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 9))]
)
def test_killed_at_any_moment_of_writing(machine: Callable[..., Machine], requests: int) -> None:
    """What is found is right (`node_side` compares it), and all that it had answered is found."""
    one, other = machine(), machine()
    one.order("flood", seed=100, most=requests + 3)  # no more than the storage has room for
    for number in range(requests):
        assert one.said() == number
    one.kill()
    for number in range(requests):
        assert other.run(seed=100 + number) == {**NOTHING, "storage": 40}
    found = other.run(seed=100 + requests)
    assert found["device"] == found["host"] == 0
    assert machine().run(seed=100 + requests) == {**NOTHING, "storage": 40}


# ---- recurrent states


def test_checkpoints_of_a_hybrid_model(machine: Callable[..., Machine]) -> None:
    """Keys and values come with a state behind them, both ways."""
    one, other = machine(kind="hybrid"), machine(kind="hybrid")
    nothing = {**NOTHING, "usable": 0, "states": 0}
    assert one.run() == nothing
    assert other.run() == {**nothing, "usable": 40, "storage": 40, "states": 1}
    assert other.run(seed=1) == {**nothing, "states": 1}
    assert one.run(seed=1) == {**nothing, "usable": 40, "storage": 40, "states": 1}
