"""`lightcache top`: what is computed from two readings, the screen, and the command."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lightcache import Cache, layout
from lightcache.layout import PageState
from lightcache.manager.stats import NodeCounters
from lightcache.shm import Segment, names
from lightcache.tools import cli, facts, top
from lightcache.tools.image import read
from lightcache.tools.output import console
from lightcache.tools.readings import Reading, Watch, change, client_change, details, next_evicted
from lightcache.tools.top_screen import History, Look, draw

LIGHTCACHE = str(Path(sys.executable).with_name("lightcache"))
TOKENS = 16
PAGES = 32
RATES = {
    "hit_ratio",
    "tier_hit_ratios",
    "saved_tokens_per_s",
    "pages_per_s",
    "loaded_bytes_per_s",
    "offloaded_bytes_per_s",
}
COUNTED = {
    *("lookups", "hit_pages", "missed_pages", "reserved_pages", "evicted_pages"),
    "published_pages",
}
CACHE = {
    *("name", "uuid", "state", "problem", "lifetime", "age_s", "page_bytes", "page_tokens"),
    *("pages", "free", "writing", "ready", "held", "doomed", "evictable", "kept"),
    *("reservations", "tickets", "clock", "counted", "storage", "clients", "reservation_list"),
    *("next_evicted", "not_working", "hints"),
    *RATES,
}
CLIENT = {
    *("slot", "engine", "role", "pid", "pid_namespace", "alive", "process", "quarantine_s"),
    *("device", "attached_s", "pins", "pinned_pages"),
    *COUNTED,
    *RATES,
}
EVICTED = {"page", "key", "weights", "tenant", "group", "unused_s", "unused_calls", "hits"}


def make(name: str, **how: Any) -> Cache:
    return Cache.create(
        name,
        pages=PAGES,
        page_bytes=4096,
        page_tokens=TOKENS,
        fingerprint="top",
        secret=b"x" * 32,
        **how,
    )


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with make(segment_name, role="engine 1", eviction="lru") as made:
        yield made


def prompt(number: int, pages: int = 4) -> Any:
    return np.arange(pages * TOKENS) + 10_000 * number


def fill(cache: Cache, number: int, pages: int = 4) -> None:
    with cache.reserve(cache.hash_pages(prompt(number, pages))) as new:
        new.publish()
    with cache.reserve(cache.hash_pages(prompt(999, 1))):
        pass  # the next holder of the lock collects what was published


def look_up(cache: Cache, number: int, pages: int = 4) -> None:
    cache.match(cache.hash_pages(prompt(number, pages))).release()


def taken(name: str) -> Reading:
    with Watch() as watch:
        return watch.read()[name]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.group, ["top", *arguments])


# ---- two readings


def test_a_change_is_what_happened_between_two_readings(cache: Cache) -> None:
    fill(cache, 1)
    with Watch() as watch:
        before = watch.read()[cache.name]
        fill(cache, 2)
        for number in (1, 2, 3):
            look_up(cache, number)
        after = watch.read()[cache.name]
    found = change(before, after, 2.0)
    assert found.pages["lookups"] == 3
    assert (found.pages["hit_pages"], found.pages["missed_pages"]) == (8, 4)
    assert found.pages["published_pages"] == 4
    assert found.hit_ratio() == 8 / 12
    assert found.saved_tokens(TOKENS) == 8 * TOKENS
    assert found.per_second(8) == 4.0
    assert change(None, after, 0.0).pages["published_pages"] == 8
    assert change(None, after, 0.0).per_second(8) is None
    assert (after.free + after.doomed, after.ready, after.pages) == (PAGES - 8, 8, PAGES)


def test_no_count_falls_when_clients_come_go_and_replace_a_cache(cache: Cache) -> None:
    fill(cache, 1)
    look_up(cache, 1)
    with Watch() as watch:
        before = watch.read()[cache.name]
        with Cache.attach(cache.name, secret=b"x" * 32) as other:
            look_up(other, 1)
            both = watch.read()[cache.name]
        alone = watch.read()[cache.name]
    assert change(before, both, 1.0).pages["hit_pages"] == 4  # all of a client that is new
    assert set(change(both, alone, 1.0).pages.values()) == {0}
    replaced = change(replace(before, uuid="another"), both, 1.0)
    assert (replaced.seconds, replaced.pages["hit_pages"]) == (0.0, 8)


def test_a_slot_that_another_client_took_begins_anew(cache: Cache) -> None:
    with Watch() as watch:
        with Cache.attach(cache.name, secret=b"x" * 32) as first:
            for _ in range(5):
                look_up(first, 1)
            before = watch.read()[cache.name]
        with Cache.attach(cache.name, secret=b"x" * 32) as second:
            look_up(second, 1)
            after = watch.read()[cache.name]
    (old,), (new,) = ([c for c in r.clients if c.role == ""] for r in (before, after))
    assert old.slot == new.slot
    assert client_change(before, after, new, 1.0).pages["lookups"] == 1


def test_counts_of_managers_by_tier_and_engine(cache: Cache) -> None:
    with NodeCounters.open(cache) as counters, Watch() as watch:
        counters.add(requests=1, prompt_tokens=100, host_tokens=10)
        before = watch.read()[cache.name]
        counters.add(requests=1, prompt_tokens=200, device_tokens=50, host_tokens=100)
        counters.add(loads=1, loaded_bytes=4096, load_ns=1000)
        after = watch.read()[cache.name]
    found = change(before, after, 2.0)
    assert found.tier_ratios() == {"device": 0.25, "host": 0.5, "storage": 0.0}
    assert found.saved_tokens(TOKENS) == 150
    assert found.counted["loaded_bytes"] == 4096
    own = client_change(before, after, after.clients[0], 2.0)  # of the process that counted
    assert own.tier_ratios() == found.tier_ratios()
    assert change(None, after, 0.0).counted["prompt_tokens"] == 300


def test_next_evicted_are_those_that_go_next(cache: Cache) -> None:
    for number in (1, 2, 3):
        fill(cache, number)
    look_up(cache, 1)
    with cache.match(cache.hash_pages(prompt(2))):
        listed = [page["page"] for page in next_evicted(read(cache.name), 8)]
    assert len(listed) == 2  # the ends of 3 and 1; that of 2 is pinned
    ends = [page["page"] for page in next_evicted(read(cache.name), 8)]
    assert len(ends) == 3
    assert ends[0] == listed[0]  # of 3: the others were used later
    (first,) = [page["page"] for page in next_evicted(read(cache.name), 1)]
    cache.evict(1)
    words = facts.records(read(cache.name))["word"]
    assert [page for page in ends if words[page] & layout.STATE_MASK == PageState.FREE] == [first]


def test_next_evicted_of_ranked_lists(segment_name: str) -> None:
    with make(segment_name, eviction="hz") as cache:
        for number in (1, 2, 3):
            fill(cache, number)
            look_up(cache, number)
        cache.index.evict_first(cache.hash_pages(prompt(2)))
        with cache.match(cache.hash_pages(prompt(1))):
            listed = list(next_evicted(read(cache.name), 8))
        assert [page["hits"] for page in listed] == [1, 1]  # the ends of 2 and of 3
        first = listed[0]["page"]
        assert len(list(next_evicted(read(cache.name), 8))) == 3
        assert [page["page"] for page in next_evicted(read(cache.name), 1)] == [first]
        cache.evict(1)
        word = facts.records(read(cache.name))["word"][first]
        assert word & layout.STATE_MASK == PageState.FREE


def test_with_hz_the_time_without_use_is_known(segment_name: str) -> None:
    """Also of what was used before `top` started: it is in the page's word."""
    with make(segment_name, eviction="hz") as cache:
        fill(cache, 1)
        fill(cache, 2)
        cache.index.evict_first(cache.hash_pages(prompt(2)))
        image = read(cache.name)
        image.taken_ns += 7200 * 10**9
        first, other = next_evicted(image, 2)
        assert (first["unused_s"], first["unused_calls"]) == (None, None)
        assert 7200 <= other["unused_s"] < 10_000
        assert other["unused_calls"] is None
        history = History()
        with Watch() as watch:
            watched(watch, history, 1.0, cache.name)
        found = replace(details(cache.name), next_evicted=(first, other))
        history.details[cache.name] = found
        screen = shown(history, Look(cache=cache.name))
        assert re.search(r"goes next +page \d+: told to go first, hits: ", screen)
        assert re.search(r"page \d+: unused for 2 h, hits: ", screen)


