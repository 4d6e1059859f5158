"""What a run has shown, in a few lines, and whether all of it held."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from lightcache.snapshot import CheckReport
from lightcache.tools.demo.messages import Hello, Holding, Recovered, Served, Verified
from lightcache.tools.demo.show import milliseconds
from lightcache.tools.output import cell

TOLERANCE = 1e-4  # between log-probabilities, float32


@dataclass
class Outcome:
    """What happened."""

    wanted_turns: int
    wanted_kill: bool
    wanted_restart: bool = False
    storage: str | None = None
    """Its URL, if there was one behind the host."""
    turns: list[Served] = field(default_factory=list)
    again: list[Served] = field(default_factory=list)
    """Behind the restart."""
    wanted_again: int = 0
    holding: Holding | None = None
    recovered: list[Recovered] = field(default_factory=list)
    successors: list[Hello] = field(default_factory=list)
    successor_s: float = 0.0
    """From the start of the first successor until it was ready."""
    lookup_us: float = 0.0
    check: CheckReport | None = None
    """Of the last cache that was checked: the first that is broken, or the last of all."""
    checked: int = 0
    """How many were: a hybrid model has two, and private pools are many."""
    verified: list[Verified] = field(default_factory=list)
    wanted_verified: int = 0
    left: list[str] = field(default_factory=list)
    """Segments that should be gone."""
    seconds: float = 0.0

    @property
    def reused(self) -> list[Served]:
        """Turns of which something was not computed."""
        return [turn for turn in self.turns if sum(turn.reused.values())]

    @property
    def recovery(self) -> Recovered | None:
        """From the death that was arranged."""
        if self.holding is None:
            return None
        number = self.holding.number
        return next((each for each in self.recovered if each.number == number), None)

    def problems(self) -> list[str]:
        """What did not hold, each in a line; empty: everything did."""
        found = []
        if len(self.turns) != self.wanted_turns:
            found.append(f"expected {self.wanted_turns} answers, found {len(self.turns)}")
        if not self.reused:
            found.append(
                "no turn reused anything; give --size more, or prompts that share prefixes"
            )
        if self.wanted_kill:
            found += self._kill_problems()
        if self.wanted_restart:
            found += self._restart_problems()
        if self.check is None or not self.check.clean:
            found.append(f"check: {self.check.message if self.check else 'it did not run'}")
        if self.reused and (not self.verified or len(self.verified) != self.wanted_verified):
            found.append(
                f"expected {self.wanted_verified} turns computed again, found {len(self.verified)}"
            )
        found += [
            f"turn {each.number} is not what an uncached run gives: tokens "
            f"{'equal' if each.equal else 'differ'}, log-probabilities by {each.difference:.1e}"
            for each in self.verified
            if not each.equal or not each.difference <= TOLERANCE
        ]
        return found + [f"{name} was not removed" for name in self.left]

    def _kill_problems(self) -> list[str]:
        if self.holding is None:
            return [
                "no worker was killed: from the middle on no turn wrote pages; give --size more"
            ]
        if self.recovery is None:
            return ["what the killed worker held was not taken back"]
        found = [] if self.recovery.doomed else ["the killed worker left no doomed page"]
        return found if self.successors else [*found, "the killed worker has no successor"]

    def _restart_problems(self) -> list[str]:
        found = []
        if not self.again or len(self.again) != self.wanted_again:
            found.append(
                f"expected {self.wanted_again} answers behind the restart, found {len(self.again)}"
            )
        reused = _by_tier(self.again)
        if not reused.get("storage"):
            found.append(
                "nothing came from storage behind the restart; give it more room, or leave the "
                "restart out (--no-restart)"
            )
        first = min(self.again, key=lambda turn: turn.number, default=None)
        if first is not None and first.attempts == 1:
            found += [
                f"the first turn behind the restart had {count} tokens from the {tier} tier, which "
                "should have been empty"
                for tier, count in first.reused.items()
                if count and tier != "storage"
            ]
        return found

    # ---- for people

    def lines(self) -> list[Text]:
        """The summary."""
        return [
            Text.assemble((f"{name:<15}", "bold"), text if isinstance(text, Text) else cell(text))
            for name, text in self.pairs()
        ]

    def pairs(self) -> list[tuple[str, str | Text]]:
        """The same, each line in two."""
        prompt = sum(turn.prompt for turn in self.turns)
        tiers = ", ".join(
            f"{count:,} ({count / max(1, prompt):.0%}) came from the {tier} tier"
            for tier, count in self.hits().items()
        )
        loaded, stored = self.moved()
        lines: list[tuple[str, str | Text]] = [
            ("turns", f"{len(self.turns)} answered in {self.seconds:.0f} s"),
            ("prompt tokens", f"{prompt:,}, of which {tiers or 'none was reused'}"),
            ("first token", self._first_token()),
            ("lookup", self._lookup()),
            ("moved", f"{loaded / 2**20:,.1f} MiB loaded, {stored / 2**20:,.1f} MiB offloaded"),
        ]
        if self.storage is not None and (self.hits().get("storage") or not self.wanted_restart):
            lines.append(("storage", self._stored(self.storage)))
        if self.wanted_kill:
            lines.append(("killed", self._killed()))
        if self.wanted_restart:
            lines.append(("restart", self._restarted()))
        if self.check is not None:
            lines.append(("check", self._verdict()))
        return [*lines, ("equal", self._equal())]

    def hits(self) -> dict[str, int]:
        """Reused tokens of each tier."""
        return _by_tier(self.turns)

    def moved(self) -> tuple[int, int]:
        """Bytes loaded and offloaded."""
        loaded = sum(turn.loaded_bytes for turn in self.turns)
        return loaded, sum(turn.stored_bytes for turn in self.turns)

    def medians(self) -> tuple[float, float] | None:
        """Seconds to the first token of reused turns, with the cache and from nothing."""
        return _medians(self.reused)

    def _first_token(self) -> str:
        found = self.medians()
        if found is None:
            return "not compared"
        with_cache, without = found
        return (
            f"{milliseconds(with_cache)} with the cache, {milliseconds(without)} from nothing: "
            f"{without / with_cache:.1f} times as fast (medians of {len(self.reused)} reused turns)"
        )

    def _lookup(self) -> str:
        reading = ", and to read what storage has" if self.storage is not None else ""
        return f"{self.lookup_us:.0f} us to hash, find and pin what there is{reading} (median)"

    def _stored(self, url: str) -> str:
        scheme = _scheme(url)
        count = self.hits().get("storage", 0)
        if count == 0:
            return (
                f"nothing came from {scheme}, the host had all that was asked for; give --size less"
            )
        return f"{count:,} tokens that the host did not have came from {scheme}"

    def _restarted(self) -> str:
        if not self.again:
            return "nobody was asked anything"
        prompt, reused = sum(turn.prompt for turn in self.again), _by_tier(self.again)
        first = min(self.again, key=lambda turn: turn.number)
        others = sum(reused.values()) - reused.get("storage", 0)
        read = f", {others:,} from the host, where these had been read to before" if others else ""
        return (
            f"everything ended and began anew, with an empty cache: of {prompt:,} prompt tokens "
            f"{reused.get('storage', 0):,} came from {_scheme(self.storage or '')}{read}; the "
            f"first of {len(self.again)} turns had its first token after "
            f"{milliseconds(first.first_s)}, {milliseconds(first.baseline_s)} from nothing"
        )

    def _killed(self) -> str:
        held, found = self.holding, self.recovery
        if held is None or found is None:
            return "nobody"
        after = (
            f"; its successor was ready after {self.successor_s:.1f} s" if self.successors else ""
        )
        return (
            f"worker {held.worker}, with {held.copied} of {held.pages} pages of turn {held.number} "
            f"copied: {found.doomed} pages doomed, usable again {found.seconds * 1e3:.0f} ms "
            f"after the signal{after}"
        )

    def _verdict(self) -> Text:
        assert self.check is not None
        if not self.check.clean:
            return Text("broken: " + self.check.message, "red")
        several = f"{self.checked} caches, the last of " if self.checked > 1 else ""
        return Text(f"clean: {several}{self.check.message}", "green")

    def _equal(self) -> str:
        worst = self.difference()
        if worst is None:
            return "not compared"
        right = sum(each.equal for each in self.verified)
        return (
            f"{right} of {len(self.verified)} reused turns gave the tokens of an uncached run in a "
            f"fresh process; log-probabilities within {worst:.1e}"
        )

    def difference(self) -> float | None:
        """The largest between log-probabilities; nan if there is one, which is beyond all others;
        None: nothing was compared."""
        found = [each.difference for each in self.verified]
        return max(found, key=lambda one: (math.isnan(one), one), default=None)

    # ---- for scripts

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        medians = self.medians()
        loaded, stored = self.moved()
        difference = self.difference()
        if difference is not None and not math.isfinite(difference):
            difference = None  # JSON has no nan; `problems` say it
        return {
            "turns": len(self.turns),
            "prompt_tokens": sum(turn.prompt for turn in self.turns),
            "hit_tokens": self.hits(),
            "reused_turns": len(self.reused),
            "first_token_s": medians[0] if medians else None,
            "first_token_from_nothing_s": medians[1] if medians else None,
            "lookup_us": self.lookup_us,
            "loaded_bytes": loaded,
            "offloaded_bytes": stored,
            "killed": self._kill_facts(),
            "restart": self._restart_facts(),
            "check": self.check.message if self.check else None,
            "clean": bool(self.check and self.check.clean),
            "verified_turns": len(self.verified),
            "largest_difference": difference,
            "seconds": self.seconds,
            "problems": self.problems(),
        }

    def _kill_facts(self) -> dict[str, Any] | None:
        held, found = self.holding, self.recovery
        if held is None or found is None:
            return None
        return {
            "worker": held.worker,
            "turn": held.number,
            "copied_pages": held.copied,
            "doomed_pages": found.doomed,
            "recovered_s": found.seconds,
        }

    def _restart_facts(self) -> dict[str, Any] | None:
        if not self.wanted_restart:
            return None
        medians = _medians(self.again)
        return {
            "turns": len(self.again),
            "prompt_tokens": sum(turn.prompt for turn in self.again),
            "hit_tokens": _by_tier(self.again),
            "reused_turns": sum(any(turn.reused.values()) for turn in self.again),
            "first_token_s": medians[0] if medians else None,
            "first_token_from_nothing_s": medians[1] if medians else None,
        }


def _by_tier(turns: Sequence[Served]) -> dict[str, int]:
    """Reused tokens of each tier."""
    found: dict[str, int] = {}
    for turn in turns:
        for tier, count in turn.reused.items():
            found[tier] = found.get(tier, 0) + count
    return found


def _medians(turns: Sequence[Served]) -> tuple[float, float] | None:
    """Seconds to the first token, with the cache and from nothing."""
    both = [(t.first_s, t.baseline_s) for t in turns if t.baseline_s is not None]
    if not both:
        return None
    return statistics.median(a for a, _ in both), statistics.median(b for _, b in both)


def _scheme(url: str) -> str:
    """Not all of it: there may be a password in it."""
    return f"{url.partition(':')[0]}:"


def sample(turns: Sequence[Served], count: int) -> list[Served]:
    """Reused turns to compute again: those that were asked twice, and others evenly spread, half of
    them such as storage gave something to."""
    reused = [turn for turn in turns if sum(turn.reused.values())]
    again = [turn for turn in reused if turn.attempts > 1][:count]
    rest = [turn for turn in reused if turn.attempts == 1]
    stored = [turn for turn in rest if turn.reused.get("storage")]
    others = [turn for turn in rest if not turn.reused.get("storage")]
    room = count - len(again)
    some = _spread(stored, max(room // 2, room - len(others)))
    return again + some + _spread(others, room - len(some))


def _spread(turns: list[Served], count: int) -> list[Served]:
    """So many of them, or all."""
    count = min(count, len(turns))
    return [turns[int(at * (len(turns) / count))] for at in range(count)]
