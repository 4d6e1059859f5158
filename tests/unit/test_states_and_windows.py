"""A model that has full attention, a window and recurrent states: one manager for all three."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refused

from lightcache import Cache, PageIndex
from lightcache.errors import ConfigError, LockTimeout
from lightcache.group_index import GroupIndex
from lightcache.groups import Rule
from lightcache.hybrid import Checkpoints, Grid, HybridConfig, HybridManager, open_hybrid
from lightcache.hybrid.checkpoints import Tier
from lightcache.hybrid.copiers import ArrayCopier
from lightcache.hybrid.opening import Windows
from lightcache.hybrid.saving import Saves
from lightcache.manager import ManagerConfig, NullBackend, Prompt, WritePolicy

WINDOW = Rule.window(5)
TOKENS = [i * 7 % 50 + 1 for i in range(42)]
PROMPT = Prompt(TOKENS)
GRID = Grid(4, 4, 8, 8)
ENDS = HybridConfig(saves=Saves.END_ONLY)


class Model:
    """Tensors, and what a pass writes to them: each token its number, a state its position."""

    def __init__(self, name: str, **how: Any) -> None:
        self.tensors = {
            "prefix": [np.zeros((2, 32, 4, 2, 8), np.float32) for _ in range(2)],
            WINDOW.name: [np.zeros((2, 24, 4, 2, 8), np.float32) for _ in range(4)],
        }
        self.states = torch.zeros((8, 30), dtype=torch.float64)
        self.opened = open_hybrid(
            self.tensors["prefix"],
            {"conv": [self.states]},
            name=f"{name}-pool",
            windows={WINDOW: self.tensors[WINDOW.name]},
            index=f"{name}-slots",
            model="m",
            axes="kbnhc",
            page_tokens=4,
            pages=200,
            secret=bytes(16),
        )
        assert isinstance(self.opened, Windows)
        self.hybrid = self.opened.manager(f"{name}-gpu", grid=GRID, hybrid=ENDS, **how)
        self.tables: dict[str, Any] = {}
        self.working = 0

    def begin(self, prompt: Prompt = PROMPT) -> Any:
        """Plan, take, load; what was found has the right bytes."""
        self.hybrid.plan("a", prompt)
        match = self.hybrid.take("a", wait=True)
        self.tables = self.hybrid.allocate("a", match.usable)
        self.working = int(self.hybrid.restore(["a"]).working[0])
        self.hybrid.load("a").wait(60)
        for name, begin in (("prefix", 0), (WINDOW.name, max(0, match.usable - 5))):
            for number, tensor in enumerate(self.tensors[name]):
                for token in range(begin, match.usable):
                    rows = tensor[:, self.tables[name][token // 4], token % 4]
                    assert (rows == 100 * number + prompt.tokens[token]).all(), (name, token)
        assert (self.states[self.working] == match.usable).all()
        return match

    def compute(self, prompt: Prompt = PROMPT, budget: int = 99) -> Any:
        """A request from begin to end. Returns its match."""
        match, at = self.begin(prompt), 0
        at = match.usable
        while at < len(prompt):
            plan = self.hybrid.save_plan("a", at, min(at + budget, len(prompt)))
            self.tables = self.hybrid.allocate("a", plan.end)
            for name, tensors in self.tensors.items():
                for number, tensor in enumerate(tensors):
                    for token in range(at, plan.end):
                        where = self.tables[name][token // 4]
                        tensor[:, where, token % 4] = 100 * number + prompt.tokens[token]
            self.states[self.working] = at = plan.end
            saved = plan.position is not None and self.hybrid.save(["a"], [plan.end])[0]
            self.hybrid.commit("a", at)
            if saved:
                self.hybrid.saved("a", at)
        self.hybrid.release("a", at=at)
        self.settle()
        return match

    def settle(self) -> None:
        """Let all copies end."""
        while self.hybrid.poll() or self.hybrid.leaving:
            pass

    def stored(self) -> None:
        """Let all writes to the storage end: they have pins."""
        assert self.hybrid.inner.storage is not None
        assert self.hybrid.inner.storage._executor.wait_idle(60.0)

    def forget_device(self) -> None:
        """Nothing is left on the device but running requests' blocks."""
        indexes = self.hybrid.manager.device.index, self.hybrid.windows[0].index
        for index in (*indexes, self.hybrid.checkpoints.slots):
            assert index is not None
            index.evict(64)
        for each in (*self.tensors["prefix"], *self.tensors[WINDOW.name], self.states):
            each[:] = 0

    def drop(self, group: GroupIndex, page: int) -> None:
        """The host forgets this page of a group."""
        space = self.hybrid.inner.weights.open_space("")
        keys = PROMPT.keys(space.host_spec)[page : page + 1]
        assert group.drop(keys, namespace=space.host) == 1

    def close(self) -> None:
        """Nothing may be pinned."""
        self.settle()
        self.hybrid.close()
        for index in (self.hybrid.manager.device.index, self.opened.kv.cache.index):
            assert index is not None
            assert index.check().pins == 0
            assert not index.plans.pages
        self.opened.close()


