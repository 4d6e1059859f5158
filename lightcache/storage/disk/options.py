"""What a URL such as `disk:/mnt/nvme/cache?capacity=1TiB&direct=no` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightcache.errors import ConfigError
from lightcache.storage.disk.header import MAX_FILES
from lightcache.storage.options import Options

OPTIONS = ("capacity", "threads", "files", "retry", "direct", "index")


def parse(path: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `DiskStorage`: those that are said.

    Raises:
        ConfigError: no path, an option that there is not, or a value that is none.
    """
    given = Options("disk", options, OPTIONS)
    if not path:
        raise ConfigError("disk: expected a folder, as in 'disk:/mnt/nvme?capacity=1TiB'")
    if path.startswith("~"):  # else a folder of that name is made, where the process happens to be
        raise ConfigError(
            f"disk: expected a folder, found {path!r}: no shell has replaced the '~'; write the "
            "folder out, as in 'disk:/home/me/pages'"
        )
    found: dict[str, Any] = {
        "direct": given.choice("direct", ("yes", "no")) == "yes",
        "persistent": given.choice("index", ("drop", "keep")) == "keep",
    }
    if "capacity" in given:
        found["capacity"] = given.size("capacity")
    if "threads" in given:
        found["threads"] = given.count("threads", 0, high=256)
    if "files" in given:
        found["files"] = given.count("files", 0, high=MAX_FILES)
    if "retry" in given:
        found["retry"] = given.seconds("retry", 0.0)
    return found


__all__ = ["OPTIONS", "parse"]
