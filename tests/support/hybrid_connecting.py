"""What tests of the connector with hybrid models do again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from support.connecting import SECRET, held
from support.index_view import IndexView
from support.tiny_models import answer, assert_same

from lightcache import Cache
from lightcache.connectors import transformers as lct
from lightcache.group_index import GroupIndex
from lightcache.kernels import Rule
from lightcache.layout import PageState


@contextlib.contextmanager
def small_cache(
    name: str, model: Any, *, pages: int = 64, states: int = 8, page: int = 16
) -> Iterator[Cache]:
    """A cache with room for so many pages of keys and values, and so many states, in which nothing
    is held in the end."""
    found = lct.describe(model, page_tokens=page)
    assert found.states is not None
    room = pages + states * found.states.run.parts
    with Cache.create(name, pages=room, secret=SECRET, **found.options) as made:
        yield made
        gc.collect()
        assert held(made) == (0, 0)


@contextlib.contextmanager
def joined(
    name: str, model: Any, *, chunk: int = 64, every: int = 256, path_limit: int = 0, **sizes: int
) -> Iterator[lct.Connector]:
    """A connector with such a cache."""
    with small_cache(name, model, **sizes) as cache:
        with lct.Connector(cache, model, chunk=chunk, every=every, path_limit=path_limit) as made:
            yield made


def states_of(connector: lct.Connector) -> GroupIndex:
    """Its states."""
    found = connector.pages.indexes(connector.cache)[Rule.point()]
    assert isinstance(found, GroupIndex)
    return found


def ready_states(connector: lct.Connector) -> int:
    """How many states the cache has."""
    pages = IndexView(connector.cache.index).pages()
    run = states_of(connector).run
    ready = [page for page in pages if page.state is PageState.READY and page.group == run.group]
    assert len(ready) % run.parts == 0
    return len(ready) // run.parts


def evict_states(connector: lct.Connector, n: int) -> int:
    """Evict up to n states; how many went."""
    run = states_of(connector).run
    return connector.cache.evict(n * run.parts, group=run.group) // run.parts


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


def superseded(connector: lct.Connector, ids: Any, *, page: int = 16) -> list[int]:
    """Those of them that are the first to be evicted."""
    keys = states_of(connector).run.last(connector.cache.hash_pages(ids.reshape(-1).tolist()))
    first = IndexView(connector.cache.index).goes_first()
    return [(at + 1) * page for at, key in enumerate(keys.tolist()) if tuple(key) in first]


def together(*parts: Any) -> Any:
    """Ids one behind the other."""
    return torch.cat(parts, dim=1)
