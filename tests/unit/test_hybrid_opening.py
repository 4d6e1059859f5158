"""From an engine's tensors to checkpoints, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.keys import prompt  # noqa: E402
from support.refusals import refused  # noqa: E402

from lightcache import Cache, cache_name  # noqa: E402
from lightcache.errors import ConfigError, InUse, LayoutMismatch  # noqa: E402
from lightcache.hybrid import Checkpoints, open_states  # noqa: E402
from lightcache.hybrid.checkpoints import Path, Tier  # noqa: E402
from lightcache.hybrid.opening import States, state_layout  # noqa: E402
from lightcache.manager import WritePolicy  # noqa: E402
from lightcache.namespaces import Namespace  # noqa: E402

SECRET = b"a secret of tests"
SLOTS = 6


def parts(slots: int = SLOTS, layers: int = 2, conv: Any = torch.bfloat16) -> dict[str, list[Any]]:
    """As an engine keeps them, full of nonsense."""
    made = torch.Generator().manual_seed(1)

    def tensors(dtype: Any, *shape: int) -> list[Any]:
        return [
            torch.randint(0, 99, (slots, *shape), generator=made).to(dtype) for _ in range(layers)
        ]

    return {"conv": tensors(conv, 5, 3), "recurrent": tensors(torch.float32, 2, 4, 4)}


def bytes_in(tensors: dict[str, list[Any]], slot: int) -> bytes:
    """Of a state, as a page has it: layer by layer, part by part."""
    layers = zip(*tensors.values(), strict=True)
    flat = [part[slot].contiguous().view(torch.uint8).numpy() for one in layers for part in one]
    return b"".join(each.tobytes() for each in flat)


def open_(name: str, tensors: Any, **how: Any) -> States:
    given = {"model": "m", "index": f"{name}-slots", "pages": 4, "secret": SECRET}
    return open_states(tensors, name=f"{name}-states", **{**given, **how})


def test_without_a_name_each_configuration_has_a_cache(segment_name: str) -> None:
    how = {"model": f"{segment_name}@1", "pages": 4, "secret": SECRET}
    with open_states(parts(), **how) as one, open_states(parts(), **how) as same:
        with open_states(parts(conv=torch.float32), **how) as other:
            assert one.host is not None
            assert same.host is not None
            assert other.host is not None
            assert one.host.name == same.host.name == cache_name(how["model"], one.host.fingerprint)
            assert other.host.name != one.host.name


@pytest.fixture
def tensors() -> dict[str, list[Any]]:
    return parts()


@pytest.fixture
def states(segment_name: str, tensors: Any) -> Iterator[States]:
    with open_(segment_name, tensors) as made:
        yield made


def path_of(checkpoints: Checkpoints, positions: int, seed: int = 0) -> Path:
    space = checkpoints.spaces.beside(Namespace("w", "", 1), lambda: True)
    assert space is not None
    return Path(prompt(seed, positions), space)


def settled(checkpoints: Checkpoints) -> None:
    checkpoints.transfers.wait(None, 60)
    checkpoints.poll()


# ---- the whole of it


def test_a_state_goes_to_the_host_and_comes_back_to_another_slot(
    states: States, tensors: Any
) -> None:
    checkpoints, before = states.checkpoints(), bytes_in(tensors, 3)
    path = path_of(checkpoints, 2)
    assert checkpoints.acquire(6).detach().tolist() == list(range(6)), "all slots of the tensors"
    checkpoints.free(np.array([0, 1, 2, 4, 5], np.int32))
    checkpoints.donate(3, path, 2)
    settled(checkpoints)
    assert checkpoints.last_ready(path) == (Tier.DEVICE, 2)
    assert states.slots is not None
    assert states.slots.evict(SLOTS) == 1
    for each in [*tensors["conv"], *tensors["recurrent"]]:
        each.zero_()
    assert checkpoints.last_ready(path) == (Tier.HOST, 2)
    assert checkpoints.plan("r", path, (Tier.HOST, 2), 60)
    taken = checkpoints.take("r")
    assert taken is not None
    checkpoints.load(taken[1], 5).wait(60)
    assert bytes_in(tensors, 5) == before
    states.copier.copy([5], [0]).wait()
    assert bytes_in(tensors, 0) == before
    assert set(bytes_in(tensors, 3)) == {0}
    checkpoints.close()


def test_engines_of_a_node_share_the_host(segment_name: str, tensors: Any) -> None:
    other = parts()
    with (
        open_(segment_name, tensors) as mine,
        open_(segment_name, other, index=f"{segment_name}-other") as theirs,
    ):
        first, second = mine.checkpoints(), theirs.checkpoints()
        path, there = path_of(first, 1), path_of(second, 1)
        slot = int(first.acquire(1).detach()[0])
        first.donate(slot, path, 1)
        settled(first)
        assert second.last_ready(there) == (Tier.HOST, 1)
        first.close()
        second.close()


def test_how_is_that_of_checkpoints(states: States) -> None:
    made = states.checkpoints(write=WritePolicy.BACK, low_water=2)
    assert (made.write, made.low_water) == (WritePolicy.BACK, 2)
    made.close()


def test_fewer_slots_than_the_tensors_have(segment_name: str, tensors: Any) -> None:
    with open_(segment_name, tensors, slots=4) as states:
        assert states.slots is not None
        assert states.slots.pages == 4
        assert states.layout.slots == SLOTS


def test_no_slots_for_checkpoints_or_no_host(segment_name: str, tensors: Any) -> None:
    with open_(segment_name, tensors, index=None) as states:
        assert states.slots is None
        states.checkpoints().close()
    with open_(segment_name, tensors, pages=None) as states:
        assert (states.host, states.copies) == (None, None)
        states.checkpoints().close()


# ---- the format


def test_a_page_is_one_state_and_says_whose(states: States, tensors: Any) -> None:
    layout, host = states.layout, states.host
    assert layout.geometry.used_bytes == len(bytes_in(tensors, 0)) == states.copier.nbytes
    assert layout.geometry.layers == (0, 1)
    assert layout.dtypes == "conv:bfloat16,recurrent:float32"
    assert host is not None
    assert host.fingerprint == f"m {layout.dtypes} {layout.geometry.fingerprint()}"
    assert host.index.independent


def test_layers_have_their_numbers_in_the_model(tensors: Any) -> None:
    assert state_layout(tensors, layers=[2, 6]).geometry.layers == (2, 6)


def test_one_tensor_of_all_layers_is_as_good(tensors: Any) -> None:
    whole = {name: torch.stack(each) for name, each in tensors.items()}
    made = state_layout(whole)
    assert made.geometry == state_layout(tensors).geometry
    plane = made.planes.planes["state", 1, "conv"]
    assert plane.address == whole["conv"][1].data_ptr()


def test_slots_may_be_apart(segment_name: str) -> None:
    """As where an engine keeps a block of bytes for each state, all parts in it."""
    raw = torch.zeros((SLOTS, 256), dtype=torch.uint8)
    conv = raw[:, :32].view(torch.bfloat16)
    recurrent = raw[:, 64:128].view(torch.float32).unflatten(1, (2, 8))
    with open_(segment_name, {"conv": [conv], "recurrent": [recurrent]}) as states:
        raw[2] = 7
        states.copier.copy([2], [4]).wait()
        assert raw[4].count_nonzero() == 32 + 64


# ---- what is refused


WRONG: list[tuple[str, Any, str]] = [
    ("nothing", {}, r"found \{\}"),
    ("no layers", {"conv": []}, r"a tensor of every layer, found \{'conv': 0\}"),
    (
        "other layers",
        {"conv": parts()["conv"], "recurrent": parts()["recurrent"][:1]},
        r"found \{'conv': 2, 'recurrent': 1\}",
    ),
    (
        "shapes",
        {"conv": [torch.zeros(3, 4), torch.zeros(3, 5)]},
        r"part 'conv': expected tensors \(slots, ...\) of one shape and dtype .* \(3, 4\).* \(3, 5",
    ),
    ("dtypes", {"conv": [torch.zeros(3, 4), torch.zeros(3, 4).int()]}, "float32.*int32"),
    ("slots alone", {"conv": [torch.zeros(3)]}, r"found \[\('torch.float32', \(3,\)\)\]"),
    ("no tensors", {"conv": ["x"]}, r"found \[\('str', \(\)\)\]"),
    ("no slots", {"conv": [torch.zeros(0, 4)]}, r"found .*\(0, 4\)"),
    ("apart", {"conv": [torch.zeros(3, 4, 5).transpose(1, 2)]}, "contents that touch each other"),
]


@pytest.mark.parametrize(("wrong", "words"), [one[1:] for one in WRONG], ids=[o[0] for o in WRONG])
def test_tensors_that_are_none(wrong: Any, words: str) -> None:
    refused(ConfigError, words, state_layout, wrong)


def test_layers_that_are_not_as_many(tensors: Any) -> None:
    refused(ConfigError, "expected 3 tensors, for layers", state_layout, tensors, layers=[0, 1, 2])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"index": None, "pages": None}, "found neither"),
        ({"slots": 7}, "slots: expected .* 6, found 7"),
        ({"slots": 0}, "slots: expected 1"),
        (
            {"independent": False, "page_tokens": 16},
            "independent, page_tokens follow from the tensors",
        ),
        ({"size": "1MiB"}, "pages= or size="),
        ({"minimums": {"states": 1}}, r"it has one group, found \['states'\]"),
    ],
)
def test_what_is_refused(segment_name: str, tensors: Any, how: Any, words: str) -> None:
    refused(ConfigError, words, open_, segment_name, tensors, **how)


def test_states_of_others(segment_name: str, states: States, tensors: Any) -> None:
    index = f"{segment_name}-other"
    halves = parts(conv=torch.float16)  # as wide
    for how, other in (({}, halves), ({"model": "n"}, tensors), ({}, parts(layers=3))):
        refused(LayoutMismatch, "", open_, segment_name, other, index=index, **how)
    refused(InUse, "", open_, segment_name, tensors)


def test_a_cache_that_is_not_flat(segment_name: str, tensors: Any) -> None:
    layout = state_layout(tensors)
    with (
        Cache.create(
            f"{segment_name}-states",
            pages=4,
            page_bytes=layout.geometry.page_bytes,
            page_tokens=1,
            fingerprint=f"m {layout.dtypes} {layout.geometry.fingerprint()}",
            secret=SECRET,
        ),
        pytest.raises(LayoutMismatch, match="independent"),
    ):
        open_(segment_name, tensors)


def test_what_was_opened_is_closed_where_the_rest_fails(
    segment_name: str, tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(*_: Any, **__: Any) -> None:
        raise ConfigError("arranged")

    with monkeypatch.context() as failing:
        failing.setattr(Cache, "transfer_engine", engine)
        refused(ConfigError, "arranged", open_, segment_name, tensors)
    open_(segment_name, tensors).close()  # nobody lives in an index of that name
