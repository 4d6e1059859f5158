"""LightLLM: its server, with a host cache that all services of the node share.

    python -m lightcache.connectors.lightllm --model_dir MODEL --enable_cpu_cache ...
    python -m lightcache.connectors.lightllm --lightcache '{"name": "llama"}' --model_dir MODEL ...

All arguments but `--lightcache` are LightLLM's. Its processes are spawned, and each imports this
module before LightLLM: the hook that it sets puts our client in place of `CpuKvCacheClient`. No
file of LightLLM is changed. docs/design/lightllm.md says how it works.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.util
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from lightcache.errors import ConfigError, NotInstalled

VARIABLE = "LIGHTCACHE_LIGHTLLM"
"""Environment variable by which spawned processes know the options."""
CLIENT = "lightllm.server.multi_level_kv_cache.cpu_cache_client"
MANAGER = "lightllm.server.multi_level_kv_cache.manager"
RANK = "lightllm.server.router.model_infer.mode_backend.multi_level_kv_cache"
DECIDING = (
    "data_type", "llm_kv_type", "llm_kv_quant_group_size", "quant_type", "quant_cfg", "mtp_mode",
    "mtp_draft_model_dir", "mtp_step", "kv_quant_calibration_config_path", "weight_version",
)  # fmt: skip
"""Arguments of LightLLM that decide the bytes of a page, beside its shape."""
PACKING = ("tp", "dp", "linear_att_hash_page_size", "linear_att_ssm_data_type")
"""And those of pages with recurrent states, which are packed by rank."""


@dataclass(frozen=True)
class Options:
    """What `--lightcache` may say. The size is LightLLM's `--cpu_cache_storage_size`."""

    name: str | None = None
    """Of the cache; None: the model's name and a digest of what decides the bytes of a page."""
    storage: tuple[str, ...] = ()
    """URLs of storages, the nearer first."""
    secret_file: str | None = None
    """See `Cache.create`; so the following ones."""
    numa: str | int | None = None
    pool_path: str | None = None
    idle_limit: float | None = 24 * 3600.0

    @classmethod
    def of(cls, text: str) -> Options:
        """The options of a JSON object.

        Raises:
            ConfigError: not an object, or an option that there is not.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"--lightcache: expected a JSON object, found {text!r}: {error}"
            ) from None
        known = [option.name for option in fields(cls)]
        if not isinstance(given, dict) or set(given) - set(known):
            raise ConfigError(
                f"--lightcache: expected an object with options among {', '.join(known)}, found "
                f"{text}"
            )
        urls = given.get("storage", ())
        return cls(**{**given, "storage": (urls,) if isinstance(urls, str) else tuple(urls)})


def service() -> Any:
    """The service of this process, by LightLLM's own configuration of it.

    Raises:
        ConfigError: LightLLM's disk cache is enabled.
    """
    from lightllm.utils.envs_utils import get_env_start_args, get_unique_server_name
    from lightllm.utils.kv_cache_utils import calcu_cpu_cache_meta

    from lightcache.connectors.lightllm_client import Service, refuse_disk

    arguments, meta = get_env_start_args(), calcu_cpu_cache_meta()
    refuse_disk(bool(arguments.get("enable_disk_cache")))
    options = Options.of(os.environ.get(VARIABLE, "{}"))
    dtype = str(meta.data_type).removeprefix("torch.")
    shape = (
        meta.layer_num, meta.token_page_size, meta.num_heads, meta.get_merged_head_dim()
    )  # fmt: skip
    cache = asdict(options)
    del cache["storage"]
    name = cache.pop("name")
    return Service(
        name=get_unique_server_name(),
        model=Path(arguments["model_dir"]).name,
        fingerprint=fingerprint(arguments, shape, dtype),
        pages=meta.page_num,
        page_tokens=arguments["cpu_cache_token_page_size"],
        shape=shape,
        dtype=dtype,
        page_bytes=meta.calcu_one_page_size(),
        # Images have token ids that each service counts from the same number.
        shared=not arguments.get("enable_multimodal"),
        cache_name=name,
        cache=cache,
        storage=options.storage,
    )


def fingerprint(arguments: Mapping[str, Any], shape: Sequence[int], dtype: str) -> str:
    """All that decides the bytes of a page."""
    folder = Path(arguments["model_dir"])
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*")) if path.is_file()]
    states = shape[:3] == (1, 1, 1)  # packed with recurrent states: one row of bytes
    facts = {
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "shape": tuple(shape),
        "dtype": dtype,
        **{name: arguments.get(name) for name in DECIDING + (PACKING if states else ())},
    }
    data = json.dumps(facts, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(data, digest_size=12, person=b"lightllm").hexdigest()
    return f"lightllm {folder.name} {dtype} {'x'.join(map(str, shape))} {digest}"


# ---- The import hook.


def replace_client(module: ModuleType) -> None:
    """In their module of the client."""
    from lightcache.connectors.lightllm_client import Client

    theirs = attribute(module, "CpuKvCacheClient")

    class CpuKvCacheClient(Client):
        """Ours, made as theirs is."""

        def __init__(self, only_create_meta_data: bool, init_shm_data: bool) -> None:
            from lightllm.utils.kv_cache_utils import calcu_cpu_cache_meta

            super().__init__(service(), only_create_meta_data, init_shm_data)
            self.kv_cache_tensor_meta = calcu_cpu_cache_meta()

    CpuKvCacheClient.__qualname__ = theirs.__qualname__
    module.CpuKvCacheClient = CpuKvCacheClient  # type: ignore[attr-defined]


def replace_lookup(module: ModuleType) -> None:
    """In the manager's process: one lookup for a prompt."""
    manager, name = attribute(module, "MultiLevelKVCacheManager"), "_cpu_cache_match"
    attribute(manager, name)

    def match(self: Any, token_hash_list: list[int]) -> list[int]:
        pages: list[int] = self.cpu_cache_client.query_pages(token_hash_list)
        return pages

    setattr(manager, name, match)


