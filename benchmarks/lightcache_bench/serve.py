"""Serving models: first token with and without a hit; shared, private or no pools; overhead.

Runs the demo's workers as processes.

1. First token: prompts with a prefix of so many tokens, computed (cold) and loaded (hit).
2. Pools: conversations whose turns are routed at random, with the same host memory in total: one
   pool for all workers, one for each, none; and shared and private once more with a worker killed.
3. Overhead: prompts that never hit, every other one past the cache, in the same processes.
4. Storage: prompts whose prefix is computed, comes from storage, and from the host, by turns; on
   a disk (`--path`: a folder on it) or by `--storage URL`. Only with one of these, or `--only 4`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightcache._arguments import parse_size
from lightcache.errors import ConfigError
from lightcache.shm.sweep import sweep
from lightcache.storage import open_storage
from lightcache.tools.demo import check_packages
from lightcache.tools.demo.messages import DENSE, ModelSpec
from lightcache.tools.demo.processes import run_name
from lightcache_bench import Row, _serve_storage, meets
from lightcache_bench._serve_runs import (
    Pool,
    Run,
    Served,
    Settings,
    median,
    percentile,
    serve,
    steps,
)

SIZES = {
    "small": DENSE,
    "medium": {
        "vocab_size": 16384,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Models with random weights: 35 and 101 million parameters, and the form of Llama 3 8B."""
POOLS: tuple[Pool, ...] = ("shared", "private", "none")
NAMES = {"shared": "one pool", "private": "a pool for each", "none": "no pool"}
_FASTER = ">= 10"
_OVERHEAD = "<= 1.01"
_STORED = 12  # prompts of part 4: each is measured once from storage
_WARM = 4  # turns of the overhead that are not counted


@dataclass(frozen=True)
class Asked:
    """What is measured."""

    model: str
    """A name of `SIZES`, or a folder with a checkpoint."""
    devices: tuple[str, ...]
    workers: int
    prefixes: tuple[int, ...]
    requests: int
    """Turns of the pools, and prompts of the overhead."""
    pools: tuple[Pool, ...]
    size: int
    """Bytes of host memory, in total."""
    parts: tuple[int, ...]
    repeats: int
    place: _serve_storage.Place

    @property
    def on_gpu(self) -> bool:
        """Whether devices are GPUs."""
        return self.devices[0] != "cpu"


def rows(
    quick: bool,
    model: str | None = None,
    device: str | None = None,
    workers: int | None = None,
    prefix_tokens: str | None = None,
    requests: int | None = None,
    pool: str | None = None,
    size: str | None = None,
    only: str | None = None,
    path: str | None = None,
    storage: str | None = None,
) -> Iterator[Row]:
    """See the module.

    Args:
        model: small, medium, 8b, or a folder; None: 8b on a GPU, small without.
        device: cpu, cuda, or names with commas between; None: all GPUs, or the processor.
        workers: None: one for each device, two on the processor.
        prefix_tokens: of parts 1 and 4, with commas between.
        requests: turns of part 2, prompts of part 3.
        pool: shared, private or none: only that one; None: all.
        size: of host memory in total, such as "16GiB".
        only: parts, such as "1,3".
        path, storage: of part 4: a folder on the disk that is to be measured (what is made there is
            removed), or the URL of a storage; neither: the current folder.

    Raises:
        ConfigError: something that does not exist, or does not fit.
    """
    check_packages()
    place = _place(path, storage)
    if only is None:
        only = "1,2,3" if path is None and storage is None else "1,2,3,4"
    asked = _asked(quick, model, device, workers, prefix_tokens, requests, pool, size, only, place)
    if 4 not in asked.parts and not (path is None and storage is None):
        raise ConfigError(f"--path, --storage: are of part 4; found --only {only}")
    base = _settings(asked)
    sweep(prefix="bench-serve-")  # what earlier ones left whose every process was killed
    for part in asked.parts:
        yield from {1: _first_token, 2: _pools, 3: _overhead, 4: _storage}[part](asked, base)


