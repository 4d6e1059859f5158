"""Pages whose offload did not happen: tried again, with a reason, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.manager_case import World, made_worlds, on_host, tokens
from support.stamped import StampedBackend, StampedMoving, stamps_of

from lightcache.errors import Abandoned, LockTimeout, OutOfPages
from lightcache.manager import Prompt, RequestOptions, WritePolicy

EVERY = np.concatenate([tokens(18), tokens(46, 1)])  # 16 pages
PROMPT, WHOLE = Prompt(EVERY[:18]), Prompt(EVERY)


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Callable[..., World]]:
    yield from made_worlds(segment_name)


def logged(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """Log lines with these words."""
    return [line for line in (each.getMessage() for each in caplog.records) if words in line]


def computed(world: World, request: str, begin: int, end: int) -> None:
    """Tokens [begin, end) of EVERY, one in each step."""
    for token in range(begin, end):
        world.compute(request, EVERY, token, token + 1)


class Fill:
    """Other pages, pinned: they leave no room on the host."""

    def __init__(self, world: World, pages: int) -> None:
        keys = Prompt(tokens(4 * pages + 1, 99)).keys(world.cache.key_spec())
        with world.cache.reserve(keys) as new:
            assert len(new.pages) == pages
            new.publish()
        self.lease, self._cache = world.cache.match(keys), world.cache

    def leave(self) -> None:
        """There is room again."""
        self.lease.release()
        self._cache.evict(32)


class Counting(StampedBackend):
    """Counts the pages that are copied; may raise `error` for what would otherwise fail."""

    copied = 0
    error: Exception | None = None

    def offload(self, new: Any, slots: Any) -> StampedMoving:
        """See `TransferBackend`."""
        self.copied += len(new.pages)
        if self.error is not None:
            raise self.error
        return super().offload(new, slots)


def counting(world: World) -> Counting:
    """A backend of this kind for this world."""
    world.backend = backend = Counting(world.cache, world.store)
    world.manager.state.backend = backend
    return backend


def asked(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an element for each reservation from now on."""
    calls: list[int] = []
    reserve = world.cache.index.reserve_batch

    def counted(*arguments: Any, **how: Any) -> Any:
        calls.append(1)
        return reserve(*arguments, **how)

    monkeypatch.setattr(world.cache.index, "reserve_batch", counted)
    return calls


# ---- tried again

causes = pytest.mark.parametrize("cause", ["room", "copy", "stale", "refused", "lock"])


def not_written(world: World, cause: str) -> None:
    """The prompt of "a" is computed and not written. Then the cause ends."""
    end: Callable[[], None]
    backend = counting(world)
    world.start("a", PROMPT)
    if cause == "room":
        end = Fill(world, 32).leave
    elif cause in ("copy", "stale"):
        backend.error = RuntimeError("arranged") if cause == "copy" else Abandoned("arranged")
        end = partial(setattr, backend, "error", None)
    else:
        error = LockTimeout("arranged") if cause == "lock" else Abandoned("arranged")
        patch = pytest.MonkeyPatch()

        def refused(*_: Any, **__: Any) -> Any:
            raise error

        patch.setattr(world.cache.index, "reserve_batch", refused)
        end = patch.undo
    world.compute("a", EVERY, 0, 18)
    if cause == "copy":
        with pytest.raises(RuntimeError, match="arranged"):
            world.manager.poll()
    end()
    assert world.cache.stats().ready == 0
    backend.copied = 0


@causes
@pytest.mark.parametrize("when", ["next write", "at its end"])
def test_pages_that_were_not_written_are_tried_again(
    worlds: Any, monkeypatch: pytest.MonkeyPatch, cause: str, when: str
) -> None:
    world = worlds()
    not_written(world, cause)
    calls, pages = asked(world, monkeypatch), 4
    if when == "next write":
        computed(world, "a", 18, 47)
        assert not calls  # nothing is tried between two writes
        computed(world, "a", 47, 48)
        pages = 12
        assert on_host(world, WHOLE) == pages
    world.manager.release("a")
    assert (len(calls), world.backend.copied) == (1, pages)
    assert on_host(world, WHOLE) == pages


