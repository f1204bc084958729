"""OpenAI's responses API.

responses_request   fields of a request -> fields of the chat API
responses_tools     tools, and the names of their calls in both directions
responses_input     input items -> chat messages
responses_answer    a whole chat answer -> the response object
responses_events    a streamed one -> events; responses_items has those of each item
    responses_memory    what later requests of the attempt can refer to

Reasoning is shown unchanged as the content of a reasoning item; nothing is summarised or
encrypted.
"""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect, Message

from ..asgi import error_body
from ..model_request import ModelRequest
from .answers import choice_of, ending_of, parts_of
from .base import Memory
from .reading import boolean, count, string
from .responses_answer import Head, output_of, status_of
from .responses_events import ResponsesWriter
from .responses_input import messages_of
from .responses_memory import earlier_messages, find_item, remember
from .responses_request import fields_of, refuse_impossible, wants_logprobs
from .responses_tools import tools_of
from .tables import RESPONSES


class ResponsesDialect:
    """See DialectAdapter."""

    name: Dialect = "responses"
    table = RESPONSES

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        refuse_impossible(body)
        tools = tools_of(body)
        return ModelRequest(
            dialect="responses",
            body=body,
            messages=[
                *_instructions(body),
                *earlier_messages(memory, body),
                *messages_of(body.get("input"), lambda item_id: find_item(memory, item_id)),
            ],
            tools=tools,
            fields=fields_of(body, tools),
            wanted_tokens=count(body, "max_output_tokens"),
            stream=bool(boolean(body, "stream")),
            wants_logprobs=wants_logprobs(body),
        )

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        ending = ending_of(answer)
        response = Head(request, answer).response(
            status_of(ending), output_of(request, answer), ending
        )
        remember(memory, request, response, parts_of(choice_of(answer)["message"]))
        return response

    def writer(self, request: ModelRequest, memory: Memory) -> ResponsesWriter:
        return ResponsesWriter(request, memory)

    def error(self, error: EnvserverError) -> dict[str, Any]:
        return error_body(error)


def _instructions(body: dict[str, Any]) -> list[Message]:
    if not body.get("instructions"):
        return []
    return [{"role": "system", "content": string(body, "instructions")}]
