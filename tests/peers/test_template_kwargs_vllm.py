"""A real vLLM that gives every chat template a variable is continued token by token.

`learning_vllm` has one that switches thinking off.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.sdk_house import vllm_house
from support.vllm_server import VllmServer

from envserver import OpenAIConfig
from envserver.models import OpenAIEngine
from envserver.models.probe import probe
from envserver.proxy.capabilities import Capabilities, capabilities_of
from envserver.tokens_config import TokensConfig

pytestmark = pytest.mark.vllm
OFF = {"enable_thinking": False}


async def capabilities(server: VllmServer, told: dict[str, Any] | None) -> Capabilities:
    async with OpenAIEngine(OpenAIConfig(base_url=server.base_url)) as engine:
        found = await probe(engine, model=server.model)
    return capabilities_of(found, TokensConfig(), told)


async def test_the_probe_finds_the_variable_or_names_the_setting(learning_vllm: VllmServer) -> None:
    for told in (None, OFF):
        found = await capabilities(learning_vllm, told)
        assert found.format is not None, found.why_not
        assert found.format.defaults == OFF
        assert found.probe_result.reasoning_parser
    wrong = await capabilities(learning_vllm, {})
    assert wrong.format is None
    assert "--openai.default_template_kwargs '{\"enable_thinking\":false}'" in wrong.why_not


def test_a_conversation_is_one_row_and_a_request_may_switch_back(learning_vllm: VllmServer) -> None:
    with (
        vllm_house(learning_vllm.base_url, learning_vllm.model, think="keep") as house,
        house.seat(max_turns=9) as seat,
    ):
        said: list[Any] = []
        for kwargs in ({}, {}, {}, {"enable_thinking": True}):
            said.append({"role": "user", "content": f"Say number {len(said)}."})
            told = seat.openai.chat.completions.create(
                model=seat.model,
                messages=said,
                max_tokens=6,
                extra_body={"chat_template_kwargs": kwargs},
            )
            said.append({"role": "assistant", "content": told.choices[0].message.content})
        assert [call.edge == "root" for call in seat.calls] == [True, False, False, True]
        assert not any("render_mismatch" in call.flags for call in seat.calls)
        assert len(seat.sequences) == 2, seat.edges
        seat.assert_exact()
