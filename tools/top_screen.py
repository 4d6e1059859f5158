"""The screen of `lightcache top`: lines of text, made of readings and of what the user looks at."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from lightcache._arguments import format_size
from lightcache.shm.clients import ClientInfo
from lightcache.tools import facts, hints
from lightcache.tools.facts import Facts, state_of
from lightcache.tools.output import age, counted, printable
from lightcache.tools.readings import (
    TIERS,
    Change,
    Details,
    Reading,
    change,
    client_change,
    engine_of,
    process_of,
)

MINUTE = 60.0
"""Seconds that ratios are of; rates are of the last interval."""
KEYS = (
    "up/down choose  enter look into  esc back  tab other table  s sort  r reverse  q quit",
    "arrows, enter, esc, tab; s sort, r reverse, q quit",
)
Table = Literal["clients", "reservations"]


# ---- What was read


class History:
    """Readings of the last minute, and what was last found in copies."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, Reading]]] = deque()
        self.details: dict[str, Details] = {}
        self.problems: dict[str, str] = {}
        """Why there are no details of a cache."""
        self._uuids: dict[str, str] = {}

    def add(self, now: float, readings: Mapping[str, Reading]) -> None:
        """Add a reading, and forget those that are older than a minute, but one."""
        self._readings.append((now, readings))
        while len(self._readings) > 2 and self._readings[1][0] <= now - MINUTE:
            self._readings.popleft()
        for name in [*self.details, *self.problems]:
            if name not in readings or readings[name].uuid != self._uuids.get(name):
                self.details.pop(name, None)
                self.problems.pop(name, None)
        self._uuids = {name: reading.uuid for name, reading in readings.items()}

    @property
    def now(self) -> Mapping[str, Reading]:
        """The last reading; empty: there is none."""
        return self._readings[-1][1] if self._readings else {}

    def _before(self, name: str, uuid: str, *, last: bool) -> tuple[Reading | None, float]:
        """A reading to compare with, and its age: the one before the last, or the oldest of the
        same segment. None: there is none."""
        taken = self._readings[-1][0]
        earlier = [*self._readings][-2:-1] if last else [*self._readings][:-1]
        for then, readings in earlier:
            reading = readings.get(name)
            if reading is not None and reading.readable and reading.uuid == uuid:
                return reading, taken - then
        return None, 0.0

    def rates(self, name: str) -> Change:
        """What happened to a cache in the last interval; in 0 s, nothing, after the first."""
        reading = self.now[name]
        before, seconds = self._before(name, reading.uuid, last=True)
        return change(before or reading, reading, seconds)

    def minute(self, name: str) -> Change:
        """The same of the last minute; since its clients attached, if nothing happened in it."""
        reading = self.now[name]
        before, seconds = self._before(name, reading.uuid, last=False)
        recent = change(before, reading, seconds)
        asked = recent.hit_ratio() is not None or recent.counted.get("prompt_tokens")
        return recent if before is None or asked else change(None, reading, 0.0)

    def client(self, name: str, client: ClientInfo, *, last: bool) -> Change:
        """The same for a client of it."""
        reading = self.now[name]
        before, seconds = self._before(name, reading.uuid, last=last)
        if last and before is None:
            before = reading
        return client_change(before, reading, client, seconds)

    def unused(self, name: str, calls: int) -> str:
        """How long ago a page was used last, if so many calls have passed since."""
        tick, taken = self.now[name].clock - calls, self._readings[-1][0]
        for then, readings in reversed(self._readings):
            reading = readings.get(name)
            if reading is not None and reading.clock <= tick:
                return age(taken - then)
        return f"over {age(taken - self._readings[0][0])}"


# ---- What the user looks at


