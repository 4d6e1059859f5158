"""SGLang's interface, of release 0.5.23: `LightcacheLinker`. It only carries calls to `Rank`; an
error of one is said once and is answered, so no method raises on the scheduler's thread."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

from lightcache.connectors.engine_cache import host_name
from lightcache.connectors.link import guarded
from lightcache.connectors.sglang.figures import Meter
from lightcache.connectors.sglang.pools import Format, check_served, describe
from lightcache.connectors.sglang.rank import ABSENT, SLOW, Options, Rank, launch_of
from lightcache.connectors.sglang.tree import Piece, tell_linkers
from lightcache.errors import ConfigError, NotInstalled
from lightcache.layout import Hint

try:
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.unified_cache import unified_cache_linker as interface
except ImportError as error:
    raise NotInstalled(
        f"lightcache.connectors.sglang needs SGLang 0.5.23 or later ({error}); install lightcache "
        "into the environment of SGLang with: pip install 'lightcache[sglang]'"
    ) from error


F = TypeVar("F", bound=Callable[..., Any])


def timed(method: F) -> F:
    """Of SGLang's scheduler, or of a forward pass: if it has waited for long, that is said."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        begun = time.monotonic()
        try:
            return method(self, *arguments, **named)
        finally:
            if (seconds := time.monotonic() - begun) >= SLOW:
                self.rank.slow(method.__name__, seconds)

    return cast(F, call)


class LayerCounter:
    """What a forward pass waits for: the loads of its batch, layer by layer. It never raises."""

    def __init__(self, rank: Rank) -> None:
        """No batch is consumed."""
        self.rank = rank
        self.consumer_index = -1

    def trouble(self, what: str, error: BaseException) -> None:
        """See `Guarded`."""
        self.rank.trouble(what, error)

    @property
    def num_layers(self) -> int:
        """One more than the model has: SGLang waits for the last of them where it means all, and a
        layer that no pool has stands for all of each."""
        return self.rank.layers + 1

    def set_consumer(self, index: int) -> None:
        """The pass that comes next is that of this batch; -1: it has no loads."""
        self.consumer_index = index

    @timed
    @guarded(lambda: None)
    def wait_until(self, threshold: int) -> None:
        """Wait for a layer."""
        self.rank.wait(self.consumer_index, threshold)


