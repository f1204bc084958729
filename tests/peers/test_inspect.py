"""Inspect tasks as environments, with the real inspect-ai (`make inspect-peer`).

Each command starts several processes of two CPU seconds of imports: the dearer half is slow.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.backends import install
from support.commands import envserver, read_jsonl

TASKS = Path(__file__).parents[1] / "support" / "inspect_tasks" / "tasks.py"
NAMES = ("questions", "files", "unscorable", "told")
EVALUATION = "inspect:inspect_evals/agent_threat_bench_memory_poison"
ONE_PROCESS = ("--workers.processes", 1, "--rollouts.scorer_processes", 1)
WRITE = {"name": "bash", "arguments": '{"command": "cat state.txt; pwd; echo 42 > answer.txt"}'}


@pytest.fixture(scope="module")
def home(inspect_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installed: the tasks of tests/support/inspect_tasks, and one of inspect_evals."""
    place = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(place))
        references = [f"inspect:{TASKS}@{name}" for name in NAMES]
        install(inspect_python, "inspect", *references, EVALUATION)
    return place


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    return tmp_path


def script(folder: Path, question: str, *turns: str | dict[str, str]) -> Path:
    """Writes what the simulated engine says: texts, and calls of tools."""
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        if isinstance(turn, str):
            messages.append({"role": "assistant", "content": turn})
            continue
        call = {"id": f"c{number}", "type": "function", "function": turn}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": ""},
        ]
    path = folder / "script.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": question}, *messages]}))
    return path


def process(folder: Path, task: str, *words: object) -> list[dict[str, Any]]:
    """Returns the groups of one `process` of two rollouts."""
    reference = task if ":" in task else f"inspect:{TASKS}@{task}"
    done = envserver(
        *("process", "--env", reference, "--model", "sim", "--out", "rows.jsonl"),
        *("--env.group_size", 2, "--env.total_steps", 1, *ONE_PROCESS, *words),
        folder=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_jsonl(folder / "rows.jsonl")


def test_questions_are_scored_by_weighted_scorers_outside_of_the_worker(folder: Path) -> None:
    weights = '{"includes": 1, "graded_parts/short": 1}'
    (group,) = process(folder, "questions", "--env.weights", weights, "--sim.solve_probability", 1)
    assert group["scores"] == [0.75, 0.75]
    for rollout in group["envserver"]["rollouts"]:
        assert rollout["components"] == {
            "includes": 1.0,
            "graded_parts/right": 1.0,
            "graded_parts/short": 0.5,
            "graded_parts/unit": 1.0,
        }
        assert "target" not in json.dumps(rollout["output"]) and not rollout["output"]["values"]
    (prompt, answer) = group["messages"][0]
    assert prompt["content"].endswith(("Count apples.", "Count pears."))  # metadata of the sample
    assert answer["role"] == "assistant"
    assert_exact(group)


def assert_exact(group: dict[str, Any]) -> None:
    """One row for each rollout, whose trained tokens have logprobs."""
    assert [one["rows"] for one in group["envserver"]["rollouts"]] == [[0], [1]]
    for one in group["envserver"]["rollouts"]:
        assert one["flags"] == [] and one["row_flags"] == [[]]
    for tokens, mask, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        trained = [place for place, token in enumerate(mask) if token != -100]
        assert trained and [mask[place] for place in trained] == [
            tokens[place] for place in trained
        ]
        assert all(logprobs[place] < 0 for place in trained)


def test_a_sandbox_task_runs_in_our_sandbox_and_is_scored_there(folder: Path) -> None:
    said = script(folder, "Write 42 into answer.txt.", WRITE, "Done.")
    (group,) = process(folder, "files", "--sim.transcript", said)
    assert group["scores"] == [1.0, 1.0]
    assert group["messages"][0][2]["content"] == "ready\n/work\n"
    assert_exact(group)
    for rollout in group["envserver"]["rollouts"]:
        assert rollout["usage"]["sandbox"]["executions"] > 0
    # The limit of the task ends it after the tool has run; then it is scored.
    limited = process(
        *(folder, "files", "--sim.transcript", said, "--overwrite"),
        *("--env.args", '{"message_limit": 2}'),
    )
    assert limited[0]["scores"] == [1.0, 1.0]
    assert {one["turns"] for one in limited[0]["envserver"]["rollouts"]} == {1}
    assert {one["limit"] for one in limited[0]["envserver"]["rollouts"]} == {"turns"}


@pytest.mark.slow
def test_a_docker_sandbox_is_a_container_of_its_image(folder: Path, docker_image: str) -> None:
    command = "cat state.txt; ls -d /.dockerenv /run/.containerenv; pwd; echo 42 > answer.txt"
    call = {"name": "bash", "arguments": json.dumps({"command": command})}
    (group,) = process(
        *(folder, "files", "--env.args", '{"kind": "docker"}', "--env.image", docker_image),
        *("--sandbox.backend", "docker", "--sandbox.docker_image", docker_image),
        *("--sim.transcript", script(folder, "Write 42 into answer.txt.", call, "Done.")),
    )
    assert group["scores"] == [1.0, 1.0]
    for messages in group["messages"]:
        told = messages[2]["content"]
        assert "ready" in told and "/work" in told
        assert "/.dockerenv\n" in told or "/run/.containerenv\n" in told
    assert_exact(group)


def refused(folder: Path, task: str, *words: object) -> str:
    """Returns what a `process` says that writes no group."""
    done = envserver(
        *("process", "--env", f"inspect:{TASKS}@{task}", "--model", "sim", *ONE_PROCESS, *words),
        *("--env.total_steps", 1, "--env.group_size", 2, "--rollouts.max_attempts", 1),
        *("--out", "none.jsonl", "--overwrite"),
        folder=folder,
    )
    assert done.returncode != 0
    assert not (folder / "none.jsonl").exists() or not read_jsonl(folder / "none.jsonl")
    return done.stdout + done.stderr


def test_an_error_in_a_scorer_is_never_a_reward(folder: Path) -> None:
    assert "the grader's library is missing" in refused(folder, "unscorable")


@pytest.mark.slow
def test_what_cannot_be_run_is_said(folder: Path) -> None:
    assert "--env.scoring rollout" in refused(folder, "told")
    assert "--env.weights must name scorers" in refused(folder, "questions")
    assert "kind 'k8s'" in refused(folder, "files", "--env.args", '{"kind": "k8s"}')


@pytest.mark.slow
def test_a_solver_may_have_the_target_where_the_rollout_scores(folder: Path) -> None:
    (group,) = process(folder, "told", "--env.scoring", "rollout", "--sim.solve_probability", 1)
    assert "(It is 2.)" in group["messages"][0][0]["content"]
    assert group["scores"] == [1.0, 1.0]


@pytest.mark.slow
def test_a_task_of_inspect_evals_runs(folder: Path) -> None:
    (group,) = process(folder, EVALUATION)
    assert len(group["scores"]) == 2
