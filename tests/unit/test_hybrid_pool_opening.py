"""From an engine's tensors to one pool of KV and states, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.keys import prompt  # noqa: E402
from support.refusals import refused  # noqa: E402

from lightcache.errors import ConfigError, LayoutMismatch  # noqa: E402
from lightcache.hybrid import Checkpoints, Grid, HybridManager, open_hybrid  # noqa: E402
from lightcache.hybrid.checkpoints import Path, Tier  # noqa: E402
from lightcache.hybrid.opening import States  # noqa: E402
from lightcache.manager import Prompt  # noqa: E402

SECRET = b"a secret of tests"
BLOCKS, BLOCK, SLOTS = 32, 4, 6


def kv_tensors(layers: int = 2) -> list[Any]:
    made = torch.Generator().manual_seed(1)
    return [torch.rand((2, BLOCKS, BLOCK, 2, 8), generator=made) for _ in range(layers)]


def state_tensors(width: int = 40) -> dict[str, list[Any]]:
    """As an engine keeps them, full of nonsense: 2 * (60 + 4 * width) bytes a state."""
    made = torch.Generator().manual_seed(2)

    def tensors(dtype: Any, *shape: int) -> list[Any]:
        return [torch.randint(0, 99, (SLOTS, *shape), generator=made).to(dtype) for _ in range(2)]

    return {"conv": tensors(torch.bfloat16, 30), "recurrent": tensors(torch.float32, width)}


def open_(name: str, kv: Any, states: Any, **how: Any) -> States:
    given = {"model": "m", "axes": "kbnhc", "page_tokens": 4, "index": f"{name}-slots"}
    return open_hybrid(
        kv, states, name=f"{name}-pool", **{"pages": 64, "secret": SECRET, **given, **how}
    )


def path_of(states: States, checkpoints: Checkpoints, positions: int) -> Path:
    assert states.kv is not None
    space = checkpoints.spaces.beside(states.kv.cache.index.default_namespace, lambda: True)
    assert space is not None
    return Path(prompt(0, positions), space)


def test_a_minimum_for_states(segment_name: str) -> None:
    """By its name and in bytes; more KV than the pool has leaves as many states."""
    tensors = kv_tensors(), state_tensors(510)
    with open_(segment_name, *tensors, minimums={"states": "20KB", "kv": 1}) as states:
        assert states.kv is not None
        index, size = states.kv.cache.index, states.kv.cache.page_bytes
        assert (size, states.layout.geometry.parts) == (1024, 5)
        assert [group.minimum_pages for group in index.groups()] == [1, 20]
        checkpoints = states.checkpoints()
        path = path_of(states, checkpoints, 6)
        run = checkpoints.run
        for page in range(6):
            with index.reserve(run.keys(path.keys[page : page + 1]), run=run) as new:
                new.publish()
        with index.reserve(prompt(7, 60)) as new:
            assert len(new.pages) == 44
            assert [group.pages for group in index.groups()] == [44, 20]
        checkpoints.close()
        wrong = {"index": f"{segment_name}-b", "slots": 2}
        refused(ConfigError, r"'kv', 'states'\], found \['window5'\]",
                open_, segment_name, *tensors, minimums={"window5": 1}, **wrong)  # fmt: skip
        refused(ConfigError, r"minimum of 100 pages .*the 20 pages .*64 pages",
                open_, segment_name, *tensors, minimums={"kv": 102400}, **wrong)  # fmt: skip
        open_(segment_name, *tensors, minimums={"states": 0}, **wrong).close()
        assert [group.minimum_pages for group in index.groups()] == [1, 0]


def test_the_bytes_of_a_state_come_back(segment_name: str) -> None:
    parts = state_tensors(510)
    with open_(segment_name, kv_tensors(), parts) as states:
        assert states.layout.geometry.parts == 5
        checkpoints = states.checkpoints()
        path = path_of(states, checkpoints, 2)
        every = [each for tensors in parts.values() for each in tensors]
        wanted = [each[3].clone() for each in every]
        slots = checkpoints.acquire(SLOTS).detach()
        checkpoints.donate(3, path, 2)
        checkpoints.free(slots[slots != 3])
        checkpoints.transfers.wait(None, 60)
        checkpoints.poll()
        assert states.slots is not None
        states.slots.evict(SLOTS)
        assert states.host is not None
        assert states.host.index.stats().ready == 5
        for each in every:
            each.zero_()
        assert checkpoints.plan("r", path, (Tier.HOST, 2), 60)
        taken = checkpoints.take("r")
        assert taken is not None
        checkpoints.load(taken[1], 5).wait(60)
        assert all(torch.equal(each[5], one) for each, one in zip(every, wanted, strict=True))
        assert all(not each[4].any() for each in every)
        checkpoints.close()


def run(states: States, name: str, ids: Prompt, expected: int) -> None:
    """A request that finds so many tokens, and saves a state at 40."""
    assert states.kv is not None
    manager = states.kv.manager(name)
    checkpoints = states.checkpoints()
    hybrid = HybridManager(manager, checkpoints, Grid(BLOCK, 4, 4, 8))
    assert hybrid.plan("a", ids).usable == expected
    hybrid.take("a")
    hybrid.allocate("a", 42)
    hybrid.restore(["a"])
    hybrid.load("a").wait()
    if not expected:
        plan = hybrid.save_plan("a", 0, 42)
        assert plan.position == 40
        hybrid.save(["a"], [plan.position])
        hybrid.commit("a", 40)
        hybrid.saved("a", plan.position)
    hybrid.release("a")
    while hybrid.poll():
        pass
    hybrid.close()
    checkpoints.close()


def test_two_engines_share_a_pool(segment_name: str) -> None:
    ids = Prompt(list(range(42)))
    with (
        open_(segment_name, kv_tensors(), state_tensors()) as mine,
        open_(segment_name, kv_tensors(), state_tensors(), index=f"{segment_name}-b") as theirs,
    ):
        run(mine, f"{segment_name}-kv-a", ids, 0)
        run(theirs, f"{segment_name}-kv-b", ids, 40)


def test_padding_is_said_with_what_fits(segment_name: str, caplog: Any) -> None:
    kv = [torch.rand((2, BLOCKS, 16, 16, 64))]
    with open_(segment_name, kv, state_tensors(40_000), page_tokens=16):
        pass
    assert "states: 320120 bytes take up 3 x 131072 bytes of the pool, 19 %" in caplog.text
    assert "page_tokens=" in caplog.text


def test_what_is_refused(segment_name: str) -> None:
    refused(
        ConfigError,
        "page_bytes follow from the tensors",
        open_,
        segment_name,
        kv_tensors(),
        state_tensors(),
        page_bytes=4096,
    )
    with open_(segment_name, kv_tensors(), state_tensors()):
        refused(
            LayoutMismatch,
            "fingerprint",
            open_,
            segment_name,
            kv_tensors(),
            state_tensors(60),
            index=f"{segment_name}-other",
        )


def test_its_groups_have_names(segment_name: str) -> None:
    with open_(segment_name, kv_tensors(), state_tensors()) as states:
        assert states.host is not None
        found = states.host.index.groups()
        assert [(group.number, group.name) for group in found] == [(0, "kv"), (1, "states")]
        twice = {"kv_groups": ("a",), "index": f"{segment_name}-other"}
        tensors = kv_tensors(), state_tensors()
        refused(ConfigError, "kv_groups follow", open_, segment_name, *tensors, **twice)
