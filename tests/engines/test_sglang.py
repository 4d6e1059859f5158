"""With a real SGLang: run by `.ci/engines sglang`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from engines import contracts

pytestmark = pytest.mark.engines


def test_it_starts_and_answers(in_engine: Callable[..., str], segment_name: str) -> None:
    said = json.loads(in_engine("sglang_answers.py", segment_name).splitlines()[-1])
    first, second = said["answers"]
    assert len(first) == 4
    assert second == first
    assert said["cached"] == [0, 288]
    assert said["contract"] == contracts.SGLANG
    assert said["where"].startswith(os.environ["LIGHTCACHE_ENGINE_PATH"])
