"""Page memory for tests that are not about registering."""

import torch

from lightcache.kernels.pinned import HostPages


class Pinned(HostPages):
    """Page memory that torch has registered."""

    def __init__(self, pages, page_bytes):
        self.tensor = torch.full((pages, page_bytes), 0xCD, dtype=torch.uint8, pin_memory=True)
        super().__init__(self.tensor.numpy())
        self.ready = pages
