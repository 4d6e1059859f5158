"""Page keys: they identify the KV of a prefix of tokens.

The key of page i is the digest of everything that determines the content of that page: a seed
block (model, weights, namespace, page size, tenant salt, adapter), all tokens from position 0 to
the end of the page, and the digests of images and the like at the pages they touch. So equal keys
mean equal prefixes, and a chain of keys needs no links.

The hashed bytes can be parsed in one way only:

    seed block    format tag, then each field as its length (u64, little-endian) and its bytes
    each page     mark FFFFFFFF, length (u64) and bytes of `extra`: only where one was given
                  the page's tokens, each a little-endian u32; no token is FFFFFFFF

Keys are an array of shape (n, 2) and dtype uint64, C-contiguous. A digest is a big-endian number
of 128 bits: column 0 has its low word, column 1 its high word, for every algorithm.

Naming KV blocks by chained hashes comes from vLLM. `KeySpec` says how to choose the algorithm,
since collisions of xxh3 with a public seed can be constructed.
"""

import contextlib
import errno
import hashlib
import hmac
import operator
import os
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightcache import _arguments, layout
from lightcache.errors import ConfigError, PermissionDenied, StorageError
from lightcache.shm import owners
from lightcache.shm.codes import check

Algorithm: TypeAlias = Literal["xxh3_128", "blake2b", "sha256"]
Keys: TypeAlias = NDArray[np.uint64]
Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

FORMAT = b"lightcache key 1"  # changes with any change of the hashed bytes
MARK = 0xFFFF_FFFF  # starts an extra; it is the only u32 that is not a token
_MARK_BYTES = struct.pack("<I", MARK)
SECRET_BYTES = 32
_MIN_SECRET, _MAX_SECRET = 16, 1024
_FEW = 64  # tokens that are cheaper packed one by one than as an array
_MANY = 64  # pages that are cheaper hashed by the core than one by one
_STRIPE = 64  # bytes of a text after its head that the core wants once more
_SHORTEST = 241  # bytes that the core hashes: fewer than _MANY pages end before, for any spec
# Packers by number of tokens; a format given as text is looked up at each call.
_PACKED = [struct.Struct(f"<{n}I").pack for n in range(_FEW + 1)]
_NO_SALT = bytes(16)  # neither salt nor adapter: two lengths of 0
_NO_KEYS: Keys = np.empty((0, 2), np.uint64)


class Digest(Protocol):
    # `update` always returns None; the hot loop relies on that (`update(row) or digest()`).
    def update(self, data: bytes | memoryview, /) -> bytes | None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> "Digest": ...


