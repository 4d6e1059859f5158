"""Prefixes of hybrid models: keys and values in one cache and checkpoints in another, joined."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache import Cache, Lease, Namespace, hybrid
from lightcache._arguments import Keys, Pages
from lightcache.connectors._requirements import torch
from lightcache.connectors.cache_layers import drop_parts, parts_of, set_parts
from lightcache.connectors.model_pages import ModelPages, check_model
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.prefix_cache import Counters, PrefixCache, TokenIds, one_row, token_ids
from lightcache.connectors.state_pages import (
    StateBackend,
    StatePages,
    States,
    planes_of_states,
    prepare,
)
from lightcache.connectors.trial import forward
from lightcache.errors import Abandoned, ConfigError, LightcacheError, TransferFailed
from lightcache.hybrid import Features, Grid
from lightcache.hybrid.checkpoints import Path, Tier
from lightcache.hybrid.saving import Saves
from lightcache.kernels.groups import whole
from lightcache.manager.load import wait_on
from lightcache.namespaces import NamespaceState

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.manager.transfers import BlockTransfer


# ---- Checkpoints: states that were copied while a model computed, and the cache that keeps them.
#
# A checkpoint after n tokens has the key of the page of keys and values that ends there. It is in
# its own cache, where a page is one state, and is found, evicted and counted separately from keys
# and values. A match joins the two, see `Connector.prefix`.


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state after the first tokens of a sequence; it never changes."""

    tokens: int
    """Number of tokens that the state covers."""
    states: States = field(repr=False)
    """Tensors by layer and part."""
    named: int = 0
    """Tokens whose ids were known when it was taken, computed or not."""


def copied(past: PrefixCache, layers: tuple[int, ...], named: int) -> Checkpoint:
    """A checkpoint of the current state of these layers. On a GPU the copies are enqueued."""
    states = {
        layer: {name: tensor.clone() for name, tensor in parts_of(past.layers[layer]).items()}
        for layer in layers
    }
    return Checkpoint(past.held, states, named)


