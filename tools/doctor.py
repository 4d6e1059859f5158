"""`lightcache doctor`: what this machine offers, and what to change."""

from __future__ import annotations

from dataclasses import asdict

import click

from lightcache.errors import ConfigError
from lightcache.tools.findings import Finding, Level
from lightcache.tools.output import (
    BROKEN,
    OK,
    Command,
    cell,
    check_writable,
    console,
    emit,
    json_option,
)

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


def examine() -> list[Finding]:
    """All findings, in the order in which people read them."""
    from lightcache.tools import doctor_memory, doctor_software, doctor_system

    found: list[Finding] = []
    for module in (doctor_memory, doctor_system, doctor_software):
        for probe in module.PROBES:
            found += probe()
    return found


@click.command(cls=Command)
@click.option("--pin", metavar="NAME", help="Only measure registering this cache with the GPU.")
@click.option("--calibrate", is_flag=True, help="Only measure how fast pages are loaded.")
@click.option("--page-bytes", metavar="SIZE", default="2MiB", help="For --calibrate (2MiB).")
@click.option("--device", help="For --calibrate: cuda:0, or cpu; the first GPU if there is one.")
@click.option("--page-tokens", type=int, metavar="N", help="For --calibrate: noted in the file.")
@click.option("--prefill", type=float, metavar="N", help="The same: tokens computed in a second.")
@click.option("--out", metavar="FILE", help="For --calibrate: write it for lightcache.costs.")
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    as_json: bool,
    pin: str | None,
    calibrate: bool,
    page_bytes: str,
    device: str | None,
    page_tokens: int | None,
    prefill: float | None,
    out: str | None,
) -> None:
    """Look at this machine: memory, limits, kernel, versions, devices.

    Each line is ok, a warning, or an error with the remedy. Exit status 1 if there is an error.
    """
    if calibrate:
        from lightcache.tools import doctor_calibrate

        if pin is not None:
            raise ConfigError("doctor: --pin and --calibrate measure different things; give one")
        if out is not None:
            check_writable("--out", out)
        measured = doctor_calibrate.calibrated(page_bytes, device, page_tokens, prefill)
        doctor_calibrate.show(measured, out, as_json)
        return
    for option, value in (
        ("--out", out),
        ("--device", device),
        ("--page-tokens", page_tokens),
        ("--prefill", prefill),
    ):
        if value is not None:
            raise ConfigError(f"doctor: {option} is for what --calibrate measures; give both")
    if pin is None:
        found = examine()
    else:
        from lightcache.tools.doctor_pin import pinning

        found = pinning(pin, quiet=as_json)
    if as_json:
        emit([asdict(finding) for finding in found])
    else:
        screen = console()
        for finding in found:
            line = cell(f"{finding.level.value:<8}", _STYLES[finding.level])
            line += cell(f"{finding.name:<18} {finding.found}")
            screen.print(line, soft_wrap=True)
            if finding.remedy:
                screen.print(cell(f"{'':8}{'':18} -> {finding.remedy}"), soft_wrap=True)
    ctx.exit(BROKEN if any(finding.level is Level.ERROR for finding in found) else OK)
