"""What a URL such as `mooncake://host:50051?segment=64GiB` says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightcache.errors import ConfigError
from lightcache.storage.options import Options

PORT = 50051  # of a master, unless it is told another
SEGMENT = 16 << 20  # bytes that the client lends at least
_HANDSHAKE = "P2PHANDSHAKE"  # what the client calls: no server for metadata
_OPTIONS = (
    *("local", "metadata", "protocol", "device"),
    *("segment", "buffer", "threads", "replicas", "connect"),
)
_NAMED = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]/\s]+)(:(?P<port>[0-9]+))?")


@dataclass(frozen=True)
class MooncakeOptions:
    """How a cluster is joined."""

    host: str
    """Of the master, without brackets."""
    port: int
    local: str = ""
    """Under which other machines reach this process: an address, or address:port. Empty: that from
    which the way to the master begins."""
    metadata: str = _HANDSHAKE
    """Where addresses of peers are found; by default peers ask one another."""
    protocol: str = "tcp"
    device: str = ""
    """Of RDMA, such as mlx5_0; several with commas."""
    segment: int = 0
    """Bytes of memory that this process lends to the cluster, for as long as it lives."""
    buffer: int = 64 << 20
    """Bytes through which pages pass."""
    threads: int = 3
    """Batches that are under way at a time. With two, what is asked of the master about a page of
    8 MiB is not hidden behind others' transfers; a fourth gains nothing (docs/benchmarks.md)."""
    replicas: int = 1
    """Copies of each page, in memory of different processes."""
    connect: float = 5.0
    """Seconds in which the master must accept a connection."""

    @property
    def master(self) -> str:
        """As the client wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(scheme: str, where: str, options: Mapping[str, str]) -> MooncakeOptions:
    """Check a URL without connecting.

    Raises:
        ConfigError: no host, a port that is none, credentials, a path, an option that there is
            not, or a value that is none.
    """
    host, port = _address(scheme, where)
    given = Options(scheme, options, _OPTIONS)
    protocol = given.choice("protocol", ("tcp", "rdma"))
    if "device" in given and protocol != "rdma":
        raise ConfigError(f"{scheme}: device is of protocol=rdma; name both, or neither")
    local = given.text("local")
    if "local" in given:
        _host_and_port(scheme, "local", local)
    segment, buffer = given.size("segment", 0), given.size("buffer", MooncakeOptions.buffer)
    assert segment is not None
    assert buffer is not None
    if 0 < segment < SEGMENT:
        raise ConfigError(f"{scheme}: segment: expected 16MiB or more, or none, found {segment}")
    return MooncakeOptions(
        host=host,
        port=port,
        local=local,
        metadata=given.text("metadata", _HANDSHAKE),
        protocol=protocol,
        device=given.text("device"),
        segment=segment,
        buffer=buffer,
        threads=given.count("threads", MooncakeOptions.threads, high=64),
        replicas=given.count("replicas", MooncakeOptions.replicas, high=64),
        connect=given.seconds("connect", MooncakeOptions.connect, low=0.001),
    )


def _address(scheme: str, where: str) -> tuple[str, int]:
    if not where.startswith("//") or where == "//":
        raise ConfigError(
            f"{scheme}: expected the host of a master, as in '{scheme}://host:{PORT}', "
            f"found {'nothing' if where in ('', '//') else 'no //'}"
        )
    if "@" in where:  # and not a word of what stands before it
        raise ConfigError(f"{scheme}: a master knows no users; leave out what is in front of the @")
    name, slash, path = where[2:].partition("/")
    if path:
        raise ConfigError(f"{scheme}: expected '{scheme}://{name}', found a path: {slash + path!r}")
    return _host_and_port(scheme, "master", name)


def _host_and_port(scheme: str, what: str, name: str) -> tuple[str, int]:
    found = _NAMED.fullmatch(name)
    if not found:
        raise ConfigError(f"{scheme}: {what}: expected host or host:port, found {name!r}")
    port = int(found["port"] or PORT)
    if not 0 < port < 1 << 16:
        raise ConfigError(f"{scheme}: {what}: expected a port from 1 to 65535, found {port}")
    return found["host"].strip("[]"), port


__all__ = ["PORT", "SEGMENT", "MooncakeOptions", "parse"]
