"""The tables have every field of the official clients: a new one is decided on, not missed."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from anthropic.types.beta import message_create_params as beta_params
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from envserver.proxy.constraints import RAW
from envserver.proxy.dialects.tables import CHAT, COMPLETIONS, MESSAGES, RESPONSES, FieldTable


@pytest.mark.parametrize(
    ("table", "params"),
    [
        (CHAT, chat_params.CompletionCreateParamsBase),
        (COMPLETIONS, CompletionCreateParamsBase),
        (RESPONSES, ResponseCreateParamsBase),
        (MESSAGES, MessageCreateParamsBase),
        (MESSAGES, beta_params.MessageCreateParamsBase),
    ],
)
def test_every_field_of_an_official_client_is_decided_on(table: FieldTable, params: Any) -> None:
    decided = {*table.engine, *table.read, *table.dropped, *table.refused, *RAW}
    assert sorted(get_type_hints(params).keys() - decided) == []
