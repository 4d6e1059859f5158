"""`bench serve`: its options, and the rows it makes of runs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
from support.refusals import refused

from lightcache.errors import ConfigError, StorageError
from lightcache.shm.listing import list_segments, read_segment
from lightcache.tools import cli, demo
from lightcache.tools.demo.messages import Turn
from lightcache_bench import Row, _serve_storage, serve
from lightcache_bench._serve_runs import Run, Served, Settings, median, percentile, steps
from lightcache_bench._serve_workloads import WORKLOADS

Runs = list[Settings]
LEAVES_A_RING = """
import os, signal, sys
from lightcache.shm import SharedRing
ring = SharedRing.create(sys.argv[1], capacity=1, message_bytes=8)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A script: what a process leaves that is killed, under the name that is its argument."""


def answered(settings: Settings, turn: Turn, **figures: Any) -> Served:
    """An answer with figures that only depend on the turn."""
    plain = Served(
        number=turn.number,
        conversation=turn.conversation,
        turn=turn.turn,
        prompt=len(turn.prompt),
        cached=settings.cached(turn),
        waited_s=0.5,
        reused={"host": 0 if turn.turn == 0 else 16},
        first_s=0.1 if turn.turn == 0 else 0.01,
        steps_s=[0.002] * (turn.answer_tokens - 1),
        total_s=0.2,
    )
    return replace(plain, **figures)


def played(settings: Settings, figures: Callable[[Turn], dict[str, Any]]) -> Run:
    """A run without processes: every turn is answered at once."""
    workload = settings.make_workload()
    waiting, run = workload.begin(), Run(seconds=4.0)
    while waiting:
        turn = waiting.pop(0)
        run.turns.append(answered(settings, turn, **figures(turn)))
        waiting += workload.answered(turn, [0] * turn.answer_tokens)
    if settings.hold_at is not None:
        run.recovered_s.append(0.0125)
    return run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What is asked for; nothing is started."""
    return play(monkeypatch, lambda turn: {})


def play(monkeypatch: pytest.MonkeyPatch, figures: Callable[[Turn], dict[str, Any]]) -> Runs:
    asked: Runs = []

    def instead(settings: Settings) -> Run:
        asked.append(settings)
        return played(settings, figures)

    monkeypatch.setattr(serve, "serve", instead)
    return asked


def measured(**options: Any) -> dict[str, Row]:
    """All rows by name."""
    rows = list(serve.rows(True, **{"device": "cpu", **options}))
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


# ---- options


def test_what_is_measured_without_options(runs: Runs) -> None:
    rows = measured()
    unharmed, killed = ["none", "private", "shared"], ["private", "shared"]
    assert [one.pool for one in runs] == ["shared", *unharmed, *killed, "shared"]
    assert [one.hold_at is not None for one in runs] == [False] * 4 + [True] * 2 + [False]
    assert [one.workers for one in runs] == [1, 2, 2, 2, 2, 2, 2]
    assert all((one.size, one.page_tokens) == (64 << 20, 16) for one in runs)
    assert all((one.devices, one.model.dtype) == (("cpu",), "float32") for one in runs)
    assert [one.alternate for one in runs] == [False] * 6 + [True]
    assert "never a hit: first token" in rows


def test_options(runs: Runs) -> None:
    measured(workers=3, prefix_tokens="32,64", requests=11, pool="private", size="8MiB", only="1,2")
    assert [one.workload.get("prefix_tokens") for one in runs] == [32, 64, None, None]
    assert [one.pool for one in runs] == ["shared", "shared", "private", "private"]
    assert all(one.size == 8 << 20 for one in runs)
    assert runs[-1].workers == 3
    assert runs[-1].workload["users"] == 2  # of five turns each


