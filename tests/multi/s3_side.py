"""Run as a program: stores pages in S3, until it is killed in the middle of one.

s3_side.py URL PAGES PAGE_BYTES
"""

from __future__ import annotations

import sys

from lightcache.storage import StorageSpec, open_storage
from lightcache.storage.testing.conformance import make_keys, pages_of

SEED = 17


def main(url: str, pages: str, page_bytes: str) -> None:
    """See above."""
    spec = StorageSpec(int(page_bytes))
    keys = make_keys(int(pages), SEED)
    with open_storage(url, spec=spec) as storage:
        storage.write(keys, list(pages_of(keys, spec.page_bytes)), timeout=600.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
