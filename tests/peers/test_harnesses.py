"""Claude Code, Codex, OpenCode, mini-swe-agent and smolagents (`make agents`) play our environments
(`--agent`), in the sandbox without a network, for at least five turns; two of them get an
environment's tools by MCP.
"""

import os
import shutil
from pathlib import Path

import pytest
from support import mcp_desk
from support.process_tree import command, descendants

import envserver
from envserver import Trajectory
from envserver.harnesses import HARNESSES
from envserver.harnesses.installing import version_in

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


@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode"])
def test_a_limit_ends_a_program(name: str) -> None:
    (trajectory,) = played(name, "Repairs", 1, max_turns=2)
    assert (trajectory.limit, trajectory.turns) == ("turns", 2)


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


def program(name: str) -> str:
    """Returns the path of a program in `.agents` or on PATH; skips the test without it."""
    installed = map(str, (ROOT / ".agents").glob("*/node_modules/.bin"))
    folders = [*os.environ["PATH"].split(os.pathsep), *installed]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is missing: make agents")
    return found
