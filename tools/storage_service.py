"""`lightcache storage`: a process that writes a cache's pages to a storage, and reads them back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
from types import FrameType
from typing import Any

import click

from lightcache._arguments import format_size
from lightcache.cache import Cache
from lightcache.errors import ConfigError, InUse, LightcacheError, NotReady
from lightcache.shm.clients import ClientInfo
from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.common import Deadline
from lightcache.storage.service import StorageService
from lightcache.storage.service.board import ServiceStats, service_stats
from lightcache.storage.tasks import TierStats
from lightcache.storage.urls import check_url
from lightcache.tools.image import (
    cache_in_use,
    group_option_help,
    guest,
    name_argument,
    require,
)
from lightcache.tools.output import (
    BROKEN,
    age,
    console,
    emit,
    fail,
    json_option,
    lines,
    without_passwords,
)
from lightcache.tools.settings import Service

_PAUSE = 0.5  # seconds between two looks at whether the service has ended by itself


@click.command(cls=Service, either=(("status", "urls"),))
@name_argument(choose=cache_in_use)
@click.option(
    "--url",
    "urls",
    multiple=True,
    help="Of the storage, such as disk:/mnt/x?capacity=1TiB. Twice: the nearer first.",
)
@click.option(
    "--threads", type=int, default=2, show_default=True, help="Threads that call the storage."
)
@click.option(
    "--min-tokens", type=int, default=0, show_default=True, help="Shorter prompts are not written."
)
@click.option(
    "--seen", type=int, default=1, show_default=True, help="A page is written at its n-th offer."
)
@click.option(
    "--batch",
    "pages",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Pages in one call of the storage.",
)
@click.option(
    "--prefill-tokens-per-s",
    type=float,
    help="Prefill rate of the model: slower reads are declined.",
)
@click.option("--write-pages", type=int, help="Maximum pages that writes pin; default: a quarter.")
@click.option(
    "--grace",
    type=float,
    default=1.0,
    show_default=True,
    help="Seconds after its deadline until a call of the storage counts as hanging.",
)
@click.option(
    "--finish",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds to finish queued tasks at the end.",
)
@click.option("--group", help=group_option_help)
@click.option("--status", is_flag=True, help="Show the status of the service of NAME, and exit.")
@json_option
@click.pass_context
def storage(
    ctx: click.Context,
    /,
    name: str,
    urls: tuple[str, ...],
    pages: int,
    finish: float,
    group: str | None,
    status: bool,
    as_json: bool,
    **tier: Any,
) -> None:
    """Serve the cache NAME with a storage.

    Processes that attach to the cache send tasks through shared memory (StorageClient); only this
    process opens the storage. It runs until Ctrl-C or SIGTERM, and then finishes queued tasks; a
    second signal ends it immediately. Keys come from the clients, so it needs no secret.
    """
    if status:
        ctx.exit(_show(_status(name, group), name, as_json))
    Deadline(finish, what="finish")  # a nan passes for a number above 0, and fails at the end
    if not urls:
        raise click.UsageError("give --url, such as --url 'disk:/mnt/nvme/pages?capacity=1TiB'")
    check_url(urls)
    _check_kind(name)
    with Signals() as signals, contextlib.ExitStack() as stack:
        warm = stack.enter_context(contextlib.ExitStack())  # keeps the cache when we leave last
        warm.enter_context(guest(name))
        cache = Cache.attach(name, role="storage", group=group)
        stack.callback(_leave, cache)
        company = Company(cache)
        stack.callback(company.let_go, warm)
        backend = open_storage(urls, spec=StorageSpec.of(cache))
        closing = stack.enter_context(contextlib.ExitStack())
        closing.callback(backend.close)
        service = StorageService(cache, backend, group=pages, **tier)
        ended, begun = False, service.stats().tier
        try:
            _say_start(name, urls, as_json)
            while not (signals.end.wait(_PAUSE) or service.wait(0.0)):
                company.look()
        finally:
            try:
                ended = service.close(finish)
            finally:
                if not ended:  # closing it may wait for hanging calls: the process's exit ends them
                    closing.pop_all()
        _say_end(name, None if service.why else service.stats(), begun, as_json)
    if not ended:
        fail(f"{name}: calls of the storage hang; see its log")
    if service.why or not ended:  # the service has said why
        ctx.exit(BROKEN)


class Company:
    """The other clients of a cache: whether any attached, and all have left. Then the service is
    the last client, and removes a cache of lifetime "attached", as any other client would. If they
    were killed, or none attached, the cache stays for the next `open`."""

    def __init__(self, cache: Cache) -> None:
        """Calls `look` once."""
        self._cache = cache
        self._came = False
        self.look()

    def look(self) -> None:
        """Note whether other clients are attached."""
        self._came |= any(client.alive for client in self._others())

    @property
    def left(self) -> bool:
        """Whether others attached, and all have left."""
        return self._came and not self._others()

    def let_go(self, warm: contextlib.ExitStack) -> None:
        """Stop keeping the cache, if all have left."""
        if self.left:
            warm.close()

    def _others(self) -> list[ClientInfo]:
        ours = self._cache.client_id
        with contextlib.suppress(LightcacheError):  # removed under us
            return [client for client in self._cache.clients() if client.slot != ours.slot]
        return []


class Signals:
    """SIGINT and SIGTERM: the first one sets `end`, the next one interrupts."""

    def __init__(self) -> None:
        """Changes no handler until it is entered."""
        self.end = threading.Event()
        self._before: dict[int, Any] = {}

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self.end.is_set():
            raise KeyboardInterrupt
        self.end.set()

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._come)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _leave(cache: Cache) -> None:
    with contextlib.suppress(InUse):  # a call of the storage hangs with its pages: see `close`
        cache.close()


def _say_start(name: str, urls: tuple[str, ...], as_json: bool) -> None:
    shown = ", then ".join(map(without_passwords, urls))
    if as_json:
        click.echo(json.dumps({"name": name, "url": shown, "pid": os.getpid()}))
    else:
        click.echo(f"serving {name} with {shown} (pid {os.getpid()}); Ctrl-C ends it")


def _say_end(name: str, stats: ServiceStats | None, begun: TierStats, as_json: bool) -> None:
    """Print what this service did; as JSON the board's counters, of all services of the cache."""
    if as_json:
        click.echo(json.dumps(stats and dataclasses.asdict(stats)))
    elif stats is not None:
        tier = stats.tier
        written = format_size(tier.written_bytes - begun.written_bytes)
        read = format_size(tier.read_bytes - begun.read_bytes)
        click.echo(
            f"served {name}: {tier.tasks_finished - begun.tasks_finished:,} tasks finished, "
            f"{tier.tasks_failed - begun.tasks_failed:,} failed; {written} written, {read} read"
        )


