"""Pages that a storage service holds for its clients, and who gives them back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.serving import ServedTier
from support.storing import KEYS, cache, full, sound

from lightcache import Cache, ConfigError, Detached
from lightcache.storage import Fault, FlakyStorage, TaskState
from lightcache.storage.service import StorageClient, StorageService

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED
Wait = Callable[[Callable[[], bool], str], None]

__all__ = ["cache"]


def held(client: StorageClient, **how: Any) -> Any:
    """A prefetch of KEYS that is over, and holds them."""
    task = client.prefetch(KEYS, hold=True, **how)
    assert task.wait(60.0).prefix == 20
    assert client.cache.stats().writing == 20
    assert client.cache.peek(KEYS) == 0
    return task


def holds(service: StorageService) -> int:
    """Tasks that the service remembers."""
    return len(service._carrying.holds)


def test_publishing_once(cache: Cache) -> None:
    with ServedTier(cache, full(cache), group=8) as tier:
        task = held(tier)
        with pytest.raises(ConfigError, match="pages: expected 0 to 20"):
            task.publish(21)
        rest = task.publish(11)  # a group is read again
        assert (rest.wait(60.0).prefix, rest.result.pages, rest.result.loaded) == (11, 11, 3)
        assert sound(cache, KEYS) == 11
        assert holds(tier.serving) == 0
        with pytest.raises(ConfigError, match="neither"):
            task.publish(0)
        task.cancel()  # nothing


def test_giving_back(cache: Cache, wait_until: Wait) -> None:
    with ServedTier(cache, full(cache), timeout=600.0) as tier:
        task = held(tier)
        task.cancel()
        task.cancel()
        with pytest.raises(ConfigError, match="neither"):
            task.publish(1)
        wait_until(lambda: cache.stats().writing == 0, "the pages that were held")
        wait_until(lambda: holds(tier.serving) == 0, "the task")


def test_what_does_not_hold_publishes_nothing(cache: Cache) -> None:
    with ServedTier(cache, full(cache)) as tier:
        task = tier.prefetch(KEYS)
        task.wait(60.0)
        with pytest.raises(ConfigError, match="holds nothing"):
            task.publish(1)
        gone = tier.prefetch(KEYS, hold=True)
        tier.serving.close()
        assert gone.wait(60.0).pages == 20
        none = tier.prefetch(KEYS, hold=True)  # nobody serves
        assert none.state is FAILED
        assert none.publish(0) is none
        with pytest.raises(ConfigError):
            none.publish(1)


def test_cancelling_before_it_is_over(cache: Cache, wait_until: Wait) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("hang", at=1)]})
    with ServedTier(cache, flaky, group=8) as tier:
        task = tier.prefetch(KEYS, hold=True)
        assert flaky.wait_hanging()
        (job,) = tier.serving._tier._crew.running
        task.cancel()
        wait_until(lambda: job._given_up, "the word to cancel")
        flaky.let_go()
        assert task.wait(60.0).reasons == ("cancelled",)
        with pytest.raises(ConfigError, match="neither"):
            task.publish(8)
        wait_until(lambda: cache.stats().writing == 0, "the pages that were held")


def test_a_client_that_leaves_takes_nothing_along(cache: Cache, wait_until: Wait) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("hang", at=1)]})
    how: Any = {"group": 20, "timeout": 600.0}  # for which the tier itself would keep pages
    with StorageService(cache, flaky, **how) as service, StorageClient(cache) as other:
        with StorageClient(cache) as client:
            task = held(client)
        wait_until(lambda: holds(service) == 0, "the end of a client that left")
        wait_until(lambda: cache.stats().writing == 0, "the pages that were held")
        with pytest.raises(Detached):
            task.publish(20)
        client = StorageClient(cache)
        client.prefetch(KEYS, hold=True)
        assert flaky.wait_hanging()
        assert client.close(0.0)
        wait_until(lambda: holds(service) == 0, "the end of one whose task goes on")
        flaky.let_go()
        wait_until(lambda: cache.stats().writing == 0, "the pages that were to be held")
        assert other.prefetch(KEYS).wait(60.0).loaded == 20


def test_what_nobody_publishes_goes_back(cache: Cache, wait_until: Wait) -> None:
    now = [0.0]
    clock: Any = {"clock": lambda: now[0]}
    with StorageService(cache, full(cache), timeout=10.0, **clock) as service:
        with StorageClient(cache, **clock) as client:
            task = held(client)
            wait_until(lambda: bool(service._carrying.holds._kept), "that it is seen to be over")
            now[0] = 9.0
            service._tier.poll()
            assert cache.stats().writing == 20
            now[0] = 11.0
            service._tier.poll()
            assert cache.stats().writing == 0
            wait_until(lambda: holds(service) == 0, "the task")
            rest = task.publish(20)
            assert rest.wait(60.0).failed == 20
            assert "nobody published in time" in rest.result.reasons[0]
            assert rest.state is FAILED


def test_a_word_that_comes_too_late_gives_back(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        task = held(client)
        service._carrying._left = lambda ask: 0.0  # type: ignore[method-assign]
        rest = task.publish(20)
        assert "all of it in the queue" in rest.wait(60.0).reasons[0]
        wait_until(lambda: cache.stats().writing == 0, "the pages")
        assert service.stats().late == 1


def test_what_could_not_be_said_can_be_said_again(cache: Cache, wait_until: Wait) -> None:
    with StorageService(cache, full(cache)) as service, StorageClient(cache) as client:
        task = held(client)
        whole, idle = service._turn, threading.Event()

        def turn(timeout: float) -> int:
            idle.set()
            service._ending.wait(timeout)
            return 0

        service._turn = turn  # type: ignore[method-assign]
        assert idle.wait(60.0)
        while client._tasks.push_many([b""] * 256):
            pass
        refused = task.publish(20)
        assert "was full" in refused.result.reasons[0]
        service._turn = whole  # type: ignore[method-assign]
        wait_until(lambda: len(client._tasks) == 0, "room")
        assert task.publish(20).wait(60.0).prefix == 20
        assert sound(cache, KEYS) == 20


def test_another_service_does_not_hold_it(cache: Cache) -> None:
    with StorageClient(cache) as client:
        with StorageService(cache, full(cache)) as service:
            task = held(client)
        assert cache.stats().writing == 0
        with StorageService(cache, full(cache)):
            rest = task.publish(20)
            assert f"(pid {service._pid}) is gone" in rest.result.reasons[0]
            assert rest.result.failed == 20
            assert task.publish(0).state is FAILED  # as often as one likes


def test_a_service_that_closes_publishes_what_it_is_told(cache: Cache) -> None:
    service, client = StorageService(cache, full(cache)), StorageClient(cache)
    task = held(client)
    rest = task.publish(20)
    assert service.close()
    assert rest.wait(60.0).prefix == 20
    assert rest.state is FINISHED
    assert sound(cache, KEYS) == 20
    assert client.close()


def test_a_namespace_that_was_cleared_meanwhile(cache: Cache) -> None:
    space = cache.namespace("v1")
    with ServedTier(cache, full(cache), group=8) as tier:
        task = tier.prefetch(KEYS, hold=True, namespace=space)
        assert task.wait(60.0).prefix == 20
        cache.clear(space)
        rest = task.publish(20)
        assert rest.wait(60.0).failed == 20
        assert rest.state is FAILED
        assert holds(tier.serving) == 0
        assert cache.check().pins == 0
