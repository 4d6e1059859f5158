"""Write-back of windows: what a position needs goes to the host before the device evicts it, and
nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.refusals import refused
from support.storing import Recorder
from support.window_engine import AtOnce, LateBackend, WindowEngine

from lightcache import Cache
from lightcache.errors import LockTimeout, NotReady, OutOfPages
from lightcache.group_index import GroupIndex
from lightcache.groups import Rule
from lightcache.hybrid.checkpoints import Tier
from lightcache.manager import Prompt, RequestOptions, WritePolicy
from lightcache.storage import StorageSpec, StorageTier

WINDOW, CHUNK = Rule.window(11), Rule.chunk(24)
NEVER = 1 << 20  # for `every`
STEM = [i * 7 % 50 + 1 for i in range(60)]
OTHER = [i * 11 % 50 + 1 for i in range(60)]
Make = Callable[..., WindowEngine]


@pytest.fixture
def engines(segment_name: str) -> Iterator[Make]:
    """Makes engines with write-back, of blocks of 4 tokens and pages of 8."""
    made: list[WindowEngine] = []

    def make(*rules: Rule, **how: Any) -> WindowEngine:
        how = {"write": WritePolicy.BACK, "every": NEVER, "low_water": 0.0, **how}
        how.setdefault("timeout", 0.0 if how.get("wrap") is LateBackend else None)
        made.append(WindowEngine(f"{segment_name}.{len(made)}", rules or (WINDOW,), **how))
        return made[-1]

    yield make
    for engine in made:
        for request in list(engine.running):
            engine.end(request, publish=False)
        engine.manager.resume()
        engine.settle()
        if engine.tier is not None:
            assert engine.tier._executor.wait_idle(60.0)
        engine.nothing_left()
        engine.close()


class Counting(AtOnce):
    """Counts the tokens and pages that are written."""

    tokens = pages = 0

    def offload(self, new: Any, slots: Any) -> Any:
        """See `TransferBackend`."""
        self.tokens += len(slots)
        self.pages += len(new.pages)
        return super().offload(new, slots)


def demote(engine: WindowEngine, n: int = 64) -> int:
    """Write back so many blocks of each window. Returns how many."""
    return sum(back.demote(n) for back in engine.manage.parts.windows._backs.values())


def on_host(engine: WindowEngine, tokens: list[int], number: int = 0) -> list[int]:
    """Pages of a window that the host has whole."""
    space, group = engine.manager.state.weights.open_space(""), engine.windows[number]
    keys = Prompt(tokens).keys(space.host_spec)
    index = GroupIndex(engine.host.index, group.run)
    each = [index.peek(keys[i : i + 1], namespace=space.host) for i in range(len(keys))]
    return [i for i, there in enumerate(each) if there]


def first_of(engine: WindowEngine, rule: Rule) -> int:
    """The first token that the positions of STEM need: its end, and that of the same prompt."""
    unit, start = engine.unit, engine.manage.parts.windows.start
    return min(start(rule, 60 // unit * unit), start(rule, 59 // unit * unit))


# ---- what is written, and when


@pytest.mark.parametrize("sizes", [(4, 8), (8, 8), (16, 8), (2, 8), (4, 4)])
def test_what_a_position_needs_is_written_before_it_is_evicted(
    engines: Make, sizes: tuple[int, int]
) -> None:
    block, page = sizes
    engine = engines(WINDOW, CHUNK, block=block, page=page, wrap=Counting)
    first = engine.run(STEM, 0)
    engine.settle()
    assert [backend.pages for backend in engine.backends] == [0, 0, 0]
    assert demote(engine) > 0
    engine.settle()
    position = 60 // engine.unit * engine.unit
    for number, (window, backend) in enumerate(
        zip(engine.windows, engine.backends[1:], strict=True)
    ):
        begin = first_of(engine, window.rule)
        assert on_host(engine, STEM, number) == [*range(begin // page, position // page)]
        assert backend.pages == (position - begin) // page * window.run.parts
    engine.manager.demote(64)
    engine.settle()
    stats = engine.manage.window_stats()
    noted = sum((position - first_of(engine, rule)) // block for rule in (WINDOW, CHUNK))
    assert (stats.demotions, stats.demotions_lost, stats.failed_offloads) == (noted, 0, 0)
    again = engine.run(STEM, 3)
    usable = 59 // engine.unit * engine.unit
    assert (again.match.usable, set(again.match.tiers.values())) == (usable, {Tier.HOST})
    assert again.tokens[:60] == first.tokens[:60]


def test_blocks_that_no_position_needs_go_unwritten(engines: Make) -> None:
    engine = engines(wrap=Counting, window_blocks=24)
    long = [i % 50 + 1 for i in range(200)]
    engine.run(long, 0, budget=20)  # gives 45 blocks back as it runs
    engine.settle()
    assert engine.backends[1].pages == 0
    demote(engine)
    engine.settle()
    # 200 is the prompt's end; the same prompt can continue from 192.
    assert on_host(engine, long) == [22, 23, 24]
    stats = engine.manage.window_stats()
    assert (stats.demotions, stats.demotions_lost, engine.windows[0].free) == (6, 0, 24)


def test_a_request_takes_the_place_of_another(engines: Make) -> None:
    engine = engines(WINDOW, CHUNK, window_blocks=16, blocks=16)
    engine.run(STEM, 0)
    engine.run(OTHER, 0)
    engine.settle()
    for prompt in (STEM, OTHER, STEM):
        match = engine.run(prompt, 1).match
        assert (match.usable, match.limit) == (56, None)
        engine.settle()
    assert engine.manage.window_stats().demotions_lost == 0


def test_a_block_goes_before_others_of_its_page(engines: Make) -> None:
    """Blocks of a window are evicted in any order: the first of two takes the page along."""
    engine = engines(wrap=Counting)
    engine.run(STEM, 0)
    engine.settle()
    n = 0
    while not engine.backends[1].pages:
        assert demote(engine, 1) == 1
        engine.settle()
        n += 1
        assert n < 64
    pages, own = on_host(engine, STEM), engine.windows[0].run.parts
    assert len(pages) * own == engine.backends[1].pages == own
    demote(engine)
    engine.settle()
    assert on_host(engine, STEM) == [5, 6]
    assert engine.backends[1].pages == 2 * own  # each page once


def test_a_note_is_stale_once_its_block_has_other_content(engines: Make) -> None:
    engine = engines(wrap=Counting, window_blocks=16)
    engine.run(STEM, 0)
    engine.settle()
    engine.forget_device()  # evicted unwritten
    request = engine.begin(OTHER, 0, RequestOptions(tiers=frozenset({"device"})))
    while engine.step(request):
        pass
    engine.end(request)
    assert demote(engine) == 15
    engine.settle()
    assert engine.backends[1].pages == 0
    stats = engine.manage.window_stats()
    assert (stats.demotions, stats.demotions_lost) == (0, 0)


def test_a_share_of_the_blocks_is_kept_free(engines: Make) -> None:
    engine = engines(low_water=0.9, blocks=64, window_blocks=20)
    engine.run(STEM, 0)
    engine.settle()  # the last poll has begun copies
    engine.settle()
    assert engine.windows[0].free >= 18  # of 20: those of the first page have gone
    assert on_host(engine, STEM) == [5]


# ---- allocating while copies are in flight


def full(engines: Make, **how: Any) -> tuple[WindowEngine, int]:
    """The device's window is full of blocks that positions need; a request wants them."""
    engine = engines(wrap=LateBackend, window_blocks=9, **how)
    engine.run(STEM[:32], 0)
    request = engine.begin(OTHER[:32], 0)
    with pytest.raises(OutOfPages, match="are being written to the host first; `poll`"):
        engine.step(request)
    return engine, request


