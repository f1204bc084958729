"""The alias of the smolagents integration has its defaults, and says which it used."""

from __future__ import annotations

from pathlib import Path

import pytest
from envserver_environments.smolagents_integration import set_earlier_defaults


def test_the_earlier_defaults_of_the_smolagents_integration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GAIA where it was downloaded, web tools where the key is set; else a line says what runs."""
    words = ["process", "--env.total_steps", "2"]
    none: dict[str, str] = {}
    set_earlier_defaults(words, none, tmp_path)
    assert none == {"ENVSERVER_ENV__FILES": "true"}
    assert "GAIA is not in data/gaia" in capsys.readouterr().err
    (tmp_path / "data" / "gaia").mkdir(parents=True)
    made = {"TAVILY_API_KEY": "k"}
    set_earlier_defaults(words, made, tmp_path)
    assert made.pop("TAVILY_API_KEY")
    assert made == {
        "ENVSERVER_ENV__DATA_SET": "gaia",
        "ENVSERVER_ENV__SPLIT": "validation",
        "ENVSERVER_ENV__FILES": "true",
        "ENVSERVER_ENV__WEB": "live",
        "ENVSERVER_ENV__WEB_DEPTH": "advanced",
    }
    chosen = {"ENVSERVER_ENV__WEB": "none", "ENVSERVER_ENV__FILES": "no", "TAVILY_API_KEY": "k"}
    own = dict(chosen)
    set_earlier_defaults([*words, "--env.data_set=sample"], own, tmp_path)
    assert own == chosen
