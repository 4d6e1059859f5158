"""Parts of one process that share a client of a cache: `Cache.open(shared=True)`."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.refusals import refused

from lightcache import Cache, ConfigError, Detached, InUse, LayoutMismatch
from lightcache.shm import Segment
from lightcache.shm.listing import read_segment

FORM: dict[str, Any] = {
    "pages": 8,
    "page_bytes": 4096,
    "page_tokens": 4,
    "fingerprint": "f",
    "secret": bytes(16),
}
OPTIONS: dict[str, Any] = {"role": "engine", "device": True, "shared": True}
TOKENS = np.arange(16)
Wait = Callable[[Callable[[], bool], str], None]


def test_two_halves_are_one_client(segment_name: str) -> None:
    scheduler = Cache.open(segment_name, **FORM, **OPTIONS)
    worker = Cache.open(segment_name, **FORM, shared=True)
    router = Cache.attach(segment_name, fingerprint="f", shared=True)
    assert [client.role for client in scheduler.clients()] == ["engine"]
    assert scheduler.client_id == worker.client_id == router.client_id
    with worker.reserve(worker.hash_pages(TOKENS)) as new:
        new.publish()
    assert scheduler.plan("request", scheduler.hash_pages(TOKENS)) == 4
    lease = worker.take("request")
    assert lease.pages.tolist() == new.pages.tolist()
    scheduler.close()
    scheduler.close()
    with Cache.open(segment_name, **FORM) as own:
        assert own.client_id != worker.client_id
        assert [client.pid for client in own.clients()] == [os.getpid()] * 2
    view = worker.pool.array
    worker.close()
    refused(InUse, "views", router.close)
    del view
    router.close()
    router.close()
    assert read_segment(segment_name) is None, "the last has left"
    with Cache.open(segment_name, **FORM, **OPTIONS) as again:
        assert len(again.clients()) == 1


def test_other_options_are_named(segment_name: str) -> None:
    with Cache.open(segment_name, **FORM, **OPTIONS) as first:
        words = (
            "numa: expected 'interleave', found None; grow: expected False, found True; give the"
        )
        how = {"numa": "interleave", "grow": False}
        refused(ConfigError, words, Cache.open, segment_name, **FORM, **how, shared=True)
        with Cache.attach(segment_name, role="worker", shared=True) as second:
            assert [client.role for client in second.clients()] == ["engine"]
        other = {**FORM, "page_tokens": 8, "pages": 9}
        words = "page_tokens: expected 8, found 4; pages: expected 9, found 8"
        refused(LayoutMismatch, words, Cache.open, segment_name, **other, shared=True)
        lasting = {**FORM, "lifetime": "persistent"}
        words = "lifetime: expected persistent, found attached"
        refused(LayoutMismatch, words, Cache.open, segment_name, **lasting, shared=True)
        refused(ConfigError, "a reader", Cache.attach, segment_name, readonly=True, shared=True)
        assert len(first.clients()) == 1
    with Cache.open(segment_name, **FORM, shared=True) as plain:
        words = "device: expected True, found False"
        refused(ConfigError, words, Cache.open, segment_name, **FORM, **OPTIONS)
        assert not plain.clients()[0].device


def test_handles_that_are_dropped_count_no_more(segment_name: str) -> None:
    first, second = (Cache.open(segment_name, **FORM, shared=True) for _ in range(2))
    del second
    gc.collect()
    first.close()
    assert read_segment(segment_name) is None
    third, fourth = (Cache.open(segment_name, **FORM, shared=True) for _ in range(2))
    del third, fourth
    gc.collect()
    assert read_segment(segment_name) is None


def test_one_that_was_replaced_is_shared_no_more(segment_name: str) -> None:
    old = Cache.open(segment_name, **FORM, shared=True)
    assert Segment.unlink(segment_name, force=True)
    with Cache.open(segment_name, **FORM, shared=True) as new:
        assert new.client_id
        refused(Detached, "", lambda: old.client_id and old.match(new.hash_pages(TOKENS)))
        old.close()
        assert new.check().clean


def test_many_threads_open_and_close(segment_name: str) -> None:
    most, failed = [], []
    start = threading.Barrier(6)

    def live() -> None:
        try:
            start.wait()
            for _ in range(20):
                with Cache.open(segment_name, **FORM, shared=True) as cache:
                    most.append(len(cache.clients()))
                    cache.match(cache.hash_pages(TOKENS)).release()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=live) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert set(most) == {1}
    assert read_segment(segment_name) is None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_is_not_its_parent(segment_name: str) -> None:
    with Cache.open(segment_name, **FORM, **OPTIONS) as parent, parent.opening.leaving(parent):  # type: ignore[union-attr]
        child = os.fork()
        if not child:  # the lock is held by a thread that is not here
            status = 1
            try:
                refused(Detached, "", parent.close)
                with Cache.open(segment_name, **FORM, shared=True, role="child") as own:
                    with Cache.open(segment_name, **FORM, shared=True) as again:
                        assert again.client_id == own.client_id
                    status = 0 if len(own.clients()) == 2 else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert [client.role for client in parent.clients()] == ["engine"]
