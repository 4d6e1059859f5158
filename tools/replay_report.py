"""The page of `lightcache replay`: one file of HTML, whose plots are SVG within it. It loads
nothing."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from lightcache._arguments import format_size
from lightcache.tools.sizing import Case, Setup, footprint
from lightcache.traces import Trace

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
"""That differ for every eye (Okabe and Ito, Color universal design, 2008)."""
WIDTH, HEIGHT = 860, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 260, 16, 52
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1a1a1a;background:#fff;max-width:1180px;
margin:32px auto;padding:0 20px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:34px 0 6px}p{max-width:760px;margin:6px 0}
.quiet{color:#555}svg{width:100%;max-width:860px;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:#333}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:4px 9px;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}
th{position:sticky;top:0;background:#fff}tr:hover td{background:#f3f7fa}
"""


def share(part: int, whole: int, digits: int = 1) -> str:
    """In percent."""
    return f"{100 * part / max(1, whole):.{digits}f} %"


def sizing(trace: Trace, setup: Setup, rows: Sequence[Case]) -> Iterator[str]:
    """In words: what there is to win, and where the next GiB and the next tier stand."""
    seen = rows[0].hit_tokens + rows[0].every_shared_tokens
    yield (
        f"{len(trace):,} requests, {rows[0].tokens:,} tokens in prompts; {trace.distinct:,} "
        f"different blocks, {format_size(footprint(trace, setup))}. {share(seen, rows[0].tokens)} "
        "were in an earlier prompt: no cache serves more."
    )
    yield from map(_advice, _groups(rows).values())


def _advice(rows: Sequence[Case]) -> str:
    """Of one curve: where it is steepest, if it rises, what the next tier brings there, and what is
    enough."""
    gains = [
        (after.host_tokens - before.host_tokens) / (after.size - before.size)
        for before, after in itertools.pairwise(rows)
    ]
    row = rows[max(range(len(gains)), key=gains.__getitem__, default=0)]
    rises = any(gain > 0 for gain in gains)
    hit = share(row.hit_tokens, row.tokens)
    parts = [
        f"the curve is steepest from {format_size(row.size)} a node, where {hit} of the tokens hit"
        if rises
        else f"with {format_size(row.size)} a node {hit} of the tokens hit",
        f"the next GiB {'there ' * rises}adds {row.next_gib_tokens:,} hit tokens",
        f"a storage that keeps all adds {share(row.every_tokens, row.tokens)}",
    ]
    if row.nodes > 1:
        parts.append(f"one that all nodes share {share(row.every_shared_tokens, row.tokens)}")
    last = rows[-1]
    if len(rows) > 1 and last.host_tokens:
        enough = next(each for each in rows if each.host_tokens >= 0.95 * last.host_tokens)
        if enough is not last:
            parts.append(
                f"{format_size(enough.size)} a node has at least 95 % of the hits of "
                f"{format_size(last.size)}"
            )
        elif last.storage_tokens + last.every_tokens:
            parts.append("no tried size is enough: try larger")
    return f"{describe(row)}: {'; '.join(parts)}."


def describe(row: Case) -> str:
    """The curve that a row belongs to."""
    name = "1 node" if row.nodes == 1 else f"{row.nodes:,} nodes, {row.routing}"
    name += "" if row.policy == "lru" else f", {row.policy}"
    return name + (f", storage {format_size(row.storage)}" if row.storage else "")


