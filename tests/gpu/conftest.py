"""Tests that need a GPU: skipped where there is none, run by `make gpu-test`."""

import pytest


def pytest_collection_modifyitems(items):
    import torch

    missing = not torch.cuda.is_available()
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