def test_details_say_what_a_client_holds_and_who_writes(cache: Cache) -> None:
    fill(cache, 1)
    slot = cache.client_id.slot
    with (
        cache.match(cache.hash_pages(prompt(1))),
        cache.reserve(cache.hash_pages(prompt(2, 3))),
    ):
        found = details(cache.name)
    assert found.held[slot][1] == 7
    (entry,) = found.reservations
    assert (entry["pages"], entry["owner"]) == (3, slot)
    assert (found.not_working, found.notes) == ((), ())


# ---- the screen


def shown(history: History, look: Look, width: int = 100, height: int = 40) -> str:
    lines = draw(history, look, width, height, "top")
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain for line in lines)


def watched(watch: Watch, history: History, now: float, name: str) -> None:
    """Add a reading, without the caches of other tests."""
    history.add(now, {each: found for each, found in watch.read().items() if each == name})


@pytest.mark.parametrize("width", [20, 60, 100, 250])
@pytest.mark.parametrize("height", [3, 10, 40])
def test_every_screen_fits(cache: Cache, width: int, height: int) -> None:
    fill(cache, 1)
    history = History()
    with Watch() as watch, cache.reserve(cache.hash_pages(prompt(2, 3))):
        watched(watch, history, 1.0, cache.name)
        watched(watch, history, 3.0, cache.name)
        history.details[cache.name] = details(cache.name)
    look = Look()
    shown(history, look, width, height)
    for key in ("enter", "enter", "back", "tab", "sort", "reverse", "enter", "back", "back"):
        assert look.press(key)
        shown(history, look, width, height)
    assert look.cache is None
    assert not look.press("quit")


