"""The same requests to two engines with each of several caches: hits, first token, memory, kills.

Real engines with a small model of random weights, on the CPU: of vLLM, two without a cache between
them, two with lightcache, and two with the multi-process server of LMCache where that is installed;
in an environment of SGLang the third two have its own HiCache, each one with half of the bytes (on
a CPU it needs the stand-ins of tests/engines/sglang on PYTHONPATH). Conversations share beginnings;
each turn goes to one of the two engines at random, the same one with every cache, and each request
runs alone, with the caches in turns. Answers of a turn are given with the next prompt, so all are
asked the same. An answer has one token: its time is that of the first token. All caches have the
same bytes and the same tokens in a page. "Memory" counts what the engines and the server have in
memory (PSS) above those without a cache.

Then one engine of each is killed in a request, the other is asked the same, and a new engine takes
its place; and the server is killed and started again. Takes ten minutes on two cores.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lightcache.errors import ConfigError
from lightcache.shm import Segment
from lightcache.shm.names import FOLDER
from lightcache_bench import Row
from lightcache_bench._timing import median, spread
from lightcache_bench._vllm_engine import BLOCK, TOKEN_BYTES, VOCABULARY, save
from lightcache_bench._vllm_engines import Engine, lightcache

BLOCKS = 80
"""Of an engine's device: two or three conversations."""
BYTES = 128 << 20
"""Of host memory for the two engines: all conversations."""
PATIENCE = 120.0
"""Seconds to wait for a server, or for a request after its end."""
SHORT = {"count": 1, "tokens": 8 * BLOCK, "out": 1}
INSIDE = 0.1
"""Seconds after which an engine is killed in a request."""


HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": BYTES / 2 / (BLOCKS * BLOCK * TOKEN_BYTES),
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
}


def linker(name: str) -> dict[str, Any]:
    """Ours, for SGLang."""
    how = {
        "linker": "LightcacheLinker",
        "linker_module_path": "lightcache.connectors.sglang",
        "linker_extra_config": {"name": name, "size": BYTES, "on_reset": "keep"},
    }
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": how,
    }


def conversations(seed: int, count: int, turns: int) -> list[tuple[int, list[int]]]:
    """Engine, 0 or 1, and prompt of each request in their order: the turns of all in turns. Half of
    the conversations begin with the same 384 tokens."""
    chance = np.random.default_rng(seed)

    def some(least: int, most: int) -> list[int]:
        made: list[int] = chance.integers(0, VOCABULARY, chance.integers(least, most)).tolist()
        return made

    systems = [some(384, 385) for _ in range(2)]
    said, asked = [list(systems[number % 2]) for number in range(count)], []
    for _ in range(turns):
        for number in chance.permutation(count):
            said[number] += some(64, 160)
            asked.append((int(chance.integers(2)), list(said[number])))
            said[number] += some(32, 96)  # the answer
    return asked


@dataclass
class System:
    """Two engines, and what they have between them."""

    name: str
    kind: str
    folder: str
    connector: dict[str, Any] | None
    server: Server | None = None
    engines: list[Engine] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> Engine:
        """One more engine. It may not be ready yet."""
        return Engine(self.folder, self.connector, BLOCKS, self.kind)

    def kill(self) -> None:
        """All of it, with SIGKILL."""
        for engine in self.engines:
            engine.kill()
            for file in _left(engine.pid):
                file.unlink()
        if self.server is not None:
            self.server.kill()

    def processes(self) -> list[Any]:
        found = [one for each in self.engines for one in _tree(each.pid)]
        return found + ([] if self.server is None else _tree(self.server.pid))

    def memory(self) -> float:
        """MiB that its processes have; what they share counts once."""
        return _memory(self.processes())

    def cpu(self) -> float:
        """Seconds of processor time that its processes have used."""
        return sum(sum(each.cpu_times()[:2]) for each in self.processes())


class Server:
    """LMCache's multi-process server."""

    def __init__(self) -> None:
        self.port, self._http = _free_port(), _free_port()
        self.begin()

    def begin(self) -> None:
        """Start it, and wait until it answers."""
        program = [sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(self.port)]
        how = ["--http-port", str(self._http), "--chunk-size", str(BLOCK)]
        how += ["--l1-size-gb", str(BYTES / 2**30), "--eviction-policy", "LRU"]
        quiet = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
        self._process = subprocess.Popen(
            [*program, *how],
            env={**os.environ, **quiet, "LMCACHE_LOG_LEVEL": "ERROR"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("localhost", self._http)):
                return
            time.sleep(0.05)
        raise RuntimeError("LMCache's server does not answer")

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory(self) -> float:
        """MiB, as `System.memory`."""
        return _memory(_tree(self.pid))

    def connector(self) -> dict[str, Any]:
        """For vLLM. The server copies between shared memory of both, which is its fastest way."""
        extra = {"host": "tcp://localhost", "port": self.port, "mp_transfer_mode": "lmcache_driven"}
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {f"lmcache.mp.{key}": extra[key] for key in extra},
        }

    def kill(self) -> None:
        """With SIGKILL."""
        self._process.kill()
        self._process.wait()


def _tree(pid: int) -> list[Any]:
    first = import_module("psutil").Process(pid)
    return [first, *first.children(recursive=True)]


def _memory(processes: list[Any]) -> float:
    return sum(float(each.memory_full_info().pss) for each in processes) / 2**20


