"""The code blocks of the documents run, in order, on the processor: with a small pool and a fake
driver."""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.fake_driver import FakeDriver
from support.storing import fill, make_cache
from support.window_engine import WindowEngine

import lightcache
from lightcache import Cache, PageIndex
from lightcache.groups import Rule
from lightcache.hybrid import Checkpoints
from lightcache.kernels import Move
from lightcache.layout import EVICTIONS
from lightcache.manager import KVCacheManager, ManagedBlocks
from lightcache.manager.stats import NodeCounters
from lightcache.metrics import CacheMetrics, CheckpointMetrics, ManagerMetrics, WindowMetrics
from lightcache.shm import Segment

ROOT = Path(__file__).parents[2]
DOCUMENTS = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
BLOCK = re.compile(r"(<!-- (?:with a GPU|a program) -->\n)?```python\n(.*?)```", re.DOTALL)


class Ready:
    """A stream or an event whose work has finished."""

    def synchronize(self) -> None:
        """Return."""


class Loaded:
    """An engine and its transfer, for pages whose format does not matter."""

    def load(self, move: Move) -> Loaded:
        """Copy nothing."""
        assert isinstance(move, Move)
        return self

    def wait(self) -> None:
        """Return."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """The engines that a document makes; closed at the end, then its caches."""
    monkeypatch.setenv("HOME", str(tmp_path))
    opened: list[Any] = []
    caches: list[Cache] = []
    ended: list[NodeCounters] = []
    engine, over, counters = Cache.transfer_engine, Cache._over, NodeCounters.open

    def keep_engine(*arguments: Any, **more: Any) -> Any:
        opened.append(engine(*arguments, **more))
        return opened[-1]

    def keep_cache(*arguments: Any) -> Cache:
        caches.append(over(*arguments))
        return caches[-1]

    def keep_counters(cache: Cache) -> NodeCounters:
        ended.append(counters(cache))
        return ended[-1]

    monkeypatch.setattr(NodeCounters, "open", keep_counters)
    monkeypatch.setattr(Cache, "transfer_engine", keep_engine)
    monkeypatch.setattr(Cache, "_over", keep_cache)
    yield opened
    for closeable in (*opened, *ended, *caches):
        closeable.close()
    for cache in caches:
        Segment.unlink(cache.name)  # persistent ones


def called(model: Any, name: str) -> Any:
    """A model that was loaded from a folder of this name, which its cache has, too."""
    model.config._name_or_path = name
    return model


def run(
    document: str,
    name: str,
    begin: str = "",
    end: str = "",
    instead: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Run the blocks of a document one after another; returns the names that they define.

    Args:
        begin, end: run only the blocks between these words.
        instead: words to replace, with their replacements.
        more: names that the blocks use.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.max_new_tokens = 4
    space: dict[str, Any] = {
        "model": model,
        "input_ids": torch.arange(1, 41)[None],
        "lightcache": lightcache,
        "Move": Move,
        "FakeDriver": FakeDriver,
        "engine": Loaded(),
        "kv_caches": [torch.zeros((2, 64, 16, 1, 128), dtype=torch.bfloat16) for _ in range(32)],
        "tokens": range(5 * 64 + 1),
        "longer": range(1, 7 * 64),
        "another": range(7, 5 * 64),
        "slots": np.random.default_rng(1).permutation(1024),
        "stream": Ready(),
        "event": Ready(),
        "i": 0,
        "send": lambda *message: space["on_message"](*message),  # one process is both
        **more,
    }
    text = (ROOT / document).read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python")
    first, last = text.index(begin), text.index(end) if end else len(text)
    for block in [block for block in blocks if first <= block.start() < last]:
        source = block[2].replace('"llama', f'"{name}').replace('size="32GiB"', 'size="128MiB"')
        source = source.replace('"qwen3-next', f'"{name}').replace("8GiB", "16MiB")
        for word, replacement in (instead or {}).items():
            source = source.replace(word, replacement)
        source = source.replace('pin(device="cuda:0")', "pin(driver=FakeDriver())")
        lines = "\n" * text.count("\n", 0, block.start(2))  # errors then name the document's lines
        code = compile(lines + source, str(ROOT / document), "exec")
        if not block[1]:
            exec(code, space)
        if "cache" in space:
            space["clients"] = [space["cache"].client_id]
    return space


@pytest.mark.slow
def test_transfers(engines: list[Any], segment_name: str) -> None:
    space = run("docs/kernels.md", segment_name)
    assert len(engines) == 2
    assert space["offload"].ready
    assert space["cache"].peek(space["others"]) == len(space["others"]) == 4


@pytest.mark.models
def test_readme(engines: list[Any], segment_name: str) -> None:
    instead = {"LlamaConfig(": f'LlamaConfig(name_or_path="{segment_name}", '}
    space = run("README.md", segment_name, instead=instead)
    assert len(engines) == 3  # of transformers, of transfers, of a manager
    assert space["past"].get_seq_length() >= 40
    router = space["router"]
    assert router.peek(router.hash_pages(space["tokens"])) == 4


class Model:
    """The engine's `forward` in docs/integration.md: the KV of a token is a figure of all tokens up
    to it, and each KV that is read is checked."""

    def __init__(self, blocks: int = 64, block_tokens: int = 16) -> None:
        import torch

        shape = (2, blocks, block_tokens, 1, 128)
        self.kv_caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(32)]
        self._block_tokens = block_tokens
        self.passes: list[dict[str, tuple[int, int]]] = []
        """For each pass: by request, its computed tokens and all its tokens."""

    def forward(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Compute tokens [computed, all) of each request; returns its next token."""
        import torch

        for request in batch.values():
            tokens = torch.tensor(request.tokens)
            kv = (torch.cumsum(tokens, 0) % 251).to(torch.bfloat16)[:, None, None]
            positions = torch.arange(len(tokens))
            blocks = torch.tensor(request.table)[positions // self._block_tokens].long()
            places, known = positions % self._block_tokens, request.computed
            for tensor in self.kv_caches:
                loaded = tensor[:, blocks[:known], places[:known]]
                assert (loaded == kv[:known]).all()
                tensor[:, blocks[known:], places[known:]] = kv[known:]
        self.passes.append({name: (b.computed, len(b.tokens)) for name, b in batch.items()})
        return {name: len(request.tokens) % 97 for name, request in batch.items()}


def engine_of_documents(blocks: int = 64) -> dict[str, Any]:
    """The names of an engine that docs/integration.md uses."""
    model = Model(blocks)
    return {
        "kv_caches": model.kv_caches,
        "forward": model.forward,
        "finished": lambda request: len(request.tokens) >= 330,
        "passes": model.passes,
    }


@pytest.mark.slow
def test_integration(engines: list[Any], segment_name: str) -> None:
    path, hybrid = "docs/integration.md", "## A hybrid model"
    space = run(path, segment_name, end=hybrid, **engine_of_documents())
    assert len(engines) == 1
    # Two requests of 321 and 313 tokens decode side by side, each from its own position.
    assert space["passes"][0] == {"request 1": (0, 321), "request 2": (0, 313)}
    assert space["passes"][1] == {"request 1": (321, 322), "request 2": (313, 314)}
    assert space["passes"][-1] == {"request 2": (328, 329)}
    assert space["match"].host == 320  # the second manager loads the pages of the first
    assert space["load"].tokens == 320


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [40, 41], ids=["waits", "is preempted"])
def test_integration_without_room_for_two(
    engines: list[Any], segment_name: str, blocks: int
) -> None:
    """The loop's second request waits for blocks until the first has ended; or is preempted at
    token 321, and continues from there when the first has ended."""
    space = run(
        "docs/integration.md",
        segment_name,
        end="### A router beside it",
        **engine_of_documents(blocks),
    )
    passes = space["passes"]
    if blocks == 40:
        assert passes[0] == {"request 1": (0, 321)}
        assert passes[8] == {"request 1": (328, 329)}
        assert passes[9] == {"request 2": (0, 313)}
    else:
        assert passes[7] == {"request 1": (327, 328), "request 2": (319, 320)}
        assert passes[8] == {"request 1": (328, 329)}
        assert passes[9] == {"request 2": (320, 321)}
    assert passes[-1] == {"request 2": (328, 329)}
    assert not space["waiting"]
    space["kv"].close()


