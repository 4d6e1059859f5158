"""A tier that processes share: `StorageService` runs the tasks that `StorageClient`s ask for.

docs/storage.md, "The storage service", says what is in shared memory, and what a kill leaves.
"""

from lightcache.storage.service.board import ServiceStats, service_stats
from lightcache.storage.service.client import StorageClient
from lightcache.storage.service.serving import StorageService

__all__ = ["ServiceStats", "StorageClient", "StorageService", "service_stats"]
