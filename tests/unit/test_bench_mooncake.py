"""The plain loop that the storage in a Mooncake cluster is measured against."""

from __future__ import annotations

import numpy as np
import pytest

from lightcache import StorageError
from lightcache_bench._plain_mooncake import open_plain

pytestmark = pytest.mark.servers


def test_the_plain_loop_keeps_what_it_is_given(mooncake_url: str) -> None:
    pages = np.random.default_rng(0).integers(0, 256, (3, 4096), np.uint8)
    into = np.zeros_like(pages)
    plain = open_plain(mooncake_url, 4096)
    names = [f"bench/{i}" for i in range(3)]
    for name, page, back in zip(names, pages, into, strict=True):
        plain.write(name, page.data)
        plain.read(name, back.data)
    assert (into == pages).all()
    plain.remove(names)
    with pytest.raises(StorageError, match=r"expected 4096 of the client, found -704"):
        plain.read(names[0], into[0].data)
    plain.close()
