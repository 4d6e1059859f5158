"""`lightcache replay`: traces, the one pass against the index and a plain simulation, the page."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from lightcache import ConfigError, PageIndex, traces
from lightcache.shm.listing import list_segments
from lightcache.simulation import (
    ORDERS,
    by_chance,
    by_load,
    by_prefix,
    cached_of,
    hits_of,
    pages_needed,
    simulated,
)
from lightcache.tools.sizing import Setup, cases
from lightcache.traces import Trace

Run = Callable[..., Result]
LRU = ORDERS["lru"]
TOKENS = 4


def write(path: Path, prompts: Sequence[tuple[str, int]], **more: Any) -> Path:
    """A letter is a block of four tokens, and is known by those before it; the number: tokens of
    the prompt beyond its last whole block."""
    lines = []
    for at, (prompt, rest) in enumerate(prompts):
        ids = [ord(letter) for letter in prompt]
        said = {"timestamp": 1000 * at, "input_length": TOKENS * len(ids) + rest, "hash_ids": ids}
        lines.append(json.dumps({**said, "block_tokens": TOKENS, **more}))
    path.write_text("\n".join(lines) + "\n")
    return path


def random_trace(path: Path, seed: int) -> Trace:
    """Paths in a small tree, some of which end with their last block."""
    chance = random.Random(seed)
    letters = "ab" if seed % 2 else "abcdef"
    prompts = ["".join(chance.choices(letters, k=chance.randint(0, 9))) for _ in range(30)]
    asked = []
    for _ in range(200):
        prompt = chance.choice(prompts[: chance.randint(1, 30)])
        prompt = prompt[: chance.randint(0, 9)] + chance.choice(["", "", "x", "yz"])
        asked.append((prompt, chance.choice([0, 0, 1, 3])))
    return traces.read(write(path / f"{seed}.jsonl", asked))


def zeros(trace: Trace) -> traces.Ints:
    return np.zeros(len(trace), np.int64)


# ---- the simulation is what the index does


@pytest.mark.parametrize("pages", [1, 3, 7, 20])
def test_one_pass_is_what_the_index_serves(pages: int, tmp_path: Path, segment_name: str) -> None:
    trace = random_trace(tmp_path, pages)
    keys = np.random.default_rng(pages).integers(0, 2**64, (trace.distinct, 2), dtype=np.uint64)
    found = []
    with PageIndex.create(segment_name, pages=pages, eviction="lru", role="test") as index:
        begins = (trace.ends - trace.lengths).tolist()
        for begin, end, most in zip(begins, trace.ends, trace.matchable.tolist(), strict=True):
            path = keys[trace.blocks[begin:end]]
            with index.match(path[:most]) as lease:
                found.append(len(lease))
                with index.reserve(path, len(lease)) as made:
                    made.publish()
    assert found == hits_of(trace, pages_needed(trace, zeros(trace)) <= pages).tolist()
    assert 0 < sum(found) < trace.matchable.sum()


@pytest.mark.parametrize("nodes", [1, 3, 40])
def test_one_pass_is_a_simulation_of_each_size(nodes: int, tmp_path: Path) -> None:
    for seed in range(4):
        trace = random_trace(tmp_path, seed)
        for which in (
            by_chance(trace, nodes),
            by_load(trace, nodes, 20),
            by_prefix(trace, nodes, 20, LRU, 7),
        ):
            assert 0 <= which.min() <= which.max() < nodes
            needed = pages_needed(trace, which)
            for pages in (0, 1, 2, 5, 13, 50, 10_000):
                slow = simulated(trace, which, LRU, pages)
                assert cached_of(trace, needed <= pages).tolist() == slow.tolist()


def test_an_order_that_is_no_stack_algorithm_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, setup = random_trace(tmp_path, 2), Setup(1 << 10, 100.0)
    sizes = [4096 * pages for pages in (3, 9)]
    monkeypatch.setitem(ORDERS, "slow", dataclasses.replace(LRU, stack=False))
    given = (trace, setup, sizes, [0, 1 << 20], [1, 3], ["load", "prefix"])
    fast, slow = (list(cases(*given, [name])) for name in ("lru", "slow"))
    assert [dataclasses.replace(row, policy="lru") for row in slow] == fast


@pytest.mark.parametrize("pages", [1, 5, 20])
def test_hz_is_the_index_with_the_clock_of_the_trace(pages: int, tmp_path: Path) -> None:
    """What went and what stays is known of each block; a block is there with all before it."""
    trace, cache = random_trace(tmp_path, pages), ORDERS["hz"].cache(pages)
    held: set[int] = set()
    found, gone_again = 0, 0
    for end, length, at in zip(trace.ends, trace.lengths, trace.seconds, strict=True):
        path = trace.blocks[end - length : end].tolist()
        count = cache.cached(path)
        assert set(path[:count]) <= held
        assert path[count : count + 1] == [] or path[count] not in held
        held |= set(path)
        gone = cache.use(path, float(at))
        held -= set(gone)
        found, gone_again = found + count, gone_again + len(gone)
        assert len(held) <= pages
    cache.close()
    assert found > 0
    assert gone_again
    assert simulated(trace, zeros(trace), ORDERS["hz"], pages).sum() > 0


def test_hz_keeps_what_comes_back_from_a_scan(tmp_path: Path) -> None:
    """One prompt in ten is the same, the others come once: LRU forgets it in between, "hz" learns
    to keep it. The indexes are gone in the end."""
    prompts = [("ab" if n % 10 == 0 else chr(256 + n) + "s", 1) for n in range(1000)]
    trace = traces.read(write(tmp_path / "t", prompts))
    lru = cached_of(trace, pages_needed(trace, zeros(trace)) <= 16)
    hz = simulated(trace, zeros(trace), ORDERS["hz"], 16)
    assert hz.sum() > 1.5 * lru.sum()
    by_prefix(trace, 3, 20, ORDERS["hz"], 4)
    left = [each.name for each in list_segments()]
    assert not [name for name in left if name.startswith(f"replay-{os.getpid()}-")]


def test_hz_is_among_the_policies(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "t", [("abc", 1), ("xyz", 1), ("abd", 1)] * 5)
    given = ("replay", trace, "--nodes", "1,2", "--size", "2MiB", "--policy", "lru,hz", "--json")
    rows = json.loads(run(*given).stdout)
    assert [(row["nodes"], row["policy"]) for row in rows] == [
        *((1, policy) for policy in ("lru", "hz")),
        *((2, policy) for _ in range(3) for policy in ("lru", "hz")),
    ]
    assert all(row["host_tokens"] >= 0 for row in rows)


# ---- routing


def test_by_prefix_a_conversation_stays_on_its_node(tmp_path: Path) -> None:
    prompts = [(name * turn, 1) for turn in (2, 3, 4) for name in "abcdef"]
    trace = traces.read(write(tmp_path / "t", prompts))
    which = by_prefix(trace, 4, 1e9, LRU, 1000)
    assert which[:6].tolist() == which[6:12].tolist() == which[12:].tolist()
    assert len(set(which.tolist())) > 1


def test_by_prefix_a_loaded_node_gives_way(tmp_path: Path) -> None:
    trace = traces.read(write(tmp_path / "t", [("abcdefgh", 1), *[("ab", 1)] * 30]))
    assert len(set(by_prefix(trace, 4, 1e9, LRU, 1000))) == 1
    assert len(set(by_prefix(trace, 4, 0.01, LRU, 1000))) == 4


@pytest.mark.parametrize("seed", range(4))
def test_by_prefix_the_cheapest_node_is_chosen(seed: int, tmp_path: Path) -> None:
    """By what the caches hold, asked one by one."""
    trace, rate, pages, nodes = random_trace(tmp_path, seed), 15.0, 5, 4
    which = by_prefix(trace, nodes, rate, LRU, pages)
    caches, waiting, chosen = [LRU.cache(pages) for _ in range(nodes)], [0.0] * nodes, set()
    for number, node in enumerate(which.tolist()):
        path = trace.blocks[trace.ends[number] - trace.lengths[number] : trace.ends[number]]
        found = [cache.cached(path[: trace.matchable[number]].tolist()) for cache in caches]
        waiting = [max(0.0, tokens - (rate if number else 0)) for tokens in waiting]
        costs = [
            trace.tokens[number] - 0.9 * TOKENS * cached + tokens
            for cached, tokens in zip(found, waiting, strict=True)
        ]
        assert costs[node] == pytest.approx(min(costs))
        waiting[node] += trace.tokens[number] - TOKENS * found[node]
        caches[node].use(path.tolist(), 0.0)
        chosen.add(node)
    assert len(chosen) == nodes


def test_by_load_all_nodes_get_the_same(tmp_path: Path) -> None:
    trace = traces.read(write(tmp_path / "t", [("abcd", 0)] * 40))
    assert np.bincount(by_load(trace, 4, 1e-9)).tolist() == [10] * 4


# ---- tiers and bytes


def test_tokens_and_bytes_of_tiers(tmp_path: Path) -> None:
    trace = traces.read(write(tmp_path / "t", [("abc", 1), ("xyz", 1), ("abc", 1), ("abc", 0)]))
    page = 4096
    setup = Setup(page // TOKENS, 10.0)
    (row,) = cases(trace, setup, [3 * page], [6 * page], [1], [], ["lru"])
    # The third finds nothing in three pages and all in the storage; the fourth computes its last,
    # which is cached and is not offloaded again.
    assert (row.tokens, row.host_tokens, row.storage_tokens) == (51, 8, 12)
    assert (row.loaded, row.storage_read) == (5 * page, 3 * page)
    assert (row.offloaded, row.storage_written) == (6 * page, 6 * page)
    assert row.saved_s == 2.0
    assert (row.next_gib_tokens, row.every_tokens) == (12, 0)
    (row,) = cases(trace, setup, [3 * page], [0], [1], [], ["lru"])
    assert (row.hit_tokens, row.every_tokens, row.storage_written) == (8, 12, 0)
    assert row.offloaded == 9 * page


def test_a_shared_storage_serves_what_another_node_computed(tmp_path: Path) -> None:
    trace = traces.read(write(tmp_path / "t", [("abc", 1)] * 6))
    own, shared = (
        next(cases(trace, Setup(1 << 10, 1e-9, each), [4096], [1 << 20], [6], ["load"], ["lru"]))
        for each in (False, True)
    )
    assert (own.hit_tokens, own.every_tokens, own.every_shared_tokens) == (0, 0, 60)
    assert (shared.hit_tokens, shared.every_shared_tokens) == (60, 0)


# ---- the command


def test_the_table_and_the_page(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "<b>t", [("abc", 1), ("xyz", 1), ("abd", 1)] * 5)
    report = tmp_path / "report.html"
    given = ("replay", trace, "--nodes", "1,3", "--size", "2MiB,4MiB,1GiB", "--report", report)
    said = run(*given).stdout
    assert re.search(r"3 │ prefix .*│", said)
    assert "no cache serves more" in said
    page = report.read_text()
    links = []

    class Links(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            links.extend([value for name, value in attrs if name in ("src", "href")])
            assert tag not in ("script", "link", "b")

    Links().feed(page)
    assert not links
    assert "@import" not in page
    assert "url(" not in page
    assert page.count("<svg") == 3
    assert "&lt;b&gt;t" in page
    assert "nan" not in page
    assert "exists" in run(*given, status=2).stderr
    assert report.read_text() == page


def test_a_report_that_another_program_wrote_meanwhile_stays(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, report, read = write(tmp_path / "t", [("abc", 1)]), tmp_path / "r.html", traces.read

    def slow(*arguments: Any) -> Trace:
        report.write_text("another")
        return read(*arguments)

    monkeypatch.setattr(traces, "read", slow)
    assert "exists" in run("replay", trace, "--report", report, status=2).stderr
    assert report.read_text() == "another"


@pytest.mark.parametrize(
    ("prompts", "sizes", "rises"),
    [(3, "2MiB,1GiB", True), (3, "1GiB", False), (1, "2MiB,1GiB", False)],
)
def test_only_a_curve_that_rises_is_steepest_somewhere(
    prompts: int, sizes: str, rises: bool, run: Run, tmp_path: Path
) -> None:
    trace = write(tmp_path / "t", [("abcdef", 1)] * prompts)
    said = run("replay", trace, "--size", sizes, "--token-bytes", "256KiB").stdout
    assert ("steepest" in said) == rises
    assert "of the tokens hit; the next GiB" in said


@pytest.mark.parametrize(
    ("sizes", "enough"),
    [
        ("2MiB,6MiB,1GiB", "6.0 MiB a node has at least 95 % of the hits of 1.0 GiB."),
        ("2MiB,4MiB", "no tried size is enough: try larger."),
        ("2MiB,6MiB", "; a storage that keeps all adds 42.7 %."),  # it has all there are
    ],
)
def test_the_size_that_is_enough(sizes: str, enough: str, run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "t", [("abcdef", 1)] * 3)
    said = run("replay", trace, "--size", sizes, "--token-bytes", "256KiB").stdout
    assert enough in said


def test_json_has_every_figure(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "t", [("abc", 1)] * 2)
    (row,) = json.loads(run("replay", trace, "--size", "1GiB", "--json").stdout)
    assert (row["hit_tokens"], row["tokens"], row["routing"]) == (12, 26, "-")
    rows = json.loads(run("replay", trace, "--json").stdout)
    assert rows[-1]["hit_tokens"] == 12
    assert rows[-1]["size"] >= 3 * TOKENS << 17


def test_bytes_of_a_token_from_a_model(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "t", [("abc", 1)] * 2)
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(model))
    for given in (tmp_path, tmp_path / "config.json"):
        (row,) = json.loads(
            run("replay", trace, "--size", "1GiB", "--model", given, "--json").stdout
        )
        assert row["loaded"] == 12 * 2 * 2 * 64 * 2


# ---- recording

KEYS = np.arange(4, dtype=np.uint64).reshape(2, 2)


def recorded(path: Path | str, requests: int = 1) -> None:
    recorder = traces.Recorder(path)
    for _ in range(requests):
        recorder.note(2 * TOKENS, KEYS, TOKENS)
    recorder.close()


def test_a_short_write_is_said_once_and_spoils_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, write = tmp_path / "t", os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, text: write(file, text[:9]))
        recorded(path, 3)
    (said,) = caplog.messages
    assert "9 of" in said
    assert path.read_bytes() == b'{"timesta'
    recorded(path, 2)
    recorded(path)
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    with pytest.raises(ConfigError, match=r"sed -i 1d "):
        traces.read(path)
    path.write_text("\n".join(lines[1:]))
    assert len(traces.read(path)) == 3


@pytest.mark.parametrize("name", ["a\0b", "fifo", "none/t"])
def test_a_file_that_cannot_be_written_is_said_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "fifo")
    recorded(f"{tmp_path}/{name}", 2)
    assert len(caplog.messages) == 1


def test_a_file_that_may_only_be_written_begins_another_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> bytes:
        raise PermissionError

    monkeypatch.setattr(os, "pread", refused)
    recorded(tmp_path / "t")
    recorded(tmp_path / "t")
    assert len(traces.read(tmp_path / "t")) == 2


# ---- bad input


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "found an empty file"),
        ('{"hash_ids": [1]}\n{"hash_i', "line 2, the last one, is cut; leave it out: head -n 1"),
        ('{"hash_i', "found line 1"),
        ('{"hash_ids": [1]}\n{"ha{"hash_ids": [1]}\n', "take it out: sed -i 2d "),
        ("a,b\n", "expected a trace"),
        ("[1]\n", "expected a trace"),
        ("\x80".encode("latin1").decode("latin1") + "\n", "expected a trace"),
        ('{"hash_ids": [1.5]}\n', "expected integers"),
        ('{"hash_ids": [1, 2], "input_length": 3000}\n', "--block-tokens says"),
        ('{"hash_ids": [1], "input_length": null}\n', "--block-tokens says"),
        ('{"hash_ids": [1], "block_tokens": 0}\n', "block_tokens: expected"),
        ('{"hash_ids": [1], "timestamp": "now"}\n', "timestamp: expected"),
        ('{"hash_ids": [1], "timestamp": 1e308}\n', "expected milliseconds, found 1e+308"),
        ('{"hash_ids": [1], "timestamp": -1e15}\n', "timestamp: expected"),
        ('{"hash_ids": [1], "timestamp": NaN}\n', "timestamp: expected"),
        (f'{{"hash_ids": [1], "timestamp": {"9" * 400}}}\n', "timestamp: expected"),
        ('{"hash_ids": [1], "block_tokens": 4}\n{"hash_ids": [1]}\n', "blocks of one length"),
    ],
)
def test_what_is_no_trace(text: str, says: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert says in run("replay", path, status=2).stderr


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\x80\x81\n")
    with pytest.raises(ConfigError, match="no text"):
        traces.read(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--size", "big"), "--size: expected bytes or a size"),
        (("--size", "4KiB"), "--size: expected at least a block"),
        (("--storage", "-1"), "--storage: expected"),
        (("--nodes", "0"), "--nodes: expected numbers of 1 to 1000"),
        (("--nodes", "1,1001"), "--nodes: expected numbers of 1 to 1000"),
        (("--routing", "hash"), "--routing: expected some of random,load,prefix"),
        (("--policy", "mru"), "--policy: expected some of lru"),
        (("--prefill-tokens-per-s", "0"), "expected a number above 0"),
        (("--prefill-tokens-per-s", "nan"), "expected a number above 0"),
        (("--model", "a/model"), "give --token-bytes"),
        (("--model", "./none"), "./none: expected a model's folder or its config.json, found no"),
        (("--model", __file__), "found a file"),
        (("--model", "m", "--token-bytes", "1KiB"), "not both"),
        (("--report", "/nowhere/at/all.html"), "expected a file that can be written"),
    ],
)
def test_options_that_cannot_be(
    options: Sequence[str], says: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    trace = write(tmp_path / "t", [("abc", 1)])
    assert says in run("replay", trace, *options, status=2).stderr


def test_a_file_that_cannot_be_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    assert "No such file" in run("replay", tmp_path / "t", status=2).stderr
    assert "Is a directory" in run("replay", tmp_path, status=2).stderr
    monkeypatch.setattr(Path, "open", refused)
    assert "Permission denied; `ls -l` shows" in run("replay", tmp_path / "t", status=2).stderr


def test_prompts_without_a_full_block(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "t", [("", 3), ("", 0)])
    report = tmp_path / "r.html"
    (row,) = json.loads(run("replay", trace, "--json", "--report", report).stdout)
    assert (row["tokens"], row["hit_tokens"]) == (3, 0)
    assert "nan" not in report.read_text()
