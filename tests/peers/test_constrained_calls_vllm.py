"""Tools that a real vLLM makes its model call: what of the call is the grammar's, and not trained.

The random model calls nothing by itself; `tool_choice` has the engine hold it to the tool's form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from envserver_records.records import Call
from support.sdk_house import vllm_house
from support.vllm_server import VllmServer
from support.waiting import PATIENCE

from envserver.tokens import build

pytestmark = pytest.mark.vllm
PARAMETERS: Any = {
    "type": "object",
    "properties": {"loud": {"type": "boolean"}},
    "required": ["loud"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "ring", "strict": True, "parameters": PARAMETERS},
}
CHOICES: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "function": {"name": "ring"}},
}
_CALLS = 4
_SAME = 0.01
"""Nats: two logprobs of the same distribution, added up in different orders, differ by less."""


def models_own(server: VllmServer, call: Call) -> np.ndarray:
    """The logprobs that the engine gives to the tokens of a call without its grammar."""
    ids = [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]
    body = {"model": server.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE) as client:
        scored = client.post("/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    start = len(call.prompt_ids)
    return np.array([scored[at][str(ids[at])]["logprob"] for at in range(start, len(ids))])


@pytest.mark.parametrize("how", CHOICES)
def test_a_strict_tool_that_the_model_must_call(
    vllm_server: VllmServer, how: str, tell: Callable[[str], None]
) -> None:
    with vllm_house(vllm_server.base_url, vllm_server.model) as house, house.seat() as seat:
        for number in range(_CALLS):
            answer = seat.openai.chat.completions.create(
                model=seat.model,
                messages=[{"role": "user", "content": f"Ring bell {number}."}],
                max_tokens=120,
                tools=[TOOL],
                tool_choice=CHOICES[how],
                parallel_tool_calls=False,
                seed=number,
            )
            (called,) = answer.choices[0].message.tool_calls or []
            assert called.type == "function"
            assert called.function.name == "ring"
            assert orjson.loads(called.function.arguments)["loud"] in (True, False)
        calls = seat.calls
        assert all("structured_output_masked" in call.flags for call in calls)
        assert not any("strict_dropped" in call.flags for call in calls)
        trained = sum(int(row.mask.sum()) for row in build(calls))
        seat.assert_exact()
    away = np.concatenate([np.abs(call.logprobs - models_own(vllm_server, call)) for call in calls])
    foreign = float((away > _SAME).mean())
    assert foreign > 0.5  # trained on, they would be learned as the model's own choice
    masked = 1 - trained / len(away)
    tell(
        f"strict tool, tool_choice {how}: {masked:.0%} of {len(away)} constrained tokens masked; "
        f"{foreign:.0%} of them have another logprob than the model's, {away.mean():.1f} nats apart"
    )
    assert masked == 1
