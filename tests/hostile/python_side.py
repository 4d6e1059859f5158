"""The part of the fuzzing that goes through Python: attaching, calls, the tools, on damaged files.

    python tests/hostile/python_side.py FIRST COUNT

Needs lightcache installed. Cases run in forked children with an alarm; what is printed and the exit
status are as with `hostile`. Only the package's own errors may come out, and no control character.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import secrets
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from lightcache import Cache, LightcacheError, PageIndex
from lightcache._arguments import Keys
from lightcache.group_index import GroupIndex
from lightcache.groups import Group, GroupSet, Rule
from lightcache.page_index import geometry
from lightcache.runs import Run
from lightcache.shm import Segment
from lightcache.shm.layout import CLIENTS_OFFSET, LOCK_OFFSET, ClientRecord, SegmentHeader
from lightcache.shm.listing import read_segment
from lightcache.tools.cli import group

PAGES = 48
STATES = Run(1, 3)
LIMIT = 20  # seconds for the calls of one case: an alarm, not a measure
LOCK = 0.05  # seconds to wait for a lock
ESCAPE = b"\x1b[2J\x9b31m\xc2\x9b\xff\xfe\x07"
JSON_TEXTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"[" * 2048,
    b'{"pages":' + b"[" * 1500,
    b'{"pages":' + b"9" * 2000 + b"}",
    b'{"pages":-1}',
    b'{"pages":true}',
    b'{"pages":1e308}',
    b'{"pages":NaN}',
    b'{"pages":"48"}',
    b'{"pages":18446744073709551615}',
    b'{"pages":40000000}',
    b'{"pages":0}',
    b'{"\xff\xfe":1}',
    b'{"pages":48}',
    b'{"pages":48,"page_bytes":-1,"fingerprint":"f","page_tokens":1,"secret":""}',
    b'{"pages":48,"page_bytes":1e400,"fingerprint":"f","page_tokens":1,"secret":""}',
    b'{"pages":48,"page_bytes":"x","fingerprint":[],"page_tokens":{},"secret":null}',
    b'{"pages":48,"page_bytes":9223372036854775807,"fingerprint":"\\ud800","page_tokens":0}',
    b'{"pages":48,"page_bytes":4096,"page_tokens":16,"algorithm":[1],"fingerprint":"\\u001b[2J"}',
    b'{"pages":48,"page_tokens":16,"kv_groups":["kv","\\u001b[2J"]}',
    b'{"pages":48,"page_bytes":"x","page_tokens":16,"kv_groups":{"kv":1}}',
]


class Case:
    """One seed: what is damaged, and what is called on it."""

    def __init__(self, seed: int, name: str, picture: bytes) -> None:
        self.random = random.Random(seed)
        self.name = name
        self.path = Path("/dev/shm") / f"lightcache.{name}"
        self.picture = picture
        self.what = ""

    def damage(self) -> bytes | None:
        """The file as it is after the damage."""
        whole = bytearray(self.picture)
        kinds: list[Callable[[bytearray], None]] = [
            self._header, self._config, self._text, self._word, self._word, self._length,
        ]  # fmt: skip
        kind = self.random.choice(kinds)
        self.what = kind.__name__.strip("_")
        kind(whole)
        return bytes(whole)

    def _value(self, size: int) -> bytes:
        ends = [0, 1, 2, (1 << 8 * size) - 1, 1 << 8 * size - 1, (1 << 8 * size - 1) - 1, PAGES]
        value = self.random.choice([*ends, self.random.getrandbits(8 * size)])
        return (value % (1 << 8 * size)).to_bytes(size, "little")

    def _header(self, whole: bytearray) -> None:
        field = self.random.choice([name for name, *_ in SegmentHeader._fields_])
        found = getattr(SegmentHeader, field)
        size = min(found.size, 8)
        at = found.offset + self.random.randrange(0, found.size - size + 1)
        whole[at : at + size] = self._value(size)
        self.what = f"header.{field}"

    def _config(self, whole: bytearray) -> None:
        text = self.random.choice(JSON_TEXTS)
        if self.random.random() < 0.3:
            start = SegmentHeader.config.offset
            text = bytes(whole[start : start + 200].rstrip(b"\0"))
            at = self.random.randrange(len(text))
            text = text[:at] + self.random.randbytes(1) + text[at + 1 :]
        self._put(whole, SegmentHeader.config.offset, text[:2048].ljust(2048, b"\0"))
        self._put(whole, SegmentHeader.config_bytes.offset, len(text).to_bytes(4, "little"))

    def _text(self, whole: bytearray) -> None:
        place = geometry(PAGES)
        role = CLIENTS_OFFSET + 128 * self.random.randrange(1, 4) + ClientRecord.role.offset
        weights = place.namespaces + 128 * self.random.randrange(4) + 32
        for at in (role, weights, weights + 48):
            self._put(whole, at, ESCAPE)
        self._put(whole, SegmentHeader.boot_id.offset, ESCAPE)

    def _word(self, whole: bytearray) -> None:
        place = geometry(PAGES)
        parts = [0, CLIENTS_OFFSET, LOCK_OFFSET, place.root, place.reservation, place.ticket]
        begin = self.random.choice([*parts, place.chunk, place.bucket, place.page])
        at = begin + 4 * self.random.randrange(256)
        whole[at : at + 4] = self._value(4)
        self.what = f"word at {at:#x}"

    def _length(self, whole: bytearray) -> None:
        length = self.random.choice([0, 1, 4095, 4096, 49152, len(whole) - 1, len(whole) + 4096])
        whole[:] = bytes(whole[:length]).ljust(length, b"\0")
        self.what = f"{length} bytes long"

    @staticmethod
    def _put(whole: bytearray, at: int, text: bytes) -> None:
        whole[at : at + len(text)] = text

    # ---- calls

    def calls(self) -> list[tuple[str, Callable[[], object]]]:
        """Everything that opens a damaged segment, in any order."""
        all_calls: list[tuple[str, Callable[[], object]]] = [
            ("read", lambda: read_segment(self.name)),
            ("attach a segment", lambda: Segment.attach(self.name, timeout=LOCK).close()),
            ("attach", lambda: self._use(PageIndex.attach(
                self.name, lock_timeout=LOCK, timeout=LOCK))),
            ("attach a reader", lambda: self._look(PageIndex.attach(
                self.name, readonly=True, timeout=LOCK))),
            ("attach a cache", lambda: Cache.attach(
                self.name, grow=False, secret=b"s" * 16, lock_timeout=LOCK, timeout=LOCK).close()),
            ("open", lambda: PageIndex.open(
                self.name, pages=PAGES, lock_timeout=LOCK, timeout=LOCK).close()),
        ]  # fmt: skip
        for words in (["dump", self.name], ["dump", self.name, "--json"], ["ls"], ["ls", "--json"],
                      ["check", self.name, "--wait", "0"], ["check", self.name, "--json",
                      "--wait", "0"], ["reap", self.name], ["repair", self.name]):  # fmt: skip
            all_calls.append((" ".join(words[:1]), lambda words=words: self._tool(words)))
        self.random.shuffle(all_calls)
        return all_calls[:6]

    def _look(self, index: PageIndex) -> None:
        keys = np.arange(40, dtype=np.uint64).reshape(-1, 2)
        with contextlib.closing(index):
            found = index.peek(keys)
            assert 0 <= found <= len(keys), found
            position = groups_of(index).peek(keys)
            assert 0 <= position.pages <= len(keys), position
            states = GroupIndex(index, STATES)
            assert 0 <= states.last_ready(keys) <= len(keys)
            index.groups()
            index.stats()
            index.clients()
            index.check()

    def _use(self, index: PageIndex) -> None:
        keys = np.arange(40, dtype=np.uint64).reshape(-1, 2)
        with contextlib.closing(index):
            for call in (
                lambda: index.match(keys).release(),
                lambda: self._write(index),
                lambda: index.evict(3),
                lambda: self._match_groups(index, keys),
                *self._states(index, keys),
                lambda: index.evict(2, group=STATES.group),
                lambda: index.namespace("w", "t"),
                index.reap,
                index.check,
                index.stats,
                index.clients,
            ):
                with contextlib.suppress(LightcacheError):
                    call()

    def _match_groups(self, index: PageIndex, keys: Keys) -> None:
        together = groups_of(index)
        with together.match(keys) as one, together.match_many(keys, [0, 5, len(keys)]) as many:
            assert 0 <= one.pages <= len(keys), one.pages
            assert all(0 <= pages <= len(keys) for pages in many.pages), many.pages
            for lease in (*one.leases, *many.leases):
                assert all(0 <= page < PAGES for page in lease.pages), lease.pages

    def _states(self, index: PageIndex, keys: Keys) -> list[Callable[[], object]]:
        """Calls for pages in parts, each for itself."""
        states = GroupIndex(index, STATES)

        def plan() -> None:
            if states.plan("request", keys[3:4], timeout=LOCK):
                states.take("request").release()

        def write() -> None:
            with states.reserve(keys[8:10], 1, shards=1) as got:
                assert all(0 <= page < PAGES for page in got.pages), got.pages
                got.publish()

        return [
            lambda: states.last_ready_many(keys, [0, 5, len(keys)]),
            lambda: states.children(keys),
            plan,
            write,
            lambda: states.protect(keys[3:4]),
            lambda: states.unprotect(keys[3:4]),
            lambda: states.drop(keys[7:8]),
            index.groups,
        ]

    def _write(self, index: PageIndex) -> None:
        keys = np.arange(600, 620, dtype=np.uint64).reshape(-1, 2)
        with index.reserve(keys) as got:
            assert all(0 <= page < PAGES for page in got.pages), got.pages
            got.publish()

    def _tool(self, words: list[str]) -> None:
        result = CliRunner().invoke(group, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code in (0, 1, 2), result.exit_code
        bad = [c for c in result.output if not (c.isprintable() or c in "\n")]
        assert not bad, f"{words[0]} printed {bad[:5]!r}"
        if "--json" in words and result.exit_code == 0:
            json.loads(result.stdout)

    def run(self, counts: Counter[str]) -> list[str]:
        """Findings, in words."""
        found = []
        damaged = self.damage()
        for what, call in self.calls():
            self.restore(damaged)
            signal.alarm(LIMIT)
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    call()
                counts["success"] += 1
            except LightcacheError as error:
                counts[type(error).__name__] += 1
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                found.append(f"{what} on {self.what}: {type(error).__name__}: {str(error)[:200]} "
                             f"({Path(where.filename).name}:{where.lineno})")  # fmt: skip
            finally:
                signal.alarm(0)
        return found

    def restore(self, whole: bytes | None) -> None:
        """The file again as it should be; no process is attached meanwhile."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        with open(fd, "r+b", buffering=0) as raw:
            raw.truncate(len(whole or b""))
            raw.write(whole or b"")


