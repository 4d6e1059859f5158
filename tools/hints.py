"""What is out of the ordinary in a cache, and what to do about it, in one line each."""

from __future__ import annotations

from lightcache.tools import facts
from lightcache.tools.image import Image


def of(image: Image, lock: facts.Facts, undone: int) -> list[str]:
    """Empty where there is nothing to do.

    Args:
        image: put in order by `undo`.
        lock: as it was before.
        undone: what `undo` returned.
    """
    name = image.info.name
    found = _segment(image) + _lock(name, lock)
    if undone < 0:
        found.append(f"the undo log is damaged: run `lightcache check {name}`, then `repair`")
    dead = [client for client in image.clients if not client.alive]
    if dead:
        found.append(
            f"{len(dead)} dead clients have not been reaped; whoever needs their slots does it, or "
            f"`lightcache reap {name}` now"
        )
    totals = facts.totals(image)
    if totals["repairing"]:
        found.append("a repair is under way, or its process died: whoever locks next does it again")
    if image.steady and not totals["accounting_holds"]:
        found.append(
            f"the counters disagree with the records: run `lightcache check {name}`, then `repair`"
        )
    if totals["grown"] < image.pages:
        found.append(
            f"{image.pages - totals['grown']:,} pages have no memory yet; a client attached for "
            "writing gives it to them"
        )
    return found


def _segment(image: Image) -> list[str]:
    name, info, found = image.info.name, image.info, []
    if info.retired:
        found.append("it was retired: it was replaced or removed, and nobody can attach any more")
    if info.disabled:
        found.append(f"it is disabled: lookups and reservations fail; `lightcache enable {name}`")
    if image.config.get("page_bytes") and not any("~pool-" in full for full in info.dependents):
        found.append(f"its pool is gone: `lightcache rm {name}` and create it anew")
    if not image.steady:
        found.append(
            "it was never quiet while it was copied: figures of different instants are mixed"
        )
    return found


def _lock(name: str, lock: facts.Facts) -> list[str]:
    holder = lock["holder"]
    if holder is None:
        return []
    who = f"client {holder['slot']} (pid {holder['pid']})"
    if not holder["alive"] or holder["process"] in ("gone", "zombie", "dead"):
        return [
            f"the lock's holder, {who}, is dead: whoever needs the lock next undoes what it left "
            f"half done, or `lightcache reap {name}` now; lookups go on meanwhile"
        ]
    if holder["process"] in ("stopped", "traced"):
        return [
            f"the lock's holder, {who}, is {holder['process']}: continue it (kill -CONT "
            f"{holder['pid']}) or kill it; lookups go on meanwhile, reservations wait"
        ]
    if (holder["held_s"] or 0) > 1:
        return [
            f"{who} has held the lock for {holder['held_s']:.1f} s in {holder['operation']}, and "
            "reservations wait for it; it may be starved of processor time"
        ]
    return []
