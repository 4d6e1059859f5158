"""What clients and the storage service tell each other: there and back, and bytes that are none."""

from __future__ import annotations

import contextlib
import json
import struct
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from lightcache.kernels.groups import Rule
from lightcache.layout import GROUPS
from lightcache.namespaces import Namespace
from lightcache.runs import PLAIN, Run
from lightcache.storage import TaskState
from lightcache.storage.service.messages import (
    ANSWER_BYTES,
    MOST_KEYS,
    PART_BYTES,
    VERSION,
    Answer,
    Ask,
    Malformed,
    Part,
    PartBuffer,
    split,
)
from lightcache.storage.tasks import COUNTS
from lightcache.storage.testing.conformance import make_keys

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
CALLS = st.sampled_from(["write", "prefetch", "prefetch_last_ready", "stop", "cancel"])
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=11)
groups = st.lists(
    st.tuples(
        st.integers(1, 2**63 - 1),
        st.integers(0, 2**63 - 1),
        st.builds(Run, st.integers(1, 31), st.integers(1, 4096)) | st.just(PLAIN),
    ),
    max_size=3,
).map(lambda groups: [(Rule(f"rule{i}", *of[:2]), of[2]) for i, of in enumerate(groups)])
STARTS = st.integers(0, 5)
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "stop": st.just({}),
    "cancel": st.just({}),
    "write": st.fixed_dictionaries(
        {"request": st.none() | st.integers(-(2**63), 2**63), "tokens": st.integers(0, 2**62)}
    ),
    "prefetch": st.fixed_dictionaries({"start": STARTS}),
    "prefetch_last_ready": st.fixed_dictionaries(
        {"groups": groups, "start": STARTS, "step": st.integers(1, 2**15), "most": U32}
    ),
}
asks = CALLS.flatmap(
    lambda call: st.builds(
        Ask,
        call=st.just(call),
        end=st.floats(allow_nan=False),
        keys=st.integers(5, 9).map(lambda n: make_keys(n, seed=n)),
        namespace=st.builds(Namespace, names, names, U32),
        arguments=ARGUMENTS[call],
    )
)
WRITE = {"request": 4, "tokens": 9}
ASK = Ask("write", 1.0, make_keys(3, seed=1), Namespace("v1", "t", 7), WRITE)


def parts_buffer() -> tuple[PartBuffer, Counter[str]]:
    """A buffer, and what it counts."""
    counted: Counter[str] = Counter()
    return PartBuffer(counted), counted


def same(one: Ask, other: Ask) -> bool:
    """Equal, keys and all."""
    alike = replace(one, keys=other.keys) == other
    return bool(alike and np.array_equal(one.keys, other.keys))


# ---------------------------------------------------------------- there and back


@given(asks)
def test_a_task(ask: Ask) -> None:
    found = Ask.unpack(ask.pack())
    assert same(found, ask)
    assert (found.keys.dtype, found.keys.flags.c_contiguous) == (np.uint64, True)


@given(U64, U64, st.binary(min_size=1, max_size=3 * PART_BYTES))
def test_parts(client: int, task: int, body: bytes) -> None:
    messages = split(client, task, body)
    assert max(map(len, messages)) <= PART_BYTES
    halves, counted = parts_buffer()
    found = [halves.add(Part.unpack(message)) for message in messages]
    assert found == [None] * (len(messages) - 1) + [body]
    halves.drop()
    assert not counted["halves"]


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@given(
    U64,
    st.sampled_from(list(TaskState)),
    U32,
    st.fixed_dictionaries(dict.fromkeys(COUNTS, U32)),
    st.lists(texts, max_size=5).map(tuple),
)
def test_an_answer(
    task: int, state: TaskState, prefix: int, counts: dict[str, int], reasons: tuple[str, ...]
) -> None:
    answer = Answer(task, state, prefix, counts, reasons)
    data = answer.pack()
    found = Answer.unpack(data)
    assert len(data) <= ANSWER_BYTES
    assert replace(found, reasons=()) == replace(answer, reasons=())
    whole, cut = "\0".join(reasons), "\0".join(found.reasons)
    assert cut == whole or (whole.startswith(cut) and len(data) > ANSWER_BYTES - 5)


