"""What an operator may write into `kv_connector_extra_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightcache._arguments import count
from lightcache.connectors.engine_options import EngineOptions, OnReset
from lightcache.errors import ConfigError
from lightcache.layout import Hint

LoadFailure = Literal["recompute", "fail"]
HINT = "lightcache_hint"
"""What a request may have in its `kv_transfer_params`: one of HINTS."""
HINTS = {hint.name.lower(): hint for hint in (Hint.CONTINUES, Hint.TOOL_CALL, Hint.ENDS)}


@dataclass(frozen=True)
class Options(EngineOptions):
    """Each has a default, so `{}` is a configuration."""

    given_in = "kv_connector_extra_config"
    measures_speed = True

    blocks_per_page: int | None = None
    """Blocks of vLLM in a page. None: the least power of two with which a page of all ranks has 1
    MiB, or fewer where that is longer than a window. The tokens after the last whole page of a
    prompt are not saved."""
    save_decode: bool = False
    """True: answers are saved as well, for conversations whose next prompt repeats them."""
    record: str | None = None
    """A file to which each request is appended, for `lightcache replay`: when it came, its length,
    and parts of its pages' keys. No tokens. None: nothing is recorded."""
    load_failure: LoadFailure = "recompute"
    """What vLLM does with a request whose load failed: compute it, or end it with an error. It
    takes the place of `kv_load_failure_policy`, whose default in vLLM is to end it."""

    def __post_init__(self) -> None:
        if self.blocks_per_page is not None:
            count(self.blocks_per_page, "blocks_per_page", 1, 1 << 16)
        self.check_choice("load_failure", LoadFailure)
        super().__post_init__()
        self.check_flag("save_decode")
        record: object = self.record  # of any type: an operator wrote it
        if record is not None and not (isinstance(record, str) and record):
            raise ConfigError(f"record: expected the path of a file, found {record!r}")


__all__ = ["HINT", "HINTS", "LoadFailure", "OnReset", "Options"]
