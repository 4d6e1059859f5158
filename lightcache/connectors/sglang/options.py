"""What an operator may write into `linker_extra_config`."""

from __future__ import annotations

from dataclasses import dataclass

from lightcache.connectors.engine_options import EngineOptions, OnReset


@dataclass(frozen=True)
class Options(EngineOptions):
    """Each has a default, so `{}` is a configuration."""

    given_in = "linker_extra_config"


__all__ = ["OnReset", "Options"]
