"""Which states the connector's cache keeps: how many on a path, behind which others, and whose."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hybrid_connecting import (  # noqa: E402
    ask,
    joined,
    ready_states,
    saved,
    small_cache,
    superseded,
    together,
)
from support.raising import Odd  # noqa: E402
from support.tiny_models import prompt  # noqa: E402

from lightcache.connectors import transformers as lct  # noqa: E402
from lightcache.connectors.state_pages import StateBackend  # noqa: E402

pytestmark = pytest.mark.models


def turns(connector: lct.Connector, model: Any, ids: Any, count: int) -> Any:
    """A conversation: each turn 32 tokens longer, and so a state deeper."""
    for seed in range(count):
        ask(connector, model, ids, steps=1)
        ids = together(ids, prompt(32, seed=20 + seed))
    return ids


def test_where_prompts_part_a_state_stays(segment_name: str, qwen: Any) -> None:
    """Saved where the second left the path of the first; both go on, and the third finds it."""
    with joined(segment_name, qwen, chunk=32, every=32, path_limit=2) as connector:
        common = prompt(40)
        ask(connector, qwen, together(common, prompt(60, 1)), steps=1)
        ids = turns(connector, qwen, together(common, prompt(30, 2)), 4)
        assert saved(connector, ids) == [32, 64, 96, 128, 160]
        assert superseded(connector, ids) == [64, 96, 128]
        assert ask(connector, qwen, together(common, prompt(40, 3)), steps=1)[0] == 32


# ---- whose


def test_clearing_takes_both(segment_name: str, qwen: Any) -> None:
    """A tenant's states go with its keys and values; the other's, and salted ones, stay."""
    with small_cache(segment_name, qwen) as cache:
        with lct.Connector(cache, qwen) as connector:
            ways: dict[str, dict[str, Any]] = {
                "a": {"namespace": cache.namespace("v1", "a")},
                "b": {"namespace": cache.namespace("v1", "b")},
                "salted": {"salt": "a"},
            }

            def reused(name: str) -> int:
                with connector.prefix(prompt(70), **ways[name]) as past:
                    connector.prefill(past)
                    return past.reused

            assert [reused(name) for name in ways] == [0, 0, 0]
            gone = ways["a"]["namespace"]
            cache.clear(gone)
            assert ready_states(connector) == 2
            assert [reused("a"), reused("a")] == [0, 0], "a cleared one finds and keeps nothing"
            assert ready_states(connector) == 2
            ways["a"]["namespace"] = cache.namespace("v1", "a")
            assert [reused(name) for name in ways] == [0, 64, 64]
            assert reused("a") == 64
            cache.clear()
            assert ready_states(connector) == 2
            assert [reused(name) for name in ways] == [64, 64, 0], "a salt is no namespace"
            assert reused("salted") == 64


# ---- copies that raise


class OddCopy:
    """A copy of a device that fails while a stream is told to wait for it, and ever after."""

    def __init__(self, lease: Any) -> None:
        self.lease, self.raised = lease, 0
        self.transfer = self

    def wait_on(self, stream: Any) -> None:
        """See `Transfer`."""
        del stream
        self.fail()

    def done(self) -> bool:
        """See `TransferHandle`."""
        if self.raised:
            self.fail()
        return False

    def wait(self, timeout: float | None = None) -> None:
        """See `TransferHandle`."""
        del timeout
        self.fail()

    def fail(self) -> None:
        self.raised += 1
        raise Odd(f"arranged: {self.raised}")


def test_what_a_wait_for_a_copy_raises_is_told_once(connector: lct.Connector, qwen: Any) -> None:
    """To whoever waits, and not to the next one, who has no part in it."""
    ids = prompt(70)
    ask(connector, qwen, ids, steps=1)
    assert connector.hybrid is not None
    checkpoints = connector.hybrid.checkpoints
    assert checkpoints is not None
    path = checkpoints.path(connector.cache.hash_pages(ids[0].tolist()))
    assert path is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateBackend, "load", lambda _, lease, *__: OddCopy(lease))
        with pytest.raises(Odd, match="arranged: 1"):
            checkpoints.load(connector.empty(), checkpoints.match(path, 4))
    assert ask(connector, qwen, ids, steps=1)[0] == 64
    assert connector.cache.check().pins == 0
