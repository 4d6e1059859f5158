"""The transfer benchmark without a device: its oracle, its calls, its windows, its parts."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.plain_engine import PlainEngine, as_array
from support.refusals import refused

import lightcache_bench as frame
from lightcache import ConfigError, TransferFailed
from lightcache.kernels.geometry import MOST_PADDING, held_heads
from lightcache.tools import cli
from lightcache_bench import (
    Row,
    _gpu_copies,
    _gpu_device,
    _gpu_layers,
    _gpu_rates,
    _gpu_rig,
    _gpu_shapes,
    transfer,
)
from lightcache_bench._gpu_rig import Bench, Rig, Sizes
from lightcache_bench._restoring import restoring

torch = pytest.importorskip("torch")
TINY = Sizes(2 << 20, 8 << 20, 4 << 20, rounds=1)
SHAPES = (
    _gpu_shapes.attention("small", 4, 2, 4, batch=3, target=None),
    _gpu_shapes.attention("a share", 4, 4, 4, batch=4, target=None, ranks=4),
    _gpu_shapes.state(1, 4, batch=1, target=None),
    _gpu_shapes.states_of("in parts", 3, 100 << 10, 2, None, part_bytes=64 << 10),
)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_device, "devices", lambda: 0)


@pytest.fixture
def bench() -> Any:
    made = Bench(_gpu_device.Gpu("cpu"), True, TINY)
    yield made
    made.close()


# ---- shapes and calls


def test_shapes_have_the_sizes_of_their_names() -> None:
    assert _gpu_shapes.LARGE.geometry.page_bytes == 8 << 20
    assert [shape.share.nbytes >> 10 for shape in _gpu_shapes.SMALL] == [256, 256, 32, 32]
    assert _gpu_shapes.SMALL[1].geometry.page_bytes == 2 << 20
    assert [shape.geometry.page_bytes >> 20 for shape in _gpu_shapes.STATES] == [9, 74, 190]
    cut = [shape.geometry for shape in _gpu_shapes.IN_PARTS]
    assert [round(each.used_bytes / 2**20, 1) for each in cut] == [9.0, 73.7, 190.0]
    assert [each.parts for each in cut] == [6, 50, 127]
    assert all(each.padding < MOST_PADDING for each in cut)


@pytest.mark.parametrize("shape", [*SHAPES, *_gpu_shapes.SMALL], ids=lambda shape: shape.name)
def test_places_tile_the_device(shape: Any) -> None:
    places = _gpu_shapes.places(shape, 64 << 20)
    ends = [place.offset + place.slots * place.width for place in places]
    assert [place.offset for place in places] == [0, *ends[:-1]]
    assert ends[-1] <= 64 << 20
    assert len({place.slots for place in places}) == 1
    expected = sum(
        held_heads(plane, shape.rank, shape.ranks).count * plane.row_bytes * len(group.layers)
        for group in shape.geometry.groups
        for plane in group.planes
    )
    assert sum(place.width for place in places) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_calls(shape: Any) -> None:
    each, tokens = shape.share.nbytes, shape.geometry.page_tokens
    total = 20 * shape.batch * each + 1
    parts = shape.geometry.parts
    host = range(10, 10 + 50 * parts)
    offload, load = _gpu_shapes.scattered(shape, host, 40 * tokens, total)
    for calls in (offload, load):
        assert total <= calls.nbytes < total + shape.batch * each
        assert len(calls.moves) == 21
        assert all(len(move.pages) == shape.batch * parts for move in calls.moves)
        assert calls.pages.shape[1] == parts
        assert all(len(move.slots) == shape.batch * tokens for move in calls.moves)
        assert set(calls.pages.ravel().tolist()) <= set(host)
        assert len(set(calls.slots.tolist())) == len(calls.slots) == len(calls.pages) * tokens
        named = np.concatenate([move.slots for move in calls.moves])[: len(calls.slots)]
        assert named.tolist() == calls.slots.tolist()
    assert not set(offload.pages.ravel().tolist()) & set(load.pages.ravel().tolist())
    assert not set(offload.slots.tolist()) & set(load.slots.tolist())


def test_calls_without_room() -> None:
    with pytest.raises(ConfigError, match="use more memory"):
        _gpu_shapes.scattered(SHAPES[0], range(4), 1000, 1 << 20)


# ---- transfer backends and their oracle


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_rig(bench: Bench, plain_engine: type[PlainEngine], shape: Any) -> None:
    with Rig(bench, shape) as rig:
        rig.verify()
        assert rig.nbytes >= TINY.total
        rig.run_both()
        assert rig.submit("load", 10**6).done()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("direction", _gpu_device.DIRECTIONS)
def test_rig_finds_a_row_left_out(
    bench: Bench, plain_engine: type[PlainEngine], shape: Any, direction: str
) -> None:
    with Rig(bench, shape) as rig:
        rig.verify()  # all bytes are in place now, and must be written again
        plain_engine.broken = direction
        refused(TransferFailed, f"check of {direction}", rig.verify)


def test_rig_keeps_to_its_pages(bench: Bench, plain_engine: type[PlainEngine]) -> None:
    own = range(16, 64)
    with Rig(bench, SHAPES[0], pages=own) as rig:
        before = rig.memory.array.copy()
        rig.verify()
        changed = (rig.memory.array != before).any(axis=1).nonzero()[0]
    assert len(changed)
    assert set(changed.tolist()) <= set(own)


def test_copies(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = _gpu_copies.Copies(bench, 128 << 10)
    assert copies.nbytes == TINY.total
    copies.verify()
    copies.run_both()
    assert copies.submit("offload", 7).done()
    pairs = [pair for direction in _gpu_device.DIRECTIONS for pair in copies.pairs[direction]]
    assert len({end.data_ptr() for pair in pairs for end in pair}) == 2 * len(pairs) == 64

    def all_but_one(backend: Any, direction: str, begin: int, end: int) -> None:
        for to, source in backend.pairs[direction][begin + 1 : end]:
            to.copy_(source)

    monkeypatch.setattr(_gpu_copies.Copies, "_copy", all_but_one)
    refused(TransferFailed, "1 of 16 pieces", copies.verify)


def test_batched_copies_name_every_piece(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def batch(to: Any, source: Any, sizes: Any, count: int, *rest: Any) -> tuple[int]:
        calls.append(count)
        for one, other, size in zip(to, source, sizes, strict=True):
            as_array(one, size)[:] = as_array(other, size)
        return (0,)

    runtime = types.ModuleType("cuda.bindings.runtime")
    runtime.cudaMemcpyBatchAsync = batch  # type: ignore[attr-defined]
    runtime.cudaMemcpyAttributes = types.SimpleNamespace  # type: ignore[attr-defined]
    runtime.cudaMemcpySrcAccessOrder = types.SimpleNamespace(  # type: ignore[attr-defined]
        cudaMemcpySrcAccessOrderStream=1
    )
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    monkeypatch.setattr(
        bench.gpu, "stream", lambda: types.SimpleNamespace(cuda_stream=0), raising=True
    )
    copies = _gpu_copies.BatchedCopies(bench, 128 << 10)
    copies.verify()
    assert calls == [16, 16]


# ---- rows


def test_rates_and_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _gpu_rates.rates([1000.0, 2000.0], 1 << 30)
    assert found == pytest.approx([1073.741824, 536.870912])
    row = _gpu_rates.rate_row("x", found, ("y", found * 2), ">= 0.6", pages=3)
    assert (row.unit, row.baseline, row.target, row.met) == ("GB/s", "y", ">= 0.6", False)
    assert row.ratio == pytest.approx(0.5)
    assert row.params["pages"] == 3
    ways = {"a": _gpu_copies.Copies(bench, 128 << 10), "b": _gpu_copies.Copies(bench, 1 << 20)}
    both = _gpu_rates.compared(bench, ways, ("load", _gpu_rates.BOTH))
    assert set(both) == {(way, what) for way in ways for what in ("load", "both at once")}
    assert all((samples > 0).all() and len(samples) == 1 for samples in both.values())
    monkeypatch.setattr(_gpu_rates, "run_case", lambda backend, what: lambda i: 1000.0)
    both = _gpu_rates.compared(bench, ways, ("load", _gpu_rates.BOTH))
    assert both["a", "load"] == TINY.total / 1e6
    assert both["a", "both at once"] == 2 * TINY.total / 1e6


def test_restoring_without_a_device() -> None:
    """The rows of a step's requests; the call itself says if they did not hit."""
    rows = list(restoring(2))
    assert [row.params["requests"] for row in rows] == [64, 64]
    assert all(row.value > 0 for row in rows)


