"""Making a folder's files, or making them fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lightcache.errors import ConfigError, InUse, LayoutMismatch, StorageError
from lightcache.page_index import MAX_PAGES
from lightcache.storage.breaker import log
from lightcache.storage.disk.header import Header, new_header, read_header, write_header
from lightcache.storage.disk.slots import make_files, slot_bytes, whole
from lightcache.storage.protocol import StorageSpec


@dataclass(frozen=True)
class Wanted:
    """What whoever opens a folder says of its size."""

    capacity: int | None
    """Bytes; None: what it has."""
    files: int
    """Of a new one."""

    def slots(self, page_bytes: int, files: int) -> int | None:
        """How many these are: one for each file at least.

        Raises:
            ConfigError: no room for one, or more than an index can have.
        """
        if self.capacity is None:
            return None
        each = slot_bytes(page_bytes)
        count = self.capacity // each
        if not 1 <= count <= MAX_PAGES:
            raise ConfigError(
                f"capacity: expected room for 1 to {MAX_PAGES} slots of {each} bytes, found "
                f"{self.capacity}"
            )
        return max(count, files)


def first_slots(path: Path, spec: StorageSpec, wanted: Wanted) -> int:
    """Of a folder that is new.

    Raises:
        ConfigError: no capacity, or an impossible one.
    """
    slots = wanted.slots(spec.page_bytes, 1)
    if slots is None:
        raise ConfigError(
            f"capacity: {path} is new, and has to know how large it may become; give capacity="
        )
    return slots


def prepared(path: Path, spec: StorageSpec, wanted: Wanted, alone: bool) -> Header:
    """The header of a folder whose files are as it says: made, or made to fit. The caller holds the
    folder's lock.

    Args:
        alone: nobody uses it.

    Raises:
        ConfigError: no capacity for a new folder, or an impossible one.
        LayoutMismatch: of another version, or of other pages.
        InUse: it would have to be changed.
        StorageError: no room, or it is damaged.
    """
    found = read_header(path)
    if found is None:
        slots = first_slots(path, spec, wanted)
        return _sized(path, new_header(spec, min(wanted.files, slots), slots))
    if found.spec != spec:
        raise LayoutMismatch(
            f"disk: {path} holds pages of {found.spec}, expected {spec}; give another folder"
        )
    slots = wanted.slots(spec.page_bytes, found.files) or found.slots
    if not alone:
        if slots == found.slots:
            return found
        raise InUse(
            f"disk: {path} has {found.slots} slots, expected {slots}; it can be changed when "
            "nobody uses it: give the capacity that others have, or none"
        )
    if slots == found.slots and _whole(path, found):
        return found
    return _sized(path, replace(found, slots=slots))


def _whole(path: Path, header: Header) -> bool:
    try:
        good = whole(path, header.files, header.slots, header.page_bytes)
    except OSError as error:
        raise StorageError(f"disk: {error}") from error
    if not good:
        log.warning("disk: %s: slot files are missing or cut short, and are made again", path)
    return good


def _sized(path: Path, header: Header) -> Header:
    """Make the files fit. The header stands behind its files: if we die first, they are no more
    than too large or too small, and made to fit by the next one. No index of before counts."""
    header = replace(header, rebuilt=0)
    try:
        make_files(path, header.files, header.slots, header.page_bytes)
        write_header(path, header)
    except OSError as error:
        needed = header.slots * slot_bytes(header.page_bytes)
        raise StorageError(
            f"disk: {header.slots} slots, {needed} bytes in all, do not fit in {path}: {error}; "
            "give a smaller capacity= or make room"
        ) from error
    return header


__all__ = ["Wanted", "first_slots", "prepared"]