def groups_of(index: PageIndex) -> GroupSet:
    """Full attention, and a state at two positions."""
    groups = [
        Group("kv", Rule.prefix(), index),
        Group("states", Rule.point(), index, run=STATES),
        Group("window", Rule.window(20), index),
    ]
    return GroupSet(groups, page_tokens=16)


def picture_of(name: str) -> bytes:
    """An index with pages, states in parts, a reservation and a ticket, whose client has gone."""
    config = {"page_bytes": 4096, "page_tokens": 16, "fingerprint": "f", "algorithm": "xxh3_128",
              "secret": "", "kv_groups": ["kv", "states"]}  # fmt: skip
    with PageIndex.create(name, pages=PAGES, config=config, lifetime="persistent") as index:
        keys = np.arange(40, dtype=np.uint64).reshape(-1, 2)
        with index.reserve(keys) as got:
            got.publish()
        with GroupIndex(index, STATES).reserve(keys[[3, 7]], 0, shards=1) as got:
            got.publish()
        index.namespace("weights", "tenant")
        lease = index.match(keys[:6])
        ticket = lease.ticket([index.client_id])
        held = index.reserve(np.arange(900, 910, dtype=np.uint64).reshape(-1, 2), shards=2)
        whole = (Path("/dev/shm") / f"lightcache.{name}").read_bytes()
        held.release()
        lease.release()
        ticket.drop()
    return whole


