"""The command that installs an extra fits the way in which the package was installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from envserver_records import extras
from envserver_records.extras import CLIENTS, install_command, missing_module_hint


class Installed:
    def __init__(self, origin: dict[str, object] | None) -> None:
        self._origin = origin
        self.requires = ["msgspec>=0.18", 'smol_agents>=1; extra == "gaia"', "b; extra == 'all'"]
        self.requires = [line.replace('"', "'") for line in self.requires]

    def read_text(self, name: str) -> str | None:
        return None if self._origin is None else json.dumps(self._origin)


def install(monkeypatch: pytest.MonkeyPatch, root: Path | None, *, editable: bool) -> None:
    def found(project: str) -> Installed:
        if root is None:
            return Installed(None)
        folder = root / "clients" if project == CLIENTS else root
        return Installed({"url": folder.as_uri(), "dir_info": {"editable": editable}})

    monkeypatch.setattr(extras, "distribution", found)


def test_the_command_fits_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "my checkout"
    (root / "clients").mkdir(parents=True)
    monkeypatch.chdir(root)
    install(monkeypatch, None, editable=False)
    assert install_command("gaia") == "pip install 'envserver[gaia]'"
    assert install_command("train", CLIENTS) == "pip install 'envserver-clients[train]'"
    install(monkeypatch, root, editable=True)
    assert install_command("gaia") == "pip install -e clients -e '.[gaia]'"
    assert install_command("train", CLIENTS) == "pip install -e 'clients[train]'"
    install(monkeypatch, root, editable=False)
    assert install_command("gaia") == "pip install ./clients '.[gaia]'"
    monkeypatch.chdir(tmp_path.parent)
    assert install_command("gaia").endswith(f"'./{tmp_path.name}/my checkout[gaia]'")
    monkeypatch.chdir("/")
    install(monkeypatch, root, editable=True)
    assert f"'{str(root)[1:]}[gaia]'" in install_command("gaia")


def test_a_module_of_an_extra_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None, editable=False)
    hint = missing_module_hint("smol_agents.models")
    assert hint == "pip install 'envserver[gaia]' installs it."
    assert "pip" not in missing_module_hint("smol")
    assert "pip" not in missing_module_hint("helpers")
