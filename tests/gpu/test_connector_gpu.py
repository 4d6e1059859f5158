"""The connector for transformers with a model on a GPU: the pool is pinned, streams wait instead of
the thread, and answers are those without a cache.

On threads that stand in for a GPU the model stays on the processor, and the engine is a device's.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.place import place

pytest.importorskip("triton")
pytest.importorskip("transformers")

from support.connecting import SECRET, held, ready, save
from support.hybrid_connecting import ask, joined
from support.hybrid_models import hybrid
from support.refusals import refused
from support.tiny_models import answer, assert_same, kept, model, prompt

from lightcache import Cache, InUse
from lightcache.connectors import transformers as lct
from lightcache.connectors.cache_layers import parts_of
from lightcache.kernels.planes import DevicePlanes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STAND_IN = True


class Here:
    """An engine of the stand-in: planes in host memory count as its own."""

    def __init__(self, where: Any, engine: Any) -> None:
        self._name, self._engine = where.name, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _moved(self, verb: str, move: Any, planes: Any, how: Any) -> Any:
        if planes is not None:
            planes = DevicePlanes(planes.planes, device=self._name, keep=planes.keep)
        return getattr(self._engine, verb)(move, planes=planes, **how)

    def offload(self, move: Any, *, planes: Any = None, **how: Any) -> Any:
        return self._moved("offload", move, planes, how)

    def load(self, move: Any, *, planes: Any = None, **how: Any) -> Any:
        return self._moved("load", move, planes, how)


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = place()
    if not torch.cuda.is_available():
        original = made.engine

        def engine(cache: Cache, geometry: Any, planes: Any, *, memory: Any) -> Here:
            monkeypatch.undo()  # the stand-in's own call is of the real one
            return Here(made, original(cache, geometry, planes, memory))

        monkeypatch.setattr(Cache, "transfer_engine", engine)
    yield made
    made.close()


@pytest.fixture
def llama(where: Any) -> Any:
    return model(dtype=torch.bfloat16).to(where.memory)


@pytest.fixture
def cache(segment_name: str, llama: Any) -> Iterator[Cache]:
    with lct.open_cache(
        llama, name=segment_name, pages=32, secret=SECRET, lifetime="attached"
    ) as made:
        yield made
        gc.collect()
        assert held(made) == (0, 0)


def seen(where: Any, past: Any) -> list[torch.Tensor]:
    """The first 64 tokens, read on the current stream, which waits for the load; the processor is
    no stream of the stand-in, and waits itself."""
    if not torch.cuda.is_available():
        where.synchronize()
    return kept(past, 64)


def test_restored_bytes_are_those_saved(cache: Cache, where: Any, llama: Any) -> None:
    ids = prompt(70).to(where.memory)
    with where.pin(cache) as pinned, lct.Connector(cache, llama, pinned=pinned) as connector:
        for _ in range(3):
            with connector.prefix(ids) as past:
                answer(llama, ids, past)
            saved = kept(past, 64)
            with connector.prefix(ids) as past:
                assert past.reused == 64
                restored = seen(where, past)
            assert all(torch.equal(a, b) for a, b in zip(saved, restored, strict=True))
            where.synchronize()
            connector.engine.poll()  # the load is over now; it may not have been on leaving
            assert cache.evict(32) == 4


def test_growth_while_it_is_copied(cache: Cache, where: Any, llama: Any) -> None:
    ids = prompt(64).to(where.memory)
    with where.pin(cache) as pinned, lct.Connector(cache, llama, pinned=pinned) as connector:
        with torch.no_grad():
            past = llama(ids, use_cache=True).past_key_values
            where.synchronize()
            saved = kept(past, 64)
            keys = cache.hash_pages(ids[0].tolist())
            offload = connector.offload(past, cache.reserve(keys))
            for _ in range(20):
                llama(ids[:, :1], past_key_values=past)
        del past
        offload.wait()
        restored = seen(where, connector.restore(cache.match(keys)))
        assert all(torch.equal(a, b) for a, b in zip(saved, restored, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the stand-in pins by hand")
def test_a_connector_pins_and_unpins(cache: Cache, where: Any, llama: Any) -> None:
    made = model().to(where.memory)
    ids = prompt(70).to(where.memory)
    expected = answer(made, ids)
    with lct.open_cache(
        made, name=f"{cache.name}-32", pages=32, secret=SECRET, lifetime="attached"
    ) as own:
        mine = [client for client in own.clients() if client.pid == os.getpid()]
        assert [client.device for client in mine] == [True]
        for reused in (0, 64):
            with lct.prefix(own, made, ids) as past:
                assert past.reused == reused
                assert_same(answer(made, ids, past), expected)
                refused(InUse, "pinned already", lct.Connector, own, made)
        assert ready(own, ids) == 4
    with lct.Connector(cache, llama) as connector:
        save(connector, llama, ids)
    cache.pin(device=where.name).close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the stand-in's streams hold no model up")
@pytest.mark.parametrize("kind", ["Qwen3Next", "Qwen3_5"])
def test_a_hybrid_model(segment_name: str, where: Any, kind: str) -> None:
    """Keys, values and states come back on streams of their own; what is computed behind them is
    what a model alone computes."""
    qwen = hybrid(kind).to(where.memory)
    ids = prompt(150).to(where.memory)
    with joined(segment_name, qwen) as connector:
        with connector.prefix(ids) as past:
            connector.prefill(past)
            answer(qwen, ids, past)
            (taken,) = past.taken
        assert taken.tokens == 128
        for _ in range(3):
            with connector.prefix(ids) as past:
                assert past.reused == 128
                for at, saved in taken.states.items():
                    for name, one in parts_of(past.layers[at]).items():
                        assert torch.equal(one, saved[name]), (at, name)
        reused, every = ask(connector, qwen, ids, steps=120)
        assert reused == 128
        assert ask(connector, qwen, every)[0] == 256, "saved while decoding"
