"""`lightcache dump`: the content of a segment, for operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.text import Text

from lightcache._arguments import format_size
from lightcache.evictions import quantile
from lightcache.shm import names
from lightcache.shm.clients import quarantine_end
from lightcache.shm.layout import SLOTS
from lightcache.shm.listing import SegmentInfo
from lightcache.tools import facts, hints, structures
from lightcache.tools.image import Image, name_argument, opened, read, undo
from lightcache.tools.output import (
    Command,
    age,
    cell,
    console,
    emit,
    json_option,
    lines,
    namespace_table,
    percent,
    printable,
    table,
)

# ---- Tables of the values of `facts`


Facts = dict[str, Any]


def segment_facts(info: SegmentInfo) -> Facts:
    """The content of a segment without an index."""
    return {
        "name": info.name,
        "kind": info.kind,
        "state": "retired" if info.retired else "disabled" if info.disabled else "ready",
        "lifetime": info.lifetime,
        "idle_limit_s": info.idle_limit_s or None,
        "unused_s": round(info.unused_s, 3),
        "age_s": info.age_s,
        "uuid": info.uuid,
        "uid": info.uid,
        "bytes": info.bytes,
        "clients": info.clients,
        "dead_clients": info.dead_clients,
        "quarantined_clients": info.quarantined_clients,
        "slots": SLOTS - 1,
        "occupied": info.occupied,
    }


def _limit(info: Facts) -> str:
    """The idle limit of a persistent segment."""
    limit = info.get("idle_limit_s")
    if not limit:
        return ""
    return f", idle limit {age(limit)}, last used {age(info['unused_s'])} ago"


def show(facts: Facts) -> None:
    """Print a document as tables."""
    out = console()
    out.print(_segment(facts["segment"]))
    for name, view in _VIEWS.items():
        if name in facts:
            out.print()
            out.print(view(facts[name]))
    _hints(out, facts["not_working"], facts["hints"])


def _segment(info: Facts) -> RenderableType:
    pairs: list[tuple[str, object]] = [("state", _state(info["state"]))]
    if "kind" in info:
        pairs += [("holds", info["kind"]), ("size", format_size(info["bytes"]))]
    else:
        pairs += [("for", info["fingerprint"]), ("pages of", _page(info)), *_sizes(info)]
    readers = ", and readers" if info["occupied"] and not info["clients"] else ""
    pairs += [
        ("clients", f"{_slots(info)}{readers}"),
        ("age", f"{age(info['age_s'])}, lifetime {info['lifetime']}{_limit(info)}"),
    ]
    return lines(printable(info["name"]), pairs)


def _slots(info: Facts) -> str:
    """How many slots there are, and whose they are; as `clients.slot_use` of the clients."""
    held, dead = info["quarantined_clients"], info["dead_clients"]
    parts = [f"{info['clients']} living", f"{dead - held} dead"]
    parts += [f"{held} in quarantine"] if held else []
    return f"{', '.join(parts)}, {info['slots'] - info['clients'] - dead} slots free"


def _page(info: Facts) -> str | None:
    size, tokens = info["page_bytes"], info["page_tokens"]
    if not isinstance(size, int):
        return None
    if not isinstance(tokens, int):
        return format_size(size)
    return f"{format_size(size)}, {tokens} {'token' if tokens == 1 else 'tokens'}"


_ORDERS = {
    "lru": "lru: what was unused for longest",
    "hz": "hz: what is least likely to be used again soon",
}


def _sizes(info: Facts) -> list[tuple[str, object]]:
    flat = ", independent: any page may go before others" if info["independent"] else ""
    pairs: list[tuple[str, object]] = [("index", format_size(info["index_bytes"]) + flat)]
    pairs.append(("evicts", _ORDERS.get(info["eviction"], info["eviction"])))
    pool = info["pool_bytes"]
    if pool:
        text = f"{format_size(pool['length'])}, {format_size(pool['allocated'])} in memory"
        folder = Path(info["pool"]).parent
        pairs.append(("pool", text + (f", in {folder}" if folder != names.FOLDER else "")))
    if info["token_ids_bytes"] is not None:
        pairs.append(("token ids", f"{format_size(info['token_ids_bytes'])} in memory"))
    return pairs


def _state(state: str) -> Text:
    return Text(state, style={"ready": "green", "disabled": "yellow"}.get(state, "red"))


def _totals(facts: Facts) -> RenderableType:
    holds = Text("holds", "green") if facts["accounting_holds"] else Text("does not hold", "red")
    looked = facts["hit_pages"] + facts["missed_pages"]
    states = ("free", "writing", "ready", "evicting", "doomed", "held")
    pairs: list[tuple[str, object]] = [
        ("pages", f"{facts['pages']:,}, {facts['grown']:,} with memory"),
        *((name, f"{facts[name]:,}  {percent(facts[name], facts['pages'])}") for name in states),
        ("available", f"{facts['available']:,}  without evicting"),
        ("accounting", holds),
        *_groups(facts["groups"]),
        ("evictable", facts["evictable"]),
        ("kept", facts["kept"]),
        ("outstanding", f"{facts['reservations']} reservations, {facts['tickets']} tickets"),
        ("hit rate", f"{percent(facts['hit_pages'], looked)} of {looked:,} pages looked up"),
    ]
    return lines("pages", pairs)


def _groups(groups: list[Facts]) -> list[tuple[str, object]]:
    """The pages of each group, if there are several: KV, then windows and states."""
    if not any(group["number"] or group["minimum_pages"] for group in groups):
        return []
    return [("by group", ", ".join(map(_group, groups)))]


def _group(group: Facts) -> str:
    size, least = group["bytes"], group["minimum_bytes"]
    shown = [] if size is None else [format_size(size)]
    if group["minimum_pages"]:
        least = f"{group['minimum_pages']:,} pages" if least is None else format_size(least)
        shown.append(f"at least {least}")
    return f"{group['name']} {group['pages']:,}" + (f" ({', '.join(shown)})" if shown else "")


def _evictions(facts: Facts) -> RenderableType:
    gone = ", ".join(f"{cause} {pages:,}" for cause, pages in facts["pages"].items() if pages)
    pairs: list[tuple[str, object]] = [("pages by cause", gone or "none")]
    sample = facts["sample"]
    if sample is not None:
        pairs += [
            ("unused for", _spans(sample["idle_at_eviction_s"])),
            ("after", _spans(sample["age_at_eviction_s"])),
            ("hits after", _spans(sample["idle_at_hit_s"])),
            ("hits by turns", _by_turns(sample["hits"])),
            ("hit ratio", _curve(sample)),
        ]
    return lines("evictions", pairs)


def _spans(counts: list[int]) -> str | None:
    """When half of what was counted had happened, and nine tenths of it."""
    half, most = quantile(counts, 0.5), quantile(counts, 0.9)
    return None if half is None else f"half {_within(half)}, nine in ten {_within(most)}"


def _within(seconds: float | None) -> str:
    return "more than 3 days" if seconds in (None, float("inf")) else f"within {age(seconds)}"


def _by_turns(hits: list[Facts]) -> str | None:
    total: dict[str, int] = {}
    for each in hits:
        total[each["turns"]] = total.get(each["turns"], 0) + each["hits"]
    every = sum(total.values())
    return ", ".join(f"{turns}: {percent(n, every)}" for turns, n in total.items()) or None


def _curve(sample: Facts) -> str | None:
    """The hit ratio of the clients, and what it would be in larger caches."""
    now = sample["hit_ratio"]
    if now is None:
        return None
    larger = ", ".join(
        f"{100 * each['hit_ratio']:.1f} % with {each['size']:g}" for each in sample["returned"]
    )
    return f"{100 * now:.1f} %; {larger} times the pages"


def _lock(facts: Facts) -> RenderableType:
    pairs: list[tuple[str, object]] = []
    holder = facts["holder"]
    if holder is None:
        pairs.append(("holder", Text("none", style="green")))
    else:
        well = holder["alive"] and holder["process"] in ("running", "sleeping", "out of sight")
        pairs += [
            ("holder", f"client {holder['slot']} ({holder['role'] or 'no role'})"),
            ("process", f"pid {holder['pid']}, thread {holder['tid'] or 'unknown'}"),
            ("alive", Text(_life(holder), style="green" if well else "red")),
            ("doing", _doing(holder)),
            ("half done", f"{facts['log_entries']} stores, to be undone if it dies"),
        ]
    acquisitions = facts["acquisitions"]
    mean = facts["hold_s"] / acquisitions if acquisitions else 0.0
    pairs += [
        ("taken", f"{acquisitions:,} times, {facts['contended']:,} waited"),
        ("waited", f"{facts['wait_s']:.6f} s in all"),
        ("held", f"{mean * 1e6:.1f} us on average, {facts['hold_max_s'] * 1e6:.1f} us at most"),
        ("recoveries", f"{facts['recoveries']}, {facts['undone_words']} stores undone"),
    ]
    return lines("lock", pairs)


def _doing(holder: Facts) -> str:
    if holder["operation"] is None:
        return "it has just taken the lock, and not said for what"
    return f"{holder['operation']}, for {age(holder['held_s'])}"


def _life(client: Facts) -> str:
    if client.get("quarantine_s") is not None:
        return f"dead, in quarantine ({quarantine_end(client['quarantine_s'])})"
    return f"alive, {client['process']}" if client["alive"] else "dead"


def _members(members: list[Facts]) -> RenderableType:
    return table(
        f"clients: {len(members)}",
        ("slot", "role", "pid", "alive", "age"),
        (
            (
                client["slot"],
                client["role"] or None,
                str(client["pid"]),
                Text(_life(client), style="" if client["alive"] else "red"),
                age(client["attached_s"]),
            )
            for client in members
        ),
        right="slot pid",
    )


def _content(facts: Facts) -> RenderableType:
    pairs: list[tuple[str, object]] = []
    for name, value in facts.items():
        if name == "writer":
            slot = f"client {value['slot']}, " if value["slot"] else ""
            pairs.append((name, f"{slot}{value['state']}"))
        elif name == "readers":
            shown = [f"client {item['slot']}: {item['behind']:,} to read" for item in value]
            pairs.append((name, "; ".join(shown) or None))
        elif isinstance(value, dict):
            shown = [f"{key}: {item:,}" for key, item in value.items() if isinstance(item, int)]
            pairs.append((name.replace("_", " "), "; ".join(shown) or None))
        else:
            pairs.append((name.replace("_", " "), value if isinstance(value, int) else str(value)))
    return lines("content", pairs)


def _clients(clients: list[Facts]) -> RenderableType:
    if clients and "pins" not in clients[0]:
        return _members(clients)
    columns = ("slot", "role", "pid", "alive", "pins", "pages", "lookups", "hit", "reserved", "age")
    return table(
        f"clients: {len(clients)}",
        columns,
        (
            (
                client["slot"],
                client["role"] or None,
                str(client["pid"]),
                Text(_life(client), style="" if client["alive"] else "red"),
                client["pins"],
                client["pinned_pages"],
                client["lookups"],
                None if client["hit_rate"] is None else f"{100 * client['hit_rate']:.1f} %",
                client["reserved_pages"],
                age(client["attached_s"]),
            )
            for client in clients
        ),
        right="slot pid pins pages lookups hit reserved",
    )


def _owner(slot: int, alive: bool) -> Text:
    return Text(f"{slot} {'alive' if alive else 'dead'}", style="" if alive else "red")


def _reservations(reservations: list[Facts]) -> RenderableType:
    return table(
        f"reservations: {len(reservations)}",
        ("reservation", "state", "owner", "pages", "shards left", "owed by slots", "namespace"),
        (
            (
                entry["reservation"],
                entry["state"],
                _owner(entry["owner"], entry["owner_alive"]),
                entry["pages"],
                f"{entry['shards_left']} of {entry['shards']}",
                _numbers(entry["pending_slots"]),
                entry["namespace"],
            )
            for entry in reservations
        ),
        right="reservation pages namespace",
    )


def _tickets(tickets: list[Facts]) -> RenderableType:
    return table(
        f"tickets: {len(tickets)}",
        ("ticket", "state", "owner", "pages", "held", "adopters", "adopted", "done", "deadline"),
        (
            (
                entry["ticket"],
                entry["state"],
                _owner(entry["owner"], entry["owner_alive"]),
                entry["pages"],
                entry["pages_held"],
                *(_numbers(entry[name]) for name in ("adopters", "adopted", "done")),
                "passed" if entry["deadline_in_s"] < 0 else age(entry["deadline_in_s"]),
            )
            for entry in tickets
        ),
        right="ticket pages held",
    )


def _numbers(numbers: list[int]) -> str | None:
    return " ".join(map(str, numbers)) or None


def _namespaces(namespaces: list[Facts]) -> RenderableType:
    return namespace_table(f"namespaces: {len(namespaces)}", "namespace", namespaces)


def _pages(facts: Facts) -> RenderableType:
    part = "" if facts["shown"] == facts["in_use"] else f", the first {facts['shown']:,} of them"
    return table(
        f"pages in use: {facts['in_use']:,}{part}",
        tuple(_PAGE_COLUMNS.values()),
        ([_page_cell(entry, field) for field in _PAGE_COLUMNS] for entry in facts["pages"]),
        right="page ns gen tick hits parent children reservation",
    )


_PAGE_COLUMNS = {
    "page": "page",
    "state": "state",
    "key": "key...",
    "namespace": "ns",
    "generation": "gen",
    "pins": "pins by slot",
    "tick": "tick",
    "hits": "hits",
    "parent": "parent",
    "children": "children",
    "reservation": "reservation",
    "flags": "flags",
}


def _page_cell(entry: Facts, column: str) -> Text:
    if column == "pins":
        return cell(" ".join(f"{slot}:{count}" for slot, count in entry["pins"].items()) or None)
    if column == "flags":
        return cell(" ".join(flag for flag in ("kept", "independent") if entry[flag]) or None)
    return cell(entry[column])


def _hints(out: Console, not_working: list[str], notes: list[str]) -> None:
    out.print()
    if not_working:
        out.print(Text("not working now", style="red bold"))
    else:
        out.print(Text("not working now: nothing that can be seen from here", style="bold"))
    for line in not_working:
        out.print(Text("  - ", style="red bold") + cell(line), soft_wrap=True)
    for line in notes:
        out.print(Text("note: ", style="yellow bold") + cell(line), soft_wrap=True)


_VIEWS: dict[str, Callable[[Any], RenderableType]] = {
    "content": _content,
    "totals": _totals,
    "evictions": _evictions,
    "lock": _lock,
    "clients": _clients,
    "reservations": _reservations,
    "tickets": _tickets,
    "namespaces": _namespaces,
    "pages": _pages,
}


# ---- The command


SECTIONS: dict[str, Callable[[Image], object]] = {
    "totals": facts.totals,
    "evictions": facts.evictions,
    "lock": facts.lock,
    "clients": facts.clients,
    "reservations": facts.reservations,
    "tickets": facts.tickets,
    "namespaces": facts.namespaces,
}


@click.command(cls=Command)
@name_argument()
@click.option("--clients", is_flag=True, help="Who is attached, with pins and hit rates.")
@click.option("--lock", is_flag=True, help="Who holds the lock, and what was counted around it.")
@click.option(
    "--evictions", is_flag=True, help="Which pages went, and what more memory would give."
)
@click.option("--reservations", is_flag=True, help="Pages being written, and who owes them.")
@click.option("--tickets", is_flag=True, help="Pins on their way from one client to others.")
@click.option("--namespaces", is_flag=True, help="Weights versions and tenants.")
@click.option("--pages", is_flag=True, help="Every page that is not free.")
@click.option("--limit", default=100, show_default=True, help="Most pages to show; 0: all.")
@json_option
def dump(name: str, as_json: bool, pages: bool, limit: int, **chosen: bool) -> None:
    """Show the content of the cache NAME, or of a list, dict, ring, log or other segment.

    Reads a copy: takes no lock and no slot, and works while the holder of the lock is stopped or
    dead. Without options it shows everything but the pages. Neither tokens nor secrets are in a
    cache's index; of a key only the first digits are shown.
    """
    if limit < 0:
        raise click.BadParameter("expected 0 (all) or more", param_hint="--limit")
    with opened(name) as (_, info):
        no_index = info.kind != "index"
    if no_index:
        result: dict[str, object] = {
            "segment": segment_facts(info),
            **_chosen(structures.document(name), chosen),
        }
    else:
        result = document(read(name), chosen, pages, limit)
    if as_json:
        emit(result)
    else:
        show(result)


def document(image: Image, chosen: dict[str, bool], pages: bool, limit: int) -> dict[str, object]:
    """The chosen sections; without a choice all but the pages."""
    everything = not pages and not any(chosen.values())
    result: dict[str, object] = {"segment": facts.segment(image)}
    lock = facts.lock(image)  # before `undo` changes the copy
    undone = undo(image)
    for section, make in SECTIONS.items():
        if everything or chosen.get(section):
            result[section] = lock if section == "lock" else make(image)
    if pages:
        result["pages"] = facts.pages(image, limit)
    return result | hints.sections(hints.of(image, lock, undone))


def _chosen(facts: dict[str, object], chosen: dict[str, bool]) -> dict[str, object]:
    """The chosen sections that exist; without a choice all."""
    always = {"not_working", "hints"}
    if not any(chosen.values()):
        return facts
    return {name: value for name, value in facts.items() if chosen.get(name) or name in always}