def programs(document: str) -> list[str]:
    """The whole programs of a document."""
    blocks = BLOCK.finditer((ROOT / document).read_text())
    return [block[2] for block in blocks if block[1] and "a program" in block[1]]


def test_integration_of_ranks(
    segment_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler and two ranks, each a process."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (program,) = programs("docs/integration.md")
    (tmp_path / "ranks.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "ranks.py"), segment_name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "computed by both ranks: 150",
        "found on the device: 144",  # of 150 tokens, in blocks of 16
        "loaded by both ranks: 128",  # in pages of 64
    ]


def test_integration_by_page_number(segment_name: str) -> None:
    begin, end = "### A worker that is told page numbers", "## Add an engine"
    space = run("docs/integration.md", segment_name, begin, end)
    assert space["worker"].copied == space["pages"].tolist()
    assert len(space["pages"]) == 8


def test_integration_hybrid(engines: list[Any], segment_name: str) -> None:
    torch = pytest.importorskip("torch")
    conv = [torch.zeros((9, 24, 3), dtype=torch.bfloat16) for _ in range(3)]
    recurrent = [torch.zeros((9, 2, 16, 16)) for _ in range(3)]
    more = {"conv": conv, "recurrent": recurrent, **engine_of_documents()}
    space = run("docs/integration.md", segment_name, **more)
    assert (space["match"].usable, space["match"].tier.value) == (320, "device")


def test_router(segment_name: str) -> None:
    space = run("docs/guides/router.md", segment_name)
    assert space["choice"].device_pages == 0


def test_operating(engines: list[Any], segment_name: str) -> None:
    instead = {"meta-llama/Llama-3-8B": segment_name, "64MiB": "4MiB"}
    space = run("docs/guides/operating.md", segment_name, instead=instead)
    assert len(space["cache"].clients()) == 1
    assert space["cache"].name[: -len("-12345678")] == segment_name


@pytest.mark.models
def test_transformers(engines: list[Any], segment_name: str) -> None:
    pytest.importorskip("transformers")
    from support.tiny_models import model, prompt

    ids = prompt(40)
    path, windows = "docs/guides/transformers.md", "## Windows and chunks"
    space = run(path, segment_name, end=windows, model=called(model(), segment_name), input_ids=ids)
    assert len(engines) == 1
    assert space["reused"] == 0
    assert space["cache"].peek(space["cache"].hash_pages(space["output"][0].tolist())) == 4


@pytest.mark.models
def test_transformers_windows(segment_name: str) -> None:
    pytest.importorskip("transformers")
    from support.tiny_models import prompt
    from support.window_models import windowed

    space = run(
        "docs/guides/transformers.md",
        segment_name,
        begin="## Windows and chunks",
        end="## Hybrid models",
        model=called(windowed("Llama4"), segment_name),
        input_ids=prompt(40),
        lct=import_module("lightcache.connectors.transformers"),
    )
    assert space["past"].held == 40 + 8 - 1
    assert Segment.unlink(space["cache"].name)


@pytest.mark.models
def test_transformers_hybrid(segment_name: str) -> None:
    pytest.importorskip("transformers")
    import torch
    from support.hybrid_models import hybrid

    ids = torch.arange(1, 82)[None] % 90
    draft, accepted = ids[:, :2], ids[:, :1]
    space = run(
        "docs/guides/transformers.md",
        segment_name,
        begin="## Hybrid models",
        model=called(hybrid(), segment_name),
        input_ids=ids,
        draft=draft,
        accepted=accepted,
        rejected=True,
        lct=import_module("lightcache.connectors.transformers"),
    )
    assert space["past"].held == 81 + 31 + 1  # the KV of the last token was not computed
    assert Segment.unlink(space["cache"].name)


def test_keys(engines: list[Any], segment_name: str) -> None:
    digests = {"adapter_digest": b"an adapter", "image_digest": b"an image", "hashlib": hashlib}
    with make_cache(segment_name) as cache:
        tokens = list(range(80))
        space = run("docs/guides/keys.md", segment_name, cache=cache, tokens=tokens, **digests)
        assert space["keys"].shape == (4, 2)
        assert not (space["keys"] == cache.hash_pages(tokens)[:4]).all(axis=1).any()


def test_logging(segment_name: str) -> None:
    log = logging.getLogger("lightcache")
    before = log.level
    try:
        run("docs/guides/logging.md", segment_name)
        assert log.level == logging.INFO
    finally:
        log.setLevel(before)


def test_every_document_with_code_is_run() -> None:
    mine = Path(__file__).read_text()
    for document in ["README.md", *DOCUMENTS]:
        if "```python" in (ROOT / document).read_text():
            assert re.search(rf'(run\(|path(, hybrid)? =)\s*"{document}"', mine), document


def test_metrics(engines: list[Any], segment_name: str) -> None:
    space = run("docs/guides/metrics.md", segment_name)
    with PageIndex.create(f"{segment_name}-slots", pages=2, independent=True) as slots:
        space["registry"].register(CheckpointMetrics(Checkpoints(slots, None)))
        engine = WindowEngine(f"{segment_name}-w", (Rule.window(11),))
        space["registry"].register(WindowMetrics(engine.manage))
        device = ManagedBlocks(f"{segment_name}-device", block_tokens=16, blocks=2)
        with KVCacheManager(None, device) as manager:
            space["registry"].register(ManagerMetrics(manager))
            served = scraped(space)
        device.close()
        engine.close()
    others = ""
    for order in EVICTIONS:
        how = {"kv_groups": ("kv", "states"), "eviction": order}
        with make_cache(f"{segment_name}-{order}", **how) as cache:
            registry = CollectorRegistry(auto_describe=True)
            registry.register(CacheMetrics(cache))
            others += generate_latest(registry).decode()
    document = (ROOT / "docs/guides/metrics.md").read_text()
    families = set(re.findall(r"^# TYPE lightcache_(\w+) ", served + others, re.MULTILINE))
    assert families == set(re.findall(r"`lightcache_(\w+)`", document))
    labels = f'cache="{segment_name}",model_name="",service="chat"'
    assert f"lightcache_requests_total{{{labels}}} 1.0" in served


def scraped(space: dict[str, Any]) -> str:
    """One scrape of the guide's server."""
    try:
        port = space["server"].server_port
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        served = connection.getresponse().read().decode()
        connection.close()
        return served
    finally:
        space["server"].shutdown()
        space["server"].server_close()
        space["thread"].join(60)
        space["counters"].close()


def test_storage(engines: list[Any], segment_name: str) -> None:
    with make_cache(segment_name) as cache:
        keys = cache.hash_pages(list(range(1, 200)))
        fill(cache, keys)
        space = run("docs/guides/storage.md", segment_name, cache=cache, keys=keys)
        assert space["task"].result.prefix == space["shortest"] == len(keys) == 12
        assert space["tier"].stats().stored == 12
        space["test_my_storage"](space["CHECKS"][0])


def test_hybrid(engines: list[Any], segment_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    space = run("docs/hybrid.md", segment_name, instead={'"gemma-3': f'"{segment_name}-w'})
    assert capsys.readouterr().out in (ROOT / "docs/hybrid.md").read_text()
    assert len(engines) == 3
    assert space["fifth"].tokens == generated(space["turn"], 3)


def generated(tokens: list[int], count: int) -> list[int]:
    """These tokens and `count` more of the toy model of docs/hybrid.md, computed from the first."""
    sequence, state = list(tokens), 0
    for position in range(len(tokens) + count):
        if position == len(sequence):
            sequence.append(8 * state % 1000)  # all eight floats are equal
        state = (31 * state + sequence[position]) % 65521
    return sequence


@pytest.mark.parametrize("document", ["README.md", *sorted(DOCUMENTS)])
def test_links_lead_somewhere(document: str) -> None:
    page = ROOT / document
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), target
        if heading:
            assert heading in headings(other), target


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
