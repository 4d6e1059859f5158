"""SharedRing against a deque, its limits, its waits, and what it says to those who may not."""

import ctypes
import os
import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.filling import corrupt
from support.refusals import refused

from lightcache import errors, shm
from lightcache.shm import layout

CAPACITY, BYTES = 5, 12


@pytest.fixture
def ring(segment_name):
    with shm.SharedRing.create(segment_name, capacity=CAPACITY, message_bytes=BYTES) as made:
        yield made


def drain(ring):
    found = []
    while some := ring.pop_many(3):
        found += some
    return found


MESSAGES = st.binary(max_size=BYTES)
CALLS = st.lists(
    st.tuples(st.just("push"), MESSAGES)
    | st.tuples(st.just("push_many"), st.lists(MESSAGES, max_size=CAPACITY + 2))
    | st.tuples(st.just("pop"), st.none())
    | st.tuples(st.just("pop_many"), st.integers(1, CAPACITY + 2)),
    max_size=40,
)


@pytest.mark.parametrize("capacity", [1, 2, CAPACITY])
def test_ring_equals_a_deque(segment_name, capacity):
    with shm.SharedRing.create(segment_name, capacity=capacity, message_bytes=BYTES) as real:

        @settings(max_examples=60, derandomize=True, deadline=None)
        @given(CALLS)
        def run(calls):
            drain(real)
            model = deque()
            for verb, argument in calls:
                room = capacity - len(model)
                if verb == "push" and room == 0:
                    refused(errors.WaitTimeout, "full", real.push, argument, timeout=0)
                elif verb == "push":
                    real.push(argument, timeout=0)
                    model.append(argument)
                elif verb == "push_many":
                    assert real.push_many(argument) == min(len(argument), room)
                    model.extend(argument[:room])
                elif verb == "pop" and not model:
                    refused(errors.WaitTimeout, "empty", real.pop, timeout=0)
                elif verb == "pop":
                    assert real.pop(timeout=0) == model.popleft()
                else:
                    expected = [model.popleft() for _ in range(min(argument, len(model)))]
                    assert real.pop_many(argument) == expected
                real.check()
                assert len(real) == len(model)
            assert drain(real) == list(model)

        run()


def test_messages_are_popped_into_memory_of_the_caller(ring):
    out, lengths = (ctypes.c_char * (2 * BYTES))(), (ctypes.c_uint32 * 3)(7, 7, 7)
    assert ring.pop_into(out, lengths) == 0
    assert list(lengths) == [7, 7, 7]
    messages = [b"one", b"", b"x" * BYTES, b"y" * BYTES]
    assert ring.push_many(messages) == 4
    assert ring.pop_into(out, lengths) == 3  # as many as there are lengths
    assert list(lengths) == [3, 0, BYTES]
    assert out.raw[: 3 + BYTES] == b"one" + b"x" * BYTES
    assert ring.push_many(messages[2:]) == 2
    assert ring.pop_into(out, lengths) == 2  # as many as there is room for
    assert drain(ring) == messages[3:]
    refused(errors.ConfigError, "room for a message", ring.pop_into, out, (ctypes.c_uint32 * 0)())
    short = (ctypes.c_char * (BYTES - 1))()
    refused(errors.ConfigError, f"{BYTES - 1} bytes", ring.pop_into, short, lengths)


def test_messages_outlive_their_producer(segment_name):
    sizes = {"capacity": CAPACITY, "message_bytes": BYTES, "lifetime": "persistent"}
    with shm.SharedRing.create(segment_name, **sizes) as ring:
        ring.push(b"one")
    with pytest.raises(errors.LayoutMismatch, match="capacity"):
        shm.SharedRing.open(segment_name, capacity=CAPACITY + 1, message_bytes=BYTES)
    with shm.SharedRing.open(segment_name, **sizes) as ring:
        assert ring.pop(timeout=0) == b"one"
    shm.Segment.unlink(segment_name)


