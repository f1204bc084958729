"""Environments and reward functions of verifiers itself, of both generations, run unchanged, and
our comparison with it drives both (`make verifiers-peer`).

An environment starts several processes of 6 CPU seconds of imports: one test has them both, the
others are slow.
"""

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl, rollouts_of
from support.foreign_trainers import SUPPORT, told
from support.learning import learning, mean, tiny_model
from support.verifiers_peer import install, refusal

ONE_PROCESS = (
    *("--workers.processes", 1, "--workers.heartbeat_seconds", 30),
    *("--env.ensure_scores_are_not_same", "false"),
)
CLASSIC = ("classic_sums", "classic_shop", "classic_guess")
SERVED = """
environment: verifiers:classic_sums
env:
  args: {count: 100, scored_by: contains}
  group_size: 8
  ensure_scores_are_not_same: false
  reward_range: [0, 0.5]
sampling:
  max_tokens: 32
rollouts:
  max_queued_groups: 12
  max_staleness_at_delivery: 4
workers:
  processes: 1
"""
V1 = ("taskset_sums", "taskset_duel", "taskset_tools")


@pytest.fixture(scope="module")
def home(
    verifiers_classic_python: Path,
    verifiers_v1_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """Both backends, with our packages installed."""
    home = tmp_path_factory.mktemp("home")
    install(verifiers_classic_python, "classic", CLASSIC, home)
    install(verifiers_v1_python, "v1", V1, home)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(home))
        yield home


