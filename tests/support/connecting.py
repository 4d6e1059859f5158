"""What tests of the connector for transformers do again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from support.tiny_models import answer, model

from lightcache import Cache
from lightcache.connectors import transformers as lct

SECRET = bytes(16)


# Fixtures: a test file imports those that it uses, and may have a `llama` of its own.


@pytest.fixture(scope="module")
def llama() -> Any:
    return model()


@pytest.fixture
def cache(segment_name: str, llama: Any) -> Iterator[Cache]:
    with small_cache(segment_name, llama) as made:
        yield made


@pytest.fixture
def connector(cache: Cache, llama: Any) -> Iterator[lct.Connector]:
    with lct.Connector(cache, llama) as made:
        yield made


@contextlib.contextmanager
def small_cache(name: str, model: Any, pages: int = 32) -> Iterator[Cache]:
    """A cache for this model in which nothing is held in the end."""
    with lct.open_cache(model, name=name, pages=pages, secret=SECRET, lifetime="attached") as made:
        yield made
        gc.collect()
        assert held(made) == (0, 0)


def held(cache: Cache) -> tuple[int, int]:
    """Pins, and pages being written."""
    report = cache.check()
    assert report.clean, report.message
    return report.pins, cache.stats().writing


def save(connector: lct.Connector, model: Any, ids: Any) -> None:
    """Compute a prompt and one more token, through the cache."""
    with connector.prefix(ids) as past:
        answer(model, ids, past, steps=1)


def ready(cache: Cache, ids: Any) -> int:
    """How many pages of a prompt are stored."""
    return cache.peek(cache.hash_pages(ids.reshape(-1).tolist()))