class Checkpoints:
    """The checkpoints of one model in one cache: `lightcache.hybrid.Checkpoints` with a host and no
    slots, since every state has its own tensors here."""

    def __init__(
        self,
        kv: Cache,
        states: Cache,
        pages: StatePages,
        config: Any,
        pinned: PinnedPages | None,
        most: int | None,
    ) -> None:
        """Args:
        kv, states: the caches of keys and values, and of states.
        config: of the model.
        pinned: see `Connector`.
        most: bound on checkpoints of one path; None: no bound.
        """
        self.pages = pages
        seen = PrefixCache(config)  # every transfer brings its own planes
        prepare(pages, seen)
        self.cache = states
        self._kv = kv.index
        planes = planes_of_states(pages, self._states(seen))
        self._pool = Pooled(states, pages.geometry, planes, pages.device, pinned)
        self._backend = StateBackend(pages, self._pool)
        self._all = hybrid.Checkpoints(
            None, states, self._backend, most=most, parting=self._parting
        )

    def _parting(self, path: Path) -> Pages:
        return self._kv.children(path.keys, namespace=path.kv)

    def _states(self, past: PrefixCache) -> States:
        return {layer: parts_of(past.layers[layer]) for layer in self.pages.geometry.layers}

    def path(self, keys: Keys, namespace: Namespace | None = None) -> Path | None:
        """The positions of a prompt: keys, and their namespace. None: the namespace was cleared.

        Raises:
            OutOfPages, LockTimeout: as `Cache.namespace`, for the cache of states.
        """
        kv = self._kv.default_namespace if namespace is None else namespace

        def good() -> bool:
            return self._kv.namespace_state(kv) is NamespaceState.NORMAL

        with self._all.lock:
            space = self._all.spaces.beside(kv, good)
        return None if space is None else Path(keys, space, namespace)

    def last_ready(self, path: Path, most: int | None = None) -> int:
        """Number of leading pages that the prompt's last checkpoint covers; 0: there is none. Pins
        nothing. Searches from the last page, or from page `most`, to the front: a few ns a page."""
        position = self._all.last_ready(path, most)
        return 0 if position is None else position[1]

    def match(self, path: Path, count: int) -> Lease:
        """The checkpoint after `count` pages, pinned and marked as used; an empty lease if it is
        gone."""
        return self.cache.match(path.key(count), namespace=path.space.of(Tier.HOST))

    def load(self, past: PrefixCache, lease: Lease) -> None:
        """Restore a state into an empty cache, and take the lease over as `Load` does. Blocks on
        the CPU; on a GPU the current stream waits.

        Raises:
            TransferFailed: the copy failed. Any other exception of the copy is raised as is.
        """
        self._all.poll()
        prepare(self.pages, past)
        with self._backend.lent(self._states(past)) as slot:
            with self._all.lock:
                transfer = self._all.traffic.load(lease, slot)
            with self._told(transfer):
                wait_on(transfer, None)
                transfer.done()

    def save(self, path: Path, count: int, found: Checkpoint, *, fork: bool = False) -> None:
        """Copy a checkpoint into the cache, after the last one before it, unless it is there or
        another process is writing it. Blocks until it is published. Without room, or in a namespace
        that was cleared meanwhile, it is not saved.

        Args:
            count: pages of the path that it covers.
            fork: prompts diverge there.

        Raises:
            TransferFailed: the copy failed. Any other exception of the copy is raised as is.
        """
        self._all.poll()
        with self._backend.lent(found.states) as slot:
            transfer = self._all.donate(slot, path, count, fork=fork)
            if transfer is None:
                return
            with self._told(transfer):
                try:
                    transfer.wait()
                except TransferFailed:
                    if not isinstance(transfer.error, Abandoned):
                        raise

    @contextlib.contextmanager
    def _told(self, transfer: BlockTransfer) -> Iterator[None]:
        """Raise an exception other than a LightcacheError here, where the caller waits for the
        copy, and not in the next call, which polls."""
        foreign = self._all.traffic.moves.foreign
        try:
            yield
        except TransferFailed:
            foreign.tell()
            raise
        except LightcacheError:
            raise
        except Exception:  # from the wait itself, which fails the copy as well
            with contextlib.suppress(Exception):
                transfer.wait()  # else it fails later, and the next call raises
            try:
                foreign.tell()
            except Exception as other:
                if other is not transfer.error:
                    foreign.note(other)
            raise

    def count(self, kv: int, used: int) -> None:
        """Count a request: keys and values were found for its first `kv` tokens, and used for
        `used` of them, up to a state."""
        self._all.counts.add(
            requests=1,
            host_hits=int(used > 0),
            usable_tokens=used,
            unusable_tokens=max(0, kv - used),
        )

    def stats(self) -> hybrid.CheckpointStats:
        """Counters of this connector."""
        return self._all.stats()

    def close(self) -> None:
        """Wait for copies, and release the cache."""
        self._pool.close()  # waits for every copy; nothing else is held between calls


# ---- The PrefixCache of a hybrid model, which also takes checkpoints of its state

_DECODED = 2
"""Checkpoints kept of generated tokens: the newest, and one before it, for use if the newest is
after the kept tokens."""


