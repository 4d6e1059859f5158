"""HybridManager: what is found, saved, shared and given back of layers that see a window or a
chunk, by a toy model whose every answer depends on every row that it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.window_engine import AtOnce, LateBackend, WindowEngine, uncached

from lightcache import Router
from lightcache.errors import ConfigError, LeaseLost, NotReady, OutOfPages
from lightcache.group_index import GroupIndex
from lightcache.groups import GroupSet, Rule
from lightcache.hybrid import HybridManager, WindowBlocks
from lightcache.hybrid.checkpoints import Tier
from lightcache.hybrid.windows import GroupHits
from lightcache.manager import (
    KVCacheManager,
    ManagedBlocks,
    MirroredBlocks,
    NullBackend,
    Prompt,
    RequestOptions,
)
from lightcache.manager.stats import TierCapacity
from lightcache.runs import Run

WINDOW = Rule.window(11)
CHUNK = Rule.chunk(24)
NEVER = 1 << 20  # for `every`
STEM = [i * 7 % 50 + 1 for i in range(60)]
Make = Callable[..., WindowEngine]


@pytest.fixture
def engines(segment_name: str) -> Iterator[Make]:
    """Makes engines, by default of one window, blocks of 4 tokens and pages of 8."""
    made: list[WindowEngine] = []

    def make(*rules: Rule, **how: Any) -> WindowEngine:
        made.append(WindowEngine(f"{segment_name}.{len(made)}", rules or (WINDOW,), **how))
        return made[-1]

    yield make
    for engine in made:
        for request in list(engine.running):
            engine.end(request, publish=False)
        engine.settle()
        engine.nothing_left()
        engine.close()


class Counting(AtOnce):
    """Counts the host pages that are read and written."""

    loaded = written = 0

    def load(self, lease: Any, slots: Any, first: int) -> Any:
        """See `TransferBackend`."""
        self.loaded += len(lease)
        return super().load(lease, slots, first)

    def offload(self, new: Any, slots: Any) -> Any:
        """See `TransferBackend`."""
        self.written += len(new.pages)
        return super().offload(new, slots)


def raising(*_: Any, **__: Any) -> Any:
    """A cache that does not answer."""
    raise NotReady("arranged")


def pinned(engine: WindowEngine) -> list[int]:
    """Pages that plans hold, in each index of windows and on the host."""
    indexes = [*(window.index for window in engine.windows), engine.host.index]
    return [index.plans.pages for index in indexes]


# ---- what is found, saved and loaded


def test_host_pages_of_a_window_are_saved_and_loaded_and_no_others(engines: Make) -> None:
    engine = engines(WINDOW, CHUNK, wrap=Counting, every=NEVER)
    kv, window, chunk = engine.backends
    first = engine.run(STEM, 0)
    engine.settle()
    # Two parts a page. The prompt ends at 56: pages of tokens 40 to 56, and of 48 to 56.
    assert (kv.written, window.written, chunk.written) == (7, 4, 2)
    engine.forget_device()
    again = engine.run(STEM, 3)
    assert (again.match.usable, again.match.limit) == (56, None)
    assert set(again.match.tiers.values()) == {Tier.HOST}
    assert (kv.loaded, window.loaded, chunk.loaded) == (7, 4, 2)
    assert again.tokens[:60] == first.tokens[:60]
    stats = engine.manage.window_stats()
    assert (stats.requests, stats.host_hits, stats.loads, stats.usable_tokens) == (2, 2, 2, 56)


def test_a_chunk_that_begins_at_the_position_needs_nothing(engines: Make) -> None:
    engine = engines(CHUNK, every=NEVER)
    engine.run(STEM[:50], 0)  # ends at 48: a chunk begins there
    engine.settle()
    engine.forget_device()
    match = engine.run(STEM[:50], 2).match
    assert (match.usable, match.tiers, match.limit) == (48, {}, None)


def test_the_same_prompt_of_whole_pages_is_found(engines: Make) -> None:
    engine = engines(every=NEVER)
    engine.run(STEM[:56], 0)
    engine.settle()
    engine.forget_device()
    assert engine.run(STEM[:56], 0).match.usable == 48  # its last token is computed again
    engine.settle()
    engine.forget_device()
    assert engine.run(STEM, 0).match.usable == 56  # and a longer one begins at its end


def test_a_conversation_continues_where_the_answer_ended(engines: Make) -> None:
    engine = engines(every=NEVER)
    turn = engine.run(STEM, 20)
    engine.settle()
    engine.forget_device()
    assert engine.run([*turn.tokens, 1, 2], 2).match.usable == 80
    engine.settle()
    engine.forget_device()
    request = engine.begin(STEM[:30], 20)
    while engine.step(request):
        pass
    tokens = engine.end(request, publish=False).tokens  # an abort saves no more
    engine.settle()
    engine.forget_device()
    match = engine.run([*tokens, 1], 1).match
    assert (match.usable, match.limit) == (24, "prefix")


def test_positions_between_are_saved_every_so_many_tokens(engines: Make) -> None:
    engine = engines(every=20)
    assert engine.manage.parts.windows.every == 24  # whole blocks and pages
    engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()
    match = engine.run([*STEM[:30], 9, 9], 0).match
    assert (match.usable, match.kv_tokens, match.limit) == (24, 24, None)


def test_the_third_prompt_down_a_prefix_hits(engines: Make) -> None:
    engine = engines(every=NEVER)
    matches = []
    for last in (1, 2, 3):
        matches.append(engine.run([*STEM[:45], *[last] * 15], 0).match)
        engine.settle()
        engine.forget_device()
    assert [match.usable for match in matches] == [0, 0, 40]
    assert [match.branching for match in matches] == [None, 40, None]
    assert [match.limit for match in matches] == ["prefix", "window11", "prefix"]
    assert (matches[1].kv_tokens, matches[1].unusable) == (40, 40)
    assert engine.manage.window_stats().unusable_tokens == 40


def test_kv_beyond_the_windows_is_not_pinned_or_loaded(engines: Make) -> None:
    engine = engines(wrap=Counting, every=24)
    engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()
    window, space = engine.windows[0], engine.manager.state.weights.open_space("")
    keys = Prompt(STEM).keys(space.host_spec)
    assert GroupIndex(engine.host.index, window.run).drop(keys[6:7], namespace=space.host)
    request = engine.begin(STEM, 1)
    match = engine.running[request].match
    assert (match.usable, match.kv_tokens, match.limit) == (48, 56, window.rule.name)
    assert (match.kv.usable, match.branching) == (48, 56)
    engine.step(request)
    engine.step(request)
    assert engine.backends[0].loaded == 6


def test_windows_of_the_device_are_taken_before_those_of_the_host(engines: Make) -> None:
    engine = engines(WINDOW, CHUNK, wrap=Counting)
    engine.run(STEM, 0)
    engine.settle()
    assert set(engine.run(STEM, 1).match.tiers.values()) == {Tier.DEVICE}
    engine.windows[1].index.evict(64)
    match = engine.run(STEM, 1).match
    assert (match.usable, match.tiers) == (56, {"window11": Tier.DEVICE, "chunk24": Tier.HOST})
    assert [backend.loaded for backend in engine.backends] == [0, 0, 2]
    assert engine.manage.window_stats().device_hits == 3


def test_a_device_shares_windows_at_every_block(engines: Make) -> None:
    engine = engines(every=NEVER, page=4)
    engine.run(STEM, 0)
    engine.settle()
    # The host has the windows of 56 alone: here they are those of the device.
    match = engine.run([*STEM[:33], 9, 9], 1).match
    assert (match.usable, match.tiers) == (32, {"window11": Tier.DEVICE})


def test_the_position_is_the_deepest_that_all_accept(engines: Make) -> None:
    engine = engines(WINDOW, Rule.chunk(32), every=8)
    engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()
    space = engine.manager.state.weights.open_space("")
    keys = Prompt(STEM).keys(space.host_spec)
    for window, page in zip(engine.windows, (6, 5), strict=True):  # 56 and 48 lack one each
        GroupIndex(engine.host.index, window.run).drop(keys[page : page + 1], namespace=space.host)
    match = engine.manage.plan("a", Prompt(STEM))
    assert (match.usable, match.limit) == (40, "chunk32")
    engine.host.index.evict(1000)
    assert engine.manage.plan("a", Prompt(STEM)).usable == 40  # what it found stays
    engine.manage.cancel("a")
    engine.host.index.evict(1000)
    assert engine.manage.plan("a", Prompt(STEM)).usable == 0
    assert engine.manage.window_stats().requests == 1
    engine.manage.cancel("a")


def test_a_position_is_found_before_kv_is_planned(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each position that a window refuses would cost a plan of KV."""
    engine = engines(every=NEVER)
    engine.run(STEM, 0)
    engine.settle()
    space = engine.manager.state.weights.open_space("")
    keys = Prompt(STEM).keys(space.host_spec)
    for page in (5, 6):  # all that the host has of the window
        GroupIndex(engine.host.index, engine.windows[0].run).drop(
            keys[page : page + 1], namespace=space.host
        )
    assert engine.windows[0].index is not None
    engine.windows[0].index.evict(64)
    plans, plan = [], engine.manager.lookup.plan
    monkeypatch.setattr(engine.manager.lookup, "plan", lambda *a: plans.append(a) or plan(*a))
    match = engine.manage.plan("a", Prompt(STEM))
    assert (match.usable, match.kv_tokens, len(plans)) == (0, 56, 1)
    engine.manage.cancel("a")


