"""What an operator sets for the commands that run as services; `lightcache config` shows it.

An option is taken from the command line, else from its environment variable, else from the
settings file, else its default holds. The order and the conversion of values are click's.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lightcache.cache import DEFAULT_SECRET, SECRET_VARIABLE
from lightcache.errors import ConfigError
from lightcache.tools.output import (
    FAILED,
    Command,
    console,
    emit,
    fail,
    json_option,
    printable,
    table,
    without_passwords,
)

FILE_VARIABLE = "LIGHTCACHE_CONFIG"
SYSTEM_FILE = Path("/etc/lightcache.toml")
SERVICES = ("create", "storage", "metrics", "events")
"""The commands that have settings, in the order in which they are shown."""
PROCESS = {
    FILE_VARIABLE: ("these commands", f"~/.config/lightcache.toml, {SYSTEM_FILE}"),
    SECRET_VARIABLE: ("every process that makes keys", str(DEFAULT_SECRET)),
    "LIGHTCACHE_LIGHTLLM": ("LightLLM's servers", "{}"),
}
"""Variables of processes, which no section sets: (who reads it, what holds without it)."""
_MODES = ("as_json", "status", "once")
"""Parameters that ask for another output, once: no settings."""
_ORDER = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)
"""Where values come from, the strongest first."""
_EXCLUDED = "lightcache.excluded"
"""In a context's `meta`: parameters that a stronger one excludes, their values, and its name."""
_NAMES: dict[ParameterSource | None, str] = {
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}


class Service(Command):
    """A command whose options may also be set in the environment, and in its section of the
    settings file. A bad value there ends it with status 2, and the message says where it stands."""

    def __init__(self, *args: Any, either: tuple[tuple[str, str], ...] = (), **more: Any) -> None:
        """`either`: pairs of parameters that exclude each other. Of two that come from different
        places the stronger place decides; two from one place are a mistake."""
        super().__init__(*args, **more)
        self.params.append(
            click.Option(
                ["--log-level"],
                type=click.Choice(["debug", "info", "warning", "error"]),
                help="Log from this level on, each line with its time and logger, to standard "
                "error. Default: warnings, their texts alone.",
            )
        )
        self.either = either
        for key, option in self.settings().items():
            option.envvar = option.envvar or variable_of(str(self.name), key)

    def settings(self) -> dict[str, click.Option]:
        """The options that can be set, by their names without dashes in front."""
        return {
            option.opts[0].lstrip("-"): option
            for option in self.params
            if isinstance(option, click.Option) and option.name not in _MODES
        }

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        """Parse, and choose where two options exclude each other."""
        try:
            ctx = super().make_context(info_name, args, parent, **extra)
        except ConfigError as error:
            fail(str(error))
            raise click.exceptions.Exit(FAILED) from error
        except click.BadParameter as error:
            raise _placed(error) from None
        for pair in self.either:
            self._choose(ctx, *pair)
        return ctx

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the settings file, unless help is asked for: it is needed most where that is wrong.
        Then parse."""
        if ctx.default_map is None and not set(args) & set(self.get_help_option_names(ctx)):
            path = settings_file()
            document = read_file(path)
            for problem in unknown_sections(path, document):
                click.echo(f"warning: {printable(problem)}", err=True)
            ctx.default_map = section_of(self, path, document)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it, with the log that was asked for."""
        level = ctx.params.pop("log_level")
        if level is not None:
            form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
            logging.basicConfig(format=form)
            logging.getLogger("lightcache").setLevel(level.upper())
        return super().invoke(ctx)

    def _choose(self, ctx: click.Context, *pair: str) -> None:
        given = {
            name: _ORDER.index(source)
            for name in pair
            if (source := ctx.get_parameter_source(name)) in _ORDER and _is_given(ctx.params[name])
        }
        if len(given) < 2:
            return
        if len(set(given.values())) == 1:
            both = " or ".join(_shown(self, name) for name in pair)
            raise click.UsageError(f"give {both}, not both", ctx)
        stronger, weaker = sorted(given, key=given.__getitem__)
        excluded = ctx.meta.setdefault(_EXCLUDED, {})
        excluded[weaker] = ctx.params[weaker], _shown(self, stronger)
        (option,) = (each for each in self.params if each.name == weaker)
        ctx.params[weaker] = () if option.multiple else None


