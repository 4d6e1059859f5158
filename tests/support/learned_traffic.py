"""Requests of an index that learns which pages are worth keeping, by a clock of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from support.keys import Keys, prompt

from lightcache import PageIndex
from lightcache.layout import WhyMissing
from lightcache.namespaces import Namespace

PAGES, PROMPT, KNOWN = 66, 10, 6


@dataclass
class Traffic:
    """Requests of an index, one a second by its own clock."""

    index: PageIndex
    now: float = 1.0
    fresh: Iterator[int] = field(default_factory=lambda: iter(range(100, 100_000)))

    def request(
        self, keys: Keys, *, namespace: Namespace | None = None, **options: Any
    ) -> tuple[int, int, WhyMissing]:
        """Match, reserve and publish the rest. Returns the pages found, those made, and why."""
        self.tick()
        with self.index.match(keys, namespace=namespace) as lease:
            found = len(lease)
            with self.index.reserve(keys, found, namespace=namespace, **options) as new:
                if len(new.new):
                    new.publish()
                return found, len(new.new), new.why_missing

    def tick(self) -> None:
        self.now += 1
        self.index.set_clock(self.now)

    def known(self) -> list[tuple[int, int, WhyMissing]]:
        """Prompts that come again and again."""
        return [self.request(prompt(name, PROMPT)) for name in range(KNOWN)]

    def once(self) -> Keys:
        """A prompt that nobody has asked for."""
        return prompt(next(self.fresh), PROMPT)


def taught(index: PageIndex) -> Traffic:
    """An index that is full: of pages used just now, but for six that never were."""
    traffic = Traffic(index)
    for _ in range(25):
        traffic.known()
        traffic.request(traffic.once())
    traffic.known()
    assert index.stats().free == 0
    assert all(index.peek(prompt(name, PROMPT)) == PROMPT for name in range(KNOWN))
    return traffic


def occupied(index: PageIndex) -> Traffic:
    """The same, with no page that ranks below a new one."""
    traffic = taught(index)
    for _ in range(6):
        traffic.request(prompt(50, PAGES - KNOWN * PROMPT))
        traffic.known()
    return traffic
