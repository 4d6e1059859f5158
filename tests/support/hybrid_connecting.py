"""What tests of the connector with hybrid models do again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from support.connecting import SECRET, held
from support.tiny_models import answer, assert_same

from lightcache import Cache
from lightcache.connectors import transformers as lct


@contextlib.contextmanager
def small_caches(
    name: str, model: Any, *, pages: int = 64, states: int = 8, page: int = 16
) -> Iterator[lct.Caches]:
    """Caches for this model in which nothing is held in the end."""
    found = lct.describe(model, page_tokens=page)
    assert found.states is not None
    with (
        Cache.create(name, pages=pages, secret=SECRET, **found.options) as kv,
        Cache.create(f"{name}-states", pages=states, secret=SECRET, **found.states.options) as one,
    ):
        yield lct.Caches(kv, one)
        gc.collect()
        assert (held(kv), held(one)) == ((0, 0), (0, 0))


@contextlib.contextmanager
def joined(
    name: str, model: Any, *, chunk: int = 64, every: int = 256, path_limit: int = 0, **sizes: int
) -> Iterator[lct.Connector]:
    """A connector with such caches."""
    with small_caches(name, model, **sizes) as caches:
        with lct.Connector(
            caches.kv, model, states=caches.states, chunk=chunk, every=every, path_limit=path_limit
        ) as made:
            yield made


def states_of(connector: lct.Connector) -> Cache:
    """Its cache of states."""
    assert connector.hybrid is not None
    assert connector.hybrid.checkpoints is not None
    return connector.hybrid.checkpoints.cache


def ask(
    connector: lct.Connector, model: Any, ids: Any, *, steps: int = 8, keep: int | None = None
) -> tuple[int, Any]:
    """A prompt and an answer of some tokens through the caches, seen to be equal to the answer
    without any. Returns the tokens that were reused, and prompt and answer.

    Args:
        keep: tokens of the answer that are named; None: all.
    """
    with connector.prefix(ids) as past:
        connector.prefill(past)
        found = answer(model, ids, past, steps=steps)
        past.extend(found.tokens[:, ids.shape[1] :][:, :keep])
    assert_same(found, answer(model, ids, steps=steps))
    return past.reused, found.tokens


def saved(connector: lct.Connector, ids: Any, *, page: int = 16) -> list[int]:
    """Tokens behind which there is a state of this prompt."""
    keys = connector.cache.hash_pages(ids.reshape(-1).tolist())
    states = states_of(connector)
    return [(at + 1) * page for at in range(len(keys)) if states.peek(keys[at : at + 1])]


def together(*parts: Any) -> Any:
    """Ids one behind the other."""
    return torch.cat(parts, dim=1)
