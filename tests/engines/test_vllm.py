"""With a real vLLM: run by `.ci/engines vllm`."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from engines import contracts, sharing
from engines.sharing import NAME, until
from engines.tiny_models import STATE_BLOCK
from support.serving import Served

from lightcache import Cache
from lightcache.shm import Segment, sweep
from lightcache.storage.service.board import service_stats
from lightcache.tools.maintenance import _switch
from lightcache.tools.vllm_config import vllm_config

pytestmark = pytest.mark.engines
BY_HAND = "CI" not in os.environ
by_hand = pytest.mark.skipif(not BY_HAND, reason="takes long: `.ci/engines vllm` by hand")


def test_it_starts_and_answers(in_engine: Callable[..., str], segment_name: str) -> None:
    said = json.loads(in_engine("vllm_answers.py", segment_name).splitlines()[-1])
    first, second = said["answers"]
    assert len(first) == 4
    assert second == first
    assert said["cached"] == [0, 288]
    assert said["contract"] == contracts.VLLM
    assert said["where"].startswith(os.environ["LIGHTCACHE_ENGINE_PATH"])


def test_its_classes_read_our_events(in_engine: Callable[..., str], segment_name: str) -> None:
    sharing.events_agree(in_engine, "vllm.distributed.kv_events", segment_name, "CPU")


check_clean = partial(sharing.check_clean, NAME)
Answer = dict[str, Any]


def prompts(seed: int, count: int) -> list[list[int]]:
    """Some that have prefixes in common."""
    chance = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return [chance.randrange(500) for _ in range(chance.randrange(least, most))]

    bases = [some(300, 600) for _ in range(6)]
    return [bases[chance.randrange(6)] + some(1, 120) for _ in range(count)]


MANY = prompts(1, 80)
ONE = prompts(2, 1)
LENGTH = 1024  # of the engine: a prompt and its answer
CHANCE = random.Random(10)
EDGES = [[CHANCE.randrange(500) for _ in range(count)] for count in (1, LENGTH - 8, LENGTH - 1)]


class Engines:
    """Two that share a cache, and what one without it has answered."""

    def __init__(self, start: Callable[..., Any], storage: str) -> None:
        self._start = start
        how = {"name": NAME, "size": "64MiB", "blocks_per_page": 1, "storage": storage}
        self._how = json.dumps(how | {"token_ids": True})
        plain = self.start("null")  # alone, as it makes the model
        self.plain: Answer = plain("ask", prompts=MANY)
        self.one: Answer = plain("ask", prompts=ONE)
        self.edges: Answer = plain("ask", prompts=EDGES)
        self.adapted = {name: plain("ask", prompts=ONE, adapter=name)["answers"] for name in "ab"}
        plain.end()
        self.first, self.second = (self._start(self._how) for _ in "12")
        for engine in (self.first, self.second):
            engine.until("READY")

    def start(self, how: str | None = None, ranks: int = 1, model: str = "llama") -> Any:
        engine = self._start(how or self._how, str(ranks), model)
        engine.until("READY")
        return engine


@pytest.fixture(scope="module")
def engines(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(start, f"disk:{tmp_path_factory.mktemp('storage')}?capacity=1GiB")


def test_all_is_found_and_equal_after_a_reset_and_by_another_process(engines: Engines) -> None:
    total = sum(map(len, MANY))
    first = engines.first("ask", prompts=MANY)
    engines.first("idle")
    again, second = (each("ask", prompts=MANY) for each in (engines.first, engines.second))
    for answer in (first, again, second):
        assert answer["answers"] == engines.plain["answers"]
    assert min(sum(again["cached"]), sum(second["cached"])) > 0.93 * total
    assert sum(engines.plain["cached"]) < 0.9 * total
    assert engines.first("errors") == engines.second("errors") == 0
    check_clean()
    sharing.tokens_agree(NAME, MANY)


def test_one_token_and_the_longest(engines: Engines) -> None:
    first = engines.first("ask", prompts=EDGES)
    engines.first("idle")
    again, second = (each("ask", prompts=EDGES) for each in (engines.first, engines.second))
    assert [len(answer) for answer in engines.edges["answers"]] == [8, 8, 1]
    for answer in (first, again, second):
        assert answer["answers"] == engines.edges["answers"]
    assert first["cached"] == [0, 0, 0]
    assert again["cached"] == second["cached"] == [0, LENGTH - 32, LENGTH - 32]
    assert engines.first("errors") == engines.second("errors") == 0
    check_clean()


def test_two_at_once(engines: Engines) -> None:
    both = (engines.first, engines.second)
    some = prompts(3, 24)
    for engine in both:
        engine.begin("ask", prompts=some)
    one, other = (json.loads(engine.until("OUT")) for engine in both)
    assert one["answers"] == other["answers"]
    for engine in both:
        engine("idle")
    check_clean()


def test_events_of_the_host_name_blocks_as_those_of_the_device(engines: Engines) -> None:
    both, some = (engines.first, engines.second), prompts(9, 3)
    blocks = {tuple(ids[:end]) for ids in some for end in range(32, len(ids) + 1, 32)}
    for engine in both:
        engine("events")
        engine("ask", prompts=some, salt="s")
        engine("idle")
    first, second = (engine("events") for engine in both)
    assert len(first["CPU"]) == len({block[0] for block in first["CPU"]}) == len(blocks)
    for block in first["CPU"]:
        assert block in first["GPU"]
    assert second["CPU"] == []
    assert second["GPU"]


def test_one_waits_for_what_the_other_writes(engines: Engines) -> None:
    some = prompts(7, 1)
    engines.first("hold")
    written = engines.first("ask", prompts=some)
    assert written["cached"] == [0]
    engines.second("wait_for_writers")
    engines.second.begin("ask", prompts=some)
    engines.second.until("WAITS")
    engines.first("release")
    found = json.loads(engines.second.until("OUT"))
    assert found["cached"][0] > len(some[0]) - 32
    assert found["answers"] == written["answers"]
    engines.first("idle")
    check_clean()


def test_salts_are_apart(engines: Engines) -> None:
    ask = {"prompts": ONE}
    engines.first("ask", **ask, salt="a")
    engines.first("idle")
    found = [engines.second("ask", **ask, salt=salt) for salt in ("a", "b", None)]
    assert [answer["cached"][0] > 0 for answer in found] == [True, False, False]
    assert all(answer["answers"] == engines.one["answers"] for answer in found)


def test_adapters_are_apart(engines: Engines) -> None:
    engines.first("ask", prompts=ONE, adapter="a")
    engines.first("idle")
    a, b, a_again = (engines.second("ask", prompts=ONE, adapter=name) for name in "aba")
    assert a["answers"] == a_again["answers"] == engines.adapted["a"]
    assert b["answers"] == engines.adapted["b"]
    assert a["cached"] == a_again["cached"]
    assert [answer["cached"][0] > 0 for answer in (a, b)] == [True, False]
    assert len({str(one) for one in (*engines.adapted.values(), engines.one["answers"])}) == 3


def test_a_load_that_fails_is_computed(engines: Engines) -> None:
    engines.first("fail_loads", count=3)
    answer = engines.first("ask", prompts=MANY[:10])
    assert answer["answers"] == engines.plain["answers"][:10]
    assert engines.first("errors") == 3
    check_clean()


def test_an_abort_while_loading(engines: Engines) -> None:
    assert engines.first("abort_while_loading", prompt=MANY[0]) == [
        ["WAITING_FOR_REMOTE_KVS"],
        1,
        0,
    ]
    check_clean()


def test_disabled_filled_and_removed(engines: Engines) -> None:
    def asked() -> int:
        answer = engines.first("ask", prompts=MANY[:1])
        assert answer["answers"] == engines.plain["answers"][:1]
        engines.first("idle")
        return int(answer["cached"][0])

    _switch(NAME, None, 1)
    assert asked() == 0
    _switch(NAME, None, 0)
    until(asked)
    with Cache.attach(NAME) as cache, cache.index.allocate(cache.pages):
        assert engines.first("ask", prompts=prompts(4, 2))["cached"] == [0, 0]
    Segment.unlink(NAME, force=True)
    assert asked() == 0
    until(asked)
    check_clean()


def test_a_reset_is_of_one_engine(engines: Engines) -> None:
    engines.second("ask", prompts=MANY[:2])
    engines.second("idle")
    assert engines.second("forget", everything=True)
    assert engines.second("ask", prompts=MANY[:1])["cached"] == [0]
    assert engines.first("ask", prompts=MANY[:1])["cached"][0] > 0
    answer = engines.second("ask", prompts=MANY[:3])
    assert answer["answers"] == engines.plain["answers"][:3]


@pytest.mark.parametrize(
    ("how", "loading", "saving"),
    [
        # vLLM refuses what it cannot do while blocks are in use, with any connector.
        ("reset", "False", "False"),
        ("reset and preempt", "refused", "True"),
        ("sleep", "refused", "refused"),
        pytest.param("pause", "refused", "refused", marks=by_hand),
        pytest.param("pause and keep", "refused", "None", marks=by_hand),
    ],
)
def test_other_weights_while_copies_are_under_way(
    engines: Engines, how: str, loading: str, saving: str
) -> None:
    engine = engines.second
    old, other, new = (prompts(sum(how.encode()) + more, 1)[0] for more in range(3))
    engine("ask", prompts=[old])
    engine("idle")
    some = [old, [*old, *other[:70]]]
    for seed, kind, said in ((1, "load", loading), (2, "save", saving)):
        answers = engine("update", how=how, prompt=some[-1], seed=seed)
        assert answers[:2] == [kind, said]
        assert "refused" not in answers[2:]
        wanted = engine("ask", prompts=some, salt=f"{how} {kind}")["answers"]
        assert engine("ask", prompts=some)["answers"] == wanted
        engine("idle")
        found = engine("ask", prompts=some)
        assert found["answers"] == wanted
        assert min(found["cached"]) > 0
        some.append(new)
    check_clean()


def test_killed_in_a_save_and_in_a_load(engines: Engines) -> None:
    engines.second("hold")
    engines.second("ask", prompts=prompts(5, 2))
    with Cache.attach(NAME, readonly=True) as cache:
        assert cache.stats().writing
    engines.second.kill()
    answer = engines.first("ask", prompts=MANY[:10])
    assert answer["answers"] == engines.plain["answers"][:10]
    engines.first("idle")
    check_clean()

    engines.second = engines.start()
    warm = engines.first("ask", prompts=MANY[:10])
    restarted = engines.second("ask", prompts=MANY[:10])
    assert restarted["cached"] == warm["cached"]
    assert restarted["answers"] == engines.plain["answers"][:10]
    engines.second("hold")
    engines.second.begin("ask", prompts=MANY[:1])
    engines.second.until("HELD")
    engines.second.kill()
    assert engines.first("ask", prompts=MANY[:10])["answers"] == engines.plain["answers"][:10]
    engines.first("idle")
    check_clean()


def test_what_is_stored_outlives_all(engines: Engines) -> None:
    engines.first.kill()
    Segment.unlink(NAME)
    engines.first = engines.start()
    answer = engines.first("ask", prompts=MANY[:10])
    assert answer["answers"] == engines.plain["answers"][:10]
    assert min(answer["cached"]) > 0
    engines.first.end()


@by_hand
def test_the_storage_service_outlives_engines(
    engines: Engines, served: Callable[..., Served], tmp_path: Path
) -> None:
    """Killed in between, and asked once without it."""
    name, disk = f"{NAME}-service", f"disk:{tmp_path}?capacity=256MiB"
    how = {"name": name, "size": "64MiB", "blocks_per_page": 1, "storage": "service:"}
    some, wanted = MANY[:5], engines.plain["answers"][:5]

    def asked(engine: Any) -> int:
        answer = engine("ask", prompts=some)
        assert answer["answers"] == wanted
        engine("idle")
        return int(min(answer["cached"]))

    engine = engines.start(json.dumps(how))
    asked(engine)
    first = served(name, "--url", disk)
    asked(engine)  # as it is used again
    until(lambda: service_stats(name).tier.stored)
    assert first.end()[0] == 0
    assert asked(engine) > 0
    engine.end()
    Segment.unlink(name)
    engine = engines.start(json.dumps(how))
    second = served(name, "--url", disk)
    assert asked(engine) > 0
    second.process.kill()
    assert asked(engine) > 0
    assert served(name, "--url", disk).end()[0] == 0  # which also removes the disk's index
    engine.end()
    sharing.check_clean(name)
    Segment.unlink(name)
    sweep(prefix=f"{name}.storage-")


def test_one_rank_reads_what_two_have_written(engines: Engines) -> None:
    Segment.unlink(NAME)
    how = json.dumps({"name": NAME, "size": "64MiB", "blocks_per_page": 4})
    two = engines.start(how, ranks=2)
    some = MANY[:10]
    until(lambda: max(two("ask", prompts=some)["cached"][:1]))
    answer = two("ask", prompts=some)
    assert answer["answers"] == engines.plain["answers"][:10]
    two.kill()
    one = engines.start(how)
    found = one("ask", prompts=some)
    assert found["cached"] == answer["cached"]
    assert found["answers"] == engines.plain["answers"][:10]
    one.end()
    check_clean()


def test_what_vllm_config_prints_serves_and_is_warm_after_a_kill(
    engines: Engines, serve: Callable[[str], Any], home: Path, beside: dict[str, Any]
) -> None:
    assert beside  # these start meanwhile
    model = home / f"{NAME}-served"  # the cache is named after it
    shutil.copytree(home / "llama", model)
    printed = CliRunner().invoke(
        vllm_config, [str(model), "--size", "64MiB", "--blocks-per-page", "1"]
    )
    assert printed.exit_code == 0
    line = printed.stdout.splitlines()[0]
    assert line.startswith(f"vllm serve {model} ")
    # Small, and of one process: a prompt of 900 tokens takes the place of the one before.
    line += " --enforce-eager --dtype float32 --max-model-len 1024 --max-num-seqs 1 --block-size 32"
    line += " --skip-tokenizer-init --num-gpu-blocks-override 34 --distributed-executor-backend uni"
    first, other = (
        [chance.randrange(500) for _ in range(900)] for chance in map(random.Random, "ab")
    )
    loaded, device = "vllm:lightcache_loaded_tokens_total", "vllm:prefix_cache_hits_total"
    hits = "vllm:external_prefix_cache_hits_total"
    server = serve(line)
    answer = completed(server, model, first)
    completed(server, model, other)
    assert figure(server, hits) == figure(server, device) == 0
    assert completed(server, model, first) == answer
    until(lambda: figure(server, loaded))
    assert figure(server, hits) == figure(server, loaded) == 896 - figure(server, device)
    assert figure(server, "vllm:lightcache_errors_total") == 0
    server.kill()
    server = serve(line)
    assert completed(server, model, first) == answer
    until(lambda: figure(server, loaded))
    assert figure(server, hits) == figure(server, loaded) == 896
    server.kill()


def completed(server: Any, model: Path, prompt: list[int]) -> list[int]:
    ask = {"model": str(model), "prompt": prompt, "max_tokens": 4, "temperature": 0}
    said = json.loads(server("/v1/completions", {**ask, "return_token_ids": True}))
    answer: list[int] = said["choices"][0]["token_ids"]
    assert len(answer) == 4
    return answer


def figure(server: Any, name: str) -> float:
    """Of its metrics, over all engines."""
    lines = [line for line in server("/metrics").splitlines() if line.startswith(name + "{")]
    assert lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_latents_are_what_vllm_has_cached(engines: Engines) -> None:
    how = json.dumps({"name": f"{NAME}-latent", "size": "16MiB", "blocks_per_page": 1})
    engine = engines.start(how, model="latent")
    engine("ask", prompts=ONE)
    engine("idle")
    own = engine("ask", prompts=ONE, reset=False)
    ours = engine("ask", prompts=ONE)
    assert min(own["cached"]) > 0
    assert (ours["cached"], ours["answers"]) == (own["cached"], own["answers"])
    assert engine("errors") == 0
    engine.end()


def of_model(model: str) -> dict[str, Any]:
    """Options of the engines of a model."""
    return {"name": f"{NAME}-{model}", "size": "128MiB", "blocks_per_page": 1}


@pytest.fixture(scope="module")
def beside(start: Callable[..., Any]) -> dict[str, Any]:
    """Engines by their models, with a cache each. They start while another test runs."""
    started = {}
    more = ("gemma4", "shapes") if BY_HAND else ()
    for model in ("images", "chunks", "gemma", "oss", *more):
        started[model] = start(json.dumps(of_model(model)), "1", model)
    return started


def test_images_and_embeddings_are_part_of_the_keys(beside: dict[str, Any]) -> None:
    prompt = [number + 10 for number in ONE[0]]  # the first ids are special ones
    found = (len(prompt) + 17) // 32 * 32  # after an image of 16 tokens and one that ends it
    engine = beside["images"]
    engine.until("READY")

    def ask(**what: Any) -> tuple[list[int], int]:
        answer = engine("ask", prompts=[prompt], **what)
        engine("idle")
        return answer["answers"][0], answer["cached"][0]

    first, second, text = (ask(image=1), ask(image=2), ask())
    assert [cached for _, cached in (first, second, text)] == [0, 0, 0]
    assert len({str(answer) for answer, _ in (first, second, text)}) == 3
    assert ask(image=1) == (first[0], found)
    assert ask(image=2) == (second[0], found)
    assert ask(image=1, salt="computed again") == (first[0], 0)
    first, second = (ask(embeds=1), ask(embeds=2))
    assert (first[1], second[1]) == (0, 0)
    assert first[0] != second[0]
    assert ask(embeds=1) == (first[0], (len(prompt) - 1) // 32 * 32)
    assert engine("errors") == 0
    engine.end()


@pytest.mark.parametrize(
    ("model", "page", "groups"),
    [
        ("chunks", 32, {"full", "chunk96"}),
        ("gemma", 32, {"full", "window64", "window64-2", "window64-3"}),
        ("oss", 32, {"full", "window64"}),
        # Blocks of 64 tokens in layers with windows, of 32 in the others; or all in one group.
        pytest.param("gemma4", 64, {"full", "window64", "window64-2"}, marks=by_hand),
        pytest.param("shapes", 32, {"0"}, marks=by_hand),
    ],
)
def test_windows_chunks_and_layers_of_two_shapes_are_found_and_equal(
    start: Callable[..., Any], beside: dict[str, Any], model: str, page: int, groups: set[str]
) -> None:
    engine, some = beside[model], MANY[:12]
    engine.until("READY")
    second = None
    if model == "oss" or BY_HAND:
        second = start(json.dumps(of_model(model)), "1", model)  # it starts meanwhile
    wanted = engine("ask", prompts=some, salt="computed apart")["answers"]
    assert engine("ask", prompts=some)["answers"] == wanted
    engine("idle")
    again = engine("ask", prompts=some)
    assert again["answers"] == wanted
    assert again["cached"] == [(len(prompt) - 1) // page * page for prompt in some]
    for number in range(len(groups) - 1):
        engine("fail_loads", count=1)  # the part of one group
        answer = engine("ask", prompts=some[number : number + 1])["answers"]
        assert answer == wanted[number : number + 1]
    assert engine("errors") == len(groups) - 1
    engine("idle")
    engine.end()
    with Cache.attach(of_model(model)["name"]) as cache:
        pages = {group.name: group.pages for group in cache.index.groups()}
        assert set(pages) == groups
        assert min(pages.values()) == max(pages.values()) > 0
    if second is not None:
        second.until("READY")
        found = second("ask", prompts=some)
        assert (found["answers"], found["cached"]) == (wanted, again["cached"])
        second.end()
    if BY_HAND:
        plain = start("null", "1", model)
        plain.until("READY")
        assert plain("ask", prompts=some)["answers"] == wanted
        plain.end()


@by_hand
def test_two_ranks_read_the_windows_of_one(start: Callable[..., Any]) -> None:
    some = MANY[:20]
    how = json.dumps({**of_model("gemma"), "name": f"{NAME}-windows"})
    one = start(how, "1", "gemma")
    one.until("READY")
    wanted = one("ask", prompts=some)["answers"]
    one("idle")
    one.end()
    both = start(how, "2", "gemma")
    both.until("READY")
    found = both("ask", prompts=some)
    assert found["answers"] == wanted
    assert sum(found["cached"]) > 0.9 * sum(map(len, some))
    both.end()


@pytest.fixture
def stateful(start: Callable[..., Any]) -> Callable[..., Any]:
    """`stateful(model, plain, ranks)`: a model with recurrent states, whose engine is not ready."""

    def begin(model: str, plain: bool = False, ranks: int = 1) -> Any:
        how = {"name": f"{NAME}-{model}-{ranks}", "size": "64MiB"}
        return start("null" if plain else json.dumps(how), str(ranks), model)

    return begin


def ask_one(engine: Any, prompt: list[int], salt: str | None = None) -> tuple[list[int], int]:
    """Its answer, and what was found of it. Alone in a step: bfloat16 depends on the batch."""
    answer = engine("ask", prompts=[prompt], salt=salt)
    return answer["answers"][0], answer["cached"][0]


def three_of_one_prefix() -> list[list[int]]:
    chance = random.Random(11)
    base, *rests = ([chance.randrange(500) for _ in range(490)] for _ in range(3))
    return [base, *([*base[:200], *rest[200:]] for rest in rests)]


@pytest.mark.parametrize(
    ("model", "block"),
    [
        ("next", STATE_BLOCK),
        pytest.param("mamba", 32, marks=by_hand),
    ],
)
def test_states_are_found_and_equal(stateful: Callable[..., Any], model: str, block: int) -> None:
    some = three_of_one_prefix()
    last = [(len(prompt) - 1) // block * block for prompt in some]
    first = stateful(model)
    first.until("READY")
    second = stateful(model)  # it starts meanwhile
    # What vLLM computes of all of a prompt: a salt of its own finds nothing.
    alone = [ask_one(first, prompt, str(number)) for number, prompt in enumerate(some)]
    wanted = [answer for answer, _ in alone]
    assert {found for _, found in alone} == {0}
    first("idle")
    found = []
    for prompt in some:
        found.append(ask_one(first, prompt))
        first("idle")
    # The first that shares a prefix leaves a state after it, if attention shows that it does.
    between = 200 // block * block if model == "next" else 0
    assert found == list(zip(wanted, [0, 0, between], strict=True))
    assert [ask_one(first, prompt) for prompt in some] == list(zip(wanted, last, strict=True))
    first("fail_loads", count=1)
    assert ask_one(first, some[0]) == (wanted[0], 0)
    assert first("errors") == 1
    first("idle")
    first.end()
    second.until("READY")
    assert [ask_one(second, prompt) for prompt in some] == list(zip(wanted, last, strict=True))
    assert second("errors") == 0
    second("idle")
    second.end()
    with Cache.attach(f"{NAME}-{model}-1") as cache:
        report = cache.check()
        report.raise_if_broken()
        assert report.pins == 0
        names = {group.name for group in cache.index.groups() if group.pages}
        states = {"state", "state-2", "state-3"}
        assert names == (states | {"full"} if model == "next" else {"state"})
    if BY_HAND:
        plain = stateful(model, True)
        plain.until("READY")
        assert [ask_one(plain, prompt)[0] for prompt in some] == wanted
        plain.end()


@by_hand
def test_two_ranks_write_and_read_states(stateful: Callable[..., Any]) -> None:
    some = three_of_one_prefix()
    last = [(len(prompt) - 1) // STATE_BLOCK * STATE_BLOCK for prompt in some]
    first = stateful("next", ranks=2)
    first.until("READY")
    wanted = [ask_one(first, prompt, str(number))[0] for number, prompt in enumerate(some)]

    def saved() -> bool:
        found = [ask_one(first, prompt) for prompt in some]
        assert [answer for answer, _ in found] == wanted
        return [cached for _, cached in found] == last

    until(saved)
    first.end()
    second = stateful("next", ranks=2)
    second.until("READY")
    assert [ask_one(second, prompt) for prompt in some] == list(zip(wanted, last, strict=True))
    second.end()
