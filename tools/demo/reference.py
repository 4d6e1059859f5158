"""The reference: a fresh process that has never seen a cache, and computes turns again."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from lightcache.tools.demo import life
from lightcache.tools.demo.devices import resolve
from lightcache.tools.demo.generate import compare
from lightcache.tools.demo.messages import Mailbox, Verified
from lightcache.tools.demo.models import build
from lightcache.tools.demo.settings import Settings


def body(settings: Settings, numbers: list[int]) -> None:
    """Compare what comes in, until the end."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = build(replace(settings.model, device=resolve(settings.model.device)))
    with Mailbox(settings.report_ring) as report, Mailbox(settings.reference_ring) as inbox:
        while True:
            turn = life.receive(inbox, settings)
            equal, difference = compare(model, turn.prompt, turn.tokens, turn.logprobs)
            report.send(Verified(turn.number, equal, difference))


if __name__ == "__main__":
    life.run("reference", body)
