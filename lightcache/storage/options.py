"""What stands behind the question mark of a storage's URL."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from lightcache._arguments import parse_size
from lightcache.errors import ConfigError

_INTEGER = re.compile("[+-]?[0-9]+")


class Options:
    """The options of one URL, each asked for by name. None of them may be left over."""

    def __init__(self, scheme: str, given: Mapping[str, str], known: Sequence[str]) -> None:
        """
        Args:
            scheme: whose they are, for errors.
            known: all that there are.

        Raises:
            ConfigError: one that there is not, or that has no value.
        """
        if unknown := sorted(set(given) - set(known)):
            expected = ", ".join(known) or "no options"
            raise ConfigError(f"{scheme}: expected {expected}, found {', '.join(unknown)}")
        if empty := [name for name, text in given.items() if not text]:
            name = empty[0]
            raise ConfigError(
                f"{scheme}: {name}: expected a value, found none; leave '{name}=' out"
            )
        self._scheme, self._given = scheme, given

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str, default: str = "") -> str:
        """As it stands there."""
        return self._given.get(name, default)

    def count(self, name: str, default: int, low: int = 1, high: int = 1 << 30) -> int:
        """An integer in a range.

        Raises:
            ConfigError: none, or outside of it.
        """
        text = self._given.get(name, str(default))
        if not _INTEGER.fullmatch(text):
            raise ConfigError(f"{self._scheme}: {name}: expected a number, found {text[:40]!r}")
        if not (len(text) < 20 and low <= int(text) <= high):
            raise ConfigError(
                f"{self._scheme}: {name}: expected a number from {low} to {high}, found "
                f"{text[:40]!r}"
            )
        return int(text)

    def chance(self, name: str) -> float:
        """A probability; 0 if nothing is said.

        Raises:
            ConfigError: none.
        """
        text = self._given.get(name, "0")
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not 0.0 <= found <= 1.0:
            raise ConfigError(
                f"{self._scheme}: {name}: expected a number from 0 to 1, found {text!r}"
            )
        return found

    def seconds(self, name: str, default: float, low: float = 0.0) -> float:
        """Seconds, finite.

        Raises:
            ConfigError: none, or fewer than `low`.
        """
        text = self._given.get(name, str(default))
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not low <= found < math.inf:
            raise ConfigError(
                f"{self._scheme}: {name}: expected seconds, {low:g} or more, found {text!r}"
            )
        return found

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of these; the first if nothing is said.

        Raises:
            ConfigError: another one.
        """
        text = self._given.get(name, choices[0])
        if text not in choices:
            raise ConfigError(
                f"{self._scheme}: {name}: expected {' or '.join(choices)}, found {text!r}"
            )
        return text

    def size(self, name: str, default: int | None = None) -> int | None:
        """Bytes, as of "1TiB".

        Raises:
            ConfigError: no size.
        """
        if name not in self._given:
            return default
        return parse_size(self._given[name], f"{self._scheme}: {name}")


__all__ = ["Options"]