@causes
def test_pages_that_another_has_written_meanwhile_are_not_copied_again(
    worlds: Any, cause: str
) -> None:
    world = worlds()
    not_written(world, cause)
    world.run("b", Prompt(EVERY[:10]), options=RequestOptions(tiers=frozenset({"host"})))
    assert (world.backend.copied, on_host(world, WHOLE)) == (2, 2)
    world.manager.release("a")
    assert (world.backend.copied, on_host(world, WHOLE)) == (4, 4)


def test_a_copy_that_fails_late_is_tried_again(worlds: Any) -> None:
    world = worlds()
    world.backend.at_once = False
    world.start("a", PROMPT)
    world.compute("a", EVERY, 0, 18)
    computed(world, "a", 18, 48)  # a second write, while the first copy is in flight
    world.backend.fail_next = 1
    world.backend.finish()
    world.backend.at_once = True
    world.manager.poll()
    assert on_host(world, WHOLE) == 0
    world.manager.release("a")
    assert on_host(world, WHOLE) == 12


def test_an_abort_tries_nothing_again(worlds: Any) -> None:
    world = worlds()
    not_written(world, "room")
    world.manager.release("a", publish=False)
    assert on_host(world, WHOLE) == 0


def test_a_host_that_stays_full_is_asked_once_a_write(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    fill, calls = Fill(world, 32), asked(world, monkeypatch)
    world.start("a", PROMPT)
    world.compute("a", EVERY, 0, 18)
    computed(world, "a", 18, 64)
    assert len(calls) == 2  # the prompt, a group of 8 pages; 4 more pages are no group
    world.manager.release("a")
    assert len(calls) == 3
    assert world.manager.stats().no_room_pages == 4 + 12 + 16
    fill.lease.release()


def test_what_selective_has_skipped_is_no_page_to_be_tried_again(worlds: Any) -> None:
    world = worlds(write=WritePolicy.SELECTIVE)
    backend = counting(world)
    world.run("a", PROMPT)  # seen for the first time
    backend.error = Abandoned("arranged")
    world.run("b", PROMPT, keep=True)
    assert world.manager.stats().unwritten_stale_pages == 4
    backend.error, backend.copied = None, 0
    computed(world, "b", 18, 48)  # new pages: seen for the first time
    assert (backend.copied, on_host(world, WHOLE)) == (4, 4)
    world.manager.release("b")


# ---- with a reason


@pytest.mark.parametrize(
    ("cause", "counter", "words"),
    [
        ("room", "no_room_pages", "no room, every page is pinned"),
        ("copy", "unwritten_failed_pages", "arranged"),
        ("stale", "unwritten_stale_pages", "arranged"),
        ("refused", "unwritten_refused_pages", "arranged"),
        ("lock", "unwritten_refused_pages", "arranged"),
    ],
)
def test_the_reason_is_counted_and_logged_once(
    worlds: Any,
    caplog: pytest.LogCaptureFixture,
    cause: str,
    counter: str,
    words: str,
) -> None:
    world = worlds()
    not_written(world, cause)
    assert getattr(world.manager.stats(), counter) == 4
    (line,) = logged(caplog, "pages were not written to the host")
    assert line.startswith("4 pages")
    assert words in line
    assert f"`{counter}`" in line
    world.manager.release("a", publish=False)
    not_written(world, cause)
    assert getattr(world.manager.stats(), counter) == 8
    assert logged(caplog, "pages were not written to the host") == [line]
    world.manager.release("a", publish=False)


def test_write_back_counts_its_reasons_too(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK, low_water=0.0)
    world.run("a", PROMPT)
    counting(world).error = Abandoned("arranged")
    world.manager.demote(4)
    assert world.manager.stats().unwritten_stale_pages == 4


# ---- not for ever


def broken(world: World, request: str = "a") -> Counting:
    """Copies fail until the breaker is open."""
    backend = counting(world)
    backend.fail_next = 1000
    world.start(request, PROMPT)
    world.compute(request, EVERY, 0, 18)
    computed(world, request, 18, 48)
    world.manager.release(request)
    assert world.manager.stats().failed_offloads == 3
    backend.copied = 0
    return backend


def test_copies_that_fail_in_a_row_are_made_no_more(
    worlds: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(failures=3)
    assert world.manager.gauges().offloads == "closed"
    backend = broken(world)
    assert world.manager.gauges().offloads == "open"
    calls = asked(world, monkeypatch)
    for request in "bc":
        assert world.run(request, WHOLE).usable >= 48  # of the device: it computes as before
    assert (backend.copied, calls) == (0, [])
    stats = world.manager.stats()
    assert (stats.unwritten_disabled_pages, stats.unwritten_failed_pages) == (64, 4 + 12 + 12)
    assert not world.manager.disabled
    (line,) = logged(caplog, "no page is written to the host after 3 failed copies in a row")
    assert "arranged" in line
    assert len(logged(caplog, "pages were not written")) == 1  # the first failure, nothing else
    backend.fail_next = 0
    world.manager.enable()
    assert world.manager.gauges().offloads == "closed"
    world.run("d", WHOLE)
    assert on_host(world, WHOLE) == 16


def test_one_copy_is_tried_later(worlds: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = worlds(failures=3, offload_retry=1e-9, blocks=64)
    backend = broken(world)
    assert world.manager.gauges().offloads == "half-open"
    others = [Prompt(tokens(18, seed)) for seed in range(2, 5)]
    for i, prompt in enumerate(others):
        world.start(i, prompt)
        world.store.write(world.manager.allocate(i, 18), 0, stamps_of(prompt.tokens))
    backend.at_once = False
    world.manager.commit_many(range(3), [18] * 3)
    assert backend.copied == 4  # one of three
    world.run("late", WHOLE)
    assert backend.copied == 4  # while that is in flight
    backend.finish()  # it fails
    world.manager.poll()
    assert world.manager.stats().failed_offloads == 4
    backend.fail_next, backend.at_once, backend.copied = 0, True, 0
    world.manager.release(0)  # the next one succeeds
    assert (backend.copied, world.manager.gauges().offloads) == (4, "closed")
    for i in (1, 2):
        world.manager.release(i)
    assert [on_host(world, prompt) for prompt in others] == [4, 4, 4]
    assert len(logged(caplog, "no page is written to the host")) == 1
    assert len(logged(caplog, "a copy to the host succeeded")) <= 1


def test_a_probe_that_was_aborted_is_none(worlds: Any) -> None:
    world = worlds(failures=3, offload_retry=1e-9)
    backend = broken(world)
    backend.fail_next = 0
    world.manager.pause()
    world.start("b", Prompt(tokens(18, 2)))
    world.compute("b", tokens(18, 2), 0, 18)
    world.manager.release("b", publish=False)  # its copy was queued, and never begins
    world.manager.resume()
    assert (backend.copied, world.manager.gauges().offloads) == (0, "half-open")
    world.run("c", WHOLE)
    assert world.manager.gauges().offloads == "closed"
    assert on_host(world, WHOLE) == 16


def test_copies_in_vain_do_not_count(worlds: Any) -> None:
    """A change of weights while copies are in flight is no failure of the engine."""
    world = worlds(failures=1)
    world.backend.at_once = False
    for i in range(3):
        world.start(i, Prompt(tokens(18, i)))
        world.compute(i, tokens(18, i), 0, 18)
    world.manager.begin_update(wait=False)
    world.backend.finish()
    world.manager.poll()
    stats = world.manager.stats()
    assert (stats.unwritten_stale_pages, stats.unwritten_failed_pages) == (12, 0)
    assert world.manager.gauges().offloads == "closed"
    world.manager.release_many(range(3))


def test_with_write_back_blocks_go_unwritten(worlds: Any) -> None:
    world = worlds(failures=3, write=WritePolicy.BACK, low_water=0.0, blocks=12)
    backend = counting(world)
    world.run("a", PROMPT)
    backend.fail_next = 1000
    assert world.manager.demote(4) == 4  # three copies fail, the fourth is not made
    assert (backend.copied, world.manager.gauges().offloads) == (3, "open")
    assert world.manager.demote(4) == 0
    world.manager.plan("b", WHOLE)
    world.manager.take("b")
    assert len(world.manager.allocate("b", 48)) == 12  # all blocks: those of "a" are evicted
    assert backend.copied == 3
    with pytest.raises(OutOfPages):
        world.manager.allocate("b", 52)
    world.manager.release("b")