def test_a_router_finds_what_a_plan_finds(engines: Make) -> None:
    engine = engines(WINDOW, CHUNK, page=4, every=NEVER)
    engine.run(STEM, 0)
    engine.settle()
    host: dict[Rule, Any] = {Rule.prefix(): engine.host}
    device: dict[Rule, Any] = {Rule.prefix(): engine.device.name}
    for window in engine.windows:
        host[window.rule] = GroupIndex(engine.host.index, window.run)
        device[window.rule] = window.name
    with Router(host, {"gpu0": device}, spec=engine.host.key_spec()) as router:
        for tokens, usable in ((STEM, 56), ([*STEM[:47], 9, 9], 44)):
            assert router.route(Prompt(tokens), {"gpu0": 0}).device_pages * 4 == usable
            assert engine.manage.plan("a", Prompt(tokens)).usable == usable
    engine.manage.cancel("a")


def test_hits_are_counted_by_group(engines: Make) -> None:
    engine = engines(WINDOW, CHUNK, every=NEVER)
    engine.run(STEM, 0)
    engine.settle()
    engine.run(STEM, 0)  # 56 of the device; the window has 40 to 56, the chunk 48 to 56
    engine.settle()
    groups = engine.manage.window_stats().groups
    assert groups["prefix"] == GroupHits(56, 0, 0, 1, 60)
    assert groups["window11"] == GroupHits(16)
    assert groups["chunk24"] == GroupHits(8)
    engine.forget_device()
    engine.run([*STEM[:47], *[9] * 9], 0)  # KV of 40, windows of 56 alone
    engine.settle()
    engine.forget_device()
    request = engine.begin(STEM, 0)  # all of the host, then anew with nothing
    assert engine.manage.window_stats().groups["prefix"].host_tokens == 56
    assert engine.manage.restart(request).limit is None  # nothing was asked for
    groups = engine.manage.window_stats().groups
    assert groups["prefix"] == GroupHits(56, 0, 0, 1, 60)
    assert groups["window11"] == GroupHits(16, 0, 0, 1, 40)
    assert engine.manage.window_stats().unusable_tokens == 40


