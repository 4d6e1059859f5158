"""Real engines of vLLM on a CPU, a process each: what the connector costs where nothing is found,
and the first request of one that takes the place of a killed one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from lightcache.shm import Segment
from lightcache_bench import Row, meets

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "SGLANG_USE_CPU_ENGINE": "1",
}
MISSES = {"count": 4, "tokens": 512, "out": 16}
FIRST = {"count": 1, "tokens": 1536, "out": 1}
STUDENT = {4: 2.353, 19: 1.729}
"""One-sided, 95 %, by degrees of freedom."""


class Engine:
    """A process of `_vllm_engine` or `_sglang_engine`."""

    def __init__(
        self,
        folder: str,
        connector: dict[str, Any] | None,
        blocks: int = 512,
        kind: str = "vllm",
    ) -> None:
        """Does not wait until it is ready."""
        module = f"lightcache_bench._{kind}_engine"
        program = [sys.executable, "-m", module, folder, str(blocks)]
        self._process = subprocess.Popen(
            [*program, json.dumps(connector)],
            env={**os.environ, **SETTINGS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it is ready."""
        self._until("READY")

    def _until(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError("an engine has ended; its errors stand above")

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, **what: Any) -> None:
        """Ask, and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def ask(self, **what: Any) -> dict[str, Any]:
        """See `_vllm_engine`; seconds, cached tokens, and the first token of each answer."""
        self.begin(**what)
        answer: dict[str, Any] = json.loads(self._until("OUT"))
        return answer

    def kill(self) -> None:
        """With SIGKILL, and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def lightcache(extra: dict[str, Any]) -> dict[str, Any]:
    """The connector of ours."""
    return {
        "kv_connector": "LightcacheConnector",
        "kv_connector_module_path": "lightcache.connectors.vllm",
        "kv_connector_extra_config": extra,
    }


def engines(quick: bool) -> Iterator[Row]:
    """Two at once, asked in turns; each starts in half a minute."""
    name = f"bench-vllm-{os.getpid()}-engines"
    extra = lightcache({"name": name, "size": "256MiB", "blocks_per_page": 1})
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(Segment.unlink, name, force=True)

        def start(how: dict[str, Any] | None) -> Engine:
            engine = Engine(folder, how)
            stack.callback(engine.kill)
            engine.wait()
            return engine

        plain, cached = start(None), start(extra)
        yield from misses(plain, cached, 5 if quick else 20)
        plain.kill()
        yield from restarted(cached, lambda: start(extra), 3 if quick else 10)


def misses(plain: Engine, cached: Engine, turns: int) -> Iterator[Row]:
    """Prompts that share nothing: the same ones to both, and each turn begins with the other."""
    ratios: dict[str, list[float]] = {"s": [], "cpu_s": []}
    for turn in range(-2, turns):
        both = (plain, cached) if turn % 2 else (cached, plain)
        answers = {id(engine): engine.ask(seed=1000 + turn, **MISSES) for engine in both}
        assert not any(answers[id(cached)]["cached"])
        for which, values in ratios.items():
            if turn >= 0:  # the others warm up
                values.append(answers[id(cached)][which] / answers[id(plain)][which])
    for which, name in (("s", "time"), ("cpu_s", "processor time")):
        logs = [math.log(ratio) for ratio in ratios[which]]
        error = statistics.stdev(logs) / math.sqrt(turns)
        middle = statistics.fmean(logs)
        upper = math.exp(middle + STUDENT[turns - 1] * error)
        shown = {
            **MISSES,
            "turns": turns,
            "mean": round(math.exp(middle), 4),
            "median": round(statistics.median(ratios[which]), 4),
        }
        limit = "<= 1.03"
        row = f"an engine, 0 % hits, {name}: upper 95 % bound"
        yield Row(row, shown, upper, "x", "the same without", upper, limit, meets(upper, limit))


def restarted(cached: Engine, start: Any, times: int) -> Iterator[Row]:
    """The same prompts, one at a time: of an engine that has computed them, and of the next one
    after it was killed."""
    for seed in range(times):
        cached.ask(seed=seed, **FIRST)
    before = [cached.ask(seed=seed, **FIRST) for seed in range(times)]
    cached.kill()
    again = start()
    after = [again.ask(seed=seed, **FIRST) for seed in range(times)]
    assert [each["cached"] for each in after] == [each["cached"] for each in before]
    usual = statistics.median(each["s"] for each in before)
    for name, value in (
        ("the first request of a restarted engine", after[0]["s"]),
        ("the next ones", statistics.median(each["s"] for each in after[1:])),
    ):
        shown = {**FIRST, "cached": before[0]["cached"][0], "before_ms": round(1e3 * usual, 2)}
        ratio, limit = value / usual, "<= 1.1"
        yield Row(
            f"{name}, first token", shown, 1e3 * value, "ms", "before it was killed", ratio,
            limit, meets(ratio, limit),
        )  # fmt: skip
