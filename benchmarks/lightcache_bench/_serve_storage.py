"""Part 4 of `bench serve`: the first token when the prefix comes from storage."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from lightcache.errors import StorageError
from lightcache.storage.disk.slots import slot_bytes
from lightcache.tools.demo.messages import ModelSpec
from lightcache_bench import Row, machine
from lightcache_bench._serve_runs import Run, Served, Settings, serve
from lightcache_bench._timing import median, spread

_ANSWER = 2  # tokens
_LAG = 3  # prompts between two of the same
_ROOM = 2  # prompts that the host has room for: fewer than lie in between


@dataclass(frozen=True)
class Place:
    """Where pages go."""

    path: Path
    """A folder on the disk that is measured."""
    url: str | None = None
    """Of another storage, instead."""


def rows(
    model: str, prefixes: tuple[int, ...], repeats: int, base: Settings, place: Place
) -> Iterator[Row]:
    """Each prompt is asked three times: computed, from storage, and from the host. One at a time,
    by turns, in the same processes: what slows one of them down slows the others.

    Args:
        model: its name, for the rows.
        prefixes: tokens of each prompt's prefix.
        repeats: prompts that are measured.

    Raises:
        ConfigError: no shared memory for so long a prefix; the host has room for two prompts and a
            half, whatever else was asked for.
        StorageError: a prefix did not come from storage.
    """
    for prefix in prefixes:
        with ExitStack() as stack:
            settings = _settings(prefix, repeats, base, place, stack)
            run = serve(settings)
        yield from _rows(model, prefix, settings, run)


def _settings(
    prefix: int, repeats: int, base: Settings, place: Place, stack: ExitStack
) -> Settings:
    # The first one warms everything up; with fewer than these none would leave the host.
    prompts = max(repeats + 1, _LAG + 2)
    total = prefix + base.page_tokens + _ANSWER
    pages = -(-total // base.page_tokens)
    page = _kv_bytes_per_token(base.model) * base.page_tokens
    url = place.url
    if url is None:
        made = tempfile.TemporaryDirectory(prefix="lightcache-bench-", dir=place.path)
        folder = stack.enter_context(made)
        # Every prompt, and what is new of each when it is asked again.
        url = f"disk:{Path(folder).resolve()}?capacity={2 * prompts * pages * slot_bytes(page)}"
    workload = {
        **base.workload,
        "kind": "returning",
        "seed": secrets.randbits(32),  # a storage that stays has the prompts of former runs
        "count": prompts,
        "lag": _LAG,
        "prefix_tokens": prefix,
        "new_tokens": base.page_tokens,
        "answer_tokens": _ANSWER,
    }
    return replace(
        base,
        workers=1,
        pool="shared",
        storage=url,
        size=(_ROOM * pages + pages // 2) * page,
        workload=workload,
    )


def _kv_bytes_per_token(spec: ModelSpec) -> int:
    form = spec.form
    if spec.directory is not None:
        form = json.loads((Path(spec.directory) / "config.json").read_text())
    heads = form["num_attention_heads"]
    width = form.get("num_key_value_heads", heads) * form.get(
        "head_dim", form["hidden_size"] // heads
    )
    return 2 * form["num_hidden_layers"] * width * (4 if spec.dtype == "float32" else 2)


def _rows(model: str, prefix: int, settings: Settings, run: Run) -> Iterator[Row]:
    measured = [turn for turn in run.turns if turn.conversation]
    computed, stored, host = ([t for t in measured if t.turn == which] for which in range(3))
    _check(computed, prefix, "storage", stored, settings)
    _check(computed, prefix, "host", host, settings)
    cold = [turn.first_s * 1e3 for turn in computed]
    assert settings.storage is not None
    params = {
        "prefix_tokens": prefix,
        "model": model,
        "storage": f"{settings.storage.partition(':')[0]}:",  # there may be a password in it
        "processor": machine()["cpu"],
        "device": settings.devices[0],
        "threads": settings.threads,
    }
    name = f"first token, prefix of {prefix} tokens"
    yield Row(f"{name}, computed beside storage", {**params, **spread(cold)}, median(cold), "ms")
    for what, turns in (("from storage", stored), ("from the host", host)):
        taken = [turn.first_s * 1e3 for turn in turns]
        reused = [sum(turn.reused.values()) for turn in turns]
        found = {"reused_tokens": int(median(reused)), **spread(taken)}
        against = f"{name}, computed beside storage"
        value, ratio = median(taken), median(cold) / median(taken)
        yield Row(f"{name}, {what}", {**params, **found}, value, "ms", against, ratio)


def _check(
    computed: list[Served], prefix: int, tier: str, turns: list[Served], settings: Settings
) -> None:
    """Whether each figure is of what its row says."""
    most = prefix // settings.page_tokens * settings.page_tokens
    wrong = [turn for turn in turns if turn.reused.get(tier, 0) < most]
    wrong += [turn for turn in computed if sum(turn.reused.values())]
    if wrong or not turns or not computed:
        found = wrong[0].reused if wrong else "no turn"
        raise StorageError(
            f"bench serve: expected {most} tokens from the {tier} tier and none of a prompt that "
            f"is new, found {found}; give a storage that has room and does not fail"
        )


__all__ = ["Place", "rows"]
