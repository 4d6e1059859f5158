"""What clients and the storage service tell each other: there and back, and bytes that are none."""

from __future__ import annotations

import contextlib
import struct
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
    Kind,
    Malformed,
    Part,
    PartBuffer,
    split,
)
from lightcache.storage.tasks import COUNTS
from lightcache.storage.testing.conformance import make_keys

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TASKS = st.sampled_from([Kind.WRITE, Kind.PREFETCH, Kind.LAST_READY])
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=11)
asks = st.builds(
    Ask,
    end=st.floats(allow_nan=False),
    timeout=st.floats(allow_nan=False),
    keys=st.integers(0, 5).map(lambda n: make_keys(n, seed=n)),
    namespace=st.builds(Namespace, names, names, U32),
    tokens=st.none() | st.integers(0, 2**62),
    request=st.none() | U64,
    start=U32,
    most=U32,
    step=st.integers(1, 2**15),
    groups=st.lists(
        st.tuples(
            st.integers(1, 2**63 - 1),
            st.integers(0, 2**63 - 1),
            st.builds(Run, st.integers(1, 31), st.integers(1, 4096)) | st.just(PLAIN),
        ),
        max_size=3,
    ).map(lambda groups: tuple((Rule(f"rule{i}", *of[:2]), of[2]) for i, of in enumerate(groups))),
)
ASK = Ask(1.0, 2.0, make_keys(3, seed=1), Namespace("v1", "t", 7), tokens=9, request=4)


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


@given(TASKS, st.integers(1, 2**32 - 1), U64, U64, st.binary(min_size=1, max_size=3 * PART_BYTES))
def test_parts(kind: Kind, pid: int, client: int, task: int, body: bytes) -> None:
    messages = split(kind, pid, client, task, body)
    assert max(map(len, messages)) <= PART_BYTES
    halves = PartBuffer()
    found = [halves.add(Part.unpack(message)) for message in messages]
    assert found == [None] * (len(messages) - 1) + [body]
    assert not halves.dropped
    assert not halves.waiting


@given(st.sampled_from([Kind.STOP, Kind.CANCEL]), st.integers(1, 2**32 - 1), U64, U64)
def test_a_word_about_a_task(kind: Kind, pid: int, client: int, task: int) -> None:
    part = Part(kind, pid, client, task, 0, 1, b"")
    assert Part.unpack(part.pack()) == part


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
    groups = tuple((Rule(f"rule{i}", 1, 0), PLAIN) for i in range(GROUPS))
    ask = replace(ASK, keys=keys, namespace=Namespace("w" * 47, "t" * 47, 1), groups=groups)
    halves = PartBuffer()
    bodies = [halves.add(Part.unpack(each)) for each in split(Kind.WRITE, 1, 2, 3, ask.pack())]
    assert bodies[-1] is not None
    assert same(Ask.unpack(bodies[-1]), ask)


# ---------------------------------------------------------------- what is none


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_understood(data: bytes) -> None:
    for kind in (Part, Ask, Answer):
        try:
            made: Any = kind.unpack(data)  # type: ignore[attr-defined]
        except Malformed:
            continue
        assert kind.unpack(made.pack()) is not None  # type: ignore[attr-defined]


@given(st.sampled_from(["part", "ask", "answer"]), st.data())
def test_a_message_of_which_bytes_changed(which: str, data: Any) -> None:
    whole: bytes = {
        "part": Part(Kind.WRITE, 1, 2, 3, 0, 1, b"body").pack(),
        "ask": ASK.pack(),
        "answer": Answer(1, TaskState.RUNNING, 2, {}, ("why",)).pack(),
    }[which]
    at = data.draw(st.integers(0, len(whole) - 1))
    bad = bytearray(whole)
    bad[at] ^= data.draw(st.integers(1, 255))
    kinds = {"part": Part, "ask": Ask, "answer": Answer}
    unpack: Any = kinds[which]
    with contextlib.suppress(Malformed):
        unpack.unpack(bytes(bad)[: data.draw(st.integers(0, len(bad)))])


