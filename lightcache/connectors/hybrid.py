"""Prefixes of models with windows, chunks or recurrent states: what a position needs of each group
of layers, joined by a match."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache import Cache, Lease, hybrid
from lightcache._arguments import Keys, Pages, count
from lightcache.connectors._requirements import torch
from lightcache.connectors.cache_layers import (
    DECODED,
    Pair,
    WindowTail,
    drop_parts,
    keep_tails,
    parts_of,
    set_parts,
)
from lightcache.connectors.model_pages import ModelPages, TokenPages
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.prefix_cache import (
    Counters,
    PrefixCache,
    TokenIds,
    empty_rows,
    one_row,
    planes_of_rows,
    token_ids,
)
from lightcache.connectors.state_pages import (
    StateBackend,
    StatePages,
    States,
    planes_of_states,
    prepare,
)
from lightcache.connectors.trial import forward
from lightcache.connectors.windows import WindowGroup
from lightcache.errors import Abandoned, ConfigError, LightcacheError, TransferFailed
from lightcache.groups import Group, GroupMatch, GroupSet, Rule
from lightcache.hybrid import Grid
from lightcache.hybrid.checkpoints import CheckpointStats, Path, Tier
from lightcache.kernels.groups import whole
from lightcache.manager.load import wait_on
from lightcache.namespaces import Namespace, NamespaceState

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.manager.transfers import BlockTransfer


# ---- Checkpoints: states that were copied while a model computed, and the cache that keeps them.
#
# A checkpoint after n tokens has the key of the page of keys and values that ends there. It lies in
# several pages of the same cache, and is found and bounded separately from keys and values. A match
# joins the two, see `Connector.prefix`.


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What is needed to continue after the first tokens of a sequence, beside the keys and values
    of full attention; it never changes."""

    tokens: int
    """Number of tokens that it covers."""
    states: States = field(repr=False)
    """Tensors by layer and part."""
    windows: dict[int, tuple[Any, ...]] = field(repr=False, default_factory=dict)
    """Arguments of `WindowTail.place`, by layer."""
    named: int = 0
    """Tokens whose ids were known when it was taken, computed or not."""


class Checkpoints:
    """The checkpoints of one model: `lightcache.hybrid.Checkpoints` with a host and no slots, since
    every state has its own tensors here."""

    def __init__(self, pool: Pooled, pages: StatePages, most: int | None, *, full: bool) -> None:
        """Args:
        pool: that moves states.
        most: bound on checkpoints of one path; None: no bound.
        full: whether the cache has the keys and values of full attention, which tell where prompts
            part.
        """
        self.pages = pages
        self.cache = pool.cache
        self._kv = pool.cache.index
        self._pool = pool
        self._backend = StateBackend(pages, pool)
        self._all = hybrid.Checkpoints(
            None,
            pool.cache,
            self._backend,
            most=most,
            run=pages.run,
            parting=self._parting if full else None,
        )

    def _parting(self, path: Path) -> Pages:
        return self._kv.children(path.keys, namespace=path.kv)

    def _states(self, past: PrefixCache) -> States:
        return {layer: parts_of(past.layers[layer]) for layer in self.pages.geometry.layers}

    def path(self, keys: Keys, namespace: Namespace | None = None) -> Path | None:
        """The positions of a prompt: keys, and their namespace. None: the namespace was cleared.

        Raises:
            OutOfPages, LockTimeout: as `Cache.namespace`.
        """
        kv = self._kv.default_namespace if namespace is None else namespace

        def good() -> bool:
            return self._kv.namespace_state(kv) is NamespaceState.NORMAL

        with self._all.lock:
            space = self._all.spaces.beside(kv, good)
        return None if space is None else Path(keys, space, namespace)

    def group(self, path: Path) -> Group:
        """For a `GroupSet`."""
        space = path.space.of(Tier.HOST)
        return Group("states", Rule.point(), self.cache.index, space, self.pages.run)

    def match(self, path: Path, count: int) -> Lease:
        """The checkpoint after `count` pages, pinned and marked as used; an empty lease if it is
        gone."""
        parts = self.pages.run.keys(path.key(count))
        return self.cache.match(parts, namespace=path.space.of(Tier.HOST))

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
                transfer = self._all.load(lease, slot)
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
        foreign = self._all.transfers.foreign
        try:
            yield
        except TransferFailed:
            foreign.raise_first()
            raise
        except LightcacheError:
            raise
        except Exception:  # from the wait itself, which fails the copy as well
            with contextlib.suppress(Exception):
                transfer.wait()  # else it fails later, and the next call raises
            try:
                foreign.raise_first()
            except Exception as other:
                if other is not transfer.error:
                    foreign.note(other)
            raise

    def count(self, kv: int, used: int) -> None:
        """Count a request: keys and values were found for its first `kv` tokens, and used for
        `used` of them, up to a state."""
        self._all.counts.update(
            requests=1,
            host_hits=int(used > 0),
            usable_tokens=used,
            unusable_tokens=max(0, kv - used),
        )

    def stats(self) -> CheckpointStats:
        """Counters of this connector."""
        return self._all.stats()

    def close(self) -> None:
        """Wait for copies."""
        self._pool.close()  # waits for every copy; nothing else is held between calls


