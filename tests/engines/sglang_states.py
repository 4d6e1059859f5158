"""SGLang's own tree, pools and wrapper of linkers over states of a hybrid model, without the model:
it has no kernels for CPUs. What a layer "computes" depends on all tokens up to there.

    sglang_states.py NAME       prints what each scene has seen, as JSON

SGLang refuses the arguments of a hybrid on a CPU, so those of a small Llama are published.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import tiny_models
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs

from lightcache import Cache
from lightcache.connectors.sglang import LightcacheLinker
from lightcache.connectors.sglang.pools import check_served, describe

PAGE, TOKENS, HEADS, WIDTH = 16, 1024, 2, 8
STATES, ATTENTION, SLIDING = [0, 1, 3], [2, 3], [4]
"""Layers. The fourth has attention and a state."""
KINDS = {ComponentType.FULL, ComponentType.MAMBA}
PROMPT = list(range(3, 3 + 6 * PAGE))
LONGER = [*PROMPT, *range(200, 200 + 3 * PAGE)]
BRANCH = [*PROMPT[: 4 * PAGE], *range(300, 300 + 3 * PAGE)]
_numbers = itertools.count()


def published() -> Any:
    tiny_models.save_llama("llama", kv_heads=HEADS)
    server = ServerArgs(
        model_path="llama",
        device="cpu",
        page_size=PAGE,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        dtype="float32",
        disable_cuda_graph=True,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "LightcacheLinker",
            "linker_module_path": "lightcache.connectors.sglang",
        },
    )
    runtime_context.publish(server, role="scheduler")
    return server


def request_pool(ranks: int = 1) -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=ranks,
        intermediate_size=32,
        n_groups=2,
        num_heads=4,
        head_dim=8,
        state_size=16,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=4,
        mamba_size=24,
        mamba_spec_state_size=4,
        max_context_len=TOKENS,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=STATES),
        mamba_layer_ids=STATES,
        enable_mamba_extra_buffer=True,
    )


def pool_of(requests: Any, ranks: int = 1, latent: bool = False) -> Any:
    more = {"use_mla": True, "kv_lora_rank": 24, "qk_rope_head_dim": 8} if latent else {}
    return HybridLinearKVPool(
        size=TOKENS,
        dtype=torch.float32,
        page_size=PAGE,
        head_num=HEADS // ranks,
        head_dim=WIDTH,
        full_attention_layer_ids=ATTENTION,
        device="cpu",
        mamba_pool=requests.mamba_pool,
        **more,
    )


def noise(what: Any, shape: Any) -> Any:
    seed = int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


class Engine:
    """One rank of SGLang's scheduler, as far as it concerns its cache."""

    def __init__(
        self, server: Any, extra: Any, rank: int = 0, ranks: int = 1, group: Any = None
    ) -> None:
        self.rank, self.requests = rank, request_pool(ranks)
        self.pool = pool_of(self.requests, ranks)
        self.slots = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE, torch.float32, "cpu", self.pool, False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.slots,
            page_size=PAGE,
            enable_mamba_extra_buffer=True,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            tp_cache_group=group,
            attn_tp_cache_group=group,
        )
        self.tree = UnifiedRadixCache(params)
        components = set(self.tree.components)
        self.linker = LightcacheLinker(server, params, components=components, extra_config=extra)
        self.tree.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.offered: list[list[str]] = []
        """The pools of each save."""
        self.lose = False
        """Whether loads are of pages that have gone since they were looked up."""
        for name in ("offload", "load"):
            method = getattr(self.linker, name)
            setattr(self.linker, name, partial(getattr(self, name), method))

    def offload(self, method: Any, transfers: Any, **how: Any) -> Any:
        self.offered.append([each.name.name for each in transfers])
        return method(transfers, **how)

    def load(self, method: Any, rid: str, transfers: Any) -> Any:
        if self.lose:
            transfers[0].keys = ["ab" * 32] * len(transfers[0].keys)
        return method(rid, transfers)

    # ---- what the model would compute

    def kv(self, tokens: list[int], layer: int) -> Any:
        """Of all tokens: [2, tokens, heads, width]."""
        own = self.pool.full_kv_pool.k_buffer[0].shape[1:]
        pages = [
            noise((tokens[: end + PAGE], layer, self.rank), (2, PAGE, *own))
            for end in range(0, len(tokens), PAGE)
        ]
        return torch.cat([torch.empty(2, 0, *own), *pages], 1)

    def states(self) -> list[Any]:
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.temporal, *cache.conv]

    def state(self, tokens: list[int], number: int) -> Any:
        tensor = self.states()[number]
        shape = (len(tensor), *tensor.shape[2:])
        return noise((tokens, number, self.rank), shape).to(tensor.dtype)

    # ---- a request, as the scheduler serves it

    def begin(self, tokens: list[int]) -> Any:
        """Match, and queue the load of what the linker has."""
        key = RadixKey(array("q", tokens))
        req = SimpleNamespace(rid=f"r{next(_numbers)}", kv=ReqKvInfo(), session=None)
        req.swa_branching_seqlen = None
        req.tokens, req.loaded = tokens, torch.empty(0, dtype=torch.int64)
        match = self.tree.match_prefix(MatchPrefixParams(key=key, req=req, cow_mamba=True))
        req.last_node, req.device = match.last_device_node, match.device_prefix_len
        req.lock = self.tree.inc_lock_ref(req.last_node).to_dec_params()
        if match.host_hit_length:
            self.tree.init_load_back(
                InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
            )
            req.loaded = self.tree.linker.private_load_indices[req.rid]
        if req.kv.mamba_cow_src_index is not None:
            slot = req.kv.mamba_pool_idx.unsqueeze(0)
            self.requests.copy_mamba_state(req.kv.mamba_cow_src_index, slot)
        return req

    def forward(self, req: Any) -> bool:
        """Run its pass; whether what it has loaded has landed, with the right bytes."""
        self.linker.layer_done_counter.set_consumer(self.tree.ready_to_load_host_cache())
        prefix = torch.cat((self.tree.path_device_indices(req.last_node), req.loaded))
        same = [len(prefix) == req.device + len(req.loaded)]
        for layer in range(5):  # each waits for what it reads, as in a model
            if layer in ATTENTION:
                found = torch.stack([each[prefix] for each in self.pool.get_kv_buffer(layer)])
                same.append(torch.equal(found, self.kv(req.tokens[: len(prefix)], layer)))
            if layer in STATES and req.kv.holds_mamba:
                own = self.requests.mamba2_layer_cache(layer)
                place = STATES.index(layer)
                for number, part in enumerate([own.temporal, *own.conv]):
                    wanted = self.state(req.tokens[: len(prefix)], number)[place]
                    same.append(torch.equal(part[req.kv.mamba_pool_idx], wanted))
        landed = not self.tree.finish_external_linker_loads([req])
        assert not landed or all(same), same
        return landed

    def end(self, req: Any, landed: bool = True) -> None:
        """Put what it has computed into the tree, if anything, and wait for the saves."""
        whole = req.tokens[: len(req.tokens) // PAGE * PAGE]
        if landed:
            own = torch.cat((self.tree.path_device_indices(req.last_node), req.loaded))
            self.insert(whole, own, req.device)
        else:
            self.slots.free(req.loaded)
        if req.kv.holds_mamba:
            self.requests.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(0))
        self.tree.dec_lock_ref(req.last_node, req.lock)
        while self.tree.linker.pending_offloads:
            self.tree.check_hicache_events()

    def insert(self, whole: list[int], prefix: Any, device: int = 0) -> None:
        """These tokens, of which the first have slots, some in the tree; and the state at their
        end."""
        more = self.slots.alloc(len(whole) - len(prefix))
        slots = torch.cat((prefix, more)).to(torch.int64)
        for layer in ATTENTION:
            both = self.kv(whole, layer)
            pool = self.pool.full_kv_pool
            for tensor, values in zip((pool.k_buffer, pool.v_buffer), both, strict=True):
                tensor[ATTENTION.index(layer)][slots] = values
        place = self.requests.mamba_allocator.alloc(1)
        for number, tensor in enumerate(self.states()):
            tensor[:, place[0]] = self.state(whole, number)
        result = self.tree.insert(
            InsertParams(
                key=RadixKey(array("q", whole)),
                value=slots,
                mamba_value=place,
                prev_prefix_len=device,
            )
        )
        if result.mamba_exist:
            self.requests.mamba_allocator.free(place)

    def serve(self, tokens: list[int]) -> list[int]:
        """Tokens that the device had, and those that were loaded."""
        req = self.begin(tokens)
        landed = self.forward(req)
        self.end(req, landed)
        return [req.device, len(req.loaded) if landed else -1]

    def forget(self) -> None:
        """The device's tree loses all it can, and the linker is not told: as by other requests."""
        self.tree.evict(EvictParams(num_tokens=TOKENS, mamba_num=100))


