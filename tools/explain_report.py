"""What `lightcache explain` says: a sentence, what to do, and tables."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from lightcache.tools.facts import Facts
from lightcache.tools.output import age, cell, counted, lines, table
from lightcache.tools.whereabouts import ranges

# ---- the sentence, and what to do


def verdict(told: Facts) -> Facts:
    """`verdict` and `advice` of what was found."""
    return {"verdict": _sentence(told), "advice": list(_advice(told))}


def _hits(told: Facts) -> bool:
    prompt = told["prompt"]
    return bool(told["ready_pages"] >= min(prompt["matchable_pages"], prompt["pages"]))


def _sentence(told: Facts) -> str:
    prompt, ready, state = told["prompt"], told["ready_pages"], told["cache"]["state"]
    if state != "ready":
        return f"nothing hits: the cache is {state}"
    if not min(prompt["matchable_pages"], prompt["pages"]):
        return "nothing can hit: its one page has the last token, which an answer computes"
    hit = f"{told['hit_tokens']:,} of {prompt['tokens']:,} tokens"
    kind = "keys and values of " if told["groups"] else ""
    verb = "are there" if told["groups"] else "hit"
    if _hits(told):
        return f"{kind}{hit} {verb}, which is all that can"
    first = told["pages"][ready]
    begin, end = first["tokens"]
    found = f"{kind}{hit} {verb}" if ready else "nothing hits"
    return f"{found}: page {ready} (tokens {begin:,} to {end - 1:,}) {_why(first)}"


def _why(page: Facts) -> str:
    if page["state"] == "evicted":
        return f"was evicted, or not kept, after its last use {age(page['unused_s'])} ago"
    return {
        "writing": "is being written",
        "evicting": "is being evicted",
        "doomed": "was unlinked: it is free once its last pin goes",
        "other namespace": "is in another namespace than its key says",
        "absent": "is not there",
        "ready": "is there, but its namespace is not open",
    }[str(page["state"])]


def _advice(told: Facts) -> Iterator[str]:
    """The surest first."""
    name, state = told["cache"]["name"], told["cache"]["state"]
    if state != "ready":
        yield f"`lightcache dump {name}` says why the cache is {state}, and what to do"
    if told["groups"]:
        yield (
            "a prefix hits where the other groups have what the model's layers need at its end, "
            "too: the pages of these are below; which are needed is not in the index"
        )
    if _hits(told):
        yield (
            "an engine that finds less asks with another salt, adapter, namespace, secret or "
            "fingerprint than shown below, or with other tokens: --against"
        )
    else:
        yield from _of_miss(told)
    if told["against"] is not None:
        yield from _of_other(told["against"], told)


def _of_miss(told: Facts) -> Iterator[str]:
    ready, first = told["ready_pages"], told["pages"][told["ready_pages"]]
    found = [*_of_namespace(told), *_of_elsewhere(told, ready)]
    if told["continuations"]:
        begin, end = first["tokens"]
        number = counted(told["continuations"], "other page")
        verb = "continues" if told["continuations"] == 1 else "continue"
        found.append(
            f"{number} {verb} the prefix after page {ready - 1}: there other prompts part from "
            f"this one, within tokens {begin:,} to {end - 1:,}; --against says at which token"
        )
    yield from _of_page(first, told["cache"])
    yield from found
    if not found and first["state"] == "absent" and told["against"] is None:
        yield (
            "give --salt and --lora if the request has a salt or an adapter; and with --against a "
            "prompt that was cached and should share the beginning, or a trace"
        )


def _of_namespace(told: Facts) -> Iterator[str]:
    prompt, state = told["prompt"], told["prompt"]["namespace_state"]
    names = f"weights {prompt['weights']!r} and tenant {prompt['tenant']!r}"
    if state == "absent":
        yield (
            f"no process has opened a namespace of {names}; "
            f"`lightcache dump {told['cache']['name']} --namespaces` lists those there are"
        )
    elif state != "normal":
        yield (
            f"the namespace of {names} was cleared, as after a change of weights: nothing of it "
            "is found any more"
        )


def _of_page(first: Facts, cache: Facts) -> Iterator[str]:
    writer, name = first["writer"], cache["name"]
    if writer is not None and writer["alive"]:
        others = [each for each in writer["waits_for"] if each != writer["client"]]
        waits = f", and waits for {', '.join(others)}" if others else ""
        yield f"{writer['client']} writes it{waits}; it hits once it is published"
    elif first["state"] == "writing":
        yield (
            "its writer has died: the next call that needs room takes it back, or "
            f"`lightcache reap {name}` now"
        )
    elif first["state"] == "evicted":
        yield (
            f"`lightcache dump {name} --evictions` says what more memory would bring; a storage "
            "keeps what memory has no room for"
        )
    elif first["state"] == "absent" and cache["eviction"] == "hz":
        yield (
            "nothing remembers it: it was never written with these keys, or went long ago, or "
            "its namespace was cleared"
        )


def _of_elsewhere(told: Facts, ready: int) -> Iterator[str]:
    """Where more of it is."""
    here = ready * page_size(told)
    for each in told["elsewhere"]:
        tokens = each["ready_pages"] * each["page_tokens"]
        if tokens <= here:
            if each["evicted_pages"]:
                yield (
                    f"{counted(each['evicted_pages'], 'page')} of it went, "
                    f"{difference(told['prompt'], each)}: that is what it was saved with"
                )
            continue
        if each["tier"] in ("disk", "storage"):
            yield (
                f"{tokens:,} tokens are in {each['tier']} {each['name']!r}: an engine that has "
                "this storage reads them"
            )
        elif each["tier"] == "device":
            yield f"{tokens:,} tokens are in the device blocks {each['name']!r}: they hit there"
        elif each["name"] != told["cache"]["name"]:
            because = "; ".join(each["differs"])
            same = f"the same {tokens:,} tokens are in the cache {each['name']!r}"
            how = difference(told["prompt"], each)
            yield f"{same}, {how}: " + (
                f"its keys differ by {because}" if because else "ask that one"
            )
        else:
            yield (
                f"the same {tokens:,} tokens are in this cache {difference(told['prompt'], each)}: "
                "the request and what was saved must agree in this"
            )


def difference(prompt: Facts, other: Facts) -> str:
    """What else a prefix was saved with."""
    parts = [
        f"with {what} {other[what]!r}"
        for what in ("weights", "tenant")
        if prompt[what] != other[what]
    ]
    parts += [
        f"without the {what}"
        for what, item in (("salt", "salted"), ("adapter", "adapter"))
        if prompt[item] != other[item]
    ]
    return " and ".join(parts) or "as asked"


def _of_other(against: Facts, told: Facts) -> Iterator[str]:
    if against["kind"] == "trace":
        yield from _of_trace(against, told)
    elif against["token"] is None:
        yield (
            f"the other prompt has the same {against['same_tokens']:,} tokens: the shorter is a "
            "prefix of the longer"
        )
    else:
        mine, its = against["token"]
        yield (
            f"the other prompt parts at token {against['same_tokens']:,}, in page "
            f"{against['page']}: {mine} here, {its} there; of its pages "
            f"{against['ready_pages']} are ready"
        )
        for who, (before, after) in zip(("here", "there"), against["text"] or (), strict=False):
            yield f"{who}: {before[-60:]!r}, then {after[:60]!r}"


def _of_trace(against: Facts, told: Facts) -> Iterator[str]:
    if against["request"] is None:
        yield (
            f"none of {counted(against['requests'], 'recorded request')} begins with the first "
            "page of this prompt, as asked or with what else was tried"
        )
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(against["seconds"]))
    yield (
        f"recorded request {against['request']} (at {at} UTC) has the first "
        f"{counted(against['same_pages'], 'page')} of this prompt, "
        f"{difference(told['prompt'], against)}, of {against['pages']} in all; a trace has no "
        "tokens, so where they part within a page is not known"
    )


# ---- tables


def show(out: Console, told: Facts) -> None:
    """Print all of it. A line of text stays one line, for who searches in it; not in a picture."""
    whole = not out.record
    good = _hits(told) and told["cache"]["state"] == "ready"
    title = Text.assemble(
        (f"{told['cache']['name']}: ", "bold"), (told["verdict"], "green" if good else "yellow")
    )
    out.print(title)
    for line in told["advice"]:
        out.print(Text.assemble(("  - ", "bold"), cell(line)), soft_wrap=whole)
    out.print()
    out.print(lines("asked", _asked(told)))
    out.print()
    out.print(table("pages", ("pages", "tokens", "state", "last use", "by"), _rows(told)))
    for group in told["groups"]:
        out.print(Text(f"group {group['group']}: pages {ranges(group['pages']) or 'none'}"))
    if told["elsewhere"]:
        out.print()
        out.print(_elsewhere(told))
    for line in told["unknown"]:
        out.print(cell(f"not known: {line}", style="dim"), soft_wrap=whole)


def page_size(told: Facts) -> int:
    """Tokens of a page."""
    begin, end = told["pages"][0]["tokens"]
    return int(end - begin)


def _asked(told: Facts) -> list[tuple[str, object]]:
    cache, prompt, size = told["cache"], told["prompt"], page_size(told)
    rest = prompt["tokens"] - prompt["pages"] * size
    full = f"{prompt['tokens']:,} tokens: {counted(prompt['pages'], 'page')} of {size}"
    if rest:
        full += f"; the last {counted(rest, 'token')} fill none"
    elif prompt["matchable_pages"] < prompt["pages"]:
        full += "; the last is computed, as an answer needs a token"
    salt = "with the salt" if prompt["salted"] else "no salt"
    adapter = "with the adapter" if prompt["adapter"] else "no adapter"
    space = f"weights {prompt['weights']!r}, tenant {prompt['tenant']!r}"
    return [
        ("prompt", full),
        ("keys of", f"{_HASHED[prompt['hashed_by']]}; {salt}, {adapter}"),
        ("namespace", f"{space}: {prompt['namespace_state']}"),
        ("fingerprint", cache["fingerprint"]),
        ("eviction", cache["eviction"]),
    ]


_HASHED = {
    "tokens": "token ids",
    "hashes": "the hashes that were given",
    "sglang": "SGLang's hashes of token ids",
    "lightllm": "LightLLM's hashes of token ids",
}


def _rows(told: Facts) -> Iterator[tuple[object, ...]]:
    """Adjacent pages of one state and one company share a row."""
    for (state, behind, who), group in itertools.groupby(told["pages"], key=_kind(told)):
        pages = list(group)
        good = state == "ready" and not behind
        yield (
            ranges([page["page"] for page in pages]),
            f"{pages[0]['tokens'][0]:,}-{pages[-1]['tokens'][1] - 1:,}",
            Text(state + ", behind a gap" * behind, style="green" if good else "yellow"),
            _last_use(pages),
            who or None,
        )


def _kind(told: Facts) -> Any:
    def kind(page: Facts) -> tuple[str, bool, str]:
        parts = []
        if page["writer"] is not None:
            parts.append(f"written by {page['writer']['client']}")
        else:
            parts += [f"pinned by {', '.join(page['pinned_by'])}"] * bool(page["pinned_by"])
        if page["kept"]:
            parts.append("protected")
        behind = page["state"] == "ready" and page["page"] >= told["ready_pages"]
        return page["state"], behind, "; ".join(parts)

    return kind


def _last_use(pages: list[Facts]) -> str | None:
    seconds = [page["unused_s"] for page in pages if page["unused_s"] is not None]
    if seconds:
        low, high = age(min(seconds)), age(max(seconds))
        return f"{low} ago" if low == high else f"{low} to {high} ago"
    calls = [page["unused_calls"] for page in pages if page["unused_calls"] is not None]
    if not calls:
        return None
    return f"{counted(max(calls), 'call')} ago" if max(calls) else "in the last call"


def _elsewhere(told: Facts) -> RenderableType:
    rows = (_elsewhere_row(told["prompt"], each) for each in told["elsewhere"])
    return table("also found", ("tier", "name", "pages", "of tokens", "saved", "clients"), rows)


def _elsewhere_row(prompt: Facts, found: Facts) -> tuple[object, ...]:
    saved = difference(prompt, found) + ", another fingerprint" * bool(found["differs"])
    gone = f", {found['evicted_pages']} evicted" * bool(found["evicted_pages"])
    ready = f"0-{found['ready_pages'] - 1}" if found["ready_pages"] else "none"
    clients = [
        f"{each['role'] or 'no role'}, pid {each['pid']}" + ", dead" * (not each["alive"])
        for each in found["clients"]
    ]
    return (
        found["tier"],
        found["name"],
        f"{ready}{gone}",
        found["page_tokens"],
        saved,
        "; ".join(clients) or None,
    )


__all__ = ["difference", "page_size", "show", "verdict"]
