"""`lightcache explain`: why a prompt hits a cache, or does not."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console

from lightcache import traces
from lightcache._arguments import Keys
from lightcache.cache import SecretSource, check_config, digest_of, secret_path
from lightcache.errors import ConfigError, LayoutMismatch, LightcacheError, NotReady
from lightcache.hashing import KeySpec, matchable_pages
from lightcache.shm.listing import list_segments
from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.disk.backend import stored
from lightcache.storage.urls import is_service
from lightcache.tools import facts
from lightcache.tools.explain_report import show, verdict
from lightcache.tools.facts import Facts
from lightcache.tools.given_prompt import (
    STDIN,
    GivenPrompt,
    Identity,
    TokenIds,
    adapter_of,
    hashed_by,
    keys_of,
    open_tokenizer,
    parse_hashes,
    parse_tokens,
    read_text,
    tokenized,
)
from lightcache.tools.hints import board_of
from lightcache.tools.image import Image, name_argument, read
from lightcache.tools.output import (
    Command,
    check_writable,
    console,
    counted,
    emit,
    json_option,
    save_picture,
)
from lightcache.tools.whereabouts import PageTable, leading

AROUND = 8
"""Tokens of text that are shown on each side of the first that differs."""
STORAGE_S = 10.0
"""Seconds that a storage may take to say what it has."""
Found = npt.NDArray[np.bool_]


@click.command(cls=Command)
@name_argument()
@click.option("--tokens", metavar="FILE", help="Token ids, a JSON list; without: standard input.")
@click.option("--text", metavar="FILE", help="The prompt's text, with --tokenizer.")
@click.option("--tokenizer", metavar="DIR", help="Folder of a model: its tokenizer.")
@click.option("--hashes", metavar="FILE", help="An engine's own hashes of the pages, a JSON list.")
@click.option("--salt", default="", help="Of the request: vLLM's cache_salt, `prefix(salt=)`.")
@click.option("--lora", metavar="NAME=PATH", help="Its adapter, as vLLM has it; or hex digits.")
@click.option("--weights", default="", help="Version of the weights, if there are several.")
@click.option("--tenant", default="", help="Tenant, if there are several.")
@click.option("--against", metavar="FILE", help="A prompt that should share the prefix; a trace.")
@click.option("--storage", "storages", metavar="URL", multiple=True, help="Look there as well.")
@click.option("--page-tokens", type=click.IntRange(1, 1 << 20), help="If the cache has none.")
@click.option("--secret-file", help="Of the keys. Default: as for `lightcache create`.")
@click.option("--svg", metavar="FILE", help="Write a picture of the answer there.")
@json_option
def explain(
    name: str,
    tokens: str | None,
    text: str | None,
    tokenizer: str | None,
    hashes: str | None,
    salt: str,
    lora: str | None,
    weights: str,
    tenant: str,
    against: str | None,
    storages: tuple[str, ...],
    page_tokens: int | None,
    secret_file: str | None,
    svg: str | None,
    as_json: bool,
) -> None:
    """Say why a prompt hits the cache NAME, or does not: which of its pages are there, in which
    state and tier, where the prefix parts and why.

    Reads copies, as `dump` does: takes no lock and no slot, pins nothing, and is no use of a page.
    It needs the secret of the keys. Of a chat, give the ids that the engine makes of it.
    """
    if svg is not None:
        check_writable("--svg", svg)
    prompt = _given(tokens, text, tokenizer, hashes)
    identity = Identity(weights, tenant, salt, adapter_of(lora) if lora else b"")
    asked = _asked(name, prompt, identity, page_tokens, secret_file)
    told = _examined(asked, storages)
    if against is not None:
        told["against"] = _compared(asked, against)
    told |= verdict(told)
    if as_json:
        emit(told)
    else:
        show(console(), told)
    if svg is not None:
        _picture(svg, told)


def _picture(path: str, told: Facts) -> None:
    """As on a terminal of 110 columns."""
    out = Console(file=io.StringIO(), record=True, width=110, force_terminal=True, highlight=False)
    show(out, told)
    save_picture(out, path, f"lightcache explain {told['cache']['name']}")


# ---- what was given


def _given(
    tokens: str | None, text: str | None, tokenizer: str | None, hashes: str | None
) -> GivenPrompt:
    if sum(each is not None for each in (tokens, text, hashes)) > 1:
        raise click.UsageError("give the prompt once: --tokens, --text or --hashes")
    if (text is None) != (tokenizer is None):
        raise click.UsageError("--text needs --tokenizer, the folder of a model, and the reverse")
    if text is not None and tokenizer is not None:
        loaded = open_tokenizer(tokenizer)
        return GivenPrompt(tokenized(read_text(text, "--text"), loaded), tokenizer=loaded)
    if hashes is not None:
        return GivenPrompt(hashes=parse_hashes(read_text(hashes, "--hashes"), hashes))
    path = tokens or STDIN
    if tokens is None and sys.stdin.isatty():
        raise click.UsageError("give a prompt: --tokens FILE, --text FILE, or ids as input")
    return GivenPrompt(parse_tokens(read_text(path, "--tokens"), "--tokens", path))


@dataclass
class _Asked:
    """A prompt, and the cache that it is looked for in."""

    prompt: GivenPrompt
    identity: Identity
    pages: PageTable
    spec: KeySpec
    keys: Keys
    spaces: list[Facts]
    known: dict[tuple[KeySpec, Identity], Keys] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.pages.image.info.name

    @property
    def independent(self) -> bool:
        """Whether a page is of use without those before it."""
        return self.pages.image.config.get("independent") is True

    @property
    def space(self) -> Facts | None:
        """The namespace that is asked."""
        return _space_of(self.spaces, self.identity)

    def keys_as(self, spec: KeySpec, identity: Identity) -> Keys:
        """Of this prompt with other seeds; hashed once."""
        if (spec, identity) not in self.known:
            self.known[spec, identity] = keys_of(self.prompt, spec, identity)
        return self.known[spec, identity]


def _asked(
    name: str,
    prompt: GivenPrompt,
    identity: Identity,
    page_tokens: int | None,
    secret_file: str | None,
) -> _Asked:
    image = read(name)
    config = image.config
    if "fingerprint" not in config or "page_bytes" not in config:
        raise ConfigError(
            f"{name!r} is an index without pages of its own, of device blocks or of a disk: give "
            "the cache of the node, whose fingerprint the keys are made with; `lightcache ls` "
            "lists all"
        )
    check_config(name, config)
    secret = _secret(name, config, secret_file)
    spec = _seeded(_spec(config, _page_tokens(name, config, page_tokens), secret), identity)
    keys = keys_of(prompt, spec, identity)
    if not len(keys):
        count = 0 if prompt.tokens is None else len(prompt.tokens)
        raise ConfigError(
            f"a page of {name!r} has {spec.page_tokens} tokens, found a prompt of "
            f"{counted(count, 'token')}: it fills no page, so nothing of it is ever cached"
        )
    return _Asked(prompt, identity, PageTable(image), spec, keys, facts.namespaces(image))


def _page_tokens(name: str, config: Any, given: int | None) -> int:
    recorded = config.get("page_tokens")
    if recorded is not None and given not in (None, recorded):
        raise ConfigError(f"--page-tokens: {name!r} has {recorded} tokens a page, found {given}")
    tokens = recorded if given is None else given
    if not isinstance(tokens, int):
        raise ConfigError(
            f"{name!r} does not say how many tokens a page has: give --page-tokens, as its engine "
            "gives it to hash_pages"
        )
    return tokens


def _spec(config: Any, page_tokens: int, secret: bytes) -> KeySpec:
    return KeySpec(
        fingerprint=config["fingerprint"],
        page_tokens=page_tokens,
        secret=secret,
        algorithm=config["algorithm"],
    )


def _secret(name: str, config: Any, given: str | None) -> bytes:
    """The secret of the cache's keys. None is made."""
    source, path = SecretSource(file=given), secret_path(given)
    if not os.path.lexists(path):
        raise ConfigError(
            f"{path}: expected the secret that the keys of {name!r} are made with, found no file; "
            "give --secret-file, the file that its engine uses"
        )
    secret = source.read()
    if digest_of(secret) != config["secret"]:
        raise LayoutMismatch(
            f"the cache {name!r} was created with another secret, so no key of it can be made. "
            f"{source.differs}"
        )
    return secret


