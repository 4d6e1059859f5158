"""Keys from an engine's hashes: a keyed permutation of 128 bits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lightcache import Cache, KeySpec
from lightcache.engine_keys import EngineKeys

COLLISION = Path(__file__).parents[3] / "shared" / "xxh3_collision.json"
SPEC = KeySpec(fingerprint="model/bf16/16", page_tokens=16, secret=b"a secret of tests")
KEYS = EngineKeys(SPEC)
NUMBERS = st.lists(st.integers(0, (1 << 128) - 1), max_size=40)
WORD = 1 << 64
PINNED = [
    [17953151974631879240, 5825830295794055102],
    [16726907320242813865, 15405629051377718980],
]
EDGES = [0, 1, WORD - 1, WORD, WORD << 63, (1 << 128) - 1, (1 << 32) - 1, 0xFFFFFFFF << 32]


def oracle(spec: KeySpec, number: int, salt: str | bytes = b"") -> int:
    """What the module's docstring says, with integers."""
    left, right = divmod(number, WORD)
    for turn in range(4):
        key = spec.derive(b"engine keys %d" % turn, salt)
        if turn in (1, 2):
            digest = hashlib.blake2b(key + right.to_bytes(8, "little"), digest_size=8).digest()
            mixed = int.from_bytes(digest, "little")
        else:
            a, b = (int.from_bytes(key[at : at + 16], "little") for at in (0, 16))
            mixed = (a * right + b) % (1 << 128) >> 64
        left, right = right, left ^ mixed
    return left * WORD + right


def numbers(keys: np.ndarray) -> list[int]:
    """Keys as integers of 128 bits: column 1 has the high word."""
    return [int(high) * WORD + int(low) for low, high in keys.tolist()]


