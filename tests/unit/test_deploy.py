"""The files in deploy/: units of systemd, whose commands are started as they are typed, and
containers, whose commands and options exist. test_monitoring has deploy/monitoring."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from support.packages import need
from support.storing import make_cache

from lightcache._arguments import parse_size
from lightcache.connectors.vllm.options import Options
from lightcache.tools import cli
from lightcache.tools.settings import Service

FOLDER = Path(__file__).parents[2] / "deploy"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))
PROGRAM = "/opt/lightcache/bin/lightcache"
COMMAND = f"{sys.executable} -c 'from lightcache.tools.cli import main; main()'"


def service_of(unit: Path) -> configparser.SectionProxy:
    """The settings of a unit's process."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=["="], strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    return parser["Service"]


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """With a program that is there, as it looks for it."""
    need("systemd-analyze")
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", *sorted(map(str, tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_does_not_touch_shared_memory_of_others(unit: Path) -> None:
    service = service_of(unit)
    assert service["RemoveIPC"] == "no"
    harmful = {"DynamicUser", "MemoryMax", "MemoryHigh", "TemporaryFileSystem", "RootDirectory"}
    assert not harmful & set(service)


@pytest.fixture
def cache_name(segment_name: str) -> Iterator[str]:
    """A cache that is there while the services run."""
    with make_cache(segment_name):
        yield segment_name


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_service_runs_and_ends_in_order(unit: Path, cache_name: str, tmp_path: Path) -> None:
    service = service_of(unit)
    settings = tmp_path / f"{cache_name}.toml"
    settings.write_text(
        f'[storage]\nurl = "memory:?pages=8"\n[events]\nendpoint = "ipc://{tmp_path}/events"\n'
        "[metrics]\nport = 0\n"
    )
    line = service["ExecStart"].replace("%i", cache_name)
    place = service.get("Environment", "LIGHTCACHE_CONFIG=/etc/lightcache/%i.toml")
    name, _, path = place.replace("%i", cache_name).partition("=")
    assert path == f"/etc/lightcache/{cache_name}.toml"
    process = subprocess.Popen(
        shlex.split(line.replace(PROGRAM, COMMAND)),
        env={**os.environ, name: str(settings), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline()  # that it serves
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert said.startswith(("serving ", f"{cache_name}: publishing at "))


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", [unit for unit in UNITS if "@" in unit.name], ids=lambda unit: unit.name
)
def test_a_service_without_a_cache_ends_and_is_started_again(
    unit: Path, segment_name: str, tmp_path: Path
) -> None:
    service = service_of(unit)
    (tmp_path / "x.toml").write_text('[storage]\nurl = "memory:?pages=8"\n')
    done = subprocess.run(
        shlex.split(service["ExecStart"].replace("%i", segment_name).replace(PROGRAM, COMMAND)),
        env={**os.environ, "LIGHTCACHE_CONFIG": str(tmp_path / "x.toml")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert segment_name in done.stderr
    assert service["Restart"] == "always"


# ---- containers


def of_compose() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what all forms have in common) of the containers of the compose file."""
    made = yaml.safe_load((FOLDER / "docker" / "compose.yml").read_text())
    for name, service in made["services"].items():
        yield (
            f"compose {name}",
            {
                "words": service["command"],
                "environment": service["environment"],
                "mounts": [mount.split(":")[1] for mount in service["volumes"]],
                "sources": {
                    mount.split(":")[1]: mount.split(":")[0] for mount in service["volumes"]
                },
                "grace": service.get("stop_grace_period"),
            },
        )


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, specification) of the pods of the manifests."""
    for path in sorted((FOLDER / "kubernetes").iterdir()):
        for made in yaml.safe_load_all(path.read_text()):
            spec = made["spec"]
            yield f"{path.stem} {made['kind']}", spec.get("template", {}).get("spec", spec)


def of_kubernetes() -> Iterator[tuple[str, dict[str, Any]]]:
    """The same of the containers of pods."""
    for name, spec in pods():
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in spec["containers"]:
            mounts = container["volumeMounts"]
            yield (
                f"{name} {container['name']}",
                {
                    "words": container.get("command", []) + container.get("args", []),
                    "environment": {
                        each["name"]: each["value"] for each in container.get("env", [])
                    },
                    "mounts": [mount["mountPath"] for mount in mounts],
                    "sources": {mount["mountPath"]: volumes[mount["name"]] for mount in mounts},
                    "grace": f"{spec.get('terminationGracePeriodSeconds', 30)}s",
                },
            )


CONTAINERS = dict([*of_compose(), *of_kubernetes()])
SERVICES = {name: made for name, made in CONTAINERS.items() if made["words"][0] == "lightcache"}
ENGINES = {name: made for name, made in CONTAINERS.items() if name not in SERVICES}


def test_there_are_engines_and_services_of_each_kind() -> None:
    assert len(ENGINES) == 5
    commands = [made["words"][1] for made in SERVICES.values()]
    assert sorted(commands) == 3 * ["metrics"] + 3 * ["storage"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_of_a_container_can_be_typed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SERVICES[name]
    for variable, value in made["environment"].items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("lightcache.tools.image.list_segments", list)
    command = cli.group.get_command(click.Context(cli.group), made["words"][1])
    assert isinstance(command, Service)
    params = command.make_context(made["words"][1], made["words"][2:]).params
    variables = {option.envvar for option in command.settings().values()}
    assert set(made["environment"]) <= variables | {"LIGHTCACHE_SECRET_FILE"}
    if command.name == "storage":
        (url,) = params["urls"]
        assert url.removeprefix("disk:").partition("?")[0] in made["mounts"]
        assert made["grace"] in ("1m", "60s")
        assert params["finish"] < 60


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_a_container_has_a_line_that_the_connector_takes(name: str) -> None:
    made = ENGINES[name]
    model, option, text = made["words"][:3]
    assert option == "--kv-transfer-config"
    line = json.loads(text)
    options = Options.of(line["kv_connector_extra_config"])
    assert (line["kv_connector"], options.storage) == ("LightcacheConnector", ("service:",))
    secret = Path(made["environment"]["LIGHTCACHE_SECRET_FILE"])
    assert str(secret.parent) in made["mounts"]
    storages = [each["words"] for each in SERVICES.values() if each["words"][1] == "storage"]
    assert all(words[2] == model for words in storages)


def test_all_containers_have_one_shared_memory() -> None:
    for name, made in CONTAINERS.items():
        assert "/dev/shm" in made["sources"], name
        if name.startswith("compose"):
            assert made["sources"]["/dev/shm"] == "/dev/shm"
        elif name.startswith("node"):
            assert made["sources"]["/dev/shm"]["hostPath"]["path"] == "/dev/shm"
        else:
            shm = made["sources"]["/dev/shm"]["emptyDir"]
            assert shm["medium"] == "Memory"
            assert parse_size(f"{shm['sizeLimit']}B") > parse_size("64GiB")


def test_pods_get_no_variables_of_services_and_limits_above_the_pool() -> None:
    for name, spec in pods():
        assert spec["enableServiceLinks"] is False, name
        for container in spec["containers"]:
            limit = parse_size(f"{container['resources']['limits']['memory']}B")
            assert "metrics" in container["name"] or limit > parse_size("64GiB"), name
