"""`lightcache top`: caches and what happens in them, live, in a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console, Group

from lightcache.errors import LightcacheError
from lightcache.tools.facts import Facts, state_of
from lightcache.tools.image import name_argument, unknown
from lightcache.tools.output import (
    Command,
    check_writable,
    console,
    emit,
    hush,
    json_option,
    save_picture,
)
from lightcache.tools.readings import TIERS, Reading, Watch, details
from lightcache.tools.top_screen import (
    CacheRow,
    ClientRow,
    History,
    Look,
    cache_rows,
    client_rows,
    draw,
    warnings_of,
)

SCREEN_SHARE = 0.0035
DETAIL_SHARE = 0.001
"""Of a core: for readings and the screen, and for copies of whole indexes. Where they cost more,
they become rarer. Together with the wake-ups less than half a percent."""
GONE = 128 + signal.SIGHUP
"""Exit status where the terminal is gone."""
KEYS = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b[C": "enter",
    b"\x1bOC": "enter",
    b"l": "enter",
    b"\x1b[D": "back",
    b"\x1bOD": "back",
    b"h": "back",
    b"\x7f": "back",
    b"\x1b": "back",
    b"\t": "tab",
    b"s": "sort",
    b"r": "reverse",
    b"q": "quit",
    b"Q": "quit",
}


@click.command(cls=Command)
@name_argument(required=False)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two readings, at least.",
)
@click.option("--once", is_flag=True, help="Print one screen, after one interval, and end.")
@click.option("--svg", metavar="FILE", help="Write a picture of one screen there, and end.")
@json_option
def top(name: str | None, interval: float, once: bool, svg: str | None, as_json: bool) -> None:
    """Watch all caches, or the cache NAME: hit ratios, tokens saved, room, what is evicted next,
    transfers, storage, clients, warnings.

    Reads as `dump` does: takes no lock and no slot. It takes half a percent of a core at most; on
    machines with much to read it reads less often than asked. Rates are of the last interval,
    ratios of the last minute. Without a terminal, and with --json, it prints one reading.
    """
    out = console()
    if svg is not None:
        check_writable("--svg", svg)
    with Watch() as watch:
        history, look = History(), Look(cache=name, only=name)
        _read(watch, history)
        if name is not None and name not in history.now:
            raise unknown(name)
        if once or as_json or svg or not out.is_terminal or out.is_dumb_terminal:
            time.sleep(interval)
            _read(watch, history)
            shown = [each for each in history.now if name in (None, each)]
            _examine(history, shown)
            if as_json:
                emit(document(history, shown))
            elif svg:
                _picture(svg, history, look, interval)
            else:
                _print(out, history, look, interval)
        else:
            with _signals() as woken:
                _Live(out, watch, history, look, interval, woken).run()


def _read(watch: Watch, history: History) -> None:
    history.add(time.monotonic(), watch.read())


def _examine(history: History, which: list[str]) -> float:
    """Copy some caches. Returns what the costliest took of a processor."""
    most = 0.0
    for name in which:
        if not history.now[name].readable:
            continue
        try:
            history.details[name] = details(name)
            history.problems.pop(name, None)
            most = max(most, history.details[name].cost_s)
        except (LightcacheError, OSError, ValueError, IndexError) as error:
            history.details.pop(name, None)
            history.problems[name] = str(error)
    return most


def _print(out: Console, history: History, look: Look, interval: float) -> None:
    """One screen as lines, all of it."""
    title = f"lightcache top  over {interval:g} s"
    for line in draw(history, look, out.width, 1000, title)[:-1]:
        out.print(line, crop=False)


def _picture(path: str, history: History, look: Look, interval: float) -> None:
    """The screen of a terminal of 110 columns, as an SVG."""
    out = Console(file=io.StringIO(), record=True, width=110, force_terminal=True, highlight=False)
    for line in draw(history, look, out.width, 40, f"lightcache top  over {interval:g} s"):
        out.print(line, no_wrap=True)
    save_picture(out, path, "lightcache top")


# ---- JSON


def document(history: History, shown: list[str]) -> Facts:
    """Caches for JSON: totals, ratios of all that was counted, and rates of the last interval."""
    rows = [row for row in cache_rows(history) if row.identity in shown]
    seconds = max((row.rates.seconds for row in rows), default=0.0)
    return {"interval_s": seconds, "caches": [_cache(history, row) for row in rows]}


def _cache(history: History, row: CacheRow) -> Facts:
    reading = row.reading
    known = history.details.get(reading.name)
    broken, notes = warnings_of(history, reading.name)
    return {
        "name": reading.name,
        "uuid": reading.uuid or None,
        "state": reading.state,
        "problem": reading.problem,
        "lifetime": reading.lifetime,
        "age_s": reading.age_s,
        "page_bytes": reading.page_bytes,
        "page_tokens": reading.page_tokens,
        **{name: getattr(reading, name) for name in _ROOM},
        **_figures(row),
        "counted": None if reading.counts is None else dict(reading.counts.total),
        "storage": _storage(reading, row),
        "clients": [_client(each) for each in client_rows(history, reading)],
        "reservation_list": [] if known is None else [*known.reservations],
        "next_evicted": [] if known is None else [*known.next_evicted],
        "not_working": broken,
        "hints": notes,
    }


_ROOM = (
    *("pages", "free", "writing", "ready", "held", "doomed", "evictable", "kept"),
    *("reservations", "tickets", "clock"),
)


def _figures(row: CacheRow | ClientRow) -> Facts:
    """Ratios and rates; null: not known."""
    tiers = row.minute.tier_ratios()
    rates = row.rates

    def moved(name: str) -> float | None:
        return rates.per_second(rates.counted[name]) if name in rates.counted else None

    return {
        "hit_ratio": row.minute.hit_ratio(),
        "tier_hit_ratios": None if tiers is None else {tier: tiers[tier] for tier in TIERS},
        "saved_tokens_per_s": row.saved(),
        "pages_per_s": {name: rates.per_second(count) for name, count in rates.pages.items()},
        "loaded_bytes_per_s": moved("loaded_bytes"),
        "offloaded_bytes_per_s": moved("offloaded_bytes"),
    }


def _storage(reading: Reading, row: CacheRow) -> Facts | None:
    if reading.storage is None:
        return None
    return {
        **dataclasses.asdict(reading.storage),
        "read_bytes_per_s": row.stored("read_bytes"),
        "written_bytes_per_s": row.stored("written_bytes"),
    }


def _client(row: ClientRow) -> Facts:
    client = row.client
    return {
        "slot": client.slot,
        "engine": row.engine or None,
        "role": client.role,
        "pid": client.pid,
        "pid_namespace": client.pidns,
        "alive": client.alive,
        "process": state_of(client) if client.alive else "gone",
        "quarantine_s": client.quarantine_s,
        "device": client.device,
        "attached_s": client.attached_s,
        "pins": None if row.held is None else row.held[0],
        "pinned_pages": None if row.held is None else row.held[1],
        **{name: getattr(client, name) for name in row.rates.pages},
        **_figures(row),
    }


# ---- A terminal


class _Stopped(Exception):
    """Ctrl-Z: give the terminal back, stop, and begin again."""


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Signals end or wake the loop at once. Yields a descriptor that is readable after one."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    def stop(number: int, frame: object) -> None:
        raise _Stopped

    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wanted: dict[int, Any] = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGTSTP: stop,
        signal.SIGWINCH: lambda number, frame: None,
    }
    before = {number: signal.signal(number, call) for number, call in wanted.items()}
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, call in before.items():
            signal.signal(number, call)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Keys come one by one and are not echoed. Yields a descriptor; None: no keyboard."""
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, AttributeError, termios.error):
        yield None
        return
    try:
        tty.setcbreak(number, termios.TCSANOW)
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


