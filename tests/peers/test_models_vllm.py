"""A real vLLM, started by `envserver models start`, serves the tiny model and goes with us."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest
from support.commands import environment_variables, running, until
from support.waiting import PATIENCE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def test_vllm_serves_the_tiny_model_and_goes_with_us(
    vllm_python: Path, learn_python: Path, tmp_path: Path
) -> None:
    tiny = tmp_path / "tiny"
    making = ("models", "tiny", tiny, "--steps", "4", "--groups", "4", "--threads", "1")
    subprocess.run(
        [learn_python.with_name("envserver"), *making],
        cwd=tmp_path,
        env=environment_variables(),
        check=True,
        capture_output=True,
    )
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
                    "messages": [{"role": "user", "content": "What is 3+4?"}],
                    "tools": [CALCULATE],
                    "max_tokens": 8,
                },
            ).json()
        assert answer["usage"]["completion_tokens"] > 0
        assert answer["usage"]["prompt_tokens"] < 40
        ours.kill()
        until(lambda: not _speaks_of(str(tiny)), lambda: "vLLM lives on")


def _speaks_of(text: str) -> bool:
    """Whether a process has it in its command line."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in place.read_bytes():
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False
