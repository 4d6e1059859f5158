"""Prompt: tokens and what else decides their KV, with keys for every tier's page size."""

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
class Item:
    """A multimodal item: an image, a piece of audio. Its placeholders are tokens [start, end)."""

    start: int
    end: int
    digest: bytes
    """Of its content: it enters the key of every page that the item touches."""

    def __post_init__(self) -> None:
        count(self.start, "item: start", 0, 1 << 40)
        count(self.end, "item: end", self.start + 1, 1 << 40)
        if type(self.digest) is not bytes or self.digest == b"":
            raise ConfigError("item: expected a digest of its content, as bytes, and not empty")


class Prompt:
    """One sequence of tokens. Keys are computed once for each page size, however often it is
    planned and by however many requests; nothing of it changes."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        salt: str | bytes = b"",
        lora: bytes = b"",
        items: Sequence[Item] = (),
        tenant: str = "",
    ) -> None:
        """Converts the tokens once; nothing is hashed yet.

        Args:
            tokens, salt, lora: as for `hash_pages`.
            items: in the order of their starts, not overlapping.
            tenant: whose namespace its pages belong to, see `PageIndex.namespace`.

        Raises:
            ConfigError: tokens that are none, items out of order or out of the prompt, or
                something else than it says.
        """
        try:
            array = np.asarray(tokens)
        except ValueError as error:
            raise ConfigError(f"tokens: expected one row of integers: {error}") from None
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(
                f"tokens: expected one row of integers, found {array.dtype} {array.shape}"
            )
        if array.size and (int(array.min()) < 0 or int(array.max()) >= (1 << 32) - 1):
            raise ConfigError("tokens: expected ids of 0 to 2**32 - 2")
        for what, given, kinds in (
            ("salt", salt, (str, bytes)),
            ("lora", lora, (bytes,)),
            ("tenant", tenant, (str,)),
        ):
            if not isinstance(given, kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"{what}: expected {wanted}, found {given!r}")
        self.tokens: TokenIds = array.astype(np.uint32)  # our own: keys must not change later
        self.tokens.flags.writeable = False
        self.salt, self.lora, self.items, self.tenant = salt, lora, tuple(items), tenant
        self._check_items()
        self._keys: list[tuple[KeySpec, PageHasher, Keys]] = []
        self._firsts: list[tuple[KeySpec, bytes]] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def keys(self, spec: KeySpec) -> Keys:
        """Keys of all its complete pages, uint64 of shape (n, 2). Hashed at the first call."""
        return self._hashed(spec)[2]

    def hasher(self, spec: KeySpec) -> PageHasher:
        """A hasher that has taken in the whole prompt, to go on with what is generated."""
        return self._hashed(spec)[1].copy()

    def is_hashed(self, spec: KeySpec) -> bool:
        """Whether `keys` costs nothing more."""
        found = False
        for known in self._keys:  # two at most; `any` takes four times as long
            found |= known[0] is spec
        return found

    def first_key(self, spec: KeySpec) -> bytes:
        """The key of its first page, as it lies in an array of keys; empty if it fills none. No
        more is hashed for it."""
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
        mark = self._extra(size).get(0) if self.items else None
        if mark is None:
            return hasher.append(self.tokens[:size].tolist())[0]
        return bytes(hasher.update(self.tokens[:size], extra={0: mark}))

    def _hashed(self, spec: KeySpec) -> tuple[KeySpec, PageHasher, Keys]:
        for known in self._keys:
            if known[0] is spec:
                return known
        made = PageHasher(spec, salt=self.salt, lora=self.lora)
        keys = made.update(self.tokens, extra=self._extra(spec.page_tokens))
        self._keys.append((spec, made, keys))
        return self._keys[-1]

    def cut_item(self, tokens: int) -> Item | None:
        """The item that lies on both sides of a position, if one does."""
        for item in self.items:
            if item.start < tokens < item.end:
                return item
        return None

    def _extra(self, page_tokens: int) -> dict[int, bytes]:
        """For each page the digests of the items that touch it, with where they begin in it: the
        same image one token later is another content."""
        found: dict[int, bytes] = {}
        for item in self.items:
            for page in range(item.start // page_tokens, (item.end - 1) // page_tokens + 1):
                at = item.start - page * page_tokens
                mark = at.to_bytes(8, "little", signed=True)
                size = len(item.digest).to_bytes(8, "little")
                found[page] = found.get(page, b"") + mark + size + item.digest
        return found

    def _check_items(self) -> None:
        end = 0
        for item in self.items:
            if item.start < end or item.end > len(self):
                raise ConfigError(
                    f"items: expected them in order, apart, and within {len(self)} tokens, found "
                    f"one of tokens {item.start} to {item.end - 1}"
                )
            end = item.end


__all__ = ["Item", "Prompt"]