@dataclass(frozen=True)
class KeySpec:
    """The parameters that all keys of one namespace share.

    Two caches share entries exactly if every field is equal. Storage that outlives a segment must
    keep the secret.

    The default algorithm is fast but not cryptographic. With its default seed, 0, xxh3 mixes the
    data with public constants, so colliding pages can be constructed after any prefix. Our seed is
    derived from the secret, is never 0, and changes those constants. This prevents collisions
    computed in advance, but does not protect against tenants that can learn keys. If tenants do not
    trust each other choose `blake2b` (keyed) or `sha256` (HMAC), both truncated to 128 bits.

    Raises:
        ConfigError: a field has the wrong type, is empty but must not be, or is out of range.
    """

    fingerprint: str  # model, KV dtype, geometry, state layout, speculative scheme
    page_tokens: int
    secret: bytes = field(repr=False)  # at least 16 bytes; see load_or_create_secret
    weights: str = ""  # version of the weights; changes with every online update
    namespace: str = ""
    algorithm: Algorithm = "xxh3_128"

    def __post_init__(self) -> None:
        for name in ("fingerprint", "weights", "namespace"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a str, not {getattr(self, name)!r}")
        if not self.fingerprint:
            raise ConfigError("fingerprint is empty; name model, KV dtype and geometry in it")
        if not isinstance(self.secret, bytes):
            raise ConfigError(f"secret must be bytes, not {type(self.secret).__name__}")
        if not _MIN_SECRET <= len(self.secret) <= _MAX_SECRET:
            raise ConfigError(
                f"secret has {len(self.secret)} bytes, expected {_MIN_SECRET} to {_MAX_SECRET}; "
                "load_or_create_secret(path) makes a good one"
            )
        # type(), not isinstance: bool is an int
        if type(self.page_tokens) is not int or not 1 <= self.page_tokens <= 1 << 20:
            raise ConfigError(f"page_tokens must be an int of 1 to 2**20, not {self.page_tokens!r}")
        if self.algorithm not in get_args(Algorithm):
            raise ConfigError(
                f"algorithm {self.algorithm!r} is unknown; use one of {get_args(Algorithm)}"
            )

    @cached_property
    def _key(self) -> bytes:
        """The secret at a fixed length, derived for each algorithm: one reveals nothing about
        another."""
        person = self.algorithm.encode()
        return hashlib.blake2b(self.secret, digest_size=64, person=person).digest()

    @cached_property
    def _xxh3_seed(self) -> int:
        """64 bits of the secret, never 0: with seed 0 xxh3 uses public constants."""
        seed = hashlib.blake2b(self.secret, digest_size=8, person=b"xxh3 seed").digest()
        return int.from_bytes(seed, "little") or 1

    @cached_property
    def _seed_prefix(self) -> bytes:
        """The part of the seed block that is the same for every call."""
        fields = [self.algorithm, self.fingerprint, self.weights, self.namespace]
        encoded = [_sized(text.encode("utf-8", "surrogatepass")) for text in fields]
        return b"".join([FORMAT, *encoded, struct.pack("<Q", self.page_tokens)])

    def derive(self, person: bytes, salt: str | bytes = b"", lora: bytes = b"") -> bytes:
        """Return 64 bytes that depend on the secret, all other fields, `salt` and `lora`: a key for
        the purpose that `person` names, at most 16 bytes.

        Raises:
            ConfigError: salt or lora has the wrong type.
        """
        block = self._seed_block(salt, lora)
        return hashlib.blake2b(block, key=self._key, person=person).digest()

    def hash_packed(self, tokens: bytes, *, salt: str | bytes = b"", lora: bytes = b"") -> Keys:
        """`hash_pages` of tokens in the format of `pack_tokens`, in little more time than the core
        hashes: 0.05 us a page of 16 tokens and 8 us a call.

        Raises:
            ConfigError: as `hash_pages`.
        """
        row = 4 * self.page_tokens
        pages = len(tokens) // row
        if pages and _MARK_BYTES not in tokens[pages * row :]:
            head, seed = self._head(salt, lora)
            if head and len(head) + row >= _SHORTEST:
                start = head + tokens[:_STRIPE]
                try:
                    return _core_keys(start, len(head), tokens, row, pages, seed)
                except ConfigError:
                    pass  # `hash_pages` says which token is none
        return hash_pages(self, np.frombuffer(tokens, "<u4"), salt=salt, lora=lora)

    def _seed_block(self, salt: str | bytes, lora: bytes) -> bytes:
        if type(salt) is bytes and type(lora) is bytes and not salt and not lora:
            own = _NO_SALT
        else:
            own = _sized(_as_bytes("salt", salt)) + _sized(_as_bytes("lora", lora))
        return self._seed_prefix + own

    def _head(self, salt: str | bytes, lora: bytes) -> tuple[bytes, int]:
        """Return what stands before the tokens and the seed of xxh3, if the core can hash them:
        else empty."""
        if self.algorithm != "xxh3_128":
            return b"", 0
        # the seed carries 64 bits of the secret; the first block of data carries all of it
        return self._key + self._seed_block(salt, lora), self._xxh3_seed

    def _start(self, salt: str | bytes, lora: bytes) -> tuple[Digest, bytes, int]:
        """Return a digest that has hashed the key and the seed block, and what `_head` returns."""
        head, seed = self._head(salt, lora)
        if head:
            return xxhash.xxh3_128(head, seed=seed), head, seed
        block = self._seed_block(salt, lora)
        state: Digest
        if self.algorithm == "blake2b":
            state = hashlib.blake2b(block, digest_size=16, key=self._key)
        else:
            state = hmac.new(self._key, block, "sha256")
        return state, b"", 0


def matchable_pages(tokens: int, page_tokens: int) -> int:
    """Return how many pages of a prompt of `tokens` tokens may come from the cache.

    At least one token must be computed, because the first output token needs its logits. So a
    prompt that fills p pages exactly has p - 1.
    """
    return max(tokens - 1, 0) // page_tokens


def hash_pages(
    spec: KeySpec,
    tokens: Tokens,
    *,
    salt: str | bytes = b"",
    lora: bytes = b"",
    extra: Mapping[int, bytes] | None = None,
    leave_one: bool = False,
) -> Keys:
    """Return the keys of the complete pages of `tokens`.

    Args:
        tokens: one-dimensional integers of 0 to 2**32 - 2: an array of any integer dtype or a
            sequence. An array is converted once; converting a list takes ten times as long as
            hashing.
        salt: separates tenants; text is encoded as UTF-8.
        lora: digest of the adapter in use; empty: none.
        extra: by page number, other data that the page's content depends on, such as the digests of
            images whose placeholders it holds. If two items touch a page, concatenate their
            digests. An extra changes the keys of its page and of all later ones. An extra of a page
            without a key has no effect.
        leave_one: True: no key for a page that would leave no token to compute, for matching (see
            `matchable_pages`). False: a key for every complete page, for publishing computed pages.

    Returns:
        shape (pages, 2), uint64, columns (low, high). The keys of a shorter prompt are a prefix of
        those of a longer one.

    Cost: 14 us a call, and 0.04 us a page of 64 tokens with xxh3_128 if there are more than a few.
    131,072 tokens take 0.28 ms as int32, 0.37 as int64; with blake2b 1.6 ms, with sha256 2 ms
    (2-core x86). Never blocks.

    Raises:
        ConfigError: tokens or another argument cannot be encoded.
    """
    canonical = _canonical(tokens)
    if leave_one:
        pages = matchable_pages(canonical.size, spec.page_tokens)
        canonical = canonical[: pages * spec.page_tokens]
    return PageHasher(spec, salt=salt, lora=lora).extend(canonical, extra=extra)


class PageHasher:
    """Keys of a growing sequence, for example during decoding.

    The keys of all `update` calls together equal those of one `hash_pages`, for any split of the
    tokens. Holds less than one page of tokens. Not thread-safe.
    """

    def __init__(self, spec: KeySpec, *, salt: str | bytes = b"", lora: bytes = b"") -> None:
        """Raises: ConfigError: salt or lora has the wrong type."""
        self.spec = spec
        self._state, self._head, self._seed = spec._start(salt, lora)
        self._pages = 0
        self._row = 4 * spec.page_tokens
        self._tail = b""
        self._pending: dict[int, bytes] = {}

    def copy(self) -> "PageHasher":
        """Return an independent hasher with the same state. About 1 us."""
        copied: PageHasher = object.__new__(PageHasher)
        copied.__dict__.update(self.__dict__)
        copied._state, copied._pending = self._state.copy(), dict(self._pending)
        return copied

    @property
    def pages(self) -> int:
        """Pages that have a key so far."""
        return self._pages

    @property
    def tail(self) -> bytes:
        """Tokens after the last page that has a key, in the format of `pack_tokens`."""
        return self._tail

    @property
    def tokens(self) -> int:
        """Tokens appended so far, including the incomplete page."""
        return self._pages * self.spec.page_tokens + len(self._tail) // 4

    def update(self, tokens: Tokens, *, extra: Mapping[int, bytes] | None = None) -> Keys:
        """Append tokens; return the keys of the pages they complete, shape (n, 2), n possibly 0.

        `extra` is as for `hash_pages`, by page number from the start of the sequence. It is kept
        until its page is complete; a later value replaces it. Appending a few generated tokens as a
        list takes 1 to 2 us.

        Raises:
            ConfigError: tokens cannot be encoded, or an extra is for a page that already has its
                key. The hasher is then unchanged.
        """
        if extra is None and type(tokens) is list and len(tokens) <= _FEW:
            return _keys_of(self.append(tokens))
        return self.extend(_canonical(tokens), extra=extra)

    def append(self, tokens: list[int]) -> list[bytes]:
        """`update` for step-by-step generation. Returns each key as its 16 bytes in an array of
        keys. Takes half a microsecond if a few tokens complete no page, else 1 us.

        Raises:
            ConfigError: as `update`.
        """
        few = _few(tokens)
        return self.append_packed(_canonical(tokens).tobytes() if few is None else few)

    def append_packed(self, tokens: bytes) -> list[bytes]:
        """`append` for tokens from `pack_tokens`."""
        data, row = self._tail + tokens, self._row
        if len(data) < row:
            self._tail = data
            return []
        if self._pending or len(data) >= 2 * row:
            return [key.tobytes() for key in self.extend(np.frombuffer(tokens, "<u4"))]
        state = self._state
        state.update(data[:row])
        self._tail = data[row:]
        self._pages += 1
        return [_key_bytes(state.digest())]

    def extend(
        self, tokens: NDArray[np.uint32], *, extra: Mapping[int, bytes] | None = None
    ) -> Keys:
        """`update` for tokens that were checked: contiguous, little-endian, each a token.

        Raises:
            ConfigError: an extra is for a page that already has its key. The hasher is then
                unchanged.
        """
        blocks = _blocks(extra, self._pages) if extra else None
        if self._tail:
            tokens = np.concatenate((np.frombuffer(self._tail, "<u4"), tokens))
        size = self.spec.page_tokens
        pages = tokens.size // size
        if blocks:
            self._pending.update(blocks)
        if self._pages == 0 and pages >= _MANY and self._head and not self._pending:
            self._tail, tokens = tokens[pages * size :].tobytes(), tokens[: pages * size]
            self._pages = pages
            return self._chain(tokens)
        # Splitting by a void dtype in C: 35 ns a page, against 100 for slices of a memoryview.
        rows: list[bytes] = tokens[: pages * size].view(f"V{4 * size}").tolist()
        if self._pending:
            for page in [page for page in self._pending if page < self._pages + pages]:
                rows[page - self._pages] = self._pending.pop(page) + rows[page - self._pages]
        self._tail = tokens[pages * size :].tobytes()
        self._pages += pages
        return _digest_rows(self._state, rows)

    def _chain(self, tokens: NDArray[np.uint32]) -> Keys:
        """The keys of whole pages from the first on, hashed by the core, but for those that end
        before what it hashes."""
        head, row, state = self._head, self._row, self._state
        keys: Keys = np.empty((4 * tokens.size // row, 2), np.uint64)
        short = max(0, (_SHORTEST - 1 - len(head)) // row)
        first = short * self.spec.page_tokens
        rest = tokens[first:]
        if short:
            keys[:short] = _digest_rows(state, tokens[:first].view(f"V{row}").tolist())
        start = head + tokens[: first + _STRIPE // 4].tobytes()
        before, where = len(head) + short * row, rest.ctypes.data
        keys[short:] = _core_keys(start, before, where, row, len(keys) - short, self._seed)
        state.update(rest.data)
        return keys


def load_or_create_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the secret in a file; create the file with 32 random bytes if it does not exist.

    The file gets its name only when complete. If several processes create it at once, one succeeds
    and all return its secret. Missing folders are created for the owner alone. May block on the
    disk.

    Raises:
        PermissionDenied: the file belongs to another user, others may access it, or it is not a
            plain file.
        ConfigError: it holds fewer than 16 bytes or more than 1024.
        StorageError: it cannot be read or written.
    """
    target = Path(path)
    try:
        try:
            return _read_secret(target)
        except FileNotFoundError:
            _create_secret(target)
            return _read_secret(target)
    except OSError as error:
        if isinstance(error, PermissionDenied):
            raise
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP):
            raise PermissionDenied(
                f"secret file {target}: {os.strerror(error.errno)}: {owners.whose(target)}; "
                "expected a plain file of mode 0600 that this user owns"
            ) from error
        raise StorageError(f"secret file {target} cannot be read or created: {error}") from error


def _read_secret(path: Path) -> bytes:
    # O_NONBLOCK: if the path is a fifo, opening it must not wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # fstat of the descriptor, not of the name: the file cannot be exchanged in between
        _refuse_unsafe(path, os.fstat(descriptor))
        content = os.read(descriptor, _MAX_SECRET + 1)
    finally:
        os.close(descriptor)
    if not _MIN_SECRET <= len(content) <= _MAX_SECRET:
        raise ConfigError(
            f"secret file {path} holds {len(content)} bytes, expected {_MIN_SECRET} to "
            f"{_MAX_SECRET}; remove it, so that a new secret is made"
        )
    return content


def _refuse_unsafe(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PermissionDenied(f"secret file {path} is no plain file; choose another path")
    if status.st_uid != os.geteuid():
        raise PermissionDenied(
            f"secret file {path} belongs to user {owners.user(status.st_uid)}, expected "
            f"{owners.user(os.geteuid())}; choose a path of your own"
        )
    if status.st_mode & 0o077:
        raise PermissionDenied(
            f"secret file {path} has mode {stat.S_IMODE(status.st_mode):04o}, expected 0600; "
            "others may have read it: remove it, so that a new secret is made"
        )


def _create_secret(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    import secrets  # imported late: these two take 10 ms, and few processes create a secret
    import tempfile

    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600, O_EXCL
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(descriptor)  # after a power failure a name must not exist without its bytes
        # Unlike rename, link never replaces another process's file, which has the secret then.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _as_bytes(name: str, value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return value
    raise ConfigError(f"{name} must be bytes or str, not {type(value).__name__}")


def _canonical(tokens: Tokens) -> NDArray[np.uint32]:
    """Tokens as contiguous little-endian u32; may share memory with the caller's array.

    One pass checks the range and one converts: as unsigned, a negative number is very large.
    """
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"tokens are no sequence of integers: {error}") from error
    if array.ndim != 1:
        raise ConfigError(f"tokens must have one dimension, not shape {array.shape}")
    if array.size == 0:
        return np.empty(0, "<u4")
    if array.dtype.kind not in "iu":
        raise ConfigError(f"tokens must be integers of at most 64 bits, not {array.dtype}")
    width = np.int64 if array.itemsize < 4 else array.dtype.newbyteorder("=")
    array = np.ascontiguousarray(array, dtype=width)
    unsigned = array.view(f"u{array.itemsize}")
    if unsigned.max() >= MARK:
        place = int(np.argmax(unsigned >= MARK))
        raise ConfigError(f"token {place} is {array[place]}, expected 0 to {MARK - 1}")
    return unsigned.astype("<u4", copy=False)


def _few(tokens: list[int]) -> bytes | None:
    """A short list of tokens as little-endian u32; None: it is long, or may be invalid."""
    if len(tokens) > _FEW or (tokens and type(tokens[0]) is bool):
        return None
    try:
        block = _PACKED[len(tokens)](*tokens)
    except struct.error:
        return None  # `_canonical` raises the error
    return None if _MARK_BYTES in block else block  # a match across two tokens is harmless


def pack_tokens(tokens: Tokens) -> bytes:
    """Tokens in the hashed format: u32, little-endian.

    Raises:
        ConfigError: as `hash_pages`.
    """
    few = _few(tokens) if type(tokens) is list else None
    return _canonical(tokens).tobytes() if few is None else few


def _core_keys(
    start: bytes, before: int, tokens: int | bytes, row: int, pages: int, seed: int
) -> Keys:
    """Keys that the core hashes: after `before` bytes of `start`, which has the first bytes of
    `tokens` (an address, or the bytes) as well."""
    keys: Keys = np.empty((pages, 2), np.uint64)
    where = _arguments.address(keys)
    code = layout.load().quick.lci_chain_keys(start, before, tokens, row, pages, seed, where)
    check(code, "hash pages")
    return keys


def _key_bytes(digest: bytes) -> bytes:
    """A key's bytes in memory: the words (low, high) of the digest's first 128 bits."""
    if sys.byteorder == "little":
        return digest[15::-1]
    return digest[8:16] + digest[:8]


def _keys_of(digests: list[bytes]) -> Keys:
    """Keys from their bytes."""
    if not digests:
        return _NO_KEYS
    return np.frombuffer(bytearray().join(digests), np.uint64).reshape(-1, 2)


def _blocks(extra: Mapping[int, bytes] | None, first: int) -> dict[int, bytes]:
    """The encoded extras; all are checked before any is used."""
    blocks: dict[int, bytes] = {}
    for number, data in (extra or {}).items():
        try:
            page = operator.index(number)
        except TypeError as error:
            raise ConfigError(f"extra for page {number!r}: expected an integer") from error
        if page < first:
            raise ConfigError(
                f"extra for page {page}: expected one without a key, {first} or later"
            )
        blocks[page] = _MARK_BYTES + _sized(_as_bytes("extra", data))
    return blocks


def _digest_rows(state: Digest, rows: list[bytes]) -> Keys:
    """Hash the rows one by one; return the digest after each, as words (low, high)."""
    if not rows:
        return np.empty((0, 2), np.uint64)
    update, digest = state.update, state.digest
    # Both calls in one expression of a comprehension: 0.12 us a page, nearly all in xxhash.
    digests = [update(row) or digest() for row in rows]
    words = np.frombuffer(b"".join(digests), ">u8").reshape(len(rows), -1)
    return words[:, 1::-1].astype(np.uint64, order="C")