# ---- scenes


def addresses(server: Any) -> dict[str, Any]:
    """Where SGLang's own description has a slot of each pool, and where ours has it."""
    requests = request_pool()
    found: dict[str, Any] = {}
    windows = SWAKVPool(
        TOKENS,
        TOKENS,
        PAGE,
        torch.float32,
        HEADS,
        WIDTH,
        SLIDING,
        ATTENTION,
        "cpu",
    )
    kinds = {
        "latents": (pool_of(requests, latent=True), KINDS),
        "windows": (windows, {*KINDS, ComponentType.SWA}),
        "keys and values": (pool_of(requests), KINDS),
    }
    model = runtime_context.process_model_config()
    for name, (pool, components) in kinds.items():
        params = SimpleNamespace(
            req_to_token_pool=requests, mtp_draft_device_pools=(), sidecar_draft_device_pools=()
        )
        check_served(pool, params, components)
        form = describe(server, model, pool, PAGE, (0, 1), "0.5.23", 2 * PAGE, requests)
        try:
            group = resolve_hybrid_device_pool_group(
                kvcache=pool, page_size=PAGE, params=params, components=components
            )
        except ValueError as error:
            found[name] = str(error)
            continue
        same = {}
        for part in form.pools:
            entry = group.entry_map[PoolName[part.name]]
            rows = torch.arange(PAGE, 2 * PAGE) if part.name != "MAMBA" else torch.tensor([7])
            wanted = sorted(zip(*entry.get_page_buffer_meta(rows), strict=True))
            ours = sorted(
                (
                    plane.address + int(rows[0]) * plane.spacing[2],
                    plane.spacing[2] * len(rows),
                )
                for plane in part.planes.planes.values()
            )
            theirs = {
                layer: at if isinstance(at, int) else at[0]
                for layer, at in entry.layer_mapping.items()
            }
            same[part.name] = [wanted == ours, dict(part.layers) == theirs]
        found[name] = same
    return found


