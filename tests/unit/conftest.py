"""What tests of the connector with hybrid models share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def qwen() -> Any:
    """A small Qwen3-Next; nothing changes it."""
    from support.hybrid_models import hybrid

    return hybrid()


@pytest.fixture
def connector(segment_name: str, qwen: Any) -> Iterator[Any]:
    """For `qwen`: pages of 16 tokens, a grid of 32, and states of answers every 32."""
    from support.hybrid_connecting import joined

    with joined(segment_name, qwen, chunk=32, every=32) as made:
        yield made
