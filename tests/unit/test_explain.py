"""`lightcache explain`: why a prompt hits, or does not, on real caches."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from click.testing import CliRunner, Result
from rich.console import Console
from support.vllm_stand_in import Engine

from lightcache import Cache, PageIndex, hash_pages, traces
from lightcache.connectors.vllm.prompts import adapter_bytes, files_digest
from lightcache.evictions import TICK_NS, ghosts_of
from lightcache.shm import Segment, names
from lightcache.storage import StorageSpec, open_storage
from lightcache.tools import cli, explain
from lightcache.tools.explain_report import show
from lightcache.tools.given_prompt import engine_hashes
from lightcache.tools.image import read

SECRET = b"sixteen bytes or more of a secret"
TOKENS = 16
BYTES = 4096
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def own_segments(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the other indexes of this machine, those of this test."""
    listed = explain.list_segments
    monkeypatch.setattr(
        explain, "list_segments", lambda: [i for i in listed() if i.name.startswith(segment_name)]
    )


def make(name: str, pages: int = 32, fingerprint: str = "model=llama kv=bf16", **how: Any) -> Cache:
    return Cache.create(
        name,
        pages=pages,
        page_bytes=BYTES,
        page_tokens=TOKENS,
        fingerprint=fingerprint,
        secret=SECRET,
        role="engine 1",
        **how,
    )


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    with make(segment_name, eviction="lru") as made:
        yield made


def prompt(number: int, tokens: int = 100) -> list[int]:
    return [int(each) for each in np.random.default_rng(number).integers(0, 32000, tokens)]


