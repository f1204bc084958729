"""`envserver process`: groups in a file, whatever happens to engine, agents or the process."""

from __future__ import annotations

import math
import resource
import signal
from pathlib import Path

import pytest
from support.commands import envserver, group_ids, read_jsonl, running, until

OWN_ENVIRONMENT = '''
import os, signal, time
from envserver import Environment, Score, Task

class Echo(Environment):
    """Say the number; some tasks break the agent on purpose."""

    class Config(Environment.Config):
        tasks_in_all: int = 6
        broken: str = ""

    def tasks(self, split):
        for n in range(self.config.tasks_in_all):
            yield Task(f"echo-{n}", {"question": f"Say {n}."}, {"answer": str(n)})

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["answer"]}]

    def rollout(self, task, run):
        if self.config.broken == "raises":
            raise ValueError("no such tool")
        if self.config.broken == "hangs":
            time.sleep(60)
        if self.config.broken == "kills itself":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.config.broken == "once" and run.attempt == 1:
            raise RuntimeError("first try")
        run.log_metric("attempts", run.attempt)
        try:
            reply = run.chat_blocking([{"role": "user", "content": task.public["question"]}])
        except Exception:
            if self.config.broken == "swallows":
                return "no idea"
            raise
        return reply.content

    def score(self, task, result):
        if self.config.broken == "unscorable":
            return Score(reward=None)
        return Score(reward=float(task.hidden["answer"] in (result.output or "").split()))
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "echo.py"
    path.write_text(OWN_ENVIRONMENT)
    return path


SIM = ("--model", "sim", "--sim.latency_seconds", 0)


def test_math_groups_have_atropos_keys_and_exact_rows(tmp_path: Path) -> None:
    ran = envserver(
        "process", "--env", "math", *SIM, "--env.total_steps", 4, "--env.group_size", 3,
        "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "out.jsonl" in ran.stderr
    assert "simulated" in ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    assert len(groups) == 4
    for group in groups:
        facts = group["envserver"]
        assert [rollout["rollout_id"] for rollout in facts["rollouts"]] == [
            f"{facts['group_id']}-r{number}" for number in range(3)
        ]
        rows = len(group["tokens"])
        assert rows == len(group["masks"]) == len(group["scores"]) == len(group["messages"])
        for tokens, masks, logprobs in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], strict=True
        ):
            assert len(tokens) == len(masks) == len(logprobs)
            for token, mask, logprob in zip(tokens, masks, logprobs, strict=True):
                trained = mask != -100
                assert mask in (-100, token)
                assert (logprob <= 0 and math.isfinite(logprob)) if trained else logprob == 1.0
            assert any(mask != -100 for mask in masks)
        assert {"overrides", "advantages", "generation_params", "images"} <= group.keys()
        assert set(group["scores"]) <= {0.0, 1.0}


def test_an_environment_in_a_file_runs(own: Path, tmp_path: Path) -> None:
    ran = envserver("process", "--env", own, *SIM, "--sim.solve_probability", 1, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "data" / "echo.jsonl")
    assert sorted(group["envserver"]["task_id"] for group in groups) == [
        f"echo-{n}" for n in range(6)
    ]
    assert all(score == 1.0 for group in groups for score in group["scores"])


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_and_resumed_it_writes_the_same_groups(
    own: Path, tmp_path: Path, kills: int
) -> None:
    total = 5 * (kills + 2)
    words = (
        "process", "--env", own, *SIM, "--sim.seconds_per_token", 0.01, "--env.total_steps", total,
        "--rollouts.max_concurrent", 8, "--env.data_path_to_save_groups", "out.jsonl", "--resume",
    )  # fmt: skip
    output = tmp_path / "out.jsonl"
    for wanted in range(2, 5 * kills, 5):
        with running(*words, folder=tmp_path) as process:
            until(
                lambda wanted=wanted: output.exists() and len(group_ids_so_far(output)) >= wanted,
                process.output,
                alive=process.process,
            )
            process.kill()
        with output.open("ab") as file:
            file.write(b'{"tokens": [[1, 2')  # what a write that was cut off leaves
    ran = envserver(*words, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = group_ids(output)
    assert len(found) == len(set(found)) == total
    undisturbed = envserver(*words[:-2], "undisturbed.jsonl", folder=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert set(found) == set(group_ids(tmp_path / "undisturbed.jsonl"))


def group_ids_so_far(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def test_one_interrupt_finishes_open_groups_and_resume_goes_on(own: Path, tmp_path: Path) -> None:
    words = (
        "process", "--env", own, *SIM, "--sim.seconds_per_token", 0.01, "--env.total_steps", 30,
        "--rollouts.max_concurrent", 8, "--env.data_path_to_save_groups", "out.jsonl",
    )  # fmt: skip
    output = tmp_path / "out.jsonl"
    with running(*words, folder=tmp_path) as process:
        until(lambda: output.exists() and output.stat().st_size, process.output)
        process.send(signal.SIGINT)
        assert process.end() == 130
        assert "--resume" in process.output()
    written = group_ids(output)
    assert 0 < len(written) < 30
    assert envserver(*words, "--resume", folder=tmp_path).returncode == 0
    assert len(set(group_ids(output))) == 30
    assert group_ids(output)[: len(written)] == written


@pytest.mark.parametrize("times", [1, 2])
def test_a_stop_does_not_wait_for_tasks_that_are_being_loaded(tmp_path: Path, times: int) -> None:
    own = tmp_path / "echo.py"
    loading = "for n in range(self.config.tasks_in_all):\n            n and time.sleep(600)"
    own.write_text(OWN_ENVIRONMENT.replace("for n in range(self.config.tasks_in_all):", loading, 1))
    output = tmp_path / "out.jsonl"
    words = ("process", "--env", own, *SIM, "--env.data_path_to_save_groups", output)
    with running(*words, folder=tmp_path) as process:
        until(lambda: output.exists() and output.stat().st_size, process.output)
        for _ in range(times):
            process.send(signal.SIGINT)
        assert process.end() == 130
    assert len(group_ids(output)) == 1


def test_an_output_that_exists_is_not_touched(own: Path, tmp_path: Path) -> None:
    output = tmp_path / "data" / "echo.jsonl"
    words = ("process", "--env", own, *SIM, "--env.total_steps", 1)
    assert envserver(*words, folder=tmp_path).returncode == 0
    before = output.read_bytes()
    ran = envserver(*words, folder=tmp_path)
    assert (ran.returncode, output.read_bytes()) == (2, before)
    assert "--resume" in ran.stderr
    ran = envserver(*words, "--resume", "--env.seed", 7, folder=tmp_path)
    assert (ran.returncode, output.read_bytes()) == (2, before)
    assert "another run" in ran.stderr


def test_resume_cuts_off_only_what_it_wrote(own: Path, tmp_path: Path) -> None:
    output = tmp_path / "data" / "echo.jsonl"
    words = ("process", "--env", own, *SIM, "--env.total_steps", 2)
    assert envserver(*words, folder=tmp_path).returncode == 0
    written, ids = output.read_bytes(), group_ids(output)
    for others in (b"my notes", b'{"model": "qwen"}', written + b"my notes"):
        output.write_bytes(others)
        ran = envserver(*words, "--resume", folder=tmp_path)
        assert (ran.returncode, output.read_bytes()) == (2, others)
        assert "was not written by" in ran.stderr
    for torn in (written[:3], written[:-1]):
        output.write_bytes(torn)
        assert envserver(*words, "--resume", folder=tmp_path).returncode == 0
        assert sorted(group_ids(output)) == sorted(ids)


def test_two_models_are_not_mixed_in_one_file(own: Path, tmp_path: Path) -> None:
    output = tmp_path / "data" / "echo.jsonl"
    words = ("process", "--env", own, *SIM, "--env.total_steps", 1)
    assert envserver(*words, folder=tmp_path).returncode == 0
    others = output.read_bytes().replace(b'"model":"sim"', b'"model":"qwen"')
    output.write_bytes(others)
    ran = envserver(*words, "--resume", folder=tmp_path)
    assert (ran.returncode, output.read_bytes()) == (2, others)
    assert "holds groups of the model qwen; this run's is sim" in ran.stderr


@pytest.mark.parametrize(
    ("broken", "kind", "words"),
    [
        ("raises", "agent_error", "no such tool"),
        ("kills itself", "worker_died", "SIGKILL"),
        pytest.param("unscorable", "unscorable", "no reward", marks=pytest.mark.thorough),
        pytest.param("hangs", "worker_hung", "went on after it", marks=pytest.mark.thorough),
    ],
)
def test_when_everything_fails_it_stops_and_says_why(
    own: Path, tmp_path: Path, broken: str, kind: str, words: str
) -> None:
    timeout_seconds = 2 if broken == "hangs" else 60  # a busy machine is slow
    ran = envserver(
        "process", "--env", own, *SIM, "--env.broken", broken, "--env.total_steps", 50,
        "--env.group_size", 2, "--rollouts.max_attempts", 2,
        "--env.worker_timeout", timeout_seconds,
        "--workers.kill_grace_seconds", 0.5, "--rollouts.stop_after_failed_groups", 2,
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    assert kind in ran.stderr
    failures = read_jsonl(tmp_path / "data" / "echo.failures.jsonl")
    failed = [line for line in failures if line["event"] == "rollout_failed"]
    at_fault = [line for line in failed if not line["detail"].get("mate")]
    assert {line["kind"] for line in at_fault} == {kind}
    assert any(words in line["message"] for line in failed)
    assert any(line["final"] for line in failed)


BUG = "A bug in the environment: "
BUGGY = """
from envserver import ConfigError, Environment, Score, Task

class Buggy(Environment):
    class Config(Environment.Config):
        bug: str = ""

    def tasks(self, split):
        yield from (Task(f"t{n}", {"n": n}) for n in range(20))

    async def rollout(self, task, run):
        if self.config.bug == "module":
            import smolagents_of_nobody
        if self.config.bug == "setup":
            raise ConfigError("No key is set.", hint="Set one.")
        if self.config.bug == "one task" and task.public["n"] == 0:
            return undefined_name
        return "" if self.config.bug != "code" else None + 1

    def score(self, task, result):
        return Score(reward=1.0 if self.config.bug != "scorer" else result.output.reward)
"""


@pytest.mark.parametrize(
    ("bug", "blame", "message"),
    [
        ("code", BUG, "TypeError: unsupported operand type(s) for +: 'NoneType' and 'int' ("),
        ("setup", "The environment cannot run: ", "No key is set. Set one."),
        ("module", BUG, "ModuleNotFoundError: No module named 'smolagents_of_nobody' ("),
        ("scorer", BUG, "AttributeError: 'str' object has no attribute 'reward' ("),
    ],
)
def test_a_bug_of_the_environment_ends_each_group_at_its_first_occurrence(
    tmp_path: Path, bug: str, blame: str, message: str
) -> None:
    (tmp_path / "buggy.py").write_text(BUGGY)
    words = ("process", "--env", "buggy.py", *SIM, "--rollouts.max_concurrent", 4)
    ran = envserver(*words, "--env.group_size", 4, "--env.bug", bug, folder=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert blame + message in ran.stderr
    assert bug == "setup" or "buggy.py:" in ran.stderr
    failures = read_jsonl(tmp_path / "data" / "buggy.failures.jsonl")
    failed = [line["rollout_id"] for line in failures if line["event"] == "rollout_failed"]
    assert 1 <= len(failed) == len(set(failed)) <= 8  # none is tried again; 4 are in flight


def test_a_bug_that_one_task_meets_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "buggy.py").write_text(BUGGY)
    words = ("process", "--env", "buggy.py", *SIM, "--env.ensure_scores_are_not_same", "false")
    ran = envserver(*words, "--env.bug", "one task", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert len(group_ids(tmp_path / "data" / "buggy.jsonl")) == 19


def test_what_failed_once_is_tried_again(own: Path, tmp_path: Path) -> None:
    ran = envserver("process", "--env", own, *SIM, "--env.broken", "once", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "data" / "echo.jsonl")
    assert len(groups) == 6
    rollouts = [rollout for g in groups for rollout in g["envserver"]["rollouts"]]
    assert {rollout["attempt"] for rollout in rollouts} == {2}
    assert {rollout["agent_metrics"]["attempts"] for rollout in rollouts} == {2}


def test_a_flaky_engine_costs_no_group(own: Path, tmp_path: Path) -> None:
    ran = envserver(
        "process", "--env", own, *SIM, "--sim.error_rate", 0.3, "--rollouts.max_attempts", 20,
        "--env.total_steps", 12, folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(read_jsonl(tmp_path / "data" / "echo.jsonl")) == 12


def test_an_agent_that_hides_the_engines_failure_is_not_scored_for_it(
    own: Path, tmp_path: Path
) -> None:
    ran = envserver(
        "process", "--env", own, *SIM, "--env.broken", "swallows", "--sim.error_rate", 1,
        "--env.group_size", 2, "--rollouts.max_attempts", 1,
        "--rollouts.stop_after_failed_groups", 1, folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    assert "engine_unavailable" in ran.stderr
    assert read_jsonl(tmp_path / "data" / "echo.jsonl") == []


def test_a_full_disk_loses_nothing_that_was_written(own: Path, tmp_path: Path) -> None:
    words = ("process", "--env", own, *SIM, "--env.total_steps", 40)

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    ran = envserver(*words, folder=tmp_path, preexec_fn=small_files)
    assert ran.returncode == 1
    assert "cannot be written" in ran.stderr
    output = tmp_path / "data" / "echo.jsonl"
    kept = group_ids(output)
    assert kept
    assert envserver(*words, "--resume", folder=tmp_path).returncode == 0
    found = group_ids(output)
    assert found[: len(kept)] == kept
    assert len(set(found)) == len(found) == 40


def test_groups_of_equal_rewards_are_dropped_when_asked(own: Path, tmp_path: Path) -> None:
    ran = envserver(
        "process", "--env", own, *SIM, "--sim.solve_probability", 1,
        "--env.ensure_scores_are_not_same", "true", "--env.total_steps", 3,
        "--rollouts.stop_after_dropped_groups", 10, folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "zero_variance" in ran.stderr
    dropped = read_jsonl(tmp_path / "data" / "echo.failures.jsonl")
    assert {line["reason"] for line in dropped} == {"zero_variance"}


def test_an_engine_that_gives_only_text_gives_conversations(tmp_path: Path) -> None:
    with running("models", "sim", "--port", 0, "--env", "math", folder=tmp_path) as engine:
        url = engine.wait_for(r"http://\S+/v1").group()
        ran = envserver(
            "process", "--env", "math", "--openai.base_url", url, "--openai.server_type", "openai",
            "--env.group_size", 2, "--env.total_steps", 2,
            "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
        )  # fmt: skip
        refused = envserver(
            "serve", "--env", "math", "--openai.base_url", url, "--openai.server_type", "openai",
            folder=tmp_path,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "missing_token_ids" in ran.stderr
    for group in read_jsonl(tmp_path / "out.jsonl"):
        assert group["tokens"] == group["masks"] == group["inference_logprobs"] == [[], []]
        assert len(group["scores"]) == 2
        assert all(messages[-1]["role"] == "assistant" for messages in group["messages"])
    assert refused.returncode == 2
    assert "not fit for RL" in refused.stderr


def test_a_flag_that_does_not_exist_leaves_an_old_file_alone(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old\n")
    ran = envserver(
        "process", "--env", "math", "--model", "sim", "--overwrite",
        "--tokens.drop", "mixed_version",
        "--env.data_path_to_save_groups", "out.jsonl",
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "There is no flag 'mixed_version'. Did you mean 'mixed_versions'?" in ran.stderr
    assert (tmp_path / "out.jsonl").read_text() == "old\n"


@pytest.mark.thorough  # waits for an engine that is not there
def test_overwrite_keeps_the_old_file_until_the_first_group(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    words = ("process", "--env", "math", "--env.total_steps", "1", "--overwrite",
             "--env.data_path_to_save_groups", "out.jsonl")  # fmt: skip
    failed = envserver(*words, "--openai.base_url", "http://127.0.0.1:9/v1", folder=tmp_path)
    assert failed.returncode == 1
    assert out.read_text() == "old\n"
    assert "envserver models start" in failed.stderr
    assert "--model sim" in failed.stderr
    assert envserver(*words, "--model", "sim", folder=tmp_path).returncode == 0
    assert len(list(read_jsonl(out))) == 1
    assert [path.name for path in tmp_path.glob(".*.partial")] == []
