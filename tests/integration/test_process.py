"""`envserver process`: groups in a file, whatever happens to engine, agents or the process."""

import gzip
import math
import os
import resource
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases_of
from support.commands import group_ids, lines_of, read_jsonl, rollouts_of, running, typed, until
from support.extent import first_of

from envserver.workers.linux import descendants

CASES = cases_of(__file__)

OWN_ENVIRONMENT = CASES["own_environment"]
LINE = "process --env {env}.py --model sim --sim.latency_seconds 0 {more}"
OUT = "--env.data_path_to_save_groups out.jsonl"
Process = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the environments."""
    (tmp_path / "echo.py").write_text(OWN_ENVIRONMENT)
    (tmp_path / "buggy.py").write_text(CASES["buggy"])
    return tmp_path


@pytest.fixture
def process(folder: Path) -> Process:
    """Runs the command on one of them; returns what it says on stderr."""

    def run(more: str = "", status: int = 0, env: str = "echo", **popen: Any) -> str:
        return typed(LINE.format(env=env, more=more), folder, status, **popen).stderr

    return run


def test_math_groups_have_atropos_keys_and_exact_rows(tmp_path: Path) -> None:
    more = f"--env.total_steps 4 --env.group_size 3 {OUT}"
    said = typed(f"process --env math --model sim --sim.latency_seconds 0 {more}", tmp_path).stderr
    assert "out.jsonl" in said
    assert "simulated" in said
    groups = read_jsonl(tmp_path / "out.jsonl")
    assert len(groups) == 4
    for group in groups:
        facts = group["envserver"]
        ids = [rollout["rollout_id"] for rollout in facts["rollouts"]]
        assert ids == [f"{facts['group_id']}-r{number}" for number in range(3)]
        assert len({len(group[key]) for key in ("tokens", "masks", "scores", "messages")}) == 1
        for tokens, masks, logprobs in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], strict=True
        ):
            for token, mask, logprob in zip(tokens, masks, logprobs, strict=True):
                trained = mask != -100
                assert mask in (-100, token)
                assert (logprob <= 0 and math.isfinite(logprob)) if trained else logprob == 1.0
            assert any(mask != -100 for mask in masks)
        assert {"overrides", "advantages", "generation_params", "images"} <= group.keys()
        assert set(group["scores"]) <= {0.0, 1.0}


@pytest.mark.thorough
def test_a_file_is_neither_overwritten_nor_mixed_and_resume_cuts_off_only_what_it_wrote(
    process: Process, folder: Path
) -> None:
    output = folder / "data" / "echo.jsonl"
    process("--sim.solve_probability 1")
    groups = read_jsonl(output)
    assert sorted(one["envserver"]["task_id"] for one in groups) == [f"echo-{n}" for n in range(6)]
    assert {score for group in groups for score in group["scores"]} == {1.0}
    written, ids = output.read_bytes(), group_ids(output)
    others = written.replace(b'"model":"sim"', b'"model":"qwen"')
    for content, more, why in (
        (written, "", "--resume"),
        (written, "--resume --env.seed 7", "another run"),
        (b"my notes", "--resume", "was not written by"),
        (b'{"model": "qwen"}', "--resume", "was not written by"),
        (written + b"my notes", "--resume", "was not written by"),
        (others, "--resume", "holds groups of the model qwen; this run's is sim"),
        (written, "--overwrite --tokens.drop mixed_version", "Did you mean 'mixed_versions'?"),
    ):
        output.write_bytes(content)
        assert why in process(f"--sim.solve_probability 1 {more}", status=2)
        assert output.read_bytes() == content
    for torn in (written[:3], written[:-1]):
        output.write_bytes(torn)
        process("--sim.solve_probability 1 --resume")
        assert sorted(group_ids(output)) == sorted(ids)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_and_resumed_it_writes_the_same(process: Process, folder: Path, kills: int) -> None:
    total = 5 * (kills + 2)
    more = f"--sim.seconds_per_token 0.01 --env.total_steps {total} --rollouts.max_concurrent 8"
    resumed = f"{more} {OUT} --resume"
    output = folder / "out.jsonl"
    for wanted in range(2, 5 * kills, 5):
        with running(*shlex.split(LINE.format(env="echo", more=resumed)), folder=folder) as killed:
            killed.until(lambda n=wanted: lines_of(output) >= n)
            killed.kill()
        with output.open("ab") as file:
            file.write(b'{"tokens": [[1, 2')  # what a write that was cut off leaves
    process(resumed)
    found = group_ids(output)
    assert len(found) == len(set(found)) == total
    process(f"{more} --env.data_path_to_save_groups undisturbed.jsonl")
    once, whole = (
        {one["envserver"]["group_id"]: (one["tokens"], one["scores"]) for one in read_jsonl(path)}
        for path in (output, folder / "undisturbed.jsonl")
    )
    assert once == whole


def test_an_interrupt_finishes_open_groups_and_it_resumes(process: Process, folder: Path) -> None:
    more = f"--sim.seconds_per_token 0.01 --env.total_steps 30 --rollouts.max_concurrent 8 {OUT}"
    output = folder / "out.jsonl"
    with running(*shlex.split(LINE.format(env="echo", more=more)), folder=folder) as interrupted:
        interrupted.until(lambda: lines_of(output))
        interrupted.send(signal.SIGINT)
        assert interrupted.end() == 130
        assert "--resume" in interrupted.output()
    written = group_ids(output)
    assert 0 < len(written) < 30
    process(f"{more} --resume")
    assert len(set(group_ids(output))) == 30
    assert group_ids(output)[: len(written)] == written


@pytest.mark.parametrize("command", ["process --total_groups 1", "evaluate --env.total_steps 1"])
def test_an_interrupt_with_nothing_left_to_begin_is_no_early_stop(
    folder: Path, command: str
) -> None:
    begun, go = folder / "begun", folder / "go"
    waits = f"then open('{begun}', 'w')\nwhile not os.path.exists('{go}'): time.sleep(0.01)"
    line = LINE.replace("process", command).format(env="echo", more="--out out")
    with running(*shlex.split(line), "--env.broken", waits, folder=folder) as ends:
        ends.until(begun.exists)
        ends.send(signal.SIGINT)
        ends.wait_for("Finishing 1 open group")
        go.touch()
        assert ends.end() == 0, ends.output()
    assert "--resume" not in ends.output()


def test_a_hook_that_blocks_the_server_is_named(folder: Path) -> None:
    blocks = "def on_request(self, call):\n        while not os.path.exists('go'): time.sleep(0.01)"
    code = OWN_ENVIRONMENT.replace("def demonstration", f"{blocks}\n\n    def demonstration", 1)
    (folder / "echo.py").write_text(code)
    more = f"--telemetry.slow_callback_seconds 0.5 {OUT}"
    with running(*shlex.split(LINE.format(env="echo", more=more)), folder=folder) as blocked:
        blocked.wait_for(r"loop_is_blocked .*to_thread.*\(echo.py:\d+, in Echo.on_request\)")
        (folder / "go").touch()
        blocked.wait_for("loop_turns_again")
        assert blocked.end() == 0


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_stop_does_not_wait_for_tasks_that_are_being_loaded(folder: Path, times: int) -> None:
    loading = "for n in range(self.config.tasks_in_all):\n            n and time.sleep(600)"
    code = OWN_ENVIRONMENT.replace("for n in range(self.config.tasks_in_all):", loading, 1)
    (folder / "echo.py").write_text(code)
    with running(*shlex.split(LINE.format(env="echo", more=OUT)), folder=folder) as stopped:
        stopped.until(lambda: lines_of(folder / "out.jsonl"))
        for _ in range(times):
            stopped.send(signal.SIGINT)
        assert stopped.end() == 130
    assert len(group_ids(folder / "out.jsonl")) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_programs_that_tasks_start_end_with_it(folder: Path, number: signal.Signals) -> None:
    def left() -> list[str]:
        listed = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True).stdout
        return [line for line in listed.splitlines() if line.endswith(f" {folder}/echo.py")]

    more = f"--env.broken leaves --sim.seconds_per_token 0.1 --env.total_steps 3000 {OUT}"
    with running(*shlex.split(LINE.format(env="echo", more=more)), folder=folder) as ended:
        ended.until(lambda: lines_of(folder / "out.jsonl"))
        assert len(left()) >= 2
        below = descendants(ended.pid)
        for pid in below if number == signal.SIGKILL else ():
            os.kill(pid, signal.SIGSTOP)
        ended.send(number)
        ended.end()
    until(lambda: not left(), ended.output)
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in below), ended.output)


def test_a_third_interrupt_kills_also_what_does_not_answer(folder: Path) -> None:
    more = f"--sim.seconds_per_token 0.01 --env.total_steps 30 {OUT}"
    with running(*shlex.split(LINE.format(env="echo", more=more)), folder=folder) as stopped:
        stopped.until(lambda: lines_of(folder / "out.jsonl"))
        below = descendants(stopped.pid)
        for pid in below:
            os.kill(pid, signal.SIGSTOP)
        for said in ("second signal stops at once", "third signal kills"):
            stopped.send(signal.SIGINT)
            stopped.wait_for(said)
        stopped.send(signal.SIGINT)
        assert stopped.end() == 1
    assert len(below) > 2
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in below), stopped.output)


@pytest.mark.parametrize(
    ("broken", "kind", "words"),
    [
        ("raises", "agent_error", "no such tool"),
        ("'kills itself'", "worker_died", "SIGKILL"),
        pytest.param("unscorable", "unscorable", "no reward", marks=pytest.mark.thorough),
        pytest.param("hangs", "worker_hung", "went on after it", marks=pytest.mark.thorough),
    ],
)
def test_when_everything_fails_it_stops_and_says_why(
    process: Process, folder: Path, broken: str, kind: str, words: str
) -> None:
    timeout_seconds = 2 if broken == "hangs" else 60  # a busy machine is slow
    said = process(
        f"--env.broken {broken} --env.total_steps 50 --env.group_size 2 --rollouts.max_attempts 2"
        f" --env.worker_timeout {timeout_seconds} --workers.kill_grace_seconds 0.5"
        " --rollouts.stop_after_failed_groups 2",
        status=1,
    )
    assert kind in said
    failures = read_jsonl(folder / "data" / "echo.failures.jsonl")
    failed = [line for line in failures if line["event"] == "rollout_failed"]
    assert {line["kind"] for line in failed if not line["detail"].get("mate")} == {kind}
    assert any(words in line["message"] for line in failed)
    assert any(line["final"] for line in failed)


KILL_ITSELF = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    "end", first_of("os._exit(3)", KILL_ITSELF, "ctypes.string_at(0)", "time.sleep(3600)")
)
def test_a_rollout_that_ends_its_worker_again_is_scored(
    process: Process, folder: Path, end: str
) -> None:
    limit = "time" if "sleep" in end else "crash"
    more = (
        f"--env.broken 'then {end}' --env.total_steps 3 --env.group_size 2"
        f" --env.worker_timeout {2 if limit == 'time' else 60} --workers.kill_grace_seconds 0.5"
        " --rollouts.stop_after_failed_groups 1 --tokens.keep_calls true"
    )
    process(more)
    rollouts = rollouts_of(read_jsonl(folder / "data" / "echo.jsonl"))
    assert [(one["limit"], one["attempt"] > 1) for one in rollouts] == [(limit, True)] * 6
    # What was there when an attempt failed is in the record, and in the file of failures.
    for lost in (
        [one["attempts"][0] for one in rollouts],
        read_jsonl(folder / "data" / "echo.failures.jsonl"),
    ):
        spoke = [one for one in lost if one["turns"]]  # others of its process died with it
        assert all(one["tokens"] and one["messages"][-1]["role"] == "assistant" for one in spoke)
        assert spoke
    said = process(f"{more} --rollouts.worker_deaths null --overwrite", status=1)
    assert "worker_" in said


def test_a_run_whose_few_groups_all_failed_ends_as_failed(process: Process) -> None:
    said = process("--env.broken raises --env.tasks_in_all 2 --rollouts.max_attempts 1", status=1)
    assert "The last 2 groups were all dropped, most of them as incomplete: " in said


@pytest.mark.thorough
def test_what_failed_once_and_a_flaky_engine_cost_no_group(process: Process, folder: Path) -> None:
    process("--env.ensure_scores_are_not_same false --env.bug 'one task'", env="buggy")
    assert len(group_ids(folder / "data" / "buggy.jsonl")) == 19  # of 20
    process(
        "--env.broken once --sim.error_rate 0.3 --rollouts.max_attempts 20 --env.total_steps 12"
    )
    rollouts = rollouts_of(read_jsonl(folder / "data" / "echo.jsonl"))
    assert len(group_ids(folder / "data" / "echo.jsonl")) == 12
    assert min(rollout["attempt"] for rollout in rollouts) == 2
    assert all(one["agent_metrics"]["attempts"] == one["attempt"] for one in rollouts)


def test_an_agent_that_hides_engine_failures_is_not_scored(process: Process, folder: Path) -> None:
    more = "--env.broken swallows --sim.error_rate 1 --env.group_size 2 --rollouts.max_attempts 1"
    assert "engine_unavailable" in process(f"{more} --rollouts.stop_after_failed_groups 1", 1)
    assert read_jsonl(folder / "data" / "echo.jsonl") == []


@pytest.mark.parametrize("version", first_of("0.1", "0.2"))
def test_a_file_of_a_released_version_is_continued_and_exported(
    tmp_path: Path, version: str
) -> None:
    older = Path(__file__).parents[1] / "unit" / "store" / "older"
    written = gzip.decompress((older / f"groups_of_{version}.jsonl.gz").read_bytes())
    (tmp_path / "out.jsonl").write_bytes(written)
    more = "--model sim --env math --env.group_size 2 --env.total_steps 4 --resume"
    typed(f"process {more} {OUT}", tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes().startswith(written)
    assert len(set(group_ids(tmp_path / "out.jsonl"))) == 4
    typed("export out.jsonl --to unified --out unified.jsonl", tmp_path)
    assert len(read_jsonl(tmp_path / "unified.jsonl")) == 8


@pytest.mark.thorough
def test_a_full_disk_loses_nothing_that_was_written(process: Process, folder: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    assert "cannot be written" in process("--env.total_steps 40", 1, preexec_fn=small_files)
    output = folder / "data" / "echo.jsonl"
    kept = group_ids(output)
    assert kept
    process("--env.total_steps 40 --resume")
    found = group_ids(output)
    assert found[: len(kept)] == kept
    assert len(set(found)) == len(found) == 40


@pytest.mark.thorough
def test_an_engine_that_gives_only_text_gives_conversations(tmp_path: Path) -> None:
    with running("models", "sim", "--port", 0, "--env", "math", folder=tmp_path) as engine:
        url = engine.wait_for(r"http://\S+/v1").group()
        text = f"--env math --openai.base_url {url} --openai.server_type openai"
        ran = typed(f"process {text} --env.group_size 2 --env.total_steps 2 {OUT}", tmp_path)
        assert "cannot be used for RL" in typed(f"serve {text}", tmp_path, status=2).stderr
    assert "missing_token_ids" in ran.stderr
    for group in read_jsonl(tmp_path / "out.jsonl"):
        assert group["tokens"] == group["masks"] == group["inference_logprobs"] == [[], []]
        assert len(group["scores"]) == 2
        assert all(messages[-1]["role"] == "assistant" for messages in group["messages"])