def _seeded(spec: KeySpec, identity: Identity) -> KeySpec:
    """The seeds of a namespace's keys."""
    return replace(spec, weights=identity.weights, namespace=identity.tenant)


def _space_of(spaces: Sequence[Facts], identity: Identity) -> Facts | None:
    names = identity.weights, identity.tenant
    same = [each for each in spaces if (each["weights"], each["tenant"]) == names]
    return next((each for each in same if each["state"] == "normal"), same[0] if same else None)


# ---- where its pages are


def _examined(asked: _Asked, storages: Sequence[str]) -> Facts:
    space, unknown = asked.space, list[str]()
    number = None if space is None else space["namespace"]
    pages = asked.pages.describe(asked.keys, number)
    open_ = space is not None and space["state"] == "normal"
    there = np.array([open_ and page["state"] == "ready" for page in pages])
    ready = _usable(asked, there)
    hits = ready >= min(len(pages), _matchable(asked))
    elsewhere = [*_stored(asked, storages), *_identities(asked)]
    elsewhere += _indexes(asked, unknown, caches=not hits)
    groups = asked.pages.groups(asked.keys, number)
    parts = 0 < ready < len(pages) and not asked.independent
    return {
        "cache": _cache_facts(asked.pages.image),
        "prompt": _prompt_facts(asked),
        "ready_pages": ready,
        "hit_tokens": min(ready, _matchable(asked)) * asked.spec.page_tokens,
        "pages": [_numbered(asked, number, page) for number, page in enumerate(pages)],
        "groups": groups,
        "continuations": asked.pages.continuations(asked.keys[ready - 1 : ready]) if parts else 0,
        "elsewhere": elsewhere,
        "against": None,
        "unknown": [*unknown, *_unknown(asked, hits)],
    }


