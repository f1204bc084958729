"""Probes what an engine can do, with a dozen tiny requests.

The modes, from the best:

    tokens        vLLM with --enable-scale-out: messages are rendered to ids, ids are continued, ids
                  are parsed to a message, each by a request of its own
    completions   /v1/completions continues token ids and gives ids back
    chat          chat calls give the ids of the prompt and of the answer, and take none
    opaque        no ids: text only

What always holds: a mode is chosen only if its requests gave what a chat call gave, token by token;
for every better mode a sentence says why it was not chosen.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

import msgspec
from envserver_records.errors import ConfigError, EngineGarbage, EngineRefused
from envserver_records.sampling import LogprobsKind

from ..settings.config import Mode
from .engine import Engine
from .probe_client import (
    NotSupported,
    ProbeAnswer,
    ProbeChoice,
    ProbeClient,
    ProbeMessage,
    convert,
    read,
    refusal,
    same_tokens,
)

# Every check is exact: a mode's result must equal a chat call's, token by token. A failure is a
# `NotSupported` with a sentence for the user.

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RENDER, DERENDER = f"{CHAT}/render", f"{CHAT}/derender"
GENERATE = "/inference/v1/generate"

MESSAGES = [{"role": "user", "content": "Say one word."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
]
_THINKING = [{"role": "user", "content": "<think>\nOne and one.\n</think>\n\nTwo."}]
_THINKS = {"enable_thinking": True, "thinking": True}
"""Template variables that switch reasoning on, by the names of several families."""
_PLAIN: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 4}
_EXACT: dict[str, Any] = {**_PLAIN, "return_token_ids": True, "logprobs": True}
_EXACT_WITH_TOP: dict[str, Any] = {**_EXACT, "top_logprobs": 5}
_BARE: dict[str, Any] = {"messages": MESSAGES, "max_completion_tokens": 64}
"""For OpenAI's reasoning models, which accept neither `temperature` nor `max_tokens`."""
_WRONG_ADDRESS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)

_TELLING_SPREAD = 0.5
"""Halving the temperature doubles the distance of two logprobs; this distance is far above
noise."""


class ChatProbe(msgspec.Struct, frozen=True):
    """The result of a plain chat call.

    Args:
        body: of the request.
        inexact: why its tokens cannot be recorded, or "".
    """

    body: dict[str, Any]
    answer: ProbeAnswer
    inexact: str

    @property
    def choice(self) -> ProbeChoice:
        return self.answer.choices[0]

    def prompt_ids(self) -> list[int]:
        """Returns the prompt's ids. Raises NotSupported: tokens cannot be recorded."""
        if self.inexact:
            raise NotSupported(self.inexact)
        return self.answer.prompt_token_ids or []


class TokensMode(msgspec.Struct, frozen=True, kw_only=True):
    """The result of trying mode tokens; the fields are those of ProbeResult."""

    has_parser: bool = False
    reasoning_parser: bool = False
    weight_versions: bool = False


async def ask_chat(ask: ProbeClient, *, exact: bool) -> ChatProbe:
    """Makes a plain chat call, with ids if `exact` and the engine gives them."""
    inexact = "" if exact else "Token ids were not asked for."
    forms = [_EXACT_WITH_TOP, _EXACT] if exact else []
    for body in (*forms, _PLAIN, _BARE):
        try:
            answer = read(await ask.post(CHAT, body), CHAT)
        except EngineRefused as error:
            if body is _BARE or error.detail.get("status") in _WRONG_ADDRESS:
                raise
            if body is _EXACT:
                inexact = f"{CHAT} with return_token_ids {refusal(error)}"
        except NotSupported as garbage:
            raise EngineGarbage(str(garbage)) from None
        else:
            return ChatProbe(body, answer, inexact or _inexact(answer))
    raise AssertionError("the last call is answered or raises")


def _inexact(answer: ProbeAnswer) -> str:
    lacks = answer.choices[0].lacks()
    if not answer.prompt_token_ids:
        lacks.append("prompt_token_ids")
    if not lacks:
        return ""
    return f"Its chat answers lack {' and '.join(lacks)}. vLLM 0.10.2 and later give them."


