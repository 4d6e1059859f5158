"""The demo's turns: the same ones in any order of answers, and prefixes shared as promised."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightcache.errors import ConfigError
from lightcache.tools.demo.workload import Turn, Workload, conversations, trace

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
PLAIN = {
    "seed": 7,
    "users": 4,
    "turns": 4,
    "system_tokens": 20,
    "message_tokens": 9,
    "answer_tokens": 5,
    "vocabulary": 1000,
}


def answer_to(turn: Turn, vocabulary: int) -> list[int]:
    """What a model answers: it depends on the prompt alone."""
    start = int(turn.tokens.sum())
    return [(start + 31 * i) % vocabulary for i in range(turn.answer_tokens)]


def played(
    workload: Workload, order: int | None = None, seen: list[tuple[int, list[int]]] | None = None
) -> dict[int, Turn]:
    """All turns by number. Answers arrive by number, or in a random order of that seed; `seen` gets
    what each answer released."""
    rng = random.Random(order)
    waiting, turns = workload.begin(), {}
    while waiting:
        turn = waiting.pop(0 if order is None else rng.randrange(len(waiting)))
        assert turn.number not in turns
        turns[turn.number] = turn
        released = workload.answered(turn.number, answer_to(turn, workload.vocabulary))
        if seen is not None:
            seen.append((turn.number, [one.number for one in released]))
        waiting += released
    assert sorted(turns) == list(range(workload.total))
    return dict(sorted(turns.items()))


def same(a: Turn, b: Turn) -> bool:
    mine = (a.number, a.conversation, a.turn, a.answer_tokens, a.tokens.tolist())
    return mine == (b.number, b.conversation, b.turn, b.answer_tokens, b.tokens.tolist())


def shared(a: Any, b: Any) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    return int(np.argmin(np.append(np.asarray(a[:n]) == np.asarray(b[:n]), False)))


def by_conversation(turns: dict[int, Turn]) -> dict[int, list[Turn]]:
    found: dict[int, list[Turn]] = {}
    for number in sorted(turns):
        found.setdefault(turns[number].conversation, []).append(turns[number])
    return found


# ---- conversations


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, int]:
    users, turns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return {
        "seed": draw(st.integers(0, 99)),
        "users": users,
        "turns": turns,
        "branches": draw(st.integers(0, users if turns > 1 else 0)),
        "system_tokens": draw(st.integers(0, 9)),
        "message_tokens": draw(st.integers(1, 9)),
        "answer_tokens": draw(st.integers(1, 5)),
        "vocabulary": draw(st.integers(2, 5000)),
    }


@given(arguments(), st.integers(0, 1 << 30))
def test_conversations_whatever_the_order(of: dict[str, int], order: int) -> None:
    first, again = played(conversations(**of)), played(conversations(**of), order)
    assert all(same(first[number], again[number]) for number in first)


@given(arguments(), st.integers(0, 1 << 30))
def test_each_prompt_goes_on_from_the_one_before(of: dict[str, int], order: int) -> None:
    turns = played(conversations(**of), order)
    for conversation, chain in by_conversation(turns).items():
        assert [turn.turn for turn in chain] == list(range(len(chain)))
        assert chain[0].turn == 0
        assert len(chain) == of["turns"] or conversation >= of["users"]
        for before, turn in itertools.pairwise(chain):
            history = [*before.tokens.tolist(), *answer_to(before, of["vocabulary"])]
            assert turn.tokens[: len(history)].tolist() == history
            assert -(-of["message_tokens"] // 2) <= len(turn.tokens) - len(history)
            assert len(turn.tokens) - len(history) <= of["message_tokens"] * 3 // 2
    starts = {turn.tokens[: of["system_tokens"]].tobytes() for turn in turns.values()}
    assert len(starts) == 1
    for turn in turns.values():
        assert turn.tokens.dtype == np.int32
        assert turn.answer_tokens == of["answer_tokens"]
        assert turn.tokens.min() >= 0
        assert turn.tokens.max() < of["vocabulary"]
        assert not turn.tokens.flags.writeable


@given(st.integers(0, 500), st.integers(2, 6))
def test_a_branch_shares_a_part_of_the_history(seed: int, turns: int) -> None:
    of = {**PLAIN, "seed": seed, "turns": turns, "branches": 3, "vocabulary": 1 << 30}
    seen: list[tuple[int, list[int]]] = []
    found = played(conversations(**of), seen=seen)
    chains = by_conversation(found)
    assert sorted(chains) == list(range(of["users"] + 3))
    parents = []
    for branch in range(of["users"], of["users"] + 3):
        first = chains[branch][0]
        parent = max(
            range(of["users"]), key=lambda user: shared(first.tokens, chains[user][-1].tokens)
        )
        parents.append(parent)
        fork = turns - len(chains[branch])  # the turn that is asked differently
        assert 1 <= fork < turns
        history = chains[parent][fork - 1]
        whole = len(history.tokens) + history.answer_tokens
        assert shared(first.tokens, chains[parent][fork].tokens) == whole < len(first.tokens)
        # released by an answer to the turn that it replaces, or a later one
        cause = next(found[number] for number, released in seen if first.number in released)
        assert cause.conversation == parent
        assert cause.turn >= fork
    assert len(set(parents)) == 3


def test_turns_are_numbered_by_round() -> None:
    turns = played(conversations(**PLAIN, branches=0))
    assert [(t.conversation, t.turn) for t in turns.values()][:5] == [
        *((user, 0) for user in range(4)),
        (0, 1),
    ]
    seen: list[tuple[int, list[int]]] = []
    played(conversations(**{**PLAIN, "users": 9}, branches=9), 3, seen)
    assert all(number < later for number, released in seen for later in released)
    assert any(len(released) == 2 for _, released in seen)


def test_seeds_and_lengths_vary() -> None:
    first, other = (played(conversations(**{**PLAIN, "seed": seed})) for seed in (1, 2))
    assert first[0].tokens.tolist() != other[0].tokens.tolist()
    assert len({len(first[number].tokens) for number in range(4)}) > 1
    assert conversations(**PLAIN).total == 16 + len(by_conversation(first).get(4, []))
    assert len(by_conversation(first)) == 5  # one user in four goes back


def test_histories_are_forgotten() -> None:
    workload = conversations(**PLAIN, branches=4)
    played(workload, 5)
    assert not workload._histories
    assert not workload._prompts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", value) for value in (-1, 1.5, None)),
        *((name, 0) for name in ("users", "turns", "message_tokens", "answer_tokens")),
        *((("system_tokens"), value) for value in (-1, True, "9")),
        *(("vocabulary", value) for value in (0, 1, 1 << 31)),
        *(("branches", value) for value in (-1, 5)),
    ],
)
def test_bad_arguments_of_conversations(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        conversations(**{**PLAIN, name: value})


def test_a_single_turn_cannot_fork() -> None:
    with pytest.raises(ConfigError, match="2 turns"):
        conversations(**{**PLAIN, "turns": 1}, branches=1)
    assert conversations(**{**PLAIN, "turns": 1}).total == 4


def made_up() -> Workload:
    return conversations(**PLAIN)


def from_file(tmp_path: Path) -> Workload:
    lines = [line(1000, [0, 1]), line(1030, [0, 1, 2])]
    return trace(written(tmp_path, lines), scale=1, limit=9, vocabulary=1000)


@pytest.mark.parametrize("kind", ["made up", "trace"])
def test_what_cannot_be_answered(kind: str, tmp_path: Path) -> None:
    workload = made_up() if kind == "made up" else from_file(tmp_path)
    with pytest.raises(ConfigError, match="not handed out"):
        workload.answered(0, [1])
    first = workload.begin()[0]
    with pytest.raises(ConfigError, match="has begun"):
        workload.begin()
    for number in (-1, workload.total, True, "0"):
        with pytest.raises(ConfigError, match="number of the turn"):
            workload.answered(number, [1])
    with pytest.raises(ConfigError, match="not handed out"):
        workload.answered(workload.total - 1, [1])
    for answer in ([1000], [-1], [0.5], [[1]], [[1], [1, 2]], ["a"], [1 << 70]):
        with pytest.raises(ConfigError, match="token ids"):
            workload.answered(first.number, answer)
    workload.answered(first.number, [999])  # which still waited
    with pytest.raises(ConfigError, match="answered before"):
        workload.answered(first.number, [1])


def test_answers_of_another_length() -> None:
    workload = conversations(**{**PLAIN, "users": 1}, branches=0)
    first = workload.begin()[0]
    (second,) = workload.answered(0, [])
    assert shared(first.tokens, second.tokens) == len(first.tokens)
    (third,) = workload.answered(1, np.arange(50))
    assert third.tokens[len(second.tokens) :][:50].tolist() == list(range(50))


# ---- traces


def line(length: int, ids: list[int], wanted: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "timestamp": 0,
        "input_length": length,
        "output_length": wanted,
        "hash_ids": ids,
        **more,
    }


def written(tmp_path: Path, lines: list[Any], name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., dict[int, Turn]]:
    """Turns of a trace of such lines."""

    def turns(*lines: Any, order: int | None = None, **more: Any) -> dict[int, Turn]:
        of = {"scale": 1, "limit": 99, "vocabulary": 4096, **more}
        return played(trace(written(tmp_path, list(lines)), **of), order)

    return turns


def test_blocks_are_shared_as_their_ids_are(small: Callable[..., dict[int, Turn]]) -> None:
    turns = small(line(1324, [0, 1, 2], 7), line(1536, [0, 1, 3]), line(1024, [0, 4]), line(1, [5]))
    assert [len(turn.tokens) for turn in turns.values()] == [1324, 1536, 1024, 1]
    assert shared(turns[0].tokens, turns[1].tokens) == 1024
    assert shared(turns[0].tokens, turns[2].tokens) == 512
    assert shared(turns[0].tokens, turns[3].tokens) == 0
    # not only the beginnings differ, where the ids are
    behind = turns[0].tokens[1024 + 100 :] == turns[1].tokens[1024 + 100 : 1324]
    assert len(behind) == 200
    assert behind.mean() < 0.1
    assert turns[0].answer_tokens == 7
    assert all(turn.tokens.dtype == np.int32 for turn in turns.values())
    assert not turns[0].tokens.flags.writeable


def test_a_partial_block_is_the_beginning_of_the_whole(
    small: Callable[..., dict[int, Turn]],
) -> None:
    turns = small(line(600, [0, 1]), line(1024, [0, 1]), scale=0.5)
    assert [len(turn.tokens) for turn in turns.values()] == [256 + 44, 512]
    assert shared(turns[0].tokens, turns[1].tokens) == 300


@pytest.mark.parametrize("scale", [1, 0.5, 0.3, 0.0101, 1 / 512, 1e-9])
def test_lengths_are_scaled(scale: float, small: Callable[..., dict[int, Turn]]) -> None:
    lengths = [1, 511, 512, 513, 700, 5120]
    ids = iter(range(99))
    lines = [line(n, [next(ids) for _ in range(-(-n // 512))], n) for n in lengths]
    turns = small(*lines, scale=scale)
    block = max(1, round(512 * scale))
    for turn, n in zip(turns.values(), lengths, strict=True):
        rest = n - (n - 1) // 512 * 512
        assert len(turn.tokens) == (n - 1) // 512 * block + max(1, round(rest * scale))
        assert turn.answer_tokens == max(1, round(n * scale))


@given(
    st.sets(st.integers(0, (1 << 63) - 1), min_size=2, max_size=9),
    st.sampled_from([2, 3, 10, 4096, 128256, (1 << 31) - 1]),
    st.integers(0, 9),
)
def test_different_ids_make_different_blocks(ids: set[int], vocabulary: int, seed: int) -> None:
    from lightcache.tools.demo.traces import Blocks

    blocks = Blocks(seed, 63 / 512, vocabulary)  # 63 bits are enough for the smallest vocabulary
    made = {blocks.prompt([one], 512).tobytes() for one in ids}
    assert len(made) == len(ids)


def test_a_block_of_one_token_tells_as_many_ids_apart_as_there_are_tokens(
    small: Callable[..., dict[int, Turn]],
) -> None:
    lines = [line(512, [one]) for one in range(10)]
    for seed in range(10):
        turns = small(*lines, scale=1 / 512, vocabulary=10, seed=seed)
        assert sorted(int(turn.tokens[0]) for turn in turns.values()) == list(range(10))
    with pytest.raises(ConfigError, match=r"line 11: 1 tokens .* larger scale"):
        small(*lines, line(512, [10]), scale=1 / 512, vocabulary=10)


def test_tokens_come_from_seed_and_id_alone(small: Callable[..., dict[int, Turn]]) -> None:
    one = small(line(600, [0, 7]))[0]
    other = small(line(600, [3, 4]), line(1024, [0, 7]))[1]
    assert shared(one.tokens, other.tokens) == 600
    assert shared(one.tokens, small(line(600, [0, 7]), seed=1)[0].tokens) < 600


def test_conversations_of_a_trace(small: Callable[..., dict[int, Turn]], tmp_path: Path) -> None:
    lines = [
        line(1500, [0, 1, 2]),
        line(1500, [0, 3, 4]),
        line(512, [0]),
        line(2000, [0, 1, 2, 5]),
        line(1500, [0, 1, 6]),
        line(512, [0]),
        line(1024, [0, 3]),
    ]
    turns = small(*lines, order=4)
    places = [(turns[at].conversation, turns[at].turn) for at in range(7)]
    assert places == [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (3, 0), (1, 1)]
    workload = trace(written(tmp_path, lines), scale=0.1, limit=99, vocabulary=4096)
    assert [turn.number for turn in workload.begin()] == [0, 1, 2, 5]
    assert [turn.number for turn in workload.answered(0, [])] == [3]
    assert [turn.number for turn in workload.answered(3, [1])] == [4]
    assert workload.answered(4, [1]) == []
    assert [turn.number for turn in workload.answered(1, [1])] == [6]


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, [line(5, [0]), line(5, [0])])
    with path.open("ab") as file:
        file.write(b"\n\n{")  # never looked at with limit=2
    assert trace(path, scale=1, limit=2, vocabulary=9000).total == 2
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 5: .*no JSON"):
        trace(path, scale=1, limit=3, vocabulary=9000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"hello\n", "line 1: .*no JSON"),
        (b"\xff\xfe\xfd\n", "line 1: .*no JSON"),
        (b"[" * 100_000, "line 1: .*no JSON"),
        (b"[1]\n", "line 1: .*found a list"),
        (b"{}\n", "line 1: .*input_length.* missing"),
        (b"x" * (1 << 21), "line 1: expected at most"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"(?s)broken.jsonl.*{said}"):
        trace(path, scale=1, limit=5, vocabulary=4096)


@pytest.mark.parametrize("missing", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_missing_key(tmp_path: Path, missing: str) -> None:
    second = line(5, [0])
    del second[missing]
    with pytest.raises(ConfigError, match=rf"line 2: .*\['{missing}'\]"):
        trace(written(tmp_path, [line(5, [0]), second]), scale=1, limit=5, vocabulary=4096)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (line(0, []), "input_length"),
        (line(512, [0, 1]), "has 1 blocks .* found 2"),
        (line(513, [0]), "has 2 blocks .* found 1"),
        (line(5, [-1]), "hash_ids"),
        (line(5, [1 << 63]), "hash_ids"),
        (line(5, ["a"]), "hash_ids"),
        (line(5, [0], hash_ids=7), "hash_ids: expected a list"),
        (line(5, [0], input_length="5"), "input_length"),
        (line(5, [0], input_length=5.0), "input_length"),
        (line(5, [0], -1), "output_length"),
    ],
)
def test_a_line_that_makes_no_sense(tmp_path: Path, bad: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"trace.jsonl, line 2: .*{said}"):
        trace(written(tmp_path, [line(5, [0]), bad]), scale=1, limit=5, vocabulary=4096)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("scale", value) for value in (0, -1, 1.01, float("nan"), float("inf"), True, "1")),
        *(("limit", value) for value in (0, -1, 1.5)),
        *(("vocabulary", value) for value in (0, 1, 1 << 31)),
        ("seed", -1),
    ],
)
def test_bad_arguments_of_a_trace(tmp_path: Path, name: str, value: Any) -> None:
    of = {"scale": 1, "limit": 5, "vocabulary": 4096, name: value}
    with pytest.raises(ConfigError, match=name):
        trace(written(tmp_path, [line(5, [0])]), **of)


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            trace(path, scale=1, limit=5, vocabulary=4096)


def longest_hits(prompts: list[Any], page: int) -> list[int]:
    """Of each prompt how many pages an earlier one began with, as a cache without end has it."""
    known: set[bytes] = set()
    hits = []
    for tokens in prompts:
        starts = [np.asarray(tokens[:end]).tobytes() for end in range(page, len(tokens) + 1, page)]
        hits.append(sum(start in known for start in starts))
        known.update(starts)
    return hits


@pytest.mark.shared
def test_the_published_trace() -> None:
    if not TRACE.exists():
        pytest.skip("no published trace beside the clone")
    # 1/32: a block is a page of 16 tokens
    workload = trace(TRACE, scale=1 / 32, limit=1000, vocabulary=4096)
    turns = played(workload, 1)
    with TRACE.open() as file:
        lines = [json.loads(next(file)) for _ in range(1000)]
    full = [one["hash_ids"][: one["input_length"] // 512] for one in lines]
    tokens = [turns[number].tokens for number in range(1000)]
    # Full pages: a scaled tail can round up to one, which the trace does not call full.
    pages = [one[: 16 * len(ids)] for one, ids in zip(tokens, full, strict=True)]
    hits = longest_hits(pages, 16)
    assert hits == longest_hits([np.array(ids, np.int64) for ids in full], 1)
    assert len({turn.conversation for turn in turns.values()}) == 781
    assert max(turn.turn for turn in turns.values()) == 6
    # What a cache without end finds: 22 % of the blocks; 218 requests go on from one before.
    assert (sum(hits), sum(map(len, full))) == (5780, 26307)
    assert sum(hit > 1 for hit in hits) == 218