def _check_kind(name: str) -> None:
    info = require(name)
    if info.kind not in ("index", ""):
        raise ConfigError(f"{name!r} holds a {info.kind} segment; a storage service serves a cache")


def _status(name: str, group: str | None) -> ServiceStats:
    _check_kind(name)
    try:
        return service_stats(name, group=group)
    except NotReady:
        raise NotReady(
            f"{name!r} has no storage service, nor a client of one; `lightcache storage {name} "
            "--url ...` starts one"
        ) from None


def _show(stats: ServiceStats, name: str, as_json: bool) -> int:
    if as_json:
        emit(dataclasses.asdict(stats))
    else:
        _show_lines(stats, name)
    return 0 if stats.serving else BROKEN


def _show_lines(stats: ServiceStats, name: str) -> None:
    tier = dataclasses.asdict(stats.tier)
    mine = dataclasses.asdict(stats)
    serving = f"pid {stats.pid}, {age(stats.age_s)}" if stats.serving else "no service"
    first = [("serving", serving), ("storage", _used(stats))]
    names = ("clients", "taken", "malformed", "halves", "late", "orphans", "lost", "full")
    sizes = ("read_bytes", "written_bytes")
    console().print(lines(f"storage service of {name}", first))
    console().print(lines("messages", [(field, mine[field]) for field in names]))
    rows: list[tuple[str, object]] = [
        (field, format_size(value) if field in sizes else value)
        for field, value in tier.items()
        if field != "state"
    ]
    console().print(lines("tier", rows))


def _used(stats: ServiceStats) -> str:
    if not stats.serving:
        return "not used"
    words = {"closed": "used", "half-open": "tried again", "open": "not used: it failed"}
    return words[stats.tier.state]
