"""The text protocol: what a message says, and the loop between model and tools."""

import re
import time
from typing import Any

import pytest
from envserver_records.tasks import Json
from envserver_tools.calculator import calculate
from envserver_tools.calling import Tool, ToolError, function_tool, toolbox
from envserver_tools.protocol import FORMAT, Part, ProtocolRun, Window, parse_message, run_protocol
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.cpu import cpu_limit
from support.extent import examples

from envserver import Reply

CALL = 'TOOL_CALL: {"tool": "look", "args": {"path": "a"}}'


MESSAGES = cases_of(__file__, "messages.toml")["message"]


def short(part: Part) -> Any:
    if part.type == "error":
        return part.code
    return [part.tool, part.args] if part.type == "tool_call" else [part.type, part.text]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["says"][:40])
def test_a_message_is_read_by_the_rules(message: Json) -> None:
    assert [short(part) for part in parse_message(message["says"])] == message["parts"]


PIECES = [
    "THOUGHT:", "TOOL_CALL:", "FINAL:", "<think>", "</think>", "```", "```json", "\n", " ", "\r\n",
    '{"tool": "look", "args": {}}', '{"tool": ', '"args": ', "{", "}", "[", "]", '"', "\\", "NaN",
    "TOOL RESULT:", "\ud800", "\x00", "é", "1e999", "9" * 5000,
]  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=30))
def test_no_text_makes_the_parser_fail(pieces: list[str]) -> None:
    parts = parse_message("".join(pieces))
    types = [part.type for part in parts]
    assert parts
    assert types.count("tool_call") + types.count("final") <= 1
    assert "error" not in types[:-1]
    assert all(part.text.strip() for part in parts if part.type == "thought")


def look(path: str) -> str:
    if path == "missing":
        raise ToolError("there is no such file.")
    return f"inside of {path}"


async def wait(seconds: int) -> str:
    return f"waited {seconds}"


def tool(name: str, function: Any, **properties: Any) -> Tool:
    return Tool(function_tool(name, f"Can {name}.", properties), function)


TOOLS = toolbox(
    tool("look", look, path={"type": "string"}), tool("wait", wait, seconds={"type": "integer"})
)


class Model:
    """Says what it is told to, one text a call, and keeps what it was asked."""

    def __init__(self, *texts: str, finish_reason: str = "stop") -> None:
        self.texts, self.finish_reason = list(texts), finish_reason
        self.asked: list[list[Json]] = []
        self.sampling: Json = {}

    async def chat(self, messages: list[Json], **sampling: Any) -> Reply:
        self.asked.append(list(messages))
        self.sampling = sampling
        text = self.texts.pop(0)
        message = {"role": "assistant", "content": text}
        return Reply(content=text, tool_calls=[], finish_reason=self.finish_reason, message=message)


START: list[Json] = [
    {"role": "system", "content": "Work."},
    {"role": "user", "content": "Find it."},
]


async def played(*texts: str, **options: Any) -> tuple[ProtocolRun, Model]:
    model = Model(*texts, finish_reason=options.pop("finish_reason", "stop"))
    return await run_protocol(model.chat, TOOLS, START, **options), model


async def test_a_task_is_done_by_thoughts_calls_and_an_answer() -> None:
    wait_call = 'TOOL_CALL: {"tool": "wait", "args": {"seconds": 3}}'
    run, model = await played(f"THOUGHT: first\n{CALL}", wait_call, "FINAL: done", max_tokens=9)
    assert (run.ending, run.answer, run.tool_errors) == ("final", "done", 0)
    assert model.sampling == {"stop": ["TOOL RESULT:"], "max_tokens": 9}
    assert run.messages[:2] == START
    assert [m["content"] for m in run.messages[3::2]] == [
        "TOOL RESULT:\ninside of a",
        "TOOL RESULT:\nwaited 3",
    ]
    types = ["thought", "tool_call", "tool_result", "tool_call", "tool_result", "final"]
    assert [step["type"] for step in run.steps] == types
    assert [step["i"] for step in run.steps] == list(range(6))
    source = CALL.removeprefix("TOOL_CALL: ")
    assert run.steps[1] == {
        "i": 1, "type": "tool_call", "text": source, "tool": "look", "args": {"path": "a"},
    }  # fmt: skip
    assert run.steps[2] == {"i": 2, "type": "tool_result", "text": "inside of a"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('{"tool": "fly", "args": {}}', "no tool 'fly'"),
        ('{"tool": "look", "args": {"file": "a"}}', "not valid"),
        ('{"tool": "wait", "args": {"seconds": "3"}}', "not of type 'integer'"),
        ('{"tool": "look", "args": {"path": "missing"}}', "no such file"),
    ],
)
async def test_a_call_that_cannot_be_carried_out_is_an_observation(call: str, words: str) -> None:
    run, _ = await played(f"TOOL_CALL: {call}", "FINAL: x")
    assert run.messages[3]["content"].startswith("TOOL RESULT:\nError: ")
    assert words in run.messages[3]["content"]
    assert (run.ending, run.tool_errors) == ("final", 1)
    assert [step["type"] for step in run.steps] == ["tool_call", "tool_result", "final"]


