"""What a demo must know of a storage's URL: whether it outlives its process, and where it is."""

from __future__ import annotations

import os

from lightcache.storage.urls import check_url

NONE = "none"
"""In place of a URL: no storage."""


def outlives(url: str) -> bool:
    """Whether what is stored there is found again by the processes of another day. Of a scheme that
    is not ours we suppose so."""
    scheme, _, rest = url.partition(":")
    if scheme == "flaky":
        return outlives(rest.partition(":")[2])
    return scheme != "memory"


def checked(url: str) -> str:
    """The URL as every process of a demo will understand it: they have another working folder.

    Raises:
        As `open_storage`: whatever is wrong with it, as far as it can be said without making
            anything.
    """
    check_url(url)
    return _rooted(url)


def _rooted(url: str) -> str:
    scheme, colon, rest = url.partition(":")
    if scheme == "flaky":
        options, colon, inner = rest.partition(":")
        return f"{scheme}:{options}{colon}{_rooted(inner)}"
    if scheme == "disk":
        where, mark, query = rest.partition("?")
        return f"{scheme}{colon}{os.path.abspath(where)}{mark}{query}"
    return url


__all__ = ["NONE", "checked", "outlives"]