def _asked(
    quick: bool,
    model: str | None,
    device: str | None,
    workers: int | None,
    prefix_tokens: str | None,
    requests: int | None,
    pool: str | None,
    size: str | None,
    only: str,
    place: _serve_storage.Place,
) -> Asked:
    devices = _devices(device)
    gpu = devices[0] != "cpu"
    if pool is not None and pool not in POOLS:
        raise ConfigError(f"--pool: expected one of {', '.join(POOLS)}; found {pool!r}")
    prefixes = _numbers(prefix_tokens, "--prefix-tokens") or (
        (4096, 16384, 32768) if gpu else (256,) if quick else (256, 512, 1024)
    )
    if any(prefix < 1 for prefix in prefixes):
        raise ConfigError(f"--prefix-tokens: expected at least 1 each; found {prefix_tokens!r}")
    parts = _numbers(only, "--only")
    if not parts or any(part not in (1, 2, 3, 4) for part in parts):
        raise ConfigError(f"--only: expected parts such as 1,3 of 1, 2, 3, 4; found {only!r}")
    return Asked(
        model=model or ("8b" if gpu else "small"),
        devices=devices,
        workers=workers or (len(devices) if gpu else 2),
        prefixes=prefixes,
        requests=requests or (96 if gpu else 8 if quick else 40),
        pools=tuple(each for each in POOLS if pool in (None, each)),
        size=parse_size(size) if size else (40 << 30 if gpu else 64 << 20),
        parts=parts,
        repeats=1 if quick else 5,
        place=place,
    )


def _place(path: str | None, storage: str | None) -> _serve_storage.Place:
    if path is not None and storage is not None:
        raise ConfigError("--path, --storage: expected one of them, found both")
    if storage is not None and not storage.startswith("disk:"):
        open_storage(storage, page_bytes=4096).close()  # says now what is wrong with it
    folder = Path("." if path is None else path)
    return _serve_storage.Place(folder, storage)


def _devices(device: str | None) -> tuple[str, ...]:
    if device is not None and device != "cuda":
        return tuple(device.split(","))
    import torch

    count = torch.cuda.device_count()
    if device == "cuda" and not count:
        raise ConfigError("--device cuda: torch sees no GPU here; --device cpu works everywhere")
    return tuple(f"cuda:{number}" for number in range(count)) or ("cpu",)


def _numbers(text: str | None, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"{option}: expected numbers such as 1,3; found {text!r}") from None