def test_keys_look_into_a_cache_a_client_and_a_reservation(cache: Cache) -> None:
    history, look = History(), Look()
    with Watch() as watch, cache.reserve(cache.hash_pages(prompt(2, 3))):
        watched(watch, history, 1.0, cache.name)
        history.details[cache.name] = details(cache.name)
    assert cache.name in shown(history, look)
    look.press("enter")
    assert "engine 1" in shown(history, look)
    look.press("enter")
    assert f"pid {os.getpid()}, living" in shown(history, look)
    look.press("back")
    shown(history, look)
    look.press("tab")
    assert "parts left" in shown(history, look)
    look.press("enter")
    assert "pending slots" in shown(history, look)
    look.press("back")
    look.press("back")
    assert look.cache is None


def test_the_cursor_stays_on_its_row_when_rows_are_sorted(cache: Cache) -> None:
    history, look = History(), Look(cache=cache.name)
    with Cache.attach(cache.name, secret=b"x" * 32, role="a") as other, Watch() as watch:
        look_up(other, 1)
        watched(watch, history, 1.0, cache.name)
        chosen = (other.client_id.slot, history.now[cache.name].clients[-1].epoch)
    shown(history, look)
    look.press("down")
    shown(history, look)
    assert look.chosen == chosen
    look.press("sort")  # by engine: "a" is the first
    shown(history, look)
    assert (look.row, look.chosen) == (0, chosen)


