"""Machines that make sandboxes, in real processes: one is killed under load, a client is killed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.commands import Running, envserver, read_jsonl, running, until
from support.waiting import PATIENCE

pytestmark = pytest.mark.thorough

CODE = ("process", "--env", "code", "--model", "sim", "--env.group_size", 4)


@contextlib.contextmanager
def machine(folder: Path, *words: object) -> Iterator[tuple[Running, str]]:
    with running("sandboxes", "serve", "--port", 0, *words, folder=folder) as process:
        yield process, process.wait_for(r"--sandbox\.remote (http\S+)")[1]


def open_at(url: str) -> int:
    return int(httpx.get(f"{url}/v1/sandboxes", timeout=PATIENCE).json()["open"])


def rewards(path: Path) -> dict[str, list[float]]:
    return {line["envserver"]["group_id"]: line["scores"] for line in read_jsonl(path)}


def test_a_machine_that_is_killed_under_load_costs_no_rollout(tmp_path: Path) -> None:
    steps = ("--env.total_steps", 24, "--env.ensure_scores_are_not_same", "false")
    with machine(tmp_path) as (first, at_first), machine(tmp_path) as (_, at_second):
        remote = ("--sandbox.remote", f"{at_first},{at_second}")
        out = tmp_path / "elsewhere.jsonl"
        with running(*CODE, *steps, *remote, "--out", out, folder=tmp_path) as process:
            # Under load: a sandbox is open there, and groups are still to come.
            until(lambda: open_at(at_first), process.output)
            first.kill()
            assert process.end() == 0, process.output()
            told = process.output()
    assert "sandbox_machine_does_not_answer" in told
    done = envserver(*CODE, *steps, "--out", tmp_path / "here.jsonl", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rewards(out) == rewards(tmp_path / "here.jsonl"), "no failure of a machine is a reward"


def test_a_machine_ends_what_a_killed_client_left(tmp_path: Path) -> None:
    with machine(tmp_path, "--sandbox.concurrent", 4) as (serving, url):
        steps = ("--env.total_steps", 1000)
        remote = ("--sandbox.remote", url, "--out", "lost.jsonl")
        with running(*CODE, *steps, *remote, folder=tmp_path) as process:
            until(lambda: open_at(url), process.output)
            process.kill()
        until(lambda: not open_at(url), serving.output)
