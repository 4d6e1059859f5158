"""LightLLM: its server, with a host cache that all services of the node share.

    python -m lightcache.connectors.lightllm --model_dir MODEL --enable_cpu_cache ...
    python -m lightcache.connectors.lightllm --lightcache '{"name": "llama"}' --model_dir MODEL ...

All arguments but `--lightcache` are LightLLM's. Its processes are spawned, and each imports this
module before LightLLM: the hook that it sets puts our client in place of `CpuKvCacheClient`. No
file of LightLLM is changed. docs/design/lightllm.md says how it works.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.metadata
import importlib.util
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lightcache.connectors.engine_options import EngineOptions
from lightcache.connectors.model_facts import digest, files_of
from lightcache.errors import ConfigError, NotInstalled

VARIABLE = "LIGHTCACHE_LIGHTLLM"
"""Environment variable by which spawned processes know the options."""
CLIENT = "lightllm.server.multi_level_kv_cache.cpu_cache_client"
MANAGER = "lightllm.server.multi_level_kv_cache.manager"
RANK = "lightllm.server.router.model_infer.mode_backend.multi_level_kv_cache"
UPDATES = "lightllm.server.router.model_infer.mode_backend.rl_backend_ops"
CHANGING = (
    "update_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc",
    "release_memory_occupation",
)  # fmt: skip
"""Calls of a rank that change the weights, or give their memory away."""
DECIDING = (
    "data_type", "llm_kv_type", "llm_kv_quant_group_size", "quant_type", "quant_cfg", "mtp_mode",
    "mtp_draft_model_dir", "mtp_step", "kv_quant_calibration_config_path", "weight_version",
    "expert_dtype", "llm_prefill_att_backend", "llm_decode_att_backend",
)  # fmt: skip
"""Arguments of LightLLM that decide the bytes of a page, beside its shape."""
PACKING = ("tp", "dp", "linear_att_hash_page_size", "linear_att_ssm_data_type")
"""And those of pages with recurrent states, which are packed by rank."""


@dataclass(frozen=True)
class Options(EngineOptions):
    """What `--lightcache` may say. The size is LightLLM's `--cpu_cache_storage_size`, the version
    of the weights its `--weight_version`."""

    given_in = "--lightcache"
    elsewhere = frozenset({"size", "weights", "on_reset", "token_ids"})

    @classmethod
    def read(cls, text: str) -> Options:
        """The options of a JSON object.

        Raises:
            ConfigError: not an object, an option that there is not, or a value that it cannot have.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"--lightcache: expected a JSON object, found {text!r}: {error}"
            ) from None
        if not isinstance(given, dict):
            raise ConfigError(f"--lightcache: expected a JSON object, found {text}")
        return cls.of(given)


def service() -> Any:
    """The service of this process, by LightLLM's own configuration of it.

    Raises:
        ConfigError: see `refuse`.
    """
    from lightllm.utils.envs_utils import get_env_start_args, get_unique_server_name
    from lightllm.utils.kv_cache_utils import calcu_cpu_cache_meta

    from lightcache.connectors.lightllm_client import Service

    arguments, meta = get_env_start_args(), calcu_cpu_cache_meta()
    options = Options.read(os.environ.get(VARIABLE, "{}"))
    refuse(arguments, options)
    dtype = str(meta.data_type).removeprefix("torch.")
    shape = (
        meta.layer_num, meta.token_page_size, meta.num_heads, meta.get_merged_head_dim()
    )  # fmt: skip
    return Service(
        name=get_unique_server_name(),
        model=Path(arguments["model_dir"]).name,
        fingerprint=fingerprint(arguments, shape, dtype),
        pages=meta.page_num,
        page_tokens=arguments["cpu_cache_token_page_size"],
        shape=shape,
        dtype=dtype,
        page_bytes=meta.calcu_one_page_size(),
        shared=not arguments.get("enable_multimodal"),
        options=options,
    )


def refuse(arguments: Mapping[str, Any], options: Options) -> None:
    """What does not go together, at the start.

    Raises:
        ConfigError: LightLLM's disk cache is enabled; or the service takes images or audio, and
            `name` or `storage` is given.
    """
    if arguments.get("enable_disk_cache"):
        raise ConfigError(
            "enable_disk_cache: LightLLM's disk cache keeps pages in a way of its own; leave it "
            'out, and give --lightcache \'{"storage": "disk:/path?capacity=1TiB"}\''
        )
    # Images have token ids that each service counts from the same number: equal hashes of two
    # services, or of two starts of one, are of different content.
    given = [name for name in ("name", "storage") if getattr(options, name)]
    if arguments.get("enable_multimodal") and given:
        raise ConfigError(
            f"--lightcache: expected no {' and no '.join(given)} for a service with images or "
            "audio, whose pages no other service and no later start may find; leave it out, or "
            "start LightLLM with --disable_vision --disable_audio"
        )


def fingerprint(arguments: Mapping[str, Any], shape: Sequence[int], dtype: str) -> str:
    """All that decides the bytes of a page."""
    folder = Path(arguments["model_dir"])
    states = tuple(shape[:3]) == (1, 1, 1)  # packed with recurrent states: one row of bytes
    facts = {
        "release": release(),
        "files": files_of(folder),
        "shape": tuple(shape),
        "dtype": dtype,
        **{name: arguments.get(name) for name in DECIDING + (PACKING if states else ())},
    }
    return f"lightllm {folder.name} {dtype} {'x'.join(map(str, shape))} {digest(facts)}"


def release() -> str | None:
    """Of LightLLM; None: it is no installed package."""
    try:
        return importlib.metadata.version("lightllm")
    except importlib.metadata.PackageNotFoundError:
        return None


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


def end_at_updates(module: ModuleType) -> None:
    """In the ranks: before weights change, the service ends its use of the cache."""
    operations = attribute(module, "RlBackendOps")
    for name in CHANGING:
        setattr(operations, name, _ending(attribute(operations, name)))


def _ending(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.backend.args.enable_cpu_cache:
            # An error of this is one of the update, which then does not happen.
            self.backend.multi_level_cache_module.cpu_cache_client.end_use()
        return theirs(self, *arguments, **named)

    return call


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    CLIENT: replace_client,
    MANAGER: replace_lookup,
    RANK: hold_while_loading,
    UPDATES: end_at_updates,
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
        ConfigError: `--lightcache` says something that cannot be; or see `refuse`.
        NotInstalled: there is no LightLLM.
    """
    ours = ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--lightcache", nargs="?", const="", default=os.environ.get(VARIABLE, "{}"))
    known, given = ours.parse_known_args(arguments)
    options = Options.read(known.lightcache)
    os.environ[VARIABLE] = known.lightcache
    if importlib.util.find_spec("lightllm") is None:
        raise NotInstalled("lightllm is not installed; install it as its documentation says")
    from lightllm.server import api_server

    parser = ArgumentParser(prog="python -m lightcache.connectors.lightllm")
    api_server.add_cli_args(parser)
    theirs = vars(parser.parse_args(given))
    refuse(theirs, options)  # LightLLM finds out later whether the model takes images
    api_server.launch_server(api_server.StartArgs(**theirs))


__all__ = ["Options", "install", "main"]

if __name__ in ("__main__", "__mp_main__"):  # the latter: in a spawned process
    install()
if __name__ == "__main__":
    main()