def variable_of(command: str, key: str) -> str:
    """The environment variable of an option."""
    return f"LIGHTCACHE_{command}_{key}".replace("-", "_").upper()


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ()


def _shown(command: click.Command, name: str) -> str:
    (found,) = (each for each in command.params if each.name == name)
    return found.opts[0] if isinstance(found, click.Option) else name.upper()


def _placed(error: click.BadParameter) -> click.BadParameter:
    """The error, with the environment variable that the value came from, if it did."""
    if error.ctx is None or not isinstance(error.param, click.Option):
        return error
    if error.ctx.get_parameter_source(str(error.param.name)) is not ParameterSource.ENVIRONMENT:
        return error
    found = f"{error.message} (from the environment variable {error.param.envvar})"
    return click.BadParameter(found, error.ctx, error.param)


# ---- the file


def settings_file() -> Path | None:
    """The one settings file that holds: that of LIGHTCACHE_CONFIG, which has to be there, else the
    user's, else the machine's. Files are not merged, so that one file says all."""
    given = os.environ.get(FILE_VARIABLE)
    if given:
        return Path(given).expanduser()
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    user = Path(os.path.expanduser(folder)) / "lightcache.toml"
    return next((path for path in (user, SYSTEM_FILE) if os.path.lexists(path)), None)


def read_file(path: Path | None) -> dict[str, Any]:
    """What a settings file says, unchecked; of None, nothing.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    if path is None:
        return {}
    try:
        document: dict[str, Any] = _toml().loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a settings file that can be read, found: {error.strerror}; correct "
            f"{FILE_VARIABLE} or the file's rights"
        ) from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise ConfigError(
            f"{path}: expected TOML in UTF-8, found: {error}; correct the file"
        ) from error
    return document


def unknown_sections(path: Path | None, document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a file outside the services' sections: names that are no service's."""
    return [
        f"{path}: expected the sections {', '.join(f'[{each}]' for each in SERVICES)}, "
        f"found {name!r}; correct its name, or move it into the section of its command"
        for name in document
        if name not in SERVICES
    ]


def section_of(command: Service, path: Path | None, document: Mapping[str, Any]) -> dict[str, Any]:
    """Values that a file sets for a command, checked, by parameter.

    Raises:
        ConfigError: it is no section; a key that is no option, or a value that it does not take.
    """
    options, name = command.settings(), str(command.name)
    section = document.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path}: expected a section [{name}], found a value; put "
            f"[{name}] in front of its settings"
        )
    values = {}
    for key, value in section.items():
        if key not in options:
            raise ConfigError(
                f"{path}: [{name}]: expected one of {', '.join(options)}, found {key!r}; "
                f"`lightcache {name} --help` explains them"
            )
        problem = _problem(options[key], value)
        if problem:
            raise ConfigError(f"{path}: [{name}] {key}: {problem}; correct it there")
        alone = options[key].multiple and not isinstance(value, list)
        values[str(options[key].name)] = [value] if alone else value
    return values


def _problem(option: click.Option, value: Any) -> str:
    """Why an option does not take a value of TOML; empty: it does."""
    expected, kinds = _expected(option)
    values = value if option.multiple and isinstance(value, list) else [value]
    if not values or not all(type(each) in kinds for each in values):
        return f"expected {expected}, found {value!r}"
    try:
        for each in values:
            option.type.convert(each, option, None)
    except click.BadParameter as error:
        return f"expected {expected}: {error.message}"
    return ""


def _expected(option: click.Option) -> tuple[str, tuple[type, ...]]:
    if option.is_flag:
        return "true or false", (bool,)
    if isinstance(option.type, click.types.IntParamType):
        return "a whole number", (int,)
    if isinstance(option.type, click.types.FloatParamType):
        return "a number", (int, float)
    if option.multiple:
        return "a text, or a list of texts", (str,)
    return "a text", (str, int)  # a size may be a number of bytes


