"""The real vLLM that other tests rely on: it serves, and its own words agree with each other."""

from __future__ import annotations

import httpx
import pytest
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

pytestmark = pytest.mark.vllm


def test_token_ids_and_logprobs_come_with_an_answer(vllm_server: VllmServer) -> None:
    body = {
        "model": vllm_server.model,
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "max_tokens": 12,
        "logprobs": True,
        "return_token_ids": True,
    }
    reply = httpx.post(
        f"{vllm_server.base_url}/chat/completions", json=body, timeout=PATIENCE
    ).json()
    (choice,) = reply["choices"]
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == reply["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])


def test_tools_are_in_the_prompt(vllm_server: VllmServer) -> None:
    tool = {"type": "function", "function": {"name": "calculate", "parameters": {}}}
    sizes = []
    for tools in (None, [tool]):
        body = {"model": vllm_server.model, "messages": [{"role": "user", "content": "Hello"}]}
        body |= {"max_tokens": 1} | ({"tools": tools} if tools else {})
        reply = httpx.post(f"{vllm_server.base_url}/chat/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        sizes.append(reply.json()["usage"]["prompt_tokens"])
    assert sizes[1] > sizes[0]
