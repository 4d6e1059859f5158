"""Words of a fingerprint: what decides the content of an engine's pages, beside their format."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def name_of(model: str) -> str:
    """A model as in caches' names: the one on the hub, or the last folder of a path."""
    return Path(model).resolve().name if Path(model).exists() else model


def files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Of a model in a folder: names, sizes and times, as reading all bytes takes minutes."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def version_of(model: str, config: Any, revision: str | None) -> str | None:
    """Of a model: a digest of a folder's files; else the commit, or the revision that was asked
    for."""
    folder = Path(model)
    if folder.is_dir():
        return digest(files_of(folder))
    return getattr(config, "_commit_hash", None) or revision


def config_digest(config: Any) -> str:
    """Of a model's configuration, without what a library notes in it."""
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    return digest({name: value for name, value in described.items() if not name.startswith("_")})


def digest(facts: Any) -> str:
    """12 hex digits of anything that JSON or `str` can write."""
    data = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(data, digest_size=6, person=b"lightcache vllm").hexdigest()


def words(facts: Mapping[str, object]) -> list[str]:
    """`name=value` of each fact that there is, without blanks."""
    return [word(f"{name}={value}") for name, value in facts.items() if value is not None]


def word(text: str) -> str:
    """A text without blanks: they divide words."""
    return re.sub(r"\s+", "_", text)


__all__ = ["config_digest", "digest", "files_of", "name_of", "version_of", "word", "words"]
