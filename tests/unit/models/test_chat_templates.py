"""Chat templates and tokenizers of model folders: rendered and encoded as engines do it."""

import importlib.util
import json
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_records.errors import ConfigError, TemplateRefused
from envserver_records.records import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.cpu import cpu_limit
from support.extent import examples
from support.talk import written
from support.templates import CASES, OWN, answer, call, chat_format, result, tokenizer, tool, user
from support.vllm_server import VllmServer
from support.waiting import PATIENCE
from tokenizers.processors import TemplateProcessing

from envserver.models.parsers import FORMATS, ParsedCall
from envserver.proxy.engine_client.answer_parser import AnswerParser, format_of_calls
from envserver.tokens.chat_format import ChatFormat, ChatTemplate
from envserver.tokens.prepare import Refused, template_kwargs

TEMPLATES = cases_of(__file__, "chat_templates.toml")
MESSAGES = cases_of(__file__, "chat_messages.json")
SYSTEM = {"role": "system", "content": "s"}
DEVELOPER = {"role": "developer", "content": "d"}
PRINTS_ALL = "{{ messages | tojson }}{{ tools | tojson if tools }}"


def shown(messages: list[Message], source: str = PRINTS_ALL, **more: Any) -> str:
    return chat_format(source).prompt_text(messages, more.get("tools"), {})


def rendered(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}).render(
        [user("Ü<&")], None, generation_prompt=True, kwargs=kwargs
    )


@pytest.mark.parametrize(("source", "text"), TEMPLATES["renders"])
def test_templates_run_as_in_transformers(source: str, text: str) -> None:
    assert rendered(source, thinking=True) == text


@pytest.mark.parametrize(("source", "words"), TEMPLATES["refuses"])
def test_what_a_template_refuses_or_may_not_do_is_in_its_words(source: str, words: str) -> None:
    with pytest.raises(TemplateRefused, match=words):
        rendered(source)


@pytest.mark.parametrize(("messages", "seen"), MESSAGES["seen"])
def test_templates_get_what_vllm_gives_them(messages: list[Message], seen: list[Message]) -> None:
    assert shown(messages) == json.dumps(seen, ensure_ascii=False)


def test_tools_keep_the_fields_that_engines_know_in_their_order() -> None:
    given = {"type": "function", "x": 1, "function": {"strict": True, "name": "f", "y": 2}}
    seen = '{"type": "function", "function": {"name": "f", "description": null, "parameters": null'
    assert shown([SYSTEM], tools=[given]).endswith(f'[{seen}, "strict": true}}}}]')


@pytest.mark.parametrize(("messages", "reason"), MESSAGES["refused"])
def test_what_only_the_engine_can_render_is_refused(messages: list[Message], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        shown(messages)


def test_a_request_gives_its_variables_to_the_template() -> None:
    body = {"chat_template_kwargs": {"a": 1, "add_generation_prompt": False}}
    variables = template_kwargs(body | {"reasoning_effort": "low"})
    assert variables == {"a": 1, "reasoning_effort": "low", "enable_thinking": True}
    assert template_kwargs({"add_generation_prompt": False}) == {"add_generation_prompt": False}
    for refused in ({"continue_final_message": True}, {"chat_template_kwargs": {"tools": []}}):
        with pytest.raises(Refused):
            template_kwargs(refused)


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    words = tokenizer(["<|im_end|>"])
    begin = words.token_to_id("<s>")
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    (folder / "tokenizer.json").write_text(words.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_model_folder_is_read_like_transformers_does(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "{{ bos_token }}"},
        {"name": "tool_use", "template": "T"},
    ]
    config = {
        "chat_template": named,
        "bos_token": "<begin>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "add_bos_token": True,
    }
    folder = model_folder(tmp_path, config)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    format = ChatFormat.load(folder)
    assert format.prompt_text([SYSTEM], None, {}) == "<begin>"
    assert format.prompt_text([SYSTEM], [tool()], {}) == "T"
    assert len(format.prompt_ids([SYSTEM], None, {})) == 1  # one, and it is the config's
    assert format.stop_ids == {1, 7, format.vocabulary.special_id("<|im_end|>")}
    (folder / "chat_template.jinja").write_text("file")
    again = ChatFormat.load(folder)
    assert again.prompt_text([SYSTEM], [tool()], {}) == "file"
    assert again.tokenizer_digest == format.tokenizer_digest
    assert again.template_digest != format.template_digest


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        ChatFormat.load(tmp_path)
    folder = model_folder(tmp_path, {})
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFormat.load(folder)
    (folder / "chat_template.json").write_text('{"chat_template": [{"name": "a", "template": ""}]}')
    with pytest.raises(ConfigError, match="named default"):
        ChatFormat.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatFormat.load(folder)


def test_half_a_surrogate_pair_is_refused() -> None:
    format = chat_format(OWN["chatml"])
    with pytest.raises(Refused, match="not_unicode"):
        format.prompt_ids([user("\ud800")], None, {})


@pytest.mark.vllm
def test_prompts_are_those_of_vllm(vllm_server: VllmServer) -> None:
    format = ChatFormat.load(vllm_server.model_folder)
    odd = [
        [DEVELOPER, SYSTEM, user("u")],
        [user("x"), answer(None, call("{half"), call({"ü": [1e3, None]})), result("\n4 ")],
        [user([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}])],
    ]
    talks = [(case.messages, case.tools) for case in CASES.values()]
    for messages, tools in [*talks, *((messages, None) for messages in odd)]:
        body = {
            "model": vllm_server.model,
            "messages": messages,
            **({"tools": tools} if tools else {}),
        }
        url = f"{vllm_server.base_url}/chat/completions/render"
        theirs = httpx.post(url, json=body, timeout=PATIENCE).json()
        assert format.prompt_ids(messages, tools, {}) == theirs["token_ids"]