def alone(server: Any, extra: Any) -> dict[str, Any]:
    """Two engines that share a cache."""
    one, two = Engine(server, extra), Engine(server, extra)
    seen: dict[str, Any] = {"first": one.serve(PROMPT), "again": one.serve(PROMPT)}
    seen["offered"] = one.offered[:]
    seen["other engine"] = two.serve(LONGER)
    seen["no state at its end"] = two.serve(BRANCH)
    two.offered.clear()
    two.insert(BRANCH[: 4 * PAGE], torch.empty(0, dtype=torch.int64))  # it has one now
    seen["offered at a branch"] = two.offered[:]
    seen["on the device"] = two.serve([*BRANCH[: 4 * PAGE], *range(PAGE)])
    two.forget()
    seen["forgotten"] = two.serve(LONGER)
    two.forget()
    req = two.begin(LONGER)
    slot = req.kv.mamba_pool_idx
    two.tree.linker.release_request(req.rid)
    started = two.tree.ready_to_load_host_cache()
    written = bool(two.requests.mamba_pool.mamba_cache.temporal[:, slot].any())
    seen["aborted"] = [len(req.loaded), started, written]
    two.end(req, landed=False)
    two.lose = True
    seen["lost"] = two.serve(LONGER)
    two.lose = False
    seen["after it"] = two.serve(LONGER)
    two.tree.reset()
    two.slots.clear()
    two.requests.clear()
    seen["flushed"] = [two.serve(LONGER), two.serve(LONGER)]
    one.forget()
    seen["the other after that"] = one.serve(LONGER)
    return ended(seen, one, two)