def page(name: str, trace: Trace, setup: Setup, rows: Sequence[Case]) -> str:
    """The whole file."""
    said = list(sizing(trace, setup, rows))
    shared = "that all nodes share" if setup.shared else "of each node"
    parts = [
        f"<h1>{_text(name)}</h1><p>{_text(said[0])}</p>",
        f"<p class=quiet>A token has {format_size(setup.token_bytes)} of KV, a block "
        f"{trace.block_tokens} tokens; a node computes {setup.tokens_per_s:,.0f} tokens a second. "
        f"A storage is one {shared}.</p>",
        "<h2>Hits by size</h2><p class=quiet>Tokens of prompts that need not be computed. "
        "Dotted: all that came in an earlier prompt.</p>",
        _curves(rows),
        "<h2>Sizing</h2>",
        *(f"<p>{_text(line)}</p>" for line in said[1:]),
        "<h2>What the next GiB of a node brings</h2>"
        "<p class=quiet>Further tokens that hit in the node's cache, in the whole trace.</p>",
        _gains(rows),
        f"<h2>Where tokens come from: {_text(describe(_best_group(rows)[0]))}</h2>",
        _bars(_best_group(rows)),
        "<h2>All figures</h2>",
        _figures(rows),
    ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(name)}</title>"
        f'<meta name=viewport content="width=device-width"><style>{STYLE}</style>'
        + "\n".join(parts)
        + "</html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _groups(rows: Sequence[Case]) -> dict[str, list[Case]]:
    """Rows of each curve, by its name."""
    found: dict[str, list[Case]] = {}
    for row in rows:
        found.setdefault(describe(row), []).append(row)
    return found


def _best_group(rows: Sequence[Case]) -> list[Case]:
    """The curve with the most hits."""
    return max(_groups(rows).values(), key=lambda group: sum(row.hit_tokens for row in group))


# ---- plots


def _curves(rows: Sequence[Case]) -> str:
    ceiling = 100 * (rows[0].hit_tokens + rows[0].every_shared_tokens) / max(1, rows[0].tokens)
    curves = {
        name: [(row.size, 100 * row.hit_tokens / max(1, row.tokens)) for row in group]
        for name, group in _groups(rows).items()
    }
    return _plot(curves, "hits, % of tokens", ceiling)


def _gains(rows: Sequence[Case]) -> str:
    curves = {
        name: [(row.size, float(row.next_gib_tokens)) for row in group]
        for name, group in _groups(rows).items()
    }
    return _plot(curves, "tokens a GiB", None)


def _plot(curves: dict[str, list[tuple[int, float]]], what: str, ceiling: float | None) -> str:
    """Lines over sizes, which double from left to right."""
    sizes = sorted({size for points in curves.values() for size, _ in points})
    most = max([value for points in curves.values() for _, value in points] + [ceiling or 0])
    ticks = _ticks(most)
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(size: int) -> float:
        return LEFT + wide * ((math.log2(size) - low) / (high - low) if high > low else 0.5)

    def y(value: float) -> float:
        return TOP + tall * (1 - value / ticks[-1])

    parts = [*_grid(ticks, y, what), *_size_ticks(sizes, x)]
    if ceiling is not None:
        parts.append(_line(LEFT, y(ceiling), WIDTH - RIGHT, y(ceiling), "#1a1a1a", "2 4"))
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in points)
        dash = ' stroke-dasharray="7 4"' if number >= len(COLOURS) else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        parts += [
            f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}"><title>'
            f"{_text(name)}, {format_size(size)}: {value:.4g}</title></circle>"
            for size, value in points
        ]
        parts.append(_key(number, colour, name))
    return _svg(parts, what, max(HEIGHT, TOP + 20 * len(curves) + 10))


def _bars(rows: Sequence[Case]) -> str:
    """From where the tokens of prompts come, one bar a size."""
    kinds = ("host", "storage", "computed")
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    step = wide / len(rows)
    parts = list(_grid([0, 25, 50, 75, 100], lambda v: TOP + tall * (1 - v / 100), "% of tokens"))
    for number, row in enumerate(rows):
        rest = row.tokens - row.hit_tokens
        at = float(TOP + tall)
        for kind, tokens in zip(kinds, (row.host_tokens, row.storage_tokens, rest), strict=True):
            high = tall * tokens / max(1, row.tokens)
            at -= high
            parts.append(
                f'<rect x="{LEFT + step * (number + 0.15):.1f}" y="{at:.1f}" '
                f'width="{0.7 * step:.1f}" height="{high:.1f}" fill="{_KIND[kind]}"><title>'
                f"{format_size(row.size)}, {kind}: {share(tokens, row.tokens)}</title></rect>"
            )
        parts.append(_label(LEFT + step * (number + 0.5), row.size, len(rows)))
    parts += [_key(number, _KIND[kind], kind) for number, kind in enumerate(kinds)]
    return _svg(parts, "where tokens come from", HEIGHT)