def _prompt_facts(asked: _Asked) -> Facts:
    tokens, space = asked.prompt.tokens, asked.space
    by = "hashes" if asked.prompt.hashes else hashed_by(asked.spec.fingerprint)
    return {
        "tokens": len(asked.keys) * asked.spec.page_tokens if tokens is None else len(tokens),
        "pages": len(asked.keys),
        "matchable_pages": _matchable(asked),
        "hashed_by": by or "tokens",
        **_identity_facts(asked.identity),
        "namespace": None if space is None else space["namespace"],
        "namespace_state": "absent" if space is None else space["state"],
    }


def _usable(asked: _Asked, there: Found) -> int:
    """Pages of the prefix that is there: of an index of independent pages up to the last one."""
    if not asked.independent:
        return leading(there)
    return int(np.flatnonzero(there)[-1]) + 1 if there.any() else 0


def _matchable(asked: _Asked) -> int:
    if asked.prompt.tokens is None:
        return len(asked.keys)
    return matchable_pages(len(asked.prompt.tokens), asked.spec.page_tokens)


def _cache_facts(image: Image) -> Facts:
    shown = facts.segment(image)
    kept = ("name", "state", "eviction", "independent", "page_tokens", "fingerprint", "algorithm")
    return {name: shown[name] for name in (*kept, "clients", "dead_clients", "copy_is_steady")}


def _identity_facts(identity: Identity) -> Facts:
    """A salt separates those who do not trust each other, so it is not repeated."""
    return {
        "weights": identity.weights,
        "tenant": identity.tenant,
        "salted": bool(identity.salt),
        "adapter": bool(identity.lora),
    }


def _numbered(asked: _Asked, number: int, page: Facts) -> Facts:
    size = asked.spec.page_tokens
    return {"page": number, "tokens": [number * size, (number + 1) * size], **page}


def _identities(asked: _Asked) -> Iterator[Facts]:
    """The same tokens in this cache, under what else is recorded or was given."""
    for identity in _tried(asked.identity, asked.spaces):
        if identity != asked.identity:
            found = _found_as(asked, asked.pages, asked.spec, asked.spaces, identity)
            gone = asked.pages.gone(asked.keys_as(_seeded(asked.spec, identity), identity))
            if found or gone:
                yield _elsewhere(asked, "host", asked.name, found, identity, evicted_pages=gone)


def _tried(given: Identity, spaces: Sequence[Facts]) -> Iterator[Identity]:
    names = dict.fromkeys(
        [(given.weights, given.tenant)]
        + [(each["weights"], each["tenant"]) for each in spaces if each["state"] == "normal"]
    )
    salts, adapters = dict.fromkeys((given.salt, "")), dict.fromkeys((given.lora, b""))
    for (weights, tenant), salt, lora in itertools.product(names, salts, adapters):
        yield Identity(weights, tenant, salt, lora)


