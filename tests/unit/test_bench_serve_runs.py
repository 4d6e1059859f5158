"""Runs of `bench serve`: figures, caches that are checked and left, and a real one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from support.demo_desk import open_cache, settings_of
from support.demo_turns import answered

import lightcache
from lightcache.errors import CacheCorrupted
from lightcache.shm import list_segments
from lightcache.snapshot import CheckReport
from lightcache.tools.demo.messages import Finished, Hello, Holding, Lost, Recovered
from lightcache.tools.demo.settings import Settings
from lightcache_bench import _serve_runs, serve
from lightcache_bench._serve_runs import Run, median, percentile, steps


def test_percentiles() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert [percentile(hundred, each) for each in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert [percentile([3.0], each) for each in (0, 50, 99, 100)] == [3.0] * 4
    assert percentile([1.0, 2.0, 3.0], 99) == 3.0
    assert math.isnan(percentile([], 99))
    assert math.isnan(median([]))
    assert median([3.0, 1.0]) == 2.0


def test_values_of_a_run() -> None:
    run = Run(
        turns=[
            answered(settings_of("x"), turn) for turn in settings_of("x").make_workload().begin()
        ]
    )
    assert run.values(lambda turn: [turn.first_s]) == [0.1, 0.1]
    assert run.values(lambda turn: [turn.number], lambda turn: turn.conversation == 1) == [1]
    assert list(steps(run)) == [0.002] * 4


# ---- a run


class Told:
    """A stage that says what a test wants said; each event may be a call, made when it is due."""

    def __init__(self, *said: Any) -> None:
        self.said = said
        self.killed: list[tuple[int, int]] = []
        self.settings: Any = None

    def __call__(self, settings: Settings) -> Told:
        self.settings = settings
        return self

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def events(self) -> Iterator[Any]:
        for event in self.said:
            yield event(self.settings) if callable(event) else event
        raise AssertionError("nothing more is said, and it waits")

    def kill(self, worker: int, life: int) -> None:
        self.killed.append((worker, life))


def existing() -> set[str]:
    return {info.name for info in list_segments()}


def test_a_run(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private caches: that of a dead worker is checked and left, those of the living at the end."""
    settings = settings_of(segment_name, pool="private")
    turn = answered(settings, settings.make_workload().begin()[0])
    names: dict[tuple[int, int], str] = {}
    opened: dict[tuple[int, int], lightcache.Cache] = {}
    checked: list[str] = []
    check = lightcache.Cache.check

    def noted(cache: lightcache.Cache) -> CheckReport:
        checked.append(cache.name)
        return check(cache)

    monkeypatch.setattr(lightcache.Cache, "check", noted)
    with ExitStack() as stack:

        def hello(worker: int, life: int) -> Callable[[Settings], Hello]:
            def say(asked: Settings) -> Hello:
                cache = open_cache(asked, worker, life)
                assert cache is not None
                opened[worker, life] = cache
                names[worker, life] = cache.name
                stack.callback(cache.close)
                return Hello(worker, life, 1, cache.name, None)

            return say

        def dies(asked: Settings) -> Lost:
            opened[1, 0].close()
            return Lost(1, 0, 0.0)

        def gone(asked: Settings) -> Finished:
            assert names[1, 0] not in existing(), "it ends with its worker"
            assert checked == [names[1, 0]]
            return Finished(1, 3.0, 0.0)

        told = Told(
            hello(0, 0),
            hello(1, 0),
            Holding(0, 1, 0, 1, 2),
            dies,
            Recovered(1, 0, 1, 1, 0.5),
            Lost(1, 1, 0.0),  # before its hello
            hello(1, 2),
            turn,
            gone,
        )
        monkeypatch.setattr(_serve_runs, "Stage", told)
        run = _serve_runs.serve(settings)
    assert told.killed == [(1, 0)]
    assert (run.seconds, [each.number for each in run.turns]) == (3.0, [turn.number])
    assert [each.doomed for each in run.recovered] == [1]
    assert run.ready_s > 0
    assert checked == [names[key] for key in ((1, 0), (0, 0), (1, 2))]
    assert told.settings.run.startswith(segment_name)
    assert told.settings.run != segment_name


def test_a_check_that_finds_something(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(segment_name)
    report = replace(_clean(segment_name), clean=False, message="page 3 is in no chain")
    monkeypatch.setattr(lightcache.Cache, "check", lambda self: report)
    with ExitStack() as stack:

        def hello(asked: Settings) -> Hello:
            cache = open_cache(asked, 0, 0)
            assert cache is not None
            stack.callback(cache.close)
            return Hello(0, 0, 1, cache.name, None)

        monkeypatch.setattr(_serve_runs, "Stage", Told(hello, hello, Finished(0, 1.0, 0.0)))
        with pytest.raises(CacheCorrupted, match="page 3 is in no chain"):
            _serve_runs.serve(settings)


def _clean(name: str) -> Any:
    with lightcache.Cache.create(
        f"{name}-clean", pages=4, page_bytes=4096, fingerprint="x", secret=b"sixteen bytes or so"
    ) as cache:
        return cache.check()


@pytest.mark.models
@pytest.mark.timeout(300)
def test_a_real_one() -> None:
    pytest.importorskip("transformers")
    rows = list(
        serve.rows(True, model="small", device="cpu", prefix_tokens="64", size="8MiB", only="1")
    )
    assert [row.unit for row in rows] == ["ms", "ms"]
    assert all(row.value > 0 for row in rows)
    assert rows[1].params["reused_tokens"] == 64
    assert not any(name.startswith("bench-serve-") for name in existing())
