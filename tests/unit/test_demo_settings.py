"""Settings of a run travel whole, and the prompts that are measured are what they promise."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.demo_desk import LEAVES_A_RING, settings_of

from lightcache.errors import ConfigError, StorageError
from lightcache.shm import SharedRing, read_segment
from lightcache.tools import cli
from lightcache.tools.demo import machine, urls
from lightcache.tools.demo.models import ModelChoice
from lightcache.tools.demo.prompts import Prompts
from lightcache.tools.demo.report import Report
from lightcache.tools.demo.returning import Returning
from lightcache.tools.demo.settings import Settings
from lightcache.tools.demo.stage import Stage
from lightcache.tools.demo.turns import Turn

PLAIN: dict[str, Any] = {
    "seed": 4,
    "count": 5,
    "prefix_tokens": 12,
    "new_tokens": 4,
    "answer_tokens": 2,
    "vocabulary": 1000,
}


# ---- settings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hold_at": 3, "baseline": False, "alternate": True, "pool": "none", "routing": "random"},
        {"routing": "prefix", "kept": 4, "storage": "memory:?capacity=1GiB"},
        {"devices": ("cuda:0", "cuda:1"), "workers": 2, "threads": 7, "seed": -1},
        {"model": ModelChoice("/a folder", "8b", 3, "cuda:1", "bfloat16"), "pool": "private"},
        {"workload": {"kind": "prompts", **PLAIN, "chains": 2}},
        {"workload": {"kind": "trace", "path": "/tmp/\udcff \n\"'", "scale": 1 / 32}},
    ],
)
def test_they_travel_whole(changes: dict[str, Any]) -> None:
    sent = settings_of("run-1", **changes)
    found = Settings.from_json(sent.to_json())
    assert found == sent
    assert type(found.devices) is tuple
    assert "\0" not in sent.to_json(), "a command line ends there"


def test_another_field_is_refused() -> None:
    plain = settings_of("run-1")
    with pytest.raises(TypeError):
        Settings.from_json(plain.to_json().replace("page_tokens", "hamsters"))


def test_names_of_a_run() -> None:
    shared = settings_of("run-1")
    rings = [shared.router_ring, shared.report_ring, shared.reference_ring]
    rings += [shared.worker_ring(worker, life) for worker in range(3) for life in range(3)]
    private = replace(shared, pool="private")
    lives = [(worker, life) for worker in range(3) for life in range(3)]
    caches = [private.cache(worker, life) for worker, life in lives]
    devices = [private.device_index(worker, life) for worker, life in lives]
    names = [*rings, *caches, *devices, shared.cache(0, 0)]
    assert len(set(names)) == len(names)
    assert all(name is not None and name.startswith("run-1-") for name in names)
    assert shared.cache(0, 0) == shared.cache(1, 4)
    assert replace(shared, pool="none").cache(0, 0) is None


def test_shares_of_workers() -> None:
    plain = settings_of("run-1", size=1000, workers=3, devices=("a", "b"))
    assert plain.cache_size == 1000
    assert replace(plain, pool="private").cache_size == 333
    assert [plain.device(worker) for worker in range(3)] == ["a", "b", "a"]


def test_the_workload_begins_again() -> None:
    plain = settings_of("run-1")
    one, other = plain.make_workload(), plain.make_workload()
    assert [turn.tokens.tolist() for turn in one.begin()] == [
        turn.tokens.tolist() for turn in other.begin()
    ]
    assert "kind" in plain.workload


@pytest.mark.crash
def test_room_is_looked_for_when_the_dead_are_gone(
    segment_name: str, script: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed demo left may be what takes the room; who lives is left alone."""
    dead, living = f"demo-{segment_name}-dead", f"demo-{segment_name}-living"
    script(LEAVES_A_RING, dead, status=-9)
    looked: list[int] = []

    def look(size: int) -> None:
        looked.append(size)
        assert read_segment(dead) is None
        assert read_segment(living) is not None

    monkeypatch.setattr(machine, "preflight", look)
    with SharedRing.create(living, capacity=1, message_bytes=8):
        found = CliRunner().invoke(cli.group, ["demo", "--trace", "/nowhere", "--size", "1MiB"])
    assert "/nowhere" in found.output
    assert looked == [1 << 20]


def test_what_a_hybrid_model_cannot_have_yet() -> None:
    found = CliRunner().invoke(cli.group, ["demo", "--model", "hybrid", "--routing", "prefix"])
    assert found.exit_code != 0
    assert "--model hybrid: expected another --routing than prefix" in found.output


