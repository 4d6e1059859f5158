"""`lightcache dump`, also `shm-dump`: what an operator asks at three in the morning."""

from __future__ import annotations

from collections.abc import Callable

import click

from lightcache.tools import dump_view, facts, hints, page_facts, structures
from lightcache.tools.image import Image, opened, read, undo
from lightcache.tools.output import Command, emit, json_option

SECTIONS: dict[str, Callable[[Image], object]] = {
    "totals": facts.totals,
    "lock": facts.lock,
    "clients": facts.clients,
    "reservations": facts.reservations,
    "tickets": facts.tickets,
    "namespaces": facts.namespaces,
}


@click.command(cls=Command)
@click.argument("name")
@click.option("--clients", is_flag=True, help="Who is attached, with pins and hit rates.")
@click.option("--lock", is_flag=True, help="Who holds the lock, and what was counted around it.")
@click.option("--reservations", is_flag=True, help="Pages being written, and who owes them.")
@click.option("--tickets", is_flag=True, help="Pins on their way from one client to others.")
@click.option("--namespaces", is_flag=True, help="Weights versions and tenants.")
@click.option("--pages", is_flag=True, help="Every page that is not free.")
@click.option("--limit", default=100, show_default=True, help="Most pages to show; 0: all.")
@json_option
def dump(name: str, as_json: bool, pages: bool, limit: int, **chosen: bool) -> None:
    """Show what is in the cache NAME, or in a list, dict, ring, log or other segment.

    Reads a copy: takes no lock and no slot, and works while the holder of the lock is stopped or
    dead. Without options it shows everything but the pages. Neither tokens nor secrets are in a
    cache's index; of a key only the first digits are shown.
    """
    if limit < 0:
        raise click.BadParameter("expected 0 (all) or more", param_hint="--limit")
    with opened(name) as (_, info):
        plain = info.kind != "index"
    if plain:
        found: dict[str, object] = {
            "segment": dump_view.plain(info),
            **_chosen(structures.document(name), chosen),
        }
    else:
        found = document(read(name), chosen, pages, limit)
    if as_json:
        emit(found)
    else:
        dump_view.show(found)


def document(image: Image, chosen: dict[str, bool], pages: bool, limit: int) -> dict[str, object]:
    """The sections asked for; without a choice all but the pages."""
    everything = not pages and not any(chosen.values())
    found: dict[str, object] = {"segment": facts.segment(image)}
    lock = facts.lock(image)  # as it was, before the copy is put in order
    undone = undo(image)
    for section, make in SECTIONS.items():
        if everything or chosen.get(section):
            found[section] = lock if section == "lock" else make(image)
    if pages:
        found["pages"] = page_facts.pages(image, limit)
    return found | hints.sections(hints.of(image, lock, undone))


def _chosen(found: dict[str, object], chosen: dict[str, bool]) -> dict[str, object]:
    """The sections asked for that there are; without a choice all."""
    always = {"not_working", "hints"}
    if not any(chosen.values()):
        return found
    return {name: value for name, value in found.items() if chosen.get(name) or name in always}