@pytest.fixture
def model(segment_name: str) -> Iterator[Model]:
    made = Model(segment_name)
    yield made
    made.close()


def test_all_groups_come_back_from_the_device_and_from_the_host(model: Model) -> None:
    groups = model.opened.kv.cache.index.groups()
    assert [group.name for group in groups] == ["kv", "states", "window5"]
    assert model.compute().usable == 0
    match = model.compute()
    assert (match.usable, match.limit) == (40, None)
    assert match.tiers == {"point": Tier.DEVICE, "window5": Tier.DEVICE}
    model.forget_device()
    match = model.compute()
    assert (match.usable, match.kv.host) == (40, 40)
    assert match.tiers == {"point": Tier.HOST, "window5": Tier.HOST}
    states, windows = model.hybrid.stats(), model.hybrid.window_stats()
    assert (states.requests, states.device_hits, states.host_hits, states.loads) == (3, 1, 1, 1)
    assert (windows.requests, windows.device_hits, windows.host_hits) == (3, 1, 1)
    assert windows.groups["point"].host_tokens == windows.groups["prefix"].host_tokens == 40
    assert windows.groups["prefix"].limited_requests == 1


def test_windows_are_saved_where_states_are_and_nowhere_else(model: Model) -> None:
    model.compute(budget=16)  # states of 16, 32 and 40
    (window,) = [each for each in model.opened.kv.cache.index.groups() if each.name == "window5"]
    run = model.hybrid.windows[0].run
    assert window.pages == run.parts * 6  # two pages for each


def test_the_position_is_the_deepest_that_all_groups_accept(model: Model) -> None:
    model.compute(budget=16)
    model.forget_device()
    index, window = model.opened.kv.cache.index, model.hybrid.windows[0]
    states = model.hybrid.checkpoints.host_states
    assert isinstance(states, GroupIndex)
    model.drop(GroupIndex(index, window.run), 9)  # of tokens 36 to 40
    (peeked,) = model.hybrid.peek_many([PROMPT])
    assert (peeked.usable, peeked.limit, peeked.branching) == (32, "window5", 40)
    assert model.hybrid.plan("b", PROMPT) == peeked
    model.hybrid.cancel("b")
    model.drop(states, 7)
    assert model.hybrid.plan("b", PROMPT).usable == 16
    model.hybrid.cancel("b")
    match = model.compute()
    assert (match.usable, match.kv_tokens) == (16, 40)
    assert model.compute().usable == 40  # what the first of them has saved


