"""`envserver models tiny`: what it needs, what is made of it, and a real vLLM that serves it."""

import subprocess
from pathlib import Path

import httpx
import pytest
from support.commands import environment_variables, read_jsonl, running, until
from support.foreign_trainers import printed
from support.process_tree import command, parents
from support.sim import tool, user
from support.waiting import PATIENCE

MAKING = ("models", "tiny", "tiny", "--steps", 4, "--groups", 4, "--threads", 1)


def variables() -> dict[str, str]:
    return environment_variables() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


ARITHMETIC = (
    *("--env", "math", "--env.data_set", "arithmetic", "--env.system_prompt", ""),
    *("--env.mode", "single", "--env.group_size", "2", "--env.total_steps", "2"),
)


@pytest.mark.slow
def test_it_is_made_served_and_answers_by_the_proxy(learn_python: Path, tmp_path: Path) -> None:
    def learner(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [learn_python.with_name("envserver"), *map(str, words)],
            cwd=tmp_path,
            env=variables(),
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
            check=False,
        )

    made = learner(*MAKING)
    assert made.returncode == 0, made.stderr
    weights = (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert "Use --overwrite to replace it" in learner(*MAKING).stderr
    again = learner(*MAKING, "--overwrite")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == weights

    done = learner("process", *ARITHMETIC, "--model", "tiny", "--engine.backend", "local")
    assert done.returncode == 0, done.stderr
    groups = read_jsonl(tmp_path / "data" / "math.jsonl")
    assert len(groups) == 2
    assert all(any(kept >= 0 for kept in row) for group in groups for row in group["masks"])
    assert all(group["envserver"]["model"] == "tiny" for group in groups)
    assert not list(tmp_path.glob(".tiny-*"))


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_serves_the_tiny_model_and_goes_with_us(
    vllm_python: Path, learn_python: Path, tmp_path: Path
) -> None:
    tiny = tmp_path / "tiny"
    making = (learn_python.with_name("envserver"), *MAKING)
    printed(*making, folder=tmp_path, env=variables(), seconds=4 * PATIENCE)
    short = ("--vllm_args=--max-model-len", "--vllm_args=512")
    words = ("models", "start", tiny, "--vllm_python", vllm_python, "--port", 0, *short)
    with running(*words, folder=tmp_path) as ours:
        url = ours.wait_for(r"(?m)^(http://\S+/v1)$", 4 * PATIENCE).group(1)
        assert "vLLM serves" in ours.output()
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            answer = client.post(
                "/chat/completions",
                json={
                    "model": "tiny",
                    "messages": user("What is 3+4?"),
                    "tools": [tool("calculate", expression={"type": "string"})],
                    "max_tokens": 8,
                },
            ).json()
        assert answer["usage"]["completion_tokens"] > 0
        assert answer["usage"]["prompt_tokens"] < 40
        ours.kill()
        until(
            lambda: not any(str(tiny) in command(pid) for pid in parents()), lambda: "it lives on"
        )