def test_settings_behind_a_restart() -> None:
    """The same in all but what is asked, and under names of their own."""
    before = settings_of("run-1", hold_at=3, storage="disk:/there")
    found = before.again("/turns.json")
    assert found.run == "run-1-again"
    assert (found.hold_at, found.storage, found.seed) == (None, "disk:/there", before.seed)
    total, vocabulary = before.make_workload().total, before.workload["vocabulary"]
    assert found.workload == {
        "kind": "again",
        "path": "/turns.json",
        "first": total,
        "vocabulary": vocabulary,
    }
    assert Settings.from_json(found.to_json()) == found


# ---- storage


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("disk:/mnt/x?capacity=1GiB", True),
        ("memory:?capacity=1GiB", False),
        ("flaky:read_fail=0.1,seed=3:memory:", False),
        ("flaky:read_fail=0.1:disk:/mnt/x", True),
        ("flaky:read_fail=0.1:flaky:seed=1:memory:", False),
        ("mine://there", True),
        ("stack:?promote=no|memory:|disk:/mnt/x", True),
        ("stack:memory:|memory:?pages=1", False),
    ],
)
def test_what_outlives_its_processes(url: str, found: bool) -> None:
    assert urls.outlives(url) is found


def test_a_folder_is_the_one_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have another working folder."""
    monkeypatch.chdir(tmp_path)
    assert urls.checked("disk:pages?capacity=1MiB") == f"disk:{tmp_path}/pages?capacity=1MiB"
    assert urls.checked("disk:/mnt/x") == "disk:/mnt/x"
    assert urls.checked("memory:?pages=4") == "memory:?pages=4"
    stack = urls.checked("stack:?promote=no|memory:|disk:pages?capacity=1MiB")
    assert stack == f"stack:?promote=no|memory:|disk:{tmp_path}/pages?capacity=1MiB"
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1"):
        urls.checked("flaky::redis://127.0.0.1:1")
    assert not list(tmp_path.iterdir()), "nothing is made"


class Started(Exception):
    """A run would begin."""


@pytest.mark.parametrize(
    ("more", "storage", "restarts"),
    [
        ([], f"disk:.*/pages\\?capacity={2 << 20}$", True),
        (["--model", "hybrid"], f"disk:.*/pages\\?capacity={1 << 20}$", True),
        (["--storage", "none"], None, False),
        (["--no-restart"], None, False),
        (["--storage", "disk:/there?capacity=1MiB"], r"disk:/there\?capacity=1MiB$", True),
        (["--storage", "disk:/there", "--no-restart"], "disk:/there$", False),
        (["--storage", "memory:"], "memory:$", False),
    ],
)
def test_where_pages_go(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    storage: str | None,
    restarts: bool,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[Report] = []

    def run(self: Report) -> None:
        seen.append(self)
        assert bool(list(tmp_path.iterdir())) is restarts
        raise Started

    monkeypatch.setattr(Report, "run", run)
    found = CliRunner().invoke(cli.group, ["demo", "--size", "1MiB", *more])
    assert isinstance(found.exception, Started), found.output
    (report,) = seen
    if storage is None:
        assert report.settings.storage is None
    else:
        assert re.match(storage, report.settings.storage or "")
    assert (report.scratch is not None) is report.outcome.wanted_restart is restarts
    assert not list(tmp_path.iterdir()), "it is removed, whatever happens"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hamster", "expected a URL such as 'memory:', found 'hamster'"),
        ("", "expected a URL such as 'memory:', found ''"),
        ("None", "expected a URL such as 'memory:', found 'None'"),
        ("disk:", "disk: expected a folder"),
        ("disk:/there?capacity=lots", "capacity"),
        ("disk:/there?size=1GiB", "found size"),
        ("memory:?pages=few", "pages: expected a number, found 'few'"),
    ],
)
def test_a_bad_storage_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, words: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Stage, "__enter__", lambda self: pytest.fail("something starts"))
    found = CliRunner().invoke(cli.group, ["demo", "--storage", url])
    assert found.exit_code == 2
    assert words in found.output
    assert not list(tmp_path.iterdir())


# ---- prompts


def played(prompts: Prompts) -> tuple[list[Turn], int]:
    """All turns in the order in which they were asked, and how many were open at most."""
    waiting, turns, most = prompts.begin(), [], 0
    while waiting:
        most = max(most, len(waiting))
        turn = waiting.pop(0)
        turns.append(turn)
        waiting += prompts.answered(turn.number, [0] * turn.answer_tokens)
    return turns, most


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 6),
    repeats=st.integers(1, 4),
    chains=st.integers(1, 8),
    seed=st.integers(0, 1 << 40),
)
def test_each_is_asked_as_often_as_was_said(
    count: int, repeats: int, chains: int, seed: int
) -> None:
    arguments = {**PLAIN, "count": count, "repeats": repeats, "chains": chains, "seed": seed}
    prompts = Prompts(**arguments)
    turns, most = played(prompts)
    assert most == min(chains, count)
    assert sorted(turn.number for turn in turns) == list(range(prompts.total))
    asked: dict[int, list[int]] = {}
    prefixes: dict[int, list[int]] = {}
    for turn in turns:
        asked.setdefault(turn.conversation, []).append(turn.turn)
        prefix = prefixes.setdefault(turn.conversation, turn.tokens[:12].tolist())
        assert turn.tokens[:12].tolist() == prefix
        assert (len(turn.tokens), turn.answer_tokens) == (16, 2)
        assert turn.tokens.dtype == np.int32
        assert 0 <= turn.tokens.min() <= turn.tokens.max() < 1000
    assert asked == {prompt: list(range(repeats)) for prompt in range(count)}, "one after the other"
    starts = {tuple(prefix[:4]) for prefix in prefixes.values()}
    news = {tuple(turn.tokens[12:].tolist()) for turn in turns}
    assert len(starts) == count, "prompts share nothing"
    assert len(news) == len(turns), "what follows a prefix is new"
    assert not starts & news
    again, _ = played(Prompts(**arguments))
    assert [turn.tokens.tolist() for turn in again] == [turn.tokens.tolist() for turn in turns]


def test_a_seed_makes_other_prompts() -> None:
    one, other = (Prompts(**{**PLAIN, "seed": seed}).begin()[0] for seed in (1, 2))
    assert one.tokens.tolist() != other.tokens.tolist()


def test_tokens_stay_as_they_are() -> None:
    (turn,) = Prompts(**PLAIN).begin()
    with pytest.raises(ValueError, match="read-only"):
        turn.tokens[0] = 1


@pytest.mark.parametrize(
    "name", ["count", "prefix_tokens", "new_tokens", "answer_tokens", "repeats", "chains"]
)
def test_none_of_something(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected at least 1, found 0"):
        Prompts(**{**PLAIN, name: 0})


def test_out_of_order() -> None:
    prompts = Prompts(**PLAIN)
    with pytest.raises(ConfigError, match="not handed out"):
        prompts.answered(0, [1])
    prompts.begin()
    with pytest.raises(ConfigError, match="has begun"):
        prompts.begin()
    with pytest.raises(ConfigError, match="token ids"):
        prompts.answered(0, [1000])
    assert prompts.answered(0, [999])
    with pytest.raises(ConfigError, match="answered before"):
        prompts.answered(0, [1])
    with pytest.raises(ConfigError, match="number of the turn"):
        prompts.answered(5, [1])


# ---- prompts that come back


def returning(**changes: Any) -> Returning:
    given = {name: value for name, value in PLAIN.items() if name != "count"}
    return Returning(**{**given, "count": 5, "lag": 2, **changes})


@pytest.mark.parametrize(("count", "lag"), [(5, 2), (1, 1), (2, 3), (4, 4), (3, 1)])
def test_prompts_that_come_back(count: int, lag: int) -> None:
    """One at a time; each again behind `lag` others that are new, and at once again."""
    turns, most = played(returning(count=count, lag=lag))
    assert most == 1
    asked = [(turn.conversation, turn.turn) for turn in turns]
    assert sorted(asked) == [(prompt, repeat) for prompt in range(count) for repeat in range(3)]
    assert len(turns) == returning(count=count, lag=lag).total == 3 * count
    for prompt in range(count):
        first, again, more = (asked.index((prompt, repeat)) for repeat in range(3))
        assert more == again + 1
        between = [each for each in asked[first + 1 : again] if each[1] == 0]
        assert between == [(each, 0) for each in range(prompt + 1, min(prompt + lag + 1, count))]
        prefixes = {tuple(turns[at].tokens[:12].tolist()) for at in (first, again, more)}
        assert len(prefixes) == 1
        assert len({tuple(turns[at].tokens[12:].tolist()) for at in (first, again, more)}) == 3


def test_prompts_that_never_come_back() -> None:
    with pytest.raises(ConfigError, match="lag: expected at least 1, found 0"):
        returning(lag=0)
    with pytest.raises(ConfigError, match="count: expected at least 1"):
        returning(count=0)


def test_what_comes_back_out_of_order() -> None:
    prompts = returning()
    (first,) = prompts.begin()
    with pytest.raises(ConfigError, match="has begun"):
        prompts.begin()
    with pytest.raises(ConfigError, match="token ids"):
        prompts.answered(first.number, [1000])
    assert prompts.answered(first.number, [1])
    with pytest.raises(ConfigError, match="answered before"):
        prompts.answered(first.number, [1])
