"""A prompt that an operator gives a tool: token ids, text with a tokenizer, or an engine's hashes;
and how each engine makes keys of it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lightcache._arguments import Keys
from lightcache.connectors.vllm.prompts import adapter_bytes, files_digest
from lightcache.engine_keys import EngineKeys
from lightcache.errors import ConfigError
from lightcache.hashing import KeySpec, hash_pages
from lightcache.shm.errors import require

TokenIds = npt.NDArray[np.uint32]
STDIN = "-"
_MOST = (1 << 32) - 2
_IDS = "token ids as a JSON list, such as [1, 15043, 29892]"


@dataclass(frozen=True)
class GivenPrompt:
    """One of `tokens` and `hashes` is given."""

    tokens: TokenIds | None = None
    hashes: tuple[Any, ...] = ()
    """An engine's own, one a full page."""
    tokenizer: Any = None
    """Of text: what made the tokens; it shows them as text again."""

    @property
    def ids(self) -> TokenIds:
        """`tokens`; empty if hashes were given."""
        return np.empty(0, np.uint32) if self.tokens is None else self.tokens

    def text(self, first: int, end: int) -> str:
        """The text of some tokens, by the tokenizer."""
        return str(self.tokenizer.decode(self.ids[max(0, first) : end].tolist()))


@dataclass(frozen=True)
class Identity:
    """What decides keys beside the tokens and the cache's own configuration."""

    weights: str = ""
    tenant: str = ""
    salt: str = ""
    lora: bytes = b""


# ---- keys

HASHED_BY = ("sglang", "lightllm")
"""Engines that name pages by hashes of their own, whose tokens we hash as they do."""


def hashed_by(fingerprint: str) -> str | None:
    """The engine of `HASHED_BY` whose cache this is, as its connector's fingerprint says. None: the
    keys are those of the token ids."""
    if fingerprint.startswith("lightllm "):
        return "lightllm"
    return "sglang" if fingerprint.startswith("engine=sglang-") else None


def keys_of(prompt: GivenPrompt, spec: KeySpec, identity: Identity) -> Keys:
    """The keys of all full pages of a prompt.

    Args:
        spec: of the cache; weights and tenant are those of `identity`.
    """
    by = hashed_by(spec.fingerprint)
    hashes: Sequence[Any] = prompt.hashes
    if not hashes and by is not None:
        hashes = engine_hashes(by, prompt.ids, spec.page_tokens)
    if prompt.hashes or by is not None:
        keys = EngineKeys(spec, salt=identity.salt, lora=identity.lora)
        return keys.encode(hashes)
    return hash_pages(spec, prompt.ids, salt=identity.salt, lora=identity.lora)


def engine_hashes(engine: str, ids: TokenIds, page_tokens: int) -> list[Any]:
    """An engine's hashes of the full pages of a prompt without salt and adapter: of SGLang SHA-256
    of the hash before and the page's ids, 4 bytes each; of LightLLM xxh3-128 of all ids up to the
    page's end, 8 bytes each."""
    found: list[Any] = []
    rows = ids[: len(ids) // page_tokens * page_tokens].reshape(-1, page_tokens)
    if engine == "sglang":
        digest = b""
        for row in rows:
            digest = hashlib.sha256(digest + row.astype("<u4").tobytes()).digest()
            found.append(digest.hex())
        return found
    state = xxhash.xxh3_128()
    for row in rows:
        state.update(row.astype("<u8").tobytes())
        found.append(state.intdigest())
    return found


def adapter_of(given: str) -> bytes:
    """What stands for an adapter in keys.

    Args:
        given: "NAME=PATH", as a request to vLLM names it; or the hex digits of an application's
            own digest.

    Raises:
        ConfigError: neither, or the folder cannot be read.
    """
    name, equals, path = given.partition("=")
    if equals:
        try:
            return adapter_bytes(name, path, files_digest(path))
        except OSError as error:
            raise ConfigError(f"--lora: {path} cannot be read: {error.strerror}") from error
    try:
        return bytes.fromhex(given)
    except ValueError:
        raise ConfigError(
            f"--lora: expected NAME=PATH, as vLLM was given them, or the hex digits of the digest "
            f"that the application hashes, found {given!r}"
        ) from None


# ---- files


def read_text(path: str, what: str) -> str:
    """A file, or standard input.

    Raises:
        ConfigError: it cannot be read, is no text, or is empty.
    """
    try:
        text = sys.stdin.read() if path == STDIN else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{what}: expected a file that this user can read, found {path!r}: {error.strerror}"
        ) from error
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: expected text, found bytes that are none in {path!r}") from None
    if not text.strip():
        raise ConfigError(
            f"{what}: expected a prompt, found nothing in {_named(path)}; give {_IDS}"
        )
    return text


def parse_tokens(text: str, what: str, path: str) -> TokenIds:
    """Token ids.

    Raises:
        ConfigError: not a list of them; names the first that is none.
    """
    found = _list(text, what, path, _IDS)
    for number, each in enumerate(found):
        if type(each) is not int or not 0 <= each <= _MOST:
            raise ConfigError(
                f"{what}: expected ids of 0 to 2**32 - 2, found {str(each)[:40]!r} as number "
                f"{number} in {_named(path)}; give what the engine's tokenizer returned"
            )
    return np.array(found, np.uint32)


def parse_hashes(text: str, path: str) -> tuple[Any, ...]:
    """Hashes of an engine; `EngineKeys.encode` checks them."""
    return tuple(
        _list(text, "--hashes", path, 'hashes of an engine as a JSON list, such as ["5fe3...", ..]')
    )


def _list(text: str, what: str, path: str, expected: str) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(
            f"{what}: expected {expected}, found text that is no JSON{place} in {_named(path)}; "
            "is the file cut? A prompt's text is given with --text and --tokenizer"
        ) from None
    if not isinstance(found, list) or not found:
        kind = "an empty list" if found == [] else type(found).__name__
        raise ConfigError(f"{what}: expected {expected}, found {kind} in {_named(path)}")
    return found


def _named(path: str) -> str:
    return "standard input" if path == STDIN else repr(path)


def open_tokenizer(folder: str) -> Any:
    """The tokenizer of a model's folder. Nothing is downloaded, and no code of the folder runs.

    Raises:
        ConfigError: no folder, or it has no tokenizer.
        NotInstalled: transformers is not installed.
    """
    if not Path(folder).is_dir():
        raise ConfigError(
            f"--tokenizer: expected the folder of a model, with its tokenizer.json, found "
            f"{folder!r}; give the folder, or token ids with --tokens"
        )
    require("transformers", "transformers", "--tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any kind: files of other people
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ConfigError(
            f"--tokenizer: no tokenizer can be loaded from {folder!r}: {first}; give token ids "
            "with --tokens"
        ) from error


def tokenized(text: str, tokenizer: Any) -> TokenIds:
    """The ids of a text, with the special tokens that the tokenizer adds."""
    return np.array(tokenizer(text)["input_ids"], np.uint32)


__all__ = [
    "STDIN",
    "GivenPrompt",
    "Identity",
    "TokenIds",
    "adapter_of",
    "engine_hashes",
    "hashed_by",
    "keys_of",
    "open_tokenizer",
    "parse_hashes",
    "parse_tokens",
    "read_text",
    "tokenized",
]