def test_each_device_has_a_worker(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    measured(device="cuda", model="small", only="2", pool="none")
    assert (runs[0].workers, runs[0].devices) == (2, ("cuda:0", "cuda:1"))
    assert (runs[0].model.dtype, runs[0].page_tokens) == ("bfloat16", 64)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pool": "hamster"}, r"--pool: expected one of shared, private, none; found 'hamster'"),
        ({"only": "5"}, r"--only: expected parts such as 1,3 of 1, 2, 3, 4; found '5'"),
        ({"only": ""}, r"--only: expected parts such as 1,3 of 1, 2, 3, 4; found ''"),
        ({"path": ".", "storage": "disk:/x"}, r"--path, --storage: expected one of them"),
        ({"path": ".", "only": "1"}, r"--path, --storage: are of part 4; found --only 1"),
        ({"storage": "hamster"}, r"hamster"),
        ({"only": "1;2"}, r"--only: expected numbers such as 1,3; found '1;2'"),
        ({"only": "1,"}, r"--only: expected numbers"),
        ({"prefix_tokens": "many"}, r"--prefix-tokens: expected numbers .*'many'"),
        ({"prefix_tokens": "32,0"}, r"--prefix-tokens: expected at least 1 each; found '32,0'"),
        ({"size": "lots"}, r"lots"),
        ({"model": "/nowhere"}, r"/nowhere"),
    ],
)
def test_bad_options(runs: Runs, options: dict[str, Any], said: str) -> None:
    refused(ConfigError, said, measured, **options)
    assert not runs


