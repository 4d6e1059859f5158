"""A tier that processes share: `StorageService` runs the tasks of `StorageClient`s.

docs/design/storage.md, section 24, describes the shared memory, and what is left after a kill.
"""

from lightcache.storage.service.client import StorageClient
from lightcache.storage.service.serving import StorageService

__all__ = ["StorageClient", "StorageService"]
