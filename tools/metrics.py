"""`lightcache metrics`: the caches of this machine for Prometheus, over HTTP or as a file."""

from __future__ import annotations

import errno
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lightcache.cache import family_name
from lightcache.errors import ConfigError
from lightcache.tools.output import fail
from lightcache.tools.settings import Service
from lightcache.tools.storage_service import Signals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PORT = 9464
"""By default; OpenTelemetry's for exporters of this kind."""


@click.command(cls=Service, either=(("port", "textfile"), ("once", "port")))
@click.argument("caches", metavar="[NAME]...", nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Serve http://ADDRESS:PORT/metrics; 0: any free port.",
)
@click.option(
    "--address", default="127.0.0.1", show_default=True, help="To listen at; 0.0.0.0: all."
)
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write this file, *.prom, instead: for the textfile collector of node_exporter.",
)
@click.option(
    "--every",
    type=click.FloatRange(0.1),
    default=15.0,
    show_default=True,
    help="Seconds between two writes of the file.",
)
@click.option("--once", is_flag=True, help="Write the file once, or print to the terminal.")
def metrics(
    caches: tuple[str, ...],
    port: int | None,
    address: str,
    textfile: Path | None,
    every: float,
    once: bool,
) -> None:
    """Serve the metrics of all caches, or of those with a NAME or of a model, until Ctrl-C or
    SIGTERM.

    One process of a machine does it: all figures are of the machine, read from shared memory, and
    include those of processes that have ended or were killed. It takes no lock and no slot; caches
    may come and go.
    """
    for name in caches:
        family_name(name)  # the model of a NAME, which may be one
    registry = _registry(caches)
    if textfile is not None:
        _check_file(textfile)
        _write(registry, textfile, None if once else every)
    elif once:
        click.echo(_page(registry), nl=False)
    else:
        assert port is not None  # it has a default, which only another way of these gives up
        _serve(registry, address, port)


def _registry(caches: tuple[str, ...]) -> CollectorRegistry:
    """Imports prometheus_client, which may be absent: then `NotInstalled` says what to do."""
    importlib.import_module("lightcache.metrics")
    node_metrics = importlib.import_module("lightcache.tools.node_metrics")
    registry: CollectorRegistry = importlib.import_module("prometheus_client").CollectorRegistry()
    registry.register(node_metrics.NodeMetrics(caches or None))
    return registry


def _page(registry: CollectorRegistry) -> str:
    page: bytes = importlib.import_module("prometheus_client").generate_latest(registry)
    return page.decode()


# ---- HTTP


def _serve(registry: CollectorRegistry, address: str, port: int) -> None:
    start = importlib.import_module("prometheus_client").start_http_server
    with Signals() as signals:
        try:
            server, thread = start(port, addr=address, registry=registry)
        except OSError as error:
            raise _not_served(error, address, port) from error
        try:
            where = server.server_address
            click.echo(f"serving http://{where[0]}:{where[1]}/metrics; Ctrl-C ends it")
            signals.end.wait()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _not_served(error: OSError, address: str, port: int) -> ConfigError:
    why = error.strerror or error
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port: expected one that is free, found {address}:{port}: {why}; one exporter "
            "serves all caches of a machine, and another may run already: ask it, or give another "
            "port"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"--port: expected one that this user may use, found {port}: {why}")
    return ConfigError(
        f"--address: expected one of this machine, found {address!r}: {why}; 127.0.0.1: for "
        "this machine alone, 0.0.0.0: for all"
    )


# ---- a file


def _check_file(path: Path) -> None:
    """Raises ConfigError: it cannot be written, or would not be read."""
    if path.suffix != ".prom":
        raise ConfigError(
            f"--textfile: expected a name that ends in .prom, found {path.name!r}: node_exporter "
            "reads no other"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"--textfile: expected a folder that exists, found {str(path.parent)!r}; make it, and "
            "give it to node_exporter's --collector.textfile.directory"
        )


def _write(registry: CollectorRegistry, path: Path, every: float | None) -> None:
    """Write the file; again and again, until a signal: then it is removed, as its figures would
    look as if they were of now.

    Raises:
        ConfigError: it could not be written the first time. Later this is said, and tried again.
    """
    try:
        _replace(path, _page(registry))
    except OSError as error:
        raise ConfigError(
            f"--textfile: {path}: expected a file that can be written, found {error.strerror}; "
            "give the folder to the user of this process, or choose another"
        ) from error
    if every is None:
        return
    said = ""
    with Signals() as signals:
        click.echo(f"writing {path} each {every:g} s; Ctrl-C ends it")
        while not signals.end.wait(every):
            try:
                _replace(path, _page(registry))
                said = ""
            except OSError as error:
                if said != str(error):
                    said = str(error)
                    fail(f"{path} is not written, and tried again: {error}")
    path.unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    """A reader finds the file before or the new one, whole."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        new.chmod(0o644)  # node_exporter is another user
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
