"""Layers without cycles, and an import that costs little and drags nothing in."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# A package may import itself and what stands here; nothing else of ours. These two belong to all.
ERRORS = "lightcache.shm.errors"
WAITING = "lightcache.shm.waiting"
BOTH = [ERRORS, WAITING]
PAGES = ["lightcache", "lightcache.shm", "lightcache.kernels", *BOTH]
MODELS = ["lightcache.hybrid", "lightcache.manager", "lightcache.storage", *PAGES]
BELOW = {
    "lightcache.shm": BOTH,
    ERRORS: [],
    WAITING: [],
    "lightcache.kernels": BOTH,
    "lightcache": PAGES[1:],
    "lightcache.storage": ["lightcache", "lightcache.shm", *BOTH],
    "lightcache.manager": ["lightcache.storage", *PAGES],
    "lightcache.hybrid": MODELS[1:],
    "lightcache.metrics": [*MODELS[:2], "lightcache", "lightcache.shm", *BOTH],
    "lightcache.connectors": MODELS,
    "lightcache.tools": ["lightcache.connectors", "lightcache.metrics", *MODELS],
}


def package_of(module):
    """The layer that a module belongs to: the longest name in BELOW that begins it."""
    owners = [name for name in BELOW if module == name or module.startswith(name + ".")]
    return max(owners, key=len, default=None)


def files():
    root = Path(find_spec("lightcache").origin).parent
    # The folders beside lightcache/ are links in it, which rglob does not follow.
    for path in sorted(
        Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    ):
        module = ".".join(("lightcache", *path.relative_to(root).with_suffix("").parts))
        yield module.removesuffix(".__init__"), path


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            # `from lightcache import shm` names a layer by its attribute.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_down():
    for module, path in files():
        own = package_of(module)
        for name in imported(path):
            layer = package_of(name) if name else None
            if layer is not None and layer != own:
                assert layer in BELOW[own], f"{module} imports {name}, which is not below it"


@pytest.mark.parametrize(
    "package",
    [
        "lightcache",
        "lightcache.shm",
        "lightcache.kernels",
        "lightcache.kernels.geometry",
        "lightcache.kernels.layouts",
        "lightcache.connectors",
        "lightcache.hybrid",
        "lightcache.manager",
        "lightcache.storage",
    ],
)
def test_import_drags_nothing_in(package):
    code = f"import sys, json, {package}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "triton", "click", "rich", "transformers", "prometheus_client"}