@dataclass
class Look:
    """The chosen row, and how far the user has gone into it."""

    cache: str | None = None
    """None: the list of caches."""
    client: tuple[int, int] | None = None
    """Slot and epoch of the only client to show."""
    reservation: int | None = None
    """Number of the only reservation to show."""
    table: Table = "clients"
    row: int = 0
    sort: dict[str, int] = field(default_factory=dict)
    """Number of the column, by table."""
    reverse: dict[str, bool] = field(default_factory=dict)
    chosen: Any = None
    """Identity of the row under the cursor, which stays on it when rows move."""
    drawn: Sequence[Any] = ()
    """Identities of the rows of the table with the cursor, as they were drawn last."""
    only: str | None = None
    """The cache that the command was given: there is no list to go back to."""

    @property
    def shown(self) -> str:
        """Name of the table with the cursor."""
        return "caches" if self.cache is None else self.table

    def press(self, key: str) -> bool:
        """Follow a key. False: the user wants to leave."""
        if key == "quit":
            return False
        inside = self.client is not None or self.reservation is not None
        if key in ("up", "down") and self.drawn and not inside:
            self.row = min(max(0, self.row + (1 if key == "down" else -1)), len(self.drawn) - 1)
            self.chosen = self.drawn[self.row]
        elif key == "enter" and self.chosen is not None and not inside:
            self._enter()
        elif key == "back":
            self._leave()
        elif key == "tab" and self.cache is not None and not inside:
            self.table = "reservations" if self.table == "clients" else "clients"
            self._begin()
        elif key == "sort":
            self.sort[self.shown] = self.sort.get(self.shown, 0) + 1
        elif key == "reverse":
            self.reverse[self.shown] = not self.reverse.get(self.shown, False)
        return True

    def _begin(self) -> None:
        """The cursor is at the top of a table that is not drawn yet."""
        self.row, self.chosen, self.drawn = 0, None, ()

    def _enter(self) -> None:
        if self.cache is None:
            self.cache, self.table = self.chosen, "clients"
        elif self.table == "clients":
            self.client = self.chosen
        else:
            self.reservation = self.chosen
        self._begin()

    def _leave(self) -> None:
        if self.client is not None or self.reservation is not None:
            self.client = self.reservation = None
        elif self.only is None:
            self.cache = None
        self._begin()


# ---- Tables


@dataclass(frozen=True)
class Column:
    """A column of a table. The later ones go first where a terminal is narrow."""

    name: str
    text: Callable[[Any], str]
    order: Callable[[Any], Any]
    right: bool = True


def _number(value: float | None) -> float:
    return -1.0 if value is None else value


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _bytes_rate(value: float | None) -> str:
    return "-" if value is None else f"{format_size(int(value))}/s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


@dataclass(frozen=True)
class CacheRow:
    """A row of the list of caches."""

    reading: Reading
    rates: Change
    minute: Change
    warnings: int

    @property
    def identity(self) -> str:
        """What the cursor stays on."""
        return self.reading.name

    @property
    def living(self) -> int:
        """Living clients."""
        return sum(client.alive for client in self.reading.clients)

    @property
    def used(self) -> float | None:
        """Share of pages with content."""
        reading = self.reading
        return None if not reading.pages else (reading.pages - reading.free) / reading.pages

    def saved(self) -> float | None:
        """Tokens a second."""
        tokens = self.rates.saved_tokens(self.reading.page_tokens)
        return None if tokens is None else self.rates.per_second(tokens)

    def hits(self) -> float | None:
        """Of all tiers, where managers count; otherwise of this index."""
        tiers = self.minute.tier_ratios()
        return self.minute.hit_ratio() if tiers is None else sum(tiers.values())

    def counted(self, name: str) -> float | None:
        """A rate of the managers' counts."""
        found = self.rates.counted.get(name)
        return None if found is None else self.rates.per_second(found)

    def written(self) -> float | None:
        """Bytes of published pages a second."""
        size = self.reading.page_bytes
        pages = self.rates.per_second(self.rates.pages["published_pages"])
        return None if size is None or pages is None else size * pages

    def stored(self, name: str) -> float | None:
        """Bytes a second that the storage service, or the managers' own storages, moved."""
        mine = {"read_bytes": "storage_read_bytes", "written_bytes": "storage_written_bytes"}[name]
        found = [self.rates.stored.get(name), self.rates.counted.get(mine)]
        known = [count for count in found if count is not None]
        return self.rates.per_second(max(known)) if known else None