async def test_an_error_is_quoted_with_the_format_and_three_in_a_row_end_it() -> None:
    bad = "TOOL_CALL: {'tool'}"
    run, model = await played(bad, bad, CALL, bad, "", bad, "FINAL: never")
    assert (run.ending, model.texts) == ("errors", ["FINAL: never"])
    correction = run.messages[3]["content"]
    assert "double quotes" in correction and "'tool'}" in correction and FORMAT in correction
    assert run.messages[-1]["role"] == "assistant"  # what it said last is answered by nobody
    assert [step["type"] for step in run.steps].count("error") == 5


async def test_what_follows_a_call_is_dropped_and_said_to_be() -> None:
    made_up = f"{CALL}\nTOOL RESULT:\nmade up\nFINAL: lie"
    run, _ = await played(made_up, *[f"{CALL}\n{CALL}"] * 3, "FINAL: x")
    assert run.ending == "final"  # a call in order is no error in a row
    assert run.messages[3]["content"].startswith("TOOL RESULT:\ninside of a\n\n(")
    assert "one call per message" in run.messages[5]["content"]
    assert [step["type"] for step in run.steps[:3]] == ["tool_call", "tool_result", "error"]
    assert run.steps[2]["text"].startswith("text_after_call")


async def test_other_ends() -> None:
    run, _ = await played(*['TOOL_CALL: {"tool": "fly"}'] * 5, max_tool_errors=3)
    assert (run.ending, run.tool_errors) == ("tool_errors", 3)
    # Three thoughts in a row are reminded, and count as steps.
    run, _ = await played("a", "THOUGHT: b", "c", "d", "e", CALL, max_steps=6)
    assert run.ending == "steps"
    reminded = [FORMAT in message["content"] for message in run.messages[3::2]]
    assert reminded == [False, False, True, False, False, False]
    # A message that was cut off is never read.
    run, _ = await played("FINAL: 4", finish_reason="length")
    assert (run.ending, run.answer, run.steps[-1]["type"]) == ("truncated", None, "error")


async def test_what_happened_before_an_exception_is_known() -> None:
    record = ProtocolRun()
    with pytest.raises(IndexError):
        await run_protocol(Model(CALL).chat, TOOLS, START, record=record)
    assert [step["type"] for step in record.steps] == ["tool_call", "tool_result"]


async def test_old_turns_are_left_out_in_pairs_when_the_context_is_full() -> None:
    # 85 % of 90 - 10 tokens: six messages.
    window = Window(lambda messages: 10 * len(messages), context_tokens=90, max_tokens=10)
    calls = [f'TOOL_CALL: {{"tool": "wait", "args": {{"seconds": {n}}}}}' for n in range(5)]
    run, model = await played(*calls, "FINAL: x", window=window)
    assert [len(messages) for messages in model.asked] == [2, 4, 6, 6, 6, 6]
    assert all(messages[:2] == START for messages in model.asked)
    last = [message["content"] for message in model.asked[-1][3::2]]
    assert last == ["TOOL RESULT:\nwaited 3", "TOOL RESULT:\nwaited 4"]
    assert len(run.messages) == 2 + 2 * 5 + 1
    # The last turn stays even where it is too long.
    window = Window(lambda messages: 10**6, context_tokens=90, max_tokens=10)
    _, model = await played(CALL, CALL, "FINAL: x", window=window)
    assert [len(messages) for messages in model.asked] == [2, 4, 4]


# The calculator: right values as text, a refusal for everything else, always at once --------------

CASES = cases_of(__file__, "calculator.json")
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")


def test_values_and_refusals() -> None:
    values = CASES["values"]
    assert {expression: calculate(expression) for expression in values} == values
    for error, expressions in CASES["refusals"].items():
        refused = {expression: calculate(expression) for expression in expressions}
        assert refused == dict.fromkeys(expressions, f"error: {error}")


@given(st.text(alphabet="0123456789.+-*/%^()e,! abcdfgilmnopqrstx", max_size=200))
def test_never_raises_and_is_quick(expression: str) -> None:
    started = time.process_time()
    answer = calculate(expression)
    assert time.process_time() - started < cpu_limit(0.5)
    assert answer.startswith("error: ") or NUMBER.fullmatch(answer)