def test_the_third_prompt_down_a_prefix_hits(model: Model) -> None:
    found = []
    for last in (1, 2, 3):
        prompt = Prompt([*TOKENS[:27], *[last] * 15])
        found.append(model.compute(prompt))
        model.forget_device()
    assert [match.usable for match in found] == [0, 0, 24]
    assert [match.branching for match in found] == [None, 24, None]
    assert found[1].limit == "point"


def test_a_request_that_begins_anew_gives_everything_back(model: Model) -> None:
    model.compute()
    model.forget_device()
    model.begin()
    assert model.hybrid.restart("a").usable == 0
    assert (model.states[model.working] == 0).all()
    tables = model.hybrid.allocate("a", 20)
    assert {name: len(table) for name, table in tables.items()} == {"prefix": 5, "window5": 5}
    model.hybrid.release("a", publish=False)
    model.settle()
    model.hybrid.plan("a", PROMPT)
    model.hybrid.take("a")
    assert model.hybrid.skip_load("a").usable == 0  # the device has nothing
    model.hybrid.release("a")


def test_all_groups_come_back_from_storage(segment_name: str) -> None:
    model = Model(segment_name, storage="memory:")
    model.compute(budget=16)
    model.forget_device()
    model.stored()
    model.opened.kv.cache.index.evict(200)
    match = model.compute()
    assert (match.usable, match.kv.storage) == (40, 40)
    assert match.tiers == {"point": Tier.HOST, "window5": Tier.HOST}
    assert model.hybrid.stats().storage_hits == model.hybrid.window_stats().storage_hits == 1
    model.stored()
    model.close()


def test_kv_that_came_late_is_stored_with_a_state(
    segment_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV finds no room when its request ends, and neither does the last state. Write-back brings KV
    to the host: storage gets it up to the last position that has a state."""
    back = ManagerConfig(write=WritePolicy.BACK)
    model = Model(segment_name, storage="memory:", config=back)
    states = model.hybrid.checkpoints.host_states
    reserve, reserve_batch = GroupIndex.reserve, PageIndex.reserve_batch
    last = PROMPT.keys(model.hybrid.inner.weights.open_space("").host_spec)[9]

    def no_state(self: GroupIndex, keys: Any, *rest: Any, **how: Any) -> Any:
        if self is states and (keys[-1] == last).all():
            keys, rest = keys[:0], (0,)
        return reserve(self, keys, *rest, **how)

    def no_kv(self: PageIndex, *rest: Any, **how: Any) -> Any:
        if self is model.hybrid.manager.host.index:
            raise LockTimeout("arranged")
        return reserve_batch(self, *rest, **how)

    with monkeypatch.context() as patch:
        patch.setattr(GroupIndex, "reserve", no_state)
        patch.setattr(PageIndex, "reserve_batch", no_kv)
        model.compute(budget=16)  # states of 16 and 32
    model.stored()
    assert model.hybrid.manager.demote(64) > 0
    model.settle()
    model.stored()
    model.forget_device()
    model.opened.kv.cache.index.evict(200)
    match = model.compute()
    assert (match.usable, match.kv.storage) == (32, 32)
    model.stored()
    model.close()


def test_what_cannot_be_joined_is_refused(segment_name: str, model: Model) -> None:
    hybrid = model.hybrid
    how: dict[str, Any] = {"windows": hybrid.windows}
    given = hybrid.manager, hybrid.checkpoints, GRID
    refused(ConfigError, "expected checkpoints with their grid", HybridManager, *given[:2])
    refused(ConfigError, "saved where states are", HybridManager, *given, every=8, **how)
    pages: dict[str, Any] = {"page_bytes": 8, "fingerprint": "states", "independent": True}
    with Cache.create(f"{segment_name}.states", pages=2, **pages) as own:
        copier = ArrayCopier(np.zeros((4, 1)))
        alone = Checkpoints(None, own, NullBackend(), copier)
        message = "expected states in the host cache of KV"
        refused(ConfigError, message, HybridManager, hybrid.manager, alone, GRID, **how)
        alone.close()