def _found_as(
    asked: _Asked, pages: PageTable, spec: KeySpec, spaces: Sequence[Facts], identity: Identity
) -> int:
    """Pages of the prefix that another index, or another namespace, has."""
    space = _space_of(spaces, identity)
    if space is None or space["state"] != "normal":
        return 0
    keys = asked.keys_as(_seeded(spec, identity), identity)
    return _usable(asked, pages.ready(keys, space["namespace"]))


def _elsewhere(
    asked: _Asked, tier: str, name: str, pages: int, identity: Identity, **more: Any
) -> Facts:
    found = {"tier": tier, "name": name, "ready_pages": pages, **_identity_facts(identity)}
    known = {"page_tokens": asked.spec.page_tokens, "evicted_pages": 0}
    return {**found, **known, "differs": [], "clients": [], **more}


def _indexes(asked: _Asked, unknown: list[str], *, caches: bool) -> list[Facts]:
    """What the other indexes of this machine have: of device blocks, of disks, and, if `caches`, of
    other caches. Those that cannot be read are said in `unknown`."""
    found: list[Facts] = []
    closed: list[str] = []
    secrets: list[str] = []
    for info in list_segments():
        if info.kind != "index" or info.retired or info.name == asked.name:
            continue
        try:
            image = read(info.name)
            if "fingerprint" not in image.config:
                found += _blocks(asked, image)
            elif image.config.get("secret") != asked.pages.image.config["secret"]:
                secrets.append(info.name)
            elif caches:
                found += _cached(asked, image)
        except NotReady:
            continue  # it has gone meanwhile, or is being made
        except (LightcacheError, OSError):
            closed.append(info.name)
    if closed:
        unknown.append(
            f"what is in {_some(closed)}: of another release, of another user, or damaged"
        )
    if secrets and caches:
        unknown.append(f"what is in {_some(secrets)}: made with another secret")
    return found


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _blocks(asked: _Asked, image: Image) -> Iterator[Facts]:
    """Of an index of device blocks or of a disk: its keys are those of the cache, with a page size
    of its own."""
    tokens = image.config.get("block_tokens") or asked.spec.page_tokens
    if type(tokens) is not int or not 1 <= tokens <= 1 << 20:
        return
    pages = PageTable(image)
    keys = asked.keys_as(replace(asked.spec, page_tokens=tokens), asked.identity)
    ready = leading(pages.ready(keys, None))
    if ready:
        tier = "disk" if "folder" in image.config else "device"
        clients = [facts.member(each) for each in image.clients]
        how = {"page_tokens": tokens, "clients": clients}
        yield _elsewhere(asked, tier, image.info.name, ready, asked.identity, **how)


def _cached(asked: _Asked, image: Image) -> Iterator[Facts]:
    """Of another cache with the same secret: all that it has of the tokens."""
    config = image.config
    check_config(image.info.name, config)
    spec = _spec(config, config.get("page_tokens") or asked.spec.page_tokens, asked.spec.secret)
    pages, spaces = PageTable(image), facts.namespaces(image)
    for identity in _tried(asked.identity, spaces):
        ready = _found_as(asked, pages, spec, spaces, identity)
        if ready:
            how = {"page_tokens": spec.page_tokens, "differs": _differing(asked.spec, spec)}
            yield _elsewhere(asked, "host", image.info.name, ready, identity, **how)


def _differing(one: KeySpec, other: KeySpec) -> list[str]:
    """What makes keys of the same tokens differ: words of the fingerprints, and the rest."""
    words = itertools.zip_longest(one.fingerprint.split(), other.fingerprint.split())
    pairs = [("", mine, its) for mine, its in words]
    pairs += [
        (f"{what} ", getattr(one, what), getattr(other, what))
        for what in ("page_tokens", "algorithm")
    ]
    return [f"{what}{mine} here, {its} there" for what, mine, its in pairs if mine != its]


# ---- storages


def _stored(asked: _Asked, urls: Sequence[str]) -> Iterator[Facts]:
    config = asked.pages.image.config
    spec = StorageSpec(config["page_bytes"], config["fingerprint"], config["algorithm"])
    for url in urls:
        scheme, _, rest = url.partition(":")
        if is_service(url) or scheme == "memory":
            where = "the storage service" if is_service(url) else "the process that opened it"
            raise ConfigError(
                f"--storage: expected the URL of a medium, found {url!r}, which only {where} can "
                f"look into; give the URL that {where} was given"
            )
        if scheme == "disk":
            found = leading(_among(asked.keys, stored(rest.partition("?")[0], spec)))
        else:
            with open_storage(url, spec=spec) as storage:
                found = storage.contains(asked.keys, timeout=STORAGE_S)
        yield _elsewhere(asked, "storage", scheme, found, asked.identity)