def test_a_cache_that_goes_and_comes_again(segment_name: str) -> None:
    history, look = History(), Look(cache=segment_name, only=segment_name)
    with Watch() as watch:
        with make(segment_name) as cache:
            look_up(cache, 1)
            watched(watch, history, 1.0, segment_name)
            first = history.now[segment_name].uuid
        watched(watch, history, 2.0, segment_name)
        assert "is gone" in shown(history, look)
        look.press("back")
        assert look.cache == segment_name  # there is no list to go back to
        with make(segment_name):
            watched(watch, history, 3.0, segment_name)
            assert history.now[segment_name].uuid != first
            assert history.minute(segment_name).pages["lookups"] == 0
            assert "is gone" not in shown(history, look)
            history.details[segment_name] = details(segment_name)
        with make(segment_name):  # replaced between two readings
            watched(watch, history, 4.0, segment_name)
            assert history.now[segment_name].state == "ready"
            assert history.rates(segment_name).seconds == 0
            assert not history.details  # of the one before


def test_a_damaged_cache_is_said_to_be(segment_name: str) -> None:
    with make(segment_name, lifetime="persistent"):
        pass
    path = names.FOLDER / f"lightcache.{segment_name}"
    history, look = History(), Look(cache=segment_name)
    try:
        with Watch() as watch:
            watched(watch, history, 1.0, segment_name)
            assert history.now[segment_name].state == "ready"
            os.truncate(path, 5000)  # while it is open
            watched(watch, history, 2.0, segment_name)
            assert "truncated" in shown(history, look)
        assert run(segment_name, "--once", "--interval", "0.1").exit_code == 0
    finally:
        Segment.unlink(segment_name, force=True)


DIES = """
import sys
from lightcache import Cache
cache = Cache.attach(sys.argv[1], secret=b"x" * 32, role="victim")
lease = cache.match(cache.hash_pages(range(64)))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_client(cache: Cache, tmp_path: Path) -> None:
    with cache.reserve(cache.hash_pages(np.arange(64))) as new:
        new.publish()
    command, pipe = [sys.executable, "-c", DIES, cache.name], subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path) as process,
        Watch() as watch,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        history, look = History(), Look(cache=cache.name)
        watched(watch, history, 1.0, cache.name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        watched(watch, history, 2.0, cache.name)
        history.details[cache.name] = details(cache.name)
        text = shown(history, look)
    assert "1+1 dead clients" in text
    assert "1 dead clients have not been reaped" in text
    (row,) = [line for line in text.splitlines() if "victim" in line]
    assert row.split()[3:6] == ["dead", "-", "4"]


# ---- the command


def test_json_has_these_fields(cache: Cache) -> None:
    fill(cache, 1)
    look_up(cache, 1)
    result = run(cache.name, "--once", "--json", "--interval", "0.1")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document.keys() == {"interval_s", "caches"}
    (found,) = document["caches"]
    assert found.keys() == CACHE
    (client,) = found["clients"]
    assert client.keys() == CLIENT
    assert found["pages_per_s"].keys() == COUNTED
    assert found["next_evicted"][0].keys() == EVICTED
    assert (found["hit_ratio"], found["ready"], client["engine"]) == (1.0, 4, "engine 1")
    assert document["interval_s"] > 0


def test_without_a_terminal_one_screen_is_printed(cache: Cache) -> None:
    result = run("--interval", "0.1")
    assert result.exit_code == 0
    assert cache.name in result.stdout
    assert "\x1b" not in result.stdout


def test_a_picture(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "top.svg"
    assert run(cache.name, "--svg", str(path), "--interval", "0.1").exit_code == 0
    assert path.read_text().startswith("<svg")
    refused = run("--svg", str(tmp_path / "absent" / "top.svg"))
    assert (refused.exit_code, "--svg: expected a file" in refused.stderr) == (2, True)


def test_a_wrong_name(segment_name: str) -> None:
    result = run(segment_name, "--once")
    assert result.exit_code == 2
    assert f"there is no cache '{segment_name}'" in result.stderr
    assert run("a/b", "--once").exit_code == 2


@pytest.mark.parametrize("signalled", [True, False])
def test_a_terminal_that_is_gone(signalled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings cannot be given back, and nothing be read."""
    own, other = pty.openpty()
    out = console()
    monkeypatch.setattr(top, "hush", lambda: None)

    def loop(self: Any, keys: int | None) -> None:
        os.close(own)
        if signalled:
            raise SystemExit(top.GONE)
        os.write(keys or 0, b"a screen")

    monkeypatch.setattr(top._Live, "_loop", loop)
    with os.fdopen(other) as terminal, Watch() as watch:
        monkeypatch.setattr(sys, "stdin", terminal)
        live = top._Live(out, watch, History(), Look(cache=None, only=None), 1.0, other)
        with pytest.raises(SystemExit) as left:
            live.run()
    assert left.value.code == 129


