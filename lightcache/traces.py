"""Traces of requests: what prompts had in common, without their tokens.

A file has one JSON object a line, as the traces published with Mooncake (FAST'25) have:

    timestamp      milliseconds; without it requests are a second apart
    input_length   tokens of the prompt; without it, all of its blocks are full
    hash_ids       one integer a block of the prompt, from its root on: equal ids, equal blocks
    block_tokens   tokens of a block, in traces that say it; else the reader does

A last block that is not full may have an id. No cache holds it, so it is left out here.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightcache.errors import ConfigError
from lightcache.hashing import Keys

_log = logging.getLogger("lightcache.traces")

BLOCK_TOKENS = 512
"""Of a trace that does not say it: that of Mooncake's."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their times. Blocks are numbered from 0: one that follows other
    blocks is another block."""

    block_tokens: int
    seconds: NDArray[np.float64]
    """When each request came."""
    tokens: Ints
    """Of each prompt."""
    blocks: Ints
    """The full blocks of all prompts, one prompt after the other, each from its root on."""
    ends: Ints
    """Of each prompt in `blocks`."""
    distinct: int
    """Different blocks."""

    def __len__(self) -> int:
        """Requests."""
        return len(self.tokens)

    @property
    def lengths(self) -> Ints:
        """Full blocks of each prompt."""
        return np.diff(self.ends, prepend=0)

    @property
    def matchable(self) -> Ints:
        """Blocks of each prompt that a cache may serve: one token at least is computed."""
        most: Ints = np.maximum(self.tokens - 1, 0) // self.block_tokens
        return np.minimum(self.lengths, most)


def read(path: Path, block_tokens: int | None = None) -> Trace:
    """Read a file. Takes 5 us a block.

    Args:
        block_tokens: of a file that does not say it; None: `BLOCK_TOKENS`.

    Raises:
        ConfigError: it cannot be read, is empty, cut, or of another form; the message names the
            line.
    """
    found = sorted(lines(path, block_tokens), key=lambda line: line[0])
    if not found:
        raise ConfigError(f"{path}: expected a trace, found an empty file; record it again")
    sizes = {size for _, _, size, _ in found}
    if len(sizes) > 1:
        raise ConfigError(
            f"{path}: expected blocks of one length, found {', '.join(map(str, sorted(sizes)))} "
            "tokens; replay what each cache recorded by itself"
        )
    size = sizes.pop()
    numbers: dict[tuple[int, int], int] = {}
    blocks: list[int] = []
    ends: list[int] = []
    for _, tokens, _, ids in found:
        parent = -1
        for block in ids[: tokens // size]:
            parent = numbers.setdefault((parent, block), len(numbers))
            blocks.append(parent)
        ends.append(len(blocks))
    return Trace(
        size,
        np.array([seconds for seconds, *_ in found]),
        np.array([tokens for _, tokens, *_ in found], np.int64),
        np.array(blocks, np.int64),
        np.array(ends, np.int64),
        len(numbers),
    )


def lines(
    path: Path, block_tokens: int | None = None
) -> Iterator[tuple[float, int, int, list[int]]]:
    """The requests of a file as they stand there: seconds, tokens, tokens of a block, and ids.

    Raises:
        ConfigError: as `read`, but for an empty file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _request(_parsed(path, number, line), path, number, block_tokens)
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a trace that this user can read: {error.strerror}; `ls -l` shows "
            "whether it is there, and whose it is"
        ) from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: {_FORM}, found bytes that are no text") from None


_LATEST = 1e15
"""Milliseconds: 30,000 years."""
_FORM = 'expected a trace, with a JSON object such as {"hash_ids": [1, 2]} on each line'


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        if not line.endswith("\n") and number > 1:
            raise ConfigError(
                f"{path}: line {number}, the last one, is cut; leave it out: "
                f"head -n {number - 1} {shlex.quote(str(path))} > whole.jsonl"
            ) from None
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("hash_ids"), list):
        raise ConfigError(
            f"{path}: {_FORM}, found line {number}: {line[:40]!r}; if only this line is spoiled, "
            f"take it out: sed -i {number}d {shlex.quote(str(path))}"
        )
    return found


def _request(
    line: dict[str, Any], path: Path, number: int, block_tokens: int | None
) -> tuple[float, int, int, list[int]]:
    ids, size = line["hash_ids"], line.get("block_tokens", block_tokens or BLOCK_TOKENS)
    where = f"{path}: line {number}"
    if not all(type(each) is int for each in ids):
        raise ConfigError(f"{where}: hash_ids: expected integers, found others")
    if type(size) is not int or not 1 <= size <= 1 << 20:
        raise ConfigError(f"{where}: block_tokens: expected 1 to 2**20, found {size!r}")
    tokens = line.get("input_length", len(ids) * size)
    if type(tokens) is not int or not tokens // size <= len(ids) <= -(-tokens // size):
        raise ConfigError(
            f"{where}: expected an id for each {size} tokens of input_length {tokens!r}, found "
            f"{len(ids)}; --block-tokens says how many tokens a block has"
        )
    at = line.get("timestamp", 1000 * (number - 1))
    if type(at) not in (int, float) or not abs(at) < _LATEST:
        raise ConfigError(f"{where}: timestamp: expected milliseconds, found {repr(at)[:40]}")
    return at / 1000, tokens, size, ids


def ids_of(keys: Keys) -> list[int]:
    """The `hash_ids` that a `Recorder` writes of these keys: 53 bits of each, which JSON holds."""
    ids: list[int] = (keys[:, 0] & _ID).tolist()
    return ids


class Recorder:
    """Appends a line for each request to a file, which is made with mode 0600. Processes may share
    a file: a line is one write. What cannot be written is said once, and nothing is tried again.
    The file may end in a part of a line, where a disk was full: the first write begins another."""

    def __init__(self, path: str | Path) -> None:
        """Opens nothing: the first request does."""
        self._path = path
        self._file: int | None = None
        self._failed = False

    def note(self, tokens: int, keys: Keys, page_tokens: int) -> None:
        """A request came: the tokens of its prompt, and the keys of all of its full pages. What is
        written of keys (`ids_of`) tells nothing of tokens to a reader who has not the secret. Never
        raises."""
        if self._failed:
            return
        line = {
            "timestamp": int(time.time() * 1000),
            "input_length": tokens,
            "hash_ids": ids_of(keys),
            "block_tokens": page_tokens,
        }
        try:
            text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            if self._file is None:
                self._file, begin = _open_to_append(self._path)
                text = begin + text
            written = os.write(self._file, text)
            if written < len(text):
                raise OSError(f"{written} of {len(text)} bytes were written; is the disk full?")
        except (OSError, ValueError) as error:
            self._failed = True
            _log.warning("lightcache: record=%s: %s; nothing is recorded", self._path, error)

    def close(self) -> None:
        """Close the file. What comes after is not written."""
        self._failed = True
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open_to_append(path: str | Path) -> tuple[int, bytes]:
    """A descriptor, and what ends the last line of the file. Does not wait for the reader of a
    FIFO."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode) or not (size := os.fstat(file).st_size):
        return file, b""
    try:
        with open(path, "rb") as known:
            return file, b"" if os.pread(known.fileno(), 1, size - 1) == b"\n" else b"\n"
    except OSError:  # a file that may only be written; the reader skips empty lines
        return file, b"\n"


_ID = np.uint64((1 << 53) - 1)

__all__ = ["BLOCK_TOKENS", "Recorder", "Trace", "ids_of", "lines", "read"]
