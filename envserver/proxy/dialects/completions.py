"""OpenAI's text completions, for agents that render or even tokenise their own prompts."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect, Message

from ..asgi import DONE, error_body, event
from ..model_request import ModelRequest
from .base import Memory
from .checks import LARGEST_INT32, MAX_CHOICES
from .fields import response_format
from .reading import bad, count
from .tables import COMPLETIONS

_DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's API and of engines."""


class CompletionsDialect:
    """See DialectAdapter."""

    name: Dialect = "completions"
    table = COMPLETIONS

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        prompts = _prompts(body.get("prompt"))
        options = body.get("stream_options")
        fields = {name: value for name, value in body.items() if name in COMPLETIONS.engine}
        if fields.get("logprobs") is False:
            del fields["logprobs"]
        if "response_format" in fields:
            form = fields["response_format"]
            fields["response_format"] = response_format(form, "response_format")
        choices = (count(body, "n") or 1) * len(prompts)
        if choices > MAX_CHOICES:
            raise bad(
                "n", f"asks for {choices} answers, all prompts together: {MAX_CHOICES} at most"
            )
        return ModelRequest(
            dialect="completions",
            body=body,
            messages=_as_messages(prompts),
            prompt=prompts[0] if len(prompts) == 1 else prompts,
            fields=fields,
            choices=choices,
            wanted_tokens=count(body, "max_tokens") or _DEFAULT_MAX_TOKENS,
            stream=bool(body.get("stream")),
            wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            wants_logprobs="logprobs" in fields,
            wants_token_ids=bool(body.get("return_token_ids")),
        )

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        told = {**answer, "object": "text_completion"}
        told["choices"] = [_choice(c, c["message"]) for c in answer["choices"]]
        return told

    def writer(self, request: ModelRequest, memory: Memory) -> CompletionsWriter:
        return CompletionsWriter()

    def error(self, error: EnvserverError) -> dict[str, Any]:
        return error_body(error)


class CompletionsWriter:
    """See EventWriter."""

    def begin(self) -> bytes:
        return b""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """See EventWriter. The chunk with the role exists only in chats and is skipped."""
        parts = [part for part in chunk["choices"] if not _is_role(part)]
        if chunk["choices"] and not parts:
            return b""
        told = {**chunk, "object": "text_completion"}
        told["choices"] = [_choice(part, part["delta"]) for part in parts]
        return event(told)

    def end(self) -> bytes:
        return DONE

    def fail(self, error: EnvserverError) -> bytes:
        return event(error_body(error))


def _prompts(prompt: Any) -> list[Any]:
    """Returns the prompts in field `prompt`: texts or lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if len(prompt) <= MAX_CHOICES and all(isinstance(p, str) or _is_ids(p) for p in prompt):
            return prompt
    raise bad("prompt", f"must be a text, a list of token ids, or up to {MAX_CHOICES} of these")


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token <= LARGEST_INT32 for token in value)
    )


def _as_messages(prompts: list[Any]) -> list[Message]:
    return [{"role": "user", "content": text} for text in prompts if isinstance(text, str)]


def _is_role(part: dict[str, Any]) -> bool:
    delta = part["delta"]
    return "role" in delta and not delta.get("content") and part.get("finish_reason") is None


def _choice(choice: dict[str, Any], message: Message) -> dict[str, Any]:
    told = {
        "index": choice.get("index", 0),
        "text": message.get("content") or "",
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason"),
    }
    kept = ("stop_reason", "token_ids", "prompt_token_ids")
    return told | {name: choice[name] for name in kept if name in choice}
