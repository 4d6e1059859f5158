"""Where a model runs."""

from __future__ import annotations

import torch

from lightcache.errors import ConfigError


def resolve(name: str, worker: int = 0) -> str:
    """A device by name, ready to be used by this process.

    Args:
        name: as torch calls it; "auto": a GPU for each worker in turn, the processor without any.

    Raises:
        ConfigError: there is no such device.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        name = f"cuda:{worker % count}" if count else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and (device.index or 0) >= count:
            raise RuntimeError(f"device {device.index or 0} of {count}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device: {name!r} cannot be used ({reason}); this machine has "
            f"{count or 'no'} GPUs that torch sees; cpu works everywhere"
        ) from None
    return name
