"""What LightLLM's three callers call on their host cache's client, in their order, as functions
over any class with its calls: theirs or ours. Each returns what the callers would see.

The callers, of commit 87881ae: `MultiLevelKVCacheManager` (the manager's process), the router's
queue (aborted requests), and `MultiLevelKvCacheModule` (rank 0). Their disk cache is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash

Answers = list[Any]
Step = Callable[[Any, Any, Any, int], Answers]


def hashes(prompt: str, pages: int, after: list[int] | None = None) -> list[int]:
    """As LightLLM makes them: xxh3 of all bytes up to a page's end; `after` those of another."""
    state = xxhash.xxh3_128(prompt.encode())
    made = []
    for page in range(pages):
        state.update(b"%d" % page)
        made.append(state.intdigest())
    return (after or []) + made


class Manager:
    """`_handle_group_req_multi_cache_match`: find, check, hand on."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def match(self, keys: list[int]) -> list[int]:
        """The prompt's pages. Ours is asked once, as the import hook makes it."""
        if hasattr(self.client, "query_pages"):
            pages = self.client.query_pages(keys)
        else:
            pages = []
            self.client.lock.acquire_sleep1ms()
            for key in keys:
                page, _ = self.client.query_one_page(key)
                if page is None:
                    break
                pages.append(page)
            self.client.lock.release()
        assert self.client.check_allpages_ready(pages)
        return pages

    def idle(self) -> None:
        """A second passes. Ours takes back what was given back; theirs has done so at once."""
        if hasattr(self.client, "collect"):
            self.client.collect()


class Worker:
    """The router's queue, and rank 0: give back, allocate, publish."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def _locked(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.client.lock.acquire_sleep1ms()
        try:
            return call(*arguments, **options)
        finally:
            self.client.lock.release()

    def loaded(self, pages: list[int]) -> None:
        """After a load, or of an aborted request."""
        self._locked(self.client.deref_pages, page_list=pages)

    def allocate(self, keys: list[int]) -> tuple[list[int], list[bool]]:
        """For a finished request."""
        return self._locked(self.client.allocate_pages, keys, disk_offload_enable=False)

    def publish(self, pages: list[int], tokens: int = 0) -> None:
        """When its copy has finished."""
        self._locked(
            self.client.update_pages_status_to_ready,
            page_list=pages,
            deref=True,
            disk_offload_enable=False,
            token_num_in_page_list=tokens,
        )

    def finish(self, keys: list[int]) -> tuple[list[int], list[bool]]:
        """All of a finished request, at once."""
        pages, ready = self.allocate(keys)
        self.publish(pages)
        return pages, ready


def real(pages: list[int]) -> int:
    """How many of a list are pages."""
    return sum(page != -1 for page in pages)


# ---- The scenes. `pages` is how many the cache has: 64.


def hit_and_miss(manager: Manager, worker: Worker, router: Worker, pages: int) -> Answers:
    """A request is served, then the same prompt, a longer one, and another."""
    first = hashes("first", 20)
    seen: Answers = [manager.match(first)]
    written, ready = worker.allocate(first)
    seen += [real(written), sum(ready), len(set(written)), manager.match(first)]  # being written
    worker.publish(written)
    found = manager.match(first)
    seen += [found == written]
    worker.loaded(found)
    longer = hashes("longer", 5, first)
    found = manager.match(longer)
    seen += [found == written]
    worker.loaded(found)
    again, ready = worker.finish(longer)
    seen += [again[:20] == written, real(again), sum(ready)]
    found = manager.match(longer)
    seen += [found == again, manager.match(hashes("another", 3))]
    router.loaded(found)  # aborted in the queue
    return seen


def shared_pages(manager: Manager, worker: Worker, router: Worker, pages: int) -> Answers:
    """Two requests that have found the same pages; one is aborted, one loads."""
    prompt = hashes("shared", 12)
    written, _ = worker.finish(prompt)
    one, other = manager.match(prompt), manager.match(prompt[:8])
    seen: Answers = [one == written, other == written[:8]]
    router.loaded(other)
    crowded = worker.finish(hashes("crowd", pages))[0]  # all but what `one` holds
    seen += [real(crowded), len(set(crowded) & set(one))]
    worker.loaded([*one, -1])
    seen += [manager.match(prompt) == written]
    worker.loaded(written)
    return seen


def several_at_once(manager: Manager, worker: Worker, router: Worker, pages: int) -> Answers:
    """One list of pages of two requests, given back in one call; two offloads in flight."""
    left, right = hashes("left", 6), hashes("right", 7)
    one, two = worker.allocate(left)[0], worker.allocate(right)[0]
    worker.publish(one)
    seen: Answers = [len(manager.match(left)), len(manager.match(right))]
    worker.loaded(one)
    worker.publish(two)
    found = manager.match(left) + manager.match(right)
    seen += [found == one + two]
    worker.loaded(found)
    manager.idle()
    everything = worker.finish(hashes("everything", pages))[0]  # so nothing was held
    seen += [real(everything), len(manager.match(left)), len(manager.match(right))]
    return seen


def no_room(manager: Manager, worker: Worker, router: Worker, pages: int) -> Answers:
    """A prompt of more pages than there are; what is found of it; a smaller one after it."""
    long = hashes("long", pages + 20)
    written, ready = worker.finish(long)
    found = manager.match(long)
    seen: Answers = [real(written), written[-20:] == [-1] * 20, sum(ready), len(found)]
    small, _ = worker.finish(hashes("small", 4))  # all are held by the request that found them
    seen += [real(small)]
    worker.loaded(found)
    manager.idle()
    small, _ = worker.finish(hashes("small", 4))
    seen += [real(small), len(manager.match(hashes("small", 4)))]
    worker.loaded(small)
    return seen


def eviction(manager: Manager, worker: Worker, router: Worker, pages: int) -> Answers:
    """Ten prompts of ten pages in 64: the last ones are found."""
    seen: Answers = []
    for number in range(10):
        worker.finish(hashes(f"prompt {number}", 10))
    for number in range(9, 4, -1):
        found = manager.match(hashes(f"prompt {number}", 10))
        seen.append(len(found))
        worker.loaded(found)
    found = manager.match(hashes("prompt 0", 10))
    seen.append(len(found))
    worker.loaded(found)
    return seen


SCENES: dict[str, Step] = {
    scene.__name__: scene
    for scene in (hit_and_miss, shared_pages, several_at_once, no_room, eviction)
}
