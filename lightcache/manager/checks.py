"""What callers hand in, looked at before anything is done with it: a refused call changes
nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from lightcache._arguments import Pages, pages
from lightcache.cache import Cache
from lightcache.errors import ConfigError
from lightcache.hashing import Tokens, pack_tokens
from lightcache.manager.asking import Asked, AskedMany
from lightcache.manager.device import DeviceTier
from lightcache.manager.matches import ANY, ManagerConfig, Wishes
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Request


def check_parts(host: Any, device: Any, config: Any) -> None:
    """What a manager is made of.

    Raises:
        ConfigError: something else.
    """
    for what, found, kind in (
        ("host", host, Cache),
        ("device", device, DeviceTier),
        ("config", config, ManagerConfig),
    ):
        if not isinstance(found, kind):
            raise ConfigError(f"{what}: expected a {kind.__name__}, found {found!r}")


def asked_many(
    requests: Sequence[Hashable],
    prompts: Sequence[Prompt],
    wishes: Sequence[Wishes] | None,
    limits: Sequence[int | None] | None,
    device_tokens: Sequence[int] | None,
) -> AskedMany:
    """What is to be planned. About 0.1 us a request: a queue is planned in every step.

    Raises:
        ConfigError: says which of the arguments is wrong, and why.
    """
    n = len(requests)
    check_ids(requests, "plan")
    for what, given in (
        ("prompts", prompts),
        ("wishes", wishes),
        ("limits", limits),
        ("device_tokens", device_tokens),
    ):
        if given is not None and len(given) != n:
            raise ConfigError(f"{what}: expected one for each of {n} requests, found {len(given)}")
    _check_all(prompts, Prompt, "prompts: expected a Prompt for each request")
    _check_all(wishes or (), Wishes, "wishes: expected Wishes for each request")
    _check_numbers("limit", limits, or_none=True)
    _check_numbers("device_tokens", device_tokens)
    return AskedMany(
        requests,
        prompts,
        [ANY] * n if wishes is None else wishes,
        [None] * n if limits is None else limits,
        device_tokens,
    )


def asked_of(
    request: Hashable,
    prompt: Prompt,
    wishes: Wishes,
    limit: int | None,
    device_tokens: int | None,
) -> Asked:
    """`asked_many` of one. Half a microsecond where all is as it mostly is.

    Raises:
        ConfigError: see there.
    """
    usual = type(prompt) is Prompt and type(wishes) is Wishes and type(request) in (int, str)
    if not usual or limit is not None or device_tokens is not None:
        given = None if device_tokens is None else [device_tokens]
        asked_many([request], [prompt], [wishes], [limit], given)
    return Asked._make((prompt, wishes, limit))


def _check_numbers(what: str, numbers: Any, *, or_none: bool = False) -> None:
    for one in () if numbers is None else numbers:
        if one is None and or_none:
            continue
        if not isinstance(one, (int, np.integer)) or one < 0:
            raise ConfigError(f"{what}: expected tokens >= 0, found {one!r}")


def check_ids(requests: Sequence[Hashable], call: str) -> None:
    """Ids of the requests of one call.

    Raises:
        ConfigError: one is named twice, or cannot be looked up.
    """
    if check_hashable(requests, call) != len(requests):
        raise ConfigError(f"{call}: one of the requests is named twice; name each once")


def check_hashable(requests: Sequence[Hashable], call: str) -> int:
    """Ids of requests; how many different ones.

    Raises:
        ConfigError: one cannot be looked up.
    """
    try:
        return len(set(requests))
    except TypeError as error:
        raise ConfigError(f"{call}: a request's id has to be hashable: {error}") from None


def _check_all(given: Sequence[Any], kind: type, expected: str) -> None:
    if set(map(type, given)) <= {kind}:
        return
    for one in given:
        if not isinstance(one, kind):
            raise ConfigError(f"{expected}, found {type(one).__name__} {one!r}"[:200])


def check_commits(
    device: DeviceTier,
    running: list[Request],
    totals: Sequence[int],
    new_tokens: Sequence[Tokens | None] | None,
    tables: Sequence[Pages] | None,
) -> tuple[list[bytes], Sequence[Pages] | None]:
    """What is to be committed; returns new tokens, packed, and tables as they can be used.

    Raises:
        ConfigError: says which request's arguments are wrong, and why.
    """
    n = len(running)
    if len(set(map(id, running))) != n:
        raise ConfigError("commit: one of the requests is named twice; name each once")
    for what, given in (("totals", totals), ("new_tokens", new_tokens), ("tables", tables)):
        if given is not None and len(given) != n:
            raise ConfigError(f"{what}: expected one for each of {n} requests, found {len(given)}")
    packed = [b""] * n
    if new_tokens is not None:
        packed = [_packed(one, each) for one, each in zip(running, new_tokens, strict=True)]
    for one, total, fresh in zip(running, totals, packed, strict=True):
        one.check(total, len(fresh) // 4)
    if tables is not None:
        return packed, [
            check_table(device, one, table, total)
            for one, table, total in zip(running, tables, totals, strict=True)
        ]
    if not device.owned and device.index is not None:
        for one, total in zip(running, totals, strict=True):
            if total and not len(one.table):
                raise ConfigError(
                    f"commit {one.id!r}: the engine owns the blocks; give the request's as table="
                )
    return packed, None


def _packed(one: Request, tokens: Tokens | None) -> bytes:
    if tokens is None:
        return b""
    try:
        return pack_tokens(tokens)
    except ConfigError as error:
        raise ConfigError(f"commit {one.id!r}: new_tokens: {error}") from None


def check_table(device: DeviceTier, one: Request, table: Any, total: int) -> Pages:
    """A request's blocks, of an attached device. Those that are of no use now are not looked at.

    Raises:
        ConfigError: no row of block numbers, or of an owned device, which knows them.
    """
    if device.owned:
        raise ConfigError(
            f"table of {one.id!r}: blocks of an owned device are those that `allocate` returned; "
            "leave the table out"
        )
    found = pages(table)
    fresh = found[one.named : total // device.block_tokens]
    if device.index is not None and len(fresh):  # seldom, while single tokens are generated
        least, most = int(fresh.min()), int(fresh.max())
        if not 0 <= least <= most < device.blocks:
            raise ConfigError(
                f"table of {one.id!r}: expected blocks of 0 to {device.blocks - 1}, found {least} "
                f"to {most}"
            )
    return found


def numbers_of(blocks: Any) -> Pages:
    """Block numbers from whatever sequence; negative ones are let through.

    Raises:
        ConfigError: no integers.
    """
    try:
        found = np.asarray(blocks)
    except ValueError as error:
        raise ConfigError(f"blocks: expected block numbers: {error}") from None
    if found.size and found.dtype.kind not in "iu":
        raise ConfigError(f"blocks: expected block numbers, found {found.dtype} {found.shape}")
    return np.ascontiguousarray(found, np.int32)


__all__ = [
    "asked_many",
    "asked_of",
    "check_commits",
    "check_hashable",
    "check_ids",
    "check_parts",
    "check_table",
    "numbers_of",
]
