"""Prompt: tokens and everything else that decides their KV. Managers and routers take one, and hash
its keys for each page size, weights version and tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, count
from lightcache.errors import ConfigError
from lightcache.hashing import KeySpec, PageHasher, Tokens

TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class MultimodalItem:
    """An image, or a piece of audio. Its placeholders are tokens [start, end)."""

    start: int
    end: int
    digest: bytes
    """Digest of the content. It enters the key of every page that the item touches."""

    def __post_init__(self) -> None:
        count(self.start, "item: start", 0, 1 << 40)
        count(self.end, "item: end", self.start + 1, 1 << 40)
        if type(self.digest) is not bytes or self.digest == b"":
            raise ConfigError("item: expected a digest of its content, as bytes, and not empty")


class Prompt:
    """One sequence of tokens, immutable. Keys are hashed once for each page size, however many
    requests plan it and however often.

    Two prompts of the same content are equal: a scheduler may make a new one in each step. That
    costs a copy of the tokens and a comparison; no key is hashed again."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        salt: str | bytes = b"",
        lora: bytes = b"",
        items: Sequence[MultimodalItem] = (),
        tenant: str = "",
    ) -> None:
        """Converts or copies the tokens once; nothing is hashed yet.

        Args:
            tokens, salt, lora: as for `hash_pages`. A read-only array of uint32 is kept as it is:
                nothing may change it.
            items: in the order of their starts, not overlapping.
            tenant: the pages belong to its namespace, see `PageIndex.namespace`.

        Raises:
            ConfigError: no token ids, items out of order or out of the prompt, or an argument of
                the wrong type.
        """
        try:
            array = np.asarray(tokens)
        except ValueError as error:
            raise ConfigError(f"tokens: expected one row of integers: {error}") from None
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(
                f"tokens: expected one row of integers, found {array.dtype} {array.shape}"
            )
        least = int(array.min()) if array.size and array.dtype.kind == "i" else 0
        if least < 0 or (array.size and int(array.max()) >= (1 << 32) - 1):
            raise ConfigError("tokens: expected ids of 0 to 2**32 - 2")
        for name, value, kinds in (
            ("salt", salt, (str, bytes)),
            ("lora", lora, (bytes,)),
            ("tenant", tenant, (str,)),
        ):
            if not isinstance(value, kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"{name}: expected {wanted}, found {value!r}")
        copied = array.flags.writeable  # our own: keys must not change later
        self.tokens: TokenIds = array.astype(np.uint32, "C", copy=copied)
        self.tokens.flags.writeable = False
        self.salt, self.lora, self.items, self.tenant = salt, lora, tuple(items), tenant
        self._check_items()
        self._keys: list[tuple[KeySpec, PageHasher, Keys]] = []
        self._firsts: list[tuple[KeySpec, bytes]] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        """Whether the content, and so every key, is the same."""
        if self is other:
            return True
        if not isinstance(other, Prompt):
            return NotImplemented
        return self.identity() == other.identity() and np.array_equal(self.tokens, other.tokens)

    def __hash__(self) -> int:
        return hash((self.identity(), self.tokens[-64:].tobytes()))

    def identity(self) -> tuple[object, ...]:
        """Everything that decides the keys, with the number of tokens instead of the tokens."""
        return len(self.tokens), self.tenant, self.salt, self.lora, self.items

    @property
    def told_tokens(self) -> TokenIds | None:
        """Its tokens, if nothing else tells its keys from those of other prompts: then a router
        that knows only tokens may be told of its pages. Otherwise None."""
        others = self.tenant or self.salt or self.lora or self.items
        return None if others else self.tokens

    def keys(self, spec: KeySpec) -> Keys:
        """Keys of all complete pages, uint64 of shape (n, 2). Hashed at the first call."""
        for known in self._keys:
            if known[0] is spec:
                return known[2]
        return self._hash(spec)[2]

    def hasher(self, spec: KeySpec) -> PageHasher:
        """A hasher that has hashed the whole prompt, to continue with generated tokens."""
        self.keys(spec)
        return next(hasher for known, hasher, _ in self._keys if known is spec).copy()

    def is_hashed(self, spec: KeySpec) -> bool:
        """Whether the keys of `spec` are hashed already."""
        hashed = False
        for known in self._keys:  # a few; `any` takes four times as long
            hashed |= known[0] is spec
        return hashed

    def first_key(self, spec: KeySpec) -> bytes:
        """The key of the first page, as it lies in an array of keys; empty if the prompt fills no
        page. Only this page is hashed."""
        if len(self.tokens) < spec.page_tokens:
            return b""
        if self.is_hashed(spec):
            return bytes(self.keys(spec)[0])
        for spec_of, key in self._firsts:
            if spec_of is spec:
                return key
        key = self._hash_first(PageHasher(spec, salt=self.salt, lora=self.lora))
        self._firsts.append((spec, key))
        return key

    def _hash_first(self, hasher: PageHasher) -> bytes:
        size = hasher.spec.page_tokens
        mark = self.item_marks(size).get(0) if self.items else None
        if mark is None:
            return hasher.append(self.tokens[:size].tolist())[0]
        return bytes(hasher.update(self.tokens[:size], extra={0: mark}))

    def _hash(self, spec: KeySpec) -> tuple[KeySpec, PageHasher, Keys]:
        hasher = PageHasher(spec, salt=self.salt, lora=self.lora)
        marks = self.item_marks(spec.page_tokens) if self.items else None
        keys = hasher.extend(self.tokens, extra=marks)
        self._keys.append((spec, hasher, keys))
        return self._keys[-1]

    def cut_item(self, tokens: int) -> MultimodalItem | None:
        """The item that a cut at this position would split, if any."""
        for item in self.items:
            if item.start < tokens < item.end:
                return item
        return None

    def item_marks(self, page_tokens: int) -> dict[int, bytes]:
        """For each page, the digests of the items that touch it and the offsets at which they
        begin: the same image one token later is different content."""
        marks: dict[int, bytes] = {}
        for item in self.items:
            for page in range(item.start // page_tokens, (item.end - 1) // page_tokens + 1):
                offset = item.start - page * page_tokens
                mark = offset.to_bytes(8, "little", signed=True)
                size = len(item.digest).to_bytes(8, "little")
                marks[page] = marks.get(page, b"") + mark + size + item.digest
        return marks

    def _check_items(self) -> None:
        end = 0
        for item in self.items:
            if item.start < end or item.end > len(self):
                raise ConfigError(
                    f"items: expected them in order, apart, and within {len(self)} tokens, found "
                    f"one of tokens {item.start} to {item.end - 1}"
                )
            end = item.end


__all__ = ["MultimodalItem", "Prompt", "TokenIds"]
