"""Claude Code, Codex, OpenCode, mini-swe-agent and smolagents (`make agents`) play our environments
(`--agent`), in the sandbox without a network, for at least five turns; two of them get an
environment's tools by MCP, three ask the proxy with their default settings.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import mcp_desk
from support.process_tree import command, descendants
from support.sdk_house import SdkHouse, Seat, sim_house
from support.sim import call, said
from support.waiting import PATIENCE

import envserver
from envserver import Trajectory
from envserver.harnesses import HARNESSES
from envserver.harnesses.installing import version_in
from envserver.tokens import build

pytestmark = pytest.mark.peer
ROOT = Path(__file__).parents[2]
AGENTS = ROOT / ".agents"
TASKS = ROOT / "tests/support/harness_swe.py"
SHELLS = {
    "claude-code": "Bash:command",
    "codex": "exec_command:cmd",
    "opencode": "bash:command",
    "mini-swe-agent": "bash:command",
    "smolagents": "code:bash",
}
SCENARIO = """\
prompt: Write what can be reached into net.txt.
files: {notes.txt: "Nothing yet."}
checks: [{file: net.txt, equals: "nothing"}, {file: notes.txt, contains: "Nothing"}]
"""
TASK_FOLDER = {
    "task.toml": "[environment]\ncpus = 1\n",
    "instruction.md": "Write the sum of /app/numbers.txt into /app/total.txt.",
    "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY numbers.txt /app/\n",
    "environment/numbers.txt": "1\n2\n3\n",
    "tests/test.sh": 'test "$(cat total.txt)" = 6; echo $((1 - $?)) > /logs/verifier/reward.txt',
    "solution/solve.sh": "awk '{ sum += $1 } END { print sum }' numbers.txt > /app/total.txt",
}
LOOKS = (
    "python3 -c \"import socket; socket.create_connection(('1.1.1.1', 443), 2)\" 2> why.txt"
    " || echo nothing > net.txt"
)


def played(name: str, kind: str, group_size: int, **env: object) -> list[Trajectory]:
    """Plays one task with a program; returns its rollouts."""
    if not version_in(AGENTS / name):
        pytest.skip(f"{name} is missing: make agents")
    result = envserver.process(
        f"{TASKS}:{kind}",
        model="sim",
        env={
            "total_steps": 1,
            "group_size": group_size,
            "shell": SHELLS[name],
            "ends_by_command": name == "mini-swe-agent",
            "max_token_length": 100_000,
            "worker_timeout": 600,
            **env,
        },
        sim={"solve_probability": 1.0, "openers": False},
        rollouts={"max_attempts": 1},
        agent={"name": name, "folder": AGENTS},
    )
    (group,) = result.groups
    assert group.provenance["agent"] == {"name": name, "version": version_in(AGENTS / name)}
    return group.trajectories


def check(trajectory: Trajectory) -> None:
    """Checks that a rollout is right and in one row, and that it left nothing."""
    (step,) = [one for one in trajectory.actions if one["tool"] == "agent"]
    told = step["output"]
    assert (told["ending"], trajectory.score.reward) == ("finished", 1.0), told
    assert trajectory.turns >= 5
    assert len(trajectory.sequences) == 1
    assert "Authorization" not in told["output"]
    assert not [pid for pid in descendants(os.getpid()) if "/agent/" in command(pid)]


@pytest.mark.parametrize("name", HARNESSES)
def test_a_program_repairs_a_repository(name: str) -> None:
    for trajectory in played(name, "Repairs", 1 if name == "opencode" else 2):
        check(trajectory)
        assert trajectory.output["patch"].startswith("diff --git")


@pytest.mark.parametrize("name", ["claude-code", "codex"])
def test_a_program_writes_a_function(name: str) -> None:
    (trajectory,) = played(name, "Programs", 1)
    check(trajectory)
    assert "def " in trajectory.output["code"]


def test_a_program_answers_a_question_with_a_file() -> None:
    (trajectory,) = played("claude-code", "Assistance", 1, max_turns=30)
    check(trajectory)
    assert trajectory.output["answer"].startswith("FINAL ANSWER: ")


def test_a_program_solves_a_task_folder_of_harbor(tmp_path: Path) -> None:
    for path, text in TASK_FOLDER.items():
        file = tmp_path / "sums" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (trajectory,) = played("codex", "Folders", 1, images=False, tasks_folder=str(tmp_path))
    check(trajectory)


def test_a_program_searches_with_the_tools_of_an_environment_over_mcp() -> None:
    (trajectory,) = played("codex", "Questions", 1, shell="mcp__env__search:query")
    check(trajectory)
    found = [str(one["content"]) for one in trajectory.messages if one["role"] == "tool"]
    assert len(found) == 4
    assert all("[p1]" in text for text in found)
    assert trajectory.metrics["searches"] == 4


@pytest.mark.parametrize("name", ["claude-code", "codex", "mini-swe-agent"])
def test_a_program_works_in_a_folder_and_reaches_no_network(name: str, tmp_path: Path) -> None:
    scenario = tmp_path / "reach.yaml"
    scenario.write_text(SCENARIO)
    commands = ["ls", "cat notes.txt", "id", LOOKS, "cat net.txt why.txt"]
    (trajectory,) = played(name, "Errands", 1, scenario=[str(scenario)], commands=commands)
    check(trajectory)
    assert "unreachable" in str(trajectory.messages[-3:])


# An environment's tools over MCP; the model calls go through the proxy


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_an_agent_that_speaks_mcp_uses_our_tools(name: str) -> None:
    made = envserver.process(
        mcp_desk.__file__,
        model="sim",
        env={
            "total_steps": 1,
            "group_size": 1,
            "max_token_length": 32_768,
            "program": program(name),
        },
        sim={"solve_probability": 1.0, "openers": False},
    )
    (trajectory,) = made.groups[0].trajectories
    results = [one["content"] for one in trajectory.messages if one["role"] == "tool"]
    told = [text.partition("Output:\n")[2] or text for text in results]  # Codex says how long
    assert told == [
        "amber",
        "Error: the arguments of save_answer are not valid: Expected `str`, got `int` - at "
        "`answer`.",
        "Saved amber.",
    ], trajectory.output
    assert trajectory.score.reward == 1.0
    assert len(trajectory.sequences) == 1 and trajectory.metrics["tool_errors"] == 1


# Programs with their default settings, against the proxy and the simulated engine: exact tokens,
# one row for the conversation, and an end at a limit


ERRAND = "Write hello into done.txt, five times over."
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
    """Runs a program on `ERRAND` in `folder`/work, which it begins empty, as its home is."""
    work, home = folder / "work", folder / "home"
    shutil.rmtree(folder, ignore_errors=True)
    for path in (work, home):
        path.mkdir(parents=True)
    command_of = {"claude": _claude, "codex": _codex, "opencode": _opencode}[name]
    command, variables = command_of(seat, home)
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
    words = ["-p", ERRAND, "--output-format", "json", "--dangerously-skip-permissions"]
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
    return [*words, "--json", ERRAND], variables


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
    return ["run", "--format", "json", ERRAND], offline


WRITING = 5
SIDE_CALLS = {"claude": 1, "codex": 0, "opencode": 1}
"""Titles that each asks for."""


@pytest.fixture(scope="module")
def house() -> Iterator[SdkHouse]:
    with sim_house() as house:
        yield house


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Codex warns in /tmp.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path) / "rollout"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_program_writes_a_file_in_one_row(house: SdkHouse, name: str, folder: Path) -> None:
    program(name)
    openings = []
    for _ in range(2 if name == "claude" else 1):
        turns = [*[said("Writing.", WRITES[name])] * WRITING, said("It is done.")]
        with house.seat(*turns, max_tokens=4000, seconds=600) as seat:
            ran = play(name, seat, folder)
            assert "It is done." in ran.stdout, ran
            assert (folder / "work/done.txt").read_text() == "hello\n" * WRITING
            side = [call for call in seat.calls if call.agent == "side"]
            main = [call for call in seat.calls if call.agent is None]
            assert (len(side), len(main)) == (SIDE_CALLS[name], WRITING + 1)
            assert not any(call.trained for call in side)
            assert all(call.exact and call.trained and not call.flags for call in main)
            (row,) = build(main)
            assert int(row.mask.sum()) == sum(len(call.completion_ids) for call in main)
            assert all(one.status == 200 for one in seat.exchanges), [
                (one.path, one.status, one.content) for one in seat.exchanges
            ]
            openings.append(main[0].prompt_ids.tolist())
    assert openings[0] == openings[-1]  # rollouts of a group have the same prompt


@pytest.mark.parametrize("name", PACKAGES)
def test_a_limit_ends_a_program_at_its_first_refusal(
    house: SdkHouse, name: str, folder: Path
) -> None:
    program(name)
    with house.seat(*[said("Writing.", WRITES[name])] * 4, max_turns=2, seconds=600) as seat:
        ran = play(name, seat, folder)
        assert "All 2 turns of this rollout are used up." in ran.stdout + ran.stderr
        statuses = [one.status for one in seat.exchanges if "/v1/" in one.path]
        assert statuses.count(400) == 1 and statuses[-1] == 400
        assert len([call for call in seat.calls if call.trained]) == 2
        assert seat.attempt.limit == "turns"
