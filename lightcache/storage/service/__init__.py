"""A storage tier that processes share: `StorageService` carries out what each `StorageClient` asks.

docs/design/storage.md, section 24, says what lies in shared memory and what a kill leaves of it.
"""

from lightcache.storage.service.client import StorageClient
from lightcache.storage.service.serving import StorageService
from lightcache.storage.service.status import ServiceStats, service_stats

__all__ = ["ServiceStats", "StorageClient", "StorageService", "service_stats"]
