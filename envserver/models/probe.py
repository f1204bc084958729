"""Probes what an engine can do, with a dozen tiny requests.

The modes, from the best:

    tokens        vLLM with --enable-scale-out: messages are rendered to ids, ids are continued,
                  and ids are parsed to a message, each by a request of its own
    completions   /v1/completions continues token ids and gives ids back
    chat          chat calls give the ids of the prompt and of the answer, and take none
    opaque        no ids: text only

Invariants: a mode is chosen only if its requests gave what a chat call gave, token by token; for
every better mode a sentence says why it was not chosen.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import msgspec
import structlog
from envserver_records.errors import (
    ConfigError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from envserver_records.sampling import LogprobsKind

from ..settings.config import Mode
from .engine import Engine, EngineRequest

# In flow an engine's unvalidated answers; out flow small structs, or `NotSupported` with a sentence
# that says what the engine lacks. An engine that is down or too slow is another matter:
# EngineUnavailable and EngineTimeout pass through. Fields are where vLLM has them.

_SECONDS = 300.0
"""An engine that compiles at its first call, or shares a busy machine, takes minutes for it."""
_TELL_SECONDS = 10.0
_SIMULATED_TRIES = 6
_TIE = 0.05
"""Two tokens with logprobs this close may swap ranks between requests: a GPU sums in another order
when other requests run in parallel. Neither can then have a probability above one half."""
_HALF = math.log(0.5)
_ROUNDING = 0.1
"""Mean difference of logprobs from which on two models gave them."""

_log = structlog.get_logger("envserver.engine")

T = TypeVar("T")
Token = tuple[str, tuple[int, ...]]
"""A token as chat answers name it: its text, and its bytes."""


class NotSupported(Exception):
    """The text is a sentence that says why."""


class TopToken(msgspec.Struct, frozen=True):
    logprob: float
    token: str = ""
    bytes: list[int] | None = None


class ScoredToken(msgspec.Struct, frozen=True):
    logprob: float
    top_logprobs: list[TopToken] | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """Logprobs of one choice: `content` in chat and generate, `token_logprobs` in completions."""

    content: list[ScoredToken] | None = None
    token_logprobs: list[float | None] | None = None

    def values(self) -> list[float]:
        """One number for each token, without nulls."""
        if self.content is not None:
            return [scored.logprob for scored in self.content]
        return [logprob for logprob in self.token_logprobs or () if logprob is not None]


class ProbeMessage(msgspec.Struct, frozen=True):
    content: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_reasoning(self) -> bool:
        return bool(self.reasoning or self.reasoning_content)

    def same(self, other: ProbeMessage) -> bool:
        ours = (self.content or "", self.reasoning or self.reasoning_content or "")
        theirs = (other.content or "", other.reasoning or other.reasoning_content or "")
        return ours == theirs and len(self.tool_calls or ()) == len(other.tool_calls or ())


class ProbeChoice(msgspec.Struct, frozen=True):
    """One choice of an answer; `prompt_token_ids` is here in completions only."""

    message: ProbeMessage | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    weight_versions: list[Any] | None = None
    routed_experts: str | None = None

    def scores(self) -> list[float]:
        """The sampled tokens' logprobs; [] if they do not have vLLM's form."""
        return self._logprobs().values()

    def lacks(self) -> list[str]:
        """What is missing for an exact record."""
        if not self.token_ids:
            return ["token_ids"]
        return [] if len(self.scores()) == len(self.token_ids) else ["a logprob for each token"]

    def first_place(self) -> dict[Token, float]:
        """The logprobs of the likeliest first tokens, by text.

        Texts that occur twice are left out: parts of a character may all decode to nothing.
        """
        content = self._logprobs().content
        tops = (content[0].top_logprobs if content else None) or []
        texts = [(top.token, tuple(top.bytes or ())) for top in tops]
        once = [(text, top) for text, top in zip(texts, tops, strict=True) if texts.count(text) < 2]
        return {text: top.logprob for text, top in once}

    def _logprobs(self) -> Logprobs:
        try:
            return msgspec.convert(self.logprobs or {}, Logprobs)
        except msgspec.ValidationError:
            return Logprobs()


class ProbeAnswer(msgspec.Struct, frozen=True):
    choices: list[ProbeChoice]
    prompt_token_ids: list[int] | None = None
    model: Any = None


class ProbeClient:
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self.model = model
        # The in-process simulated engine fails at random and does not retry by itself.
        self._tries = _SIMULATED_TRIES if engine.kind == "sim" else 1

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = EngineRequest(path, {"model": self.model, **body}, "probe", _SECONDS)
        for left in reversed(range(self._tries)):
            try:
                with _logs_if_slow(path):
                    return await self._engine.post(request)
            except (EngineUnavailable, EngineGarbage):
                if not left:
                    raise
        raise AssertionError("there is at least one try")

    async def may(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Like `post`, for an optional ability."""
        try:
            return await self.post(path, body)
        except EngineError as error:
            _raise_if_down(error)
            raise NotSupported(f"{path} {refusal(error)}") from None

    async def get(self, path: str) -> dict[str, Any] | None:
        """None if the engine has no answer."""
        try:
            return await self._engine.get(path)
        except EngineError as error:
            _raise_if_down(error)
            return None

    async def has_metrics(self) -> bool:
        try:
            await self._engine.get("/metrics")
        except EngineGarbage as error:
            # An Engine reads JSON only; its error quotes the beginning of the text.
            return "# HELP" in error.message or "# TYPE" in error.message
        except EngineError as error:
            _raise_if_down(error)
        return False


