"""Claude Code, Codex and OpenCode, headless, with their default settings, against one attempt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.sdk_house import Seat
from support.sim import call

from .waiting import PATIENCE

ROOT = Path(__file__).parents[2]
TASK = "Write hello into done.txt, five times over."
CODEX = """
model = "{model}"
model_provider = "env"
[model_providers.env]
name = "env"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
PACKAGES = {
    "claude": "@anthropic-ai/claude-code@2.1.197",
    "codex": "@openai/codex@0.169.0",
    "opencode": "opencode-ai@1.18.33",
}
_LINE = "echo hello >> done.txt"
WRITES = {
    "claude": call("Bash", {"command": _LINE, "description": "Write."}),
    "codex": call("exec_command", {"cmd": _LINE}),
    "opencode": call("bash", {"command": _LINE, "description": "Write."}),
}
"""The call with which each writes a line."""


def program(name: str) -> str:
    """Returns the path of a program in `.agents` or on PATH; skips the test without it."""
    installed = map(str, (ROOT / ".agents").glob("*/node_modules/.bin"))
    folders = [*os.environ["PATH"].split(os.pathsep), *installed]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is missing: make agents")
    return found


def play(name: str, seat: Seat, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program on `TASK` in `folder`/work, which it begins empty, as its home is."""
    work, home = folder / "work", folder / "home"
    shutil.rmtree(folder, ignore_errors=True)
    for path in (work, home):
        path.mkdir(parents=True)
    command, variables = {"claude": _claude, "codex": _codex, "opencode": _opencode}[name](
        seat, home
    )
    return subprocess.run(
        [program(name), *command],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def _claude(seat: Seat, home: Path) -> tuple[list[str], dict[str, str]]:
    words = ["-p", TASK, "--output-format", "json", "--dangerously-skip-permissions"]
    return words, {
        "ANTHROPIC_BASE_URL": seat.url,
        "ANTHROPIC_API_KEY": seat.attempt.key,
        "ANTHROPIC_MODEL": seat.model,
        "IS_SANDBOX": "1",  # it asks for it where it runs as root
    }


def _codex(seat: Seat, home: Path) -> tuple[list[str], dict[str, str]]:
    (home / "config.toml").write_text(CODEX.format(model=seat.model, url=seat.url))
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    variables = {"CODEX_HOME": str(home), "OPENAI_API_KEY": seat.attempt.key}
    return [*words, "--json", TASK], variables


def _opencode(seat: Seat, home: Path) -> tuple[list[str], dict[str, str]]:
    limit = {"context": 131_072, "output": 4096}
    name = f"env/{seat.model}"
    settings = {
        "model": name,
        "small_model": name,
        "permission": {"*": "allow"},
        "provider": {
            "env": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{seat.url}/v1", "apiKey": seat.attempt.key},
                "models": {seat.model: {"limit": limit}},
            }
        },
    }
    folder = home / ".config/opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps(settings))
    offline = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return ["run", "--format", "json", TASK], offline
