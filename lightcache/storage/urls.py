"""Storages by URL: `open_storage("memory:?capacity=1GiB", page_bytes=8 << 20)`.

A scheme is built in, registered by `register`, or an entry point of the group `lightcache.storage`.
A built-in one of a server is a row of `REMOTE`; another one is a row of `_BUILT_IN`, with a
function here that opens its URLs and one that checks them without opening anything. The name of an
entry point is the scheme, and its object is an `Opener`:

    [options.entry_points]
    lightcache.storage =
        mine = my_package.storage:open_mine
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import unquote

from lightcache.errors import ConfigError, LightcacheError, StorageError
from lightcache.storage import stacked
from lightcache.storage.common import check_spec
from lightcache.storage.memory import MemoryStorage
from lightcache.storage.protocol import Storage, StorageSpec

GROUP = "lightcache.storage"
REMOTE = {
    "mooncake": "mooncake",
    "redis": "redis",
    "rediss": "redis",
    "s3": "s3",
    "valkey": "redis",
    "valkeys": "redis",
}
"""Schemes of `lightcache.storage.remote`, and their modules. A module has `parse(scheme, where,
options)`, which checks a URL without connecting, and `open_url(scheme, where, options, spec)`,
which imports the store's client, or says what to install. A row here is a row of `_BUILT_IN`."""

SERVICE = "service:"
"""In the place of a URL: the storage service of a cache. It is not opened here, but by `open_tier`.
"""

