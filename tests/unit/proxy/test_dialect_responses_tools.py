"""Tools of namespaces, as Codex offers those of MCP servers."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from envserver_records.errors import InputError
from support.dialects import Desk, call, chat_answer

from envserver.proxy import ResponsesDialect
from envserver.proxy.admission import read_request

API = ResponsesDialect()


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "strict": False, "parameters": {"type": "object"}}


def space(name: str, *tools: str) -> dict[str, Any]:
    inner = [function(tool) for tool in tools]
    return {"type": "namespace", "name": name, "description": "Some.", "tools": inner}


TOOLS = [function("exec_command"), space("mcp__env", "save_answer", "look"), space("mcp", "look")]
SEARCH = {"type": "web_search", "external_web_access": True}


def read(**request: Any) -> Any:
    return read_request(API, {"model": "any", "input": "hi", **request}, {})


def names(request: Any) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools]


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_of_tools_in_namespaces_have_both_names(streamed: bool) -> None:
    flat = ("exec_command", "mcp__env__save_answer", "mcp__look", "mcp__env__unknown")
    desk = Desk(API, chat_answer(calls=[call(f"c{n}", name, "{}") for n, name in enumerate(flat)]))
    client = openai.OpenAI(
        base_url="http://desk/v1", api_key="any", http_client=desk.http, max_retries=0
    )
    asked: Any = {"model": "any", "input": "hi", "tools": [*TOOLS, SEARCH]}
    if streamed:
        events = [*client.responses.create(**asked, stream=True)]
        response = events[-1].response
        added = [e.item.to_dict() for e in events if e.type == "response.output_item.added"]
        assert [item.get("namespace") for item in added] == [None, "mcp__env", "mcp", None]
    else:
        response = client.responses.create(**asked)
    items = [item.to_dict() for item in response.output]
    assert [(item.get("namespace"), item["name"]) for item in items] == [
        (None, "exec_command"),
        ("mcp__env", "save_answer"),
        ("mcp", "look"),
        (None, "mcp__env__unknown"),
    ]
    assert names(desk.ask) == [
        "exec_command",
        "mcp__env__save_answer",
        "mcp__env__look",
        "mcp__look",
    ]
    back = read(tools=TOOLS, input=[{"role": "user", "content": "hi"}, *items])
    assert [made["function"]["name"] for made in back.messages[1]["tool_calls"]] == list(flat)


def test_a_tool_of_a_namespace_can_be_chosen() -> None:
    named = {"type": "function", "namespace": "mcp__env", "name": "look"}
    forced = read(tools=TOOLS, tool_choice=named)
    assert forced.fields["tool_choice"]["function"] == {"name": "mcp__env__look"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    assert names(read(tools=TOOLS, tool_choice=allowed)) == ["mcp__env__look"]


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ([{"type": "namespace", "name": "a", "tools": []}], "tools must be a list"),
        ([{"type": "namespace", "tools": [function("b")]}], r"tools\[0\]\.name must be a text"),
        (
            [{"type": "namespace", "name": "a", "tools": [space("b", "c")]}],
            r"tools\[0\]\.tools\[0\]\.type 'namespace' is not supported",
        ),
        ([function("a__b"), space("a", "b")], r"tools\[1\]\.tools\[0\]\.name is taken"),
        ([space("a", "b__c"), space("a__b", "c")], r"tools\[1\]\.tools\[0\]\.name is taken"),
    ],
)
def test_namespaces_that_no_call_could_be_told_from_are_refused(tools: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read(tools=tools)


def test_a_search_by_the_provider_is_left_out_and_cannot_be_forced() -> None:
    assert names(read(tools=[SEARCH, function("look")])) == ["look"]
    assert read(tools=[SEARCH]).tools == []
    with pytest.raises(InputError, match="'web_search' is not supported"):
        read(tools=[SEARCH, function("look")], tool_choice={"type": "web_search"})
