"""Handoff of a computed prefix from one engine to another, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.manager_world import Engine, open_cache
from support.stamped import TOKEN_BYTES

from lightcache import Cache
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    LeaseLost,
    OutOfPages,
    TransferFailed,
    WaitTimeout,
)
from lightcache.manager import MultimodalItem, Prompt, RequestOptions, WritePolicy
from lightcache.manager.handoff import KVHandoff, hand_off, receive

PAGE = 8


class Node:
    """A prefill engine and a decode engine on one host cache."""

    def __init__(self, name: str, *, owned: bool = True, block: int = 4, **config: Any) -> None:
        self.cache = open_cache(name, 16, PAGE)
        how: dict[str, Any] = {"blocks": 32, "page": PAGE, "pages": 16, "cache": self.cache}
        self.prefill = Engine(f"{name}.p", owned=True, block=block, **how, **config)
        self.decode = Engine(f"{name}.d", owned=owned, block=block, **how)
        self.sides = [self.cache.client_id]

    def compute(self, prompt: Prompt, total: int | None = None) -> None:
        """The prefill side runs request 1."""
        assert self.prefill.begin(1, prompt)
        while self.prefill.running[1].computed < (total or len(prompt)):
            assert self.prefill.compute(1, 3, [])

    def hand(self, **how: Any) -> KVHandoff:
        return hand_off(self.prefill.manager, 1, self.sides, **how)

    def receive(self, prompt: Prompt, handed: KVHandoff | bytes, **how: Any) -> Any:
        """The decode side takes it over as request 2; checks what it has on its device."""
        found = receive(self.decode.manager, 2, prompt, handed, **how)
        self.check(prompt, found)
        return found

    def check(self, prompt: Prompt, found: Any) -> None:
        table = self.decode.manager.state.requests[2].table
        stamps = self.decode.stamps(prompt)[: found.tokens]
        assert (self.decode.store.read(table, 0, found.tokens) == stamps).all()

    def settle(self) -> None:
        """Nothing of it is left."""
        for manager in (self.prefill.manager, self.decode.manager):
            for request in list(manager.state.requests):
                manager.release(request)
        self.prefill.running.clear()
        for engine in (self.prefill, self.decode):
            engine.settle()
        assert self.cache.check().pins == 0
        assert self.cache.stats().tickets == 0

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.cache.close()


@pytest.fixture
def nodes(segment_name: str) -> Iterator[Any]:
    made: list[Node] = []

    def make(**how: Any) -> Node:
        made.append(Node(f"{segment_name}{len(made)}", **how))
        return made[-1]

    yield make
    for node in made:
        node.close()


def prompt(n: int, seed: int = 0, **how: Any) -> Prompt:
    return Prompt(np.random.default_rng(seed).integers(0, 1000, n), **how)


def longer(given: Prompt, n: int = 1) -> Prompt:
    """With the first tokens of the answer."""
    return Prompt(np.concatenate([given.tokens, np.arange(n)]), salt=given.salt, items=given.items)


@pytest.mark.parametrize("block", [2, 4, 8, 16])
@pytest.mark.parametrize("n", [5, 8, 16, 21, 23])
def test_everything_arrives(nodes: Any, block: int, n: int) -> None:
    node, given = nodes(block=block), prompt(n)
    node.compute(given)
    handed = node.hand()
    assert (handed.tokens, handed.partial) == (n // PAGE * PAGE, n % PAGE)
    found = node.receive(longer(given), bytes(handed))
    assert found.done()
    assert found.tokens == n
    assert not found.failed
    node.settle()


def test_of_the_partial_page_its_tokens_are_counted(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    assert node.receive(longer(given), node.hand()).tokens == 21
    sent, received = node.prefill.manager.stats(), node.decode.manager.stats()
    assert (sent.offloaded_pages, sent.offloaded_bytes) == (3, 21 * TOKEN_BYTES)
    assert (received.loaded_pages, received.loaded_bytes) == (3, 21 * TOKEN_BYTES)
    node.settle()


@pytest.mark.parametrize("write", list(WritePolicy))
def test_whatever_the_write_policy(nodes: Any, write: WritePolicy) -> None:
    node, given = nodes(write=write), prompt(21)
    node.compute(given)
    assert node.receive(longer(given), node.hand()).tokens == 21
    node.settle()


def test_the_prefill_side_keeps_nothing(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    handed = node.hand()
    assert node.cache.stats().held == 0
    node.prefill.end(1, publish=True)
    assert node.receive(longer(given), handed).tokens == 21
    node.settle()


def test_the_last_token_is_computed_again(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    assert node.receive(given, node.hand()).tokens == 20
    node.settle()


def test_generated_tokens_too(nodes: Any) -> None:
    node, given = nodes(), prompt(10)
    node.compute(given)
    assert node.prefill.compute(1, 11, list(range(11)))
    handed = node.hand()
    assert (handed.tokens, handed.partial) == (16, 5)
    assert node.receive(longer(given, 12), handed).tokens == 21
    node.settle()


def test_an_attached_device(nodes: Any) -> None:
    node, given = nodes(owned=False), prompt(21)
    node.compute(given)
    handed = node.hand()
    table = np.array([7, 3, 9, 1, 12, 20], np.int32)
    found = node.receive(longer(given), handed, table=table, device_tokens=0)
    assert found.tokens == 21
    node.settle()


def test_it_waits_for_pages_that_are_being_written(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, given = nodes(write=WritePolicy.BACK), prompt(21)
    node.compute(given)
    backend = node.prefill.backend
    backend.at_once = False
    save = backend.save

    def at_once(*what: Any) -> Any:
        moving = save(*what)
        pages = backend.going.popleft()
        backend.finish()
        backend.going.append(pages)
        return moving

    monkeypatch.setattr(backend, "save", at_once)
    handed = node.hand()
    assert node.cache.stats().writing == 2
    wait = Cache.wait

    def meanwhile(cache: Cache, *what: Any, **how: Any) -> int:
        backend.finish()
        node.prefill.manager.poll()
        return wait(cache, *what, **how)

    monkeypatch.setattr(Cache, "wait", meanwhile)
    assert node.receive(longer(given), handed).tokens == 21
    node.settle()


def test_pages_that_do_not_come_are_computed(nodes: Any) -> None:
    node, given = nodes(write=WritePolicy.BACK), prompt(16)
    node.compute(given)
    node.prefill.backend.at_once = False
    handed = node.hand()
    found = node.receive(longer(given), handed, timeout=0)
    assert found.done()
    assert found.tokens == 0
    node.settle()


def test_pages_that_were_evicted_meanwhile(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    handed = node.hand()
    node.cache.evict(2)
    assert node.receive(longer(given), handed).tokens == 0
    node.settle()


def test_no_room_for_the_partial_page(nodes: Any) -> None:
    node, given = nodes(write=WritePolicy.BACK), prompt(21)
    node.compute(given)
    node.prefill.backend.at_once = False
    with node.cache.index.allocate(14):
        handed = node.hand()
        assert (handed.tokens, handed.partial, handed.ticket) == (16, 0, None)
    node.prefill.backend.finish()
    assert node.receive(longer(given), handed).tokens == 16
    node.settle()


def test_the_copy_of_the_partial_page_fails(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    node.prefill.backend.fail_next = 1
    handed = node.hand()
    assert handed == KVHandoff(16)
    assert node.prefill.manager.stats().failed_offloads == 1
    assert node.cache.stats().held == 0
    node.settle()


def test_the_copy_of_the_partial_page_takes_too_long(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    node.prefill.backend.at_once = False
    with pytest.raises(WaitTimeout):
        node.hand(timeout=0)
    assert node.cache.stats().held == 1  # it is in flight
    node.prefill.backend.finish()
    node.prefill.manager.poll()
    assert node.cache.stats().held == 0
    node.settle()


@pytest.mark.parametrize("which", [0, 1])
def test_a_load_fails(nodes: Any, which: int) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    handed = node.hand()
    backend = node.decode.backend
    backend.at_once = False
    found = receive(node.decode.manager, 2, longer(given), handed)
    assert not found.done()
    assert found.tokens == 21
    if which == 0:
        backend.fail_next = 1
        backend.finish(1)
        assert not found.done()  # the other one writes its block still
    else:
        backend.finish(1)
        backend.fail_next = 1
    backend.finish()
    with pytest.raises(TransferFailed):
        found.wait(0)
    assert found.failed
    assert found.tokens == (0, 16)[which]
    node.check(given, found)
    node.settle()


@pytest.mark.parametrize(
    ("other", "tokens"),
    [
        (prompt(22, 1), 0),
        (longer(prompt(21, salt="x")), 0),
        (longer(prompt(20)), 16),
        (longer(prompt(18), 9), 16),
        (longer(prompt(21), 9), 21),
    ],
)
def test_another_prompt_does_not_get_the_partial_page(
    nodes: Any, other: Prompt, tokens: int
) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    assert node.receive(other, node.hand()).tokens == tokens
    node.settle()


def test_other_items_do_not_get_the_partial_page(nodes: Any) -> None:
    node, given = nodes(), prompt(21, items=[MultimodalItem(17, 19, b"image")])
    node.compute(given)
    handed = node.hand()
    other = Prompt(longer(given).tokens, items=[MultimodalItem(17, 19, b"other")])
    assert node.receive(other, handed).tokens == 16
    node.settle()


def test_other_weights_get_nothing(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    handed = node.hand()
    node.decode.manager.begin_update()
    node.decode.manager.finish_update("2")
    found = receive(node.decode.manager, 2, longer(given), handed)
    assert found.tokens == 0
    assert node.prefill.manager.weights_state.value != "normal"
    assert node.hand() == KVHandoff(0)
    node.prefill.manager.release(1)
    for index in (node.prefill.device.index, node.decode.device.index):
        index.evict(1)  # collects what was cleared
    node.settle()


def test_out_of_blocks_leaves_nothing(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    handed = node.hand()
    held = node.decode.device.index.allocate(30)
    with pytest.raises(OutOfPages):
        receive(node.decode.manager, 2, longer(given), handed)
    assert not node.decode.manager.state.requests
    assert node.cache.check().pins == 0
    held.free()
    node.settle()


def test_a_request_that_runs_already(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    handed = node.hand()
    node.receive(longer(given), handed)
    with pytest.raises(ConfigError, match="runs already"):
        receive(node.decode.manager, 2, longer(given), handed)
    node.check(given, receive(node.decode.manager, 3, longer(given), KVHandoff(16)))
    node.settle()


def test_a_table_that_is_too_short(nodes: Any) -> None:
    node, given = nodes(owned=False), prompt(21)
    node.compute(given)
    with pytest.raises(ConfigError, match="expected blocks"):
        receive(
            node.decode.manager, 2, longer(given), node.hand(), np.zeros(1, np.int32),
            device_tokens=0,
        )  # fmt: skip
    node.settle()


def test_what_is_refused(nodes: Any) -> None:
    node = nodes()
    with pytest.raises(LeaseLost):
        node.hand()
    for wrong in (b"", bytes(3), bytes(len(bytes(KVHandoff(0))))):
        with pytest.raises(CacheCorrupted, match="hand-off"):
            KVHandoff.parse(wrong)
    manager = node.prefill.manager
    manager.plan(1, prompt(9), options=RequestOptions(write=False))
    manager.take(1)
    with pytest.raises(ConfigError, match="write=False"):
        node.hand()
    with pytest.raises(ConfigError, match="rest of a page"):
        receive(manager, 3, prompt(9), KVHandoff(3))


def test_an_adopter_that_is_not_attached(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    node.sides = [type(node.sides[0])(60, 1)]
    with pytest.raises(LeaseLost, match="has left or died"):
        node.hand()
    assert node.cache.stats().held == 0
    node.settle()


def test_a_partial_page_that_no_engine_adopts(nodes: Any) -> None:
    node, given = nodes(), prompt(21)
    node.compute(given)
    handed = node.hand(adopt_timeout=0)
    assert node.receive(longer(given), handed).tokens == 16
    node.settle()


def test_travelling() -> None:
    whole = KVHandoff(64, 3, bytes(range(16)), bytes(16))
    assert KVHandoff.parse(bytes(whole)) == whole
    assert KVHandoff.parse(bytes(KVHandoff(64))) == KVHandoff(64)