def _dead(row: CacheRow) -> str:
    dead = len(row.reading.clients) - row.living
    return f"{row.living}+{dead} dead" if dead else f"{row.living}"


CACHES = (
    Column("cache", lambda r: r.reading.name, lambda r: r.reading.name, right=False),
    Column("state", lambda r: r.reading.state, lambda r: r.reading.state, right=False),
    Column("used", lambda r: _share(r.used), lambda r: -_number(r.used)),
    Column("hit", lambda r: _share(r.hits()), lambda r: -_number(r.hits())),
    Column("saved tok/s", lambda r: _rate(r.saved()), lambda r: -_number(r.saved())),
    Column("clients", _dead, lambda r: -r.living),
    Column("warn", lambda r: str(r.warnings or "-"), lambda r: -r.warnings),
    Column("written", lambda r: _bytes_rate(r.written()), lambda r: -_number(r.written())),
    Column(
        "loaded",
        lambda r: _bytes_rate(r.counted("loaded_bytes")),
        lambda r: -_number(r.counted("loaded_bytes")),
    ),
    Column(
        "evicted/s",
        lambda r: _rate(r.rates.per_second(r.rates.pages["evicted_pages"])),
        lambda r: -r.rates.pages["evicted_pages"],
    ),
    Column(
        "from storage",
        lambda r: _bytes_rate(r.stored("read_bytes")),
        lambda r: -_number(r.stored("read_bytes")),
    ),
    Column(
        "to storage",
        lambda r: _bytes_rate(r.stored("written_bytes")),
        lambda r: -_number(r.stored("written_bytes")),
    ),
)


@dataclass(frozen=True)
class ClientRow:
    """A row of a cache's clients."""

    client: ClientInfo
    engine: str
    rates: Change
    minute: Change
    held: tuple[int, int] | None
    """Pins and pinned pages; None: not known yet."""
    page_tokens: int | None

    @property
    def identity(self) -> tuple[int, int]:
        """What the cursor stays on."""
        return self.client.slot, self.client.epoch

    @property
    def state(self) -> str:
        """What its process does."""
        return state_of(self.client) if self.client.alive else self.client.life

    def hits(self) -> float | None:
        """See `CacheRow.hits`."""
        tiers = self.minute.tier_ratios()
        return self.minute.hit_ratio() if tiers is None else sum(tiers.values())

    def saved(self) -> float | None:
        """Tokens a second."""
        tokens = self.rates.saved_tokens(self.page_tokens)
        return None if tokens is None else self.rates.per_second(tokens)


def _per(name: str) -> Callable[[ClientRow], str]:
    return lambda r: _rate(r.rates.per_second(r.rates.pages[name]))


def _more(name: str) -> Callable[[ClientRow], float]:
    return lambda r: -r.rates.pages[name]


CLIENTS = (
    Column("slot", lambda r: str(r.client.slot), lambda r: r.client.slot),
    Column("engine", lambda r: r.engine or "-", lambda r: r.engine, right=False),
    Column("pid", lambda r: str(r.client.pid), lambda r: r.client.pid),
    Column("process", lambda r: r.state, lambda r: r.state, right=False),
    Column("hit", lambda r: _share(r.hits()), lambda r: -_number(r.hits())),
    Column(
        "holds",
        lambda r: "-" if r.held is None else f"{r.held[1]:,}",
        lambda r: -_number(None if r.held is None else r.held[1]),
    ),
    Column("since", lambda r: age(r.client.attached_s), lambda r: r.client.attached_s),
    Column("saved tok/s", lambda r: _rate(r.saved()), lambda r: -_number(r.saved())),
    Column("lookups/s", _per("lookups"), _more("lookups")),
    Column("written/s", _per("published_pages"), _more("published_pages")),
    Column("evicted/s", _per("evicted_pages"), _more("evicted_pages")),
)