def test_there_is_no_room_while_copies_are_in_flight(engines: Make) -> None:
    engine, request = full(engines)
    going = len(engine.backends[1].going)
    refused(OutOfPages, "written to the host", engine.manage.allocate, request, 32)
    assert len(engine.backends[1].going) == going  # asking again begins nothing again
    assert len(engine.manage.allocate(request, 4)["window11"]) == 1  # what is free can be had
    engine.backends[1].finish()
    assert len(engine.manage.allocate(request, 32)["window11"]) == 8
    assert on_host(engine, STEM[:32]) == [1, 2, 3]
    engine.manage.release(request)
    engine.running.pop(request)


def test_waiting_for_room(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = full(engines)
    for copy in engine.backends[1].going:  # a wait lets it happen, as a device would
        monkeypatch.setattr(copy, "wait", lambda *_: engine.backends[1].finish())
    refused(OutOfPages, "written", engine.manage.allocate, request, 32, timeout=0)
    assert len(engine.manage.allocate(request, 32, timeout=None)["window11"]) == 8
    engine.manage.release(request)
    engine.running.pop(request)


def test_paused_transfers_do_not_make_room(engines: Make) -> None:
    engine = engines(window_blocks=8, timeout=0.0)
    engine.run(STEM[:32], 0)
    engine.manager.pause()
    request = engine.begin(OTHER[:32], 0)
    refused(OutOfPages, "resumed", engine.manage.allocate, request, 32, timeout=None)
    engine.manager.resume()
    engine.settle()
    assert len(engine.manage.allocate(request, 32)["window11"]) == 8


# ---- what is not written


def test_a_failed_copy_loses_the_block_and_is_counted(engines: Make) -> None:
    engine = engines(wrap=LateBackend)
    engine.run(STEM, 0)
    demote(engine)
    engine.backends[1].fail_next = 100
    engine.settle()
    stats = engine.manage.window_stats()
    assert stats.demotions == 0
    assert stats.demotions_lost == 4
    assert stats.failed_offloads == 2  # a copy for each page
    assert on_host(engine, STEM) == []
    assert engine.windows[0].free == 64


@pytest.mark.parametrize("write", [WritePolicy.BACK, WritePolicy.THROUGH])
def test_failed_copies_of_windows_count_for_the_breaker_of_kv(
    engines: Make, write: WritePolicy
) -> None:
    """While it is open no window is copied either; blocks that were to be written go without."""
    engine = engines(write=write, wrap=LateBackend)
    for backend in engine.backends:
        backend.fail_next = 1 << 20
    for i in range(1, 9):
        engine.run([i, *STEM[1:]], 0)
        demote(engine)
        engine.settle()
        kv, windows = engine.manager.stats(), engine.manage.window_stats()
        failed = kv.failed_offloads + windows.failed_offloads
        if failed >= engine.manager.config.failures:
            break
        assert engine.manager.offloader.breaker.failures == failed
        assert engine.manage.gauges().offloads == "closed"
    assert engine.manage.gauges().offloads == "open"
    assert windows.failed_offloads
    engine.run(OTHER, 0)
    assert demote(engine) == 0
    assert not any(backend.going for backend in engine.backends)
    stats = engine.manage.window_stats()
    assert stats.failed_offloads == windows.failed_offloads
    assert (stats.unsaved > 0) == (write is WritePolicy.THROUGH)
    for backend in engine.backends:
        backend.fail_next = 0
    engine.manager.enable()
    engine.run([*OTHER, 9, 8, 7, 6], 0)
    demote(engine)
    engine.settle()
    assert on_host(engine, [*OTHER, 9, 8, 7, 6])
    assert engine.manager.offloader.breaker.failures == 0


def test_without_room_on_the_host_it_goes(engines: Make) -> None:
    engine = engines(pages=8)
    engine.run(STEM, 0)
    with engine.host.reserve(Prompt(range(900, 964)).keys(engine.host.key_spec())):
        demote(engine)
        stats = engine.manage.window_stats()
        assert (stats.no_room, stats.demotions, stats.demotions_lost) == (2, 0, 4)


@pytest.mark.parametrize("error", [LockTimeout, NotReady])
def test_a_host_that_does_not_answer_leaves_the_blocks(
    engines: Make, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    engine.run(STEM, 0)
    free = engine.windows[0].free

    def broken(*_: Any, **__: Any) -> Any:
        raise error("arranged")

    with monkeypatch.context() as patch:
        patch.setattr(GroupIndex, "reserve", broken)
        assert demote(engine) > 0
    assert engine.windows[0].free == free
    assert engine.manage.window_stats().failed_offloads == 1  # each may be a long wait
    demote(engine)
    engine.settle()
    assert on_host(engine, STEM) == [5, 6]


def test_a_block_that_is_matched_meanwhile_stays(engines: Make) -> None:
    engine = engines(wrap=LateBackend)
    engine.run(STEM, 0)
    demote(engine)
    match = engine.manage.plan("a", Prompt(STEM))
    assert match.tiers == {"window11": Tier.DEVICE}
    engine.settle()
    stats = engine.manage.window_stats()
    assert (stats.demotions, stats.demotions_lost) == (0, 0)
    assert engine.manage.plan("a", Prompt(STEM)).tiers == {"window11": Tier.DEVICE}
    engine.manage.cancel("a")
    demote(engine)
    engine.settle()
    assert engine.manage.window_stats().demotions == 4  # its note stayed


def test_former_weights_are_not_written(engines: Make) -> None:
    engine = engines(wrap=Counting)
    engine.run(STEM, 0)
    engine.change()
    demote(engine)
    assert engine.backends[1].pages == 0
    other = engines(host=engine.host.name, wrap=Counting)
    other.run(OTHER, 0)
    engine.change()  # in another process
    assert demote(other) >= 0
    assert other.backends[1].pages == 0
    assert other.manager.stats().errors == 0


def test_a_batch_of_former_weights_leaves_those_of_the_present_ones(engines: Make) -> None:
    engine = engines(wrap=LateBackend)
    engine.run(STEM, 0)
    assert demote(engine) == 15  # in flight
    engine.change()
    engine.run(STEM, 0)
    assert engine.manage.plan("a", Prompt(STEM)).tiers == {"window11": Tier.DEVICE}
    engine.manage.cancel("a")
    engine.settle()
    assert engine.manage.plan("a", Prompt(STEM)).tiers == {"window11": Tier.DEVICE}
    engine.manage.cancel("a")
    assert engine.manager.stats().errors == 0


@pytest.mark.parametrize(
    "options",
    [RequestOptions(tiers=frozenset({"device"})), RequestOptions(priority=-1)],
)
def test_a_request_that_leaves_the_host_out_notes_nothing(
    engines: Make, options: RequestOptions
) -> None:
    engine = engines(wrap=Counting)
    request = engine.begin(STEM, 0, options)
    while engine.step(request):
        pass
    engine.end(request)
    demote(engine)
    assert engine.backends[1].pages == 0


# ---- storage


def kept(cache: Cache) -> StorageTier:
    """Takes what it is given."""
    return StorageTier(cache, Recorder(StorageSpec.of(cache)), write_pages=cache.pages)


def forget(engine: WindowEngine) -> None:
    """Storage alone has what it was given."""
    engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    engine.forget_device()
    engine.host.index.evict(1000)


def test_with_a_storage_positions_are_stored_at_the_end(engines: Make) -> None:
    engine = engines(WINDOW, CHUNK, storage=kept)
    engine.run(STEM, 0)
    forget(engine)
    match = engine.run(STEM, 2).match
    assert (match.usable, match.kv.storage) == (56, 56)


def test_a_position_is_stored_once_write_back_has_made_it_whole(engines: Make) -> None:
    """A window finds no room at the end of its request; it gets there when the device needs its
    blocks, and then storage gets the position."""
    engine = engines(WINDOW, CHUNK, storage=kept)
    reserve, refuse = GroupIndex.reserve, engine.windows[0].run

    def no_room(self: GroupIndex, keys: Any, *rest: Any, **how: Any) -> Any:
        return reserve(self, keys[:0] if self.run == refuse else keys, *rest, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupIndex, "reserve", no_room)
        engine.run(STEM, 0)
        engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    writes = engine.tier.storage.stats().pages
    assert writes == 0
    demote(engine)
    engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    assert engine.tier.storage.stats().pages == 7 + 4 + 2
    forget(engine)
    assert engine.run(STEM, 2).match.usable == 56


@pytest.mark.parametrize("first", ["kv", "windows"])
def test_kv_whose_copy_failed_is_stored_with_its_windows(engines: Make, first: str) -> None:
    """Neither KV nor a window reaches the host when the request ends. Storage gets the position
    when write-back has brought both there, in whichever order, and nothing of it before."""
    engine = engines(WINDOW, CHUNK, storage=kept, wrap=LateBackend)
    kv, window, _ = engine.backends
    request = engine.begin(STEM, 0)
    while engine.step(request):
        pass
    window.fail_next = 1 << 20  # of each position
    engine.end(request)
    kv.fail_next = 1 << 20
    engine.settle()
    kv.fail_next = window.fail_next = 0
    assert engine.tier._executor.wait_idle(60.0)
    assert engine.tier.storage.stats().pages == 0
    both = [lambda: engine.manager.demote(64), lambda: demote(engine)]
    for number, back in enumerate(both if first == "kv" else both[::-1]):
        assert back() > 0
        engine.settle()
        assert engine.tier._executor.wait_idle(60.0)
        assert engine.tier.storage.stats().pages == number * (7 + 4 + 2)
    forget(engine)
    request = engine.begin(STEM, 0)
    assert engine.running[request].match.usable == 56


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_positions_outlive_all_processes_of_a_node(
    engines: Make, segment_name: str, tmp_path: Any, ranks: int
) -> None:
    """Blocks are written back while requests come and go; then engine and cache are gone, and
    others begin with what the disk has."""

    def on_disk(cache: Cache) -> StorageTier:
        return StorageTier.open(cache, f"disk:{tmp_path}/kv?capacity=4MiB")

    how: dict[str, Any] = {"storage": on_disk, "window_blocks": 24, "blocks": 24, "ranks": ranks}
    how |= {"write": WritePolicy.BACK, "every": NEVER, "low_water": 0.1}
    prompts = [[*STEM, n] for n in (1, 2)] + [[*OTHER, n] for n in (1, 2)]
    engine = WindowEngine(f"{segment_name}.first", (WINDOW, CHUNK), **how)
    for prompt in prompts:
        engine.run(prompt, 0)
        engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    engine.close()
    engine = engines(WINDOW, CHUNK, **how)
    for prompt in prompts[::2]:
        match = engine.run(prompt, 2).match
        assert (match.usable, match.kv.storage) == (56, 56)
        engine.settle()


def test_a_prompt_without_its_windows_keeps_no_other_from_storage(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a window does not answer for one of two whose KV came late."""
    engine = engines(WINDOW, CHUNK, storage=kept, wrap=LateBackend)
    for tokens in (STEM, [token + 1 for token in STEM]):
        request = engine.begin(tokens, 0)
        while engine.step(request):
            pass
        engine.end(request)
    engine.backends[0].fail_next = 1 << 20
    engine.settle()
    engine.backends[0].fail_next = 0
    assert engine.tier._executor.wait_idle(60.0)
    assert engine.tier.storage.stats().pages == 0
    state, asked = engine.manager.state, []
    stored_with = state.stored_with

    def once(*given: Any) -> Any:
        asked.append(given)
        if len(asked) == 1:
            raise LockTimeout("arranged")
        return stored_with(*given)

    monkeypatch.setattr(state, "stored_with", once)
    assert engine.manager.demote(64) > 0
    engine.settle()
    assert engine.tier._executor.wait_idle(60.0)
    assert len(asked) == 2
    assert engine.tier.storage.stats().pages == 7 + 4 + 2
