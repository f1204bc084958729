"""Model calls of foreign environments (such as Atropos's), which do their own recording.

`/generate` speaks the dialect that Atropos's `server_type=vllm` expects: token ids in, token ids
with logprobs out. Nothing is limited or recorded.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from envserver_records.errors import EngineGarbage, EngineRefused, EnvserverError, InputError

from ..models.engine import Engine, EngineRequest
from .asgi import (
    DONE,
    Interrupts,
    Receive,
    Send,
    end_events,
    error_body,
    event,
    parse_object,
    send_events,
    send_json,
    start_events,
)

_TIMEOUT_SECONDS = 3600.0
"""Upper limit; the engine's own timeout is usually shorter."""


async def pass_through(
    engine: Engine, key: str, path: str, body: bytes, receive: Receive, send: Send
) -> None:
    fields = parse_object(body)
    fields["model"] = await engine.model_name()
    request = EngineRequest(path, fields, key, _TIMEOUT_SECONDS)
    async with Interrupts(receive, _TIMEOUT_SECONDS) as interrupts:
        if not fields.get("stream"):
            answer = await engine.post(request)
            interrupts.stop_watching()
            await send_json(send, 200, answer)
            return
        await _relay(engine, request, interrupts, send)


async def _relay(
    engine: Engine, request: EngineRequest, interrupts: Interrupts, send: Send
) -> None:
    end = DONE
    async with engine.stream(request) as chunks:
        await start_events(send)
        try:
            async for chunk in chunks:
                await send_events(send, event(chunk))
        except EnvserverError as error:
            end = event(error_body(error))
    interrupts.stop_watching()
    await end_events(send, end)


async def generate(engine: Engine, key: str, body: bytes, receive: Receive, send: Send) -> None:
    if not engine.exact:
        raise EngineRefused("This engine returns no token ids.", hint="Use a vLLM server.")
    request = parse_object(body)
    engine_body = {**_generate_body(request), "model": await engine.model_name()}
    async with Interrupts(receive, _TIMEOUT_SECONDS) as interrupts:
        answer = await engine.post(
            EngineRequest("/v1/completions", engine_body, key, _TIMEOUT_SECONDS)
        )
        generated = generate_answer(answer, request)
        interrupts.stop_watching()
        await send_json(send, 200, generated)


def _generate_body(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("stream"):
        raise InputError("/generate does not stream.", place="stream")
    body = {name: value for name, value in request.items() if name not in ("stream", "model")}
    body["prompt"] = _prompt(request.get("prompt"))
    body["return_token_ids"] = True
    body["logprobs"] = 0
    return body


def _prompt(prompt: Any) -> str | list[int]:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    if isinstance(ids, str) and ids:
        return ids
    if isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids):
        return ids
    raise InputError(
        'prompt must be a string or {"prompt_token_ids": [ids]}, and not empty.', place="prompt"
    )


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    """`prompt_logprobs` is None for the first token, which has no context."""

    token_ids: list[int]
    logprobs: _Logprobs
    text: str = ""
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


def generate_answer(answer: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Converts a text completion into the answer of `/generate`.

    Returns:
        `text`, `finish_reasons`, `token_ids` per choice; `logprobs` as [choice][position] lists of
        one {token id: logprob}; `prompt` (the text that was sent, "" for ids), `prompt_token_ids`
        and, if requested, `prompt_logprobs` as [choice][position].
    """
    try:
        choices = msgspec.convert(answer, _Completion).choices
    except msgspec.ValidationError as error:
        raise EngineGarbage(f"The engine's answer lacks a requested field: {error}.") from None
    prompt = request.get("prompt")
    fields: dict[str, Any] = {
        "text": [choice.text for choice in choices],
        "prompt": prompt if isinstance(prompt, str) else "",
        "prompt_token_ids": choices[0].prompt_token_ids,
        "token_ids": [choice.token_ids for choice in choices],
        "logprobs": [_positions(choice) for choice in choices],
        "finish_reasons": [choice.finish_reason for choice in choices],
    }
    if request.get("prompt_logprobs") is not None:
        fields["prompt_logprobs"] = [_prompt_positions(choice) for choice in choices]
    return fields


def _positions(choice: _Choice) -> list[list[dict[str, float]]]:
    ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs
    if len(ids) != len(logprobs):
        raise EngineGarbage("The engine's answer has different numbers of logprobs and tokens.")
    return [[{str(token): logprob}] for token, logprob in zip(ids, logprobs, strict=True)]


def _prompt_positions(choice: _Choice) -> list[list[dict[str, float]] | None]:
    if choice.prompt_logprobs is None:
        raise EngineGarbage("The engine's answer lacks the prompt's logprobs.")
    return [
        None if position is None else [{token: of.logprob} for token, of in position.items()]
        for position in choice.prompt_logprobs
    ]