@dataclass(frozen=True)
class ReservationRow:
    """A row of a cache's reservations."""

    entry: Facts
    owner: str

    @property
    def identity(self) -> int:
        """What the cursor stays on."""
        return int(self.entry["reservation"])


def _left(row: ReservationRow) -> str:
    return f"{row.entry['shards_left']} of {row.entry['shards']}"


RESERVATIONS = (
    Column("reservation", lambda r: str(r.identity), lambda r: r.identity),
    Column("state", lambda r: r.entry["state"], lambda r: r.entry["state"], right=False),
    Column("owner", lambda r: r.owner, lambda r: r.entry["owner"], right=False),
    Column("pages", lambda r: f"{r.entry['pages']:,}", lambda r: -r.entry["pages"]),
    Column("parts left", _left, lambda r: -r.entry["shards_left"]),
)
Row = CacheRow | ClientRow | ReservationRow


def _sorted(rows: list[Row], columns: Sequence[Column], look: Look, table: str) -> list[Row]:
    column = columns[look.sort.get(table, 0) % len(columns)]
    return sorted(rows, key=column.order, reverse=look.reverse.get(table, False))


def _cursor(rows: Sequence[Row], look: Look) -> int:
    """The row under the cursor, which follows the row it was on."""
    for number, row in enumerate(rows):
        if row.identity == look.chosen:
            look.row = number
    look.drawn = [row.identity for row in rows]
    look.row = min(look.row, max(0, len(rows) - 1))
    look.chosen = rows[look.row].identity if rows else None
    return look.row


