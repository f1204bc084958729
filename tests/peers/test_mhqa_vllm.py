"""The agents of `mhqa` on a real vLLM: a run is one sequence, exactly as it was sampled.

Its random model is held to a form, so that it searches and answers.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.commands import envserver, read_jsonl
from support.relay import relay
from support.vllm_server import VllmServer

pytestmark = pytest.mark.vllm

HELD = '''
from envserver_environments.mhqa.env import Mhqa

CALL = r'<tool_call>\\{"name": "%s", "arguments": \\{"%s": "%s"\\}\\}</tool_call>'
SEARCH = CALL % ("search", "query", "[A-Z][a-z]{2,5}")
FINISH = CALL % ("finish", "answer", "(yes|no)")


class Held(Mhqa):
    """Its model searches twice and then says yes or no."""

    async def rollout(self, task, run):
        forms = iter([SEARCH, SEARCH, FINISH])
        chat = run.chat

        def held(messages, **asked):
            return chat(messages, **asked, structured_outputs={"regex": next(forms)})

        run.chat = held
        return await super().rollout(task, run)
'''


def test_a_run_with_tools_is_one_exact_sequence(vllm_server: VllmServer, tmp_path: Path) -> None:
    path = tmp_path / "held.py"
    path.write_text(HELD)
    with relay(vllm_server.root_url) as (url, echoes):
        ran = envserver(
            "process", "--env", path, "--openai.base_url", url, "--tokens.constraints", "all",
            "--tokens.train", "structured_output_masked",
            "--openai.model_name", vllm_server.model, "--sampling.max_tokens", 60,
            "--env.group_size", 2, "--env.total_steps", 3,
            "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    assert len(echoes) == 3 * 2 * 3
    assert [len(group["tokens"]) for group in groups] == [2, 2, 2]
    rows = [
        list(zip(*row, strict=True))
        for group in groups
        for row in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
    ]
    # What the engine saw and said at the end of each run is the whole row, and what it sampled in
    # all calls is what is trained.
    seen = [echo.prompt_ids + echo.completion_ids for echo in echoes]
    assert all([token for token, _, _ in row] in seen for row in rows)
    sampled = Counter(
        (token, float(np.float32(logprob)))
        for echo in echoes
        for token, logprob in zip(echo.completion_ids, echo.logprobs, strict=True)
    )
    assert sampled == Counter(
        (token, logprob) for row in rows for token, mask, logprob in row if mask != -100
    )
