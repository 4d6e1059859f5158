"""What a router refuses of a model whose layers have indexes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.refusals import Table, tried

from lightcache import Cache, ConfigError, KeySpec, PageIndex, Router
from lightcache.groups import Rule

PREFIX, POINT, WINDOW = Rule.prefix(), Rule.point(), Rule.window(40)
SPEC = KeySpec("model", 16, secret=bytes(16))


@pytest.fixture
def kv(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=8, config={"page_tokens": 16}) as made:
        yield made


@pytest.fixture
def wide(segment_name: str) -> Iterator[PageIndex]:
    """With pages of 32 tokens."""
    config = {"page_tokens": 32}
    with PageIndex.create(f"{segment_name}-w", pages=8, independent=True, config=config) as made:
        yield made


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with Cache.create(
        f"{segment_name}-c",
        pages=8,
        page_bytes=64,
        page_tokens=16,
        fingerprint="model",
        secret=bytes(16),
    ) as made:
        yield made


def host(indexes: Any, spec: KeySpec | None = SPEC) -> Router:
    return Router(indexes, {"a": None}, spec=spec)


def worker(indexes: Any) -> Router:
    return Router(None, {"a": indexes}, spec=SPEC)


OTHER = KeySpec("other", 16, secret=bytes(16))

TABLE: Table = {
    ("gave a router indexes by rule", ConfigError): [
        ("worker 'a': .*of one rule at least, found none", lambda: worker({})),
        ("host: .*a Rule for each index, .* found 'kv'", lambda kv: host({"kv": kv})),
        ("worker 'a', rule 'point': .* or a name, found None", lambda: worker({POINT: None})),
        ("host, rule 'prefix': expected a PageIndex", lambda: host({PREFIX: 4})),
        ("spec: .*by rule, found None", lambda kv: host({PREFIX: kv}, None)),
    ],
    ("gave a router indexes of several page sizes", ConfigError): [
        (
            "a: .*16 tokens in .*, 32 tokens in",
            lambda kv, wide: worker({PREFIX: kv, WINDOW: wide.name}),
        ),
        (
            "host: .*16 tokens in .*, 32 tokens in",
            lambda kv, wide: host({PREFIX: kv, POINT: wide}),
        ),
    ],
    ("gave a router the spec of another cache", ConfigError): [
        ("'model' of the host .* found 'other'", lambda cache: host(cache, OTHER)),
        ("'model' of the host .* found 'other'", lambda cache: host({PREFIX: cache}, OTHER)),
    ],
}

test_refused = tried(TABLE)
