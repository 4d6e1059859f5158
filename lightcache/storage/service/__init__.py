"""A tier that processes share: `StorageService` runs the tasks that `StorageClient`s ask for.

docs/design/storage.md, section 24, says what lies in shared memory and what a kill leaves of it.
"""

from lightcache.storage.service.board import ServiceStats, service_stats
from lightcache.storage.service.client import StorageClient
from lightcache.storage.service.serving import StorageService

__all__ = ["ServiceStats", "StorageClient", "StorageService", "service_stats"]