def test_one_step_moves_as_much_as_one_hold_may(segment_name):
    many, large = layout.RING_BATCH, layout.RING_MESSAGE
    with shm.SharedRing.create(segment_name, capacity=1000, message_bytes=large) as ring:
        assert ring.push_many([b"%d" % i for i in range(1000)]) == many
        assert ring.push_many([b"%d" % i for i in range(many, 1000)]) == many
        assert ring.pop_many(1000) == [b"%d" % i for i in range(many)]
        assert ring.push_many([b"good"] * many + [b"not looked at" * large]) == many
        assert len(drain(ring)) == 2 * many
        assert ring.push_many([b"%d" % i for i in range(many)]) == many
        assert len(drain(ring)) == many
        four = layout.RING_HOLD // large
        assert ring.push_many([bytes(large)] * 9) == four
        assert ring.push_many([bytes(large)] * 9) == four
        assert ring.pop_many(9) == [bytes(large)] * four
        ring.check()


def other_end(name, act):
    """Run `act` with a ring of its own in another process; the process's number."""
    pid = os.fork()
    if pid == 0:
        try:
            with shm.SharedRing.attach(name) as mine:
                act(mine)
        finally:
            os._exit(0)
    return pid


def test_pop_waits_for_a_push_of_another_process(ring):
    pid = other_end(ring.segment.name, lambda mine: mine.push(b"late"))
    assert ring.pop(timeout=60) == b"late"
    os.waitpid(pid, 0)


def test_push_waits_for_a_pop_of_another_process(ring):
    for i in range(CAPACITY):
        ring.push(b"%d" % i)
    pid = other_end(ring.segment.name, lambda mine: mine.pop())
    ring.push(b"late", timeout=60)
    os.waitpid(pid, 0)
    assert drain(ring) == [b"1", b"2", b"3", b"4", b"late"]


def test_threads_share_a_ring(ring):
    """Two threads push, two pop: nothing is lost, and each producer's messages keep their order."""
    each, found = 300, [[], []]

    def produce(who):
        for i in range(each):
            ring.push(b"%d %d" % (who, i))

    def consume(into):
        while (message := ring.pop()) != b"end":
            into.append(tuple(map(int, message.split())))

    producers = [threading.Thread(target=produce, args=[i], daemon=True) for i in range(2)]
    consumers = [threading.Thread(target=consume, args=[into], daemon=True) for into in found]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join(60)
    for _ in consumers:
        ring.push(b"end")
    for thread in consumers:
        thread.join(60)
    assert sorted(found[0] + found[1]) == [(who, i) for who in range(2) for i in range(each)]
    for one in found:
        for who in range(2):
            order = [i for producer, i in one if producer == who]
            assert order == sorted(order)


ROOT, SLOT = ctypes.sizeof(layout.RingRoot), 8 + 16  # a slot of 12 bytes takes 16


@pytest.mark.parametrize(
    ("offset", "value", "named"),
    [
        (layout.RingRoot.first.offset, CAPACITY, "from slot 5 on"),
        (layout.RingRoot.count.offset, CAPACITY + 1, "6 messages"),
        (layout.RingRoot.pushed.offset, 9, "expected 7"),
        (ROOT + layout.RingSlot.stamp.offset, 5, "slot 0 holds message 5, expected 0"),
        (ROOT + layout.RingSlot.length.offset, 1 << 31, "has 2147483648 bytes"),
    ],
)
def test_a_damaged_ring_is_an_error_not_a_signal(ring, offset, value, named):
    ring.push(b"one")
    ring.push(b"two")
    corrupt(ring.segment, offset, value)
    refused(errors.CacheCorrupted, named, ring.check)
    refused(errors.CacheCorrupted, "", ring.pop)
    refused(errors.CacheCorrupted, "", ring.pop_many, 2)


def test_a_second_message_that_is_damaged_takes_nothing_out(ring):
    ring.push(b"one")
    ring.push(b"two")
    corrupt(ring.segment, ROOT + SLOT, 7)
    refused(errors.CacheCorrupted, "pop from", ring.pop_many, 2)
    assert len(ring) == 2
    assert ring.pop() == b"one"
