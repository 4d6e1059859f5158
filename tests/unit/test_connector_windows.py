"""Restoring by layer windows: the model begins while layers are still on their way."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.connecting import (  # noqa: E402
    cache,
    connector,
    held,
    save,
)
from support.tiny_models import answer, assert_same, kept, model, prompt  # noqa: E402

from lightcache import Cache, ConfigError, TransferFailed  # noqa: E402
from lightcache.connectors import transformers as lct  # noqa: E402

__all__ = ["cache", "connector"]

pytestmark = pytest.mark.models

LAYERS = 4


@pytest.fixture(scope="module")
def llama() -> Any:
    return model(num_hidden_layers=LAYERS)


def lease_of(cache: Cache, ids: Any) -> Any:
    return cache.match(cache.hash_pages(ids[0].tolist(), leave_one=True))


@pytest.mark.parametrize("window", [1, 3, LAYERS, 100])
def test_the_result_is_the_same(
    cache: Cache, connector: lct.Connector, llama: Any, window: int
) -> None:
    ids = prompt(70)
    save(connector, llama, ids)
    past = connector.restore(lease_of(cache, ids), window=window)
    assert past.reused == 64
    assert_same(answer(llama, ids, past), answer(llama, ids))
    while connector.engine.poll():
        pass
    assert held(cache) == (0, 0)


class Watched:
    """A transfer that notes who waited for what."""

    def __init__(self, transfer: Any) -> None:
        self.transfer, self.asked, self.error = transfer, [], False

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self.asked.append(layer)
        if self.error:
            raise TransferFailed("the copy failed")
        self.transfer.wait_layer(layer, stream)

    def done(self) -> bool:
        return bool(self.transfer.done())

    def wait_on(self, stream: Any = None) -> None:
        self.asked.append("all")
        self.transfer.wait_on(stream)


@pytest.fixture
def restored(cache: Cache, connector: lct.Connector, llama: Any) -> Any:
    """A prompt, what was restored of it, and its transfer, watched."""
    ids = prompt(70)
    save(connector, llama, ids)
    past = connector.restore(lease_of(cache, ids), window=1)
    past._load.transfer = watched = Watched(past._load.transfer)
    return ids, past, watched


def test_each_layer_waits_for_its_own_and_once(llama: Any, restored: Any) -> None:
    ids, past, watched = restored
    answer(llama, ids, past)
    assert watched.asked == list(range(LAYERS))


def test_who_reads_all_of_it_waits_for_all(
    cache: Cache, connector: lct.Connector, restored: Any
) -> None:
    ids, past, watched = restored
    stored = kept(connector.restore(lease_of(cache, ids)), 64)
    cache.clear()
    new = cache.reserve(cache.hash_pages(ids[0].tolist(), leave_one=True))
    connector.offload(past, new).wait()
    assert watched.asked == ["all"]
    again = connector.restore(lease_of(cache, ids))
    assert all(torch.equal(a, b) for a, b in zip(kept(again, 64), stored, strict=True))


def test_rows_are_selected_from_what_has_arrived(restored: Any) -> None:
    _, past, watched = restored
    past.batch_select_indices(torch.tensor([0]))
    assert watched.asked == ["all"]


def test_a_reset_waits_for_nothing(llama: Any, restored: Any) -> None:
    ids, past, watched = restored
    past.reset()
    assert_same(answer(llama, ids, past), answer(llama, ids))
    assert watched.asked == []


def test_what_does_not_arrive_is_said_by_its_layer(
    cache: Cache, connector: lct.Connector, llama: Any, restored: Any
) -> None:
    ids, past, watched = restored
    watched.error = True
    with pytest.raises(TransferFailed), torch.no_grad():
        llama(ids[:, 64:], past_key_values=past)
    assert watched.asked == [0]
    while connector.engine.poll():  # the copy itself goes on, and holds its pages
        pass
    assert held(cache) == (0, 0)


@pytest.mark.parametrize("window", [0, -1, 1.5, "all"])
def test_windows_that_are_none(
    cache: Cache, connector: lct.Connector, llama: Any, window: Any
) -> None:
    ids = prompt(40)
    save(connector, llama, ids)
    with lease_of(cache, ids) as lease, pytest.raises(ConfigError):
        connector.restore(lease, window=window)
    assert held(cache) == (0, 0)