def in_child(name: str, picture: bytes, first: int, end: int) -> tuple[int, int, list[str]]:
    """Run cases in a child; (the case that ended it or `end`, its wait status, its lines)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with open(writing, "w", buffering=1) as out:
            for seed in range(first, end):
                counts: Counter[str] = Counter()
                out.write(f"BEGIN {seed}\n")
                for line in Case(seed, name, picture).run(counts):
                    out.write(f"FINDING python seed {seed}, {line}\n")
                for kind, count in counts.items():
                    out.write(f"RESULT {kind} {count}\n")
        os._exit(0)
    os.close(writing)
    with open(reading) as inward:
        lines = inward.read().splitlines()
    _, status = os.waitpid(pid, 0)
    begun = [int(line.split()[1]) for line in lines if line.startswith("BEGIN")]
    return (begun[-1] if begun and status else end), status, lines


def main() -> int:
    """Run the seeds given on the command line."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    name = f"fuzz-{secrets.token_hex(4)}"
    picture = picture_of(name)
    results: Counter[str] = Counter()
    findings, at = [], first
    try:
        while at < first + count:
            stopped, status, lines = in_child(name, picture, at, first + count)
            for line in lines:
                if line.startswith("FINDING"):
                    findings.append(line)
                elif line.startswith("RESULT"):
                    results[line.split()[1]] += int(line.split()[2])
            if status:
                findings.append(f"FINDING python seed {stopped}: died with wait status {status}")
                at = stopped + 1
            else:
                at = first + count
    finally:
        for path in Path("/dev/shm").glob(f"lightcache.{name}*"):
            path.unlink()
    for line in findings:
        print(line)
    print("python", count, " ".join(f"{kind} {n}" for kind, n in sorted(results.items())))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