def _raise_if_down(error: EngineError) -> None:
    """Raises errors that say nothing about the engine's abilities."""
    status = error.detail.get("status", 0)
    unknown = status == HTTPStatus.NOT_IMPLEMENTED or 300 <= status < 400
    if isinstance(error, EngineTimeout | EngineUnavailable) and not unknown:
        raise error


def refusal(error: EngineError) -> str:
    """What the engine did, with its message, as the end of a sentence."""
    status = error.detail.get("status")
    words = error.message.removeprefix(f"The engine refused the request (HTTP {status}): ")
    verb = f"is refused (HTTP {status})" if isinstance(error, EngineRefused) else "fails"
    return sentence(f"{verb}: {words}")


def sentence(words: str) -> str:
    words = words.strip()
    return words if words.endswith((".", "!", "?", "…")) else f"{words}."


def read(answer: dict[str, Any], path: str) -> ProbeAnswer:
    """Raises NotSupported unless the parts that the probe needs have vLLM's form."""
    found = convert(answer, ProbeAnswer, path)
    if not found.choices:
        raise NotSupported(f"{path} returns no choice.")
    return found


def convert(value: Any, kind: type[T], path: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise NotSupported(f"{path} does not answer in vLLM's format ({error}).") from None


def same_tokens(ours: ProbeChoice, theirs: ProbeChoice) -> bool:
    """Whether two complete greedy answers to one prompt agree, up to a tie of two tokens."""
    pairs = zip(ours.token_ids or (), theirs.token_ids or (), strict=False)
    for (our, their), a, b in zip(pairs, ours.scores(), theirs.scores(), strict=False):
        if our != their:
            return abs(a - b) < _TIE and min(a, b) <= _HALF
    return True


def same_scores(ours: ProbeChoice, theirs: ProbeChoice) -> bool:
    """Whether one model can have given two greedy answers: the same tokens, up to a tie, with
    logprobs that differ by rounding only."""
    away = [abs(a - b) for a, b in zip(ours.scores(), theirs.scores(), strict=False)]
    return same_tokens(ours, theirs) and sum(away) <= _ROUNDING * len(away)


@contextmanager
def _logs_if_slow(path: str) -> Iterator[None]:
    """Logs once that an engine is slow to answer, as one that compiles or loads weights."""
    facts = {"path": path, "seconds": _TELL_SECONDS, "at_most": _SECONDS}
    timer = asyncio.get_running_loop().call_later(
        _TELL_SECONDS, lambda: _log.warning("engine_is_waited_for", **facts)
    )
    try:
        yield
    finally:
        timer.cancel()


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
    """The result of a plain chat call. `inexact`: why its tokens cannot be recorded, or ""."""

    body: dict[str, Any]
    answer: ProbeAnswer
    inexact: str

    @property
    def choice(self) -> ProbeChoice:
        return self.answer.choices[0]

    def prompt_ids(self) -> list[int]:
        if self.inexact:
            raise NotSupported(self.inexact)
        return self.answer.prompt_token_ids or []


class TokensMode(msgspec.Struct, frozen=True, kw_only=True):
    has_parser: bool = False
    reasoning_parser: bool = False
    weight_versions: bool = False


async def ask_chat(ask: ProbeClient, *, exact: bool) -> ChatProbe:
    inexact = "" if exact else "Token ids were not requested."
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
        raise NotSupported(f"{RENDER} renders other ids than the prompt of a chat call has.")
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
        raise NotSupported(f"{path} returns no {' or '.join(lacks)}.")
    if prompt_ids != chat.prompt_ids():
        raise NotSupported(f"{path} does not echo the ids of the prompt that it was sent.")
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
    """Appends the flags that vLLM needs, unless the sentence names them."""
    named = all(word in str(no) for word in flags.split() if word.startswith("--"))
    return str(no) if named else f"{no} Start vLLM with {flags}."


async def _try_derender(ask: ProbeClient, chat: ChatProbe) -> tuple[bool, bool]:
    """Whether a parser is configured, and whether it was seen to find reasoning."""
    ids = chat.choice.token_ids or []
    ended = chat.choice.finish_reason == "stop"
    has_parser = has_reasoning = False
    # /derender shows the end token as text, chat does not; empty ids are refused.
    spoken = ids[:-1] if ended and len(ids) > 1 else ids
    try:
        message = await _derender(ask, spoken, None)
    except NotSupported:
        # A configured parser needs the request.
        message = await _derender(ask, spoken, chat.body)
        has_parser, has_reasoning = True, await _finds_reasoning(ask, chat)
    only_end = ended and len(ids) == 1
    if not only_end and not message.same(chat.choice.message or ProbeMessage()):
        raise NotSupported(f"{DERENDER} makes a different message of the ids than a chat call.")
    return has_parser, has_reasoning


async def _finds_reasoning(ask: ProbeClient, chat: ChatProbe) -> bool:
    """Whether the engine separates reasoning, also if its template's default is none."""
    rendered = await _scale_out(ask, RENDER, {**chat.body, "messages": _THINKING})
    thought_ids = convert(rendered.get("token_ids"), list[int], RENDER)
    request = {**chat.body, "chat_template_kwargs": _THINKS}
    return (await _derender(ask, thought_ids, request)).has_reasoning


async def _derender(
    ask: ProbeClient, ids: list[int], request: dict[str, Any] | None
) -> ProbeMessage:
    choice = {"index": 0, "finish_reason": "stop", "token_ids": ids}
    body: dict[str, Any] = {"generate_response": {"request_id": "probe", "choices": [choice]}}
    if request is not None:
        body["chat_request"] = {"model": ask.model, **request}
    answer = read(await _scale_out(ask, DERENDER, body), DERENDER)
    messages = [choice.message for choice in answer.choices if choice.message is not None]
    if len(messages) != 1:
        raise NotSupported(f"{DERENDER} gives {len(messages)} messages for 1 answers.")
    return messages[0]


async def try_tools(ask: ProbeClient, chat: ChatProbe) -> ProbeAnswer:
    body = {**chat.body, "tools": TOOLS, "tool_choice": "auto"}
    try:
        return read(await ask.may(CHAT, body), CHAT)
    except NotSupported as no:
        advised = _advised(no, "--enable-auto-tool-choice and --tool-call-parser NAME")
        raise NotSupported(f"With tools {advised}") from None


async def logprobs_kind(ask: ProbeClient, chat: ChatProbe) -> LogprobsKind:
    """Whether logprobs are the model's own or change with the temperature."""
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
_NOT_PAUSABLE = (
    "It has no /is_paused. If no one else can reach it, start vLLM with VLLM_SERVER_DEV_MODE=1."
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
        reasons: for each better mode and each missing ability, by field name, why it is missing and
            what to do.
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
    """Each request takes at most 300 s and `--openai.timeout`.

    `wanted`: the mode to use; auto: the best possible.
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
    """The mode, the result of trying it, and why better ones are not possible."""
    reasons: dict[str, str] = {}
    for mode in _BETTER:
        if wanted not in ("auto", mode):
            reasons[mode] = f"Not tried: openai.mode is {wanted}."
            continue
        try:
            if mode == "tokens":
                return mode, await try_tokens(ask, chat), reasons
            if mode == "completions":
                await try_completions(ask, chat)
            chat.prompt_ids()
            return mode, TokensMode(), reasons
        except NotSupported as no:
            reasons[mode] = str(no)
            if wanted == mode:
                raise ConfigError(
                    f"openai.mode is {mode}, but this engine does not support it: {no}",
                    hint="openai.mode auto uses the best supported mode.",
                ) from None
    return "opaque", TokensMode(), reasons


def _echo(answer: ProbeAnswer, tools: list[dict[str, Any]]) -> list[Echo]:
    if not answer.prompt_token_ids:
        return []
    return [Echo(messages=MESSAGES, tools=tools, prompt_ids=answer.prompt_token_ids)]


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


async def _card(ask: ProbeClient) -> _Card:
    """The engine's entry for the model, with its base model's root for an adapter."""
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
