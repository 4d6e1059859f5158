"""What `lightcache doctor` says of logind, which may remove a user's caches."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from lightcache.tools.doctor import Level, logout

NAME = pwd.getpwuid(os.getuid()).pw_name


def machine(root: Path, **files: str) -> Path:
    """A machine with systemd, whose logind has these files."""
    (root / "run/systemd/system").mkdir(parents=True)
    for name, content in files.items():
        folder = root / ("etc/systemd" if name == "logind" else "etc/systemd/logind.conf.d")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.conf").write_text(f"[Login]\n{content}\n")
    return root


@pytest.mark.parametrize(
    ("files", "level"),
    [
        ({}, Level.WARNING),
        ({"logind": "#RemoveIPC=no"}, Level.WARNING),
        ({"logind": "RemoveIPC=yes"}, Level.WARNING),
        ({"logind": "RemoveIPC=no"}, Level.OK),
        ({"logind": "RemoveIPC=no", "zz": "RemoveIPC=yes"}, Level.WARNING),
        ({"b": "RemoveIPC=no", "a": "RemoveIPC=yes"}, Level.OK),
    ],
)
def test_a_user_who_logs_in(tmp_path: Path, files: dict[str, str], level: Level) -> None:
    (found,) = logout(machine(tmp_path, **files), user=12345678)
    assert found.level is level
    assert bool(found.remedy) == (level is Level.WARNING)


def test_system_users_and_machines_without_systemd_keep_theirs(tmp_path: Path) -> None:
    assert logout(tmp_path, user=12345678)[0].level is Level.OK
    assert logout(machine(tmp_path), user=999)[0].level is Level.OK


def test_a_user_who_lingers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path)
    monkeypatch.setattr("lightcache.tools.doctor._FIRST_USER", 0)
    assert logout(tmp_path, user=os.getuid())[0].level is Level.WARNING
    linger = tmp_path / "var/lib/systemd/linger"
    linger.mkdir(parents=True)
    (linger / NAME).touch()
    assert logout(tmp_path, user=os.getuid())[0].level is Level.OK
