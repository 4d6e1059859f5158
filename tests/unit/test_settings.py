"""`lightcache config`, the settings file and the environment: which wins, what is refused, and that
docs/guides/settings.md has them all."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from lightcache import ConfigError
from lightcache.tools import cli
from lightcache.tools.settings import SERVICES, Service, read_file

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "settings.md"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file of this test's commands."""
    for name in [name for name in os.environ if name.startswith("LIGHTCACHE_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "settings.toml"
    path.write_text("")
    monkeypatch.setenv("LIGHTCACHE_CONFIG", str(path))
    return path


def typed(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(cli.group, arguments, prog_name="lightcache")
    assert done.exit_code == status, done.output
    return done.output


def service(name: str) -> Service:
    command = cli.group.get_command(click.Context(cli.group), name)
    assert isinstance(command, Service)
    return command


def used(name: str, *arguments: str) -> dict[str, Any]:
    """What a command would be called with."""
    params: dict[str, Any] = service(name).make_context(name, list(arguments)).params
    return params


def shown() -> dict[str, dict[str, Any]]:
    """The settings of `lightcache config`, by their names."""
    rows = json.loads(typed("config", "--json"))["settings"]
    return {row["setting"] or row["variable"]: row for row in rows}


def test_command_line_before_environment_before_file_before_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert used("metrics")["port"] == 9464
    assert shown()["[metrics] port"]["from"] == "default"
    file.write_text("[metrics]\nport = 1111\n")
    assert used("metrics")["port"] == 1111
    assert shown()["[metrics] port"]["from"] == "file"
    monkeypatch.setenv("LIGHTCACHE_METRICS_PORT", "2222")
    assert used("metrics")["port"] == 2222
    row = shown()["[metrics] port"]
    assert (row["value"], row["from"]) == (2222, "environment")
    assert row["variable"] == "LIGHTCACHE_METRICS_PORT"
    assert used("metrics", "--port", "3333")["port"] == 3333


def test_values_of_every_kind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        '[create]\nsize = 1073741824\nhuge-pages = true\neviction = "lru"\nnuma = "gpu:0"\n'
        '[storage]\nurl = ["memory:", "disk:/x?capacity=1GiB"]\ngrace = 2\nmin-tokens = 64\n'
        '[events]\nworker = "kv@10.0.0.1@llama"\n'
    )
    made = used("create")
    assert (made["size"], made["huge_pages"], made["eviction"]) == ("1073741824", True, "lru")
    stored = used("storage", "x")
    assert stored["urls"] == ("memory:", "disk:/x?capacity=1GiB")
    assert (stored["grace"], stored["min_tokens"]) == (2.0, 64)
    assert used("events", "x")["workers"] == ("kv@10.0.0.1@llama",)
    monkeypatch.setenv("LIGHTCACHE_STORAGE_URL", "memory: disk:/y")
    monkeypatch.setenv("LIGHTCACHE_CREATE_HUGE_PAGES", "false")
    assert used("storage", "x")["urls"] == ("memory:", "disk:/y")
    assert used("create")["huge_pages"] is False


@pytest.mark.parametrize(
    ("section", "name", "arguments", "taken", "given_up"),
    [
        ("[metrics]\nport = 1\n", "metrics", ["--textfile", "/srv/x.prom"], "textfile", "port"),
        ('[metrics]\ntextfile = "/srv/x.prom"\n', "metrics", ["--port", "0"], "port", "textfile"),
        ("[metrics]\nport = 1\n", "metrics", ["--once"], "once", "port"),
        ('[create]\nsize = "1GiB"\n', "create", ["--pages", "7"], "pages", "size"),
        ('[create]\nmodel = "llama"\n', "create", ["mine"], "name", "model"),
        ('[storage]\nurl = "memory:"\n', "storage", ["x", "--status"], "status", "urls"),
    ],
)
def test_of_two_that_exclude_each_other_the_stronger_place_decides(
    file: Path, section: str, name: str, arguments: list[str], taken: str, given_up: str
) -> None:
    file.write_text(section)
    params = used(name, *arguments)
    assert params[taken] is not None
    assert not params[given_up]


def test_what_is_excluded_is_shown_with_its_value(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[metrics]\nport = 1234\n")
    monkeypatch.setenv("LIGHTCACHE_METRICS_TEXTFILE", "/srv/x.prom")
    row = shown()["[metrics] port"]
    assert (row["value"], row["from"], row["excluded_by"]) == (1234, "file", "--textfile")
    assert shown()["[metrics] textfile"]["excluded_by"] is None
    assert re.search(r"port\W+1234\W+file, excluded by --textfile", typed("config"))


def test_both_in_one_file_are_a_mistake(file: Path) -> None:
    file.write_text('[metrics]\nport = 1\ntextfile = "/srv/x.prom"\n')
    assert "give --port or --textfile, not both" in typed("metrics", status=2)
    assert "give --port or --textfile, not both" in typed("config", status=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[metrics]\nprot = 1\n", r"\[metrics\]: expected one of port, .*, found 'prot'"),
        ("[metrics]\nonce = true\n", "found 'once'"),
        ('[metrics]\nport = "9464"\n', r"\[metrics\] port: expected a whole number, found '9464'"),
        ("[metrics]\nport = true\n", "expected a whole number, found True"),
        ("[metrics]\nport = 70000\n", "expected a whole number: 70000 is not in the range"),
        ('[metrics]\nevery = "1"\n', "expected a number, found '1'"),
        ("[metrics]\naddress = 1.5\n", "expected a text, found 1.5"),
        ("[create]\nhuge-pages = 1\n", "expected true or false, found 1"),
        ('[create]\neviction = "mru"\n', "'mru' is not one of 'lru', 'hz'"),
        ("[storage]\nurl = []\n", "expected a text, or a list of texts, found"),
        ("[storage]\nurl = [1]\n", "expected a text, or a list of texts, found"),
        ("[metric]\nport = 1\n", r"expected the sections \[create\], .*, found 'metric'"),
        ("port = 1\n", "found 'port'"),
        ("metrics = 1\n", r"expected a section \[metrics\], found a value"),
        ("storage = 1\n", r"expected a section \[storage\], found a value"),
        ("[metrics\n", "expected TOML in UTF-8, found: .*line 1"),
    ],
)
def test_wrong_settings(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    out = typed("config", status=2)
    assert out.startswith(f"error: {file}: ")
    assert re.search(words, out), out
    assert len(out.splitlines()) == 1


def test_wrong_files(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(b"[metrics]\naddress = '\xff'\n")
    with pytest.raises(ConfigError, match="expected TOML in UTF-8"):
        read_file(file)
    for path in (tmp_path, tmp_path / "absent.toml"):
        monkeypatch.setenv("LIGHTCACHE_CONFIG", str(path))
        out = typed("metrics", status=2)
        assert re.search(f"error: {path}: expected a settings file that can be read, found:", out)
        assert "correct LIGHTCACHE_CONFIG" in out


def test_a_service_reads_its_own_section_alone(file: Path) -> None:
    """A mistake in another one is no reason not to start; `lightcache config` finds it."""
    file.write_text("[storage]\nbacth = 2\n[metrics]\nport = 1\n")
    assert used("metrics")["port"] == 1
    assert "[storage]: expected one of" in typed("config", status=2)
    assert "[storage]: expected one of" in typed("storage", "x", status=2)


@pytest.mark.parametrize("text", ["[metrcs]\nport = 1\n", "port = 1\n"])
def test_an_unknown_section_keeps_no_service_from_starting(
    file: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"{text}[storage]\nseen = 2\n")
    for name, arguments in (("storage", ["x"]), ("metrics", []), ("create", ["x"])):
        used(name, *arguments)
        said = capsys.readouterr().err
        assert said.startswith(f"warning: {file}: expected the sections [create], [storage], ")
        assert len(said.splitlines()) == 1
    assert "error: " in typed("config", status=2)


def test_config_reads_the_file_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    whole = Path.read_bytes

    def count(path: Path) -> bytes:
        read.append(path)
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", count)
    typed("config")
    assert read == [file]


@pytest.mark.parametrize("text", ["not TOML", "[metrics]\nprot = 1\n"])
def test_help_is_there_where_the_file_is_wrong(file: Path, text: str) -> None:
    file.write_text(text)
    typed("metrics", status=2)
    assert "--textfile" in typed("metrics", "--help")


def test_other_commands_read_no_settings(file: Path) -> None:
    file.write_text("not TOML")
    typed("sweep", "--help")
    typed("ls", "--help")


def test_a_wrong_variable_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets this one for a Service that is called lightcache-metrics."""
    monkeypatch.setenv("LIGHTCACHE_METRICS_PORT", "tcp://10.0.0.1:9464")
    for command in ("metrics", "config"):
        out = typed(command, status=2)
        assert "environment variable LIGHTCACHE_METRICS_PORT" in out


def test_the_first_file_there_is_holds(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, system = tmp_path / "lightcache.toml", tmp_path / "system.toml"
    monkeypatch.setattr("lightcache.tools.settings.SYSTEM_FILE", system)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LIGHTCACHE_CONFIG")
    assert "settings file: none" in typed("config")
    system.write_text("[metrics]\nport = 1\nevery = 2.5\n")
    assert (used("metrics")["port"], used("metrics")["every"]) == (1, 2.5)
    user.write_text("[metrics]\nport = 3\n")
    assert (used("metrics")["port"], used("metrics")["every"]) == (3, 15)  # files are not merged
    monkeypatch.setenv("LIGHTCACHE_CONFIG", str(system))
    assert used("metrics")["port"] == 1


@pytest.mark.parametrize("password", ["QQ", "QQ/QQ", "QQ@QQ", "/QQ@/QQ@", "QQ QQ"])
def test_passwords_are_not_shown(
    file: Path, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    url = f"redis://me:{password}@host/0"
    file.write_text(f'[storage]\nurl = "{url}"\n')
    monkeypatch.setenv("LIGHTCACHE_LIGHTLLM", json.dumps({"storage": url}))
    for out in (typed("config"), typed("config", "--json")):
        assert "QQ" not in out
        assert out.count("redis://...@host/0") == 2


def test_variables_that_nothing_reads_are_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no setting" not in typed("config")
    monkeypatch.setenv("LIGHTCACHE_METRIC_PORT", "1")
    assert "no setting: LIGHTCACHE_METRIC_PORT" in typed("config")
    assert json.loads(typed("config", "--json"))["unknown_variables"] == ["LIGHTCACHE_METRIC_PORT"]


# ---- the guide


def test_the_guide_has_every_setting_with_its_default(file: Path) -> None:
    row = re.compile(r"^\| `([\w-]+)` \| ?(.*?) ?\| `(LIGHTCACHE_\w+)` \|", re.MULTILINE)
    found = {
        (variable, name): default.strip("`")
        for name, default, variable in row.findall(GUIDE.read_text())
    }
    settings = {
        (row["variable"], row["setting"].partition("] ")[2]): row["value"]
        for row in shown().values()
        if row["setting"]
    }
    assert found.keys() == settings.keys()
    for key, value in settings.items():
        said = found[key]
        if isinstance(value, bool):
            assert said == str(value).lower(), key
        elif value not in (None, []):
            assert said == f"{value:g}" if isinstance(value, float) else str(value), key


def test_every_variable_in_the_code_is_in_the_guide() -> None:
    """Those of the build and of the tests are in CONTRIBUTING.md, or set by make."""
    code = "\n".join(
        path.read_text()
        for top in ("lightcache", "shm", "kernels", "tools", "deploy")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".c", ".h", ".service", ".yml", ".yaml", ".toml")
    )
    variables = set(re.findall(r"\bLIGHTCACHE_[A-Z0-9_]*[A-Z0-9]\b", code))
    assert {"LIGHTCACHE_CONFIG", "LIGHTCACHE_SECRET_FILE", "LIGHTCACHE_LIGHTLLM"} <= variables
    assert variables <= set(re.findall(r"LIGHTCACHE_\w+", GUIDE.read_text()))


def test_the_file_of_the_guide_is_taken(file: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    file.write_text(example)
    from_file = {name for name, row in shown().items() if row["from"] == "file"}
    assert len(from_file) == example.count(" = ")
    assert {f"[{name}]" for name in SERVICES} == {name.split()[0] for name in from_file}
