"""Messages of the demo: each arrives as it was sent, whole or not at all, whoever else sends."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightcache.errors import WaitTimeout
from lightcache.tools.demo import messages
from lightcache.tools.demo.messages import (
    Answer,
    Failed,
    Finished,
    Hello,
    Holding,
    Lost,
    Mailbox,
    Message,
    Recovered,
    Request,
    Served,
    Verified,
    Verify,
    decode,
    encode,
)

Script = Callable[..., Any]

_WHOLE = st.integers(0, 1 << 62)
_SECONDS = st.floats(allow_nan=False)
_ROW = st.lists(_SECONDS, max_size=4)
_TIERS = st.dictionaries(st.text(max_size=6), _WHOLE, max_size=2)
_TOKENS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=9).map(
    lambda tokens: np.array(tokens, np.int32)
)
_WORKER = {"number": _WHOLE, "worker": _WHOLE, "life": _WHOLE}
_FIGURES = {
    "logprobs": _ROW,
    "reused": _TIERS,
    "loaded_bytes": _WHOLE,
    "stored_bytes": _WHOLE,
    "first_s": _SECONDS,
    "steps_s": _ROW,
    "total_s": _SECONDS,
    "lookup_s": st.none() | _SECONDS,
    "baseline_s": st.none() | _SECONDS,
}
_FIELDS: dict[type[Message], dict[str, st.SearchStrategy[Any]]] = {
    Hello: {
        "worker": _WHOLE,
        "life": _WHOLE,
        "pid": _WHOLE,
        "cache": st.none() | st.text(max_size=9),
        "device": st.none() | st.text(max_size=9),
    },
    Request: {
        "number": _WHOLE,
        "answer_tokens": _WHOLE,
        "sent": _SECONDS,
        "cached": st.booleans(),
        "baseline": st.booleans(),
        "hold": st.booleans(),
    },
    Answer: {**_WORKER, **_FIGURES},
    Holding: {**_WORKER, "copied": _WHOLE, "pages": _WHOLE},
    Lost: {"worker": _WHOLE, "life": _WHOLE, "at": _SECONDS},
    Recovered: {
        "worker": _WHOLE,
        "number": st.none() | _WHOLE,
        "doomed": _WHOLE,
        "clients": _WHOLE,
        "seconds": _SECONDS,
    },
    Served: {
        **_WORKER,
        **_FIGURES,
        "conversation": _WHOLE,
        "turn": _WHOLE,
        "prompt": _WHOLE,
        "attempts": _WHOLE,
        "waited_s": _SECONDS,
        "cached": st.booleans(),
    },
    Finished: {"turns": _WHOLE, "seconds": _SECONDS, "lookup_us": _SECONDS},
    Verify: {"number": _WHOLE, "prompt": _WHOLE, "logprobs": _ROW},
    Verified: {"number": _WHOLE, "equal": st.booleans(), "difference": _SECONDS},
    Failed: {"role": st.text(max_size=9), "reason": st.text(max_size=99)},
}
_MESSAGES = st.one_of(
    [st.builds(kind, **fields, tokens=_TOKENS) for kind, fields in _FIELDS.items()]
)


def lost(worker: int, life: int = 0, tokens: int = 0) -> Lost:
    """Some message, with so many tokens that tell it apart."""
    return Lost(worker, life, 0.5, tokens=np.arange(worker, worker + tokens, dtype=np.int32))


def same(found: Message, sent: Message) -> bool:
    return found == sent and found.tokens.tolist() == sent.tokens.tolist()


@pytest.fixture
def box(segment_name: str) -> Iterator[Mailbox]:
    """Of the receiver."""
    with Mailbox(segment_name) as made:
        yield made


# ---- as bytes


def test_every_message_is_tried_here() -> None:
    assert set(_FIELDS) == {*Message.__subclasses__(), *Answer.__subclasses__()}


@settings(max_examples=300, deadline=None)
@given(_MESSAGES)
def test_a_message_survives(sent: Message) -> None:
    found = decode(encode(sent))
    assert type(found) is type(sent)
    assert same(found, sent)
    assert found.tokens.dtype == np.int32
    found.tokens[:] = 0  # its receiver's own, for writing too


def test_no_number_survives() -> None:
    found = decode(encode(Verified(1, False, math.nan)))
    assert math.isnan(found.difference)
    assert decode(encode(Verified(1, False, math.inf))).difference == math.inf


def test_tokens_of_another_type_are_converted() -> None:
    strided = np.arange(20, dtype=np.int64)[::3]
    found = decode(encode(Verify(1, 2, [], tokens=strided)))  # type: ignore[arg-type]
    assert found.tokens.tolist() == strided.tolist()


# ---- in a ring


@pytest.mark.parametrize("tokens", [0, 1, 2000, 2030, 2031, 2032, 2033, 2034, 2035, 9000, 100_000])
def test_a_large_one_goes_in_pieces(segment_name: str, box: Mailbox, tokens: int) -> None:
    with Mailbox(segment_name) as sender:
        sender.send(lost(3, tokens=tokens))
        found = box.receive(10)
        assert same(found, lost(3, tokens=tokens))
        assert box.receive(0) is None


def test_one_that_exceeds_the_ring_waits_for_its_receiver(segment_name: str, box: Mailbox) -> None:
    tokens = messages._PIECES * messages._PIECE_BYTES  # four times what fits
    with Mailbox(segment_name) as sender:
        thread = threading.Thread(target=sender.send, args=(lost(5, tokens=tokens),))
        thread.start()
        found = box.receive(30)
        thread.join()
    assert same(found, lost(5, tokens=tokens))


def test_order_is_kept(segment_name: str, box: Mailbox) -> None:
    with Mailbox(segment_name) as sender:
        for number in range(20):
            sender.send(lost(number, tokens=number * 200))
        for number in range(20):
            assert same(box.receive(10), lost(number, tokens=number * 200))


def test_senders_interleave(segment_name: str, box: Mailbox) -> None:
    """Each has a mailbox of its own; pieces of all lie between each other."""
    senders, each, tokens = 4, 12, 15_000

    def send(worker: int) -> None:
        with Mailbox(segment_name) as mine:
            for life in range(each):
                mine.send(lost(worker, life, tokens))

    threads = [threading.Thread(target=send, args=(worker,)) for worker in range(senders)]
    for thread in threads:
        thread.start()
    found = [box.receive(30) for _ in range(senders * each)]
    for thread in threads:
        thread.join()
    for worker in range(senders):
        mine = [one for one in found if one.worker == worker]
        assert [one.life for one in mine] == list(range(each))
        assert all(same(one, lost(worker, one.life, tokens)) for one in mine)
    assert box.receive(0) is None
    assert not box._pieces


def test_pieces_of_two_by_turns(segment_name: str, box: Mailbox) -> None:
    """The same without chance: a piece of one, a piece of the other."""
    with Mailbox(segment_name) as one, Mailbox(segment_name) as other:
        queues: list[list[bytes]] = [[], []]
        for sender, queue in zip((one, other), queues, strict=True):
            sender._ring, ring = _Recorder(queue), sender._ring  # type: ignore[assignment]
            sender.send(lost(1, life=len(queues[0]), tokens=5000))
            sender._ring = ring
        assert len(queues[0]) == len(queues[1]) == 3
        for pieces in zip(*queues, strict=True):
            for piece in pieces:
                one._ring.push(piece, 1)
    found = [box.receive(1), box.receive(1)]
    assert same(found[0], lost(1, 0, 5000))
    assert same(found[1], lost(1, 3, 5000))


class _Recorder:
    """A ring that keeps what is pushed."""

    def __init__(self, into: list[bytes]) -> None:
        self._into = into

    def push(self, data: bytes, timeout: float) -> None:
        self._into.append(data)


_DIES_HALF_WAY = """
import os, signal, sys
import numpy as np
from lightcache.tools.demo.messages import Lost, Mailbox

