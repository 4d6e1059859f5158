"""How near hits of hybrid models are to runs without a cache, beside the noise of computing in
pieces: `python -m support.hybrid_noise` prints the table of docs/reliability.md.

Random prompts; log-probabilities of everything behind the hit. *Pieces* are the same tokens without
a cache in passes that end where those of the hit ended; *elsewhere* in passes that end at other
places, which says how much it matters where one is cut.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from support.hybrid_connecting import joined
from support.hybrid_engine import made_engines
from support.hybrid_models import hybrid
from support.hybrid_scores import divergence, in_pieces, scores
from support.tiny_models import prompt

MANAGED = ("Qwen3Next", "Qwen3_5")
KINDS = (*MANAGED, "FalconH1", "NemotronH")
HIT, BEHIND = 128, 72
SEEDS = range(3)


class Noise(NamedTuple):
    """Means and largest differences of some prompts."""

    found: float
    """KL divergence of hits."""
    pieces: float
    elsewhere: float
    largest: float
    """Difference of a log-probability of a hit."""


def mean(rows: list[tuple[float, ...]]) -> Noise:
    """Of all prompts; the largest of the last."""
    columns = list(zip(*rows, strict=True))
    return Noise(*(sum(each) / len(rows) for each in columns[:3]), max(columns[3]))


def compared(model: Any, ids: Any, hit: int, found: Any, cuts: list[int]) -> tuple[float, ...]:
    """One prompt, of which `found` was computed behind a hit."""
    whole = scores(model, ids)[hit:]
    others = [cut - 27 for cut in cuts]
    return (
        divergence(found[: len(whole)], whole),
        divergence(in_pieces(model, ids, cuts)[hit:], whole),
        divergence(in_pieces(model, ids, others)[hit:], whole),
        float((found[: len(whole)] - whole).abs().max()),
    )


def of_connector(name: str, model: Any) -> Noise:
    """Hits of prefills through the connector of transformers."""
    rows = []
    with joined(name, model) as connector:
        for seed in SEEDS:
            ids = prompt(HIT + BEHIND, seed)
            with connector.prefix(ids[:, : HIT + 20]) as past:
                connector.prefill(past)
            with connector.prefix(ids) as past:
                assert past.reused == HIT
                rows.append(compared(model, ids, HIT, scores(model, ids, past), [HIT]))
    return mean(rows)


def of_engine(name: str, model: Any, *, decoded: bool, ahead: bool) -> Noise:
    """Hits through a HybridManager: of prefills, or of states saved while decoding."""
    rows = []
    with contextlib.contextmanager(made_engines)(name, model) as engines:
        engine = engines(ahead=ahead, slots=24, states=24)
        for seed in SEEDS:
            first = prompt(HIT + 20 - 32 * decoded, seed)[0].tolist()
            (one,) = engine.serve([first], 14 if decoded else 1)
            start = one.answer().tokens[0].tolist() if decoded else first
            tokens = [*start, *prompt(BEHIND, 50 + seed)[0].tolist()]
            (one,) = engine.serve([tokens], 1)
            assert one.match.usable == HIT
            cuts = [96, *range(len(first), HIT + 1)] if decoded else [HIT]
            found = torch.cat(one.scores)
            rows.append(compared(model, torch.tensor([tokens]), HIT, found, cuts))
    return mean(rows)


def table() -> Iterator[str]:
    """Rows in Markdown."""
    name = f"noise-{os.getpid()}"
    yield "| model | dtype | hits | KL | in pieces | cut elsewhere | largest difference |"
    yield "|---|---|---|---|---|---|---|"
    for dtype in (torch.float32, torch.bfloat16):
        for kind in KINDS:
            model = hybrid(kind, dtype=dtype)
            ways = {"connector, prefill": lambda m=model: of_connector(name, m)}
            if kind in MANAGED:
                for ahead, what in ((False, "manager"), (True, "manager, overlap")):
                    for decoded, how in ((False, "prefill"), (True, "decode")):
                        ways[f"{what}, {how}"] = lambda m=model, d=decoded, a=ahead: of_engine(
                            name, m, decoded=d, ahead=a
                        )
            for what, measure in ways.items():
                one = measure()
                figures = " | ".join(f"{each:.1e}" if each >= 1e-7 else "< 1e-7" for each in one)
                yield f"| {kind} | {str(dtype)[6:]} | {what} | {figures} |"


def main() -> None:
    """Print it."""
    torch.set_num_threads(1)
    for row in table():
        print(row, flush=True)


if __name__ == "__main__":
    main()