Opener = Callable[[str, StorageSpec], Storage]
"""Opens the part of a URL after "scheme:", for a spec. Raises ConfigError or StorageError."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def open_storage(
    url: str | Sequence[str],
    *,
    page_bytes: int | None = None,
    spec: StorageSpec | None = None,
) -> Storage:
    """Open a storage.

    Args:
        url: `disk:/mnt/nvme/cache?capacity=1TiB`, `redis://host:6379/0`, `s3://bucket/prefix`,
            `mooncake://host:50051`, `memory:`, `memory:?capacity=1GiB`,
            `flaky:read_fail=0.1,corrupt=0.01,seed=3:memory:`, or a URL of a registered scheme.
            Two URLs, as a list or as `stack:URL|URL`, make a `StackedStorage`, the nearer first.
        page_bytes: the size of a page; or
        spec: the spec of the pages: `StorageSpec.of(cache)`.

    Raises:
        ConfigError: an unknown scheme (the message lists the known ones), or unknown options.
        StorageError: the storage cannot be opened.
    """
    if (spec is None) == (page_bytes is None):
        raise ConfigError("give the size of a page once: page_bytes= or spec=")
    if spec is None:
        assert page_bytes is not None
        spec = StorageSpec(page_bytes)
    check_spec(spec)
    url = _alone(url)
    if isinstance(url, (list, tuple)):
        return _stack(url, spec)
    scheme, rest = _parts(url)
    return _opener(scheme)(rest, spec)


def check_url(url: str | Sequence[str]) -> None:
    """Check one or two URLs without opening anything. A disk is not opened, since that would
    allocate its space for pages of a wrong size.

    Raises:
        As `open_storage`.
    """
    url = _alone(url)
    if isinstance(url, (list, tuple)):
        _check_stack(url)
    else:
        _check(url, imports=True)


def is_service(url: str | Sequence[str]) -> bool:
    """Whether it is "service:", or a list of that alone."""
    return _alone(url) == SERVICE


def _check(url: object, *, imports: bool) -> None:
    """See `check_url`.

    Args:
        imports: also import the openers of other packages. Only they can check the rest of a URL.
    """
    scheme, rest = _parts(url)
    if scheme in _BUILT_IN:
        _BUILT_IN[scheme].check(rest, imports)
    elif imports or scheme not in schemes():
        _opener(scheme)


def register(scheme: str, opener: Opener) -> None:
    """Register an opener for a scheme in this process: for tests, or without a package.

    Raises:
        ConfigError: a bad scheme, a registered one, or an opener that is not callable.
    """
    given: Any = scheme
    if not (isinstance(given, str) and _SCHEME.fullmatch(given)):
        raise ConfigError(
            f"scheme: expected a small letter, then small letters, digits and '+.-', found "
            f"{scheme!r}"
        )
    if not callable(opener):
        raise ConfigError(f"opener: expected a function of (rest_of_url, spec), found {opener!r}")
    opener = _guarded(scheme, opener)
    with _lock:
        if scheme in _openers:
            raise ConfigError(f"scheme: {scheme!r} is registered already; choose another")
        _openers[scheme] = opener


def schemes() -> list[str]:
    """The names of all known schemes."""
    with _lock:
        known = set(_openers)
    return sorted(known | {entry.name for entry in entry_points(group=GROUP)})


def _opener(scheme: str) -> Opener:
    with _lock:
        known = _openers.get(scheme)
    if known is not None:
        return known
    for entry in entry_points(group=GROUP, name=scheme):
        try:
            opener: Opener = entry.load()
        except Exception as error:  # the import may raise anything
            raise StorageError(
                f"storage: {entry.value} of scheme {scheme!r} cannot be imported: {error!r}; "
                "repair or remove its package"
            ) from error
        return _guarded(scheme, opener)
    raise ConfigError(
        f"storage: expected a scheme of {schemes()}, found {scheme!r}; others come with packages "
        f"that have an entry point {GROUP!r}, or by register()"
    )


def _guarded(scheme: str, opener: Opener) -> Opener:
    """Wrap an opener of another package: any failure of it becomes a StorageError."""

    def opened(rest: str, spec: StorageSpec) -> Storage:
        try:
            found: Any = opener(rest, spec)
        except LightcacheError:
            raise
        except Exception as error:
            raise StorageError(
                f"storage: the opener of scheme {scheme!r} failed: {error!r}; repair its package"
            ) from error
        if not isinstance(found, Storage):
            raise StorageError(
                f"storage: the opener of scheme {scheme!r} returned {found!r}, expected a "
                "Storage; repair its package"
            )
        return found

    return opened


def _options(text: str, separator: str) -> dict[str, str]:
    """Parse options. A plus is not a space: values are sizes and files, not data of web forms."""
    found: dict[str, str] = {}
    for part in text.split(separator):
        name, equals, value = part.partition("=")
        if not (name and equals):
            raise ConfigError(
                f"storage: expected options such as name=value{separator}..., found {text!r}"
            )
        if unquote(name) in found:
            raise ConfigError(f"storage: expected each option once, found {name} twice: {text!r}")
        found[unquote(name)] = unquote(value)
    return found


def _parts(url: object) -> tuple[str, str]:
    """The scheme, and the rest."""
    if not isinstance(url, str):
        raise ConfigError(f"storage: expected a URL such as 'memory:', or a list, found {url!r}")
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise ConfigError(
            f"storage: expected a URL such as 'memory:', found {url!r}; a folder is "
            "'disk:/mnt/nvme/cache?capacity=1TiB'"
        )
    return scheme, rest


def _alone(url: str | Sequence[str]) -> str | Sequence[str]:
    """The URL of a list of one; otherwise the argument."""
    return url[0] if isinstance(url, (list, tuple)) and len(url) == 1 else url


def _check_stack(parts: Sequence[str]) -> None:
    how, urls = _stack_of(parts)
    for each in urls:
        try:
            check_url(each)
        except ConfigError:
            raise
        except Exception:  # such as a missing package
            if not how["skip"]:
                raise


def _stack_of(parts: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The checked options of a stack, and its URLs."""
    query, urls = stacked.split(parts)
    return stacked.parse(_options(query, "&") if query else {}), urls


def _stack(parts: Sequence[str], spec: StorageSpec) -> Storage:
    how, urls = _stack_of(parts)
    for number, url in enumerate(urls, 1):  # check all before a disk is made in vain
        try:
            _check(url, imports=False)
        except ConfigError as wrong:
            name = f"{number} of {len(urls)}, {url.partition(':')[0]}:"
            raise ConfigError(f"stack, storage {name} {wrong}") from wrong
    return stacked.open_stack(urls, spec, lambda url, spec: open_storage(url, spec=spec), **how)


# ---- The built-in schemes


@dataclass(frozen=True)
class _Scheme:
    """How the URLs of a built-in scheme are opened, and checked without opening anything."""

    open: Opener
    check: Callable[[str, bool], object]
    """Of the part after "scheme:"; see `_check` for the bool. Raises as `check_url`."""


def _open_stack(rest: str, spec: StorageSpec) -> Storage:
    return _stack(rest.split("|"), spec)


def _check_stack_url(rest: str, imports: bool) -> None:
    if imports:
        _check_stack(rest.split("|"))