_KIND = {"host": COLOURS[0], "storage": COLOURS[4], "computed": "#dddddd"}


def _svg(parts: Iterable[str], title: str, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{_text(title)}" font-family="system-ui,sans-serif" font-size="12">'
        + "".join(parts)
        + "</svg>"
    )


def _ticks(most: float) -> list[float]:
    """About five round numbers from 0 to at least `most`."""
    step = 10.0 ** math.floor(math.log10((most or 1) / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if 5 * factor * step >= most)
    return [step * number for number in range(max(1, math.ceil(most / step - 1e-9)) + 1)]


def _grid(ticks: Sequence[float], y: Callable[[float], float], what: str) -> Iterator[str]:
    for tick in ticks:
        yield _line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "#dddddd", "")
        yield f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,.6g}</text>'
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    yield (
        f'<text x="14" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle})">{_text(what)}</text>'
    )


def _size_ticks(sizes: Sequence[int], x: Callable[[int], float]) -> Iterator[str]:
    for size in sizes:
        yield _label(x(size), size, len(sizes))
    yield (
        f'<text x="{LEFT + (WIDTH - LEFT - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        "memory of a node's cache</text>"
    )


def _label(at: float, size: int, of: int) -> str:
    text = format_size(size).replace(".0 ", " ")
    return (
        f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" '
        f'font-size="{12 if of < 8 else 10}">{text}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
    )


def _key(number: int, colour: str, name: str) -> str:
    at = TOP + 6 + 20 * number
    return (
        f'<rect x="{WIDTH - RIGHT + 14}" y="{at - 5}" width="12" height="10" fill="{colour}"/>'
        f'<text x="{WIDTH - RIGHT + 32}" y="{at + 4}">{_text(name)}</text>'
    )


# ---- figures

Column = tuple[str, Callable[[Case], str]]


def columns(rows: Sequence[Case]) -> list[Column]:
    """Names and cells of a table: what is equal in all rows by its nature is left out."""
    several = any(row.nodes > 1 for row in rows)
    stored = any(row.storage for row in rows)
    found: list[Column] = []
    if several:
        found += [("nodes", lambda row: f"{row.nodes:,}"), ("routing", lambda row: row.routing)]
    if len({row.policy for row in rows}) > 1:
        found.append(("policy", lambda row: row.policy))
    found.append(("size", lambda row: format_size(row.size)))
    if stored:
        found.append(("storage", lambda row: format_size(row.storage) if row.storage else "-"))
    found.append(("hits", lambda row: share(row.hit_tokens, row.tokens)))
    if stored:
        found.append(("host", lambda row: share(row.host_tokens, row.tokens)))
        found.append(("stored", lambda row: share(row.storage_tokens, row.tokens)))
    found.append(("saved", lambda row: f"{row.saved_s / 60:,.1f} min"))
    found.append(("loaded", lambda row: format_size(row.loaded)))
    found.append(("offloaded", lambda row: format_size(row.offloaded)))
    if stored:
        found.append(("read", lambda row: format_size(row.storage_read)))
        found.append(("written", lambda row: format_size(row.storage_written)))
    found.append(("+1GiB", lambda row: f"{row.next_gib_tokens:,}"))
    found.append(("+storage", lambda row: share(row.every_tokens, row.tokens)))
    if several:
        found.append(("+shared", lambda row: share(row.every_shared_tokens, row.tokens)))
    return found


def _figures(rows: Sequence[Case]) -> str:
    shown = columns(rows)
    head = "".join(f"<th>{_text(title)}</th>" for title, _ in shown)
    lines = ("".join(f"<td>{_text(cell(row))}</td>" for _, cell in shown) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        "<p class=quiet>hits, host, stored: percent of the tokens of prompts. saved: prefill, of "
        "one node. +1GiB: further tokens that hit in the node's cache, had it one GiB more. "
        "+storage, +shared: further hits with a storage that keeps all, of each node or of all.</p>"
        f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"
    )


__all__ = ["columns", "describe", "page", "share", "sizing"]
