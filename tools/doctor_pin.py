"""`lightcache doctor --pin NAME`: how long registering a cache with the GPU driver takes here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightcache._arguments import format_size
from lightcache.cache import Cache
from lightcache.errors import LightcacheError
from lightcache.tools.attaching import guest
from lightcache.tools.findings import Finding, error, ok, warning
from lightcache.tools.progress import bar

if TYPE_CHECKING:
    from lightcache.kernels.pinned import Driver


def pinning(name: str, *, quiet: bool = False, driver: Driver | None = None) -> list[Finding]:
    """Register all of an existing cache, as an engine's process does when it starts, and undo it.

    Raises:
        LightcacheError: there is no such cache, or not for us.
    """
    with guest(name), Cache.attach(name, role="doctor", grow=False) as cache:
        pool = cache.pool
        if pool.grown < pool.pages:
            found = f"{pool.grown} of {pool.pages} pages of {name} have memory"
            return [warning("pinning", found, "wait until it has grown, and measure again")]
        try:
            with bar(f"pinning {name}", pool.pages, quiet=quiet) as progress:
                pinned = cache.pin(driver=driver, progress=progress)
                pinned.wait()
        except LightcacheError as problem:
            return [error("pinning", f"{name} could not be pinned", str(problem))]
        took = pinned.statistics
        said = (
            f"{format_size(took.nbytes)} of {name} in {took.seconds:.3f} s "
            f"({took.nbytes / max(took.seconds, 1e-9) / 1e9:.1f} GB/s, {took.pieces} pieces), "
            f"first pages after {took.first_seconds * 1e3:.1f} ms"
        )
        return [ok("pinning", said)]
