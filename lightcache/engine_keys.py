"""Keys from the hashes of an engine that names its own pages.

SGLang and LightLLM find pages by hashes of their own, and events of engines name pages by them.
`EngineKeys` turns such a hash into a page key, and the holder of the secret turns the key back.

A hash is a big-endian number of 128 bits. Its key is a permutation of that number: four Feistel
rounds over its 64-bit halves, under keys derived from the secret and all fields of the `KeySpec`.
So a tenant cannot guess the key of a page, equal hashes of two models or tenants are different
pages, and keys collide exactly if the 128-bit numbers are equal: collisions of the engine's hashes
stay collisions.

    of each round, with left and right the high and low half:
        left, right = right, left ^ f(right)
    f of the inner two   BLAKE2b-64(key of 64 bytes, right as 8 little-endian bytes)
    f of the outer two   (a * right + b) mod 2**128 >> 64, with a, b: 16 little-endian bytes of the
                         key each

Two pseudorandom rounds between two of a strongly universal hash are as strong as four pseudorandom
ones (Naor and Reingold, On the construction of pseudorandom permutations, 1999), at half the cost.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightcache import _arguments
from lightcache.errors import ConfigError
from lightcache.hashing import Digest, Keys, KeySpec

EngineHashes: TypeAlias = Sequence[str] | Sequence[bytes] | Sequence[int] | NDArray[np.uint64]

Half: TypeAlias = NDArray[np.uint64]
_LOW, _SHIFT = np.uint64(0xFFFF_FFFF), np.uint64(32)
_BYTES = 16
_MAX_BYTES = 64  # SHA-512
_DO = "give hex digits, bytes, integers, or a uint64 array of shape (n,) or (n, 2)"


class EngineKeys:
    """Turns hashes of an engine into page keys of one `KeySpec`, and back. Thread-safe."""

    def __init__(self, spec: KeySpec, *, salt: str | bytes = b"", lora: bytes = b"") -> None:
        """
        Args:
            spec: the fingerprint must name what the engine's hashes leave out: the model, and how
                it hashes.
            salt, lora: as for `hash_pages`: where the engine's hashes do not cover them.

        Raises:
            ConfigError: salt or lora has the wrong type.
        """
        first, second, third, last = [
            spec.derive(b"engine keys %d" % number, salt, lora) for number in range(4)
        ]
        self._rounds = (_Multiply(first), _Hash(second), _Hash(third), _Multiply(last))

    def encode(self, hashes: EngineHashes) -> Keys:
        """Return the keys of an engine's hashes.

        Args:
            hashes: all of one kind and length. Longer ones than 128 bits are cut: the first 32 hex
                digits or 16 bytes count. A list of 32 to 128 hex digits each, of 16 to 64 bytes
                each, or of integers of 0 to 2**128 - 1 (a signed one of 64 bits: `h % 2**64`); or a
                uint64 array, of shape (n,), or (n, 2) with columns (low, high).

        Returns:
            shape (n, 2), uint64, as from `hash_pages`.

        Cost: 0.1 ms a call and 1.4 us a hash. Never blocks.

        Raises:
            ConfigError: another type, length or range, or hashes of several kinds or lengths.
        """
        left, right = _halves(hashes)
        for mix in self._rounds:
            left, right = right, left ^ mix(right)
        return _table(right, left)

    def decode(self, keys: Keys) -> list[bytes]:
        """Return the hashes that `encode` was given, as 16 big-endian bytes each.

        `hash.hex()` is the first half of a SHA-256 in hex, `int.from_bytes(hash, "big")` the
        integer. A key that `encode` did not make gives bytes without a meaning. Cost: as `encode`.

        Raises:
            ConfigError: keys are no C-contiguous uint64 array of shape (n, 2).
        """
        _arguments.keys(keys)
        right, left = np.ascontiguousarray(keys.T)
        for mix in reversed(self._rounds):
            left, right = right ^ mix(left), left
        whole: list[bytes] = _table(left, right).astype(">u8").view("V16").ravel().tolist()
        return whole


class _Hash:
    """Inner rounds."""

    def __init__(self, key: bytes) -> None:
        # The key stands first in the one block that is hashed; given as `key=` it would be a block
        # of its own, at half the speed. All inputs have one length, and BLAKE2b cannot be extended.
        self._start: Callable[[], Digest] = hashlib.blake2b(key, digest_size=8).copy

    def __call__(self, half: Half) -> Half:
        start = self._start
        rows = half.astype("<u8", copy=False).view("V8").tolist()
        # `update` returns None; all in one comprehension: 0.5 us a row, nearly all in BLAKE2b.
        digests = [(state := start()).update(row) or state.digest() for row in rows]
        return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False)


class _Multiply:
    """Outer rounds."""

    def __init__(self, key: bytes) -> None:
        self._a_low, self._a_high, self._b_low, self._b_high = np.frombuffer(key, "<u8", 4).astype(
            np.uint64
        )

    def __call__(self, half: Half) -> Half:
        # The high word of half * a_low by 32-bit digits; no sum of these reaches 2**64.
        low, high = half & _LOW, half >> _SHIFT
        a_low, a_high = self._a_low & _LOW, self._a_low >> _SHIFT
        middle = high * a_low + (low * a_low >> _SHIFT)
        carried = low * a_high + (middle & _LOW)
        product = high * a_high + (middle >> _SHIFT) + (carried >> _SHIFT)
        carry = half * self._a_low + self._b_low < self._b_low
        mixed: Half = product + half * self._a_high + self._b_high + carry
        return mixed


def _table(first: Half, second: Half) -> Keys:
    table = np.empty((len(first), 2), np.uint64)
    table[:, 0], table[:, 1] = first, second
    return table


def _halves(hashes: EngineHashes) -> tuple[Half, Half]:
    """(high, low) words of hashes of any kind."""
    if isinstance(hashes, np.ndarray):
        if hashes.dtype != np.uint64 or hashes.shape[1:] not in ((), (2,)) or not hashes.ndim:
            raise ConfigError(f"hashes: found an array of {hashes.dtype} {hashes.shape}; {_DO}")
        if hashes.ndim == 1:
            return np.zeros(len(hashes), np.uint64), np.ascontiguousarray(hashes)
        low, high = np.ascontiguousarray(hashes.T)
        return high, low
    if isinstance(hashes, (str, bytes)) or not isinstance(hashes, Sequence):
        raise ConfigError(f"hashes: found one {type(hashes).__name__}; {_DO}, in a list")
    high, low = np.frombuffer(_joined(hashes), ">u8").reshape(-1, 2).T.astype(np.uint64, order="C")
    return high, low


def _joined(hashes: Sequence[Any]) -> bytes:
    """The first 128 bits of each hash of a list."""
    kinds = set(map(type, hashes))
    if not kinds:
        return b""
    if len(kinds) > 1 or not kinds <= {str, bytes, int}:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise ConfigError(f"hashes: found a list of {names}; {_DO}, all of one kind")
    if kinds == {int}:
        try:
            return b"".join([number.to_bytes(_BYTES, "big") for number in hashes])
        except OverflowError:
            wrong = next(number for number in hashes if not 0 <= number < 1 << 128)
            raise ConfigError(
                f"hashes: expected integers of 0 to 2**128 - 1, found {wrong}; of a signed "
                "64-bit hash give h % 2**64"
            ) from None
    unit = 2 if kinds == {str} else 1
    sizes = sorted(set(map(len, hashes)))
    if len(sizes) > 1 or sizes[0] % unit or not _BYTES <= sizes[0] // unit <= _MAX_BYTES:
        raise ConfigError(
            f"hashes: expected all of one length, of {_BYTES * unit} to {_MAX_BYTES * unit} "
            f"{'hex digits' if unit == 2 else 'bytes'}, found lengths {sizes[:4]}; give shorter "
            "ones as integers"
        )
    size = sizes[0] // unit
    whole = _unhexed(hashes, size) if unit == 2 else b"".join(hashes)
    return np.frombuffer(whole, f"V{size}").view(np.uint8).reshape(-1, size)[:, :_BYTES].tobytes()


def _unhexed(hashes: Sequence[str], size: int) -> bytes:
    try:
        whole = bytes.fromhex("".join(hashes))
        if len(whole) == size * len(hashes):  # less: `fromhex` skips spaces
            return whole
    except ValueError:
        pass
    digits = set("0123456789abcdefABCDEF")
    wrong = next(number for number, text in enumerate(hashes) if set(text) - digits)
    raise ConfigError(f"hashes: number {wrong} has a character that is no hex digit; {_DO}")