def _settings(asked: Asked) -> Settings:
    directory = None if asked.model in SIZES else asked.model
    if directory is not None and not (Path(directory) / "config.json").is_file():
        names = ", ".join(SIZES)
        raise ConfigError(f"--model: expected one of {names}, or a checkpoint, found {directory!r}")
    spec = ModelSpec(
        SIZES.get(asked.model, DENSE),
        directory=directory,
        device=asked.devices[0],
        dtype="bfloat16" if asked.on_gpu else "float32",
    )
    return Settings(
        run=run_name("bench-serve"),
        model=spec,
        workload={"seed": 0},
        size=asked.size,
        page_tokens=64 if asked.on_gpu else 16,
        workers=asked.workers,
        devices=asked.devices,
        threads=max(1, len(os.sched_getaffinity(0)) // asked.workers),
    )


def _workload(base: Settings, kind: str, **arguments: Any) -> dict[str, Any]:
    return {**base.workload, "kind": kind, **arguments}


# ---- 1. first token


def _first_token(asked: Asked, base: Settings) -> Iterator[Row]:
    for prefix in asked.prefixes:
        workload = _workload(
            base,
            "prompts",
            count=asked.repeats + 1,  # the first one warms everything up
            repeats=3,
            prefix_tokens=prefix,
            new_tokens=base.page_tokens,
            answer_tokens=2,
        )
        one = replace(base, workers=1, pool="shared", workload=workload)
        run = serve(one)
        cold = run.values(lambda turn: [turn.first_s], lambda turn: _measured(turn, True))
        hits = run.values(lambda turn: [turn.first_s], lambda turn: _measured(turn, False))
        reused = run.values(
            lambda turn: [sum(turn.reused.values())], lambda turn: _measured(turn, False)
        )
        params = {"prefix_tokens": prefix, "samples": len(cold), "model": asked.model}
        name = f"first token, prefix of {prefix} tokens"
        yield Row(f"{name}, computed", params, median(cold) * 1e3, "ms")
        ratio = median(cold) / median(hits)
        yield Row(
            f"{name}, loaded",
            {**params, "samples": len(hits), "reused_tokens": int(median(reused))},
            median(hits) * 1e3,
            "ms",
            f"{name}, computed",
            ratio,
            _FASTER if prefix >= 32768 else None,
            meets(ratio, _FASTER) if prefix >= 32768 else None,
        )


def _measured(turn: Served, cold: bool) -> bool:
    return turn.conversation > 0 and (turn.turn == 0) == cold


# ---- 2. pools


def _pools(asked: Asked, base: Settings) -> Iterator[Row]:
    shape = {"system_tokens": 256, "message_tokens": 96, "answer_tokens": 16}
    if asked.on_gpu:
        shape = {"system_tokens": 2048, "message_tokens": 3072, "answer_tokens": 16}
    turns = 6 if asked.on_gpu else 5
    users = max(1, asked.requests // turns)
    workload = _workload(base, "conversations", users=users, turns=turns, **shape)
    runs = [(pool, False) for pool in asked.pools]
    runs += [(pool, True) for pool in asked.pools if pool != "none"]
    slowest: Run | None = None
    for pool, killed in sorted(runs, key=lambda each: (each[1], -POOLS.index(each[0]))):
        settings = replace(base, pool=pool, workload=workload)
        if killed:
            settings = replace(settings, hold_at=settings.make_workload().total // 2)
        run = serve(settings)
        slowest = slowest or run
        yield from _pool_rows(asked, f"{NAMES[pool]}{', a worker killed' * killed}", run, slowest)


def _pool_rows(asked: Asked, name: str, run: Run, against: Run) -> Iterator[Row]:
    prompt = sum(turn.prompt for turn in run.turns)
    hits = sum(sum(turn.reused.values()) for turn in run.turns)
    other = sum(turn.prompt for turn in against.turns) / against.seconds
    params: dict[str, Any] = {
        "workers": asked.workers,
        "turns": len(run.turns),
        "seconds": round(run.seconds, 2),
    }
    if run.recovered_s:
        params["recovered_ms"] = round(run.recovered_s[0] * 1e3, 1)
    rate = prompt / run.seconds
    yield Row(f"{name}: prompt tokens", params, rate, "tokens/s", "the first", rate / other)
    share = {"hit_tokens": hits, "prompt_tokens": prompt}
    yield Row(f"{name}: hit tokens", share, 100 * hits / prompt, "%")
    first = run.values(lambda turn: [turn.first_s])
    waited = run.values(lambda turn: [turn.waited_s + turn.first_s])
    between = list(steps(run))
    for what, values in (
        ("first token", first),
        ("first token, waiting included", waited),
        ("between tokens", between),
    ):
        spread = {"p99_ms": round(percentile(values, 99) * 1e3, 2)}
        yield Row(f"{name}: {what}, p50", spread, median(values) * 1e3, "ms")


# ---- 3. overhead


def _overhead(asked: Asked, base: Settings) -> Iterator[Row]:
    workload = _workload(
        base,
        "prompts",
        count=_WARM + 2 * max(asked.requests, asked.workers),  # some of either kind, always
        prefix_tokens=asked.prefixes[0],
        new_tokens=base.page_tokens,
        answer_tokens=32,
        chains=asked.workers,
    )
    run = serve(
        replace(base, pool="shared", alternate=True, workload=workload, random_routing=False)
    )
    warm = {turn.number for turn in sorted(run.turns, key=lambda turn: turn.number)[:_WARM]}
    figures: dict[str, Callable[[Served], list[float]]] = {
        "first token": lambda turn: [turn.first_s],
        "between tokens": lambda turn: turn.steps_s,
        "whole request": lambda turn: [turn.total_s],
    }
    through = [turn for turn in run.turns if turn.cached and turn.number not in warm]
    past = [turn for turn in run.turns if not turn.cached and turn.number not in warm]
    for what, figure in figures.items():
        with_cache, without = (
            median([value for turn in turns for value in figure(turn)]) for turns in (through, past)
        )
        ratio = with_cache / without
        yield Row(
            f"never a hit: {what}",
            {"requests": len(through), "past_the_cache_ms": round(without * 1e3, 3)},
            with_cache * 1e3,
            "ms",
            "past the cache",
            ratio,
            _OVERHEAD,
            meets(ratio, _OVERHEAD),
        )


# ---- 4. storage


def _storage(asked: Asked, base: Settings) -> Iterator[Row]:
    repeats = 1 if asked.repeats == 1 else _STORED
    yield from _serve_storage.rows(asked.model, asked.prefixes, repeats, base, asked.place)
