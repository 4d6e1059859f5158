"""What raises on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightcache.errors import LightcacheError


class Odd(RuntimeError):
    """None of our errors."""


def raising(error: type[BaseException]) -> Callable[..., Any]:
    """What raises that, whatever it is asked."""

    def call(*_: Any, **__: Any) -> Any:
        raise error("arranged")

    return call


def raised(call: Callable[[], object]) -> LightcacheError:
    """The error of ours that a call ends with."""
    with pytest.raises(LightcacheError) as caught:
        call()
    return caught.value