def played(name: str, folder: Path, *words: object, limit: int = 2) -> list[dict[str, Any]]:
    """The groups that `process` makes of one environment."""
    out = folder / "rows.jsonl"
    asked = ("process", "--env", f"verifiers:{name}", "--model", "sim", "--limit", limit)
    done = envserver(*asked, *ONE_PROCESS, "--out", out, *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(read_jsonl(out))


def test_both_generations_beside_math(home: Path, tmp_path: Path) -> None:
    """A mix of three interpreters; rewards and metrics are those of verifiers, rows are exact."""
    mix = "math=1,verifiers:classic_sums=1,verifiers:taskset_duel=1"
    out = tmp_path / "mix.jsonl"
    words = ("process", "--env", mix, "--model", "sim", "--limit", 6, "--env.group_size", 4)
    done = envserver(*words, *ONE_PROCESS, "--out", out, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = list(read_jsonl(out))
    names = {group["envserver"]["env"] for group in groups}
    assert names == {"math", "classic_sums", "taskset_duel"}, done.stdout + done.stderr
    assert not any(group["envserver"]["failures"] for group in groups)
    # Only calls whose tokens are the engine's own become rows.
    assert all(one["rows"] for one in rollouts_of(groups))

    sums = rollouts_of([one for one in groups if one["envserver"]["env"] == "classic_sums"])
    assert {one["reward"] for one in sums} == {0.0, 0.5}
    assert all(one["reward"] == 0.5 * one["components"]["exact"] for one in sums)
    assert all(one["metrics"] == {"words": 1.0, "num_turns": 1.0} for one in sums)
    assert all(one["agent_metrics"]["stopped_by.max_turns_reached"] == 1 for one in sums)

    duels = [one for one in groups if one["envserver"]["env"] == "taskset_duel"]
    played = rollouts_of(duels)
    assert any(one["rewards"]["player0"] != 0 for one in played)
    assert all(one["rewards"]["player0"] == -one["rewards"]["player1"] for one in played)
    assert all(one["rewards"]["player0"] == one["components"]["player0.points"] for one in played)
    # It has said that one turn is enough for player0, who is asked a second time.
    assert all(one["agent_calls"]["player0"] == [1] for one in played)
    # The host is not trained: it has no rows, and each player has one.
    assert all(one["agents"] == ["player0", "player1"] for one in played)
    for group in duels:
        rewards = [one["rewards"] for one in group["envserver"]["rollouts"]]
        players = ("player0", "player1")
        assert group["scores"] == [one[player] for one in rewards for player in players]


@pytest.mark.slow
def test_a_classic_class_of_its_own_is_scored_where_it_played(home: Path, tmp_path: Path) -> None:
    """Its rubric reads what JSON cannot hold; its reward may exceed 1."""
    done = rollouts_of(played("classic_guess", tmp_path, limit=3))
    assert {one["reward"] for one in done} >= {2.0}
    assert all(one["reward"] in (2.0, 1.0, 2 / 3, 0.0) for one in done)
    assert all(one["output"]["score"] is not None for one in done)


@pytest.mark.slow
def test_a_group_rubric_sees_the_whole_group(home: Path, tmp_path: Path) -> None:
    args = json.dumps({"scored_by": "best_of_group"})
    for group in played("classic_sums", tmp_path, "--env.args", args, limit=6):
        rollouts = group["envserver"]["rollouts"]
        right = [one["output"]["state"]["completion"][-1]["content"] for one in rollouts]
        answer = str(int(group["envserver"]["task_id"]))  # What is 0+N?
        hits = [0.5 * (text == answer) for text in right]
        assert group["scores"] == ([0.0] * len(hits) if all(hits) else hits)


@pytest.mark.slow
def test_a_reward_function_that_raises_is_no_reward_of_0(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    args = json.dumps({"scored_by": "raises"})
    words = ("process", "--env", "verifiers:classic_sums", "--model", "sim", "--limit", 1)
    words += ("--env.args", args, "--rollouts.max_attempts", 1)  # type: ignore[assignment]
    assert envserver(*words, *ONE_PROCESS, "--out", out, folder=tmp_path).returncode != 0
    assert "the judge is gone" in (tmp_path / "rows.failures.jsonl").read_text()
    assert not out.exists() or not list(read_jsonl(out))


@pytest.mark.slow
def test_a_task_set_without_end_is_scored_apart(home: Path, tmp_path: Path) -> None:
    groups = played("taskset_sums", tmp_path, "--env.args", json.dumps({"first": 40}), limit=6)
    done = rollouts_of(groups)
    assert {one["reward"] for one in done} == {0.0, 0.5}
    assert all(one["metrics"] == {"words": 1.0} for one in done)
    # The worker had no answer: its record has only what a model may see.
    assert all("answer" not in one["output"]["traces"][0]["record"]["task"]["data"] for one in done)
    assert groups[0]["messages"][0][0]["content"].startswith("What is 4")


@pytest.mark.slow
def test_a_task_set_with_a_tool_server(home: Path, tmp_path: Path) -> None:
    words = ("--openai.mode", "auto", "--sim.transcript", _transcript(tmp_path))
    (one, *_) = rollouts_of(played("taskset_tools", tmp_path, *words, limit=1))
    assert (one["reward"], one["turns"]) == (1.0, 2)


def _transcript(folder: Path) -> Path:
    call = {"name": "prices_price", "arguments": json.dumps({"item": "apple"})}
    called = {"id": "call-1", "type": "function", "function": call}
    messages = [
        {"role": "user", "content": "What does an apple cost?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call-1", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    path = folder / "transcript.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.mark.slow
def test_what_would_run_programs_is_refused(
    home: Path, verifiers_v1_python: Path, verifiers_classic_python: Path
) -> None:
    said = refusal(verifiers_v1_python, "v1", "taskset_bash", home)
    assert "is the harness 'bash', which runs programs of the model" in said
    said = refusal(verifiers_classic_python, "classic", "classic_python", home)
    assert "is a PythonEnv, which runs programs of the model" in said


@pytest.mark.slow
def test_a_trainer_learns_on_it(
    home: Path, learn_python: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """`serve` and our GRPO trainer, with no line of glue: the environment is a setting."""
    settings = tmp_path / "serve.yaml"
    settings.write_text(SERVED)
    words = ("--serve", settings, "--minutes", 30, "--until-reward", 0.35)
    with learning(learn_python, tiny_model(learn_python), tmp_path / "run", *words) as run:
        assert run.process.end() == 0, run.process.output()[-3000:]
    rewards = run.rewards()
    first, last = mean(rewards[:6]), mean(rewards[-6:])
    tell(f"verifiers, {len(rewards)} steps: reward {first:.2f} -> {last:.2f} of 0.5")
    assert last > first + 0.1


@pytest.mark.slow
def test_evaluate_and_check(home: Path, tmp_path: Path) -> None:
    words = ("--env", "verifiers:classic_sums", "--workers.processes", 1)
    asked = ("evaluate", *words, "--model", "sim", "--env.total_steps", 3, "--out", tmp_path / "e")
    done = envserver(*asked, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "classic_sums" in (tmp_path / "e" / "report.json").read_text()
    done = envserver("check", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_function_pays_on_rows_so_too(verifiers_classic_python: Path, tmp_path: Path) -> None:
    command = (verifiers_classic_python, "-W", "ignore", SUPPORT / "verifiers_rubrics.py")
    found = told(*command, sysconfig.get_path("purelib"), folder=tmp_path)
    for name, pairs in found.items():
        assert all(there == here for there, here in pairs), (name, pairs)
    assert [here for _, here in found["MathRubric"]] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert len({here for _, here in found["XMLParser"]}) > 2


def test_both_generations_play_rollouts_of_five_turns(
    verifiers_classic_python: Path, verifiers_v1_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SUPPORT.with_name("benchmarks"))
    import compare_runs as runs

    monkeypatch.setattr(runs, "VERIFIERS", verifiers_classic_python)
    monkeypatch.setattr(runs, "VERIFIERS_V1", verifiers_v1_python)
    with runs.engine() as url:
        for how in (runs.by_verifiers, runs.by_verifiers_v1):
            ran = runs.play(how, url, runs.Work(4, 5, 4, 3))
            assert (ran.whole, ran.hung) == (4, False)