def _table(
    rows: Sequence[Row], columns: Sequence[Column], look: Look, name: str, width: int, most: int
) -> list[Text]:
    """A heading and at most so many rows around the cursor; columns that do not fit are left
    out, the last ones first."""
    cells = [[printable(column.text(row)) for column in columns] for row in rows]
    widths = [
        max([cell_len(column.name) + 1, *(cell_len(line[at]) for line in cells)])
        for at, column in enumerate(columns)
    ]
    widths[0] = min(widths[0], max(12, width // 2))
    while len(widths) > 1 and sum(widths) + 2 * len(widths) > width:
        widths.pop()
    by = look.sort.get(name, 0) % len(columns)
    mark = "^" if look.reverse.get(name) else "v"
    heads = [column.name + (mark if at == by else " ") for at, column in enumerate(columns)]
    lines = [Text(_line(heads, columns, widths), style="bold")]
    at = _cursor(rows, look) if name == look.shown else -1
    first = max(0, min(at - most // 2, len(rows) - most))
    for number in range(first, min(len(rows), first + most)):
        style = "reverse" if number == at else _style(rows[number])
        lines.append(Text(_line(cells[number], columns, widths), style=style))
    if len(rows) > most:
        lines.append(Text(f"  {len(rows)} in all", style="dim"))
    return lines


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    parts = []
    for text, column, width in zip(cells, columns, widths, strict=False):
        if cell_len(text) > width:
            text = set_cell_size(text, width - 1) + "~"
        pad = " " * (width - cell_len(text))
        parts.append(pad + text if column.right else text + pad)
    return "  ".join(parts)


def _style(row: Row) -> str:
    if isinstance(row, CacheRow):
        return {"ready": "", "disabled": "yellow"}.get(row.reading.state, "red")
    if isinstance(row, ClientRow):
        return "" if row.client.alive else "red"
    return "" if row.entry["owner_alive"] else "red"


# ---- Screens


def warnings_of(history: History, name: str) -> tuple[list[str], list[str]]:
    """What does not work in a cache now, and other notes: of its last copy, and of its lock and
    clients as they are."""
    reading = history.now[name]
    if reading.copy is None:
        return [reading.problem or reading.state], []
    head = hints.sections(hints.of_head(reading.copy, facts.lock(reading.copy)))
    details = history.details.get(name)
    broken, notes = head["not_working"], head["hints"]
    if details is not None:
        broken, notes = [*broken, *details.not_working], [*notes, *details.notes]
    if name in history.problems:
        notes = [*notes, f"its index could not be examined: {history.problems[name]}"]
    return broken, notes


def draw(history: History, look: Look, width: int, height: int, title: str) -> list[Text]:
    """The lines of the screen, no longer than `width`, `height` of them at most."""
    if look.cache is not None and look.cache not in history.now:
        lines = _gone(look)
    elif look.cache is None:
        lines = _list(history, look, width, height)
    else:
        lines = _cache(history, look, width, height)
    where = "" if look.cache is None else f"  {look.cache}"
    head = Text(f"{title}{where}  {time.strftime('%H:%M:%S')}", style="bold")
    foot = Text(next((keys for keys in KEYS if len(keys) <= width), KEYS[-1]), style="dim")
    body = lines[: max(0, height - 2)]
    for line in (head, *body, foot):
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return [head, *body, foot]


def _gone(look: Look) -> list[Text]:
    back = "q leaves" if look.only else "esc goes back to the list"
    return [
        Text(""),
        Text(f"{look.cache} is gone: it was removed", style="red"),
        Text(f"it is shown again when a cache of that name is made; {back}"),
    ]


def cache_rows(history: History) -> list[CacheRow]:
    """A row for each cache."""
    return [
        CacheRow(
            reading,
            history.rates(name),
            history.minute(name),
            sum(map(len, warnings_of(history, name))),
        )
        for name, reading in history.now.items()
    ]


def _list(history: History, look: Look, width: int, height: int) -> list[Text]:
    if not history.now:
        return [Text(""), Text("no caches yet; `lightcache create` makes one")]
    rows = _sorted([*cache_rows(history)], CACHES, look, "caches")
    room = max(3, (height - 5) * 2 // 3)
    lines = _table(rows, CACHES, look, "caches", width, room)
    return [*lines, Text(""), *_warnings(history, [*history.now], width, height - len(lines) - 3)]


def _warnings(history: History, every: Sequence[str], width: int, most: int) -> list[Text]:
    """All warnings, what does not work first; of those that need more than `most` lines only their
    number."""
    found: list[Text] = []
    for kind, style in ((0, "red"), (1, "yellow")):
        for name in every:
            prefix = f"{name}: " if len(every) > 1 else ""
            found += [
                Text(printable(prefix + text), style=style)
                for text in warnings_of(history, name)[kind]
            ]
    if not found:
        return [Text("no warnings", style="green")]
    lines: list[Text] = []
    for number, text in enumerate(found):
        wrapped = [
            Text(line, style=text.style)
            for line in textwrap.wrap(text.plain, max(20, width), subsequent_indent="  ")
        ]
        if len(lines) + len(wrapped) > most - (number + 1 < len(found)):
            return [*lines, Text(f"and {len(found) - number} more: `lightcache dump NAME`")]
        lines += wrapped
    return lines


def _cache(history: History, look: Look, width: int, height: int) -> list[Text]:
    assert look.cache is not None
    reading = history.now[look.cache]
    if not reading.readable:
        return [Text(f"{reading.name}: {reading.state}", style="red"), Text(reading.problem or "")]
    row = CacheRow(reading, history.rates(reading.name), history.minute(reading.name), 0)
    clients = client_rows(history, reading)
    if look.client is not None:
        chosen = [each for each in clients if each.identity == look.client]
        return _client(history, reading, chosen[0], width) if chosen else [_left_text("client")]
    reservations = reservation_rows(history, reading, clients)
    if look.reservation is not None:
        entries = [each.entry for each in reservations if each.identity == look.reservation]
        return _fields(entries[0], width) if entries else [_left_text("reservation")]
    lines = [*_summary(row, width), *_eviction(history, reading, 2 if height < 30 else 5), Text("")]
    warnings = _warnings(history, [reading.name], width, max(3, height // 4))
    rows: list[Row] = [*clients] if look.table == "clients" else [*reservations]
    columns = CLIENTS if look.table == "clients" else RESERVATIONS
    other = f"{counted(len(clients), 'client')}, {counted(len(reservations), 'reservation')}"
    lines.append(Text(f"{look.table} (tab: {other})", style="dim"))
    room = max(1, height - len(lines) - len(warnings) - 5)
    rows = _sorted(rows, columns, look, look.table)
    lines += _table(rows, columns, look, look.table, width, room)
    return [*lines, Text(""), *warnings]


def _left_text(what: str) -> Text:
    return Text(f"the {what} has ended; esc goes back", style="yellow")


def client_rows(history: History, reading: Reading) -> list[ClientRow]:
    """A row for each client of a cache."""
    details = history.details.get(reading.name)
    return [
        ClientRow(
            client,
            engine_of(client, history.now, reading.name),
            history.client(reading.name, client, last=True),
            history.client(reading.name, client, last=False),
            None if details is None else details.held.get(client.slot),
            reading.page_tokens,
        )
        for client in reading.clients
    ]


def reservation_rows(
    history: History, reading: Reading, clients: Sequence[ClientRow]
) -> list[ReservationRow]:
    """A row for each reservation of a cache, as of its last copy."""
    details = history.details.get(reading.name)
    names = {row.client.slot: row.engine for row in clients}
    return [
        ReservationRow(entry, f"{entry['owner']} {names.get(entry['owner'], '')}".strip())
        for entry in (details.reservations if details is not None else ())
    ]


def _summary(row: CacheRow, width: int) -> list[Text]:
    reading, rates = row.reading, row.rates
    size = "" if reading.page_bytes is None else f" of {format_size(reading.page_bytes)}"
    tokens = "" if reading.page_tokens is None else f", {reading.page_tokens} tokens"
    written = rates.per_second(rates.pages["published_pages"])
    evicted = rates.per_second(rates.pages["evicted_pages"])
    pairs = [
        (
            "state",
            f"{reading.state}, {_dead(row)} clients, {reading.lifetime}, {age(reading.age_s)} old",
        ),
        ("pages", f"{reading.pages:,}{size}{tokens}; {_share(row.used)} used"),
        (
            "room",
            f"{reading.free:,} free, {reading.ready:,} ready ({reading.evictable:,} can go now, "
            f"{reading.kept:,} kept), {reading.writing:,} being written, {reading.held:,} held, "
            f"{reading.doomed:,} doomed",
        ),
        ("hits", _hits(row)),
        ("saved", f"{_rate(row.saved())} tokens/s"),
        (
            "pages/s",
            f"{_rate(written)} written ({_bytes_rate(row.written())}), {_rate(evicted)} evicted",
        ),
        ("moves", _moves(rates)),
        ("storage", _storage(row)),
    ]
    return [line for name, text in pairs for line in _pair(name, text, 9, width)]


def _pair(name: str, text: object, indent: int, width: int) -> list[Text]:
    """A name and its value, wrapped."""
    wrapped = textwrap.wrap(printable(text), max(20, width - indent - 1)) or [""]
    heads = [f"{name:{indent}} ", *[" " * (indent + 1)] * (len(wrapped) - 1)]
    pairs = zip(heads, wrapped, strict=True)
    return [Text.assemble((head, "dim"), line) for head, line in pairs]


def _hits(row: CacheRow) -> str:
    parts = [f"{_share(row.minute.hit_ratio())} of the pages that were looked up here"]
    tiers = row.minute.tier_ratios()
    if tiers is not None:
        shares = ", ".join(f"{tier} {_share(tiers[tier])}" for tier in TIERS)
        parts.insert(0, f"of all prompt tokens: {shares}")
    return "; ".join(parts)


def _moves(rates: Change) -> str:
    if not rates.counted:
        return "not known: its engines do not count for the node"
    parts = []
    for one, done in (("load", "loaded"), ("offload", "offloaded")):
        nbytes, ns = rates.counted[f"{done}_bytes"], rates.counted[f"{one}_ns"]
        speed = f", {nbytes / ns:.1f} GB/s while it moves" if ns else ""
        failed = rates.counted[f"failed_{one}s"]
        parts.append(
            f"{done} {_bytes_rate(rates.per_second(nbytes))}{speed}"
            + (f", {failed} failed" if failed else "")
        )
    return "; ".join(parts)


def _storage(row: CacheRow) -> str:
    service = row.reading.storage
    moved = (
        f"read {_bytes_rate(row.stored('read_bytes'))}, "
        f"written {_bytes_rate(row.stored('written_bytes'))}"
    )
    if service is None:
        return f"no service; {moved}" if row.rates.counted else "no service"
    state = f"service pid {service.pid}" if service.serving else "its service is gone"
    tier = service.tier
    return (
        f"{state}; {moved}; tasks: {tier.queued} queued, {tier.running} running, {tier.stuck} hang"
    )


def _eviction(history: History, reading: Reading, most: int) -> list[Text]:
    details = history.details.get(reading.name)
    if details is None or not details.next_evicted:
        return []
    lines = []
    for number, page in enumerate(details.next_evicted[:most]):
        where = [f"{what} {page[what]}" for what in ("weights", "tenant") if page[what]]
        where += [] if page["group"] == "0" else [f"group {page['group']}"]  # "0": it has no name
        text = (
            f"page {page['page']:,}{', '.join(['', *where])}: "
            f"{_unused(history, reading.name, page)}, hits: {page['hits']}"
        )
        name = "goes next" if number == 0 else ""
        lines.append(Text.assemble((f"{name:9} ", "dim"), printable(text)))
    return lines


def _unused(history: History, name: str, page: Facts) -> str:
    seconds, calls = page["unused_s"], page["unused_calls"]
    if seconds is None and calls is None:
        return "told to go first"
    return f"unused for {history.unused(name, calls) if seconds is None else age(seconds)}"


def _client(history: History, reading: Reading, row: ClientRow, width: int) -> list[Text]:
    client, rates = row.client, row.rates
    life = f"{client.life}, {row.state}" if client.alive else client.life
    fields: dict[str, object] = {
        "engine": row.engine or "no role",
        "process": f"pid {client.pid}, {life}",
        "slot": f"{client.slot}, attached {age(client.attached_s)} ago",
        "device": "copies may continue after its death" if client.device else "none",
        "holds": "not known yet"
        if row.held is None
        else f"{row.held[1]:,} pages, {row.held[0]:,} pins",
        "hits": f"{_share(row.minute.hit_ratio())} of the pages it looked up here",
        "saved": f"{_rate(row.saved())} tokens/s",
        **{
            name.replace("_", " "): f"{getattr(client, name):,}, {_per(name)(row)}/s"
            for name in rates.pages
        },
    }
    if (tiers := row.minute.tier_ratios()) is not None:
        fields["of its prompts"] = ", ".join(f"{tier} {_share(tiers[tier])}" for tier in TIERS)
    if rates.counted:
        fields["moves"] = _moves(rates)
    others = [
        name
        for name, other in history.now.items()
        if name != reading.name
        and any(process_of(each) == process_of(client) for each in other.clients)
    ]
    if others:
        fields["also in"] = ", ".join(others)
    owned = [entry for entry in _reservations(history, reading) if entry["owner"] == client.slot]
    fields["reservations"] = (
        ", ".join(f"{entry['reservation']} ({entry['pages']} pages)" for entry in owned) or "none"
    )
    return _fields(fields, width)


def _reservations(history: History, reading: Reading) -> Sequence[Facts]:
    details = history.details.get(reading.name)
    return () if details is None else details.reservations


def _fields(fields: Mapping[str, object], width: int) -> list[Text]:
    indent = max(map(len, fields)) + 1
    pairs = ((name.replace("_", " "), value) for name, value in fields.items())
    return [line for name, value in pairs for line in _pair(name, value, indent, width)]
