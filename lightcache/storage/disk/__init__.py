"""Pages on a local disk: slot files, and an index of them in shared memory."""

from lightcache.storage.disk.backend import DiskStorage

__all__ = ["DiskStorage"]