@pytest.mark.slow
def test_live_in_a_terminal_that_goes(cache: Cache, tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as errors:
        with Terminal([LIGHTCACHE, "top", cache.name], columns=100, errors=errors) as terminal:
            terminal.until(f"  {cache.name}  ")
            terminal.go()
            assert terminal.process.wait(timeout=60) == 129
    assert not (tmp_path / "errors").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["q", "ctrl-c", "terminate"])
def test_live_in_a_terminal(cache: Cache, ending: str) -> None:
    """Keys, a window that is resized to 60 columns, a stop and the terminal afterwards."""
    fill(cache, 1)
    command = [LIGHTCACHE, "top", "--interval", "0.1"]
    with Terminal([*command, cache.name], columns=100) as terminal:
        terminal.until(f"  {cache.name}  ")
        terminal.until("engine 1")
        terminal.send(b"\r")
        terminal.until(f"pid {os.getpid()}, living")
        terminal.send(b"\x1b")
        terminal.until("no warnings")
        terminal.resize(60)
        terminal.until("arrows, enter")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until("\x1b[?1049l")
        os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until("\x1b[?1049h")
        terminal.until("engine 1")
        if ending == "terminate":
            terminal.process.terminate()
        else:
            terminal.send({"q": b"q", "ctrl-c": b"\x03"}[ending])
        terminal.until("\x1b[?1049l")
        expected = {"q": 0, "ctrl-c": 130, "terminate": 128 + signal.SIGTERM}
        assert terminal.process.wait(timeout=60) == expected[ending]
        assert terminal.as_found()


class Terminal:
    """A pseudo terminal, and a process that it is the terminal of."""

    def __init__(self, command: list[str], columns: int, errors: BinaryIO | None = None) -> None:
        self._own, self._other = pty.openpty()
        self.resize(columns)
        self._found = termios.tcgetattr(self._other)
        self._seen = b""
        self.process = subprocess.Popen(
            command,
            stdin=self._other,
            stdout=self._other,
            stderr=errors or self._other,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color"},
        )

    def resize(self, columns: int) -> None:
        size = struct.pack("HHHH", 30, columns, 0, 0)
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, size)

    def send(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def until(self, text: str) -> None:
        """Read until this was drawn, and forget it and what came before."""
        end = time.monotonic() + 60
        while text.encode() not in self._seen:
            ready, _, _ = select.select([self._own], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} was not drawn: {self._seen[-4000:]!r}"
            self._seen += os.read(self._own, 1 << 16)
        self._seen = self._seen.partition(text.encode())[2]

    def go(self) -> None:
        """Its window is closed."""
        os.close(self._own)
        self._own = os.open(os.devnull, os.O_RDONLY)

    def as_found(self) -> bool:
        """Whether the terminal echoes, and takes lines, as before."""
        return termios.tcgetattr(self._other) == self._found

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)
        os.close(self._other)
