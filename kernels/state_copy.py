"""The state-copy kernel: recurrent states from slot to slot of the same device, all those of a step
in one launch.

A state is many pieces (each part of each layer), equally far apart from slot to slot within a piece
but not among pieces; a table of tiles says where each lies, so a launch needs no common base.
Inspired by the copies of vLLM's and SGLang's state pools, which launch once for each layer.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NUMBERS = ("n_tiles", "n_pairs")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=("tiles", "pairs"))
def copy_states(
    tiles,  # int64 [n_tiles, 3]: device address in slot 0; bytes between slots; bytes
    pairs,  # int64 [n_pairs, 2]: slot to read, negative for zeros; slot to write
    n_tiles,
    n_pairs,
    WORD: tl.constexpr,  # bytes of an access: 16, 8, 4, 2, 1
    TILE: tl.constexpr,  # accesses of a program at a time, a power of two
):
    NARROW: tl.constexpr = tl.int16 if WORD == 2 else tl.int8
    ELEMENT: tl.constexpr = tl.int64 if WORD >= 8 else (tl.int32 if WORD == 4 else NARROW)
    LANES: tl.constexpr = 2 if WORD == 16 else 1
    steps = tl.arange(0, TILE)
    lanes = tl.arange(0, LANES)[None, :]
    for item in range(tl.program_id(0), n_tiles * n_pairs, tl.num_programs(0)):
        # Neighbouring programs copy neighbouring tiles of one state.
        tile = tiles + (item % n_tiles).to(tl.int64) * 3
        pair = pairs + (item // n_tiles).to(tl.int64) * 2
        base = tl.load(tile)
        stride = tl.load(tile + 1)
        byte = steps.to(tl.int64) * WORD
        nbytes = tl.load(tile + 2)
        wanted = (byte < nbytes)[:, None]
        source = tl.load(pair)
        readable = (byte < tl.where(source >= 0, nbytes, 0))[:, None]
        target = base + tl.load(pair + 1) * stride + byte
        read = base + source * stride + byte
        # What the compiler cannot see behind a table of addresses: each pair is one 16-byte access.
        read = tl.multiple_of(read.to(tl.pointer_type(ELEMENT)), WORD)[:, None] + lanes
        target = tl.multiple_of(target.to(tl.pointer_type(ELEMENT)), WORD)[:, None] + lanes
        value = tl.load(read, mask=readable, other=0)
        tl.store(target, value, mask=wanted)
