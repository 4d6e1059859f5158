"""The manager's work as engines do it in process: dicts, and an ordered dict for what may go.

The same interface as far as `bench manager` calls it. Blocks of the device and pages of the host
each have a dict from key to number, reference counts, and a queue of those that nobody uses.

It does less than a manager: a plan pins nothing, so what it found may be gone when the request is
taken, and does not count as a use; nor does what a request that ends, or goes on writing, has on
the host already. Nothing is shared, nobody's death is survived, no weights are looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from lightcache.hashing import KeySpec
from lightcache.manager import Prompt

SPEC = KeySpec("bench", 16, b"a secret of benchmarks")


@dataclass
class Tier:
    """Blocks of one medium."""

    size: int
    named: dict[bytes, int] = field(default_factory=dict)
    keys: dict[int, bytes] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    """Users of each block that has any."""
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Without users, oldest first."""
    fresh: int = 0

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Take the longest prefix that is there."""
        found = []
        for key in keys:
            block = self.named.get(key)
            if block is None:
                break
            found.append(block)
            users = self.used.get(block, 0)
            if not users:
                del self.idle[block]
            self.used[block] = users + 1
        return found

    def allocate(self) -> int:
        """A block without a key; the oldest without users goes."""
        if self.fresh < self.size:
            block, self.fresh = self.fresh, self.fresh + 1
        else:
            block, _ = self.idle.popitem(last=False)
            key = self.keys.pop(block, None)
            if key is not None:
                del self.named[key]
        self.used[block] = 1
        return block

    def name(self, block: int, key: bytes) -> None:
        """A block is full."""
        if key not in self.named:
            self.named[key] = block
            self.keys[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """One user less of each; the last ones of a prompt go first."""
        for block in reversed(blocks):
            users = self.used[block] - 1
            if users:
                self.used[block] = users
            else:
                del self.used[block]
                self.idle[block] = None


@dataclass
class Request:
    """A running request."""

    keys: list[bytes]
    hasher: object
    blocks: list[int]
    named: int
    written: int


class PlainManager:
    """See `KVCacheManager`."""

    def __init__(self, blocks: int, pages: int, block_tokens: int) -> None:
        """Empty."""
        self.device, self.host, self.block = Tier(blocks), Tier(pages), block_tokens
        self.plans: dict[Hashable, tuple[Prompt, list[bytes]]] = {}
        self.requests: dict[Hashable, Request] = {}
        self.hashes: dict[Prompt, list[bytes]] = {}
        """By the prompt itself, so it stays: another one may have its `id` when it is gone."""

    def hashed(self, prompt: Prompt) -> list[bytes]:
        """Its keys, as bytes."""
        found = self.hashes.get(prompt)
        if found is None:
            found = [key.tobytes() for key in prompt.keys(SPEC)]
            self.hashes[prompt] = found
        return found

    def plan_many(self, requests: Sequence[Hashable], prompts: Sequence[Prompt]) -> list[int]:
        """Look each prefix up on the device, and go on on the host."""
        counts = []
        for request, prompt in zip(requests, prompts, strict=True):
            keys = self.hashed(prompt)[: (len(prompt) - 1) // self.block]
            device, host = self.device.named, self.host.named
            n = 0
            for key in keys:
                if key not in device:
                    break
                n += 1
            for key in keys[n:]:
                if key not in host:
                    break
                n += 1
            self.plans[request] = prompt, keys
            counts.append(n)
        return counts

    def cancel(self, request: Hashable) -> None:
        """Forget a plan."""
        self.plans.pop(request, None)

    def take(self, request: Hashable) -> None:
        """Begin a request."""
        prompt, keys = self.plans.pop(request)
        blocks = self.device.match(keys)
        self.requests[request] = Request(
            list(self.hashed(prompt)), prompt.hasher(SPEC), blocks, len(blocks), 0
        )

    def allocate(self, request: Hashable, tokens: int) -> None:
        """Blocks for so many tokens."""
        one = self.requests[request]
        while len(one.blocks) * self.block < tokens:
            one.blocks.append(self.device.allocate())

    def commit_many(
        self, requests: Sequence[Hashable], totals: Sequence[int], tokens: Sequence[list[int]]
    ) -> None:
        """Name full blocks; every eight of them go to the host."""
        for request, total, new in zip(requests, totals, tokens, strict=True):
            one = self.requests[request]
            if new:
                one.keys += [key.tobytes() for key in one.hasher.update(new)]  # type: ignore[attr-defined]
            for i in range(one.named, total // self.block):
                self.device.name(one.blocks[i], one.keys[i])
            one.named = total // self.block
            if one.named - one.written >= 8:
                self._write(one)

    def _write(self, one: Request) -> None:
        taken = []
        for key in one.keys[one.written : one.named]:
            page = self.host.named.get(key)
            if page is None:
                page = self.host.allocate()
                self.host.name(page, key)
                taken.append(page)
        one.written = one.named
        self.host.release(taken)

    def release_many(self, requests: Sequence[Hashable], publish: bool = True) -> None:
        """End requests."""
        for request in requests:
            one = self.requests.pop(request)
            if publish:
                self._write(one)
            self.device.release(one.blocks)
