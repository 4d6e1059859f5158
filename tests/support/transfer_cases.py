"""Device tensors in many layouts, the planes that describe them, and pages packed the slow way."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lightcache.kernels.geometry import KVGroup, PageGeometry, Plane
from lightcache.kernels.moves import Move
from lightcache.kernels.planes import DevicePlane, DevicePlanes

TOKENS = 96  # slots of a device pool


@dataclass
class Case:
    geometry: PageGeometry
    planes: DevicePlanes
    views: dict[tuple[str, int, str], Any]
    """For each (group, layer, plane): a tensor of shape (slots, rows, heads, row_bytes), uint8."""
    tensors: list[Any]

    def page(self, slots):
        """The bytes of one page whose token t has slots[t], as [head group][group][layer][plane]
        [unit][row][head][bytes]; head groups of replicated groups first."""
        groups = self.geometry.groups
        out = [
            self._part(group, 0, slots)
            for group in groups
            if all(p.heads == 1 for p in group.planes)
        ]
        for part in range(self.geometry.head_groups):
            out += [self._part(group, part, slots) for group in groups if not group.replicated]
        flat = torch.cat(out).numpy()
        return np.pad(flat, (0, self.geometry.page_bytes - len(flat)))

    def _part(self, group, part, slots):
        out = []
        for layer in group.layers:
            for plane in group.planes:
                each = plane.heads // group.head_groups
                units = [int(slot) // plane.unit_tokens for slot in slots[:: plane.unit_tokens]]
                view = self.views[group.name, layer, plane.name].cpu()
                out.append(view[units][:, :, part * each : (part + 1) * each].reshape(-1))
        return torch.cat(out)

    def poison(self):
        for tensor in self.tensors:
            tensor.view(torch.uint8).fill_(0xEE)

    def snapshot(self):
        return {key: view.cpu().clone() for key, view in self.views.items()}


def _bytes(shape, dtype, device, generator):
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, generator=generator
    )
    return raw.to(device).view(dtype)


def _plane(view, block=None):
    """A DevicePlane of a uint8 view of shape (slots, rows, heads, bytes), or with `block` of shape
    (blocks, slots in a block, rows, heads, bytes)."""
    strides = view.stride()
    if block:
        return DevicePlane(
            view.data_ptr(),
            strides[1],
            view.shape[0] * block,
            block,
            strides[0],
            strides[3],
            strides[2],
        )
    return DevicePlane(view.data_ptr(), strides[0], view.shape[0], 1, 0, strides[2], strides[1])


class Builder:
    def __init__(self, device="cpu", seed=0):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.views, self.planes, self.tensors = {}, {}, []

    def tensor(self, shape, dtype):
        made = _bytes(shape, dtype, self.device, self.generator)
        self.tensors.append(made)
        return made

    def add(self, key, view, block=None):
        """`view`: (slots, heads, dim) or (blocks, n, heads, dim) of some dtype."""
        view = view.view(torch.uint8)
        view = view.unsqueeze(2 if block else 1)
        self.planes[key] = _plane(view, block)
        self.views[key] = _Blocks(view) if block else view

    def case(self, groups):
        planes = DevicePlanes(self.planes, device=str(self.device), keep=self.tensors)
        return Case(PageGeometry(groups), planes, self.views, self.tensors)


class _Blocks:
    """Blocks of slots, indexed as if they were one: reshaping would copy."""

    def __init__(self, view):
        self.view = view

    def cpu(self):
        host = self.view.cpu()
        return host.reshape(-1, *host.shape[2:])


def _kv(layers=3, heads=4, dim=8, page=16, width=2, **more):
    return KVGroup.attention(
        "kv", layers=layers, heads=heads, head_dim=dim, dtype_bytes=width, page_tokens=page, **more
    )


def flat(device, head_groups=2):
    """SGLang: K and V of each layer [tokens, heads, dim]."""
    build = Builder(device)
    for layer in range(3):
        for name in "kv":
            build.add(("kv", layer, name), build.tensor((TOKENS, 4, 8), torch.bfloat16))
    return build.case([_kv(head_groups=head_groups)])


def blocks_nhd(device):
    """vLLM: [2, blocks, block, heads, dim] of each layer."""
    build = Builder(device)
    for layer in range(3):
        made = build.tensor((2, TOKENS // 8, 8, 4, 8), torch.bfloat16)
        for number, name in enumerate("kv"):
            build.add(("kv", layer, name), made[number], 8)
    return build.case([_kv()])


def blocks_hnd(device):
    """vLLM and FlashInfer: [blocks, 2, heads, block, dim] of each layer."""
    build = Builder(device)
    for layer in range(3):
        made = build.tensor((TOKENS // 8, 2, 4, 8, 8), torch.bfloat16)
        for number, name in enumerate("kv"):
            build.add(("kv", layer, name), made[:, number].transpose(1, 2), 8)
    return build.case([_kv(head_groups=4)])


def whole_blocks(device):
    """Blocks that hold all layers as a page does: [blocks, layers, 2, block, heads, dim]."""
    build = Builder(device)
    made = build.tensor((TOKENS // 16, 3, 2, 16, 4, 8), torch.bfloat16)
    for layer in range(3):
        for number, name in enumerate("kv"):
            build.add(("kv", layer, name), made[:, layer, number], 16)
    return build.case([_kv()])


def joined_heads(device):
    """LightLLM: [layer, token, 2 * heads, dim], K heads first."""
    build = Builder(device)
    made = build.tensor((3, TOKENS, 8, 8), torch.bfloat16)
    for layer in range(3):
        build.add(("kv", layer, "k"), made[layer, :, :4])
        build.add(("kv", layer, "v"), made[layer, :, 4:])
    return build.case([_kv()])


def packed(device):
    """K and V in each row: [blocks, heads, block, 2 * dim]."""
    build = Builder(device)
    for layer in range(3):
        made = build.tensor((TOKENS // 16, 4, 16, 16), torch.bfloat16)
        build.add(("kv", layer, "kv"), made.transpose(1, 2), 16)
    return build.case([_kv(content="packed")])


def latent(device):
    """MLA with an opaque cache of 132 bytes a token beside it."""
    build = Builder(device)
    for layer in range(2):
        build.add(("mla", layer, "kv"), build.tensor((TOKENS, 1, 24), torch.bfloat16))
        build.add(("index", layer, "opaque"), build.tensor((TOKENS, 1, 132), torch.uint8))
    return build.case(
        [
            KVGroup.attention(
                "mla",
                layers=2,
                heads=1,
                head_dim=24,
                dtype_bytes=2,
                page_tokens=16,
                content="single",
            ),
            KVGroup.opaque("index", layers=2, row_bytes=132, page_tokens=16),
        ]
    )


def opaque_blocks(device):
    """Device blocks of 8 tokens whose inside nobody knows."""
    build = Builder(device)
    for layer in range(2):
        build.add(("index", layer, "opaque"), build.tensor((TOKENS // 8, 1, 1056), torch.uint8))
    return build.case(
        [KVGroup.opaque("index", layers=2, row_bytes=1056, page_tokens=16, unit_tokens=8)]
    )


def scales(device):
    """int8 with a scale of 2 bytes for each head of each token, odd sizes."""
    build = Builder(device)
    for layer in range(2):
        for name in "kv":
            build.add(("kv", layer, name), build.tensor((TOKENS, 3, 10), torch.int8))
            build.add(("kv", layer, f"{name}_scale"), build.tensor((TOKENS, 3, 1), torch.float16))
    return build.case([_kv(layers=2, heads=3, dim=10, width=1, scale_bytes=2)])


def states(device):
    """Recurrent states: an fp32 part by head, and a convolution [slots, width, channels] by
    sections of heads."""
    build = Builder(device)
    for layer in range(2):
        build.add(("state", layer, "ssm"), build.tensor((9, 4, 20), torch.float32))
        conv = build.tensor((9, 3, 12), torch.bfloat16).view(torch.uint8)
        for name, low, heads in (("conv.q", 0, 4), ("conv.v", 8, 4)):
            view = conv[:, :, low : low + heads * 4].unflatten(2, (heads, 4))
            key = ("state", layer, name)
            build.views[key] = view
            build.planes[key] = _plane(view)
    parts = [Plane("ssm", 80, 4), Plane("conv.q", 4, 4, rows=3), Plane("conv.v", 4, 4, rows=3)]
    return build.case([KVGroup.state("state", layers=2, parts=parts, head_groups=2)])


CASES = [
    flat,
    blocks_nhd,
    blocks_hnd,
    whole_blocks,
    joined_heads,
    packed,
    latent,
    opaque_blocks,
    scales,
    states,
]


def some_slots(case, pages, seed=1, scattered=True):
    """Slots for the tokens of some pages, whole units together."""
    if case.geometry.rule.name == "point":
        return np.random.default_rng(seed).permutation(9)[:pages]
    unit = max(plane.unit_tokens for group in case.geometry.groups for plane in group.planes)
    size = unit if scattered else case.geometry.page_tokens
    starts = np.random.default_rng(seed).permutation(TOKENS // size)
    starts = starts[: pages * case.geometry.page_tokens // size] * size
    return (starts[:, None] + np.arange(size)).ravel()


def check_loaded(case, before, slots):
    """The slots have their bytes again, everything else stays poisoned."""
    for key, view in case.snapshot().items():
        plane = next(
            plane
            for group in case.geometry.groups
            if group.name == key[0]
            for plane in group.planes
            if plane.name == key[2]
        )
        mine = np.zeros(len(view), bool)
        mine[np.unique(np.asarray(slots) // plane.unit_tokens)] = True
        assert torch.equal(view[mine], before[key][mine]), key
        assert (view[~mine] == 0xEE).all(), key


# ---- parts


def in_parts(case, part_bytes):
    """The same tensors, for pages that are cut into host pages of so many bytes."""
    return replace(case, geometry=PageGeometry(case.geometry.groups, part_bytes=part_bytes))


def check_parts(engine, memory, case, places, slots):
    """Offload pages whose parts are the host pages `places`, of shape (n, parts), and load them.
    The whole pool is looked at: no other page changes, nor does the padding."""
    geometry, move = case.geometry, Move(places.ravel(), slots)
    expected = memory.array.copy()
    for number, parts in enumerate(places):
        own = slots[number * geometry.page_tokens :][: geometry.page_tokens]
        page = case.page(own)[: geometry.used_bytes]
        for part, host in enumerate(parts):
            piece = page[part * geometry.part_bytes :][: geometry.part_bytes]
            expected[host, : len(piece)] = piece
    engine.offload(move).wait(60)
    np.testing.assert_array_equal(memory.array, expected)
    before = case.snapshot()
    case.poison()
    engine.load(move).wait(60)
    check_loaded(case, before, slots)
    np.testing.assert_array_equal(memory.array, expected)
