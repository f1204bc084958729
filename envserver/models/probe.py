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

from typing import Any, Literal

import msgspec
from envserver_records.errors import ConfigError
from envserver_records.sampling import LogprobsKind

from ..config import Mode
from .engine import Engine
from .probe_client import NotSupported, ProbeAnswer, ProbeClient, convert
from .probe_modes import (
    MESSAGES,
    TOOLS,
    ChatProbe,
    TokensMode,
    ask_chat,
    logprobs_kind,
    try_completions,
    try_tokens,
    try_tools,
)

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

    Raises:
        EngineUnavailable, EngineTimeout: it does not answer.
        EngineRefused: it rejects our key, does not serve the model, or has no chat API.
            EngineError: it fails at a plain chat call or gives a malformed answer.
            ConfigError: the requested mode is not possible; the message says why.
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
