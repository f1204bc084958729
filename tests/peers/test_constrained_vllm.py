"""A real vLLM's logprobs under a grammar are those after its mask, and `strict` can be left out."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from support.sdk_house import vllm_house
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

from envserver.tokens import build

pytestmark = pytest.mark.vllm
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "count", "strict": True, "parameters": SCHEMA}}


def differences(server: VllmServer, **more: Any) -> np.ndarray:
    """Recorded logprobs of an answer minus those that the engine gives to the same tokens."""
    asked = {"model": server.model, "temperature": 1.0, "seed": 3, "return_token_ids": True}
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE) as client:
        said = [{"role": "user", "content": "Count."}]
        body = {**asked, "messages": said, "max_tokens": 24, "logprobs": True, **more}
        answer = client.post("/chat/completions", json=body).json()
        choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
        ids = choice["token_ids"]
        again = {**asked, "prompt": prompt + ids, "max_tokens": 1, "prompt_logprobs": 0}
        scored = client.post("/completions", json=again).json()["choices"][0]["prompt_logprobs"]
    own = [
        entry[str(token)]["logprob"]
        for entry, token in zip(scored[len(prompt) :], ids, strict=True)
    ]
    return np.array([one["logprob"] for one in choice["logprobs"]["content"]]) - np.array(own)


def test_raw_logprobs_are_taken_after_the_grammars_mask(vllm_server: VllmServer) -> None:
    """The day this fails, vLLM gives the model's own: then constrained calls need no mask."""
    assert np.abs(differences(vllm_server)).max() < 1e-4
    assert differences(vllm_server, response_format=FORM).max() > 1
    assert differences(vllm_server, tools=[TOOL], tool_choice="required").max() > 1


def test_calls_with_strict_tools_are_trained_as_the_models_own(vllm_server: VllmServer) -> None:
    with vllm_house(vllm_server.base_url, vllm_server.model) as house, house.seat() as seat:
        for more in ({"tools": [TOOL]}, {"response_format": FORM}):
            seat.openai.chat.completions.create(
                model=seat.model,
                messages=[{"role": "user", "content": "Count."}],
                max_tokens=24,
                **more,
            )
        free, forced = seat.calls
        assert "strict_dropped" in free.flags
        assert "structured_output_masked" in forced.flags
        (row,) = build(seat.calls)
        assert row.tokens[row.mask == 1].tolist() == free.completion_ids.tolist()
