"""What an operator may write for any engine: the options that their connectors have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args

from lightcache._arguments import parse_size
from lightcache.errors import ConfigError
from lightcache.namespaces import NAME_BYTES
from lightcache.pool import Numa, check_numa, nodes_of_gpus
from lightcache.shm.names import object_name
from lightcache.storage.urls import SERVICE, check_url, is_service

OnReset = Literal["new", "keep"]
Eviction = Literal["lru", "hz"]
DAY = 24 * 3600.0
T = TypeVar("T", bound="EngineOptions")


@dataclass(frozen=True)
class EngineOptions:
    """Each has a default, so `{}` is a configuration."""

    given_in: ClassVar[str]
    """What the engine calls the mapping, for errors."""
    elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Options that the engine says by arguments of its own, or of which its connector knows too
    little; here they are refused."""
    measures_speed: ClassVar[bool] = False
    """Whether the connector measures the prefill speed, and gives up reading by itself."""

    size: int | str = "8GiB"
    """Memory for pages: bytes, or with a unit. An existing cache with a default name keeps its own;
    under a given `name` it must be equal."""
    name: str | None = None
    """Of the cache. None: the model's name and a digest of what decides the bytes of a page, so
    engines whose pages differ never meet."""
    weights: str = ""
    """Version of the weights, at most 47 bytes: pages of another one are not found."""
    storage: tuple[str, ...] = ()
    """URLs of storages, the nearer first, such as "disk:/mnt/nvme/cache?capacity=1TiB"; one may be
    given as a text. What the cache evicts is read from there again. "service:": the storage service
    of the cache (`lightcache storage`) reads and writes for all engines."""
    eviction: Eviction | None = None
    """The order in which pages go from a new cache when memory is short: "hz", what is least likely
    to be used again soon, which the cache learns, or "lru", the least recently used first. None:
    "hz"; "lru" for a model with windows or states, whose pages are of use together alone, and with
    SGLang, which does not say what its device serves. An existing cache keeps its own; under a
    given `name` one that is given must be equal."""
    admission: bool = False
    """True: pages that are not worth what would go for them are not saved, nor is what follows them
    in their prompt. For a cache whose eviction is "hz"; with a `storage` all are saved, as it is
    written from the cache."""
    token_ids: bool = False
    """True: a new cache notes the token ids of pages, for `lightcache events` to routers that find
    blocks by tokens. They are content, in shared memory that this user alone may read. An existing
    cache with a default name stays as it is; one with a given `name` must note them."""
    on_reset: OnReset = "new"
    """After the engine has dropped its own prefix cache, as a weight update does and so do sleep
    and pause: "new": pages saved before are not found by this engine. "keep": they are; for engines
    whose weights never change."""
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
    it is measured, by engines whose connector can."""

    def __post_init__(self) -> None:
        given = asdict(self)  # of any type: an operator wrote it
        if parse_size(self.size, "size") < 1:
            raise ConfigError(f"size: expected at least a page, found {self.size!r}")
        self.check_choice("on_reset", OnReset)
        if self.eviction is not None:
            self.check_choice("eviction", Eviction)
        self.check_flag("admission")
        self.check_flag("token_ids")
        for name in ("name", "secret_file", "pool_path"):
            if given[name] is not None and not (isinstance(given[name], str) and given[name]):
                raise ConfigError(f"{name}: expected text, found {given[name]!r}")
        weights = given["weights"]
        if not isinstance(weights, str) or len(weights.encode()) > NAME_BYTES:
            raise ConfigError(
                f"weights: expected text of {NAME_BYTES} bytes at most, found {weights!r}"
            )
        for name in ("idle_limit", "prefill_tokens_per_s"):
            number = isinstance(given[name], (int, float)) and not isinstance(given[name], bool)
            if given[name] is not None and not (number and given[name] > 0):
                raise ConfigError(f"{name}: expected a number above 0, found {given[name]!r}")
        if not all(isinstance(url, str) and url for url in given["storage"]):
            raise ConfigError(f"storage: expected URLs, found {self.storage!r}")
        if is_service(self.storage):
            self._check_service()
        elif self.storage:
            check_url(self.storage)
        if self.name is not None:
            object_name(self.name)
        check_numa(self.numa)

    def _check_service(self) -> None:
        if self.prefill_tokens_per_s is not None and not self.measures_speed:
            raise ConfigError(
                f"prefill_tokens_per_s: expected none with the storage {SERVICE!r}, found "
                f"{self.prefill_tokens_per_s!r}; the service decides for all of its engines: "
                "`lightcache storage NAME --url URL --prefill-tokens-per-s N`"
            )

    def placement(self) -> Numa:
        """`numa`, or its default on this machine."""
        if self.numa is None and len(nodes_of_gpus()) > 1:
            return "interleave"
        return self.numa

    def check_flag(self, name: str) -> None:
        """Refuse a value that is neither true nor false.

        Raises:
            ConfigError: it is neither.
        """
        if type(given := getattr(self, name)) is not bool:
            raise ConfigError(f"{name}: expected true or false, found {given!r}")

    def check_choice(self, name: str, choices: Any) -> None:
        """Refuse a value that is none of a `Literal`.

        Raises:
            ConfigError: it is none.
        """
        if getattr(self, name) not in get_args(choices):
            raise ConfigError(
                f"{name}: expected one of {get_args(choices)}, found {getattr(self, name)!r}"
            )

    @classmethod
    def of(cls: type[T], given: Mapping[str, Any]) -> T:
        """The options of an engine's extra configuration.

        Raises:
            ConfigError: an option that there is not, or a value that it cannot have.
        """
        known = [field.name for field in fields(cls) if field.name not in cls.elsewhere]
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(
                f"{cls.given_in}: expected options among {', '.join(known)}, found "
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


__all__ = ["DAY", "EngineOptions", "OnReset"]