async def try_tokens(ask: ProbeClient, chat: ChatProbe) -> TokensMode:
    """Renders, continues ids and parses ids, in separate requests."""
    prompt_ids = chat.prompt_ids()
    rendered = await _scale_out(ask, RENDER, chat.body)
    if rendered.get("token_ids") != prompt_ids:
        raise NotSupported(f"{RENDER} gives other ids than a chat call has in its prompt.")
    # As vLLM's own clients do: the answer of /render is the request for /generate.
    answered = await _scale_out(ask, GENERATE, {**rendered, "return_token_ids": True})
    answer = read(answered, GENERATE)
    _check(chat, answer.choices[0], answer.prompt_token_ids, GENERATE)
    has_parser, reasoning_parser = await _try_derender(ask, chat)
    return TokensMode(
        has_parser=has_parser,
        reasoning_parser=reasoning_parser,
        weight_versions=bool(answer.choices[0].weight_versions),
    )


async def try_completions(ask: ProbeClient, chat: ChatProbe) -> None:
    """Continues the prompt's ids."""
    body = {
        "prompt": chat.prompt_ids(),
        "temperature": 0,
        "max_tokens": _PLAIN["max_tokens"],
        "return_token_ids": True,
        "logprobs": 1,
    }
    choice = read(await ask.may(COMPLETIONS, body), COMPLETIONS).choices[0]
    _check(chat, choice, choice.prompt_token_ids, COMPLETIONS)


def _check(chat: ChatProbe, choice: ProbeChoice, prompt_ids: list[int] | None, path: str) -> None:
    if lacks := choice.lacks():
        raise NotSupported(f"{path} answers without {' and '.join(lacks)}.")
    if prompt_ids != chat.prompt_ids():
        raise NotSupported(f"{path} does not give back the ids of the prompt that it was sent.")
    if not same_tokens(chat.choice, choice):
        raise NotSupported(
            f"{path} samples {choice.token_ids} at temperature 0 where a chat call with the same "
            f"prompt samples {chat.choice.token_ids}."
        )


