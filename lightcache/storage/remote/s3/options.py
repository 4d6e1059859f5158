"""URLs of S3-compatible stores: what is right in them, and what the client makes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightcache.errors import ConfigError
from lightcache.storage.options import Options
from lightcache.storage.remote.s3.words import CREDENTIALS

KNOWN = (
    *("endpoint", "region", "addressing", "requests", "retries"),
    *("conditional", "bulk_delete", "anonymous", "wait", "ca"),
)
_SECRET = re.compile(r"key|secret|token|password|credential|profile", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9!_.*'()=-]+")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_AWAY = f"credentials do not belong in a URL; set {CREDENTIALS} in the environment"


@dataclass(frozen=True)
class Place:
    """What a URL says."""

    bucket: str
    prefix: str
    """Without slashes around it; may be empty."""
    endpoint: str
    """Empty: that of AWS for the region."""
    region: str
    """Empty: what the environment says, or us-east-1."""
    virtual: bool
    """The bucket is a part of the host's name."""
    requests: int
    """Under way at a time."""
    retries: int
    """Of a request, by the client, within the time of the call."""
    conditional: bool
    """Pages are stored only where none is."""
    bulk_delete: bool
    anonymous: bool
    """Requests are not signed."""
    wait: float
    """Seconds in which the store must answer when it is opened; 0: it is not asked."""
    ca: str = ""
    """File of certificates that the store's may come from, besides those of the system."""

    def __str__(self) -> str:
        where = f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        return f"{where} at {self.endpoint}" if self.endpoint else where

    @property
    def config(self) -> dict[str, Any]:
        """For the client. Over TLS a body is not hashed once more for the signature: it takes as
        long as sending it does on a fast line, and nobody can change it on the way."""
        found: dict[str, Any] = {
            "virtual_hosted_style_request": self.virtual,
            "disable_bulk_delete": not self.bulk_delete,
            "unsigned_payload": not self.endpoint.startswith("http:"),
        }
        if self.endpoint:
            found["endpoint"] = self._address
        if self.region:
            found["region"] = self.region
        if self.anonymous:
            found["skip_signature"] = True
        return found

    @property
    def client(self) -> dict[str, Any]:
        """Of its connections. What bounds a request is the time of the call.

        Raises:
            ConfigError: the file of certificates cannot be read, or has none.
        """
        found: dict[str, Any] = {
            "allow_http": self.endpoint.startswith("http:"),
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(hours=24),
            "pool_max_idle_per_host": str(self.requests),
            "pool_idle_timeout": timedelta(seconds=30),
        }
        if self.ca:
            found["root_certificate"] = self._certificates()
        return found

    @property
    def retrying(self) -> dict[str, Any]:
        """Of its retries."""
        backoff = {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=2),
        }
        limit = timedelta(minutes=2)
        return {"max_retries": self.retries, "backoff": backoff, "retry_timeout": limit}

    def _certificates(self) -> bytes:
        try:
            found = Path(self.ca).read_bytes()
        except OSError as error:
            raise ConfigError(f"s3: ca: expected a file to read, found {error}") from None
        if b"-----BEGIN CERTIFICATE-----" not in found:
            raise ConfigError(f"s3: ca: expected certificates in PEM, found none in {self.ca}")
        return found

    @property
    def _address(self) -> str:
        scheme, _, rest = self.endpoint.partition("://")
        return f"{scheme}://{self.bucket}.{rest}" if self.virtual else self.endpoint


def parse(scheme: str, where: str, options: Mapping[str, str]) -> Place:
    """Of "//bucket/prefix" and the options. Asks nobody.

    Raises:
        ConfigError: names what is wrong. No text of a URL that may hold credentials is in it.
    """
    if secret := sorted(name for name in options if _SECRET.search(name)):
        raise ConfigError(f"{scheme}: found {', '.join(secret)}: {_AWAY}")
    given = Options(scheme, options, KNOWN)
    bucket, prefix = _bucket(scheme, where)
    region = given.text("region")
    if region and not _REGION.fullmatch(region):
        raise ConfigError(f"{scheme}: region: expected one such as eu-west-1, found {region!r}")
    endpoint = _endpoint(scheme, given.text("endpoint")) if "endpoint" in given else ""
    if "ca" in given and endpoint.startswith("http:"):
        raise ConfigError(f"{scheme}: ca: expected an endpoint of https beside it, found http")
    return Place(
        bucket,
        prefix,
        endpoint,
        region,
        virtual=given.choice("addressing", ("path", "virtual")) == "virtual",
        requests=given.count("requests", 32, 1, 1024),
        retries=given.count("retries", 2, 0, 10),
        conditional=given.choice("conditional", ("yes", "no")) == "yes",
        bulk_delete=given.choice("bulk_delete", ("yes", "no")) == "yes",
        anonymous=given.choice("anonymous", ("no", "yes")) == "yes",
        wait=given.seconds("wait", 10.0),
        ca=given.text("ca"),
    )


def _bucket(scheme: str, where: str) -> tuple[str, str]:
    if "@" in where:
        raise ConfigError(f"{scheme}: expected a bucket, found an '@': {_AWAY}")
    bucket, _, prefix = where.removeprefix("//").partition("/")
    if not where.startswith("//") or not bucket:
        raise ConfigError(f"{scheme}: expected '{scheme}://bucket/prefix', found {where!r}")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{scheme}: expected the name of a bucket, 3 to 63 letters, digits and '.-', found "
            f"{bucket!r}; a server's address belongs to endpoint="
        )
    prefix = prefix.removesuffix("/")
    if prefix and not all(_PART.fullmatch(part) for part in prefix.split("/")):
        raise ConfigError(
            f'{scheme}: expected a prefix of letters, digits and "!_.*\'()=-" between single '
            f"slashes, found {prefix!r}"
        )
    return bucket, prefix


def _endpoint(scheme: str, text: str) -> str:
    if "@" in text:
        raise ConfigError(f"{scheme}: endpoint: expected no '@': {_AWAY}")
    try:
        found = urlsplit(text)
        right = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:  # a port that is none, half an address of IPv6
        right = False
    if not right or found.path not in ("", "/") or found.query or found.fragment:
        raise ConfigError(
            f"{scheme}: endpoint: expected one such as http://127.0.0.1:9000, found {text!r}"
        )
    return text.rstrip("/")


__all__ = ["Place", "parse"]
