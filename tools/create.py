"""`lightcache create`: a cache that outlives the command, with all its memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lightcache._arguments import format_size
from lightcache.cache import SECRET_VARIABLE, Cache, digest_of, secret_path
from lightcache.connectors.model_facts import digest, name_of, words
from lightcache.connectors.vllm.options import Options
from lightcache.errors import ConfigError, LightcacheError
from lightcache.hashing import load_or_create_secret
from lightcache.layout import EVICTIONS
from lightcache.pool import HostPool, parse_numa
from lightcache.shm import Segment, names, wanted
from lightcache.shm.objects import OpenObject
from lightcache.tools.output import bar, emit, json_option
from lightcache.tools.settings import Service
from lightcache.tools.vllm_config import (
    Unknown,
    element_bytes,
    find_model,
    geometry_of,
    page_of,
    shape_of,
)

BLOCK = 16
"""Tokens that a page has a multiple of, unless it is said."""
_NOTES = ("_name_or_path", "transformers_version")
"""Of config.json, what says nothing of the model."""


@click.command(cls=Service, either=(("size", "pages"), ("name", "model")))
@click.argument("name", required=False)
@click.option(
    "--model",
    help="Without NAME: the default cache of this model. Unused ones of the model give way to it. "
    "A folder with a config.json, or that file, says what a page and the fingerprint are.",
)
@click.option("--size", help='Capacity in bytes, or as "64GiB"; or')
@click.option("--pages", type=int, help="capacity in pages.")
@click.option("--page-bytes", help='Size of a page in bytes, or as "8MiB".')
@click.option("--fingerprint", help="Model, KV dtype and geometry, in any form.")
@click.option("--page-tokens", type=int, help="Tokens of a page.")
@click.option(
    "--independent", is_flag=True, help="For states: any page may be evicted before others."
)
@click.option(
    "--eviction",
    type=click.Choice(EVICTIONS),
    help="What goes first: the page least likely to be used soon (hz, the default, unless the "
    "cache is independent or has several groups), or the one unused for longest (lru).",
)
@click.option(
    "--token-ids",
    is_flag=True,
    help="Note the token ids of pages, for `lightcache events`: content, readable by this user.",
)
@click.option("--kv-groups", help='Names of the KV groups that share it, such as "kv,states".')
@click.option(
    "--algorithm", default="xxh3_128", show_default=True, help="Hash algorithm of the keys."
)
@click.option(
    "--lifetime",
    type=click.Choice(["persistent", "attached"]),
    default="persistent",
    show_default=True,
    help="Until `lightcache rm`; or until the last client leaves, including this command.",
)
@click.option("--group", help="A group whose members may attach as well.")
@click.option(
    "--secret-file",
    envvar=SECRET_VARIABLE,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the secret of the keys (mode 0600); created if it is missing. Default: "
    "$LIGHTCACHE_SECRET_FILE, or ~/.local/share/lightcache/secret.",
)
@click.option("--huge-pages", is_flag=True, help="Ask for transparent huge pages.")
@click.option(
    "--numa", help='Where its memory should be: "interleave", a memory node\'s number, or "gpu:0".'
)
@click.option("--pool-path", help="Folder on a tmpfs or hugetlbfs for the pool; else /dev/shm.")
@click.option("--no-prefault", is_flag=True, help="Leave the memory to the clients.")
@click.option("--threads", type=click.IntRange(1, 256), help="To zero memory; default: up to 8.")
@json_option
def create(
    name: str | None,
    model: str | None,
    as_json: bool,
    no_prefault: bool,
    threads: int | None,
    secret_file: Path | None,
    numa: str | None,
    kv_groups: str | None,
    **configuration: Any,
) -> None:
    """Create the cache NAME, or the default cache of a model.

    It has its memory when the command returns (unless --no-prefault), and exists until `lightcache
    rm NAME`; that of a model also until unused caches of the model give way to another one.
    Engines `attach` to it, or `open` it with the same configuration and lifetime="persistent". With
    --lifetime attached the command stays, and the cache is removed with its last client.
    """
    if not name and model:
        model = _from_model(model, configuration)
    _check_given(name or model, configuration)
    with _undone_by_sigterm(), _secret(secret_file) as secret:
        cache = Cache.create(
            name,
            model=model,
            secret=secret,
            role="create",
            grow=False,
            numa=parse_numa(numa),
            kv_groups=None if kv_groups is None else kv_groups.split(","),
            **configuration,
        )
        try:
            if not no_prefault:
                _prefault(cache.pool, cache.name, threads, quiet=as_json)
        except BaseException:
            _undo(cache)
            raise
    _report(cache, as_json)
    if not as_json and name is None:
        click.echo(f"fingerprint: {configuration['fingerprint']}", err=True)
    if configuration["lifetime"] == "attached":
        _stay()
    cache.close()


def _from_model(model: str, configuration: dict[str, Any]) -> str:
    """Fill in what a model's config.json says of a page, where it is on this machine. Returns the
    model's name.

    Raises:
        ConfigError: it is a path that is absent, or not on this machine, or its pages cannot be
            known from it.
    """
    if configuration["page_bytes"] and configuration["fingerprint"]:
        return model
    model, config = find_model(model)
    if config is None:
        raise ConfigError(
            f"--model: {model} is not on this machine, so no config.json says what a page is; give "
            "--page-bytes and --fingerprint"
        )
    name, tokens = name_of(model), configuration["page_tokens"]
    try:
        shape, element = shape_of(config), element_bytes(config, "auto")
        options = Options(blocks_per_page=1 if tokens else None)
        page = page_of(shape, element, tokens or BLOCK, options)
    except Unknown as error:
        raise ConfigError(f"--model: {error}; give --page-bytes and --fingerprint") from error
    facts = {key: value for key, value in config.items() if key not in _NOTES}
    said = words({"model": name, "config": digest(facts)})
    geometry = geometry_of(shape, element, page.tokens)
    configuration["page_tokens"] = page.tokens
    configuration["page_bytes"] = configuration["page_bytes"] or page.bytes
    configuration["fingerprint"] = configuration["fingerprint"] or " ".join(
        [*said, geometry.fingerprint()]
    )
    return name


def _check_given(name: str | None, configuration: dict[str, Any]) -> None:
    """Raises click.UsageError: names all missing options."""
    options = {
        "NAME (or --model)": (name, "--model llama-3-8b"),
        "--size (or --pages)": (
            configuration["size"] or configuration["pages"] is not None,
            "--size 64GiB",
        ),
        "--page-bytes": (configuration["page_bytes"], "--page-bytes 8MiB --page-tokens 64"),
        "--fingerprint": (configuration["fingerprint"], "--fingerprint llama-3-8b/bf16/64"),
    }
    missing = {option: example for option, (given, example) in options.items() if not given}
    if missing:
        raise click.UsageError(
            f"missing: {', '.join(missing)}; for example `{' '.join(missing.values())}`"
        )


@contextlib.contextmanager
def _undone_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so what was begun is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _secret(option: Path | None) -> Iterator[bytes]:
    """The secret of a file, while a cache is created. If that fails, a file that was created for it
    is removed with its new folders, unless another cache uses it."""
    path = secret_path(option)
    exists = os.path.lexists(path)
    new_folders = [folder for folder in path.parents if not os.path.lexists(folder)]
    secret = None
    try:
        secret = load_or_create_secret(path)
        yield secret
    except BaseException:
        with contextlib.suppress(OSError):  # a folder with something of others stays
            if not exists and secret is not None and not _is_used(secret):
                path.unlink()
            for folder in new_folders:
                folder.rmdir()
        raise


def _is_used(secret: bytes) -> bool:
    for name in names.segment_names():
        with contextlib.suppress(LightcacheError, OSError):
            opened = OpenObject.open(name, writable=False)
            if opened is not None:
                with contextlib.closing(opened):
                    if wanted.config_of(opened.header()).get("secret") == digest_of(secret):
                        return True
    return False


def _undo(cache: Cache) -> None:
    """There was not enough memory: remove the cache, unless another client has attached."""
    with contextlib.suppress(LightcacheError):
        cache.close()
        Segment.unlink(cache.name)


def _prefault(pool: HostPool, name: str, threads: int | None, *, quiet: bool) -> None:
    with bar(f"memory of {name}", pool.pages, pool.grown, quiet=quiet) as progress:
        pool.prefault(threads=threads, progress=progress)


def _report(cache: Cache, as_json: bool) -> None:
    pool = cache.pool
    if as_json:
        emit(
            {
                "name": cache.name,
                "pages": pool.pages,
                "page_bytes": pool.page_bytes,
                "pool_bytes": pool.nbytes,
                "grown": pool.grown,
                "index_bytes": cache.index.segment.nbytes,
                "fingerprint": cache.fingerprint,
                "lifetime": cache.index.segment.lifetime.name.lower(),
            }
        )
        return
    note = "" if pool.grown == pool.pages else f", {pool.grown:,} of them with memory so far"
    click.echo(
        f"created {cache.name}: {pool.pages:,} pages of {format_size(pool.page_bytes)}{note}; "
        f"pool {format_size(pool.nbytes)}, index {format_size(cache.index.segment.nbytes)}"
    )


def _stay() -> None:
    """Wait for Ctrl-C or SIGTERM, then leave in order."""
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    click.echo("the cache is removed with its last client; Ctrl-C ends this one", err=True)
    end.wait()