def ended(seen: dict[str, Any], *engines: Engine) -> dict[str, Any]:
    seen["errors"] = [engine.linker.rank.voice.count for engine in engines]
    for engine in engines:
        engine.linker.close()
    return seen


def of_two_ranks(server: Any, extra: Any, rank: int, folder: str) -> dict[str, Any]:
    """One of them; both do the same, but that one loses what it has looked up."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/gloo", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    engine = Engine(server, {**extra, "on_reset": "keep"}, rank, 2, group)
    seen: dict[str, Any] = {"first": engine.serve(PROMPT)}
    engine.forget()
    seen["again"] = engine.serve(LONGER)
    engine.forget()
    engine.lose = rank == 1
    seen["one has lost it"] = engine.serve(LONGER)
    engine.lose = False
    seen["after it"] = engine.serve(LONGER)
    seen = ended(seen, engine)
    torch.distributed.destroy_process_group()
    return seen


def saves_half(server: Any, extra: Any, said: int) -> None:
    """Saves KV and not the state after it, says so, and waits to be killed."""
    engine = Engine(server, extra)
    rank = engine.linker.rank
    begin = rank._begin_save

    def held(save: Any, pool: int) -> Any:
        if pool:
            os.write(said, b"here")
            signal.pause()
        return begin(save, pool)

    rank._begin_save = held
    engine.serve(PROMPT)


def after_a_kill(server: Any, extra: Any, process: int) -> dict[str, Any]:
    """Of an engine that has saved KV and not the state after it."""
    engine = Engine(server, extra)
    with Cache.attach(extra["name"]) as cache:
        while cache.stats().ready < len(PROMPT) // PAGE:
            time.sleep(0.001)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        cache.reap()
        cache.check().raise_if_broken()
    seen: dict[str, Any] = {"no state": engine.serve(PROMPT)}
    engine.forget()
    seen["saved again"] = engine.serve(PROMPT)
    return ended(seen, engine)


def forked(work: Callable[[int], Any]) -> tuple[int, int]:
    """A process that does this with the pipe it may write to; its number, and the pipe's end."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        signal.alarm(300)  # it ends, whatever it waits for
        try:
            os.close(reading)
            work(writing)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    return process, reading


def answer(process: int, reading: int) -> Any:
    with os.fdopen(reading) as file:
        text = file.read()
    _, status = os.waitpid(process, 0)
    assert status == 0
    return json.loads(text)


def main() -> None:
    name, folder = sys.argv[1], tempfile.mkdtemp(dir=os.getcwd())
    server = published()
    extra = {"name": name, "size": "4MiB", "secret_file": f"{folder}/secret"}
    two = {**extra, "name": f"{name}-2"}

    def rank_of(rank: int) -> tuple[int, int]:
        work = partial(of_two_ranks, server, two, rank, folder)
        return forked(lambda said: os.write(said, json.dumps(work()).encode()))

    ranks = [rank_of(rank) for rank in range(2)]
    seen: dict[str, Any] = {"two ranks": [answer(*one) for one in ranks]}
    killed = {**extra, "name": f"{name}-3"}
    process, reading = forked(partial(saves_half, server, killed))
    os.read(reading, 4)
    seen["after a kill"] = after_a_kill(server, killed, process)
    seen["addresses"] = addresses(server)
    seen["alone"] = alone(server, extra)
    print("SEEN", json.dumps(seen), flush=True)
    os._exit(0)  # SGLang leaves threads


if __name__ == "__main__":
    main()
