"""A worker of the demo in this process, with a model of milliseconds, and the router beside it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.demo_desk import WORKLOAD, Desk, settings_of  # noqa: E402
from support.tiny_models import SIZES  # noqa: E402

from lightcache.tools.demo import models  # noqa: E402
from lightcache.tools.demo.generate import compare  # noqa: E402
from lightcache.tools.demo.messages import Mailbox  # noqa: E402
from lightcache.tools.demo.models import ModelChoice  # noqa: E402
from lightcache.tools.demo.worker import Worker  # noqa: E402

_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def test_turns_of_two_workers(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is that of a model without a cache, and no turn leaves anything behind."""
    tiny = {name: SIZES[name] for name in (*_SHAPE, "num_key_value_heads")}
    made_up = {"vocab_size": 128, "head_dim": 8}
    monkeypatch.setattr(models, "SIZES", {**models.SIZES, "tiny": {**tiny, **made_up}})
    workload = {**WORKLOAD, "turns": 4, "vocabulary": 128}
    settings = settings_of(
        segment_name, model=ModelChoice(size="tiny"), workload=workload, size=4 << 20
    )
    with ExitStack() as stack:
        desk = Desk(settings, stack)
        workers: list[tuple[Any, Mailbox]] = []
        for number in (0, 1):
            inbox = stack.enter_context(Mailbox(settings.worker_ring(number, 0)))
            worker = Worker(settings, number, 0, desk.report, stack)
            workers.append((worker, inbox))
            desk.tell(worker.hello())
        desk.router.route(desk.router.workload.begin())
        while desk.router.answered < desk.router.workload.total:
            desk.dispatch()
            for worker, inbox in workers:
                request = inbox.receive(0)
                if request is not None:
                    desk.tell(worker.serve(request))
        desk.collect()
        assert len(desk.served) == 8
        model = workers[0][0].model
        for turn in desk.served:
            equal, difference = compare(model, turn.prompt, turn.tokens, turn.logprobs)
            assert equal
            assert difference < 1e-4
            assert turn.baseline_s is not None
            assert turn.turn == 0 or turn.reused["host"] >= 16
        cache = workers[0][0].cache
        report, stats = cache.check(), cache.stats()
        assert report.clean, report.message
        assert (report.pins, stats.tickets, stats.writing) == (0, 0, 0)