@pytest.mark.parametrize("first", ["", "x"])
def test_a_reason_that_is_too_long_is_cut_off_between_characters(first: str) -> None:
    answer = Answer(1, TaskState.FAILED, 0, {}, (first + "é" * ANSWER_BYTES,))
    (reason,) = Answer.unpack(answer.pack()).reasons
    assert set(reason) == {*first, "é"}
    assert len(reason) > ANSWER_BYTES // 3


def test_the_longest_chain_has_all_of_its_parts() -> None:
    keys = make_keys(MOST_KEYS, seed=3)
    each = [(Rule(f"rule{i}", 2**62, 2**62), PLAIN) for i in range(GROUPS)]
    how = {"groups": each, "start": 1, "step": 1, "most": 1}
    space = Namespace("w" * 47, "t" * 47, 1)
    ask = replace(ASK, call="prefetch_last_ready", keys=keys, namespace=space, arguments=how)
    halves, _ = parts_buffer()
    messages = split(2, 3, ask.pack())
    bodies = [halves.add(Part.unpack(each)) for each in messages]
    assert bodies[-1] is not None
    assert same(Ask.unpack(bodies[-1]), ask)


# ---------------------------------------------------------------- what is none


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_understood(data: bytes) -> None:
    unpacks: list[Any] = [Part.unpack, Ask.unpack, Answer.unpack]
    for unpack in unpacks:
        try:
            made: Any = unpack(data)
        except Malformed:
            continue
        assert unpack(made.pack()) is not None


@given(st.sampled_from(["part", "ask", "answer"]), st.data())
def test_a_message_of_which_bytes_changed(which: str, data: Any) -> None:
    whole: bytes = {
        "part": Part(2, 3, 0, 1, b"body").pack(),
        "ask": ASK.pack(),
        "answer": Answer(1, TaskState.RUNNING, 2, {}, ("why",)).pack(),
    }[which]
    at = data.draw(st.integers(0, len(whole) - 1))
    bad = bytearray(whole)
    bad[at] ^= data.draw(st.integers(1, 255))
    unpack: Any = {"part": Part.unpack, "ask": Ask.unpack, "answer": Answer.unpack}[which]
    with contextlib.suppress(Malformed):
        unpack(bytes(bad)[: data.draw(st.integers(0, len(bad)))])


def head(part: int = 0, parts: int = 1, **how: Any) -> bytes:
    """A part's head, byte by byte."""
    magic, version = how.get("magic", b"lcST"), how.get("version", VERSION)
    return struct.pack("<4sBHHQQ", magic, version, part, parts, 1, 1)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        head()[:-1],
        head(magic=b"lcSU") + b"x",
        head(version=1) + b"x",
        head(parts=67) + b"x",
        head(part=1) + b"x",
        head(parts=0) + b"x",
        head(),
    ],
)
def test_no_part(message: bytes) -> None:
    refused(Malformed, "", Part.unpack, message)


def body(*fields: Any, keys: bytes = b"k" * 32, **how: Any) -> bytes:
    """A task's body, field by field."""
    known = ["write", 1.0, "v1", "t", 1, {"request": None, "tokens": 1, **how}]
    text = json.dumps([*fields, *known[len(fields) :]]).encode()
    return struct.pack("<I", len(text)) + text + keys


GROUPED = {"groups": [[1, 1, 0, 1]], "start": 0, "step": 1, "most": 1}


