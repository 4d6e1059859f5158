"""Certificates of tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.packages import need


def make(folder: Path, names: str) -> Path:
    """A folder with `ca`, an authority, and `cert` with its `key`, signed by it. (One that signs
    itself is taken by some clients, and by others not.)

    Args:
        names: that the certificate is of, as in "IP:127.0.0.1,DNS:host".
    """
    need("openssl")
    new = ("-newkey", "rsa:2048", "-nodes", "-subj")
    (folder / "extensions").write_text(f"subjectAltName={names}\nbasicConstraints=CA:FALSE\n")
    _openssl(folder, "req", "-x509", *new, "/CN=tests", "-keyout", "ca-key", "-out", "ca")
    _openssl(folder, "req", *new, "/CN=lightcache tests", "-keyout", "key", "-out", "request")
    signing = ("-CA", "ca", "-CAkey", "ca-key", "-CAcreateserial", "-extfile", "extensions")
    _openssl(folder, "x509", "-req", "-in", "request", *signing, "-out", "cert")
    return folder


def _openssl(folder: Path, *command: str) -> None:
    subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True, timeout=60.0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 127.0.0.1."""
    return make(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


__all__ = ["certificates", "make"]
