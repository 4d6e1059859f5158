"""What an operator may write into `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from lightcache._arguments import count, parse_size
from lightcache.errors import ConfigError
from lightcache.namespaces import NAME_BYTES
from lightcache.pool import Numa, check_numa, nodes_of_gpus
from lightcache.shm.names import object_name
from lightcache.storage.urls import check_url

LoadFailure = Literal["recompute", "fail"]
OnReset = Literal["new", "keep"]
DAY = 24 * 3600.0


@dataclass(frozen=True)
class Options:
    """Each has a default, so `{}` is a configuration."""

    size: int | str = "8GiB"
    """Memory for pages: bytes, or with a unit. An existing cache with a default name keeps its own;
    under a given `name` it must be equal."""
    name: str | None = None
    """Of the cache. None: the model's name and a digest of what decides the bytes of a page, so
    engines whose pages differ never meet."""
    weights: str = ""
    """Version of the weights, at most 47 bytes: pages of another one are not found."""
    blocks_per_page: int | None = None
    """Blocks of vLLM in a page. None: the least power of two with which a page of all ranks has 1
    MiB, or fewer where that is longer than a window. The tokens after the last whole page of a
    prompt are not saved."""
    storage: tuple[str, ...] = ()
    """URLs of storages, the nearer first, such as "disk:/mnt/nvme/cache?capacity=1TiB"; one may be
    given as a text. What the cache evicts is read from there again."""
    save_decode: bool = False
    """True: answers are saved as well, for conversations whose next prompt repeats them."""
    load_failure: LoadFailure = "recompute"
    """What vLLM does with a request whose load failed: compute it, or end it with an error. It
    takes the place of `kv_load_failure_policy`, whose default in vLLM is to end it."""
    on_reset: OnReset = "new"
    """After vLLM's `reset_prefix_cache` with connectors, which a weight update calls, and so do
    sleep and pause: "new": pages saved before are not found by this engine. "keep": they are; for
    engines whose weights never change."""
    secret_file: str | None = None
    """File of the secret that keys are made with. Engines share pages only if it is the same: mount
    one into all containers. None: that of LIGHTCACHE_SECRET_FILE, or that of
    ~/.local/share/lightcache/secret."""
    numa: Numa = None
    """Where the pool's memory lies: "interleave" or a node; see `Cache.create`. None: "interleave"
    where the machine has GPUs next to more than one node, as the first engine would else have it
    all on its own; elsewhere where it is touched first."""
    pool_path: str | None = None
    """Folder of the pool, such as one of huge pages; None: /dev/shm."""
    idle_limit: float | None = DAY
    """Seconds without use after which a new cache may be removed when its room is needed. None:
    never."""
    prefill_tokens_per_s: float | None = None
    """The model's prefill speed, to give up reading from a storage when computing is faster. None:
    it is measured while the engine works."""

    def __post_init__(self) -> None:
        given = asdict(self)  # of any type: an operator wrote it
        if parse_size(self.size, "size") < 1:
            raise ConfigError(f"size: expected at least a page, found {self.size!r}")
        if self.blocks_per_page is not None:
            count(self.blocks_per_page, "blocks_per_page", 1, 1 << 16)
        for name, choices in (("load_failure", LoadFailure), ("on_reset", OnReset)):
            if given[name] not in get_args(choices):
                raise ConfigError(
                    f"{name}: expected one of {get_args(choices)}, found {given[name]!r}"
                )
        for name in ("name", "secret_file", "pool_path"):
            if given[name] is not None and not (isinstance(given[name], str) and given[name]):
                raise ConfigError(f"{name}: expected text, found {given[name]!r}")
        weights = given["weights"]
        if not isinstance(weights, str) or len(weights.encode()) > NAME_BYTES:
            raise ConfigError(
                f"weights: expected text of {NAME_BYTES} bytes at most, found {weights!r}"
            )
        if type(given["save_decode"]) is not bool:
            raise ConfigError(f"save_decode: expected true or false, found {self.save_decode!r}")
        for name in ("idle_limit", "prefill_tokens_per_s"):
            number = isinstance(given[name], (int, float)) and not isinstance(given[name], bool)
            if given[name] is not None and not (number and given[name] > 0):
                raise ConfigError(f"{name}: expected a number above 0, found {given[name]!r}")
        if not all(isinstance(url, str) and url for url in given["storage"]):
            raise ConfigError(f"storage: expected URLs, found {self.storage!r}")
        if self.storage:
            check_url(self.storage if len(self.storage) > 1 else self.storage[0])
        if self.name is not None:
            object_name(self.name)
        check_numa(self.numa)

    def placement(self) -> Numa:
        """`numa`, or its default on this machine."""
        if self.numa is None and len(nodes_of_gpus()) > 1:
            return "interleave"
        return self.numa

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """The options of an extra configuration.

        Raises:
            ConfigError: an option that there is not, or a value that it cannot have.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(
                f"kv_connector_extra_config: expected options among {', '.join(known)}, found "
                f"{', '.join(unknown)}"
            )
        values = dict(given)
        if "storage" in values:
            urls = values["storage"]
            listed = [urls] if isinstance(urls, str) else urls
            if not isinstance(listed, (list, tuple)):
                raise ConfigError(f"storage: expected a URL or a list of URLs, found {urls!r}")
            values["storage"] = tuple(listed)
        return cls(**values)


__all__ = ["LoadFailure", "OnReset", "Options"]
