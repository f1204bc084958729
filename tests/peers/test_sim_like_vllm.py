"""The simulated engine puts its fields where a real vLLM puts them, with the same types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.sim import TOOLS, ask, engine
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

pytestmark = pytest.mark.vllm

OURS_ONLY = {".system_fingerprint"}
"""The simulated engine names itself in every chunk, vLLM only in the last."""

Shape = dict[str, set[str]]


def shape(value: Any, place: str = "") -> Shape:
    """Every place in a JSON value with the kinds of value that stand there; ids as keys are `*`."""
    found: Shape = {}
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        found[place] = {"object"}
        children = [
            (f"{place}.{'*' if key.isdigit() else key}", item) for key, item in value.items()
        ]
        if place.endswith("top_logprobs[]") and "token" not in value:
            children = [(f"{place}.*", item) for item in value.values()]
    elif isinstance(value, list):
        found[place] = {"list"}
        children = [(f"{place}[]", item) for item in value]
    else:
        found[place] = {"null" if value is None else type(value).__name__}
    for name, item in children:
        for at, kinds in shape(item, name).items():
            found.setdefault(at, set()).update(kinds)
    return found


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def merged(values: list[Any]) -> Shape:
    found: Shape = {}
    for value in values:
        for place, kinds in shape(value).items():
            found.setdefault(place, set()).update(kinds)
    return found


CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", ask(top_logprobs=2, n=2, max_tokens=8, prompt_logprobs=2)),
    ("/v1/chat/completions", ask(max_tokens=3, return_tokens_as_token_ids=True)),
    ("/v1/chat/completions", ask(tools=TOOLS, max_tokens=4)),
    ("/v1/completions", {"prompt": "A box", "logprobs": 2, "n": 2, "return_token_ids": True,
                         "prompt_logprobs": 0}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2}),
    ("/tokenize", {"messages": ask()["messages"]}),
    ("/tokenize", {"prompt": "A box", "return_token_strs": True}),
    ("/detokenize", {"tokens": [70, 71]}),
]  # fmt: skip
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", ask(n=2, max_tokens=8, top_logprobs=2)),
    ("/v1/completions", {"prompt": "A box", "logprobs": 1, "return_token_ids": True, "n": 2}),
]


def compare(ours: Shape, theirs: Shape) -> None:
    """No place of our own, no place of vLLM's left out unless it is null, no other type."""
    assert set(ours) - set(theirs) <= OURS_ONLY
    assert all(theirs[place] == {"null"} for place in set(theirs) - set(ours))
    for place in ours.keys() & theirs.keys():
        solid = (ours[place] | theirs[place]) - {"null"}
        assert len(solid) <= 1, f"{place}: {ours[place]} but vLLM {theirs[place]}"


@pytest.mark.parametrize(("path", "body"), CASES, ids=lambda case: str(case)[:60])
async def test_answers_have_vllms_places(
    vllm_server: VllmServer, path: str, body: dict[str, Any]
) -> None:
    async with httpx.AsyncClient(base_url=vllm_server.root_url, timeout=PATIENCE) as client:
        response = await client.post(path, json={**body, "model": vllm_server.model})
    assert response.status_code == 200, response.text
    ours = await engine().post(path, {**body, "model": "sim"}, rollout_id="", timeout_seconds=10)
    compare(shape(ours), shape(response.json()))


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=lambda case: str(case)[:60])
async def test_chunks_have_vllms_places(
    vllm_server: VllmServer, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(base_url=vllm_server.root_url, timeout=PATIENCE) as client:
        response = await client.post(path, json={**body, "model": vllm_server.model})
    assert response.status_code == 200, response.text
    theirs = events(response.text)
    async with engine().stream(
        path, {**body, "model": "sim"}, rollout_id="", timeout_seconds=10
    ) as stream:
        ours = [chunk async for chunk in stream]
    compare(merged(ours), merged(theirs))
    compare(shape(ours[0]), shape(theirs[0]))
    compare(shape(ours[-1]), shape(theirs[-1]))
