"""What a folder of slot files says of itself."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lightcache.errors import LayoutMismatch, StorageError
from lightcache.page_index import MAX_PAGES
from lightcache.storage.protocol import StorageSpec

VERSION = 1
NAME = "header.json"
MAX_FILES = 1000


@dataclass(frozen=True)
class Header:
    """The same for all processes that use a folder. Written under its lock, whole or not at all."""

    version: int
    uuid: str
    """Of this folder, for good: the index in shared memory says whose it is."""
    page_bytes: int
    fingerprint: str
    algorithm: str
    files: int
    slots: int
    epoch: int
    """Clearing begins another one; slots of those before hold nothing. The first is by chance: if a
    header is lost, the next one knows nothing of the slots, cleared ones among them."""
    index: int = 0
    """How many indexes were begun. That in shared memory says which it is: an older one does not
    know what was written since."""
    rebuilt: int = 0
    """The last index that knows all slots."""

    @property
    def spec(self) -> StorageSpec:
        """Whose pages."""
        return StorageSpec(self.page_bytes, self.fingerprint, self.algorithm)

    @property
    def possible(self) -> bool:
        """Whether its numbers are such as we write."""
        counted = 0 <= self.epoch < 1 << 63 and 0 <= self.rebuilt <= self.index < 1 << 63
        sized = 1 <= self.files <= MAX_FILES and 1 <= self.slots <= MAX_PAGES
        return counted and sized and self.page_bytes > 0


def new_header(spec: StorageSpec, files: int, slots: int) -> Header:
    """Of a folder that is made now."""
    uuid, epoch = secrets.token_hex(8), secrets.randbits(62)
    whose = (spec.page_bytes, spec.fingerprint, spec.algorithm)
    return Header(VERSION, uuid, *whose, files, slots, epoch)


def read_header(folder: Path) -> Header | None:
    """None: there is none.

    Raises:
        StorageError: it cannot be read, or is none.
        LayoutMismatch: of another version.
    """
    try:
        text = (folder / NAME).read_text("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"disk: {error}") from error
    try:
        found = json.loads(text)
        version = found["version"]
        if version == VERSION:
            kinds = {each.name: {"int": int, "str": str}[str(each.type)] for each in fields(Header)}
            known = {name: type(value) for name, value in found.items()} == kinds
            if known and (header := Header(**found)).possible:
                return header
    except (ValueError, KeyError, TypeError, AttributeError):
        version = None
    if isinstance(version, int) and version != VERSION:
        raise LayoutMismatch(
            f"disk: {folder} was made by another version of lightcache: expected {VERSION}, found "
            f"{version}; remove the folder, or give another"
        )
    raise StorageError(
        f"disk: {folder / NAME} is damaged; remove the folder (what it holds is only a cache)"
    )


def signature(folder: Path) -> tuple[int, int, int]:
    """Of the header's file: another one, and it was replaced.

    Raises:
        OSError: it is not there.
    """
    found = os.stat(folder / NAME)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def write_header(folder: Path, header: Header) -> None:
    """Replace it, and wait until the disk has it.

    Raises:
        OSError: the old one stays.
    """
    fresh = folder / (NAME + ".new")
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump(asdict(header), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, folder / NAME)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = ["NAME", "Header", "new_header", "read_header", "signature", "write_header"]
