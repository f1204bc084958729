"""The dialects as agents speak them: a conversation in the form of chats -> a request of a dialect,
and its answer, whole or streamed -> messages in the form of chats. Without any of our code.
"""

import json
from collections.abc import Iterable
from typing import Any, ClassVar

Json = dict[str, Any]
Message = dict[str, Any]


class Speaker:
    path: ClassVar[str]
    wishes: ClassVar[frozenset[str]]
    """Those fields of the chat API that the dialect has under the same name."""
    system: ClassVar[str] = ""
    chosen: ClassVar[str] = ""
    """The field of a system message, and the type of a tool that must be called."""

    def body(self, messages: list[Message], tools: list[Json], wishes: Json, goes_on: str) -> Json:
        """A request.

        Args:
            wishes: fields of the chat API; those that the dialect lacks are left out.
            goes_on: the id of the answer that the last assistant message is, unchanged; or "".
        """
        body: Json = {"model": "any", **{k: v for k, v in wishes.items() if k in self.wishes}}
        if self.system and messages[0]["role"] == "system":
            body[self.system] = messages[0]["content"]
        if tools:
            body["tools"] = [self.tool(tool["function"]) for tool in tools]
            if isinstance(wishes.get("tool_choice"), dict):
                name = wishes["tool_choice"]["function"]["name"]
                body["tool_choice"] = {"type": self.chosen, "name": name}
        return body

    def tool(self, function: Json) -> Json:
        return {"type": "function", **function}

    def answers(self, whole: Json) -> list[Message]:
        """The messages in an answer, one per choice."""
        raise NotImplementedError

    def joined(self, events: list[Json]) -> Json:
        """The whole answer that was streamed as `events`."""
        raise NotImplementedError


class Chat(Speaker):
    """OpenAI's chat completions."""

    path = "v1/chat/completions"

    def body(self, messages: list[Message], tools: list[Json], wishes: Json, goes_on: str) -> Json:
        told = {"tools": tools} if tools else {}
        return {"model": "any", "messages": messages, **wishes, **told}

    def answers(self, whole: Json) -> list[Message]:
        return [choice["message"] for choice in whole["choices"]]

    def joined(self, events: list[Json]) -> Json:
        messages: dict[int, Message] = {}
        for event in events:
            for part in event["choices"]:
                message = messages.setdefault(part["index"], {"role": "assistant", "content": ""})
                message["content"] += part["delta"].get("content") or ""
                for call in part["delta"].get("tool_calls") or []:
                    called = {name: call[name] for name in ("id", "type", "function")}
                    message.setdefault("tool_calls", []).append(called)
        return {"choices": [{"message": messages[index]} for index in sorted(messages)]}


class Texts(Speaker):
    """OpenAI's text completions. The last message holds the prompt, a text or token ids.

    Messages in answers hold their ids.
    """

    path = "v1/completions"
    wishes = frozenset({"seed", "max_tokens", "stop", "n", "stream", "user"})

    def body(self, messages: list[Message], tools: list[Json], wishes: Json, goes_on: str) -> Json:
        body = super().body(messages, tools, wishes, goes_on)
        return {**body, "prompt": messages[-1]["content"], "return_token_ids": True}

    def answers(self, whole: Json) -> list[Message]:
        return [
            {"role": "assistant", "content": choice["text"], "token_ids": choice["token_ids"]}
            for choice in whole["choices"]
        ]

    def joined(self, events: list[Json]) -> Json:
        choices: dict[int, Json] = {}
        for event in events:
            for part in event["choices"]:
                choice = choices.setdefault(part["index"], {"text": "", "token_ids": []})
                choice["text"] += part["text"]
                choice["token_ids"] += part.get("token_ids") or []
        return {"choices": [choices[index] for index in sorted(choices)]}


