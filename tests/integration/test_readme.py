"""What the README shows works as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from support.waiting import PATIENCE

from envserver.cli.settings import load_settings

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no {language} block"
    return found.group(1)


def test_the_first_environment_has_forty_lines_and_runs(tmp_path: Path) -> None:
    code = block("python")
    assert len(code.splitlines()) <= 40
    (tmp_path / "addition.py").write_text(code)
    command = [sys.executable, "-m", "envserver", "process", "--env", "addition.py"]
    flags = ["--env.digits", "5", "--env.total_steps", "2", "--model", "sim"]
    done = subprocess.run(
        [*command, *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "data" / "addition.jsonl").read_text().splitlines()
    groups = [json.loads(line) for line in lines]
    assert [len(group["tokens"]) for group in groups if "tokens" in group] == [4, 4]


def test_the_settings_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(block("yaml"))
    settings = load_settings(["--config", str(path)], environ={}, folder=tmp_path)
    assert settings.environment == "math"
    assert settings.env.group_size == 8
    assert len(settings.openai.base_urls) == 2
