"""`restore` and `offload` of a connector: for those who hold leases, reservations and shards
themselves, as a worker behind a scheduler does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.connecting import (  # noqa: E402
    cache,
    connector,
    held,
    llama,
    save,
    small_cache,
)
from support.refusals import refused  # noqa: E402
from support.tiny_models import answer, assert_same, kept, model, prompt  # noqa: E402

from lightcache import Cache, ConfigError, LeaseLost, TransferFailed  # noqa: E402
from lightcache.connectors import transformers as lct  # noqa: E402
from lightcache.reservations import ReservationShard  # noqa: E402

__all__ = ["cache", "connector", "llama"]

pytestmark = pytest.mark.models

PAGE = 16


def keys_of(cache: Cache, ids: Any) -> Any:
    return cache.hash_pages(ids[0].tolist())


class Gate:
    """Makes copies wait, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connector: lct.Connector) -> None:
        self.opened, self.error = threading.Event(), False
        for verb in ("offload", "load"):
            monkeypatch.setattr(connector.engine, verb, self.behind(verb, connector.engine))

    def behind(self, verb: str, engine: Any) -> Any:
        call = getattr(engine, verb)
        return lambda move, **how: call(move, **how, after=[self])

    def synchronize(self) -> None:
        assert self.opened.wait(60)
        if self.error:
            raise RuntimeError("the copy failed")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, connector: lct.Connector) -> Iterator[Gate]:
    made = Gate(monkeypatch, connector)
    yield made
    made.opened.set()


def computed(model: Any, ids: Any) -> Any:
    """A plain DynamicCache."""
    with torch.no_grad():
        return model(ids, use_cache=True).past_key_values


def test_a_worker_adopts_what_a_scheduler_gives(
    cache: Cache, connector: lct.Connector, llama: Any
) -> None:
    ids = prompt(70)
    save(connector, llama, ids[:, :40])
    keys = keys_of(cache, ids)
    with cache.match(keys[:4]) as hit, cache.reserve(keys, len(hit)) as new:
        me = [cache.client_id]
        with hit.ticket(me) as reading, new.ticket(me) as writing:
            past = connector.restore(cache.adopt(bytes(reading)))  # type: ignore[arg-type]
            assert past.reused == 32
            assert_same(answer(llama, ids, past), answer(llama, ids))
            shard = cache.adopt(bytes(writing), shard=0)
            assert isinstance(shard, ReservationShard)
            refused(ConfigError, "give positions=", connector.offload, past, shard)
            connector.offload(past, shard, positions=new.new).wait()
    assert cache.peek(keys) == 4


def test_growth_while_it_is_copied(
    cache: Cache, connector: lct.Connector, llama: Any, gate: Gate
) -> None:
    ids = prompt(48)
    past = computed(llama, ids)
    saved = kept(past, 48)
    tensors = [layer.keys.data_ptr() for layer in past.layers]
    offload = connector.offload(past, cache.reserve(keys_of(cache, ids)))
    with torch.no_grad():
        llama(prompt(5, 1), past_key_values=past)
    assert [layer.keys.data_ptr() for layer in past.layers] != tensors
    past.crop(-20)
    del past
    gc.collect()
    spoiled = [torch.full((1, 2, 48, 8), 7.0) for _ in range(64)]  # takes what was freed
    assert not offload.done()
    assert held(cache) == (3, 3)
    gate.opened.set()
    offload.wait()
    assert offload.ready is True
    restored = connector.restore(cache.match(keys_of(cache, ids)))
    assert all(torch.equal(a, b) for a, b in zip(kept(restored, 48), saved, strict=True))
    assert spoiled


def test_reset_while_it_is_copied(
    cache: Cache, connector: lct.Connector, llama: Any, gate: Gate
) -> None:
    ids = prompt(32)
    past = lct.PrefixCache(llama.config)
    with torch.no_grad():
        llama(ids, past_key_values=past)
    saved = kept(past, 32)
    offload = connector.offload(past, cache.reserve(keys_of(cache, ids)))
    past.reset()
    gate.opened.set()
    offload.wait()
    restored = connector.restore(cache.match(keys_of(cache, ids)))
    assert all(torch.equal(a, b) for a, b in zip(kept(restored, 32), saved, strict=True))


