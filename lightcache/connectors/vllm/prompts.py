"""Keys of vLLM's requests, from their token ids and what else decides the KV. They depend neither
on vLLM's own hashes nor on its release; a router computes the same ones from a `Prompt`."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import ConfigError
from lightcache.hashing import KeySpec
from lightcache.prompt import MultimodalItem, Prompt

_MOST_EMBEDS = 64 << 20
"""Bytes of prompt embeddings that are hashed on the engine's thread."""


def adapter_bytes(name: str, path: str, files: bytes) -> bytes:
    """What stands for a LoRA adapter in keys, as a `Prompt`'s `lora`."""
    parts = [name.encode(), path.encode(), files]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def files_digest(path: str) -> bytes:
    """Of names, sizes and times of an adapter's files; of one that is no folder here, empty."""
    folder = Path(path)
    if not folder.is_dir():
        return b""
    digest = hashlib.blake2b(digest_size=16, person=b"lightcache lora")
    for file in sorted(folder.iterdir()):
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.digest()


class Adapters:
    """Digests of adapters' files, found out in a thread: the engine's own never waits for a file.
    Looked at for each request: vLLM loads an adapter when it first hears of it, and perhaps again
    when it had no room for it meanwhile. So of one whose files were replaced since, nothing is
    known, and its requests have no keys."""

    def __init__(self) -> None:
        """Its thread starts with the first adapter."""
        self._asked: SimpleQueue[tuple[str, str, int | None] | None] = SimpleQueue()
        self._found: dict[str, bytes | None] = {}
        self._loaded: dict[int, bytes] = {}
        """By vLLM's number of an adapter."""
        self._thread: threading.Thread | None = None

    def ask(self, request: str, path: str, number: int | None = None) -> None:
        """Begin to look at the files of a request's adapter. `number` is vLLM's; None: vLLM loads
        it again for each request."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightcache-lora", daemon=True)
            self._thread.start()
        self._asked.put((request, path, number))

    def known(self, request: str) -> bool:
        """Whether its files have been looked at."""
        return request in self._found

    def take(self, request: str) -> bytes | None:
        """What was found; None: nothing yet, or its files could not be looked at."""
        return self._found.get(request)

    def forget(self, request: str) -> None:
        """The request has its prompt, or has ended."""
        self._found.pop(request, None)

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            request, path, number = asked
            try:
                self._found[request] = self._look(path, number)
            except OSError:
                self._found[request] = None  # the request is neither found nor saved

    def _look(self, path: str, number: int | None) -> bytes:
        found = files_digest(path)
        if number is not None and self._loaded.setdefault(number, found) != found:
            raise OSError(f"{path}: its files are others than when vLLM first heard of it")
        return found


def prompt_of(request: Any, page_tokens: int, adapter: bytes | None) -> Prompt:
    """The prompt of a request.

    Args:
        adapter: digest of its adapter's files, if it has one.

    Raises:
        ConfigError: it cannot be keyed: items overlap, or embeddings are too large.
    """
    tokens, salt, lora = _text(request, adapter)
    items = [
        MultimodalItem(
            feature.mm_position.offset,
            feature.mm_position.offset + feature.mm_position.length,
            str(feature.identifier).encode(),
        )
        for feature in request.mm_features
    ]
    if request.prompt_embeds is not None:
        items += _embedded(request.prompt_embeds, request.num_prompt_tokens, page_tokens)
    return Prompt(np.frombuffer(tokens, np.uint32), salt=salt, lora=lora, items=items)


def keys_of(request: Any, spec: KeySpec, adapter: bytes | None) -> Keys:
    """The keys of its prompt, of text alone in a third of the steps that a `Prompt` takes: what is
    done once a prompt waits for memory, code included.

    Raises:
        ConfigError: as `prompt_of`.
    """
    if request.mm_features or request.prompt_embeds is not None:
        return prompt_of(request, spec.page_tokens, adapter).keys(spec)
    tokens, salt, lora = _text(request, adapter)
    return spec.hash_packed(tokens, salt=salt, lora=lora)


def is_tokens_alone(request: Any) -> bool:
    """Whether nothing but its tokens decides its keys, as for `Prompt.told_tokens`."""
    decided = request.mm_features or request.cache_salt or request.lora_request is not None
    return not decided and request.prompt_embeds is None


def _text(request: Any, adapter: bytes | None) -> tuple[bytes, str | bytes, bytes]:
    """Token ids, salt and adapter."""
    count = request.num_prompt_tokens
    ids = getattr(request, "prompt_token_ids", None)  # a list, so nothing is copied twice
    if ids is None or len(ids) != count:
        ids = request.all_token_ids[:count]
    lora = b""
    if request.lora_request is not None:
        one = request.lora_request
        lora = adapter_bytes(one.lora_name, one.lora_path, adapter or b"")
    return array("I", ids).tobytes(), request.cache_salt or b"", lora


def _embedded(embeds: Any, count: int, page_tokens: int) -> Iterator[MultimodalItem]:
    if embeds.nbytes > _MOST_EMBEDS:
        raise ConfigError(f"prompt_embeds: expected {_MOST_EMBEDS} bytes, found {embeds.nbytes}")
    uint8 = import_module("torch").uint8
    for start in range(0, count, page_tokens):
        end = min(count, start + page_tokens)
        data = embeds[start:end].contiguous().cpu().view(uint8).numpy().tobytes()
        yield MultimodalItem(start, end, hashlib.sha256(data).digest())


__all__ = ["Adapters", "adapter_bytes", "files_digest", "is_tokens_alone", "keys_of", "prompt_of"]
