"""Turns of the demo as its router tells them, with figures that tests can foresee."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lightcache.tools.demo.messages import Hello, Served
from lightcache.tools.demo.settings import Settings
from lightcache.tools.demo.workload import Turn


def hello(worker: int, life: int) -> Hello:
    """Of a worker without a cache."""
    return Hello(worker, life, 1, None, None)


def served(number: int, **changes: Any) -> Served:
    """A turn of a hundred tokens, of which 64 came from the host."""
    plain = Served(
        number=number,
        conversation=number % 2,
        turn=number // 2,
        worker=number % 2,
        life=0,
        prompt=100,
        attempts=1,
        waited_s=0.0,
        cached=True,
        logprobs=[-0.5],
        reused={"host": 64},
        loaded_bytes=1 << 20,
        stored_bytes=1 << 19,
        first_s=0.01,
        steps_s=[0.001],
        total_s=0.02,
        lookup_s=0.001,
        baseline_s=0.05,
        tokens=np.arange(101, dtype=np.int32),
    )
    return replace(plain, **changes)


def answered(settings: Settings, turn: Turn, **figures: Any) -> Served:
    """As a router would tell it, with figures that only depend on the turn."""
    plain = Served(
        number=turn.number,
        conversation=turn.conversation,
        turn=turn.turn,
        worker=0,
        life=0,
        prompt=len(turn.tokens),
        attempts=1,
        waited_s=0.5,
        cached=not (settings.alternate and turn.number // settings.workers % 2),
        logprobs=[],
        reused={"host": 0 if turn.turn == 0 else 16},
        loaded_bytes=0,
        stored_bytes=0,
        first_s=0.1 if turn.turn == 0 else 0.01,
        steps_s=[0.002] * (turn.answer_tokens - 1),
        total_s=0.2,
        lookup_s=None,
        baseline_s=None,
    )
    return replace(plain, **figures)
