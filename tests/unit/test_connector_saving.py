"""What leaving a `prefix` saves and what it does not, and that nothing is held afterwards."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.connecting import (  # noqa: E402
    SECRET,
    cache,
    connector,
    held,
    llama,
    ready,
    save,
)
from support.refusals import refused  # noqa: E402
from support.tiny_models import answer, assert_same, kept, prompt  # noqa: E402

from lightcache import Cache, Changes, ConfigError, Detached, InUse  # noqa: E402
from lightcache.connectors import transformers as lct  # noqa: E402
from lightcache.shm import Segment  # noqa: E402
from lightcache.shm.listing import read_segment  # noqa: E402

__all__ = ["cache", "connector", "llama"]

pytestmark = pytest.mark.models

PAGE = 16


# ---- what is saved


def test_what_was_generated(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    ids = prompt(20)
    with connector.prefix(ids) as past:
        out = answer(llama, ids, past, steps=30).tokens
        assert past.tokens.tolist() == ids[0].tolist()
        past.extend(out[:, 20:])
        assert past.tokens.tolist() == out[0, :49].tolist(), "the last one was never computed"
    assert cache.stats().ready == 3
    longer = torch.cat([out, prompt(7)], dim=1)
    with connector.prefix(longer) as past:
        assert past.reused == 48
        assert_same(answer(llama, longer, past), answer(llama, longer))


def test_token_ids_are_noted_without_a_salt(segment_name: str, llama: Any) -> None:
    how: dict[str, Any] = {"pages": 8, "secret": SECRET, "lifetime": "attached", "token_ids": True}
    with (
        lct.open_cache(llama, name=segment_name, **how) as cache,
        lct.Connector(cache, llama) as it,
    ):
        ids = prompt(40)
        for salt in ("", "a"):
            with it.prefix(ids, salt=salt) as past:
                answer(llama, ids, past, steps=1)
        (batch,) = Changes(cache.index).scan()
        assert cache.token_records is not None
        rows, known = cache.token_records.read(batch.stored_pages, batch.stored)
        assert sorted(rows[known].tolist()) == sorted(ids[0, :32].reshape(2, PAGE).tolist())
        assert len(known) == 4


def test_a_conversation_in_one_cache(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    ids = prompt(20)
    with connector.prefix(ids) as past:
        out = answer(llama, ids, past).tokens
        past.extend(out[0, 20:-1].tolist())
        second = torch.cat([out, prompt(10, 1)], dim=1)
        again = answer(llama, second, past)
        past.extend(again.tokens[0, 31:].numpy())
    assert_same(again, answer(llama, second))
    assert ready(cache, again.tokens) == (20 + 12 + 10 + 12 - 1) // PAGE


def test_speculated_tokens_that_were_rejected(
    cache: Cache, connector: lct.Connector, llama: Any
) -> None:
    """Assisted generation crops what it has rejected: never known tokens."""
    ids = torch.cat([prompt(10), prompt(10), prompt(10)], dim=1)
    with connector.prefix(ids) as past:
        found = answer(llama, ids, past, steps=30, prompt_lookup_num_tokens=3).tokens
        past.extend(found[:, 30:])
    assert torch.equal(found, answer(llama, ids, steps=30).tokens)
    assert ready(cache, found) == 3
    assert_restored(connector, llama, found)


def assert_restored(connector: lct.Connector, model: Any, ids: Any) -> None:
    """What is restored of these tokens is what the model computes for them."""
    expected = model(ids, use_cache=True).past_key_values
    with connector.prefix(ids) as past:
        assert past.reused
        for a, b in zip(kept(past, 999), kept(expected, past.reused), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_cropped_below_the_prompt(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    ids, other = prompt(60), prompt(60, 1)
    with connector.prefix(ids) as past:
        answer(llama, ids, past, steps=1)
        past.crop(-(past.held - 40))
        assert past.tokens.tolist() == ids[0, :40].tolist()
        answer(llama, torch.cat([ids[:, :40], other[:, :20]], dim=1), past, steps=1)
        refused(ConfigError, "extend: this cache was cropped to 40", past.extend, [1])
    assert cache.stats().ready == 2, "what was computed behind the crop is of other tokens"
    assert ready(cache, ids) == 2
    assert_restored(connector, llama, ids)


def test_reset_and_used_for_something_else(
    cache: Cache, connector: lct.Connector, llama: Any
) -> None:
    save(connector, llama, prompt(40))
    for length in (40, 60):
        with connector.prefix(prompt(length)) as past:
            past.reset()
            assert past.held == 0
            answer(llama, prompt(60, 1), past, steps=1)
    assert cache.stats().ready == 2
    with connector.prefix(prompt(40)) as past:
        past.crop(-0)
        answer(llama, prompt(40), past, steps=12)
        past.extend([])
    assert cache.stats().ready == 2


def test_only_what_was_computed(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    ids = prompt(60)
    with connector.prefix(ids) as past:
        llama(ids[:, :35], past_key_values=past)
    assert ready(cache, ids) == 2
    with connector.prefix(ids) as past:
        assert past.reused == 32
    with connector.prefix(prompt(60, 1)):
        pass
    assert cache.stats().ready == 2


def test_nothing_is_saved_twice(
    cache: Cache, connector: lct.Connector, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(60)
    save(connector, llama, ids[:, :40])
    moved: list[int] = []
    offload = connector.offload

    def counted(past: Any, new: Any) -> Any:
        moved.append(len(new.new))
        return offload(past, new)

    monkeypatch.setattr(connector, "offload", counted)
    save(connector, llama, ids)
    save(connector, llama, ids)
    save(connector, llama, ids[:, :50])
    save(connector, llama, ids[:, :48])
    assert moved == [1], "the last page is computed again, and stored already"


def test_evicted_while_the_model_computed(
    cache: Cache, connector: lct.Connector, llama: Any
) -> None:
    """What was restored is written again, rather than leaving a hole in front of what is new."""
    ids = prompt(60)
    save(connector, llama, ids[:, :40])
    with connector.prefix(ids) as past:
        assert past.reused == 32
        answer(llama, ids, past, steps=1)
        assert cache.evict(32) == 2
    assert ready(cache, ids) == 3
    assert_restored(connector, llama, ids)


def test_another_writes_the_same(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    ids = prompt(70)
    with Cache.attach(cache.name, secret=SECRET) as second:
        keys = second.hash_pages(ids[0].tolist())
        with second.reserve(keys[:2]) as busy:
            assert len(busy.new) == 2
            save(connector, llama, ids)
            assert cache.peek(keys) == 0, "waits for nobody, and matches nothing that is written"
            assert cache.stats().ready == 2, "saves the rest"
            busy.publish()
        assert second.peek(keys) == 4


def test_no_room(segment_name: str, llama: Any) -> None:
    with lct.open_cache(
        llama, name=segment_name, pages=3, secret=SECRET, lifetime="attached"
    ) as cache:
        with lct.Connector(cache, llama) as connector:
            ids = prompt(100)
            save(connector, llama, ids)
            assert ready(cache, ids) == 3, "what fits"
            with cache.match(cache.hash_pages(ids[0].tolist())):
                save(connector, llama, prompt(100, 1))
            assert ready(cache, prompt(100, 1)) == 0
            assert ready(cache, ids) == 3
        assert held(cache) == (0, 0)


def test_salts_and_namespaces_keep_apart(
    cache: Cache, connector: lct.Connector, llama: Any
) -> None:
    ids = prompt(40)
    space = cache.namespace("v2", "tenant")
    ways: list[dict[str, Any]] = [
        {},
        {"salt": "a"},
        {"salt": b"b"},
        {"namespace": space},
        {"namespace": space, "salt": "a"},
    ]
    for reused in (0, 32):
        for way in ways:
            with connector.prefix(ids, **way) as past:
                assert past.reused == reused
                answer(llama, ids, past, steps=1)
    assert cache.stats().ready == 2 * len(ways)


def test_a_namespace_that_is_cleared_meanwhile(
    cache: Cache, connector: lct.Connector, llama: Any
) -> None:
    space = cache.namespace("v2")
    with connector.prefix(prompt(40), namespace=space) as past:
        answer(llama, prompt(40), past, steps=1)
        cache.clear(space)
    assert cache.stats().ready == 0


# ---- errors


class Stop(Exception):
    """Out of the `with`."""


def test_an_exception_saves_nothing(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    save(connector, llama, prompt(40))
    with contextlib.suppress(Stop), connector.prefix(prompt(70)) as past:
        assert past.reused == 32
        answer(llama, prompt(70), past, steps=1)
        raise Stop
    assert cache.stats().ready == 2
    with pytest.raises(Stop), lct.prefix(cache, llama, prompt(70)):
        raise Stop
    assert held(cache) == (0, 0)


@pytest.mark.parametrize("where", ["allocate", "planes_of", "Load", "Offload"])
def test_an_error_on_the_way_leaks_nothing(
    cache: Cache, connector: lct.Connector, llama: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(connector, llama, prompt(40))

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError(where)

    with monkeypatch.context() as patch:
        patch.setattr(lct.PrefixCache if where == "allocate" else lct, where, broken)
        refused(MemoryError, where, save, connector, llama, prompt(70))
    gc.collect()
    assert held(cache) == (0, 0)
    assert cache.stats().ready == 2
    save(connector, llama, prompt(70))
    assert cache.stats().ready == 4


def test_rows_are_refused(cache: Cache, connector: lct.Connector, llama: Any) -> None:
    ids = prompt(40)
    for turn in range(2):
        with pytest.raises(ConfigError, match=r"a batch of one row, found 3; .* no beams"):
            with connector.prefix(ids) as past:
                answer(llama, ids, past, num_beams=3)
        with pytest.raises(ConfigError, match="a batch of one row, found 2"):
            with connector.prefix(ids) as past:
                past.batch_repeat_interleave(2)
        assert cache.stats().ready == 2 * turn
        save(connector, llama, ids)


def test_closed_in_order(cache: Cache, llama: Any) -> None:
    connector = lct.Connector(cache, llama)
    save(connector, llama, prompt(40))
    refused(InUse, "", cache.close)
    connector.close()
    connector.close()
    for call in (
        lambda: connector.prefix(prompt(4)).__enter__(),
        lambda: connector.restore(cache.match(cache.hash_pages(prompt(4)[0].tolist()))),
        lambda: connector.offload(None, cache.reserve(cache.hash_pages([1] * PAGE))),
    ):
        refused(Detached, "connector is closed", call)


# ---- how long caches last


def test_caches_stay_for_the_next_process_unless_said_otherwise(
    segment_name: str, llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(40)
    for reused in (0, 32):
        with lct.open_cache(llama, name=segment_name, pages=8, secret=SECRET) as cache:
            with lct.Connector(cache, llama) as connector, connector.prefix(ids) as past:
                answer(llama, ids, past)
        assert past.reused == reused
    assert [f"`lightcache rm {segment_name}`" in line for line in caplog.messages] == [True] * 2
    header = read_segment(segment_name)
    assert header is not None
    assert header.lifetime == "persistent"
    assert Segment.unlink(segment_name)
    with lct.open_cache(llama, name=segment_name, pages=8, secret=SECRET, lifetime="attached"):
        pass
    assert read_segment(segment_name) is None
    with lct.open_cache(llama, name=segment_name, pages=8, secret=SECRET, idle_limit=None) as cache:
        assert cache.index.segment.header().idle_ns == 0
    assert Segment.unlink(segment_name)
    with pytest.raises(ConfigError, match="idle_limit"):
        lct.open_cache(llama, name=segment_name, pages=8, lifetime="attached", idle_limit=5)


def test_each_request_is_a_use(
    connector: lct.Connector, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = connector.cache.index.segment
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10**15)
    before = segment.header().used_ns
    with connector.prefix(prompt(40)) as past:
        entered = segment.header().used_ns
        answer(llama, prompt(40), past)
    assert before < entered < segment.header().used_ns