def test_a_peek_finds_what_a_plan_finds_and_pins_nothing(engines: Make) -> None:
    engine = engines(WINDOW, CHUNK, every=24)
    engine.run(STEM, 0)
    engine.settle()
    prompts = [Prompt(STEM), Prompt([*STEM[:30], 9, 9]), Prompt(STEM), Prompt([9] * 60)]
    for again in range(2):
        found = engine.manage.peek_many(prompts, limits=[None, None, 43, None])
        assert pinned(engine) == [0, 0, 0]
        assert found == engine.manage.plan_many("abcd", prompts, limits=[None, None, 43, None])
        assert [match.usable for match in found] == ([56, 24, 40, 0], [56, 24, 24, 0])[again]
        for request in "abcd":
            engine.manage.cancel(request)
        engine.forget_device()
    device = RequestOptions(tiers=frozenset({"device"}))
    (nothing_found,) = engine.manage.peek_many([Prompt(STEM)], options=[device])
    assert (nothing_found.usable, engine.manage.window_stats().requests) == (0, 1)
    with refuse("limits: expected one for each of 1 requests, found 2"):
        engine.manage.peek_many([Prompt(STEM)], limits=[1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupSet, "peek", raising)
        assert engine.manage.peek_many([Prompt(STEM)])[0].usable == 0


# ---- blocks of the device


def test_blocks_before_the_window_are_given_back_while_it_runs(engines: Make) -> None:
    """A prompt of 200 tokens in 8 blocks of 4."""
    engine = engines(window_blocks=8, wrap=LateBackend)
    request = engine.begin([i % 50 + 1 for i in range(200)], 40)
    while engine.step(request, 8):
        for backend in engine.backends:
            backend.finish()  # each copy pins what it reads until then
        table = engine.running[request].tables["window11"]
        assert (table >= 0).sum() <= 7
        assert len(table) * 4 >= engine.running[request].computed
    assert engine.manage.window_stats().freed_blocks >= 50
    engine.end(request)


def test_requests_that_compute_the_same_share_blocks(engines: Make) -> None:
    engine = engines()
    one, other = engine.begin(STEM, 4), engine.begin(STEM, 4)
    for request in (one, other):
        engine.step(request, 30)
    tables = [engine.running[request].tables["window11"] for request in (one, other)]
    assert (tables[0][2:7] == tables[1][2:7]).all()
    assert tables[0][7] != tables[1][7]  # a block that is not full is its own
    for request in (one, other):
        while engine.step(request):
            pass
        engine.end(request)


def test_no_room_leaves_the_request_as_it_was(engines: Make) -> None:
    engine = engines(window_blocks=6, wrap=LateBackend)
    request = engine.begin(STEM, 0)
    with pytest.raises(OutOfPages, match="asked for"):
        engine.manage.allocate(request, 28)
    while engine.step(request, 8):
        for backend in engine.backends:
            backend.finish()
    engine.end(request)


def test_a_request_begins_anew_without_room_to_load(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    engine.settle()
    assert engine.windows[0].index is not None
    engine.windows[0].index.evict(64)
    engine.device.index.evict(5)  # KV of the last blocks
    request = engine.begin(STEM, 2)
    match = engine.running[request].match
    assert (match.usable, match.kv.device) == (56, 40)
    match = engine.manage.skip_load(request)
    assert (match.usable, match.kv.load, match.tiers) == (40, 0, {"window11": Tier.HOST})
    stats = engine.manage.window_stats()
    assert (stats.requests, stats.usable_tokens, stats.host_hits) == (2, 40, 1)
    engine.running[request].match = match
    while engine.step(request):
        pass
    engine.end(request)
    with pytest.raises(LeaseLost, match="no running request"):
        engine.manage.restart(request)


# ---- loads


def loading(engines: Make) -> tuple[WindowEngine, int]:
    """An engine, and a request whose loads are in flight."""
    engine = engines(wrap=LateBackend)
    engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()
    request = engine.begin(STEM, 2)
    engine.step(request)
    assert engine.running[request].load.tokens == 56
    assert not engine.running[request].load.done()
    return engine, request


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_computed_after_a_load_is_shared_when_it_has_succeeded(
    engines: Make, failed: int, which: int
) -> None:
    """As an engine that lets its stream wait, and computes at once."""
    engine, request = loading(engines)
    index = engine.windows[0].index
    assert index is not None
    space = engine.windows[0].beside(engine.manager.state.weights.open_space("").host)
    engine.grow(request, 60)
    engine.manage.commit(request, 60)
    assert index.namespace_pages(space) == 0
    engine.backends[which].fail_next = failed
    for backend in engine.backends:
        backend.finish()
    engine.manage.poll()
    load = engine.running[request].load
    assert (load.failed, load.tokens) == (bool(failed), 0 if failed else 56)
    engine.manage.commit(request, 60)
    assert (index.namespace_pages(space) == 0) == bool(failed)
    if failed:
        match = engine.manage.restart(request)
        assert (match.usable, match.limit) == (0, None)
        seq = engine.running[request]
        seq.match, seq.tables, seq.load, seq.computed = match, {}, None, -1
        while engine.step(request):
            engine.settle()
    engine.end(request)


def test_blocks_of_an_ended_request_stay_until_its_load_has_ended(engines: Make) -> None:
    engine, request = loading(engines)
    held = engine.windows[0].index.stats().free
    engine.end(request, publish=False)
    assert engine.manage.poll() == 2
    assert (engine.manage.leaving, engine.windows[0].index.stats().free) == (1, held)
    engine.settle()
    assert engine.manage.leaving == 0
    assert engine.windows[0].free == engine.windows[0].blocks


def test_a_load_that_waits_for_resume_never_begins_once_its_request_ended(engines: Make) -> None:
    engine = engines(wrap=LateBackend)
    engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()
    engine.manager.pause()
    request = engine.begin(STEM, 2)
    engine.step(request)
    engine.end(request)
    assert engine.manage.leaving == 0
    engine.manager.resume()
    assert engine.manage.poll() == 0


# ---- calls of the KV manager that concern all groups


def test_gauges_are_of_all_groups(engines: Make) -> None:
    engine, request = loading(engines)
    gauges = engine.manage.gauges()
    window = engine.windows[0]
    assert gauges.windows == {"window11": TierCapacity(64, window.free, 60)}
    assert (gauges.running, gauges.transfers, gauges.queued) == (1, 2, 0)  # KV and its window
    assert gauges.device == engine.manager.gauges().device
    engine.end(request, publish=False)
    assert engine.manage.gauges().leaving == 1
    engine.settle()
    assert engine.manage.gauges().windows["window11"].free == 64


def test_weights_and_pauses_are_of_all_groups(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    engine.settle()
    engine.manage.pause(1.0)
    engine.forget_device()
    request = engine.begin(STEM, 2)
    engine.step(request)
    assert engine.manage.gauges().queued == 2
    engine.manage.resume()
    engine.settle()
    assert engine.running[request].load.done()
    engine.end(request, publish=False)
    engine.settle()
    engine.manage.begin_update()
    assert engine.manage.plan("a", Prompt(STEM)).usable == 0
    engine.manage.finish_update("next")
    assert engine.manage.plan("a", Prompt(STEM)).usable == 0
    engine.manage.cancel("a")


# ---- plans


def test_a_plan_pins_what_its_match_needs_until_it_is_dropped(engines: Make) -> None:
    engine = engines(WINDOW, CHUNK)
    engine.run(STEM, 0)
    engine.settle()
    prompt = Prompt(STEM)
    engine.manage.plan_many(["a", "b"], [prompt, Prompt(STEM[:20])])
    # Tokens 40 to 56 and 0 to 16 of the window; 48 to 56 of the chunk, and 0 to 16.
    assert pinned(engine) == [8, 6, 0]
    engine.forget_device()
    assert engine.manage.plan("a", prompt).usable == 56
    engine.manage.cancel("b")
    assert pinned(engine) == [4, 2, 0]
    engine.manage.cancel("a")
    engine.manage.cancel("a")
    assert pinned(engine) == [0, 0, 0]
    engine.forget_device()
    engine.manage.plan("a", prompt)
    assert pinned(engine) == [0, 0, 7 + 4 + 2]
    engine.run(STEM, 0)
    assert engine.manage.plan("a", prompt).tiers["window11"] is Tier.DEVICE
    assert pinned(engine)[:2] == [4, 2]  # and no longer those of the host
    engine.manage.cancel("a")


def test_a_plan_of_new_weights_takes_the_place_of_the_old_one(engines: Make) -> None:
    engine = engines()
    for _ in range(2):
        engine.run(STEM, 0)
        assert engine.manage.plan("a", Prompt(STEM)).usable == 56
        assert pinned(engine)[0] == 4
        engine.change()
    assert engine.manage.plan("a", Prompt(STEM)).usable == 0
    assert pinned(engine) == [0, 0]
    engine.manage.cancel("a")
    assert pinned(engine) == [0, 0]


def test_nothing_is_taken_that_was_cleared_after_its_plan(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    engine.manage.plan("a", Prompt(STEM, tenant=""))
    engine.change()
    match = engine.manage.take("a")
    assert (match.usable, match.tiers) == (0, {})
    engine.manage.release("a")
    engine.run(STEM, 2)  # with other rows


def test_a_plan_whose_time_has_passed_takes_what_is_there(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    engine.manage.plan("a", Prompt(STEM), options=RequestOptions(ttl=1e-9))
    assert pinned(engine) == [0, 0]
    assert engine.manage.take("a").usable in (0, 56)
    engine.manage.release("a")


def test_a_tenant_finds_its_own_windows(engines: Make) -> None:
    engine = engines()
    for tenant, usable in (("a", 0), ("b", 0), ("a", 56)):
        match = engine.manage.plan(tenant, Prompt(STEM, tenant=tenant))
        assert match.usable == usable
        engine.manage.take(tenant)
        engine.manage.allocate(tenant, 60)
        engine.manage.load(tenant)
        engine.manage.commit(tenant, 60)
        engine.manage.release(tenant)
        engine.settle()
    assert engine.manage.clear_tenant("a")
    assert engine.manage.plan("c", Prompt(STEM, tenant="a")).usable == 0
    assert engine.manage.plan("c", Prompt(STEM, tenant="b")).usable == 56
    engine.manage.cancel("c")


def test_engines_share_the_host(engines: Make) -> None:
    one = engines()
    other = engines(host=one.host.name)
    one.run(STEM, 0)
    one.settle()
    match = other.run(STEM, 2).match
    assert (match.usable, match.tiers) == (56, {"window11": Tier.HOST})
    other.settle()
    request = one.begin(STEM, 3)  # it ends, and publishes nothing
    one.step(request)
    other.change()
    while one.step(request):
        pass
    one.end(request)
    for engine in (one, other):
        assert engine.run(STEM, 0).match.usable == 0
        engine.settle()
    assert other.run(STEM, 0).match.usable == 56
    assert one.run(STEM, 0).match.usable == 0  # it has other weights


def test_weights_that_go_while_a_window_is_saved(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engines()
    other = engines(host=one.host.name)
    reserve = GroupIndex.reserve

    def late(*arguments: Any, **how: Any) -> Any:
        monkeypatch.undo()
        other.change()
        return reserve(*arguments, **how)

    monkeypatch.setattr(GroupIndex, "reserve", late)
    one.run(STEM, 2)
    stats = one.manage.window_stats()
    assert (stats.unsaved, stats.offloads, one.manager.stats().errors) == (4, 0, 0)


def test_a_failed_save_leaves_the_position_to_the_next(engines: Make) -> None:
    engine = engines(wrap=LateBackend, every=NEVER)
    request = engine.begin(STEM, 0)
    engine.backends[1].fail_next = 1
    engine.step(request)
    engine.settle()
    engine.end(request)
    engine.settle()
    stats = engine.manage.window_stats()
    assert (stats.failed_offloads, stats.offloads) == (1, 0)
    engine.forget_device()
    matches = []
    for _ in range(2):
        request = engine.begin(STEM, 0)
        matches.append(engine.running[request].match)
        while engine.step(request):
            engine.settle()
        engine.end(request)
        engine.settle()
        engine.forget_device()
    assert [(match.usable, match.branching) for match in matches] == [(0, 56), (56, None)]


def test_no_room_on_the_host_is_counted(engines: Make) -> None:
    engine = engines(pages=8, every=NEVER)
    engine.run(STEM, 0)  # 7 pages of KV
    with engine.host.reserve(Prompt(range(900, 956)).keys(engine.host.key_spec())):
        engine.host.index.evict(8)
        engine.run(list(range(100, 160)), 0)
        assert engine.manage.window_stats().no_room
    engine.settle()


def test_errors_of_the_cache_are_misses(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines()
    engine.run(STEM, 0)
    engine.settle()
    engine.manage.plan("waits", Prompt(STEM))
    assert pinned(engine)[0] == 4

    with monkeypatch.context() as patch:
        patch.setattr(GroupIndex, "reserve", raising)
        patch.setattr(GroupSet, "peek", raising)
        assert engine.run([*STEM, 1], 2).match.usable == 0
    assert engine.manage.disabled
    assert pinned(engine) == [0, 0]  # nothing is kept for those that wait
    assert engine.run(STEM, 2).match.usable == 0
    engine.manage.enable()
    assert not engine.manage.disabled
    assert engine.run(STEM, 2).match.usable == 56
    assert engine.manage.take("waits").usable == 56
    engine.manage.release("waits")


@pytest.mark.parametrize(
    ("options", "usable"),
    [
        (RequestOptions(read=False), 0),
        (RequestOptions(tiers=frozenset({"device"})), 56),
        (RequestOptions(tiers=frozenset({"host"})), 56),
    ],
)
def test_a_request_reads_from_the_tiers_that_it_names(
    engines: Make, options: RequestOptions, usable: int
) -> None:
    engine = engines()
    engine.run(STEM, 0)
    engine.settle()
    match = engine.manage.plan("a", Prompt(STEM), options=options)
    assert match.usable == usable
    assert {tier.value for tier in match.tiers.values()} <= options.tiers
    engine.manage.cancel("a")


def test_a_limit_is_kept(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    assert engine.manage.plan("a", Prompt(STEM), limit=43).usable == 40
    engine.manage.cancel("a")


def test_a_device_alone(segment_name: str) -> None:
    window = WindowBlocks(f"{segment_name}.window", rule=WINDOW, block_tokens=4, blocks=32)
    device = ManagedBlocks(f"{segment_name}.device", block_tokens=4, blocks=32)
    manager = KVCacheManager(None, device)
    windows = HybridManager(manager, windows=[window])
    for usable in (0, 56):
        assert windows.plan("a", Prompt(STEM)).usable == usable
        windows.take("a")
        windows.allocate("a", 60)
        assert windows.load("a").tokens == usable
        assert windows.load("a").done()
        windows.commit("a", 60)
        windows.release("a")
    assert windows.window_stats().offloads == 0
    for closeable in (windows, manager, window, device):
        closeable.close()


# ---- bad input


def refuse(message: str) -> Any:
    return pytest.raises(ConfigError, match=message)


def test_blocks_refuse(segment_name: str) -> None:
    how: dict[str, Any] = {"block_tokens": 4, "blocks": 8}
    for rule in (Rule.prefix(), Rule.point(), "window"):
        with refuse(r"rule: expected Rule.window\(tokens\) or Rule.chunk\(tokens\), found"):
            WindowBlocks(segment_name, rule=rule, **how)  # type: ignore[arg-type]
    with refuse("run: expected one with a group from 1 on together with a backend"):
        WindowBlocks(segment_name, rule=WINDOW, backend=NullBackend(), **how)
    with refuse("run: expected one with a group"):
        WindowBlocks(segment_name, rule=WINDOW, run=Run(1), **how)

    class Small(NullBackend):
        slots = 28

    with refuse("8 blocks of 4 tokens are 32 slots, and the planes of the transfer engine hold 28"):
        WindowBlocks(segment_name, rule=WINDOW, run=Run(1), backend=Small(), **how)
    blocks = WindowBlocks(segment_name, rule=WINDOW, **how)
    blocks.close()
    with refuse("are closed; make others"):
        blocks.open_index  # noqa: B018


def test_a_manager_refuses(segment_name: str, engines: Make) -> None:
    engine = engines(WINDOW, CHUNK)
    manager, (window, chunk) = engine.manager, engine.windows
    with refuse("hybrid: expected checkpoints with their grid, windows=, or both, found"):
        HybridManager(manager, windows=[])
    with refuse("each with its own rule and its own group of the host cache, found rules"):
        HybridManager(manager, windows=[window, window])
    with refuse("windows: expected WindowBlocks, found"):
        HybridManager(manager, windows=[engine.device])  # type: ignore[list-item]
    with refuse("every: expected"):
        HybridManager(manager, windows=[window], every=0)
    how: dict[str, Any] = {"rule": Rule.window(3), "blocks": 8}
    other = WindowBlocks(f"{segment_name}.a", block_tokens=8, **how)
    with refuse("windows: expected blocks of 4 tokens, as the manager's are, found 8 in"):
        HybridManager(manager, windows=[other])
    same = WindowBlocks(
        f"{segment_name}.b", block_tokens=4, backend=NullBackend(), run=chunk.run, **how
    )
    with refuse(r"found rules \['chunk24', 'window3'\] and groups \[2, 2\]"):
        HybridManager(manager, windows=[chunk, same])
    device = ManagedBlocks(f"{segment_name}.c", block_tokens=4, blocks=8)
    with KVCacheManager(None, device) as alone:
        with refuse("has a backend, and the manager no host cache"):
            HybridManager(alone, windows=[window])
    mirror = MirroredBlocks(f"{segment_name}.d", block_tokens=4, blocks=8)
    with KVCacheManager(engine.host, mirror, NullBackend()) as mirrored:
        with refuse("manager: expected ManagedBlocks, found MirroredBlocks"):
            HybridManager(mirrored, windows=[window])
    for closeable in (other, same, device, mirror):
        closeable.close()


def test_requests_refuse(engines: Make) -> None:
    engine = engines()
    manage = engine.manage
    with refuse("prompts: expected a Prompt"):
        manage.plan("a", STEM)  # type: ignore[arg-type]
    with refuse("limit: expected tokens >= 0, found -1"):
        manage.plan("a", Prompt(STEM), limit=-1)
    with refuse("hashable"):
        manage.cancel([])  # type: ignore[arg-type]
    with pytest.raises(LeaseLost, match="take: the request 'a' was not planned; plan it first"):
        manage.take("a")
    manage.plan("a", Prompt(STEM))
    manage.take("a")
    with refuse("the request 'a' runs already"):
        manage.take("a")
    with refuse("commit 'a': expected 0 to 60 computed tokens, found 61"):
        manage.commit("a", 61)
    with refuse("tokens: expected"):
        manage.allocate("a", -1)
    manage.release("a")
    manage.release("a")
    with pytest.raises(LeaseLost, match="no running request 'a'"):
        manage.commit("a", 1)
    with refuse("hashable"):
        manage.release([])  # type: ignore[arg-type]
    engine.manager.plan("b", Prompt(STEM))
    engine.manager.take("b")
    with pytest.raises(LeaseLost, match="was taken from the KV manager, not from here"):
        manage.allocate("b", 1)
    engine.manager.release("b")


def test_a_load_needs_blocks(engines: Make) -> None:
    engine = engines()
    engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()
    request = engine.begin(STEM, 0)
    with refuse("load 0|expected blocks for 56 tokens, found 'window11' for 40"):
        engine.manage.load(request)


def test_the_model_of_these_tests_sees_what_it_should() -> None:
    """Tokens before the window count by full attention alone."""
    assert uncached((*STEM[:20], 7), (WINDOW,)) == uncached((*STEM[:20], 7), (WINDOW,))
    assert uncached((*STEM[:20], 7), (WINDOW,)) != uncached((*STEM[:20], 7), (Rule.window(12),))
