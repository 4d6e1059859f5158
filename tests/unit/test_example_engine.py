"""The engine of examples/engine.py: its answers are those of its model without a cache, whatever
is found, loaded, preempted, cancelled, lost or killed meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.connecting import held

import lightcache
from lightcache.errors import TransferFailed
from lightcache.shm import Segment

pytestmark = pytest.mark.models
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINE = EXAMPLES / "engine.py"
DIES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import engine as example

def forward(engine, batch, before=example.Engine.forward):
    answers = before(engine, batch)
    kinds = [request.computed >= request.prompt_tokens for request, _ in batch]
    served = engine.requests - len(engine.running) - len(engine.waiting)
    if served and not all(kinds) and any(kinds) and engine.waiting:
        os.kill(os.getpid(), signal.SIGKILL)  # one decodes, one is between two chunks, one waits
    return answers

example.Engine.forward = forward
example.main(*sys.argv[2:])
"""


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import engine

        yield engine
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("engine", None)


@pytest.fixture(scope="module")
def wanted(example: ModuleType) -> Callable[[list[int], int], list[int]]:
    """The model's own answer: greedy, each token from one pass over all before it."""
    model, known = example.build_model("eager"), {}

    def answer(prompt: list[int], length: int) -> list[int]:
        if (tuple(prompt), length) not in known:
            tokens = list(prompt)
            for _ in range(length):
                logits = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits
                tokens.append(int(logits[0, -1].argmax()))
            known[tuple(prompt), length] = tokens[len(prompt) :]
        return known[tuple(prompt), length]

    return answer


@pytest.fixture
def start(
    example: ModuleType, segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Engines of one cache. After the test nothing is held, and the cache goes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    engines = []

    def make(device: str, **how: Any) -> Any:
        engines.append(example.Engine(segment_name, device, **how))
        return engines[-1]

    yield make
    for engine in engines:
        while engine.manager.poll():
            pass
        assert engine.manager.device.available == engine.manager.device.blocks
    assert held(engines[0].kv.cache) == (0, 0)
    for engine in engines:
        engine.close()
    Segment.unlink(segment_name)


def run(engine: Any, wanted: Any, prompts: list[list[int]], length: int = 24) -> None:
    requests = [engine.submit(prompt, length) for prompt in prompts]
    completed = list(engine.serve())
    assert sorted(one.number for one in completed) == [one.number for one in requests]
    for request in requests:
        assert request.answer == wanted(request.tokens[: request.prompt_tokens], length)


def answers(output: str) -> dict[int, str]:
    return {int(number): text for number, text in re.findall(r"request (\d+): (.*)", output)}


def figures(output: str) -> list[int]:
    computed = (
        r"(\d+) tokens computed, (\d+) found on the device, (\d+) on the host; (\d+) requests"
    )
    found = re.search(computed, output)
    assert found, output
    return [int(figure) for figure in found.groups()]


def program(name: str, device: str, home: Path, source: str = "") -> Any:
    """Run the example, or a program that changes it, to its end."""
    command = ["-c", source, str(EXAMPLES)] if source else [str(ENGINE)]
    return subprocess.run(
        [sys.executable, *command, name, device],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_killed_then_warm(
    example: ModuleType, wanted: Any, segment_name: str, tmp_path: Path
) -> None:
    """The first process dies in the middle; the second, and the third, find what it has computed,
    and answer as the model does."""
    dead = program(segment_name, "gpu0", tmp_path, DIES)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert 0 < len(answers(dead.stdout)) < 12

    outputs = []
    for device in ("gpu0", "gpu1"):  # the index of the dead one, and another
        done = program(segment_name, device, tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        for number, prompt in enumerate(example.prompts(), start=1):
            assert answers(done.stdout)[number] == str(wanted(prompt, 24))
    second, third = map(figures, outputs)
    assert second[2] > 100  # on the host: left by the dead one
    assert third[2] > second[2]
    total = sum(map(len, example.prompts())) + 12 * 23
    assert second[3] == third[3] == 0
    assert sum(second[:3]) == sum(third[:3]) == total
    assert third[0] < total // 4

    with lightcache.Cache.attach(segment_name) as cache:
        cache.reap()
        assert held(cache) == (0, 0)
    Segment.unlink(segment_name)


def test_preempted(example: ModuleType, wanted: Any, start: Any) -> None:
    """With room for little more than one request."""
    engine = start("gpu0", blocks=26)
    run(engine, wanted, example.prompts()[:5])
    assert engine.preempted > 0
    assert engine.computed < sum(map(len, example.prompts()[:5]))  # a part is found again


def test_cancelled(example: ModuleType, wanted: Any, start: Any) -> None:
    """While it waits, loads, prefills and decodes: others are served, and nothing stays held."""
    run(start("gpu0"), wanted, example.prompts()[:2])
    engine = start("gpu1")
    requests = [engine.submit(prompt, 24) for prompt in example.prompts()]
    engine.cancel(requests[11])  # planned never
    engine.admit()
    loading = requests[0]
    assert loading.load is not None
    assert loading.match.load > 0
    engine.cancel(loading)
    assert requests[10] in engine.waiting
    engine.cancel(requests[10])
    while not (engine.running[-1].computed or engine.running[0].answer):
        engine.step()
    engine.cancel(engine.running[0])  # decodes, or will
    engine.cancel(engine.running[-1])  # prefills
    engine.cancel(loading)  # twice: nothing
    served = list(engine.serve())
    assert len(served) == 12 - 5
    for request in served:
        assert request.answer == wanted(request.tokens[: request.prompt_tokens], 24)


def test_a_load_fails(
    example: ModuleType, wanted: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to be loaded is computed."""
    run(start("gpu0"), wanted, example.prompts()[:2])
    engine = start("gpu1")

    def fails(*_: Any, **__: Any) -> Any:
        raise TransferFailed("the test's")

    monkeypatch.setattr(engine.kv.engine, "load", fails)
    run(engine, wanted, example.prompts()[:2])
    assert engine.from_host == 0
    monkeypatch.undo()
    assert engine.computed == sum(map(len, example.prompts()[:2])) + 2 * 23


def test_wrong_kv_shows(example: ModuleType, wanted: Any, start: Any) -> None:
    """The answers do depend on what is loaded: with other bytes in the pool they differ."""
    first = start("gpu0")
    run(first, wanted, example.prompts()[:2])
    while first.manager.poll():
        pass
    pool = first.kv.cache.pool
    pool.array[:] = 0
    engine = start("gpu1")
    requests = [engine.submit(prompt, 24) for prompt in example.prompts()[:2]]
    list(engine.serve())
    assert engine.from_host > 0
    assert all(r.answer != wanted(r.tokens[: r.prompt_tokens], 24) for r in requests)


@pytest.mark.parametrize(("prompt", "answer"), [(300, 21), (0, 8), (8, 0)])
def test_what_cannot_be_served(start: Any, prompt: int, answer: int) -> None:
    with pytest.raises(ValueError, match=f"320 tokens at most, found {prompt + answer}"):
        start("gpu0", blocks=20).submit([1] * prompt, answer)
