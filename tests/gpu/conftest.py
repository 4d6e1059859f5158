"""Tests that need a GPU: skipped where there is none, run by `make gpu-test`.

With LIGHTCACHE_TEST_STAND_IN=1 and no GPU, modules that say STAND_IN run on threads that stand in
for one (`gpu.place`): what is left untried then is the driver alone.
"""

import os

import pytest


def pytest_collection_modifyitems(items):
    why = reason()
    stand_in = bool(os.environ.get("LIGHTCACHE_TEST_STAND_IN"))
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if why and not (stand_in and getattr(item.module, "STAND_IN", False)):
                item.add_marker(pytest.mark.skip(reason=why))


def reason():
    """Why they cannot run in this process; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":  # as soon as tests of tests/unit are collected
        return "kernels are interpreted in this run; make gpu-test runs them on a GPU"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"