class _Live:
    """The screen and its loop."""

    def __init__(
        self,
        out: Console,
        watch: Watch,
        history: History,
        look: Look,
        interval: float,
        woken: int,
    ) -> None:
        self._out, self._watch, self._history, self._look = out, watch, history, look
        self._interval, self._woken = interval, woken
        self._due: dict[str, float] = {}
        self._every = interval

    def run(self) -> None:
        """Until the user leaves, or the terminal is gone."""
        while True:
            try:
                with _keys() as keys, self._out.screen(hide_cursor=True):
                    self._loop(keys)
                return
            except _Stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            except (OSError, termios.error) as error:
                if error.args[0] != errno.EIO:
                    raise
                hush()
                raise SystemExit(GONE) from None

    def _loop(self, keys: int | None) -> None:
        waiting = [self._woken] if keys is None else [self._woken, keys]
        due = 0.0
        while True:
            if time.monotonic() >= due:
                began = time.process_time()
                _read(self._watch, self._history)
                self._show()
                spent = time.process_time() - began
                self._examine_one()
                self._every = max(self._interval, spent / SCREEN_SHARE)
                due = time.monotonic() + self._every
            ready, _, _ = select.select(waiting, [], [], max(0.0, due - time.monotonic()))
            if self._woken in ready:
                os.read(self._woken, 4096)
            if keys in ready and not self._press(os.read(keys or 0, 1024)):
                return
            if ready:
                self._show()

    def _show(self) -> None:
        size = self._out.size
        every = f"every {self._every:.3g} s"
        lines = draw(self._history, self._look, size.width, size.height, f"lightcache top  {every}")
        with self._out.capture() as drawn:
            self._out.print(Group(*lines), end="", no_wrap=True, crop=True)
        # From the top, each line cleared behind its text, and all below: nothing flickers.
        text = drawn.get().replace("\n", "\x1b[K\r\n")
        self._out.file.write(f"\x1b[H{text}\x1b[K\x1b[J")
        self._out.file.flush()

    def _examine_one(self) -> None:
        """Copy the cache that waits for it longest: the one that is looked into, or each in
        turn."""
        now, chosen = time.monotonic(), self._look.cache
        readings = self._history.now
        names = [name for name in readings if chosen in (None, name) and readings[name].readable]
        known = self._history.details.keys() | self._history.problems.keys()
        late = [name for name in names if name not in known or self._due.get(name, 0.0) <= now]
        if not late:
            return
        name = min(late, key=lambda each: (each in known, self._due.get(each, 0.0)))
        cost = _examine(self._history, [name])
        for each in readings:  # the share is of all of them
            self._due[each] = max(self._due.get(each, 0.0), now + cost / DETAIL_SHARE)

    def _press(self, data: bytes) -> bool:
        """Follow the keys. False: the user wants to leave, or the terminal is gone."""
        if not data:
            return False
        while data:
            known = [key for key in KEYS if data.startswith(key)]
            key = max(known, key=len, default=data[:1])
            data = data[len(key) :]
            if key in KEYS and not self._look.press(KEYS[key]):
                return False
        return True
