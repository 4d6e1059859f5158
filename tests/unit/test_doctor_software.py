"""What `lightcache doctor` says of packages that not everybody needs."""

from __future__ import annotations

from importlib import metadata

import pytest

from lightcache.tools.doctor import Level, versions

CLIENTS = {"redis": "redis: and valkey:", "obstore": "s3:", "mooncake": "mooncake:"}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", CLIENTS)
def test_clients_of_storages(name: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(package: str) -> str:
        if not package.startswith(name):
            return real(package)
        if there and not package.endswith("non-cuda"):
            return "7.8.9"
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    (found,) = [each for each in versions() if each.name == name]
    extra = {"obstore": "s3"}.get(name, name)
    install = f"in a clone: pip install '.[{extra}]'"
    missing = f"not installed (only for storages {CLIENTS[name]}); {install}"
    assert (found.level, found.found) == (Level.OK, "7.8.9" if there else missing)
