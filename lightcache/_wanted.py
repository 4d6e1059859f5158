"""What a cache was asked to be: arguments checked, the configuration in its header, the secret."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightcache import _arguments
from lightcache.errors import CacheCorrupted, ConfigError
from lightcache.hashing import KeySpec, load_or_create_secret
from lightcache.page_index import MAX_PAGES
from lightcache.placement import Numa
from lightcache.pool import CHUNK_BYTES
from lightcache.pool_object import make_object
from lightcache.shm import Segment
from lightcache.shm.folders import FOLDER_ITEM, checked_path, path_in
from lightcache.sizes import parse_size

DEFAULT_SECRET = Path("~/.local/share/lightcache/secret")
_MAX_PAGE = 1 << 40


class Wanted:
    """The arguments of create and open, checked, as the index and the pool take them."""

    def __init__(
        self,
        pages: int | None,
        size: int | str | None,
        page_bytes: int | str,
        fingerprint: str,
        page_tokens: int | None,
        algorithm: str,
        secret: bytes,
        pool_path: str | os.PathLike[str] | None,
    ) -> None:
        each = parse_size(page_bytes, "page_bytes")
        if each > _MAX_PAGE:
            raise ConfigError(f"page_bytes: {each} is more than a page may have ({_MAX_PAGE})")
        if (pages is None) == (size is None):
            raise ConfigError("give the capacity once: pages= or size=")
        if size is not None:
            pages = parse_size(size) // each
            if pages == 0:
                raise ConfigError(f"size: {size!r} is less than one page of {each} bytes")
        self.pages = _arguments.count(pages, "pages", 1, MAX_PAGES)
        self.secret = secret
        self.numa: Numa = None
        folder = None if pool_path is None else checked_path(pool_path)
        self.first = min(self.pages, max(1, CHUNK_BYTES // each))
        KeySpec(  # says what is wrong with the rest
            fingerprint=fingerprint,
            page_tokens=1 if page_tokens is None else page_tokens,
            secret=secret,
            algorithm=algorithm,  # type: ignore[arg-type]
        )
        self.config: dict[str, Any] = {
            "page_bytes": each,
            "page_tokens": page_tokens,
            "fingerprint": fingerprint,
            "algorithm": algorithm,
            "secret": digest_of(secret),
            **({} if folder is None else {FOLDER_ITEM: folder}),
        }

    def initialise(self, segment: Segment) -> None:
        each = int(self.config["page_bytes"])
        make_object(segment, self.pages * each, self.first * each, self.numa)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """What `create` has written is of these types; whoever may write the segment may change it."""
    each, tokens = config["page_bytes"], config.get("page_tokens")
    if FOLDER_ITEM in config and path_in(dict(config)) is None:
        raise CacheCorrupted(
            f"the cache {name!r} has the pool's folder {config[FOLDER_ITEM]!r} in its header; "
            "remove it with `lightcache rm`"
        )
    texts = [config.get(item) for item in ("fingerprint", "algorithm", "secret")]
    if (
        type(each) is not int
        or not 1 <= each <= _MAX_PAGE
        or not (tokens is None or type(tokens) is int)
        or not all(isinstance(text, str) for text in texts)
    ):
        raise CacheCorrupted(
            f"the cache {name!r} has page_bytes {each!r}, page_tokens {tokens!r} and (fingerprint, "
            f"algorithm, secret) {texts!r} in its header; remove it with `lightcache rm`"
        )


def secret_of(given: bytes | None) -> bytes:
    """The secret that was given; None: that of the file, which is made if it is not there."""
    return given if given is not None else load_or_create_secret(DEFAULT_SECRET.expanduser())


def digest_of(secret: bytes) -> str:
    """Tells two secrets apart, and nothing about them: 32 bits of a keyed digest."""
    if not isinstance(secret, bytes):
        raise ConfigError(f"secret: expected bytes, found {type(secret).__name__}")
    return hashlib.blake2b(secret, digest_size=4, person=b"lightcache check").hexdigest()


__all__ = ["DEFAULT_SECRET", "Wanted", "check_config", "digest_of", "secret_of"]