class Responses(Speaker):
    """OpenAI's responses. Goes on by `previous_response_id` where that says all."""

    path, system, chosen = "v1/responses", "instructions", "function"
    wishes = frozenset({"seed", "chat_template_kwargs", "stream", "user"})

    def body(self, messages: list[Message], tools: list[Json], wishes: Json, goes_on: str) -> Json:
        body = super().body(messages, tools, wishes, goes_on)
        body["max_output_tokens"] = wishes["max_tokens"]
        messages = messages["instructions" in body :]
        if goes_on:
            body["previous_response_id"] = goes_on
            roles = [message["role"] for message in messages]
            messages = messages[len(roles) - roles[::-1].index("assistant") :]
        body["input"] = [item for message in messages for item in _items(message)]
        return body

    def answers(self, whole: Json) -> list[Message]:
        message: Message = {"role": "assistant", "content": ""}
        for item in whole["output"]:
            if item["type"] == "message":
                message["content"] += "".join(part["text"] for part in item["content"])
            elif item["type"] == "function_call":
                called = call(item["call_id"], item["name"], item["arguments"])
                message.setdefault("tool_calls", []).append(called)
        return [message]

    def joined(self, events: list[Json]) -> Json:
        whole: Json = events[-1]["response"]
        return whole


class Messages(Speaker):
    """Anthropic's messages."""

    path, system, chosen = "v1/messages", "system", "tool"
    wishes = frozenset({"seed", "chat_template_kwargs", "stream", "max_tokens"})

    def body(self, messages: list[Message], tools: list[Json], wishes: Json, goes_on: str) -> Json:
        body = super().body(messages, tools, wishes, goes_on)
        body["metadata"] = {"user_id": wishes["user"]}
        if wishes.get("stop"):
            body["stop_sequences"] = wishes["stop"]
        body["messages"] = [_turn(message) for message in messages["system" in body :]]
        return body

    def tool(self, function: Json) -> Json:
        schema = function["parameters"]
        told = {name: function[name] for name in ("name", "description")}
        return {**told, "input_schema": schema}

    def answers(self, whole: Json) -> list[Message]:
        message: Message = {"role": "assistant", "content": ""}
        for block in whole["content"]:
            if block["type"] == "text":
                message["content"] += block["text"]
            elif block["type"] == "tool_use":
                called = call(block["id"], block["name"], json.dumps(block["input"]))
                message.setdefault("tool_calls", []).append(called)
        return [message]

    def joined(self, events: list[Json]) -> Json:
        blocks: dict[int, Json] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "json": ""}
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                block["json"] += delta.get("partial_json", "")
                if "text" in delta:
                    block["text"] += delta["text"]
        for block in blocks.values():
            if block["json"]:
                block["input"] = json.loads(block["json"])
        return {"content": [blocks[index] for index in sorted(blocks)]}


def call(call_id: str, name: str, arguments: str) -> Json:
    """A tool call of a chat message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def events_of(stream: bytes) -> list[Json]:
    """The data of those server-sent events that came whole."""
    lines = stream.split(b"\n")[:-1]
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def text_of(message: Message) -> str:
    """A message's content as text."""
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _parts(content: Any, kind: str) -> Any:
    if isinstance(content, list):
        return [{**part, "type": kind} for part in content]
    return content or ""


def _items(message: Message) -> Iterable[Json]:
    if message["role"] == "tool":
        output = message["content"]
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
        return
    said = message["role"] == "assistant"
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        content = _parts(message["content"], "output_text" if said else "input_text")
        yield {"type": "message", "role": message["role"], "content": content}
    for made in calls:
        yield {"type": "function_call", "call_id": made["id"], **made["function"]}


def _turn(message: Message) -> Json:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
        return {"role": "user", "content": [{**result, "content": message["content"]}]}
    calls = message.get("tool_calls") or []
    if not calls:
        return {"role": message["role"], "content": _parts(message["content"], "text")}
    text = text_of(message)
    blocks: list[Json] = [{"type": "text", "text": text}] if text else []
    for made in calls:
        given = json.loads(made["function"]["arguments"])
        name = made["function"]["name"]
        blocks.append({"type": "tool_use", "id": made["id"], "name": name, "input": given})
    return {"role": "assistant", "content": blocks}