def head(kind: int = 1, part: int = 0, parts: int = 1, pid: int = 9, **how: Any) -> bytes:
    """A part's head, byte by byte."""
    magic, version, zero = (
        how.get("magic", b"lcST"),
        how.get("version", VERSION),
        how.get("zero", 0),
    )
    return struct.pack("<4sBBHIHHQQ", magic, version, kind, zero, pid, part, parts, 1, 1)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        head()[:-1],
        head(magic=b"lcSU") + b"x",
        head(version=1) + b"x",
        head(zero=1) + b"x",
        head(kind=0) + b"x",
        head(kind=6) + b"x",
        head(kind=7) + b"x",
        head(kind=8) + b"x",
        head(pid=0) + b"x",
        head(part=1) + b"x",
        head(parts=0) + b"x",
        head(),
        head(kind=4) + b"x",
        head(kind=5, parts=2),
    ],
)
def test_no_part(message: bytes) -> None:
    refused(Malformed, "", Part.unpack, message)


def body(**how: Any) -> bytes:
    """A task's body, field by field."""
    fields: dict[str, Any] = {
        "end": 1.0,
        "timeout": 1.0,
        "tokens": -1,
        "request": 0,
        "ref": 1,
        "has": 0,
        "start": 0,
        "most": 0,
        "step": 1,
        "groups": 1,
        "keys": 2,
        "weights": 2,
        "tenant": 1,
        "align": 1,
        "back": 1,
        "group": 0,
        "run": 1,
        **how,
    }
    return struct.pack("<ddqQQIIIHHIHHQQHH", *fields.values()) + b"abc" + b"k" * 32


@pytest.mark.parametrize(
    "message",
    [
        body()[:-1],
        body()[:40],
        body(end=float("nan")),
        body(timeout=float("nan")),
        body(tokens=-2),
        body(has=8),
        body(has=2),
        body(ref=1 << 32),
        body(group=32),
        body(group=1, run=0),
        body(run=2),
        body(align=0),
        body(back=1 << 63),
        body(groups=0),
        body(groups=2),
        body(groups=60000),
        body(keys=1),
        body(keys=3),
        body(keys=MOST_KEYS + 1) + b"k" * 16 * (MOST_KEYS - 1),
        body() + b"k",
        body(has=4),
        body(weights=3),
        body(weights=48),
        body(tenant=60000),
        body().replace(b"abc", b"\xff\xfe\xfd"),
    ],
)
def test_no_task(message: bytes) -> None:
    assert len(Ask.unpack(body()).keys) == 2
    refused(Malformed, "", Ask.unpack, message)


# ---------------------------------------------------------------- halves


def parts(task: int, keys: int = 3000) -> list[Part]:
    ask = replace(ASK, keys=make_keys(keys, seed=task))
    return [Part.unpack(each) for each in split(Kind.PREFETCH, 1, 2, task, ask.pack())]


def test_a_half_is_dropped_when_something_else_comes() -> None:
    halves, first, second = PartBuffer(), parts(1), parts(2)
    assert halves.add(first[0]) is None
    assert halves.waiting
    assert [halves.add(part) is None for part in second] == [True] * (len(second) - 1) + [False]
    assert halves.dropped == 1
    refused(Malformed, "without those before", halves.add, first[1])
    assert [halves.add(part) is None for part in first][-1] is False


def test_parts_out_of_order() -> None:
    halves, first = PartBuffer(), parts(1)
    halves.add(first[0])
    refused(Malformed, "", halves.add, first[2])
    assert not halves.waiting
    halves.add(first[0])
    halves.add(replace(first[0]))  # said twice: it begins anew
    assert halves.dropped == 2
    assert [halves.add(part) is None for part in first[1:]][-1] is False


def test_parts_of_another_size_and_too_many() -> None:
    halves, first = PartBuffer(), parts(1)
    refused(Malformed, "bytes", halves.add, replace(first[0], data=first[0].data[:-1]))
    refused(Malformed, "", halves.add, replace(first[0], parts=60000))
    assert not halves.waiting