def hold_while_loading(module: ModuleType) -> None:
    """In the ranks: pin what is copied."""
    loading = attribute(module, "MultiLevelKvCacheModule")
    theirs = attribute(loading, "load_cpu_cache_to_reqs")

    @functools.wraps(theirs)
    def load_cpu_cache_to_reqs(self: Any, reqs: list[Any]) -> Any:
        shared = [req.shm_req for req in reqs]
        prompts = [
            (one.token_hash_list.get_all(), one.cpu_cache_match_page_indexes.get_all())
            for one in shared
        ]
        with self.cpu_cache_client.holding(prompts):
            return theirs(self, reqs)

    loading.load_cpu_cache_to_reqs = load_cpu_cache_to_reqs


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    CLIENT: replace_client,
    MANAGER: replace_lookup,
    RANK: hold_while_loading,
}


def attribute(of: Any, name: str) -> Any:
    """What is to be replaced.

    Raises:
        ConfigError: it is not there: another release of LightLLM.
    """
    if not hasattr(of, name):
        raise ConfigError(
            f"LightLLM: expected {name} in {getattr(of, '__name__', of)}, as at commit 87881ae, "
            "found none; use that release, or start LightLLM without lightcache"
        )
    return getattr(of, name)


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets a module be found and executed as usual, and changes it then."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As the finders after this one find it, with this as its loader."""
        if name not in CHANGES:
            return None
        at = sys.meta_path.index(self)
        for finder in sys.meta_path[at + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader_state = spec.loader
                spec.loader = self
                return spec
        return None

    def create_module(self, spec: Any) -> Any:
        """As its own loader does."""
        return spec.loader_state.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute it with its own loader, then change it."""
        spec = module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = spec.loader_state
        spec.loader_state.exec_module(module)
        CHANGES[module.__name__](module)


def install() -> None:
    """Set the hook in this process, before LightLLM is imported. A second call does nothing.

    Raises:
        ConfigError: LightLLM has been imported already.
    """
    if early := sorted(CHANGES.keys() & sys.modules.keys()):
        raise ConfigError(f"LightLLM: {early[0]} was imported before the hook; import this first")
    if not any(isinstance(finder, Hook) for finder in sys.meta_path):
        sys.meta_path.insert(0, Hook())


def main(arguments: list[str] | None = None) -> None:
    """Start their server with these arguments.

    Raises:
        ConfigError: `--lightcache` says something that there is not.
        NotInstalled: there is no LightLLM.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--lightcache" in given:
        at = given.index("--lightcache")
        text = "".join(given[at + 1 : at + 2])
        Options.of(text)
        os.environ[VARIABLE] = text
        del given[at : at + 2]
    if importlib.util.find_spec("lightllm") is None:
        raise NotInstalled("lightllm is not installed; install it as its documentation says")
    from lightllm.server import api_server

    parser = ArgumentParser(prog="python -m lightcache.connectors.lightllm")
    api_server.add_cli_args(parser)
    api_server.launch_server(api_server.StartArgs(**vars(parser.parse_args(given))))


__all__ = ["Options", "install", "main"]

if __name__ in ("__main__", "__mp_main__"):  # the latter: in a spawned process
    install()
if __name__ == "__main__":
    main()