def _toml() -> Any:
    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


# ---- lightcache config


@click.command(cls=Command)
@json_option
@click.pass_context
def config(ctx: click.Context, as_json: bool) -> None:
    """Show what can be set, what it is set to, and where: environment, settings file, or default.

    The settings are the options of the commands that run as services. A file has a section for
    each, such as [metrics], with keys named as its options. The file is that of LIGHTCACHE_CONFIG,
    else ~/.config/lightcache.toml, else /etc/lightcache.toml. What is typed on a command line comes
    before both. Passwords in URLs are not shown.
    """
    path = settings_file()
    document = read_file(path)
    for problem in unknown_sections(path, document):
        raise ConfigError(problem)
    group = ctx.parent.command if ctx.parent else None
    assert isinstance(group, click.Group)
    rows = []
    for name in SERVICES:
        command = group.get_command(ctx, name)
        assert isinstance(command, Service)
        rows += _settings(command, section_of(command, path, document))
    rows += [_process(name) for name in PROCESS]
    known = {row["variable"] for row in rows}
    unknown = sorted(
        name for name in os.environ if name.startswith("LIGHTCACHE_") and name not in known
    )
    if as_json:
        emit({"file": path and str(path), "settings": rows, "unknown_variables": unknown})
    else:
        _show(path, rows, unknown)


def _settings(command: Service, section: Mapping[str, Any]) -> list[dict[str, Any]]:
    name = str(command.name)
    # A name of a cache is no setting; where one is needed to parse, this stands for it.
    needed = ["NAME" for each in command.params if each.required]
    try:
        ctx = command.make_context(name, needed, default_map=dict(section))
    except click.UsageError as error:
        raise ConfigError(f"{name}: {error.format_message()}") from error
    excluded = ctx.meta.get(_EXCLUDED, {})
    rows = []
    for key, option in command.settings().items():
        param = str(option.name)
        value, by = excluded.get(param, (ctx.params[param], None))
        rows.append(
            {
                "setting": f"[{name}] {key}",
                "value": _public(value),
                "from": _NAMES.get(ctx.get_parameter_source(param), "default"),
                "excluded_by": by,
                "variable": option.envvar,
                "read_by": f"lightcache {name}",
            }
        )
    return rows


def _process(variable: str) -> dict[str, Any]:
    who, default = PROCESS[variable]
    value = os.environ.get(variable)
    return {
        "setting": None,
        "value": _public(value or default),
        "from": "environment" if value else "default",
        "excluded_by": None,
        "variable": variable,
        "read_by": who,
    }


def _public(value: Any) -> Any:
    """A value without the passwords of URLs in it, as JSON has it."""
    if isinstance(value, (tuple, list)):
        return [_public(each) for each in value]
    if isinstance(value, (str, os.PathLike)):
        return without_passwords(os.fspath(value))
    return value


def _show(path: Path | None, rows: list[dict[str, Any]], unknown: list[str]) -> None:
    def cells(*fields: str, settings: bool) -> list[list[object]]:
        return [
            [_text(row[field]) for field in fields]
            for row in rows
            if (row["setting"] is not None) == settings
        ]

    rows = [
        row | {"from": f"{row['from']}, excluded by {by}"} if (by := row["excluded_by"]) else row
        for row in rows
    ]
    out = console()
    of_files = cells("setting", "value", "from", "variable", settings=True)
    columns = ("setting", "value", "from", "environment variable")
    out.print(table(f"settings file: {path or 'none'}", columns, of_files))
    others = cells("variable", "value", "from", "read_by", settings=False)
    out.print(table("variables of processes", ("variable", "value", "from", "read by"), others))
    if unknown:
        out.print(f"in the environment, and no setting: {', '.join(unknown)}", markup=False)


def _text(value: Any) -> object:
    if isinstance(value, list):
        return " ".join(map(str, value)) or None
    return value if value is None or isinstance(value, bool) else str(value)
