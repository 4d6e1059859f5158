"""Stacks of storages by URL: `stack:?promote=64MiB|disk:/mnt/nvme/cache|s3://bucket/prefix`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightcache.errors import ConfigError, LightcacheError, StorageError
from lightcache.storage.breaker import log
from lightcache.storage.options import Options
from lightcache.storage.protocol import Storage, StorageSpec
from lightcache.storage.stacked import StackedStorage

OPTIONS = ("promote", "failures", "retry", "missing")
_EXAMPLE = "'stack:disk:/mnt/nvme/cache|s3://bucket/prefix'"


def split(parts: Sequence[str]) -> tuple[str, list[str]]:
    """What stands between the bars: options, without their question mark, and the URLs.

    Raises:
        ConfigError: fewer than two URLs, or something that is none.
    """
    for each in parts:
        if not isinstance(each, str):
            raise ConfigError(f"storage: expected URLs in a list, found {each!r}")
    query = parts[0][1:] if parts and parts[0].startswith("?") else ""
    urls = list(parts[1:] if query or parts[:1] == ["?"] else parts)
    if len(urls) < 2:
        raise ConfigError(
            f"stack: expected two URLs or more, the nearest first and with | between them, as in "
            f"{_EXAMPLE}, found {len(urls)}; in a shell put them in quotes"
        )
    for number, url in enumerate(urls, 1):
        if ":" not in url:
            raise ConfigError(  # which may be the end of a password: it is not shown
                f"stack: expected URLs as in {_EXAMPLE}, found none as {number}.; in a password "
                "'|' is written %7C"
            )
        if url.startswith("stack:"):
            raise ConfigError(f"stack: found a stack in a stack, as {number}.; name its storages")
    return query, urls


def parse(options: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `open_stack` and `StackedStorage`: those that are said.

    Raises:
        ConfigError: an option that there is not, or a value that is none.
    """
    given = Options("stack", options, OPTIONS)
    found: dict[str, Any] = {"skip": given.choice("missing", ("raise", "skip")) == "skip"}
    if "promote" in given:
        nothing = given.text("promote") in ("no", "0")
        found["promote_bytes"] = 0 if nothing else given.size("promote")
    if "failures" in given:
        found["failures"] = given.count("failures", 0)
    if "retry" in given:
        found["retry"] = given.seconds("retry", 0.0)
    return found


def open_stack(
    urls: Sequence[str],
    spec: StorageSpec,
    open_one: Callable[[str, StorageSpec], Storage],
    *,
    skip: bool = False,
    **how: Any,
) -> Storage:
    """Open all of them; if one cannot be opened, those that were are closed again.

    Args:
        skip: do without one that cannot be opened, with a warning, for as long as this lasts: one
            that is left is not put in a stack. Whatever the reason is, but that its URL is wrong.
        how: for `StackedStorage`.

    Raises:
        ConfigError: a URL that is wrong.
        StorageError: one cannot be opened; the message says which. With `skip`: none can.
    """
    opened: list[Storage] = []
    names: list[str] = []
    first: Exception | None = None
    why = ""
    try:
        for number, url in enumerate(urls, 1):
            name = f"{number} of {len(urls)}, {url.partition(':')[0]}:"
            try:
                opened.append(open_one(url, spec))
                names.append(f"{url.partition(':')[0]}:")
            except ConfigError as wrong:
                raise ConfigError(f"stack, storage {name} {wrong}") from wrong
            except Exception as raised:  # somebody else's opener may raise anything
                said = str(raised) if isinstance(raised, LightcacheError) else repr(raised)
                first, why = first or raised, why or said
                if not skip:
                    raise StorageError(
                        f"stack: storage {name} cannot be opened: {said}; mend it, leave it out, "
                        "or begin with 'stack:?missing=skip|'"
                    ) from raised
                log.warning("storage %s cannot be opened and is left out: %s", name, said)
        if not opened:
            raise StorageError(f"stack: none of {len(urls)} can be opened: {why}") from first
        return opened[0] if len(opened) == 1 else StackedStorage(opened, names=names, **how)
    except BaseException:
        for each in opened:
            with contextlib.suppress(Exception):  # what was raised first says what is wrong
                each.close()
        raise


__all__ = ["OPTIONS", "open_stack", "parse", "split"]