def put(cache: Cache, ids: list[int], **how: Any) -> None:
    cache.put(ids, np.zeros((len(ids) // TOKENS, cache.page_bytes), np.uint8), **how)


@pytest.fixture
def invoke(segment_name: str, tmp_path: Path) -> Callable[..., Result]:
    """`invoke(ids, *options)`: asks for ids, a list, which are given as standard input."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)

    def run(ids: Any, *options: object, name: str = segment_name) -> Result:
        arguments = ["explain", name, "--secret-file", secret, *options]
        text = ids if isinstance(ids, str) else json.dumps(ids)
        return CliRunner().invoke(cli.group, [str(each) for each in arguments], input=text)

    return run


@pytest.fixture
def ask(invoke: Callable[..., Result]) -> Ask:
    def told(ids: Any, *options: object, **how: Any) -> dict[str, Any]:
        done = invoke(ids, *options, "--json", **how)
        assert done.exit_code == 0, (done.output, done.exception)
        found: dict[str, Any] = json.loads(done.stdout)
        show(Console(file=io.StringIO(), width=80), found)  # the tables can be made of it
        return found

    return told


def states(told: dict[str, Any]) -> list[str]:
    return [page["state"] for page in told["pages"]]


def tokens_file(tmp_path: Path, ids: list[int]) -> str:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(ids))
    return str(path)


# ---- what is there


def test_a_hit(cache: Cache, ask: Ask) -> None:
    put(cache, prompt(1))
    told = ask(prompt(1))
    assert (told["ready_pages"], told["hit_tokens"], states(told)) == (6, 96, ["ready"] * 6)
    assert told["verdict"] == "96 of 100 tokens hit, which is all that can"
    assert (told["elsewhere"], told["continuations"]) == ([], 0)
    assert told["cache"]["fingerprint"] == "model=llama kv=bf16"
    assert told["pages"][5]["tokens"] == [80, 96]
    assert "who wrote a page that is ready: an index does not keep it" in told["unknown"]


def test_the_last_token_is_computed(cache: Cache, ask: Ask) -> None:
    put(cache, prompt(1, 96))
    told = ask(prompt(1, 96))
    assert (told["ready_pages"], told["hit_tokens"]) == (6, 80)
    assert told["verdict"].startswith("80 of 96 tokens hit, which is all")


def test_one_page_is_computed(cache: Cache, ask: Ask) -> None:
    told = ask(prompt(1, TOKENS))
    assert (told["hit_tokens"], told["prompt"]["matchable_pages"]) == (0, 0)
    assert told["verdict"].startswith("nothing can hit: its one page has the last token")


def test_nothing_is_touched(cache: Cache, ask: Ask) -> None:
    """No lock, slot, pin or use: the segment's bytes stay as they are."""
    put(cache, prompt(1))
    path = names.FOLDER / names.object_name(cache.name).removeprefix("/")
    before = path.read_bytes()
    assert ask(prompt(1))["hit_tokens"] == 96
    assert path.read_bytes() == before


def test_where_a_prompt_parts(cache: Cache, ask: Ask, tmp_path: Path) -> None:
    first, other = prompt(1), prompt(1)[:70] + prompt(2, 30)
    put(cache, first)
    told = ask(other, "--against", tokens_file(tmp_path, first))
    assert (told["ready_pages"], states(told)) == (4, ["ready"] * 4 + ["absent"] * 2)
    assert told["verdict"] == "64 of 100 tokens hit: page 4 (tokens 64 to 79) is not there"
    assert told["continuations"] == 1
    assert "1 other page continues the prefix after page 3" in " ".join(told["advice"])
    against = told["against"]
    assert (against["same_tokens"], against["page"], against["ready_pages"]) == (70, 4, 6)
    assert against["token"] == [other[70], first[70]]
    assert f"parts at token 70, in page 4: {other[70]} here, {first[70]} there" in (
        " ".join(told["advice"])
    )
    shorter = ask(first, "--against", tokens_file(tmp_path, first[:50]))["against"]
    assert (shorter["token"], shorter["same_tokens"]) == (None, 50)


def test_lru_remembers_nothing(cache: Cache, ask: Ask) -> None:
    told = ask(prompt(1))
    assert (told["verdict"], states(told)) == (
        "nothing hits: page 0 (tokens 0 to 15) is not there",
        ["absent"] * 6,
    )
    assert any('with eviction "lru" an index remembers nothing' in each for each in told["unknown"])
    assert "give --salt and --lora" in told["advice"][-1]


def test_pages_behind_a_gap(cache: Cache, ask: Ask, invoke: Callable[..., Result]) -> None:
    put(cache, prompt(1))
    keys = cache.hash_pages(prompt(2))
    for page in (0, 2):
        with cache.reserve(keys[page : page + 1]) as new:
            new.publish()
    assert ask(prompt(2))["ready_pages"] == 1
    assert "ready, behind a gap" in invoke(prompt(2)).stdout


# ---- under something else


def test_a_salt_is_named(cache: Cache, ask: Ask) -> None:
    put(cache, prompt(1), salt="chat-7")
    assert ask(prompt(1), "--salt", "chat-7")["hit_tokens"] == 96
    assert ask(prompt(1))["hit_tokens"] == 0
    put(cache, prompt(2))
    told = ask(prompt(2), "--salt", "chat-7")
    (found,) = told["elsewhere"]
    assert (found["ready_pages"], found["salted"], told["prompt"]["salted"]) == (6, False, True)
    assert "the same 96 tokens are in this cache without the salt" in " ".join(told["advice"])
    assert "chat-7" not in json.dumps(told)


def test_an_adapter_as_vllm_names_it(cache: Cache, ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1")
    lora = adapter_bytes("sql", str(folder), files_digest(str(folder)))
    put(cache, prompt(1), lora=lora)
    assert ask(prompt(1), "--lora", f"sql={folder}")["hit_tokens"] == 96
    assert ask(prompt(1), "--lora", lora.hex())["hit_tokens"] == 96
    put(cache, prompt(2))
    told = ask(prompt(2), "--lora", f"sql={folder}")
    assert "without the adapter" in " ".join(told["advice"])


def test_another_namespace(cache: Cache, ask: Ask) -> None:
    space = cache.namespace("step-2", "team")
    put(cache, prompt(1), namespace=space)
    told = ask(prompt(1))
    (found,) = told["elsewhere"]
    assert (found["weights"], found["tenant"], found["ready_pages"]) == ("step-2", "team", 6)
    assert "with weights 'step-2' and with tenant 'team'" in " ".join(told["advice"])
    named = ("--weights", "step-2", "--tenant", "team")
    assert ask(prompt(1), *named)["hit_tokens"] == 96
    told = ask(prompt(1), "--weights", "step-3")
    assert told["prompt"]["namespace_state"] == "absent"
    assert "no process has opened a namespace" in told["advice"][0] + told["advice"][1]
    cache.clear(space)
    told = ask(prompt(1), *named)
    assert (told["hit_tokens"], told["prompt"]["namespace_state"]) == (0, "cleared")
    assert any("was cleared, as after a change of weights" in each for each in told["advice"])


def test_a_namespace_that_is_being_cleared(
    cache: Cache, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are still there, and no lookup finds them, asked for or not."""
    space = cache.namespace("step-2")
    put(cache, prompt(1), namespace=space)
    listed = explain.facts.namespaces

    def clearing(image: Any) -> list[dict[str, Any]]:
        return [{**each, **({"state": "clearing"} if each["weights"] else {})}
                for each in listed(image)]  # fmt: skip

    monkeypatch.setattr(explain.facts, "namespaces", clearing)
    told = ask(prompt(1), "--weights", "step-2")
    assert (told["hit_tokens"], states(told)) == (0, ["ready"] * 6)
    assert "is there, but its namespace is not open" in told["verdict"]
    assert ask(prompt(1))["elsewhere"] == []
    assert ask(prompt(1), "--weights", "step-2", "--salt", "s")["elsewhere"] == []


def test_a_page_in_another_namespace_than_its_key_says(cache: Cache, ask: Ask) -> None:
    space = cache.namespace("step-2")
    with cache.reserve(cache.hash_pages(prompt(1)), namespace=space) as new:
        new.publish()
    told = ask(prompt(1))
    assert (told["hit_tokens"], states(told)[0]) == (0, "other namespace")
    assert "in another namespace than its key says" in told["verdict"]
    assert ask(prompt(1), "--weights", "step-2")["elsewhere"] == []


def test_another_fingerprint(cache: Cache, segment_name: str, ask: Ask) -> None:
    with make(f"{segment_name}-fp8", fingerprint="model=llama kv=fp8") as other:
        put(other, prompt(1))
        told = ask(prompt(1))
        (found,) = told["elsewhere"]
        assert (found["name"], found["differs"]) == (other.name, ["kv=bf16 here, kv=fp8 there"])
        assert "its keys differ by kv=bf16 here, kv=fp8 there" in " ".join(told["advice"])
        put(cache, prompt(1))
        assert ask(prompt(1))["elsewhere"] == []  # who hits asks for no other cache
    with Cache.create(f"{segment_name}-own", pages=8, page_bytes=BYTES, page_tokens=TOKENS,
                      fingerprint="f", secret=bytes(32)) as hidden:  # fmt: skip
        told = ask(prompt(2))
        assert f"what is in '{hidden.name}': made with another secret" in told["unknown"]


def test_blocks_of_a_device(cache: Cache, segment_name: str, ask: Ask) -> None:
    with PageIndex.create(
        f"{segment_name}-gpu0", pages=16, config={"block_tokens": 8}, role="worker"
    ) as device:
        keys = hash_pages(replace(cache.key_spec(), page_tokens=8), prompt(1))
        with device.reserve(keys) as new:
            new.publish()
        told = ask(prompt(1))
        (found,) = told["elsewhere"]
        assert (found["tier"], found["ready_pages"], found["page_tokens"]) == ("device", 12, 8)
        assert found["clients"][0]["pid"] == os.getpid()
        assert any("they hit there" in each for each in told["advice"])


# ---- storage


def test_a_disk(cache: Cache, ask: Ask, invoke: Callable[..., Result], tmp_path: Path) -> None:
    """Its index is found while a process uses it; else its folder is read."""
    keys, spec = cache.hash_pages(prompt(1)), StorageSpec.of(cache)
    url = f"disk:{tmp_path}/pages?capacity=1MiB&direct=no"
    rows = [np.zeros(BYTES, np.uint8)] * 4
    with open_storage(url, spec=spec) as storage:
        storage.write(keys[:4], rows, timeout=60.0)
        index = storage.index_name  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(explain, "list_segments", lambda: [_info(index)])
            (found,) = ask(prompt(1))["elsewhere"]
        assert (found["tier"], found["name"], found["ready_pages"]) == ("disk", index, 4)
    told = ask(prompt(1), "--storage", url)
    (found,) = told["elsewhere"]
    assert (found["tier"], found["ready_pages"]) == ("storage", 4)
    assert "64 tokens are in storage 'disk'" in " ".join(told["advice"])
    for wrong in (f"disk:{tmp_path}/none", "memory:", "service:", "nothing"):
        done = invoke(prompt(1), "--storage", wrong)
        assert (done.exit_code, "expected" in done.stderr) == (2, True), done.output


def _info(name: str) -> Any:
    from lightcache.shm.listing import read_segment

    found = read_segment(name)
    assert found is not None
    return found


# ---- evicted, being written, unlinked


def test_what_was_evicted_is_known_with_hz(segment_name: str, ask: Ask) -> None:
    with make(segment_name, pages=8, eviction="hz") as cache:
        cache.index.set_clock(1000.0)
        put(cache, prompt(1))
        put(cache, prompt(9), salt="s")
        cache.index.set_clock(1060.0)
        put(cache, prompt(2, 8 * TOKENS))
        told = ask(prompt(1))
        assert states(told) == ["evicted"] * 6
        # Present is what the system's clock says, or the index's if that is later.
        assert all(page["unused_s"] >= 59.9 for page in told["pages"])
        assert "nothing hits: page 0 (tokens 0 to 15) was evicted, or not kept" in told["verdict"]
        told = ask(prompt(9), "--salt", "s")
        assert states(told) == ["evicted"] * 6
        told = ask(prompt(2, 8 * TOKENS), "--salt", "s")
        assert states(told) == ["absent"] * 8
        assert "nothing remembers it" in told["advice"][0]
        space = cache.namespace("step-2")
        put(cache, prompt(3), namespace=space)
        put(cache, prompt(4, 8 * TOKENS))
        told = ask(prompt(3))
        assert told["elsewhere"][0]["evicted_pages"] == 6
        assert "6 pages of it went, with weights 'step-2'" in " ".join(told["advice"])


def test_ghosts_are_read_as_the_index_reads_them(segment_name: str) -> None:
    """2,000 pages through 64: each that went and was not named again is known with its time, but
    for a few that made room in their line."""
    with PageIndex.create(segment_name, pages=64, eviction="hz") as index:
        keys = np.random.default_rng(0).integers(0, 1 << 64, (4000, 2), np.uint64)
        for number in range(0, 2000, 8):
            index.set_clock(100.0 + number)
            with index.reserve(keys[number : number + 8]) as new:
                new.publish()
        image = read(segment_name)
        tick = int(2100.0e9) // TICK_NS
        ages = ghosts_of(image.data, image.place, keys, tick)
        there = np.array([index.peek(keys[i : i + 1]) for i in range(4000)], bool)
        went = ~there & (np.arange(4000) < 2000)
        assert np.count_nonzero(there) == 64
        assert np.isfinite(ages[went]).mean() > 0.99
        assert np.count_nonzero(np.isfinite(ages[2000:])) < 5
        due = 2100.0 - (100.0 + np.arange(4000) // 8 * 8)
        known = went & np.isfinite(ages)
        # Times are in 64 ticks; ids within a call, and calls at one instant, differ by ticks.
        assert np.abs(ages[known] - due[known]).max() < 0.01
    with PageIndex.create(segment_name, pages=64) as index:
        image = read(segment_name)
        assert np.isnan(ghosts_of(image.data, image.place, keys, tick)).all()


def test_what_is_being_written(cache: Cache, ask: Ask) -> None:
    with cache.reserve(cache.hash_pages(prompt(1))):
        told = ask(prompt(1))
        page = told["pages"][0]
        assert (page["state"], page["writer"]["alive"]) == ("writing", True)
        assert (
            f"client 1 (engine 1, pid {os.getpid()}) writes it; it hits once" in (told["advice"][0])
        )


@pytest.mark.slow
def test_whose_writer_died(cache: Cache, ask: Ask, script: Any) -> None:
    script(
        "import os, signal, sys\nfrom lightcache import Cache\n"
        f"cache = Cache.attach(sys.argv[1], secret={SECRET!r})\n"
        f"held = cache.reserve(cache.hash_pages({prompt(1)}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        cache.name,
        status=-9,
    )
    told = ask(prompt(1))
    assert "its writer has died" in told["advice"][0]
    put(cache, prompt(2))
    with cache.match(cache.hash_pages(prompt(2))):
        pinned = ask(prompt(2))["pages"][0]["pinned_by"]
        assert pinned == [f"client 1 (engine 1, pid {os.getpid()})"]
        cache.clear(cache.index.default_namespace)
        told = ask(prompt(2))
        assert states(told)[0] == "doomed"
        assert "was unlinked" in told["verdict"]


def test_a_disabled_cache(cache: Cache, ask: Ask) -> None:
    put(cache, prompt(1))
    assert CliRunner().invoke(cli.group, ["disable", cache.name]).exit_code == 0
    told = ask(prompt(1))
    assert told["verdict"] == "nothing hits: the cache is disabled"
    assert "dump" in told["advice"][0]


# ---- groups, engines


def test_other_groups(segment_name: str, ask: Ask) -> None:
    """KV alone makes no hit there, and the sentence does not say so."""
    from lightcache.runs import Run

    with make(segment_name, kv_groups=["kv", "none", "states"]) as cache:
        put(cache, prompt(1))
        keys = Run(2, 2).keys(cache.hash_pages(prompt(1))[3:4])
        with cache.index.reserve(keys, run=Run(2, 2), independent=True) as new:
            new.publish()
        told = ask(prompt(1))
        assert told["groups"] == [{"group": "states", "pages": [3]}]
        assert told["verdict"] == (
            "keys and values of 96 of 100 tokens are there, which is all that can"
        )
        assert "the other groups" in told["advice"][0]


def test_hashes_of_engines(segment_name: str, ask: Ask) -> None:
    """SGLang's are a chain of SHA-256, LightLLM's a running xxh3: of the ids' bytes."""
    ids = prompt(1, 40)
    row = np.asarray(ids[:32], "<u4").reshape(2, TOKENS)
    first = hashlib.sha256(row[0].tobytes()).digest()
    chained = [first.hex(), hashlib.sha256(first + row[1].tobytes()).hexdigest()]
    assert engine_hashes("sglang", np.array(ids, np.uint32), TOKENS) == chained
    wide = np.asarray(ids[:32], "<u8").tobytes()
    assert engine_hashes("lightllm", np.array(ids, np.uint32), TOKENS) == [
        xxhash.xxh3_128(wide[: 8 * TOKENS]).intdigest(),
        xxhash.xxh3_128(wide).intdigest(),
    ]
    for name, fingerprint, hashes in (
        ("sglang", "engine=sglang-0.5.23 model=llama", chained),
        ("lightllm", "lightllm llama bf16", engine_hashes("lightllm", np.array(ids), TOKENS)),
    ):
        with make(f"{segment_name}-{name}", fingerprint=fingerprint) as cache:
            with cache.reserve(cache.engine_keys().encode(hashes)) as new:
                new.publish()
            told = ask(ids, name=cache.name)
            assert (told["hit_tokens"], told["prompt"]["hashed_by"]) == (32, name)


def test_hashes_that_are_given(
    cache: Cache, ask: Ask, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    hashes = [hashlib.sha256(bytes([i])).hexdigest() for i in range(3)]
    with cache.reserve(cache.engine_keys().encode(hashes)[:2]) as new:
        new.publish()
    path = tmp_path / "hashes.json"
    path.write_text(json.dumps(hashes))
    told = ask("", "--hashes", path)
    assert (told["ready_pages"], told["prompt"]["hashed_by"]) == (2, "hashes")
    done = invoke("", "--hashes", path, "--against", tokens_file(tmp_path, [1, 2]))
    assert (done.exit_code, "expected a trace" in done.stderr) == (2, True)


# ---- a trace


def test_against_a_trace(cache: Cache, ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = traces.Recorder(path)
    salted = cache.hash_pages(prompt(1), salt="s")
    for keys in (cache.hash_pages(prompt(7)), cache.hash_pages(prompt(1)[:50]), salted):
        recorder.note(len(keys) * TOKENS + 2, keys, TOKENS)
    recorder.close()
    first = json.loads(path.read_text().splitlines()[0])["hash_ids"][0]
    assert first == int(cache.hash_pages(prompt(7))[0, 0]) % 2**53
    against = ask(prompt(1), "--against", path)["against"]
    assert (against["request"], against["same_pages"], against["requests"]) == (2, 3, 3)
    told = ask(prompt(1), "--salt", "s", "--against", path)
    assert (told["against"]["request"], told["against"]["same_pages"]) == (3, 6)
    assert "has the first 6 pages of this prompt, as asked, of 6 in all" in told["advice"][-1]
    told = ask(prompt(8), "--against", path)
    assert (told["against"]["request"], told["against"]["pages"]) == (None, None)
    assert "none of 3 recorded requests begins" in told["advice"][-1]


def test_a_trace_of_other_pages(
    cache: Cache, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1, 2], "block_tokens": 512}\n')
    done = invoke(prompt(1), "--against", path)
    assert done.exit_code == 2
    assert "expected a trace with blocks of 16 tokens" in done.stderr
    path.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, ')
    assert "line 2, the last one, is cut" in invoke(prompt(1), "--against", path).stderr


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a prompt, found nothing in standard input"),
        ("[]", "found an empty list"),
        ("{}", "found dict"),
        ("[1, 2, ", "found text that is no JSON at character 7"),
        ("what is", "is the file cut?"),
        ("[1, -2]", "expected ids of 0 to 2**32 - 2, found '-2' as number 1"),
        ("[1, 2.5]", "found '2.5' as number 1"),
        ("[true]", "found 'True' as number 0"),
        ('["a"]', "found 'a' as number 0"),
        ("[4294967295]", "found '4294967295'"),
        ("[[1, 2]]", "found '[1, 2]' as number 0"),
        ("[1, 2, 3]", "a page of"),
    ],
)
def test_prompts_that_are_none(
    cache: Cache, invoke: Callable[..., Result], text: str, said: str
) -> None:
    done = invoke(text)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr


def test_wrong_options(
    cache: Cache, segment_name: str, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    ids = prompt(1)
    for options, said in (
        (("--tokens", tmp_path / "none"), "expected a file that this user can read"),
        (("--tokens", "a", "--hashes", "b"), "give the prompt once"),
        (("--text", "a"), "--text needs --tokenizer"),
        (("--text", "a", "--tokenizer", tmp_path / "none"), "expected the folder of a model"),
        (("--lora", "zz"), "expected NAME=PATH, as vLLM was given them, or the hex digits"),
        (("--secret-file", tmp_path / "none"), "found no file; give --secret-file"),
        (("--page-tokens", 8), "has 16 tokens a page, found 8"),
        (("--svg", tmp_path / "none" / "a.svg"), "--svg: expected a file"),
    ):
        done = invoke(ids, *options)
        assert (done.exit_code, said in done.stderr) == (2, True), (options, done.output)
    assert not (tmp_path / "none").exists()  # no secret is made
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    assert "created with another secret" in invoke(ids, "--secret-file", other).stderr
    assert "there is no cache" in invoke(ids, name=f"{segment_name}-none").stderr
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "found bytes that are none" in invoke(ids, "--tokens", binary).stderr
    with PageIndex.create(f"{segment_name}-index", pages=4) as index:
        assert "give the cache of the node" in invoke(ids, name=index.name).stderr


def test_a_cache_without_page_tokens(
    segment_name: str, ask: Ask, invoke: Callable[..., Result]
) -> None:
    with Cache.create(segment_name, pages=8, page_bytes=BYTES, fingerprint="f",
                      secret=SECRET) as cache:  # fmt: skip
        keys = cache.hash_pages(prompt(1), TOKENS)
        with cache.reserve(keys) as new:
            new.publish()
        assert "give --page-tokens" in invoke(prompt(1)).stderr
        assert ask(prompt(1), "--page-tokens", TOKENS)["hit_tokens"] == 96


def test_it_goes_meanwhile(
    cache: Cache, segment_name: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another index that is removed between the list and the copy nothing is said."""
    with make(f"{segment_name}-other") as other:
        listed = explain.list_segments()
    assert other.name in [each.name for each in listed]
    monkeypatch.setattr(explain, "list_segments", lambda: listed)
    told = ask(prompt(1))
    assert (told["elsewhere"], [each for each in told["unknown"] if other.name in each]) == ([], [])


def test_an_index_of_another_release(cache: Cache, segment_name: str, ask: Ask) -> None:
    name = f"{segment_name}-old"
    with ExitStack() as stack:
        stack.callback(Segment.unlink, name, force=True)
        with make(name, lifetime="persistent") as other:
            header = other.index.segment
            path = names.FOLDER / names.object_name(name).removeprefix("/")
            data = bytearray(path.read_bytes())
            config = data.index(b'"fingerprint"')
        assert header.name == name
        data[config : config + 13] = b'"fingerprin\xff"'
        path.write_bytes(data)
        assert any(f"what is in '{name}'" in each for each in ask(prompt(1))["unknown"])


# ---- the screen


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_of_any_width(cache: Cache, ask: Ask, width: int) -> None:
    """No word is cut, and no table is wider; what an operator is told is one line for a pipe."""
    put(cache, prompt(1))
    with cache.match(cache.hash_pages(prompt(1))):
        told = ask(prompt(1)[:70] + prompt(2, 30))
    out = Console(file=io.StringIO(), width=width, highlight=False)
    show(out, told)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines() if line[:1] in "│┃┏") <= width
    assert any("0-63" in line and "ready" in line for line in shown.splitlines())
    assert all(line in shown for line in told["advice"])


def test_a_picture(cache: Cache, invoke: Callable[..., Result], tmp_path: Path) -> None:
    put(cache, prompt(1))
    path = tmp_path / "explain.svg"
    assert invoke(prompt(1), "--svg", path).exit_code == 0
    assert path.read_text().startswith("<svg")


# ---- with a tokenizer, with a connector


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(50)} | {"[UNK]": 50}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(
        tmp_path / "model"
    )
    return tmp_path / "model"


@pytest.mark.models
def test_text(
    cache: Cache, ask: Ask, invoke: Callable[..., Result], tokenizer: Path, tmp_path: Path
) -> None:
    put(cache, list(range(40)))
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(" ".join(f"w{number}" for number in [*range(20), *range(30, 50)]))
    other.write_text(" ".join(f"w{number}" for number in range(40)))
    told = ask("", "--text", one, "--tokenizer", tokenizer, "--against", other)
    assert (told["hit_tokens"], told["prompt"]["tokens"]) == (16, 40)
    against = told["against"]
    assert (against["same_tokens"], against["page"], against["token"]) == (20, 1, [30, 20])
    (here, there) = against["text"]
    assert here[0].split()[-1] == there[0].split()[-1] == "w19"
    assert (here[1].split()[0], there[1].split()[0]) == ("w30", "w20")
    assert "there: " in told["advice"][-1]
    empty = tmp_path / "empty"
    empty.mkdir()
    done = invoke("", "--text", one, "--tokenizer", empty)
    assert (done.exit_code, "no tokenizer can be loaded" in done.stderr) == (2, True), done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        done = invoke("", "--text", one, "--tokenizer", tokenizer)
    assert (done.exit_code, "pip install 'lightcache[transformers]'" in done.stderr) == (2, True)


def test_what_the_connector_for_vllm_saved(
    segment_name: str, ask: Ask, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    """Its clients and fingerprint are in the cache, its request's salt is not."""
    ids, recorded = prompt(1, 50), tmp_path / "trace.jsonl"
    options = {"secret_file": str(tmp_path / "secret"), "record": str(recorded)}
    with Engine(segment_name, windows=(10,), **options) as engine:
        engine.ask(ids, cache_salt="t")
        told = ask(ids, "--salt", "t", "--against", recorded)
        assert told["hit_tokens"] == 48
        assert told["cache"]["fingerprint"].startswith("stand-in ")
        assert [group["group"] for group in told["groups"]] == ["window10"]
        assert told["groups"][0]["pages"][-1] == 5
        assert (told["against"]["request"], told["against"]["same_pages"]) == (1, 6)
        told = ask(ids, "--against", recorded)
        assert (told["hit_tokens"], told["against"]["request"]) == (0, None)
    Segment.unlink(segment_name)


@pytest.mark.models
def test_what_the_connector_for_transformers_saved(segment_name: str, ask: Ask) -> None:
    """Its fingerprint is the cache's; the salt is the caller's."""
    from support.tiny_models import answer, model
    from support.tiny_models import prompt as row

    from lightcache.connectors import transformers as lct

    llama, ids = model(), row(70)
    with (
        lct.open_cache(
            llama, name=segment_name, pages=32, secret=SECRET, lifetime="attached"
        ) as cache,
        lct.Connector(cache, llama) as connector,
    ):
        with connector.prefix(ids, salt="chat-7") as past:
            answer(llama, ids, past, steps=1)
        given = ids[0].tolist()
        told = ask(given, "--salt", "chat-7")
        assert told["hit_tokens"] == 64
        assert told["cache"]["fingerprint"] == connector.pages.fingerprint
        assert ask(given)["hit_tokens"] == 0