@pytest.mark.parametrize("call", ["restore", "offload"])
def test_the_next_call_publishes(
    cache: Cache, connector: lct.Connector, llama: Any, gate: Gate, call: str
) -> None:
    ids = prompt(32)
    offload = connector.offload(computed(llama, ids), cache.reserve(keys_of(cache, ids)))
    gate.opened.set()
    offload.transfer.wait_on()
    assert offload.ready is None
    if call == "restore":
        connector.restore(cache.match(keys_of(cache, prompt(32, 1))))
    else:
        connector.offload(None, cache.reserve(keys_of(cache, ids)[:0]))
    assert offload.ready is True


def test_closing_publishes(cache: Cache, llama: Any) -> None:
    ids = prompt(32)
    with lct.Connector(cache, llama) as connector:
        offload = connector.offload(computed(llama, ids), cache.reserve(keys_of(cache, ids)))
    assert offload.ready is True


def test_a_dropped_offload_is_aborted(
    cache: Cache, connector: lct.Connector, llama: Any, gate: Gate
) -> None:
    ids = prompt(32)
    connector.offload(computed(llama, ids), cache.reserve(keys_of(cache, ids)))
    gc.collect()
    assert cache.stats().writing == 0
    gate.opened.set()
    while connector.engine.poll():
        pass
    assert cache.peek(keys_of(cache, ids)) == 0


def test_copies_that_fail(cache: Cache, connector: lct.Connector, llama: Any, gate: Gate) -> None:
    ids = prompt(40)
    gate.opened.set()
    save(connector, llama, ids)
    gate.error = True
    with pytest.raises(TransferFailed), connector.prefix(ids):
        pytest.fail("entered")
    assert held(cache) == (0, 0)
    refused(TransferFailed, "", save, connector, llama, prompt(40, 1))
    gc.collect()
    assert held(cache) == (0, 0)
    assert cache.stats().ready == 2
    gate.error = False
    save(connector, llama, prompt(40, 1))
    assert cache.stats().ready == 4


def test_restored_pages_are_held_until_they_are_copied(
    cache: Cache, connector: lct.Connector, llama: Any, gate: Gate
) -> None:
    ids = prompt(40)
    gate.opened.set()
    save(connector, llama, ids)
    gate.opened.clear()
    lease, found = cache.match(keys_of(cache, ids)), []
    reader = threading.Thread(target=lambda: found.append(connector.restore(lease)))
    reader.start()
    while not lease.ended:
        assert reader.is_alive()
    assert held(cache)[0] == 2
    assert cache.evict(8) == 0
    gate.opened.set()
    reader.join()
    assert found[0].reused == 32
    assert held(cache) == (0, 0)


def test_nothing_to_restore_or_to_save(cache: Cache, connector: lct.Connector) -> None:
    keys = keys_of(cache, prompt(32))
    lease = cache.match(keys)
    past = connector.restore(lease)
    assert (past.reused, past.held) == (0, 0)
    refused(LeaseLost, "", lease.release)
    offload = connector.offload(past, cache.reserve(keys[:0]))
    offload.wait()
    assert offload.ready is True


def test_a_restored_cache_knows_no_tokens(
    cache: Cache, connector: lct.Connector, llama: Any
) -> None:
    save(connector, llama, prompt(40))
    past = connector.restore(cache.match(keys_of(cache, prompt(40))))
    assert len(past.tokens) == 0
    past.crop(-8)
    past.reset()
    refused(ConfigError, "extend: expected a cache made by `prefix`", past.extend, [1])