# This project's parsers of model output: tool calls, reasoning, and the text around them

PARSED = cases_of(__file__, "parsers.toml")
WRITERS = {
    "hermes": ("qwen2_5", "qwen3", "qwen3_vl", "qwen3_instruct_2507"),
    "functions": ("qwen3_5_think", "qwen3_6", "nemotron_3_nano"),
    "keys": ("glm4moe",),
    "llama": ("llama3_1", "llama3_2"),
    None: ("gptoss", "deepseekv3", "phi3", "gemma3", "cohere2"),
}


def test_the_format_of_a_model_is_the_one_that_reads_its_template() -> None:
    package = importlib.util.find_spec("trl")
    assert package is not None and package.submodule_search_locations, "run `make test`"
    folder = Path(package.submodule_search_locations[0]) / "chat_templates"
    for name, writers in WRITERS.items():
        for writer in writers:
            source = (folder / f"{writer}.jinja").read_text()
            assert format_of_calls(chat_format(source)) == name, writer


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>[]{}"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | WORDS,
    lambda values: st.lists(values, max_size=2) | st.dictionaries(WORDS, values, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("name", ["chatml", "thinking", "llama", "mistral"])
@settings(deadline=None, max_examples=examples(240))
@given(data=st.data())
def test_what_a_model_means_is_read(name: str, data: st.DataObject) -> None:
    count = 1 if name == "llama" else data.draw(st.integers(0, 3))
    arguments = st.dictionaries(WORDS, VALUES, max_size=3)
    calls = [call(data.draw(arguments), name=f"tool_{n}") for n in range(count)]
    content = "" if (bool(calls) and name in ("llama", "mistral")) else data.draw(WORDS)
    message = answer(content, *calls)
    if name == "thinking":
        message["reasoning"] = data.draw(WORDS)
    text = written(name, message, indent=data.draw(st.sampled_from([None, 1])))
    body = {"tools": [tool()]}
    assert reader(name).trouble(body) is None
    assert as_told(reader(name).message(text, body, [1])) == as_told(message)


@cache
def reader(name: str) -> AnswerParser:
    return AnswerParser(chat_format(OWN[name]), reasons=name == "thinking")


def as_told(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    functions = [parsed_call["function"] for parsed_call in message.get("tool_calls") or []]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    texts = [(message.get(name) or "").strip() for name in ("content", "reasoning")]
    return texts[0], texts[1], calls


@pytest.mark.parametrize(("format", "text", "content", "calls"), PARSED["formats"])
def test_formats(format: str, text: str, content: str, calls: list[list[str]]) -> None:
    found = FORMATS[format](text, [tool()])
    assert found is not None
    assert (found.content, found.calls) == (content, [ParsedCall(*called) for called in calls])


LONG = [["hermes", "<tool_call>" + "[" * 100_000], ["pythonic", "[f(a=" + "(" * 10_000 + ")]"]]


@pytest.mark.parametrize(("format", "text"), [*PARSED["broken"], *LONG])
def test_broken_calls_are_text(format: str, text: str) -> None:
    assert FORMATS[format](text, [tool()]) is None


def test_no_text_takes_long_to_read() -> None:
    beginnings = ("", "<tool_call>", "<function=f>")
    most = cpu_limit(0.5)
    marks = ("<function=", "<parameter=", "<arg_key>", "<tool_call>", "[TOOL_CALLS]", "{", '"')
    for beginning, mark, name in product(beginnings, marks, FORMATS):
        began = time.process_time()
        FORMATS[name](beginning + mark * (100_000 // len(mark)), [tool()])
        assert time.process_time() - began < most, (name, beginning, mark)


@settings(deadline=None, max_examples=examples(240))
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PARSED["marks"]), max_size=12))
def test_no_text_breaks_a_format(format: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = FORMATS[format](text, [tool()])
    if found is not None:
        assert found.calls
        assert found.content in text
        for parsed_call in found.calls:
            assert parsed_call.name
            json.loads(parsed_call.arguments)


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "content"),
    [
        ("", "<think>\na\n</think>\n\nb", "\na\n", "\n\nb"),
        ("<think>\n", "a</think>b", "a", "b"),
        ("<think>\n", "a, without an end", "a, without an end", None),
        ("", "a</think>", "a", None),
        ("<think>\n\n</think>\n\n", "b", None, "b"),
    ],
)
def test_reasoning(tail: str, text: str, reasoning: str | None, content: str | None) -> None:
    prompt_ids = chat_format(OWN["thinking"]).encode("x" * 99 + tail)
    message = reader("thinking").message(text, {}, prompt_ids)
    assert (message["reasoning"], message["content"]) == (reasoning, content)


def test_tools_that_must_not_be_called() -> None:
    text = '<tool_call>{"name": "calculate", "arguments": {"expression": "1"}}</tool_call>'
    none = reader("chatml").message(text, {"tools": [tool()], "tool_choice": "none"}, [1])
    assert none == {"role": "assistant", "content": text}
