"""Transfers beside other work and in great number: memory, graphs, offsets beyond 32 bits."""

import gc
import warnings

import numpy as np
import pytest
import torch
from support.gpu_memory import Pinned
from support.refusals import refused

from lightcache.kernels import calibration
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.moves import Move
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.shm.errors import ConfigError

pytest.importorskip("triton")


def pool_of(layers, heads, dim, page_tokens, slots):
    """One device pool [2 * layers, slots, heads, dim] of 16 bits, its geometry and planes."""
    group = KVGroup.attention(
        "kv", layers=layers, heads=heads, head_dim=dim, dtype_bytes=2, page_tokens=page_tokens
    )
    pool = torch.empty((2 * layers, slots, heads, dim), dtype=torch.int16, device="cuda:0")
    planes = {
        ("kv", number // 2, "kv"[number % 2]): DevicePlane(
            pool[number].data_ptr(), heads * dim * 2, slots, head_stride=dim * 2
        )
        for number in range(2 * layers)
    }
    return pool, PageGeometry([group]), DevicePlanes(planes, device="cuda:0", keep=pool)


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_slots_beyond_31_bits(mode):
    """A pool of 6 GiB in one plane: byte offsets beyond 2**32, element offsets beyond 2**31."""
    from lightcache.kernels.engine import TransferEngine

    slots = 3 * (1 << 20) + 5
    pool, geometry, planes = pool_of(1, 8, 128, 16, slots)
    wanted = np.r_[slots - 8 : slots, 0:4, slots // 2 : slots // 2 + 4]
    index = torch.from_numpy(wanted).cuda()
    random = torch.randint(0, 256, (2, 16, 2048), dtype=torch.uint8).cuda().view(torch.int16)
    pool[:, index] = random.view(2, 16, 8, 128)
    memory = Pinned(2, geometry.page_bytes)
    with TransferEngine(geometry, planes, memory, mode=mode) as engine:
        engine.offload(Move([1], wanted)).wait(60)
        assert torch.equal(
            torch.from_numpy(memory.array[1]), random.view(torch.uint8).view(-1).cpu()
        )
        pool[:, index] = 0
        engine.load(Move([1], wanted)).wait(60)
        assert torch.equal(pool[:, index].reshape(2, 16, 1024), random.view(2, 16, 1024))


def test_thousands_of_transfers_leave_memory_alone():
    from lightcache.kernels.engine import TransferEngine

    pool, geometry, planes = pool_of(4, 2, 64, 16, 4096)
    pool.random_()
    memory = Pinned(64, geometry.page_bytes)
    rng = np.random.default_rng(0)
    with TransferEngine(geometry, planes, memory) as engine:
        engine.warm()

        def some(count):
            for _ in range(count):
                pages = rng.permutation(64)[: rng.integers(1, 40)]
                move = Move(pages, rng.permutation(4096)[: len(pages) * 16])
                transfers = [engine.offload(move), engine.load(move)]
                for transfer in transfers:
                    transfer.wait(60)

        some(300)
        gc.collect()
        before = (
            torch.cuda.memory_allocated(),
            engine._in_flight.blocks.made,
            engine._in_flight.events.made,
        )
        objects = len(gc.get_objects())
        some(2500)
        gc.collect()
        after = (
            torch.cuda.memory_allocated(),
            engine._in_flight.blocks.made,
            engine._in_flight.events.made,
        )
        assert after == before, (after, before)
        more = len(gc.get_objects()) - objects
        assert more < 200, more
        assert engine.poll() == 0


def test_steady_state_never_waits_for_the_device():
    """Torch raises at every operation of its own that would; transfers only enqueue."""
    from lightcache.kernels.engine import TransferEngine

    pool, geometry, planes = pool_of(4, 2, 64, 16, 4096)
    pool.random_()
    memory = Pinned(64, geometry.page_bytes)
    moves = [Move(np.arange(40), np.arange(640) * 3), Move(np.array([3]), np.arange(16) * 5)]
    with TransferEngine(geometry, planes, memory) as engine:
        engine.warm()

        def rounds():
            for _ in range(20):
                for move in moves:
                    engine.offload(move).wait_on()
                    engine.load(move, window=2).wait_layer(1)

        # Until a round makes nothing although all of it is under way at once: making blocks is so
        # slow that the first ones are back before the last are made.
        made = None
        while made != (made := (engine._in_flight.blocks.made, engine._in_flight.events.made)):
            torch.cuda._sleep(2_000_000_000)
            rounds()
            torch.cuda.synchronize()
            assert engine.poll() == 0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
            rounds()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_beside_a_replayed_graph():
    """A graph that writes slots is replayed on and on; what transfers moved meanwhile is right."""
    from lightcache.kernels.engine import TransferEngine

    pool, geometry, planes = pool_of(4, 2, 64, 16, 1024)
    pool.random_()
    memory = Pinned(16, geometry.page_bytes)
    work = torch.randn(1024, 1024, device="cuda:0")
    result = torch.empty_like(work)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with TransferEngine(geometry, planes, memory, mode="staged") as engine:
        engine.warm()
        with torch.cuda.stream(stream):
            torch.mm(work, work, out=result)  # cuBLAS allocates at its first call
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(8):
                torch.mm(work, work, out=result)
            pool[:, :512].add_(1)
            refused(ConfigError, "captured", engine.offload, Move([0], np.arange(16)))
        slots = np.random.default_rng(0).permutation(512)[:256] + 512
        expected = pool[:, torch.from_numpy(slots).cuda()].cpu()
        for _ in range(20):
            with torch.cuda.stream(stream):
                for _ in range(5):
                    graph.replay()
            transfer = engine.offload(Move(np.arange(16), slots), streams=())
            transfer.wait(60)
            found = torch.from_numpy(memory.array[:, : geometry.used_bytes]).view(torch.int16)
            found = found.view(16, 8, 16, 2, 64).transpose(0, 1).reshape(8, 256, 2, 64)
            assert torch.equal(found, expected)
        torch.cuda.synchronize()


def test_a_transfer_waits_for_its_producer_and_for_after():
    """The producer is slow; without the wait the copy would carry the old bytes."""
    from lightcache.kernels.engine import TransferEngine

    pool, geometry, planes = pool_of(2, 2, 64, 16, 64)
    memory = Pinned(4, geometry.page_bytes)
    work = torch.randn(4096, 4096, device="cuda:0")
    torch.mm(work, work)
    slots = np.arange(16)
    for mode in ("staged", "direct", "copies"):
        with TransferEngine(geometry, planes, memory, mode=mode) as engine:
            engine.warm()
            for way in ("current", "streams", "after"):
                pool.zero_()
                memory.array[:] = 0xEE
                torch.cuda.synchronize()
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for _ in range(20):
                        torch.mm(work, work)
                    pool.fill_(1)
                    event = torch.cuda.Event()
                    event.record(stream)
                if way == "current":
                    with torch.cuda.stream(stream):
                        transfer = engine.offload(Move([2], slots))
                elif way == "streams":
                    transfer = engine.offload(Move([2], slots), streams=[stream])
                else:
                    transfer = engine.offload(Move([2], slots), streams=(), after=[event])
                transfer.wait(60)
                found = torch.from_numpy(memory.array[2]).view(torch.int16)
                assert (found == 1).all(), (mode, way)


def test_wait_on_and_windows_order_the_model():
    """Layers are read on the model's stream behind `wait_layer`, with copies that take a while."""
    from lightcache.kernels.engine import TransferEngine

    pool, geometry, planes = pool_of(8, 8, 128, 64, 4096)
    pages = 4096 // 64
    memory = Pinned(pages, geometry.page_bytes)
    memory.tensor.random_(0, 256)
    slots = np.random.default_rng(0).permutation(4096)
    where = torch.from_numpy(slots).cuda()
    wanted = memory.tensor.view(torch.int16).view(pages, 16, 64 * 8 * 128).transpose(0, 1)
    stream = torch.cuda.Stream()
    with TransferEngine(geometry, planes, memory) as engine:
        engine.warm()
        for _ in range(3):
            pool.zero_()
            torch.cuda.synchronize()
            transfer = engine.load(Move(np.arange(pages), slots), window=2)
            got = []
            with torch.cuda.stream(stream):
                for layer in range(8):
                    transfer.wait_layer(layer, stream)
                    rows = pool[2 * layer : 2 * layer + 2].view(torch.int16)
                    got.append(rows.flatten(2)[:, where].clone())
            torch.cuda.synchronize()
            found = torch.cat(got).view(16, pages, -1).cpu()
            assert torch.equal(found, wanted)
            assert transfer.done()


def test_calibration_is_measured_once(tmp_path):
    found = calibration.stored("cuda:0", tmp_path)
    (path,) = tmp_path.iterdir()
    print(path.read_text())
    assert calibration.read(path) == found
    assert calibration.stored("cuda:0", tmp_path) == found