def test_what_has_ended_or_is_none(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    ids = prompt(32)
    past = computed(llama, ids)
    refused(ConfigError, "lease: expected a Lease, found NoneType", connector.restore, None)
    with pytest.raises(ConfigError, match="held: expected a Reservation or ReservationShard"):
        connector.offload(past, cache.match(keys_of(cache, ids)))  # type: ignore[arg-type]
    lease, new = cache.match(keys_of(cache, ids)), cache.reserve(keys_of(cache, ids))
    lease.release()
    new.release()
    refused(LeaseLost, "", connector.restore, lease)
    refused(LeaseLost, "", connector.offload, past, new)


def test_pages_of_another_cache(
    cache: Cache, connector: lct.Connector, llama: Any, segment_name: str
) -> None:
    ids = prompt(32)
    with small_cache(f"{segment_name}-other", llama) as other:
        keys = keys_of(other, ids)
        with pytest.raises(ConfigError, match=r"as this connector's .* found those of .*-other"):
            connector.restore(other.match(keys))
        with other.reserve(keys) as new, pytest.raises(ConfigError, match="-other"):
            connector.offload(computed(llama, ids), new)


def doubled(past: Any) -> Any:
    past.batch_repeat_interleave(2)
    return past


def cut(past: Any) -> Any:
    past.crop(-1)
    return past


def halved(past: Any) -> Any:
    past.layers[1].keys = past.layers[1].keys.to(torch.bfloat16)
    return past


def static(past: Any) -> Any:
    found = transformers.StaticCache(config=model().config, max_cache_len=64)
    for number, layer in enumerate(past.layers):
        found.update(layer.keys, layer.values, number)
    return found


def sliding(past: Any) -> Any:
    config = model("Mistral", sliding_window=64).config
    found = transformers.DynamicCache(config=config)
    for number, layer in enumerate(past.layers):
        found.update(layer.keys, layer.values, number)
    return found


def shorter(past: Any) -> Any:
    del past.layers[1]
    return past


BAD = {
    "nothing": (lambda past: None, "past: expected a DynamicCache, found NoneType"),
    "a tuple": (lambda past: tuple(past.layers), "expected a DynamicCache, found tuple"),
    "static": (static, "expected a DynamicCache, found StaticCache"),
    "sliding": (sliding, "found 0 among 2 of DynamicSlidingWindowLayer"),
    "rows": (doubled, "a batch of one row, found 2"),
    "too short": (cut, "the pages at positions 0 to 1 hold tokens 0 to 31, found 31 slots"),
    "another dtype": (halved, "expected torch.float32, .* found torch.bfloat16 in layer 1"),
    "fewer layers": (shorter, "expected 2 layers that keep every token, found 1"),
    "empty": (lambda past: transformers.DynamicCache(config=model().config), "prefill first"),
    "another shape": (lambda past: computed(model(num_key_value_heads=4), prompt(32)), "heads"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_caches(cache: Cache, connector: lct.Connector, llama: Any, kind: str) -> None:
    change, message = BAD[kind]
    ids = prompt(32)
    past = change(computed(llama, ids))
    with cache.reserve(keys_of(cache, ids)) as new:
        refused(ConfigError, message, connector.offload, past, new)
        assert held(cache) == (2, 2), "still the caller's"
        connector.offload(computed(llama, ids), new).wait()
    assert cache.peek(keys_of(cache, ids)) == 2


# ---- loading behind what a cache holds


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("before", [0, 16, 32])
def test_pages_behind_what_is_there(
    cache: Cache, connector: lct.Connector, llama: Any, before: int, window: int | None
) -> None:
    ids = prompt(70)
    save(connector, llama, ids)
    keys, past = keys_of(cache, ids), connector.empty()
    if before:
        with torch.no_grad():
            llama(ids[:, :before], past_key_values=past)
    load = connector.load(past, cache.match(keys[before // PAGE :]), window=window)
    if window is None:
        load.wait()
    assert (past.held, past.reused) == (64, 64 - before)
    assert_same(answer(llama, ids, past), answer(llama, ids))
    while connector.engine.poll():
        pass
    assert held(cache) == (0, 0)


def test_loads_one_behind_the_other(
    cache: Cache, connector: lct.Connector, llama: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the layers of the first before it moves their tensors."""
    ids = prompt(70)
    gate.opened.set()
    save(connector, llama, ids)
    gate.opened.clear()
    keys, past = keys_of(cache, ids), connector.empty()
    connector.load(past, cache.match(keys[:1]), window=1)
    settle = past.settle

    def waits() -> None:
        gate.opened.set()  # nothing arrives before somebody waits for it
        settle()

    monkeypatch.setattr(past, "settle", waits)
    connector.load(past, cache.match(keys[1:]), window=1)
    assert_same(answer(llama, ids, past), answer(llama, ids))
    while connector.engine.poll():
        pass
    assert held(cache) == (0, 0)


def test_a_load_that_is_refused_leaves_the_cache_as_it_was(
    cache: Cache, connector: lct.Connector, llama: Any
) -> None:
    ids = prompt(40)
    save(connector, llama, ids)
    past = connector.empty()
    with torch.no_grad():
        llama(ids[:, :PAGE], past_key_values=past)
    with cache.match(keys_of(cache, ids)[1:]) as lease, pytest.raises(ConfigError):
        connector.load(past, lease, window=0)
    assert (past.held, past.reused) == (PAGE, 0)
    assert_same(answer(llama, ids, past), answer(llama, ids))
    plain, before = computed(llama, ids), past.held
    said = "past: expected a PrefixCache, found DynamicCache"
    with cache.match(keys_of(cache, ids)) as lease, pytest.raises(ConfigError, match=said):
        connector.load(plain, lease)
    connector.load(past, cache.match(keys_of(cache, ids)[:0])).wait()
    assert past.held == before
    assert held(cache) == (0, 0)