def _open_service(rest: str, spec: StorageSpec) -> Storage:
    found = repr(SERVICE + rest) if rest else "it beside another, or where a storage is opened"
    raise ConfigError(
        f"storage: expected {SERVICE!r} alone, as the only storage of an engine or a manager, "
        f"found {found}; it is the storage service of the cache, which has the URLs: `lightcache "
        "storage NAME --url URL`, with a second --url for a second storage"
    )


def _check_service(rest: str, imports: bool) -> None:
    _open_service(rest, StorageSpec(1))


def _open_memory(rest: str, spec: StorageSpec) -> Storage:
    where, _, query = rest.partition("?")
    if where:
        raise ConfigError(f"memory: expected 'memory:' or 'memory:?options', found {where!r}")
    return MemoryStorage.open(_options(query, "&") if query else {}, spec)


def _check_memory(rest: str, imports: bool) -> None:
    _open_memory(rest, StorageSpec(1)).close()  # any capacity has room for such a page


def _open_disk(rest: str, spec: StorageSpec) -> Storage:
    from lightcache.storage.disk import DiskStorage  # imports the index, only needed for a disk

    where, _, query = rest.partition("?")
    return DiskStorage.open(where, _options(query, "&") if query else {}, spec)


def _check_disk(rest: str, imports: bool) -> None:
    from lightcache.storage.disk.backend import parse

    where, _, query = rest.partition("?")
    parse(where, _options(query, "&") if query else {})


def _remote(scheme: str) -> Any:
    return importlib.import_module(f"lightcache.storage.remote.{REMOTE[scheme]}")


def _remote_scheme(scheme: str) -> _Scheme:
    def opened(rest: str, spec: StorageSpec) -> Storage:
        where, _, query = rest.partition("?")
        found: Storage = _remote(scheme).open_url(
            scheme, where, _remote_options(scheme, query), spec
        )
        return found

    def check(rest: str, imports: bool) -> None:
        where, _, query = rest.partition("?")
        _remote(scheme).parse(scheme, where, _remote_options(scheme, query))

    return _Scheme(opened, check)


def _remote_options(scheme: str, query: str) -> dict[str, str]:
    """Parse options. No error shows them: they may be the end of a password with a '?' in it."""
    try:
        return _options(query, "&") if query else {}
    except ConfigError:
        raise ConfigError(
            f"{scheme}: expected options such as name=value&name=value behind the '?', each "
            "once; in a password '?' is written %3F"
        ) from None


def _flaky_of(rest: str) -> tuple[dict[str, str], str]:
    """The options, and the URL of the wrapped storage."""
    options, colon, inner = rest.partition(":")
    if not colon or not inner:
        raise ConfigError(
            f"flaky: expected options, a colon, and the URL of another storage, as in "
            f"'flaky:read_fail=0.1,seed=3:memory:', found {rest!r}"
        )
    return _options(options, ",") if options else {}, inner


def _open_flaky(rest: str, spec: StorageSpec) -> Storage:
    from lightcache.storage.testing.faults import FlakyStorage  # for drills alone

    chosen, inner = _flaky_of(rest)
    FlakyStorage.open(chosen, MemoryStorage(spec)).close()  # check before a disk is made in vain
    backend = open_storage(inner, spec=spec)
    try:
        return FlakyStorage.open(chosen, backend)
    except LightcacheError:
        backend.close()
        raise


def _check_flaky(rest: str, imports: bool) -> None:
    from lightcache.storage.testing.faults import FlakyStorage

    chosen, inner = _flaky_of(rest)
    FlakyStorage.open(chosen, MemoryStorage(StorageSpec(4096))).close()
    _check(inner, imports=imports)


_BUILT_IN: dict[str, _Scheme] = {
    "memory": _Scheme(_open_memory, _check_memory),
    "disk": _Scheme(_open_disk, _check_disk),
    "flaky": _Scheme(_open_flaky, _check_flaky),
    "service": _Scheme(_open_service, _check_service),
    "stack": _Scheme(_open_stack, _check_stack_url),
    **{scheme: _remote_scheme(scheme) for scheme in REMOTE},
}
_lock = threading.Lock()
_openers: dict[str, Opener] = {scheme: built_in.open for scheme, built_in in _BUILT_IN.items()}

__all__ = [
    "GROUP",
    "REMOTE",
    "SERVICE",
    "Opener",
    "check_url",
    "is_service",
    "open_storage",
    "register",
    "schemes",
]