def sha(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


@given(NUMBERS, st.binary(max_size=4))
def test_the_key_is_the_documented_permutation(hashes: list[int], salt: bytes) -> None:
    for some in (hashes, EDGES):
        keys = EngineKeys(SPEC, salt=salt).encode(some)
        assert numbers(keys) == [oracle(SPEC, number, salt) for number in some]
        assert keys.dtype == np.uint64
        assert keys.shape == (len(some), 2)
        assert keys.flags.c_contiguous


@given(NUMBERS)
def test_the_holder_of_the_secret_gets_the_hash_back(hashes: list[int]) -> None:
    back = KEYS.decode(KEYS.encode(hashes))
    assert back == [number.to_bytes(16, "big") for number in hashes]
    keys = np.array([(number % WORD, number // WORD) for number in hashes], np.uint64)
    assert (KEYS.encode(KEYS.decode(keys.reshape(-1, 2))) == keys.reshape(-1, 2)).all()


def test_each_form_of_a_hash_gives_its_key() -> None:
    digests = [sha(number) for number in range(9)]
    keys = KEYS.encode(digests)
    whole = [int.from_bytes(digest[:16], "big") for digest in digests]
    words = np.array([(number % WORD, number // WORD) for number in whole], np.uint64)
    forms: list[Any] = [
        [digest.hex() for digest in digests],
        [digest.hex().upper() for digest in digests],
        tuple(digest.hex()[:32] for digest in digests),
        [digest[:16] for digest in digests],
        [digest + digest for digest in digests],
        whole,
        words,
        np.asfortranarray(words),
        np.repeat(words, 2, axis=0)[::2],
    ]
    for form in forms:
        assert (KEYS.encode(form) == keys).all()
    assert [hash_.hex() for hash_ in KEYS.decode(keys)] == [each.hex()[:32] for each in digests]


def test_a_word_of_64_bits_is_the_same_as_an_integer() -> None:
    words = [5, WORD - 1, 0]
    assert (KEYS.encode(np.array(words, np.uint64)) == KEYS.encode(words)).all()
    assert (KEYS.encode(np.array([[0, 5, 9]], np.uint64)[0, 1:]) == KEYS.encode([5, 9])).all()


def test_no_hash_has_no_key() -> None:
    for none in ([], (), np.empty(0, np.uint64), np.empty((0, 2), np.uint64)):
        assert KEYS.encode(none).shape == (0, 2)
    assert KEYS.decode(np.empty((0, 2), np.uint64)) == []


def test_keys_stay_the_same_over_releases() -> None:
    assert KEYS.encode([7, 1 << 100]).tolist() == PINNED


@pytest.mark.parametrize(
    "other",
    [
        lambda: EngineKeys(dataclasses.replace(SPEC, secret=b"another of 16 bytes")),
        lambda: EngineKeys(dataclasses.replace(SPEC, fingerprint="model/fp8/16")),
        lambda: EngineKeys(dataclasses.replace(SPEC, page_tokens=32)),
        lambda: EngineKeys(dataclasses.replace(SPEC, weights="2")),
        lambda: EngineKeys(dataclasses.replace(SPEC, namespace="tenant")),
        lambda: EngineKeys(dataclasses.replace(SPEC, algorithm="sha256")),
        lambda: EngineKeys(SPEC, salt="tenant"),
        lambda: EngineKeys(SPEC, lora=b"adapter"),
    ],
)
def test_equal_hashes_of_others_are_other_pages(other: Callable[[], EngineKeys]) -> None:
    ours, theirs = KEYS.encode(range_of(300)), other().encode(range_of(300))
    assert not (ours == theirs).any()


def range_of(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64)


@pytest.mark.parametrize("bit", [0, 31, 63, 64, 127])
def test_each_bit_of_a_hash_changes_half_of_the_bits_of_its_key(bit: int) -> None:
    some = [int.from_bytes(sha(number)[:16], "big") for number in range(2000)]
    one = KEYS.encode(some)
    two = KEYS.encode([number ^ 1 << bit for number in some])
    changed = np.unpackbits((one ^ two).view(np.uint8), axis=1).mean(axis=0)
    assert changed.shape == (128,)
    assert abs(changed - 0.5).max() < 0.06  # five deviations of 2,000 throws of a coin


def test_hashes_in_order_spread_over_all_buckets() -> None:
    keys = KEYS.encode(range_of(1 << 15))
    for column in (0, 1):
        for shift in (0, 24, 48, 56):
            counts = np.bincount(keys[:, column] >> np.uint64(shift) & np.uint64(255), None, 256)
            assert counts.sum() == 1 << 15
            chi = ((counts - 128) ** 2 / 128).sum()
            assert 150 < chi < 370, (column, shift)  # 255 degrees: five deviations of 22.6
    assert len(np.unique(keys, axis=0)) == 1 << 15


@pytest.mark.shared
def test_collisions_of_an_engine_stay_within_their_salt() -> None:
    if not COLLISION.exists():
        pytest.skip("no file of constructed collisions beside the clone")
    pair = json.loads(COLLISION.read_text())
    a, b = (xxhash.xxh3_128_intdigest(np.array(pair[name], "<i4").tobytes()) for name in "ab")
    assert pair["a"] != pair["b"]
    assert (KEYS.encode([a]) == KEYS.encode([b])).all()  # inherited, as docs/guides/keys.md says
    assert not (KEYS.encode([a]) == EngineKeys(SPEC, salt="other").encode([b])).any()


def test_a_cache_finds_pages_by_an_engines_hashes(segment_name: str) -> None:
    made = {"page_bytes": 64, "page_tokens": 16, "fingerprint": "m", "secret": SPEC.secret}
    with Cache.create(segment_name, pages=8, **made) as cache:
        hashes = [sha(number).hex() for number in range(4)]
        tenant = cache.engine_keys(salt="tenant")
        with cache.reserve(cache.engine_keys().encode(hashes)) as new:
            new.publish()
        assert cache.peek(cache.engine_keys().encode(hashes)) == 4
        assert cache.peek(tenant.encode(hashes)) == 0
        with cache.match(cache.engine_keys().encode(hashes)) as hit:
            named = cache.engine_keys().decode(cache.index.keys_of(hit.pages))
        assert [name.hex() for name in named] == [each[:32] for each in hashes]