class LightcacheLinker(interface.UnifiedCacheLinker):
    """See the package. Made by SGLang, in each rank."""

    before: str | None = None
    """See `tree.Told`."""
    piece: Piece | None = None
    """See `tree.Told`."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Opens the cache, or says once why it is not used.

        Raises:
            ConfigError: an option of `linker_extra_config` that there is not, or a value that it
                cannot have.
        """
        options = Options.of(extra_config or {})
        self.forward_stream = forward_stream
        group, place, why = None, (0, 1), ""
        try:
            group = params.attn_tp_cache_group or params.tp_cache_group
            place = _place(group)
        except Exception as error:
            why = repr(error)
        self._rank = Rank(options, launch_of(secrets.randbits(63)), place[0])
        self._ranks, self._passed = place[1], 0
        self._meter = self._measured(server_args)
        self._device = False
        self.pools: dict[Any, Any] = {}
        self.layer_done_counter = LayerCounter(self._rank)
        form, team, why = self._join(server_args, params, components, place, group, why)
        if why or form is None:
            self._rank.refuse(why)
            return
        if team is not None:
            self._rank.launch = launch_of(team)  # the same in all ranks
        self._device = form.device != "cpu"
        wrapper = getattr(interface, "UnifiedCacheLinkerWrapper", None)
        if not tell_linkers(wrapper, LightcacheLinker):
            self.untold("this release of SGLang does not tell what is before them")
        self._rank.start(form, team)

    @guarded(lambda: None)
    def _measured(self, server: Any) -> Meter | None:
        if not getattr(server, "enable_metrics", False):
            return None
        model = getattr(server, "served_model_name", None) or server.model_path
        return Meter(str(model), self._rank.rank)

    @property
    def rank(self) -> Rank:
        """What does the work."""
        return self._rank

    def trouble(self, what: str, error: BaseException) -> None:
        """See `Guarded`."""
        self._rank.trouble(what, error)

    def untold(self, why: str) -> None:
        """See `tree.Told`."""
        self._rank.guess_beginnings(why)

    @property
    def window(self) -> int:
        """See `tree.Told`."""
        return self._rank.window

    @property
    def wants_tokens(self) -> bool:
        """See `tree.Told`."""
        return self._rank.notes_tokens

    @guarded(lambda: None)
    def used(self, last: list[str]) -> None:
        """See `tree.Told`."""
        self._rank.used(last)

    def _join(
        self,
        server: Any,
        params: Any,
        components: Any,
        place: tuple[int, int],
        group: Any,
        why: str,
    ) -> tuple[Format | None, int | None, str]:
        """The format of pages, what the ranks write together by, and why the cache is not used, if
        so."""
        form = None
        try:
            pool = params.token_to_kv_pool_allocator.get_kvcache()
            check_served(pool, params, components)
            model = import_module("sglang.srt.runtime_context").process_model_config()
            release = str(import_module("sglang.version").__version__)
            window = getattr(params, "swa_retain_window", None)
            states = params.req_to_token_pool if _has_states(components) else None
            form = describe(server, model, pool, params.page_size, place, release, window, states)
            self.pools = {PoolName[each.name]: pool for each in form.pools}
            if states is not None:  # SGLang does it for pools of KV alone
                states.register_layer_transfer_counter(self.layer_done_counter)
        except Exception as error:
            why = why or (str(error) if isinstance(error, ConfigError) else repr(error))
        # Each rank gets here, so that none waits for another: either all use the cache or none. If
        # the call itself fails on some ranks, these alone do not: docs/design/sglang.md, Ranks.
        try:
            team, why = _agree(form, why, place, group)
        except Exception as error:
            return None, None, why or repr(error)
        return form, team, why

    # ---- lookups and loads

    @timed
    @guarded(list)
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """See SGLang."""
        before, self.before = self.before, None
        hashes = _keys(transfers)
        found = self._rank.lookup(rid, hashes, before) if hashes else 0
        return list(self._rank.lengths(found))

    @timed
    def load(self, rid: str, transfers: list[Any]) -> bool:
        """See SGLang. True, always: ranks that answer otherwise than others wait for ever. What is
        lost is said by `finish_layer_wise_loading`."""
        try:
            of = {each.name: each for each in transfers}
            slots = [partial(_slots, of[name].device_indices) for name in self.pools]
            self._rank.load(rid, list(of[PoolName.KV].keys), *slots)
        except Exception as error:
            self._rank.lose(rid, error)
        return True

    @timed
    @guarded(bool)
    def cancel_queued_load(self, rid: str) -> bool:
        """See SGLang."""
        return self._rank.cancel_load(rid)

    @timed
    @guarded(lambda: -1)
    def start_layer_wise_loading(self) -> int:
        """See SGLang. The loads wait for all work that is queued by now: it may still read the
        slots."""
        return self._rank.begin(self._events)

    @timed
    @guarded(bool)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """See SGLang."""
        return self._rank.finish(counter_index)

    # ---- saves

    @timed
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """See SGLang. The same on all ranks, which count their saves in common: True, unless there
        is nothing to save, or the only rank does not use the cache. One of several that does not
        use it cannot know whether the others do, so its saves have their turns, and fail in them.

        Args:
            session_id: of the session that the pages are of: it goes on, which is a hint.
        """
        before, self.before = self.before, None
        piece, self.piece = self.piece, None
        if self._rank.serves:
            hint = Hint.CONTINUES if session_id else Hint.NONE
            return self._offload(transfers, before, hint, piece)
        passed = self._ranks > 1 and self._is_save(transfers)
        self._passed += passed
        return passed

    @guarded(lambda: True)
    def _is_save(self, transfers: list[Any]) -> bool:
        return bool(_keys(transfers))

    @guarded(lambda: True)
    def _offload(
        self, transfers: list[Any], before: str | None, hint: Hint, piece: Piece | None
    ) -> bool:
        hashes: list[str] = []
        events: list[Any] = []
        try:
            hashes = _keys(transfers)
            if not hashes:
                return False
            events = self._events()
            of = {each.name: each for each in transfers}
            slots, *more = (_saved(of.get(name), events) for name in self.pools)
        except Exception as error:  # it has its turn, and fails in it
            slots, more = (0, partial(_fail, error)), []
        tokens = piece.tokens if piece is not None and piece.hashes == hashes else ()
        self._rank.offload(hashes, slots[1], before, events, *more, hint=hint, tokens=tokens)
        return True

    def _events(self) -> list[Any]:
        return self.record_offload_ready() if self._device else []

    @timed
    @guarded(int)
    def num_completed_offloads(self) -> int:
        """See SGLang, which asks in each step."""
        if self._meter is not None and self._meter.due():
            self._meter.observe(self._rank.count_storage())
        return self._passed or self._rank.completed()

    @timed
    @guarded(bool)
    def pop_completed_offload(self) -> bool:
        """See SGLang."""
        if self._passed:
            self._passed -= 1
            return False
        return self._rank.pop()

    # ---- the end

    @timed
    @guarded(lambda: None)
    def reset(self) -> None:
        """See SGLang."""
        self._passed = 0  # it has dropped its saves
        self._rank.reset()

    @timed
    @guarded(lambda: None)
    def close(self) -> None:
        """See SGLang."""
        self._rank.close()


def _has_states(components: Any) -> bool:
    return any(getattr(each, "name", None) == "MAMBA" for each in components)


def _keys(transfers: list[Any]) -> list[str]:
    return next((list(each.keys or ()) for each in transfers if each.name == PoolName.KV), [])


def _slots(indices: Any, ready: Any = None) -> Any:
    if ready is not None:
        ready.synchronize()
    return indices.detach().cpu().numpy().astype(np.int64)


def _saved(transfer: Any, events: list[Any]) -> tuple[int, Any]:
    """Pages of a pool that SGLang has of a node, and their slots: the first event says that their
    numbers are there."""
    if transfer is None:
        return ABSENT
    return len(transfer.keys), partial(_slots, transfer.device_indices, *events[:1])


def _fail(error: Exception) -> Any:
    raise error


def _place(group: Any) -> tuple[int, int]:
    """The rank and the number of ranks that hold the same tokens."""
    distributed = import_module("torch").distributed
    if group is None or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(group), distributed.get_world_size(group)


def _agree(
    form: Format | None, why: str, place: tuple[int, int], group: Any
) -> tuple[int | None, str]:
    """What the ranks write together by, and why none of them uses the cache, if so."""
    if place[1] == 1:
        return None, why
    mine = (secrets.randbits(63) + 1, host_name(), "" if form is None else form.fingerprint, why)
    said: list[Any] = [None] * place[1]
    import_module("torch").distributed.all_gather_object(said, mine, group=group)
    teams, hosts, fingerprints, reasons = zip(*said, strict=True)
    why = "; ".join(sorted(set(filter(None, reasons))))
    if not why and len(set(hosts)) > 1:
        why = "ranks on other nodes"
    if not why and len(set(fingerprints)) > 1:
        why = "the ranks describe different pages"
    return teams[0], why


__all__ = ["LayerCounter", "LightcacheLinker"]
