"""How programs that play agents are started and installed."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from envserver import ConfigError, NotFoundError
from envserver.harnesses import HARNESSES, harness_of
from envserver.harnesses.installing import agents_folder, install, version_in
from envserver.harnesses.programs import Launch, Session
from envserver.rollout_interface import HarnessSpec
from envserver.running.context import chosen_harness
from envserver.settings.runs import HarnessConfig

KEY = "key-of-the-attempt"
SKILL = {"sorting/SKILL.md": "---\nname: sorting\n---\nSort."}


def launched(name: str, instruction: str = "Sort it.", **more: Any) -> Launch:
    command = more.pop("command", "")
    session = Session(
        spec=HarnessSpec(name=name, place="/agent", command=command, arguments=["--more"]),
        home=Path("/tmp/agent"),
        workspace=Path("/work"),
        base_url=f"http://127.0.0.1:9/r/{KEY}/v1",
        api_key=KEY,
        model='a "model"',
        instruction=instruction,
        instruction_file=Path("/tmp/agent/instruction.md"),
        **more,
    )
    return harness_of(name).launch(session)


@pytest.mark.parametrize("name", HARNESSES)
def test_each_is_told_the_proxy_the_model_and_the_task(name: str) -> None:
    launch = launched(name)
    told = json.dumps([launch.argv, launch.env, launch.files])
    assert launch.argv[0].startswith("/agent/")
    assert "--more" in launch.argv
    for part in (f"http://127.0.0.1:9/r/{KEY}", "Sort it.", KEY):
        assert part in told


def test_those_that_know_skills_and_mcp_get_them() -> None:
    for name in ("claude-code", "codex", "opencode"):
        launch = launched(name, mcp_url="http://127.0.0.1:7/secret/mcp", skills=SKILL)
        assert "http://127.0.0.1:7/secret/mcp" in json.dumps([launch.argv, launch.files])
        (place,) = [path for path in launch.files if path.endswith("sorting/SKILL.md")]
        assert launch.files[place] == SKILL["sorting/SKILL.md"]
        assert "--bare" not in launch.argv


def test_configurations_and_commands_are_read_as_they_are_meant() -> None:
    config = tomllib.loads(launched("codex").files[".codex/config.toml"])
    assert config["model"] == 'a "model"'
    assert config["model_providers"]["env"]["stream_max_retries"] == 0
    # What the task says is not replaced in a command.
    launch = launched("command", "Say {api_key}", command="my-agent '{instruction}' {folder}/x")
    assert launch.argv == ["my-agent", "Say {api_key}", "/agent/x", "--more"]


def test_installing_says_what_is_missing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "agents"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(ConfigError, match=r"needs Node\.js, which is not installed"):
        install(harness_of("codex"), folder)
    (programs / "node").write_text("#!/bin/sh\necho v16.20.0\n")
    (programs / "node").chmod(0o755)
    with pytest.raises(ConfigError, match=r"a newer Node\.js than 'v16\.20\.0'"):
        install(harness_of("codex"), folder)
    assert list(folder.iterdir()) == []
    with pytest.raises(NotFoundError, match="not installed in"):
        chosen_harness(HarnessConfig(name="codex", folder=folder), None)


def test_programs_are_found_in_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    place = agents_folder() / "codex"
    assert (place, version_in(place)) == (tmp_path / "envserver/agents/codex", "")
    place.mkdir(parents=True)
    (place / "agent.json").write_text('{"version": "0.169.0"}')
    harness, _ = chosen_harness(HarnessConfig(name="codex"), None)
    assert harness is not None
    assert harness.identity() == {"name": "codex", "version": "0.169.0"}
