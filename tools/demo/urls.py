"""What a demo must know of a storage's URL: whether it outlives its process, and where it is."""

from __future__ import annotations

import os

from lightcache.storage.urls import REMOTE, check_url, open_storage

NONE = "none"
"""In place of a URL: no storage."""


def outlives(url: str) -> bool:
    """Whether what is stored there is found again by the processes of another day. Of a scheme that
    is not ours we suppose so."""
    scheme, _, rest = url.partition(":")
    if scheme == "flaky":
        return outlives(rest.partition(":")[2])
    if scheme == "stack":
        return any(map(outlives, _stacked(rest)))
    return scheme != "memory"


def checked(url: str) -> str:
    """The URL as every process of a demo will understand it: they have another working folder.

    Raises:
        As `open_storage`: whatever is wrong with it, as far as it can be said without making
            anything. A server is asked whether it is there.
    """
    check_url(url)
    _ask(url)
    return _rooted(url)


def _ask(url: str) -> None:
    scheme, _, rest = url.partition(":")
    if scheme == "flaky":
        _ask(rest.partition(":")[2])
    elif scheme == "stack":
        for each in _stacked(rest):
            _ask(each)
    elif scheme in REMOTE:
        open_storage(url, page_bytes=4096).close()


def _rooted(url: str) -> str:
    scheme, colon, rest = url.partition(":")
    if scheme == "flaky":
        options, colon, inner = rest.partition(":")
        return f"{scheme}:{options}{colon}{_rooted(inner)}"
    if scheme == "stack":
        return f"{scheme}:{'|'.join(_rooted(each) for each in rest.split('|'))}"
    if scheme == "disk":
        where, mark, query = rest.partition("?")
        return f"{scheme}{colon}{os.path.abspath(where)}{mark}{query}"
    return url


def _stacked(rest: str) -> list[str]:
    """URLs of a stack, without its options."""
    return [each for each in rest.split("|") if not each.startswith("?")]


__all__ = ["NONE", "checked", "outlives"]
