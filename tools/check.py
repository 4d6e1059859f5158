"""`lightcache check`: every invariant, derived again from a copy."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from lightcache import pool as pool_file
from lightcache import snapshot
from lightcache._arguments import format_size
from lightcache.errors import CacheCorrupted
from lightcache.page_index import PageIndex
from lightcache.pool import PoolObject
from lightcache.shm.clients import slot_use
from lightcache.shm.layout import SegmentKind
from lightcache.shm.listing import read_segment
from lightcache.snapshot import CheckReport
from lightcache.tools import facts, structures
from lightcache.tools.facts import state_of
from lightcache.tools.image import Image, guest, name_argument, read, require, unknown
from lightcache.tools.output import BROKEN, FAILED, OK, Command, emit, fail, json_option, printable

_BUSY = "it was never quiet for the time of a copy: this may be an artefact; wait longer (--wait)"

# Pinning takes no lock, so these may seem broken in a copy of a busy cache (see `_moving`).
PIN_INVARIANTS = frozenset({26, 27, 28, 43, 44, 50})


@dataclass(frozen=True)
class Result:
    """The result of a check."""

    status: int
    """OK, BROKEN or FAILED: the exit status."""
    report: CheckReport
    note: str = ""
    pool: PoolObject | None = None
    """The object with the pages; None: an index without a pool, or it is unknown."""
    slots: str = ""
    """Whose the client slots are, in a line."""

    def with_pool(self, pool: PoolObject | None) -> Result:
        """The same, with the state of the pool."""
        status = self.status
        if pool and pool.problem and status != BROKEN:
            status = BROKEN if pool.seen else FAILED
        return replace(self, status=status, pool=pool)


@click.command(cls=Command)
@name_argument()
@click.option(
    "--lock", is_flag=True, help="Attach, and hold the lock while copying: reservations wait."
)
@click.option("--wait", default=5.0, show_default=True, help="Seconds to wait for a quiet instant.")
@json_option
@click.pass_context
def check(ctx: click.Context, name: str, lock: bool, wait: float, as_json: bool) -> None:
    """Check the cache NAME, or a list, dict, ring, log or other segment.

    Works on a copy, without lock or slot, also if the holder of the lock is stopped or dead: its
    unfinished step is undone in the copy, as the next holder would do.

    Exit status: 0 every invariant holds, 1 one is broken (the first is named), 2 it could not be
    checked.
    """
    kind = require(name).kind
    if kind.upper() in SegmentKind.__members__ and kind != "index":
        ctx.exit(_structure(name, SegmentKind[kind.upper()], wait, as_json))
    try:
        result = _attached(name) if lock else _copied(name, wait)
    except CacheCorrupted as error:
        result = Result(BROKEN, _damaged(str(error)))
    if as_json:
        emit(_json(name, result))
    else:
        _say(name, result)
    ctx.exit(result.status)


def _structure(name: str, kind: SegmentKind, wait: float, as_json: bool) -> int:
    """Check a segment without an index; returns the exit status."""
    try:
        checked = structures.check(name, kind, wait)
    except CacheCorrupted as error:
        checked = structures.Checked(False, str(error))
    status = FAILED if checked.clean is None else OK if checked.clean else BROKEN
    note = _BUSY if checked.clean is None else ""
    name_of_kind = kind.name.lower()
    if as_json:
        word = {OK: "clean", BROKEN: "broken", FAILED: "unchecked"}[status]
        emit({"name": name, "kind": name_of_kind, "status": word, "note": note, **asdict(checked)})
    elif status == FAILED:
        fail(f"{name!r} could not be checked: {checked.message}; {note}")
    else:
        broken = "" if checked.clean else "broken: "
        click.echo(f"{name}: {name_of_kind}: {broken}{printable(checked.message)}")
        if checked.recovered:
            click.echo(f"  {checked.recovered} log entries of an unfinished step undone")
    return status


def _attached(name: str) -> Result:
    with guest(name) as info, PageIndex.attach(name, role="check") as index:
        report = index.check()
        grown = index.stats().grown
        config = index.segment.config
        pool = pool_file.look(name, info.uuid, info.uid, config, index.pages, grown)
        slots = slot_use([one for one in index.clients() if one.slot != index.client_id.slot])
    return replace(Result(OK if report.clean else BROKEN, report).with_pool(pool), slots=slots)


def _copied(name: str, wait: float) -> Result:
    """Check the index in copies, and the pool itself. A missing pool is no finding if the cache was
    removed meanwhile."""
    result, image = _index_copied(name, wait)
    pool = facts.pool(image)
    if pool and pool.problem:
        now = read_segment(name)
        if now is None or now.uuid != image.info.uuid or now.retired:
            raise unknown(name)
    return replace(result.with_pool(pool), slots=slot_use(image.clients))


def _index_copied(name: str, wait: float) -> tuple[Result, Image]:
    """Take copies until one is conclusive. A clean copy is, even if it mixes two instants; a
    finding is if it is of one instant and the next copy repeats it."""
    end = time.monotonic() + wait
    before: tuple[Image, CheckReport] | None = None
    while True:
        image = read(name)
        if image.root.repairing:
            if time.monotonic() >= end:
                return _half_repaired(image), image
            continue
        report = _check_image(image)
        if report.clean:
            return Result(OK, report), image
        if image.steady and before is not None and _repeats(before, (image, report)):
            return Result(BROKEN, report), image
        if time.monotonic() >= end:
            return _undecided(image, report), image
        before = (image, report) if image.steady else None


def _half_repaired(image: Image) -> Result:
    holder = facts.lock(image)["holder"]
    if holder and holder["alive"]:
        return Result(FAILED, _damaged("a repair is running"), "try again when it has finished")
    return Result(
        BROKEN, _damaged("a repair was killed; the next holder of the lock, or `repair`, redoes it")
    )


def _check_image(image: Image) -> CheckReport:
    root, place = image.root, image.place
    says = (root.pages, root.buckets, root.reservations, root.tickets, root.chunks)
    is_so = (place.pages, place.buckets, place.reservations, place.tickets, place.chunks)
    if says != is_so or root.index_bytes != place.end:
        return _damaged(f"the root says (pages, buckets, ...) {says}, expected {is_so}; remove it")
    quiet = image.steady and not image.held
    return snapshot.check_copy(image.data, image.pages, quiet=quiet)


def _repeats(before: tuple[Image, CheckReport], now: tuple[Image, CheckReport]) -> bool:
    """Whether two findings in a row are the same, and no client was pinning."""
    first, second = before[1], now[1]
    if (first.invariant, first.page) != (second.invariant, second.page):
        return False
    return second.invariant not in PIN_INVARIANTS or not _moving(before[0], now[0])


def _moving(before: Image, now: Image) -> bool:
    """Whether a client may have been pinning: it made a lookup, joined or left between two copies,
    or it is stopped, or dead and not reaped."""
    stamps = [
        [(c.slot, c.epoch, c.alive, c.lookups, c.reserved_pages) for c in image.clients]
        for image in (before, now)
    ]
    stuck = any(not c.alive or state_of(c) in ("stopped", "traced") for c in now.clients)
    return stuck or stamps[0] != stamps[1]


def _undecided(image: Image, report: CheckReport) -> Result:
    if report.invariant in PIN_INVARIANTS:
        # All invariants before the pins hold in this copy, and clients were changing the pins.
        again = snapshot.check_copy(image.data, image.pages, quiet=False)
        if again.clean:
            return Result(
                OK,
                again,
                "pins were not checked: clients were pinning, or are stopped, or dead",
            )
        report = again
    note = (
        "the cache was never quiet for the time of a copy, so this may be an artefact; wait longer "
        "(--wait), or block reservations while it is copied (--lock)"
    )
    return Result(FAILED, replace(report, quiet=False), note)


def _damaged(message: str) -> CheckReport:
    return CheckReport(
        clean=False,
        message=message,
        invariant=-1,
        page=0,
        free=0,
        writing=0,
        ready=0,
        doomed=0,
        held=0,
        pins=0,
        late_pins=0,
        quiet=True,
        recovered=0,
    )


def _json(name: str, result: Result) -> dict[str, Any]:
    status = {OK: "clean", BROKEN: "broken", FAILED: "unchecked"}[result.status]
    pool = result.pool and asdict(result.pool)
    return {
        "name": name,
        "status": status,
        "note": result.note,
        **asdict(result.report),
        "pool": pool,
        "slots": result.slots,
    }


def _say(name: str, result: Result) -> None:
    report, pool = result.report, result.pool
    problem = pool.problem if pool else None
    if result.status == FAILED:
        fail(f"{name!r} could not be checked: {problem or f'{report.message}; {result.note}'}")
        return
    if not report.clean and not result.note:  # with a note it could not be decided
        number = f"invariant {report.invariant}: " if report.invariant > 0 else ""
        click.echo(f"{name}: broken: {number}{printable(report.message)}")
        if report.invariant > 0:
            click.echo(f"stop the writers and run `lightcache repair {name}`")
    if problem:
        click.echo(f"{name}: broken: {printable(problem)}")
    if result.status == BROKEN:
        return
    click.echo(f"{name}: {report.message}")
    click.echo(
        f"  {report.ready} ready, {report.writing} writing, {report.doomed} doomed, "
        f"{report.held} held, the rest free; {report.pins} pins"
    )
    if report.late_pins:
        click.echo(
            f"  {report.late_pins} more pins are of tickets that were not adopted in time: the "
            "next call that evicts releases them"
        )
    if pool:
        held = f"{format_size(pool.allocated)} of {format_size(pool.length)} in memory"
        click.echo(f"  pool: {printable(pool.path)}, {held}")
    if result.slots:
        click.echo(f"  clients: {result.slots}")
    if report.recovered:
        click.echo(f"  {report.recovered} log entries of an unfinished critical section undone")
    if result.note:
        click.echo(f"  {result.note}")