def _among(keys: Keys, others: Keys) -> Found:
    """Which keys are among others."""
    known = set(map(tuple, others.tolist()))
    return np.array([tuple(key) in known for key in keys.tolist()])


# ---- another prompt, or a trace


def _compared(asked: _Asked, path: str) -> Facts:
    text, tokenizer = read_text(path, "--against"), asked.prompt.tokenizer
    if _is_trace(text):
        return _against_trace(asked, path)
    if asked.prompt.tokens is None:
        raise ConfigError(
            f"--against: expected a trace, since the prompt was given as hashes, found {path!r}; "
            "give both prompts as token ids"
        )
    found = tokenized(text, tokenizer) if tokenizer else parse_tokens(text, "--against", path)
    return _against_prompt(asked, asked.prompt.tokens, GivenPrompt(found, tokenizer=tokenizer))


def _is_trace(text: str) -> bool:
    first = text.lstrip()
    return first.startswith("{") and '"hash_ids"' in first.partition("\n")[0]


def _against_prompt(asked: _Asked, mine: TokenIds, other: GivenPrompt) -> Facts:
    its = other.ids
    both = min(len(mine), len(its))
    differing = np.flatnonzero(mine[:both] != its[:both])
    at = int(differing[0]) if len(differing) else None
    keys, space = keys_of(other, asked.spec, asked.identity), asked.space
    there = asked.pages.ready(keys, None if space is None else space["namespace"])
    return {
        "kind": "prompt",
        "tokens": len(its),
        "ready_pages": leading(there),
        "same_tokens": both if at is None else at,
        "page": None if at is None else at // asked.spec.page_tokens,
        "token": None if at is None else [int(mine[at]), int(its[at])],
        "text": None if at is None else _around(asked.prompt, other, at),
    }


def _around(one: GivenPrompt, other: GivenPrompt, at: int) -> list[list[str]] | None:
    """Of both prompts the text before the first differing token, and from it on."""
    if one.tokenizer is None:
        return None
    return [[each.text(at - AROUND, at), each.text(at, at + AROUND)] for each in (one, other)]


def _against_trace(asked: _Asked, path: str) -> Facts:
    """The recorded request with the longest prefix in common: a trace has a part of each key."""
    size = asked.spec.page_tokens
    own = {
        identity: traces.ids_of(asked.keys_as(_seeded(asked.spec, identity), identity))
        for identity in _tried(asked.identity, asked.spaces)
    }
    best, told, requests, sizes = _NO_REQUEST, asked.identity, 0, set[int]()
    for seconds, tokens, block, ids in traces.lines(Path(path), size):
        requests += 1
        sizes.add(block)
        full = ids[: tokens // block]
        for identity, mine in own.items():
            same = _common(mine, full)
            if same > best["same_pages"]:
                told, request = identity, {"request": requests, "seconds": seconds}
                best = {**request, "same_pages": same, "pages": len(full)}
    if sizes != {size}:
        raise ConfigError(
            f"--against: expected a trace with blocks of {size} tokens, as a page of "
            f"{asked.name!r} has, found {', '.join(map(str, sorted(sizes)))} tokens; give what an "
            "engine of this cache recorded"
        )
    return {"kind": "trace", "requests": requests, **best, **_identity_facts(told)}


_NO_REQUEST: Facts = {"request": None, "seconds": None, "same_pages": 0, "pages": None}


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count


# ---- what is not recorded


def _unknown(asked: _Asked, hits: bool) -> Iterator[str]:
    """What an operator may ask, and no copy tells."""
    if not hits:
        yield (
            "the salts and adapters of what is cached: they are in the keys alone, so those given "
            "and none were tried"
        )
        if not asked.pages.ranked:
            yield (
                'whether what is absent was ever there: with eviction "lru" an index remembers '
                "nothing of pages that went"
            )
    yield "who wrote a page that is ready: an index does not keep it"
    if not asked.pages.image.steady:
        yield "whether all states are of one moment: the cache changed while it was copied"
    with contextlib.suppress(LightcacheError, OSError, ValueError):
        if board_of(asked.name, asked.pages.image.info.uuid).stats.serving:
            yield (
                "what the storage of the storage service has: its URL is not recorded, give it "
                "with --storage"
            )
