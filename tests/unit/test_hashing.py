"""Page keys: what they depend on, that every split gives the same, what is refused."""

import dataclasses
import hashlib
import hmac
import itertools
import json
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from lightcache.errors import ConfigError
from lightcache.hashing import (
    KeySpec,
    PageHasher,
    hash_pages,
    load_or_create_secret,
    matchable_pages,
    pack_tokens,
)

ALGORITHMS = ["xxh3_128", "blake2b", "sha256"]
SECRET = bytes(range(32))
COLLISION = Path(__file__).parents[3] / "shared" / "xxh3_collision.json"

token_lists = st.lists(st.integers(0, 2**32 - 2), max_size=60)


def spec(**changes):
    fields = {"fingerprint": "tiny/bf16", "page_tokens": 4, "secret": SECRET} | changes
    return KeySpec(**fields)


def rows(keys):
    return [tuple(row) for row in keys.tolist()]


def every_page(key_spec, tokens, **arguments):
    return hash_pages(key_spec, tokens, leave_one=False, **arguments)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("fingerprint", ["short", "as long as that of a model " * 8])
@pytest.mark.parametrize("tokens", [0, 3, 4, 7, 299])
def test_packed_tokens_have_the_same_keys(algorithm, fingerprint, tokens):
    by = spec(algorithm=algorithm, fingerprint=fingerprint)
    ids = list(range(1000, 1000 + tokens))
    for how in ({}, {"salt": "s"}, {"salt": b"s", "lora": b"l"}):
        found = by.hash_packed(pack_tokens(ids), **how)
        assert rows(found) == rows(hash_pages(by, ids, **how))
        assert found.shape == (tokens // 4, 2)


@pytest.mark.parametrize("place", [0, 31, 63, 64])
def test_a_packed_mark_is_no_token(place):
    data = bytearray(4 * 65)
    data[4 * place : 4 * place + 4] = b"\xff" * 4
    refused(ConfigError, f"token {place} is", spec(fingerprint="x" * 300).hash_packed, bytes(data))


# ---- the definition, written a second time ----


def sized(data):
    return struct.pack("<Q", len(data)) + data


def oracle(key_spec, tokens, salt=b"", lora=b"", extra=None):
    """One digest a page over the whole prefix, put together by hand."""
    key = hashlib.blake2b(
        key_spec.secret, digest_size=64, person=key_spec.algorithm.encode()
    ).digest()
    data = b"lightcache key 1"
    for name in ("algorithm", "fingerprint", "weights", "namespace"):
        data += sized(getattr(key_spec, name).encode())
    data += struct.pack("<Q", key_spec.page_tokens) + sized(salt) + sized(lora)
    result = []
    size = key_spec.page_tokens
    for page in range(len(tokens) // size):
        if extra and page in extra:
            data += b"\xff\xff\xff\xff" + sized(extra[page])
        data += struct.pack(f"<{size}I", *tokens[page * size : (page + 1) * size])
        if key_spec.algorithm == "xxh3_128":
            seed = hashlib.blake2b(key_spec.secret, digest_size=8, person=b"xxh3 seed").digest()
            number = xxhash.xxh3_128_intdigest(key + data, int.from_bytes(seed, "little"))
        elif key_spec.algorithm == "blake2b":
            number = int.from_bytes(hashlib.blake2b(data, digest_size=16, key=key).digest(), "big")
        else:
            number = int.from_bytes(hmac.digest(key, data, "sha256")[:16], "big")
        result.append((number & (2**64 - 1), number >> 64))
    return result


@given(
    tokens=token_lists,
    algorithm=st.sampled_from(ALGORITHMS),
    size=st.integers(1, 9),
    salt=st.binary(max_size=9),
    lora=st.binary(max_size=9),
    extra=st.dictionaries(st.integers(0, 12), st.binary(max_size=9), max_size=4),
)
def test_keys_are_the_digests_of_the_documented_bytes(tokens, algorithm, size, salt, lora, extra):
    key_spec = spec(algorithm=algorithm, page_tokens=size)
    keys = every_page(key_spec, tokens, salt=salt, lora=lora, extra=extra)
    assert rows(keys) == oracle(key_spec, tokens, salt, lora, extra)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("name", ["m", "a model " * 11])
def test_long_prompts_are_hashed_as_short_ones(size, name):
    """The core hashes them; xxhash the rest of a growing one."""
    key_spec = spec(page_tokens=size, fingerprint=name)
    tokens = [number * 7919 % 128_000 for number in range(80 * size + 1)]
    assert rows(every_page(key_spec, tokens, salt="s", lora=b"l")) == oracle(
        key_spec, tokens, b"s", b"l"
    )
    hasher = PageHasher(key_spec)
    parts = [
        hasher.update(part) for part in (tokens[:1], tokens[1 : 70 * size], tokens[70 * size :])
    ]
    assert rows(np.concatenate(parts)) == oracle(key_spec, tokens)
    assert hasher.tokens == len(tokens)


@settings(max_examples=20)
@given(cut=st.integers(64, 80), extra=st.dictionaries(st.integers(0, 82), st.binary(max_size=9)))
def test_an_extra_in_a_long_prompt(cut, extra):
    tokens = list(range(4 * 80))
    hasher = PageHasher(spec())
    parts = [hasher.update(tokens[: 4 * cut], extra=extra), hasher.update(tokens[4 * cut :])]
    assert rows(np.concatenate(parts)) == oracle(spec(), tokens, extra=extra)


def test_keys_stay_the_same_over_releases():
    """Storage keeps keys. Should this ever have to change, change FORMAT as well."""
    found = {}
    for name in ALGORITHMS:
        [(low, high)] = rows(every_page(spec(algorithm=name), range(4)))
        found[name] = f"{high:016x}{low:016x}"
    assert found == {
        "xxh3_128": "744aae4586bf11a9415412c31e634136",
        "blake2b": "0ca545661946a4ff470d6103d96928ce",
        "sha256": "42dbc6697b6247f513c474549343e387",
    }


def test_shape_dtype_and_layout():
    keys = hash_pages(spec(), range(103))
    assert keys.shape == (25, 2)
    assert keys.dtype == np.uint64
    assert keys.dtype.isnative
    assert keys.flags.c_contiguous
    assert keys.flags.writeable
    assert hash_pages(spec(), []).shape == (0, 2)
    assert hash_pages(spec(), []).dtype == np.uint64


# ---- splits and prefixes ----


@given(
    tokens=token_lists,
    cuts=st.lists(st.integers(0, 60), max_size=6),
    algorithm=st.sampled_from(ALGORITHMS),
    extra=st.dictionaries(st.integers(0, 14), st.binary(max_size=9), max_size=4),
)
def test_any_split_gives_the_same_keys(tokens, cuts, algorithm, extra):
    key_spec = spec(algorithm=algorithm)
    hasher = PageHasher(key_spec, salt="s", lora=b"l")
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    parts = [hasher.update([], extra=extra)]
    parts += [hasher.update(tokens[a:b]) for a, b in itertools.pairwise(edges)]
    whole = every_page(key_spec, tokens, salt="s", lora=b"l", extra=extra)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert hasher.pages == len(whole)
    assert hasher.tokens == len(tokens)


@pytest.mark.parametrize("algorithm", ["xxh3_128", "blake2b", "sha256"])
def test_appended_tokens_get_the_keys_of_the_whole_as_bytes(algorithm):
    one = spec(algorithm=algorithm)
    hasher, whole = PageHasher(one), list(range(21))
    parts = [whole[:3], whole[3:4], whole[4:9], [], whole[9:]]
    packed = [key for part in parts for key in hasher.append(part)]
    assert packed == [key.tobytes() for key in every_page(one, whole)]


def test_the_mark_across_two_tokens_is_none():
    tokens = [0xFFFF_0000, 0x0000_FFFF, 1, 2]
    keys = PageHasher(spec()).update(tokens)
    np.testing.assert_array_equal(keys, every_page(spec(), np.array(tokens)))


def test_the_tail_is_a_copy():
    tokens = np.arange(6, dtype=np.uint32)
    hasher = PageHasher(spec())
    hasher.update(tokens)
    tokens[:] = 99
    np.testing.assert_array_equal(hasher.update([6, 7]), every_page(spec(), range(8))[1:])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(algorithm):
    key_spec = spec(algorithm=algorithm)
    long = every_page(key_spec, range(80))
    assert len(set(rows(long))) == 20
    for length in range(80):
        np.testing.assert_array_equal(every_page(key_spec, range(length)), long[: length // 4])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_changed_token_changes_its_page_and_all_later_ones(algorithm):
    key_spec = spec(algorithm=algorithm)
    before, after = list(range(40)), list(range(40))
    after[17] = 999
    same = every_page(key_spec, before) == every_page(key_spec, after)
    assert same.all(axis=1).tolist() == [True] * 4 + [False] * 6


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_one_token_is_left_to_compute(tokens, pages):
    assert matchable_pages(tokens, 4) == pages
    keys = hash_pages(spec(), range(tokens), leave_one=True)
    np.testing.assert_array_equal(keys, every_page(spec(), range(tokens))[:pages])
    np.testing.assert_array_equal(
        hash_pages(spec(), range(tokens)), every_page(spec(), range(tokens))
    )
    assert len(keys) == pages
    assert len(every_page(spec(), range(tokens))) == tokens // 4


# ---- everything that must keep keys apart ----


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_input_counts(algorithm):
    base = spec(algorithm=algorithm)
    variants = [
        (base, {}),
        (spec(algorithm=algorithm, fingerprint="tiny/fp8"), {}),
        (spec(algorithm=algorithm, weights="2"), {}),
        (spec(algorithm=algorithm, namespace="2"), {}),
        (spec(algorithm=algorithm, secret=bytes(32)), {}),
        (spec(algorithm=algorithm, secret=SECRET + b"\0"), {}),
        (base, {"salt": b"2"}),
        (base, {"lora": b"2"}),
        (base, {"extra": {0: b"2"}}),
        (base, {"extra": {0: b""}}),
        (base, {"extra": {0: b"2\0"}}),
        # the same bytes in a neighbouring field
        (spec(algorithm=algorithm, fingerprint="tiny", weights="/bf16"), {}),
        (spec(algorithm=algorithm, weights="2", namespace="2"), {}),
        (base, {"salt": b"2", "lora": b"2"}),
        (base, {"salt": b"22"}),
        (base, {"lora": b"22"}),
    ]
    keys = [rows(every_page(key_spec, range(4), **inputs))[0] for key_spec, inputs in variants]
    assert len(set(keys)) == len(keys)


def test_an_extra_cannot_be_written_as_tokens():
    # mark, length 4 and four bytes, then page 1, against a page that would spell the same
    tokens = [*range(4), *range(4)]
    with_extra = every_page(spec(), tokens, extra={1: struct.pack("<I", 9)})
    with pytest.raises(ConfigError, match="token 4 is 4294967295"):
        every_page(spec(), [0, 1, 2, 3, 2**32 - 1, 4, 0, 9])
    assert len(with_extra) == 2


def test_salt_as_text_is_its_utf8():
    np.testing.assert_array_equal(
        hash_pages(spec(), range(9), salt="ü"), hash_pages(spec(), range(9), salt=b"\xc3\xbc")
    )


# ---- tokens in every form ----


@pytest.mark.parametrize(
    "dtype",
    ["i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8"],
)
def test_the_dtype_of_tokens_does_not_matter(dtype):
    expected = hash_pages(spec(), list(range(100)))
    tokens = np.arange(100).astype(dtype)
    np.testing.assert_array_equal(hash_pages(spec(), tokens), expected)
    tokens.flags.writeable = False
    np.testing.assert_array_equal(hash_pages(spec(), tokens), expected)
    strided = np.repeat(tokens, 2)[::2]
    np.testing.assert_array_equal(hash_pages(spec(), strided), expected)


@pytest.mark.parametrize(
    "tokens",
    [
        [-1, 2, 3, 4],
        [2**32 - 1, 2, 3, 4],
        [2**32, 2, 3, 4],
        [2**64, 2, 3, 4],
        [-(2**70), 2, 3, 4],
        np.array([0, -1], np.int8),
        np.array([0, -1], np.int32),
        np.array([0, -1], ">i8"),
        np.array([0, 2**32 - 1], np.uint32),
        np.array([0, 2**40], np.uint64),
        np.zeros((4, 4), np.int32),
        np.zeros((), np.int32),
        np.zeros(4, np.float32),
        np.zeros(4, bool),
        [1.0, 2.0],
        [[1, 2], [3]],
        ["a", "b"],
        "abcd",
        b"abcd",
        None,
        7,
    ],
)
def test_what_is_no_token_is_refused(tokens):
    hasher = PageHasher(spec())
    hasher.update([0, 1, 2])
    for call in (lambda: hash_pages(spec(), tokens), lambda: hasher.update(tokens)):
        refused(ConfigError, "token", call)
    np.testing.assert_array_equal(hasher.update([3]), every_page(spec(), range(4)))


@pytest.mark.parametrize("extra", [{0: b"late"}, {-1: b""}, {2: 5}, {2: None}, {"2": b""}])
def test_a_refused_extra_changes_nothing(extra):
    hasher = PageHasher(spec())
    hasher.update(range(5))
    refused(ConfigError, "extra", hasher.update, [5, 6, 7], extra={1: b"good"} | extra)
    np.testing.assert_array_equal(hasher.update([5, 6, 7]), every_page(spec(), range(8))[1:])


def test_an_extra_given_again_is_replaced():
    hasher = PageHasher(spec())
    hasher.update([0], extra={0: b"old"})
    keys = hasher.update([1, 2, 3], extra={0: b"new"})
    np.testing.assert_array_equal(keys, every_page(spec(), range(4), extra={0: b"new"}))


# ---- the specification ----


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": ""},
        {"fingerprint": b"tiny"},
        {"weights": 1},
        {"namespace": None},
        {"secret": b"short"},
        {"secret": bytes(1025)},
        {"secret": "x" * 32},
        {"page_tokens": 0},
        {"page_tokens": True},
        {"page_tokens": 4.0},
        {"page_tokens": 2**20 + 1},
        {"algorithm": "md5"},
    ],
)
def test_an_unusable_spec_is_refused(changes):
    refused(ConfigError, next(iter(changes)), spec, **changes)


@pytest.mark.parametrize("arguments", [{"salt": 5}, {"lora": 5}, {"salt": None}])
def test_salt_and_lora_must_be_bytes(arguments):
    refused(ConfigError, next(iter(arguments)), hash_pages, spec(), range(9), **arguments)


def test_spec_is_frozen_and_hides_its_secret():
    key_spec = spec(secret=b"do not print me!")
    hash_pages(key_spec, range(9))
    assert "do not print" not in repr(key_spec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        key_spec.weights = "2"


def test_the_seed_of_xxh3_is_never_zero(monkeypatch):
    class Zero:
        def digest(self):
            return bytes(8)

    monkeypatch.setattr("lightcache.hashing.hashlib.blake2b", lambda *_, **__: Zero())
    assert spec()._xxh3_seed == 1


@pytest.mark.shared
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_constructed_collisions_of_plain_xxh3_do_not_collide_here(algorithm):
    if not COLLISION.exists():
        pytest.skip("no file of constructed collisions beside the clone")
    pair = json.loads(COLLISION.read_text())
    a, b = (np.array(pair[name], "<i4") for name in "ab")
    assert a.tolist() != b.tolist()
    for prefix in (b"", bytes(1024), b"a secret that is merely hashed!!" * 32):
        digests = {xxhash.xxh3_128_digest(prefix + block.tobytes()) for block in (a, b)}
        assert len(digests) == 1

    # in every alignment of the page with the kilobytes that the construction needs
    for padding in range(0, 256, 4):
        key_spec = spec(algorithm=algorithm, page_tokens=256, fingerprint="f" * (1 + padding))
        for pages in range(3):
            before = np.zeros(256 * pages, "<i4")
            one, two = (rows(every_page(key_spec, [*before, *block])) for block in (a, b))
            assert one[:-1] == two[:-1]
            assert one[-1] != two[-1]


# ---- the file of the secret ----


def test_a_secret_is_made_once(tmp_path):
    path = tmp_path / "new" / "secret"
    first = load_or_create_secret(path)
    assert len(first) == 32
    assert load_or_create_secret(str(path)) == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["secret"]
    assert load_or_create_secret(tmp_path / "other") != first


def test_of_many_creators_one_wins(tmp_path):
    barrier = threading.Barrier(8)
    found = []

    def create():
        barrier.wait()
        found.append(load_or_create_secret(tmp_path / "secret"))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert set(found) == {(tmp_path / "secret").read_bytes()}
    assert os.listdir(tmp_path) == ["secret"]