def test_a_failing_part_is_a_row(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def some_part(_: Bench) -> Any:
        yield Row("fine")
        yield Row("too few", {"seen": float("nan")}, float("nan"))
        raise TransferFailed("the device is gone")

    rows = list(transfer.guarded(some_part, bench))
    assert [row.name for row in rows] == ["fine", "too few", "some part"]
    assert rows[2].params == {"failed": "TransferFailed: the device is gone"}
    assert "Traceback" in capsys.readouterr().err
    shown = json.loads(json.dumps(frame.document(rows), allow_nan=False))["rows"]
    assert [row["value"] for row in shown] == [0.0, None, None]
    assert shown[1]["params"] == {"seen": None}


# ---- the command


def test_parts() -> None:
    assert transfer.parts(None) == list(range(1, 14))
    assert transfer.parts("3, 2,3") == [2, 3]
    for wrong in ("", "0", "14", "two", "2-3"):
        with pytest.raises(ConfigError, match=r"expected parts such as 2,3 of 1 \(copy engine\)"):
            transfer.parts(wrong)


@pytest.mark.slow
def test_layer_loads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine of this machine, whole and in windows of each size."""
    monkeypatch.setattr(_gpu_layers, "LARGE", SHAPES[0])
    monkeypatch.setattr(_gpu_layers, "SMALL", SHAPES[1:2])
    rows = list(_gpu_layers.layer_loads(bench))
    assert len(rows) == 2 * (1 + 5 * 2 + 1)
    assert all(row.value > 0 for row in rows)
    assert all(row.met is None for row in rows)  # nothing is promised without a device


@pytest.mark.slow
def test_command_without_device(
    monkeypatch: pytest.MonkeyPatch, no_device: None, plain_engine: type[PlainEngine]
) -> None:
    monkeypatch.setattr(
        _gpu_rig, "WITHOUT_DEVICE_QUICK", Sizes(16 << 20, 32 << 20, 32 << 20, rounds=1)
    )
    monkeypatch.setattr(_gpu_rates, "SMALL", ())
    monkeypatch.setattr(_gpu_rates, "STATES", ())
    monkeypatch.setattr(
        _gpu_rates, "LARGE", _gpu_shapes.attention("pages", 2, 2, 64, batch=2, target=">= 0.97")
    )
    arguments = ["bench", "transfer", "--quick", "--json", "--only", "1,2,3,6"]
    result = CliRunner().invoke(cli.group, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["name"] for row in rows] == [
        "device",
        "numpy copies, offload",
        "numpy copies, load",
        "numpy copies, both at once",
        "offload, pages",
        "load, pages",
        "both at once, pages",
    ]
    assert all(row["value"] > 0 for row in rows[1:])
    assert all(row["met"] is None for row in rows)  # nothing was promised without a device


def test_command_refuses(monkeypatch: pytest.MonkeyPatch, no_device: None) -> None:
    monkeypatch.setattr("lightcache_bench._gpu_interface.has_host_engine", lambda: False)
    for arguments, message in (
        (["transfer"], "expected a device that torch can use"),
        (["transfer", "--only", "14"], "expected parts such as 2,3"),
        (["index", "--only", "2"], "takes no --only; `policy`, `transfer`, `serve` and `vllm` do"),
        (
            ["index", "--trace", __file__],
            "takes no --trace; `policy`, `manager`, `hybrid` and `vllm` do",
        ),
    ):
        result = CliRunner().invoke(cli.group, ["bench", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stdout == ""