def _left(pid: int) -> list[Path]:
    """Files in shared memory that a process has named after itself."""
    return [file for file in FOLDER.iterdir() if f"_{pid}_" in file.name]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def rows(quick: bool) -> Iterator[Row]:
    """See `Benchmark.rows`.

    Raises:
        ConfigError: this environment has neither vLLM nor SGLang.
    """
    kinds = [kind for kind in ("vllm", "sglang") if importlib.util.find_spec(kind)]
    if not kinds:
        raise ConfigError("engines: needs vLLM or SGLang; run it in an environment that has one")
    name = f"bench-engines-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(Segment.unlink, name, force=True)
        systems = [System("none", kinds[0], folder, None)]
        if kinds[0] == "sglang":
            systems.append(System("lightcache", "sglang", folder, linker(name)))
            systems.append(System("HiCache", "sglang", folder, HICACHE))
        else:
            how = lightcache({"name": name, "size": BYTES, "blocks_per_page": 1})
            systems.append(System("lightcache", "vllm", folder, how))
            if importlib.util.find_spec("lmcache") is not None:
                server = Server()
                stack.callback(server.kill)
                systems.append(System("LMCache", "vllm", folder, server.connector(), server))
        save(f"{folder}/model")
        for system in systems:
            stack.callback(system.kill)
            for _ in range(2):
                system.engines.append(system.start())
        for system in systems:
            for engine in system.engines:
                engine.wait()
        asked = conversations(1, *((3, 2) if quick else (8, 4)))
        yield from served(systems, asked)
        yield from engine_killed(systems, asked)
        yield from server_killed(systems)


def served(systems: list[System], asked: list[tuple[int, list[int]]]) -> Iterator[Row]:
    """All requests."""
    for system in systems:  # what is made at the first request of an engine
        for number, engine in enumerate(system.engines):
            engine.ask(seed=number, count=1, tokens=BLOCK, out=1)
    before = [system.cpu() for system in systems]
    for number, (which, ids) in enumerate(asked):
        for place in range(len(systems)):
            system = systems[(number + place) % len(systems)]
            system.answers.append(system.engines[which].ask(ids=ids, out=1))
    plain, total = systems[0], sum(len(ids) for _, ids in asked)
    for system, begun in zip(systems, before, strict=True):
        times = [1e3 * each["s"] for each in system.answers]
        usual = median([1e3 * each["s"] for each in plain.answers])
        same = sum(
            a["first"] == b["first"] for a, b in zip(system.answers, plain.answers, strict=True)
        )
        who = {"with": system.name, "requests": len(asked)}
        found = sum(each["cached"][0] for each in system.answers)
        yield Row("tokens found", {**who, "of": total, "same first tokens": same}, found, "tokens")
        shown = {**who, **spread(times), "worst": round(max(times), 1)}
        yield Row("first token", shown, median(times), "ms", "none", median(times) / usual)
        yield Row("processor time", who, system.cpu() - begun, "s")
        own = 0.0 if system.server is None else system.server.memory()
        shown = {**who, "of the server": round(own, 1)}
        yield Row("memory above none", shown, system.memory() - plain.memory(), "MiB")


def engine_killed(systems: list[System], asked: list[tuple[int, list[int]]]) -> Iterator[Row]:
    """SIGKILL in a request, and then the same requests: by the other engine and by a new one."""
    ids = max((ids for _, ids in asked), key=len)
    new = ids + ids[::-1][: BLOCK * 8]
    for system in systems:
        first, other = system.engines
        first.begin(ids=new, out=1)
        time.sleep(INSIDE)
        first.kill()
        left = _left(first.pid)
        beside = other.ask(ids=new, out=1)
        begun = time.monotonic()
        system.engines[0] = system.start()
        system.engines[0].wait()
        took = time.monotonic() - begun
        system.engines[0].ask(seed=0, count=1, tokens=BLOCK, out=1)
        again = system.engines[0].ask(ids=new, out=1)
        who = {"with": system.name, "tokens": len(new)}
        size = sum(file.stat().st_size for file in left) / 2**20
        yield Row("an engine killed: left in shared memory", who, size, "MiB")
        for file in left:
            file.unlink()
        for name, answer in (("the other one", beside), ("a new one", again)):
            shown = {**who, "found": answer["cached"][0]}
            if answer is again:
                shown["start_s"] = round(took, 1)
            yield Row(f"an engine killed: {name}, first token", shown, 1e3 * answer["s"], "ms")


def server_killed(systems: list[System]) -> Iterator[Row]:
    """SIGKILL of a server, and then requests that it has had the tokens of; the device is empty."""
    for system in systems:
        if system.server is None:
            continue
        for seed in range(4):
            system.engines[0].ask(seed=100 + seed, **SHORT)
        for seed in range(4):
            if seed == 1:
                system.server.kill()
            answer = system.engines[1].ask(seed=100 + seed, **SHORT)
            when = f"request {seed} after" if seed else "before"
            shown = {"with": system.name, **SHORT, "found": answer["cached"][0]}
            yield Row(f"a server killed: {when}", shown, 1e3 * answer["s"], "ms")
        begun = time.monotonic()
        system.server.begin()
        took, found = time.monotonic() - begun, 0
        begun += took
        while not found and time.monotonic() < begun + PATIENCE:
            seed += 1
            system.engines[1].ask(seed=100 + seed, **SHORT)
            found = system.engines[0].ask(seed=100 + seed, **SHORT)["cached"][0]
        shown = {"with": system.name, **SHORT, "found": found, "start_s": round(took, 1)}
        yield Row("a server started again: used after", shown, time.monotonic() - begun, "s")