async def _scale_out(ask: ProbeClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return await ask.may(path, body)
    except NotSupported as no:
        raise NotSupported(_advised(no, "--enable-scale-out")) from None


def _advised(no: NotSupported, flags: str) -> str:
    """Adds to the sentence the flags that vLLM needs, unless it names them."""
    named = all(word in str(no) for word in flags.split() if word.startswith("--"))
    return str(no) if named else f"{no} Start vLLM with {flags}."


async def _try_derender(ask: ProbeClient, chat: ChatProbe) -> tuple[bool, bool]:
    """Returns whether a parser is configured, and whether it was seen to find reasoning."""
    ids = chat.choice.token_ids or []
    ended = chat.choice.finish_reason == "stop"
    has_parser = has_reasoning = False
    # /derender shows the end token as text, chat does not; empty ids are refused.
    spoken = ids[:-1] if ended and len(ids) > 1 else ids
    try:
        message, *_ = await _derender(ask, [spoken], None)
    except NotSupported:
        # A configured parser needs the request.
        message, *_ = await _derender(ask, [spoken], chat.body)
        has_parser, has_reasoning = True, await _finds_reasoning(ask, chat)
    only_end = ended and len(ids) == 1
    if not only_end and not message.same(chat.choice.message or ProbeMessage()):
        raise NotSupported(f"{DERENDER} makes another message of the same ids than a chat call.")
    return has_parser, has_reasoning


async def _finds_reasoning(ask: ProbeClient, chat: ChatProbe) -> bool:
    """Returns whether the engine separates reasoning, also if its template's default is none."""
    rendered = await _scale_out(ask, RENDER, {**chat.body, "messages": _THINKING})
    thought_ids = convert(rendered.get("token_ids"), list[int], RENDER)
    request = {**chat.body, "chat_template_kwargs": _THINKS}
    (message,) = await _derender(ask, [thought_ids], request)
    return message.has_reasoning


async def _derender(
    ask: ProbeClient, answers: list[list[int]], request: dict[str, Any] | None
) -> list[ProbeMessage]:
    """Returns the engine's messages for the ids of several answers."""
    choices = [
        {"index": index, "finish_reason": "stop", "token_ids": ids}
        for index, ids in enumerate(answers)
    ]
    body: dict[str, Any] = {"generate_response": {"request_id": "probe", "choices": choices}}
    if request is not None:
        body["chat_request"] = {"model": ask.model, **request}
    answer = read(await _scale_out(ask, DERENDER, body), DERENDER)
    messages = [choice.message for choice in answer.choices if choice.message is not None]
    if len(messages) != len(answers):
        raise NotSupported(f"{DERENDER} gives {len(messages)} messages for {len(answers)} answers.")
    return messages


async def try_tools(ask: ProbeClient, chat: ChatProbe) -> ProbeAnswer:
    """Makes a chat call with an optional tool."""
    body = {**chat.body, "tools": TOOLS, "tool_choice": "auto"}
    try:
        return read(await ask.may(CHAT, body), CHAT)
    except NotSupported as no:
        advised = _advised(no, "--enable-auto-tool-choice and --tool-call-parser NAME")
        raise NotSupported(f"With tools {advised}") from None


async def logprobs_kind(ask: ProbeClient, chat: ChatProbe) -> LogprobsKind:
    """Returns whether logprobs are the model's own or change with the temperature.
    Raises EngineUnavailable, EngineTimeout: it does not answer.
    """
    if chat.inexact or chat.body is not _EXACT_WITH_TOP:
        return "unknown"
    try:
        answered = await ask.may(CHAT, {**chat.body, "temperature": 0.5, "max_tokens": 1})
        warm = read(answered, CHAT).choices[0].first_place()
    except NotSupported:
        return "unknown"
    greedy = chat.choice.first_place()
    both = greedy.keys() & warm.keys()
    values = [greedy[token] for token in both]
    spread = max(values, default=0.0) - min(values, default=0.0)
    # If temperature applied, some logprob would move by at least half of the largest distance.
    if all(abs(greedy[token] - warm[token]) < spread / 4 for token in both) and both:
        return "raw"
    return "processed" if spread >= _TELLING_SPREAD else "unknown"


EngineMode = Literal["tokens", "completions", "chat", "opaque"]

_BETTER: tuple[EngineMode, ...] = ("tokens", "completions", "chat")
"""Modes better than opaque, best first."""
_NOT_PAUSABLE = (
    "It has no /is_paused. If nobody else can reach it, start vLLM with VLLM_SERVER_DEV_MODE=1."
)


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """A small conversation and the engine's prompt ids for it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt_ids: list[int]


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of probing an engine.

    Args:
        mode: the best possible mode, or the one that was requested.
        model: the name that it serves.
        server: its name and version, such as "vllm 0.32.0"; "" if unknown.
        max_model_len: maximum tokens of prompt and answer together.
        root: the folder or name from which the model was loaded, as the engine reports it; for an
            adapter its base model's.
        weights: the name of the weights that it serves now, if it tells (vLLM's /weight_info).
        tools: whether it accepts tools and lets the model decide about calling one.
        has_parser: whether it parses calls or reasoning when it turns ids into a message.
        reasoning_parser: whether it was seen to separate reasoning from content.
        weight_versions: whether it reports which weights sampled each token.
        routed_experts: whether it tells which experts each token went through.
        logprobs: the model's own (raw), after temperature and the like (processed), or unknown.
        pausable: whether sampling can be paused while weights change.
        metrics: whether it serves /metrics.
        reasons: for each better mode and each missing ability, by field name, why it is missing
            and what to do.
        echoes: conversations with which our rendering can be compared.
        chat: its answer to the first of them; None: it was not kept.
    """

    mode: EngineMode
    model: str
    server: str = ""
    max_model_len: int | None = None
    root: str | None = None
    weights: str | None = None
    tools: bool = False
    has_parser: bool = False
    reasoning_parser: bool = False
    weight_versions: bool = False
    routed_experts: bool = False
    logprobs: LogprobsKind = "unknown"
    pausable: bool = False
    metrics: bool = False
    reasons: dict[str, str] = {}
    echoes: list[Echo] = []
    chat: ProbeAnswer | None = None


async def probe(engine: Engine, *, wanted: Mode = "auto", model: str) -> ProbeResult:
    """Probes an engine with a dozen tiny requests, each of at most 300 s and `--openai.timeout`.

    Args:
        wanted: the mode to use; auto: the best possible.
        model: the name that the engine serves.
    """
    ask = ProbeClient(engine, model)
    card = await _card(ask)
    version = await ask.get("/version") or {}
    weights = (await ask.get("/weight_info") or {}).get("weight_version")
    paused = await ask.get("/is_paused") or {}
    metrics = await ask.has_metrics()
    chat = await ask_chat(ask, exact=wanted != "opaque")
    mode, shown, reasons = await _best(ask, chat, wanted)
    echoes = _echo(chat.answer, [])
    try:
        echoes += _echo(await try_tools(ask, chat), TOOLS)
    except NotSupported as no:
        reasons["tools"] = str(no)
    if "is_paused" not in paused:
        reasons["pausable"] = _NOT_PAUSABLE
    message = chat.choice.message
    return ProbeResult(
        mode=mode,
        model=model,
        server=_server(card, version.get("version")),
        max_model_len=card.max_model_len,
        root=card.root,
        weights=weights if isinstance(weights, str) else None,
        tools="tools" not in reasons,
        has_parser=shown.has_parser,
        reasoning_parser=shown.reasoning_parser or bool(message and message.has_reasoning),
        weight_versions=shown.weight_versions,
        routed_experts=chat.choice.routed_experts is not None,
        logprobs=await logprobs_kind(ask, chat),
        pausable="pausable" not in reasons,
        metrics=metrics,
        reasons=reasons,
        echoes=echoes,
        chat=chat.answer,
    )


async def _best(
    ask: ProbeClient, chat: ChatProbe, wanted: Mode
) -> tuple[EngineMode, TokensMode, dict[str, str]]:
    """Returns the mode, what trying it showed, and why better ones are not possible."""
    reasons: dict[str, str] = {}
    for mode in _BETTER:
        if wanted not in ("auto", mode):
            reasons[mode] = f"Not tried: openai.mode is {wanted}."
            continue
        try:
            return mode, await _tried(ask, chat, mode), reasons
        except NotSupported as no:
            reasons[mode] = str(no)
            if wanted == mode:
                raise ConfigError(
                    f"openai.mode is {mode}, but this engine does not support it: {no}",
                    hint="openai.mode auto uses the best possible mode.",
                ) from None
    return "opaque", TokensMode(), reasons


async def _tried(ask: ProbeClient, chat: ChatProbe, mode: EngineMode) -> TokensMode:
    """Tries one mode."""
    if mode == "tokens":
        return await try_tokens(ask, chat)
    if mode == "completions":
        await try_completions(ask, chat)
    chat.prompt_ids()
    return TokensMode()


def _echo(answer: ProbeAnswer, tools: list[dict[str, Any]]) -> list[Echo]:
    if not answer.prompt_token_ids:
        return []
    return [Echo(messages=MESSAGES, tools=tools, prompt_ids=answer.prompt_token_ids)]


class _Card(msgspec.Struct):
    """A model in the engine's list."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


async def _card(ask: ProbeClient) -> _Card:
    """Returns the engine's entry for the model; for an adapter with its base model's root."""
    try:
        cards = convert(await ask.get("/v1/models") or {}, _Cards, "/v1/models").data
    except NotSupported:
        cards = []
    by_name = {card.id: card for card in cards}
    card = by_name.get(ask.model) or _Card(ask.model)
    base = by_name.get(card.parent or "")
    if base is not None:
        card.root = base.root
        card.max_model_len = card.max_model_len or base.max_model_len
    return card


def _server(card: _Card, version: Any) -> str:
    if not isinstance(version, str):
        return card.owned_by or ""
    return version if " " in version else f"{card.owned_by or ''} {version}".strip()
