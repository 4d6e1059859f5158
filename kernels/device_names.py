"""What a device is called: one name for each, so that names can be compared."""

from __future__ import annotations

import re
import sys

from lightcache.shm.errors import ConfigError

_NAME = re.compile(r"(cpu|cuda)(?::(0|[1-9][0-9]{0,3}))?", re.ASCII)


def device_name(device: object) -> str:
    """The one name of a device: "cpu", or "cuda:0" with its number. Does not block, and loads
    neither torch nor a driver.

    Args:
        device: "cpu", "cuda" or "cuda:0", a torch.device, or the number of a GPU. A GPU without a
            number is the current one of this thread; GPU 0 where torch has not used any so far.
            Asking torch then would make a context, which a process must not have before it is
            attached to a cache (docs/design/index.md, section 12).

    Raises:
        ConfigError: something else.
    """
    text = f"cuda:{device}" if type(device) is int else str(device)
    found = _NAME.fullmatch(text)
    if found is None or (found[1] == "cpu" and found[2] not in (None, "0")):
        raise ConfigError(f"device: expected 'cpu' or a GPU such as 'cuda:0', found {device!r}")
    if found[1] == "cpu":
        return "cpu"
    return f"cuda:{_current() if found[2] is None else found[2]}"


def _current() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_device())


__all__ = ["device_name"]