def test_no_gpu(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refused(ConfigError, "--device cpu works everywhere", measured, device="cuda")
    list(serve.rows(True, only="1"))
    assert runs[0].devices == ("cpu",)


@pytest.mark.crash
def test_what_killed_runs_left_is_removed_first(
    runs: Runs, segment_name: str, script: Callable[..., Any]
) -> None:
    name = f"bench-serve-{segment_name}"
    script(LEAVES_A_RING, name, status=-9)
    measured(only="3")
    assert read_segment(name) is None


def test_the_command_says_it_in_one_line() -> None:
    result = click.testing.CliRunner().invoke(cli.group, ["bench", "serve", "--only", "7"])
    assert result.exit_code == 2
    assert result.output.startswith("error: --only: ")
    assert len(result.output.splitlines()) == 1


# ---- rows


def test_rows_of_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt only warms up; a row is the median of the others."""

    def figures(turn: Turn) -> dict[str, Any]:
        if turn.conversation == 0:
            return {"first_s": 99.0, "reused": {"host": 99}}
        return {"reused": {"host": 256}} if turn.turn else {}

    runs = play(monkeypatch, figures)
    rows = measured(only="1", prefix_tokens="256,32768")
    cold = rows["first token, prefix of 256 tokens, computed"]
    assert cold.value == pytest.approx(100.0)
    assert cold.unit == "ms"
    assert cold.params == {"prefix_tokens": 256, "samples": 1, "model": "small"}
    loaded = rows["first token, prefix of 256 tokens, loaded"]
    assert loaded.value == pytest.approx(10.0)
    assert loaded.ratio == pytest.approx(10.0)
    assert (loaded.params["samples"], loaded.params["reused_tokens"]) == (2, 256)
    assert loaded.baseline == cold.name
    assert (loaded.target, loaded.met) == (None, None), "promised for long prefixes alone"
    long = rows["first token, prefix of 32768 tokens, loaded"]
    assert long.target == ">= 10"
    assert long.met is (long.ratio is not None and long.ratio >= 10)
    assert runs[0].workload["repeats"] == 3


def three_ways(turn: Turn) -> dict[str, Any]:
    """What a prompt of 256 tokens finds that is computed, stored, and on the host."""
    reused = ({"host": 0}, {"host": 0, "storage": 256}, {"host": 256})[turn.turn]
    first = (0.1, 0.02, 0.01)[turn.turn]
    return {"first_s": 99.0 if turn.conversation == 0 else first, "reused": reused}


def test_rows_of_storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A disk in the folder that was given, which has all prompts, with less than these on the
    host."""
    runs = play(monkeypatch, three_ways)
    monkeypatch.setattr(_serve_storage, "serve", serve.serve)
    rows = measured(only="4", path=str(tmp_path), prefix_tokens="256")
    (one,) = runs
    assert one.storage is not None
    assert re.match(rf"disk:{tmp_path}/lightcache-bench-\w+\?capacity=\d+$", one.storage)
    assert (one.workers, one.pool) == (1, "shared")
    page = 16 * 8192
    assert 2 * 17 * page < one.size < 3 * 17 * page
    assert one.workload["lag"] == 3
    assert int(one.storage.partition("=")[2]) > one.workload["count"] * 17 * page
    assert not list(tmp_path.iterdir())
    name = "first token, prefix of 256 tokens"
    assert list(rows) == [
        f"{name}, computed beside storage",
        f"{name}, from storage",
        f"{name}, from the host",
    ]
    assert [row.value for row in rows.values()] == [pytest.approx(v) for v in (100, 20, 10)]
    cold, stored, host = rows.values()
    assert (stored.ratio, host.ratio) == (pytest.approx(5), pytest.approx(10))
    assert stored.baseline == host.baseline == cold.name
    assert (cold.params["samples"], stored.params["reused_tokens"]) == (4, 256)
    for row in rows.values():
        assert (row.params["storage"], row.params["model"]) == ("disk:", "small")
        assert (row.params["device"], row.params["threads"]) == ("cpu", one.threads)
        assert row.params["processor"]
        assert "quartiles" in row.params


def test_a_storage_instead_of_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former runs have left other prompts in it."""
    runs = play(monkeypatch, three_ways)
    monkeypatch.setattr(_serve_storage, "serve", serve.serve)
    for _ in range(2):
        rows = measured(only="4", storage="flaky:seed=1:memory:", prefix_tokens="256")
        assert rows["first token, prefix of 256 tokens, from storage"].params["storage"] == "flaky:"
    one, other = runs
    assert one.storage == other.storage == "flaky:seed=1:memory:"
    assert one.workload["seed"] != other.workload["seed"]


@pytest.mark.parametrize("options", [{"path": "."}, {"storage": "memory:"}])
def test_a_place_for_storage_asks_for_its_part(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    runs = play(monkeypatch, lambda turn: three_ways(turn) if turn.turn < 3 else {})
    monkeypatch.setattr(_serve_storage, "serve", serve.serve)
    measured(**options)
    assert [one.storage is not None for one in runs] == [False] * 7 + [True]


@pytest.mark.parametrize(
    "reused",
    [
        ({"host": 0}, {"host": 256}, {"host": 256}),
        ({"host": 0}, {"host": 16, "storage": 240}, {"host": 256}),
        ({"host": 0}, {"host": 0, "storage": 256}, {"host": 240}),
        ({"host": 0, "storage": 16}, {"host": 0, "storage": 256}, {"host": 256}),
    ],
)
def test_figures_of_something_else_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reused: tuple[dict[str, int], ...]
) -> None:
    play(monkeypatch, lambda turn: {"reused": reused[turn.turn]})
    monkeypatch.setattr(_serve_storage, "serve", serve.serve)
    with pytest.raises(StorageError, match="expected 256 tokens from the"):
        measured(only="4", path=str(tmp_path), prefix_tokens="256")
    assert not list(tmp_path.iterdir())


def test_rows_of_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(turn: Turn) -> dict[str, Any]:
        return {"first_s": 0.1, "waited_s": 0.3, "reused": {"host": 20, "disk": 5}}

    runs = play(monkeypatch, figures)
    rows = measured(only="2", requests=10)
    prompt = sum(turn.prompt for turn in played(runs[0], figures).turns)
    for name in ("no pool", "a pool for each", "one pool, a worker killed"):
        tokens = rows[f"{name}: prompt tokens"]
        assert tokens.value == pytest.approx(prompt / 4)
        assert tokens.unit == "tokens/s"
        assert tokens.ratio == pytest.approx(1.0)
        assert (tokens.params["workers"], tokens.params["turns"]) == (2, 10)
        assert tokens.params["seconds"] == 4.0
        hits = rows[f"{name}: hit tokens"]
        assert hits.value == pytest.approx(100 * 250 / prompt)
        assert hits.params == {"hit_tokens": 250, "prompt_tokens": prompt}
        assert rows[f"{name}: first token, p50"].value == pytest.approx(100.0)
        assert rows[f"{name}: first token, waiting included, p50"].value == pytest.approx(400.0)
        assert rows[f"{name}: between tokens, p50"].value == pytest.approx(2.0)
        assert rows[f"{name}: between tokens, p50"].params == {"p99_ms": 2.0}
    assert rows["one pool, a worker killed: prompt tokens"].params["recovered_ms"] == 12.5
    assert "recovered_ms" not in rows["one pool: prompt tokens"].params
    assert "no pool, a worker killed: prompt tokens" not in rows
    assert [one.hold_at for one in runs] == [None, None, None, 5, 5]
    assert all(one.random_routing for one in runs)


def test_pools_compare_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((8.0, 4.0, 2.0, 2.0, 1.0))

    def instead(settings: Settings) -> Run:
        run = played(settings, lambda turn: {})
        run.seconds = next(seconds)
        return run

    play(monkeypatch, lambda turn: {})
    monkeypatch.setattr(serve, "serve", instead)
    rows = [row for row in measured(only="2").values() if row.unit == "tokens/s"]
    assert [row.ratio for row in rows] == [pytest.approx(each) for each in (1, 2, 4, 4, 8)]


@pytest.mark.parametrize(("past", "met"), [(0.1, True), (0.05, False)])
def test_rows_of_the_overhead(monkeypatch: pytest.MonkeyPatch, past: float, met: bool) -> None:
    """The first four turns only warm up, whatever they took."""

    def figures(turn: Turn) -> dict[str, Any]:
        if turn.number < 4:
            return {"first_s": 99.0, "steps_s": [99.0], "total_s": 99.0}
        seconds = past if turn.number // 2 % 2 else 0.1
        return {"first_s": seconds, "steps_s": [seconds / 2] * 3, "total_s": 2 * seconds}

    runs = play(monkeypatch, figures)
    rows = measured(only="3", requests=6)
    assert len(rows) == 3
    for name, value in (("first token", 100), ("between tokens", 50), ("whole request", 200)):
        row = rows[f"never a hit: {name}"]
        assert row.value == pytest.approx(value)
        assert row.unit == "ms"
        assert row.ratio == pytest.approx(0.1 / past)
        assert (row.target, row.met) == ("<= 1.01", met)
        assert row.params["requests"] == 6
        assert row.params["past_the_cache_ms"] == pytest.approx(value * past / 0.1)
    assert (runs[0].alternate, runs[0].workload["chains"]) == (True, 2)


@pytest.mark.parametrize("workers", [1, 2, 16])
def test_few_requests_leave_some_of_either_kind(runs: Runs, workers: int) -> None:
    rows = measured(only="3", requests=1, workers=workers)
    for row in rows.values():
        assert math.isfinite(row.value)
        assert row.ratio is not None
        assert math.isfinite(row.ratio)
        json.dumps(row.params, allow_nan=False)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    refused(ConfigError, r"pip install 'lightcache\[demo\]'", measured, only="1")
    assert runs == []


# ---- runs


def test_percentiles() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert [percentile(hundred, each) for each in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentile([1.0, 2.0, 3.0], 99) == 3.0
    assert math.isnan(percentile([], 99))
    assert math.isnan(median([]))
    assert median([3.0, 1.0]) == 2.0


def test_values_of_a_run(runs: Runs) -> None:
    measured(only="1")
    run = played(runs[0], lambda turn: {})
    assert run.values(lambda turn: [turn.number], lambda turn: turn.conversation == 1) == [3, 4, 5]
    assert list(steps(run)) == [0.002] * 6


def order(kind: str, **arguments: Any) -> list[tuple[int, int]]:
    """Prompts as they are asked one after the other, and how often each was asked before."""
    sizes = {"prefix_tokens": 8, "new_tokens": 4, "answer_tokens": 2, "seed": 0}
    workload = WORKLOADS[kind](**sizes, **arguments)
    waiting, asked = workload.begin(), []
    while waiting:
        turn = waiting.pop(0)
        assert len(turn.prompt) + turn.answer_tokens == workload.longest == 14
        asked.append((turn.conversation, turn.turn))
        waiting += workload.answered(turn, [0, 0])
    assert len(asked) == workload.total
    return asked


def test_prompts_are_repeated_in_a_row() -> None:
    assert order("prompts", count=2, repeats=2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert order("prompts", count=3, chains=2) == [(0, 0), (1, 0), (2, 0)]


def test_prompts_return_after_others() -> None:
    asked = order("returning", count=3, lag=2)
    assert asked[:5] == [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2)]
    assert sorted(asked) == [(prompt, repeat) for prompt in range(3) for repeat in range(3)]


@pytest.mark.models
@pytest.mark.timeout(900)
def test_real_runs() -> None:
    """Loaded prefixes, and private pools of which one is killed with its worker."""
    pytest.importorskip("transformers")
    small = {"device": "cpu", "model": "small", "prefix_tokens": "64", "size": "16MiB"}
    rows = measured(**small, only="1")
    assert [row.unit for row in rows.values()] == ["ms", "ms"]
    assert list(rows.values())[1].params["reused_tokens"] == 64
    rows = measured(**small, only="2", pool="private", requests=10)
    assert rows["a pool for each, a worker killed: prompt tokens"].params["recovered_ms"] > 0
    ours = f"bench-serve-{os.getpid()}-"  # others may measure as well
    assert not any(info.name.startswith(ours) for info in list_segments())