# ---- The PrefixCache of a hybrid model, which also takes checkpoints of its state


class HybridPrefixCache(PrefixCache):
    """Keys, values and recurrent states of one sequence, for `past_key_values=`.

    A state covers all its tokens, and a window only the last ones, so it cannot be cropped, or not
    far: `checkpoint` before tokens that may be rejected, and `rewind` to it. What a position needs
    may be copied and saved: at the positions given to `save_at`, and while decoding at multiples of
    an interval. Of windows that is done on the way; of states between two forward passes.
    """

    def __init__(
        self, config: Any, pages: ModelPages, every: int, tokens: TokenIds | None = None
    ) -> None:
        """Empty, with a layer for each of the model's.

        Args:
            pages: of the model.
            every: tokens between checkpoints that are taken while decoding.
            config, tokens: see `PrefixCache`.
        """
        super().__init__(config, tokens)
        self._pages, self._every = pages, every
        self._states = () if pages.states is None else pages.states.geometry.layers
        self._seen = 0
        """Number of tokens at the last `look`."""
        self._valid: weakref.WeakSet[Checkpoint] = weakref.WeakSet()
        """Checkpoints of tokens that are still held."""
        self._wanted: set[int] = set()
        self._prompt: dict[int, Checkpoint] = {}
        self._decoded: dict[int, Checkpoint] = {}
        self._windows = keep_tails(
            self, config.get_text_config(decoder=True), pages.page_tokens, self._wanted, every
        )
        self.branching: int | None = None
        """The branching point, if no checkpoint was found there: a multiple of the grid, in
        tokens."""

    @property
    def stateful(self) -> bool:
        """Whether the model keeps recurrent states."""
        return bool(self._states)

    @property
    def left(self) -> int:
        """Tokens of a prompt that are left to compute. With states two: some models compute a pass
        of one token differently from the same token in a longer pass (Nemotron-H, Zamba2, and
        Granite in bfloat16, in transformers 5.23)."""
        return 2 if self._states and self.several else 1

    @property
    def several(self) -> bool:
        """Whether the model may continue from a state with several tokens in one pass."""
        return self._pages.states is None or self._pages.states.continues

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

    # ---- windows

    def tails_of(self, pages: TokenPages) -> dict[int, WindowTail]:
        """The layers that have these pages, by number."""
        return {number: self._windows[number] for number in pages.geometry.layers}

    def rows_of(self, pages: TokenPages, position: int) -> dict[int, Pair] | None:
        """What a position needs of these layers, from the beginning of a page; None: it is not
        held."""
        rows = {n: tail.rows_of(position) for n, tail in self.tails_of(pages).items()}
        found = {n: pair for n, pair in rows.items() if pair is not None}
        return found if len(found) == len(rows) else None

    # ---- checkpoints

    def checkpoint(self) -> Checkpoint:
        """A copy of the current state, to rewind to. On a GPU the copies are enqueued."""
        states = {
            layer: {name: tensor.clone() for name, tensor in parts_of(self.layers[layer]).items()}
            for layer in self._states
        }
        windows = {number: tail.copy() for number, tail in self._windows.items()}
        named = 0 if self._tokens is None else len(self._tokens)
        copies = Checkpoint(self.held, states, windows, named)
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
        for number, place in checkpoint.windows.items():
            self._windows[number].clear()
            if place[0] is not None:
                self._windows[number].place(*place)
        self.passed(checkpoint.tokens)
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
        if not self._states or held in (self._seen, self.reused):
            return
        self._seen = held
        if held in self._wanted:
            self._prompt[held] = self.checkpoint()
        elif held % self._every == 0:
            self._decoded[held] = self.checkpoint()
            for old in sorted(self._decoded)[:-DECODED]:
                del self._decoded[old]

    @property
    def positions(self) -> set[int]:
        """Positions at which something was copied, or could be: the end of the last page."""
        if self._states:
            return self._prompt.keys() | self._decoded.keys()
        taken = {position for tail in self._windows.values() for position in tail.taken}
        size = self._pages.page_tokens
        return taken | {len(self.tokens) // size * size} - {0}

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
        for tail in self._windows.values():
            tail.forget_after(held)
        self._seen = min(self._seen, held)

    # ---- forward passes

    def begin(self) -> None:
        """Note that a forward pass begins: states cover all tokens held, and may be copied.

        Raises:
            ConfigError: there are keys and values, but no matching state.
        """
        if self.held and self._states and not self.has_previous_state(self._states[0]):
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
        if several and not self.several and self.has_previous_state(layer_idx):
            raise ConfigError(
                f"past_key_values: expected one token at a time after a state, found "
                f"{int(conv_states.shape[-1])}: this release of transformers ignores the state of "
                "this model with several; call connector.prefill(past) before generate"
            )
        return super().update_conv_state(conv_states, layer_idx, *arguments, **more)

    # ---- changes that checkpoints do not allow

    def crop(self, *arguments: Any, **more: Any) -> None:
        """See `PrefixCache.crop`. Not supported for recurrent states.

        Raises:
            ConfigError: there are states, or windows do not reach so far back.
        """
        if self._states:
            raise ConfigError(
                "crop: expected a model of attention alone, found recurrent states, which cannot "
                "be cropped; take a `checkpoint` before tokens that may be dropped, and `rewind` "
                "to it"
            )
        super().crop(*arguments, **more)
        self._void(self.held)

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
    the one before it for the same prompt, which must leave something to compute.
    """
    if not isinstance(past, HybridPrefixCache):
        raise ConfigError(
            f"past: expected a cache of this connector's `prefix`, found {type(past).__name__}"
        )
    if at_most is not None:
        whole(at_most, "at_most")
    prompt = past.name(None if tokens is None else token_ids(tokens))
    positions = save_positions(past, prompt, grid)
    if not past.stateful:
        return
    for end in sorted(positions):
        _compute(model, past, prompt[:end], at_most)
        past.look()
    if not past.several:
        # The caller computes the last token: its logits give the next one.
        _compute(model, past, prompt[:-1], at_most)


def save_positions(past: HybridPrefixCache, prompt: TokenIds, grid: Grid) -> set[int]:
    """Have what positions of a prompt need saved. Returns those that leave tokens to compute."""
    bound = len(prompt) - past.left
    positions = {
        position
        for position in (past.branching, grid.floor(bound))
        if position and position <= bound
    }
    past.save_at(positions)
    if grid.floor(len(prompt)) == len(prompt):
        past.save_at({len(prompt)})
    return positions


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
            forward(body, past, ids.to(model.device), past.held)


# ---- Prefixes of models with more than full attention: every group of layers has what it needs.


def check_kind(cache: Cache, pages: ModelPages) -> None:
    """Check that pages of the cache are evicted as the model's layers need it.

    Raises:
        ConfigError: they are not.
    """
    if cache.index.independent != (not pages.full):
        raise ConfigError(
            f"cache: expected one made with independent={not pages.full}, found {cache.name!r} "
            f"with {cache.index.independent}; pages would be evicted in the wrong order. Remove "
            "it, or take another name, and use open_cache, or Cache.open with the options that "
            "describe(model) gives"
        )


class HybridPrefixes:
    """The parts of a connector that only models with windows, chunks or recurrent states need."""

    def __init__(
        self,
        pool: Pooled,
        model: Any,
        pages: ModelPages,
        *,
        chunk: int,
        every: int,
        path_limit: int,
        figures: Counters,
    ) -> None:
        """Args:
        pool: that moves the model's first pages.
        chunk, every, path_limit: see `Connector`.
        figures: counters of the connector.

        Raises:
            ConfigError: sizes out of range.
        """
        self._cache, self._model, self._pages = pool.cache, model, pages
        tokens = pages.page_tokens
        self.grid = Grid(tokens, tokens, tokens if pages.states is None else chunk, every)
        """Where states are saved."""
        self._figures = figures
        if pages.states is not None:
            count(path_limit, "path_limit", 0, 1 << 20)
            self._check_grid(chunk)
        self.windows: list[WindowGroup] = []
        """Layers of windows and chunks, one for each of their settings."""
        self.checkpoints: Checkpoints | None = None
        """States; None: the model has none."""
        with contextlib.ExitStack() as stack:
            for of in pages.attention:
                if of.rule != Rule.prefix():
                    own = pool
                    if of is not pages.first:
                        own = pool_of_tokens(self._cache, of, pool.pinned)
                    self.windows.append(WindowGroup(own, of, figures))
                    stack.callback(own.close)
            if pages.states is not None:
                if pages.attention:
                    pool = pool_of_states(self._cache, pages.states, model.config, pool.pinned)
                self.checkpoints = Checkpoints(
                    pool, pages.states, path_limit or None, full=pages.full
                )
            stack.pop_all()

    def _check_grid(self, chunk: int) -> None:
        tokens = self._pages.page_tokens
        if self.grid.grid > max(tokens, chunk):
            self._figures.say_once(
                "grid",
                f"cache {self._cache.name!r}: states are saved at multiples of {self.grid.grid} "
                f"tokens, the least common multiple of page_tokens={tokens} and chunk={chunk}; "
                "shorter prompts save none. Choose one a multiple of the other",
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
        """The longest prefix of which every group has what it needs. Keys and values after it are
        not loaded.

        Args:
            load: loads keys and values of full attention, and takes the lease over.
        """
        past = self.empty(ids)
        size = self.grid.page_tokens
        keys = keys[: max(0, len(ids) - past.left) // size]
        reach = self._cache.peek(keys, namespace=namespace) if self._pages.full else 0
        groups = self._groups(keys, namespace)
        if groups is not None:
            with GroupSet(groups, page_tokens=size).match(keys) as match:
                if match.pages:
                    self._restore(past, match, load)
        tokens = reach * size
        if self.checkpoints is not None:
            self.checkpoints.count(tokens, past.held)
        self._figures.add(stateless_tokens=max(0, tokens - past.held))
        past.branching = self.grid.branching(tokens, past.held)
        if not past.stateful:
            save_positions(past, ids, self.grid)
        return past

    def _groups(self, keys: Keys, namespace: Namespace | None) -> list[Group] | None:
        """What is matched together; None: the namespace was cleared."""
        groups = []
        if self._pages.full:
            groups.append(Group("kv", Rule.prefix(), self._cache.index, namespace))
        groups += [window.group(namespace) for window in self.windows]
        if self.checkpoints is not None:
            path = self.checkpoints.path(keys, namespace)
            if path is None:
                return None
            groups.append(self.checkpoints.group(path))
        return groups

    def _restore(
        self,
        past: HybridPrefixCache,
        match: GroupMatch,
        load: Callable[[PrefixCache, Lease], None],
    ) -> None:
        leases = list(zip(match.leases, match.first, strict=True))
        position = match.pages * self.grid.page_tokens
        if self._pages.full:
            load(past, leases.pop(0)[0])
        else:
            past.restored(0, position)
        for window in self.windows:
            lease, first = leases.pop(0)
            window.load(past.tails_of(window.pages), lease, first, position)
        if self.checkpoints is not None:
            self.checkpoints.load(past, leases.pop(0)[0])

    def prefill(self, past: Any, tokens: Any, at_most: int | None) -> None:
        """See `Connector.prefill`."""
        prefill(self._model, past, tokens, grid=self.grid, at_most=at_most)

    def save(self, past: HybridPrefixCache, keys: Keys, namespace: Namespace | None) -> None:
        """Save what positions need whose tokens have stored keys and values; else it would be of no
        use.

        Args:
            keys: of the tokens held and known.
        """
        past.look()
        size = self.grid.page_tokens
        stored = len(keys)
        if self._pages.full:
            stored = self._cache.peek(keys, namespace=namespace)
        positions = sorted(
            position
            for position in past.positions
            if position % size == 0 and position <= stored * size
        )
        for window in self.windows:
            self._save_window(window, past, keys, namespace, positions)
        if self.checkpoints is not None:
            self._save_states(self.checkpoints, past, keys, namespace, positions)

    def _save_window(
        self,
        window: WindowGroup,
        past: HybridPrefixCache,
        keys: Keys,
        namespace: Namespace | None,
        positions: list[int],
    ) -> None:
        for position in positions:
            rows = past.rows_of(window.pages, position)
            if rows is not None:
                window.save(keys, namespace, rows, position)

    def _save_states(
        self,
        checkpoints: Checkpoints,
        past: HybridPrefixCache,
        keys: Keys,
        namespace: Namespace | None,
        positions: list[int],
    ) -> None:
        if past.held < self.grid.grid:
            self._figures.add(off_grid=1)
            self._figures.say_once(
                "short",
                f"cache {checkpoints.cache.name!r}: a prompt of {past.held} tokens saves no "
                f"state: states are saved at multiples of {self.grid.grid}. Further ones are "
                "counted in `off_grid` only; a smaller chunk= saves more often",
            )
        path = checkpoints.path(keys, namespace)
        if path is None:
            return
        for checkpoint in past.taken:
            if checkpoint.tokens in positions:
                fork = checkpoint.tokens == past.branching
                pages = checkpoint.tokens // self.grid.page_tokens
                checkpoints.save(path, pages, checkpoint, fork=fork)

    def close(self) -> None:
        """Wait for copies."""
        with contextlib.ExitStack() as stack:
            for window in self.windows:
                stack.callback(window.close)
            if self.checkpoints is not None:
                stack.callback(self.checkpoints.close)


def pool_of_tokens(cache: Cache, pages: TokenPages, pinned: PinnedPages | None) -> Pooled:
    """What moves keys and values. See `Pooled`."""
    planes = planes_of_rows(pages, empty_rows(pages, 1))  # every transfer brings its own
    return Pooled(cache, pages.geometry, planes, pages.device, pinned)


def pool_of_states(
    cache: Cache, pages: StatePages, config: Any, pinned: PinnedPages | None
) -> Pooled:
    """What moves states. See `Pooled`."""
    seen = PrefixCache(config)  # every transfer brings its own planes
    prepare(pages, seen)
    states = {layer: parts_of(seen.layers[layer]) for layer in pages.geometry.layers}
    return Pooled(cache, pages.geometry, planes_of_states(pages, states), pages.device, pinned)


__all__ = [
    "Checkpoint",
    "Checkpoints",
    "HybridPrefixCache",
    "HybridPrefixes",
    "check_kind",
    "pool_of_states",
    "pool_of_tokens",
    "prefill",
]