@pytest.mark.parametrize(
    "message",
    [
        body()[:-1],
        body()[:40],
        body()[:3],
        body() + b"k",
        body(keys=b"k" * 24),
        body("writes"),
        body(1),
        body(["write"]),
        body("stop"),
        body("write", float("nan")),
        body("write", 1),
        body("write", "1"),
        body("write", None),
        body("write", 1.0, "v1", "t", 1 << 32),
        body("write", 1.0, "v1", "t", -1),
        body("write", 1.0, "v1", "t", True),
        body("write", 1.0, 1, "t", 1),
        body("write", 1.0, "v1", "t", 1, []),
        body("write", 1.0, "v1", "t", 1, {"request": 1}),
        body("write", 1.0, "v1", "t", 1, {"request": 1, "tokens": 1}, 1),
        body(hold=True),
        body(lease=None),
        body().replace(b"v1", b"\xff\xfe"),
        body().replace(b"v1", b'v"'),
        struct.pack("<I", 10000) + b"[" * 10000,
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 1) + b"1",
        struct.pack("<I", 1 << 31),
    ],
)
def test_no_task(message: bytes) -> None:
    assert len(Ask.unpack(body()).keys) == 2
    refused(Malformed, "", Ask.unpack, message)


@pytest.mark.parametrize(
    "groups",
    [
        *(1, [1], [[]], [[1, 1, 0]], [[1, 1, 0, 1, 1]], [[0, 1, 0, 1]], [[1, 1 << 63, 0, 1]]),
        *([[1, 1, 32, 1]], [[1, 1, 1, 0]], [[1, 1, 0, 2]], [["1", 1, 0, 1]]),
    ],
)
def test_no_groups(groups: Any) -> None:
    def unpack(how: Any) -> Ask:
        return Ask.unpack(body("prefetch_last_ready", 1.0, "v1", "t", 1, how))

    assert len(unpack(GROUPED).arguments["groups"]) == 1
    refused(Malformed, "", unpack, GROUPED | {"groups": groups})


@pytest.mark.parametrize("start", [-1, 3, -(1 << 33), 1 << 64, 1.0, True, None, "1", [1], {}])
def test_no_start(start: Any) -> None:
    """It would be a number of pages that no answer has room for, or none at all."""

    def unpack(start: Any) -> Ask:
        return Ask.unpack(body("prefetch", 1.0, "v1", "t", 1, {"start": start}))

    assert [unpack(start).pages for start in (0, 2)] == [2, 0]
    refused(Malformed, "", unpack, start)


# ---------------------------------------------------------------- halves


def parts(task: int, keys: int = 3000) -> list[Part]:
    ask = replace(ASK, call="prefetch", keys=make_keys(keys, seed=task), arguments={"start": 0})
    return [Part.unpack(each) for each in split(2, task, ask.pack())]


def test_a_half_is_dropped_when_something_else_comes() -> None:
    (halves, counted), first, second = parts_buffer(), parts(1), parts(2)
    assert halves.add(first[0]) is None
    assert [halves.add(part) is None for part in second] == [True] * (len(second) - 1) + [False]
    assert counted["halves"] == 1
    refused(Malformed, "without those before", halves.add, first[1])
    assert [halves.add(part) is None for part in first][-1] is False


def test_parts_out_of_order() -> None:
    (halves, counted), first = parts_buffer(), parts(1)
    halves.add(first[0])
    refused(Malformed, "", halves.add, first[2])
    assert counted["halves"] == 1
    halves.add(first[0])
    halves.add(replace(first[0]))  # said twice: it begins anew
    assert counted["halves"] == 2
    assert [halves.add(part) is None for part in first[1:]][-1] is False


def test_a_part_of_another_task() -> None:
    """With the same number: another client, or number of parts."""
    first = parts(1)
    for change in ({"client": 9}, {"parts": 60}, {"task": 9}):
        halves, counted = parts_buffer()
        halves.add(first[0])
        refused(Malformed, "without those before", halves.add, replace(first[1], **change))  # type: ignore[arg-type]
        assert counted["halves"] == 1