box = Mailbox(sys.argv[1])
box.send(Lost(1, 0, 0.5))
push, pushed = box._ring.push, []

def dying(data, timeout):
    if len(pushed) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    pushed.append(data)
    push(data, timeout)

box._ring.push = dying
box.send(Lost(1, 1, 0.5, tokens=np.zeros(50_000, np.int32)))
"""


@pytest.mark.crash
def test_a_sender_that_dies_half_way(segment_name: str, box: Mailbox, script: Script) -> None:
    script(_DIES_HALF_WAY, segment_name, status=-9)
    assert same(box.receive(10), lost(1))
    assert box.receive(0) is None, "what it had sent in part never becomes a message"
    with Mailbox(segment_name) as successor:
        successor.send(lost(1, 1, 20_000))
        assert same(box.receive(10), lost(1, 1, 20_000))


# ---- time


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_nothing_comes(box: Mailbox, timeout: float) -> None:
    assert box.receive(timeout) is None


def test_part_of_a_message_is_none_yet(segment_name: str, box: Mailbox) -> None:
    queue: list[bytes] = []
    with Mailbox(segment_name) as sender:
        sender._ring, ring = _Recorder(queue), sender._ring  # type: ignore[assignment]
        sender.send(lost(1, tokens=3000))
        sender._ring = ring
        ring.push(queue[0], 1)
        assert box.receive(0.01) is None
        ring.push(queue[1], 1)
        assert same(box.receive(10), lost(1, tokens=3000))


def test_a_full_ring(segment_name: str, box: Mailbox) -> None:
    with Mailbox(segment_name) as sender:
        for number in range(messages._PIECES):
            sender.send(lost(number), timeout=0)
        with pytest.raises(WaitTimeout, match="full"):
            sender.send(lost(99), timeout=0)
        assert [box.receive(0).worker for _ in range(3)] == [0, 1, 2]
        # Three pieces fit, the fourth does not: that message never was, the next one is.
        with pytest.raises(WaitTimeout, match="full"):
            sender.send(lost(98, tokens=8000), timeout=0)
        found = [box.receive(0).worker for _ in range(messages._PIECES - 3)]
        assert found == list(range(3, messages._PIECES))
        assert box.receive(0) is None
        sender.send(lost(97, tokens=8000), timeout=0)
        assert same(box.receive(0), lost(97, tokens=8000))


def test_what_was_sent_outlives_its_sender(segment_name: str, box: Mailbox) -> None:
    with Mailbox(segment_name) as sender:
        sender.send(lost(1, tokens=5000))
    assert same(box.receive(0), lost(1, tokens=5000))