class HybridPrefixCache(PrefixCache):
    """Keys, values and recurrent states of one sequence, for `past_key_values=`.

    A state covers all its tokens, so it cannot be cropped: `checkpoint` before tokens that may
    be rejected, and `rewind` to it. Between two forward passes the state may be copied, and saved
    under the tokens that it covers: at the positions given to `save_at`, and while decoding at
    multiples of an interval.
    """

    def __init__(
        self, config: Any, pages: StatePages, every: int, tokens: TokenIds | None = None
    ) -> None:
        """Empty, with a layer for each of the model's.

        Args:
            pages: of the model's states.
            every: tokens between checkpoints that are taken while decoding.
            config, tokens: see `PrefixCache`.
        """
        super().__init__(config, tokens)
        self._pages, self._every = pages, every
        self._states = pages.geometry.layers
        self._seen = 0
        """Number of tokens at the last `look`."""
        self._valid: weakref.WeakSet[Checkpoint] = weakref.WeakSet()
        """Checkpoints of tokens that are still held."""
        self._wanted: set[int] = set()
        self._prompt: dict[int, Checkpoint] = {}
        self._decoded: dict[int, Checkpoint] = {}
        self.branching: int | None = None
        """The branching point, if no checkpoint was found there: a multiple of the grid, in
        tokens."""

    @property
    def several(self) -> bool:
        """Whether the model may continue from a state with several tokens in one pass."""
        return self._pages.continues

    def name(self, tokens: TokenIds | None) -> TokenIds:
        """The tokens of the whole prompt; `tokens`, if given, replace them.

        Raises:
            ConfigError: no tokens are known, or these do not begin with the tokens held.
        """
        if tokens is not None and not self._cropped:
            known = self.tokens
            if len(tokens) >= self.held and (tokens[: len(known)] == known).all():
                self.check_given(tokens, len(known), "tokens")
                self._tokens = tokens
                return tokens
        elif self._tokens is not None and not self._cropped:
            return self._tokens
        raise ConfigError(
            f"tokens: expected a prompt that begins with the {self.held} tokens held, "
            f"{len(self.tokens)} of them known, found {'none' if tokens is None else len(tokens)}; "
            "begin another `prefix`"
        )

    # ---- checkpoints

    def checkpoint(self) -> Checkpoint:
        """A copy of the current state, to rewind to."""
        named = 0 if self._tokens is None else len(self._tokens)
        copies = copied(self, self._states, named)
        self._valid.add(copies)
        return copies

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Return to a checkpoint of this cache: drops all tokens computed or named since.

        Raises:
            ConfigError: a checkpoint of another cache, or of tokens that were dropped since.
        """
        if checkpoint not in self._valid:
            raise ConfigError(
                f"rewind: expected a checkpoint that this cache made, of tokens that it still "
                f"holds, found {checkpoint!r} for {self.held} tokens; it may be of tokens that an "
                "earlier `rewind` or `reset` has dropped"
            )
        self._shorten(self.held - checkpoint.tokens)
        for layer in self._states:
            if checkpoint.states[layer]:
                set_parts(self.layers[layer], checkpoint.states[layer])
            else:
                drop_parts(self.layers[layer])
        if self._tokens is not None:
            self._tokens = self._tokens[: max(checkpoint.named, checkpoint.tokens)]
        self._void(checkpoint.tokens)

    def save_at(self, positions: set[int]) -> None:
        """Take a checkpoint when a forward pass ends at one of these positions."""
        self._wanted |= positions

    def look(self) -> None:
        """Take a checkpoint if one is due at the current position. Between forward passes only;
        the connector calls it when the next pass begins."""
        held = self.held
        if held in (self._seen, self.reused):
            return
        self._seen = held
        if held in self._wanted:
            self._prompt[held] = self.checkpoint()
        elif held % self._every == 0:
            self._decoded[held] = self.checkpoint()
            for old in sorted(self._decoded)[:-_DECODED]:
                del self._decoded[old]

    @property
    def taken(self) -> list[Checkpoint]:
        """Checkpoints taken so far, by position."""
        return [checkpoint for _, checkpoint in sorted((self._prompt | self._decoded).items())]

    def _void(self, held: int) -> None:
        """Drop checkpoints that cover more than `held` tokens."""
        for checkpoint in [each for each in self._valid if each.tokens > held]:
            self._valid.discard(checkpoint)
        for saved in (self._prompt, self._decoded):
            for tokens in [each for each in saved if each > held]:
                del saved[tokens]
        self._seen = min(self._seen, held)

    # ---- forward passes

    def begin(self) -> None:
        """Note that a forward pass begins: states cover all tokens held, and may be copied.

        Raises:
            ConfigError: there are keys and values, but no matching state.
        """
        if self.held and not self.has_previous_state(self._states[0]):
            raise ConfigError(
                f"past_key_values: expected the state after the {self.held} tokens whose keys and "
                "values are held, found none; use `prefix`, which restores both"
            )
        self.look()

    def update_conv_state(
        self, conv_states: Any, layer_idx: int, *arguments: Any, **more: Any
    ) -> Any:
        """See `DynamicCache.update_conv_state`.

        Raises:
            ConfigError: several rows; or several tokens after a state, for a model that can
                continue with only one at a time.
        """
        one_row(int(conv_states.shape[0]))
        several = int(conv_states.shape[-1]) > 1
        if several and not self._pages.continues and self.has_previous_state(layer_idx):
            raise ConfigError(
                f"past_key_values: expected one token at a time after a state, found "
                f"{int(conv_states.shape[-1])}: this release of transformers ignores the state of "
                "this model with several; call connector.prefill(past) before generate"
            )
        return super().update_conv_state(conv_states, layer_idx, *arguments, **more)

    # ---- changes that checkpoints do not allow

    def crop(self, *arguments: Any, **more: Any) -> None:
        """Not supported for recurrent states.

        Raises:
            ConfigError: always.
        """
        del arguments, more
        raise ConfigError(
            "crop: expected a model of attention alone, found recurrent states, which cannot be "
            "cropped; take a `checkpoint` before tokens that may be dropped, and `rewind` to it"
        )

    def reset(self) -> None:
        """See `PrefixCache.reset`."""
        super().reset()
        for layer in self._states:
            drop_parts(self.layers[layer])
        self._void(0)


# ---- Prefill of a hybrid model: forward passes end where a state is saved


def prefill(model: Any, past: Any, tokens: Any, *, grid: Grid, at_most: int | None) -> None:
    """See `Connector.prefill`.

    Transformers exposes a state only at the end of a forward pass, so a pass ends at each position
    that is saved. A prompt that ends on the grid saves two states: the last for longer prompts, and
    the one before it for the same prompt, which must leave something to compute: two tokens, since
    some models compute a pass of one token differently from the same token in a longer pass
    (Nemotron-H, Zamba2, and Granite in bfloat16, in transformers 5.23).
    """
    if not isinstance(past, HybridPrefixCache):
        raise ConfigError(
            f"past: expected a cache of this connector's `prefix`, found {type(past).__name__}"
        )
    if at_most is not None:
        whole(at_most, "at_most")
    prompt = past.name(None if tokens is None else token_ids(tokens))
    limit = len(prompt) - 1  # the caller computes the last token: its logits give the next one
    bound = limit - 1 if past.several else limit
    positions = {
        position
        for position in (past.branching, grid.floor(bound))
        if position and position <= bound
    }
    past.save_at(positions)
    if grid.floor(len(prompt)) == len(prompt):
        past.save_at({len(prompt)})
    for end in sorted(positions):
        _compute(model, past, prompt[:end], at_most)
        past.look()
    if not past.several:
        _compute(model, past, prompt[:limit], at_most)


def _compute(model: Any, past: HybridPrefixCache, prompt: TokenIds, at_most: int | None) -> None:
    """Compute the part of a prompt that is not held."""
    body = getattr(model, "base_model", model)  # no logits are needed
    with torch.no_grad():
        while past.held < len(prompt):
            left = len(prompt) - past.held
            limit = left if past.several or not past.held else 1
            count = min(limit, at_most or limit)
            if count > 2 and left - count == 1:
                count -= 1  # no pass of one token
            piece = prompt[past.held :][:count]
            ids = torch.from_numpy(np.ascontiguousarray(piece))[None]
            forward(body, past, ids.to(model.device))


# ---- Prefixes of hybrid models: keys and values in one cache and checkpoints in another, joined.


def check_states(states: Any, model: Any, pages: ModelPages) -> None:
    """Check that a connector has a cache of states if and only if its model has states.

    Raises:
        LayoutMismatch: it is of another model.
        ConfigError: no cache, one too many, one too few, or one that is not independent.
    """
    kind = type(model).__name__
    if states is not None and not isinstance(states, Cache):
        raise ConfigError(f"states: expected a lightcache.Cache, found {type(states).__name__}")
    if pages.states is None:
        if states is not None:
            raise ConfigError(
                f"states: expected None for {kind}, whose layers keep only keys and values, found "
                f"the cache {states.name!r}"
            )
    elif states is None:
        raise ConfigError(
            f"states: expected a cache for the recurrent states of {kind}, found None; use "
            "open_caches, and give states=caches.states"
        )
    else:
        check_model(states, pages.states)
        if not states.index.independent:
            raise ConfigError(
                f"states: expected a cache made with independent=True, found {states.name!r} "
                "without; "
                "its last states would be evicted first. Remove it, or take another name, and use "
                "open_caches, or Cache.open with describe(model).states.options"
            )


class HybridPrefixes:
    """The parts of a connector that only hybrid models need."""

    def __init__(
        self,
        cache: Cache,
        states: Cache,
        model: Any,
        pages: ModelPages,
        *,
        pinned: PinnedPages | None,
        chunk: int,
        every: int,
        path_limit: int,
        figures: Counters,
    ) -> None:
        """Args:
        cache, states: of keys and values, and of states.
        pinned: the pool of `states`, see `Connector`.
        chunk, every, path_limit: see `Connector`.
        figures: counters of the connector.

        Raises:
            ConfigError: sizes out of range, or settings that conflict, all in one message.
        """
        assert pages.states is not None
        self._cache, self._model = cache, model
        self._pages: StatePages = pages.states
        tokens = pages.geometry.page_tokens
        self.grid = Grid(tokens, tokens, chunk, every)
        """Where states are saved."""
        self._figures = figures
        if self.grid.grid > max(tokens, chunk):
            figures.say_once(
                "grid",
                f"cache {states.name!r}: states are saved at multiples of {self.grid.grid} tokens, "
                f"the least common multiple of page_tokens={tokens} and chunk={chunk}; shorter "
                "prompts save none. Choose one a multiple of the other",
            )
        Features(  # one sequence at a time, in its own tensors; saved states are on the host
            self.grid,
            Saves.END_ONLY,
            running=1,
            device_slots=1,
            device_states=0,
            host_states=states.pages,
            path_limit=path_limit,
        ).check()
        self.checkpoints = Checkpoints(
            cache, states, pages.states, model.config, pinned, path_limit or None
        )

    def empty(self, ids: TokenIds | None) -> HybridPrefixCache:
        """An empty cache for these tokens."""
        return HybridPrefixCache(self._model.config, self._pages, self.grid.interval, ids)

    def found(
        self,
        ids: TokenIds,
        keys: Keys,
        namespace: Namespace | None,
        load: Callable[[PrefixCache, Lease], None],
    ) -> HybridPrefixCache:
        """The longest prefix with both a checkpoint, and keys and values up to it. Keys and values
        after the checkpoint are not loaded.

        Args:
            load: loads keys and values, and takes the lease over.
        """
        past = self.empty(ids)
        if past.several:  # no pass of one token may follow: see `prefill`
            keys = keys[: max(0, len(ids) - 2) // self.grid.page_tokens]
        path = self.checkpoints.path(keys, namespace)
        if path is None:
            return past
        kv = reach = self._cache.peek(keys, namespace=namespace)
        while position := self.checkpoints.last_ready(path, reach):
            with (
                self.checkpoints.match(path, position) as state,
                self._cache.match(keys[:position], namespace=namespace) as lease,
            ):
                if len(state.pages) and len(lease.pages) == position:
                    load(past, lease)
                    self.checkpoints.load(past, state)
                    break
                # Evicted between lookup and match. Each turn tries fewer pages, so this ends.
                reach = len(lease.pages) if len(state.pages) else position - 1
        tokens = kv * self.grid.page_tokens
        self.checkpoints.count(tokens, past.held)
        self._figures.add(stateless_tokens=max(0, tokens - past.held))
        past.branching = self.grid.branching(tokens, past.held)
        return past

    def prefill(self, past: Any, tokens: Any, at_most: int | None) -> None:
        """See `Connector.prefill`."""
        prefill(self._model, past, tokens, grid=self.grid, at_most=at_most)

    def save(self, past: HybridPrefixCache, keys: Keys, namespace: Namespace | None) -> None:
        """Save the taken checkpoints whose tokens have stored keys and values; others would be of
        no use.

        Args:
            keys: of the tokens held and known.
        """
        past.look()
        if past.held < self.grid.grid:
            self._figures.add(off_grid=1)
            self._figures.say_once(
                "short",
                f"cache {self.checkpoints.cache.name!r}: a prompt of {past.held} tokens saves no "
                f"state: states are saved at multiples of {self.grid.grid}. Further ones are "
                "counted in `off_grid` only; a smaller chunk= saves more often",
            )
        path = self.checkpoints.path(keys, namespace)
        if path is None:
            return
        stored = self._cache.peek(keys, namespace=namespace)
        for checkpoint in past.taken:
            pages, more = divmod(checkpoint.tokens, self.grid.page_tokens)
            if not more and pages <= stored:
                fork = checkpoint.tokens == past.branching
                self.checkpoints.save(path, pages, checkpoint, fork=fork)

    def close(self) -> None:
        """Wait for copies, and release the cache of states."""
        self.checkpoints.close()


__all__ = [
    "Checkpoint",
    "Checkpoints",
    "HybridPrefixCache",
    "HybridPrefixes",
    "check_states",
    "copied",
    "prefill",
]
